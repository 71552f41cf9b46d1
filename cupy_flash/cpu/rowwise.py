"""Batch-invariant forward pass: the bits of a row depend only on its own query and keys.

BLAS may sum a row in another order if the matrix has more rows or the row has another index. With
OpenBLAS 0.3.31 on AVX2, rows 0 and 6 of a float32 product differ for equal inputs. So each row has
matrix products of its own here, (1, head_dim) x (head_dim, Bc) and (1, Bc) x (Bc, head_dim_v + 1).
KV tiles begin at multiples of Bc and are padded with zeros. Then other rows cannot affect a result,
and masked keys can affect it only if their values hold NaN or inf.

All heads of a sequence are computed at once, in few NumPy calls. For a handful of queries and keys,
this is also the fastest way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.sequences import Keys, read
from cupy_flash.cpu.forward_pass import (
    SHRINK,
    all_set_in_ranges,
    compute_dtype,
    include_sink,
    modify_scores,
)
from cupy_flash.cpu.row_results import KeySums, RowResults, moment_of, shifted_moment
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.dropout import kept_pairs, key_of
from cupy_flash.mods.on_arrays.scores import Pairs
from cupy_flash.problem.mask import Mask, masked_after, masked_before

Array = NDArray[Any]

#: Default number of keys in a KV tile. It is the same for all problems, as the bits depend on it.
DEFAULT_BC = 256


def forward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    results: RowResults,
    *,
    keys: Keys,
    first: Pairs,
    causal: bool,
    q_offset: int,
    softmax_scale: float,
    Bc: int,
    bound_mods: BoundModifications | None = None,
) -> None:
    """Write attention of one sequence to ``out``, and its results per row to ``results``.

    Scratch memory grows with heads_q * seqlen_q * Bc.

    Parameters
    ----------
    q : numpy.ndarray, (seqlen_q, heads_q, head_dim)
        Queries: some or all rows and heads of the sequence.
    k : numpy.ndarray, (blocks, rows, heads_kv, head_dim)
        Keys; a packed array is a single block.
    v : numpy.ndarray, (blocks, rows, heads_kv, head_dim_v)
        Values.
    out : numpy.ndarray, (seqlen_q, heads_q, head_dim_v)
        Output.
    results : RowResults
        Outputs of shape (heads_q, seqlen_q).
    keys : Keys
        Location of the sequence's keys and values in k and v.
    first : Pairs
        Indices of the sequence, and of the first row and head that q holds.
    causal : bool
        Whether query ``i`` of the sequence attends only to the keys ``j <= i + q_offset``.
    q_offset : int
        Position of the sequence's first query among its keys.
    softmax_scale : float
        Factor on the scores.
    Bc : int
        Number of keys in a KV tile; the bits depend on it.
    bound_mods : BoundModifications, optional
        Masks and score modifications, see `cupy_flash.cpu.varlen.varlen_forward`.
    """
    seqlen_q, heads_q, head_dim = q.shape
    heads_kv, head_dim_v = v.shape[2:]
    compute = compute_dtype(q.dtype)
    # Shape (heads_kv, m, 1, dim): m rows per KV head, ordered by query and then by query head.
    group = heads_q // heads_kv
    m = seqlen_q * group
    by_kv_head = q.reshape(seqlen_q, heads_kv, group, head_dim).swapaxes(0, 1)
    rows = by_kv_head.astype(compute).reshape(heads_kv, m, 1, head_dim)
    rows *= compute.type(softmax_scale)
    queries = np.arange(first.row, first.row + seqlen_q)
    visible = Mask(first.row + seqlen_q, keys.seqlen, causal, q_offset)
    modification = None
    if bound_mods is not None:
        visible = bound_mods.mask_with(visible, first.b)
        heads = np.arange(first.h, first.h + heads_q, dtype=np.int32).reshape(heads_kv, 1, group)
        pairs = first._replace(
            h=np.repeat(heads, seqlen_q, axis=1).reshape(heads_kv, m, 1, 1),
            row=np.repeat(queries, group).astype(np.int32)[:, None, None],
            q_offset=visible.q_offset,
        )
        begins = np.repeat(visible.begins(queries), group)
        modification = _Modification(bound_mods, pairs, begins, keys.seqlen - 1, first)
    ends = np.repeat(visible.ends(queries), group)
    moment = None if results.entropy is None else np.zeros((heads_kv, m, 1, 1), compute)
    acc, row_max = _process_tiles(rows, k, v, keys, ends, Bc, modification, moment=moment)
    share = None if modification is None else modification.kept_share
    row_sum, result = _normalized(acc, share)
    if not np.isfinite(result).all():
        # A sum of weighted values overflowed, perhaps although all values are finite. Recompute
        # with scaled values, and replace only the results that are not finite.
        acc, _ = _process_tiles(rows, k, v, keys, ends, Bc, modification, compute.type(SHRINK))
        _, shrunk = _normalized(acc, share)
        result = np.where(np.isfinite(result), result, shrunk / compute.type(SHRINK))
    empty = row_sum == 0
    key_sums = KeySums(row_max.copy(), row_sum.copy(), moment) if results.has_statistics else None
    sinks = None if modification is None else modification.sinks
    if sinks is not None:
        sum_of_keys = row_sum.copy()
        result *= sum_of_keys * include_sink(row_max, row_sum, sinks.astype(compute)) / row_sum
    row_lse = row_max + np.log(row_sum)
    if empty.any():
        nan_rows = empty & _find_nan_rows(rows, k, keys, ends, modification)
        for array, value in ((result, 0), (row_lse, -np.inf if sinks is None else sinks)):
            np.copyto(array, value, where=empty)
            np.copyto(array, np.nan, where=nan_rows)
    result = result.reshape(heads_kv, seqlen_q, group, head_dim_v).swapaxes(0, 1)
    np.copyto(out, result.reshape(out.shape), casting="same_kind")
    # The rows here have the axes (heads_kv, seqlen_q, group).
    results = results.each(lambda array: array.reshape(heads_kv, group, seqlen_q).swapaxes(1, 2))
    if results.lse is not None:
        np.copyto(results.lse, row_lse.reshape(results.lse.shape), casting="same_kind")
    if key_sums is not None:
        key_sums.write(results, row_lse, empty, has_sinks=sinks is not None)


class _Modification(NamedTuple):
    """Modifications of a call, with the indices of the rows that they apply to."""

    bound_mods: BoundModifications
    pairs: Pairs  # indices except those of keys; they broadcast to (heads_kv, m, 1, keys)
    begins: Array  # first key that each row attends to, (m,)
    last_key: int
    first: Pairs  # indices of the sequence and of the first row and head

    def apply(self, scores: Array, start: int) -> None:
        """Modify scores (heads_kv, m, 1, Bc) of the KV tile at `start`, and mask early keys."""
        stop = start + scores.shape[-1]
        # Whole tiles are modified, so that the bits do not depend on the number of keys. Keys past
        # the last one are masked later.
        j = np.minimum(np.arange(start, stop, dtype=np.int32), np.int32(self.last_key))
        modify_scores(scores, self.bound_mods, self.pairs._replace(j=j))
        if start < self.begins[-1]:
            np.copyto(scores, -np.inf, where=masked_before(self.begins, start, stop)[:, None])

    @property
    def kept_share(self) -> float | None:
        """Probability with which dropout keeps a weight; None without dropout."""
        dropout = self.bound_mods.dropout
        return None if dropout is None else dropout.kept_share

    def kept_by_dropout(self, start: int, stop: int) -> Array | None:
        """Return which weights of keys [start, stop) dropout keeps; None without dropout.

        The axes are (heads_kv, m, 1, keys).
        """
        dropout = self.bound_mods.dropout
        if dropout is None:
            return None
        heads_kv, m = self.pairs.h.shape[:2]
        heads = np.unique(self.pairs.h).reshape(heads_kv, -1)
        seqlen_q = m // heads.shape[1]
        rows = slice(self.first.row, self.first.row + seqlen_q)
        kept = kept_pairs(
            *(dropout.threshold, key_of(dropout), self.first.b, heads, rows, slice(start, stop))
        )
        by_row: Array = kept.swapaxes(1, 2).reshape(heads_kv, m, 1, stop - start)
        return by_row

    @property
    def sinks(self) -> Array | None:
        """Sink of each row, (heads_kv, m, 1, 1); None without sinks."""
        return None if self.bound_mods.sinks is None else self.bound_mods.sinks[self.pairs.h]


def _normalized(acc: Array, kept_share: float | None) -> tuple[Array, Array]:
    """Return the row sums and the rows of the output; `kept_share` is that of dropout."""
    # The copy is contiguous: NumPy may compute the logarithm of strided arrays differently.
    row_sum = acc[..., -1:].copy()
    divisor = row_sum if kept_share is None else row_sum * acc.dtype.type(kept_share)
    return row_sum, acc[..., :-1] / divisor


def _process_tiles(
    rows: Array,
    k: Array,
    v: Array,
    keys: Keys,
    ends: Array,
    Bc: int,
    modification: _Modification | None,
    factor: Any = 1,
    moment: Array | None = None,
) -> tuple[Array, Array]:
    """Return the sums of weighted values, with the row sums as a last column, and the row maxima.

    The values are multiplied by `factor`. `ends` is the end of the keys that each row attends to.
    The moments of the rows (see `row_results`) are written to `moment` if it is given.
    """
    heads_kv, m, _, head_dim = rows.shape
    head_dim_v, compute = v.shape[3], rows.dtype
    common_end, last_end = int(ends.min()), int(ends.max())
    begin = 0 if modification is None else int(modification.begins[0]) // Bc * Bc
    k_tile = np.zeros((heads_kv, Bc, head_dim), compute)
    # A last column of ones makes the product compute the row sums as well.
    v_tile = np.zeros((heads_kv, Bc, head_dim_v + 1), compute)
    v_tile[..., -1] = 1
    scores = np.empty((heads_kv, m, 1, Bc), compute)
    acc = np.zeros((heads_kv, m, 1, head_dim_v + 1), compute)
    row_max = np.full((heads_kv, m, 1, 1), -np.inf, compute)
    for start in range(begin, last_end, Bc):
        stop = min(start + Bc, last_end)
        count = stop - start
        k_tile[:, :count] = read(k, keys, start, stop).swapaxes(0, 1)
        v_tile[:, :count, :-1] = read(v, keys, start, stop).swapaxes(0, 1)
        if factor != 1:
            v_tile[:, :count, :-1] *= factor
        k_tile[:, count:] = 0
        v_tile[:, count:, :-1] = 0
        np.matmul(rows, k_tile.swapaxes(1, 2)[:, None], out=scores)
        if modification is not None:
            modification.apply(scores, start)
        if start + Bc > common_end:
            np.copyto(scores, -np.inf, where=masked_after(ends, start, start + Bc)[:, None])
        new_max = np.maximum(scores.max(axis=-1, keepdims=True), row_max)
        # -inf - -inf would be NaN; subtracting 0 leaves exp(-inf) = 0.
        safe = np.where(new_max == -np.inf, 0, new_max)
        scores -= safe
        exponents = None if moment is None else scores.copy()
        np.exp(scores, out=scores)
        if start:
            change = row_max - safe
            if moment is not None:
                moment[...] = shifted_moment(moment, acc[..., -1:], change, np.exp(change))
            acc *= np.exp(change)
        if moment is not None and exponents is not None:
            moment += moment_of(scores, exponents)
        kept = None if modification is None else modification.kept_by_dropout(start, start + Bc)
        if kept is None:
            acc += np.matmul(scores, v_tile[:, None])
        else:
            # The row sums are those of all weights.
            acc[..., -1:] += np.matmul(scores, v_tile[:, None, :, -1:])
            scores *= kept
            acc[..., :-1] += np.matmul(scores, v_tile[:, None, :, :-1])
        row_max = new_max
    return acc, row_max


def _find_nan_rows(
    rows: Array, k: Array, keys: Keys, ends: Array, modification: _Modification | None
) -> Array:
    """Return which rows attend to a key and have finite queries and keys; see `find_nan_rows`."""
    begins: Any = 0 if modification is None else modification.begins
    if modification is not None and not modification.bound_mods.scores.changes_nothing:
        return np.zeros((*rows.shape[:3], 1), bool)
    finite = np.isfinite(read(k, keys, 0, int(ends.max()))).all(axis=-1).T
    nan_rows: Array = (begins < ends) & all_set_in_ranges(finite, begins, ends)
    nan_rows &= np.isfinite(rows[:, :, 0]).all(axis=-1)
    return nan_rows[:, :, None, None]
