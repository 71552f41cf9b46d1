"""Mask of dropout as an array: the checks of `cupy_flash.dropout_mask`, and its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_flash.arrays.kinds import is_number_or_list, read, result_converter, seed_and_offset
from cupy_flash.arrays.strided import array_module, require_shape
from cupy_flash.mods.keywords import DROPOUT_SEED, checked_dropout
from cupy_flash.mods.on_arrays.dropout import Key, kept_pairs
from cupy_flash.problem.values import count


def mask(
    batch: int, heads_q: int, seqlen_q: int, seqlen_k: int, dropout_p: float, dropout_seed: Any
) -> Any:
    """Return the result of `cupy_flash.dropout_mask`."""
    sizes = {"batch": batch, "heads_q": heads_q, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    shape = tuple(count(name, size) for name, size in sizes.items())
    threshold = checked_dropout(dropout_p)
    seed, convert = _read_seed(dropout_seed)
    xp = array_module(seed)
    if threshold is None:
        return convert(xp.ones(shape, bool))
    indices = xp.arange(shape[0])[:, None], xp.arange(shape[1])
    ranges = slice(0, shape[2]), slice(0, shape[3])
    return convert(xp.ascontiguousarray(kept_pairs(threshold, Key.of(seed), *indices, *ranges, xp)))


def _read_seed(dropout_seed: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return seed and offset as an int64 array on their device, and a converter of the result."""
    if is_number_or_list(dropout_seed):
        return seed_and_offset(DROPOUT_SEED, dropout_seed, on_host=True), lambda result: result
    seed = read(DROPOUT_SEED, dropout_seed)
    require_shape(DROPOUT_SEED, seed, (2,), "the seed and the offset")
    if seed.dtype.kind not in "iu":
        raise TypeError(f"dropout_seed has dtype {seed.dtype}; expected int64")
    return seed.astype(np.int64, copy=False), result_converter(DROPOUT_SEED, dropout_seed)
