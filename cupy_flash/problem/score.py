"""Mask and score modifications of a call, described as far as kernels depend on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Bound of scores whose softmax needs no row maximum: exp(score) is between 2^-74 and 2^74. Products
# with values from 1e-14 to 1e10, and sums over two million keys, are then normal float32 numbers.
LARGEST_BOUNDED = 51.0


@dataclass(frozen=True)
class BiasSpec:
    """Layout of a bias whose last axis, that of the keys, is contiguous.

    Attributes
    ----------
    dtype
        Name of the dtype of the bias.
    strides
        Strides of the batch, head and row axes, in elements; 0 along an axis that broadcasts.
    alignment
        Alignment of every row's address in bytes: a power of two, at most 16.
    """

    dtype: str
    strides: tuple[int, int, int]
    alignment: int


@dataclass(frozen=True)
class ScoreSpec:
    """Modifications of a call: their generated CUDA source, and what planning depends on.

    Attributes
    ----------
    left, right
        Bounds of a window on the distance from query to key; None is no bound.
    prefix
        Whether sequences have leading keys that are visible in spite of causality (prefix_lens).
    offsets
        Whether each sequence has its own position of the first query (q_offset).
    seqused_q
        Whether sequences may have unused query rows at their end (seqused_q).
    sinks
        Whether each query head has a sink: one more score, which has no value.
    changes_scores, masks_pairs
        Whether `cuda_source` changes scores, and whether it masks pairs.
    cuda_source
        Generated CUDA source of ``ModArguments`` and ``Mods`` (`kernels_cu/score/modify.cuh`).
    dtype
        Dtype of the struct ``ModArguments``.
    block_mask_suffices
        Whether a block mask covers all pairs that `cuda_source` masks (`calls/gpu/block_masks.py`).
    mask_varies
        Whether the user's mask depends on the batch index, and on the query head.
    block
        Rows and keys of the blocks in which the user's mask is constant, or None.
    reads_pairs
        Whether `cuda_source` loads an array element per pair, or per key in order to change scores.
    bias
        Layout of the bias if it has four axes and contiguous rows, otherwise None.
    is_bounded
        Whether all scores are within +-`LARGEST_BOUNDED`, for any queries and keys.
    conceals
        Whether functions or arrays may mask all keys, or all but one, that a row attends to by its
        position.
    has_low_scores
        Whether a finite score, as an exponent of two, may become the lowest finite number.
    changes_slope
        Whether the derivative of new scores with respect to scaled scores may differ from 1.
    differentiable
        Members of ``ModArguments`` that are captured arrays with gradients, in a backward pass. The
        position in the tuple is the array's number in `cuda_source`.
    dropout
        Whether weights are dropped at random after the softmax (dropout_p).
    """

    left: int | None
    right: int | None
    prefix: bool
    offsets: bool
    seqused_q: bool
    sinks: bool
    changes_scores: bool
    masks_pairs: bool
    cuda_source: str
    dtype: np.dtype
    block_mask_suffices: bool = False
    mask_varies: tuple[bool, bool] = (False, False)
    block: tuple[int, int] | None = None
    reads_pairs: bool = False
    bias: BiasSpec | None = None
    is_bounded: bool = False
    has_low_scores: bool = False
    conceals: bool = False
    changes_slope: bool = False
    differentiable: tuple[str, ...] = ()
    dropout: bool = False

    @property
    def only_sinks(self) -> bool:
        """Whether no modification other than sinks affects scores or visible keys."""
        bounds = self.left is not None or self.right is not None or self.prefix
        places = self.offsets or self.seqused_q
        return not (bounds or places or self.changes_scores or self.masks_pairs)
