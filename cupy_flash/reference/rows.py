"""Helpers of the reference formulas: reading and checking arrays, chunks of rows, masks, softmax.

All arrays in the formulas are (batch, heads, seqlen, dim).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.kinds import read
from cupy_flash.arrays.strided import (
    array_module,
    dtype_name,
    require_batch_axes,
    with_one_batch_axis,
)
from cupy_flash.mods.keywords import FURTHEST
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.score_derivatives import apply_with_slope
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR, Pairs
from cupy_flash.mods.shapes import Sizes
from cupy_flash.problem.mask import Mask, masked_after, masked_before
from cupy_flash.problem.problem import if_swapped
from cupy_flash.problem.values import the_one

#: Maximum size in bytes of a chunk of float64 scores in the float64 formulas. A chunk has at least
#: one row of scores, even if the row is larger.
CHUNK_BYTES = 128 << 20


class Rows(NamedTuple):
    """Chunk of query rows of one head, whose scores are computed together.

    Attributes
    ----------
    b, head, kv_head
        Indices of the sequence, and of the heads in the arrays of queries and of keys.
    span
        Rows of the chunk in the array of queries.
    end
        One past the last key that a row of the chunk attends to by its position.
    mask
        Position mask of the sequence: causality, window and prefix.
    pairs
        Pairs of the query rows and the keys before `end`. For a `Selection`, the indices of the
        head and of the query rows differ from `head` and `span`.
    """

    b: int
    head: int
    kv_head: int
    span: slice
    end: int
    mask: Mask
    pairs: Pairs

    def queries(self, x: Any) -> Any:
        """Return the rows of the chunk in an array (batch, heads_q, seqlen_q, ...)."""
        return x[self.b, self.head, self.span]

    def keys(self, x: Any) -> Any:
        """Return the keys before `end` in an array (batch, heads_kv, seqlen_k, dim)."""
        return x[self.b, self.kv_head, : self.end]

    def scores(self, q: Any, k: Any, scale: float, compute: np.dtype[Any], xp: Any) -> Any:
        """Return the scaled scores, (rows, keys), in dtype `compute`."""
        scores = xp.matmul(self.queries(q).astype(compute), self.keys(k).astype(compute).T)
        scores *= compute.type(scale)
        return scores

    def softmax_scores(
        self, q: Any, k: Any, scale: float, bound_mods: BoundModifications, xp: Any
    ) -> Any:
        """Return the float64 scores that the softmax reads, (rows, keys); -inf for masked pairs."""
        scores = self.scores(q, k, scale, np.dtype(np.float64), xp)
        # A score_mod that depends on fewer indices returns a smaller array, which broadcasts.
        scores[...] = bound_mods.scores.apply(scores, self.pairs, xp)
        mask_scores(xp, scores, self.mask, self.pairs.row[:, 0])
        return scores


class Selection(NamedTuple):
    """Query heads and query rows of a call that are computed.

    Attributes
    ----------
    heads, queries : int64 arrays in host memory, with one axis
        Indices of the heads and of the queries, in any order and with repetitions.
    heads_q
        Number of query heads of the call.
    """

    heads: NDArray[np.int64]
    queries: NDArray[np.int64]
    heads_q: int


def chunks_of_rows(
    xp: Any,
    q: Any,
    k: Any,
    visible: Mask,
    bound_mods: BoundModifications,
    sequence: Pairs = FIRST_PAIR,
    selection: Selection | None = None,
) -> Iterator[Rows]:
    """Yield all rows of all heads in chunks with scores of at most `CHUNK_BYTES`.

    Parameters
    ----------
    visible
        Position mask without modifications, that is, only causality.
    sequence
        Index of the first sequence, and its first rows in packed arrays.
    selection
        Heads and queries of the call that q holds; None for all.
    """
    _, heads_q, seqlen_q, _ = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    # The indices of all rows are computed on the device, without a copy from the host.
    indices = xp.arange(seqlen_q, dtype=np.int32)
    if selection is None:
        selection = Selection(np.arange(heads_q), np.arange(seqlen_q), heads_q)
    else:
        indices = xp.asarray(selection.queries, dtype=np.int32)
    chunk = max(1, CHUNK_BYTES // (8 * max(seqlen_k, 1)))
    for b, (index, head) in itertools.product(range(len(q)), enumerate(selection.heads.tolist())):
        mask = bound_mods.mask_with(visible, sequence.b + b)
        kv_head = head // (selection.heads_q // heads_kv)
        for first in range(0, seqlen_q, chunk):
            span = slice(first, min(first + chunk, seqlen_q))
            end = mask.end(int(selection.queries[span].max()))
            pairs = pairs_of(xp, sequence, mask, indices[span], end)
            pairs = pairs._replace(b=sequence.b + b, h=head)
            yield Rows(b, index, kv_head, span, end, mask, pairs)


def as_bhsd(q: Any, k: Any, v: Any, layout: str) -> tuple[Any, Any, Any]:
    """Return the arrays as (batch, heads, seqlen, dim), after checking their shapes.

    They are views, except for arrays whose batch axes cannot be merged without a copy.
    """
    q, k, v = _read_bhsd(layout, q=q, k=k, v=v)
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "q, k and v must agree in batch, q and k in head_dim, k and v in heads and seqlen; as "
            f"(batch, heads, seqlen, dim) they are {q.shape}, {k.shape}, {v.shape}"
        )
    _require_groups(q, k, layout)
    return q, k, v


def queries_and_keys(q: Any, k: Any, layout: str) -> tuple[Any, Any]:
    """Return queries and keys as (batch, heads, seqlen, dim); see `as_bhsd`."""
    q, k = _read_bhsd(layout, q=q, k=k)
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "q and k must agree in batch and head_dim; as (batch, heads, seqlen, dim) they are "
            f"{q.shape}, {k.shape}"
        )
    _require_groups(q, k, layout)
    return q, k


def _read_bhsd(layout: str, **arrays: Any) -> Iterator[Any]:
    """Yield the arrays as (batch, heads, seqlen, dim), which must have the batch axes of q."""
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout must be 'bshd' or 'bhsd', not {layout!r}")
    arrays = {name: read(name, array) for name, array in arrays.items()}
    for name, array in arrays.items():
        require_batch_axes(name, array, arrays["q"])
    for array in arrays.values():
        yield to_bhsd(array, layout)


def _require_groups(q: Any, k: Any, layout: str) -> None:
    """Raise ValueError unless the number of query heads is a multiple of that of KV heads."""
    if q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]:
        instead = if_swapped(q.shape[2:0:-1], k.shape[2:0:-1], layout)
        raise ValueError(
            f"heads_q ({q.shape[1]}) must be a multiple of heads_kv ({k.shape[1]}){instead}"
        )


def to_bhsd(array: Any, layout: str) -> Any:
    """Return an array with any batch axes as (batch, heads, seqlen, dim); see `as_bhsd`."""
    array = with_one_batch_axis(array)
    return array.swapaxes(1, 2) if layout == "bshd" else array


def from_bhsd(array: Any, layout: str, batch: tuple[int, ...]) -> Any:
    """Return a (batch, heads, seqlen, dim) array with the batch axes and layout of the inputs."""
    if layout == "bshd":
        array = array_module(array).ascontiguousarray(array.swapaxes(1, 2))
    return array.reshape(*batch, *array.shape[1:])


def sizes_of(q: Any, k: Any) -> Sizes:
    """Return the sizes of a call of (batch, heads, seqlen, dim) arrays."""
    batch, heads_q, seqlen_q, _ = q.shape
    return Sizes(dtype_name(q), batch, heads_q, seqlen_q, k.shape[2])


def resolve(
    q: Any, k: Any, softmax_scale: float | None, causal: bool, q_offset: int | None
) -> tuple[float, Mask]:
    """Return the scale and the position mask; the offset is clamped to +-`FURTHEST`."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    scale = 1 / math.sqrt(max(q.shape[3], 1))
    if softmax_scale is not None:
        scale = float(the_one(softmax_scale))
    offset = seqlen_k - seqlen_q if q_offset is None else int(q_offset)
    return scale, Mask(seqlen_q, seqlen_k, causal, min(max(offset, -FURTHEST), FURTHEST))


def precision_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which the naive formulas compute: float64 for float64, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def pairs_of(xp: Any, sequence: Pairs, mask: Mask, rows: Any, keys: int) -> Pairs:
    """Return the pairs of query rows and the first `keys` keys, without sequence and head.

    ``rows`` is an int32 array of the rows' indices.
    """
    return sequence._replace(
        row=rows[:, None],
        j=xp.arange(keys, dtype=np.int32),
        q_offset=mask.q_offset,
    )


def sinks_of(xp: Any, bound_mods: BoundModifications, heads_q: int, dtype: Any) -> Any:
    """Return the sink of each head; -inf, which adds nothing, if there are no sinks."""
    if bound_mods.sinks is None:
        return xp.full(heads_q, -np.inf, dtype)
    return bound_mods.sinks.astype(dtype)


def mask_scores(xp: Any, scores: Any, mask: Mask, rows: Any) -> None:
    """Set the scores of pairs that are masked by position to -inf.

    ``scores`` is (..., rows, keys), and ``rows`` holds the indices of the query rows.
    """
    keys = scores.shape[-1]
    if mask.is_full and keys <= mask.seqlen_k:
        return
    # The offset of a sequence may be any int32, so that positions need more bits.
    rows = rows.astype(np.int64)
    masked = masked_after(mask.ends(rows, xp), 0, keys, xp)
    masked |= masked_before(mask.begins(rows, xp), 0, keys, xp)
    xp.copyto(scores, -np.inf, where=masked)


def softmax_terms(xp: Any, scores: Any, sink: Any) -> tuple[Any, Any, Any]:
    """Replace ``scores`` by exp(scores - row maximum) in place.

    Returns
    -------
    lse : array, shape (..., rows)
        Log-sum-exp of each row, sink included.
    sums : array, shape (..., rows, 1)
        Divisors that normalize the rows; 1 for fully masked rows without a sink.
    empty : bool array, shape (..., rows)
        True for rows without a score above -inf.
    """
    row_max = scores.max(axis=-1, keepdims=True)
    empty = (row_max == -np.inf)[..., 0]
    row_max = xp.maximum(row_max, sink)
    base = xp.where(row_max == -np.inf, 0, row_max)
    scores -= base
    xp.exp(scores, out=scores)
    row_sum = scores.sum(axis=-1, keepdims=True) + xp.exp(sink - base)
    row_lse = (row_max + xp.log(row_sum))[..., 0]
    return row_lse, xp.where(row_sum == 0, 1, row_sum), empty


def softmax_and_slope(
    xp: Any,
    x: Any,
    rows: Rows,
    bound_mods: BoundModifications,
    sink: Any,
    log_counts: Any | None = None,
) -> tuple[Any, Any, Any | None, Any]:
    """Compute the softmax of rows of scaled scores.

    `log_counts` are summands of the modified scores, if keys count more or less often than once.

    Returns
    -------
    p : array, shape (rows, keys)
        Probabilities; 0 for masked pairs.
    seen : bool array, shape (rows, keys)
        True for visible pairs.
    slope : array, broadcastable to p, or None
        Derivatives of the modified scores, see `apply_with_slope`.
    lse : array, shape (rows,)
    """
    if rows.end == 0:
        return x, x == x, None, xp.broadcast_to(sink, x.shape[:1])
    changed, slope = apply_with_slope(bound_mods.scores, x, rows.pairs, xp)
    p = xp.empty_like(x)
    # A score_mod that depends on fewer indices returns a smaller array, which broadcasts.
    p[...] = changed
    mask_scores(xp, p, rows.mask, rows.pairs.row[:, 0])
    if log_counts is not None:
        p += log_counts.astype(p.dtype)
    seen = p != -np.inf
    lse, row_sum, _ = softmax_terms(xp, p, sink)
    return xp.where(seen, p / row_sum, 0), seen, slope, lse


def visible_product(xp: Any, weights: Any, seen: Any, rows: Any) -> Any:
    """Return ``weights @ rows`` without masked pairs, whose weights are 0.

    A row that holds NaN or inf is added separately, and only where `seen` is True.
    """
    odd = ~xp.isfinite(rows).all(axis=1)
    if not bool(odd.any()):
        return xp.matmul(weights, rows)
    result = xp.matmul(weights[:, ~odd], rows[~odd])
    for j in xp.flatnonzero(odd).tolist():
        result += xp.where(seen[:, j, None], weights[:, j, None] * rows[j], 0)
    return result
