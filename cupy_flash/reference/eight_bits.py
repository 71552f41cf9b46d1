"""Conversions between float64 and 8-bit numbers with scales: float8 (e4m3) and int8."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash.arrays.strided import array_module, dtype_name
from cupy_flash.problem.arrays import FLOAT8, LARGEST_QUANTIZED

# Code of NaN in e4m3. The codes below it are those of the nonnegative numbers, in ascending order.
_NAN = 0x7F


def as_bytes(array: Any) -> Any:
    """Return a float8 array as a uint8 view of its memory, and any other array unchanged.

    CuPy can neither copy nor index float8 arrays.
    """
    return array.view(np.uint8) if dtype_name(array) == FLOAT8 else array


def widened(array: Any) -> Any:
    """Return a float8 array as float32, which is exact, and any other array unchanged."""
    if dtype_name(array) != FLOAT8:
        return array
    # CuPy cannot convert float8 arrays, so a table maps each code to its number.
    numbers = np.arange(256, dtype=np.uint8).view(array.dtype).astype(np.float32)
    return array_module(array).asarray(numbers)[array.view(np.uint8)]


def dequantized(stored: Any, scale: Any, dtype: Any = np.float64) -> Any:
    """Return stored numbers times their scales.

    Parameters
    ----------
    stored : array, shape (..., dim)
        Numbers of any dtype.
    scale : number or float32 array
        Scales, which broadcast to the leading axes of `stored`; None for 1.
    dtype
        Dtype of the products. Float64 holds the product of 8 bits and a float32 scale exactly.
    """
    numbers = widened(stored).astype(dtype)
    if scale is None:
        return numbers
    with np.errstate(all="ignore"):
        return numbers * array_module(stored).asarray(scale, dtype)[..., None]


def quantized(rows: Any, scales: Any, dtype: np.dtype[Any]) -> Any:
    """Return rows (..., dim) divided by their scales (...), in 8 bits.

    The quotient is computed in float32, clamped to the range of the dtype and rounded to nearest
    even. It is 0 if the scale is 0. NaN stays NaN in float8 and becomes 0 in int8.
    """
    xp = array_module(rows)
    largest = LARGEST_QUANTIZED[dtype.name]
    divisor = scales.astype(np.float32)[..., None]
    with np.errstate(all="ignore"):
        quotient = xp.where(divisor == 0, np.float32(0), rows.astype(np.float32) / divisor)
        quotient = xp.minimum(xp.maximum(quotient, -largest), largest)
        if dtype.kind == "i":
            return xp.where(xp.isnan(quotient), 0, xp.rint(quotient)).astype(dtype)
        return _encoded(rounded_to_float8(quotient, xp), dtype, xp)


def _encoded(x: Any, dtype: np.dtype[Any], xp: Any) -> Any:
    """Return float32 numbers as e4m3. Each must be NaN or exactly representable."""
    numbers = np.arange(_NAN, dtype=np.uint8).view(dtype).astype(np.float32)
    # searchsorted places NaN after all numbers, at the index that is the code of NaN.
    codes = xp.searchsorted(xp.asarray(numbers), abs(x)).astype(np.uint8)
    return (codes | xp.signbit(x).astype(np.uint8) << 7).view(dtype)


def largest_scales(rows: Any, dtype: np.dtype[Any]) -> Any:
    """Return the scale of each row (..., dim) that maps its largest magnitude to that of `dtype`.

    The result is float32 of shape (...).
    """
    magnitudes = abs(rows.astype(np.float32))
    return magnitudes.max(axis=-1) / np.float32(LARGEST_QUANTIZED[dtype.name])


def rounded_to_float8(x: Any, xp: Any) -> Any:
    """Return numbers of magnitude at most 448, rounded to values of e4m3.

    e4m3 has 4 significant bits, and its numbers are multiples of 2^-9. CuPy has no such conversion.
    """
    _, exponent = xp.frexp(x)
    # The mantissa of frexp is in [0.5, 1).
    unit = xp.ldexp(xp.ones_like(x), xp.maximum(exponent, -5) - 4)
    return xp.rint(x / unit) * unit
