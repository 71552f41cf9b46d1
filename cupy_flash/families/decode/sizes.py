"""Rows, columns and bytes that a warp, a group of column warps and a thread block hold."""

from __future__ import annotations

import dataclasses

from cupy_flash.families.contract import ceil_div, round_up
from cupy_flash.families.decode.tile import MAX_STAGES, DecodeTile
from cupy_flash.problem.arrays import ITEMSIZE, Strides
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# Size in bytes of the scale of a key or value.
_SCALE_BYTES = 4
# Size in bytes of the work range and other state of a thread block (`State` in the kernel).
_STATE_BYTES = 160
# Heads of more columns are divided over COLUMN_WARPS warps, as one warp's registers cannot hold
# their queries and output. At head_dim 576, each warp has 144 columns and 170 registers.
_MAX_COLUMNS = 256
COLUMN_WARPS = 4


def group(problem: Problem) -> int:
    """Return the number of query heads per KV head; 1 if there are no query heads."""
    return max(1, problem.heads_q // problem.heads_kv)


def rows(problem: Problem) -> int:
    """Return the number of query rows of a sequence that use the same KV head."""
    return problem.seqlen_q * (problem.heads_q // problem.heads_kv)


def row_tiles(problem: Problem, Br: int) -> int:
    """Return the number of query tiles of a sequence and KV head."""
    return ceil_div(rows(problem), Br)


def head_tiles(problem: Problem, Br: int) -> int:
    """Return the number of (KV head, query tile) pairs; the keys of each are divided separately."""
    return max(1, problem.heads_kv * row_tiles(problem, Br))


def column_warps(problem: Problem) -> int:
    """Return the number of warps that divide the columns of a head (column warps)."""
    return 1 if max(problem.head_dim, problem.head_dim_v) <= _MAX_COLUMNS else COLUMN_WARPS


def _key_warps(problem: Problem, tile: DecodeTile) -> int:
    return tile.warps // column_warps(problem)


def padded_dims(problem: Problem) -> tuple[int, int]:
    """Return the padded columns of keys and of values: multiples of 16 for each column warp.

    In MLA, where values are columns of the keys, values have as many columns as keys.
    """
    step = 16 * column_warps(problem)
    columns = round_up(problem.head_dim, step)
    return columns, columns if problem.values_in_keys else round_up(problem.head_dim_v, step)


def scales_vary_by_key(problem: Problem, scales: Strides | None) -> bool:
    """Return whether the keys of one sequence and head may have different scales."""
    if scales is None:
        return False
    block, row, _ = scales
    return row != 0 or (problem.layout.page_size > 0 and block != 0)


def _key_bytes(problem: Problem) -> int:
    """Return the size in bytes of a key, its value and their scales in shared memory.

    Each column warp has a copy of the scales.
    """
    size = ITEMSIZE[problem.tensors["k"].dtype]
    scale_bytes = 0
    if problem.scales is not None:
        each = problem.scales.given.values()
        scale_bytes = sum(_SCALE_BYTES for strides in each if scales_vary_by_key(problem, strides))
    columns, columns_v = padded_dims(problem)
    columns += 0 if problem.values_in_keys else columns_v
    return columns * size + scale_bytes * column_warps(problem)


def total_kv_bytes(problem: Problem) -> int:
    """Return the size in bytes of all keys and values if all sequences have the maximum length."""
    return problem.batch * problem.seqlen_k * problem.heads_kv * _key_bytes(problem)


def stage_bytes(problem: Problem, tile: DecodeTile) -> int:
    """Return the size in bytes of a KV tile, which is a ring stage of a group of column warps."""
    return tile.Bc * _key_bytes(problem)


def _exchange_bytes(problem: Problem, tile: DecodeTile) -> int:
    """Return the size in bytes of the double buffer in which column warps sum partial scores."""
    return 2 * tile.warps * tile.Br * tile.Bc * 4 if column_warps(problem) > 1 else 0


def unit_keys(problem: Problem, tile: DecodeTile) -> int:
    """Return the number of keys of a KV unit: one KV tile for each group of column warps."""
    return tile.Bc * _key_warps(problem, tile)


def units(problem: Problem, tile: DecodeTile) -> int:
    """Return the largest number of KV units of all sequences; one unit for each without keys."""
    return problem.batch * max(1, ceil_div(problem.seqlen_k, unit_keys(problem, tile)))


def record_bytes(problem: Problem) -> int:
    """Return the size in bytes of a row of a partial result, in shared memory and workspace."""
    return (padded_dims(problem)[1] + 8) * 4


def merge_slices(tile: DecodeTile) -> int:
    """Return into how many slices of columns a cluster may divide the merge of a query tile."""
    return max(1, tile.cluster)


def slot_record_bytes(problem: Problem, tile: DecodeTile) -> int:
    """Return the size in bytes of a row of a workspace slot, which may consist of slices."""
    chunks = round_up(problem.head_dim_v, 16) // 4
    slice_bytes = (4 * ceil_div(chunks, merge_slices(tile)) + 4) * 4
    return max(record_bytes(problem), merge_slices(tile) * slice_bytes)


def receive_rows(problem: Problem, tile: DecodeTile) -> int:
    """Return the number of query rows of a tile for which a cluster exchanges partial results."""
    return max(1, min(tile.Br, rows(problem)))


def _receive_bytes(problem: Problem, tile: DecodeTile) -> int:
    """Return the size in bytes of the buffer that receives the partial results of a cluster."""
    return tile.cluster * receive_rows(problem, tile) * record_bytes(problem)


def shared_memory(problem: Problem, tile: DecodeTile) -> int:
    """Return the size in bytes of shared memory of a thread block."""
    rings = _key_warps(problem, tile) * tile.stages * stage_bytes(problem, tile)
    others = _exchange_bytes(problem, tile) + _receive_bytes(problem, tile)
    return rings + others + _STATE_BYTES


def with_all_stages(problem: Problem, device: Device, tile: DecodeTile) -> DecodeTile:
    """Return the tile with as many stages as shared memory has space for, given `min_blocks`."""
    per_block = device.shared_memory_per_sm // tile.min_blocks - device.reserved_shared_memory
    per_block = min(per_block, device.shared_memory_per_block) - _receive_bytes(problem, tile)
    per_block -= _exchange_bytes(problem, tile) + _STATE_BYTES
    stages = per_block // (_key_warps(problem, tile) * stage_bytes(problem, tile))
    return dataclasses.replace(tile, stages=max(0, min(MAX_STAGES, stages)))


def registers(problem: Problem, tile: DecodeTile) -> int:
    """Return a lower bound of the registers: queries, scores, output, and 40 others."""
    row_tiles = tile.Br // 16
    columns, columns_v = (dim // column_warps(problem) for dim in padded_dims(problem))
    return row_tiles * (columns // 4 + tile.Bc // 2 + columns_v // 2) + 40
