"""Library arguments for a case's modifications: array shapes, keyword arguments, score spec."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from cupy_flash.calls.check.modifications import canonical, parse_modifications, score_spec
from cupy_flash.mods.shapes import Sizes
from cupy_flash.problem.arrays import MAX_ALIGNMENT
from cupy_flash.problem.score import ScoreSpec

from .built_in import BUILT_IN
from .mods import CaseMods

# Keyword arguments that hold arrays over (query, key) pairs.
OF_PAIRS = ("bias", "mask")
# Seed of the random numbers of dropout.
_SEED = 2024


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a name in `cupy_flash.problem.arrays.DTYPES`."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def shapes(mods: CaseMods, sizes: Sizes) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and dtype of each array by its keyword argument, without captured arrays.

    Raise ValueError if an array has a batch axis and the sequences are packed.
    """
    real = np.dtype(np.float64 if sizes.dtype == "float64" else np.float32)
    result: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    if mods.alibi:
        result["alibi_slopes"] = (sizes.heads_q,), real
    if mods.sinks:
        result["sinks"] = (sizes.heads_q,), real
    for name, dtype in zip(OF_PAIRS, (numpy_dtype(sizes.dtype), np.dtype(bool)), strict=True):
        if (span := getattr(mods, name)) is None:
            continue
        if span == "batch" and sizes.total_q is not None:
            raise ValueError(
                f"{name} batch has an axis of sequences, and packed ones have rows of their own; "
                "expected heads or shared"
            )
        heads = 1 if span == "shared" else sizes.heads_q
        batch = sizes.batch if span == "batch" else 1
        pairs = (batch, heads, sizes.seqlen_q, sizes.seqlen_k)
        packed = (heads, sizes.total_q or 0, sizes.seqlen_k)
        result[name] = pairs if sizes.total_q is None else packed, dtype
    return result


def array_bytes(mods: CaseMods, sizes: Sizes) -> int:
    """Return the total size of the arrays that `shapes` lists, in bytes."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes(mods, sizes).values())


def keywords(
    mods: CaseMods, sizes: Sizes, arrays: Mapping[str, Any], placed: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return the keyword arguments of the library's functions.

    Parameters
    ----------
    mods, sizes
        Modifications and sizes of the case.
    arrays
        Arrays of the shapes and dtypes that `shapes` returns.
    placed
        Function that moves captured arrays to the memory of `arrays`.
    """
    result = dict(arrays)
    if mods.window != CaseMods.window:
        result["window_size"] = tuple(mods.window)
    if mods.softcap is not None:
        result["softcap"] = mods.softcap
    if mods.dropout is not None:
        result["dropout_p"] = mods.dropout
        result["dropout_seed"] = placed(np.array([_SEED, 0], np.int64))
    if mods.mod is not None:
        built_in = BUILT_IN[mods.mod]
        captures = built_in.captures(sizes.heads_q, sizes.seqlen_k)
        mod = built_in.make(
            built_in.function,
            **{n: placed(x) if isinstance(x, np.ndarray) else x for n, x in captures.items()},
        )
        result[built_in.keyword] = mod
    return result


@functools.lru_cache(maxsize=256)
def score_of(
    mods: CaseMods, sizes: Sizes, *, causal: bool, backward: bool = False
) -> ScoreSpec | None:
    """Return the score spec that kernels are generated from, with derivatives if `backward`.

    Raise TypeError or ValueError if the library rejects the modifications.
    """
    unread = {name: _unread(*array) for name, array in shapes(mods, sizes).items()}
    result = parse_modifications(keywords(mods, sizes, unread, np.asarray), backward=backward)
    if result is None:
        return None
    mod_key, arrays, _ = result
    return score_spec(mod_key, canonical(mod_key, arrays, sizes), sizes, causal=causal)


def _unread(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a placeholder that has the strides and alignment of a new array, but little memory."""
    if 0 in shape:
        return np.empty(shape, dtype)
    steps = [dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    memory = np.empty(MAX_ALIGNMENT // dtype.itemsize, dtype)
    return np.lib.stride_tricks.as_strided(memory, shape, steps, writeable=False)


def restricted(
    given: Mapping[str, Any],
    mods: CaseMods,
    *,
    batch: int,
    keys: int,
    heads: slice = slice(None),
    rows: slice = slice(None),
) -> dict[str, Any]:
    """Return the keyword arguments of a separate call on some heads and rows of one sequence.

    Parameters
    ----------
    given
        Keyword arguments of the whole call.
    mods
        Modifications of the case.
    batch
        Index of the sequence.
    keys
        Number of keys of the sequence.
    heads
        Range of query heads.
    rows
        Range of query rows: rows of the packed array or, if it is not packed, of the sequence.
    """
    result = dict(given)
    for name in ("alibi_slopes", "sinks"):
        if name in result:
            result[name] = result[name][heads]
    for name in OF_PAIRS:
        if name in result:
            array = result[name]
            array = array[None] if array.ndim == 3 else array
            first = batch if array.shape[0] > 1 else 0
            of_heads = heads if array.shape[1] > 1 else slice(None)
            result[name] = array[first : first + 1, of_heads, rows, :keys]
    built_in = BUILT_IN[mods.mod] if mods.mod else None
    if built_in is not None and built_in.head_axis is not None:
        mod = result[built_in.keyword]
        captures = dict(mod.captures)
        captures[built_in.head_axis] = captures[built_in.head_axis][heads]
        result[built_in.keyword] = built_in.make(built_in.function, **captures)
    return result
