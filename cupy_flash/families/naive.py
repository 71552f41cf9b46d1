"""Unfused attention with the score matrix in global memory: the baseline of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupy_flash.families.contract import (
    MAX_GRID,
    Family,
    ceil_div,
    heads_in_l2,
    why_not_dropout,
)
from cupy_flash.families.schedule import Launch, Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

_TILE = 32
_SOFTMAX_WARPS = 8
# Upper limit of the score matrix in bytes, which is more than the memory of any GPU.
_MAX_WORKSPACE = 2**40


@dataclass(frozen=True)
class NaiveTile(Tile):
    """Tile of the `naive` family, always 32 x 32, with one thread per element."""

    Br: int = _TILE
    Bc: int = _TILE


def _matrix_bytes(problem: Problem) -> int:
    accumulator = 8 if problem.dtype == "float64" else 4
    return problem.rows * problem.seqlen_k * accumulator


class NaiveFamily(Family[NaiveTile]):
    """Family of three kernels, for scores, softmax and output: `kernels_cu/forward/naive.cu`."""

    name = "naive"
    source = "forward/naive.cu"
    tile_type = NaiveTile
    automatic = False

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if device.arch < 75:
            return f"needs sm_75 or later, and {device.name} is {device.sm}"
        if reason := why_not_dropout(problem):
            return reason
        matrix = _matrix_bytes(problem)
        if matrix > _MAX_WORKSPACE:
            return (
                f"keeps the score matrix in global memory, here {matrix / 2**40:.3g} TiB; "
                f"the limit is 1 TiB"
            )
        grid = max(launch.grid[0] for launch in self._launches(problem, NaiveTile()))
        if grid > MAX_GRID:
            return f"needs {grid} thread blocks in a launch; the limit is {MAX_GRID}"
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[NaiveTile]:
        yield NaiveTile()

    def why_not_tile(self, problem: Problem, device: Device, tile: NaiveTile) -> str | None:
        if tile != NaiveTile():
            return f"the naive kernels' tile is always {NaiveTile()}, not {tile}"
        return None

    def default_tile(self, problem: Problem, device: Device) -> NaiveTile:
        # A baseline has the textbook tile and no choice.
        return NaiveTile()

    def shared_memory(self, problem: Problem, tile: NaiveTile) -> int:
        # The two operand tiles of a matrix product are in static shared memory.
        return 0

    def schedule(self, problem: Problem, device: Device, tile: NaiveTile) -> Schedule:
        return Schedule(
            self._launches(problem, tile),
            workspace=_matrix_bytes(problem),
            section_heads=heads_in_l2(problem, device),
        )

    def _launches(self, problem: Problem, tile: NaiveTile) -> tuple[Launch, ...]:
        row_tiles = problem.batch * problem.heads_q * ceil_div(problem.seqlen_q, tile.Br)
        # Without keys there are no scores, but a launch needs at least one thread block.
        scores = max(1, row_tiles * ceil_div(problem.seqlen_k, tile.Bc))
        rows = ceil_div(problem.rows, _SOFTMAX_WARPS)
        outputs = row_tiles * ceil_div(problem.head_dim_v, tile.Bc)
        return (
            Launch("scores", "naive::scores", (scores, 1, 1), tile.Br * tile.Bc),
            Launch("softmax", "naive::softmax", (rows, 1, 1), 32 * _SOFTMAX_WARPS),
            Launch("output", "naive::output", (outputs, 1, 1), tile.Br * tile.Bc),
        )

    def config(self, problem: Problem, tile: NaiveTile, split: Split) -> dict[str, int | bool]:
        # The tile is a constant of naive.cu, so the kernels have no parameters.
        return {}
