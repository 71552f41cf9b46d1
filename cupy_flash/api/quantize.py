"""Keys and values of 8 bits, with scales."""

from __future__ import annotations

from typing import Any

from cupy_flash.calls import quantize


def quantize_kv(x: Any, dtype: Any, per: str = "head") -> tuple[Any, Any]:
    """Round keys or values to 8 bits, as caches hold them, and compute their scales.

    A stored number stands for itself times its scale: pass the two results to
    `flash_attention_with_kvcache` or `flash_attention_varlen` as `k_cache` (or `k`) and `k_scale`,
    or as `v_cache` (or `v`) and `v_scale`. New rows that a call appends are rounded by the call.

    Parameters
    ----------
    x : array, shape (pages, page_size, heads_kv, head_dim) or (total_k, heads_kv, head_dim)
        Finite keys or values: a cache in pages or, with (caches, seqlen_cache), without pages; or
        packed rows. float16, bfloat16, float32 or float64; NumPy, CuPy, or any array that speaks
        DLPack. It is not written.
    dtype : dtype or str
        Dtype of the stored numbers: int8, or float8_e4m3fn of ml_dtypes, torch or JAX.
    per : {"head", "row", "page", "tensor"}
        Unit that shares a scale: a head; a row of a head; a head of a page, or of a cache; or x as
        a whole. Packed rows have no pages.

    Returns
    -------
    values : array of `dtype`, the shape of x
        Each number divided by its scale in float32, and rounded to nearest even. 0 where the scale
        is 0.
    scales : float32 array
        The largest magnitude of the numbers that share the scale divided by the largest number of
        `dtype`, which is 127 or 448. Shape (heads_kv,) for heads; (pages, page_size, heads_kv) or
        (total_k, heads_kv) for rows; (pages, 1, heads_kv) for pages; () for x as a whole.

    Raises
    ------
    TypeError
        For a wrong kind of array or dtype.
    ValueError
        For an x of another shape, or another `per`.

    Notes
    -----
    With int8 a number is off by at most half of its scale. float8_e4m3fn has four significant bits,
    so a number is off by at most 1/16 of itself, or by 2^-10 of its scale where that is more.
    Arrays on a GPU are computed there, on the current device and stream, without synchronizing;
    NumPy arrays by NumPy. Both give the same bits.

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
    return quantize.quantize(x, dtype, per)
