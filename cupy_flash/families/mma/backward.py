"""Backward pass on tensor cores for 16-bit and float32 inputs: `kernels_cu/backward/mma.cu`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cupy_flash.families import backward_common
from cupy_flash.families.backward_common import QuerySums
from cupy_flash.families.contract import (
    MAX_GRID,
    MAX_REGISTERS,
    Family,
    QueryTileLists,
    ceil_div,
    has_dropout,
    round_up,
    tile_members,
    why_not_blocks,
)
from cupy_flash.families.schedule import KEY_GRADIENTS, QUERY_GRADIENTS, Launch, Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

# Size in bytes of the statistics of a query row: its log-sum-exp and delta.
_ROW_STATS_BYTES = 8
# Bytes of the scales after a preswizzled float32 tile (`backward/preprocess/preswizzle.cuh`).
_SCALES_BYTES = 128
# Number of scale factors of P and dS that fit after `KeyScales`, which hold a bit for each key.
_MAX_UNITS = (_SCALES_BYTES - 4 * 4 - 256 // 8) // 4
# Bytes of the barrier after the query tiles in shared memory; they keep the size a multiple of 16.
_BARRIER_BYTES = 16
_PRESWIZZLE_THREADS = 256
PRESWIZZLED_TILES = "tile_images"
# Largest head dim for which a warp computes all of its columns of dq at once.
_WIDEST_WHOLE = 256
# Number of registers for addresses, counters and operands.
_OTHER_REGISTERS = 40
# Number of additional registers for float32, whose products are summed separately before they are
# added.
_COMPONENT_REGISTERS = 32
# Number of dq rows that a warp computes, if a tile has enough rows.
_SUM_ROWS = 32
# Limits on how many KV tiles of a head run concurrently: at most _MAX_CONCURRENT, and one per
# _STEPS_PER_TILE query tiles. Each begins 1.5 query tiles later than the previous one. A causal
# mask halves their number, because a thread block then has half the steps to catch up after a wait.
_MAX_CONCURRENT = 16
_STEPS_PER_TILE = 2


@dataclass(frozen=True)
class MmaBackwardTile(Tile):
    """Tile of the backward `mma` family.

    Attributes
    ----------
    Br, Bc
        Number of query rows of each iteration, and number of keys of a thread block.
    warps
        Number of warps of a thread block.
    key_warps
        Number of groups that the keys are divided into, 16 or 32 keys each. The warps of a group
        divide the query rows and the columns of dk and dv among themselves.
    columns
        Number of query rows for which a warp computes scores at once. With 8, which requires
        `paired`, each warp reads P and dS of all queries from shared memory.
    stages
        Number of query tiles in shared memory: one in use and, with 2, one being loaded.
    min_blocks
        Number of thread blocks per SM in `__launch_bounds__`, which limits registers per thread.
    paired
        1 if two warps with the same keys work as a pair: one computes S and the other dP, for the
        query rows of both.
    """

    warps: int = 4
    key_warps: int = 4
    columns: int = 32
    stages: int = 2
    min_blocks: int = 1
    paired: int = 0

    @property
    def side_warps(self) -> int:
        """Number of warps that process the same keys."""
        return self.warps // self.key_warps


class MmaBackwardFamily(Family[MmaBackwardTile]):
    """Backward pass in one kernel with five matrix products: `kernels_cu/backward/mma.cu`.

    For float32, the workspace also holds q, k, v and dout, padded to whole tiles.
    """

    name = "mma"
    source = "backward/mma.cu"
    tile_type = MmaBackwardTile
    serves_sequences = True
    reads_block_masks = True

    def uses_block_mask(self, problem: Problem, tile: MmaBackwardTile) -> bool:
        """Return whether the kernels of a tile read a block mask of the problem."""
        return backward_common.reads_lists(problem, tile.Br, tile.Bc)

    def query_tile_lists(self, problem: Problem, tile: MmaBackwardTile) -> QueryTileLists | None:
        """Return the lists of query tiles that a block mask has for the kernels, or None."""
        if not self.uses_block_mask(problem, tile):
            return None
        return backward_common.query_tile_lists(problem)

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if device.arch < 80:
            return f"needs sm_80 or later, and {device.name} is {device.sm}"
        if problem.dtype == "float64":
            return "its tensor-core products do not take float64"
        if reason := backward_common.why_not_tensor_cores(problem):
            return reason
        if _uses_components(problem) and has_dropout(problem):
            return "does not support dropout of float32, whose weights may exceed 1"
        if self._first_legal(problem, device) is None:
            return self.why_not_tile(problem, device, self.preferred_tiles(problem, device)[-1])
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[MmaBackwardTile]:
        if _is_wide(problem):
            for warps, Br, columns, stages in itertools.product((8, 4), (64, 32), (16, 8), (2, 1)):
                # Each group of four warps holds dk and dv of 16 keys.
                keys = 4 * warps
                yield MmaBackwardTile(Br, keys, warps, warps // 4, columns, stages, paired=1)
            return
        for warps, key_warps, row_tiles, Br, columns, stages, blocks in itertools.product(
            (4, 8), (1, 2, 4, 8), (1, 2), (16, 32, 64, 128), (16, 32, 64), (2, 1), (1, 2, 3)
        ):
            if warps % key_warps == 0:
                keys = 16 * row_tiles * key_warps
                yield MmaBackwardTile(Br, keys, warps, key_warps, columns, stages, blocks)

    def why_not_tile(self, problem: Problem, device: Device, tile: MmaBackwardTile) -> str | None:
        if not 1 <= tile.warps <= 16 or tile.key_warps < 1 or tile.warps % tile.key_warps:
            return f"warps is {tile.warps}; expected at most 16, and a multiple of key_warps"
        if tile.Bc not in (16 * tile.key_warps, 32 * tile.key_warps):
            return f"Bc is {tile.Bc}; expected 16 or 32 times key_warps, {tile.key_warps}"
        if tile.columns not in (8, 16, 32, 64) or tile.Br % (tile.columns * tile.side_warps):
            return (
                f"Br is {tile.Br} and columns is {tile.columns}; expected columns of 8, 16, 32 or "
                f"64, and a multiple of {tile.side_warps} * columns as Br"
            )
        row_warps = _sum_row_warps(problem, tile)
        for warps in (tile.side_warps, tile.warps // row_warps):
            # `TileLayout::advance` computes addresses of such warps only.
            if warps & (warps - 1):
                return f"{warps} warps divide columns; expected a power of two"
        if tile.warps % row_warps or tile.Br % (16 * row_warps):
            return f"Br is {tile.Br}; {tile.warps} warps cannot divide these rows of dq"
        if tile.stages not in (1, 2):
            return f"stages is {tile.stages}; expected 1 or 2"
        if tile.paired not in (0, 1) or (tile.paired and tile.side_warps % 2):
            return f"paired is {tile.paired}; expected 0, or 1 if warps / key_warps is even"
        if tile.columns % 16 and has_dropout(problem):
            return f"columns is {tile.columns}; expected at least 16 columns with dropout"
        if tile.columns == 8 and not tile.paired:
            return "columns is 8 and paired is 0; expected at least 16 columns, or paired = 1"
        if tile.min_blocks < 1:
            return f"min_blocks is {tile.min_blocks}; expected at least 1"
        units = _second_units(problem) * tile.key_warps * (tile.Br // tile.columns)
        if units > _MAX_UNITS:
            return (
                f"Br is {tile.Br}, key_warps {tile.key_warps} and columns {tile.columns}, which "
                f"need {units} scale factors; expected at most {_MAX_UNITS}"
            )
        reason = why_not_blocks(
            device,
            threads=32 * tile.warps,
            shared_memory=self.shared_memory(problem, tile),
            registers=self._registers(problem, tile),
            min_blocks=tile.min_blocks,
        )
        reason = reason or backward_common.why_not_grid(problem, tile.Bc, tile.Br)
        # The kernel that pre-swizzles tiles has a thread block for each KV tile and query tile.
        blocks = sum(backward_common.count_blocks(problem, tile.Bc, tile.Br))
        if reason is None and _uses_components(problem) and blocks > MAX_GRID:
            return f"needs {blocks} thread blocks, more than the {MAX_GRID} of a launch"
        return reason

    def _registers(self, problem: Problem, tile: MmaBackwardTile) -> int:
        """Return a lower bound: dk and dv, the larger of (S and dP) and dq, and other registers."""
        scores = (3 if tile.paired else 2) * tile.Bc // tile.key_warps * tile.columns // 32
        sums = _dq_steps(problem, tile) * _step_registers(problem, tile)
        return _kept_registers(problem, tile) + max(scores, sums) + _OTHER_REGISTERS

    def preferred_tiles(self, problem: Problem, device: Device) -> Sequence[MmaBackwardTile]:
        if _is_wide(problem):
            return _WIDE
        return (*_preferred_tiles(problem), *_SMALL)

    def shared_memory(self, problem: Problem, tile: MmaBackwardTile) -> int:
        row_bytes = sum(_padded_dims(problem, tile)) * problem.itemsize
        pairs = tile.Bc * tile.Br * problem.itemsize * (2 if tile.side_warps > 1 else 1)
        scales = _SCALES_BYTES if _uses_components(problem) else 0
        stage = tile.Br * (row_bytes + _ROW_STATS_BYTES) + scales
        barrier = _BARRIER_BYTES if tile.warps == 8 else 0
        return tile.Bc * row_bytes + scales + pairs + tile.stages * stage + barrier

    def schedule(self, problem: Problem, device: Device, tile: MmaBackwardTile) -> Schedule:
        kv_blocks, query_blocks = backward_common.count_blocks(problem, tile.Bc, tile.Br)
        shared_memory = self.shared_memory(problem, tile)
        threads = 32 * tile.warps
        launches = []
        if _uses_components(problem):
            blocks, preswizzle_threads = kv_blocks + query_blocks, _PRESWIZZLE_THREADS
            launches.append(
                Launch.of_gradients(
                    PRESWIZZLED_TILES, "mma_preswizzle_tiles", blocks, preswizzle_threads
                )
            )
        slots = device.sm_count * device.blocks_per_sm(threads, shared_memory, 0)
        chunks = backward_common.query_chunks(
            problem, kv_blocks, ceil_div(problem.seqlen_q, tile.Br), least=slots, wave=slots
        )
        resources = threads, shared_memory, tile.min_blocks
        blocks = chunks.blocks(kv_blocks)
        launches.append(Launch.of_gradients(KEY_GRADIENTS, "mma_gradients", blocks, *resources))
        if problem.gradient_spec.wants("q"):
            launches.append(
                Launch.of_gradients(QUERY_GRADIENTS, "mma_query_gradients", query_blocks, threads)
            )
        sums = self._sums(problem, tile)
        schedule = backward_common.schedule(
            problem, device, launches, sums, self._section(problem, device, tile, slots)
        )
        preswizzled = _preswizzled_bytes(problem, tile, sums) if _uses_components(problem) else 0
        schedule = dataclasses.replace(schedule, workspace=schedule.workspace + preswizzled)
        floats = tile.Bc * sum(_padded_dims(problem, tile))
        return backward_common.with_chunks(schedule, problem, chunks, kv_blocks, 1, floats)

    def _sums(self, problem: Problem, tile: MmaBackwardTile) -> QuerySums:
        gradient = problem.gradient_spec
        return QuerySums(tile.Br, _padded_dims(problem, tile)[0] if gradient.wants("q") else 0)

    def _section(self, problem: Problem, device: Device, tile: MmaBackwardTile, slots: int) -> int:
        """Return the number of query heads whose tiles are interleaved.

        q, dout and the dq accumulator of these heads should fit in half of L2. But with too few
        heads, the KV tiles of a head would wait for each other when the kernel begins.
        """
        has_lists = self.uses_block_mask(problem, tile)
        rows = backward_common.visited_rows(problem, has_lists=has_lists)
        group = problem.heads_q // problem.heads_kv
        row_bytes = (
            problem.head_dim + problem.head_dim_v
        ) * problem.itemsize + 4 * problem.head_dim
        in_l2 = device.l2_cache // 2 // max(1, group * rows * row_bytes)
        steps = group * ceil_div(rows, tile.Br)
        at_once = min(_MAX_CONCURRENT, max(1, steps // _STEPS_PER_TILE))
        if problem.causal:
            at_once = max(1, at_once // 2)
        groups = max(1, problem.batch * problem.heads_kv)
        section = max(1, min(max(in_l2, ceil_div(slots, at_once)), groups))
        # Sections have nearly equal sizes: a last one of few heads would leave most SMs idle.
        return group * ceil_div(groups, ceil_div(groups, section))

    def config(
        self, problem: Problem, tile: MmaBackwardTile, split: Split
    ) -> dict[str, int | bool]:
        gradient = problem.gradient_spec
        dim, dim_v = _padded_dims(problem, tile)
        return {
            **tile_members(tile, "Br Bc warps key_warps columns stages"),
            "paired": bool(tile.paired),
            "dq_row_warps": _sum_row_warps(problem, tile),
            "dq_steps": _dq_steps(problem, tile),
            "padded_dim": dim,
            "padded_dim_v": dim_v,
            "shared_memory": self.shared_memory(problem, tile),
            **{f"wants_{name}": gradient.wants(name) for name in ROWS},
        } | backward_common.config(problem, self._sums(problem, tile))


def _is_wide(problem: Problem) -> bool:
    """Return whether a head dim is too wide for warps that compute all their dq columns at once."""
    return max(problem.head_dim, problem.head_dim_v) > _WIDEST_WHOLE


def _padded_dims(problem: Problem, tile: MmaBackwardTile) -> tuple[int, int]:
    """Return the padded columns of q and k, and of v and dout: multiples of 16 for each warp."""
    dim = _padded_dim(problem, tile, _sum_row_warps(problem, tile))
    return dim, round_up(problem.head_dim_v, 16 * tile.side_warps)


def _padded_dim(problem: Problem, tile: MmaBackwardTile, sum_row_warps: int) -> int:
    """Return the padded head_dim if dq is divided into `sum_row_warps` groups of rows."""
    return round_up(problem.head_dim, 16 * max(tile.side_warps, tile.warps // sum_row_warps))


def _sum_row_warps(problem: Problem, tile: MmaBackwardTile) -> int:
    """Return the number of groups of dq rows; each group is computed by different warps.

    With few groups, warps have many rows and read k less often. For wide heads, twice as many
    groups may need less padding, because fewer warps then divide the columns.
    """
    groups = min(tile.warps, max(1, tile.Br // _SUM_ROWS))
    if not _is_wide(problem):
        return groups
    return min((groups, 2 * groups), key=lambda n: _padded_dim(problem, tile, n))


def _kept_registers(problem: Problem, tile: MmaBackwardTile) -> int:
    """Return the number of registers of a thread that hold dk and dv."""
    return tile.Bc * sum(_padded_dims(problem, tile)) // tile.warps // 32


def _step_registers(problem: Problem, tile: MmaBackwardTile) -> int:
    """Return the number of registers of a thread that hold dq of 16 columns of each warp."""
    return tile.Br // _sum_row_warps(problem, tile) // 2


def _dq_steps(problem: Problem, tile: MmaBackwardTile) -> int:
    """Return the number of 16-column steps of dq that a warp computes at once.

    Wide heads may need several parts, because dk and dv leave too few registers for all steps.
    """
    column_warps = tile.warps // _sum_row_warps(problem, tile)
    steps = _padded_dims(problem, tile)[0] // (16 * column_warps)
    if not _is_wide(problem):
        return steps
    left = MAX_REGISTERS - _OTHER_REGISTERS - _kept_registers(problem, tile)
    if _uses_components(problem):
        left -= _COMPONENT_REGISTERS
    most = max(1, left // _step_registers(problem, tile))
    return max(n for n in range(1, steps + 1) if steps % n == 0 and n <= most)


def _uses_components(problem: Problem) -> bool:
    """Return whether tiles are converted first: float32 to pairs of float16, pre-swizzled."""
    return problem.dtype == "float32"


def _second_units(problem: Problem) -> int:
    """Return how many of P and dS have scale factors of each warp (`refines_p`, `refines_ds`)."""
    score = problem.score
    if score is None or not _uses_components(problem):
        return 0
    return int(score.sinks or score.changes_slope) + int(score.sinks)


def _preswizzled_bytes(problem: Problem, tile: MmaBackwardTile, sums: QuerySums) -> int:
    """Return the size in bytes of all pre-swizzled tiles."""
    layout = problem.layout
    keys = problem.batch * problem.heads_kv * ceil_div(problem.seqlen_k, tile.Bc)
    if layout.packed_k:
        keys = problem.heads_kv * (layout.total_k // tile.Bc + problem.batch)
    row_bytes = sum(_padded_dims(problem, tile)) * problem.itemsize
    query_tile_bytes = tile.Br * (row_bytes + _ROW_STATS_BYTES) + _SCALES_BYTES
    kv_tile_bytes = tile.Bc * row_bytes + _SCALES_BYTES
    return sums.tile_slots(problem) * query_tile_bytes + keys * kv_tile_bytes


def _preferred_tiles(problem: Problem) -> tuple[MmaBackwardTile, ...]:
    """Return tiles from the fastest to the slowest (TFLOP/s on an H200, seqlen 2048 and 8192)."""
    dim = max(problem.head_dim, problem.head_dim_v)
    tile = MmaBackwardTile
    if problem.dtype == "float32":
        if dim <= 64:
            # The first tile reaches 116 and 122 TFLOP/s, the second one 111 and 112.
            return tile(32, 128, 4, 4, min_blocks=2), tile(64, 64, 4, 2, stages=1, min_blocks=2)
        if dim <= 128:
            # The first tile reaches 98 and 106 TFLOP/s, the second one 94 and 100.
            return (
                tile(32, 64, 4, 2, columns=16, stages=1, min_blocks=2),
                tile(64, 64, 8, 4, stages=1),
            )
        # This tile reaches 83 TFLOP/s.
        return (tile(32, 64, 8, 4, columns=16, stages=1),)
    if dim <= 64:
        # The first tile reaches 313 and 325 TFLOP/s, the second one 291 and 308.
        return (
            tile(128, 128, 4, 4, stages=1, min_blocks=2),
            tile(64, 128, 4, 4, min_blocks=2),
            tile(64, 128, 4, 4),
            tile(32, 128, 4, 4),
        )
    if dim <= 128:
        # The first tile reaches 272 and 289 TFLOP/s, the second one 267 and 251.
        return (
            tile(64, 128, 8, 4),
            tile(64, 64, 4, 2, min_blocks=2),
            tile(32, 64, 4, 2, columns=16),
        )
    # The first tile reaches 219 and 243 TFLOP/s; without `paired`, it reaches 207 and 231.
    return (
        tile(64, 64, 8, 2, columns=16, paired=1),
        tile(64, 64, 8, 2, columns=16, stages=1, paired=1),
    )


# Tiles for head dims over 256. If both are 512, dk and dv take 128 registers of a thread in each of
# these tiles. In 16 bits, 32 keys or queries of that size take 64 KiB of shared memory.
_WIDE = (
    MmaBackwardTile(32, 32, 8, 2, columns=8, paired=1),
    MmaBackwardTile(64, 32, 8, 2, columns=16, stages=1, paired=1),
    MmaBackwardTile(32, 32, 8, 2, columns=8, stages=1, paired=1),
    MmaBackwardTile(32, 16, 4, 1, columns=8, stages=1, paired=1),
)
# Tiles for devices with little shared memory.
_SMALL = (
    MmaBackwardTile(32, 32, 4, 2, columns=16, stages=1),
    MmaBackwardTile(32, 16, 2, 1, columns=16, stages=1),
)
