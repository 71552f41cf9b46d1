"""Copies of lengths, offsets and arrays of modifications that kernels cannot read in place."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.strided import (
    array_module,
    as_cupy,
    as_int32,
    dtype_name,
    has_contiguous_rows,
    has_whole_strides,
    is_aligned,
    readable_in_place,
)
from cupy_flash.calls.arguments import INT32, call_arrays
from cupy_flash.calls.options import DENSE_KINDS, Options
from cupy_flash.mods.keywords import ARRAYS, DROPOUT_SEED, VECTORS

_CONVERTED = INT32.union(ARRAYS, (DROPOUT_SEED,))
# Arrays that the argument struct describes without strides, so that they must be contiguous.
_CONTIGUOUS = INT32.union((DROPOUT_SEED,))
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


class Converted(NamedTuple):
    """Shape and dtype of the copy of an array that a call has to convert."""

    shape: tuple[int, ...]
    dtype: np.dtype


def conversions(arrays: Any, options: Options | None = None) -> dict[str, Converted]:
    """Return the shape and dtype of the copy of each array that a call has to copy, by name.

    Lengths, offsets and indices of any integer dtype become int32. ALiBi slopes and sinks of any
    float dtype become float32 or float64, and a single number is repeated for each head. A seed of
    any integer dtype becomes int64. Arrays that are not aligned to their element size are copied to
    aligned memory.

    Parameters
    ----------
    arrays
        Record of the arrays of a call, all on the same device.
    options
        Options of the call; None for a merge of partial results.
    """
    result = {}
    for index, name in _indices_and_names(arrays.__class__):
        given = arrays[index]
        if given is None:
            continue
        array = as_cupy(given)
        shape, dtype = tuple(array.shape), array.dtype
        if name in INT32:
            if dtype.kind in "iu" and _can_be_cast(array):
                dtype = _INT32
        elif name == DROPOUT_SEED:
            if dtype.kind in "iu" and _can_be_cast(array):
                dtype = _INT64
        elif name in VECTORS:
            shape, dtype = _head_values(name, array, arrays, options)
        if not _is_readable(name, array) or dtype != array.dtype or shape != array.shape:
            result[name] = Converted(shape, dtype)
    return result


# Cached, because inspecting the names of all arrays of a call would take 3 us.
@functools.lru_cache(maxsize=256)
def _indices_and_names(record: Any) -> tuple[tuple[int, str], ...]:
    """Return the index and name of each field of a record that may have to be copied."""
    fields: tuple[str, ...] = record._fields
    return tuple((index, name) for index, name in enumerate(fields) if name in _CONVERTED)


def converted(arrays: Any, options: Options | None = None) -> Any:
    """Return the record with each array that `conversions` lists replaced by its copy.

    Raises
    ------
    ValueError
        If int32 cannot hold an integer of an array in host memory.
    """
    wanted = conversions(arrays, options)
    if not wanted:
        return arrays
    return arrays._replace(
        **{name: _copy(name, getattr(arrays, name), *spec) for name, spec in wanted.items()}
    )


def readable_copies(arguments: Any, options: Options, in_place: tuple[str, ...]) -> dict[str, Any]:
    """Return the arrays of a call by name, with copies of those that kernels cannot read in place.

    Arrays named `in_place` and those of modifications are left out.
    """
    return {
        name: readable_in_place(
            array, one_batch=options.kind in DENSE_KINDS, inner=4 if name == "qkv" else 3
        )
        for name, array in call_arrays(arguments).items()
        if name not in in_place
    }


def contiguous_copies(arrays: Any, *names: str) -> dict[str, Any]:
    """Return copies, by name, of the arrays on a GPU that are not contiguous or not aligned."""
    given = {name: as_cupy(getattr(arrays, name)) for name in names}
    return {
        name: array_module(array).ascontiguousarray(readable_in_place(array))
        for name, array in given.items()
        if array is not None and not (array.flags.c_contiguous and is_aligned(array))
    }


def _copy(name: str, given: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    array = as_cupy(readable_in_place(given))
    if name in INT32:
        return as_int32(name, array)
    # Numbers out of range become infinite or 0, whatever NumPy error state the caller has set.
    with np.errstate(all="ignore"):
        if shape == array.shape:
            return array.astype(dtype, copy=False)
        return array_module(array).broadcast_to(array, shape).astype(dtype, order="C")


def _head_values(name: str, array: Any, arrays: Any, options: Options | None) -> Converted:
    """Return the shape and dtype in which kernels read an array of ALiBi slopes or sinks."""
    like = as_cupy(arrays.like)
    shape, dtype = tuple(array.shape), array.dtype
    if array.ndim == 0 and like.ndim >= 3:
        axis = -3 if options is not None and options.layout == "bhsd" else -2
        shape = (like.shape[axis],)
    accumulator = "float64" if dtype_name(like) == "float64" else "float32"
    as_they_are = (accumulator,) if name == "alibi_slopes" else (accumulator, dtype_name(like))
    is_real = dtype.kind == "f" or dtype_name(array) == "bfloat16"
    is_read = dtype.isnative and dtype_name(array) in as_they_are
    if is_real and not is_read and _can_be_cast(array):
        dtype = np.dtype(accumulator)
    return Converted(shape, dtype)


def _is_readable(name: str, array: Any) -> bool:
    if isinstance(array, np.ndarray):
        # Reading the flags takes 0.1 us, reading the address of a NumPy array 1 us.
        return array.flags.aligned and has_whole_strides(array)
    is_contiguous = name not in _CONTIGUOUS or has_contiguous_rows(array)
    return is_contiguous and has_whole_strides(array) and is_aligned(array)


def _can_be_cast(array: Any) -> bool:
    """Return whether `astype` can convert the array. CuPy requires the native byte order."""
    return bool(array.dtype.isnative) or isinstance(array, np.ndarray)
