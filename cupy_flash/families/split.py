"""Splitting the keys of a query tile over thread blocks: the host's side of `split.cuh`.

Shared by the fused families.
"""

from __future__ import annotations

from cupy_flash.device import Device
from cupy_flash.families.base import Launch, ceil_div
from cupy_flash.problem import Problem

MAX_SPLITS = 32
# A split must do more than write a partial result and have it merged.
MIN_KEY_TILES = 2
# FlashAttention's rule for decoding: leave the keys whole where the query tiles fill this share of
# the GPU, else take the fewest splits that come within this share of the best one's efficiency.
FULL_ENOUGH = 0.80
NEAR_BEST = 0.85

COMBINE = "combine"
_COMBINE_WARPS = 8


def num_splits(
    problem: Problem,
    device: Device,
    *,
    q_tiles: int,
    key_tiles: int,
    blocks_per_sm: int,
    group: int = 1,
) -> int:
    """How many thread blocks share the keys of one query tile.

    Parameters
    ----------
    q_tiles, key_tiles
        Tiles of query rows of one head, or of `group` heads together, and tiles of keys.
    blocks_per_sm
        Thread blocks of the kernel that an SM holds at once.
    group
        Query heads whose rows make up a tile.

    Returns
    -------
    int
        The number that the problem asks for, else from 1, for the keys left whole, to
        `MAX_SPLITS`.
    """
    if problem.is_batch_invariant:
        return 1
    if problem.sequences is not None and problem.sequences.num_splits:
        return problem.sequences.num_splits
    slots = device.sm_count * max(1, blocks_per_sm)
    blocks = q_tiles * problem.batch * problem.heads_q // group
    most = min(MAX_SPLITS, key_tiles // MIN_KEY_TILES)
    if blocks == 0 or blocks >= FULL_ENOUGH * slots or most <= 1:
        return 1
    # Efficiency is inverse to the key tiles that a slot works through, one wave after another.
    longest = {
        splits: ceil_div(blocks * splits, slots) * ceil_div(key_tiles, splits)
        for splits in range(1, most + 1)
    }
    best = min(longest.values())
    return min(splits for splits, tiles in longest.items() if best >= NEAR_BEST * tiles)


def workspace(problem: Problem, num_splits: int) -> int:
    """Bytes of the partial outputs and log-sum-exps of all splits; 0 where keys stay whole."""
    if num_splits == 1:
        return 0
    accumulator = 8 if problem.dtype == "float64" else 4
    sequences = problem.sequences
    rows = problem.rows
    if sequences is not None and sequences.packed_q:
        rows = problem.heads_q * sequences.total_q
    return num_splits * rows * (problem.head_dim_v + 1) * accumulator


def combine_launches(problem: Problem, num_splits: int) -> tuple[Launch, ...]:
    """The launch that merges the splits, one warp for each query row; none if there is nothing."""
    if num_splits == 1:
        return ()
    return (Launch(COMBINE, (combine_blocks(problem), 1, 1), 32 * _COMBINE_WARPS),)


def combine_blocks(problem: Problem) -> int:
    """Thread blocks of the launch that merges splits."""
    return ceil_div(problem.rows, _COMBINE_WARPS)


def combine_entries(num_splits: int, *, sequences: bool = False) -> dict[str, str]:
    """C++ of the entry that `combine_launches` launches.

    Parameters
    ----------
    num_splits
        Shares of the keys.
    sequences
        Whether it takes the struct of `sequences.cuh` after the params.
    """
    if num_splits == 1:
        return {}
    parameters = "const __grid_constant__ Params params"
    arguments = "params"
    if sequences:
        parameters += ", const __grid_constant__ Sequences sequences"
        arguments += ", sequences"
    # A bound of one block per SM keeps the compiler from spilling for a higher occupancy.
    return {
        COMBINE: (
            f'extern "C" __global__ void __launch_bounds__({32 * _COMBINE_WARPS}, 1)\n'
            f"{COMBINE}({parameters}) {{ combine<Config>({arguments}); }}"
        )
    }
