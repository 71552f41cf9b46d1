"""Tests of `kv_partition.cuh`, run on the host with the grids and workspace that `decode` plans:
the partial tiles that each thread block processes."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
from support.host_programs import HostProgram, needs_host_compiler

from cupy_flash.families.contract import score_config
from cupy_flash.families.decode import DecodeFamily, DecodeTile
from cupy_flash.families.schedule import EVEN, Schedule, Split
from cupy_flash.problem.arrays import ArraySpec
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.problem import Problem, make_problem

pytestmark = needs_host_compiler

decode = DecodeFamily()


@dataclass(frozen=True)
class Kind:
    """Compile-time parameters of a kernel; `layout` is the layout of the keys."""

    layout: str
    group: int
    tile: DecodeTile
    num_splits: int = 0
    head_dim: int = 16

    def __str__(self) -> str:
        wide = f"-head_dim{self.head_dim}" if self.column_warps > 1 else ""
        name = f"{self.layout}-{self.group}-cluster{self.tile.cluster}-splits{self.num_splits}"
        return name + wide

    @property
    def column_warps(self) -> int:
        """Number of warps that process the same keys."""
        return 1 if self.head_dim <= 256 else 4


def tile(Br: int = 16, warps: int = 1, cluster: int = 0) -> DecodeTile:
    return DecodeTile(Br, 16, warps, 4, 1, cluster)


# KV units are small, so that short sequences have many of them.
KINDS = (
    Kind("dense", 1, tile()),
    Kind("dense", 3, tile(warps=2, cluster=4)),
    Kind("cache", 4, tile()),
    Kind("cache", 20, tile(Br=16, cluster=8)),
    Kind("cache", 5, tile(Br=32, warps=2, cluster=8)),
    Kind("cache", 1, tile(cluster=2)),
    Kind("cache", 2, tile(cluster=1)),
    Kind("paged", 2, tile(warps=3)),
    Kind("paged", 7, tile(cluster=4)),
    Kind("cache", 5, tile(warps=8), head_dim=320),
    Kind("cache", 3, tile(), num_splits=1),
    Kind("cache", 9, tile(), num_splits=3),
    Kind("varlen", 2, tile(), num_splits=7),
    Kind("varlen", 20, tile(Br=32), num_splits=2),
)


@dataclass(frozen=True)
class Batch:
    """A problem with the contents of its arrays, which may be invalid."""

    kind: Kind
    problem: Problem
    sm_count: int
    keys: int = 0
    cu_seqlens_q: tuple[int, ...] = ()
    seqused_k: tuple[int, ...] = ()
    cache_batch_idx: tuple[int, ...] = ()

    @property
    def schedule(self) -> Schedule:
        device = replace(device_for_arch("sm_90"), sm_count=self.sm_count)
        return decode.schedule(self.problem, device, self.kind.tile)

    @property
    def grid(self) -> tuple[int, int, int]:
        (launch,) = self.schedule.launches
        return launch.grid

    @property
    def text_line(self) -> str:
        p, s = self.problem, self.problem.layout
        numbers = [KINDS.index(self.kind), *self.grid, p.batch, p.seqlen_q, p.seqlen_k, p.heads_kv]
        numbers += [self.schedule.split.parts, s.caches, s.total_q, self.keys]
        numbers.append(s.new_keys)
        arrays = (self.cu_seqlens_q, self.seqused_k, self.cache_batch_idx)
        numbers += [bool(array) for array in arrays]
        return " ".join(str(int(number)) for number in itertools.chain(numbers, *arrays))

    def lengths(self) -> list[tuple[int, int]]:
        """Return the numbers of queries and keys of each sequence."""
        p, s = self.problem, self.problem.layout
        if s.is_dense:
            return [(p.seqlen_q, p.seqlen_k)] * p.batch
        result = []
        for b in range(p.batch):
            capacity = p.seqlen_k
            if self.cache_batch_idx and not 0 <= self.cache_batch_idx[b] < s.caches:
                capacity = 0
            keys = self.seqused_k[b] if self.seqused_k else self.keys
            keys = min(min(max(keys, 0), capacity) + s.new_keys, capacity)
            seqlen_q = p.seqlen_q
            if self.cu_seqlens_q:
                seqlen_q = self.cu_seqlens_q[b + 1] - self.cu_seqlens_q[b]
            result.append((seqlen_q, keys))
        return result

    def units(self) -> dict[tuple[int, int, int], int]:
        """Return the number of KV units of each output tile (sequence, KV head, row tile)."""
        p, tile = self.problem, self.kind.tile
        found = {}
        for b, (seqlen_q, keys) in enumerate(self.lengths()):
            row_tiles = -(-seqlen_q * self.kind.group // tile.Br)
            units = max(1, -(-keys // (tile.Bc * tile.warps // self.kind.column_warps)))
            for output_tile in itertools.product([b], range(p.heads_kv), range(row_tiles)):
                found[output_tile] = units
        return found


class MergeGroup(NamedTuple):
    """Merge group: results of an output tile that one thread block merges."""

    first: int
    step: int
    count: int
    counter: int
    is_last: int


@dataclass(frozen=True)
class PartialTile:
    """Partial tile: one line of the program's output."""

    x: int
    y: int
    z: int
    batch: int
    head_kv: int
    row_tile: int
    seqlen_q: int
    seqlen_k: int
    begin: int
    end: int
    number: int
    count: int
    first_cta_rank: int
    result: int
    results: int
    slot: int
    is_sliced: bool
    merge_groups: tuple[MergeGroup, ...]

    @property
    def output_tile(self) -> tuple[int, int, int]:
        return self.batch, self.head_kv, self.row_tile


@dataclass(frozen=True)
class Partition:
    """Partial tiles of a launch, in the order of each thread block, and `total_keys`."""

    partial_tiles: list[PartialTile]
    total_keys: int

    def by_output_tile(self) -> dict[tuple[int, int, int], list[PartialTile]]:
        found = defaultdict(list)
        for partial_tile in self.partial_tiles:
            found[partial_tile.output_tile].append(partial_tile)
        return {
            output_tile: sorted(partial_tiles, key=lambda p: (p.result, p.number))
            for output_tile, partial_tiles in found.items()
        }


Run = Callable[[list[Batch]], list[Partition]]


def spec(*shape: int) -> ArraySpec:
    return ArraySpec.contiguous(shape, "float16")


def problem_of(
    kind: Kind, *, batch: int, heads_kv: int, seqlen_q: int, seqlen_k: int, new_keys: int = 0
) -> Problem:
    heads_q = heads_kv * kind.group
    q, keys = spec(batch, seqlen_q, heads_q, kind.head_dim), (heads_kv, kind.head_dim)
    if kind.layout == "dense":
        k = spec(batch, seqlen_k, *keys)
        return make_problem(q, k, k)
    if kind.layout == "paged":
        page_size = 8
        table = (-(-seqlen_k // page_size), 1000)
        pages = spec(5, page_size, *keys)
        return make_problem(q, pages, pages, kind="kvcache", block_table=table, new_keys=new_keys)
    if kind.layout == "cache":
        cache, of_cache = spec(batch + 3, seqlen_k, *keys), {"chosen_caches": True}
        options = {"new_keys": new_keys, "num_splits": kind.num_splits}
        return make_problem(q, cache, cache, kind="kvcache", **of_cache, **options)
    packed = spec(1, batch * seqlen_k, *keys)
    packed_q = spec(1, batch * seqlen_q, heads_q, kind.head_dim)
    longest = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    options = {"batch": batch, "num_splits": kind.num_splits}
    return make_problem(packed_q, packed, packed, kind="varlen", **longest, **options)


def random_batch(rng: np.random.Generator, kind: Kind) -> Batch:
    count = int(rng.choice([1, 2, 5, 31, 32, 33, 70, 131]))
    # Emulated barriers between lanes are slow if the lengths differ.
    sm_count = int(rng.integers(1, 40 if count <= 33 else 12))
    seqlen_k = int(rng.choice([1, 16, 17, 203, 799]))
    seqlen_q = int(rng.integers(1, 4))
    appended = bool(kind.layout in ("cache", "paged") and rng.integers(2))
    sizes = {"heads_kv": int(rng.integers(1, 4)), "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    problem = problem_of(kind, batch=count, **sizes, new_keys=min(seqlen_q, seqlen_k) * appended)
    batch = Batch(kind, problem, sm_count, keys=int(rng.integers(0, seqlen_k + 1)))
    if kind.layout == "dense":
        return batch
    if kind.layout == "varlen":
        ends = np.cumsum(rng.integers(0, seqlen_q + 1, count))
        batch = replace(batch, cu_seqlens_q=(0, *map(int, ends)))
    # Either one length for all, or any lengths (also invalid ones), or few sequences with keys.
    lengths = rng.integers(-3, seqlen_k + 5, count)
    if rng.integers(3) == 0:
        lengths *= rng.random(count) < 0.1
    if kind.layout == "varlen" or rng.integers(3):
        batch = replace(batch, seqused_k=tuple(map(int, lengths)))
    if kind.layout == "cache" and rng.integers(2):
        chosen = rng.integers(-1, count + 4, count)
        batch = replace(batch, cache_batch_idx=tuple(map(int, chosen)))
    return batch


def configs() -> str:
    """Return the header kv_partition_configs.h, which the program is compiled with."""
    lines, cases = [], []
    for index, kind in enumerate(KINDS):
        problem = problem_of(kind, batch=2, heads_kv=1, seqlen_q=1, seqlen_k=99)
        split = Split.into(kind.num_splits) if kind.num_splits else EVEN
        members = decode.config(problem, kind.tile, split) | score_config(problem)
        members["causal"] = False
        fields = "".join(f"static constexpr int {n} = {int(v)}; " for n, v in members.items())
        lines.append(f"struct Config{index} {{ {fields}}};")
        cases.append(f"case {index}: Call<Config{index}>::print(p); return true;")
    head = "template <template <class> class Call>\nbool with_config(int config, const Params& p) {"
    return "\n".join([*lines, head, "switch (config) {", *cases, "}", "return false;", "}"])


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("cpu")
    (folder / "kv_partition_configs.h").write_text(configs(), encoding="utf-8")
    program = HostProgram("kv_partition", tmp_path_factory, f"-I{folder}")

    def run(batches: list[Batch]) -> list[Partition]:
        launches = program.output(batch.text_line for batch in batches).split("\n\n")[:-1]
        assert len(launches) == len(batches)
        return [_partition(text.splitlines()) for text in launches]

    return run


def _partition(lines: list[str]) -> Partition:
    *partial_tiles, keys = lines
    numbers = ([int(number) for number in line.split()] for line in partial_tiles)
    return Partition([_partial_tile(each) for each in numbers], int(keys))


def _partial_tile(numbers: list[int]) -> PartialTile:
    fixed = len(dataclasses.fields(PartialTile)) - 1
    groups = np.reshape(numbers[fixed:], (-1, len(MergeGroup._fields))).tolist()
    return PartialTile(*numbers[:fixed], tuple(MergeGroup(*group) for group in groups))


def assert_is_whole(batch: Batch, partition: Partition) -> None:
    """Assert that the partial tiles are a partition, and that each result has its own slot."""
    assert_is_a_partition(batch, partition)
    assert_slots_are_distinct(batch, partition)


def assert_is_a_partition(batch: Batch, partition: Partition) -> None:
    """Assert that every unit is in one partial tile, and that thread blocks agree on the split."""
    units, lengths, by_output_tile = batch.units(), batch.lengths(), partition.by_output_tile()
    assert by_output_tile.keys() == units.keys()
    for output_tile, partial_tiles in by_output_tile.items():
        by_result = itertools.groupby(partial_tiles, key=lambda partial_tile: partial_tile.result)
        results = [list(those) for _, those in by_result]
        assert [those[0].result for those in results] == list(range(partial_tiles[0].results))
        assert len({partial_tile.results for partial_tile in partial_tiles}) == 1
        for those in results:
            assert [partial_tile.number for partial_tile in those] == list(range(those[0].count))
            assert len({(tile.count, tile.first_cta_rank, tile.slot) for tile in those}) == 1
        assert_is_sliced_where_all_merge(batch, partition, partial_tiles)
        ends = [partial_tile.end for partial_tile in partial_tiles]
        assert [partial_tile.begin for partial_tile in partial_tiles] == [0, *ends[:-1]]
        assert partial_tiles[-1].end == units[output_tile]
        for partial_tile in partial_tiles:
            assert (partial_tile.seqlen_q, partial_tile.seqlen_k) == lengths[partial_tile.batch]


def assert_is_sliced_where_all_merge(
    batch: Batch, partition: Partition, partial_tiles: list[PartialTile]
) -> None:
    """Assert that `is_sliced` says if all blocks of these clusters process the output tile last."""
    size = batch.kind.tile.cluster
    last = {(tile.x, tile.y, tile.z): tile.output_tile for tile in partition.partial_tiles}
    cta_indices = {partial_tile.z for partial_tile in partial_tiles}
    clusters = (range(z - z % size, z - z % size + size) for z in cta_indices if size > 1)
    whole = size > 1 and all(other in cta_indices for cluster in clusters for other in cluster)
    expected = whole and all(
        last[tile.x, tile.y, tile.z] == tile.output_tile for tile in partial_tiles
    )
    assert {partial_tile.is_sliced for partial_tile in partial_tiles} == {expected}


def assert_slots_are_distinct(batch: Batch, partition: Partition) -> None:
    """Assert that all slots of results and all counters are valid and distinct."""
    schedule = batch.schedule
    slices = max(1, schedule.launches[0].cluster)
    slice_columns = -(-batch.kind.head_dim // (4 * slices)) * 4
    slot_bytes = batch.kind.tile.Br * max(batch.kind.head_dim + 8, slices * (slice_columns + 4)) * 4
    tiles = partition.partial_tiles
    left = [tile for tile in tiles if tile.results > 1 and tile.number == 0]
    slots = [partial_tile.slot for partial_tile in left]
    assert len(set(slots)) == len(slots)
    slot_count = schedule.workspace // slot_bytes
    assert all(0 <= slot < slot_count for slot in slots)
    counters = []
    for partial_tiles in partition.by_output_tile().values():
        if partial_tiles[0].results > 1:
            ways = [tile.merge_groups for tile in partial_tiles if tile.number == 0]
            counters += assert_tree_covers_all_results(ways)
    assert len(set(counters)) == len(counters)
    assert all(0 <= counter < schedule.counters // slices for counter in counters)


def assert_tree_covers_all_results(ways: list[tuple[MergeGroup, ...]]) -> list[int]:
    """Assert that the merge groups form a tree over all results; return the groups' counters.

    `ways` holds the merge groups that each result of an output tile passes through.
    """
    arriving = {result: way for result, way in enumerate(ways)}
    counters = []
    for level in range(len(ways[0])):
        groups = defaultdict(list)
        for result, way in arriving.items():
            groups[way[level]].append(result)
        for group, results in groups.items():
            assert results == [group.first + i * group.step for i in range(group.count)]
            assert group.is_last == (len(groups) == 1)
        counters += [group.counter for group in groups if group.count > 1]
        arriving = {group.first: ways[group.first] for group in groups}
    assert list(arriving) == [0]
    return counters


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kv_unit_is_processed_once_and_slots_of_results_are_distinct(partitions, rng, kind):
    batches = [random_batch(rng, kind) for _ in range(8)]
    for batch, partition in zip(batches, partitions(batches), strict=True):
        assert_is_whole(batch, partition)
        assert partition.total_keys >= batch.problem.heads_kv * sum(k for _, k in batch.lengths())


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.num_splits], ids=str)
def test_work_ranges_are_equal_and_partial_tiles_of_an_output_tile_are_adjacent(
    partitions, rng, kind
):
    batches = [random_batch(rng, kind) for _ in range(8)]
    for batch, partition in zip(batches, partitions(batches), strict=True):
        tile, work = batch.kind.tile, defaultdict(list)
        for partial_tile in partition.partial_tiles:
            assert (partial_tile.row_tile, partial_tile.head_kv) == (partial_tile.x, partial_tile.y)
            rank = partial_tile.first_cta_rank + partial_tile.number
            assert partial_tile.z % max(1, tile.cluster) == rank
            work[partial_tile.x, partial_tile.y, partial_tile.z].append(partial_tile)
        *_, cta_indices = batch.grid
        first = [units for (_, *place), units in batch.units().items() if place == [0, 0]]
        total = sum(first)
        cluster = tile.cluster or cta_indices
        range_units = -(-total // (cluster if total <= 3 * tile.cluster else cta_indices))
        for block, partial_tiles in work.items():
            taken_units = sum(each.end - each.begin for each in partial_tiles)
            assert taken_units == min(range_units, total - range_units * block[2])
            # Partial tiles are consecutive, so that only the first and the last can be split.
            order = [(partial_tile.batch, partial_tile.begin) for partial_tile in partial_tiles]
            assert order == sorted(order)
            assert all(partial_tile.count == 1 for partial_tile in partial_tiles[1:-1])
            # A CTA of a cluster can receive the results of one output tile.
            received = [each for each in partial_tiles if each.number == 0 and each.count > 1]
            assert len(received) <= 1


def test_a_work_range_far_into_a_large_batch_has_the_right_sequence(partitions):
    kind = KINDS[2]
    problem = problem_of(kind, batch=260, heads_kv=1, seqlen_q=1, seqlen_k=799)
    # One long sequence follows many empty ones, and another one is the very last.
    lengths = [0] * 260
    lengths[129] = lengths[259] = 799
    batch = Batch(kind, problem, 5, seqused_k=tuple(lengths))
    (partition,) = partitions([batch])
    assert_is_whole(batch, partition)
    assert {partial_tile.z for partial_tile in partition.partial_tiles} == set(range(5))


@pytest.mark.parametrize(
    ("kind", "sm_count", "levels"),
    [
        (KINDS[0], 9, 2),
        (KINDS[2], 132, 3),
        (KINDS[5], 132, 2),
        (KINDS[6], 132, 2),
        (KINDS[6], 9, 1),
    ],
    ids=str,
)
def test_many_results_are_merged_as_a_tree(partitions, kind, sm_count, levels):
    # The 2000 keys are 125 units of 16 keys, the smallest ranges that a CTA may take.
    problem = problem_of(kind, batch=1, heads_kv=1, seqlen_q=1, seqlen_k=2000)
    batch = Batch(kind, problem, sm_count, keys=2000)
    (partition,) = partitions([batch])
    assert_is_whole(batch, partition)
    assert {len(partial_tile.merge_groups) for partial_tile in partition.partial_tiles} == {levels}


def test_fewer_thread_blocks_than_splits_process_several_each(partitions, rng):
    class OnFewBlocks(Batch):
        grid = (5, 1, 1)

    for kind in (KINDS[10], KINDS[11]):
        whole = random_batch(rng, kind)
        few = OnFewBlocks(**whole.__dict__)
        (partition,) = partitions([few])
        assert_is_whole(few, partition)


def test_few_units_go_to_one_cluster(partitions):
    kind = KINDS[3]
    # The cache holds 50 units; with 40 SMs there are two clusters of 8 for each row tile.
    problem = problem_of(kind, batch=1, heads_kv=1, seqlen_q=1, seqlen_k=799)
    for keys, blocks in ((30, 2), (16 * 24, 8), (16 * 25, 13), (799, 13)):
        batch = Batch(kind, problem, 40, keys=keys)
        assert batch.grid == (2, 1, 16)
        (partition,) = partitions([batch])
        assert_is_whole(batch, partition)
        assert {partial_tile.z for partial_tile in partition.partial_tiles} == set(range(blocks))
