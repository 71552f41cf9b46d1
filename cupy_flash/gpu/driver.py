"""Functions of the CUDA driver that CuPy does not wrap."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from cupy_flash.errors import DriverError


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
