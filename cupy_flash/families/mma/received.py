"""Sums of attention weights over queries, on tensor cores: `kernels_cu/received/mma.cu`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cupy_flash.families import received_common
from cupy_flash.families.contract import (
    Family,
    round_up,
    tile_members,
    why_not_blocks,
    why_not_dropout,
    why_not_scale,
)
from cupy_flash.families.schedule import Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

_MAX_WARPS = 8
_WORD = 4
# Number of queries of the smallest tile.
_FEW_QUERIES = 16


@dataclass(frozen=True)
class MmaReceivedTile(Tile):
    """Tile of the `mma` family for sums of weights.

    Attributes
    ----------
    warps
        Number of warps of a thread block. A warp owns 16 or 32 of the Bc keys.
    """

    warps: int = 4


class MmaReceivedFamily(Family[MmaReceivedTile]):
    """Sums of weights by one product, with the keys in registers."""

    name = "mma"
    source = "received/mma.cu"
    tile_type = MmaReceivedTile
    serves_sequences = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if problem.itemsize != 2:
            return f"its tensor-core products take float16 or bfloat16, not {problem.dtype}"
        if device.arch < 80:
            return f"needs sm_80 or newer for cp.async and its mma shapes, not {device.sm}"
        if reason := why_not_dropout(problem) or why_not_scale(problem):
            return reason
        if self._first_legal(problem, device) is None:
            return f"none of its tiles fits {device.name}"
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[MmaReceivedTile]:
        for warps, keys, Br in itertools.product((_MAX_WARPS, 4, 2), (32, 16), (64, 32, 16)):
            yield MmaReceivedTile(Br=Br, Bc=keys * warps, warps=warps)

    def why_not_tile(self, problem: Problem, device: Device, tile: MmaReceivedTile) -> str | None:
        if not 1 <= tile.warps <= _MAX_WARPS:
            return f"warps is {tile.warps}; expected 1 to {_MAX_WARPS}"
        if tile.Bc not in (16 * tile.warps, 32 * tile.warps):
            return f"Bc is {tile.Bc}; expected 16 or 32 keys for each of {tile.warps} warps"
        if tile.Br < 16 or tile.Br % 16:
            return f"Br is {tile.Br}; expected a multiple of 16"
        reason = why_not_blocks(
            device,
            threads=32 * tile.warps,
            shared_memory=self.shared_memory(problem, tile),
            registers=tile.Bc // (16 * tile.warps) * (tile.Br // 2 + 4) + 60,
            min_blocks=1,
        )
        return reason or received_common.why_not_grid(problem, tile.Bc)

    def preferred_tiles(self, problem: Problem, device: Device) -> Iterable[MmaReceivedTile]:
        best = [MmaReceivedTile(64, 128), MmaReceivedTile(64, 64)]
        if problem.seqlen_q <= _FEW_QUERIES:
            # A decoding step has one query for each head.
            best.insert(0, MmaReceivedTile(_FEW_QUERIES, 128))
        return itertools.chain(best, self.candidates(problem, device))

    def shared_memory(self, problem: Problem, tile: MmaReceivedTile) -> int:
        row = round_up(problem.head_dim, 16) * problem.itemsize
        return tile.Bc * row + 2 * tile.Br * (row + _WORD)

    def schedule(self, problem: Problem, device: Device, tile: MmaReceivedTile) -> Schedule:
        return received_common.schedule(
            *(problem, device, tile.Bc, "mma_received", 32 * tile.warps),
            self.shared_memory(problem, tile),
        )

    def config(
        self, problem: Problem, tile: MmaReceivedTile, split: Split
    ) -> dict[str, int | bool]:
        return {
            **tile_members(tile, "Br Bc warps"),
            "shared_memory": self.shared_memory(problem, tile),
        } | received_common.config(problem)
