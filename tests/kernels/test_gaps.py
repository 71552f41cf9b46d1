"""Tests of `gaps.cuh`, run on the host: rows of packed queries that belong to no sequence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.draws import few_then_slow
from support.host_programs import HostProgram, needs_host_compiler

from cupy_flash.arrays.sequences import find_queries, unassigned_rows

pytestmark = needs_host_compiler


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> HostProgram:
    """Return the compiled program, which prints the rows assigned to each warp."""
    return HostProgram("gaps", tmp_path_factory)


Batch = tuple[int, int, int, np.ndarray]  # total_q, max_seqlen_q, warps, cu_seqlens_q


def ordered_batches(count: int) -> list[Batch]:
    rng = np.random.default_rng(5)
    batches = []
    for _ in range(count):
        lengths = rng.integers(0, rng.choice([2, 30]), rng.integers(1, 70))
        starts = rng.integers(0, 9) + np.concatenate([[0], np.cumsum(lengths)])
        total = int(starts[-1] + rng.integers(0, 50))
        batches.append((total, int(rng.integers(1, 40)), int(rng.integers(1, 9)), starts))
    return batches


def wild_batches(count: int) -> list[Batch]:
    rng = np.random.default_rng(6)
    batches = []
    for _ in range(count):
        starts = rng.integers(-100, 500, rng.integers(2, 40))
        starts[rng.integers(len(starts))] = rng.choice([-(2**31), 2**31 - 1, 7])
        batches.append((int(rng.integers(1, 400)), int(rng.choice([20, 10**9])), 3, starts))
    return batches


def unowned_rows(total: int, longest: int, starts: np.ndarray) -> list[int]:
    """Return the rows that belong to no sequence, by marking the rows of each sequence."""
    owned = np.zeros(total, bool)
    for rows in find_queries(starts, total, longest):
        owned[rows.rows] = True
    return [int(row) for row in np.flatnonzero(~owned)]


@pytest.mark.parametrize("make_batches", [ordered_batches, wild_batches])
# Each batch takes 0.2 s, because the kernel's code is compiled with sanitizers.
@pytest.mark.parametrize("count", few_then_slow([10, 300], 1))
def test_exactly_the_rows_of_no_sequence_are_listed(
    program: HostProgram, make_batches: Callable[[int], list[Batch]], count: int
) -> None:
    batches = make_batches(count)
    lines = (
        f"{len(starts) - 1} {total} {longest} {warps} {' '.join(map(str, starts))}"
        for total, longest, warps, starts in batches
    )
    found = [rows[:, 0].tolist() for rows in program.rows(lines, 1)]
    pairs = zip(found[::2], found[1::2], strict=True)
    for (total, longest, _, starts), listings in zip(batches, pairs, strict=True):
        expected = unowned_rows(total, longest, starts)
        decreases = bool((np.diff(np.clip(starts, 0, total)) < 0).any())
        for rows in listings:
            # If cu_seqlens_q decreases, gaps may overlap, and rows may appear twice.
            assert (sorted(set(rows)) if decreases else sorted(rows)) == expected, starts


@pytest.mark.parametrize("make_batches", [ordered_batches, wild_batches])
def test_the_host_finds_the_same_rows(make_batches: Callable[[int], list[Batch]]) -> None:
    for total, longest, _, starts in make_batches(300):
        ranges = unassigned_rows(find_queries(starts, total, longest), total)
        rows = [row for found in ranges for row in range(found.start, found.stop)]
        assert rows == unowned_rows(total, longest, starts), starts
