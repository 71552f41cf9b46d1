"""Gradients on the CPU by the plain formula, where the scores of a head are few.

A step computes all pairs of some heads of some sequences. A small call is one step, and the steps
of other calls are distributed over threads. Each gradient is written once, as the formula gives it,
and nothing is accumulated over tiles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host.crew import Stop, cpus, share_out, single_threaded_blas
from cupy_flash.host.formula import (
    MAX_PRODUCT_OF_ONE_THREAD,
    divides_keys,
    write_scores,
    write_sums,
    write_sums_of_keys,
)
from cupy_flash.host.gradient_tiles import (
    least_weight_of_one_key,
    row_products,
    sure_weight_of_one_key,
)
from cupy_flash.host.passes import Scratch, even_share, slices
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]

# Scores of a step, and so of a head, up to which gradients are computed by the formula. The arrays
# of scores and their gradients then stay in the L2 cache.
MAX_SCORES_OF_STEP = 1 << 17

# Keys from which on weights are stored key by key, and rows for which they are. 32 x 2048, 8 heads
# of 64: 1.11 ms a head, row by row 1.20; 128 x 512 0.78, 0.80; 8 x 128, all heads, 0.101, 0.104.
MIN_KEYS_KEY_BY_KEY = 512
MIN_ROWS_KEY_BY_KEY = 8

# Rows and scores of a head for which scores are the product of keys and transposed copies of the
# queries, which OpenBLAS computes in half of the time if there are at least twice as many keys.
# 32 x 128, 8 heads of 64: 263 us, without copies 329; 8 x 32 50, 42; 64 x 256 1250, 1200.
ROWS_TO_TRANSPOSE = range(8, 33)
SCORES_TO_TRANSPOSE = range(1025, (1 << 14) + 1)

# Scores that make a worker worthwhile: they take one 1.2 ms, waking it 0.05 to 0.1.
MIN_SCORES_PER_WORKER = 1 << 17

_ROWS = frozenset(ROWS)
_NAMES = {"f": "float32", "d": "float64"}


class SmallGradients(NamedTuple):
    """How a call is computed by the formula, as far as the shapes of its arrays decide.

    Attributes
    ----------
    visible
        The mask; None if each row attends to every key.
    rows_of_one_key
        Rows that attend to a single key; None if there is no such row.
    is_of_one_thread
        Whether BLAS computes the products in one thread in any case.
    is_key_by_key
        Whether scores are stored key by key.
    transposes
        Whether queries and the gradient of the output are transposed before they are multiplied.
    divides
        Whether products are divided, see `cupy_flash.host.formula.divides_keys`.
    sequences, heads
        Number of sequences and heads of a step.
    steps
        Number of steps.
    workers
        Number of threads that are worthwhile.
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


# Finding out takes as long as three calls of NumPy.
@functools.lru_cache(1024)
def small_gradients(
    q_shape: tuple[int, int, int, int],
    k_shape: tuple[int, int, int, int],
    head_dim_v: int,
    causal: bool,
    q_offset: int,
    tile: Tile,
) -> SmallGradients | None:
    """Return how a call is computed by the formula; None if it is not for `backward_small`."""
    batch, seqlen_q, heads, head_dim = q_shape
    _, seqlen_k, heads_kv, _ = k_shape
    visible = Mask(seqlen_q, seqlen_k, causal, q_offset)
    of_head = seqlen_q * seqlen_k
    if (
        not 0 < of_head <= MAX_SCORES_OF_STEP
        or heads != heads_kv
        or seqlen_q > tile.Br
        or seqlen_k > tile.Bc
        # A row that attends to no key must leave no trace, whatever its query is.
        or visible.end(0) == 0
    ):
        return None
    rows_of_one_key = None
    if visible.end(0) == 1:
        # All of them, or the first.
        rows_of_one_key = slice(None) if seqlen_k == 1 else slice(1)
    at_once = max(1, MAX_SCORES_OF_STEP // of_head)
    heads_of_step = even_share(heads, at_once)
    sequences_of_step = even_share(batch, at_once // heads)
    steps = -(-heads // heads_of_step) * -(-batch // sequences_of_step)
    return SmallGradients(
        visible=None if visible.sees_all(0, seqlen_q) else visible,
        rows_of_one_key=rows_of_one_key,
        is_of_one_thread=of_head * max(head_dim, head_dim_v) <= MAX_PRODUCT_OF_ONE_THREAD,
        is_key_by_key=seqlen_k >= MIN_KEYS_KEY_BY_KEY and seqlen_q >= MIN_ROWS_KEY_BY_KEY,
        transposes=seqlen_q in ROWS_TO_TRANSPOSE
        and of_head in SCORES_TO_TRANSPOSE
        and seqlen_k >= 2 * seqlen_q,
        # Few heads of many in a step keep their keys in the cache. 32 x 2048, 8 heads of 64, two in
        # a step: 4.0 ms, divided 5.6; 8 x 2048, all in a step: 3.8, 2.2.
        divides=heads_of_step == heads
        and divides_keys(seqlen_q, seqlen_k, heads, 4 * heads * max(head_dim, head_dim_v)),
        sequences=sequences_of_step,
        heads=heads_of_step,
        steps=steps,
        workers=max(1, min(steps, batch * heads * of_head // MIN_SCORES_PER_WORKER)),
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
    """Write the gradients of a whole call, if its heads are small and its values are finite.

    Takes the arguments of `cupy_flash.host.gradients.backward`, in order. Returns False if the
    call is left to that function, which keeps values that are not finite from rows that do not
    attend to them. In one thread, 8 queries and keys with 8 heads of 64 take a sixth of the time of
    that function.
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
    """Do what `backward_small` does, where it is known how the call is computed.

    `scale` is the factor on the scores, a number of the queries' dtype.
    """
    if small.steps == 1:
        whole = q, k, v, out, dout, lse, dlse, results, small, scale, None
        if small.is_of_one_thread:
            return _differentiate(*whole)
        with single_threaded_blas:
            return _differentiate(*whole)
    stop = Stop()
    left: list[tuple[slice, slice]] = []

    def work(steps: Iterator[tuple[slice, slice]]) -> None:
        with Scratch.borrowed() as scratch:
            for some, heads in steps:
                rows, of_rows = (some, slice(None), heads), (some, heads)
                done = _differentiate(
                    q[rows],
                    k[rows],
                    v[rows],
                    out[rows],
                    dout[rows],
                    lse[of_rows],
                    None if dlse is None else dlse[of_rows],
                    {name: result[rows] for name, result in results.items()},
                    small,
                    scale,
                    scratch,
                )
                if not done:
                    left.append(of_rows)
                    stop.requested = True
                    return

    steps = product(slices(q.shape[0], small.sequences), slices(q.shape[2], small.heads))
    with single_threaded_blas:
        share_out(min(small.workers, threads or cpus()), steps, work, stop)
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
    """Write the gradients; return False if a value is not finite that may reach hidden pairs."""
    visible, divides = small.visible, small.divides
    delta = row_products(dout, out).swapaxes(1, 2)
    if dlse is not None:
        delta -= dlse
    scaled = q * scale
    # With an infinite query, all weights of a row may be 0.
    if not math.isfinite(np.vdot(scaled, scaled)):
        return False
    q, k, v, dout = scaled.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), dout.swapaxes(1, 2)
    of_scores, of_slopes = (_transposed(q), _transposed(dout)) if small.transposes else (q, dout)
    if small.is_key_by_key:
        lse_of_scores = lse
    else:
        lse_of_scores, delta = lse[..., None], delta[..., None]
    stored_p, p = _products(of_scores, k, small, scratch, "p")
    stored_p -= lse_of_scores
    np.exp(stored_p, out=stored_p)
    if visible is not None:
        # All rows attend to the keys before.
        first = visible.end(0)
        hidden = visible.hidden(0, visible.seqlen_q, first, visible.seqlen_k)
        np.copyto(p[..., first:], 0, where=hidden)
    stored_ds, ds = _products(of_slopes, v, small, scratch, "ds")
    stored_ds -= delta
    stored_ds *= stored_p
    # NaN and infinity in v, dout and lse, and in keys that a row attends to, are in ds as well.
    if not math.isfinite(np.vdot(stored_ds, stored_ds)):
        return False
    rows = small.rows_of_one_key
    if rows is not None and dlse is None:
        weights = p[:, :, rows, 0]
        # NumPy takes 5 us to tell the name of a dtype.
        dtype, columns = _NAMES[p.dtype.char], max(q.shape[3], v.shape[3])
        # Most often all of these weights are 1, and thresholds of each row take 12 us.
        if weights.min() > sure_weight_of_one_key(dtype, columns):
            ds[:, :, rows] = 0
        else:
            least = least_weight_of_one_key(dtype, columns, lse[:, :, rows])
            ds[:, :, rows, 0][weights > least] = 0
    dq = results["q"]
    write_sums(ds, k, dq.swapaxes(1, 2), divides)
    # In hidden keys they are in dq only.
    if visible is not None and not math.isfinite(np.vdot(dq, dq)):
        return False
    dq *= scale
    if "k" in results:
        write_sums_of_keys(ds, q, results["k"].swapaxes(1, 2), divides)
    if "v" in results:
        write_sums_of_keys(p, dout, results["v"].swapaxes(1, 2), divides)
    return True


def _transposed(x: Array) -> Array:
    """Return the same matrices in new memory, in which each is transposed."""
    return np.array(x.swapaxes(2, 3), order="C").swapaxes(2, 3)


def _products(
    rows: Array, keys: Array, small: SmallGradients, scratch: Scratch | None, name: str
) -> tuple[Array, Array]:
    """Return the products of rows with keys as they are stored, and as (..., rows, keys)."""
    if scratch is None and not small.is_key_by_key and not small.divides:
        product: Array = np.matmul(rows, keys.swapaxes(2, 3))
        return product, product
    shape: tuple[int, ...] = *rows.shape[:3], keys.shape[2]
    if small.is_key_by_key:
        shape = shape[-1:] + shape[:-1]
    stored = (
        np.empty(shape, rows.dtype) if scratch is None else scratch.cut(name, shape, rows.dtype)
    )
    product = stored.transpose(1, 2, 3, 0) if small.is_key_by_key else stored
    write_scores(rows, keys, product, small.divides)
    return stored, product
