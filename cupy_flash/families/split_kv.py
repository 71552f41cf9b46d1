"""Host side of split KV (`scheduler/split_kv.cuh`): splits the keys of a query tile over blocks.

All fused families use this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupy_flash.families.contract import ceil_div
from cupy_flash.families.schedule import UNSPLIT, Launch, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

MAX_CHOSEN_PARTS = 32
# Least number of KV tiles per part: with fewer, writing and merging partial results dominates.
MIN_KEY_TILES = 2
# FlashAttention's heuristic for decoding, where merging is cheap. The keys are not split if the
# query tiles fill a fraction FULL_ENOUGH of the GPU. Otherwise the number of parts is the least one
# whose efficiency is at least NEAR_BEST of the best.
FULL_ENOUGH = 0.80
NEAR_BEST = 0.85
# Cost of the `combine` kernel: the time of its launch, and the bandwidth at which partial results
# are written and read again. With these constants, the chosen splits of 16 problems on an H200 are
# within 1.5% of the fastest measured split.
_COMBINE_US = 1.0
_PARTIALS_TB_PER_S = 1.5

# Fraction of an SM's arithmetic throughput that a single thread block on the SM reaches, and the
# read bandwidth of a single thread block (62 GB/s for `decode` on an H100).
_ALONE = 0.6
_BLOCK_TB_PER_S = 0.06

COMBINE = "combine"
_COMBINE_WARPS = 8


@dataclass(frozen=True)
class TileTime:
    """Estimated time that a thread block takes for a KV tile, in microseconds.

    Attributes
    ----------
    shared
        Time of an SM per KV tile if the SM is full of thread blocks.
    alone
        Time of a thread block per KV tile if it is the only one on the SM.
    part
        Additional time of each part if the keys are split, besides the traffic of partial results:
        merging wide output rows takes a warp many steps.
    """

    shared: float
    alone: float
    part: float = 0.0

    @classmethod
    def estimate(cls, flops: int, read_bytes: int, tflops_per_sm: float) -> TileTime:
        """Return the estimate for a KV tile from its FLOPs, its bytes and the rate of a full SM."""
        shared = 1e-6 * flops / tflops_per_sm
        return cls(shared, max(shared / _ALONE, 1e-6 * read_bytes / _BLOCK_TB_PER_S))

    def of(self, blocks: int) -> float:
        """Return the time in which each of `blocks` thread blocks of one SM computes a KV tile."""
        return max(blocks * self.shared, self.alone)


def choose(
    problem: Problem,
    device: Device,
    *,
    q_tiles: int,
    key_tiles: int,
    blocks_per_sm: int,
    group: int = 1,
    tile_time: TileTime | None = None,
) -> Split:
    """Choose the split of the keys of a query tile: none, or a number of parts.

    Parameters
    ----------
    q_tiles, key_tiles
        Number of query tiles of one head, or of `group` heads together, and number of KV tiles.
    blocks_per_sm
        Number of thread blocks of the kernel that fit an SM.
    group
        Number of query heads whose rows are packed into one query tile.
    tile_time
        Time of a KV tile; None for a kernel that merges few rows by itself, at little cost.

    Returns
    -------
    Split
        The number of parts is that of the call (`num_splits`) if it is given. Otherwise it is
        between 1, which means no split, and `MAX_CHOSEN_PARTS`.
    """
    # With a huge scale, the scaled scores of a part may all be -inf. Merging would drop that part.
    if problem.is_batch_invariant or problem.has_huge_scale:
        return UNSPLIT
    if problem.layout.num_splits:
        return Split.into(problem.layout.num_splits)
    blocks = q_tiles * problem.batch * problem.heads_q // group
    most = min(MAX_CHOSEN_PARTS, key_tiles // MIN_KEY_TILES)
    if blocks == 0 or most <= 1:
        return UNSPLIT
    if tile_time is None:
        slots = device.sm_count * max(1, blocks_per_sm)
        return Split.into(_fewest_that_fill(blocks, slots, key_tiles, most))
    times = {
        parts: ceil_div(key_tiles, parts) * tile_time.of(ceil_div(blocks * parts, device.sm_count))
        + combine_time(problem, Split.into(parts))
        + (tile_time.part * parts if parts > 1 else 0.0)
        for parts in range(1, most + 1)
    }
    return Split.into(min(times, key=lambda parts: (times[parts], parts)))


def _fewest_that_fill(blocks: int, slots: int, key_tiles: int, most: int) -> int:
    if blocks >= FULL_ENOUGH * slots:
        return 1
    # The efficiency is inverse to the number of KV tiles that a slot processes in all waves.
    longest = {
        splits: ceil_div(blocks * splits, slots) * ceil_div(key_tiles, splits)
        for splits in range(1, most + 1)
    }
    best = min(longest.values())
    return min(splits for splits, tiles in longest.items() if best >= NEAR_BEST * tiles)


def combine_time(problem: Problem, split: Split) -> float:
    """Return the estimated time of writing and merging partial results, in microseconds.

    The estimate ignores row statistics, so that calls with and without them have the same split.
    """
    if split.is_unsplit:
        return 0.0
    return _COMBINE_US + 2e-6 * _bytes_of_partials(problem, split, 0) / _PARTIALS_TB_PER_S


def workspace(problem: Problem, split: Split) -> int:
    """Return the size in bytes of all partial outputs, log-sum-exps and row statistics.

    The size is 0 without a split.
    """
    return _bytes_of_partials(problem, split, len(problem.statistics))


def _bytes_of_partials(problem: Problem, split: Split, statistics: int) -> int:
    if split.is_unsplit:
        return 0
    accumulator = 8 if problem.dtype == "float64" else 4
    layout = problem.layout
    rows = problem.rows
    if layout.packed_q:
        rows = problem.heads_q * layout.total_q
    # If modifications change scores, each log-sum-exp is a pair (scheduler/split_kv.cuh).
    numbers = problem.head_dim_v + (2 if problem.score and problem.score.changes_scores else 1)
    return split.parts * rows * (numbers + statistics) * accumulator


def combine_launches(problem: Problem, split: Split) -> tuple[Launch, ...]:
    """Return the launch that merges the parts, one warp per query row; none without a split."""
    if split.is_unsplit:
        return ()
    grid = (combine_blocks(problem), 1, 1)
    # With `min_blocks` of 1, the compiler does not spill registers to reach a higher occupancy.
    return (Launch(COMBINE, "combine", grid, 32 * _COMBINE_WARPS, min_blocks=1),)


def combine_blocks(problem: Problem) -> int:
    """Return the number of thread blocks of the launch that merges parts."""
    return ceil_div(problem.rows, _COMBINE_WARPS)
