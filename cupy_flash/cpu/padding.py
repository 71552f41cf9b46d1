"""Short packed sequences of unequal lengths on the CPU, padded to one length and computed together.

Computed alone, a sequence of 10 tokens with 8 heads of 64 takes 43 us, only 13 of them in matrix
products. Padding is masked, and is not copied to the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.cpu.forward_pass import ELEMENTS_AT_ONCE, Scratch, compute_dtype
from cupy_flash.cpu.untiled import by_head, score_matrix, to_weights
from cupy_flash.problem.mask import causal_ends, masked_after

Array = NDArray[Any]

# Maximum number of query-key pairs, over all heads, of a sequence that is padded. For longer ones,
# gathering and masking cost more than the saved NumPy calls. The second limit applies if all
# sequences together have `MANY` pairs, as threads then compute groups in parallel: 16.6 instead of
# 22.2 ms for 128 sequences of 16 to 64 tokens (8 heads of 64, 2 threads).
MAX_PAIRS = 1 << 12
MAX_PAIRS_OF_MANY = 1 << 15
MANY = 1 << 19

# Maximum number of keys per query row of a sequence that is padded: with more keys, reading the
# keys dominates the time, and padding saves little.
MAX_KEYS_PER_ROW = 4

# A group that begins with length n holds lengths up to MAX_RATIO * n + MAX_DIFFERENCE.
MAX_RATIO = 1.25
MAX_DIFFERENCE = 12


def are_worth_it(seqlens_q: Array, seqlens_k: Array, heads: int) -> Array:
    """Return which sequences to pad: the short ones, if most adjacent lengths differ."""
    pairs = heads * seqlens_q * seqlens_k
    short = pairs <= (MAX_PAIRS_OF_MANY if pairs.sum() >= MANY else MAX_PAIRS)
    # With fewer keys than queries, some rows might attend to no key.
    short &= (seqlens_q > 0) & (seqlens_q <= seqlens_k)
    short &= seqlens_k <= MAX_KEYS_PER_ROW * seqlens_q
    is_same_length = (seqlens_q[1:] == seqlens_q[:-1]) & (seqlens_k[1:] == seqlens_k[:-1])
    if 2 * np.count_nonzero(is_same_length) >= len(is_same_length) or np.count_nonzero(short) < 2:
        short[...] = False
    return short


def groups(seqlens_q: Array, seqlens_k: Array, elements: int) -> Iterator[Array]:
    """Yield the indices of sequences of similar lengths that together fit the scratch of a step.

    ``elements`` is the number of elements of one query and one key, without their scores.
    """
    order = np.lexsort((seqlens_q, seqlens_k))
    lengths = zip(seqlens_q[order].tolist(), seqlens_k[order].tolist(), strict=True)
    first = most_q = most_k = capacity = 0
    for i, (seqlen_q, seqlen_k) in enumerate(lengths):
        if seqlen_q > most_q or seqlen_k > most_k or i - first >= capacity:
            if i:
                yield order[first:i]
            first = i
            most_q, most_k = (int(MAX_RATIO * n) + MAX_DIFFERENCE for n in (seqlen_q, seqlen_k))
            capacity = max(1, ELEMENTS_AT_ONCE // (elements * most_k))
    if order.size:
        yield order[first:]


class Group(NamedTuple):
    """Sequences that are computed together, and the indices of their rows in the packed arrays."""

    members: list[int]  # indices of the sequences
    seqlens_q: Array
    seqlens_k: Array
    rows_q: Array  # (sequences, longest seqlen_q), indices in q; padding repeats the last row
    rows_k: Array  # (sequences, longest seqlen_k), indices in k and v, padded likewise
    is_row: Array  # whether an entry of rows_q is a row of the sequence, and not padding
    out_rows: Array  # entries of rows_q without padding, flattened

    @classmethod
    def make(
        cls, members: Array, firsts_q: Array, seqlens_q: Array, firsts_k: Array, seqlens_k: Array
    ) -> Group:
        """Return the group of the sequences with the indices `members`."""
        seqlens_q, seqlens_k = seqlens_q[members], seqlens_k[members]
        rows_q = _padded(firsts_q[members], seqlens_q)
        rows_k = _padded(firsts_k[members], seqlens_k)
        is_row = np.arange(rows_q.shape[1]) < seqlens_q[:, None]
        return cls(members.tolist(), seqlens_q, seqlens_k, rows_q, rows_k, is_row, rows_q[is_row])


def forward(
    group: Group,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    *,
    scratch: Scratch,
    causal: bool,
    softmax_scale: float,
) -> bool:
    """Compute a group; return False, without output, if a row has no score above -inf.

    With ``causal``, query ``i`` attends only to the keys ``j <= i + seqlen_k - seqlen_q``.
    """
    _, seqlens_q, seqlens_k, rows_q, rows_k, is_row, rows = group
    count, heads_kv = len(seqlens_q), k.shape[1]
    group_size = q.shape[1] // heads_kv
    compute = compute_dtype(q.dtype)
    seqlen_q, seqlen_k = rows_q.shape[1], rows_k.shape[1]

    def gathered(x: Array, rows: Array) -> Array:
        """Return rows as (sequences, KV heads, heads, rows, dim), in the dtype to compute in."""
        shape = *rows.shape, heads_kv, x.shape[1] // heads_kv, x.shape[2]
        return x[rows].astype(compute, copy=False).reshape(shape).transpose(0, 2, 3, 1, 4)

    q_rows = gathered(q, rows_q)
    q_rows *= compute.type(softmax_scale)
    k_rows, v_rows = gathered(k, rows_k), gathered(v, rows_k)
    by_row = count, heads_kv, group_size, seqlen_q
    flat = scratch.array("scores", (math.prod(by_row) * seqlen_k,), compute)
    matrix, keys_axis = score_matrix(flat, seqlen_k, group_size * seqlen_q)
    scores = by_head(matrix, keys_axis, by_row)
    np.matmul(q_rows, k_rows.swapaxes(3, 4), out=scores)
    ends = causal_ends(seqlen_q, seqlens_q, seqlens_k) if causal else seqlens_k[:, None]
    np.copyto(scores, -np.inf, where=masked_after(ends, 0, seqlen_k)[:, None, None])
    row_max, row_sum, empty = to_weights(matrix, keys_axis)
    if empty is not None:
        return False
    acc = scratch.array("acc", (*rows_q.shape, heads_kv, group_size, v.shape[2]), compute)
    np.matmul(scores, v_rows, out=acc.transpose(0, 2, 3, 1, 4))
    out[rows] = acc[is_row].reshape(-1, *out.shape[1:])
    if lse is not None:
        np.log(row_sum, out=row_sum)
        row_sum += row_max
        lse[:, rows] = row_sum.reshape(count, -1, seqlen_q).swapaxes(0, 1)[:, is_row]
    return True


def _padded(firsts: Array, seqlens: Array) -> Array:
    offsets = np.arange(seqlens.max())
    rows: Array = firsts[:, None] + np.minimum(offsets, seqlens[:, None] - 1)
    return rows
