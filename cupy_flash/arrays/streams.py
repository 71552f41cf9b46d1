"""CUDA streams of any library, made current for one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from cupy_flash.arrays.strided import kind_of
from cupy_flash.arrays.torch_arrays import external_stream, is_any_tensor
from cupy_flash.errors import UnsupportedError

# Handles of the null stream, which are 0 in most libraries, and 1 in CUDA's runtime.
_NULL = (0, 1)


@contextlib.contextmanager
def on_stream(stream: Any | None, like: Any) -> Iterator[None]:
    """Make a stream current in CuPy and, if `like` is a tensor on a GPU, in torch as well.

    Parameters
    ----------
    stream
        Stream of CuPy, PyTorch, Numba or PyCUDA, or an object with ``__cuda_stream__``. None leaves
        the current stream.
    like
        Array of the call.

    Raises
    ------
    TypeError
        If the argument is not a stream, or CuPy is not installed.
    UnsupportedError
        If no GPU can be used.
    """
    if stream is None:
        yield
        return
    handle = handle_of(stream)
    ours = _in_cupy(handle)
    with _in_torch(handle, like), ours:
        yield


def _in_cupy(handle: int) -> AbstractContextManager[Any]:
    """Return a context in which a stream of the current device is CuPy's."""
    try:
        import cupy
    except ImportError as error:
        raise TypeError(
            "stream is given, but CuPy, which runs calls on a GPU, is not installed"
        ) from error
    runtime = cupy.cuda.runtime
    try:
        device = runtime.getDevice()
    except runtime.CUDARuntimeError as error:
        # The text of this error is misleading: without a driver, it is about the driver's version.
        raise UnsupportedError(
            "stream is given, but no GPU can be used; 'cupy-flash info' tells why"
        ) from error
    if handle in _NULL:
        null: AbstractContextManager[Any] = cupy.cuda.Stream.null
        return null
    return external_stream(handle, device)


def handle_of(stream: Any) -> int:
    """Return the handle of a stream as an integer.

    Raises
    ------
    TypeError
        If the argument is not a stream.
    """
    if (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
        # Early releases of the protocol define a property instead of a method.
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    for name in _HANDLES:
        if hasattr(stream, name):
            handle = getattr(stream, name)
            # Numba has a ctypes object, whose value is None for the null stream.
            return int(getattr(handle, "value", handle) or 0)
    raise TypeError(
        f"stream is {kind_of(stream)}; expected a stream of CuPy, PyTorch or Numba, or an object "
        "with __cuda_stream__"
    )


# Attributes of streams that hold the handle: those of PyTorch, of CuPy, and of Numba and PyCUDA.
_HANDLES = ("cuda_stream", "ptr", "handle")


def _in_torch(handle: int, like: Any) -> AbstractContextManager[Any]:
    """Return a context in which a stream is torch's, if `like` is a tensor on a GPU."""
    if not is_any_tensor(like) or not like.is_cuda:
        return contextlib.nullcontext()
    import torch

    cuda = torch.cuda
    if handle in _NULL:
        stream: Any = cuda.default_stream(like.device)
    else:
        stream = cuda.ExternalStream(handle, device=like.device)
    context: AbstractContextManager[Any] = cuda.stream(stream)
    return context
