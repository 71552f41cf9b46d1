"""Gradients on the CUDA cores: `kernels_cu/backward/simt.cu`, every dtype, every architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupy_flash.families import gradients
from cupy_flash.families.contract import Family, why_not_shared_memory
from cupy_flash.families.schedule import KEY_GRADIENTS, QUERY_GRADIENTS, Launch, Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

# Threads along the rows of a tile, and along its columns.
_SIDE = 16
_THREADS = _SIDE * _SIDE
_SLICE = 32


@dataclass(frozen=True)
class SimtBackwardTile(Tile):
    """As many queries as keys, of which one of the two kernels has its rows of each."""


class SimtBackwardFamily(Family[SimtBackwardTile]):
    """See `kernels_cu/backward/simt.cu`."""

    name = "simt"
    source = "backward/simt.cu"
    tile_type = SimtBackwardTile
    serves_sequences = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if device.arch < 75:
            return f"needs sm_75 or later, and {device.name} is {device.sm}"
        if reason := gradients.why_not(problem):
            return reason
        return self.why_not_tile(problem, device, self.default_tile(problem, device))

    def candidates(self, problem: Problem, device: Device) -> Iterator[SimtBackwardTile]:
        for rows in (64, 48, 32, 16):
            yield SimtBackwardTile(rows, rows)

    def why_not_tile(self, problem: Problem, device: Device, tile: SimtBackwardTile) -> str | None:
        if tile.Br != tile.Bc or tile.Br < _SIDE or tile.Br % _SIDE:
            return f"Br and Bc are {tile.Br} and {tile.Bc}; expected one multiple of {_SIDE}"
        if reason := why_not_shared_memory(device, self.shared_memory(problem, tile)):
            return reason
        return gradients.why_not_grid(problem, tile.Bc, tile.Br)

    def default_tile(self, problem: Problem, device: Device) -> SimtBackwardTile:
        # What a thread keeps of two sums: 4 rows of head_dim / 16 columns each are 128 registers at
        # head dims of 256, of float64 as many at 16 rows for each 64.
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
        gradient = problem.gradient
        assert gradient is not None
        of_keys, of_queries = gradients.blocks_of(problem, tile.Bc, tile.Br)
        entries = []
        if gradient.wants("k", "v"):
            entries.append((KEY_GRADIENTS, "simt_key_gradients", of_keys))
        if gradient.wants("q"):
            entries.append((QUERY_GRADIENTS, "simt_query_gradients", of_queries))
        launches = (
            Launch(
                entry,
                function,
                (blocks, 1, 1),
                _THREADS,
                self.shared_memory(problem, tile),
                1,
                arguments=("gradients",),
            )
            for entry, function, blocks in entries
        )
        return gradients.schedule(problem, device, launches)

    def config(
        self, problem: Problem, tile: SimtBackwardTile, split: Split
    ) -> dict[str, int | bool]:
        return {
            "Br": tile.Br,
            "Bc": tile.Bc,
            "shared_memory": self.shared_memory(problem, tile),
        } | gradients.config(problem)
