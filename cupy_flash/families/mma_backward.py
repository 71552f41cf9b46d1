"""Gradients on tensor cores for 16-bit inputs and float32: `kernels_cu/backward/mma.cu`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from cupy_flash.families import gradients
from cupy_flash.families.contract import (
    Family,
    round_up,
    why_not_blocks,
    why_not_scale,
)
from cupy_flash.families.schedule import (
    KEY_GRADIENTS,
    QUERY_GRADIENTS,
    VALUE_GRADIENTS,
    Launch,
    Schedule,
    Split,
)
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
    apart
        1 where dk and dv have a kernel each: eight products in all in place of seven, for head
        dims whose sums of both do not fit the registers.
    """

    warps: int = 4
    dq_Br: int = 64
    dq_Bc: int = 64
    dq_warps: int = 4
    min_blocks: int = 1
    dq_min_blocks: int = 1
    apart: int = 0


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
            return self.why_not_tile(problem, device, _SMALL[-1])
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[MmaBackwardTile]:
        shapes = [
            (rows, columns, warps, blocks)
            for warps, tiles, columns, blocks in itertools.product(
                (4, 8), (1, 2), (64, 32, 16), (1, 2, 3)
            )
            if (rows := 16 * tiles * warps) <= 128
        ]
        for (keys, Br, warps, blocks), (queries, Bc, dq_warps, dq_blocks) in itertools.product(
            shapes, shapes
        ):
            for apart in (0, 1):
                yield MmaBackwardTile(
                    Br, keys, warps, queries, Bc, dq_warps, blocks, dq_blocks, apart
                )

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
                shared_memory=self._shared_memory(problem, tile, of_keys=of_keys),
                registers=self._registers(problem, tile, of_keys=of_keys),
                min_blocks=blocks,
            )
            if reason:
                return reason
        return gradients.why_not_grid(problem, tile.Bc, tile.dq_Br)

    def _registers(self, problem: Problem, tile: MmaBackwardTile, *, of_keys: bool) -> int:
        """What a thread holds: sums, s, dp, and the rest."""
        dim, dim_v = _padded_dims(problem)
        if not of_keys:
            return _held(tile.dq_Br // tile.dq_warps, tile.dq_Bc, dim)
        both = max(dim, dim_v) if tile.apart else dim + dim_v
        return _held(tile.Bc // tile.warps, tile.Br, both)

    def default_tile(self, problem: Problem, device: Device) -> MmaBackwardTile:
        tile = self._first_legal(problem, device)
        assert tile is not None, "asked only where why_not() has no reason"
        return tile

    def _first_legal(self, problem: Problem, device: Device) -> MmaBackwardTile | None:
        tiles = itertools.chain(_preferred_tiles(problem), _SMALL)
        return next((t for t in tiles if self.why_not_tile(problem, device, t) is None), None)

    def shared_memory(self, problem: Problem, tile: MmaBackwardTile) -> int:
        return self._shared_memory(problem, tile, of_keys=True)

    def _shared_memory(self, problem: Problem, tile: MmaBackwardTile, *, of_keys: bool) -> int:
        row_bytes = sum(_padded_dims(problem)) * problem.itemsize
        if not of_keys:
            return (tile.dq_Br + _STAGES * tile.dq_Bc) * row_bytes
        return tile.Bc * row_bytes + _STAGES * tile.Br * (row_bytes + _TERMS_BYTES)

    def schedule(self, problem: Problem, device: Device, tile: MmaBackwardTile) -> Schedule:
        of_keys, of_queries = gradients.blocks_of(problem, tile.Bc, tile.dq_Br)
        launches = []
        for entry, function, is_of_keys in self._kernels(problem, tile):
            warps, blocks, min_blocks = (
                (tile.warps, of_keys, tile.min_blocks)
                if is_of_keys
                else (tile.dq_warps, of_queries, tile.dq_min_blocks)
            )
            launches.append(
                Launch(
                    entry,
                    function,
                    (blocks, 1, 1),
                    32 * warps,
                    self._shared_memory(problem, tile, of_keys=is_of_keys),
                    min_blocks,
                    arguments=("gradients",),
                )
            )
        return gradients.schedule(problem, device, launches)

    def _kernels(self, problem: Problem, tile: MmaBackwardTile) -> list[tuple[str, str, bool]]:
        """Entry, function, and whether its rows are keys, of each kernel of a backward pass."""
        gradient = problem.gradient
        assert gradient is not None
        found = []
        if gradient.wants("k", "v"):
            if gradient.wants("k") and gradient.wants("v") and not tile.apart:
                found.append((KEY_GRADIENTS, "mma_key_and_value_gradients", True))
            else:
                if gradient.wants("k"):
                    found.append((KEY_GRADIENTS, "mma_key_gradients", True))
                if gradient.wants("v"):
                    found.append((VALUE_GRADIENTS, "mma_value_gradients", True))
        if gradient.wants("q"):
            found.append((QUERY_GRADIENTS, "mma_query_gradients", False))
        return found

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
            "dq_shared_memory": self._shared_memory(problem, tile, of_keys=False),
        } | gradients.config(problem)


def _held(rows: int, columns: int, dims: int) -> int:
    """Registers of a thread of a warp of so many rows: accumulators, and the rest."""
    return rows * (dims + 2 * columns) // 32 + _OTHER_REGISTERS


def _padded_dims(problem: Problem) -> tuple[int, int]:
    """Columns of q and k, and of v and dout, in shared memory (see mma.cu)."""
    unit = 32 if problem.dtype == "float32" else 16
    return round_up(problem.head_dim, unit), round_up(problem.head_dim_v, unit)


def _preferred_tiles(problem: Problem) -> tuple[MmaBackwardTile, ...]:
    """Tiles from the best down, by resource arithmetic: not yet measured."""
    dim = max(_padded_dims(problem))
    tile = MmaBackwardTile
    if problem.itemsize == 2:
        if dim <= 64:
            return (tile(64, 128, 8, 128, 32, 4, dq_min_blocks=2), tile(64, 64))
        if dim <= 128:
            return (tile(64, 64, 4, 64, 64, 4, 2, 2), tile(32, 64))
        return (tile(32, 64, 4, 64, 32, apart=1), tile(16, 64, 4, 64, 16, apart=1))
    if dim <= 64:
        return (tile(32, 64), tile(32, 64, 4, 64, 32))
    if dim <= 128:
        return (tile(32, 64, 4, 64, 32, apart=1), tile(16, 64, 4, 64, 16, apart=1))
    return (tile(16, 64, 4, 64, 16, apart=1), tile(16, 32, 2, 32, 16, 2, apart=1))


# For little shared memory.
_SMALL = (
    MmaBackwardTile(16, 32, 2, 32, 16, 2, apart=1),
    MmaBackwardTile(16, 16, 1, 16, 16, 1, apart=1),
)
