"""A model of how many bytes attention moves from and to device memory, and the roofline over it.

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

from ..cases.mods import PLAIN, Mods
from ..cases.seen import Ints, Seen


@dataclass(frozen=True)
class Roof:
    """What bounds the rate of a program on a GPU.

    Attributes
    ----------
    peak_flops
        Floating-point operations per second that the units can do.
    bytes_per_second
        Bandwidth of the device memory.
    """

    peak_flops: float
    bytes_per_second: float

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on the units are the bound: peak over bandwidth."""
        return self.peak_flops / self.bytes_per_second

    def attainable(self, intensity: float) -> float:
        """FLOP/s at so many FLOP per byte: min(peak, bandwidth * intensity)."""
        return min(self.peak_flops, self.bytes_per_second * intensity)

    def bound(self, intensity: float) -> str:
        """What holds the rate back."""
        return "compute" if intensity >= self.ridge else "memory"


@dataclass(frozen=True)
class Traffic:
    """Bytes read from and written to device memory.

    Attributes
    ----------
    read, written
        Bytes.
    key_value_reads
        How often the keys and values that any query sees are read; 0 where there are none.
    """

    read: int
    written: int
    key_value_reads: float

    @property
    def total(self) -> int:
        """Bytes both ways."""
        return self.read + self.written

    def intensity(self, flops: float) -> float:
        """Operations per byte; 0 where nothing is moved."""
        return flops / self.total if self.total else 0.0


@dataclass(frozen=True)
class Schedule:
    """How a fused kernel goes through the query tiles (see `kernels_cu/scheduler/tile_coord.cuh`).

    Attributes
    ----------
    Br, Bc
        Query and key rows of a tile.
    blocks
        Thread blocks that run at the same time.
    section_heads
        Query heads whose query tiles are interleaved.
    l2_bytes
        Size of the L2 cache, half of which is taken to hold keys and values, as the planner does.
    num_splits
        Thread blocks that share the keys of a query tile.
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
        """That of a plan for a GPU."""
        device = plan.device
        assert device is not None, "the CPU backend has no device memory"
        grid = math.prod(plan.main.grid) if plan.main else 1
        # Where blocks take equal shares of all keys, so many of them meet in a key/value head.
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
    """Bytes of q."""
    return problem.rows * problem.head_dim * problem.itemsize


def out_bytes(problem: Problem) -> int:
    """Bytes of the output."""
    return problem.rows * problem.head_dim_v * problem.itemsize


def row_bytes(problem: Problem) -> int:
    """Of a key and its value, of one key/value head; or of a query and its output."""
    return (problem.head_dim + problem.head_dim_v) * problem.itemsize


def count_heads_kv(problem: Problem) -> int:
    """Key/value heads of the whole batch."""
    return problem.batch * problem.heads_kv


def seen_of(problem: Problem, mods: Mods = PLAIN) -> Seen:
    """Which keys the queries of a head see."""
    return Seen.of(problem.mask, mods.mod, problem.seqlen_k)


# Keys [begin, end) of a tile of queries, or queries of a tile of keys.
Range = tuple[int, int]


def tile_ranges(problem: Problem, Br: int, Bc: int, mods: Mods = PLAIN) -> list[Range]:
    """Keys that each query tile of a head reads, from the first tile to the last.

    Only tiles of keys of which a pair is seen count, each whole up to the end of the sequence.
    """
    return _in_tiles(seen_of(problem, mods).tiles(Br), Bc, problem.seqlen_k)


def tile_ranges_of_keys(problem: Problem, Br: int, Bc: int, mods: Mods = PLAIN) -> list[Range]:
    """Queries that each tile of keys of a head reads, likewise."""
    return _in_tiles(seen_of(problem, mods).tiles_of_keys(Bc), Br, problem.seqlen_q)


def _in_tiles(found: tuple[Ints, Ints], size: int, length: int) -> list[Range]:
    begins, ends = (places.tolist() for places in found)
    return [
        (begin // size * size, min(length, round_up(end, size))) if end > begin else (0, 0)
        for begin, end in zip(begins, ends, strict=True)
    ]


def length(rows: Range) -> int:
    """How many rows."""
    begin, end = rows
    return end - begin


def _together(rows: Sequence[Range]) -> int:
    """Rows from the first that any of the tiles reads to the last."""
    read = [each for each in rows if length(each)]
    return max(e for _, e in read) - min(b for b, _ in read) if read else 0


@dataclass(frozen=True)
class _OfPairs:
    """A bias or a mask in an array: of how many heads it has rows of their own, and an element."""

    matrices: int
    itemsize: int

    def bytes_of(self, pairs: int, matrices: int | None = None) -> int:
        """Of so many pairs in each of its matrices, or in so many readings of one."""
        return pairs * self.itemsize * (self.matrices if matrices is None else matrices)


def arrays_of_pairs(problem: Problem, mods: Mods) -> list[_OfPairs]:
    heads = {"shared": 1, "heads": problem.heads_q, "batch": problem.batch * problem.heads_q}
    given = ((mods.bias, problem.itemsize), (mods.mask, 1))
    return [_OfPairs(heads[span], itemsize) for span, itemsize in given if span]


def compulsory(problem: Problem, mods: Mods = PLAIN) -> Traffic:
    """What no algorithm does without: q, what is seen of keys, values and biases, and out, once."""
    seen = seen_of(problem, mods)
    key_values = count_heads_kv(problem) * seen.keys() * row_bytes(problem)
    pairs = int((seen.ends - seen.begins).sum())
    changed = sum(array.bytes_of(pairs) for array in arrays_of_pairs(problem, mods))
    return Traffic(
        query_bytes(problem) + key_values + changed,
        out_bytes(problem),
        1.0 if key_values else 0.0,
    )


def standard(problem: Problem, mods: Mods = PLAIN) -> Traffic:
    """Three kernels with the score matrix in device memory between them.

    S = Q K^T reads q and k and writes S; P = softmax(S) reads S and writes P; O = P V reads P and v
    and writes out. S and P have the inputs' dtype and are whole also where masks hide much: these
    are applied to them, as is what changes scores. A product reads each operand once, and so are
    biases and masks in arrays. This flatters the algorithm.
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
    problem: Problem, mods: Mods, key_value_rows: int, workspace: int, changed: int
) -> Traffic:
    """A fused kernel that reads so many rows of keys and values, and bytes of biases and masks."""
    seen = count_heads_kv(problem) * seen_of(problem, mods).keys()
    keys = key_value_rows * row_bytes(problem)
    return Traffic(
        read=query_bytes(problem) + keys + changed + workspace,
        written=out_bytes(problem) + workspace,
        key_value_reads=key_value_rows / seen if seen else 0.0,
    )


def fused_without_cache(problem: Problem, *, Br: int, Bc: int, mods: Mods = PLAIN) -> Traffic:
    """A fused kernel where every query tile of every head reads its keys and values itself.

    That is theorem 2 for a loop over the queries outside and the keys inside: with Br as large as
    an on-chip memory of M bytes allows, Br ~ M / head_dim, the keys and values are read
    seqlen_q / Br times, some seqlen^2 * head_dim^2 / M bytes in all.
    """
    ranges = tile_ranges(problem, Br, Bc, mods)
    heads = problem.batch * problem.heads_q
    pairs = read_pairs(ranges, Br, problem.seqlen_q)
    changed = sum(array.bytes_of(pairs, heads) for array in arrays_of_pairs(problem, mods))
    return _fused(problem, mods, heads * sum(map(length, ranges)), 0, changed)


def fused(problem: Problem, schedule: Schedule, mods: Mods = PLAIN) -> Traffic:
    """Our fused kernels: q and out once, keys and values as often as the L2 cache makes them.

    The query tiles of `section_heads` heads are interleaved, and go from the last to the first, so
    that `blocks / section_heads` tiles of each head run at the same time. These begin at about the
    same key and go on at the same pace: they read a tile of keys from device memory once. If the
    keys and values of the section's heads fit half the L2 cache together, they are read once for
    all tiles; if not, once for every round of tiles that run together, from the first key that one
    of them sees to the last. A bias or mask is read once for each section that it is of, or once
    for all if it fits half the cache. Partial results of splits are written and read.
    """
    ranges = tile_ranges(problem, schedule.Br, schedule.Bc, mods)
    rows = streamed_rows(problem, schedule, ranges[::-1], keys_stay=False)
    pairs = read_pairs(ranges, schedule.Br, problem.seqlen_q)
    changed = array_bytes_of_sections(problem, schedule, pairs, mods)
    return _fused(problem, mods, rows, schedule.workspace, changed)


def array_bytes_of_sections(problem: Problem, schedule: Schedule, pairs: int, mods: Mods) -> int:
    """Bytes of biases and masks that are read, of so many pairs of a head."""
    heads = problem.batch * problem.heads_q
    sections = ceil_div(heads, schedule.section_heads)
    read = 0
    for array in arrays_of_pairs(problem, mods):
        fits = array.bytes_of(pairs) <= schedule.l2_bytes // 2
        read += array.bytes_of(pairs, None if fits else min(heads, array.matrices * sections))
    return read


def read_pairs(ranges: Sequence[Range], size: int, rows: int) -> int:
    """Pairs of the tiles of a head, of so many of its rows, and what they read."""
    own = (min(size, rows - tile * size) for tile in range(len(ranges)))
    return sum(count * length(read) for count, read in zip(own, ranges, strict=True))


def streamed_rows(
    problem: Problem, schedule: Schedule, ranges: Sequence[Range], *, keys_stay: bool
) -> int:
    """Rows that tiles read from device memory one after the other, over all heads.

    Parameters
    ----------
    problem, schedule
        Of a kernel.
    ranges
        Rows that each tile of a head reads, in the order in which tiles are taken.
    keys_stay
        Whether the tiles are of keys, and the queries of all heads that share these pass by; else
        they are of queries.
    """
    group = problem.heads_q // problem.heads_kv
    sections, rest = divmod(problem.batch * problem.heads_q, schedule.section_heads)
    rows = 0
    for count, of_queries in ((sections, schedule.section_heads), (1, rest)):
        of_keys = ceil_div(of_queries, group)
        owners, streamed = (of_keys, of_queries) if keys_stay else (of_queries, of_keys)
        rows += count * streamed * _rows_of_a_head(problem, schedule, ranges, owners, streamed)
    return rows


def _rows_of_a_head(
    problem: Problem,
    schedule: Schedule,
    ranges: Sequence[Range],
    owners: int,
    streamed: int,
) -> int:
    """Rows read from device memory for one of the section's heads whose rows pass by.

    Parameters
    ----------
    owners, streamed
        Heads of a section: that have tiles of their own, and whose rows these read.
    """
    if not ranges or not owners:
        return 0
    everything = _together(ranges)
    if streamed * everything * row_bytes(problem) <= schedule.l2_bytes // 2:
        return everything
    count = max(1, schedule.blocks // (owners * schedule.num_splits))
    return sum(_together(ranges[i : i + count]) for i in range(0, len(ranges), count))
