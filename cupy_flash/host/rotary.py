"""Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash.arrays.strided import array_module


def rotated(
    x: Any,
    cos: Any,
    sin: Any,
    first_positions: Any,
    *,
    interleaved: bool,
    advance: bool,
    compute: Any,
) -> Any:
    """The leading columns of ``x`` turned, pair by pair, by the angles of each row's position.

    Parameters
    ----------
    x : numpy.ndarray or cupy.ndarray, (batch, seqlen, heads, head_dim)
    cos, sin : same kind of array, (rows, rotary_dim / 2)
        Of the angle of each position and pair. A position outside of the table takes the nearest
        row of it.
    first_positions : numpy.ndarray, (batch,)
        Position of the first row of each sequence.
    interleaved : bool
        Whether columns (2i, 2i + 1) are a pair; else (i, i + rotary_dim / 2) are.
    advance : bool
        Whether row ``i`` is ``i`` positions further; else all rows are at the first position.
    compute : dtype
        Of the products and sums, and of the result.

    Returns
    -------
    array of dtype ``compute``, the shape of ``x``
    """
    seqlen, half = x.shape[1], cos.shape[1]
    positions = np.asarray(first_positions)[:, None] + (np.arange(seqlen) if advance else 0)
    rows = np.clip(np.broadcast_to(positions, x.shape[:2]), 0, len(cos) - 1)
    rows = array_module(x).asarray(rows)
    # (batch, seqlen, 1, half): the same for all heads.
    cos, sin = (table[rows].astype(compute)[:, :, None] for table in (cos, sin))
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    turned = x.astype(compute)
    a, b = turned[..., first].copy(), turned[..., second].copy()
    turned[..., first] = a * cos - b * sin
    turned[..., second] = a * sin + b * cos
    return turned
