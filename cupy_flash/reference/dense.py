"""The attention formula written out: what results are compared with, and how far they may be off.

:func:`attention_reference` computes in float64 and is the oracle. :func:`attention_naive` is the
formula as one writes it without a fused kernel, in the precision of its inputs; its error is the
yardstick of :func:`error_bound`, and its time the baseline of the benchmarks.

All of it runs on NumPy and on CuPy arrays; CuPy is imported only when an array of its kind comes
in. The formulas also take what `cupy_flash.flash_attention` takes besides, such as torch tensors,
and then give the same kind.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_flash.arrays.kinds import read, way_back
from cupy_flash.arrays.strided import array_module
from cupy_flash.mods.keywords import with_offsets
from cupy_flash.mods.modified import Modified
from cupy_flash.mods.scores import FIRST, Pairs
from cupy_flash.mods.shapes import refuse_other_lengths
from cupy_flash.problem.arrays import FLOAT8, FLOAT8_OUTPUTS
from cupy_flash.reference.eight_bits import dequantized, rounded_to_float8, widened
from cupy_flash.reference.modifications import fitting_modifications, read_scale
from cupy_flash.reference.rows import (
    as_bhsd,
    chunks_of_rows,
    from_bhsd,
    hide,
    pairs_of,
    precision_of,
    resolve,
    sinks_of,
    sizes_of,
    softmax_terms,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications

#: Units in the last place, of the output dtype at the largest reference value, that
#: :func:`error_bound` adds. One is the final rounding and one the reference landing just above a
#: power of two; the rest is for sums taken in another order, which matters where the naive result
#: happens to be exact.
BOUND_ULPS = 4


def attention_reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    q_scale: Any | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Attention in float64 by the plain formula, ``softmax(softmax_scale * q @ k.T) @ v``.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    The scores are computed in chunks of at most :data:`~cupy_flash.reference.rows.CHUNK_BYTES`, so
    sequence length is limited by time, not by memory. Exact to float64 rounding: no online softmax,
    no tiling over keys.

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads_q, head_dim)
        Queries, of any float dtype, ``ml_dtypes.bfloat16`` included: NumPy's, CuPy's, or one that
        speaks DLPack, such as a torch tensor. There may be no batch axis or several, as in
        `cupy_flash.flash_attention`.
    k : same kind of array, (batch, seqlen_k, heads_kv, head_dim)
        Keys. ``heads_q`` is a multiple of ``heads_kv``; query head ``h`` reads key/value head
        ``h // (heads_q // heads_kv)``.
    v : same kind of array, (batch, seqlen_k, heads_kv, head_dim_v)
        Values.
    causal : bool
        Query ``i`` sees only the keys ``j <= i + q_offset``.
    softmax_scale : float, optional
        Factor on the scores; ``1 / sqrt(head_dim)`` if not given.
    q_offset : int or integer array of shape (batch,), optional
        Absolute position of the first query; ``seqlen_k - seqlen_q`` if not given.
    layout : {"bshd", "bhsd"}
        "bhsd" reads and returns (batch, heads, seqlen, head_dim).
    return_lse : bool
        Also return the log-sum-exp of the scaled scores.
    q_scale, k_scale, v_scale : number or float32 array, optional
        What the numbers of q, k and v are multiplied by; they broadcast to (batch, 1, heads).
    **modifications
        Masks, and what becomes of scores: see `cupy_flash.Modifications`.

    Returns
    -------
    out : float64 array, (batch, seqlen_q, heads_q, head_dim_v)
        In the layout of the inputs.
    lse : float64 array, (batch, heads_q, seqlen_q)
        Natural logarithm; only with ``return_lse``.

    Raises
    ------
    TypeError
        q, k or v is no array, or a modification of a wrong kind.
    ValueError
        A shape or the layout is not one of the above; a modification's shape is not the call's.

    Notes
    -----
    NaN and inf in what a query sees propagate as the formula has them, with one exception: a query
    that sees no key, or whose every seen score is -inf, gives 0 and an lse of -inf. A masked key
    never reaches the query's result, whatever it holds. A NaN or inf in the *value* row of a masked
    key may or may not reach it (the formula has 0 * NaN there, but whole chunks of keys that no
    query sees are left out): do not rely on either.
    """
    convert = way_back("q", q)
    q_offset, others = with_offsets(q_offset, modifications)
    refuse_other_lengths(others.get, "equal")
    q = read("q", q)
    batch = q.shape[:-3]
    q, k, v = as_bhsd(q, k, v, layout)
    q, k, v = _scaled(q, k, v, (q_scale, k_scale, v_scale), np.float64)
    out, lse = formula(
        *(q, k, v),
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        modified=fitting_modifications(others, q, sizes_of(q, k), causal=causal),
    )
    out = convert(from_bhsd(out, layout, batch))
    return (out, convert(lse.reshape(*batch, *lse.shape[1:]))) if return_lse else out


def formula(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    softmax_scale: float | None,
    q_offset: int | None = None,
    modified: Modified,
    sequence: Pairs = FIRST,
) -> tuple[Any, Any]:
    """`attention_reference` of (batch, heads, seqlen, dim) arrays, read and checked.

    Parameters
    ----------
    sequence
        Number of the first sequence, and where it begins in packed arrays.
    """
    xp = array_module(q)
    batch, heads_q, seqlen_q, _ = q.shape
    scale, visible = resolve(q, k, softmax_scale, causal, q_offset)
    sinks = sinks_of(xp, modified, heads_q, np.float64)
    out = xp.zeros((batch, heads_q, seqlen_q, v.shape[3]), np.float64)
    lse = xp.empty((batch, heads_q, seqlen_q), np.float64)
    lse[...] = sinks[:, None]
    for rows in chunks_of_rows(xp, q, k, visible, modified, sequence):
        if rows.end == 0:
            continue
        with np.errstate(all="ignore"):
            scores = rows.scores(q, k, scale, np.dtype(np.float64), xp)
            # A score that depends on less than the pair has fewer elements.
            scores[...] = modified.scores.apply(scores, rows.at, xp)
            hide(xp, scores, rows.mask, rows.span.start)
            row_lse, row_sum, empty = softmax_terms(xp, scores, sinks[rows.head])
            result = xp.matmul(scores, rows.keys(v).astype(np.float64)) / row_sum
        result[empty] = 0
        rows.queries(out)[...] = result
        rows.queries(lse)[...] = row_lse
    return out, lse


def attention_naive(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    dtype: Any = None,
    as_float8: bool | None = None,
    q_scale: Any | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Attention as one writes it without a fused kernel, the whole score matrix in memory.

    Computes in float64 for float64 and in float32 for the other dtypes; for 16-bit ones the
    probabilities are rounded to ``dtype`` before the second product, as separate kernels with
    16-bit arrays between them do. Of float8 (e4m3) the probabilities are rounded to it before the
    division by their sum: ``exp(score - max)``, as divided ones of long sequences are all 0 in it.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, q_offset, layout, q_scale, k_scale, v_scale, **modifications
        As in :func:`attention_reference`.
    dtype : dtype, optional
        Of the probabilities and of the result; the dtype of ``q`` if not given. Of float8, that of
        the result, bfloat16 if not given.
    as_float8 : bool, optional
        Whether probabilities are rounded as those of float8; by default whether ``q`` is.

    Returns
    -------
    out : array of ``dtype``, (batch, seqlen_q, heads_q, head_dim_v)
        In the layout of the inputs.

    Notes
    -----
    Memory: batch * heads_q * seqlen_q * seqlen_k scores.
    """
    convert = way_back("q", q)
    q_offset, others = with_offsets(q_offset, modifications)
    refuse_other_lengths(others.get, "equal")
    q = read("q", q)
    batch = q.shape[:-3]
    q, k, v = as_bhsd(q, k, v, layout)
    is_float8 = q.dtype.name == FLOAT8
    if dtype is None:
        dtype = FLOAT8_OUTPUTS[0] if is_float8 else q.dtype
    q, k, v = _scaled(q, k, v, (q_scale, k_scale, v_scale), np.float32)
    out = naive_formula(
        *(q, k, v),
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        dtype=np.dtype(dtype),
        as_float8=is_float8 if as_float8 is None else as_float8,
        modified=fitting_modifications(others, q, sizes_of(q, k), causal=causal),
    )
    return convert(from_bhsd(out, layout, batch))


def naive_formula(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    softmax_scale: float | None,
    q_offset: int | None = None,
    dtype: np.dtype[Any],
    modified: Modified,
    as_float8: bool = False,
    sequence: Pairs = FIRST,
) -> Any:
    """`attention_naive` of (batch, heads, seqlen, dim) arrays; parameters as of `formula`."""
    xp = array_module(q)
    compute = precision_of(dtype)
    q, k, v = (x.astype(compute, copy=False) for x in (q, k, v))
    scale, visible = resolve(q, k, softmax_scale, causal, q_offset)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, head_dim_v = v.shape
    if batch * heads_q * seqlen_q * seqlen_k == 0:
        return xp.zeros((batch, heads_q, seqlen_q, head_dim_v), dtype)
    # (batch, heads_kv, heads per kv head, seqlen, dim): k and v broadcast over the heads that share
    # them.
    grouped = (batch, heads_kv, heads_q // heads_kv, seqlen_q)
    sinks = sinks_of(xp, modified, heads_q, compute).reshape(*grouped[1:3], 1, 1)
    h = xp.arange(heads_q).reshape(*grouped[1:3], 1, 1)
    with np.errstate(all="ignore"):
        q = (q * compute.type(scale)).reshape(*grouped, head_dim)
        scores = xp.matmul(q, k[:, :, None].swapaxes(-1, -2))
        for b in range(batch):
            mask = modified.of_mask(visible, sequence.b + b)
            at = pairs_of(xp, sequence, mask, slice(0, seqlen_q), seqlen_k)
            at = at._replace(b=sequence.b + b, h=h)
            scores[b] = modified.scores.apply(scores[b], at, xp)
            hide(xp, scores[b], mask, 0)
        _, row_sum, empty = softmax_terms(xp, scores, sinks)
        if as_float8:
            scores = rounded_to_float8(scores, xp)
            out = xp.matmul(scores, v[:, :, None]) / row_sum
        else:
            scores /= row_sum
            if dtype != compute:
                scores = scores.astype(dtype).astype(compute)
            out = xp.matmul(scores, v[:, :, None])
        out[empty] = 0
        return out.reshape(batch, heads_q, seqlen_q, head_dim_v).astype(dtype, copy=False)


def _scaled(q: Any, k: Any, v: Any, scales: tuple[Any, Any, Any], dtype: Any) -> Any:
    """Numbers of (batch, heads, seqlen, dim) arrays: products of `dtype` if there are scales."""
    if all(scale is None for scale in scales):
        return tuple(map(widened, (q, k, v)))
    return tuple(
        dequantized(x.swapaxes(1, 2), read_scale(name, scale, x), dtype).swapaxes(1, 2)
        for name, x, scale in zip(("q_scale", "k_scale", "v_scale"), (q, k, v), scales, strict=True)
    )


def max_error(out: Any, reference: Any) -> float:
    """Largest absolute difference between two arrays of one shape.

    Positions where both hold NaN, or both the same infinity, count 0; NaN or inf against anything
    else is inf. Arrays without elements differ by 0.
    """
    if out.shape != reference.shape:
        raise ValueError(
            f"out has shape {out.shape}, reference {reference.shape}; they must be equal"
        )
    xp = array_module(reference)
    largest = 0.0
    for result, truth in zip(out, reference, strict=True) if out.size else ():
        result, truth = result.astype(np.float64), truth.astype(np.float64)
        with np.errstate(all="ignore"):
            difference = xp.abs(result - truth)
        same = (result == truth) | (xp.isnan(result) & xp.isnan(truth))
        difference = xp.where(same, 0, xp.where(xp.isnan(difference), np.inf, difference))
        largest = max(largest, float(difference.max()))
    return largest


def error_bound(naive: Any, reference: Any, dtype: Any, *, lse: Any = None) -> float:
    """Error against ``reference`` that a result of ``dtype`` is allowed.

    Twice the error of ``naive``, the formula in the same precision (:func:`attention_naive`), plus
    :data:`BOUND_ULPS` * ulp. The ulp is that of ``dtype`` in the binade of the largest finite
    ``|reference|``, ``eps * 2**floor(log2(max))``, and no less than its smallest subnormal. Only
    positions where both arrays are finite count, so a naive overflow does not excuse everything;
    that NaN and inf stand where they should is for :func:`max_error` to say.

    A score of size s is known to s * eps at best, and its exponential is off by as much. Over many
    rows the naive result shows that error; over a few it may be lucky, and in float64 it shares the
    reference's own. For such cases pass the reference's ``lse``: twice its largest finite
    magnitude, which is about that of the scores that count, is added to :data:`BOUND_ULPS`.
    """
    import ml_dtypes

    xp = array_module(reference)
    info: Any = ml_dtypes.finfo(np.dtype(dtype))  # type: ignore[no-untyped-call]
    error = largest = 0.0
    for result, truth in zip(naive, reference, strict=True) if reference.size else ():
        result, truth = result.astype(np.float64), truth.astype(np.float64)
        finite = xp.isfinite(result) & xp.isfinite(truth)
        with np.errstate(all="ignore"):
            error = max(error, float(xp.where(finite, xp.abs(result - truth), 0).max()))
        largest = max(largest, float(xp.where(xp.isfinite(truth), xp.abs(truth), 0).max()))
    # frexp's mantissa is in [0.5, 1): the binade starts at half of 2**exponent.
    ulp = float(info.eps) * math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest else 0.0
    ulps = float(BOUND_ULPS)
    if lse is not None and lse.size:
        ulps += 2 * float(xp.where(xp.isfinite(lse), xp.abs(lse), 0).max())
    return 2 * error + ulps * max(ulp, float(info.smallest_subnormal))
