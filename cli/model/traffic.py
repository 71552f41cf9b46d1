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
from ..cases.seen import Seen


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
    """How a fused kernel goes through the query tiles (see `kernels_cu/grid/schedule.cuh`).

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
        num_splits = plan.num_splits or ceil_div(grid, max(1, _heads_kv(plan.problem)))
        return cls(
            Br=plan.tile.Br,
            Bc=plan.tile.Bc,
            blocks=max(1, min(grid, device.sm_count * plan.blocks_per_sm())),
            section_heads=plan.schedule.section_heads,
            l2_bytes=device.l2_cache,
            num_splits=num_splits,
            workspace=plan.workspace if num_splits > 1 else 0,
        )


def _query_bytes(problem: Problem) -> int:
    return problem.rows * problem.head_dim * problem.itemsize


def _out_bytes(problem: Problem) -> int:
    return problem.rows * problem.head_dim_v * problem.itemsize


def _key_row_bytes(problem: Problem) -> int:
    """Of a key and its value, of one key/value head."""
    return (problem.head_dim + problem.head_dim_v) * problem.itemsize


def _heads_kv(problem: Problem) -> int:
    """Key/value heads of the whole batch."""
    return problem.batch * problem.heads_kv


def seen_of(problem: Problem, mods: Mods = PLAIN) -> Seen:
    """Which keys the queries of a head see."""
    return Seen.of(problem.mask, mods.mod, problem.seqlen_k)


# Keys [begin, end) of a tile of queries.
_Range = tuple[int, int]


def tile_ranges(problem: Problem, Br: int, Bc: int, mods: Mods = PLAIN) -> list[_Range]:
    """Keys that each query tile of a head reads, from the first tile to the last.

    Only tiles of keys of which a pair is seen count, each whole up to the end of the sequence.
    """
    begins, ends = (keys.tolist() for keys in seen_of(problem, mods).tiles(Br))
    return [
        (begin // Bc * Bc, min(problem.seqlen_k, round_up(end, Bc))) if end > begin else (0, 0)
        for begin, end in zip(begins, ends, strict=True)
    ]


def _length(keys: _Range) -> int:
    begin, end = keys
    return end - begin


def _together(keys: Sequence[_Range]) -> int:
    """Keys from the first that any of the tiles reads to the last."""
    read = [each for each in keys if _length(each)]
    return max(e for _, e in read) - min(b for b, _ in read) if read else 0


@dataclass(frozen=True)
class _OfPairs:
    """A bias or a mask in an array: of how many heads it has rows of their own, and an element."""

    matrices: int
    itemsize: int

    def bytes_of(self, pairs: int, matrices: int | None = None) -> int:
        """Of so many pairs in each of its matrices, or in so many readings of one."""
        return pairs * self.itemsize * (self.matrices if matrices is None else matrices)


def _arrays_of_pairs(problem: Problem, mods: Mods) -> list[_OfPairs]:
    heads = {"shared": 1, "heads": problem.heads_q, "batch": problem.batch * problem.heads_q}
    given = ((mods.bias, problem.itemsize), (mods.mask, 1))
    return [_OfPairs(heads[span], itemsize) for span, itemsize in given if span]


def compulsory(problem: Problem, mods: Mods = PLAIN) -> Traffic:
    """What no algorithm does without: q, what is seen of keys, values and biases, and out, once."""
    seen = seen_of(problem, mods)
    key_values = _heads_kv(problem) * seen.keys() * _key_row_bytes(problem)
    pairs = int((seen.ends - seen.begins).sum())
    changed = sum(array.bytes_of(pairs) for array in _arrays_of_pairs(problem, mods))
    return Traffic(
        _query_bytes(problem) + key_values + changed,
        _out_bytes(problem),
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
    key_values = _heads_kv(problem) * problem.seqlen_k * _key_row_bytes(problem)
    pairs = problem.seqlen_q * problem.seqlen_k
    changed = sum(array.bytes_of(pairs) for array in _arrays_of_pairs(problem, mods))
    return Traffic(
        read=_query_bytes(problem) + key_values + changed + 2 * scores,
        written=2 * scores + _out_bytes(problem),
        key_value_reads=1.0 if key_values else 0.0,
    )


def _fused(
    problem: Problem, mods: Mods, key_value_rows: int, workspace: int, changed: int
) -> Traffic:
    """A fused kernel that reads so many rows of keys and values, and bytes of biases and masks."""
    seen = _heads_kv(problem) * seen_of(problem, mods).keys()
    keys = key_value_rows * _key_row_bytes(problem)
    return Traffic(
        read=_query_bytes(problem) + keys + changed + workspace,
        written=_out_bytes(problem) + workspace,
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
    pairs = _read_pairs(problem, ranges, Br)
    changed = sum(array.bytes_of(pairs, heads) for array in _arrays_of_pairs(problem, mods))
    return _fused(problem, mods, heads * sum(map(_length, ranges)), 0, changed)


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
    group = problem.heads_q // problem.heads_kv
    heads = problem.batch * problem.heads_q
    sections, rest = divmod(heads, schedule.section_heads)
    rows = 0
    for count, section_heads in ((sections, schedule.section_heads), (1, rest)):
        heads_kv = ceil_div(section_heads, group)
        of_head = _rows_of_a_head(problem, schedule, ranges[::-1], section_heads, heads_kv)
        rows += count * heads_kv * of_head
    pairs = _read_pairs(problem, ranges, schedule.Br)
    changed = 0
    for array in _arrays_of_pairs(problem, mods):
        in_sections = min(heads, array.matrices * (sections + bool(rest)))
        fits = array.bytes_of(pairs) <= schedule.l2_bytes // 2
        changed += array.bytes_of(pairs, None if fits else in_sections)
    return _fused(problem, mods, rows, schedule.workspace, changed)


def _read_pairs(problem: Problem, ranges: Sequence[_Range], Br: int) -> int:
    """Pairs of the tiles of a head of which its keys are read."""
    rows = (min(Br, problem.seqlen_q - tile * Br) for tile in range(len(ranges)))
    return sum(count * _length(keys) for count, keys in zip(rows, ranges, strict=True))


def _rows_of_a_head(
    problem: Problem,
    schedule: Schedule,
    ranges: Sequence[_Range],
    section_heads: int,
    heads_kv: int,
) -> int:
    """Rows of keys read from device memory for one of the section's key/value heads."""
    if not ranges or not section_heads:
        return 0
    everything = _together(ranges)
    if heads_kv * everything * _key_row_bytes(problem) <= schedule.l2_bytes // 2:
        return everything
    count = max(1, schedule.blocks // (section_heads * schedule.num_splits))
    return sum(_together(ranges[i : i + count]) for i in range(0, len(ranges), count))
