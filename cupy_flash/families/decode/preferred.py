"""Which tiles of `decode` are best, with the measurements behind that."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from cupy_flash.families.contract import ceil_div
from cupy_flash.families.decode import shares, sizes
from cupy_flash.families.decode.tile import CLUSTERS, MOST_STAGES, QUANTIZED_KEYS, DecodeTile
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# Row tiles of a head up to which two teams are better off in one thread block.
_MOST_TILES_TOGETHER = 2
# Bytes of keys and values up to which two stages do in a cluster. With 16 rows a cluster of 8 has
# no place for three: 8192 keys of 8 heads take it 23.1 us, clusters of 4 25.2; 33 sequences of up
# to 2048 keys 81.9 and 75.5.
_LITTLE = 64 << 20
# And up to which clusters are better although two row tiles read each key twice: 4 x 8192 keys of
# one head, 32 query heads, take them 18.5 us, blocks without clusters 20.0, and 16 x 8192 keys 49.2
# and 40.9.
_READ_TWICE = 16 << 20
# With more than so much, pages take a cluster's few blocks too long, and short ones with more than
# `_LITTLE`: 8 x 65536 keys of 8 heads in pages of 16 rows and of one take them 585 and 725 us on an
# H200, a block on each SM 492 and 499; 1 x 65536 in pages of 64, 16 and one 76.5, 78.6 and 91, and
# 79.5, 79.9 and 81.
_MUCH_IN_PAGES = 320 << 20
# Where keys are more than `_LITTLE`, blocks without clusters need no more bytes on their way than
# this, two stages of head_dim 128, unless pages are short: 64 x 8192 keys take two stages 489 us,
# three 491; in pages of 16 rows 499 and 500, of one 525 and 506.
_ENOUGH_ON_THE_WAY = 128 << 10
_FEWEST_PAGE_ROWS = 16
# Keys of all sequences up to which four warps merge sooner than eight read, if there are several
# heads: 1024 keys of 8 heads take 10.3 us, with eight warps 10.6; of one head 9.6 and 9.1.
_TINY = 1024
_SEVERAL_HEADS = 4
# Caches of 8 bits take twice the instructions for a byte. Up to so many bytes clusters are better,
# whose blocks are on less than half of the SMs; elsewhere a block has all stages that fit. On an
# H200 1 x 8192 keys of 8 heads take clusters of 8 16.6 us, a block on each SM 17.8, but 8 x 8192
# 69.4 and 49.9; 64 x 65536 keys take such blocks with two stages 2080 us, with three 1996.
_LITTLE_QUANTIZED = 16 << 20
# Keys that a sequence may have, from which on the end of each costs a cluster's few blocks little:
# 64 sequences of 1024, 8192 and 65536 keys take them 117, 707 and 5505 us, and 128 blocks that
# merge through memory 106, 703 and 5582.
_LONG = 16384
# More sequences than this, of fewer keys: two smaller blocks per SM are as fast or faster. 64
# sequences of 1024 keys, 8 heads, take them 105.1 us, large ones 105.6; with 256 query heads 116.7
# and 123.1, but 8 such sequences 26.3 and 23.1.
_MANY = 16
_SHORT = 4096


def preferred_tiles(problem: Problem, device: Device) -> Iterator[DecodeTile]:
    """Tiles from the best down, of which the first that fits is the default."""
    if sizes.team(problem) > 1:
        for tile in _tiles_of_teams(problem):
            yield sizes.with_all_stages(problem, device, tile)
        return
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    keys = 16 if problem.scales is None else QUANTIZED_KEYS
    small = [DecodeTile(16, keys, min_blocks=2), DecodeTile(16, keys, min_blocks=1)]
    several_heads = problem.heads_kv >= _SEVERAL_HEADS
    is_tiny = problem.batch * problem.seqlen_k <= _TINY and several_heads
    large = DecodeTile(16, keys, warps=4 if wide or is_tiny else 8, min_blocks=1)
    has_much = sizes.all_bytes(problem) > _LITTLE
    page_size = problem.layout.page_size
    tiles = [large, *small]
    if problem.is_batch_invariant:
        # Bc and warps decide in which order a row's keys are summed up.
        tiles = small
    elif problem.batch > _MANY and problem.seqlen_k < _SHORT:
        tiles = [*small, large]
    is_free = shares.is_balanced(problem, 16) and not problem.is_batch_invariant
    most_stages = MOST_STAGES
    short_pages = 0 < page_size < _FEWEST_PAGE_ROWS
    most_in_clusters = math.inf if problem.scales is None else _LITTLE_QUANTIZED
    if page_size:
        most_in_clusters = min(most_in_clusters, _LITTLE if short_pages else _MUCH_IN_PAGES)
    suits_clusters = (
        shares.has_clusters(device) and is_free and sizes.all_bytes(problem) <= most_in_clusters
    )
    if device.arch == 90 and is_free and several_heads and not short_pages:
        # Four blocks of two warps on an SM, where each has whole sequences, begin and end at
        # different times. 8 heads, batch x keys, us of an H200 beside the next best: 64 x 1024
        # 76.4, 77.7; 64 x 4096 249.6, 250.7; 64 x 8192 478.5, 478.6; 64 x 65536 3772, clusters
        # 3798; 128 x 1024, head_dim 64, 81.6, 83.5; 32 x 1024 of 32 heads 134.3, 135.8. Where
        # they have not, 48 x 8192: 370.4, 365.2.
        fine = DecodeTile(16, keys, warps=2, min_blocks=4)
        if shares.places_of_whole_sequences(problem, device, fine):
            tiles.insert(0, fine)
            suits_clusters = suits_clusters and not has_much
        if has_much and problem.scales is None:
            enough = ceil_div(_ENOUGH_ON_THE_WAY, large.warps * sizes.stage_bytes(problem, large))
            most_stages = max(2, enough)
    if suits_clusters:
        yield from _clustered(problem, device, large)
    for tile in tiles:
        full = sizes.with_all_stages(problem, device, tile)
        most = full.stages if any(tile is other for other in small) else most_stages
        yield dataclasses.replace(full, stages=min(most, full.stages))


def _tiles_of_teams(problem: Problem) -> Iterator[DecodeTile]:
    """Two teams on an SM, in one thread block or one in each of two.

    Of 128 x 8192 keys of 576 columns, 512 of them the values, 16 query heads, on an H200: one
    block of two teams 301 us, with tiles of 16 keys 320, two blocks 328, one team 360. In 8
    bits two blocks 292, one 319; of 64 x 4096 keys, 128 query heads, 556 and 611.
    """
    together = DecodeTile(16, QUANTIZED_KEYS, warps=2 * sizes.TEAM, min_blocks=1)
    apart = DecodeTile(16, QUANTIZED_KEYS, warps=sizes.TEAM, min_blocks=2)
    finer = [dataclasses.replace(tile, Bc=16) for tile in (together, apart)]
    # What decides in which order keys are summed up must not go by the number of rows.
    several = sizes.row_tiles(problem, 16) > _MOST_TILES_TOGETHER and not problem.is_batch_invariant
    if problem.scales is not None or several:
        yield from (apart, together, *reversed(finer))
    else:
        yield from (together, *finer, apart)
    yield from (dataclasses.replace(tile, min_blocks=1) for tile in (apart, finer[1]))


def _clustered(problem: Problem, device: Device, tile: DecodeTile) -> Iterator[DecodeTile]:
    """The tile with the best clusters, where clusters are better than none.

    That is the smallest of which one for each line is enough for the bandwidth, or else the
    largest, of those that leave shared memory enough for keys on their way. Of few heads with
    little to read the smallest that has all parts of a sequence: 16 x 1024 keys of one head, 32
    query heads, on an H200: clusters of 2, 4 and 8 take 13.3, 13.4 and 13.9 us; of 2 heads
    13.8, 14.0 and 15.0; 4 x 1024 of one head 12.4, 12.6 and 10.8. Where none has, those with a
    third stage: 1 x 8192 of one head 15.5, 13.9 and 14.4, of 2 heads 16.6, 14.3 and 15.1.
    """
    total = sizes.all_bytes(problem)
    if sizes.row_tiles(problem, tile.Br) > 1 and total > _READ_TWICE:
        return
    tiles = [
        sizes.with_all_stages(problem, device, dataclasses.replace(tile, cluster=cluster))
        for cluster in CLUSTERS
    ]
    tiles = [tile for tile in tiles if tile.stages >= (2 if total <= _LITTLE else 3)]
    if not tiles:
        return
    lines = sizes.lines(problem, tile.Br)
    enough = [tile for tile in tiles if shares.most_clusters(device, lines, tile) == 1]
    best = enough[0] if enough else tiles[-1]
    is_cut = shares.blocks_of_sequence(problem, device, best) > 1
    is_short = sizes.units(problem, best) <= shares.CLUSTER_UNITS * best.cluster
    few_heads = problem.heads_kv < _SEVERAL_HEADS and total <= _LITTLE
    if not enough and few_heads and is_cut and not is_short:
        holding = [t for t in tiles if shares.blocks_of_sequence(problem, device, t) <= t.cluster]
        with_third = [t for t in tiles if t.stages >= 3]
        best = holding[0] if holding else (with_third or tiles)[-1]
    blocks = best.cluster * shares.most_clusters(device, lines, best)
    if problem.batch < 2 * blocks or problem.seqlen_k >= _LONG:
        yield best
