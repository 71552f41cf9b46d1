"""The CUDA-core fused kernel: every dtype, every architecture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from cupy_flash.families import ragged
from cupy_flash.families.contract import MAX_REGISTERS, Family, ceil_div, round_up
from cupy_flash.families.schedule import Launch, Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

ENTRY = "simt_forward"
# Queries that one low tile holds.
_FEW = 16
# Compile time grows with it, and a step of 8 x 8 is 256 multiply-adds already.
_MAX_UNROLL = 16
# Of every architecture from sm_75 on.
_REGISTERS_PER_SM = 65536
# Pointers, loop counters, temporaries of the softmax: at ease, and at least.
_REGISTERS_FOR_ADDRESSES = 64
_LEAST_REGISTERS_FOR_ADDRESSES = 24
# Columns of a score that are summed in one go, as `forward/simt/rows.cuh` has it.
_MOST_IN_ONE_SUM = 256
# By the bytes of an accumulator, of an SM in calls that are short enough to split (see `split.py`).
_TFLOPS_PER_SM = {4: 0.18, 8: 0.085}
# Two warps for each of an SM's four schedulers hide the latency of eight independent rows; for more
# than four, registers are not worth giving up.
_ENOUGH_THREADS = 256
_MOST_THREADS = 512


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


class SimtFamily(Family[SimtTile]):
    """See `kernels_cu/forward/simt.cu`."""

    name = "simt"
    source = "forward/simt.cu"
    tile_type = SimtTile
    serves_sequences = True
    serves_any_rows = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if device.arch < 75:
            return f"needs sm_75 or later, and {device.name} is {device.sm}"
        # Every size fits, but not every number of thread blocks.
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
            return f"share_kv is {tile.share_kv}; expected 0 or 1"
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
        if held + _LEAST_REGISTERS_FOR_ADDRESSES > limit:
            return (
                f"keeps {held} registers of scores, outputs and operands per thread, and has "
                f"{limit - _LEAST_REGISTERS_FOR_ADDRESSES} for them"
            )
        shared_memory = self.shared_memory(problem, tile)
        if shared_memory > device.shared_memory_per_block:
            return (
                f"needs {shared_memory} bytes of shared memory, and {device.name} allows "
                f"{device.shared_memory_per_block} per block"
            )
        return ragged.why_not_grid(problem, tile.Br)

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
        """The 32-bit registers that a thread may use.

        As many as leave room for the blocks that what a thread must hold at once leaves room for.
        """
        per_block = _REGISTERS_PER_SM // (tile.threads * self._resident_blocks(problem, tile))
        return min(MAX_REGISTERS, per_block // 8 * 8)

    def _resident_blocks(self, problem: Problem, tile: SimtTile) -> int:
        # Told to the compiler, which otherwise may spill to reach an occupancy nobody asked for.
        held = self._registers_held(problem, tile) + _REGISTERS_FOR_ADDRESSES
        threads = min(_MOST_THREADS, _REGISTERS_PER_SM // held)
        return max(1, threads // tile.threads)

    def _registers_held(self, problem: Problem, tile: SimtTile) -> int:
        # Outputs, scores (and of wide heads a piece's share) or a tile's share of the outputs, one
        # vector of Q or P and three statistics of each row; two vectors more.
        size = _accumulator_size(problem)
        width = 16 // size
        keys, columns = _keys_and_columns(problem, tile)
        scores = 2 * keys if problem.head_dim > _MOST_IN_ONE_SUM else keys
        per_row = max(scores, columns) + columns + width + 3
        return (tile.rows_per_thread * per_row + 2 * width) * size // 4

    def _blocks_per_sm(self, problem: Problem, device: Device, tile: SimtTile) -> int:
        return device.blocks_per_sm(
            tile.threads, self.shared_memory(problem, tile), self.registers(problem, tile)
        )

    def shared_memory(self, problem: Problem, tile: SimtTile) -> int:
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

    def schedule(self, problem: Problem, device: Device, tile: SimtTile) -> Schedule:
        blocks_per_sm = self._blocks_per_sm(problem, device, tile)
        tflops = _TFLOPS_PER_SM[_accumulator_size(problem)]
        cut = ragged.choose_split(problem, device, tile, blocks_per_sm, tflops)
        main = Launch(
            ENTRY,
            "simt_attention",
            (ragged.query_blocks(problem, tile.Br) * cut.parts, 1, 1),
            tile.threads,
            self.shared_memory(problem, tile),
            self._resident_blocks(problem, tile),
        )
        return ragged.schedule(problem, device, cut, main)

    def config(self, problem: Problem, tile: SimtTile, split: Split) -> dict[str, int | bool]:
        return {
            "Br": tile.Br,
            "Bc": tile.Bc,
            "threads": tile.threads,
            "rows_per_thread": tile.rows_per_thread,
            "share_kv": bool(tile.share_kv),
            "unroll": tile.unroll,
            "shared_memory": self.shared_memory(problem, tile),
        } | ragged.config(problem)


def _accumulator_size(problem: Problem) -> int:
    return 8 if problem.dtype == "float64" else 4


def _has_few_queries(problem: Problem) -> bool:
    """Whether one low tile holds a head's queries, or those of all heads in a tile."""
    if problem.is_batch_invariant:
        return False
    return ragged.query_rows(problem) <= _FEW


def _holds_few_rows(problem: Problem) -> bool:
    """Whether a thread has the registers for the outputs of two rows, no more."""
    return problem.dtype == "float64" and problem.head_dim_v > _WIDE_FROM


def _smallest(problem: Problem) -> SimtTile:
    """Fits wherever the kernel runs, but for float64: heads over 384 wide do not fit 64 KiB."""
    is_wide = max(problem.head_dim, problem.head_dim_v) > _WIDE_FROM
    return _WIDE[8][-1] if is_wide and problem.dtype == "float64" else SimtTile(8, 16, 64, 2, 1, 1)


def _keys_and_columns(problem: Problem, tile: SimtTile) -> tuple[int, int]:
    """How many scores and outputs of each of its rows a thread keeps."""
    width = 16 // _accumulator_size(problem)
    columns = ceil_div(problem.head_dim_v, width * tile.row_threads) * width
    return tile.Bc // tile.row_threads, columns


def _multiplications_bind(problem: Problem, tile: SimtTile) -> bool:
    """Whether the multiply-adds of a tile take as long as its reads of shared memory.

    Both counted in cycles of an SM per warp and 16-byte step, as the head of `simt.cu` does.
    """
    rows = tile.rows_per_thread
    keys, columns = _keys_and_columns(problem, tile)
    return 2 * (rows + keys) + 2 * (rows + columns) <= rows * (keys + columns)


def _preferred_tiles(problem: Problem) -> tuple[SimtTile, ...]:
    """Tiles from the best to the smallest; the first to fit with enough warps is the default.

    Resource arithmetic, not yet measured: 8 x 8 values of S and of O per thread keep shared memory
    half idle under the multiplications, but cost 250 registers, so an SM holds eight warps. Where
    its shared memory does not hold the 128 rows that two such blocks need, 4 rows per thread and
    256 threads keep eight warps; Bc shrinks before Br does, for a tile of keys is read again by
    every query tile.
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
            # Unrolled twice it takes all 255 registers on sm_100 and later.
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
# Head dims over this: where the outputs of 4 rows do not fit 16 threads, all lanes of a warp share
# a row. As many rows and keys as the shared memory of sm_90, sm_80, sm_86 and sm_75 holds, in turn.
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
# One query tile whatever its height: a low one, whose blocks split the keys among more warps.
_FEW_QUERIES = (SimtTile(16, 32, 128, 2, 0, 2), SimtTile(16, 32, 128, 2, 1, 2))
