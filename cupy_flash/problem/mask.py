"""Masks by position: which keys a query row attends to under causality, a window and a prefix.

`kernels_cu/score/mask.cuh` implements the same rules in the kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Mask(NamedTuple):
    """Range of keys [begin(i), end(i)) that query row i of a sequence attends to.

    Row i has position p = i + q_offset among the keys. Both bounds grow from row to row, except for
    rows that attend to no key.

    Attributes
    ----------
    seqlen_q, seqlen_k
        Number of query rows and number of keys.
    causal
        Whether row i attends only to the keys j <= p.
    q_offset
        Position of the first query among the keys.
    left, right
        Bounds of a window, p - left <= j <= p + right for the keys j of row i; None is no bound.
    prefix
        Number of leading keys that all rows attend to in spite of `causal` and `right`. A mask with
        a prefix has no `left`, because that would leave two ranges of keys.
    """

    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    q_offset: int = 0
    left: int | None = None
    right: int | None = None
    prefix: int = 0

    @property
    def is_full(self) -> bool:
        """Whether every row attends to every key."""
        return not self.causal and self.left is None and self.right is None

    def rounded(self, rows: int, keys: int) -> Mask:
        """Return the mask with rounded sizes, so that similar masks become equal.

        seqlen_q is rounded up to a multiple of `rows`, seqlen_k up to a multiple of `keys`, and
        q_offset to the nearest multiple of `keys`.
        """
        return self._replace(
            seqlen_q=-(-self.seqlen_q // rows) * rows,
            seqlen_k=-(-self.seqlen_k // keys) * keys,
            q_offset=round(self.q_offset / keys) * keys,
        )

    def skip_rows(self, rows: int) -> Mask:
        """Return the mask without its first `rows` rows. The other rows keep their positions."""
        return self._replace(seqlen_q=self.seqlen_q - rows, q_offset=self.q_offset + rows)

    def with_last(self, rows: int) -> Mask:
        """Return the mask shifted so that row ``rows - 1`` has the position of the last row."""
        return self._replace(q_offset=self.q_offset + self.seqlen_q - rows)

    def end(self, row: int) -> int:
        """Return one past the last key that a row attends to."""
        end = self.seqlen_k
        if self.causal:
            end = row + self.q_offset + 1
        if self.right is not None:
            end = min(end, row + self.q_offset + 1 + self.right)
        return min(max(end, self.prefix, 0), self.seqlen_k)

    def begin(self, row: int) -> int:
        """Return the first key that a row attends to; at least `end` if it attends to none."""
        if self.left is None:
            return 0
        return min(max(row + self.q_offset - self.left, 0), self.seqlen_k)

    def ends(self, rows: Any, xp: Any = np) -> Any:
        """Return `end` for each row of a NumPy or CuPy array."""
        if not self.causal and self.right is None:
            return xp.full(rows.shape, self.seqlen_k)
        positions = rows + (self.q_offset + 1)
        ends = positions if self.causal else self.seqlen_k
        if self.right is not None:
            ends = xp.minimum(ends, positions + self.right)
        return xp.clip(xp.maximum(ends, self.prefix), 0, self.seqlen_k)

    def begins(self, rows: Any, xp: Any = np) -> Any:
        """Return `begin` for each row of a NumPy or CuPy array."""
        if self.left is None:
            return xp.zeros(rows.shape, np.int64)
        return xp.clip(rows + (self.q_offset - self.left), 0, self.seqlen_k)

    def all_visible(self, first: int, stop: int) -> bool:
        """Return whether each of the rows [first, stop) attends to every key."""
        return self.begin(stop - 1) == 0 and self.end(first) == self.seqlen_k

    def edges(self, first: int, stop: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return at most two runs of keys in [start, end) that some rows of [first, stop) mask."""
        left = min(max(self.begin(stop - 1), start), end)
        right = max(min(self.end(first), end), start)
        runs = [(start, left), (right, end)] if left < right else [(start, end)]
        return [run for run in runs if run[0] < run[1]]

    def masked(self, first: int, stop: int, start: int, end: int) -> NDArray[Any]:
        """Return which pairs of rows [first, stop) and keys [start, end) are masked."""
        if self._is_diagonal:
            return _masked_in_rows(stop - first, end - start, first + self.q_offset + 1 - start)
        rows = np.arange(first, stop)
        masked: NDArray[Any] = masked_after(self.ends(rows), start, end)
        return (
            masked if self.left is None else masked | masked_before(self.begins(rows), start, end)
        )

    @property
    def _is_diagonal(self) -> bool:
        """Whether the mask is only causal: each row attends to one key more than the row before."""
        return self.causal and self.left is None and self.right is None and not self.prefix

    def blocks_of_keys(self, first: int, stop: int, Bc: int) -> tuple[int, int, int, int]:
        """Return the blocks of Bc keys that rows [first, stop) attend to.

        The result is (begin, full_begin, full_end, end). Each of the blocks [begin, end) has a
        visible pair, unless the rows attend to no key. In the blocks [full_begin, full_end), which
        have Bc keys, all pairs are visible.
        """
        end = -(-self.end(stop - 1) // Bc)
        begin = min(self.begin(first) // Bc, end)
        full_begin = min(max(-(-self.begin(stop - 1) // Bc), begin), end)
        return begin, full_begin, max(full_begin, min(self.end(first) // Bc, end)), end

    def first_row(self, key: int) -> int:
        """Return the first row with ``end(row) > key``, as for all later rows; seqlen_q if none."""
        rows = [0]
        if key < self.prefix:
            return 0
        if self.causal:
            rows.append(key - self.q_offset)
        if self.right is not None:
            rows.append(key - self.q_offset - self.right)
        return min(max(rows), self.seqlen_q)

    def last_row(self, key: int) -> int:
        """Return one past the last row with ``begin(row) <= key``."""
        if self.left is None:
            return self.seqlen_q
        return min(max(key + self.left - self.q_offset + 1, 0), self.seqlen_q)

    def tiles_of_rows(self, first: int, stop: int, Br: int) -> tuple[int, int, int, int]:
        """Return the tiles of Br rows that attend to the keys [first, stop).

        As in `blocks_of_keys`, but the last tile may be full even if it has fewer than Br rows.
        """
        rows = self.seqlen_q
        end = -(-self.last_row(stop - 1) // Br)
        begin = min(self.first_row(first) // Br, end)
        full_begin = min(max(-(-self.first_row(stop - 1) // Br), begin), end)
        last = self.last_row(first)
        full_end = min(-(-last // Br) if last == rows else last // Br, end)
        return begin, full_begin, max(full_begin, full_end), end

    def pairs(self) -> float:
        """Return the number of visible pairs; a purely causal mask counts diagonal pairs half.

        A square causal mask then has exactly half of all pairs, as is usual for FLOP counts.
        """
        if self.is_full:
            return float(self.seqlen_q * self.seqlen_k)
        if not self._is_diagonal:
            rows = np.arange(self.seqlen_q)
            return float(np.maximum(self.ends(rows) - self.begins(rows), 0).sum())
        # With diagonal pairs counted half, row i has clamp(i + q_offset + 1/2, 0, seqlen_k) pairs.
        low, high = (min(self.seqlen_q, self.first_row(key)) for key in (0, self.seqlen_k))
        rising = (high - low) * (low + high) / 2 + (high - low) * self.q_offset
        return rising + (self.seqlen_q - high) * float(self.seqlen_k)


def masked_after(ends: Any, start: int, stop: int, xp: Any = np) -> Any:
    """Return an array (..., stop - start) of whether keys [start, stop) are at or after `ends`."""
    return xp.arange(start, stop) >= ends[..., None]


def masked_before(begins: Any, start: int, stop: int, xp: Any = np) -> Any:
    """Return an array (..., stop - start) of whether keys [start, stop) are before `begins`."""
    return xp.arange(start, stop) < begins[..., None]


def causal_ends(rows: int, seqlens_q: Any, seqlens_k: Any) -> NDArray[Any]:
    """Return an array (sequences, rows) of `Mask.end`, not clipped, for causal sequences.

    The last query of each sequence is aligned with its last key.
    """
    ends: NDArray[Any] = np.arange(1, rows + 1) + (seqlens_k - seqlens_q)[:, None]
    return ends


@functools.lru_cache(32)
def _masked_in_rows(rows: int, columns: int, first_end: int) -> NDArray[Any]:
    """Return the masked pairs if row r attends to the first ``first_end + r`` of the columns."""
    masked: NDArray[Any] = masked_after(np.arange(first_end, first_end + rows), 0, columns)
    return masked
