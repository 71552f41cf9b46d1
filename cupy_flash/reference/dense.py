"""Reference formula of attention, with error bounds for other implementations.

:func:`attention_reference` computes the formula in float64 and is the oracle of the tests.
:func:`attention_naive` is a straightforward implementation without a fused kernel, in the precision
of its inputs. Its error is the yardstick of :func:`error_bound`, and its time the baseline of the
benchmarks.

All functions run on NumPy and CuPy arrays; CuPy is imported only for CuPy arrays. The two public
formulas also take other arrays that `cupy_flash.flash_attention` takes, such as torch tensors, and
return arrays of that type.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module
from cupy_flash.mods.keywords import with_offsets
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR, Pairs
from cupy_flash.mods.shapes import refuse_other_lengths
from cupy_flash.opaque import opaque
from cupy_flash.problem.arrays import FLOAT8, FLOAT8_OUTPUTS
from cupy_flash.reference.dropout import factors
from cupy_flash.reference.eight_bits import rounded_to_float8
from cupy_flash.reference.key_lists import dense_lists, listed
from cupy_flash.reference.modifications import fitting_modifications, scaled
from cupy_flash.reference.rows import (
    as_bhsd,
    chunks_of_rows,
    from_bhsd,
    mask_scores,
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

#: Units in the last place (ulp) that :func:`error_bound` adds, for the output dtype at the largest
#: reference value. One is for the final rounding, and one for a reference that lies just above a
#: power of two. The others are for another order of summation, if the naive result is exact.
BOUND_ULPS = 4


@opaque
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
    return_max_logits: bool = False,
    return_entropy: bool = False,
    q_scale: Any | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    stream: Any | None = None,
    key_indices: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute attention in float64 by the formula ``softmax(softmax_scale * q @ k.T) @ v``.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    The scores are computed in chunks of at most :data:`~cupy_flash.reference.rows.CHUNK_BYTES`, so
    time rather than memory limits the sequence length. The result is exact to float64 rounding: no
    online softmax, no tiling over keys.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries, of any float dtype including ``ml_dtypes.bfloat16``. NumPy, CuPy, or any array that
        supports DLPack, such as a torch tensor. There may be no batch axis or several, as in
        `cupy_flash.flash_attention`.
    k : array, shape (batch, seqlen_k, heads_kv, head_dim)
        Keys, with the array type of q. ``heads_q`` is a multiple of ``heads_kv``; query head ``h``
        uses KV head ``h // (heads_q // heads_kv)``.
    v : array, shape (batch, seqlen_k, heads_kv, head_dim_v)
        Values, with the array type of q.
    causal : bool
        Whether query ``i`` attends only to the keys ``j <= i + q_offset``.
    softmax_scale : float, optional
        Factor on the scores; ``1 / sqrt(head_dim)`` if not given.
    q_offset : int or integer array of shape (batch,), optional
        Position of the first query among the keys; by default ``seqlen_k - seqlen_q``.
    layout : {"bshd", "bhsd"}
        Order of the axes of q, k, v and out; "bhsd" is (batch, heads, seqlen, head_dim).
    return_lse : bool
        Whether to return the log-sum-exp of the scaled scores of each query row, too.
    return_max_logits, return_entropy : bool
        Whether to return the largest score of each query row, and the entropy of its weights, too.
    q_scale, k_scale, v_scale : number or float32 array, optional
        Factors that q, k and v are multiplied by. They broadcast to (batch, 1, heads).
    stream : stream, optional
        Stream to run on instead of the current one, see `cupy_flash.flash_attention`.
    key_indices : array of integers, optional
        Lists of the keys that each query attends to, see `cupy_flash.flash_attention`.
    **modifications
        Masks and changes of scores, see `cupy_flash.Modifications`.

    Returns
    -------
    out : float64 array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output, in the layout of the inputs.
    lse : float64 array, shape (batch, heads_q, seqlen_q)
        Log-sum-exp, natural logarithm; only with ``return_lse``.
    max_logits : float64 array, shape (batch, heads_q, seqlen_q)
        Largest scores over the keys; only with ``return_max_logits``. See
        `cupy_flash.flash_attention`.
    entropy : float64 array, shape (batch, heads_q, seqlen_q)
        Entropies of the weights; only with ``return_entropy``.

    Raises
    ------
    TypeError
        If q, k or v is not an array, or a modification has a wrong type.
    ValueError
        If the shapes or the layout are wrong, or the shape of a modification does not fit.
    UnsupportedError
        If `stream` is given, and no GPU can be used.

    Notes
    -----
    NaN and inf in the rows that a query attends to propagate as in the formula, with one exception:
    a query that attends to no key, or only to keys with scores of -inf, returns 0 with an lse of
    -inf or of its sink. A masked key never affects the query's result. A NaN or inf in the value of
    a masked key may or may not affect it: the formula has 0 * NaN there, but whole chunks of keys
    that are masked for all of their queries are skipped.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import attention_reference, flash_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 64, 2, 8), np.float32)
    >>> difference = flash_attention(q, k, v) - attention_reference(q, k, v)
    >>> bool(np.abs(difference).max() < 1e-5)
    True
    """
    with on_stream(stream, q):
        convert = result_converter("q", q)
        q_offset, others = with_offsets(q_offset, modifications)
        refuse_other_lengths(others.get, "dense")
        q = read("q", q)
        batch = q.shape[:-3]
        q, k, v = as_bhsd(q, k, v, layout)
        q, k, v = scaled((q, k, v), (q_scale, k_scale, v_scale), np.float64)
        result = formula(
            *(q, k, v),
            causal=causal,
            softmax_scale=softmax_scale,
            q_offset=q_offset,
            bound_mods=fitting_modifications(others, q, sizes_of(q, k), causal=causal),
            with_entropy=return_entropy,
            lists=dense_lists(array_module(q), key_indices, q.shape[2]),
        )
        out = convert(from_bhsd(result.out, layout, batch))
        rows = result.requested(return_lse, return_max_logits, return_entropy)
        results = (out, *(convert(x.reshape(*batch, *x.shape[1:])) for x in rows))
        return results if rows else out


class FormulaResult(NamedTuple):
    """Result of :func:`formula`; all arrays except `out` have shape (batch, heads, seqlen_q).

    `entropy` is None if it was not requested.
    """

    out: Any
    lse: Any
    max_logits: Any
    entropy: Any

    def requested(self, lse: bool, max_logits: bool, entropy: bool) -> tuple[Any, ...]:
        """Return the requested results per row."""
        return tuple(itertools.compress(self[1:], (lse, max_logits, entropy)))


def formula(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    softmax_scale: float | None,
    q_offset: int | None = None,
    bound_mods: BoundModifications,
    sequence: Pairs = FIRST_PAIR,
    with_entropy: bool = False,
    lists: Any | None = None,
) -> FormulaResult:
    """Compute `attention_reference` of (batch, heads, seqlen, dim) arrays, read and checked.

    Parameters
    ----------
    sequence
        Index of the first sequence, and its first rows in packed arrays.
    with_entropy
        Whether to compute entropies, which takes time and memory.
    lists
        Keys that each query attends to, (batch, lists, seqlen_q, n), or None.
    """
    xp = array_module(q)
    batch, heads_q, seqlen_q, _ = q.shape
    scale, visible = resolve(q, k, softmax_scale, causal, q_offset)
    sinks = sinks_of(xp, bound_mods, heads_q, np.float64)
    out = xp.zeros((batch, heads_q, seqlen_q, v.shape[3]), np.float64)
    lse = xp.empty((batch, heads_q, seqlen_q), np.float64)
    lse[...] = sinks[:, None]
    max_logits = xp.full_like(lse, -np.inf)
    entropy = xp.zeros_like(lse) if with_entropy else None
    for rows in chunks_of_rows(xp, q, k, visible, bound_mods, sequence):
        if rows.end == 0 or (lists is not None and lists.shape[-1] == 0):
            continue
        with np.errstate(all="ignore"):
            scores = rows.softmax_scores(q, k, scale, bound_mods, xp)
            values = rows.keys(v).astype(np.float64)
            if lists is not None:
                scores, values = listed(xp, scores, values, lists, rows)
            row_max = scores.max(axis=-1)
            row_lse, row_sum, empty = softmax_terms(xp, scores, sinks[rows.head])
            if entropy is not None:
                rows.queries(entropy)[...] = entropy_of(xp, scores / row_sum)
            scores *= factors(bound_mods.dropout, rows.pairs, scores.dtype, xp)
            result = product(xp, scores, values) / row_sum
        result[empty] = 0
        rows.queries(out)[...] = result
        rows.queries(lse)[...] = row_lse
        rows.queries(max_logits)[...] = xp.where(xp.isnan(row_lse), np.nan, row_max)
    return FormulaResult(out, lse, max_logits, entropy)


def product(xp: Any, weights: Any, values: Any) -> Any:
    """Return weights (rows, n) times values (n, dim), or times those of each row (rows, n, dim)."""
    if values.ndim == 2:
        return xp.matmul(weights, values)
    return xp.matmul(weights[:, None], values)[:, 0]


def entropy_of(xp: Any, weights: Any) -> Any:
    """Return -sum(w * log(w)) over the last axis; a weight of 0 adds nothing."""
    return -xp.where(weights == 0, 0, weights * xp.log(weights)).sum(axis=-1)


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
    """Compute attention as one writes it without a fused kernel, storing the whole score matrix.

    float64 inputs are computed in float64, other dtypes in float32. For 16-bit dtypes the
    probabilities are rounded to ``dtype`` before the second product, as by separate kernels with
    16-bit arrays between them. For float8 (e4m3) ``exp(score - max)`` is rounded to float8 before
    the division by its sum: quotients of long sequences would all round to 0.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, q_offset, layout, q_scale, k_scale, v_scale, **modifications
        See :func:`attention_reference`.
    dtype : dtype, optional
        Dtype of the probabilities and of the result, by default that of ``q``. For float8 inputs,
        dtype of the result only, by default bfloat16.
    as_float8 : bool, optional
        Whether probabilities are rounded as for float8 inputs; by default whether ``q`` is float8.

    Returns
    -------
    out : array of ``dtype``, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output, in the layout of the inputs.

    Notes
    -----
    The score matrix takes memory for batch * heads_q * seqlen_q * seqlen_k numbers.
    """
    convert = result_converter("q", q)
    q_offset, others = with_offsets(q_offset, modifications)
    refuse_other_lengths(others.get, "dense")
    q = read("q", q)
    batch = q.shape[:-3]
    q, k, v = as_bhsd(q, k, v, layout)
    is_float8 = q.dtype.name == FLOAT8
    if dtype is None:
        dtype = FLOAT8_OUTPUTS[0] if is_float8 else q.dtype
    q, k, v = scaled((q, k, v), (q_scale, k_scale, v_scale), np.float32)
    out = naive_formula(
        *(q, k, v),
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        dtype=np.dtype(dtype),
        as_float8=is_float8 if as_float8 is None else as_float8,
        bound_mods=fitting_modifications(others, q, sizes_of(q, k), causal=causal),
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
    bound_mods: BoundModifications,
    as_float8: bool = False,
    sequence: Pairs = FIRST_PAIR,
) -> Any:
    """Compute `attention_naive` of (batch, heads, seqlen, dim) arrays; see `formula`."""
    xp = array_module(q)
    compute = precision_of(dtype)
    q, k, v = (x.astype(compute, copy=False) for x in (q, k, v))
    scale, visible = resolve(q, k, softmax_scale, causal, q_offset)
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, head_dim_v = v.shape
    if batch * heads_q * seqlen_q * seqlen_k == 0:
        return xp.zeros((batch, heads_q, seqlen_q, head_dim_v), dtype)
    # Scores are (batch, heads_kv, query heads per KV head, seqlen_q, seqlen_k): k and v broadcast
    # over the query heads of their KV head.
    grouped = (batch, heads_kv, heads_q // heads_kv, seqlen_q)
    sinks = sinks_of(xp, bound_mods, heads_q, compute).reshape(*grouped[1:3], 1, 1)
    h = xp.arange(heads_q).reshape(*grouped[1:3], 1, 1)
    rows = xp.arange(seqlen_q, dtype=np.int32)
    with np.errstate(all="ignore"):
        q = (q * compute.type(scale)).reshape(*grouped, head_dim)
        scores = xp.matmul(q, k[:, :, None].swapaxes(-1, -2))
        kept = []
        for b in range(batch):
            mask = bound_mods.mask_with(visible, sequence.b + b)
            pairs = pairs_of(xp, sequence, mask, rows, seqlen_k)
            pairs = pairs._replace(b=sequence.b + b, h=h)
            scores[b] = bound_mods.scores.apply(scores[b], pairs, xp)
            mask_scores(xp, scores[b], mask, rows)
            kept.append(factors(bound_mods.dropout, pairs, compute, xp))
        _, row_sum, empty = softmax_terms(xp, scores, sinks)
        for b in range(batch):
            scores[b] *= kept[b]
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


def max_error(out: Any, reference: Any) -> float:
    """Return the largest absolute difference between two arrays of the same shape.

    Elements that are both NaN, or both the same infinity, differ by 0. Any other pair with a NaN or
    inf differs by inf. Empty arrays differ by 0.
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
    """Return the largest allowed error of a result of ``dtype`` against ``reference``.

    The bound is twice the error of ``naive``, the formula in the same precision
    (:func:`attention_naive`), plus :data:`BOUND_ULPS` * ulp. The ulp is that of ``dtype`` in the
    binade of the largest finite ``|reference|``, ``eps * 2**floor(log2(max))``, and at least the
    smallest subnormal. Only positions where both arrays are finite count, so an overflow of the
    naive result does not loosen the bound; :func:`max_error` checks the positions of NaN and inf.

    A score of size s has an error of about s * eps, and its exponential that relative error.
    Over many rows the naive result shows this error; over few rows it may not, and in float64 it
    has the same errors as the reference. Then pass the ``lse`` of the reference: twice its largest
    finite magnitude, about that of the scores that matter, is added to :data:`BOUND_ULPS`.
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
    # The mantissa of frexp is in [0.5, 1), so the binade starts at half of 2**exponent.
    ulp = float(info.eps) * math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest else 0.0
    ulps = float(BOUND_ULPS)
    if lse is not None and lse.size:
        ulps += 2 * float(xp.where(xp.isfinite(lse), xp.abs(lse), 0).max())
    return 2 * error + ulps * max(ulp, float(info.smallest_subnormal))
