"""Model of the bytes that attention moves from and to device memory, and of the roofline.

The roofline: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model
for Multicore Architectures", 2009. The traffic of the standard and the fused algorithm: Dao et al.,
"FlashAttention", 2022, theorem 2 and its proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cupy_flash.families.contract import ceil_div, round_up
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.problem import Problem

from ..cases.mods import PLAIN, CaseMods
from ..cases.visible import Ints, VisibleKeys


@dataclass(frozen=True)
class Roof:
    """Bounds of a program's rate on a GPU.

    Attributes
    ----------
    peak_flops
        Peak rate of the arithmetic units, in FLOP/s.
    bytes_per_second
        Bandwidth of the device memory in bytes per second.
    """

    peak_flops: float
    bytes_per_second: float

    @property
    def ridge(self) -> float:
        """Intensity in FLOP per byte from which on arithmetic is the bound: peak over bandwidth."""
        return self.peak_flops / self.bytes_per_second

    def attainable(self, intensity: float) -> float:
        """Return the attainable FLOP/s at an intensity: min(peak, bandwidth * intensity)."""
        return min(self.peak_flops, self.bytes_per_second * intensity)

    def bound(self, intensity: float) -> str:
        """Return the bound of the rate at an intensity: "compute" or "memory"."""
        return "compute" if intensity >= self.ridge else "memory"


@dataclass(frozen=True)
class Traffic:
    """Bytes read from and written to device memory.

    Attributes
    ----------
    read, written
        Number of bytes.
    key_value_reads
        Average number of times that the visible keys and values are read; 0 if there are none.
    """

    read: int
    written: int
    key_value_reads: float

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.read + self.written

    def intensity(self, flops: float) -> float:
        """Return the operations per byte; 0 if no bytes are moved."""
        return flops / self.total if self.total else 0.0


@dataclass(frozen=True)
class Schedule:
    """Order of query tiles in a fused kernel (see `kernels_cu/scheduler/tile_coord.cuh`).

    Attributes
    ----------
    Br, Bc
        Numbers of query and key rows of a tile.
    blocks
        Number of thread blocks that run concurrently.
    section_heads
        Number of query heads whose query tiles are interleaved.
    l2_bytes
        Size of the L2 cache in bytes. As in the planner, keys and values use half of it.
    num_splits
        Number of thread blocks over which the keys of a query tile are split.
    workspace
        Bytes of the splits' partial results.
    """

    Br: int
    Bc: int
    blocks: int
    section_heads: int
    l2_bytes: int
    num_splits: int = 1
    workspace: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Schedule:
        """Return the schedule of a plan for a GPU."""
        device = plan.device
        assert device is not None, "the CPU backend has no device memory"
        grid = math.prod(plan.main.grid) if plan.main else 1
        # The plan has 0 splits if all keys are divided evenly over the thread blocks. Then the
        # number of thread blocks per KV head is taken.
        num_splits = plan.num_splits or ceil_div(grid, max(1, count_heads_kv(plan.problem)))
        return cls(
            Br=plan.tile.Br,
            Bc=plan.tile.Bc,
            blocks=max(1, min(grid, device.sm_count * plan.blocks_per_sm())),
            section_heads=plan.schedule.section_heads,
            l2_bytes=device.l2_cache,
            num_splits=num_splits,
            workspace=plan.workspace if num_splits > 1 else 0,
        )


def query_bytes(problem: Problem) -> int:
    """Return the bytes of q."""
    return problem.rows * problem.head_dim * problem.itemsize


def out_bytes(problem: Problem) -> int:
    """Return the bytes of the output."""
    return problem.rows * problem.head_dim_v * problem.itemsize


def row_bytes(problem: Problem) -> int:
    """Return the bytes of a key and its value in one KV head, or of a query and its output."""
    return (problem.head_dim + problem.head_dim_v) * problem.itemsize


def count_heads_kv(problem: Problem) -> int:
    """Return the number of KV heads of the whole batch."""
    return problem.batch * problem.heads_kv


def visible_keys(problem: Problem, mods: CaseMods = PLAIN) -> VisibleKeys:
    """Return the visible keys of a head's queries."""
    return VisibleKeys.of(problem.mask, mods.mod, problem.seqlen_k)


# Range [begin, end) of the keys of a query tile, or of the queries of a key tile.
Range = tuple[int, int]


def tile_ranges(problem: Problem, Br: int, Bc: int, mods: CaseMods = PLAIN) -> list[Range]:
    """Return the keys that each query tile of a head reads, from the first tile to the last.

    Only key tiles with a visible pair count, each as a whole up to the end of the sequence.
    """
    return _in_tiles(visible_keys(problem, mods).tiles(Br), Bc, problem.seqlen_k)


def tile_ranges_of_keys(problem: Problem, Br: int, Bc: int, mods: CaseMods = PLAIN) -> list[Range]:
    """Return the queries that each key tile of a head reads, from the first tile to the last."""
    return _in_tiles(visible_keys(problem, mods).tiles_of_keys(Bc), Br, problem.seqlen_q)


def _in_tiles(result: tuple[Ints, Ints], size: int, length: int) -> list[Range]:
    begins, ends = (places.tolist() for places in result)
    return [
        (begin // size * size, min(length, round_up(end, size))) if end > begin else (0, 0)
        for begin, end in zip(begins, ends, strict=True)
    ]


def length(rows: Range) -> int:
    """Return the number of rows in a range."""
    begin, end = rows
    return end - begin


def _together(rows: Sequence[Range]) -> int:
    """Return the number of rows from the first to the last that any of the tiles reads."""
    read = [each for each in rows if length(each)]
    return max(e for _, e in read) - min(b for b, _ in read) if read else 0


@dataclass(frozen=True)
class _OfPairs:
    """Bias or mask array: the number of heads with matrices of their own, and bytes per element."""

    matrices: int
    itemsize: int

    def bytes_of(self, pairs: int, matrices: int | None = None) -> int:
        """Return the bytes of `pairs` elements in each of `matrices` matrices; None means all."""
        return pairs * self.itemsize * (self.matrices if matrices is None else matrices)


def arrays_of_pairs(problem: Problem, mods: CaseMods) -> list[_OfPairs]:
    heads = {"shared": 1, "heads": problem.heads_q, "batch": problem.batch * problem.heads_q}
    given = ((mods.bias, problem.itemsize), (mods.mask, 1))
    return [_OfPairs(heads[span], itemsize) for span, itemsize in given if span]


def compulsory(problem: Problem, mods: CaseMods = PLAIN) -> Traffic:
    """Return the least possible traffic: q, visible keys, values and biases, and out, each once."""
    visible = visible_keys(problem, mods)
    key_values = count_heads_kv(problem) * visible.keys() * row_bytes(problem)
    pairs = int((visible.ends - visible.begins).sum())
    changed = sum(array.bytes_of(pairs) for array in arrays_of_pairs(problem, mods))
    return Traffic(
        query_bytes(problem) + key_values + changed,
        out_bytes(problem),
        1.0 if key_values else 0.0,
    )


def standard(problem: Problem, mods: CaseMods = PLAIN) -> Traffic:
    """Return the traffic of three kernels with the score matrix in device memory between them.

    S = Q K^T reads q and k and writes S; P = softmax(S) reads S and writes P; O = P V reads P and v
    and writes out. S and P have the inputs' dtype. Even if masks hide most pairs, S and P are
    complete, and masks and score modifications are applied to them. Each product reads its operands
    once, and biases and mask arrays are read once. These assumptions favour the algorithm.
    """
    scores = problem.rows * problem.seqlen_k * problem.itemsize
    key_values = count_heads_kv(problem) * problem.seqlen_k * row_bytes(problem)
    pairs = problem.seqlen_q * problem.seqlen_k
    changed = sum(array.bytes_of(pairs) for array in arrays_of_pairs(problem, mods))
    return Traffic(
        read=query_bytes(problem) + key_values + changed + 2 * scores,
        written=2 * scores + out_bytes(problem),
        key_value_reads=1.0 if key_values else 0.0,
    )


def _fused(
    problem: Problem, mods: CaseMods, key_value_rows: int, workspace: int, changed: int
) -> Traffic:
    """Return the traffic of a fused kernel that reads `key_value_rows` rows of keys and values."""
    visible = count_heads_kv(problem) * visible_keys(problem, mods).keys()
    keys = key_value_rows * row_bytes(problem)
    return Traffic(
        read=query_bytes(problem) + keys + changed + workspace,
        written=out_bytes(problem) + workspace,
        key_value_reads=key_value_rows / visible if visible else 0.0,
    )


def fused_without_cache(problem: Problem, *, Br: int, Bc: int, mods: CaseMods = PLAIN) -> Traffic:
    """Return the traffic of a fused kernel if every query tile reads its keys and values itself.

    This is theorem 2 for an outer loop over queries and an inner loop over keys. Br is as large as
    an on-chip memory of M bytes allows, Br ~ M / head_dim. The keys and values are then read
    seqlen_q / Br times, about seqlen^2 * head_dim^2 / M bytes in all.
    """
    ranges = tile_ranges(problem, Br, Bc, mods)
    heads = problem.batch * problem.heads_q
    pairs = read_pairs(ranges, Br, problem.seqlen_q)
    changed = sum(array.bytes_of(pairs, heads) for array in arrays_of_pairs(problem, mods))
    return _fused(problem, mods, heads * sum(map(length, ranges)), 0, changed)


def fused(problem: Problem, schedule: Schedule, mods: CaseMods = PLAIN) -> Traffic:
    """Return the traffic of this library's fused kernels, with the L2 cache.

    q and out are moved once. The query tiles of `section_heads` heads are interleaved and run from
    the last to the first, `blocks / section_heads` per head at a time. These proceed at the same
    pace from about the same key, so they read a key tile from device memory once. If the keys and
    values of the section's heads fit half the L2 cache, they are read once for all tiles. Otherwise
    they are read once per round of concurrent tiles, from the first to the last key that any of
    these attends to. A bias or mask is read once per section that it is for, or once in all if it
    fits half the cache. Partial results of splits are written and read.
    """
    ranges = tile_ranges(problem, schedule.Br, schedule.Bc, mods)
    rows = streamed_rows(problem, schedule, ranges[::-1], keys_stay=False)
    pairs = read_pairs(ranges, schedule.Br, problem.seqlen_q)
    changed = array_bytes_of_sections(problem, schedule, pairs, mods)
    return _fused(problem, mods, rows, schedule.workspace, changed)


def array_bytes_of_sections(
    problem: Problem, schedule: Schedule, pairs: int, mods: CaseMods
) -> int:
    """Return the bytes of biases and masks that are read, for `pairs` pairs of each head."""
    heads = problem.batch * problem.heads_q
    sections = ceil_div(heads, schedule.section_heads)
    read = 0
    for array in arrays_of_pairs(problem, mods):
        fits = array.bytes_of(pairs) <= schedule.l2_bytes // 2
        read += array.bytes_of(pairs, None if fits else min(heads, array.matrices * sections))
    return read


def read_pairs(ranges: Sequence[Range], size: int, rows: int) -> int:
    """Return the pairs that a head's tiles of `size` rows compute with the rows that they read."""
    own = (min(size, rows - tile * size) for tile in range(len(ranges)))
    return sum(count * length(read) for count, read in zip(own, ranges, strict=True))


def streamed_rows(
    problem: Problem, schedule: Schedule, ranges: Sequence[Range], *, keys_stay: bool
) -> int:
    """Return the rows that consecutive tiles read from device memory, over all heads.

    Parameters
    ----------
    problem, schedule
        Problem and schedule of a kernel.
    ranges
        Rows that each tile of a head reads, in the order in which tiles are computed.
    keys_stay
        Whether the tiles hold keys and read the queries of all heads of their group; otherwise
        they hold queries and read keys.
    """
    group = problem.heads_q // problem.heads_kv
    sections, rest = divmod(problem.batch * problem.heads_q, schedule.section_heads)
    rows = 0
    for count, query_heads in ((sections, schedule.section_heads), (1, rest)):
        key_heads = ceil_div(query_heads, group)
        owners, streamed = (key_heads, query_heads) if keys_stay else (query_heads, key_heads)
        rows += count * streamed * _rows_of_a_head(problem, schedule, ranges, owners, streamed)
    return rows


def _rows_of_a_head(
    problem: Problem,
    schedule: Schedule,
    ranges: Sequence[Range],
    owners: int,
    streamed: int,
) -> int:
    """Return the rows read from device memory for one of the section's heads that tiles read.

    Parameters
    ----------
    owners, streamed
        Numbers of heads in a section: heads that have tiles, and heads whose rows these read.
    """
    if not ranges or not owners:
        return 0
    everything = _together(ranges)
    if streamed * everything * row_bytes(problem) <= schedule.l2_bytes // 2:
        return everything
    count = max(1, schedule.blocks // (owners * schedule.num_splits))
    return sum(_together(ranges[i : i + count]) for i in range(0, len(ranges), count))
