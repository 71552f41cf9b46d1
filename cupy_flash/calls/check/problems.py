"""Conversion of the arrays and options of a call to a `Problem`.

Shapes, dtypes and options are checked for all arrays. The contents of lengths, offsets and indices
are checked only in host memory (`cupy_flash.calls.check.lengths`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.strided import (
    address_of,
    array_module,
    dtype_name,
    is_aligned,
    new_spec,
    require_axes,
    require_batch_axes,
    require_dtype,
    require_float,
    require_in_place,
    require_int32,
    require_layout,
    require_shape,
    spec_of,
    to_bshd,
    with_one_batch_axis,
)
from cupy_flash.calls.arguments import CACHES, FLOAT8_SCALES, INT32, SCALES, Arguments
from cupy_flash.calls.check.modifications import (
    canonical,
    score_spec,
)
from cupy_flash.calls.check.rotary_tables import require_tables
from cupy_flash.calls.options import Options
from cupy_flash.mods.keywords import unsupported_dropout
from cupy_flash.mods.shapes import Sizes, refuse_other_lengths
from cupy_flash.problem.arrays import (
    DTYPES,
    FLOAT8,
    FLOAT8_OUTPUTS,
    LARGEST_QUANTIZED,
    ArraySpec,
    Scales,
    Strides,
    check_no_self_overlap,
)
from cupy_flash.problem.problem import Problem, make_problem
from cupy_flash.problem.score import ScoreSpec
from cupy_flash.problem.values import check_bool, count


class CheckedCall(NamedTuple):
    """Problem of a call that passed the checks, and the result of `canonical` for it."""

    problem: Problem
    mod_arrays: dict[str, Any]


def problem_of(arguments: Arguments, options: Options) -> Problem:
    """Return the problem of `check_call`."""
    return check_call(arguments, options).problem


def check_call(arguments: Arguments, options: Options) -> CheckedCall:
    """Check the NumPy or CuPy arrays and the options of a call, and return its problem.

    Raises
    ------
    TypeError, ValueError
        If no kernel computes the problem; the message names the argument.
    """
    check_bool("return_lse", options.return_lse)
    arguments = arguments.parts_of_qkv(options.layout)
    for name in INT32:
        if (array := getattr(arguments, name, None)) is not None:
            require_int32(name, array)
    checked = _CHECKS[options.kind](arguments, options)
    if options.shares_gpu:
        checked = checked._replace(problem=dataclasses.replace(checked.problem, shares_gpu=True))
    if options.discards_out:
        checked = checked._replace(problem=dataclasses.replace(checked.problem, discards_out=True))
    if options.wrt is None and (statistics := options.statistics):
        problem = dataclasses.replace(checked.problem, statistics=statistics)
        checked = checked._replace(problem=problem)
    return checked


def _score(
    arguments: Arguments, options: Options, dtype: str, *sizes: int, **more: int
) -> tuple[ScoreSpec | None, dict[str, Any]]:
    """Return the spec of the call's modifications, or None without any, and `canonical` arrays."""
    mod_key = options.mod_key
    if mod_key is None:
        return None, {}
    result = Sizes(dtype, *sizes, **more)
    arrays = canonical(mod_key, arguments.modification_arrays, result)
    return score_spec(mod_key, arrays, result, causal=options.causal), arrays


def sizes_of(problem: Problem, options: Options) -> Sizes:
    """Return the sizes that the modifications of a problem's call have to fit."""
    p = problem
    if not p.layout.packed_q:
        return Sizes(p.dtype, p.batch, p.heads_q, p.seqlen_q, p.seqlen_k)
    # The bounds as the caller gave them: those of the problem are clipped to the arrays.
    seqlen_q = count("max_seqlen_q", options.max_seqlen_q)
    seqlen_k = count("max_seqlen_k", options.max_seqlen_k)
    return Sizes(p.dtype, p.batch, p.heads_q, seqlen_q, seqlen_k, p.layout.total_q)


def _check_dense(arguments: Arguments, options: Options) -> CheckedCall:
    require_layout(options.layout)
    arrays = {"q": arguments.q, "k": arguments.k, "v": arguments.v}
    if arguments.out is not None:
        arrays["out"] = arguments.out
    is_float8 = dtype_name(arguments.q) == FLOAT8 and options.wrt is None
    for name, array in arrays.items():
        require_batch_axes(name, array, arguments.q)
        require_float(name, array, (*DTYPES, FLOAT8) if is_float8 else DTYPES)
    if arguments.out is not None:
        require_in_place("out", arguments.out)
    specs = {n: spec_of(to_bshd(a, options.layout), address_of(a)) for n, a in arrays.items()}
    if arguments.out is None:
        shape = (*with_one_batch_axis(arguments.q).shape[:3], arguments.v.shape[-1])
        dtype = float8_output(options.out_dtype) if is_float8 else dtype_name(arguments.q)
        specs["out"] = new_spec(shape, options.layout, dtype)
    q, k = specs["q"], specs["k"]
    scales = _float8_scales(arguments, options, q, k)
    refuse_other_lengths(lambda name: getattr(arguments, name, None), "dense")
    is_padded = getattr(arguments, "seqlens_k", None) is not None
    score, mod_arrays = _score(
        arguments, options, q.dtype, q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    )
    problem = make_problem(
        *(specs[name] for name in ("q", "k", "v", "out")),
        kind="padded" if is_padded else "dense",
        score=score,
        causal=options.causal,
        softmax_scale=options.softmax_scale,
        q_offset=options.q_offset,
        scales=scales,
        layout=options.layout,
    )
    return CheckedCall(problem, mod_arrays)


def lse_shape(q: Any, problem: Problem) -> tuple[int, ...]:
    """Return the shape of the log-sum-exp of a call, with the batch axes of q."""
    return problem.lse_shape if problem.layout.packed_q else (*q.shape[:-3], *problem.lse_shape[1:])


def float8_output(dtype: str | None) -> str:
    """Return the dtype of a newly allocated output for float8 inputs.

    Raises
    ------
    ValueError
        If `dtype` is not a 16-bit float.
    """
    if dtype is not None and dtype not in FLOAT8_OUTPUTS:
        raise ValueError(f"out_dtype is {dtype!r}; expected one of {', '.join(FLOAT8_OUTPUTS)}")
    return dtype or FLOAT8_OUTPUTS[0]


def _float8_scales(
    arguments: Arguments, options: Options, q: ArraySpec, k: ArraySpec
) -> Scales | None:
    """Return the strides of float8 scales, or None if q is not float8 and so has no scales."""
    given = {name: getattr(arguments, name, None) for name in FLOAT8_SCALES}
    if q.dtype != FLOAT8:
        for name, value in (given | {"out_dtype": options.out_dtype}).items():
            if value is not None:
                raise ValueError(f"{name} is for {FLOAT8} q, k and v; q is {q.dtype}")
        return None
    _refuse_dropout(options, f"calls on {q.dtype} arrays")
    if options.mod_key is not None:
        arrays = f" ({', '.join(options.mod_key.names)})" if options.mod_key.names else ""
        raise ValueError(f"q is {q.dtype}, which is supported only without modifications{arrays}")
    if arguments.out is not None and options.out_dtype is not None:
        raise ValueError("out and out_dtype are both given; pass only one")
    strides = {
        name: _strides_of_scale(
            name,
            array,
            (q.shape[0], 1, (q if name == "q_scale" else k).shape[2]),
            "batch, 1, heads",
        )
        for name, array in given.items()
    }
    return Scales(strides["k_scale"], strides["v_scale"], q=strides["q_scale"])


def _check_varlen(arguments: Arguments, options: Options) -> CheckedCall:
    q, k, v, out = arguments.q, arguments.k, arguments.v, arguments.out
    block_table, seqused_k = arguments.block_table, arguments.seqused_k
    cu_seqlens_q, cu_seqlens_k = arguments.cu_seqlens_q, arguments.cu_seqlens_k
    packed = "total length, heads and head_dim"
    require_axes("q", q, 3, packed)
    for name, array in (("k", k), ("v", v)):
        if block_table is None:
            require_axes(name, array, 3, packed)
        else:
            require_axes(name, array, 4, "pages, page_size, heads and head_dim, with block_table")
    if out is not None:
        expected = (*q.shape[:2], v.shape[-1])
        require_shape("out", out, expected, "as q, but with the head_dim of v")
    require_axes("cu_seqlens_q", cu_seqlens_q, 1, "the first row of each sequence, and the end")
    if cu_seqlens_q.shape[0] == 0:
        raise ValueError("cu_seqlens_q is empty; expected batch + 1 integers, at least one")
    batch = cu_seqlens_q.shape[0] - 1
    require_shape("cu_seqlens_k", cu_seqlens_k, (batch + 1,), "as cu_seqlens_q")
    if seqused_k is not None:
        require_shape("seqused_k", seqused_k, (batch,), "one length for each sequence")
    refuse_other_lengths(lambda name: getattr(arguments, name, None), "varlen")
    table = _table(block_table, batch)
    max_seqlen_k = count("max_seqlen_k", options.max_seqlen_k)
    score, mod_arrays = _score(
        arguments,
        options,
        dtype_name(q),
        batch,
        q.shape[1],
        count("max_seqlen_q", options.max_seqlen_q),
        max_seqlen_k,
        total_q=q.shape[0],
    )
    specs = _specs(arguments, options)
    scales = _scales_of_keys(arguments, options, specs[1])
    if scales is not None:
        _refuse_dropout(options, f"calls on {specs[1].dtype} keys and values")
    problem = make_problem(
        *specs,
        kind="varlen",
        score=score,
        batch=batch,
        max_seqlen_q=options.max_seqlen_q,
        max_seqlen_k=options.max_seqlen_k,
        block_table=table,
        num_splits=options.num_splits,
        batch_invariant=options.batch_invariant,
        causal=options.causal,
        softmax_scale=options.softmax_scale,
        scales=scales,
    )
    return CheckedCall(problem, mod_arrays)


def _refuse_dropout(options: Options, calls: str) -> None:
    """Raise UnsupportedError for dropout in calls that have no gradients."""
    if options.mod_key is not None and options.mod_key.dropout_threshold is not None:
        raise unsupported_dropout(calls)


def _check_kvcache(arguments: Arguments, options: Options) -> CheckedCall:
    """Check a KV cache call. Attention reads a rotated q from a contiguous copy."""
    _refuse_dropout(options, "calls on KV caches")
    q, block_table = arguments.q, arguments.block_table
    require_axes("q", q, 4, "batch, seqlen, heads and head_dim")
    batch = q.shape[0]
    first = "caches, seqlen" if block_table is None else "pages, page_size"
    for name in _caches(options):
        require_axes(name, getattr(arguments, name), 4, f"{first}, heads and head_dim")
        require_in_place(name, getattr(arguments, name), ": a cache is not copied")
    if arguments.out is not None:
        require_axes("out", arguments.out, 4, "batch, seqlen, heads and head_dim")
    for name, meaning in (
        ("cache_seqlens", "length for each sequence; pass an integer if all are equal"),
        ("cache_batch_idx", "cache for each sequence"),
        ("rotary_seqlens", "position for each sequence"),
    ):
        if (array := getattr(arguments, name)) is not None:
            require_shape(name, array, (batch,), f"one {meaning}")
    _check_packed_new(arguments, batch)
    if arguments.cache_batch_idx is not None and block_table is not None:
        raise ValueError("cache_batch_idx and block_table are both given; pass only one")
    if options.head_dim_v is not None:
        _check_values_in_keys(arguments.k_cache.shape[3], options.head_dim_v)
    q_spec, k_spec, v_spec, out_spec = _specs(arguments, options)
    if arguments.rotary_cos is not None:
        q_spec = ArraySpec.contiguous(q_spec.shape, q_spec.dtype)
    refuse_other_lengths(lambda name: getattr(arguments, name, None), "kvcache")
    table = _table(block_table, batch)
    capacity = k_spec.shape[1] * (1 if table is None else table[0])
    scales = _scales_of_keys(arguments, options, k_spec)
    heads_q, seqlen_q = q_spec.shape[2], q_spec.shape[1]
    score, mod_arrays = _score(arguments, options, q_spec.dtype, batch, heads_q, seqlen_q, capacity)
    problem = make_problem(
        q_spec,
        k_spec,
        v_spec,
        out_spec,
        kind="kvcache",
        score=score,
        block_table=table,
        chosen_caches=arguments.cache_batch_idx is not None,
        new_keys=_seqlen_new(arguments, options),
        packed_new=arguments.cu_seqlens_k_new is not None and arguments.k.shape[0] > 0,
        num_splits=options.num_splits,
        batch_invariant=options.batch_invariant,
        causal=options.causal,
        softmax_scale=options.softmax_scale,
        scales=scales,
        values_in_keys=options.head_dim_v is not None,
    )
    _check_new_rows(arguments, options, problem)
    _check_rotary(arguments, options, problem)
    return CheckedCall(problem, mod_arrays)


_CHECKS = {
    "dense": _check_dense,
    "scaled": _check_dense,
    "qkvpacked": _check_dense,
    "varlen": _check_varlen,
    "kvcache": _check_kvcache,
}


def _caches(options: Options) -> tuple[str, ...]:
    """Return the names of the cache arrays: one if the keys hold the values, otherwise two."""
    return CACHES if options.head_dim_v is None else CACHES[:1]


def _check_values_in_keys(head_dim: int, head_dim_v: int) -> None:
    if not 1 <= head_dim_v <= head_dim:
        raise ValueError(
            f"head_dim_v is {head_dim_v}; expected 1 to {head_dim}, the columns of k_cache"
        )


def _specs(
    arguments: Arguments, options: Options
) -> tuple[ArraySpec, ArraySpec, ArraySpec, ArraySpec | None]:
    q, out, values = arguments.q, arguments.out, arguments.values_of(options)
    k, v = ("k", "v") if arguments.k_cache is None else CACHES
    # Backward calls do not support 8-bit keys.
    more = LARGEST_QUANTIZED if options.wrt is None else ()
    for name, array in (("q", q), (k, arguments.keys), (v, values), ("out", out)):
        if array is not None:
            require_float(name, array, (*DTYPES, *(more if name in (k, v) else ())))
    if out is not None:
        require_in_place("out", out)
    inputs = (q, arguments.keys, values)
    q_spec, k_spec, v_spec = (spec_of(array, address_of(array)) for array in inputs)
    return q_spec, k_spec, v_spec, None if out is None else spec_of(out, address_of(out))


def _scales_of_keys(arguments: Arguments, options: Options, keys: ArraySpec) -> Scales | None:
    """Return the strides of the scales of 8-bit keys and values; None for other dtypes."""
    in_keys, computed = options.head_dim_v is not None, options.compute_scales
    given = {name: getattr(arguments, name) for name in SCALES[: 1 if in_keys else 2]}
    what = "keys and values" if arguments.k_cache is None else "caches"
    dtypes = {dtype_name(array) for array in (arguments.keys, arguments.values_of(options))}
    if not dtypes & LARGEST_QUANTIZED.keys():
        for name, array in given.items():
            if array is not None:
                raise ValueError(f"{name} is for 8-bit {what}; these are {keys.dtype}")
        if computed:
            raise ValueError(f"compute_scales is for 8-bit {what}; these are {keys.dtype}")
        return None
    if dtype_name(arguments.q) == "float64":
        raise TypeError(
            f"q has dtype float64; expected float16, bfloat16 or float32 with 8-bit {what}"
        )
    shape = keys.shape[:3]
    axes = "caches or pages, their rows, and heads"
    strides = {name: _strides_of_scale(name, array, shape, axes) for name, array in given.items()}
    if computed:
        if arguments.k is None:
            raise ValueError("compute_scales is for new rows; pass k and v, too")
        for name, array in given.items():
            if array is None or tuple(array.shape) != shape:
                result = "None" if array is None else f"of shape {tuple(array.shape)}"
                raise ValueError(
                    f"{name} is {result}; expected shape {shape}, as compute_scales writes a scale "
                    "for each row and head"
                )
            check_no_self_overlap(
                name, ArraySpec((*shape, 1), strides[name] or (0, 0, 0), "float32")
            )
    key_strides = strides["k_scale"]
    return Scales(key_strides, strides.get("v_scale", key_strides), computed)


def _strides_of_scale(
    name: str, array: Any | None, shape: tuple[int, ...], axes: str
) -> Strides | None:
    if array is None:
        return None
    require_dtype(name, array, ("float32",))
    try:
        block, row, head = array_module(array).broadcast_to(array, shape).strides
    except ValueError:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}, which does not broadcast to {shape}: {axes}"
        ) from None
    size = array.itemsize
    odd = any(stride % size for stride in (block, row, head)) or not is_aligned(array)
    if odd and not isinstance(array, np.ndarray):
        raise ValueError(
            f"{name} lies at address {address_of(array):#x} with strides {array.strides}; expected "
            f"multiples of {size} bytes"
        )
    return block // size, row // size, head // size


def _table(block_table: Any | None, batch: int) -> tuple[int, int] | None:
    if block_table is None:
        return None
    require_axes("block_table", block_table, 2, "batch and pages of a sequence")
    if block_table.shape[0] != batch:
        raise ValueError(
            f"block_table has {block_table.shape[0]} rows; expected {batch}, one for each sequence"
        )
    return block_table.shape[1], block_table.strides[0] // block_table.itemsize


def _new_rows(arguments: Arguments, options: Options) -> dict[str, Any]:
    """Return the new rows by name: keys, and values unless the keys hold the values."""
    both = {"k": arguments.k, "v": arguments.v}
    return both if options.head_dim_v is None else {"k": arguments.k}


def _seqlen_new(arguments: Arguments, options: Options) -> int:
    rows = _new_rows(arguments, options)
    given = [name for name, array in rows.items() if array is not None]
    if not given:
        return 0
    if len(given) < len(rows):
        (missing,) = rows.keys() - given
        raise ValueError(f"{given[0]} is given and {missing} is not; pass both or neither")
    if arguments.cu_seqlens_k_new is not None:
        for name, array in rows.items():
            require_axes(name, array, 3, "total_new, heads and head_dim")
        return 0
    for name, array in rows.items():
        axes = "batch, seqlen_new, heads and head_dim; packed rows need cu_seqlens_k_new"
        require_axes(name, array, 4, axes)
    return int(arguments.k.shape[1])


def _check_packed_new(arguments: Arguments, batch: int) -> None:
    starts = arguments.cu_seqlens_k_new
    if starts is None:
        return
    if arguments.k is None:
        raise ValueError("cu_seqlens_k_new divides packed k and v; pass k and v, too")
    meaning = "where the new rows of each sequence begin, and where those of the last end"
    require_shape("cu_seqlens_k_new", starts, (batch + 1,), meaning)


def _check_new_rows(arguments: Arguments, options: Options, problem: Problem) -> None:
    if arguments.k is None:
        return
    dims = {"k": problem.head_dim, "v": problem.head_dim_v}
    for name, array in _new_rows(arguments, options).items():
        if dtype_name(array) != problem.dtype or not array.dtype.isnative:
            raise TypeError(f"{name} has dtype {array.dtype}; expected {problem.dtype}, as q has")
        expected = (*arguments.k.shape[:-2], problem.heads_kv, dims[name])
        meaning = f"packed rows of {name}_cache"
        if arguments.cu_seqlens_k_new is None:
            expected = (problem.batch, *expected[1:])
            meaning = f"rows of {name}_cache for each sequence of q"
        require_shape(name, array, expected, meaning)
    if problem.layout.appends:
        for name in _caches(options):
            cache = getattr(arguments, name)
            check_no_self_overlap(name, spec_of(cache, address_of(cache)))


def _check_rotary(arguments: Arguments, options: Options, problem: Problem) -> None:
    check_bool("rotary_interleaved", options.rotary_interleaved)
    cos, sin = arguments.rotary_cos, arguments.rotary_sin
    if cos is None and sin is None:
        if arguments.rotary_seqlens is not None:
            raise ValueError("rotary_seqlens is for rotary_cos and rotary_sin; pass them, too")
        return
    if cos is None or sin is None:
        given, missing = ("cos", "sin") if sin is None else ("sin", "cos")
        raise ValueError(f"rotary_{given} is given, but not rotary_{missing}; pass both or neither")
    if arguments.k is None:
        raise ValueError("rotary_cos and rotary_sin rotate k and q; pass k and v with them")
    require_tables(("rotary_cos", cos), ("rotary_sin", sin), "q", problem.dtype, problem.head_dim)
    rows = int(cos.shape[0])
    least = max(positions(arguments, problem), 1)
    if rows < least:
        raise ValueError(
            f"rotary_cos has {rows} rows; expected at least {least}, one for each position"
        )


def positions(arguments: Arguments, problem: Problem) -> int:
    """Return how many consecutive positions of the rotary tables are read, from the first new row.

    Packed new rows are not counted, because their number differs between sequences;
    `check_contents` checks them.
    """
    q_rows = 0 if problem.is_empty else problem.seqlen_q if problem.is_local else 1
    if arguments.cu_seqlens_k_new is not None:
        return q_rows
    return max(q_rows, int(arguments.k.shape[1]))
