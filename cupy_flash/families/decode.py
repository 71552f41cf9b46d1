"""Attention of few query rows over many keys, bound by memory: `kernels_cu/forward/decode.cu`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from cupy_flash.families import split
from cupy_flash.families.contract import (
    FLOAT8_ARCH,
    MAX_GRID,
    MAX_GRID_Y,
    Family,
    ceil_div,
    heads_in_l2,
    round_up,
    why_not_blocks,
    why_not_scale,
)
from cupy_flash.families.hopper import HopperFamily
from cupy_flash.families.schedule import EVEN, MAIN_ENTRY, Launch, Schedule, Split
from cupy_flash.problem.arrays import ITEMSIZE, Strides
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import MAX_SEQLEN, Problem
from cupy_flash.problem.tile import Tile

_HOPPER = HopperFamily()
# Query rows of a key/value head and keys, beyond or below which other families are better.
_MOST_ROWS = 32
_FEWEST_KEYS = 256
# Row tiles up to which the keys of all sequences are shared out evenly: with more, there are
# thread blocks enough, and causal masks make the shares uneven anyway.
_MOST_SHARED_TILES = 8
_MOST_STAGES = 8
# A scale of one key or value.
_SCALE_BYTES = 4
# What a block knows of its part of the keys (`State` in the kernel).
_STATE_BYTES = 160
_CLUSTERS = (1, 2, 4, 8)
# Keys of a tile of a cache of 8 bits: as many bytes as 16 of 16 bits.
_QUANTIZED_KEYS = 32
# Columns beyond which a warp's registers do not hold a row tile's queries and output, and how many
# warps share them then. With those of 576 each has 144, and about 170 registers.
_MOST_COLUMNS = 256
_TEAM = 4
# Row tiles of a head up to which two teams are better off in one thread block.
_MOST_TILES_TOGETHER = 2
# Of the SMs, with which thread blocks of clusters take keys and values as fast as with all.
_SHARE_OF_SMS = 0.42
# Units of keys for each block of a cluster up to which no other cluster has a share: 1024 keys of 4
# heads, 64 query heads, take one cluster of 4 blocks 10.7 us, two 12.6.
_CLUSTER_UNITS = 3
# Bytes of keys and values up to which two stages do in a cluster. With 16 rows a cluster of 8 has
# no place for three: 8192 keys of 8 heads take it 23.1 us, clusters of 4 25.2; 33 sequences of up
# to 2048 keys 81.9 and 75.5.
_LITTLE = 64 << 20
# And up to which clusters are better although two row tiles read each key twice: 4 x 8192 keys of
# one head, 32 query heads, take them 18.5 us, blocks without clusters 20.0, and 16 x 8192 keys 49.2
# and 40.9.
_READ_TWICE = 16 << 20
# Up to so much, whatever the lengths are, a launch lets keys and values leave L2 first.
_FEW_BYTES = 320 << 20
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
# Of the blocks that run at once, so many are enough if then no sequence is cut, where all are of
# equal lengths. 8 heads on an H200: 64 sequences of 2048 keys take 33 blocks for each head 138.8
# us, 32 of them 135.9; 128 of 1024 141.2 and 138.5; unequal lengths about the same time.
_ENOUGH_PLACES = 0.95


@dataclass(frozen=True)
class DecodeTile(Tile):
    """Tile of the `decode` family.

    Attributes
    ----------
    Br
        Rows of a thread block, 16 or 32: the query heads of a key/value head together.
    Bc
        Keys of a warp's tile, 16 or 32.
    warps
        Of a thread block; they share its keys. With wide heads a multiple of 4, which have the
        same keys and share their columns.
    stages
        Tiles in a warp's ring: one in use, the others on their way.
    min_blocks
        Thread blocks per SM that the compiler limits registers for, and that are launched.
    cluster
        Thread blocks of a cluster, which merges its results through shared memory; as many
        clusters share the keys of a head as the memory's bandwidth takes. 0 for as many blocks as
        run at once, merging through device memory.
    """

    warps: int = 4
    stages: int = 3
    min_blocks: int = 2
    cluster: int = 0


class DecodeFamily(Family[DecodeTile]):
    """Flash-Decoding, merged in the same kernel; with equal shares of all keys where it can."""

    name = "decode"
    source = "forward/decode.cu"
    tile_type = DecodeTile
    serves_sequences = True
    serves_quantized = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if problem.itemsize != 2:
            return f"its tensor-core products take float16 or bfloat16, not {problem.dtype}"
        if device.arch < 80:
            return f"needs sm_80 or newer for cp.async and its mma shapes, not {device.sm}"
        if reason := why_not_scale(problem):
            return reason
        layout, stored = problem.layout, problem.tensors["k"].dtype
        if stored == "float8_e4m3fn" and device.arch < FLOAT8_ARCH:
            return f"needs sm_{FLOAT8_ARCH} or newer to read {stored}, not {device.sm}"
        if layout.page_size and layout.max_pages == 0:
            return "its block_table has no pages"
        if self._first_legal(problem, device) is None:
            return f"no tile of it fits {device.name}"
        return None

    def why_not_first(self, problem: Problem, device: Device) -> str | None:
        rows = _rows(problem)
        most = _MOST_ROWS
        if _team(problem) > 1:
            # 128 query heads of latent attention are one query's rows.
            most = max(most, min(_group(problem), 16 * _MOST_SHARED_TILES))
        if not 1 <= rows <= most:
            return f"is for 1 to {most} query rows of a key/value head, and here are {rows}"
        if rows > _MOST_ROWS and _suits_hopper(problem, device):
            return f"reads keys anew for each 16 of {rows} rows, which hopper has in one tile"
        if problem.seqlen_k < _FEWEST_KEYS:
            return f"is for at least {_FEWEST_KEYS} keys, and here are {problem.seqlen_k}"
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[DecodeTile]:
        for Br, Bc, warps, min_blocks, cluster in itertools.product(
            (16, 32), (16, 32), (2, 4, 8), (1, 2, 3, 4), (0, *_CLUSTERS)
        ):
            if warps % _team(problem):
                continue
            tile = DecodeTile(Br, Bc, warps, 2, min_blocks, cluster)
            yield self._with_all_stages(problem, device, tile)

    def why_not_tile(self, problem: Problem, device: Device, tile: DecodeTile) -> str | None:
        if tile.Br not in (16, 32):
            return f"Br is {tile.Br}; expected 16 or 32"
        if tile.Bc not in (16, 32):
            return f"Bc is {tile.Bc}; expected 16 or 32"
        if problem.scales is not None and tile.Bc != _QUANTIZED_KEYS:
            return f"Bc is {tile.Bc}; expected {_QUANTIZED_KEYS} of a cache of 8 bits"
        if not 1 <= tile.warps <= 16:
            return f"warps is {tile.warps}; expected 1 to 16"
        team = _team(problem)
        if tile.warps % team:
            return f"warps is {tile.warps}; expected a multiple of {team} that share wide rows"
        if team > 1 and tile.Br != 16:
            return f"Br is {tile.Br}; expected 16 with warps that share wide rows"
        if not 2 <= tile.stages <= _MOST_STAGES:
            return f"stages is {tile.stages}; expected 2 to {_MOST_STAGES}"
        if tile.cluster not in (0, *_CLUSTERS):
            return f"cluster is {tile.cluster}; expected 0, 1, 2, 4 or 8"
        if tile.cluster and not _has_clusters(device):
            return f"needs sm_90 or sm_100 for clusters, not {device.sm}"
        if _rows(problem) > MAX_SEQLEN:
            return f"has {_rows(problem)} rows of a key/value head; {MAX_SEQLEN} can be counted"
        if tile.min_blocks < 1:
            return f"min_blocks is {tile.min_blocks}; expected at least 1"
        if tile.Br * _padded_dims(problem)[0] * problem.itemsize > _stage_bytes(problem, tile):
            return f"Br is {tile.Br}; its queries must fit a stage of {tile.Bc} keys and values"
        if tile.Br * _record_bytes(problem) > tile.stages * _stage_bytes(problem, tile):
            return f"stages is {tile.stages}; a warp's result must fit its ring"
        reason = why_not_blocks(
            device,
            threads=self.threads(tile),
            shared_memory=self.shared_memory(problem, tile),
            registers=self._registers(problem, tile),
            min_blocks=tile.min_blocks,
        )
        if reason:
            return reason
        items, splits = self._items(problem, tile), problem.layout.num_splits or 1
        if items * splits > MAX_GRID:
            return f"has {items} x {splits} splits of query tiles; {MAX_GRID} can be counted"
        if _units(problem, tile) > MAX_GRID:
            return f"may have {_units(problem, tile)} units of keys; {MAX_GRID} can be counted"
        return None

    def _registers(self, problem: Problem, tile: DecodeTile) -> int:
        """An estimate from below: queries, scores and output, and 40 for addresses and state."""
        row_tiles = tile.Br // 16
        columns, columns_v = (dim // _team(problem) for dim in _padded_dims(problem))
        return row_tiles * (columns // 4 + tile.Bc // 2 + columns_v // 2) + 40

    def default_tile(self, problem: Problem, device: Device) -> DecodeTile:
        tile = self._first_legal(problem, device)
        assert tile is not None, "asked only where why_not() has no reason"
        return tile

    def _first_legal(self, problem: Problem, device: Device) -> DecodeTile | None:
        preferred = self._preferred_tiles(problem, device)
        tiles = itertools.chain(preferred, self.candidates(problem, device))
        return next((t for t in tiles if self.why_not_tile(problem, device, t) is None), None)

    def _preferred_tiles(self, problem: Problem, device: Device) -> Iterator[DecodeTile]:
        """Tiles from the best down, of which the first that fits is the default."""
        if _team(problem) > 1:
            for tile in self._tiles_of_teams(problem):
                yield self._with_all_stages(problem, device, tile)
            return
        wide = max(problem.head_dim, problem.head_dim_v) > 128
        keys = 16 if problem.scales is None else _QUANTIZED_KEYS
        small = [DecodeTile(16, keys, min_blocks=2), DecodeTile(16, keys, min_blocks=1)]
        several_heads = problem.heads_kv >= _SEVERAL_HEADS
        is_tiny = problem.batch * problem.seqlen_k <= _TINY and several_heads
        large = DecodeTile(16, keys, warps=4 if wide or is_tiny else 8, min_blocks=1)
        has_much = _bytes(problem) > _LITTLE
        page_size = problem.layout.page_size
        tiles = [large, *small]
        if problem.is_batch_invariant:
            # Bc and warps decide in which order a row's keys are summed up.
            tiles = small
        elif problem.batch > _MANY and problem.seqlen_k < _SHORT:
            tiles = [*small, large]
        is_free = _is_balanced(problem, 16) and not problem.is_batch_invariant
        most_stages = _MOST_STAGES
        short_pages = 0 < page_size < _FEWEST_PAGE_ROWS
        most_in_clusters = math.inf if problem.scales is None else _LITTLE_QUANTIZED
        if page_size:
            most_in_clusters = min(most_in_clusters, _LITTLE if short_pages else _MUCH_IN_PAGES)
        suits_clusters = _has_clusters(device) and is_free and _bytes(problem) <= most_in_clusters
        if device.arch == 90 and is_free and several_heads and not short_pages:
            # Four blocks of two warps on an SM, where each has whole sequences, begin and end at
            # different times. 8 heads, batch x keys, us of an H200 beside the next best: 64 x 1024
            # 76.4, 77.7; 64 x 4096 249.6, 250.7; 64 x 8192 478.5, 478.6; 64 x 65536 3772, clusters
            # 3798; 128 x 1024, head_dim 64, 81.6, 83.5; 32 x 1024 of 32 heads 134.3, 135.8. Where
            # they have not, 48 x 8192: 370.4, 365.2.
            fine = DecodeTile(16, keys, warps=2, min_blocks=4)
            if _places_of_whole_sequences(problem, device, fine):
                tiles.insert(0, fine)
                suits_clusters = suits_clusters and not has_much
            if has_much and problem.scales is None:
                enough = ceil_div(_ENOUGH_ON_THE_WAY, large.warps * _stage_bytes(problem, large))
                most_stages = max(2, enough)
        if suits_clusters:
            yield from self._clustered(problem, device, large)
        for tile in tiles:
            full = self._with_all_stages(problem, device, tile)
            most = full.stages if any(tile is other for other in small) else most_stages
            yield dataclasses.replace(full, stages=min(most, full.stages))

    def _tiles_of_teams(self, problem: Problem) -> Iterator[DecodeTile]:
        """Two teams on an SM, in one thread block or one in each of two.

        Of 128 x 8192 keys of 576 columns, 512 of them the values, 16 query heads, on an H200: one
        block of two teams 301 us, with tiles of 16 keys 320, two blocks 328, one team 360. In 8
        bits two blocks 292, one 319; of 64 x 4096 keys, 128 query heads, 556 and 611.
        """
        together = DecodeTile(16, _QUANTIZED_KEYS, warps=2 * _TEAM, min_blocks=1)
        apart = DecodeTile(16, _QUANTIZED_KEYS, warps=_TEAM, min_blocks=2)
        finer = [dataclasses.replace(tile, Bc=16) for tile in (together, apart)]
        # What decides in which order keys are summed up must not go by the number of rows.
        several = _row_tiles(problem, 16) > _MOST_TILES_TOGETHER and not problem.is_batch_invariant
        if problem.scales is not None or several:
            yield from (apart, together, *reversed(finer))
        else:
            yield from (together, *finer, apart)
        yield from (dataclasses.replace(tile, min_blocks=1) for tile in (apart, finer[1]))

    def _clustered(
        self, problem: Problem, device: Device, tile: DecodeTile
    ) -> Iterator[DecodeTile]:
        """The tile with the best clusters, where clusters are better than none.

        That is the smallest of which one for each line is enough for the bandwidth, or else the
        largest, of those that leave shared memory enough for keys on their way. Of few heads with
        little to read the smallest that has all parts of a sequence: 16 x 1024 keys of one head, 32
        query heads, on an H200: clusters of 2, 4 and 8 take 13.3, 13.4 and 13.9 us; of 2 heads
        13.8, 14.0 and 15.0; 4 x 1024 of one head 12.4, 12.6 and 10.8. Where none has, those with a
        third stage: 1 x 8192 of one head 15.5, 13.9 and 14.4, of 2 heads 16.6, 14.3 and 15.1.
        """
        total = _bytes(problem)
        if _row_tiles(problem, tile.Br) > 1 and total > _READ_TWICE:
            return
        tiles = [
            self._with_all_stages(problem, device, dataclasses.replace(tile, cluster=cluster))
            for cluster in _CLUSTERS
        ]
        tiles = [tile for tile in tiles if tile.stages >= (2 if total <= _LITTLE else 3)]
        if not tiles:
            return
        lines = _lines(problem, tile.Br)
        enough = [tile for tile in tiles if _most_clusters(device, lines, tile) == 1]
        best = enough[0] if enough else tiles[-1]
        is_cut = self._blocks_of_sequence(problem, device, best) > 1
        is_short = _units(problem, best) <= _CLUSTER_UNITS * best.cluster
        few_heads = problem.heads_kv < _SEVERAL_HEADS and total <= _LITTLE
        if not enough and few_heads and is_cut and not is_short:
            holding = [
                t for t in tiles if self._blocks_of_sequence(problem, device, t) <= t.cluster
            ]
            with_third = [t for t in tiles if t.stages >= 3]
            best = holding[0] if holding else (with_third or tiles)[-1]
        blocks = best.cluster * _most_clusters(device, lines, best)
        if problem.batch < 2 * blocks or problem.seqlen_k >= _LONG:
            yield best

    def _with_all_stages(self, problem: Problem, device: Device, tile: DecodeTile) -> DecodeTile:
        """The tile with as many stages as its share of the SM's shared memory has place for."""
        per_block = device.shared_memory_per_sm // tile.min_blocks - device.reserved_shared_memory
        per_block = min(per_block, device.shared_memory_per_block) - _kept_bytes(problem, tile)
        per_block -= _meeting_bytes(problem, tile) + _STATE_BYTES
        stages = per_block // (_teams(problem, tile) * _stage_bytes(problem, tile))
        return dataclasses.replace(tile, stages=max(0, min(_MOST_STAGES, stages)))

    def shared_memory(self, problem: Problem, tile: DecodeTile) -> int:
        rings = _teams(problem, tile) * tile.stages * _stage_bytes(problem, tile)
        others = _meeting_bytes(problem, tile) + _kept_bytes(problem, tile)
        return rings + others + _STATE_BYTES

    def threads(self, tile: DecodeTile) -> int:
        return 32 * tile.warps

    def schedule(self, problem: Problem, device: Device, tile: DecodeTile) -> Schedule:
        cut = EVEN if _is_balanced(problem, tile.Br) else self._split(problem, device, tile)
        launched = _launched(tile, cut)
        if cut == EVEN:
            grid = self._blocks(problem, device, tile)
        else:
            grid = (self._items(problem, tile) * cut.parts, 1, 1)
        slots = self._slots(problem, device, tile, cut)
        launch = Launch(
            MAIN_ENTRY,
            "decode_forward",
            grid,
            self.threads(tile),
            self.shared_memory(problem, launched),
            tile.min_blocks,
            launched.cluster,
            ("params",) if problem.scales is None else ("quantized_params",),
        )
        return Schedule(
            (launch,),
            cut,
            workspace=slots * tile.Br * _slot_record_bytes(problem, launched),
            counters=slots * _pieces(launched),
            section_heads=heads_in_l2(problem, device),
        )

    def _split(self, problem: Problem, device: Device, tile: DecodeTile) -> Split:
        return split.choose(
            problem,
            device,
            q_tiles=_row_tiles(problem, tile.Br),
            key_tiles=ceil_div(problem.seqlen_k, _unit_keys(problem, tile)),
            blocks_per_sm=tile.min_blocks,
            group=_group(problem),
        )

    def _slots(self, problem: Problem, device: Device, tile: DecodeTile, cut: Split) -> int:
        """Places for results that meet in device memory."""
        if cut.is_whole:
            return 0
        if cut.kind == "parts":
            return self._items(problem, tile) * cut.parts
        row_tiles, heads, blocks = self._blocks(problem, device, tile)
        clusters = blocks // max(1, tile.cluster)
        if clusters == 1:
            return 0
        # A cluster leaves at most two: where its share begins, and ends.
        return 2 * row_tiles * heads * clusters

    def _items(self, problem: Problem, tile: DecodeTile) -> int:
        return problem.batch * problem.heads_kv * _row_tiles(problem, tile.Br)

    def _blocks(self, problem: Problem, device: Device, tile: DecodeTile) -> tuple[int, int, int]:
        """Row tiles, key/value heads, and how many thread blocks share the keys of each."""
        row_tiles = _row_tiles(problem, tile.Br)
        lines = _lines(problem, tile.Br)
        units = _units(problem, tile)
        places = _places_of_whole_sequences(problem, device, tile)
        places = max(1, min(places or _places(problem, device, tile), units))
        if tile.cluster:
            clusters = min(_most_clusters(device, lines, tile), ceil_div(units, tile.cluster))
            is_short = units <= _CLUSTER_UNITS * tile.cluster
            places = tile.cluster if is_short else clusters * tile.cluster
        return row_tiles, problem.heads_kv, places

    def _blocks_of_sequence(self, problem: Problem, device: Device, tile: DecodeTile) -> int:
        """Thread blocks of a head that have keys of one sequence, where lengths are equal."""
        units = _units(problem, tile)
        units_of_block = max(1, ceil_div(units, self._blocks(problem, device, tile)[2]))
        return ceil_div(units // max(1, problem.batch), units_of_block)

    def config(self, problem: Problem, tile: DecodeTile, split: Split) -> dict[str, int | bool]:
        layout, launched = problem.layout, _launched(tile, split)
        quantized: dict[str, int | bool] = {"quantized": problem.scales is not None}
        if problem.scales is not None:
            quantized |= {
                f"{name}_scales_by_key": _by_key(problem, strides)
                for name, strides in (("k", problem.scales.k), ("v", problem.scales.v))
            }
        return quantized | {
            "Br": tile.Br,
            "Bc": tile.Bc,
            "warps": tile.warps,
            "team": _team(problem),
            "stages": tile.stages,
            "values_in_keys": problem.values_in_keys,
            "cluster_units": _CLUSTER_UNITS,
            "reads_little": _bytes(problem) <= _FEW_BYTES,
            "q_in_registers": True,
            "kept_rows": _kept_rows(problem, tile),
            "group": _group(problem),
            "sequences": not layout.is_equal,
            "page_size": layout.page_size,
            "balanced": split == EVEN,
            "cluster": launched.cluster,
            "shared_memory": self.shared_memory(problem, launched),
        }


def _suits_hopper(problem: Problem, device: Device) -> bool:
    reasons = (_HOPPER.why_not, _HOPPER.why_not_first)
    return all(reason(problem, device) is None for reason in reasons)


def _places(problem: Problem, device: Device, tile: DecodeTile) -> int:
    """Thread blocks for each line of keys that run at once."""
    return device.sm_count * tile.min_blocks // _lines(problem, tile.Br)


def _places_of_whole_sequences(problem: Problem, device: Device, tile: DecodeTile) -> int:
    """Nearly as many as `_places`, of which each has whole sequences if lengths are equal.

    0 if there is no such number.
    """
    places = _places(problem, device, tile)
    counts = range(places, math.ceil(_ENOUGH_PLACES * places) - 1, -1)
    return next((count for count in counts if count and problem.batch % count == 0), 0)


def _most_clusters(device: Device, lines: int, tile: DecodeTile) -> int:
    """Clusters for each line of keys that are enough for the bandwidth.

    A power of two, so that sequences of equal lengths end where shares end.
    """
    enough = math.ceil(_SHARE_OF_SMS * device.sm_count / (lines * tile.cluster))
    return 1 << (enough - 1).bit_length()


def _has_clusters(device: Device) -> bool:
    return device.arch // 10 in (9, 10)


def _launched(tile: DecodeTile, cut: Split) -> DecodeTile:
    """The tile as it is launched: with a cluster only where blocks have even shares."""
    return tile if cut == EVEN else dataclasses.replace(tile, cluster=0)


def _is_balanced(problem: Problem, Br: int) -> bool:
    """Whether the thread blocks take equal shares of all keys, not splits of each sequence's.

    The kernel needs to know how many rows every sequence has, which packed queries do not tell.
    """
    layout = problem.layout
    if layout.packed_q or layout.num_splits:
        return False
    few_tiles = _row_tiles(problem, Br) <= _MOST_SHARED_TILES
    return few_tiles and problem.heads_kv <= MAX_GRID_Y


def _group(problem: Problem) -> int:
    """Query heads that share a key/value head; at least 1, for queries without heads."""
    return max(1, problem.heads_q // problem.heads_kv)


def _rows(problem: Problem) -> int:
    """Query rows of a sequence that share a key/value head."""
    return problem.seqlen_q * (problem.heads_q // problem.heads_kv)


def _row_tiles(problem: Problem, Br: int) -> int:
    return ceil_div(_rows(problem), Br)


def _lines(problem: Problem, Br: int) -> int:
    """Lines of keys that thread blocks share out: one for each head and row tile."""
    return max(1, problem.heads_kv * _row_tiles(problem, Br))


def _team(problem: Problem) -> int:
    """Warps that share the columns of a head."""
    return 1 if max(problem.head_dim, problem.head_dim_v) <= _MOST_COLUMNS else _TEAM


def _teams(problem: Problem, tile: DecodeTile) -> int:
    return tile.warps // _team(problem)


def _padded_dims(problem: Problem) -> tuple[int, int]:
    """Columns of keys and of values: whole steps of the tensor cores for each of a team.

    Values in keys have all of the keys', some of which may be none of the output's.
    """
    step = 16 * _team(problem)
    columns = round_up(problem.head_dim, step)
    return columns, columns if problem.values_in_keys else round_up(problem.head_dim_v, step)


def _by_key(problem: Problem, scales: Strides | None) -> bool:
    """Whether keys of a sequence's head may have different scales."""
    if scales is None:
        return False
    block, row, _ = scales
    return row != 0 or (problem.layout.page_size > 0 and block != 0)


def _key_bytes(problem: Problem) -> int:
    """A key and its value in shared memory, and their scales, which each of a team has."""
    size = ITEMSIZE[problem.tensors["k"].dtype]
    of_scales = 0
    if problem.scales is not None:
        each = problem.scales.given.values()
        of_scales = sum(_SCALE_BYTES for strides in each if _by_key(problem, strides))
    columns, columns_v = _padded_dims(problem)
    columns += 0 if problem.values_in_keys else columns_v
    return columns * size + of_scales * _team(problem)


def _bytes(problem: Problem) -> int:
    """All keys and values of the sequences, if they are as long as they may be."""
    return problem.batch * problem.seqlen_k * problem.heads_kv * _key_bytes(problem)


def _stage_bytes(problem: Problem, tile: DecodeTile) -> int:
    """Of all warps of a team."""
    return tile.Bc * _key_bytes(problem)


def _meeting_bytes(problem: Problem, tile: DecodeTile) -> int:
    """Where teams add up their scores, of two tiles in turns."""
    return 2 * tile.warps * tile.Br * tile.Bc * 4 if _team(problem) > 1 else 0


def _unit_keys(problem: Problem, tile: DecodeTile) -> int:
    """A tile for each team."""
    return tile.Bc * _teams(problem, tile)


def _units(problem: Problem, tile: DecodeTile) -> int:
    """Units of keys that all sequences together may have; one without keys has one too."""
    return problem.batch * max(1, ceil_div(problem.seqlen_k, _unit_keys(problem, tile)))


def _record_bytes(problem: Problem) -> int:
    """A row of a partial result, as the kernel's shared memory and workspace hold it."""
    return (_padded_dims(problem)[1] + 8) * 4


def _pieces(tile: DecodeTile) -> int:
    """Pieces of an item's columns that the blocks of a cluster may merge."""
    return max(1, tile.cluster)


def _slot_record_bytes(problem: Problem, tile: DecodeTile) -> int:
    """The same in pieces or whole, as the workspace has place for."""
    chunks = round_up(problem.head_dim_v, 16) // 4
    of_piece = (4 * ceil_div(chunks, _pieces(tile)) + 4) * 4
    return max(_record_bytes(problem), _pieces(tile) * of_piece)


def _kept_rows(problem: Problem, tile: DecodeTile) -> int:
    return max(1, min(tile.Br, _rows(problem)))


def _kept_bytes(problem: Problem, tile: DecodeTile) -> int:
    """The results of a cluster's blocks for an item."""
    return tile.cluster * _kept_rows(problem, tile) * _record_bytes(problem)
