"""Which keys the queries of a case see, as far as arithmetic tells: what counts as its work."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.problem.mask import Mask

from .built_in import BUILT_IN

Ints = NDArray[np.int64]


class Seen(NamedTuple):
    """Keys that each query of a head sees.

    Attributes
    ----------
    mask
        By positions.
    begins, ends : int64 arrays, (seqlen_q,)
        They lie in [begin, end), which is empty where it sees none.
    step
        It sees one in so many of them.
    """

    mask: Mask
    begins: Ints
    ends: Ints
    step: int = 1

    @classmethod
    def of(cls, mask: Mask, mod: str | None = None, row: int = 0) -> Seen:
        """Of a mask of positions and a modification in `BUILT_IN`.

        Parameters
        ----------
        mask
            Of one sequence.
        mod
            Its name; masks in arrays hide pairs, but nothing that a kernel could leave out.
        row
            Keys that the modification was made for.
        """
        rows = np.arange(mask.seqlen_q)
        begins, ends = mask.begins(rows), mask.ends(rows)
        built_in = BUILT_IN[mod] if mod else None
        if built_in is None or built_in.seen is None:
            return cls(mask, begins, np.maximum(begins, ends))
        first, last = built_in.seen(rows + mask.q_offset, row)
        begins = np.maximum(begins, first)
        return cls(mask, begins, np.maximum(begins, np.minimum(ends, last)), built_in.step)

    def pairs(self) -> float:
        """How many pairs are seen."""
        # The places of the first and of the last key, in steps from the query's own.
        positions = np.arange(self.mask.seqlen_q) + self.mask.q_offset
        first, last = ((keys - positions) // -self.step for keys in (self.begins, self.ends))
        return float((first - last).sum())

    def keys(self) -> int:
        """How many keys any query sees, and those between them."""
        begins, ends = self.tiles(max(self.mask.seqlen_q, 1))
        return int((ends - begins).sum())

    def tiles(self, Br: int) -> tuple[Ints, Ints]:
        """Where the keys begin and end that each tile of Br queries sees between them."""
        starts = np.arange(0, self.mask.seqlen_q, Br)
        sees = self.ends > self.begins
        begins = np.minimum.reduceat(np.where(sees, self.begins, self.mask.seqlen_k), starts)
        ends = np.maximum.reduceat(np.where(sees, self.ends, 0), starts)
        return np.minimum(begins, ends), ends

    def tiles_of_keys(self, Bc: int) -> tuple[Ints, Ints]:
        """Where the queries begin and end that see any of each tile of Bc keys."""
        found = np.zeros((2, -(-self.mask.seqlen_k // Bc)), np.int64)
        # Of each row the tiles that it sees any of; rows with the same ones lie in runs.
        of_rows = np.stack([self.begins // Bc, -(-self.ends // Bc)])
        of_rows[:, self.ends == self.begins] = 0
        starts = np.flatnonzero(np.diff(of_rows, prepend=-1).any(axis=0))
        stops = np.append(starts, self.mask.seqlen_q)[1:]
        runs = [slice(*tiles) for tiles in of_rows[:, starts].T.tolist()]
        for run, stop in zip(runs, stops, strict=True):
            found[1, run] = stop
        for run, start in zip(reversed(runs), reversed(starts), strict=True):
            found[0, run] = start
        return found[0], found[1]


def count_pairs(mask: Mask, mod: str | None, row: int) -> float:
    """How many pairs the queries of a head see; parameters as of `Seen.of`.

    Where nothing but positions hides any, the field's convention holds, see `Mask.pairs`.
    """
    hides = mod is not None and BUILT_IN[mod].seen is not None
    return Seen.of(mask, mod, row).pairs() if hides else mask.pairs()
