"""Keys that the queries of a case attend to, as ranges; FLOPs and bytes follow from them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.problem.mask import Mask

from .built_in import BUILT_IN

Ints = NDArray[np.int64]


class VisibleKeys(NamedTuple):
    """Visible keys of each query of one head.

    Attributes
    ----------
    mask
        Positional mask of one sequence.
    begins, ends : int64 arrays, (seqlen_q,)
        Range [begin, end) that holds the visible keys of each query; empty if there are none.
    step
        Distance between visible keys within the range; 1 if all are visible.
    """

    mask: Mask
    begins: Ints
    ends: Ints
    step: int = 1

    @classmethod
    def of(cls, mask: Mask, mod: str | None = None, mod_keys: int = 0) -> VisibleKeys:
        """Return the visible keys under a positional mask and a modification in `BUILT_IN`.

        Parameters
        ----------
        mask
            Positional mask of one sequence.
        mod
            Name of the modification. Mask arrays are ignored: no kernel can skip pairs by them.
        mod_keys
            Number of keys that the modification was built for: of a cache, its capacity.
        """
        rows = np.arange(mask.seqlen_q)
        begins, ends = mask.begins(rows), mask.ends(rows)
        built_in = BUILT_IN[mod] if mod else None
        if built_in is None or built_in.visible_range is None:
            return cls(mask, begins, np.maximum(begins, ends))
        first, last = built_in.visible_range(rows + mask.q_offset, mod_keys)
        begins = np.maximum(begins, first)
        return cls(mask, begins, np.maximum(begins, np.minimum(ends, last)), built_in.step)

    def pairs(self) -> float:
        """Return the number of visible pairs."""
        # A key in [begin, end) is visible if its distance to the query's position, which is in
        # (position - end, position - begin], is a multiple of the step.
        positions = np.arange(self.mask.seqlen_q) + self.mask.q_offset
        first, last = ((keys - positions) // -self.step for keys in (self.begins, self.ends))
        return float((first - last).sum())

    def keys(self) -> int:
        """Return the size of the smallest range that holds every visible key."""
        begins, ends = self.tiles(max(self.mask.seqlen_q, 1))
        return int((ends - begins).sum())

    def tiles(self, Br: int) -> tuple[Ints, Ints]:
        """Return begin and end of the keys that are visible to each tile of Br queries."""
        starts = np.arange(0, self.mask.seqlen_q, Br)
        sees = self.ends > self.begins
        begins = np.minimum.reduceat(np.where(sees, self.begins, self.mask.seqlen_k), starts)
        ends = np.maximum.reduceat(np.where(sees, self.ends, 0), starts)
        return np.minimum(begins, ends), ends

    def tiles_of_keys(self, Bc: int) -> tuple[Ints, Ints]:
        """Return begin and end of the queries that attend to any key of each tile of Bc keys."""
        result = np.zeros((2, -(-self.mask.seqlen_k // Bc)), np.int64)
        # Range of key tiles that each query attends to. Neighbouring queries with equal ranges form
        # a run.
        tile_ranges = np.stack([self.begins // Bc, -(-self.ends // Bc)])
        tile_ranges[:, self.ends == self.begins] = 0
        starts = np.flatnonzero(np.diff(tile_ranges, prepend=-1).any(axis=0))
        stops = np.append(starts, self.mask.seqlen_q)[1:]
        runs = [slice(*tiles) for tiles in tile_ranges[:, starts].T.tolist()]
        for run, stop in zip(runs, stops, strict=True):
            result[1, run] = stop
        for run, start in zip(reversed(runs), reversed(starts), strict=True):
            result[0, run] = start
        return result[0], result[1]


def count_pairs(mask: Mask, mod: str | None, mod_keys: int) -> float:
    """Return the number of visible pairs of one head; `VisibleKeys.of` describes the parameters.

    If only positions mask pairs, the FLOP convention of `Mask.pairs` applies.
    """
    masks_pairs = mod is not None and BUILT_IN[mod].visible_range is not None
    return VisibleKeys.of(mask, mod, mod_keys).pairs() if masks_pairs else mask.pairs()
