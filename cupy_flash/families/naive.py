"""Three kernels with the score matrix in global memory: the baseline of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupy_flash.families.contract import MAX_GRID, Family, Launch, ceil_div
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

_TILE = 32
_SOFTMAX_WARPS = 8
# More than any GPU's memory; beyond it, byte counts help nobody.
_MAX_WORKSPACE = 2**40


@dataclass(frozen=True)
class NaiveTile(Tile):
    """Always 32 x 32: one thread for each element of a tile."""

    Br: int = _TILE
    Bc: int = _TILE


def _matrix_bytes(problem: Problem) -> int:
    accumulator = 8 if problem.dtype == "float64" else 4
    return problem.rows * problem.seqlen_k * accumulator


class NaiveFamily(Family):
    """See `kernels_cu/forward/naive.cu`."""

    name = "naive"
    source = "forward/naive.cu"
    tile_type = NaiveTile
    automatic = False

    def why_not(self, problem: Problem, device: Device) -> str | None:
        if device.arch < 75:
            return f"needs sm_75 or later, and {device.name} is {device.sm}"
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

    def why_not_tile(self, problem: Problem, device: Device, tile: Tile) -> str | None:
        if tile != NaiveTile():
            return f"the naive kernels' tile is always {NaiveTile()}, not {tile}"
        return None

    def default_tile(self, problem: Problem, device: Device) -> NaiveTile:
        # The textbook's tile is the point of a baseline: nothing to choose.
        return NaiveTile()

    def shared_memory(self, problem: Problem, tile: Tile) -> int:
        # The two tiles of a product are static shared memory.
        return 0

    def threads(self, tile: Tile) -> int:
        return tile.Br * tile.Bc

    def workspace(self, problem: Problem, device: Device, tile: Tile, num_splits: int) -> int:
        return _matrix_bytes(problem)

    def launches(
        self, problem: Problem, device: Device, tile: Tile, num_splits: int
    ) -> tuple[Launch, ...]:
        return self._launches(problem, tile)

    def _launches(self, problem: Problem, tile: Tile) -> tuple[Launch, ...]:
        row_tiles = problem.batch * problem.heads_q * ceil_div(problem.seqlen_q, tile.Br)
        # With no keys there are no scores, but a launch needs a block.
        scores = max(1, row_tiles * ceil_div(problem.seqlen_k, tile.Bc))
        rows = ceil_div(problem.rows, _SOFTMAX_WARPS)
        outputs = row_tiles * ceil_div(problem.head_dim_v, tile.Bc)
        return (
            Launch("scores", (scores, 1, 1), self.threads(tile)),
            Launch("softmax", (rows, 1, 1), 32 * _SOFTMAX_WARPS),
            Launch("output", (outputs, 1, 1), self.threads(tile)),
        )

    def entries(self, problem: Problem, tile: Tile, num_splits: int) -> dict[str, str]:
        return {
            launch.entry: (
                f'extern "C" __global__ void __launch_bounds__({launch.threads})\n'
                f"{launch.entry}(const __grid_constant__ Params params) "
                f"{{ naive::{launch.entry}<Config>(params); }}"
            )
            for launch in self._launches(problem, tile)
        }

    def config(self, problem: Problem, tile: Tile) -> dict[str, int | bool]:
        # The kernels' tile is a constant of naive.cu: a textbook kernel has no knobs.
        return {}
