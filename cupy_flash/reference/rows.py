"""What the formulas share: arrays read and checked, rows taken in chunks, masks, the softmax.

The arrays of a formula are (batch, heads, seqlen, dim).
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
from cupy_flash.mods.modified import Modified
from cupy_flash.mods.scores import Pairs
from cupy_flash.mods.shapes import Sizes
from cupy_flash.problem.mask import Mask, before, unseen
from cupy_flash.problem.problem import if_swapped
from cupy_flash.problem.values import the_one

#: A chunk of float64 scores in the float64 formulas takes at most this many bytes (one row of
#: scores, if that alone is more).
CHUNK_BYTES = 128 << 20


class Rows(NamedTuple):
    """Rows of one head whose scores are computed at once.

    Attributes
    ----------
    b, head, kv_head
        Their sequence, query head and key/value head.
    span
        Which of the head's rows.
    end
        Behind the last key that one of them sees by its position.
    mask
        Of the sequence's positions.
    at
        Pairs of them and the keys before `end`.
    """

    b: int
    head: int
    kv_head: int
    span: slice
    end: int
    mask: Mask
    at: Pairs

    def queries(self, x: Any) -> Any:
        """Their part of an array (batch, heads_q, seqlen_q, ...)."""
        return x[self.b, self.head, self.span]

    def keys(self, x: Any) -> Any:
        """The keys' part of an array (batch, heads_kv, seqlen_k, dim)."""
        return x[self.b, self.kv_head, : self.end]

    def scores(self, q: Any, k: Any, scale: float, compute: np.dtype[Any], xp: Any) -> Any:
        """Scaled scores: (rows, keys) of `compute`."""
        scores = xp.matmul(self.queries(q).astype(compute), self.keys(k).astype(compute).T)
        scores *= compute.type(scale)
        return scores


def chunks_of_rows(
    xp: Any, q: Any, k: Any, visible: Mask, modified: Modified, sequence: Pairs
) -> Iterator[Rows]:
    """All rows of all heads, in chunks of `CHUNK_BYTES`.

    Parameters
    ----------
    visible
        The mask of positions without modifications.
    sequence
        Number of the first sequence, and where it begins in packed arrays.
    """
    batch, heads_q, seqlen_q, _ = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    chunk = max(1, CHUNK_BYTES // (8 * max(seqlen_k, 1)))
    for b, head in np.ndindex(batch, heads_q):
        mask = modified.of_mask(visible, sequence.b + b)
        for first in range(0, seqlen_q, chunk):
            span = slice(first, min(first + chunk, seqlen_q))
            end = mask.end(span.stop - 1)
            at = pairs_of(xp, sequence, mask, span, end)._replace(b=sequence.b + b, h=head)
            yield Rows(b, head, head // (heads_q // heads_kv), span, end, mask, at)


def as_bhsd(q: Any, k: Any, v: Any, layout: str) -> tuple[Any, Any, Any]:
    """Arrays of shape (batch, heads, seqlen, dim), their shapes checked against each other.

    They are views, but for arrays of several batch axes that cannot be merged without a copy.
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
    """Return an array of any batch axes as (batch, heads, seqlen, dim); see `as_bhsd`."""
    array = with_one_batch_axis(array)
    return array.swapaxes(1, 2) if layout == "bshd" else array


def from_bhsd(array: Any, layout: str, batch: tuple[int, ...]) -> Any:
    """Return an array of (batch, heads, seqlen, dim) with batch axes and order of the inputs."""
    if layout == "bshd":
        array = array_module(array).ascontiguousarray(array.swapaxes(1, 2))
    return array.reshape(*batch, *array.shape[1:])


def sizes_of(q: Any, k: Any) -> Sizes:
    """Of a call of (batch, heads, seqlen, dim) arrays."""
    batch, heads_q, seqlen_q, _ = q.shape
    return Sizes(dtype_name(q), batch, heads_q, seqlen_q, k.shape[2])


def resolve(
    q: Any, k: Any, softmax_scale: float | None, causal: bool, q_offset: int | None
) -> tuple[float, Mask]:
    """The scale and mask that apply; the offset no further out than makes a difference."""
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
    """Pairs of rows and the first keys, but for their sequence and head: (rows, keys)."""
    return sequence._replace(
        row=xp.arange(rows.start, rows.stop, dtype=np.int32)[:, None],
        j=xp.arange(keys, dtype=np.int32),
        q_offset=mask.q_offset,
    )


def sinks_of(xp: Any, modified: Modified, heads_q: int, dtype: Any) -> Any:
    """Of each head; -inf, which adds nothing, where there are none."""
    if modified.sinks is None:
        return xp.full(heads_q, -np.inf, dtype)
    return modified.sinks.astype(dtype)


def hide(xp: Any, scores: Any, mask: Mask, first_row: int) -> None:
    """Set to -inf what a query does not see by its position.

    ``scores`` is (..., rows from ``first_row`` on, keys).
    """
    rows, keys = scores.shape[-2:]
    if mask.is_full and keys <= mask.seqlen_k:
        return
    positions = xp.arange(first_row, first_row + rows)
    hidden = unseen(mask.ends(positions, xp), 0, keys, xp)
    hidden |= before(mask.begins(positions, xp), 0, keys, xp)
    xp.copyto(scores, -np.inf, where=hidden)


def softmax_terms(xp: Any, scores: Any, sink: Any) -> tuple[Any, Any, Any]:
    """Turn ``scores`` into exp(scores - row maximum) in place.

    Returns
    -------
    lse : array, (..., rows)
    sums : array, (..., rows, 1)
        To be divided by: 1 where nothing is seen.
    empty : bool array, (..., rows)
        Rows with no score above -inf.
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
