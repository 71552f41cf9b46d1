"""Tangents on tensor cores for 16-bit types: `kernels_cu/tangents/mma.cu`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cupy_flash.families import tangent_common
from cupy_flash.families.contract import (
    Family,
    round_up,
    tile_members,
    why_not_blocks,
    why_not_scale,
)
from cupy_flash.families.schedule import Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

_MAX_WARPS = 8
# Largest head dim whose output fits in the registers of a warp with 16 rows.
_MAX_DIM = 256


@dataclass(frozen=True)
class MmaTangentTile(Tile):
    """Tile of the tangents of the `mma` family.

    Attributes
    ----------
    warps
        Number of warps of a thread block. A warp owns 16 or 32 of the Br rows.
    stages
        Number of KV tiles in shared memory, 1 or 2. With 2, one is loaded while the other is used.
    min_blocks
        Number of thread blocks per SM in `__launch_bounds__`, which limits registers per thread.
    """

    warps: int = 4
    stages: int = 2
    min_blocks: int = 1


class MmaTangentFamily(Family[MmaTangentTile]):
    """Tangents by five products in one pass over the keys, after the forward pass."""

    name = "mma"
    source = "tangents/mma.cu"
    tile_type = MmaTangentTile
    serves_sequences = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if problem.itemsize != 2:
            return f"its tensor-core products take float16 or bfloat16, not {problem.dtype}"
        if max(problem.head_dim, problem.head_dim_v) > _MAX_DIM:
            return f"needs too many registers for head dims over {_MAX_DIM}"
        if device.arch < 80:
            return f"needs sm_80 or newer for cp.async and its mma shapes, not {device.sm}"
        if reason := tangent_common.why_not(problem) or why_not_scale(problem):
            return reason
        if self._first_legal(problem, device) is None:
            return f"none of its tiles fits {device.name}"
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[MmaTangentTile]:
        for warps, rows, Bc, stages, min_blocks in itertools.product(
            (_MAX_WARPS, 4, 2), (16, 32), (64, 48, 32, 16), (2, 1), (1, 2)
        ):
            yield MmaTangentTile(
                Br=rows * warps, Bc=Bc, warps=warps, stages=stages, min_blocks=min_blocks
            )

    def why_not_tile(self, problem: Problem, device: Device, tile: MmaTangentTile) -> str | None:
        if not 1 <= tile.warps <= _MAX_WARPS:
            return f"warps is {tile.warps}; expected 1 to {_MAX_WARPS}"
        if tile.Br not in (16 * tile.warps, 32 * tile.warps):
            return f"Br is {tile.Br}; expected 16 or 32 rows for each of {tile.warps} warps"
        if tile.Bc < 16 or tile.Bc % 16:
            return f"Bc is {tile.Bc}; expected a multiple of 16"
        if tile.stages not in (1, 2):
            return f"stages is {tile.stages}; expected 1 or 2"
        if tile.min_blocks < 1:
            return f"min_blocks is {tile.min_blocks}; expected at least 1"
        reason = why_not_blocks(
            device,
            threads=32 * tile.warps,
            shared_memory=self.shared_memory(problem, tile),
            registers=self._registers(problem, tile),
            min_blocks=tile.min_blocks,
        )
        return reason or tangent_common.why_not_grid(problem, tile.Br)

    def _registers(self, problem: Problem, tile: MmaTangentTile) -> int:
        """Return a lower bound of the registers per thread: live fragments, and 40 others."""
        row_tiles = tile.Br // (16 * tile.warps)
        scores = 2 * row_tiles * tile.Bc // 2
        output = row_tiles * round_up(problem.head_dim_v, 16) // 2
        return scores + output + 8 * row_tiles + 40

    def preferred_tiles(self, problem: Problem, device: Device) -> Iterable[MmaTangentTile]:
        widest = max(problem.head_dim, problem.head_dim_v)
        best = [
            MmaTangentTile(128, 64, warps=8) if widest <= 128 else MmaTangentTile(64, 32),
            MmaTangentTile(64, 32),
        ]
        return itertools.chain(best, self.candidates(problem, device))

    def shared_memory(self, problem: Problem, tile: MmaTangentTile) -> int:
        columns, columns_v = round_up(problem.head_dim, 16), round_up(problem.head_dim_v, 16)
        moves = problem.moves
        queries = (1 + ("q" in moves)) * columns
        of_key = (1 + ("k" in moves)) * columns
        of_key += (("q" in moves or "k" in moves) + ("v" in moves)) * columns_v
        return (tile.Br * queries + tile.stages * tile.Bc * of_key) * problem.itemsize

    def schedule(self, problem: Problem, device: Device, tile: MmaTangentTile) -> Schedule:
        return tangent_common.schedule(
            *(problem, device, tile.Br, "mma_tangents", 32 * tile.warps),
            *(self.shared_memory(problem, tile), tile.min_blocks),
        )

    def config(self, problem: Problem, tile: MmaTangentTile, split: Split) -> dict[str, int | bool]:
        return {
            **tile_members(tile, "Br Bc warps stages"),
            "shared_memory": self.shared_memory(problem, tile),
        } | tangent_common.config(problem)
