"""Untiled backward pass on the CPU, for calls with few scores per head.

A step computes all query-key pairs of some heads of some sequences. A small call is one step; the
steps of other calls are distributed over threads. Each gradient is written once, and nothing is
accumulated over tiles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.cpu.backward.tiled import (
    least_weight_of_one_key,
    row_products,
    sure_weight_of_one_key,
)
from cupy_flash.cpu.forward_pass import Scratch, even_part_size, slices
from cupy_flash.cpu.thread_pool import Stop, cpus, run_in_parallel, single_threaded_blas
from cupy_flash.cpu.untiled import (
    MAX_PRODUCT_OF_ONE_THREAD,
    divides_keys,
    write_scores,
    write_sums,
    write_sums_of_keys,
)
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]

# Maximum number of scores of a step, and hence of a head. The arrays of scores and their gradients
# then stay in the L2 cache.
MAX_SCORES_OF_STEP = 1 << 17

# Minimum numbers of keys and query rows for which weights are stored key by key: 1.11 instead of
# 1.20 ms per head for 32 queries and 2048 keys, head_dim 64.
MIN_KEYS_KEY_BY_KEY = 512
MIN_ROWS_KEY_BY_KEY = 8

# Numbers of query rows, and of scores per head, for which scores are computed from the keys and a
# transposed copy of the queries. OpenBLAS then takes half the time if there are at least twice as
# many keys. 32 queries, 128 keys, 8 heads of 64: 263 us, without copies 329 us.
ROWS_TO_TRANSPOSE = range(8, 33)
SCORES_TO_TRANSPOSE = range(1025, (1 << 14) + 1)

# Minimum number of scores per thread: about 1.2 ms of work. Waking a thread takes 0.1 ms.
MIN_SCORES_PER_WORKER = 1 << 17

_ROWS = frozenset(ROWS)
_NAMES = {"f": "float32", "d": "float64"}


class SmallGradients(NamedTuple):
    """Choices for the untiled backward pass, as far as the shapes of a call determine them.

    Attributes
    ----------
    visible
        Mask; None if each row attends to every key.
    rows_of_one_key
        Rows that attend to a single key; None if there is no such row.
    is_of_one_thread
        Whether BLAS uses a single thread for these products even without a limit.
    is_key_by_key
        Whether scores are stored key by key.
    transposes
        Whether queries and the gradient of the output are transposed before they are multiplied.
    divides
        Whether products are divided, see `cupy_flash.cpu.untiled.divides_keys`.
    sequences, heads
        Number of sequences and heads of a step.
    steps
        Number of steps.
    workers
        Maximum number of threads worth using.
    """

    visible: Mask | None
    rows_of_one_key: slice | None
    is_of_one_thread: bool
    is_key_by_key: bool
    transposes: bool
    divides: bool
    sequences: int
    heads: int
    steps: int
    workers: int


# Cached, because the computation takes as long as three NumPy calls.
@functools.lru_cache(1024)
def small_gradients(
    q_shape: tuple[int, int, int, int],
    k_shape: tuple[int, int, int, int],
    head_dim_v: int,
    causal: bool,
    q_offset: int,
    tile: Tile,
) -> SmallGradients | None:
    """Return the choices for a call; None if the call does not qualify for `backward_small`."""
    batch, seqlen_q, heads, head_dim = q_shape
    _, seqlen_k, heads_kv, _ = k_shape
    visible = Mask(seqlen_q, seqlen_k, causal, q_offset)
    scores_per_head = seqlen_q * seqlen_k
    if (
        not 0 < scores_per_head <= MAX_SCORES_OF_STEP
        or heads != heads_kv
        or seqlen_q > tile.Br
        or seqlen_k > tile.Bc
        # A row that attends to no key must not affect gradients, whatever its query holds.
        or visible.end(0) == 0
    ):
        return None
    rows_of_one_key = None
    if visible.end(0) == 1:
        # If there is one key, all rows attend to it alone. Otherwise only the first row attends to
        # a single key.
        rows_of_one_key = slice(None) if seqlen_k == 1 else slice(1)
    heads_per_step = max(1, MAX_SCORES_OF_STEP // scores_per_head)
    heads_of_step = even_part_size(heads, heads_per_step)
    sequences_of_step = even_part_size(batch, heads_per_step // heads)
    steps = -(-heads // heads_of_step) * -(-batch // sequences_of_step)
    return SmallGradients(
        visible=None if visible.all_visible(0, seqlen_q) else visible,
        rows_of_one_key=rows_of_one_key,
        is_of_one_thread=scores_per_head * max(head_dim, head_dim_v) <= MAX_PRODUCT_OF_ONE_THREAD,
        is_key_by_key=seqlen_k >= MIN_KEYS_KEY_BY_KEY and seqlen_q >= MIN_ROWS_KEY_BY_KEY,
        transposes=seqlen_q in ROWS_TO_TRANSPOSE
        and scores_per_head in SCORES_TO_TRANSPOSE
        and seqlen_k >= 2 * seqlen_q,
        # The keys of only some heads fit the cache, and dividing their products is slower: 5.6
        # instead of 4.0 ms for two of 8 heads (32 queries, 2048 keys, head_dim 64).
        divides=heads_of_step == heads
        and divides_keys(seqlen_q, seqlen_k, heads, 4 * heads * max(head_dim, head_dim_v)),
        sequences=sequences_of_step,
        heads=heads_of_step,
        steps=steps,
        workers=max(1, min(steps, batch * heads * scores_per_head // MIN_SCORES_PER_WORKER)),
    )


def backward_small(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dlse: Array | None,
    results: Mapping[str, Array],
    causal: bool,
    q_offset: int,
    softmax_scale: float,
    tile: Tile,
    threads: int | None,
) -> bool:
    """Write the gradients of a call with few scores per head, if its values are finite.

    Takes the arguments of `gradients.backward`, in order. Returns False if that function must
    compute the call. Only that function keeps NaN and inf from rows that do not attend to them, but
    it takes six times as long (one thread, 8 queries and 8 keys, 8 heads of 64).
    """
    dtype = q.dtype
    if dtype.char not in "fd" or "q" not in results or not results.keys() <= _ROWS:
        return False
    for result in results.values():
        if result.dtype != dtype:
            return False
    small = small_gradients(q.shape, k.shape, v.shape[3], causal, q_offset, tile)
    if small is None:
        return False
    scale = dtype.type(softmax_scale)
    return backward_by_formula(q, k, v, out, dout, lse, dlse, results, small, scale, threads)


def backward_by_formula(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dlse: Array | None,
    results: Mapping[str, Array],
    small: SmallGradients,
    scale: Any,
    threads: int | None = None,
) -> bool:
    """Compute a call like `backward_small`, with choices `small` that are already known.

    `scale` is the factor on the scores, as a scalar of the queries' dtype.
    """
    if small.steps == 1:
        arguments = q, k, v, out, dout, lse, dlse, results, small, scale, None
        if small.is_of_one_thread:
            return _differentiate(*arguments)
        with single_threaded_blas:
            return _differentiate(*arguments)
    stop = Stop()
    left: list[tuple[slice, slice]] = []

    def work(steps: Iterator[tuple[slice, slice]]) -> None:
        with Scratch.borrowed() as scratch:
            for sequences, heads in steps:
                rows, lse_rows = (sequences, slice(None), heads), (sequences, heads)
                done = _differentiate(
                    q[rows],
                    k[rows],
                    v[rows],
                    out[rows],
                    dout[rows],
                    lse[lse_rows],
                    None if dlse is None else dlse[lse_rows],
                    {name: result[rows] for name, result in results.items()},
                    small,
                    scale,
                    scratch,
                )
                if not done:
                    left.append(lse_rows)
                    stop.requested = True
                    return

    steps = product(slices(q.shape[0], small.sequences), slices(q.shape[2], small.heads))
    with single_threaded_blas:
        run_in_parallel(min(small.workers, threads or cpus()), steps, work, stop)
    return not left


def _differentiate(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dlse: Array | None,
    results: Mapping[str, Array],
    small: SmallGradients,
    scale: Any,
    scratch: Scratch | None,
) -> bool:
    """Write the gradients; return False if a NaN or inf might affect masked pairs."""
    visible, divides = small.visible, small.divides
    delta = row_products(dout, out).swapaxes(1, 2)
    if dlse is not None:
        delta -= dlse
    scaled = q * scale
    # An infinite query may make all weights of its row 0, so ds alone would not reveal it.
    if not math.isfinite(np.vdot(scaled, scaled)):
        return False
    q, k, v, dout = scaled.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), dout.swapaxes(1, 2)
    q_operand, dout_operand = (_transposed(q), _transposed(dout)) if small.transposes else (q, dout)
    if small.is_key_by_key:
        lse_of_scores = lse
    else:
        lse_of_scores, delta = lse[..., None], delta[..., None]
    stored_p, p = _products(q_operand, k, small, scratch, "p")
    stored_p -= lse_of_scores
    np.exp(stored_p, out=stored_p)
    if visible is not None:
        # All rows attend to the keys before `first`.
        first = visible.end(0)
        hidden = visible.masked(0, visible.seqlen_q, first, visible.seqlen_k)
        np.copyto(p[..., first:], 0, where=hidden)
    stored_ds, ds = _products(dout_operand, v, small, scratch, "ds")
    stored_ds -= delta
    stored_ds *= stored_p
    # Any NaN or inf in v, dout, lse, or a key that a row attends to makes ds NaN or inf as well.
    if not math.isfinite(np.vdot(stored_ds, stored_ds)):
        return False
    rows = small.rows_of_one_key
    if rows is not None and dlse is None:
        weights = p[:, :, rows, 0]
        # A dictionary, as `dtype.name` takes 5 us.
        dtype, columns = _NAMES[p.dtype.char], max(q.shape[3], v.shape[3])
        # Usually all of these weights are 1, and computing a threshold for each row takes 12 us.
        if weights.min() > sure_weight_of_one_key(dtype, columns):
            ds[:, :, rows] = 0
        else:
            least = least_weight_of_one_key(dtype, columns, lse[:, :, rows])
            ds[:, :, rows, 0][weights > least] = 0
    dq = results["q"]
    write_sums(ds, k, dq.swapaxes(1, 2), divides)
    # NaN and inf in a masked key appear only in dq.
    if visible is not None and not math.isfinite(np.vdot(dq, dq)):
        return False
    dq *= scale
    if "k" in results:
        write_sums_of_keys(ds, q, results["k"].swapaxes(1, 2), divides)
    if "v" in results:
        write_sums_of_keys(p, dout, results["v"].swapaxes(1, 2), divides)
    return True


def _transposed(x: Array) -> Array:
    """Return a copy of the matrices x (..., rows, dim) whose memory order is (..., dim, rows)."""
    return np.array(x.swapaxes(2, 3), order="C").swapaxes(2, 3)


def _products(
    rows: Array, keys: Array, small: SmallGradients, scratch: Scratch | None, name: str
) -> tuple[Array, Array]:
    """Return the products of rows and keys as stored in memory, and as a view (..., rows, keys)."""
    if scratch is None and not small.is_key_by_key and not small.divides:
        product: Array = np.matmul(rows, keys.swapaxes(2, 3))
        return product, product
    shape: tuple[int, ...] = *rows.shape[:3], keys.shape[2]
    if small.is_key_by_key:
        shape = shape[-1:] + shape[:-1]
    stored = (
        np.empty(shape, rows.dtype) if scratch is None else scratch.array(name, shape, rows.dtype)
    )
    product = stored.transpose(1, 2, 3, 0) if small.is_key_by_key else stored
    write_scores(rows, keys, product, small.divides)
    return stored, product
