"""What a call does to scores, as far as a kernel is made for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ScoreSpec:
    """Modifications of a call: the text that a unit has for them, and what planning looks at.

    Attributes
    ----------
    left, right
        Of the window that bounds keys by their distance; None has no bound.
    prefix
        Whether each sequence has keys that are seen in spite of causality.
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
    """

    left: int | None
    right: int | None
    prefix: bool
    sinks: bool
    changes_scores: bool
    hides_pairs: bool
    text: str
    dtype: np.dtype
    may_be_mapped: bool = False
