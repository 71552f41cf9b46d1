"""Thread blocks of sm_90a: warpgroups, the columns of a head that a block has, and stages.

A block has all columns of a head, or half for wide heads (a cluster of 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from cupy_flash.families.contract import ceil_div, round_up
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

# Number of threads of a warpgroup, and number of rows of its products (wgmma).
WARPGROUP = 128
WARPGROUP_ROWS = 64
# Registers per producer thread and per consumer thread of kernels whose producer needs few, by the
# number of consumer warpgroups.
REGISTERS = {1: (40, 240), 2: (40, 232), 3: (32, 160), 4: (56, 104)}
BARRIER_BYTES = 8

# Largest number of head_dim columns of a thread block; a cluster of two processes wider heads.
MAX_COLUMNS = 256
# Size in bytes of a row of each operand that one wgmma instruction multiplies (k).
_STEP_BYTES = 32


TileT = TypeVar("TileT", bound=Tile)


def why_not_device(device: Device) -> str | None:
    """Return why kernels cannot be compiled for sm_90a on a device, or None if they can."""
    if device.arch != 90:
        return f"needs sm_90 for wgmma, not {device.sm}"
    if not device.arch_specific:
        return "needs NVRTC 12.9 or newer: through CuPy, older ones cannot compile for sm_90a"
    return None


def cta_ranks(problem: Problem) -> int:
    """Return the number of thread blocks of a query tile (1 or 2), which divide its columns."""
    return 1 if max(problem.head_dim, problem.head_dim_v) <= MAX_COLUMNS else 2


def block_columns(problem: Problem, dim: int) -> int:
    """Return the number of columns of `dim` per thread block; the last block may have fewer."""
    blocks = cta_ranks(problem)
    return dim if blocks == 1 else round_up(ceil_div(dim, blocks), 16)


def k_steps(problem: Problem) -> int:
    """Return the number of k steps of S = Q K^T: 16 columns each, or 32 for float8."""
    return ceil_div(block_columns(problem, problem.head_dim), _STEP_BYTES // operand_bytes(problem))


def operand_bytes(problem: Problem) -> int:
    """Return the size in bytes of an operand element of the matrix products."""
    return 1 if problem.is_float8 else 2


def most_stages(
    device: Device, tiles: Iterable[TileT], shared_memory: Callable[[TileT], int]
) -> TileT:
    """Return the first tile whose shared memory fits, or else the last one.

    The tiles differ in their numbers of stages, in order of preference.
    """
    last = None
    for tile in tiles:
        last = tile
        if shared_memory(tile) <= device.shared_memory_per_block:
            break
    assert last is not None
    return last
