"""Modifications of a call with their arrays, for the CPU backend and the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupy_flash.mods.keywords import Window
from cupy_flash.mods.on_arrays.scores import Scores
from cupy_flash.problem.mask import Mask


class BoundModifications(NamedTuple):
    """Modifications of a call with their arrays.

    Attributes
    ----------
    scores
        Changes of scores, and masks other than those by position.
    window
        Window of positions.
    prefix_lens, seqlens_k : arrays in host memory, (batch,), or None
        Number of first keys of each sequence that are visible in spite of causality and the window,
        and number of keys of each sequence.
    sinks : array, (heads_q,), or None
    q_offset : array in host memory, (batch,), or None
        Position of the first query of each sequence among its keys.
    """

    scores: Scores = Scores()
    window: Window = Window()
    prefix_lens: Any = None
    seqlens_k: Any = None
    sinks: Any = None
    q_offset: Any = None

    @property
    def masks_differ(self) -> bool:
        """Whether the masks by position differ between sequences."""
        sequence_arrays = (self.prefix_lens, self.seqlens_k, self.q_offset)
        return any(array is not None for array in sequence_arrays)

    def mask_with(self, mask: Mask, b: int) -> Mask:
        """Return the mask by position of a sequence, with the window and the prefix.

        With a prefix the mask has no left bound: `Scores.apply` masks the keys before the bound.
        """
        seqlen_k = mask.seqlen_k
        if self.seqlens_k is not None:
            seqlen_k = min(max(int(self.seqlens_k[b]), 0), seqlen_k)
        if self.q_offset is not None:
            mask = mask._replace(q_offset=int(self.q_offset[b]))
        elif self.scores.seqused_q is not None:
            mask = mask.with_last(min(max(int(self.scores.seqused_q[b]), 0), mask.seqlen_q))
        left, right = self.window
        if self.prefix_lens is None:
            return mask._replace(seqlen_k=seqlen_k, left=left, right=right)
        return mask._replace(seqlen_k=seqlen_k, right=right, prefix=int(self.prefix_lens[b]))
