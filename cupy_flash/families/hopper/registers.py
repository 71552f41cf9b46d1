"""Registers of the threads of the forward kernel: their distribution, and the need of a tile."""

from __future__ import annotations

from cupy_flash.families.contract import may_have_block_mask
from cupy_flash.families.hopper import float8, float32, mla
from cupy_flash.families.hopper.block import WARPGROUP_ROWS, block_columns
from cupy_flash.families.hopper.scores import streams_bias
from cupy_flash.families.hopper.tiles import HopperTile
from cupy_flash.problem.problem import Problem

# Registers per producer thread and per consumer thread, by the number of consumer warpgroups. All
# warpgroups together must not exceed the launch's allocation (168 or 128 per thread), or setmaxnreg
# hangs.
_REGISTERS = {1: (40, 240), 2: (40, 232), 3: (32, 160)}
# Registers if the producer reads a block mask: with fewer registers, the producer spills and delays
# the consumers.
_MAPPED_REGISTERS = {1: (40, 240), 2: (72, 216), 3: (80, 144)}
# Number of registers of a consumer thread for addresses and state, in addition to S, P, O and Q.
_STATE_REGISTERS = 24


def register_split(problem: Problem, tile: HopperTile) -> tuple[int, int]:
    """Return the number of registers of a producer thread and of a consumer thread."""
    split = _MAPPED_REGISTERS if may_have_block_mask(problem) else _REGISTERS
    return split[tile.Br // WARPGROUP_ROWS]


def consumer_registers(problem: Problem, tile: HopperTile) -> int:
    """Return a lower bound of the registers of a consumer thread: S, P, O, Q and loop state."""
    if problem.is_float8:
        return float8.registers(problem, tile)
    factor = float32.count(problem)
    output = float32.output_registers(problem, block_columns(problem, problem.head_dim_v))
    scores = tile.Bc // 2 + tile.Bc // 4 * (2 if streams_bias(problem) else factor)
    return scores + output + 4 * tile.q_steps + _STATE_REGISTERS


def overlaps_output(problem: Problem, tile: HopperTile) -> bool:
    """Return whether a consumer computes a softmax while its previous P V product is running.

    This overlap needs registers for P of two KV tiles. Three consumers lack these registers, but
    then two other consumers keep the tensor cores busy.
    """
    if problem.is_float8:
        return False
    _, most = register_split(problem, tile)
    need = consumer_registers(problem, tile) + tile.Bc // 4 * float32.count(problem)
    # In MLA, a ring stage holds keys and values. Releasing it early is worth more than the overlap.
    return tile.Br < 192 and need <= most and not mla.holds_values_in_keys(problem)
