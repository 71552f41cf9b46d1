"""Registration of Python functions as XLA FFI handlers, in a form that no exception can leave.

XLA calls a handler as a C function. If a Python exception leaves the function, ctypes leaves the
result undefined, and XLA frees an address that is none or takes the call for successful. A
KeyboardInterrupt may be raised at any bytecode of the main thread, also before a `try` statement
is entered. So a handler on the main thread is a generator that waits within its `try` statement,
and all that runs before it resumes is C code.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import operator
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax

from cupy_flash.jax.frames import answer_metadata, api_of, new_error
from cupy_flash.jax.versions import ffi

_Pointer = ctypes.c_void_p
_CFunction = ctypes.CFUNCTYPE(_Pointer, _Pointer)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, _Pointer, ctypes.c_char_p, _Pointer)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# Callbacks that XLA may call until the process ends: it cannot unregister a handler.
_kept: list[Any] = []

# Function that executes a call, given the address of its frame.
Execute = Callable[[int], None]


def register(name: str, platform: str, execute: Execute, *, is_replayable: bool = False) -> None:
    """Register a function as the handler of an FFI target on a platform.

    Parameters
    ----------
    name, platform
        Name of the target, and platform as `jax.ffi.register_ffi_target` names it.
    execute
        Function that executes a call. XLA raises its exception as an error of the computation.
    is_replayable
        Whether XLA may record the launches of a call in a command buffer (CUDA graph), and replay
        them without a call.
    """
    callback = _CFunction(_Handler(execute, is_replayable))
    _kept.append(callback)
    capsule = _new_capsule(ctypes.cast(callback, _Pointer).value, None, None)
    ffi.register_ffi_target(name, capsule, platform=platform, api_version=1)


# Address of the API struct, which is the same in all frames; 0 before the first frame with one.
_api = 0


def _answer(execute: Execute, traits: int, address: int) -> None:
    """Answer a frame, which is a query for metadata or a call."""
    global _api
    _api = api_of(address) or _api
    if not answer_metadata(address, traits):
        execute(address)


def _failure(error: BaseException) -> int | None:
    """Return the address of an XLA error with the text of an exception; None without an API."""
    text = type(error).__name__
    # The exception itself may have no text.
    with contextlib.suppress(BaseException):
        text = f"{text}: {error}"
    return new_error(_api, text) if _api else None


def _called(answer: Callable[[int], None], address: int) -> int | None:
    """Answer a frame on a thread that receives no signals; return an error's address or None."""
    try:
        answer(address)
    except BaseException as error:
        return _failure(error)
    return None


def _resumed(
    call: Callable[[int], int | None], set_busy: Callable[[bool], None]
) -> Generator[int | None, int, None]:
    """Call a function with each address that is sent; yield an error's address or None.

    Python raises a pending signal when the generator resumes, or anywhere later. An exception is
    handled at the start of the innermost loop, within its `try` statement, so that any number of
    further signals may be raised meanwhile. Python raises signals in calls and at the ends of
    loops. A signal that is raised right after the inner `except` clause is caught by the outer
    `try` statement. Only a third one, within the same few instructions, would leave the generator.
    """
    result: int | None = None
    error: BaseException | None = None
    while True:
        try:
            while True:
                try:
                    while True:
                        if error is not None:
                            result, error = _failure(error), None
                        set_busy(False)
                        address = yield result
                        set_busy(True)
                        result = call(address)
                except GeneratorExit:  # The process ends.
                    return
                except BaseException as caught:
                    error = caught
        except BaseException as caught:
            error = caught


class _Handler(threading.local):
    """Callable whose call is C code up to the resumption of a generator on the main thread.

    The property, the attribute getter and the generator's `send` are C code. Other threads have no
    attribute `send_or_call` of their own, so they get the class's, and call `_called`. The main
    thread does so, too, while its generator is running, as in a handler that waits for another.
    """

    __call__ = property(operator.attrgetter("send_or_call"))
    send_or_call: Callable[[int], int | None]

    def __new__(cls, execute: Execute, is_replayable: bool) -> _Handler:
        # A class of its own for each handler, because attributes of the instance are of a thread.
        answer = functools.partial(_answer, execute, int(is_replayable))
        call = functools.partial(_called, answer)
        kind = type(cls.__name__, (cls,), {"send_or_call": staticmethod(call)})
        return threading.local.__new__(kind)

    def __init__(self, *_: Any) -> None:
        """Prepare the handler on the main thread; called once on each thread, at its first use.

        `current_thread` would keep an object for each thread of XLA.
        """
        if threading.get_ident() == threading.main_thread().ident:
            self._prepare(type(self).send_or_call)

    def _prepare(self, call: Callable[[int], int | None]) -> None:
        def set_busy(is_busy: bool) -> None:
            self.send_or_call = call if is_busy else send

        generator = _resumed(call, set_busy)
        send: Callable[[int], int | None] = generator.send
        next(generator)
        set_busy(False)


def _wait_for_all() -> None:
    """Wait for all computations: a thread of XLA that needs Python would hang while Python ends."""
    if not _api:  # No computation has called a handler.
        return
    for array in jax.live_arrays():
        # An array may have been deleted, or its computation may have failed.
        with contextlib.suppress(Exception):
            array.block_until_ready()
    # Computations whose results were dropped precede this one on their device.
    for device in jax.local_devices():
        with contextlib.suppress(Exception):
            (jax.device_put(0, device) + 1).block_until_ready()


# Functions that are registered later run earlier: this one before those of JAX, imported above.
atexit.register(_wait_for_all)
