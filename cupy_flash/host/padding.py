"""Short packed sequences of unequal lengths on the CPU, padded and computed together.

A sequence of 10 tokens, 8 heads of 64, takes NumPy 43 us on its own, of which 13 are in matrix
products. What padding adds is hidden, and cut off again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host.formula import by_head, cut_scores, to_weights
from cupy_flash.host.passes import ELEMENTS_AT_ONCE, Scratch, compute_dtype
from cupy_flash.problem.mask import seen_in_sequences, unseen

Array = NDArray[Any]

# Query-key pairs of a sequence, over all heads, up to which it is padded: of more, to gather and to
# hide costs more than the calls of NumPy that are saved. Of enough pairs in all, threads share the
# groups; 128 sequences of 16 to 64 tokens, 8 heads of 64, two threads: 16.6 ms, one by one 22.2.
MAX_PAIRS = 1 << 12
MAX_PAIRS_OF_MANY = 1 << 15
MANY = 1 << 19

# Keys to a row up to which: of more, reading them is what takes the time.
MAX_KEYS_PER_ROW = 4

# How much longer than the shortest sequence of a group the longest is: by a factor and by a number.
MAX_RATIO = 1.25
MAX_DIFFERENCE = 12


def are_worth_it(seqlens_q: Array, seqlens_k: Array, heads: int) -> Array:
    """Which sequences are better padded: short ones, if most are unlike those beside them."""
    pairs = heads * seqlens_q * seqlens_k
    short = pairs <= (MAX_PAIRS_OF_MANY if pairs.sum() >= MANY else MAX_PAIRS)
    # With fewer keys some rows may see none.
    short &= (seqlens_q > 0) & (seqlens_q <= seqlens_k)
    short &= seqlens_k <= MAX_KEYS_PER_ROW * seqlens_q
    alike = (seqlens_q[1:] == seqlens_q[:-1]) & (seqlens_k[1:] == seqlens_k[:-1])
    if 2 * np.count_nonzero(alike) >= len(alike) or np.count_nonzero(short) < 2:
        short[...] = False
    return short


def groups(seqlens_q: Array, seqlens_k: Array, elements: int) -> Iterator[Array]:
    """Indices of sequences of like lengths, as many as fit the scratch of a step.

    ``elements`` is what a key and a query take, besides their scores.
    """
    order = np.lexsort((seqlens_q, seqlens_k))
    lengths = zip(seqlens_q[order].tolist(), seqlens_k[order].tolist(), strict=True)
    first = most_q = most_k = room = 0
    for i, (seqlen_q, seqlen_k) in enumerate(lengths):
        if seqlen_q > most_q or seqlen_k > most_k or i - first >= room:
            if i:
                yield order[first:i]
            first = i
            most_q, most_k = (int(MAX_RATIO * n) + MAX_DIFFERENCE for n in (seqlen_q, seqlen_k))
            room = max(1, ELEMENTS_AT_ONCE // (elements * most_k))
    if order.size:
        yield order[first:]


class Group(NamedTuple):
    """Sequences that are computed together, and where their rows are."""

    members: list[int]
    seqlens_q: Array
    seqlens_k: Array
    rows_q: Array  # (sequences, longest): the last one over and over where there are no more
    rows_k: Array
    there: Array  # which of rows_q are
    out_rows: Array  # those, one behind the other

    @classmethod
    def make(
        cls, members: Array, firsts_q: Array, seqlens_q: Array, firsts_k: Array, seqlens_k: Array
    ) -> Group:
        """Some of all sequences, by their indices."""
        seqlens_q, seqlens_k = seqlens_q[members], seqlens_k[members]
        rows_q = _padded(firsts_q[members], seqlens_q)
        rows_k = _padded(firsts_k[members], seqlens_k)
        there = np.arange(rows_q.shape[1]) < seqlens_q[:, None]
        return cls(members.tolist(), seqlens_q, seqlens_k, rows_q, rows_k, there, rows_q[there])


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
    """Attention within each of some packed sequences; False, and no output, if a row has no weight.

    With ``causal``, query ``i`` sees only the keys ``j <= i + seqlen_k - seqlen_q``.
    """
    _, seqlens_q, seqlens_k, rows_q, rows_k, there, rows = group
    count, heads_kv = len(seqlens_q), k.shape[1]
    shared = q.shape[1] // heads_kv
    compute = compute_dtype(q.dtype)
    seqlen_q, seqlen_k = rows_q.shape[1], rows_k.shape[1]

    def gathered(x: Array, rows: Array) -> Array:
        """(sequences, kv heads, heads, rows, dim) in the dtype to compute in."""
        shape = *rows.shape, heads_kv, x.shape[1] // heads_kv, x.shape[2]
        return x[rows].astype(compute, copy=False).reshape(shape).transpose(0, 2, 3, 1, 4)

    q_rows = gathered(q, rows_q)
    q_rows *= compute.type(softmax_scale)
    k_rows, v_rows = gathered(k, rows_k), gathered(v, rows_k)
    by_row = count, heads_kv, shared, seqlen_q
    flat = scratch.cut("scores", (math.prod(by_row) * seqlen_k,), compute)
    matrix, keys_axis = cut_scores(flat, seqlen_k, shared * seqlen_q)
    scores = by_head(matrix, keys_axis, by_row)
    np.matmul(q_rows, k_rows.swapaxes(3, 4), out=scores)
    seen = seen_in_sequences(seqlen_q, seqlens_q, seqlens_k) if causal else seqlens_k[:, None]
    np.copyto(scores, -np.inf, where=unseen(seen, 0, seqlen_k)[:, None, None])
    row_max, row_sum, empty = to_weights(matrix, keys_axis)
    if empty is not None:
        return False
    acc = scratch.cut("acc", (*rows_q.shape, heads_kv, shared, v.shape[2]), compute)
    np.matmul(scores, v_rows, out=acc.transpose(0, 2, 3, 1, 4))
    out[rows] = acc[there].reshape(-1, *out.shape[1:])
    if lse is not None:
        np.log(row_sum, out=row_sum)
        row_sum += row_max
        lse[:, rows] = row_sum.reshape(count, -1, seqlen_q).swapaxes(0, 1)[:, there]
    return True


def _padded(firsts: Array, seqlens: Array) -> Array:
    places = np.arange(seqlens.max())
    rows: Array = firsts[:, None] + np.minimum(places, seqlens[:, None] - 1)
    return rows
