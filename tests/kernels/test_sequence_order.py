"""Tests of `varlen_order.cuh`, run on the host: the order in which query tiles of packed sequences are
assigned to thread blocks."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.draws import few_then_slow

from cupy_flash.families.contract import KERNEL_DIR

# Same values as in `host_kernels/sequence_order.cpp`.
BR, BC = 64, 32
FOLDER = Path(__file__).resolve().parent / "host_kernels"
COMPILER = shutil.which("g++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernel's code with")


class Visit(NamedTuple):
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
    alike: bool = False

    @classmethod
    def of_lengths(cls, q: list[int], k: list[int], **options: int) -> Batch:
        cu_q, cu_k = ([0, *map(int, np.cumsum(lengths))] for lengths in (q, k))
        return cls(cu_q, cu_k, cu_q[-1], cu_k[-1], max(q), max(k), **options)

    @property
    def line(self) -> str:
        numbers = [self.causal, self.threads, len(self.cu_seqlens_q) - 1]
        numbers += [self.max_seqlen_q, self.max_seqlen_k, self.heads_q, self.heads_kv]
        numbers += [self.section_keys, self.total_q, self.total_k, self.seqused_k is not None]
        numbers += [self.splits, self.alike]
        numbers += [*self.cu_seqlens_q, *self.cu_seqlens_k, *(self.seqused_k or [])]
        return " ".join(str(int(number)) for number in numbers)

    def places(self) -> list[tuple[int, int, int, int]]:
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

    def expected(self) -> list[Visit]:
        """Return the work tiles of all query tiles, in any order."""
        visits = []
        for i, (q_first, seqlen_q, k_first, seqlen_k) in enumerate(self.places()):
            for head in range(self.heads_q):
                for q_begin in range(0, seqlen_q, BR):
                    last = min(q_begin + BR, seqlen_q) - 1
                    seen = seqlen_k
                    if self.causal:
                        seen = min(seqlen_k, max(0, last + seqlen_k - seqlen_q + 1))
                    head_kv = head // (self.heads_q // self.heads_kv)
                    place = (q_first, seqlen_q, k_first, seqlen_k)
                    blocks = -(-seen // BC)
                    share = -(-blocks // self.splits)
                    for split in range(self.splits):
                        begin = min(blocks, split * share)
                        keys = (begin, min(blocks, begin + share))
                        visits.append(Visit(i, head, head_kv, q_begin, *keys, *place))
        return visits


Order = Callable[[list[Batch]], list[list[Visit]]]


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory: pytest.TempPathFactory) -> Order:
    program = tmp_path_factory.mktemp("host") / "sequence_order"
    source = FOLDER / "sequence_order.cpp"
    options = ["-std=c++20", "-O1", "-fsanitize=address,undefined"]
    options += ["-fno-sanitize-recover=all", f"-I{KERNEL_DIR}", f"-I{FOLDER}"]
    subprocess.run([str(COMPILER), *options, str(source), "-o", str(program)], check=True)

    def run(batches: list[Batch]) -> list[list[Visit]]:
        lines = "\n".join(batch.line for batch in batches) + "\n"
        done = subprocess.run(
            [str(program)], input=lines, capture_output=True, text=True, check=True
        )
        blocks = _split_batches(done.stdout)
        assert len(blocks) == len(batches)
        return [[Visit(*map(int, line.split())) for line in block] for block in blocks]

    return run


def _split_batches(text: str) -> list[list[str]]:
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if line:
            blocks[-1].append(line)
        else:
            blocks.append([])
    return blocks[:-1]


def random_batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    count = int(rng.choice([1, 2, 5, 32, 33, 70, 260]))
    longest = int(rng.choice([1, 64, 65, 200]))
    q, k = rng.integers(0, longest + 1, (2, count))
    heads_kv, group = map(int, rng.integers(1, 4, 2))
    batch = Batch.of_lengths(
        list(map(int, q)),
        list(map(int, k)),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        causal=bool(rng.integers(2)),
        section_keys=int(rng.choice([1, 500, 2000, 10**6])),
        threads=int(rng.choice([32, 64])),
    )
    if seed % 3 == 0:
        used = list(map(int, rng.integers(-3, longest + 3, count)))
        batch = Batch(**{**batch.__dict__, "seqused_k": used})
    return batch


@pytest.mark.parametrize("count", few_then_slow([3, 40], 1))
def test_every_query_tile_of_every_head_is_handed_out_once_with_the_keys_that_it_sees(
    handed_out, count
):
    batches = [random_batch(seed) for seed in range(count)]
    batches += [
        replace(random_batch(seed), causal=False, splits=splits)
        for seed, splits in zip(range(40, 40 + count // 2), itertools.cycle((2, 3, 7)))
    ]
    batches += [replace(random_batch(seed), alike=True) for seed in range(60, 60 + count // 2)]
    for batch, visits in zip(batches, handed_out(batches), strict=True):
        assert sorted(visits) == sorted(batch.expected())


def test_blocks_that_make_the_order_each_for_itself_come_to_the_same(handed_out):
    rng = np.random.default_rng(2)
    lengths = [int(n) for n in rng.choice([0, 1, 63, 64, 900, 1000], 300)]
    one, *others = (
        Batch.of_lengths([1] * 300, lengths, threads=threads, alike=True)
        for threads in (32, 64, 128)
    )
    expected = handed_out([one])[0]
    # Sequences of equal length are in the order of their indices.
    by_length: dict[int, list[int]] = {}
    for visit in expected:
        by_length.setdefault(visit.seqlen_k, []).append(visit.batch)
    assert all(numbers == sorted(numbers) for numbers in by_length.values())
    assert all(visits == expected for visits in handed_out(others))


@pytest.mark.slow
def test_whatever_the_numbers_are_no_row_outside_of_the_arrays_is_named(handed_out):
    rng = np.random.default_rng(5)
    extreme = [0, 1, -1, 2**31 - 1, -(2**31), 2**30, 100, 333, 1000]
    batches = []
    for seed in range(60):
        count = int(rng.integers(1, 40))
        q, k = rng.choice(extreme, (2, count + 1))
        used = list(map(int, rng.choice(extreme, count))) if seed % 2 else None
        batches.append(
            Batch(
                list(map(int, q)),
                list(map(int, k)),
                total_q=700,
                total_k=900,
                max_seqlen_q=500,
                max_seqlen_k=600,
                causal=bool(seed % 4 // 2),
                seqused_k=used,
            )
        )
    for batch, visits in zip(batches, handed_out(batches), strict=True):
        assert sorted(visits) == sorted(batch.expected())
        for visit in visits:
            assert visit.q_first >= 0
            assert visit.q_first + visit.seqlen_q <= batch.total_q
            assert visit.k_first >= 0
            assert visit.k_first + visit.seqlen_k <= batch.total_k


def test_sequences_with_more_keys_come_first_but_for_an_eighth(handed_out):
    rng = np.random.default_rng(1)
    lengths = [int(n) for n in np.exp(rng.uniform(np.log(16), np.log(16384), 200))]
    (visits,) = handed_out([Batch.of_lengths([1] * 200, lengths, section_keys=1)])
    order = [visit.seqlen_k for visit in visits]
    longest_to_come = np.maximum.accumulate(order[::-1])[::-1]
    assert np.all(longest_to_come <= 1.125 * np.array(order))
    assert order[0] >= max(lengths) / 1.125


@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_is_taken_in_sections_of_heads_from_the_last_tile_to_the_first(
    handed_out, causal
):
    batch = Batch.of_lengths([200], [200], heads_q=6, heads_kv=3, causal=causal, section_keys=450)
    (visits,) = handed_out([batch])
    # Two KV heads have 400 keys. Without a causal mask, a section is the heads of one KV head.
    section = 4 if causal else 2
    expected = [
        (head, q_begin)
        for first in range(0, 6, section)
        for q_begin in (192, 128, 64, 0)
        for head in range(first, min(first + section, 6))
    ]
    assert [(visit.head, visit.q_begin) for visit in visits] == expected


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
    handed_out, heads_kv, section_keys, section
):
    batch = Batch.of_lengths(
        [65],
        [1],
        heads_q=4096,
        heads_kv=heads_kv,
        causal=True,
        section_keys=section_keys,
    )
    (visits,) = handed_out([batch])
    expected = [
        (head, q_begin)
        for first in range(0, 4096, section)
        for q_begin in (64, 0)
        for head in range(first, first + section)
    ]
    assert [(visit.head, visit.q_begin) for visit in visits] == expected
