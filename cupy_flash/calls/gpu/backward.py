"""Prepared backward calls on a GPU: plan, kernels, packed arguments, and the launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cupy_flash.arrays.overlap import OverlapCheck, require_no_overlap
from cupy_flash.arrays.strided import as_cupy
from cupy_flash.calls.arguments import WRITTEN_GRADIENTS, GradientArguments
from cupy_flash.calls.check.gradients import check_gradient_call, result_spec
from cupy_flash.calls.check.lengths import LengthLimit, require_length
from cupy_flash.calls.check.modifications import NO_USER_MODS, UserMods
from cupy_flash.calls.conversions import contiguous_copies, converted, readable_copies
from cupy_flash.calls.gpu.allocate import (
    ResultAllocator,
    result_allocator,
)
from cupy_flash.calls.gpu.block_masks import block_mask_fields, block_mask_spec, ready_block_mask
from cupy_flash.calls.gpu.forward import loaded_launches
from cupy_flash.calls.gpu.prepared_calls import Context, Operation
from cupy_flash.calls.options import Options
from cupy_flash.gpu.block_masks import LENGTHS, BlockMaskKey, Lengths
from cupy_flash.gpu.counters import shared
from cupy_flash.gpu.environment import cupy_module
from cupy_flash.gpu.launch import Launches
from cupy_flash.mods.captures import prefixed
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.gradient import ROWS

# Names of the values that follow the addresses of the arguments when a struct is packed: the
# address of each input's gradient, of the workspace, and of arrays in the workspace.
_RESULT, WORKSPACE = "gradient of ", "workspace"
# Name of the address of the block mask, which is the last of these values.
_BLOCK_MASK = "block_mask"
# Struct fields for the gradients of inputs other than q, k, v and captured arrays.
_FIELDS = {"bias": "dbias", "sinks": "dsinks"}


class Placed(NamedTuple):
    """Memory of the caller for a backward call.

    Attributes
    ----------
    results
        Arrays of the gradients, in order. They may be None unless named in `Call.cleared`.
    addresses
        Addresses of the gradients, followed by that of at least `Call.workspace` bytes.
    """

    results: list[Any]
    addresses: list[int]


@dataclass(frozen=True)
class Call:
    """Prepared backward call: what the call key determines, see `prepared_calls.look_up`.

    Attributes
    ----------
    allocate
        Function that allocates, in order, the gradients that no array is given for, and the plan's
        workspace.
    given
        Index among the gradients, and index among the call's arrays, of each array that is given.
    overlap_check
        Overlap check for all arrays of the call.
    uses_torch
        Whether torch allocates that memory. Torch tracks itself which streams use its memory.
    workspace_offsets
        Byte offsets in the workspace of the arrays whose addresses kernels are given.
    device
        Index of the device.
    launches
        Launches of the backward kernels; none if there is no query.
    cleared
        Indices of the gradients that are zeroed first, because kernels write only parts of them.
    block_mask_key
        Key of the block mask that the kernels read, or None.
    length_indices
        Indices among the call's arrays of the lengths that the block mask depends on; None for
        each that is not given.
    workspace
        Size in bytes of the plan's workspace.
    limits
        Limits of the length of all cached sequences, which kernels then receive after the workspace
        and its arrays; None for calls without a cache.
    """

    allocate: ResultAllocator
    given: tuple[tuple[int, int], ...]
    overlap_check: OverlapCheck
    uses_torch: bool
    workspace_offsets: tuple[int, ...]
    device: int
    launches: Launches
    cleared: tuple[int, ...]
    block_mask_key: BlockMaskKey | None = None
    length_indices: tuple[int | None, ...] = ()
    workspace: int = 0
    limits: tuple[LengthLimit, ...] | None = None

    def run(
        self,
        arguments: Any,
        addresses: tuple[int, ...],
        keys: int = 0,
        user_mods: UserMods = NO_USER_MODS,
        stream: int | None = None,
        placed: Placed | None = None,
    ) -> list[Any]:
        """Enqueue the launches for arrays at these addresses; return the gradients.

        `arguments` is used only for the arrays that gradients are written to, and for those that
        the block mask is built from. `stream` is the handle of the stream, by default that of
        CuPy's current stream. It may be another one only if no gradient is cleared and no block
        mask is built. Gradients and workspace are allocated unless they are `placed`.
        """
        if self.limits is not None:
            require_length("cache_seqlens", keys, self.limits)
        if self.overlap_check.pairs:
            self.overlap_check.check(addresses)
        if stream is None:
            # Passing the device saves CuPy the look-up of the current device.
            stream = cupy_module().cuda.get_current_stream(self.device).ptr
        # A caller that gives memory takes care itself that launches with it follow one another.
        has_queue = not self.uses_torch and placed is None
        queue = shared(0, self.device, stream) if has_queue else None
        if placed is None:
            arrays, new_addresses = self.allocate()
            # `_memory` is referenced until the launches are enqueued; then the pool may reuse it.
            _memory = arrays.pop()
        else:
            arrays, new_addresses = placed
        for index, argument_index in self.given:
            arrays[index], new_addresses[index] = (
                arguments[argument_index],
                addresses[argument_index],
            )
        for index in self.cleared:
            as_cupy(arrays[index]).fill(0)
        if self.launches:
            values = (*addresses, *new_addresses)
            if self.workspace_offsets:
                workspace = new_addresses[-1]
                values += tuple([workspace + offset for offset in self.workspace_offsets])
            if self.limits is not None:
                values += (keys,)
            ready = None
            if self.block_mask_key is not None:
                assert user_mods.mask_mod is not None
                ready = ready_block_mask(
                    *(user_mods.mask_mod, self.block_mask_key, stream, arguments),
                    uses_torch=self.uses_torch,
                    lengths=_lengths(addresses, self.length_indices),
                )
                values += (ready.address,)
            self.launches.run(values, stream)
            if ready is not None:
                ready.launched(stream)
        if queue is not None:
            queue.launched()
        return arrays


def readable(arguments: GradientArguments, options: Options) -> GradientArguments:
    """Return the arrays, with copies of those that kernels cannot read in place."""
    arguments = converted(arguments, options)
    copied = readable_copies(arguments, options, WRITTEN_GRADIENTS)
    return arguments._replace(**(copied | contiguous_copies(arguments, "lse", "dlse")))


def prepare(arguments: GradientArguments, options: Options, context: Context) -> Call:
    """Check, plan, compile and load what backward calls with such CuPy arrays need."""
    assert options.wrt is not None
    fields = arguments._fields
    problem, mod_arrays = check_gradient_call(arguments, options)
    overlap_check = require_no_overlap(fields, arguments, WRITTEN_GRADIENTS)
    plan = make_plan(
        problem, context.device, family=options.family, tile=options.tile, explain=False
    )
    sources = {name: name for name in ("q", "k", "v", "out", "lse", "dout", WORKSPACE)}
    sources |= {_field_of(name): _RESULT + name for name in options.wrt}
    offsets = plan.schedule.workspace_offsets
    sources |= {name: name for name in offsets}
    optional = ("dlse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    sources |= {name: name for name in optional if getattr(arguments, name) is not None}
    if problem.layout.kind == "padded":
        sources["seqused_k"] = "seqlens_k"
    fixed: dict[str, Any] = {}
    spec, block_mask_key = block_mask_spec(plan), None
    device = cupy_module().cuda.runtime.getDevice()
    if spec is not None:
        assert context.user_mods.mask_mod is not None
        block_mask_key = BlockMaskKey(device, problem.dtype, spec)
        fixed["block_mask"] = block_mask_fields(context.user_mods.mask_mod, block_mask_key)
        sources |= {"block_mask.memory": _BLOCK_MASK}
    results = tuple(_RESULT + name for name in options.wrt)
    names = (*fields, *results, WORKSPACE, *offsets, *((_BLOCK_MASK,) if spec else ()))
    given = {
        index: fields.index(f"d{name}")
        for index, name in enumerate(options.wrt)
        if name in ROWS and getattr(arguments, f"d{name}") is not None
    }
    new = [
        None if index in given else result_spec(arguments, options, name)
        for index, name in enumerate(options.wrt)
    ]
    return Call(
        allocate=result_allocator(new, uses_torch=context.uses_torch, workspace=plan.workspace),
        given=tuple(given.items()),
        overlap_check=overlap_check,
        uses_torch=context.uses_torch,
        workspace_offsets=tuple(offsets.values()),
        device=device,
        launches=loaded_launches(plan, options, mod_arrays, fixed, sources, names),
        cleared=tuple(
            index
            for index, name in enumerate(options.wrt)
            if problem.is_empty or (name not in ROWS and not problem.layout.is_dense)
        ),
        block_mask_key=block_mask_key,
        length_indices=tuple(
            [fields.index(sources[name]) if name in sources else None for name in LENGTHS]
        ),
        workspace=plan.workspace,
    )


# Gradients of attention. The options of a call are `Options` with `wrt`.
GRADIENTS = Operation(readable, prepare, check_gradient_call)


def _lengths(addresses: tuple[int, ...], indices: tuple[int | None, ...]) -> Lengths:
    """Return the addresses of the lengths of sequences, given those of all arrays of a call."""
    cu_seqlens_q, cu_seqlens_k, seqused_k = [0 if i is None else addresses[i] for i in indices]
    return cu_seqlens_q, cu_seqlens_k, seqused_k


def _field_of(name: str) -> str:
    """Return the struct field that holds the address of an input's gradient."""
    if name in ROWS:
        return f"d{name}"
    return _FIELDS.get(name) or f"dcaptures.{prefixed(*name.split('.'))}"
