"""Run packed and cached attention on the current GPU, prepared once per call key as in `launch`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cupy_flash.calls.arrays import address_of, as_cupy, dtype_name, readable_in_place, spec_of
from cupy_flash.calls.overlap import OverlapCheck
from cupy_flash.calls.sequence_arrays import (
    CACHES,
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
from cupy_flash.gpu import append
from cupy_flash.gpu.counters import shared
from cupy_flash.gpu.gpu_calls import (
    Attention,
    cupy_module,
    facts_of,
    remember,
    require_device,
    require_given,
)
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import Device, device_for_id
from cupy_flash.problem.problem import MAX_ALIGNMENT, Problem

# Where rotated queries begin behind the workspace: as a new allocation would.
_SCRATCH_ALIGNMENT = 512


@dataclass(frozen=True)
class _Call:
    """Everything about a call that does not change while its key stays the same."""

    attention: Attention
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
    call, arrays, addresses = _find(arrays, options, varlen_problem, _prepare_varlen)
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, _ = addresses
    attention = call.attention
    attention.apart.check(addresses)
    out, lse = attention.results(arrays.q, arrays.out, options.return_lse)
    if attention.kernels:
        stream = shared(attention.counters) if attention.counters or call.scratch else None
        # Named until the launches are made: then the pool may hand it on, to what runs later.
        memory = cupy_module().cuda.alloc(call.scratch) if call.scratch else None
        attention.launch(
            (q, k, v),
            out,
            lse,
            0 if memory is None else memory.ptr,
            0 if stream is None else stream.address,
            (cu_seqlens_q, cu_seqlens_k, seqused_k, 0, block_table),
        )
        if stream is not None:
            stream.launched()
    return out, lse


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
    call, arrays, addresses = _find(arrays, options, cache_problem, _prepare_cache)
    q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table, cos, sin, _ = addresses
    attention = call.attention
    if not 0 <= keys <= call.most_keys:
        require_length("cache_seqlens", keys, call.length_limits)
    attention.apart.check(addresses)
    out, lse = attention.results(arrays.q, arrays.out, options.return_lse)
    stream = shared(attention.counters) if attention.counters or call.scratch else None
    memory = cupy_module().cuda.alloc(call.scratch) if call.scratch else None
    scratch = 0 if memory is None else memory.ptr
    if call.append is not None:
        rotated = 0 if call.rotated_at is None else scratch + call.rotated_at
        call.append.run(
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
        q = rotated or q
    if call.has_no_keys:
        as_cupy(out).fill(0)
        if lse is not None:
            as_cupy(lse).fill(-math.inf)
    elif attention.kernels:
        attention.launch(
            (q, k_cache, v_cache),
            out,
            lse,
            scratch,
            0 if stream is None else stream.address,
            (0, 0, cache_seqlens, cache_batch_idx, block_table),
            keys,
        )
    if stream is not None:
        stream.launched()
    return out, lse


def _find(
    arrays: Any,
    options: Any,
    problem_of: Callable[[Any, Any], Problem],
    prepare: Callable[[Any, Problem, Any, Device], _Call],
) -> tuple[_Call, Any, tuple[int, ...]]:
    """The call, prepared if it is new; its arrays, copied where they had to be; their addresses."""
    device_id = cupy_module().cuda.runtime.getDevice()
    facts, addresses = facts_of(arrays)
    key = (device_id, facts, options, tuning.generation())
    call = _calls.get(key)
    if call is None:
        require_given(arrays)
        require_device(device_id, **arrays._asdict())
        readable = _readable(arrays)
        if any(a is not b for a, b in zip(readable, arrays, strict=True)):
            return _find(readable, options, problem_of, prepare)
        plain = type(arrays)(*map(as_cupy, arrays))
        problem = problem_of(plain, options)
        call = prepare(plain, problem, options, device_for_id(device_id))
        remember(_calls, key, call)
    return call, arrays, addresses


def _readable(arrays: Any) -> Any:
    """The arrays, copied where kernels cannot read them as they lie and a copy will do."""
    kept = (*CACHES, "out")
    copied = {
        name: readable_in_place(array)
        for name, array in zip(arrays._fields, arrays, strict=True)
        if array is not None and name not in kept
    }
    cos, sin = (as_cupy(copied.get(name)) for name in ("rotary_cos", "rotary_sin"))
    if cos is not None and sin is not None and cos.strides[0] != sin.strides[0]:
        # The kernel has one distance between their rows.
        copied["rotary_cos"], copied["rotary_sin"] = cos.copy(order="C"), sin.copy(order="C")
    return arrays._replace(**copied)


def _prepare_varlen(
    arrays: VarlenArrays, problem: Problem, options: VarlenOptions, device: Device
) -> _Call:
    q = arrays.q
    attention = _attention(
        arrays,
        problem,
        options,
        device,
        out_shape=(*q.shape[:2], problem.head_dim_v),
        lse_shape=(problem.heads_q, q.shape[0]),
        written=("out",),
    )
    return _Call(attention, attention.workspace)


def _prepare_cache(
    arrays: CacheArrays, problem: Problem, options: CacheOptions, device: Device
) -> _Call:
    assert problem.sequences is not None
    limits = length_limits(arrays, problem)
    writes_cache = problem.sequences.new_keys > 0
    attention = _attention(
        arrays,
        problem,
        options,
        device,
        out_shape=(*arrays.q.shape[:3], problem.head_dim_v),
        lse_shape=(problem.batch, problem.heads_q, problem.seqlen_q),
        written=(*CACHES, "out") if writes_cache else ("out",),
    )
    scratch, rotated_at = attention.workspace, None
    if arrays.rotary_cos is not None:
        rotated_at = -(-scratch // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        scratch = rotated_at + arrays.q.size * arrays.q.itemsize
    return _Call(
        attention,
        scratch,
        rotated_at=rotated_at,
        append=(
            append.prepare(append_spec(arrays, problem, options), device)
            if writes_cache or rotated_at is not None
            else None
        ),
        most_keys=min(limit.most for limit in limits),
        length_limits=limits,
        has_no_keys=problem.seqlen_k == 0 and not problem.is_empty,
    )


def _attention(
    arrays: Any,
    problem: Problem,
    options: Any,
    device: Device,
    *,
    out_shape: tuple[int, ...],
    lse_shape: tuple[int, ...],
    written: tuple[str, ...],
) -> Attention:
    apart = OverlapCheck(arrays._fields, arrays, written)
    # Before anything is compiled.
    apart.check(tuple(0 if array is None else address_of(array) for array in arrays))
    plan = make_plan(problem, device, family=options.family, tile=options.tile)
    return Attention.of(plan, arrays.q.dtype, out_shape, lse_shape, apart)


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
