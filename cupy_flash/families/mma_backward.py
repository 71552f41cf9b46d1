"""Gradients on tensor cores for 16-bit inputs and float32: `kernels_cu/backward/mma.cu`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from cupy_flash.families import gradients
from cupy_flash.families.contract import (
    MAX_REGISTERS,
    Family,
    round_up,
    why_not_blocks,
    why_not_scale,
)
from cupy_flash.families.schedule import KEY_GRADIENTS, QUERY_GRADIENTS, Launch, Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

# Tiles of columns in shared memory: one in use, one on its way.
_STAGES = 2
# Of query columns: the log-sum-exp and delta of each.
_TERMS_BYTES = 8
# Addresses, counters and the operands of products.
_OTHER_REGISTERS = 48


@dataclass(frozen=True)
class MmaBackwardTile(Tile):
    """Tiles of the two kernels of the `mma` family.

    Attributes
    ----------
    Br, Bc
        Of the kernel of dk and dv: its rows are Bc keys, Br queries stream by.
    warps
        Of its blocks; each owns 16 or 32 of the keys.
    dq_Br, dq_Bc, dq_warps
        Of the kernel of dq: its rows are queries, keys stream by.
    min_blocks, dq_min_blocks
        Thread blocks per SM that the compiler limits registers for.
    """

    warps: int = 4
    dq_Br: int = 64
    dq_Bc: int = 64
    dq_warps: int = 4
    min_blocks: int = 1
    dq_min_blocks: int = 1


class MmaBackwardFamily(Family[MmaBackwardTile]):
    """See `kernels_cu/backward/mma.cu`."""

    name = "mma"
    source = "backward/mma.cu"
    tile_type = MmaBackwardTile
    serves_sequences = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if device.arch < 80:
            return f"needs sm_80 or later, and {device.name} is {device.sm}"
        if problem.dtype == "float64":
            return "has no products of float64"
        if reason := gradients.why_not(problem) or why_not_scale(problem):
            return reason
        if self._first_legal(problem, device) is None:
            return self.why_not_tile(problem, device, MmaBackwardTile(32, 64))
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[MmaBackwardTile]:
        shapes = [
            (rows, columns, warps, blocks)
            for warps, tiles, columns, blocks in itertools.product(
                (4, 8), (1, 2), (64, 32, 16), (1, 2, 3)
            )
            if (rows := 16 * tiles * warps) <= 128
        ]
        for keys, Br, warps, blocks in shapes:
            for queries, Bc, dq_warps, dq_blocks in shapes:
                yield MmaBackwardTile(Br, keys, warps, queries, Bc, dq_warps, blocks, dq_blocks)

    def why_not_tile(self, problem: Problem, device: Device, tile: MmaBackwardTile) -> str | None:
        for rows, columns, warps, blocks, of_keys in (
            (tile.Bc, tile.Br, tile.warps, tile.min_blocks, True),
            (tile.dq_Br, tile.dq_Bc, tile.dq_warps, tile.dq_min_blocks, False),
        ):
            if not 1 <= warps <= 16:
                return f"a kernel has {warps} warps; expected 1 to 16"
            if rows not in (16 * warps, 32 * warps):
                return f"a kernel has {rows} rows; expected 16 or 32 for each of {warps} warps"
            if columns < 16 or columns % 16:
                return f"{columns} columns stream by; expected a multiple of 16"
            if blocks < 1:
                return f"min_blocks is {blocks}; expected at least 1"
            reason = why_not_blocks(
                device,
                threads=32 * warps,
                shared_memory=self._shared_memory(problem, rows, columns, of_keys=of_keys),
                registers=min(
                    MAX_REGISTERS,
                    self._registers(problem, rows // warps, columns, of_keys=of_keys),
                ),
                min_blocks=blocks,
            )
            if reason:
                return reason
        return gradients.why_not_grid(problem, tile.Bc, tile.dq_Br)

    def _registers(self, problem: Problem, rows: int, columns: int, *, of_keys: bool) -> int:
        """What a thread of a warp of so many rows holds: sums, s, dp, and the rest."""
        dim, dim_v = _padded_dims(problem)
        dims = dim + dim_v if of_keys else dim
        return rows * (dims + 2 * columns) // 32 + _OTHER_REGISTERS

    def default_tile(self, problem: Problem, device: Device) -> MmaBackwardTile:
        tile = self._first_legal(problem, device)
        assert tile is not None, "asked only where why_not() has no reason"
        return tile

    def _first_legal(self, problem: Problem, device: Device) -> MmaBackwardTile | None:
        tiles = itertools.chain(_preferred_tiles(problem), _SMALL)
        return next((t for t in tiles if self.why_not_tile(problem, device, t) is None), None)

    def shared_memory(self, problem: Problem, tile: MmaBackwardTile) -> int:
        return self._shared_memory(problem, tile.Bc, tile.Br, of_keys=True)

    def _shared_memory(self, problem: Problem, rows: int, columns: int, *, of_keys: bool) -> int:
        row_bytes = sum(_padded_dims(problem)) * problem.itemsize
        terms = columns * _TERMS_BYTES if of_keys else 0
        return rows * row_bytes + _STAGES * (columns * row_bytes + terms)

    def schedule(self, problem: Problem, device: Device, tile: MmaBackwardTile) -> Schedule:
        of_keys, of_queries = gradients.blocks_of(problem, tile.Bc, tile.dq_Br)
        launches = {
            KEY_GRADIENTS: Launch(
                KEY_GRADIENTS,
                "mma_key_gradients",
                (of_keys, 1, 1),
                32 * tile.warps,
                self.shared_memory(problem, tile),
                tile.min_blocks,
                arguments=("gradients",),
            ),
            QUERY_GRADIENTS: Launch(
                QUERY_GRADIENTS,
                "mma_query_gradients",
                (of_queries, 1, 1),
                32 * tile.dq_warps,
                self._shared_memory(problem, tile.dq_Br, tile.dq_Bc, of_keys=False),
                tile.dq_min_blocks,
                arguments=("gradients",),
            ),
        }
        return gradients.schedule(problem, device, launches)

    def config(
        self, problem: Problem, tile: MmaBackwardTile, split: Split
    ) -> dict[str, int | bool]:
        return {
            "Br": tile.Br,
            "Bc": tile.Bc,
            "warps": tile.warps,
            "dq_Br": tile.dq_Br,
            "dq_Bc": tile.dq_Bc,
            "dq_warps": tile.dq_warps,
            "shared_memory": self.shared_memory(problem, tile),
            "dq_shared_memory": self._shared_memory(
                problem, tile.dq_Br, tile.dq_Bc, of_keys=False
            ),
        } | gradients.config(problem)


def _padded_dims(problem: Problem) -> tuple[int, int]:
    """Columns of q and k, and of v and dout, in shared memory (see mma.cu)."""
    unit = 32 if problem.dtype == "float32" else 16
    return round_up(problem.head_dim, unit), round_up(problem.head_dim_v, unit)


def _preferred_tiles(problem: Problem) -> tuple[MmaBackwardTile, ...]:
    """Tiles from the best down, by resource arithmetic: not yet measured."""
    dim = max(_padded_dims(problem))
    if problem.itemsize == 2:
        if dim <= 64:
            return (MmaBackwardTile(64, 128, 8, 128, 64, 4, 1, 1), MmaBackwardTile(64, 64))
        if dim <= 128:
            return (MmaBackwardTile(64, 64, 4, 128, 32, 4, 2, 1), MmaBackwardTile(32, 64))
        return (MmaBackwardTile(16, 64, 4, 64, 32, 4), MmaBackwardTile(16, 64, 4, 64, 16))
    if dim <= 64:
        return (MmaBackwardTile(32, 64), MmaBackwardTile(32, 64, 4, 64, 32))
    return (MmaBackwardTile(16, 64, 4, 64, 32), MmaBackwardTile(16, 64, 4, 64, 16))


# For little shared memory.
_SMALL = (MmaBackwardTile(16, 32, 2, 32, 16, 2), MmaBackwardTile(16, 16, 1, 16, 16, 1))
