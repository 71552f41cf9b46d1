"""Dropout of the reference formulas: the mask of the definition, evaluated for one pair at a time.

This module shares no code with `cupy_flash.mods.on_arrays.dropout`, whose results it checks. The
definition is in docs/guide/masks.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash.mods.on_arrays.bound_modifications import Dropout
from cupy_flash.mods.on_arrays.scores import Pairs

_BITS = 2**32 - 1


def factors(dropout: Dropout | None, pairs: Pairs, dtype: np.dtype[Any], xp: Any = np) -> Any:
    """Return the factors of dropout on the weights of some pairs: 0 or 1 / (1 - p).

    Without dropout the factor is 1.
    """
    if dropout is None:
        return dtype.type(1)
    kept = random_bytes(dropout, pairs, xp) >= dropout.threshold
    return xp.where(kept, dtype.type(256 / (256 - dropout.threshold)), dtype.type(0))


def random_bytes(dropout: Dropout, pairs: Pairs, xp: Any = np) -> Any:
    """Return the random number of each pair, from 0 to 255, as a uint64 array.

    A weight is dropped if the number is below the threshold.
    """
    key = (dropout.seed ^ dropout.offset * 0x9E3779B97F4A7C15) % 2**64
    b, h, i, j = (
        xp.asarray(index).astype(np.int64) for index in (pairs.b, pairs.h, pairs.row, pairs.j)
    )
    counter = [i // 16 * 4 + i % 8 // 2, j // 16 * 4 + j % 8 // 2, h, b]
    words = [
        xp.broadcast_to(word, np.broadcast_shapes(*(word.shape for word in counter)))
        for word in counter
    ]
    first, second, third, fourth = _philox(words, key & _BITS, key >> 32)
    right_key, lower_row = j % 2 == 1, i % 2 == 1
    word = xp.where(
        lower_row, xp.where(right_key, fourth, third), xp.where(right_key, second, first)
    )
    byte = 2 * (i % 16 // 8) + j % 16 // 8
    return (word >> (8 * byte).astype(np.uint64)) & np.uint64(255)


def _philox(counter: list[Any], low: int, high: int) -> list[Any]:
    """Return the result of Philox 4x32-10 for each counter, of four uint64 arrays below 2^32."""
    bits, half = np.uint64(_BITS), np.uint64(32)
    a, b, c, d = (word.astype(np.uint64) for word in counter)
    for step in range(10):
        of_a, of_c = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        low_key = np.uint64((low + step * 0x9E3779B9) & _BITS)
        high_key = np.uint64((high + step * 0xBB67AE85) & _BITS)
        a, b, c, d = (
            (of_c >> half) ^ b ^ low_key,
            of_c & bits,
            (of_a >> half) ^ d ^ high_key,
            of_a & bits,
        )
    return [a, b, c, d]
