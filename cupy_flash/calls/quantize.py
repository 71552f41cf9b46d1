"""Quantization of keys and values to 8 bits with scales, for arrays of any type."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash.arrays.float8 import float8_codes
from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.numpy_errors import ignore_fp_errors
from cupy_flash.arrays.quantized import quantized, scales_of_rows
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module, require_float
from cupy_flash.problem.arrays import FLOAT8, LARGEST_QUANTIZED
from cupy_flash.problem.values import named_dtype

# Axes before head_dim that have one scale in common, by `per` and by the number of axes of x.
_SHARED: dict[str, dict[int, tuple[int, ...]]] = {
    "tensor": {4: (0, 1, 2), 3: (0, 1)},
    "head": {4: (0, 1), 3: (0,)},
    "page": {4: (1,)},
    "row": {4: (), 3: ()},
}


def quantize(x: Any, dtype: Any, per: str, stream: Any | None) -> tuple[Any, Any]:
    """Return what `cupy_flash.quantize_kv` returns."""
    with on_stream(stream, x):
        rows, convert = read("x", x), result_converter("x", x)
        require_float("x", rows)
        name = named_dtype(dtype)
        if name not in LARGEST_QUANTIZED:
            raise TypeError(f"dtype is {dtype!r}; expected one of {', '.join(LARGEST_QUANTIZED)}")
        if per not in _SHARED:
            raise ValueError(f"per is {per!r}; expected one of {', '.join(_SHARED)}")
        axes = _SHARED[per].get(rows.ndim)
        if axes is None or not rows.shape[-1]:
            packed = "" if per == "page" else " or (total, heads_kv, head_dim)"
            raise ValueError(
                f"x has shape {tuple(rows.shape)}; expected (pages, page_size, heads_kv, head_dim)"
                f"{packed}, as per is {per!r}"
            )
        scales = _scales(rows, name, axes, keepdims=per == "page")
        return convert(_stored(rows, scales, name)), convert(scales)


@ignore_fp_errors
def _scales(rows: Any, dtype: str, axes: tuple[int, ...], *, keepdims: bool) -> Any:
    """Return the scales of all rows, reduced to their maximum along some axes."""
    xp = array_module(rows)
    row_scales = scales_of_rows(rows, dtype)
    if not axes:
        return row_scales
    # max() raises for an empty array; sum() returns 0.
    reduce = row_scales.max if row_scales.size else row_scales.sum
    return xp.asarray(reduce(axis=axes, keepdims=keepdims))


@ignore_fp_errors
def _stored(rows: Any, scales: Any, dtype: str) -> Any:
    """Return the rows divided by their scales, in 8 bits; see `quantized`."""
    xp = array_module(rows)
    if dtype != FLOAT8 or xp is np:
        return quantized(rows, scales, np.dtype(_float8() if dtype == FLOAT8 else dtype))
    # CuPy cannot convert to float8.
    largest, divisors = LARGEST_QUANTIZED[dtype], scales[..., None]
    scaled = xp.where(divisors == 0, np.float32(0), rows.astype(np.float32) / divisors)
    return float8_codes(xp.clip(scaled, -largest, largest)).view(_float8())


def _float8() -> Any:
    import ml_dtypes

    return ml_dtypes.float8_e4m3fn
