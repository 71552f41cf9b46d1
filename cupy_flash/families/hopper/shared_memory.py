"""Shared memory of a block of the forward kernel: query tiles, the ring of keys and values."""

from __future__ import annotations

from typing import Any

from cupy_flash.families.contract import ceil_div, may_have_block_map, round_up
from cupy_flash.families.hopper import float8, latent, pieces
from cupy_flash.families.hopper.columns import block_columns, operand_bytes, ranks
from cupy_flash.families.hopper.scores import BIAS_STAGES, is_noted, streams_bias
from cupy_flash.families.hopper.sm90 import BARRIER_BYTES, WARPGROUP_ROWS
from cupy_flash.families.hopper.tiles import HopperTile
from cupy_flash.problem.problem import Problem

# What the blocks of a pair send to each other: tiles of scores, as many as they have buffers for.
_PAIR_BUFFERS = 2
# Of latent attention, whose tiles of keys are held longer.
_LATENT_PAIR_BUFFERS = 1
_SCORE_BYTES = 4
_VISIT_BYTES = 32
# What a visit holds besides of a packed or cached sequence, and what is noted of its last values.
_PLACE_BYTES = 24
_TAIL_BYTES = 8
_NOTE_BYTES = 8
# Of 64 rows and a block of up to so many keys, the pairs that a mask shows (`blocks/map.cuh`).
_SHOWN_BYTES, _SHOWN_KEYS = 1024, 128
# Of a query tile's scales of float8, which its visit has.
_SCALES_BYTES = 8


def footprint(problem: Problem) -> tuple[Any, ...]:
    """Return all that `block_bytes` depends on besides the tile: no lengths, so few values."""
    score = problem.score
    of_score: tuple[Any, ...] = ()
    if score is not None:
        has_edges = score.left is not None or score.right is not None
        is_mapped, of_bias = may_have_block_map(problem), streams_bias(problem)
        of_score = has_edges, score.may_be_mapped, is_mapped, of_bias
    return (
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        problem.layout.is_equal,
        latent.holds_values_in_keys(problem),
        of_score,
    )


def block_bytes(problem: Problem, tile: HopperTile) -> int:
    """Return the bytes of a block of a problem as it is posed to the kernel; see `footprint`."""
    queries = tile.Br * _row_bytes(problem, problem.head_dim)
    stage = max(tile.Bc * _row_bytes(problem, problem.head_dim), _value_bytes(problem, tile))
    # A slot has two barriers; a visit is kept for each query tile, for one whose output is
    # being written, and for one whose queries are no longer needed.
    scales = _SCALES_BYTES if problem.is_float8 else 0
    visits = (tile.q_stages + 2) * (_VISIT_BYTES + scales)
    total = (
        tile.q_stages * (queries + 2 * BARRIER_BYTES)
        + tile.stages * (stage + 2 * BARRIER_BYTES)
        + visits
    )
    if is_noted(problem, tile):
        total += tile.stages * _NOTE_BYTES
    if may_have_block_map(problem):
        blocks = (tile.stages // 2 + 1) * (tile.Br // WARPGROUP_ROWS)
        total += blocks * _SHOWN_BYTES * ceil_div(tile.Bc, _SHOWN_KEYS)
    if streams_bias(problem):
        bias = tile.Br * round_up(tile.Bc, 32) * problem.itemsize
        total += BIAS_STAGES * (bias + 2 * BARRIER_BYTES)
    if ranks(problem) > 1:
        scores = tile.Br * tile.Bc * _SCORE_BYTES
        # A barrier for each warp of the consumers.
        is_latent = latent.holds_values_in_keys(problem)
        buffers = _LATENT_PAIR_BUFFERS if is_latent else _PAIR_BUFFERS
        total += buffers * scores + 2 * (tile.Br // 16 * BARRIER_BYTES)
    if problem.layout.is_equal:
        return total
    # Two visits more, all with their places, and two barriers for them; a note and a barrier
    # for the last values of a sequence in each slot, and for the end.
    return (
        total
        + (tile.q_stages + 4) * _PLACE_BYTES
        + 2 * _VISIT_BYTES
        + 2 * BARRIER_BYTES
        + (tile.stages + 1) * (BARRIER_BYTES + _TAIL_BYTES)
    )


def _row_bytes(problem: Problem, columns: int) -> int:
    """Of a row in shared memory, all pieces."""
    bytes_of_row = block_columns(problem, columns) * operand_bytes(problem)
    return round_up(bytes_of_row, 64) * pieces.count(problem)


def _value_bytes(problem: Problem, tile: HopperTile) -> int:
    """Of a tile of values, which of float8 has columns as rows."""
    if problem.is_float8:
        return float8.value_rows(problem, tile) * _row_bytes(problem, tile.Bc)
    return tile.Bc * _row_bytes(problem, problem.head_dim_v)
