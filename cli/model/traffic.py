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


def seen_keys(problem: Problem, rows: int) -> int:
    """Keys that the first `rows` queries see between them."""
    return problem.mask.end(rows - 1) if rows else 0


def tile_keys(problem: Problem, Br: int, Bc: int) -> list[int]:
    """Keys that each query tile of a head reads, from the first tile to the last.

    Only tiles of keys of which a pair is seen count, each whole up to the end of the sequence.
    """
    ends = (
        min((tile + 1) * Br, problem.seqlen_q) for tile in range(ceil_div(problem.seqlen_q, Br))
    )
    return [min(problem.seqlen_k, round_up(seen_keys(problem, end), Bc)) for end in ends]


def compulsory(problem: Problem) -> Traffic:
    """What no algorithm does without: q, the keys and values that are seen, and out, once each."""
    key_values = _heads_kv(problem) * seen_keys(problem, problem.seqlen_q) * _key_row_bytes(problem)
    return Traffic(
        _query_bytes(problem) + key_values, _out_bytes(problem), 1.0 if key_values else 0.0
    )


def standard(problem: Problem) -> Traffic:
    """Three kernels with the score matrix in device memory between them.

    S = Q K^T reads q and k and writes S; P = softmax(S) reads S and writes P; O = P V reads P and v
    and writes out. S and P have the inputs' dtype and are whole also when causal: the mask is
    applied to them. A product reads each operand once. This flatters the algorithm.
    """
    scores = problem.rows * problem.seqlen_k * problem.itemsize
    key_values = _heads_kv(problem) * problem.seqlen_k * _key_row_bytes(problem)
    return Traffic(
        read=_query_bytes(problem) + key_values + 2 * scores,
        written=2 * scores + _out_bytes(problem),
        key_value_reads=1.0 if key_values else 0.0,
    )


def _fused(problem: Problem, key_value_rows: int, workspace: int) -> Traffic:
    """A fused kernel that reads so many rows of keys and values from device memory."""
    seen = _heads_kv(problem) * seen_keys(problem, problem.seqlen_q)
    return Traffic(
        read=_query_bytes(problem) + key_value_rows * _key_row_bytes(problem) + workspace,
        written=_out_bytes(problem) + workspace,
        key_value_reads=key_value_rows / seen if seen else 0.0,
    )


def fused_without_cache(problem: Problem, *, Br: int, Bc: int) -> Traffic:
    """A fused kernel where every query tile of every head reads its keys and values itself.

    That is theorem 2 for a loop over the queries outside and the keys inside: with Br as large as
    an on-chip memory of M bytes allows, Br ~ M / head_dim, the keys and values are read
    seqlen_q / Br times, some seqlen^2 * head_dim^2 / M bytes in all.
    """
    rows = problem.batch * problem.heads_q * sum(tile_keys(problem, Br, Bc))
    return _fused(problem, rows, 0)


def fused(problem: Problem, schedule: Schedule) -> Traffic:
    """Our fused kernels: q and out once, keys and values as often as the L2 cache makes them.

    The query tiles of `section_heads` heads are interleaved, and go from the last to the first, so
    that `blocks / section_heads` tiles of each head run at the same time. These begin at the same
    key and go on at the same pace: they read a tile of keys from device memory once. If the keys
    and values of the section's heads fit half the L2 cache together, they are read once for all
    tiles; if not, once for every round of tiles that run together, as far as the longest of them
    sees. Partial results of splits are written and read.
    """
    keys = tile_keys(problem, schedule.Br, schedule.Bc)[::-1]
    group = problem.heads_q // problem.heads_kv
    heads = problem.batch * problem.heads_q
    sections, rest = divmod(heads, schedule.section_heads)
    rows = 0
    for count, section_heads in ((sections, schedule.section_heads), (1, rest)):
        heads_kv = ceil_div(section_heads, group)
        rows += count * heads_kv * _rows_of_a_head(problem, schedule, keys, section_heads, heads_kv)
    return _fused(problem, rows, schedule.workspace)


def _rows_of_a_head(
    problem: Problem, schedule: Schedule, keys: Sequence[int], section_heads: int, heads_kv: int
) -> int:
    """Rows of keys read from device memory for one of the section's key/value heads."""
    if not keys or not section_heads:
        return 0
    if heads_kv * keys[0] * _key_row_bytes(problem) <= schedule.l2_bytes // 2:
        return keys[0]
    together = max(1, schedule.blocks // (section_heads * schedule.num_splits))
    return sum(keys[::together])
