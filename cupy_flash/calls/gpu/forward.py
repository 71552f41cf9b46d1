"""Prepared attention calls on a GPU: plan, kernels, packed arguments, and the launches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.overlap import OverlapCheck, require_no_overlap
from cupy_flash.arrays.strided import (
    address_of,
    as_cupy,
    dtype_name,
    spec_of,
)
from cupy_flash.calls.arguments import IN_PLACE, Arguments, written_arrays
from cupy_flash.calls.check.lengths import LengthLimit, length_limits, require_length
from cupy_flash.calls.check.modifications import UserMods, packed_arguments
from cupy_flash.calls.check.problems import check_call, lse_shape
from cupy_flash.calls.conversions import converted, readable_copies
from cupy_flash.calls.gpu.allocate import (
    MemoryAllocator,
    ResultAllocator,
    memory_allocator,
    result_allocator,
)
from cupy_flash.calls.gpu.block_masks import block_mask_fields, block_mask_spec, ready_block_mask
from cupy_flash.calls.gpu.prepared_calls import Context, Operation
from cupy_flash.calls.options import Options
from cupy_flash.families.params import params_dtype
from cupy_flash.gpu import append
from cupy_flash.gpu.block_masks import BlockMaskKey
from cupy_flash.gpu.counters import shared
from cupy_flash.gpu.environment import cupy_module
from cupy_flash.gpu.launch import Launches
from cupy_flash.gpu.params import PackedStruct
from cupy_flash.gpu.tensor_map import TensorMaps
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.arrays import MAX_ALIGNMENT
from cupy_flash.problem.problem import EMPTY_ROW, Problem

# Alignment in bytes of the arrays in the scratch memory, equal to that of a new allocation.
_SCRATCH_ALIGNMENT = 512

# Names of the values that follow the addresses of the arguments when a struct is packed: addresses
# of results and scratch memory, and numbers.
_VALUES = ("result", "lse", "workspace", "counters", "keys", "q_rotated")
_PARTS_OF_QKV = ("q", "k", "v")
# Name under which kernels find the address of the block mask.
_BLOCK_MASK = "block_mask"


class Placed(NamedTuple):
    """Memory of the caller for a call: results, their addresses, and the scratch memory.

    Attributes
    ----------
    results
        Arrays of out, lse and row statistics. They may be None unless `Call.fills_results`.
    addresses
        Addresses of the results. Captured launches with the same out never run concurrently.
    scratch
        Address of at least `Call.scratch_bytes` bytes.
    """

    results: Sequence[Any]
    addresses: Sequence[int]
    scratch: int


@dataclass(frozen=True)
class Call:
    """Prepared call: everything that the call key determines, see `prepared_calls.look_up`.

    Attributes
    ----------
    allocate_results
        Function that allocates out, unless it is given, and lse and row statistics, if they are
        requested.
    out_index
        Index of `out` among the addresses.
    overlap_check
        Overlap check for all arrays of the call.
    counters
        Number of zeroed 32-bit words that the kernels need.
    scratch, scratch_bytes
        Function that allocates the scratch memory, or None, and the size of that memory: the plan's
        workspace, then the rotated queries, then the lengths after an append of packed rows.
    launches
        Launches of attention; none if there is nothing to compute.
    qkv
        Index of qkv among the addresses, and bytes between its parts; None if q, k and v are
        separate arrays.
    fills_results
        Whether the call fills its results itself, because no kernel runs: the caches have no rows,
        or no query row belongs to a sequence.
    has_no_rows
        Whether no row of packed queries belongs to a sequence, so that sinks are ignored.
    rotated_offset
        Byte offset of the rotated queries in the scratch memory.
    append
        Launch that precedes attention and appends to the cache, or None.
    max_keys, limits
        Largest integer that cache_seqlens may be, and the limits that determine it.
    device, block_mask_key
        Index of the device, and key of the block mask that the kernels read, or None.
    workspace_offsets
        Byte offsets in the scratch memory of the arrays whose addresses kernels are given.
    uses_torch
        Whether torch allocates the scratch memory, and a block mask that a graph captures.
    backward_calls
        Prepared backward calls of this call, see `torch_autograd.py`.
    statistics
        Names of the row statistics that follow out and lse.
    """

    allocate_results: ResultAllocator
    out_index: int
    overlap_check: OverlapCheck
    counters: int
    scratch: MemoryAllocator | None
    launches: Launches | None
    qkv: tuple[int, int] | None
    fills_results: bool = False
    has_no_rows: bool = False
    scratch_bytes: int = 0
    rotated_offset: int = 0
    append: append.Append | None = None
    max_keys: int = 0
    limits: tuple[LengthLimit, ...] = ()
    device: int = 0
    block_mask_key: BlockMaskKey | None = None
    workspace_offsets: tuple[int, ...] = ()
    uses_torch: bool = False
    backward_calls: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    statistics: tuple[str, ...] = ()

    def run(
        self,
        arguments: Arguments,
        addresses: tuple[int, ...],
        keys: int,
        user_mods: UserMods,
        stream: int | None = None,
        placed: Placed | None = None,
    ) -> tuple[Any, ...]:
        """Enqueue the launches; return out, lse (None if not requested) and row statistics.

        The results are allocated unless they are `placed`.

        `stream` is the handle of the stream, by default that of CuPy's current stream. It may be
        another stream only if the call neither appends nor fills its results.
        """
        if not 0 <= keys <= self.max_keys:
            require_length("cache_seqlens", keys, self.limits)
        if self.overlap_check.pairs:
            self.overlap_check.check(addresses)
        results: Sequence[Any]
        its_addresses: Sequence[int]
        if placed is None:
            results, its_addresses = self.allocate_results()
        else:
            results, its_addresses, scratch = placed
        statistics: Sequence[Any] = ()
        others: Sequence[int] = ()
        # A starred assignment would cost calls without statistics 0.2 us.
        if self.statistics:
            statistics, others = results[2:], its_addresses[2:]
            results, its_addresses = results[:2], its_addresses[:2]
        (out, lse), (out_address, lse_address) = results, its_addresses
        if out is None and placed is None:
            out, out_address = arguments.out, addresses[self.out_index]
        if not self.launches and self.append is None and not self.fills_results:
            return (out, lse, *statistics)
        if stream is None:
            stream = cupy_module().cuda.get_current_stream(self.device).ptr
        # A caller that gives memory takes care itself that launches with it follow one another.
        needs_order, result = self.scratch and not placed, placed and out_address
        has_queue = self.counters or needs_order
        queue = shared(self.counters, self.device, stream, result) if has_queue else None
        if placed is None:
            # `_memory` is referenced until the launches are enqueued; then the pool may reuse it.
            _memory, scratch = self.scratch() if self.scratch else (None, 0)
        # In the order of `names` in `prepare`. Adding tuples is twice as fast as a starred tuple.
        counters, rotated = 0 if queue is None else queue.address, scratch + self.rotated_offset
        values = addresses + (out_address, lse_address, scratch, counters, keys, rotated)  # noqa: RUF005
        if self.qkv is not None:
            index, step = self.qkv
            first = addresses[index]
            values += (first, first + step, first + 2 * step)
        ready = None
        if self.block_mask_key is not None:
            assert user_mods.mask_mod is not None
            ready = ready_block_mask(
                *(user_mods.mask_mod, self.block_mask_key, stream, arguments),
                uses_torch=self.uses_torch,
            )
            values += (ready.address,)
        if self.workspace_offsets:
            values += tuple([scratch + offset for offset in self.workspace_offsets])
        if self.statistics:
            values += tuple(others)
        if self.append is not None:
            self.append.run(values)
        if self.launches:
            self.launches.run(values, stream)
        elif self.fills_results:
            self._fill(arguments, out, lse, statistics)
        if ready is not None:
            ready.launched(stream)
        if queue is not None:
            queue.launched()
        return (out, lse, *statistics) if self.statistics else (out, lse)

    def _fill(self, arguments: Arguments, out: Any, lse: Any, statistics: Sequence[Any]) -> None:
        """Fill the results of rows that attend to no key."""
        as_cupy(out).fill(0)
        if lse is not None:
            sinks = getattr(arguments, "sinks", None)
            as_cupy(lse).fill(-math.inf)
            if sinks is not None and not self.has_no_rows:
                as_cupy(lse)[...] = as_cupy(sinks)[:, None]
        for name, array in zip(self.statistics, statistics, strict=True):
            as_cupy(array).fill(EMPTY_ROW[name])


def readable(arguments: Arguments, options: Options) -> Arguments:
    """Return the arrays, with copies of those that kernels cannot read in place."""
    arguments.require_given(options)
    arguments = converted(arguments, options)
    copied = readable_copies(arguments, options, (*IN_PLACE, "out"))
    cos, sin = (as_cupy(copied.get(name)) for name in ("rotary_cos", "rotary_sin"))
    if cos is not None and sin is not None and cos.strides[0] != sin.strides[0]:
        # The append kernel takes one row stride for both tables.
        copied["rotary_cos"], copied["rotary_sin"] = cos.copy(order="C"), sin.copy(order="C")
    return arguments._replace(**copied)


def prepare(arguments: Arguments, options: Options, context: Context) -> Call:
    """Check, plan, compile and load what calls with such CuPy arrays or tensors need."""
    fields, given = arguments.key_names(options), arguments.key_arrays(options)
    arguments, qkv = arguments.parts_of_qkv(options.layout), arguments.qkv
    problem, mod_arrays = check_call(arguments, options)
    layout, q = problem.layout, arguments.q
    is_kvcache = options.kind == "kvcache"
    limits = length_limits(arguments, problem) if is_kvcache else ()
    # Overlapping arrays are refused before anything is compiled.
    overlap_check = require_no_overlap(fields, given, written_arrays(problem))
    plan = make_plan(
        problem, context.device, family=options.family, tile=options.tile, explain=False
    )
    scratch, rotated_offset, scratch_offsets = scratch_layout(plan, arguments)
    appends = layout.appends or arguments.rotary_cos is not None
    has_no_keys = is_kvcache and problem.seqlen_k == 0
    # Kernels zero rows that belong to no sequence. If no sequence can have rows, no kernel runs,
    # and the call itself fills the results.
    has_no_rows = layout.packed_q and problem.is_empty and q.size > 0
    spec = block_mask_spec(plan)
    optional = _PARTS_OF_QKV * (qkv is not None) + (_BLOCK_MASK,) * (spec is not None)
    names = (*fields, *_VALUES, *optional, *scratch_offsets, *problem.statistics)
    fixed, sources = {}, sources_of(arguments, plan)
    block_mask_key = None
    device = cupy_module().cuda.runtime.getDevice()
    if spec is not None:
        assert context.user_mods.mask_mod is not None
        block_mask_key = BlockMaskKey(device, problem.dtype, spec)
        fixed["block_mask"] = block_mask_fields(context.user_mods.mask_mod, block_mask_key)
        sources |= {"block_mask.memory": _BLOCK_MASK}
    out = ((*q.shape[:-1], problem.head_dim_v), np.dtype(problem.out_dtype))
    lse = (lse_shape(q, problem), np.dtype(problem.lse_dtype))
    statistics = [lse] * len(problem.statistics)
    new = (None if arguments.out is not None else out, lse if options.return_lse else None)
    return Call(
        allocate_results=result_allocator((*new, *statistics), uses_torch=context.uses_torch),
        out_index=fields.index("out"),
        overlap_check=overlap_check,
        counters=plan.schedule.counters,
        scratch=memory_allocator(scratch, uses_torch=context.uses_torch),
        launches=None
        if has_no_keys
        else loaded_launches(plan, options, mod_arrays, fixed, sources, names),
        qkv=None if qkv is None else (fields.index("qkv"), qkv.strides[-3]),
        fills_results=has_no_rows or (has_no_keys and not problem.is_empty),
        has_no_rows=has_no_rows,
        scratch_bytes=scratch,
        rotated_offset=rotated_offset,
        append=append.prepare(append_spec(arguments, problem, options), context.device, names)
        if appends
        else None,
        max_keys=min((limit.most for limit in limits), default=0),
        limits=limits,
        device=device,
        block_mask_key=block_mask_key,
        workspace_offsets=tuple(scratch_offsets.values()),
        uses_torch=context.uses_torch,
        statistics=problem.statistics,
    )


class ScratchLayout(NamedTuple):
    """Layout of the scratch memory of a call.

    Attributes
    ----------
    size
        Size in bytes.
    rotated_offset
        Byte offset of the rotated queries; 0 if there are none.
    offsets
        Byte offsets of the arrays whose addresses kernels are given, by name.
    """

    size: int
    rotated_offset: int
    offsets: dict[str, int]


def scratch_layout(plan: Plan, arguments: Arguments) -> ScratchLayout:
    """Return the layout of the scratch memory of a plan for arrays of these sizes."""
    size, rotated_offset, q = plan.workspace, 0, arguments.q
    if arguments.rotary_cos is not None:
        rotated_offset = -(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        size = rotated_offset + q.size * q.itemsize
    offsets = dict(plan.schedule.workspace_offsets)
    if plan.problem.layout.packed_new:
        # The append kernel writes the lengths after the append; the attention kernel reads them.
        offsets["lengths_after"] = -(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        size = offsets["lengths_after"] + 4 * plan.problem.batch
    return ScratchLayout(size, rotated_offset, offsets)


# Attention, after an append to the caches if there are new rows. The options of a call are
# `Options` without `wrt`.
ATTENTION = Operation(readable, prepare, check_call)


def loaded_launches(
    plan: Plan,
    options: Options,
    mod_arrays: Mapping[str, Any],
    fixed: Mapping[str, Any],
    sources: Mapping[str, str],
    names: tuple[str, ...],
) -> Launches:
    """Compile and load the kernels of a plan; return their launches.

    `fixed`, `sources` and `names` are parameters of `PackedStruct`. This function adds the fields
    of `fixed_fields` and of modifications to them.
    """
    fixed, problem, maps = {**fixed_fields(plan), **fixed}, plan.problem, plan.schedule.tensor_maps
    if options.mod_key is not None:
        fixed["mods"], captured = packed_arguments(
            options.mod_key, mod_arrays, problem.dtype, problem.softmax_scale
        )
        sources = {**sources, **{f"mods.{name}.data": name for name in captured}}
    params = PackedStruct(params_dtype(problem), fixed, sources, names)
    return Launches(plan, params, TensorMaps(maps, names, sources) if maps else None)


def fixed_fields(plan: Plan) -> dict[str, Any]:
    """Return the fields of the argument struct that are the same in all calls of a plan."""
    problem, schedule = plan.problem, plan.schedule
    sizes = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "q_offset")
    pages = ("block_table_stride", "pages", "max_pages")
    layout_sizes = (*pages, "total_q", "total_k", "caches", "new_keys")
    return {
        **{name: tensor.strides for name, tensor in problem.tensors.items()},
        **({} if problem.scales is None else problem.scales.given),
        "softmax_scale": problem.score_factor[1],
        **{name: getattr(problem, name) for name in sizes},
        "num_splits": schedule.split.parts,
        "section_heads": schedule.section_heads,
        **{name: getattr(problem.layout, name) for name in layout_sizes},
        **schedule.params,
    }


def sources_of(arguments: Arguments, plan: Plan) -> dict[str, str]:
    """Return the names of the values of the other struct fields; fields without one stay null."""
    is_kvcache = plan.problem.layout.kind == "kvcache"
    result = {name: name for name in ("q", "k", "v", "lse", "workspace", "counters")}
    result |= {"out": "result", **{name: name for name in plan.problem.statistics}}
    if is_kvcache:
        values = "k_cache" if plan.problem.values_in_keys else "v_cache"
        lengths = "lengths_after" if plan.problem.layout.packed_new else "cache_seqlens"
        result |= {"k": "k_cache", "v": values, "seqused_k": lengths, "keys": "keys"}
    if plan.problem.layout.kind == "padded":
        result["seqused_k"] = "seqlens_k"
    if arguments.rotary_cos is not None:
        result["q"] = "q_rotated"
    if plan.problem.scales is not None:
        result |= {name: name for name in plan.problem.scales.given}
        if plan.problem.values_in_keys and "v_scale" in result:
            result["v_scale"] = "k_scale"
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "cache_batch_idx", "block_table"):
        if getattr(arguments, name) is not None:
            result[name] = name
    return result


def append_spec(arguments: Arguments, problem: Problem, options: Options) -> append.AppendSpec:
    """Return the spec of the launch that appends new keys and values, and rotates queries."""
    layout, cos = problem.layout, arguments.rotary_cos
    scales, head_dim_v = problem.scales, problem.head_dim_v
    v, v_cache = arguments.v, arguments.v_cache
    if problem.values_in_keys:
        # The keys hold the values, so there are only keys to append.
        head_dim_v, v, v_cache = 0, arguments.k, arguments.k_cache
        scales = None if scales is None else scales._replace(v=None)
    new = (arguments.k, v)
    if arguments.cu_seqlens_k_new is not None:
        new = tuple(rows[None] for rows in new)
    arrays = (arguments.q, *new, arguments.k_cache, v_cache)
    specs = [spec_of(array, address_of(array)) for array in arrays]
    together = specs if scales is None else specs[:3]
    q_spec, k_spec, v_spec, k_cache_spec, v_cache_spec = specs
    tables = [] if cos is None else [_rotary_alignment(t) for t in (cos, arguments.rotary_sin)]
    return append.AppendSpec(
        dtype=problem.dtype,
        batch=problem.batch,
        seqlen_q=problem.seqlen_q,
        seqlen_new=layout.new_keys,
        total_new=arguments.k.shape[0] if layout.packed_new else None,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        head_dim=problem.head_dim,
        head_dim_v=head_dim_v,
        seqlen_cache=problem.seqlen_k,
        q_strides=q_spec.strides,
        k_strides=k_spec.strides,
        v_strides=v_spec.strides,
        k_cache_strides=k_cache_spec.strides,
        v_cache_strides=v_cache_spec.strides,
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
        queries_advance=problem.is_local,
        alignment=min(spec.row_alignment() for spec in together),
        cache_alignment=min(k_cache_spec.row_alignment(), v_cache_spec.row_alignment()),
        rotary_alignment=min(tables, default=MAX_ALIGNMENT),
        cache_dtype=None if scales is None else k_cache_spec.dtype,
        scales=scales,
    )


def _rotary_alignment(table: Any) -> int:
    """Return the alignment in bytes, at most 16, of all rows of a (positions, columns) table."""
    return math.gcd(
        address_of(table) or MAX_ALIGNMENT,
        table.strides[0] if table.shape[0] > 1 else 0,
        MAX_ALIGNMENT,
    )
