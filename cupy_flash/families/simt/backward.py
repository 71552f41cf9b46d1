"""Backward pass on CUDA cores, for every dtype and architecture: `kernels_cu/backward/simt.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupy_flash.families import backward_common
from cupy_flash.families.contract import Family, tile_members, why_not_shared_memory
from cupy_flash.families.schedule import KEY_GRADIENTS, QUERY_GRADIENTS, Launch, Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

# Number of threads along the rows of a tile, and along its columns.
_SIDE = 16
_THREADS = _SIDE * _SIDE
_SLICE = 32


@dataclass(frozen=True)
class SimtBackwardTile(Tile):
    """Tile of the backward `simt` family, with Br = Bc: one kernel owns keys, the other queries."""


class SimtBackwardFamily(Family[SimtBackwardTile]):
    """Backward pass in two kernels, one for dk and dv and one for dq, on CUDA cores."""

    name = "simt"
    source = "backward/simt.cu"
    tile_type = SimtBackwardTile
    serves_sequences = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if device.arch < 75:
            return f"needs sm_75 or later, and {device.name} is {device.sm}"
        if reason := backward_common.why_not(problem):
            return reason
        return self.why_not_tile(problem, device, self.default_tile(problem, device))

    def candidates(self, problem: Problem, device: Device) -> Iterator[SimtBackwardTile]:
        for rows in (64, 48, 32, 16):
            yield SimtBackwardTile(rows, rows)

    def why_not_tile(self, problem: Problem, device: Device, tile: SimtBackwardTile) -> str | None:
        if tile.Br != tile.Bc or tile.Br < _SIDE or tile.Br % _SIDE:
            return f"Br and Bc are {tile.Br} and {tile.Bc}; expected equal multiples of {_SIDE}"
        if reason := why_not_shared_memory(device, self.shared_memory(problem, tile)):
            return reason
        return backward_common.why_not_grid(problem, tile.Bc, tile.Br)

    def default_tile(self, problem: Problem, device: Device) -> SimtBackwardTile:
        # The number of rows limits the registers for dk and dv. With 64 rows, a thread holds 4 rows
        # by head_dim / 16 columns of each: 128 registers if both head dims are 256 (float32).
        words = self._accumulator_size(problem) // 4
        dims = problem.head_dim + problem.head_dim_v
        rows = 64 if dims * words <= 512 else 32 if dims * words <= 768 else 16
        return SimtBackwardTile(rows, rows)

    def _accumulator_size(self, problem: Problem) -> int:
        return 8 if problem.dtype == "float64" else 4

    def shared_memory(self, problem: Problem, tile: SimtBackwardTile) -> int:
        slices = 2 * tile.Br * (_SLICE + 1)
        weights = 2 * tile.Br * (tile.Br + 1)
        return (slices + weights) * self._accumulator_size(problem)

    def schedule(self, problem: Problem, device: Device, tile: SimtBackwardTile) -> Schedule:
        gradient = problem.gradient_spec
        kv_blocks, query_blocks = backward_common.count_blocks(problem, tile.Bc, tile.Br)
        entries = []
        if gradient.wants("k", "v"):
            entries.append((KEY_GRADIENTS, "simt_key_gradients", kv_blocks))
        if gradient.wants("q"):
            entries.append((QUERY_GRADIENTS, "simt_query_gradients", query_blocks))
        shared_memory = self.shared_memory(problem, tile)
        launches = (Launch.of_gradients(*entry, _THREADS, shared_memory, 1) for entry in entries)
        return backward_common.schedule(problem, device, launches)

    def config(
        self, problem: Problem, tile: SimtBackwardTile, split: Split
    ) -> dict[str, int | bool]:
        return {
            **tile_members(tile, "Br Bc"),
            "shared_memory": self.shared_memory(problem, tile),
        } | backward_common.config(problem)
