"""Latent attention, whose values are columns of their keys, as the `hopper` family works on it."""

from __future__ import annotations

import dataclasses
from typing import Any

from cupy_flash.families import split
from cupy_flash.families.contract import ceil_div
from cupy_flash.families.hopper.columns import ranks
from cupy_flash.families.hopper.tiles import HopperTile
from cupy_flash.families.schedule import Split
from cupy_flash.problem.arrays import Tensor, Tensors
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# Thread blocks that a tile is worked on by, and the keys that times are of.
_PAIR = 2
_KEYS = 64
# Columns of the values, and of the others, come in lines of shared memory, as many in both blocks.
_COLUMNS = _PAIR * 32
# Microseconds that a pair of blocks takes for 64 keys, by the rows of the tile; that
# each part of cut keys adds, and that a call takes besides. And what `decode` takes besides, and
# its rate, which goes little by the number of rows where these are 33 to 128. On an H100, us of
# graphs with L2 flushed, pages of 64, `hopper` and `decode`: 128 heads 1 x 4096 54, 45; 1 x 32768
# 104, 101; 4 x 4096 56, 60; 4 x 32768 124, 287; 16 x 1024 46, 54; 64 x 4096 159, 523. 64 heads
# 1 x 32768 90, 71; 4 x 4096 55, 52; 16 x 4096 66, 87; 64 x 1024 53, 78. 48 heads 4 x 32768 108,
# 136; 16 x 4096 61, 77.
_TILE_US = {64: 1.7, 128: 2.1}
_PART_US = 0.7
_LAUNCH_US = 10.0
# With 256 heads, where `mma` comes next: 1 x 4096 59, `mma` 83; 64 x 4096 285, 610.
_MOST_FEW_ROWS = 128
_FEW_ROWS_LAUNCH_US = 12.0
_FEW_ROWS_TFLOPS = 150.0


def holds_values_in_keys(problem: Problem) -> bool:
    """Whether a tile of keys serves as that of their values, without more columns than they have.

    Each of two thread blocks takes half of the values' columns and half of the others.
    """
    if ranks(problem) < _PAIR or not problem.values_in_keys or problem.itemsize != 2:
        return False
    if problem.score is not None or problem.scales is not None or problem.layout.packed_q:
        return False
    return problem.head_dim % _COLUMNS == problem.head_dim_v % _COLUMNS == 0


def posed(problem: Problem) -> Problem:
    """The problem as the kernels have it.

    Of latent attention with one query of each sequence, which sees all keys, the query heads of a
    key/value head are rows: a tile then has many.
    """
    if problem.seqlen_q != 1 or not holds_values_in_keys(problem):
        return problem
    group = problem.heads_q // problem.heads_kv
    changed = {name: _of_rows(problem.tensors[name], group) for name in ("q", "out")}
    return dataclasses.replace(
        problem,
        seqlen_q=group,
        heads_q=problem.heads_kv,
        causal=False,
        tensors=Tensors(**{**problem.tensors, **changed}),
    )


def changed_params(problem: Problem, posed: Problem) -> dict[str, Any]:
    """Fields of the kernels' argument in which a problem and how it is posed differ."""
    if posed is problem:
        return {}
    return {
        "seqlen_q": posed.seqlen_q,
        "heads_q": posed.heads_q,
        **{name: posed.tensors[name].strides for name in ("q", "out")},
    }


def split_of(problem: Problem, device: Device, tile: HopperTile) -> Split:
    """How the keys of sequences are shared out."""
    return split.choose(
        problem,
        device,
        q_tiles=ceil_div(problem.seqlen_q, tile.Br) * _PAIR,
        key_tiles=ceil_div(problem.seqlen_k, tile.Bc),
        blocks_per_sm=1,
        tile_time=_tile_time(tile),
    )


def why_not_first(problem: Problem, device: Device, tile: HopperTile, tiles: int) -> str | None:
    """Why a kernel for few rows takes less time for a posed problem, or None.

    `tiles` is how many query tiles there are.
    """
    if problem.seqlen_q > _MOST_FEW_ROWS:
        return None
    cut = split_of(problem, device, tile)
    rounds = ceil_div(tiles * cut.parts, max(1, device.sm_count // _PAIR))
    blocks = ceil_div(ceil_div(problem.seqlen_k, tile.Bc), cut.parts)
    of_tile = _tile_time(tile)
    time = _LAUNCH_US + rounds * blocks * of_tile.alone
    time += split.combine_time(problem, cut) + of_tile.part * (cut.parts - 1)
    others = _FEW_ROWS_LAUNCH_US + 1e-6 * problem.flops() / _FEW_ROWS_TFLOPS
    if time < others:
        return None
    return (
        f"takes about {time:.0f} us for tiles of {tile.Br} rows, of which {problem.seqlen_q} are "
        f"there; one for few rows takes {others:.0f}"
    )


def _tile_time(tile: HopperTile) -> split.TileTime:
    of_block = _TILE_US.get(tile.Br, _TILE_US[128]) * tile.Bc / _KEYS
    return split.TileTime(of_block, of_block, _PART_US)


def _of_rows(tensor: Tensor, group: int) -> Tensor:
    batch, _, head = tensor.strides
    return tensor._replace(strides=(batch, head, group * head))
