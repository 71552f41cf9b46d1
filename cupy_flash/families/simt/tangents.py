"""Tangents on CUDA cores, for every dtype and architecture: `kernels_cu/tangents/simt.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupy_flash.families import tangent_common
from cupy_flash.families.contract import Family, tile_members, why_not_shared_memory
from cupy_flash.families.schedule import Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

# Number of threads along the rows of a tile, and along its columns.
_SIDE = 16
_THREADS = _SIDE * _SIDE
_SLICE = 32


@dataclass(frozen=True)
class SimtTangentTile(Tile):
    """Tile of the tangents of the `simt` family, with Br = Bc."""


class SimtTangentFamily(Family[SimtTangentTile]):
    """Tangents in one pass over the keys, after the forward pass, on CUDA cores."""

    name = "simt"
    source = "tangents/simt.cu"
    tile_type = SimtTangentTile
    serves_sequences = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if device.arch < 75:
            return f"needs sm_75 or later, and {device.name} is {device.sm}"
        if reason := tangent_common.why_not(problem):
            return reason
        return self.why_not_tile(problem, device, self.default_tile(problem, device))

    def candidates(self, problem: Problem, device: Device) -> Iterator[SimtTangentTile]:
        for rows in (64, 48, 32, 16):
            yield SimtTangentTile(rows, rows)

    def why_not_tile(self, problem: Problem, device: Device, tile: SimtTangentTile) -> str | None:
        if tile.Br != tile.Bc or tile.Br < _SIDE or tile.Br % _SIDE:
            return f"Br and Bc are {tile.Br} and {tile.Bc}; expected equal multiples of {_SIDE}"
        if reason := why_not_shared_memory(device, self.shared_memory(problem, tile)):
            return reason
        return tangent_common.why_not_grid(problem, tile.Br)

    def default_tile(self, problem: Problem, device: Device) -> SimtTangentTile:
        # The number of rows limits the registers for the output: with 64 rows, a thread holds 4
        # rows by head_dim_v / 16 columns of it, 128 registers if head_dim_v is 512 (float32).
        words = self._accumulator_size(problem) // 4
        rows = 64 if problem.head_dim_v * words <= 256 else 32
        return SimtTangentTile(rows, rows)

    def _accumulator_size(self, problem: Problem) -> int:
        return 8 if problem.dtype == "float64" else 4

    def shared_memory(self, problem: Problem, tile: SimtTangentTile) -> int:
        slices = 2 * tile.Br * (_SLICE + 1)
        weights = 2 * tile.Br * (tile.Br + 1)
        return (slices + weights) * self._accumulator_size(problem)

    def schedule(self, problem: Problem, device: Device, tile: SimtTangentTile) -> Schedule:
        return tangent_common.schedule(
            *(problem, device, tile.Br, "simt_tangents", _THREADS),
            self.shared_memory(problem, tile),
        )

    def config(
        self, problem: Problem, tile: SimtTangentTile, split: Split
    ) -> dict[str, int | bool]:
        return {
            **tile_members(tile, "Br Bc"),
            "shared_memory": self.shared_memory(problem, tile),
        } | tangent_common.config(problem)
