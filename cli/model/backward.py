"""Model of backward kernels: the bytes and operations of the kernels that compute dq, dk and dv.

For each key tile, one kernel iterates over queries and rows of dout, and accumulates dk and dv. For
each query tile, another iterates over keys and values, and accumulates dq. Each recomputes the
scores. A preprocess kernel reads out and dout, and writes a few numbers for each query row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cupy_flash.families.schedule import KEY_GRADIENTS, QUERY_GRADIENTS
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.problem import Problem

from ..cases.mods import PLAIN, CaseMods
from . import traffic
from .traffic import Range, Schedule, Traffic

# Products over head_dim (s = q k', dq, dk) and over head_dim_v (dp = dout v', dv = p' dout).
USEFUL = (3, 2)
_PRODUCTS = {KEY_GRADIENTS: (2, 2), QUERY_GRADIENTS: (2, 1)}
# Other operations per pair: an exponential's argument, and (dp - delta) p.
_PAIR_FLOPS = 4


@dataclass(frozen=True)
class Kernel:
    """One kernel of a backward pass.

    Attributes
    ----------
    schedule
        Tiles of Br queries and Bc keys, and the number of thread blocks that run concurrently.
    keys_stay
        Whether a thread block holds a key tile; otherwise it holds a query tile.
    products
        Numbers of products over head_dim and over head_dim_v.
    """

    schedule: Schedule
    keys_stay: bool
    products: tuple[int, int]

    def ranges(self, problem: Problem, mods: CaseMods) -> list[Range]:
        """Return the range of rows that each tile of a head reads."""
        of = traffic.tile_ranges_of_keys if self.keys_stay else traffic.tile_ranges
        return of(problem, self.schedule.Br, self.schedule.Bc, mods)

    def pairs(self, problem: Problem, ranges: Sequence[Range]) -> int:
        """Return the number of pairs of a head that the kernel's tiles compute."""
        schedule = self.schedule
        if self.keys_stay:
            return traffic.read_pairs(ranges, schedule.Bc, problem.seqlen_k)
        return traffic.read_pairs(ranges, schedule.Br, problem.seqlen_q)


def kernels_of(plan: Plan) -> list[Kernel]:
    """Return the kernels of a plan that compute on (query, key) pairs."""
    device, tile = plan.device, plan.tile
    assert device is not None, "the CPU backend has no device memory"
    # Kernels that only add or round the sums of another kernel hold no tile in shared memory.
    launches = [
        launch
        for launch in plan.launches
        if launch is plan.main or (launch.entry in _PRODUCTS and launch.shared_memory)
    ]
    entries = [launch.entry for launch in launches]
    result = []
    for launch in launches:
        keys_stay = launch.entry != QUERY_GRADIENTS
        products = _PRODUCTS[launch.entry] if QUERY_GRADIENTS in entries else USEFUL
        resident = device.blocks_per_sm(launch.threads, launch.shared_memory, 0)
        schedule = Schedule(
            Br=tile.Br,
            Bc=tile.Bc,
            blocks=max(1, min(math.prod(launch.grid), device.sm_count * resident)),
            section_heads=plan.schedule.section_heads,
            l2_bytes=device.l2_cache,
            workspace=plan.workspace,
        )
        result.append(Kernel(schedule, keys_stay, products))
    return result


def usual_kernels(schedule: Schedule) -> list[Kernel]:
    """Return a kernel for dk and dv and one for dq, for a GPU without kernels of this library."""
    key_products, query_products = _PRODUCTS[KEY_GRADIENTS], _PRODUCTS[QUERY_GRADIENTS]
    return [Kernel(schedule, True, key_products), Kernel(schedule, False, query_products)]


def _width(problem: Problem, products: tuple[int, int]) -> int:
    return products[0] * problem.head_dim + products[1] * problem.head_dim_v


def product_flops(problem: Problem, kernels: Sequence[Kernel], pairs: float) -> float:
    """Return the operations of all products of all kernels, for visible pairs over all heads."""
    return 2.0 * pairs * sum(_width(problem, kernel.products) for kernel in kernels)


def recomputation(problem: Problem, kernels: Sequence[Kernel]) -> float:
    """Return the ratio of the FLOPs that are computed to the FLOPs that count."""
    computed = sum(_width(problem, kernel.products) for kernel in kernels)
    return computed / _width(problem, USEFUL)


def other_flops(problem: Problem, kernels: Sequence[Kernel], pairs: float) -> float:
    """Return the operations other than products, for visible pairs over all heads."""
    return len(kernels) * _PAIR_FLOPS * pairs + 2 * problem.rows * problem.head_dim_v


def compulsory(problem: Problem, mods: CaseMods = PLAIN) -> Traffic:
    """Return the least possible traffic: visible inputs read once, gradients written once."""
    forward = traffic.compulsory(problem, mods)
    # Bytes of out and dout.
    of_rows = 2 * traffic.out_bytes(problem)
    return dataclasses.replace(forward, read=forward.read + of_rows, written=_written(problem))


def standard(problem: Problem) -> Traffic:
    """Return the traffic of separate products, with score matrices in device memory between them.

    dv = P' dout; dP = dout v'; dS = P (dP - rowsum(dout out)); dq = dS k; dk = dS' q. P is left by
    the forward pass, with all biases in it. A product reads each operand once, an assumption that
    favours this algorithm.
    """
    scores = problem.rows * problem.seqlen_k * problem.itemsize
    key_values = _key_values(problem)
    # dout is read for dv, for dP and, with out, for the row sums.
    of_rows = traffic.query_bytes(problem) + 4 * traffic.out_bytes(problem)
    return Traffic(
        read=of_rows + key_values + 5 * scores,
        written=2 * scores + _written(problem),
        key_value_reads=1.0 if key_values else 0.0,
    )


def fused(problem: Problem, kernels: Sequence[Kernel], mods: CaseMods = PLAIN) -> Traffic:
    """Return the traffic of this library's kernels, with the L2 cache.

    As in `traffic.fused`, concurrent tiles of a section's heads read a row from memory once.
    """
    rows, arrays = [], 0
    for kernel in kernels:
        ranges = kernel.ranges(problem, mods)
        schedule, keys_stay = kernel.schedule, kernel.keys_stay
        rows.append(traffic.streamed_rows(problem, schedule, ranges, keys_stay=keys_stay))
        pairs = kernel.pairs(problem, ranges)
        arrays += traffic.array_bytes_of_sections(problem, schedule, pairs, mods)
    return _of_kernels(problem, mods, kernels, rows, arrays)


def fused_without_cache(
    problem: Problem, kernels: Sequence[Kernel], mods: CaseMods = PLAIN
) -> Traffic:
    """Return the traffic if every tile of every head reads its rows from device memory."""
    rows, arrays = [], 0
    heads = problem.batch * problem.heads_q
    for kernel in kernels:
        ranges = kernel.ranges(problem, mods)
        rows.append(heads * sum(map(traffic.length, ranges)))
        pairs = kernel.pairs(problem, ranges)
        arrays += sum(a.bytes_of(pairs, heads) for a in traffic.arrays_of_pairs(problem, mods))
    return _of_kernels(problem, mods, kernels, rows, arrays)


def _of_kernels(
    problem: Problem, mods: CaseMods, kernels: Sequence[Kernel], rows: Sequence[int], arrays: int
) -> Traffic:
    """Return the traffic of kernels that iterate over `rows`, and read `arrays` bytes of biases."""
    workspace = max((kernel.schedule.workspace for kernel in kernels), default=0)
    read, key_values = 2 * traffic.out_bytes(problem) + arrays, 0
    for kernel, streamed in zip(kernels, rows, strict=True):
        passing = streamed * traffic.row_bytes(problem)
        own_queries = traffic.query_bytes(problem) + traffic.out_bytes(problem)
        read += passing + (_key_values(problem) if kernel.keys_stay else own_queries) + workspace
        key_values += _key_values(problem) if kernel.keys_stay else passing
    visible = traffic.count_heads_kv(problem) * traffic.visible_keys(problem, mods).keys()
    return Traffic(
        read=read,
        written=_written(problem) + workspace,
        key_value_reads=key_values / (visible * traffic.row_bytes(problem)) if visible else 0.0,
    )


def _key_values(problem: Problem) -> int:
    """Return the bytes of all keys and values."""
    return traffic.count_heads_kv(problem) * problem.seqlen_k * traffic.row_bytes(problem)


def _written(problem: Problem) -> int:
    """Return the bytes of dq, dk and dv."""
    return traffic.query_bytes(problem) + _key_values(problem)
