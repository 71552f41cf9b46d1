"""Tests of `varlen_order.cuh`, run on the host: the order in which query tiles of packed sequences
are assigned to thread blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest
from support.draws import few_then_slow
from support.host_programs import HostProgram, needs_host_compiler

# Same values as in `on_cpu/varlen_order.cpp`.
BR, BC = 64, 32

pytestmark = needs_host_compiler


class WorkTile(NamedTuple):
    """Work tile: one line of the program's output."""

    batch: int
    head: int
    head_kv: int
    q_begin: int
    begin: int
    end: int
    q_first: int
    seqlen_q: int
    k_first: int
    seqlen_k: int


@dataclass(frozen=True)
class Batch:
    """Packed sequences; the contents of the arrays may be invalid."""

    cu_seqlens_q: list[int]
    cu_seqlens_k: list[int]
    total_q: int
    total_k: int
    max_seqlen_q: int
    max_seqlen_k: int
    heads_q: int = 1
    heads_kv: int = 1
    causal: bool = False
    section_keys: int = 4096
    threads: int = 64
    splits: int = 1
    seqused_k: list[int] | None = field(default=None)
    deterministic: bool = False

    @classmethod
    def of_lengths(cls, q: list[int], k: list[int], **options: int) -> Batch:
        cu_q, cu_k = ([0, *map(int, np.cumsum(lengths))] for lengths in (q, k))
        return cls(cu_q, cu_k, cu_q[-1], cu_k[-1], max(q), max(k), **options)

    @property
    def line(self) -> str:
        numbers = [self.causal, self.threads, len(self.cu_seqlens_q) - 1]
        numbers += [self.max_seqlen_q, self.max_seqlen_k, self.heads_q, self.heads_kv]
        numbers += [self.section_keys, self.total_q, self.total_k, self.seqused_k is not None]
        numbers += [self.splits, self.deterministic]
        numbers += [*self.cu_seqlens_q, *self.cu_seqlens_k, *(self.seqused_k or [])]
        return " ".join(str(int(number)) for number in numbers)

    def sequences(self) -> list[tuple[int, int, int, int]]:
        """Return (q_first, seqlen_q, k_first, seqlen_k) of each sequence."""
        result = []
        for i in range(len(self.cu_seqlens_q) - 1):
            q_first = min(max(self.cu_seqlens_q[i], 0), self.total_q)
            q_end = min(max(self.cu_seqlens_q[i + 1], q_first), self.total_q)
            k_first = min(max(self.cu_seqlens_k[i], 0), self.total_k)
            keys = max(self.cu_seqlens_k[i + 1], 0) - max(self.cu_seqlens_k[i], 0)
            if self.seqused_k is not None:
                keys = self.seqused_k[i]
            capacity = min(self.max_seqlen_k, self.total_k - k_first)
            seqlen_q = min(q_end - q_first, self.max_seqlen_q)
            result.append((q_first, seqlen_q, k_first, min(max(keys, 0), capacity)))
        return result

    def expected(self) -> list[WorkTile]:
        """Return the work tiles of all query tiles, in any order."""
        work_tiles = []
        for i, (q_first, seqlen_q, k_first, seqlen_k) in enumerate(self.sequences()):
            for head in range(self.heads_q):
                for q_begin in range(0, seqlen_q, BR):
                    last = min(q_begin + BR, seqlen_q) - 1
                    visible = seqlen_k
                    if self.causal:
                        visible = min(seqlen_k, max(0, last + seqlen_k - seqlen_q + 1))
                    head_kv = head // (self.heads_q // self.heads_kv)
                    sequence = (q_first, seqlen_q, k_first, seqlen_k)
                    kv_tiles = -(-visible // BC)
                    split_tiles = -(-kv_tiles // self.splits)
                    for split in range(self.splits):
                        begin = min(kv_tiles, split * split_tiles)
                        keys = (begin, min(kv_tiles, begin + split_tiles))
                        work_tiles.append(WorkTile(i, head, head_kv, q_begin, *keys, *sequence))
        return work_tiles


Order = Callable[[list[Batch]], list[list[WorkTile]]]


@pytest.fixture(scope="module")
def assigned_tiles(tmp_path_factory: pytest.TempPathFactory) -> Order:
    program = HostProgram("varlen_order", tmp_path_factory)

    def run(batches: list[Batch]) -> list[list[WorkTile]]:
        batches_of_lines = _split_batches(program.output(batch.line for batch in batches))
        assert len(batches_of_lines) == len(batches)
        return [[WorkTile(*map(int, line.split())) for line in block] for block in batches_of_lines]

    return run


def _split_batches(text: str) -> list[list[str]]:
    batches: list[list[str]] = [[]]
    for line in text.splitlines():
        if line:
            batches[-1].append(line)
        else:
            batches.append([])
    return batches[:-1]


def random_batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    count = int(rng.choice([1, 2, 5, 32, 33, 70, 260]))
    longest = int(rng.choice([1, 64, 65, 200]))
    q, k = rng.integers(0, longest + 1, (2, count))
    heads_kv, group = map(int, rng.integers(1, 4, 2))
    lengths = [list(map(int, each)) for each in (q, k)]
    heads = {"heads_q": heads_kv * group, "heads_kv": heads_kv}
    causal, section_keys = bool(rng.integers(2)), int(rng.choice([1, 500, 2000, 10**6]))
    options = {"causal": causal, "section_keys": section_keys, "threads": int(rng.choice([32, 64]))}
    batch = Batch.of_lengths(*lengths, **heads, **options)
    if seed % 3 == 0:
        used = list(map(int, rng.integers(-3, longest + 3, count)))
        batch = replace(batch, seqused_k=used)
    return batch


@pytest.mark.parametrize("count", few_then_slow([3, 40], 1))
def test_every_query_tile_of_every_head_is_assigned_once_with_its_visible_keys(
    assigned_tiles, count
):
    batches = [random_batch(seed) for seed in range(count)]
    batches += [
        replace(random_batch(seed), causal=False, splits=splits)
        for seed, splits in zip(range(40, 40 + count // 2), itertools.cycle((2, 3, 7)))
    ]
    batches += [
        replace(random_batch(seed), deterministic=True) for seed in range(60, 60 + count // 2)
    ]
    for batch, work_tiles in zip(batches, assigned_tiles(batches), strict=True):
        assert sorted(work_tiles) == sorted(batch.expected())


def test_thread_blocks_that_each_build_the_order_agree(assigned_tiles):
    rng = np.random.default_rng(2)
    lengths = [int(n) for n in rng.choice([0, 1, 63, 64, 900, 1000], 300)]
    one, *others = (
        Batch.of_lengths([1] * 300, lengths, threads=threads, deterministic=True)
        for threads in (32, 64, 128)
    )
    expected = assigned_tiles([one])[0]
    # Sequences of equal length are in the order of their indices.
    by_length: dict[int, list[int]] = {}
    for work_tile in expected:
        by_length.setdefault(work_tile.seqlen_k, []).append(work_tile.batch)
    assert all(numbers == sorted(numbers) for numbers in by_length.values())
    assert all(work_tiles == expected for work_tiles in assigned_tiles(others))


@pytest.mark.slow
def test_for_any_lengths_no_row_outside_of_the_arrays_is_assigned(assigned_tiles):
    rng = np.random.default_rng(5)
    extreme = [0, 1, -1, 2**31 - 1, -(2**31), 2**30, 100, 333, 1000]
    batches = []
    for seed in range(60):
        count = int(rng.integers(1, 40))
        q, k = rng.choice(extreme, (2, count + 1))
        used = list(map(int, rng.choice(extreme, count))) if seed % 2 else None
        totals = {"total_q": 700, "total_k": 900, "max_seqlen_q": 500, "max_seqlen_k": 600}
        starts = [list(map(int, each)) for each in (q, k)]
        batches.append(Batch(*starts, **totals, causal=bool(seed % 4 // 2), seqused_k=used))
    for batch, work_tiles in zip(batches, assigned_tiles(batches), strict=True):
        assert sorted(work_tiles) == sorted(batch.expected())
        for work_tile in work_tiles:
            assert work_tile.q_first >= 0
            assert work_tile.q_first + work_tile.seqlen_q <= batch.total_q
            assert work_tile.k_first >= 0
            assert work_tile.k_first + work_tile.seqlen_k <= batch.total_k


def test_sequences_with_more_keys_come_first_but_for_an_eighth(assigned_tiles):
    rng = np.random.default_rng(1)
    lengths = [int(n) for n in np.exp(rng.uniform(np.log(16), np.log(16384), 200))]
    (work_tiles,) = assigned_tiles([Batch.of_lengths([1] * 200, lengths, section_keys=1)])
    order = [work_tile.seqlen_k for work_tile in work_tiles]
    longest_to_come = np.maximum.accumulate(order[::-1])[::-1]
    assert np.all(longest_to_come <= 1.125 * np.array(order))
    assert order[0] >= max(lengths) / 1.125


@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_is_processed_in_sections_of_heads_from_the_last_tile_to_the_first(
    assigned_tiles, causal
):
    batch = Batch.of_lengths([200], [200], heads_q=6, heads_kv=3, causal=causal, section_keys=450)
    (work_tiles,) = assigned_tiles([batch])
    # Two KV heads have 400 keys. Without a causal mask, a section is the heads of one KV head.
    section = 4 if causal else 2
    expected = [
        (head, q_begin)
        for first in range(0, 6, section)
        for q_begin in (192, 128, 64, 0)
        for head in range(first, min(first + section, 6))
    ]
    assert [(work_tile.head, work_tile.q_begin) for work_tile in work_tiles] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads_kv", "section_keys", "section"),
    [
        # Half of a 50 MB L2 cache in rows of head_dim 8; the largest number of keys.
        (1, 819_200, 4096),
        (1, 2**31 - 1, 4096),
        (4, 2**31 - 1, 4096),
        (4, 2, 2048),
        (4, 1, 1024),
    ],
)
def test_a_section_is_a_group_of_heads_at_least_and_all_at_most_however_few_keys_there_are(
    assigned_tiles, heads_kv, section_keys, section
):
    heads = {"heads_q": 4096, "heads_kv": heads_kv}
    batch = Batch.of_lengths([65], [1], **heads, causal=True, section_keys=section_keys)
    (work_tiles,) = assigned_tiles([batch])
    expected = [
        (head, q_begin)
        for first in range(0, 4096, section)
        for q_begin in (64, 0)
        for head in range(first, first + section)
    ]
    assert [(work_tile.head, work_tile.q_begin) for work_tile in work_tiles] == expected
