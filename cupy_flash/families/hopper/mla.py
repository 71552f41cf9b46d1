"""Multi-head latent attention (MLA) in the `hopper` family: the values are columns of the keys."""

from __future__ import annotations

import dataclasses
from typing import Any

from cupy_flash.families import split_kv
from cupy_flash.families.contract import ceil_div
from cupy_flash.families.hopper.block import cta_ranks
from cupy_flash.families.hopper.tiles import HopperTile
from cupy_flash.families.schedule import Split
from cupy_flash.problem.arrays import Tensor, Tensors
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# Number of thread blocks of a query tile, and number of keys to which `_TILE_US` refers.
_PAIR = 2
_KEYS = 64
# Head dims must be multiples of this: each of the two thread blocks has whole 64-byte box rows.
_COLUMNS = _PAIR * 32
# Cost model, fitted to timings on an H100. `_TILE_US` is the time of two thread blocks per 64 keys,
# by Br. Each part of the keys adds `_PART_US`, and a call adds `_LAUNCH_US`.
_TILE_US = {64: 1.7, 128: 2.1}
_PART_US = 0.7
_LAUNCH_US = 10.0
# Cost model of the `decode` family: launch time and TFLOP/s, for up to _MAX_FEW_ROWS query rows
# per KV head. For more rows, `hopper` is always faster.
_MAX_FEW_ROWS = 128
_FEW_ROWS_LAUNCH_US = 12.0
_FEW_ROWS_TFLOPS = 150.0


def holds_values_in_keys(problem: Problem) -> bool:
    """Return whether the kernel reads values from K tiles (MLA); it must not pad their columns.

    Each of two thread blocks has half of the columns of the values and half of the other columns.
    """
    if cta_ranks(problem) < _PAIR or not problem.values_in_keys or problem.itemsize != 2:
        return False
    if problem.score is not None or problem.scales is not None or problem.layout.packed_q:
        return False
    return problem.head_dim % _COLUMNS == problem.head_dim_v % _COLUMNS == 0


def kernel_problem(problem: Problem) -> Problem:
    """Return the problem as the kernel computes it.

    In MLA decoding with one query per sequence, which attends to all keys, the query heads of a KV
    head become query rows, so that they fill a tile.
    """
    if problem.seqlen_q != 1 or not holds_values_in_keys(problem):
        return problem
    group = problem.heads_q // problem.heads_kv
    changed = {name: _heads_as_rows(problem.tensors[name], group) for name in ("q", "out")}
    return dataclasses.replace(
        problem,
        seqlen_q=group,
        heads_q=problem.heads_kv,
        causal=False,
        tensors=Tensors(**{**problem.tensors, **changed}),
    )


def param_overrides(problem: Problem, kernel_problem: Problem) -> dict[str, Any]:
    """Return the fields of the argument struct in which the two problems differ."""
    if kernel_problem is problem:
        return {}
    return {
        "seqlen_q": kernel_problem.seqlen_q,
        "heads_q": kernel_problem.heads_q,
        **{name: kernel_problem.tensors[name].strides for name in ("q", "out")},
    }


def choose_split(problem: Problem, device: Device, tile: HopperTile) -> Split:
    """Choose the split of the keys of each sequence."""
    return split_kv.choose(
        problem,
        device,
        q_tiles=ceil_div(problem.seqlen_q, tile.Br) * _PAIR,
        key_tiles=ceil_div(problem.seqlen_k, tile.Bc),
        blocks_per_sm=1,
        tile_time=_tile_time(tile),
    )


def why_not_first(problem: Problem, device: Device, tile: HopperTile, tiles: int) -> str | None:
    """Return why `decode` is faster for a problem from `kernel_problem`, or None.

    `tiles` is the number of query tiles.
    """
    if problem.seqlen_q > _MAX_FEW_ROWS:
        return None
    split = choose_split(problem, device, tile)
    rounds = ceil_div(tiles * split.parts, max(1, device.sm_count // _PAIR))
    blocks = ceil_div(ceil_div(problem.seqlen_k, tile.Bc), split.parts)
    tile_time = _tile_time(tile)
    time = _LAUNCH_US + rounds * blocks * tile_time.alone
    time += split_kv.combine_time(problem, split) + tile_time.part * (split.parts - 1)
    others = _FEW_ROWS_LAUNCH_US + 1e-6 * problem.flops() / _FEW_ROWS_TFLOPS
    if time < others:
        return None
    return (
        f"takes about {time:.0f} us with tiles of {tile.Br} rows, of which {problem.seqlen_q} are "
        f"used; decode takes about {others:.0f} us"
    )


def _tile_time(tile: HopperTile) -> split_kv.TileTime:
    block_time = _TILE_US.get(tile.Br, _TILE_US[128]) * tile.Bc / _KEYS
    return split_kv.TileTime(block_time, block_time, _PART_US)


def _heads_as_rows(tensor: Tensor, group: int) -> Tensor:
    batch, _, head = tensor.strides
    return tensor._replace(strides=(batch, head, group * head))
