"""Which query sees which key: the one place of the library that compares a row with a column.

`kernels_cu/score/mask.cuh` says the same to the kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Mask(NamedTuple):
    """Query i sees the keys [0, seen(i)); rows and keys count from the first of each.

    Attributes
    ----------
    seqlen_q, seqlen_k
        Rows and keys that there are.
    causal
        Whether query i sees only the keys j <= i + q_offset.
    q_offset
        Position of the first query among the keys.
    """

    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    q_offset: int = 0

    def seen(self, row: int) -> int:
        """How many keys, from the first on, a row sees."""
        if not self.causal:
            return self.seqlen_k
        return min(max(row + self.q_offset + 1, 0), self.seqlen_k)

    def seen_by(self, rows: Any, xp: Any = np) -> Any:
        """`seen` of each row of an array of NumPy or CuPy."""
        if not self.causal:
            return xp.full(rows.shape, self.seqlen_k)
        return xp.clip(rows + (self.q_offset + 1), 0, self.seqlen_k)

    def unseen(self, first: int, stop: int, start: int, end: int) -> NDArray[Any]:
        """Which of the keys [start, end) the rows [first, stop) do not see, if causal."""
        return _unseen_of_rows(stop - first, end - start, first + self.q_offset + 1 - start)

    def blocks_of_keys(self, first: int, stop: int, Bc: int) -> tuple[int, int]:
        """Blocks of Bc keys of which the rows [first, stop) see all, and of which they see any.

        Both are counts from the first block on; only full blocks are seen whole.
        """
        some = -(-self.seen(stop - 1) // Bc)
        return min(self.seen(first) // Bc, some), some

    def first_row(self, key: int) -> int:
        """The first row that sees a key, and with it all behind; seqlen_q if none does."""
        if not self.causal:
            return 0
        return min(max(key - self.q_offset, 0), self.seqlen_q)

    def tiles_of_rows(self, first: int, stop: int, Br: int) -> tuple[int, int]:
        """From which tile of Br rows on rows see any of the keys [first, stop), and all see all.

        The transpose of `blocks_of_keys`.
        """
        some, all_of_them = self.first_row(first), self.first_row(stop - 1)
        tiles = -(-self.seqlen_q // Br)
        return some // Br if some < self.seqlen_q else tiles, -(-all_of_them // Br)

    def pairs(self) -> float:
        """How many pairs are seen, where a row on the diagonal counts its last key half.

        So a square causal mask sees exactly half of all pairs, as the field counts them.
        """
        if not self.causal:
            return float(self.seqlen_q * self.seqlen_k)
        # Row i sees clamp(i + q_offset + 1/2, 0, seqlen_k) keys.
        low, high = (min(self.seqlen_q, self.first_row(key)) for key in (0, self.seqlen_k))
        rising = (high - low) * (low + high) / 2 + (high - low) * self.q_offset
        return rising + (self.seqlen_q - high) * float(self.seqlen_k)


def unseen(ends: Any, start: int, stop: int, xp: Any = np) -> Any:
    """Which of the keys [start, stop) rows do not see that see [0, end): (..., stop - start)."""
    return xp.arange(start, stop) >= ends[..., None]


def seen_in_sequences(rows: int, seqlens_q: Any, seqlens_k: Any) -> NDArray[Any]:
    """`seen` of the first rows of causal sequences, aligned at their ends: (sequences, rows).

    Not clipped to the keys that there are.
    """
    ends: NDArray[Any] = np.arange(1, rows + 1) + (seqlens_k - seqlens_q)[:, None]
    return ends


@functools.lru_cache(32)
def _unseen_of_rows(rows: int, columns: int, seen: int) -> NDArray[Any]:
    """`unseen` of rows of which the first sees so many of the columns, and each one more."""
    hidden: NDArray[Any] = unseen(np.arange(seen, seen + rows), 0, columns)
    return hidden
