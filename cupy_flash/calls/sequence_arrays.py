"""The arrays of a call on packed or cached sequences, and the problem that they pose.

Shapes, dtypes and options are checked for every kind of array; contents, which say where sequences
lie, only of arrays in host memory (`check_varlen_contents`, `check_cache_contents`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cupy_flash.calls.arrays import (
    address_of,
    dtype_name,
    normalize,
    normalize_int32,
    normalize_out,
    require_axes,
    require_float,
    require_in_place,
    require_int32,
    require_shape,
    spec_of,
    way_back,
)
from cupy_flash.problem.problem import (
    ArraySpec,
    Problem,
    check_bool,
    check_count,
    check_no_self_overlap,
    make_sequences_problem,
)
from cupy_flash.problem.tile import FrozenTile


class VarlenArrays(NamedTuple):
    """Arrays of `cupy_flash.flash_attention_varlen`."""

    q: Any
    k: Any
    v: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any = None
    block_table: Any = None
    out: Any = None


class CacheArrays(NamedTuple):
    """Arrays of `cupy_flash.flash_attention_with_kvcache`; cache_seqlens None if it is an int."""

    q: Any
    k_cache: Any
    v_cache: Any
    k: Any = None
    v: Any = None
    cache_seqlens: Any = None
    cache_batch_idx: Any = None
    block_table: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    out: Any = None


class VarlenOptions(NamedTuple):
    """What such a call asks for besides its arrays; hashable, as part of the call's key."""

    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool = False
    softmax_scale: float | None = None
    return_lse: bool = False
    num_splits: int = 0
    batch_invariant: bool = False
    family: str | None = None
    tile: FrozenTile = None


class CacheOptions(NamedTuple):
    """The same of a call with a cache."""

    causal: bool = False
    softmax_scale: float | None = None
    return_lse: bool = False
    num_splits: int = 0
    batch_invariant: bool = False
    family: str | None = None
    tile: FrozenTile = None
    rotary_interleaved: bool = True


_INT32 = frozenset(
    {
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "cache_seqlens",
        "cache_batch_idx",
        "block_table",
    }
)
# Read in place or not at all: a copy of a cache would cost more than the call.
CACHES = ("k_cache", "v_cache")

_Arrays = TypeVar("_Arrays", VarlenArrays, CacheArrays)


def normalized(given: _Arrays) -> tuple[_Arrays, Callable[[Any], Any]]:
    """Every array as a NumPy or CuPy one, all of one kind, and the way back to q's.

    Raises
    ------
    TypeError
        For what is no array, lies elsewhere than q or is of a dtype that nothing reads.
    """
    q = normalize("q", given.q)
    convert = way_back("q", given.q)
    on_host = isinstance(q, np.ndarray)
    found: list[Any] = []
    for name, array in zip(given._fields, given, strict=True):
        if array is None and name in given._field_defaults:
            found.append(None)
        elif name in _INT32:
            found.append(normalize_int32(name, array, on_host=on_host))
        else:
            read = normalize_out if name == "out" else normalize
            normal = q if name == "q" else read(name, array)
            if isinstance(normal, np.ndarray) != on_host:
                host, device = ("q", name) if on_host else (name, "q")
                raise TypeError(
                    f"{host} lies in host memory and {device} on a GPU; move one of them"
                )
            found.append(normal)
    return type(given)(*found), convert


def varlen_problem(arrays: VarlenArrays, options: VarlenOptions) -> Problem:
    """The problem that NumPy or CuPy arrays of packed sequences pose.

    Raises
    ------
    TypeError, ValueError
        For what no kernel computes; the message names the argument.
    """
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, out = arrays
    _check_int32(arrays)
    check_bool("return_lse", options.return_lse)
    packed = "total length, heads and head_dim"
    require_axes("q", q, 3, packed)
    for name, array in (("k", k), ("v", v)):
        if block_table is None:
            require_axes(name, array, 3, packed)
        else:
            require_axes(name, array, 4, "pages, page_size, heads and head_dim, as of block_table")
    if out is not None:
        expected = (*q.shape[:2], v.shape[-1])
        require_shape("out", out, expected, "as q, but with the head_dim of v")
    require_axes("cu_seqlens_q", cu_seqlens_q, 1, "where each sequence begins, and the end")
    if cu_seqlens_q.shape[0] == 0:
        raise ValueError("cu_seqlens_q is empty; expected batch + 1 integers, at least one")
    batch = cu_seqlens_q.shape[0] - 1
    require_shape("cu_seqlens_k", cu_seqlens_k, (batch + 1,), "as cu_seqlens_q")
    if seqused_k is not None:
        require_shape("seqused_k", seqused_k, (batch,), "one length for each sequence")
    return make_sequences_problem(
        *_specs(q, k, v, out),
        batch=batch,
        # None is how the constructor is told of a cache.
        max_seqlen_q=_given("max_seqlen_q", options.max_seqlen_q),
        max_seqlen_k=_given("max_seqlen_k", options.max_seqlen_k),
        block_table=_table(block_table, batch),
        num_splits=options.num_splits,
        batch_invariant=options.batch_invariant,
        causal=options.causal,
        softmax_scale=options.softmax_scale,
    )


def cache_problem(arrays: CacheArrays, options: CacheOptions) -> Problem:
    """The problem that NumPy or CuPy arrays of queries and a cache pose.

    Where q is rotated, attention reads the contiguous array that it is rotated into.

    Raises
    ------
    TypeError, ValueError
        For what no kernel computes; the message names the argument.
    """
    q, k_cache, v_cache, k, v = arrays[:5]
    _check_int32(arrays)
    check_bool("return_lse", options.return_lse)
    require_axes("q", q, 4, "batch, seqlen, heads and head_dim")
    batch = q.shape[0]
    first = "caches, seqlen" if arrays.block_table is None else "pages, page_size"
    for name, array in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_axes(name, array, 4, f"{first}, heads and head_dim")
        require_in_place(name, array, ": a cache is not copied")
    if arrays.out is not None:
        require_axes("out", arrays.out, 4, "batch, seqlen, heads and head_dim")
    for name, array, meaning in (
        (
            "cache_seqlens",
            arrays.cache_seqlens,
            "one length for each sequence; where all have one, pass an integer",
        ),
        ("cache_batch_idx", arrays.cache_batch_idx, "one cache for each sequence"),
    ):
        if array is not None:
            require_shape(name, array, (batch,), meaning)
    if arrays.cache_batch_idx is not None and arrays.block_table is not None:
        raise ValueError("cache_batch_idx and block_table both say where a cache is; pass one")
    q_spec, k_spec, v_spec, out_spec = _specs(q, k_cache, v_cache, arrays.out, CACHES)
    if arrays.rotary_cos is not None:
        q_spec = ArraySpec.contiguous(q_spec.shape, q_spec.dtype)
    problem = make_sequences_problem(
        q_spec,
        k_spec,
        v_spec,
        out_spec,
        batch=batch,
        block_table=_table(arrays.block_table, batch),
        chosen_caches=arrays.cache_batch_idx is not None,
        new_keys=_seqlen_new(k, v),
        num_splits=options.num_splits,
        batch_invariant=options.batch_invariant,
        causal=options.causal,
        softmax_scale=options.softmax_scale,
    )
    _check_new_rows(arrays, problem)
    _check_rotary(arrays, options, problem)
    return problem


def _check_int32(arrays: VarlenArrays | CacheArrays) -> None:
    for name, array in zip(arrays._fields, arrays, strict=True):
        if array is not None and name in _INT32:
            require_int32(name, array)


def _specs(
    q: Any, k: Any, v: Any, out: Any | None, names: tuple[str, str] = ("k", "v")
) -> tuple[ArraySpec, ArraySpec, ArraySpec, ArraySpec | None]:
    for name, array in (("q", q), (names[0], k), (names[1], v), ("out", out)):
        if array is not None:
            require_float(name, array)
    if out is not None:
        require_in_place("out", out)
    q_spec, k_spec, v_spec = (spec_of(array, address_of(array)) for array in (q, k, v))
    return q_spec, k_spec, v_spec, None if out is None else spec_of(out, address_of(out))


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise TypeError(f"{name} is None; expected an integer")
    return value


def _table(block_table: Any | None, batch: int) -> tuple[int, int] | None:
    if block_table is None:
        return None
    require_axes("block_table", block_table, 2, "batch and pages of a sequence")
    if block_table.shape[0] != batch:
        raise ValueError(
            f"block_table has {block_table.shape[0]} rows; expected {batch}, one for each sequence"
        )
    return block_table.shape[1], block_table.strides[0] // block_table.itemsize


def _seqlen_new(k: Any | None, v: Any | None) -> int:
    if k is None and v is None:
        return 0
    if k is None or v is None:
        given, missing = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"{given} is given and {missing} is not; pass both, or none to append")
    for name, array in (("k", k), ("v", v)):
        require_axes(name, array, 4, "batch, seqlen_new, heads and head_dim")
    return int(k.shape[1])


def _check_new_rows(arrays: CacheArrays, problem: Problem) -> None:
    if arrays.k is None:
        return
    for name, array, dim in (
        ("k", arrays.k, problem.head_dim),
        ("v", arrays.v, problem.head_dim_v),
    ):
        if dtype_name(array) != problem.dtype or not array.dtype.isnative:
            raise TypeError(f"{name} has dtype {array.dtype}; expected {problem.dtype}, as q has")
        expected = (problem.batch, arrays.k.shape[1], problem.heads_kv, dim)
        require_shape(name, array, expected, f"rows of {name}_cache for each sequence of q")
    if problem.sequences is not None and problem.sequences.new_keys:
        for name, cache in (("k_cache", arrays.k_cache), ("v_cache", arrays.v_cache)):
            check_no_self_overlap(name, spec_of(cache, address_of(cache)))


def _check_rotary(arrays: CacheArrays, options: CacheOptions, problem: Problem) -> None:
    check_bool("rotary_interleaved", options.rotary_interleaved)
    cos, sin = arrays.rotary_cos, arrays.rotary_sin
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        given, missing = ("cos", "sin") if sin is None else ("sin", "cos")
        raise ValueError(f"rotary_{given} is given and rotary_{missing} is not; pass both or none")
    if arrays.k is None:
        raise ValueError("rotary_cos and rotary_sin rotate k and q; pass k and v with them")
    accumulator = "float64" if problem.dtype == "float64" else "float32"
    dtypes = tuple(dict.fromkeys((problem.dtype, accumulator)))
    for name, array in (("rotary_cos", cos), ("rotary_sin", sin)):
        require_axes(name, array, 2, "positions and rotary_dim / 2")
        if dtype_name(array) not in dtypes or not array.dtype.isnative:
            raise TypeError(
                f"{name} has dtype {array.dtype}; expected {' or '.join(dtypes)}, with q "
                f"{problem.dtype}"
            )
    require_shape("rotary_sin", sin, tuple(cos.shape), "as rotary_cos")
    if cos.dtype != sin.dtype:
        raise TypeError(f"rotary_sin has dtype {sin.dtype}; expected {cos.dtype}, as rotary_cos")
    rows, half = cos.shape
    check_count("number of rows of rotary_cos", rows)
    if not 2 <= 2 * half <= problem.head_dim:
        raise ValueError(
            f"rotary_cos has {half} columns for a rotary_dim of {2 * half}; expected a rotary_dim "
            f"of 2 to {problem.head_dim}, the head_dim"
        )
    least = max(_positions(arrays, problem), 1)
    if rows < least:
        raise ValueError(
            f"rotary_cos has {rows} rows; expected at least {least}, one for each position"
        )


def _positions(arrays: CacheArrays, problem: Problem) -> int:
    """How many positions are rotated to, from the length of the cache on."""
    q_rows = 0 if problem.is_empty else problem.seqlen_q if problem.causal else 1
    return max(q_rows, int(arrays.k.shape[1]))


class LengthLimit(NamedTuple):
    """The most that an entry of cache_seqlens may be, and why."""

    most: int
    reason: str


def length_limits(arrays: CacheArrays, problem: Problem) -> tuple[LengthLimit, ...]:
    """What lengths of a cache before the append have to keep to."""
    assert problem.sequences is not None
    new, capacity = problem.sequences.new_keys, problem.seqlen_k
    reason = f"a cache holds {capacity} rows" + (f", and {new} are appended" if new else "")
    limits = [LengthLimit(capacity - new, reason)]
    if arrays.rotary_cos is not None:
        rows, count = int(arrays.rotary_cos.shape[0]), _positions(arrays, problem)
        if count:
            reason = f"rotary_cos has {rows} rows, and {count} are read from there on"
            limits.append(LengthLimit(rows - count, reason))
    return tuple(limits)


def require_length(name: str, length: int, limits: tuple[LengthLimit, ...]) -> None:
    """Raise ValueError for a length of a cache that is negative or beyond a limit."""
    if length < 0:
        raise ValueError(f"{name} is {length}; expected at least 0")
    for most, reason in limits:
        if length > most:
            raise ValueError(f"{name} is {length}; expected at most {most}: {reason}")


# Contents of packed calls that were found right, and how many of at most so many bytes are kept.
_MAX_KNOWN = 256
_MAX_KNOWN_BYTES = 1 << 14
_known: set[Any] = set()


def check_varlen_contents(arrays: VarlenArrays, options: VarlenOptions, problem: Problem) -> None:
    """Raise ValueError for what kernels would have to clamp, as these NumPy arrays show.

    The layers of a model are called with the same contents, one after the other: to find them
    right takes 30 to 60 us, to know them again 3.
    """
    sequences = problem.sequences
    assert sequences is not None
    integers = arrays.cu_seqlens_q, arrays.cu_seqlens_k, arrays.seqused_k
    key = None
    if arrays.block_table is None and arrays.cu_seqlens_q.nbytes <= _MAX_KNOWN_BYTES:
        contents = (None if x is None else x.tobytes() for x in integers)
        limits = options.max_seqlen_q, options.max_seqlen_k, sequences.total_q, sequences.total_k
        key = (*contents, *limits)
        if key in _known:
            return
    _check_varlen_contents(arrays, options, problem)
    if key is not None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known.add(key)


def _check_varlen_contents(arrays: VarlenArrays, options: VarlenOptions, problem: Problem) -> None:
    sequences = problem.sequences
    assert sequences is not None
    q_lengths = _check_offsets("cu_seqlens_q", arrays.cu_seqlens_q, sequences.total_q, "q")
    _check_most("cu_seqlens_q", q_lengths, options.max_seqlen_q, "max_seqlen_q")
    total_k = sequences.total_k if sequences.packed_k else None
    k_lengths = _check_offsets("cu_seqlens_k", arrays.cu_seqlens_k, total_k, "k")
    name = "cu_seqlens_k"
    if arrays.seqused_k is not None:
        name, k_lengths = "seqused_k", arrays.seqused_k.astype(np.int64)
        if k_lengths.size and k_lengths.min() < 0:
            b = int(k_lengths.argmin())
            raise ValueError(f"seqused_k[{b}] is {k_lengths[b]}; expected at least 0")
    _check_most(name, k_lengths, options.max_seqlen_k, "max_seqlen_k")
    if sequences.packed_k:
        left = sequences.total_k - arrays.cu_seqlens_k[:-1].astype(np.int64)
        for b in np.flatnonzero(k_lengths > left)[:1]:
            raise ValueError(
                f"{name} gives sequence {b} {k_lengths[b]} keys; expected at most {left[b]}, the "
                "rows of k from its first on"
            )
    else:
        _check_pages(arrays.block_table, name, k_lengths, problem)


def check_cache_contents(arrays: CacheArrays, lengths: np.ndarray, problem: Problem) -> None:
    """The same of a call with a cache.

    Parameters
    ----------
    arrays, problem
        The call's.
    lengths
        Of the caches before the append, (batch,); one integer for all was checked before.
    """
    sequences = problem.sequences
    assert sequences is not None
    if arrays.cache_seqlens is not None:
        limits = length_limits(arrays, problem)
        for b, length in enumerate(lengths.tolist()):
            require_length(f"cache_seqlens[{b}]", length, limits)
    if arrays.cache_batch_idx is not None:
        for b, row in enumerate(arrays.cache_batch_idx.tolist()):
            if not 0 <= row < sequences.caches:
                raise ValueError(
                    f"cache_batch_idx[{b}] is {row}; expected 0 to {sequences.caches - 1}, as "
                    f"k_cache holds {sequences.caches} caches"
                )
    if arrays.block_table is not None:
        _check_pages(arrays.block_table, "cache_seqlens", lengths + sequences.new_keys, problem)


def _check_offsets(name: str, offsets: np.ndarray, total: int | None, whose: str) -> np.ndarray:
    """Lengths of the sequences, (batch,), of offsets that increase from 0 to at most `total`."""
    wide = offsets.astype(np.int64)
    # Not by np.diff, which takes 8 us.
    lengths = wide[1:] - wide[:-1]
    if wide[0] < 0:
        raise ValueError(f"{name}[0] is {wide[0]}; expected at least 0")
    if lengths.min(initial=0) < 0:
        b = int((lengths < 0).argmax())
        raise ValueError(
            f"{name} decreases from {wide[b]} to {wide[b + 1]} at index {b + 1}; expected running "
            "totals of the lengths"
        )
    if total is not None and wide[-1] > total:
        raise ValueError(
            f"{name}[{wide.size - 1}] is {wide[-1]}; expected at most {total}, the rows of {whose}"
        )
    return lengths


def _check_most(name: str, lengths: np.ndarray, most: int, limit: str) -> None:
    if lengths.max(initial=most) > most:
        b = int((lengths > most).argmax())
        raise ValueError(
            f"{name} gives sequence {b} a length of {lengths[b]}; expected at most {most}, as "
            f"{limit} says"
        )


def _check_pages(block_table: np.ndarray, name: str, lengths: np.ndarray, problem: Problem) -> None:
    sequences = problem.sequences
    assert sequences is not None
    pages_used = -(-lengths // sequences.page_size)
    for b in np.flatnonzero(pages_used > sequences.max_pages)[:1]:
        raise ValueError(
            f"{name} gives sequence {b} {lengths[b]} keys; expected at most "
            f"{sequences.max_pages * sequences.page_size}, which block_table has pages for"
        )
    columns = np.arange(sequences.max_pages)
    outside = (block_table < 0) | (block_table >= sequences.pages)
    for b, column in np.argwhere(outside & (columns < pages_used[:, None]))[:1]:
        entry = f"block_table[{b}, {column}] is {block_table[b, column]}"
        if not sequences.pages:
            raise ValueError(f"{entry}, but there are no pages; {name} has to be 0")
        raise ValueError(
            f"{entry}; expected 0 to {sequences.pages - 1}, as there are {sequences.pages} pages"
        )
