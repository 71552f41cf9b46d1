"""Functions of the CUDA driver that CuPy does not wrap."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from typing import Any

from cupy_flash.errors import DriverError

# Mode CU_STREAM_CAPTURE_MODE_RELAXED of cuda.h.
_RELAXED = 2


@functools.cache
def driver_function(name: str) -> Any:
    """Return a function of the driver library; the function returns a CUresult.

    Raises
    ------
    DriverError
        If there is no driver, or if the driver lacks the function.
    """
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        function = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError) as error:
        raise DriverError(f"{library} has no {name}: {error}") from error
    function.restype = ctypes.c_int
    return function


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread allocate memory and load kernels although it captures a stream.

    CUDA otherwise refuses both calls, and invalidates the capture, unless the library that began
    the capture has chosen the relaxed mode.
    """
    before = _exchanged_mode(_RELAXED)
    try:
        yield
    finally:
        _exchanged_mode(before)


def _exchanged_mode(mode: int) -> int:
    """Set the capture mode of this thread, and return the previous one."""
    exchanged = ctypes.c_int(mode)
    if status := driver_function("cuThreadExchangeStreamCaptureMode")(ctypes.byref(exchanged)):
        raise DriverError(f"cuThreadExchangeStreamCaptureMode failed with CUresult {status}")
    return exchanged.value
