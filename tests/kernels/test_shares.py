"""Tests of `kv_partition.cuh`, run on the host with the grids and the workspace that `decode` plans:
the partial tiles that each thread block processes."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cupy_flash.families.contract import KERNEL_DIR, score_config
from cupy_flash.families.decode import DecodeFamily, DecodeTile
from cupy_flash.families.schedule import EVEN, Schedule, Split
from cupy_flash.problem.arrays import ArraySpec
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.problem import Problem, make_contiguous_problem, make_problem

FOLDER = Path(__file__).resolve().parent / "host_kernels"
COMPILER = shutil.which("g++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernel's code with")

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
        wide = f"-head_dim{self.head_dim}" if self.team > 1 else ""
        name = f"{self.layout}-{self.group}-cluster{self.tile.cluster}-splits{self.num_splits}"
        return name + wide

    @property
    def team(self) -> int:
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
    Kind("packed", 2, tile(), num_splits=7),
    Kind("packed", 20, tile(Br=32), num_splits=2),
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
    def line(self) -> str:
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
        if s.is_equal:
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
            units = max(1, -(-keys // (tile.Bc * tile.warps // self.kind.team)))
            for item in itertools.product([b], range(p.heads_kv), range(row_tiles)):
                found[item] = units
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
    place: int
    result: int
    results: int
    slot: int
    is_spread: bool
    meetings: tuple[MergeGroup, ...]

    @property
    def item(self) -> tuple[int, int, int]:
        return self.batch, self.head_kv, self.row_tile


@dataclass(frozen=True)
class Taken:
    """Partial tiles of a launch, in the order of each thread block, and `keys_of_all`."""

    parts: list[PartialTile]
    keys_of_all: int

    def by_item(self) -> dict[tuple[int, int, int], list[PartialTile]]:
        found = defaultdict(list)
        for part in self.parts:
            found[part.item].append(part)
        return {
            item: sorted(parts, key=lambda p: (p.result, p.number)) for item, parts in found.items()
        }


Run = Callable[[list[Batch]], list[Taken]]


def spec(*shape: int) -> ArraySpec:
    return ArraySpec.contiguous(shape, "float16")


def problem_of(
    kind: Kind, *, batch: int, heads_kv: int, seqlen_q: int, seqlen_k: int, new_keys: int = 0
) -> Problem:
    heads_q = heads_kv * kind.group
    q, keys = spec(batch, seqlen_q, heads_q, kind.head_dim), (heads_kv, kind.head_dim)
    if kind.layout == "dense":
        return make_contiguous_problem(
            dtype="float16",
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=kind.head_dim,
            head_dim_v=kind.head_dim,
        )
    if kind.layout == "paged":
        page_size = 8
        table = (-(-seqlen_k // page_size), 1000)
        pages = spec(5, page_size, *keys)
        return make_problem(q, pages, pages, kind="cached", block_table=table, new_keys=new_keys)
    if kind.layout == "cache":
        cache = spec(batch + 3, seqlen_k, *keys)
        return make_problem(
            q,
            cache,
            cache,
            kind="cached",
            chosen_caches=True,
            new_keys=new_keys,
            num_splits=kind.num_splits,
        )
    packed = spec(1, batch * seqlen_k, *keys)
    return make_problem(
        spec(1, batch * seqlen_q, heads_q, kind.head_dim),
        packed,
        packed,
        kind="packed",
        batch=batch,
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        num_splits=kind.num_splits,
    )


def random_batch(rng: np.random.Generator, kind: Kind) -> Batch:
    count = int(rng.choice([1, 2, 5, 31, 32, 33, 70, 131]))
    # Emulated barriers between lanes are slow if the lengths differ.
    sm_count = int(rng.integers(1, 40 if count <= 33 else 12))
    seqlen_k = int(rng.choice([1, 16, 17, 203, 799]))
    seqlen_q = int(rng.integers(1, 4))
    appended = bool(kind.layout in ("cache", "paged") and rng.integers(2))
    problem = problem_of(
        kind,
        batch=count,
        heads_kv=int(rng.integers(1, 4)),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        new_keys=min(seqlen_q, seqlen_k) * appended,
    )
    batch = Batch(kind, problem, sm_count, keys=int(rng.integers(0, seqlen_k + 1)))
    if kind.layout == "dense":
        return batch
    if kind.layout == "packed":
        ends = np.cumsum(rng.integers(0, seqlen_q + 1, count))
        batch = replace(batch, cu_seqlens_q=(0, *map(int, ends)))
    # Either one length for all, or any lengths (also invalid ones), or few sequences with keys.
    lengths = rng.integers(-3, seqlen_k + 5, count)
    if rng.integers(3) == 0:
        lengths *= rng.random(count) < 0.1
    if kind.layout == "packed" or rng.integers(3):
        batch = replace(batch, seqused_k=tuple(map(int, lengths)))
    if kind.layout == "cache" and rng.integers(2):
        chosen = rng.integers(-1, count + 4, count)
        batch = replace(batch, cache_batch_idx=tuple(map(int, chosen)))
    return batch


def configs() -> str:
    """Return the header shares_configs.h, which the program is compiled with."""
    lines, cases = [], []
    for index, kind in enumerate(KINDS):
        problem = problem_of(kind, batch=2, heads_kv=1, seqlen_q=1, seqlen_k=99)
        split = Split.into(kind.num_splits) if kind.num_splits else EVEN
        members = decode.config(problem, kind.tile, split) | score_config(problem)
        members["causal"] = False
        fields = "".join(f"static constexpr int {n} = {int(v)}; " for n, v in members.items())
        lines.append(f"struct Config{index} {{ {fields}}};")
        cases.append(f"case {index}: Call<Config{index}>::print(p); return true;")
    return "\n".join(
        [
            *lines,
            "template <template <class> class Call>",
            "bool with_config(int config, const Params& p) {",
            "  switch (config) {",
            *cases,
            "  }",
            "  return false;",
            "}",
        ]
    )


@pytest.fixture(scope="module")
def take(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("host")
    (folder / "shares_configs.h").write_text(configs(), encoding="utf-8")
    options = ["-std=c++20", "-O1", "-fsanitize=address,undefined"]
    options += ["-fno-sanitize-recover=all"]
    options += [f"-I{path}" for path in (KERNEL_DIR, FOLDER, folder)]
    program, source = folder / "shares", FOLDER / "shares.cpp"
    subprocess.run([str(COMPILER), *options, str(source), "-o", str(program)], check=True)

    def run(batches: list[Batch]) -> list[Taken]:
        lines = "".join(batch.line + "\n" for batch in batches)
        done = subprocess.run(
            [str(program)], input=lines, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        launches = done.stdout.split("\n\n")[:-1]
        assert len(launches) == len(batches)
        return [_taken(text.splitlines()) for text in launches]

    return run


def _taken(lines: list[str]) -> Taken:
    *parts, keys = lines
    return Taken([_part([int(number) for number in line.split()]) for line in parts], int(keys))


def _part(numbers: list[int]) -> PartialTile:
    fixed = len(dataclasses.fields(PartialTile)) - 1
    fields = len(MergeGroup._fields)
    meetings = range(fixed, len(numbers), fields)
    return PartialTile(
        *numbers[:fixed], tuple(MergeGroup(*numbers[i : i + fields]) for i in meetings)
    )


def assert_is_a_partition(batch: Batch, taken: Taken) -> None:
    """Assert that every unit is in one partial tile, and that thread blocks agree on the split."""
    units, lengths, by_item = batch.units(), batch.lengths(), taken.by_item()
    assert by_item.keys() == units.keys()
    for item, parts in by_item.items():
        by_result = itertools.groupby(parts, key=lambda part: part.result)
        results = [list(those) for _, those in by_result]
        assert [those[0].result for those in results] == list(range(parts[0].results))
        assert len({part.results for part in parts}) == 1
        for those in results:
            assert [part.number for part in those] == list(range(those[0].count))
            assert len({(part.count, part.place, part.slot) for part in those}) == 1
        assert_is_spread_where_all_merge(batch, taken, parts)
        assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
        assert parts[-1].end == units[item]
        for part in parts:
            assert (part.seqlen_q, part.seqlen_k) == lengths[part.batch]


def assert_is_spread_where_all_merge(batch: Batch, taken: Taken, parts: list[PartialTile]) -> None:
    """Assert that is_spread is true exactly if all blocks of the clusters have the tile last."""
    size = batch.kind.tile.cluster
    last = {(part.x, part.y, part.z): part.item for part in taken.parts}
    places = {part.z for part in parts}
    whole = size > 1 and all(
        other in places for z in places for other in range(z - z % size, z - z % size + size)
    )
    expected = whole and all(last[part.x, part.y, part.z] == part.item for part in parts)
    assert {part.is_spread for part in parts} == {expected}


def assert_no_two_meet(batch: Batch, taken: Taken) -> None:
    """Assert that all slots of results and all counters are valid and distinct."""
    schedule = batch.schedule
    pieces = max(1, schedule.launches[0].cluster)
    piece = -(-batch.kind.head_dim // (4 * pieces)) * 4
    slot_bytes = batch.kind.tile.Br * max(batch.kind.head_dim + 8, pieces * (piece + 4)) * 4
    left = [part for part in taken.parts if part.results > 1 and part.number == 0]
    slots = [part.slot for part in left]
    assert len(set(slots)) == len(slots)
    most = schedule.workspace // slot_bytes
    assert all(0 <= slot < most for slot in slots)
    counters = []
    for parts in taken.by_item().values():
        if parts[0].results > 1:
            ways = [part.meetings for part in parts if part.number == 0]
            counters += assert_all_meet(ways)
    assert len(set(counters)) == len(counters)
    assert all(0 <= counter < schedule.counters // pieces for counter in counters)


def assert_all_meet(ways: list[tuple[MergeGroup, ...]]) -> list[int]:
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
def test_every_unit_of_keys_is_taken_once_and_no_two_results_have_a_place_in_common(
    take, rng, kind
):
    batches = [random_batch(rng, kind) for _ in range(8)]
    for batch, taken in zip(batches, take(batches), strict=True):
        assert_is_a_partition(batch, taken)
        assert_no_two_meet(batch, taken)
        assert taken.keys_of_all >= batch.problem.heads_kv * sum(k for _, k in batch.lengths())


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.num_splits], ids=str)
def test_an_items_parts_are_in_neighbouring_blocks_of_equal_shares_and_place_is_the_first(
    take, rng, kind
):
    batches = [random_batch(rng, kind) for _ in range(8)]
    for batch, taken in zip(batches, take(batches), strict=True):
        tile, work = batch.kind.tile, defaultdict(list)
        for part in taken.parts:
            assert (part.row_tile, part.head_kv) == (part.x, part.y)
            assert part.z % max(1, tile.cluster) == part.place + part.number
            work[part.x, part.y, part.z].append(part)
        *_, places = batch.grid
        line = sum(units for (_, *item), units in batch.units().items() if item == [0, 0])
        cluster = tile.cluster or places
        share = -(-line // (cluster if line <= 3 * tile.cluster else places))
        for block, parts in work.items():
            taken_units = sum(part.end - part.begin for part in parts)
            assert taken_units == min(share, line - share * block[2])
            # Partial tiles are consecutive, so that only the first and the last can be split.
            order = [(part.batch, part.begin) for part in parts]
            assert order == sorted(order)
            assert all(part.count == 1 for part in parts[1:-1])
            # A CTA of a cluster can receive the results of one output tile.
            assert sum(part.number == 0 and part.count > 1 for part in parts) <= 1


def test_a_block_that_finds_its_share_far_down_a_large_batch_has_the_right_sequence(take):
    kind = KINDS[2]
    problem = problem_of(kind, batch=260, heads_kv=1, seqlen_q=1, seqlen_k=799)
    # One long sequence follows many empty ones, and another one is the very last.
    lengths = [0] * 260
    lengths[129] = lengths[259] = 799
    batch = Batch(kind, problem, 5, seqused_k=tuple(lengths))
    (taken,) = take([batch])
    assert_is_a_partition(batch, taken)
    assert_no_two_meet(batch, taken)
    assert {part.z for part in taken.parts} == set(range(5))


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
def test_many_results_meet_group_by_group(take, kind, sm_count, levels):
    # The 2000 keys are 125 units.
    problem = problem_of(kind, batch=1, heads_kv=1, seqlen_q=1, seqlen_k=2000)
    batch = Batch(kind, problem, sm_count, keys=2000)
    (taken,) = take([batch])
    assert_is_a_partition(batch, taken)
    assert_no_two_meet(batch, taken)
    assert {len(part.meetings) for part in taken.parts} == {levels}


def test_fewer_blocks_than_parts_of_given_splits_take_several_each(take, rng):
    class OnFewBlocks(Batch):
        grid = (5, 1, 1)

    for kind in (KINDS[10], KINDS[11]):
        whole = random_batch(rng, kind)
        few = OnFewBlocks(**whole.__dict__)
        (taken,) = take([few])
        assert_is_a_partition(few, taken)
        assert_no_two_meet(few, taken)


def test_a_short_line_is_one_cluster_s(take):
    kind = KINDS[3]
    # The cache holds 50 units; with 40 SMs there are two clusters of 8 for each row tile.
    problem = problem_of(kind, batch=1, heads_kv=1, seqlen_q=1, seqlen_k=799)
    for keys, blocks in ((30, 2), (16 * 24, 8), (16 * 25, 13), (799, 13)):
        batch = Batch(kind, problem, 40, keys=keys)
        assert batch.grid == (2, 1, 16)
        (taken,) = take([batch])
        assert_is_a_partition(batch, taken)
        assert_no_two_meet(batch, taken)
        assert {part.z for part in taken.parts} == set(range(blocks))
