"""Block masks of a user's mask: its CUDA source and captures, and the block masks that it keeps."""

from __future__ import annotations

import functools

import numpy as np

from cupy_flash.arrays.strided import address_of, as_cupy
from cupy_flash.calls.arguments import Arguments, GradientArguments
from cupy_flash.calls.gpu.allocate import new_torch_memory
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.block_mask_layout import BatchLayout, BlockMaskSpec, MaskSource, block_mask_at
from cupy_flash.gpu.block_masks import (
    NO_LENGTHS,
    BlockMaskKey,
    Lengths,
    ReadyBlockMask,
    build_mask,
    find_kept_mask,
)
from cupy_flash.mods.captures import prefixed
from cupy_flash.mods.codegen.arguments import pack_arguments, real_type
from cupy_flash.mods.codegen.bounds import HEADERS as BOUNDS_HEADERS
from cupy_flash.mods.codegen.bounds import RANGE_BYTES, emit_bounds
from cupy_flash.mods.codegen.emit import HEADERS, emit
from cupy_flash.mods.ir.compose import prefixed_text, varies
from cupy_flash.mods.modification import MaskMod
from cupy_flash.mods.trace.traced import Traced
from cupy_flash.planning.planner import Plan


def ready_block_mask(
    mod: MaskMod,
    key: BlockMaskKey,
    current: int,
    arguments: Arguments | GradientArguments | None = None,
    *,
    uses_torch: bool = False,
    lengths: Lengths = NO_LENGTHS,
) -> ReadyBlockMask:
    """Return the block mask of a mask on the current device, ready for the next launch.

    Each `MaskMod` keeps block masks of dense batches until `MaskMod.refresh`, even if another mask
    is equal. The block mask of another batch is built in each call.

    Parameters
    ----------
    mod
        Mask of this call itself; an equal mask may have captured other arrays.
    key
        Device; dtype of q and k, which determines how captured floats are read; and the sizes,
        the tile, and the causal and window bounds.
    current
        Handle of the current stream.
    arguments
        Record with the arrays that the mask reads; by default those that it captured.
    uses_torch
        Whether the call's workspace is torch's memory. A block mask that is not kept is then in
        torch's memory, too, as in a graph.
    lengths
        Addresses of the lengths of the sequences, unless the batch is dense.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    UnsupportedError
        If there are too many blocks.
    """
    kept = mod.kept_maps()
    result = find_kept_mask(kept, key, current) if key.spec.layout.is_dense else None
    if result is not None:
        return result
    mods = packed_captures(mod, key.dtype, arguments)
    allocate = new_torch_memory if uses_torch else None
    return build_mask(kept, key, current, mask_text(mod, key.dtype), mods, allocate, lengths)


def block_mask_fields(mod: MaskMod, key: BlockMaskKey) -> tuple[int, ...]:
    """Return the values of the struct of a block mask whose address is not known yet.

    Parameters
    ----------
    mod, key
        See `ready_block_mask`.
    """
    return block_mask_at(key.spec, mask_text(mod, key.dtype)).fields


def packed_captures(
    mod: MaskMod, dtype: str, arguments: Arguments | GradientArguments | None = None
) -> np.ndarray:
    """Return the ``ModArguments`` of a mask, filled in; see `ready_block_mask`."""
    values = {prefixed("mask_mod", name): value for name, value in mod.captures.items()}
    if arguments is not None:
        values |= {name: as_cupy(getattr(arguments, name)) for name in mod.array_names}
    addresses = {name: address_of(values[name]) for name in mod.array_names}
    _, specs = prefixed_text(mod.traced, "mask_mod")
    return pack_arguments(specs, values, addresses, real_type(dtype))


def block_mask_spec(plan: Plan) -> BlockMaskSpec | None:
    """Return the sizes and bounds of the block mask of a plan; None if its kernels read none."""
    problem, score = plan.problem, plan.problem.score
    family = FAMILIES[problem.direction].get(plan.family)
    if score is None or family is None or not family.uses_block_mask(problem, plan.tile):
        return None
    return BlockMaskSpec(
        plan.tile.Br,
        plan.tile.Bc,
        problem.batch,
        problem.heads_q,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.q_offset,
        # The keys of a prefix are visible even if causality or the window would mask them.
        *((False, None, None) if score.prefix else (problem.causal, score.left, score.right)),
        family.row_groups(plan.tile),
        family.query_tile_lists(problem, plan.tile),
        BatchLayout(problem.layout.kind, problem.layout.total_q, problem.layout.total_k),
    )


def mask_text(mod: MaskMod, dtype: str) -> MaskSource:
    """Return the CUDA source of a mask; equal masks have the same source."""
    return _mask_text(mod.traced, dtype)


# The cache key is not the mask itself, which would keep its captured arrays and block masks alive.
@functools.lru_cache(maxsize=256)
def _mask_text(traced: Traced, dtype: str) -> MaskSource:
    expression, specs = prefixed_text(traced, "mask_mod")
    bounds = emit_bounds(expression, specs, dtype=dtype)
    of_batch, of_head = varies(traced)
    return MaskSource(
        text=emit(None, expression, specs, dtype=dtype) + "\n" + bounds.text,
        headers=(*HEADERS, *BOUNDS_HEADERS),
        row_ranges=bounds.row_ranges * RANGE_BYTES,
        key_ranges=bounds.key_ranges * RANGE_BYTES,
        of_batch=of_batch,
        of_head=of_head,
    )
