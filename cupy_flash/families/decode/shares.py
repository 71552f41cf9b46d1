"""Which thread blocks of `decode` share keys: how many, in clusters or not, and where they meet."""

from __future__ import annotations

import dataclasses
import math

from cupy_flash.families import split
from cupy_flash.families.contract import MAX_GRID_Y, ceil_div
from cupy_flash.families.decode import sizes
from cupy_flash.families.decode.tile import DecodeTile
from cupy_flash.families.schedule import EVEN, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# Row tiles up to which the keys of all sequences are shared out evenly: with more, there are
# thread blocks enough, and causal masks make the shares uneven anyway.
MOST_SHARED_TILES = 8
# Of the SMs, with which thread blocks of clusters take keys and values as fast as with all.
_SHARE_OF_SMS = 0.42
# Units of keys for each block of a cluster up to which no other cluster has a share: 1024 keys of 4
# heads, 64 query heads, take one cluster of 4 blocks 10.7 us, two 12.6.
CLUSTER_UNITS = 3
# Of the blocks that run at once, so many are enough if then no sequence is cut, where all are of
# equal lengths. 8 heads on an H200: 64 sequences of 2048 keys take 33 blocks for each head 138.8
# us, 32 of them 135.9; 128 of 1024 141.2 and 138.5; unequal lengths about the same time.
_ENOUGH_PLACES = 0.95


def is_balanced(problem: Problem, Br: int) -> bool:
    """Whether the thread blocks take equal shares of all keys, not splits of each sequence's.

    The kernel needs to know how many rows every sequence has, which packed queries do not tell.
    """
    layout = problem.layout
    if layout.packed_q or layout.num_splits:
        return False
    few_tiles = sizes.row_tiles(problem, Br) <= MOST_SHARED_TILES
    return few_tiles and problem.heads_kv <= MAX_GRID_Y


def split_of(problem: Problem, device: Device, tile: DecodeTile) -> Split:
    """How each sequence's keys are split, where they are not shared out evenly."""
    return split.choose(
        problem,
        device,
        q_tiles=sizes.row_tiles(problem, tile.Br),
        key_tiles=ceil_div(problem.seqlen_k, sizes.unit_keys(problem, tile)),
        blocks_per_sm=tile.min_blocks,
        group=sizes.group(problem),
    )


def items(problem: Problem, tile: DecodeTile) -> int:
    """Row tiles of all key/value heads and sequences."""
    return problem.batch * problem.heads_kv * sizes.row_tiles(problem, tile.Br)


def slots(problem: Problem, device: Device, tile: DecodeTile, cut: Split) -> int:
    """Places for results that meet in device memory."""
    if cut.is_whole:
        return 0
    if cut.kind == "parts":
        return items(problem, tile) * cut.parts
    row_tiles, heads, blocks = grid_of(problem, device, tile)
    clusters = blocks // max(1, tile.cluster)
    if clusters == 1:
        return 0
    # A cluster leaves at most two: where its share begins, and ends.
    return 2 * row_tiles * heads * clusters


def grid_of(problem: Problem, device: Device, tile: DecodeTile) -> tuple[int, int, int]:
    """Row tiles, key/value heads, and how many thread blocks share the keys of each."""
    row_tiles = sizes.row_tiles(problem, tile.Br)
    lines = sizes.lines(problem, tile.Br)
    units = sizes.units(problem, tile)
    places = places_of_whole_sequences(problem, device, tile)
    places = max(1, min(places or _places(problem, device, tile), units))
    if tile.cluster:
        clusters = min(most_clusters(device, lines, tile), ceil_div(units, tile.cluster))
        is_short = units <= CLUSTER_UNITS * tile.cluster
        places = tile.cluster if is_short else clusters * tile.cluster
    return row_tiles, problem.heads_kv, places


def blocks_of_sequence(problem: Problem, device: Device, tile: DecodeTile) -> int:
    """Thread blocks of a head that have keys of one sequence, where lengths are equal."""
    units = sizes.units(problem, tile)
    units_of_block = max(1, ceil_div(units, grid_of(problem, device, tile)[2]))
    return ceil_div(units // max(1, problem.batch), units_of_block)


def _places(problem: Problem, device: Device, tile: DecodeTile) -> int:
    """Thread blocks for each line of keys that run at once."""
    return device.sm_count * tile.min_blocks // sizes.lines(problem, tile.Br)


def places_of_whole_sequences(problem: Problem, device: Device, tile: DecodeTile) -> int:
    """Nearly as many as `_places`, of which each has whole sequences if lengths are equal.

    0 if there is no such number.
    """
    places = _places(problem, device, tile)
    counts = range(places, math.ceil(_ENOUGH_PLACES * places) - 1, -1)
    return next((count for count in counts if count and problem.batch % count == 0), 0)


def most_clusters(device: Device, lines: int, tile: DecodeTile) -> int:
    """Clusters for each line of keys that are enough for the bandwidth.

    A power of two, so that sequences of equal lengths end where shares end.
    """
    enough = math.ceil(_SHARE_OF_SMS * device.sm_count / (lines * tile.cluster))
    return 1 << (enough - 1).bit_length()


def has_clusters(device: Device) -> bool:
    """Whether thread blocks can be launched in clusters."""
    return device.arch // 10 in (9, 10)


def launched(tile: DecodeTile, cut: Split) -> DecodeTile:
    """The tile as it is launched: with a cluster only where blocks have even shares."""
    return tile if cut == EVEN else dataclasses.replace(tile, cluster=0)
