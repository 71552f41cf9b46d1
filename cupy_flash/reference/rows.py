"""Helpers of the reference formulas: reading and checking arrays, chunks of rows, masks, softmax.

All arrays in the formulas are (batch, heads, seqlen, dim).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import read
from cupy_flash.arrays.strided import (
    array_module,
    dtype_name,
    require_batch_axes,
    with_one_batch_axis,
)
from cupy_flash.mods.keywords import FURTHEST
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.scores import Pairs
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
        Indices of the sequence, query head and KV head.
    span
        Query rows of the chunk.
    end
        One past the last key that a row of the chunk attends to by its position.
    mask
        Position mask of the sequence: causality, window and prefix.
    pairs
        Pairs of the query rows and the keys before `end`.
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


def chunks_of_rows(
    xp: Any, q: Any, k: Any, visible: Mask, bound_mods: BoundModifications, sequence: Pairs
) -> Iterator[Rows]:
    """Yield all rows of all heads in chunks with scores of at most `CHUNK_BYTES`.

    Parameters
    ----------
    visible
        Position mask without modifications, that is, only causality.
    sequence
        Index of the first sequence, and its first rows in packed arrays.
    """
    batch, heads_q, seqlen_q, _ = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    chunk = max(1, CHUNK_BYTES // (8 * max(seqlen_k, 1)))
    for b, head in np.ndindex(batch, heads_q):
        mask = bound_mods.mask_with(visible, sequence.b + b)
        for first in range(0, seqlen_q, chunk):
            span = slice(first, min(first + chunk, seqlen_q))
            end = mask.end(span.stop - 1)
            pairs = pairs_of(xp, sequence, mask, span, end)._replace(b=sequence.b + b, h=head)
            yield Rows(b, head, head // (heads_q // heads_kv), span, end, mask, pairs)


def as_bhsd(q: Any, k: Any, v: Any, layout: str) -> tuple[Any, Any, Any]:
    """Return the arrays as (batch, heads, seqlen, dim), after checking their shapes.

    They are views, except for arrays whose batch axes cannot be merged without a copy.
    """
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout must be 'bshd' or 'bhsd', not {layout!r}")
    q, k, v = (read(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_batch_axes(name, x, q)
    q, k, v = (to_bhsd(x, layout) for x in (q, k, v))
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "q, k and v must agree in batch, q and k in head_dim, k and v in heads and seqlen; as "
            f"(batch, heads, seqlen, dim) they are {q.shape}, {k.shape}, {v.shape}"
        )
    if q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]:
        instead = if_swapped(q.shape[2:0:-1], k.shape[2:0:-1], layout)
        raise ValueError(
            f"heads_q ({q.shape[1]}) must be a multiple of heads_kv ({k.shape[1]}){instead}"
        )
    return q, k, v


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


def pairs_of(xp: Any, sequence: Pairs, mask: Mask, rows: slice, keys: int) -> Pairs:
    """Return the pairs of query rows and the first `keys` keys, without sequence and head."""
    return sequence._replace(
        row=xp.arange(rows.start, rows.stop, dtype=np.int32)[:, None],
        j=xp.arange(keys, dtype=np.int32),
        q_offset=mask.q_offset,
    )


def sinks_of(xp: Any, bound_mods: BoundModifications, heads_q: int, dtype: Any) -> Any:
    """Return the sink of each head; -inf, which adds nothing, if there are no sinks."""
    if bound_mods.sinks is None:
        return xp.full(heads_q, -np.inf, dtype)
    return bound_mods.sinks.astype(dtype)


def mask_scores(xp: Any, scores: Any, mask: Mask, first_row: int) -> None:
    """Set the scores of pairs that are masked by position to -inf.

    ``scores`` is (..., rows, keys), where the first row is query ``first_row``.
    """
    rows, keys = scores.shape[-2:]
    if mask.is_full and keys <= mask.seqlen_k:
        return
    positions = xp.arange(first_row, first_row + rows)
    masked = masked_after(mask.ends(positions, xp), 0, keys, xp)
    masked |= masked_before(mask.begins(positions, xp), 0, keys, xp)
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
