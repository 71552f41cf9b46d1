"""Conversion of float32 to float8 (e4m3) for CuPy arrays, because CuPy has no float8."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash.arrays.strided import array_module

# Code of NaN in float8.
_NAN = 0x7F
# Number of mantissa bits of float32 that e4m3 lacks.
_DROPPED = 23 - 3
# Difference between the exponent biases of float32 and e4m3, shifted to float32's exponent bits.
_BIAS = (127 - 7) << 23
# The smallest normal number of e4m3, and 1 divided by its smallest subnormal number.
_SMALLEST_NORMAL, _UNITS = 2.0**-6, 2.0**9


def float8_codes(x: Any) -> Any:
    """Return float32 numbers as bytes of float8_e4m3fn, rounded to nearest even.

    Parameters
    ----------
    x : numpy.ndarray or cupy.ndarray of float32
        Numbers of at most 448 in magnitude, or NaN.

    Returns
    -------
    array of uint8, the shape of ``x``
    """
    xp = array_module(x)
    magnitudes = xp.abs(x)
    bits = magnitudes.view(np.uint32).astype(np.int64)
    # Half of the last bit that is kept, minus one unit if that bit is 0, so that ties go to even.
    to_even = (1 << (_DROPPED - 1)) - 1 + ((bits >> _DROPPED) & 1)
    normal = (bits - _BIAS + to_even) >> _DROPPED
    # The code after the last subnormal number is that of the smallest normal number.
    is_small = magnitudes < _SMALLEST_NORMAL
    subnormal = xp.rint(xp.where(is_small, magnitudes, np.float32(0)) * np.float32(_UNITS))
    codes = xp.where(is_small, subnormal.astype(np.int64), normal)
    codes = xp.where(xp.isnan(x), _NAN, codes)
    return (codes | xp.signbit(x).astype(np.int64) << 7).astype(np.uint8)
