"""The CUDA-core fused kernel: every dtype, every architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupy_flash.device import Device
from cupy_flash.families import split
from cupy_flash.families.base import Family, Launch, Tile, ceil_div, round_up
from cupy_flash.problem import Problem

ENTRY = "simt_forward"
_MAX_GRID = 2**31 - 1
_MAX_REGISTERS = 255


@dataclass(frozen=True)
class SimtTile(Tile):
    """Compile-time choices of the CUDA-core kernel.

    Attributes
    ----------
    Br, Bc
        Query rows and key/value rows of a tile.
    threads
        Threads of a block.
    rows_per_thread
        Query rows whose scores and outputs a thread keeps in registers.
    share_kv
        1 if K and V take turns in one shared-memory buffer, 0 if each has its own and the next
        one is copied while the other is multiplied.
    unroll
        Steps of 16 bytes that the multiplication loops are unrolled by.
    """

    threads: int
    rows_per_thread: int
    share_kv: int
    unroll: int

    @property
    def row_threads(self) -> int:
        """Threads that share a query row."""
        return self.threads * self.rows_per_thread // self.Br


class SimtFamily(Family):
    """See `kernels_cu/simt.cu`."""

    name = "simt"
    source = "simt.cu"
    tile_type = SimtTile

    def why_not(self, problem: Problem, device: Device) -> str | None:
        if device.arch < 75:
            return f"needs sm_75 or later, and {device.name} is {device.sm}"
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[SimtTile]:
        for rows_per_thread in (8, 4, 2):
            for row_threads in (8, 16, 4, 32):
                for threads in (64, 128, 256):
                    rows = threads * rows_per_thread // row_threads
                    for keys in (128, 64, 32, 16):
                        for share_kv in (0, 1):
                            for unroll in (1, 2, 4):
                                yield SimtTile(
                                    rows, keys, threads, rows_per_thread, share_kv, unroll
                                )

    def why_not_tile(self, problem: Problem, device: Device, tile: Tile) -> str | None:
        assert isinstance(tile, SimtTile)
        if min(tile.Br, tile.Bc, tile.threads, tile.rows_per_thread, tile.unroll) < 1:
            return "Br, Bc, threads, rows_per_thread and unroll must be positive"
        if tile.share_kv not in (0, 1):
            return f"share_kv is {tile.share_kv}; expected 0 or 1"
        if tile.threads % 32 or tile.threads > 1024:
            return f"threads is {tile.threads}; expected a multiple of 32, at most 1024"
        if tile.row_threads not in (4, 8, 16, 32) or (
            tile.row_threads * tile.Br != tile.threads * tile.rows_per_thread
        ):
            return (
                f"threads * rows_per_thread / Br, the threads that share a row, is "
                f"{tile.threads * tile.rows_per_thread / tile.Br:g}; expected 4, 8, 16 or 32"
            )
        if tile.Bc % tile.row_threads:
            return f"Bc is {tile.Bc}; expected a multiple of the {tile.row_threads} threads of a row"
        registers = self.registers(problem, tile)
        limit = min(_MAX_REGISTERS, device.registers_per_sm // tile.threads)
        if registers > limit:
            return f"needs about {registers} registers per thread, and there are {limit}"
        shared_memory = self.shared_memory(problem, tile)
        if shared_memory > device.shared_memory_per_block:
            return (
                f"needs {shared_memory} bytes of shared memory, and {device.name} allows "
                f"{device.shared_memory_per_block} per block"
            )
        if ceil_div(problem.seqlen_q, tile.Br) * problem.batch * problem.heads_q > _MAX_GRID:
            return f"needs more than the {_MAX_GRID} thread blocks of a launch; take a larger Br"
        return None

    def default_tile(self, problem: Problem, device: Device) -> SimtTile:
        for tile in (
            SimtTile(128, 64, 128, 8, 0, 2),
            SimtTile(64, 64, 64, 8, 0, 2),
            SimtTile(64, 32, 128, 4, 1, 2),
            SimtTile(32, 16, 128, 2, 1, 2),
            SimtTile(16, 16, 128, 2, 1, 2),
        ):
            if self.why_not_tile(problem, device, tile) is None:
                return tile
        raise AssertionError(f"no tile fits {device.name}")

    def registers(self, problem: Problem, tile: SimtTile) -> int:
        """Estimate of the 32-bit registers of a thread: what it accumulates, and operands."""
        size = _accumulator_size(problem)
        width = 16 // size
        rows = tile.rows_per_thread
        keys = tile.Bc // tile.row_threads
        columns = ceil_div(problem.head_dim_v, width * tile.row_threads) * width
        return (rows * (keys + columns + width + 3) + 2 * width) * size // 4 + 24

    def shared_memory(self, problem: Problem, tile: Tile) -> int:
        assert isinstance(tile, SimtTile)
        # As simt.cu's Layout computes it, and asserts.
        size = _accumulator_size(problem)
        width = 16 // size
        piece = max(width, problem.alignment // problem.itemsize)
        qk_stride = (round_up(problem.head_dim, piece) // width | 1) * width
        v_stride = round_up(round_up(problem.head_dim_v, width * tile.row_threads), piece)
        banks = 128 // size
        span = min(tile.row_threads, banks // 2)
        p_stride = tile.Bc + (span - tile.Bc) % banks
        k_size, v_size = tile.Bc * qk_stride, tile.Bc * v_stride
        kv_size = max(k_size, v_size) if tile.share_kv else k_size + v_size
        return size * (tile.Br * qk_stride + kv_size + tile.Br * p_stride)

    def threads(self, tile: Tile) -> int:
        assert isinstance(tile, SimtTile)
        return tile.threads

    def num_splits(self, problem: Problem, device: Device, tile: Tile) -> int:
        assert isinstance(tile, SimtTile)
        return split.num_splits(
            problem,
            device,
            q_tiles=ceil_div(problem.seqlen_q, tile.Br),
            key_tiles=ceil_div(problem.seqlen_k, tile.Bc),
            blocks_per_sm=device.blocks_per_sm(
                tile.threads, self.shared_memory(problem, tile), self.registers(problem, tile)
            ),
        )

    def workspace(self, problem: Problem, num_splits: int) -> int:
        return split.workspace(problem, num_splits)

    def launches(self, problem: Problem, tile: Tile, num_splits: int) -> tuple[Launch, ...]:
        q_tiles = ceil_div(problem.seqlen_q, tile.Br)
        grid = (q_tiles * problem.batch * problem.heads_q * num_splits, 1, 1)
        forward = Launch(ENTRY, grid, self.threads(tile), self.shared_memory(problem, tile))
        return (forward, *split.combine_launches(problem, num_splits))

    def entries(self, problem: Problem, tile: Tile, num_splits: int) -> dict[str, str]:
        forward = (
            f'extern "C" __global__ void __launch_bounds__({self.threads(tile)})\n'
            f"{ENTRY}(const __grid_constant__ Params params) {{ simt_attention<Config>(params); }}"
        )
        return {ENTRY: forward} | split.combine_entries(num_splits)

    def config(self, problem: Problem, tile: Tile) -> dict[str, int | bool]:
        assert isinstance(tile, SimtTile)
        return {
            "Br": tile.Br,
            "Bc": tile.Bc,
            "threads": tile.threads,
            "rows_per_thread": tile.rows_per_thread,
            "share_kv": bool(tile.share_kv),
            "unroll": tile.unroll,
            "shared_memory": self.shared_memory(problem, tile),
        }


def _accumulator_size(problem: Problem) -> int:
    return 8 if problem.dtype == "float64" else 4
