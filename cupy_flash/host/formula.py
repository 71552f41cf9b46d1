"""The plain formula on the CPU: where a step takes up all keys that its rows see.

Weights are divided by their sum before they meet the values, as in the formula, so that no sum of
products overflows where a result does not.

Scores of few keys lie in memory key by key, those of all rows and heads behind each other: NumPy
takes 1.3 ns an element for maxima of rows of 32, 0.1 for maxima of as many columns.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host.passes import Block, Pass, Scratch, count_sink, lost_rows, lowest, mask, ones
from cupy_flash.host.sequence_places import PagedRows
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]

# Elements of the scores and queries of a call up to which it is computed in one go, in new arrays.
MAX_ELEMENTS_OF_CALL = 1 << 16

# Multiplications of a matrix product up to which OpenBLAS takes one thread in any case.
MAX_PRODUCT_OF_ONE_THREAD = 1 << 18

# Scores that are looked at, and the magnitude up to which no maximum is subtracted from them: exp
# stays within [1e-13, 1e13].
MAX_SCORES_TO_LOOK_AT = 1024
SCORE_BOUND = 30.0

# Keys up to which scores lie key by key.
MAX_KEYS_FIRST = 128


def forward_small(
    q: Array,
    k: Array | PagedRows,
    v: Array | PagedRows,
    out: Array,
    lse: Array | None,
    causal: bool,
    q_offset: int,
    softmax_scale: float,
    tile: Tile,
) -> bool:
    """A whole call at once, if it is small: without record, blocks, scratch and threads.

    Takes what `cpu.forward` does. False, and no output, if it is not for this function.
    A call of 8 queries and keys of 8 heads of 64 takes 24 us here; the record alone takes 8.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, heads_kv, _ = k.shape
    rows = batch * heads * seqlen_q
    if (
        rows * max(seqlen_k, head_dim) > MAX_ELEMENTS_OF_CALL
        or seqlen_q * seqlen_k * head_dim > MAX_PRODUCT_OF_ONE_THREAD
        or seqlen_q > tile.Br
        or not 0 < seqlen_k <= tile.Bc
        or (heads != heads_kv and seqlen_q > 1)
        or q.dtype.char not in "fd"
        or not isinstance(k, np.ndarray)
        or not isinstance(v, np.ndarray)
    ):
        return False
    scaled = q * q.dtype.type(softmax_scale)
    if heads == heads_kv:
        scaled, out = scaled.swapaxes(1, 2), out.swapaxes(1, 2)
    else:
        # The heads of a group are the rows of one matrix.
        scaled, out = (x[:, 0].reshape(batch, heads_kv, -1, x.shape[3]) for x in (scaled, out))
    visible = Mask(seqlen_q, seqlen_k, causal, q_offset)
    masked = not visible.sees_all(0, seqlen_q)
    # NumPy takes 1 us to find so few scores to be small, 5 for maxima and to subtract them. Not
    # where some are hidden from some rows: of those a row then bears the trace.
    few = rows * seqlen_k <= MAX_SCORES_TO_LOOK_AT and not masked
    if few:
        # NumPy may choose another order for strided operands, and a reshape would be a copy.
        scores = np.matmul(scaled, k.transpose(0, 2, 3, 1), order="C")
        matrix, keys_axis = scores.reshape(rows, seqlen_k), 1
    else:
        matrix, keys_axis = cut_scores(np.empty(rows * seqlen_k, q.dtype), seqlen_k)
        scores = by_head(matrix, keys_axis, scaled.shape[:3])
        np.matmul(scaled, k.transpose(0, 2, 3, 1), out=scores)
    if few and np.vdot(matrix, matrix) <= SCORE_BOUND**2:
        row_max: Array | float = 0.0
        np.exp(matrix, out=matrix)
        row_sum = sums(matrix, keys_axis)
        matrix /= row_sum
    else:
        if masked:
            hidden = visible.hidden(0, seqlen_q, 0, seqlen_k)
            np.copyto(scores, -np.inf, where=hidden)
        row_max, row_sum, empty = to_weights(matrix, keys_axis)
        if empty is not None:
            return False
    write_sums(scores, v.swapaxes(1, 2), out)
    if lse is not None:
        np.log(row_sum, out=row_sum)
        row_sum += row_max
        lse[...] = row_sum.reshape(lse.shape)
    return True


def attend(job: Pass, scratch: Scratch, block: Block, keys: tuple[int, int]) -> None:
    """Output and lse of the rows of a block, which attend to no other keys than [begin, end)."""
    compute = job.compute
    begin, end = keys
    out = job.out[tuple(block)]
    sinks = job.sinks_of(block)
    lse_of_nothing = -np.inf if sinks is None else sinks
    if begin >= end:
        out[...] = 0
        if job.lse is not None:
            job.lse[tuple(block)][..., None] = lse_of_nothing
        return
    seen = end - begin
    q = job.queries(block, scratch)
    k = job.keys(block, begin, end, scratch)
    v = job.values(block, begin, end, scratch)
    # The rows of all heads that share keys are one matrix.
    rows = q.reshape(*q.shape[:2], -1, q.shape[4])
    flat = scratch.cut("scores", (math.prod(rows.shape[:3]) * seen,), compute)
    matrix, keys_axis = cut_scores(flat, seen)
    scores = by_head(matrix, keys_axis, rows.shape[:3])
    np.matmul(rows, k.swapaxes(-1, -2), out=scores)
    mask(job, block, by_head(matrix, keys_axis, q.shape[:4]), begin, end)
    sink = None if sinks is None else np.broadcast_to(sinks, (*q.shape[:4], 1))
    row_max, row_sum, empty = to_weights(matrix, keys_axis, sink)
    if out.dtype == compute and 1 in q.shape[2:4]:
        np.matmul(scores, v, out=out[:, :, 0] if q.shape[2] == 1 else out[:, :, :, 0])
    else:
        acc = scratch.cut("acc", (*rows.shape[:3], v.shape[3]), compute)
        np.matmul(scores, v, out=acc)
        np.copyto(out, acc.reshape(out.shape), casting="same_kind")
    if empty is None and job.lse is None:
        return
    row_lse = np.log(row_sum)
    row_lse += row_max
    row_lse = row_lse.reshape(*q.shape[:4], 1)
    if empty is not None:
        empty = empty.reshape(row_lse.shape)
        lost = lost_rows(job, block, scratch, empty)
        for array, nothing in ((out, 0), (row_lse, lse_of_nothing)):
            np.copyto(array, nothing, where=empty)
            np.copyto(array, np.nan, where=lost)
    if job.lse is not None:
        job.lse[tuple(block)] = row_lse[..., 0]


def cut_scores(flat: Array, keys: int) -> tuple[Array, int]:
    """A matrix of rows by keys or of keys by rows, and which of its axes are the keys."""
    if keys <= MAX_KEYS_FIRST and keys * keys <= flat.size:
        return flat.reshape(keys, -1), 0
    return flat.reshape(-1, keys), 1


def by_head(matrix: Array, keys_axis: int, rows: tuple[int, ...]) -> Array:
    """A view of scores as (*rows, keys)."""
    by_row = matrix if keys_axis == 1 else matrix.T
    return by_row.reshape(*rows, -1)


def to_weights(
    scores: Array, keys_axis: int, sink: Array | None = None
) -> tuple[Array, Array, Array | None]:
    """Turn a matrix of scores into weights, exp(scores - row maximum) / row sum, in place.

    Returns the row maxima; the row sums; and which rows are empty if any are, with 1 for their sum.
    A sink of each row counts in the maxima and sums.
    """
    # -inf - -inf would be NaN; subtracting the lowest number leaves exp(-inf) = 0.
    least = lowest(scores.dtype.char)
    row_max = np.maximum.reduce(scores, axis=keys_axis, keepdims=True, initial=least)
    scores -= row_max
    np.exp(scores, out=scores)
    row_sum = sums(scores, keys_axis)
    empty = None
    if np.count_nonzero(row_sum) < row_sum.size:
        empty = row_sum == 0
        row_sum[empty] = 1
    if sink is not None:
        scores *= count_sink(row_max, row_sum, sink.reshape(row_max.shape))
    # A row of one key weighs it with 1, as p / p is.
    scores /= row_sum
    return row_max, row_sum, empty


def write_sums(weights: Array, rows: Array, out: Array) -> None:
    """Write the product of matrices (..., m, n) and (..., n, dim)."""
    # 2048 x 1 by 1 x 64 of 8 heads takes BLAS 5.6 ms, to multiply 2.0.
    product = np.multiply if weights.shape[-1] == 1 else np.matmul
    product(weights, rows, out=out)


def sums(scores: Array, keys_axis: int) -> Array:
    """Row sums, by a product with ones: faster than add.reduce."""
    column = ones(scores.shape[keys_axis], scores.dtype.char)
    return scores.dot(column)[:, None] if keys_axis == 1 else column.dot(scores)[None]
