"""Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864), in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.strided import array_module


def rotated(x: Any, cos: Any, sin: Any, positions: NDArray[np.int64], *, interleaved: bool) -> Any:
    """Return ``x * cos + partner * sin``, where the partner of the pair (a, b) is (-b, a).

    Parameters
    ----------
    x : array, shape (batch, seqlen, heads, head_dim)
        Rows to rotate. Columns from rotary_dim on are not changed.
    cos, sin : array, shape (rows, rotary_dim / 2)
        Cosine and sine of the angle of each position and pair. A position outside the tables uses
        the nearest row.
    positions : integer array, shape (batch, seqlen)
        Position of each row of `x`.
    interleaved
        Whether columns 2i and 2i + 1 form a pair; otherwise columns i and i + rotary_dim / 2 do.
    """
    xp = array_module(x)
    x = x.astype(np.float64)
    half = cos.shape[1]
    table_rows = xp.asarray(np.minimum(np.maximum(positions, 0), len(cos) - 1))
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    columns = np.arange(2 * half)
    # For each column: the index of its pair, its partner, and whether it is the first of the pair.
    pair = columns // 2 if interleaved else columns % half
    is_first = columns % 2 == 0 if interleaved else columns < half
    partner = columns + np.where(is_first, 1, -1) * (1 if interleaved else half)
    sign = xp.asarray(np.where(is_first, -1.0, 1.0))
    c, s = (table.astype(np.float64)[table_rows][:, :, None, pair] for table in (cos, sin))
    with np.errstate(all="ignore"):
        turned = turning * c + sign * turning[..., partner] * s
    return xp.concatenate([turned, rest], axis=-1)
