"""Structs that kernels take by value.

As NumPy scalars, which CuPy takes as well, they would cost 2 us each.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

# Bytes kept for a struct, more than any has.
SLOT = 512


class ByValue:
    """Bytes that are passed to kernels, in a copy that a launch makes before it returns.

    Attributes
    ----------
    memory
        The bytes, of one struct for each `SLOT`.
    pointers
        What CuPy's kernels take for each struct.
    """

    def __init__(self, memory: bytearray) -> None:
        from cupy.cuda.function import CPointer

        self.memory = memory
        self._exported = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(self._exported)
        slots = range(0, len(memory), SLOT)
        self.pointers: tuple[Any, ...] = tuple(CPointer(start + slot) for slot in slots)


class _OfThread(threading.local):
    # Not made on import, which needs no CuPy.
    arguments: ByValue | None = None


_of_thread = _OfThread()


def thread_arguments() -> ByValue:
    """Memory of this thread's for the two structs of its next launch."""
    arguments = _of_thread.arguments
    if arguments is None:
        arguments = _of_thread.arguments = ByValue(bytearray(2 * SLOT))
    return arguments
