"""Shared memory of a thread block of the forward kernel: query tiles, KV ring, smaller buffers."""

from __future__ import annotations

from typing import Any

from cupy_flash.families.contract import ceil_div, may_have_block_mask, round_up
from cupy_flash.families.hopper import float8, float32, mla
from cupy_flash.families.hopper.block import (
    BARRIER_BYTES,
    WARPGROUP_ROWS,
    block_columns,
    cta_ranks,
    operand_bytes,
)
from cupy_flash.families.hopper.scores import BIAS_STAGES, skips_tiles, streams_bias
from cupy_flash.families.hopper.tiles import HopperTile
from cupy_flash.problem.problem import Problem

# Number of buffers for the partial scores that two thread blocks of a cluster exchange.
_PAIR_BUFFERS = 2
# Number of the score buffers in MLA, where KV tiles stay in shared memory longer.
_MLA_PAIR_BUFFERS = 1
_SCORE_BYTES = 4
# Size in bytes of a work tile: a query tile and its range of KV tiles.
_WORK_TILE_BYTES = 32
# Additional bytes of a work tile of a packed or cached sequence: the location of its rows.
_BLOCK_INFO_BYTES = 24
# Sizes in bytes of the record of a sequence's last values, and of the record of a KV tile.
_TAIL_BYTES = 8
_KV_TILE_INFO_BYTES = 8
# Size in bytes of `VisiblePairs` (`block_mask/block_mask.cuh`): 64 query rows, 128 keys.
_VISIBLE_PAIRS_BYTES, _VISIBLE_PAIRS_KEYS = 1024, 128
# Size in bytes of the float8 scales of a query tile, which are part of its work tile.
_SCALES_BYTES = 8


def footprint(problem: Problem) -> tuple[Any, ...]:
    """Return everything that `block_bytes` depends on, except the tile; lengths do not matter."""
    score = problem.score
    score_key: tuple[Any, ...] = ()
    if score is not None:
        has_edges = score.left is not None or score.right is not None
        uses_block_mask, bias_is_streamed = may_have_block_mask(problem), streams_bias(problem)
        score_key = has_edges, score.block_mask_suffices, uses_block_mask, bias_is_streamed
    return (
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        problem.layout.is_dense,
        mla.holds_values_in_keys(problem),
        score_key,
    )


def block_bytes(problem: Problem, tile: HopperTile) -> int:
    """Return the size in bytes of a thread block, for a problem as `mla.kernel_problem` returns."""
    queries = tile.Br * _row_bytes(problem, problem.head_dim)
    stage = max(tile.Bc * _row_bytes(problem, problem.head_dim), _value_bytes(problem, tile))
    # Each stage has two barriers. Work tiles: one for each query stage, one whose output is being
    # written, and one whose queries are no longer needed.
    scales = _SCALES_BYTES if problem.is_float8 else 0
    work_tiles = (tile.q_stages + 2) * (_WORK_TILE_BYTES + scales)
    total = (
        tile.q_stages * (queries + 2 * BARRIER_BYTES)
        + tile.stages * (stage + 2 * BARRIER_BYTES)
        + work_tiles
    )
    if skips_tiles(problem, tile):
        total += tile.stages * _KV_TILE_INFO_BYTES
    if may_have_block_mask(problem):
        blocks = (tile.stages // 2 + 1) * (tile.Br // WARPGROUP_ROWS)
        total += blocks * _VISIBLE_PAIRS_BYTES * ceil_div(tile.Bc, _VISIBLE_PAIRS_KEYS)
    if streams_bias(problem):
        bias = tile.Br * round_up(tile.Bc, 32) * problem.itemsize
        total += BIAS_STAGES * (bias + 2 * BARRIER_BYTES)
    if cta_ranks(problem) > 1:
        scores = tile.Br * tile.Bc * _SCORE_BYTES
        # Each consumer warp has two barriers: one per score buffer or, in MLA, one for a full
        # buffer and one for a buffer that has been read.
        is_mla = mla.holds_values_in_keys(problem)
        buffers = _MLA_PAIR_BUFFERS if is_mla else _PAIR_BUFFERS
        total += buffers * scores + 2 * (tile.Br // 16 * BARRIER_BYTES)
    if problem.layout.is_dense:
        return total
    # Varlen and KV cache: two more work tiles with two barriers, the rows of the sequence for each
    # work tile, and a barrier and a record of the last values for each stage and for the end.
    return (
        total
        + (tile.q_stages + 4) * _BLOCK_INFO_BYTES
        + 2 * _WORK_TILE_BYTES
        + 2 * BARRIER_BYTES
        + (tile.stages + 1) * (BARRIER_BYTES + _TAIL_BYTES)
    )


def _row_bytes(problem: Problem, columns: int) -> int:
    """Return the size in bytes of a row in shared memory, including all float32 components."""
    bytes_of_row = block_columns(problem, columns) * operand_bytes(problem)
    return round_up(bytes_of_row, 64) * float32.count(problem)


def _value_bytes(problem: Problem, tile: HopperTile) -> int:
    """Return the size in bytes of a tile of values, which is transposed for float8."""
    if problem.is_float8:
        return float8.value_rows(problem, tile) * _row_bytes(problem, tile.Bc)
    return tile.Bc * _row_bytes(problem, problem.head_dim_v)
