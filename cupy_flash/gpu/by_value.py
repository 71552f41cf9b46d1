"""Structs that kernels take by value.

As NumPy scalars, which CuPy takes as well, they would cost 2 us each.
"""

from __future__ import annotations

import ctypes
import threading

# Bytes kept for a struct: the most that a kernel takes.
MAX_BYTES = 32764


class ByValue:
    """Bytes that are passed to kernels, in a copy that a launch makes before it returns.

    Attributes
    ----------
    memory
        The bytes.
    address, pointer
        Where they lie, and what CuPy's kernels take for them.
    """

    def __init__(self, memory: bytearray) -> None:
        from cupy.cuda.function import CPointer

        self.memory = memory
        self._exported = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._exported)
        self.pointer = CPointer(self.address)


class ThreadArguments(ByValue):
    """The struct of a thread's next launch, with the arguments of one as the driver takes them.

    Attributes
    ----------
    with_maps, alone
        Where the addresses lie of a kernel's arguments: tensor maps and the struct, or the struct.
    """

    def __init__(self) -> None:
        super().__init__(bytearray(MAX_BYTES))
        self._arguments = (ctypes.c_void_p * 2)(None, self.address)
        self.with_maps = ctypes.addressof(self._arguments)
        self.alone = self.with_maps + ctypes.sizeof(ctypes.c_void_p)

    def set_maps(self, address: int) -> None:
        """Say where the tensor maps lie."""
        self._arguments[0] = address


class _OfThread(threading.local):
    # Not made on import, which needs no CuPy.
    arguments: ThreadArguments | None = None


_of_thread = _OfThread()


def thread_arguments() -> ThreadArguments:
    """Memory of this thread's for the struct of its next launch."""
    arguments = _of_thread.arguments
    if arguments is None:
        from cupy.cuda import runtime

        # The driver launches in the thread's context, which a new thread has none of yet.
        runtime.setDevice(runtime.getDevice())
        arguments = _of_thread.arguments = ThreadArguments()
    return arguments
