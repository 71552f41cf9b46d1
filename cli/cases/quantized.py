"""Caches of 8 bits, and q, k and v, made of those of other dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from cupy_flash.arrays.strided import array_module
from cupy_flash.reference.eight_bits import widened

# A power of two, so that 16 bits hold what a number stands for exactly: four of the standard normal
# numbers that caches are drawn from are the largest of int8.
SCALE = 2.0**-5
# Rows of an array that are converted at once.
_AT_ONCE = 1 << 22
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
# Between the exponents of float16 and of float8, in its last places.
_EXPONENTS = 8 << 3


def quantized(cache: Any, dtype: str) -> Any:
    """A cache (blocks, rows, heads, dim), or q, in float8_e4m3fn or int8, of numbers times `SCALE`.

    float8's are those of float16 with bits cut off, as CuPy has no conversions of it.
    """
    xp = array_module(cache)
    stored = xp.empty(cache.shape, np.int8 if dtype == "int8" else np.uint8)
    for part, source in _parts(stored, cache):
        scaled = source.astype(np.float32) / np.float32(SCALE)
        if dtype == "int8":
            part[...] = xp.rint(xp.clip(scaled, -127, 127)).astype(np.int8)
        else:
            bits = scaled.astype(np.float16).view(np.uint16)
            magnitude = ((bits & 0x7FFF) >> 7).astype(np.int32) - _EXPONENTS
            # Of exponents that are too small the numbers are zeros.
            magnitude = xp.where(magnitude < 8, 0, xp.minimum(magnitude, 0x7E))
            part[...] = (bits >> 8 & 0x80) | magnitude.astype(np.uint16)
    return stored if dtype == "int8" else stored.view(_FLOAT8)


def restored(stored: Any, dtype: np.dtype[Any]) -> Any:
    """What some of such a cache stands for, which `dtype` holds exactly."""
    return (widened(stored).astype(np.float32) * np.float32(SCALE)).astype(dtype)


def _parts(stored: Any, cache: Any) -> Iterator[tuple[Any, Any]]:
    flat, source = stored.reshape(-1), cache.reshape(-1)
    for start in range(0, flat.size, _AT_ONCE):
        yield flat[start : start + _AT_ONCE], source[start : start + _AT_ONCE]
