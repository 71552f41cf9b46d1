"""Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864)."""

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
    """Rotate the leading columns of ``x`` by positions counted from each sequence's first position.

    Parameters
    ----------
    x : numpy.ndarray or cupy.ndarray, (batch, seqlen, heads, head_dim)
    cos, sin, interleaved, compute
        See `rotated_at`.
    first_positions : numpy.ndarray, (batch,)
        Position of the first row of each sequence.
    advance : bool
        Whether row ``i`` has the first position plus ``i``, not the first position itself.

    Returns
    -------
    array of dtype ``compute``, the shape of ``x``
    """
    steps = np.arange(x.shape[1] if advance else 1)
    positions = np.asarray(first_positions)[:, None] + steps
    return rotated_at(x, cos, sin, positions, interleaved=interleaved, compute=compute)


def rotated_at(
    x: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    *,
    interleaved: bool,
    compute: Any,
    transposed: bool = False,
) -> Any:
    """Rotate pairs of the leading columns of ``x`` by the angles of each row's position.

    Parameters
    ----------
    x : numpy.ndarray or cupy.ndarray, (..., heads, head_dim)
    cos, sin : arrays of the same library as x, (rows, rotary_dim / 2)
        Cosine and sine of the angle of each position and pair. A position outside of the table
        uses the nearest row of the table.
    positions : numpy.ndarray, or array of the same library as x
        Position of each row of x: integers that broadcast to the axes of x before heads.
    interleaved : bool
        Whether the pairs are columns (2i, 2i + 1), not columns (i, i + rotary_dim / 2).
    compute : dtype
        Dtype of the products and sums, and of the result.
    transposed : bool
        Whether to rotate by the negative angles, as for gradients.

    Returns
    -------
    array of dtype ``compute``, the shape of ``x``
    """
    xp, half = array_module(x), cos.shape[1]
    rows = xp.clip(xp.asarray(positions).astype(np.int64), 0, len(cos) - 1)
    # Shape (..., 1, half): all heads of a row have the same angles.
    cos, sin = (table[rows].astype(compute)[..., None, :] for table in (cos, sin))
    if transposed:
        sin = -sin
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    result = x.astype(compute)
    a, b = result[..., first].copy(), result[..., second].copy()
    result[..., first] = a * cos - b * sin
    result[..., second] = a * sin + b * cos
    return result
