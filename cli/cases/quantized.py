"""Conversion of caches, or of q, k and v, to dtypes of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from cupy_flash.arrays.strided import array_module
from cupy_flash.reference.eight_bits import widened

# Scale of the 8-bit values. It is a power of two, so that 16-bit numbers hold dequantized values
# exactly. The largest int8 value, 127, stands for about 4; caches hold standard normal values.
SCALE = 2.0**-5
# Maximum number of elements that are converted at once, which limits temporary memory.
_AT_ONCE = 1 << 22
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
# Difference between the exponent biases of float16 and float8, in units of float8's last place.
_EXPONENTS = 8 << 3


def quantized(cache: Any, dtype: str) -> Any:
    """Return a cache (blocks, rows, heads, dim), or q, in 8 bits: the values divided by `SCALE`.

    float8_e4m3fn values are truncated from float16, because CuPy cannot convert to float8.
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
            # Values below the smallest normal number of float8 become zero.
            magnitude = xp.where(magnitude < 8, 0, xp.minimum(magnitude, 0x7E))
            part[...] = (bits >> 8 & 0x80) | magnitude.astype(np.uint16)
    return stored if dtype == "int8" else stored.view(_FLOAT8)


def restored(stored: Any, dtype: np.dtype[Any]) -> Any:
    """Return the values that 8-bit elements stand for, in a dtype that holds them exactly."""
    return (widened(stored).astype(np.float32) * np.float32(SCALE)).astype(dtype)


def _parts(stored: Any, cache: Any) -> Iterator[tuple[Any, Any]]:
    flat, source = stored.reshape(-1), cache.reshape(-1)
    for start in range(0, flat.size, _AT_ONCE):
        yield flat[start : start + _AT_ONCE], source[start : start + _AT_ONCE]
