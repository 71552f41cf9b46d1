"""Structs that kernels take by value.

CuPy also accepts NumPy scalars for such structs, but they take 2 us each.
"""

from __future__ import annotations

import ctypes
import threading

# Size of the memory for a struct: the largest argument size of a kernel.
MAX_BYTES = 32764


class ByValue:
    """Bytes that are passed to kernels by value; a launch copies them before it returns.

    Attributes
    ----------
    memory
        Bytes of the struct.
    address, pointer
        Address of the bytes, as a number and as an argument for CuPy's kernels.
    """

    def __init__(self, memory: bytearray) -> None:
        from cupy.cuda.function import CPointer

        self.memory = memory
        self._exported = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._exported)
        self.pointer = CPointer(self.address)


class ThreadArguments(ByValue):
    """Memory for the struct of a thread's next launch, and argument lists for the driver.

    Attributes
    ----------
    with_maps, alone
        Addresses of two argument lists: tensor maps and the struct, and the struct only.
    """

    def __init__(self) -> None:
        super().__init__(bytearray(MAX_BYTES))
        self._arguments = (ctypes.c_void_p * 2)(None, self.address)
        self.with_maps = ctypes.addressof(self._arguments)
        self.alone = self.with_maps + ctypes.sizeof(ctypes.c_void_p)

    def set_maps(self, address: int) -> None:
        """Set the address of the tensor maps."""
        self._arguments[0] = address


class _ThreadState(threading.local):
    # Created on first use, because importing this module must not need CuPy.
    arguments: ThreadArguments | None = None


_thread_state = _ThreadState()


def thread_arguments() -> ThreadArguments:
    """Return this thread's memory for the struct of its next launch."""
    arguments = _thread_state.arguments
    if arguments is None:
        from cupy.cuda import runtime

        # The driver launches in the current context, and a new thread has none yet. This sets it.
        runtime.setDevice(runtime.getDevice())
        arguments = _thread_state.arguments = ThreadArguments()
    return arguments
