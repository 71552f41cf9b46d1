"""Fused attention on CUDA cores, for every dtype and architecture: `kernels_cu/forward/simt.cu`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from cupy_flash.families import query_tiles
from cupy_flash.families.contract import MAX_REGISTERS, Family, ceil_div, round_up, tile_members
from cupy_flash.families.schedule import Launch, Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

ENTRY = "simt_forward"
# Number of query rows of the tiles for few queries.
_FEW = 16
# Largest unrolling, which limits compile time: a step of 8 x 8 values is 256 multiply-adds already.
_MAX_UNROLL = 16
# Number of registers of an SM, on every architecture from sm_75 on.
_REGISTERS_PER_SM = 65536
# Number of registers for pointers, loop counters and temporaries: a normal and a least number.
_REGISTERS_FOR_ADDRESSES = 64
_MIN_REGISTERS_FOR_ADDRESSES = 24
# Number of head_dim columns that one accumulator sums (`forward/simt/rows.cuh`).
_MAX_SUM_LENGTH = 256
# TFLOP/s of an SM, by bytes of an accumulator, for calls that are short enough for split KV.
_TFLOPS_PER_SM = {4: 0.18, 8: 0.085}
# Numbers of threads per SM: a sufficient number, and the largest. Two warps on each of the four
# schedulers hide the latency of eight independent rows. More than four warps per scheduler would
# leave a thread too few registers.
_ENOUGH_THREADS = 256
_MAX_THREADS = 512


@dataclass(frozen=True)
class SimtTile(Tile):
    """Tile of the `simt` family.

    Attributes
    ----------
    Br, Bc
        Number of query rows, and of keys, of a tile.
    threads
        Number of threads of a thread block.
    rows_per_thread
        Number of query rows whose scores and outputs a thread keeps in registers.
    share_kv
        1 if K and V use the same shared-memory buffer one after the other; 0 if each has its own,
        so that one is loaded while the other is multiplied.
    unroll
        Number of 16-byte steps by which the multiplication loops are unrolled.
    """

    threads: int
    rows_per_thread: int
    share_kv: int
    unroll: int

    @property
    def row_threads(self) -> int:
        """Number of threads that process the same query row."""
        return self.threads * self.rows_per_thread // self.Br


class SimtFamily(Family[SimtTile]):
    """FlashAttention-2 on CUDA cores."""

    name = "simt"
    source = "forward/simt.cu"
    tile_type = SimtTile
    serves_sequences = True
    serves_any_rows = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if device.arch < 75:
            return f"needs sm_75 or later, and {device.name} is {device.sm}"
        # Every size fits an SM, but a launch may have too many thread blocks.
        return self.why_not_tile(problem, device, self.default_tile(problem, device))

    def candidates(self, problem: Problem, device: Device) -> Iterator[SimtTile]:
        thin = _has_few_queries(problem) or _holds_few_rows(problem)
        for rows, row_threads, threads, keys, share_kv, unroll in itertools.product(
            (2,) if thin else (8, 4),
            (8, 16, 4, 32),
            (64, 128, 256),
            (128, 64, 32, 16),
            (0, 1),
            (1, 2),
        ):
            tile = SimtTile(threads * rows // row_threads, keys, threads, rows, share_kv, unroll)
            if thin or _multiplications_bind(problem, tile):
                yield tile

    def why_not_tile(self, problem: Problem, device: Device, tile: SimtTile) -> str | None:
        if min(tile.threads, tile.rows_per_thread, tile.unroll) < 1:
            return "threads, rows_per_thread and unroll must be positive"
        if tile.share_kv not in (0, 1):
            return f"share_kv (one buffer for K and V) is {tile.share_kv}; expected 0 or 1"
        if tile.unroll > _MAX_UNROLL:
            return f"unroll is {tile.unroll}; expected at most {_MAX_UNROLL}"
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
            return (
                f"Bc is {tile.Bc}; expected a multiple of the {tile.row_threads} threads of a row"
            )
        held = self._registers_held(problem, tile)
        limit = min(MAX_REGISTERS, _REGISTERS_PER_SM // tile.threads)
        if held + _MIN_REGISTERS_FOR_ADDRESSES > limit:
            return (
                f"needs {held} registers per thread for scores, outputs and operands; "
                f"{limit - _MIN_REGISTERS_FOR_ADDRESSES} are available"
            )
        shared_memory = self.shared_memory(problem, tile)
        if shared_memory > device.shared_memory_per_block:
            return (
                f"needs {shared_memory} bytes of shared memory, and {device.name} allows "
                f"{device.shared_memory_per_block} per block"
            )
        return query_tiles.why_not_grid(problem, tile.Br)

    def default_tile(self, problem: Problem, device: Device) -> SimtTile:
        legal = [
            tile
            for tile in _preferred_tiles(problem)
            if self.why_not_tile(problem, device, tile) is None
        ]
        for tile in legal:
            blocks = self._blocks_per_sm(problem, device, tile)
            if blocks * tile.threads >= _ENOUGH_THREADS:
                return tile
        return legal[0] if legal else _smallest(problem)

    def registers(self, problem: Problem, tile: SimtTile) -> int:
        """Return the largest number of 32-bit registers that a thread may use.

        The limit lets as many thread blocks run on an SM as `_resident_blocks` returns.
        """
        per_block = _REGISTERS_PER_SM // (tile.threads * self._resident_blocks(problem, tile))
        return min(MAX_REGISTERS, per_block // 8 * 8)

    def _resident_blocks(self, problem: Problem, tile: SimtTile) -> int:
        # `__launch_bounds__` receives this number. Without it, the compiler may spill registers to
        # reach a higher occupancy than needed.
        held = self._registers_held(problem, tile) + _REGISTERS_FOR_ADDRESSES
        threads = min(_MAX_THREADS, _REGISTERS_PER_SM // held)
        return max(1, threads // tile.threads)

    def _registers_held(self, problem: Problem, tile: SimtTile) -> int:
        # Each row has the output, one vector of Q or P and three statistics, and the larger of the
        # scores (twice for wide heads) and the output of one tile. Two more vectors are K or V.
        size = _accumulator_size(problem)
        width = 16 // size
        keys, columns = _keys_and_columns(problem, tile)
        scores = 2 * keys if problem.head_dim > _MAX_SUM_LENGTH else keys
        per_row = max(scores, columns) + columns + width + 3
        return (tile.rows_per_thread * per_row + 2 * width) * size // 4

    def _blocks_per_sm(self, problem: Problem, device: Device, tile: SimtTile) -> int:
        return device.blocks_per_sm(
            tile.threads, self.shared_memory(problem, tile), self.registers(problem, tile)
        )

    def shared_memory(self, problem: Problem, tile: SimtTile) -> int:
        # This mirrors `Layout` of forward/simt/layout.cuh, which asserts that both are equal.
        size = _accumulator_size(problem)
        width = 16 // size
        chunk = max(width, problem.alignment // problem.itemsize)
        qk_stride = (round_up(problem.head_dim, chunk) // width | 1) * width
        v_stride = round_up(round_up(problem.head_dim_v, width * tile.row_threads), chunk)
        banks = 128 // size
        span = min(tile.row_threads, banks // 2)
        p_stride = tile.Bc + (span - tile.Bc) % banks
        k_size, v_size = tile.Bc * qk_stride, tile.Bc * v_stride
        kv_size = max(k_size, v_size) if tile.share_kv else k_size + v_size
        return size * (tile.Br * qk_stride + kv_size + tile.Br * p_stride)

    def schedule(self, problem: Problem, device: Device, tile: SimtTile) -> Schedule:
        blocks_per_sm = self._blocks_per_sm(problem, device, tile)
        tflops = _TFLOPS_PER_SM[_accumulator_size(problem)]
        split = query_tiles.choose_split(problem, device, tile, blocks_per_sm, tflops)
        main = Launch(
            ENTRY,
            "simt_attention",
            (query_tiles.query_blocks(problem, tile.Br) * split.parts, 1, 1),
            tile.threads,
            self.shared_memory(problem, tile),
            self._resident_blocks(problem, tile),
        )
        return query_tiles.schedule(problem, device, split, main)

    def config(self, problem: Problem, tile: SimtTile, split: Split) -> dict[str, int | bool]:
        return {
            **tile_members(tile, "Br Bc threads rows_per_thread"),
            "share_kv": bool(tile.share_kv),
            "unroll": tile.unroll,
            "shared_memory": self.shared_memory(problem, tile),
        } | query_tiles.config(problem)


def _accumulator_size(problem: Problem) -> int:
    return 8 if problem.dtype == "float64" else 4


def _has_few_queries(problem: Problem) -> bool:
    """Return whether one tile of `_FEW` rows holds all query rows of a head or group of heads."""
    if problem.is_batch_invariant:
        return False
    return query_tiles.query_rows(problem) <= _FEW


def _holds_few_rows(problem: Problem) -> bool:
    """Return whether the registers of a thread hold the outputs of at most two rows."""
    return problem.dtype == "float64" and problem.head_dim_v > _WIDE_FROM


def _smallest(problem: Problem) -> SimtTile:
    """Return the smallest tile. It fits every GPU, except for float64 with head dims above 384."""
    is_wide = max(problem.head_dim, problem.head_dim_v) > _WIDE_FROM
    return _WIDE[8][-1] if is_wide and problem.dtype == "float64" else SimtTile(8, 16, 64, 2, 1, 1)


def _keys_and_columns(problem: Problem, tile: SimtTile) -> tuple[int, int]:
    """Return how many scores, and how many outputs, a thread keeps for each of its rows."""
    width = 16 // _accumulator_size(problem)
    columns = ceil_div(problem.head_dim_v, width * tile.row_threads) * width
    return tile.Bc // tile.row_threads, columns


def _multiplications_bind(problem: Problem, tile: SimtTile) -> bool:
    """Return whether the multiply-adds of a tile take at least as long as its shared-memory reads.

    Both times are in cycles of an SM, per warp and 16-byte step (see `forward/simt/rows.cuh`).
    """
    rows = tile.rows_per_thread
    keys, columns = _keys_and_columns(problem, tile)
    return 2 * (rows + keys) + 2 * (rows + columns) <= rows * (keys + columns)


def _preferred_tiles(problem: Problem) -> tuple[SimtTile, ...]:
    """Return tiles from the best to the smallest; the first with enough warps is the default.

    The order comes from resource arithmetic, not from measurements. With 8 x 8 values of S and O
    per thread, shared memory is idle half of the time. But a thread then takes 250 registers, and
    an SM holds eight warps. If shared memory is too small for two such thread blocks (128 rows), 4
    rows per thread and 256 threads also give eight warps. Smaller tiles reduce Bc before Br,
    because every query tile reads all keys again.
    """
    dim = max(problem.head_dim, problem.head_dim_v)
    wide = _WIDE[_accumulator_size(problem)] if dim > _WIDE_FROM else ()
    if _has_few_queries(problem):
        return (*_FEW_QUERIES, *wide)
    if wide:
        return wide
    column = 0 if dim <= 64 else 1 if dim <= 128 else 2
    return _PREFERRED[_accumulator_size(problem)][column]


_PREFERRED = {
    4: (
        (
            # With `unroll` 2, this tile takes all 255 registers on sm_100 and later.
            SimtTile(128, 64, 128, 8, 0, 1),
            SimtTile(128, 64, 256, 4, 1, 2),
            SimtTile(128, 32, 256, 4, 1, 2),
        ),
        (
            SimtTile(64, 64, 128, 8, 1, 2),
            SimtTile(128, 64, 256, 8, 1, 2),
            SimtTile(64, 64, 256, 4, 1, 2),
            SimtTile(64, 32, 256, 4, 1, 2),
        ),
        (
            SimtTile(64, 64, 256, 4, 1, 2),
            SimtTile(32, 32, 128, 4, 1, 2),
            SimtTile(32, 16, 128, 4, 1, 2),
        ),
    ),
    8: (
        (
            SimtTile(64, 64, 128, 4, 1, 2),
            SimtTile(64, 32, 128, 4, 1, 2),
            SimtTile(32, 32, 128, 2, 1, 2),
        ),
        (
            SimtTile(64, 64, 256, 4, 1, 2),
            SimtTile(64, 32, 256, 4, 0, 2),
            SimtTile(32, 32, 128, 4, 1, 2),
            SimtTile(32, 16, 128, 4, 1, 2),
        ),
        (
            SimtTile(32, 32, 256, 2, 1, 2),
            SimtTile(16, 16, 128, 2, 1, 2),
        ),
    ),
}
# Tiles for head dims above 256. If 16 threads cannot hold the outputs of 4 rows, 32 threads process
# a row. The tiles fill the shared memory of sm_90, sm_80, sm_86 and sm_75, in this order.
_WIDE_FROM = 256
_WIDE = {
    4: (
        SimtTile(64, 64, 256, 4, 1, 2),
        SimtTile(64, 32, 256, 4, 1, 2),
        SimtTile(32, 64, 256, 4, 1, 2),
        SimtTile(32, 32, 256, 4, 1, 2),
        SimtTile(16, 32, 128, 4, 1, 2),
        SimtTile(8, 32, 64, 4, 1, 2),
        SimtTile(8, 16, 64, 2, 1, 1),
    ),
    8: (
        SimtTile(16, 32, 256, 2, 1, 2),
        SimtTile(8, 32, 128, 2, 1, 2),
        SimtTile(8, 16, 128, 1, 1, 1),
        SimtTile(4, 16, 64, 1, 1, 1),
    ),
}
# Tiles for few query rows, which fit one tile: a small tile leaves more warps to split the keys.
_FEW_QUERIES = (SimtTile(16, 32, 128, 2, 0, 2), SimtTile(16, 32, 128, 2, 1, 2))
