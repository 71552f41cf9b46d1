"""Public function that quantizes keys and values to 8 bits, with scales."""

from __future__ import annotations

from typing import Any

from cupy_flash.calls import quantize
from cupy_flash.opaque import opaque


@opaque
def quantize_kv(
    x: Any, dtype: Any, per: str = "head", *, stream: Any | None = None
) -> tuple[Any, Any]:
    """Quantize keys or values to 8 bits for a KV cache, and compute their scales.

    A stored number times its scale is the key or value. Pass both results to
    `flash_attention_with_kvcache` or `flash_attention_varlen`, as `k_cache` (or `k`) and `k_scale`,
    or as `v_cache` (or `v`) and `v_scale`. A call quantizes the new rows that it appends itself.

    Parameters
    ----------
    x : array, shape (pages, page_size, heads_kv, head_dim) or (total_k, heads_kv, head_dim)
        Finite keys or values: a paged cache; a cache without pages, (caches, seqlen_cache, ...); or
        packed rows. float16, bfloat16, float32 or float64; NumPy, CuPy, or any array that supports
        DLPack. It is not written.
    dtype : dtype or str
        Dtype of the stored numbers: int8, or float8_e4m3fn of ml_dtypes, torch or JAX.
    per : {"head", "row", "page", "tensor"}
        Numbers that have one scale in common: those of a head, of a row and head, of a page (or
        cache) and head, or all of x. Packed rows do not support "page".
    stream : stream, optional
        Stream to run on instead of the current one, see `flash_attention`.

    Returns
    -------
    values : array of `dtype`, the shape of x
        Quantized numbers: x divided by the scale in float32, rounded to nearest even, and 0 if the
        scale is 0.
    scales : float32 array
        Scales: the largest magnitude of x among the numbers with this scale, divided by the largest
        number of `dtype` (127 or 448). Shape (heads_kv,) for "head", (pages, page_size, heads_kv)
        or (total_k, heads_kv) for "row", (pages, 1, heads_kv) for "page", () for "tensor".

    Raises
    ------
    TypeError
        If x has a wrong array type or dtype, or `dtype` is not supported.
    ValueError
        If the shape of x or the value of `per` is not supported.
    UnsupportedError
        If `stream` is given, and no GPU can be used.

    Notes
    -----
    The error of an int8 number is at most half its scale. float8_e4m3fn has four significant bits:
    its error is at most 1/16 of the number, or 2^-10 of the scale if that is more. Arrays on a GPU
    are computed there, on the current device and stream, without synchronizing; NumPy arrays are
    computed by NumPy. Both give the same bits.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import quantize_kv
    >>> x = np.array([[[1.2, -2.0]], [[0.4, 0.0]]], np.float32)  # total_k, heads_kv, head_dim
    >>> values, scales = quantize_kv(x, np.int8)
    >>> values[:, 0], scales * 127
    (array([[  76, -127],
           [  25,    0]], dtype=int8), array([2.], dtype=float32))
    """
    return quantize.quantize(x, dtype, per, stream)
