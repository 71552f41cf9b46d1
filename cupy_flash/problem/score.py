"""What a call does to scores, as far as a kernel is made for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# exp(score) is then between 2^-74 and 2^74: products with values from 1e-14 to 1e10, and their sums
# over two million keys, are normal numbers of float32, even where all scores are as low or as high.
LARGEST_BOUNDED = 51.0


@dataclass(frozen=True)
class BiasSpec:
    """How a bias lies whose elements along the keys lie one behind the other.

    Attributes
    ----------
    dtype
        Of its elements.
    strides
        Of batch, head and row, in elements; 0 where it is the same for all.
    alignment
        Bytes (a power of two, at most 16) that every row starts at a multiple of.
    """

    dtype: str
    strides: tuple[int, int, int]
    alignment: int


@dataclass(frozen=True)
class ScoreSpec:
    """Modifications of a call: the text that a unit has for them, and what planning looks at.

    Attributes
    ----------
    left, right
        Of the window that bounds keys by their distance; None has no bound.
    prefix
        Whether each sequence has keys that are seen in spite of causality.
    offsets
        Whether each sequence has its own position of the first query.
    seqused_q
        Whether each sequence has queries that are not used, behind those that are.
    sinks
        Whether each head has a score without a value.
    changes_scores, hides_pairs
        Whether the text does.
    text
        C++ of ``ModArguments`` and ``Mods`` (`kernels_cu/score/modify.cuh`).
    dtype
        Of ``ModArguments``.
    may_be_mapped
        Whether all that the text hides a block map can tell (`cupy_flash.calls.block_maps`).
    block
        Rows and keys of the blocks that the user's mask is the same in, if any.
    reads_pairs
        Whether the text reads an element of an array for each pair, or to change scores of each
        key.
    bias
        The bias, where each sequence has its own rows and they are contiguous.
    is_bounded
        Whether no score is beyond +-`LARGEST_BOUNDED`, whatever queries and keys are.
    conceals
        Whether functions or arrays may hide all keys, or all but one, that positions let a row see.
    has_low_scores
        Whether finite scores may be so low that, as exponents of two, they are the lowest number.
    changes_slope
        Of a backward pass: whether derivatives by the scaled score may be others than 1.
    differentiable
        Of a backward pass: arrays that scores are read from whose gradients are asked for, as
        members of ``ModArguments``, by the number that the text gives them.
    """

    left: int | None
    right: int | None
    prefix: bool
    offsets: bool
    seqused_q: bool
    sinks: bool
    changes_scores: bool
    hides_pairs: bool
    text: str
    dtype: np.dtype
    may_be_mapped: bool = False
    block: tuple[int, int] | None = None
    reads_pairs: bool = False
    bias: BiasSpec | None = None
    is_bounded: bool = False
    has_low_scores: bool = False
    conceals: bool = False
    changes_slope: bool = False
    differentiable: tuple[str, ...] = ()

    @property
    def only_sinks(self) -> bool:
        """Whether scores, and which keys are seen, are those of a plain call."""
        bounds = self.left is not None or self.right is not None or self.prefix
        places = self.offsets or self.seqused_q
        return not (bounds or places or self.changes_scores or self.hides_pairs)
