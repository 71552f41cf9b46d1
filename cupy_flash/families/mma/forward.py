"""Fused attention on tensor cores for float32 and 16-bit types: `kernels_cu/forward/mma.cu`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cupy_flash.families import query_tiles
from cupy_flash.families.contract import Family, round_up, tile_members, why_not_blocks
from cupy_flash.families.schedule import MAIN_ENTRY, Launch, Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile


@dataclass(frozen=True)
class MmaTile(Tile):
    """Tile of the `mma` family.

    Attributes
    ----------
    warps
        Number of warps of a thread block. A warp owns 16 or 32 of the Br rows. For wide heads, two
        warps may own the same 16 rows: each has half of the keys and half of the output columns.
    stages
        Number of K or V tiles in the shared-memory ring, 2 to 4: one in use, the others being
        loaded.
    q_in_registers
        1 keeps the query fragments in registers; 0 reads them from shared memory for each KV tile.
    min_blocks
        Number of thread blocks per SM in `__launch_bounds__`, which limits registers per thread.
    """

    warps: int = 4
    stages: int = 2
    q_in_registers: int = 0
    min_blocks: int = 1

    @property
    def column_warps(self) -> int:
        """Number of warps that process the same query rows."""
        return 2 if self.Br == 8 * self.warps else 1


# TFLOP/s of an SM, by bytes of an element, for calls that are short enough for split KV. These are
# 0.7 of the rate of an SM of an H100 in long calls (see `split_kv.py`).
_TFLOPS_PER_SM = {2: 2.1, 4: 0.32}
# Largest number of warps, and of query rows, of the candidate tiles.
_MAX_WARPS = 8
_MAX_ROWS = 2 * 16 * _MAX_WARPS
# For head dims above this, two warps may process the same query rows.
_WIDE = 256


def _preferred_tiles(problem: Problem, device: Device) -> list[MmaTile]:
    """Return tiles from the fastest to the slowest; the first that fits becomes the default.

    Figures in the comments are TFLOP/s on an H100 (bfloat16, full attention, batch x seqlen 16384,
    heads x head_dim 2048).
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    # Some tiles fit into 255 registers on sm_90 but spill on other architectures.
    hopper = device.arch == 90
    layout = problem.layout
    # With a paged KV cache, the largest tile spills.
    paged = layout.page_size > 0
    if problem.dtype == "float32":
        # At head_dim 128, tile 64x64 is 10% faster than 64x32 although it spills 16 bytes (H200,
        # causal, seqlen 4096).
        # With the entropy, it needs more registers and spills more bytes.
        fits = hopper and layout.is_dense and "entropy" not in problem.statistics
        large = [MmaTile(64, 64)] if widest <= 64 or fits else []
        return [*large, MmaTile(64, 32)]
    if widest <= 64:
        # Tile 128x80 reaches 327 TFLOP/s at seqlen 4096 and 257 at seqlen 512; the small tile
        # reaches 323 and 264 TFLOP/s. Tile 128x96 spills.
        small = MmaTile(64, 64, warps=2, stages=4)
        long = problem.seqlen_k >= 1024 and not problem.causal and not problem.is_batch_invariant
        return [MmaTile(128, 80, stages=4), small] if hopper and long else [small]
    if widest <= 128:
        # Tile 128x64 reaches 394 TFLOP/s at seqlen 4096, tile 64x64 reaches 317.
        large = [MmaTile(128, 64)] if hopper and not paged else []
        return [*large, MmaTile(64, 64), MmaTile(64, 32)]
    if widest > _WIDE:
        # Tile 64x64 reaches 235 TFLOP/s, 64x32 reaches 213 (H200, head_dim 512, seqlen 4096).
        # With a paged KV cache and head_dim_v above 512, tile 64x64 spills.
        large = [] if paged and problem.head_dim_v > 512 else [MmaTile(64, 64, warps=8)]
        return [*large, MmaTile(64, 32, warps=8), MmaTile(32, 32), MmaTile(16, 32, warps=2)]
    # Tile 64x64 reaches 329 TFLOP/s at seqlen 4096, tile 64x32 reaches 283.
    return [MmaTile(64, 64), MmaTile(64, 32), MmaTile(32, 32, warps=2)]


def _padded_dims(problem: Problem, tile: MmaTile) -> tuple[int, int]:
    """Return the padded columns of Q and K, and of V: multiples of the shape of an MMA."""
    step, step_v = (8, 32) if problem.dtype == "float32" else (16, 16 * tile.column_warps)
    return round_up(problem.head_dim, step), round_up(problem.head_dim_v, step_v)


def _is_wide(problem: Problem) -> bool:
    return max(problem.head_dim, problem.head_dim_v) > _WIDE


def _rows(problem: Problem, warps: int) -> tuple[int, ...]:
    """Return the numbers of query rows that a tile of `warps` warps may have, the least last."""
    shared = (8 * warps,) if _is_wide(problem) and warps % 2 == 0 else ()
    return (16 * warps, 32 * warps, *shared)


class MmaFamily(Family[MmaTile]):
    """FlashAttention-2 with `mma.sync` and `cp.async`; float32 takes three TF32 products."""

    name = "mma"
    source = "forward/mma.cu"
    tile_type = MmaTile
    serves_sequences = True
    serves_any_rows = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if problem.dtype == "float64":
            return "its tensor-core products take float16, bfloat16 or float32, not float64"
        if problem.dtype == "float32" and max(problem.head_dim, problem.head_dim_v) > 128:
            return "float32 needs too many registers for head dims over 128"
        if device.arch < 80:
            return f"needs sm_80 or newer for cp.async and its mma shapes, not {device.sm}"
        if reason := query_tiles.why_not_grid(problem, _MAX_ROWS):
            return reason
        if self._first_legal(problem, device) is None:
            return f"none of its tiles fits {device.name}"
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[MmaTile]:
        sizes = [(warps, Br) for warps in (2, 4, _MAX_WARPS) for Br in _rows(problem, warps)]
        for (warps, Br), Bc, stages, q_in_registers, min_blocks in itertools.product(
            sizes,
            (32, 48, 64, 80, 96, 128),
            (2, 3, 4),
            (0, 1),
            (1, 2, 3),
        ):
            yield MmaTile(
                Br=Br,
                Bc=Bc,
                warps=warps,
                stages=stages,
                q_in_registers=q_in_registers,
                min_blocks=min_blocks,
            )

    def why_not_tile(self, problem: Problem, device: Device, tile: MmaTile) -> str | None:
        if not 1 <= tile.warps <= 16:
            return f"warps is {tile.warps}; expected 1 to 16"
        if tile.Br not in _rows(problem, tile.warps):
            extra = "8, " if _is_wide(problem) else ""
            return f"Br is {tile.Br}; expected {extra}16 or 32 rows for each of {tile.warps} warps"
        if tile.Bc < 16 or tile.Bc % (16 * tile.column_warps):
            return f"Bc is {tile.Bc}; expected a multiple of {16 * tile.column_warps}"
        if not 2 <= tile.stages <= 4:
            return f"stages is {tile.stages}; expected 2 to 4"
        if tile.q_in_registers not in (0, 1):
            return f"q_in_registers is {tile.q_in_registers}; expected 0 or 1"
        if tile.min_blocks < 1:
            return f"min_blocks is {tile.min_blocks}; expected at least 1"
        reason = why_not_blocks(
            device,
            threads=self.threads(tile),
            shared_memory=self.shared_memory(problem, tile),
            registers=self._registers(problem, tile),
            min_blocks=tile.min_blocks,
        )
        return reason or query_tiles.why_not_grid(problem, tile.Br)

    def _registers(self, problem: Problem, tile: MmaTile) -> int:
        """Return a lower bound: the fragments that are live at once, and 30 other registers."""
        row_tiles = tile.Br * tile.column_warps // (16 * tile.warps)
        columns, columns_v = _padded_dims(problem, tile)
        words = problem.itemsize / 4
        scores = row_tiles * tile.Bc // 2
        output = row_tiles * columns_v // tile.column_warps // 2
        queries = int(row_tiles * columns * words) // 2 if tile.q_in_registers else 0
        products = 16 if problem.itemsize == 2 else 16 + 32 * row_tiles
        return scores + output + queries + products + 30

    def preferred_tiles(self, problem: Problem, device: Device) -> Iterable[MmaTile]:
        best = _preferred_tiles(problem, device)
        return itertools.chain(best, self.candidates(problem, device))

    def shared_memory(self, problem: Problem, tile: MmaTile) -> int:
        columns = max(*_padded_dims(problem, tile))
        return (tile.Br + tile.stages * tile.Bc) * columns * problem.itemsize

    def threads(self, tile: MmaTile) -> int:
        return 32 * tile.warps

    def schedule(self, problem: Problem, device: Device, tile: MmaTile) -> Schedule:
        threads, shared_memory = self.threads(tile), self.shared_memory(problem, tile)
        blocks_per_sm = device.blocks_per_sm(threads, shared_memory, 255)
        tflops = _TFLOPS_PER_SM[problem.itemsize]
        split = query_tiles.choose_split(problem, device, tile, blocks_per_sm, tflops)
        grid = (query_tiles.query_blocks(problem, tile.Br) * split.parts, 1, 1)
        main = Launch(MAIN_ENTRY, "mma_forward", grid, threads, shared_memory, tile.min_blocks)
        return query_tiles.schedule(problem, device, split, main)

    def config(self, problem: Problem, tile: MmaTile, split: Split) -> dict[str, int | bool]:
        return {
            **tile_members(tile, "Br Bc warps stages"),
            "q_in_registers": bool(tile.q_in_registers),
            "shared_memory": self.shared_memory(problem, tile),
        } | query_tiles.config(problem)
