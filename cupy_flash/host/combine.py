"""Merging partial results in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host.quiet import quiet

Array = NDArray[Any]


@quiet
def merge(out_partial: Array, lse_partial: Array, out: Array, sinks: Array | None = None) -> Array:
    """Write what the parts come to into ``out``, and return its log-sum-exp.

    The arguments, as of `cupy_flash.combine`, are taken as checked.
    """
    largest = lse_partial.max(axis=0)
    of_heads = None
    if sinks is not None:
        of_heads = sinks.astype(largest.dtype, copy=False)[:, None]
        largest = np.maximum(largest, of_heads)
    # As in combine.cu: of no use where it is infinite.
    base = np.where(np.isfinite(largest), largest, largest.dtype.type(0))
    weights = np.exp(lse_partial - base)
    total = weights.sum(axis=0)
    if of_heads is not None:
        total += np.exp(of_heads - base)
    lse = base + np.log(total)
    weights /= np.where(total == 0, total.dtype.type(1), total)
    # From (..., heads_q, seqlen_q) to the order of out, one split at a time: at most a copy
    # of out is held in the precision of the sums.
    by_row = weights.swapaxes(-1, -2)[..., None]
    saw_nothing = (lse_partial == -np.inf).swapaxes(-1, -2)[..., None]
    merged = np.zeros(out.shape, lse.dtype)
    for partial, weight, excluded in zip(out_partial, by_row, saw_nothing, strict=True):
        merged += weight * np.where(excluded, 0, partial.astype(lse.dtype, copy=False))
    out[...] = merged
    return np.asarray(lse)
