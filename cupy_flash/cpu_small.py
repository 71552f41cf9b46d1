"""A small call of the CPU backend at once: the plain formula, in as few calls of NumPy as it takes.

Weights are divided by their sum before they meet the values, as in the formula, so that no sum of
products overflows where a result does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.cpu_pass import hidden, lowest, ones
from cupy_flash.host_sequences import PagedRows
from cupy_flash.tile import Tile

Array = NDArray[Any]


# Elements of the scores and queries of a call up to which it is computed in one go, in new arrays.
MAX_ELEMENTS_OF_CALL = 1 << 16

# Multiplications of a matrix product up to which OpenBLAS takes one thread in any case.
MAX_PRODUCT_OF_ONE_THREAD = 1 << 18

# Scores up to this need no maximum subtracted: exp stays within [1e-13, 1e13].
SCORE_BOUND = 30.0


def forward_small(
    q: Array,
    k: Array | PagedRows,
    v: Array | PagedRows,
    out: Array,
    lse: Array | None,
    *,
    causal: bool,
    q_offset: int,
    softmax_scale: float,
    tile: Tile,
) -> bool:
    """A whole call at once, if it is small: without record, blocks, scratch and threads.

    Takes what `cupy_flash.cpu.forward` does. False, and no output, if it is not for this function.
    A call of 8 queries and keys of 8 heads of 64 takes NumPy 23 us; the record alone 8.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    if (
        batch * heads * seqlen_q * max(seqlen_k, head_dim) > MAX_ELEMENTS_OF_CALL
        or seqlen_q * seqlen_k * head_dim > MAX_PRODUCT_OF_ONE_THREAD
        or seqlen_q > tile.Br
        or not 0 < seqlen_k <= tile.Bc
        or (heads != heads_kv and seqlen_q > 1)
        or not isinstance(k, np.ndarray)
        or not isinstance(v, np.ndarray)
        or q.dtype.char not in "fd"
    ):
        return False
    if heads == heads_kv:
        rows, out_rows = q.swapaxes(1, 2), out.swapaxes(1, 2)
    else:
        # The heads of a group are the rows of one matrix.
        rows, out_rows = (x[:, 0].reshape(batch, heads_kv, -1, x.shape[3]) for x in (q, out))
    unseen = None
    if causal and q_offset + 1 < seqlen_k:
        unseen = hidden(seqlen_q, seqlen_k, max(q_offset, -seqlen_q))
    with np.errstate(all="ignore"):
        scores = np.matmul(rows * q.dtype.type(softmax_scale), k.transpose(0, 2, 3, 1))
        row_max, row_sum, empty = _to_weights(scores, unseen)
        if empty is not None:
            return False
        np.matmul(scores, v.swapaxes(1, 2), out=out_rows)
        if lse is not None:
            np.log(row_sum, out=row_sum)
            row_sum += row_max
            lse[...] = row_sum.reshape(lse.shape)
    return True


def _to_weights(scores: Array, unseen: Array | None) -> tuple[Array | float, Array, Array | None]:
    """Turn scores into weights, exp(scores - row maximum) divided by its row sum, in place.

    Returns the row maxima, or 0 where none are subtracted; the row sums; and which rows are empty
    if any are, with 1 for their sum.
    """
    seqlen_k = scores.shape[-1]
    flat = scores.reshape(-1)
    row_max: Array | float = 0.0
    # Of a mask, what one row does not see may be what another one does, and must leave no trace.
    bounded = unseen is None and _are_bounded(flat)
    if not bounded:
        if unseen is not None:
            np.copyto(scores, -np.inf, where=unseen)
        # -inf - -inf would be NaN; subtracting the lowest number leaves exp(-inf) = 0.
        lowest_score = lowest(scores.dtype.char)
        row_max = np.maximum.reduce(scores, axis=-1, keepdims=True, initial=lowest_score)
        scores -= row_max
    np.exp(scores, out=scores)
    # A product with ones sums rows faster than add.reduce.
    sums = flat.reshape(-1, seqlen_k).dot(ones(seqlen_k, scores.dtype.char))
    row_sum = sums.reshape((*scores.shape[:-1], 1))
    empty = None
    if not bounded and not sums.all():
        empty = row_sum == 0
        row_sum[empty] = 1
    # A row of one key weighs it with 1, as p / p is.
    scores /= row_sum
    return row_max, row_sum, empty


def _are_bounded(scores: Array) -> bool:
    """Whether exp neither overflows nor underflows; False for NaN.

    Of 8 x 32 x 32 scores, their maximum and minimum take 3 us, row maxima and subtracting them 18.
    """
    if scores.size <= 1024 and scores.dot(scores) <= SCORE_BOUND**2:
        # Quicker still, and enough for few.
        return True
    return bool(scores.max() <= SCORE_BOUND and scores.min() >= -SCORE_BOUND)
