"""Sums of attention weights over queries, on CUDA cores: `kernels_cu/received/simt.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupy_flash.families import received_common
from cupy_flash.families.contract import (
    Family,
    tile_members,
    why_not_dropout,
    why_not_shared_memory,
)
from cupy_flash.families.schedule import Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

# Number of threads along the rows of a tile, and along its columns.
_SIDE = 16
_THREADS = _SIDE * _SIDE
_SLICE = 32


@dataclass(frozen=True)
class SimtReceivedTile(Tile):
    """Tile of the `simt` family for sums of weights, with Br = Bc."""


class SimtReceivedFamily(Family[SimtReceivedTile]):
    """Sums of weights by one product on CUDA cores."""

    name = "simt"
    source = "received/simt.cu"
    tile_type = SimtReceivedTile
    serves_sequences = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if device.arch < 75:
            return f"needs sm_75 or later, and {device.name} is {device.sm}"
        if reason := why_not_dropout(problem):
            return reason
        smallest = SimtReceivedTile(_SIDE, _SIDE)
        return self.why_not_tile(problem, device, self._first_legal(problem, device) or smallest)

    def candidates(self, problem: Problem, device: Device) -> Iterator[SimtReceivedTile]:
        for rows in (64, 48, 32, 16):
            yield SimtReceivedTile(rows, rows)

    def why_not_tile(self, problem: Problem, device: Device, tile: SimtReceivedTile) -> str | None:
        if tile.Br != tile.Bc or tile.Br < _SIDE or tile.Br % _SIDE:
            return f"Br and Bc are {tile.Br} and {tile.Bc}; expected equal multiples of {_SIDE}"
        if problem.layout.page_size % tile.Bc:
            return f"needs pages of a multiple of {tile.Bc} rows, not {problem.layout.page_size}"
        if reason := why_not_shared_memory(device, self.shared_memory(problem, tile)):
            return reason
        return received_common.why_not_grid(problem, tile.Bc)

    def shared_memory(self, problem: Problem, tile: SimtReceivedTile) -> int:
        size = 8 if problem.dtype == "float64" else 4
        return 2 * tile.Br * (_SLICE + 1) * size

    def schedule(self, problem: Problem, device: Device, tile: SimtReceivedTile) -> Schedule:
        return received_common.schedule(
            *(problem, device, tile.Bc, "simt_received", _THREADS),
            self.shared_memory(problem, tile),
        )

    def config(
        self, problem: Problem, tile: SimtReceivedTile, split: Split
    ) -> dict[str, int | bool]:
        return {
            **tile_members(tile, "Br Bc"),
            "shared_memory": self.shared_memory(problem, tile),
        } | received_common.config(problem)
