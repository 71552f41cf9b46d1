"""Partition of the keys over thread blocks and clusters in the `decode` family."""

from __future__ import annotations

import dataclasses
import math

from cupy_flash.families import split_kv
from cupy_flash.families.contract import MAX_GRID_Y, ceil_div
from cupy_flash.families.decode import sizes
from cupy_flash.families.decode.tile import DecodeTile
from cupy_flash.families.schedule import EVEN, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# Largest number of query tiles per KV head for which all keys are divided evenly. With more query
# tiles there are enough thread blocks, and causal masks would make even work ranges unbalanced.
MAX_QUERY_TILES = 8
# Fraction of the SMs whose thread blocks, in clusters, reach the full memory bandwidth.
_FRACTION_OF_SMS = 0.42
# Largest number of KV units per thread block for which one cluster processes all keys: one cluster
# of 4 takes 10.7 us, two take 12.6 us (1024 keys, 4 KV heads, 64 query heads).
CLUSTER_UNITS = 3
# Least fraction of the concurrent thread blocks to use if this avoids splitting sequences of equal
# length: 32 thread blocks per KV head take 135.9 us, 33 take 138.8 us (H200, 64 sequences of 2048
# keys).
_LEAST_CONCURRENT = 0.95


def is_balanced(problem: Problem, Br: int) -> bool:
    """Return whether all keys are divided evenly, instead of splitting the keys of each sequence.

    An even division requires that all sequences have the same number of query rows. This excludes
    packed queries.
    """
    layout = problem.layout
    if layout.packed_q or layout.num_splits:
        return False
    few_tiles = sizes.row_tiles(problem, Br) <= MAX_QUERY_TILES
    return few_tiles and problem.heads_kv <= MAX_GRID_Y


def choose_split(problem: Problem, device: Device, tile: DecodeTile) -> Split:
    """Return the split of the keys of each sequence, for problems without an even division."""
    return split_kv.choose(
        problem,
        device,
        q_tiles=sizes.row_tiles(problem, tile.Br),
        key_tiles=ceil_div(problem.seqlen_k, sizes.unit_keys(problem, tile)),
        blocks_per_sm=tile.min_blocks,
        group=sizes.group(problem),
    )


def output_tiles(problem: Problem, tile: DecodeTile) -> int:
    """Return the number of query tiles of all KV heads and sequences."""
    return problem.batch * problem.heads_kv * sizes.row_tiles(problem, tile.Br)


def partial_slots(problem: Problem, device: Device, tile: DecodeTile, split: Split) -> int:
    """Return the number of slots for partial results that are merged through device memory."""
    if split.is_unsplit:
        return 0
    if split.kind == "fixed":
        return output_tiles(problem, tile) * split.parts
    row_tiles, heads, blocks = grid_size(problem, device, tile)
    clusters = blocks // max(1, tile.cluster)
    if clusters == 1:
        return 0
    # A cluster writes at most two partial results: at the beginning and end of its work range.
    return 2 * row_tiles * heads * clusters


def grid_size(problem: Problem, device: Device, tile: DecodeTile) -> tuple[int, int, int]:
    """Return the grid: query tiles, KV heads, and thread blocks that divide the keys of each."""
    row_tiles = sizes.row_tiles(problem, tile.Br)
    head_tiles = sizes.head_tiles(problem, tile.Br)
    units = sizes.units(problem, tile)
    blocks = blocks_without_splits(problem, device, tile)
    blocks = max(1, min(blocks or _concurrent_blocks(problem, device, tile), units))
    if tile.cluster:
        clusters = min(max_clusters(device, head_tiles, tile), ceil_div(units, tile.cluster))
        is_short = units <= CLUSTER_UNITS * tile.cluster
        blocks = tile.cluster if is_short else clusters * tile.cluster
    return row_tiles, problem.heads_kv, blocks


def blocks_per_sequence(problem: Problem, device: Device, tile: DecodeTile) -> int:
    """Return over how many thread blocks the keys of a sequence are split, for equal lengths."""
    units = sizes.units(problem, tile)
    units_per_block = max(1, ceil_div(units, grid_size(problem, device, tile)[2]))
    return ceil_div(units // max(1, problem.batch), units_per_block)


def _concurrent_blocks(problem: Problem, device: Device, tile: DecodeTile) -> int:
    """Return the number of concurrent thread blocks for each KV head and query tile."""
    return device.sm_count * tile.min_blocks // sizes.head_tiles(problem, tile.Br)


def blocks_without_splits(problem: Problem, device: Device, tile: DecodeTile) -> int:
    """Return a divisor of the batch size near `_concurrent_blocks`, or 0 if there is none.

    With this number of thread blocks, no sequence is split if all have the same length.
    """
    blocks = _concurrent_blocks(problem, device, tile)
    counts = range(blocks, math.ceil(_LEAST_CONCURRENT * blocks) - 1, -1)
    return next((count for count in counts if count and problem.batch % count == 0), 0)


def max_clusters(device: Device, head_tiles: int, tile: DecodeTile) -> int:
    """Return the number of clusters per KV head and query tile that reach the memory bandwidth.

    It is a power of two, so that sequences of equal lengths are split evenly.
    """
    enough = math.ceil(_FRACTION_OF_SMS * device.sm_count / (head_tiles * tile.cluster))
    return 1 << (enough - 1).bit_length()


def has_clusters(device: Device) -> bool:
    """Return whether the device can launch thread blocks in clusters."""
    return device.arch // 10 in (9, 10)


def launched_tile(tile: DecodeTile, split: Split) -> DecodeTile:
    """Return the tile to launch, which has clusters only if keys are divided evenly."""
    return tile if split == EVEN else dataclasses.replace(tile, cluster=0)
