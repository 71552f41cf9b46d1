"""Splitting the keys of a query tile over thread blocks: the host's side of `split.cuh`.

Shared by the fused families.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupy_flash.families.contract import ceil_div
from cupy_flash.families.schedule import WHOLE, Launch, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

MOST_CHOSEN_PARTS = 32
# A split must do more than write a partial result and have it merged.
MIN_KEY_TILES = 2
# FlashAttention's rule for decoding, where merging costs next to nothing: leave the keys whole if
# the query tiles fill this share of the GPU, else take the fewest splits that come within this
# share of the best one's efficiency.
FULL_ENOUGH = 0.80
NEAR_BEST = 0.85
# What merging by `combine` takes: its launch behind the other kernel, and partial results that are
# written and read again. With these, and the rates that families give, the splits of 16 problems on
# an H200 (1 x 64 x 16384 to 1 x 2048 x 4096, float16 to float64, both families) are within 1.5% of
# the best of those that were timed; by the rule above up to 54% from it, in 1 x 1280 x 1536 with 16
# heads of 128.
_COMBINE_US = 1.0
_PARTIALS_TB_PER_S = 1.5

# Of an SM's arithmetic, what one thread block alone on it reaches; and how fast one reads: a block
# of `decode` alone had 62 GB/s on an H100.
_ALONE = 0.6
_BLOCK_TB_PER_S = 0.06

COMBINE = "combine"
_COMBINE_WARPS = 8


@dataclass(frozen=True)
class TileTime:
    """How long a thread block takes for a tile of keys, about, in microseconds.

    Attributes
    ----------
    shared
        Of an SM that is full of blocks, for one of them.
    alone
        Of a block that has the SM to itself.
    part
        What each part adds where keys are cut, besides its partial results: of wide values, whose
        columns a warp merges one by one.
    """

    shared: float
    alone: float
    part: float = 0.0

    @classmethod
    def estimate(cls, flops: int, read_bytes: int, tflops_per_sm: float) -> TileTime:
        """From the operations and bytes of a tile, and the kernel's rate on a full SM."""
        shared = 1e-6 * flops / tflops_per_sm
        return cls(shared, max(shared / _ALONE, 1e-6 * read_bytes / _BLOCK_TB_PER_S))

    def of(self, blocks: int) -> float:
        """Of each of so many blocks that an SM has, one beside or after the other."""
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
    """How the keys of a query tile are shared out: whole, or in parts.

    Parameters
    ----------
    q_tiles, key_tiles
        Tiles of query rows of one head, or of `group` heads together, and tiles of keys.
    blocks_per_sm
        Thread blocks of the kernel that an SM holds at once.
    group
        Query heads whose rows make up a tile.
    tile_time
        Of a tile of keys; None for a kernel that merges few rows by itself, at little cost.

    Returns
    -------
    Split
        Into as many parts as the problem asks for, else from 1, for the keys left whole, to
        `MOST_CHOSEN_PARTS`.
    """
    # A share of the keys whose scaled scores are all -inf would be left out when they are merged.
    if problem.is_batch_invariant or problem.has_huge_scale:
        return WHOLE
    if problem.layout.num_splits:
        return Split.into(problem.layout.num_splits)
    blocks = q_tiles * problem.batch * problem.heads_q // group
    most = min(MOST_CHOSEN_PARTS, key_tiles // MIN_KEY_TILES)
    if blocks == 0 or most <= 1:
        return WHOLE
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
    # Efficiency is inverse to the key tiles that a slot works through, one wave after another.
    longest = {
        splits: ceil_div(blocks * splits, slots) * ceil_div(key_tiles, splits)
        for splits in range(1, most + 1)
    }
    best = min(longest.values())
    return min(splits for splits, tiles in longest.items() if best >= NEAR_BEST * tiles)


def combine_time(problem: Problem, split: Split) -> float:
    """Microseconds, about, that writing partial results and merging them takes."""
    if split.is_whole:
        return 0.0
    return _COMBINE_US + 2e-6 * workspace(problem, split) / _PARTIALS_TB_PER_S


def workspace(problem: Problem, split: Split) -> int:
    """Bytes of the partial outputs and log-sum-exps of all parts; 0 where keys stay whole."""
    if split.is_whole:
        return 0
    accumulator = 8 if problem.dtype == "float64" else 4
    layout = problem.layout
    rows = problem.rows
    if layout.packed_q:
        rows = problem.heads_q * layout.total_q
    # Where scores are changed, a log-sum-exp is a pair of numbers (grid/split.cuh).
    numbers = problem.head_dim_v + (2 if problem.score and problem.score.changes_scores else 1)
    return split.parts * rows * numbers * accumulator


def combine_launches(problem: Problem, split: Split) -> tuple[Launch, ...]:
    """The launch that merges the parts, one warp for each query row; none if there is nothing."""
    if split.is_whole:
        return ()
    grid = (combine_blocks(problem), 1, 1)
    # A bound of one block per SM keeps the compiler from spilling for a higher occupancy.
    return (Launch(COMBINE, "combine", grid, 32 * _COMBINE_WARPS, min_blocks=1),)


def combine_blocks(problem: Problem) -> int:
    """Thread blocks of the launch that merges parts."""
    return ceil_div(problem.rows, _COMBINE_WARPS)
