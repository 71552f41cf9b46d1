"""Tests of `packed_tiles.cuh`, run on the host: rows and tile slots of packed sequences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from support.host_programs import HostProgram, needs_host_compiler

# Same value as in `on_cpu/packed_tiles.cpp`.
ROWS = 24

pytestmark = needs_host_compiler


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> HostProgram:
    """Return the compiled program, which prints the owners of tile slots and rows."""
    return HostProgram("packed_tiles", tmp_path_factory)


class Ranges(NamedTuple):
    """Results of the program: (sequence, begin, end) for each tile slot, row and sequence.

    `ordered` has the tile slots of each sequence in the order of lengths.
    """

    of_slots: np.ndarray
    of_rows: np.ndarray
    of_sequences: np.ndarray
    ordered: np.ndarray


def ranges_of(batches: list[tuple[int, np.ndarray]], program: HostProgram) -> list[Ranges]:
    """Return the results of the program for batches of (total, starts)."""
    lines = (f"{len(s) - 1} {total} {' '.join(map(str, s))}" for total, s in batches)
    found = program.rows(lines, 3)
    assert len(found) == 4 * len(batches)
    return [Ranges(*found[i : i + 4]) for i in range(0, len(found), 4)]


def wild_batches() -> list[tuple[int, np.ndarray]]:
    rng = np.random.default_rng(6)
    batches = []
    for _ in range(500):
        starts = rng.integers(-100, 500, rng.integers(2, 12))
        starts[rng.integers(len(starts))] = rng.choice([-(2**31), 2**31 - 1, 7])
        batches.append((int(rng.integers(1, 400)), starts))
    return batches


@pytest.mark.slow
def test_the_tiles_of_each_sequence_have_slots_and_few_are_empty(program: HostProgram) -> None:
    rng = np.random.default_rng(5)
    batches = []
    for _ in range(500):
        lengths = rng.integers(0, rng.choice([2, 30, 300]), rng.integers(1, 12))
        starts = rng.integers(0, 50) + np.concatenate([[0], np.cumsum(lengths)])
        batches.append((int(starts[-1] + rng.integers(0, 50)), starts))
    for (total, starts), ranges in zip(batches, ranges_of(batches, program), strict=True):
        slots = ranges.of_slots
        slot_counts = np.bincount(slots[:, 0], minlength=len(starts) - 1)
        tiles = -(-np.diff(starts) // ROWS)
        assert (slot_counts >= tiles).all(), starts
        # Rows outside of all sequences belong to the slots of the first or the last sequence.
        assert (slot_counts - tiles)[1:-1].max(initial=0) <= 1, starts
        assert len(slots) == total // ROWS + len(tiles)
        sequence_rows = np.stack([np.arange(len(tiles)), starts[:-1], starts[1:]], axis=1)
        assert (ranges.of_sequences == sequence_rows).all(), starts
        found_rows = ranges.of_rows[starts[0] : starts[-1]]
        assert (found_rows == np.repeat(sequence_rows, np.diff(starts), axis=0)).all(), starts


def test_for_any_starts_a_slot_belongs_to_one_sequence_and_all_searches_agree(
    program: HostProgram,
) -> None:
    batches = wild_batches()
    for (_, starts), (slots, _, _, _) in zip(batches, ranges_of(batches, program), strict=True):
        for slot, (sequence, begin, end) in enumerate(slots.tolist()):
            assert begin <= slot < end, starts
            assert (slots[begin:end] == (sequence, begin, end)).all(), starts
            assert (slots[:, 0] == sequence).sum() == end - begin, starts


def test_for_any_starts_a_row_belongs_to_one_sequence_and_its_tiles_have_slots(
    program: HostProgram,
) -> None:
    batches = wild_batches()
    for (total, starts), ranges in zip(batches, ranges_of(batches, program), strict=True):
        owners = np.full(total, -1)
        end_slot = 0
        for sequence, begin, end in ranges.of_sequences.tolist():
            if begin >= end:
                continue
            assert (owners[begin:end] == -1).all(), starts
            owners[begin:end] = sequence
            # Kernels number tile slots so that a sequence's slots come after those of earlier ones.
            tiles, first = -(-(end - begin) // ROWS), begin // ROWS + sequence
            assert end_slot <= first, starts
            end_slot = first + tiles
            assert (ranges.of_slots[:, 0] == sequence).sum() >= tiles, starts
        assert end_slot <= len(ranges.of_slots), starts
        _, begins, ends = ranges.of_rows.T
        has_sequence = (begins <= np.arange(total)) & (np.arange(total) < ends)
        assert (np.where(has_sequence, ranges.of_rows[:, 0], -1) == owners).all(), starts


def test_for_any_starts_the_order_of_lengths_has_each_slot_once_and_longer_sequences_first(
    program: HostProgram,
) -> None:
    batches = wild_batches()
    for (_, starts), ranges in zip(batches, ranges_of(batches, program), strict=True):
        counts = np.bincount(ranges.of_slots[:, 0], minlength=len(starts) - 1)
        ordered = [row for row in ranges.ordered.tolist() if row[1] < row[2]]
        assert sorted(sequence for sequence, _, _ in ordered) == np.nonzero(counts)[0].tolist()
        end_slot, longest = 0, counts.max()
        for sequence, begin, end in sorted(ordered, key=lambda row: row[1]):
            assert begin == end_slot, starts
            assert end - begin == counts[sequence] <= longest, starts
            end_slot, longest = end, counts[sequence]
        assert end_slot == len(ranges.of_slots), starts
