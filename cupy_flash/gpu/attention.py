"""Attention of one key of calls: plan, kernels and packed arguments, and the launches of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash.calls.arguments import CACHES, FIELDS, Arguments, problem_of, require_given
from cupy_flash.calls.arrays import (
    address_of,
    as_cupy,
    dtype_name,
    readable_in_place,
    spec_of,
)
from cupy_flash.calls.contents import LengthLimit, length_limits, require_length
from cupy_flash.calls.options import Options
from cupy_flash.calls.overlap import OverlapCheck
from cupy_flash.gpu import append
from cupy_flash.gpu.by_value import SLOT, thread_arguments
from cupy_flash.gpu.counters import shared
from cupy_flash.gpu.gpu_calls import (
    LoadedLaunch,
    address_of_result,
    cupy_module,
    empty,
    loaded_launches,
)
from cupy_flash.gpu.params import PackedParams, PackedSequences
from cupy_flash.gpu.tensor_map import TensorMaps
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import MAX_ALIGNMENT, Problem

# Of cu_seqlens_q, cu_seqlens_k, the array of lengths, cache_batch_idx and block_table.
_NO_PLACES = (0, 0, 0, 0, 0)
# Where rotated queries begin behind the workspace: as a new allocation would.
_SCRATCH_ALIGNMENT = 512


@dataclass(frozen=True)
class Call:
    """Everything about a call that does not change while its key stays the same.

    Attributes
    ----------
    out_shape, lse_shape, dtype, lse_dtype
        Of the results; lse_shape is None where it is not asked for.
    apart
        Of all arrays of the call.
    params, tensor_maps, sequences
        What kernels are given, but for the addresses; None for what they have no parameter for.
    counters, scratch
        Words, and bytes: of the plan's workspace, and behind it the rotated queries.
    rotated_at
        Where in the scratch those begin; None without a rotary embedding.
    kernels
        Of attention; none where there is nothing to compute.
    qkv_step
        Bytes between the parts of qkv; 0 where they are arrays of their own.
    absent
        An address of 0 for each field of `Arguments` that calls of this kind do not have.
    is_equal, is_cached, has_no_keys
        Whether lengths are equal; a cache is attended to, and one without any capacity.
    append
        Launch before attention.
    most_keys, limits
        Of an integer cache_seqlens.
    """

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...] | None
    dtype: np.dtype
    lse_dtype: np.dtype
    apart: OverlapCheck
    params: PackedParams
    tensor_maps: TensorMaps | None
    sequences: PackedSequences | None
    counters: int
    scratch: int
    kernels: tuple[LoadedLaunch, ...]
    qkv_step: int
    absent: tuple[int, ...]
    is_equal: bool = False
    is_cached: bool = False
    has_no_keys: bool = False
    rotated_at: int | None = None
    append: append.Append | None = None
    most_keys: int = 0
    limits: tuple[LengthLimit, ...] = ()

    def run(
        self, arguments: Arguments, addresses: tuple[int, ...], keys: int
    ) -> tuple[Any, Any | None]:
        """Enqueue the launches for arrays at these addresses; out and lse."""
        if self.qkv_step:
            _, _, _, out_address, q = addresses
            step = self.qkv_step
            addresses = (q, q + step, q + 2 * step, out_address, 0)
        elif not 0 <= keys <= self.most_keys:
            require_length("cache_seqlens", keys, self.limits)
        self.apart.check(addresses)
        like = arguments.qkv if self.qkv_step else arguments.q
        out = arguments.out
        if out is None:
            out = empty(like, self.out_shape, self.dtype)
        lse = None if self.lse_shape is None else empty(like, self.lse_shape, self.lse_dtype)
        if not self.kernels and self.append is None and not self.has_no_keys:
            return out, lse
        q, k, v = addresses[:3]
        places = _NO_PLACES
        if not self.is_equal:
            _, _, _, _, _, table, cu_q, cu_k, used, k_cache, v_cache, lengths, chosen, cos, sin = (
                addresses + self.absent
            )
            places = (cu_q, cu_k, used or lengths, chosen, table)
        stream = shared(self.counters) if self.counters or self.scratch else None
        # Named until the launches are made: then the pool may hand it on, to what runs later.
        memory = cupy_module().cuda.alloc(self.scratch) if self.scratch else None
        scratch = 0 if memory is None else memory.ptr
        if self.is_cached:
            if self.append is not None:
                rotated = 0 if self.rotated_at is None else scratch + self.rotated_at
                self.append.run(
                    q=q,
                    q_rotated=rotated,
                    k=k,
                    v=v,
                    k_cache=k_cache,
                    v_cache=v_cache,
                    cache_seqlens=lengths,
                    keys=keys,
                    cache_batch_idx=chosen,
                    block_table=table,
                    cos=cos,
                    sin=sin,
                )
                q = rotated or q
            k, v = k_cache, v_cache
        if self.kernels:
            by_value = thread_arguments()
            to, (params, sequences) = by_value.memory, by_value.pointers
            lse_address = 0 if lse is None else address_of_result(lse)
            self.params.pack_into(to, 0, q, k, v, address_of_result(out), lse_address, scratch)
            given: tuple[Any, ...] = (params,)
            if self.tensor_maps is not None:
                # Named until the launches are made: others may push it out of those that are kept.
                maps = self.tensor_maps.at((q, k, v))
                given = (params, maps.pointers[0])
            if self.sequences is not None:
                counters = 0 if stream is None else stream.address
                self.sequences.pack_into(to, SLOT, *places, counters, keys)
                given = (*given, sequences)
            for kernel, grid, block, shared_memory in self.kernels:
                kernel(grid, block, given, shared_memory)
        elif self.has_no_keys:
            as_cupy(out).fill(0)
            if lse is not None:
                as_cupy(lse).fill(-math.inf)
        if stream is not None:
            stream.launched()
        return out, lse


def readable(arguments: Arguments, options: Options) -> Arguments:
    """The arrays, copied where kernels cannot read them as they lie and a copy will do."""
    require_given(arguments, options.kind)
    copied = {
        name: readable_in_place(array)
        for name, array in zip(arguments._fields, arguments, strict=True)
        if array is not None and name not in (*CACHES, "out")
    }
    cos, sin = (as_cupy(copied.get(name)) for name in ("rotary_cos", "rotary_sin"))
    if cos is not None and sin is not None and cos.strides[0] != sin.strides[0]:
        # The kernel has one distance between their rows.
        copied["rotary_cos"], copied["rotary_sin"] = cos.copy(order="C"), sin.copy(order="C")
    return arguments._replace(**copied)


def prepare(arguments: Arguments, options: Options, device: Device) -> Call:
    """Check, plan, compile and load what calls with CuPy arrays like these need."""
    qkv_step = 0 if arguments.qkv is None else arguments.qkv.strides[2]
    arguments = arguments.parts_of_qkv()
    problem = problem_of(arguments, options)
    layout, q = problem.layout, arguments.q
    is_cached = options.kind == "cached"
    limits = length_limits(arguments, problem) if is_cached else ()
    fields = FIELDS[options.kind]
    given = arguments[:fields]
    written = (*CACHES, "out") if layout.new_keys else ("out",)
    apart = OverlapCheck(arguments._fields[:fields], given, written)
    # Before anything is compiled.
    apart.check(tuple(0 if array is None else address_of(array) for array in given))
    plan = make_plan(problem, device, family=options.family, tile=options.tile)
    scratch, rotated_at = plan.workspace, None
    if arguments.rotary_cos is not None:
        rotated_at = -(-scratch // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        scratch = rotated_at + q.size * q.itemsize
    appends = layout.new_keys > 0 or rotated_at is not None
    has_no_keys = is_cached and problem.seqlen_k == 0
    return Call(
        out_shape=(*q.shape[:-1], problem.head_dim_v),
        lse_shape=problem.lse_shape if options.return_lse else None,
        dtype=q.dtype,
        lse_dtype=np.dtype(problem.lse_dtype),
        apart=apart,
        params=PackedParams(problem, num_splits=plan.num_splits, section_heads=plan.section_heads),
        tensor_maps=TensorMaps(plan.tensor_maps) if plan.tensor_maps else None,
        sequences=PackedSequences(problem) if plan.takes_sequences else None,
        counters=plan.counters,
        scratch=scratch,
        kernels=() if has_no_keys else loaded_launches(plan),
        qkv_step=qkv_step,
        absent=(0,) * (len(arguments) - fields),
        is_equal=layout.is_equal,
        is_cached=is_cached,
        has_no_keys=has_no_keys and not problem.is_empty,
        rotated_at=rotated_at,
        append=append.prepare(append_spec(arguments, problem, options), device)
        if appends
        else None,
        most_keys=min((limit.most for limit in limits), default=0),
        limits=limits,
    )


def append_spec(arguments: Arguments, problem: Problem, options: Options) -> append.AppendSpec:
    """The append of a call that brings new keys and values."""
    layout, cos = problem.layout, arguments.rotary_cos
    arrays = (arguments.q, arguments.k, arguments.v, arguments.k_cache, arguments.v_cache)
    specs = [spec_of(array, address_of(array)) for array in arrays]
    q, k, v, k_cache, v_cache = specs
    tables = [] if cos is None else [_rotary_alignment(t) for t in (cos, arguments.rotary_sin)]
    return append.AppendSpec(
        dtype=problem.dtype,
        batch=problem.batch,
        seqlen_q=problem.seqlen_q,
        seqlen_new=layout.new_keys,
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
        caches=layout.caches,
        page_size=layout.page_size,
        pages=layout.pages,
        max_pages=layout.max_pages,
        block_table_stride=layout.block_table_stride,
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
