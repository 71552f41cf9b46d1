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
    pointer
        What CuPy's kernels take for them.
    """

    def __init__(self, memory: bytearray) -> None:
        from cupy.cuda.function import CPointer

        self.memory = memory
        self._exported = ctypes.c_char.from_buffer(memory)
        self.pointer = CPointer(ctypes.addressof(self._exported))


class _OfThread(threading.local):
    # Not made on import, which needs no CuPy.
    arguments: ByValue | None = None


_of_thread = _OfThread()


def thread_arguments() -> ByValue:
    """Memory of this thread's for the struct of its next launch."""
    arguments = _of_thread.arguments
    if arguments is None:
        arguments = _of_thread.arguments = ByValue(bytearray(MAX_BYTES))
    return arguments
