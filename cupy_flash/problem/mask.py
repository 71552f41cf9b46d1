"""Which query sees which key: the one place of the library that compares a row with a column.

`kernels_cu/score/mask.cuh` says the same to the kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Mask(NamedTuple):
    """Query i sees the keys [begin(i), end(i)); rows and keys count from the first of each.

    Query i stands at position p = i + q_offset among the keys. Both ends grow from row to row, but
    for rows that see nothing.

    Attributes
    ----------
    seqlen_q, seqlen_k
        Rows and keys that there are.
    causal
        Whether query i sees only the keys j <= p.
    q_offset
        Position of the first query among the keys.
    left, right
        Of a window: query i sees only the keys p - left <= j <= p + right; None has no bound.
    prefix
        Number of first keys that all queries see in spite of `causal` and `right`. A mask with a
        prefix has no `left`, as that would leave two ranges of keys.
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
        """Whether every query sees every key."""
        return not self.causal and self.left is None and self.right is None

    def rounded(self, rows: int, keys: int) -> Mask:
        """Return a mask with few other lengths: multiples of `rows`, and of `keys`.

        Lengths are rounded up, and q_offset to the nearest multiple.
        """
        return self._replace(
            seqlen_q=-(-self.seqlen_q // rows) * rows,
            seqlen_k=-(-self.seqlen_k // keys) * keys,
            q_offset=round(self.q_offset / keys) * keys,
        )

    def behind(self, rows: int) -> Mask:
        """Return the mask of the rows that follow the first `rows` ones, at their positions."""
        return self._replace(seqlen_q=self.seqlen_q - rows, q_offset=self.q_offset + rows)

    def with_last(self, rows: int) -> Mask:
        """Return the mask shifted so that row ``rows - 1`` has the position of the last row."""
        return self._replace(q_offset=self.q_offset + self.seqlen_q - rows)

    def end(self, row: int) -> int:
        """Behind the last key that a row sees."""
        end = self.seqlen_k
        if self.causal:
            end = row + self.q_offset + 1
        if self.right is not None:
            end = min(end, row + self.q_offset + 1 + self.right)
        return min(max(end, self.prefix, 0), self.seqlen_k)

    def begin(self, row: int) -> int:
        """The first key that a row sees; no less than its `end` where it sees none."""
        if self.left is None:
            return 0
        return min(max(row + self.q_offset - self.left, 0), self.seqlen_k)

    def ends(self, rows: Any, xp: Any = np) -> Any:
        """`end` of each row of an array of NumPy or CuPy."""
        if not self.causal and self.right is None:
            return xp.full(rows.shape, self.seqlen_k)
        positions = rows + (self.q_offset + 1)
        ends = positions if self.causal else self.seqlen_k
        if self.right is not None:
            ends = xp.minimum(ends, positions + self.right)
        return xp.clip(xp.maximum(ends, self.prefix), 0, self.seqlen_k)

    def begins(self, rows: Any, xp: Any = np) -> Any:
        """`begin` likewise."""
        if self.left is None:
            return xp.zeros(rows.shape, np.int64)
        return xp.clip(rows + (self.q_offset - self.left), 0, self.seqlen_k)

    def sees_all(self, first: int, stop: int) -> bool:
        """Whether each of the rows [first, stop) sees every key."""
        return self.begin(stop - 1) == 0 and self.end(first) == self.seqlen_k

    def edges(self, first: int, stop: int, start: int, end: int) -> list[tuple[int, int]]:
        """Runs of keys among [start, end), at most two, that not all rows [first, stop) see."""
        left = min(max(self.begin(stop - 1), start), end)
        right = max(min(self.end(first), end), start)
        runs = [(start, left), (right, end)] if left < right else [(start, end)]
        return [run for run in runs if run[0] < run[1]]

    def hidden(self, first: int, stop: int, start: int, end: int) -> NDArray[Any]:
        """Which of the keys [start, end) the rows [first, stop) do not see: (rows, keys)."""
        if self._is_diagonal:
            return _hidden_of_rows(stop - first, end - start, first + self.q_offset + 1 - start)
        rows = np.arange(first, stop)
        hidden: NDArray[Any] = unseen(self.ends(rows), start, end)
        return hidden if self.left is None else hidden | before(self.begins(rows), start, end)

    @property
    def _is_diagonal(self) -> bool:
        """Whether each row sees one key more than the one before, and that is all."""
        return self.causal and self.left is None and self.right is None and not self.prefix

    def blocks_of_keys(self, first: int, stop: int, Bc: int) -> tuple[int, int, int, int]:
        """Blocks of Bc keys that the rows [first, stop) see: begin, full_begin, full_end, end.

        Some row sees some key of the blocks from begin to end - 1, unless the rows see none at all
        in between; every row sees every key of those from full_begin to full_end - 1, which are
        whole.
        """
        end = -(-self.end(stop - 1) // Bc)
        begin = min(self.begin(first) // Bc, end)
        full_begin = min(max(-(-self.begin(stop - 1) // Bc), begin), end)
        return begin, full_begin, max(full_begin, min(self.end(first) // Bc, end)), end

    def first_row(self, key: int) -> int:
        """The first row whose end lies behind a key, as all later rows' do; seqlen_q if none."""
        rows = [0]
        if key < self.prefix:
            return 0
        if self.causal:
            rows.append(key - self.q_offset)
        if self.right is not None:
            rows.append(key - self.q_offset - self.right)
        return min(max(rows), self.seqlen_q)

    def last_row(self, key: int) -> int:
        """Behind the last row that does not begin behind a key."""
        if self.left is None:
            return self.seqlen_q
        return min(max(key + self.left - self.q_offset + 1, 0), self.seqlen_q)

    def tiles_of_rows(self, first: int, stop: int, Br: int) -> tuple[int, int, int, int]:
        """Tiles of Br rows that see the keys [first, stop): begin, full_begin, full_end, end.

        The transpose of `blocks_of_keys`, but that the last tile counts as whole.
        """
        rows = self.seqlen_q
        end = -(-self.last_row(stop - 1) // Br)
        begin = min(self.first_row(first) // Br, end)
        full_begin = min(max(-(-self.first_row(stop - 1) // Br), begin), end)
        last = self.last_row(first)
        full_end = min(-(-last // Br) if last == rows else last // Br, end)
        return begin, full_begin, max(full_begin, full_end), end

    def pairs(self) -> float:
        """How many pairs are seen, where a row on the diagonal counts its last key half.

        So a square causal mask sees exactly half of all pairs, as the field counts them.
        """
        if self.is_full:
            return float(self.seqlen_q * self.seqlen_k)
        if not self._is_diagonal:
            rows = np.arange(self.seqlen_q)
            return float(np.maximum(self.ends(rows) - self.begins(rows), 0).sum())
        # Row i sees clamp(i + q_offset + 1/2, 0, seqlen_k) keys.
        low, high = (min(self.seqlen_q, self.first_row(key)) for key in (0, self.seqlen_k))
        rising = (high - low) * (low + high) / 2 + (high - low) * self.q_offset
        return rising + (self.seqlen_q - high) * float(self.seqlen_k)


def unseen(ends: Any, start: int, stop: int, xp: Any = np) -> Any:
    """Which of the keys [start, stop) rows do not see that see [0, end): (..., stop - start)."""
    return xp.arange(start, stop) >= ends[..., None]


def before(begins: Any, start: int, stop: int, xp: Any = np) -> Any:
    """Which of the keys [start, stop) lie before those that rows see: (..., stop - start)."""
    return xp.arange(start, stop) < begins[..., None]


def seen_in_sequences(rows: int, seqlens_q: Any, seqlens_k: Any) -> NDArray[Any]:
    """`Mask.end` of the first rows of causal sequences, aligned at their ends: (sequences, rows).

    Not clipped to the keys that there are.
    """
    ends: NDArray[Any] = np.arange(1, rows + 1) + (seqlens_k - seqlens_q)[:, None]
    return ends


@functools.lru_cache(32)
def _hidden_of_rows(rows: int, columns: int, seen: int) -> NDArray[Any]:
    """`unseen` of rows of which the first sees so many of the columns, and each one more."""
    hidden: NDArray[Any] = unseen(np.arange(seen, seen + rows), 0, columns)
    return hidden
