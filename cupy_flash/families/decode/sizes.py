"""Rows, columns and bytes of `decode`: what a warp, a team of warps and a thread block hold."""

from __future__ import annotations

import dataclasses

from cupy_flash.families.contract import ceil_div, round_up
from cupy_flash.families.decode.tile import MOST_STAGES, DecodeTile
from cupy_flash.problem.arrays import ITEMSIZE, Strides
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# A scale of one key or value.
_SCALE_BYTES = 4
# What a block knows of its part of the keys (`State` in the kernel).
_STATE_BYTES = 160
# Columns beyond which a warp's registers do not hold a row tile's queries and output, and how many
# warps share them then. With those of 576 each has 144, and about 170 registers.
_MOST_COLUMNS = 256
TEAM = 4


def group(problem: Problem) -> int:
    """Query heads that share a key/value head; at least 1, for queries without heads."""
    return max(1, problem.heads_q // problem.heads_kv)


def rows(problem: Problem) -> int:
    """Query rows of a sequence that share a key/value head."""
    return problem.seqlen_q * (problem.heads_q // problem.heads_kv)


def row_tiles(problem: Problem, Br: int) -> int:
    """Row tiles of a sequence's key/value head."""
    return ceil_div(rows(problem), Br)


def lines(problem: Problem, Br: int) -> int:
    """Lines of keys that thread blocks share out: one for each head and row tile."""
    return max(1, problem.heads_kv * row_tiles(problem, Br))


def team(problem: Problem) -> int:
    """Warps that share the columns of a head."""
    return 1 if max(problem.head_dim, problem.head_dim_v) <= _MOST_COLUMNS else TEAM


def _teams(problem: Problem, tile: DecodeTile) -> int:
    return tile.warps // team(problem)


def padded_dims(problem: Problem) -> tuple[int, int]:
    """Columns of keys and of values: whole steps of the tensor cores for each of a team.

    Values in keys have all of the keys', some of which may be none of the output's.
    """
    step = 16 * team(problem)
    columns = round_up(problem.head_dim, step)
    return columns, columns if problem.values_in_keys else round_up(problem.head_dim_v, step)


def by_key(problem: Problem, scales: Strides | None) -> bool:
    """Whether keys of a sequence's head may have different scales."""
    if scales is None:
        return False
    block, row, _ = scales
    return row != 0 or (problem.layout.page_size > 0 and block != 0)


def _key_bytes(problem: Problem) -> int:
    """A key and its value in shared memory, and their scales, which each of a team has."""
    size = ITEMSIZE[problem.tensors["k"].dtype]
    of_scales = 0
    if problem.scales is not None:
        each = problem.scales.given.values()
        of_scales = sum(_SCALE_BYTES for strides in each if by_key(problem, strides))
    columns, columns_v = padded_dims(problem)
    columns += 0 if problem.values_in_keys else columns_v
    return columns * size + of_scales * team(problem)


def all_bytes(problem: Problem) -> int:
    """All keys and values of the sequences, if they are as long as they may be."""
    return problem.batch * problem.seqlen_k * problem.heads_kv * _key_bytes(problem)


def stage_bytes(problem: Problem, tile: DecodeTile) -> int:
    """Of all warps of a team."""
    return tile.Bc * _key_bytes(problem)


def _meeting_bytes(problem: Problem, tile: DecodeTile) -> int:
    """Where teams add up their scores, of two tiles in turns."""
    return 2 * tile.warps * tile.Br * tile.Bc * 4 if team(problem) > 1 else 0


def unit_keys(problem: Problem, tile: DecodeTile) -> int:
    """A tile for each team."""
    return tile.Bc * _teams(problem, tile)


def units(problem: Problem, tile: DecodeTile) -> int:
    """Units of keys that all sequences together may have; one without keys has one too."""
    return problem.batch * max(1, ceil_div(problem.seqlen_k, unit_keys(problem, tile)))


def record_bytes(problem: Problem) -> int:
    """A row of a partial result, as the kernel's shared memory and workspace hold it."""
    return (padded_dims(problem)[1] + 8) * 4


def pieces(tile: DecodeTile) -> int:
    """Pieces of an item's columns that the blocks of a cluster may merge."""
    return max(1, tile.cluster)


def slot_record_bytes(problem: Problem, tile: DecodeTile) -> int:
    """The same in pieces or whole, as the workspace has place for."""
    chunks = round_up(problem.head_dim_v, 16) // 4
    of_piece = (4 * ceil_div(chunks, pieces(tile)) + 4) * 4
    return max(record_bytes(problem), pieces(tile) * of_piece)


def kept_rows(problem: Problem, tile: DecodeTile) -> int:
    """Rows of a tile that there are, whose results the blocks of a cluster keep."""
    return max(1, min(tile.Br, rows(problem)))


def _kept_bytes(problem: Problem, tile: DecodeTile) -> int:
    """The results of a cluster's blocks for an item."""
    return tile.cluster * kept_rows(problem, tile) * record_bytes(problem)


def shared_memory(problem: Problem, tile: DecodeTile) -> int:
    """Bytes of a thread block."""
    rings = _teams(problem, tile) * tile.stages * stage_bytes(problem, tile)
    others = _meeting_bytes(problem, tile) + _kept_bytes(problem, tile)
    return rings + others + _STATE_BYTES


def with_all_stages(problem: Problem, device: Device, tile: DecodeTile) -> DecodeTile:
    """The tile with as many stages as its share of the SM's shared memory has place for."""
    per_block = device.shared_memory_per_sm // tile.min_blocks - device.reserved_shared_memory
    per_block = min(per_block, device.shared_memory_per_block) - _kept_bytes(problem, tile)
    per_block -= _meeting_bytes(problem, tile) + _STATE_BYTES
    stages = per_block // (_teams(problem, tile) * stage_bytes(problem, tile))
    return dataclasses.replace(tile, stages=max(0, min(MOST_STAGES, stages)))


def registers(problem: Problem, tile: DecodeTile) -> int:
    """An estimate from below: queries, scores and output, and 40 for addresses and state."""
    row_tiles = tile.Br // 16
    columns, columns_v = (dim // team(problem) for dim in padded_dims(problem))
    return row_tiles * (columns // 4 + tile.Bc // 2 + columns_v // 2) + 40
