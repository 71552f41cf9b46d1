"""Plain softmax attention on the CPU, for query tiles whose keys all fit into one KV tile.

The softmax weights are normalized before the product with the values. So this product overflows
only if the result does.

The scores of many rows are stored key by key: the scores of one key, of all rows and heads, are
consecutive. NumPy computes maxima over an axis of length 32 faster this way (0.1 instead of 1.3 ns
per element), and OpenBLAS multiplies few queries by many keys faster with the keys as rows.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.sequences import PagedRows
from cupy_flash.cpu.forward_pass import (
    Block,
    Pass,
    Scratch,
    apply_mask,
    find_nan_rows,
    include_sink,
    lowest,
    ones,
)
from cupy_flash.cpu.row_results import KeySums
from cupy_flash.cpu.thread_pool import single_threaded_blas
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]

# Upper limits of a small call, which one step computes in new arrays: number of scores (with fewer,
# a second thread would not pay), and number of elements of all queries.
MAX_SCORES_OF_CALL = 1 << 17
MAX_ELEMENTS_OF_QUERIES = 1 << 19

# Multiplications in the largest matrix product for which OpenBLAS always uses a single thread.
MAX_PRODUCT_OF_ONE_THREAD = 1 << 18

# Number of scores up to which a call checks their magnitude, and magnitude up to which it subtracts
# no row maxima: exp of such scores stays within [1e-13, 1e13].
MAX_SCORES_TO_LOOK_AT = 1024
SCORE_BOUND = 30.0

# Thresholds of `is_key_by_key`. 8 queries, 512 keys, 8 heads of 64, one thread: 374 us with scores
# stored key by key, 476 us row by row.
MIN_ROWS_KEY_BY_KEY = 64
MIN_ROWS_OF_PRODUCT = 4
MAX_KEYS_OF_FEW_ROWS = 32

# Number of keys in each part of a divided product, and thresholds of `divides_keys`. Scores of one
# query row with 2048 keys, 8 heads of 64: 235 us, undivided 467 us.
KEYS_OF_PART = 128
MAX_ROWS_TO_DIVIDE_KEYS = 32
MIN_BYTES_TO_DIVIDE_KEYS = 2 << 20


class SmallCall(NamedTuple):
    """Choices for the computation of a small call, as far as its shapes determine them.

    Attributes
    ----------
    shape
        Batch size, number of KV heads, and number of query rows per KV head.
    is_grouped
        Whether a KV head serves several query heads, each with one query.
    visible
        Mask; None if each row attends to every key.
    is_tiny
        Whether the magnitude of the scores is checked first.
    divides
        Whether matrix products are divided by keys, see `divides_keys`.
    is_of_one_thread
        Whether BLAS uses a single thread for these products even without a limit.
    """

    shape: tuple[int, int, int]
    is_grouped: bool
    visible: Mask | None
    is_tiny: bool
    divides: bool
    is_of_one_thread: bool


# Cached, because the computation takes as long as two NumPy calls.
@functools.lru_cache(1024)
def small_call(
    q_shape: tuple[int, int, int, int],
    k_shape: tuple[int, int, int, int],
    head_dim_v: int,
    causal: bool,
    q_offset: int,
    tile: Tile,
) -> SmallCall | None:
    """Return the `SmallCall` of a call; None if the call does not qualify for `forward_small`."""
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
    is_masked = not visible.all_visible(0, seqlen_q)
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
    """Compute a small call in one step, without a `Pass`, tiles, scratch buffers and threads.

    Takes the arguments of `cpu.forward`. Returns False, without output, if the call does not
    qualify. 8 queries and keys with 8 heads of 64 take 24 us; making a `Pass` alone takes 8 us.
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
    """Return the `SmallCall` of a call; None if the call does not qualify for `forward_at_once`."""
    if q.dtype.char not in "fd":
        return None
    return small_call(q.shape, k.shape, v.shape[3], causal, q_offset, tile)


def forward_at_once(
    q: Array, k: Array, v: Array, out: Array, lse: Array | None, small: SmallCall, scale: Any
) -> bool:
    """Write output and lse of a small call; return False, without output, if a row sum is 0.

    `scale` is the factor on the scores, as a scalar of the queries' dtype.
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
        # The query heads of a KV head become the rows of one matrix.
        scaled, out = (x[:, 0].reshape(*shape, x.shape[3]) for x in (scaled, out))
    else:
        scaled, out = scaled.swapaxes(1, 2), out.swapaxes(1, 2)
    # Checking the magnitude of so few scores takes 1 us; subtracting row maxima takes 5 us. Masked
    # calls are never tiny, because the check would let masked scores affect the result.
    if is_tiny:
        # Without order="C" NumPy may choose another order, and the reshape would copy the scores.
        scores = np.matmul(scaled, k.transpose(0, 2, 3, 1), order="C")
        matrix, keys_axis = scores.reshape(rows, seqlen_k), 1
    else:
        matrix, keys_axis = score_matrix(np.empty(rows * seqlen_k, q.dtype), seqlen_k, shape[2])
        scores = by_head(matrix, keys_axis, shape)
        write_scores(scaled, k.swapaxes(1, 2), scores, divides)
    if is_tiny and np.vdot(matrix, matrix) <= SCORE_BOUND**2:
        row_max: Array | float = 0.0
        np.exp(matrix, out=matrix)
        row_sum = sums(matrix, keys_axis)
        matrix /= row_sum
    else:
        if visible is not None:
            # All rows attend to the keys before `first`, so masking them is skipped: 9 instead of
            # 20 us (8 queries, 128 keys, 8 heads).
            first = visible.end(0)
            hidden = visible.masked(0, visible.seqlen_q, first, seqlen_k)
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
    """Write the results of a query tile that attends only to keys [begin, end), see `keys`."""
    compute = job.compute
    begin, end = keys
    out = job.out[tuple(block)]
    sinks = job.sinks_of(block)
    lse_of_nothing = -np.inf if sinks is None else sinks
    results = job.rows.each(lambda array: array[tuple(block)])
    if begin >= end:
        out[...] = 0
        results.each(lambda array: array[..., None]).write_empty(lse_of_nothing)
        return
    seen = end - begin
    q = job.queries(block, scratch)
    k = job.keys(block, begin, end, scratch)
    v = job.values(block, begin, end, scratch)
    # The rows of all query heads that use the same KV head form one matrix.
    rows = q.reshape(*q.shape[:2], -1, q.shape[4])
    flat = scratch.array("scores", (math.prod(rows.shape[:3]) * seen,), compute)
    matrix, keys_axis = score_matrix(flat, seen, rows.shape[2])
    scores = by_head(matrix, keys_axis, rows.shape[:3])
    divides = divides_keys(rows.shape[2], seen, k.shape[1], k.strides[2])
    write_scores(rows, k, scores, divides)
    apply_mask(job, block, by_head(matrix, keys_axis, q.shape[:4]), begin, end)
    key_sums = None
    if results.has_statistics:
        key_sums = KeySums.of(matrix, keys_axis, entropy=results.entropy is not None)
    sink = None if sinks is None else np.broadcast_to(sinks, (*q.shape[:4], 1))
    row_max, row_sum, empty = to_weights(matrix, keys_axis, sink, job.kept_share)
    kept = job.kept_by_dropout(block, begin, end)
    if kept is not None:
        weights = by_head(matrix, keys_axis, q.shape[:4])
        weights *= kept
    if out.dtype == compute and 1 in q.shape[2:4]:
        by_matrix = out[:, :, 0] if q.shape[2] == 1 else out[:, :, :, 0]
        write_sums(scores, v, by_matrix, divides)
    else:
        acc = scratch.array("acc", (*rows.shape[:3], v.shape[3]), compute)
        write_sums(scores, v, acc, divides)
        np.copyto(out, acc.reshape(out.shape), casting="same_kind")
    if empty is None and all(array is None for array in results):
        return
    row_lse = np.log(row_sum)
    row_lse += row_max
    row_lse = row_lse.reshape(*q.shape[:4], 1)
    if empty is not None:
        empty = empty.reshape(row_lse.shape)
        nan_rows = find_nan_rows(job, block, scratch, empty)
        for array, nothing in ((out, 0), (row_lse, lse_of_nothing)):
            np.copyto(array, nothing, where=empty)
            np.copyto(array, np.nan, where=nan_rows)
    if results.lse is not None:
        results.lse[...] = row_lse[..., 0]
    if key_sums is not None:
        key_sums.write(results, row_lse, empty, has_sinks=sinks is not None)


def score_matrix(flat: Array, keys: int, rows_of_product: int) -> tuple[Array, int]:
    """Return a buffer as a matrix, (rows, keys) or (keys, rows), and the axis of its keys.

    `rows_of_product` is the number of query rows per KV head.
    """
    if is_key_by_key(flat.size // keys, keys, rows_of_product):
        return flat.reshape(keys, -1), 0
    return flat.reshape(-1, keys), 1


def is_key_by_key(rows: int, keys: int, rows_of_product: int) -> bool:
    """Return whether scores are better stored key by key, as (keys, rows)."""
    return rows >= min(keys, MIN_ROWS_KEY_BY_KEY) and (
        rows_of_product >= MIN_ROWS_OF_PRODUCT or keys <= MAX_KEYS_OF_FEW_ROWS
    )


def by_head(matrix: Array, keys_axis: int, rows: tuple[int, ...]) -> Array:
    """Return a view of a matrix of scores as (*rows, keys)."""
    by_row = matrix if keys_axis == 1 else matrix.T
    return by_row.reshape(*rows, -1)


def to_weights(
    scores: Array, keys_axis: int, sink: Array | None = None, kept_share: float | None = None
) -> tuple[Array, Array, Array | None]:
    """Replace a matrix of scores by softmax weights, exp(scores - row maximum) / row sum.

    With dropout, the weights are also divided by `kept_share`, the probability of keeping a weight.

    Returns the row maxima, the row sums, and which rows have no score above -inf, or None if there
    is no such row. The row sum of such a row is returned as 1. `sink`, one score for each row, is
    included in the maxima and sums.
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
        scores *= include_sink(row_max, row_sum, sink.reshape(row_max.shape))
    # The weights are divided, not multiplied by a reciprocal: the weight of a row's only key is
    # then exactly 1.
    scores /= row_sum if kept_share is None else row_sum * scores.dtype.type(kept_share)
    return row_max, row_sum, empty


def write_scores(queries: Array, keys: Array, out: Array, divides: bool = False) -> None:
    """Write the scores of queries (..., m, dim) and keys (..., n, dim) to out (..., m, n)."""
    if not divides:
        np.matmul(queries, keys.swapaxes(-1, -2), out=out)
        return
    for some in parts_of_keys(keys.shape[-2]):
        np.matmul(queries, keys[..., some, :].swapaxes(-1, -2), out=out[..., some])


def write_sums(weights: Array, rows: Array, out: Array, divides: bool = False) -> None:
    """Write the matrix product of weights (..., m, n) and rows (..., n, dim) to `out`."""
    if not divides:
        # If n is 1, np.multiply is faster: 2.0 instead of 5.6 ms for m = 2048 and 8 heads of 64.
        product = np.multiply if weights.shape[-1] == 1 else np.matmul
        product(weights, rows, out=out)
        return
    first, *others = parts_of_keys(rows.shape[-2])
    np.matmul(weights[..., first], rows[..., first, :], out=out)
    for some in others:
        out += np.matmul(weights[..., some], rows[..., some, :])


def write_sums_of_keys(weights: Array, rows: Array, out: Array, divides: bool = False) -> None:
    """Write the product of transposed weights (..., m, n) and rows (..., m, dim) to `out`."""
    if not divides:
        write_sums(weights.swapaxes(-1, -2), rows, out)
        return
    for some in parts_of_keys(out.shape[-2]):
        write_sums(weights[..., some].swapaxes(-1, -2), rows, out[..., some, :])


def parts_of_keys(count: int) -> list[slice]:
    """Return the ranges of keys that the parts of a divided product cover."""
    return [slice(first, first + KEYS_OF_PART) for first in range(0, count, KEYS_OF_PART)]


def divides_keys(seqlen_q: int, seqlen_k: int, heads: int, bytes_of_key: int) -> bool:
    """Return whether a matrix product with the keys is faster if divided into ranges of keys.

    In memory, the heads of a key are next to each other, but BLAS reads or writes all keys of a
    head before the next head. That takes twice the time if the keys of all heads exceed the cache.

    Parameters
    ----------
    seqlen_q
        Number of query rows per KV head.
    seqlen_k
        Number of keys.
    heads
        Number of KV heads that one call multiplies.
    bytes_of_key
        Number of bytes of one key in all heads.
    """
    return (
        seqlen_q <= MAX_ROWS_TO_DIVIDE_KEYS
        and heads > 1
        and seqlen_k * bytes_of_key >= MIN_BYTES_TO_DIVIDE_KEYS
    )


def sums(scores: Array, keys_axis: int) -> Array:
    """Return the row sums of scores, by a product with ones, which is faster than add.reduce."""
    column = ones(scores.shape[keys_axis], scores.dtype.char)
    return scores.dot(column)[:, None] if keys_axis == 1 else column.dot(scores)[None]
