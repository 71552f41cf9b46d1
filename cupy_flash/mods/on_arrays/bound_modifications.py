"""Modifications of a call with their arrays, for the CPU backend and the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupy_flash.mods.keywords import DROPOUT_STEPS, Window
from cupy_flash.mods.on_arrays.scores import Scores
from cupy_flash.problem.mask import Mask


class Dropout(NamedTuple):
    """Dropout of a call whose seed has been read.

    Attributes
    ----------
    threshold
        Probability of dropout in steps of 1 / 256.
    seed, offset
        Seed and offset of the random numbers, from -2^63 to below 2^63.
    """

    threshold: int
    seed: int
    offset: int

    @classmethod
    def of(cls, threshold: int, dropout_seed: Any) -> Dropout:
        """Return the dropout of a call, given seed and offset in host memory."""
        seed, offset = dropout_seed.tolist()
        return cls(threshold, seed, offset)

    @property
    def kept_share(self) -> float:
        """Probability that a weight is kept."""
        return 1 - self.threshold / DROPOUT_STEPS


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
    dropout
        Dropout of the weights after the softmax, or None.
    """

    scores: Scores = Scores()
    window: Window = Window()
    prefix_lens: Any = None
    seqlens_k: Any = None
    sinks: Any = None
    q_offset: Any = None
    dropout: Dropout | None = None

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
