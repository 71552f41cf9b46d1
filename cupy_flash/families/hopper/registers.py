"""Registers of the forward kernel's threads: how they are shared out, and what a tile needs."""

from __future__ import annotations

from cupy_flash.families.contract import may_have_block_map
from cupy_flash.families.hopper import float8, latent, pieces
from cupy_flash.families.hopper.columns import block_columns
from cupy_flash.families.hopper.scores import streams_bias
from cupy_flash.families.hopper.sm90 import WARPGROUP_ROWS
from cupy_flash.families.hopper.tiles import HopperTile
from cupy_flash.problem.problem import Problem

# Registers of a producer's and a consumer's thread, by the number of consumers. Together they are
# what the launch allots, 168 or 128 for each thread: setmaxnreg would wait forever for more.
_REGISTERS = {1: (40, 240), 2: (40, 232), 3: (32, 160)}
# The same where the producer reads a block map: with fewer it spills, and consumers wait for it.
_MAPPED_REGISTERS = {1: (40, 240), 2: (72, 216), 3: (80, 144)}
# Of a consumer, for addresses and state, besides S, P, O and Q.
_STATE_REGISTERS = 24


def register_split(problem: Problem, tile: HopperTile) -> tuple[int, int]:
    """Of a thread of the producer, and of one of a consumer."""
    split = _MAPPED_REGISTERS if may_have_block_map(problem) else _REGISTERS
    return split[tile.Br // WARPGROUP_ROWS]


def consumer_registers(problem: Problem, tile: HopperTile) -> int:
    """An estimate from below: S, P, O and Q, and what else lives in the main loop."""
    if problem.is_float8:
        return float8.registers(problem, tile)
    factor = pieces.count(problem)
    output = pieces.output_registers(problem, block_columns(problem, problem.head_dim_v))
    scores = tile.Bc // 2 + tile.Bc // 4 * (2 if streams_bias(problem) else factor)
    return scores + output + 4 * tile.q_steps + _STATE_REGISTERS


def overlaps_output(problem: Problem, tile: HopperTile) -> bool:
    """Whether consumers take exponentials while their own output is multiplied.

    It takes registers for P of two blocks. Three consumers do not have them, and have two
    others to fill the tensor cores meanwhile.
    """
    if problem.is_float8:
        return False
    _, most = register_split(problem, tile)
    need = consumer_registers(problem, tile) + tile.Bc // 4 * pieces.count(problem)
    # Where slots hold keys and values, leaving one early is worth more.
    return tile.Br < 192 and need <= most and not latent.holds_values_in_keys(problem)
