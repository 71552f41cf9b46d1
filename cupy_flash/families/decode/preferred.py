"""Choice of the fastest tile of the `decode` family, from measurements on an H200."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from cupy_flash.families.contract import ceil_div
from cupy_flash.families.decode import partition, sizes
from cupy_flash.families.decode.tile import CLUSTERS, MAX_STAGES, QUANTIZED_KEYS, DecodeTile
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# Largest number of query tiles per KV head for which two groups of column warps are faster in one
# thread block than in two.
_MAX_CONCURRENT_TILES = 2
# Up to this size of keys and values in bytes, clusters may have only two ring stages. A cluster of
# 8 has no space for three: it takes 23.1 us, clusters of 4 take 25.2 us (8192 keys, 8 KV heads).
_LITTLE = 64 << 20
# Up to this size in bytes, clusters are faster even if each key is read twice, by two query tiles:
# 18.5 instead of 20.0 us (4 sequences of 8192 keys, 1 KV head, 32 query heads).
_REREAD_BYTES = 16 << 20
# Up to this size in bytes, clusters are used for a paged KV cache; for short pages the limit is
# `_LITTLE`. Above this size, a thread block per SM takes 492 us, clusters take 585 us (8 sequences
# of 65536 keys, 8 KV heads, pages of 16 rows).
_LARGE_PAGED_BYTES = 320 << 20
# Number of bytes in flight that a thread block without clusters needs above `_LITTLE` bytes: two
# stages at head_dim 128. Pages shorter than _MIN_PAGE_ROWS need more: three stages take 506
# instead of 525 us (64 sequences of 8192 keys, pages of 1 row).
_BYTES_IN_FLIGHT = 128 << 10
_MIN_PAGE_ROWS = 16
# Up to this number of keys in all sequences, 4 warps are faster than 8 if there are at least
# _SEVERAL_HEADS KV heads: 10.3 instead of 10.6 us (1024 keys, 8 KV heads).
_TINY = 1024
_SEVERAL_HEADS = 4
# Up to this size in bytes, clusters are used for an 8-bit KV cache. An 8-bit cache takes twice the
# instructions per byte, and clusters run on less than half of the SMs. Above it, a thread block per
# SM takes 49.9 us, clusters take 69.4 us (8 sequences of 8192 keys, 8 KV heads).
_LITTLE_QUANTIZED = 16 << 20
# Many sequences use clusters only if seqlen_k is at least this, because the end of each sequence
# delays a cluster: 64 sequences of 1024 keys take 117 us, and 106 us without clusters.
_LONG = 16384
# For more than _MANY sequences of fewer than _SHORT keys, two smaller thread blocks per SM are as
# fast or faster: 116.7 instead of 123.1 us (64 sequences of 1024 keys, 256 query heads).
_MANY = 16
_SHORT = 4096


def preferred_tiles(problem: Problem, device: Device) -> Iterator[DecodeTile]:
    """Yield tiles from the fastest to the slowest; the first that fits is the default."""
    if sizes.column_warps(problem) > 1:
        for tile in _tiles_for_column_warps(problem):
            yield sizes.with_all_stages(problem, device, tile)
        return
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    keys = 16 if problem.scales is None else QUANTIZED_KEYS
    small = [DecodeTile(16, keys, min_blocks=2), DecodeTile(16, keys, min_blocks=1)]
    several_heads = problem.heads_kv >= _SEVERAL_HEADS
    is_tiny = problem.batch * problem.seqlen_k <= _TINY and several_heads
    large = DecodeTile(16, keys, warps=4 if wide or is_tiny else 8, min_blocks=1)
    has_much = sizes.total_kv_bytes(problem) > _LITTLE
    page_size = problem.layout.page_size
    tiles = [large, *small]
    if problem.is_batch_invariant:
        # Bc and the number of warps determine the order in which the keys of a row are accumulated.
        tiles = small
    elif problem.batch > _MANY and problem.seqlen_k < _SHORT:
        tiles = [*small, large]
    is_free = partition.is_balanced(problem, 16) and not problem.is_batch_invariant
    most_stages = MAX_STAGES
    short_pages = 0 < page_size < _MIN_PAGE_ROWS
    most_in_clusters = math.inf if problem.scales is None else _LITTLE_QUANTIZED
    if page_size:
        most_in_clusters = min(most_in_clusters, _LITTLE if short_pages else _LARGE_PAGED_BYTES)
    suits_clusters = (
        partition.has_clusters(device)
        and is_free
        and sizes.total_kv_bytes(problem) <= most_in_clusters
    )
    if device.arch == 90 and is_free and several_heads and not short_pages:
        # Four thread blocks of two warps per SM are fastest if no sequence is split, because they
        # begin and end at different times: 76.4 us, while the next best tile takes 77.7 us (64
        # sequences of 1024 keys, 8 KV heads).
        fine = DecodeTile(16, keys, warps=2, min_blocks=4)
        if partition.blocks_without_splits(problem, device, fine):
            tiles.insert(0, fine)
            suits_clusters = suits_clusters and not has_much
        if has_much and problem.scales is None:
            enough = ceil_div(_BYTES_IN_FLIGHT, large.warps * sizes.stage_bytes(problem, large))
            most_stages = max(2, enough)
    if suits_clusters:
        yield from _clustered(problem, device, large)
    for tile in tiles:
        full = sizes.with_all_stages(problem, device, tile)
        limit = full.stages if any(tile is other for other in small) else most_stages
        yield dataclasses.replace(full, stages=min(limit, full.stages))


def _tiles_for_column_warps(problem: Problem) -> Iterator[DecodeTile]:
    """Yield tiles for wide heads: two groups of column warps per SM, in one or two thread blocks.

    One thread block with both groups takes 301 us, two thread blocks take 328 us (MLA, 128
    sequences of 8192 keys, 16 query heads). For an 8-bit KV cache, two thread blocks are faster.
    """
    one_block = DecodeTile(16, QUANTIZED_KEYS, warps=2 * sizes.COLUMN_WARPS, min_blocks=1)
    two_blocks = DecodeTile(16, QUANTIZED_KEYS, warps=sizes.COLUMN_WARPS, min_blocks=2)
    finer = [dataclasses.replace(tile, Bc=16) for tile in (one_block, two_blocks)]
    # A batch-invariant tile must not depend on the number of rows: it determines the order in which
    # keys are accumulated.
    several = (
        sizes.row_tiles(problem, 16) > _MAX_CONCURRENT_TILES and not problem.is_batch_invariant
    )
    if problem.scales is not None or several:
        yield from (two_blocks, one_block, *reversed(finer))
    else:
        yield from (one_block, *finer, two_blocks)
    yield from (dataclasses.replace(tile, min_blocks=1) for tile in (two_blocks, finer[1]))


def _clustered(problem: Problem, device: Device, tile: DecodeTile) -> Iterator[DecodeTile]:
    """Yield the tile with the fastest cluster size, unless thread blocks without clusters win.

    The cluster size is the smallest with which one cluster per KV head reaches the memory
    bandwidth, or else the largest. Only sizes that leave space for enough ring stages are
    considered. For few KV heads with little data, it is the smallest size with which one cluster
    has all keys of a sequence, or else the largest size with three stages: clusters of 2 take 13.3
    us, clusters of 8 take 13.9 us (16 sequences of 1024 keys, 1 KV head, 32 query heads).
    """
    total = sizes.total_kv_bytes(problem)
    if sizes.row_tiles(problem, tile.Br) > 1 and total > _REREAD_BYTES:
        return
    tiles = [
        sizes.with_all_stages(problem, device, dataclasses.replace(tile, cluster=cluster))
        for cluster in CLUSTERS
    ]
    tiles = [tile for tile in tiles if tile.stages >= (2 if total <= _LITTLE else 3)]
    if not tiles:
        return
    head_tiles = sizes.head_tiles(problem, tile.Br)
    enough = [tile for tile in tiles if partition.max_clusters(device, head_tiles, tile) == 1]
    best = enough[0] if enough else tiles[-1]
    is_cut = partition.blocks_per_sequence(problem, device, best) > 1
    is_short = sizes.units(problem, best) <= partition.CLUSTER_UNITS * best.cluster
    few_heads = problem.heads_kv < _SEVERAL_HEADS and total <= _LITTLE
    if not enough and few_heads and is_cut and not is_short:
        holding = [
            t for t in tiles if partition.blocks_per_sequence(problem, device, t) <= t.cluster
        ]
        with_third = [t for t in tiles if t.stages >= 3]
        best = holding[0] if holding else (with_third or tiles)[-1]
    blocks = best.cluster * partition.max_clusters(device, head_tiles, best)
    if problem.batch < 2 * blocks or problem.seqlen_k >= _LONG:
        yield best
