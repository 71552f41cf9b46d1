"""Run packed and cached attention on the current GPU, prepared once per call key as in `launch`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cupy_flash import append, tuning
from cupy_flash.arrays import address_of, dtype_name, kind_of, readable_in_place, spec_of
from cupy_flash.counters import zeroed
from cupy_flash.device import Device, device_for_id
from cupy_flash.gpu_calls import LoadedLaunch, cupy_module, loaded_launches, require_device
from cupy_flash.params import PackedParams, PackedSequences
from cupy_flash.planner import make_plan
from cupy_flash.problem import MAX_ALIGNMENT, Problem
from cupy_flash.sequence_arrays import (
    CACHES,
    Apart,
    CacheArrays,
    CacheOptions,
    LengthLimit,
    VarlenArrays,
    VarlenOptions,
    cache_problem,
    length_limits,
    require_length,
    varlen_problem,
)
from cupy_flash.tensor_map import TensorMaps

# Calls kept for reuse, as in `launch`.
_MAX_CALLS = 4096
# Where rotated queries begin behind the workspace: as a new allocation would.
_SCRATCH_ALIGNMENT = 512


@dataclass(frozen=True)
class _Call:
    """Everything about a call that does not change while its key stays the same."""

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_dtype: str
    apart: Apart
    params: PackedParams
    tensor_maps: TensorMaps | None
    sequences: PackedSequences
    counters: int
    kernels: tuple[LoadedLaunch, ...]
    # The plan's workspace, and behind it the rotated queries, if there are any.
    scratch: int
    rotated_at: int | None = None
    append: append.Append | None = None
    # Of an integer cache_seqlens.
    most_keys: int = 0
    length_limits: tuple[LengthLimit, ...] = ()
    has_no_keys: bool = False


_calls: dict[tuple[Any, ...], _Call] = {}


def varlen(arrays: VarlenArrays, options: VarlenOptions) -> tuple[Any, Any | None]:
    """Attention of packed CuPy arrays on the current device and stream.

    Returns
    -------
    out, lse
        lse is None unless asked for.
    """
    call, arrays = _find(arrays, options, varlen_problem, _prepare_varlen)
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, out = addresses = [
        0 if array is None else array.data.ptr for array in arrays
    ]
    call.apart.check(arrays, addresses)
    result, lse = _results(call, arrays, options)
    if call.kernels:
        scratch = cupy_module().cuda.alloc(call.scratch) if call.scratch else None
        _attend(
            call,
            (q, k, v),
            out or result.data.ptr,
            lse,
            0 if scratch is None else scratch.ptr,
            (cu_seqlens_q, cu_seqlens_k, seqused_k, 0, block_table),
            0,
        )
    return result, lse


def with_kvcache(arrays: CacheArrays, keys: int, options: CacheOptions) -> tuple[Any, Any | None]:
    """Append to a cache of CuPy arrays and attend to it, on the current device and stream.

    Parameters
    ----------
    arrays, options
        The call's.
    keys
        Length of every cache before the append, where arrays.cache_seqlens is None; else 0.

    Returns
    -------
    out, lse
        lse is None unless asked for.
    """
    call, arrays = _find(arrays, options, cache_problem, _prepare_cache)
    addresses = [0 if array is None else array.data.ptr for array in arrays]
    q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table, cos, sin, out = (
        addresses
    )
    if not 0 <= keys <= call.most_keys:
        require_length("cache_seqlens", keys, call.length_limits)
    call.apart.check(arrays, addresses)
    result, lse = _results(call, arrays, options)
    scratch = 0
    if call.scratch:
        # Named until the launches are made: then the pool may hand it on, to what runs later.
        memory = cupy_module().cuda.alloc(call.scratch)
        scratch = memory.ptr
    if call.append is not None:
        rotated = 0 if call.rotated_at is None else scratch + call.rotated_at
        params = call.append.params.with_pointers(
            q=q,
            q_rotated=rotated,
            k=k,
            v=v,
            k_cache=k_cache,
            v_cache=v_cache,
            cache_seqlens=cache_seqlens,
            keys=keys,
            cache_batch_idx=cache_batch_idx,
            block_table=block_table,
            cos=cos,
            sin=sin,
        )
        call.append.run(params)
        q = rotated or q
    if call.has_no_keys:
        result.fill(0)
        if lse is not None:
            lse.fill(-math.inf)
    elif call.kernels:
        _attend(
            call,
            (q, k_cache, v_cache),
            out or result.data.ptr,
            lse,
            scratch,
            (0, 0, cache_seqlens, cache_batch_idx, block_table),
            keys,
        )
    return result, lse


def _key(arrays: Any) -> tuple[Any, ...]:
    """What the plan and the checks depend on. dtype.num, as hashing a dtype takes a microsecond."""
    facts: list[Any] = []
    # A loop, as a function for each array would cost half a microsecond a call.
    for array in arrays:
        if array is None:
            facts.append(None)
            continue
        data, dtype = array.data, array.dtype
        facts.append(
            (
                array.shape,
                array.strides,
                dtype.num,
                # Of both byte orders there is one number.
                dtype.isnative,
                data.device_id,
                data.ptr & (MAX_ALIGNMENT - 1),
            )
        )
    return tuple(facts)


def _find(
    arrays: Any,
    options: Any,
    problem_of: Callable[[Any, Any], Problem],
    prepare: Callable[[Any, Problem, Any, Device], _Call],
) -> tuple[_Call, Any]:
    """The call, prepared if it is new; and its arrays, copied where they had to be."""
    device_id = cupy_module().cuda.runtime.getDevice()
    key = (
        device_id,
        _key(arrays),
        options,
        # 1 and True are one key, and only one of them may be a right value.
        tuple(map(type, options)),
        tuning.generation(),
    )
    try:
        call = _calls.get(key)
    except TypeError:
        # An option that cannot be part of a key: the checks say which, and what to pass.
        options = _hashable(options, problem_of(arrays, options))
        return _find(arrays, options, problem_of, prepare)
    if call is None:
        require_device(device_id, **arrays._asdict())
        readable = _readable(arrays)
        if any(a is not b for a, b in zip(readable, arrays, strict=True)):
            return _find(readable, options, problem_of, prepare)
        problem = problem_of(arrays, options)
        call = prepare(arrays, problem, options, device_for_id(device_id))
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _calls[key] = call
    return call, arrays


def _hashable(options: Any, problem: Problem) -> Any:
    # A scale may be an array of one number.
    options = options._replace(softmax_scale=problem.softmax_scale)
    for name, value in zip(options._fields, options, strict=True):
        try:
            hash(value)
        except TypeError:
            raise TypeError(f"{name} is {kind_of(value)}; expected a plain value") from None
    return options


def _readable(arrays: Any) -> Any:
    """The arrays, copied where kernels cannot read them as they lie and a copy will do."""
    kept = (*CACHES, "out")
    copied = {
        name: readable_in_place(array)
        for name, array in zip(arrays._fields, arrays, strict=True)
        if array is not None and name not in kept
    }
    cos, sin = copied.get("rotary_cos"), copied.get("rotary_sin")
    if cos is not None and sin is not None and cos.strides[0] != sin.strides[0]:
        # The kernel has one distance between their rows.
        copied["rotary_cos"], copied["rotary_sin"] = cos.copy(order="C"), sin.copy(order="C")
    return arrays._replace(**copied)


def _prepare_varlen(
    arrays: VarlenArrays, problem: Problem, options: VarlenOptions, device: Device
) -> _Call:
    q = arrays.q
    plan = _plan_fields(problem, options, device)
    return _Call(
        out_shape=(*q.shape[:2], problem.head_dim_v),
        lse_shape=(problem.heads_q, q.shape[0]),
        apart=Apart(arrays, ("out",)),
        **plan,
    )


def _prepare_cache(
    arrays: CacheArrays, problem: Problem, options: CacheOptions, device: Device
) -> _Call:
    assert problem.sequences is not None
    plan = _plan_fields(problem, options, device)
    limits = length_limits(arrays, problem)
    rotated_at = None
    if arrays.rotary_cos is not None:
        rotated_at = -(-plan["scratch"] // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        plan["scratch"] = rotated_at + arrays.q.size * arrays.q.itemsize
    writes_cache = problem.sequences.new_keys > 0
    return _Call(
        out_shape=(*arrays.q.shape[:3], problem.head_dim_v),
        lse_shape=(problem.batch, problem.heads_q, problem.seqlen_q),
        apart=Apart(arrays, (*CACHES, "out") if writes_cache else ("out",)),
        rotated_at=rotated_at,
        append=(
            append.prepare(append_spec(arrays, problem, options), device)
            if writes_cache or rotated_at is not None
            else None
        ),
        most_keys=min(limit.most for limit in limits),
        length_limits=limits,
        has_no_keys=problem.seqlen_k == 0 and not problem.is_empty,
        **plan,
    )


def _plan_fields(problem: Problem, options: Any, device: Device) -> dict[str, Any]:
    """The fields of a `_Call` that come from its plan."""
    plan = make_plan(problem, device, family=options.family, tile=options.tile)
    return {
        "lse_dtype": "float64" if problem.dtype == "float64" else "float32",
        "params": PackedParams(
            problem, num_splits=plan.num_splits, section_heads=plan.section_heads
        ),
        "tensor_maps": TensorMaps(plan.tensor_maps) if plan.tensor_maps else None,
        "sequences": PackedSequences(problem),
        "counters": plan.counters,
        "kernels": loaded_launches(plan),
        "scratch": plan.workspace,
    }


def append_spec(arrays: CacheArrays, problem: Problem, options: CacheOptions) -> append.AppendSpec:
    """The append of a call that brings new keys and values."""
    assert problem.sequences is not None
    sequences, cos = problem.sequences, arrays.rotary_cos
    specs = [spec_of(array, address_of(array)) for array in arrays[:5]]
    q, k_cache, v_cache, k, v = specs
    tables = [] if cos is None else [_rotary_alignment(t) for t in (cos, arrays.rotary_sin)]
    return append.AppendSpec(
        dtype=problem.dtype,
        batch=problem.batch,
        seqlen_q=problem.seqlen_q,
        seqlen_new=sequences.new_keys,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        seqlen_cache=problem.seqlen_k,
        q_strides=q.strides,
        k_strides=k.strides,
        v_strides=v.strides,
        k_cache_strides=k_cache.strides,
        v_cache_strides=v_cache.strides,
        caches=sequences.caches,
        page_size=sequences.page_size,
        pages=sequences.pages,
        max_pages=sequences.max_pages,
        block_table_stride=sequences.block_table_stride,
        rotary_dim=0 if cos is None else 2 * cos.shape[1],
        rotary_rows=0 if cos is None else cos.shape[0],
        rotary_stride=0 if cos is None else cos.strides[0] // cos.itemsize,
        rotary_dtype=problem.dtype if cos is None else dtype_name(cos),
        rotary_interleaved=bool(options.rotary_interleaved),
        causal=problem.causal,
        alignment=min(spec.row_alignment() for spec in specs),
        rotary_alignment=min(tables, default=MAX_ALIGNMENT),
    )


def _rotary_alignment(table: Any) -> int:
    """Bytes, at most 16, that every row of a (positions, columns) table starts at a multiple of."""
    return math.gcd(
        address_of(table) or MAX_ALIGNMENT,
        table.strides[0] if table.shape[0] > 1 else 0,
        MAX_ALIGNMENT,
    )


def _results(call: _Call, arrays: Any, options: Any) -> tuple[Any, Any | None]:
    ndarray = cupy_module().ndarray
    out = ndarray(call.out_shape, arrays.q.dtype) if arrays.out is None else arrays.out
    return out, ndarray(call.lse_shape, call.lse_dtype) if options.return_lse else None


def _attend(
    call: _Call,
    inputs: tuple[int, int, int],
    out: int,
    lse: Any | None,
    workspace: int,
    places: tuple[int, int, int, int, int],
    keys: int,
) -> None:
    params = call.params.with_pointers(*inputs, out, 0 if lse is None else lse.data.ptr, workspace)
    counters = zeroed(call.counters) if call.counters else 0
    sequences = call.sequences.with_pointers(*places, counters, keys)
    arguments: tuple[Any, ...] = (params, sequences)
    if call.tensor_maps is not None:
        arguments = (params, call.tensor_maps.at(inputs), sequences)
    for kernel, grid, block, shared_memory in call.kernels:
        kernel(grid, block, arguments, shared_memory)
