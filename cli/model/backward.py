"""The model of gradients: what kernels that sum up rows of dq, dk and dv move and compute.

The tiles of one kernel hold keys, by which queries and rows of dout pass, and sum up dk and dv;
those of another hold queries, by which keys and values pass, and sum up dq. Each finds the scores
anew. A kernel before these reads out and dout, and leaves a few numbers for each query.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cupy_flash.families.schedule import KEY_GRADIENTS, QUERY_GRADIENTS
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.problem import Problem

from ..cases.mods import PLAIN, Mods
from . import traffic
from .traffic import Range, Schedule, Traffic

# Products over head_dim and over head_dim_v: s = q k', dp = dout v', dv = p' dout, and dq and dk.
USEFUL = (3, 2)
_OF_KERNEL = {KEY_GRADIENTS: (2, 2), QUERY_GRADIENTS: (2, 1)}
# Arithmetic besides, for each pair: an exponential's argument, and (dp - delta) p.
_PAIR_FLOPS = 4


@dataclass(frozen=True)
class Kernel:
    """One kernel of a backward pass.

    Attributes
    ----------
    schedule
        Its tiles, of Br queries and Bc keys, and how many run at the same time.
    keys_stay
        Whether a thread block holds keys; else it holds queries.
    products
        Products over head_dim, and over head_dim_v.
    """

    schedule: Schedule
    keys_stay: bool
    products: tuple[int, int]

    def ranges(self, problem: Problem, mods: Mods) -> list[Range]:
        """What each tile of a head reads."""
        of = traffic.tile_ranges_of_keys if self.keys_stay else traffic.tile_ranges
        return of(problem, self.schedule.Br, self.schedule.Bc, mods)

    def pairs(self, problem: Problem, ranges: Sequence[Range]) -> int:
        """Pairs of a head that its tiles go through."""
        schedule = self.schedule
        if self.keys_stay:
            return traffic.read_pairs(ranges, schedule.Bc, problem.seqlen_k)
        return traffic.read_pairs(ranges, schedule.Br, problem.seqlen_q)


def kernels_of(plan: Plan) -> list[Kernel]:
    """The kernels of a plan that go through pairs."""
    device, tile = plan.device, plan.tile
    assert device is not None, "the CPU backend has no device memory"
    # What only adds up or rounds sums that another kernel made holds no tile.
    launches = [
        launch
        for launch in plan.launches
        if launch is plan.main or (launch.entry in _OF_KERNEL and launch.shared_memory)
    ]
    entries = [launch.entry for launch in launches]
    found = []
    for launch in launches:
        keys_stay = launch.entry != QUERY_GRADIENTS
        products = _OF_KERNEL[launch.entry] if QUERY_GRADIENTS in entries else USEFUL
        resident = device.blocks_per_sm(launch.threads, launch.shared_memory, 0)
        schedule = Schedule(
            Br=tile.Br,
            Bc=tile.Bc,
            blocks=max(1, min(math.prod(launch.grid), device.sm_count * resident)),
            section_heads=plan.schedule.section_heads,
            l2_bytes=device.l2_cache,
            workspace=plan.workspace,
        )
        found.append(Kernel(schedule, keys_stay, products))
    return found


def usual_kernels(schedule: Schedule) -> list[Kernel]:
    """One of dk and dv and one of dq, on a GPU that has no kernels."""
    of_keys, of_queries = _OF_KERNEL[KEY_GRADIENTS], _OF_KERNEL[QUERY_GRADIENTS]
    return [Kernel(schedule, True, of_keys), Kernel(schedule, False, of_queries)]


def _width(problem: Problem, products: tuple[int, int]) -> int:
    return products[0] * problem.head_dim + products[1] * problem.head_dim_v


def product_flops(problem: Problem, kernels: Sequence[Kernel], pairs: float) -> float:
    """Of the products of all kernels, of so many pairs that are seen, over all heads."""
    return 2.0 * pairs * sum(_width(problem, kernel.products) for kernel in kernels)


def recomputation(problem: Problem, kernels: Sequence[Kernel]) -> float:
    """How many times as much as counts is computed."""
    computed = sum(_width(problem, kernel.products) for kernel in kernels)
    return computed / _width(problem, USEFUL)


def other_flops(problem: Problem, kernels: Sequence[Kernel], pairs: float) -> float:
    """Arithmetic besides products, of so many pairs that are seen, over all heads."""
    return len(kernels) * _PAIR_FLOPS * pairs + 2 * problem.rows * problem.head_dim_v


def compulsory(problem: Problem, mods: Mods = PLAIN) -> Traffic:
    """What no algorithm does without: all inputs that are seen read once, gradients written."""
    forward = traffic.compulsory(problem, mods)
    # Of out and dout.
    of_rows = 2 * traffic.out_bytes(problem)
    return dataclasses.replace(forward, read=forward.read + of_rows, written=_written(problem))


def standard(problem: Problem) -> Traffic:
    """Products with matrices of scores in device memory between them; forward left P there.

    dv = P' dout; dP = dout v'; dS = P (dP - rowsum(dout out)); dq = dS k; dk = dS' q. A product
    reads each operand once, which flatters the algorithm, and its P has all biases in it.
    """
    scores = problem.rows * problem.seqlen_k * problem.itemsize
    key_values = _key_values(problem)
    # dout for dv, for dP and with out for the sums of rows.
    of_rows = traffic.query_bytes(problem) + 4 * traffic.out_bytes(problem)
    return Traffic(
        read=of_rows + key_values + 5 * scores,
        written=2 * scores + _written(problem),
        key_value_reads=1.0 if key_values else 0.0,
    )


def fused(problem: Problem, kernels: Sequence[Kernel], mods: Mods = PLAIN) -> Traffic:
    """Our kernels, whose rows that pass by come from memory as often as the L2 makes them.

    See `traffic.fused`: the tiles of a section's heads that run at the same time read a row once.
    """
    rows, arrays = [], 0
    for kernel in kernels:
        ranges = kernel.ranges(problem, mods)
        schedule, keys_stay = kernel.schedule, kernel.keys_stay
        rows.append(traffic.streamed_rows(problem, schedule, ranges, keys_stay=keys_stay))
        pairs = kernel.pairs(problem, ranges)
        arrays += traffic.array_bytes_of_sections(problem, schedule, pairs, mods)
    return _of_kernels(problem, mods, kernels, rows, arrays)


def fused_without_cache(problem: Problem, kernels: Sequence[Kernel], mods: Mods = PLAIN) -> Traffic:
    """Where every tile of every head reads what passes by itself."""
    rows, arrays = [], 0
    heads = problem.batch * problem.heads_q
    for kernel in kernels:
        ranges = kernel.ranges(problem, mods)
        rows.append(heads * sum(map(traffic.length, ranges)))
        pairs = kernel.pairs(problem, ranges)
        arrays += sum(a.bytes_of(pairs, heads) for a in traffic.arrays_of_pairs(problem, mods))
    return _of_kernels(problem, mods, kernels, rows, arrays)


def _of_kernels(
    problem: Problem, mods: Mods, kernels: Sequence[Kernel], rows: Sequence[int], arrays: int
) -> Traffic:
    """Kernels past which so many rows go, and which read so many bytes of biases and masks."""
    workspace = max((kernel.schedule.workspace for kernel in kernels), default=0)
    read, key_values = 2 * traffic.out_bytes(problem) + arrays, 0
    for kernel, streamed in zip(kernels, rows, strict=True):
        passing = streamed * traffic.row_bytes(problem)
        own_queries = traffic.query_bytes(problem) + traffic.out_bytes(problem)
        read += passing + (_key_values(problem) if kernel.keys_stay else own_queries) + workspace
        key_values += _key_values(problem) if kernel.keys_stay else passing
    seen = traffic.count_heads_kv(problem) * traffic.seen_of(problem, mods).keys()
    return Traffic(
        read=read,
        written=_written(problem) + workspace,
        key_value_reads=key_values / (seen * traffic.row_bytes(problem)) if seen else 0.0,
    )


def _key_values(problem: Problem) -> int:
    """Bytes of all keys and values."""
    return traffic.count_heads_kv(problem) * problem.seqlen_k * traffic.row_bytes(problem)


def _written(problem: Problem) -> int:
    """Bytes of dq, dk and dv."""
    return traffic.query_bytes(problem) + _key_values(problem)
