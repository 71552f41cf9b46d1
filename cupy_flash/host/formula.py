"""The plain formula on the CPU: where a step takes up all keys that its rows see.

Weights are divided by their sum before they meet the values, as in the formula, so that no sum of
products overflows where a result does not.

Scores of many rows are stored key by key, those of all rows and heads consecutively: NumPy takes
1.3 ns an element for maxima of rows of 32, 0.1 for maxima of as many columns, and OpenBLAS
multiplies few queries by many keys faster if the keys come first.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host.crew import single_threaded_blas
from cupy_flash.host.passes import Block, Pass, Scratch, count_sink, lost_rows, lowest, mask, ones
from cupy_flash.host.sequence_places import PagedRows
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]

# Scores below which, and elements of queries up to which, a call is computed in one go, in new
# arrays. A second thread has no part in fewer scores.
MAX_SCORES_OF_CALL = 1 << 17
MAX_ELEMENTS_OF_QUERIES = 1 << 19

# Multiplications of a matrix product up to which OpenBLAS takes one thread in any case.
MAX_PRODUCT_OF_ONE_THREAD = 1 << 18

# Scores that are looked at, and the magnitude up to which no maximum is subtracted from them: exp
# stays within [1e-13, 1e13].
MAX_SCORES_TO_LOOK_AT = 1024
SCORE_BOUND = 30.0

# Rows of scores from which on scores are stored key by key, unless there are fewer keys; and keys
# up to which they are if BLAS multiplies fewer rows than `MIN_ROWS_OF_PRODUCT` at a time. One
# thread, us, row by row and key by key, 8 heads of 64: 32 x 512 1017, 880; 8 x 512 476, 374;
# 128 x 128 815, 747; 2 x 512 95, 112; 64 x 1 x 512 1125, 1277.
MIN_ROWS_KEY_BY_KEY = 64
MIN_ROWS_OF_PRODUCT = 4
MAX_KEYS_OF_FEW_ROWS = 32


# Keys of a part of a product, query rows up to which a product is divided, and bytes of all keys
# from which on. 2048 keys, 8 heads of 64: scores of one row 467 us, divided 235; of 8 885, 430.
KEYS_OF_PART = 128
MAX_ROWS_TO_DIVIDE_KEYS = 32
MIN_BYTES_TO_DIVIDE_KEYS = 2 << 20


class SmallCall(NamedTuple):
    """How a small call is computed, as far as the shapes of its arrays decide.

    Attributes
    ----------
    shape
        Batch, KV heads, and query rows of a KV head.
    is_grouped
        Whether these rows are of several query heads, at one position each.
    visible
        The mask; None if each row attends to every key.
    is_tiny
        Whether the magnitude of the scores is checked first.
    divides
        Whether products are divided, see `divides_keys`.
    is_of_one_thread
        Whether BLAS computes the products in one thread in any case.
    """

    shape: tuple[int, int, int]
    is_grouped: bool
    visible: Mask | None
    is_tiny: bool
    divides: bool
    is_of_one_thread: bool


# Finding out takes as long as two calls of NumPy.
@functools.lru_cache(1024)
def small_call(
    q_shape: tuple[int, int, int, int],
    k_shape: tuple[int, int, int, int],
    head_dim_v: int,
    causal: bool,
    q_offset: int,
    tile: Tile,
) -> SmallCall | None:
    """Return how a call is computed in one step; None if it is not for `forward_small`."""
    batch, seqlen_q, heads, head_dim = q_shape
    _, seqlen_k, heads_kv, _ = k_shape
    rows = batch * heads * seqlen_q
    visible = Mask(seqlen_q, seqlen_k, causal, q_offset)
    if (
        rows * seqlen_k >= MAX_SCORES_OF_CALL
        or rows * max(head_dim, head_dim_v) > MAX_ELEMENTS_OF_QUERIES
        or seqlen_q > tile.Br
        or not 0 < seqlen_k <= tile.Bc
        or (heads != heads_kv and seqlen_q > 1)
        or visible.end(0) == 0
    ):
        return None
    is_masked = not visible.sees_all(0, seqlen_q)
    rows_of_head = seqlen_q * (heads // heads_kv)
    return SmallCall(
        shape=(batch, heads_kv, rows_of_head),
        is_grouped=heads != heads_kv,
        visible=visible if is_masked else None,
        is_tiny=rows * seqlen_k <= MAX_SCORES_TO_LOOK_AT and not is_masked,
        divides=divides_keys(
            rows_of_head, seqlen_k, heads_kv, 4 * heads_kv * max(head_dim, head_dim_v)
        ),
        is_of_one_thread=rows_of_head * seqlen_k * max(head_dim, head_dim_v)
        <= MAX_PRODUCT_OF_ONE_THREAD,
    )


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
    if not isinstance(k, np.ndarray) or not isinstance(v, np.ndarray):
        return False
    small = small_call_of(q, k, v, causal, q_offset, tile)
    return small is not None and forward_at_once(
        q, k, v, out, lse, small, q.dtype.type(softmax_scale)
    )


def small_call_of(
    q: Array, k: Array, v: Array, causal: bool, q_offset: int, tile: Tile
) -> SmallCall | None:
    """Return how a call is computed in one step; None if it is not for `forward_at_once`."""
    if q.dtype.char not in "fd":
        return None
    return small_call(q.shape, k.shape, v.shape[3], causal, q_offset, tile)


def forward_at_once(
    q: Array, k: Array, v: Array, out: Array, lse: Array | None, small: SmallCall, scale: Any
) -> bool:
    """Output and lse of a small call; False, and no output, if a row has no weight.

    `scale` is the factor on the scores, a number of the queries' dtype.
    """
    if small.is_of_one_thread:
        return _attend_in_one_step(q, k, v, out, lse, small, scale)
    with single_threaded_blas:
        return _attend_in_one_step(q, k, v, out, lse, small, scale)


def _attend_in_one_step(
    q: Array, k: Array, v: Array, out: Array, lse: Array | None, small: SmallCall, scale: Any
) -> bool:
    shape, is_grouped, visible, is_tiny, divides, _ = small
    seqlen_k = k.shape[1]
    rows = shape[0] * shape[1] * shape[2]
    scaled = q * scale
    if is_grouped:
        # The heads of a group are the rows of one matrix.
        scaled, out = (x[:, 0].reshape(*shape, x.shape[3]) for x in (scaled, out))
    else:
        scaled, out = scaled.swapaxes(1, 2), out.swapaxes(1, 2)
    # NumPy takes 1 us to find so few scores to be small, 5 for maxima and to subtract them. Not
    # where some are hidden from some rows: of those a row then bears the trace.
    if is_tiny:
        # NumPy may choose another order for strided operands, and a reshape would be a copy.
        scores = np.matmul(scaled, k.transpose(0, 2, 3, 1), order="C")
        matrix, keys_axis = scores.reshape(rows, seqlen_k), 1
    else:
        matrix, keys_axis = cut_scores(np.empty(rows * seqlen_k, q.dtype), seqlen_k, shape[2])
        scores = by_head(matrix, keys_axis, shape)
        write_scores(scaled, k.swapaxes(1, 2), scores, divides)
    if is_tiny and np.vdot(matrix, matrix) <= SCORE_BOUND**2:
        row_max: Array | float = 0.0
        np.exp(matrix, out=matrix)
        row_sum = sums(matrix, keys_axis)
        matrix /= row_sum
    else:
        if visible is not None:
            # All rows attend to the keys before. 8 x 128, 8 heads: 9 us, with all keys 20.
            first = visible.end(0)
            hidden = visible.hidden(0, visible.seqlen_q, first, seqlen_k)
            np.copyto(scores[..., first:], -np.inf, where=hidden)
        row_max, row_sum, empty = to_weights(matrix, keys_axis)
        if empty is not None:
            return False
    write_sums(scores, v.swapaxes(1, 2), out, divides)
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
    matrix, keys_axis = cut_scores(flat, seen, rows.shape[2])
    scores = by_head(matrix, keys_axis, rows.shape[:3])
    divides = divides_keys(rows.shape[2], seen, k.shape[1], k.strides[2])
    write_scores(rows, k, scores, divides)
    mask(job, block, by_head(matrix, keys_axis, q.shape[:4]), begin, end)
    sink = None if sinks is None else np.broadcast_to(sinks, (*q.shape[:4], 1))
    row_max, row_sum, empty = to_weights(matrix, keys_axis, sink)
    if out.dtype == compute and 1 in q.shape[2:4]:
        by_matrix = out[:, :, 0] if q.shape[2] == 1 else out[:, :, :, 0]
        write_sums(scores, v, by_matrix, divides)
    else:
        acc = scratch.cut("acc", (*rows.shape[:3], v.shape[3]), compute)
        write_sums(scores, v, acc, divides)
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


def cut_scores(flat: Array, keys: int, rows_of_product: int) -> tuple[Array, int]:
    """A matrix of rows by keys or of keys by rows, and which of its axes are the keys.

    `rows_of_product` is the number of query rows of a KV head.
    """
    if is_key_by_key(flat.size // keys, keys, rows_of_product):
        return flat.reshape(keys, -1), 0
    return flat.reshape(-1, keys), 1


def is_key_by_key(rows: int, keys: int, rows_of_product: int) -> bool:
    """Return whether scores are better stored key by key."""
    return rows >= min(keys, MIN_ROWS_KEY_BY_KEY) and (
        rows_of_product >= MIN_ROWS_OF_PRODUCT or keys <= MAX_KEYS_OF_FEW_ROWS
    )


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


def write_scores(queries: Array, keys: Array, out: Array, divides: bool = False) -> None:
    """Write the products of queries (..., m, dim) with keys (..., n, dim): (..., m, n)."""
    if not divides:
        np.matmul(queries, keys.swapaxes(-1, -2), out=out)
        return
    for some in parts_of_keys(keys.shape[-2]):
        np.matmul(queries, keys[..., some, :].swapaxes(-1, -2), out=out[..., some])


def write_sums(weights: Array, rows: Array, out: Array, divides: bool = False) -> None:
    """Write the product of matrices (..., m, n) and (..., n, dim)."""
    if not divides:
        # 2048 x 1 by 1 x 64 of 8 heads takes BLAS 5.6 ms, to multiply 2.0.
        product = np.multiply if weights.shape[-1] == 1 else np.matmul
        product(weights, rows, out=out)
        return
    first, *others = parts_of_keys(rows.shape[-2])
    np.matmul(weights[..., first], rows[..., first, :], out=out)
    for some in others:
        out += np.matmul(weights[..., some], rows[..., some, :])


def write_sums_of_keys(weights: Array, rows: Array, out: Array, divides: bool = False) -> None:
    """Write the sum over rows (..., m, dim), weighted (..., m, n), of each key: (..., n, dim)."""
    if not divides:
        write_sums(weights.swapaxes(-1, -2), rows, out)
        return
    for some in parts_of_keys(out.shape[-2]):
        write_sums(weights[..., some].swapaxes(-1, -2), rows, out[..., some, :])


def parts_of_keys(count: int) -> list[slice]:
    """Return the ranges of keys that the parts of a divided product take one after another."""
    return [slice(first, first + KEYS_OF_PART) for first in range(0, count, KEYS_OF_PART)]


def divides_keys(seqlen_q: int, seqlen_k: int, heads: int, bytes_of_key: int) -> bool:
    """Return whether products with the keys of all heads are better divided.

    The keys of a head lie between those of other heads. BLAS reads or writes all keys of a head
    before those of the next head, which takes twice the time if the keys of all heads do not fit
    the cache.

    Parameters
    ----------
    seqlen_q
        Number of query rows of a KV head.
    seqlen_k
        Number of keys.
    heads
        Number of heads that are multiplied in one call.
    bytes_of_key
        Bytes of a key of all heads.
    """
    return (
        seqlen_q <= MAX_ROWS_TO_DIVIDE_KEYS
        and heads > 1
        and seqlen_k * bytes_of_key >= MIN_BYTES_TO_DIVIDE_KEYS
    )


def sums(scores: Array, keys_axis: int) -> Array:
    """Row sums, by a product with ones: faster than add.reduce."""
    column = ones(scores.shape[keys_axis], scores.dtype.char)
    return scores.dot(column)[:, None] if keys_axis == 1 else column.dot(scores)[None]
