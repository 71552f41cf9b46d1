"""float8 as the `hopper` family takes it: the host's side of `forward/hopper/float8.cuh`.

The values become an array of their own in the workspace, transposed (`values.cuh`): (batch,
heads_kv, head_dim_v, keys), the keys filled up to whole tiles.
"""

from __future__ import annotations

from typing import NamedTuple

from cupy_flash.families.contract import round_up
from cupy_flash.families.hopper_tiles import HopperTile
from cupy_flash.families.schedule import Launch, TensorMapSpec
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# What the schedule calls the array.
VALUES = "values"
# Columns of the output for whose share there are registers beside O and S.
_MOST_AT_ONCE = 128
# Keys of a tile, and threads that bring it to shared memory.
_KEYS = 128
_BLOCKS_PER_SM = 8


class Shares(NamedTuple):
    """How a block's share of the output is summed and added.

    Attributes
    ----------
    columns
        Of the output at once.
    buffers
        Of so many columns, each in registers of its own.
    early_scores
        Whether the next scores are multiplied while the shares are added, in other registers.
    """

    columns: int
    buffers: int
    early_scores: bool


def shares_of(problem: Problem, tile: HopperTile) -> Shares:
    """As registers allow.

    Shares that have the registers of scores are as wide as these: of any others the compiler says
    that it has too few registers, and serializes the products.
    """
    columns = round_up(problem.head_dim_v, 16)
    if columns <= _MOST_AT_ONCE and tile.Br < 192:
        return Shares(columns, 1, early_scores=True)
    return Shares(tile.Bc, 1, early_scores=False)


def value_rows(problem: Problem, tile: HopperTile) -> int:
    """Columns of values in shared memory, where they are rows: whole shares."""
    return round_up(problem.head_dim_v, shares_of(problem, tile).columns)


def registers(problem: Problem, tile: HopperTile) -> int:
    """Of O, shares of it, S and P."""
    found = shares_of(problem, tile)
    shares, scores = found.buffers * found.columns // 2, tile.Bc // 2
    both = shares + scores if found.early_scores else max(shares, scores)
    return value_rows(problem, tile) // 2 + both + tile.Bc // 8


def config(problem: Problem, tile: HopperTile) -> dict[str, int | bool]:
    """Constants of the kernel that others do not have."""
    found = shares_of(problem, tile)
    return {
        "share_columns": found.columns,
        "share_buffers": found.buffers,
        "early_scores": found.early_scores,
    }


def launch(device: Device) -> Launch:
    """What makes the array, ahead of the kernel that reads it."""
    blocks = _BLOCKS_PER_SM * device.sm_count
    return Launch(VALUES, "hopper_values", (blocks, 1, 1), _KEYS, arguments=("float8_params",))


def workspace(problem: Problem) -> int:
    """Bytes of the array."""
    return problem.batch * problem.heads_kv * problem.head_dim_v * _line(problem)


def tensor_map(problem: Problem, box: tuple[int, int]) -> TensorMapSpec:
    """Of the array, with the keys and columns of a copy."""
    p, line = problem, _line(problem)
    of_head = p.head_dim_v * line
    return TensorMapSpec(
        p.dtype,
        (line, p.head_dim_v, p.heads_kv, p.batch),
        (line, of_head, p.heads_kv * of_head),
        box,
    )


def _line(problem: Problem) -> int:
    """Bytes between the columns."""
    return round_up(problem.seqlen_k, _KEYS)
