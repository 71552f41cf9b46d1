"""Tests of `packed_tiles.cuh`, run on the host: rows and tile slots of packed sequences."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cupy_flash.families.contract import KERNEL_DIR

# Same value as in `host_kernels/places.cpp`.
ROWS = 24
FOLDER = Path(__file__).resolve().parent / "host_kernels"
COMPILER = shutil.which("g++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernel's code with")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the compiled program, which prints the owners of tile slots and rows."""
    program = tmp_path_factory.mktemp("host") / "places"
    options = ["-std=c++20", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    options += [f"-I{KERNEL_DIR}", f"-I{FOLDER}"]
    source = str(FOLDER / "places.cpp")
    subprocess.run([str(COMPILER), *options, source, "-o", str(program)], check=True)
    return program


class Parts(NamedTuple):
    """Results of the program: (sequence, begin, end) for each tile slot, row and sequence."""

    of_places: np.ndarray
    of_rows: np.ndarray
    of_sequences: np.ndarray


def parts_of(batches: list[tuple[int, np.ndarray]], program: Path) -> list[Parts]:
    """Return the results of the program for batches of (total, starts)."""
    lines = "".join(f"{len(s) - 1} {total} {' '.join(map(str, s))}\n" for total, s in batches)
    done = subprocess.run([str(program)], input=lines, capture_output=True, text=True, check=True)
    found = [np.array(line.split(), int).reshape(-1, 3) for line in done.stdout.splitlines()]
    assert len(found) == 3 * len(batches)
    return [Parts(*found[i : i + 3]) for i in range(0, len(found), 3)]


def wild_batches() -> list[tuple[int, np.ndarray]]:
    rng = np.random.default_rng(6)
    batches = []
    for _ in range(500):
        starts = rng.integers(-100, 500, rng.integers(2, 12))
        starts[rng.integers(len(starts))] = rng.choice([-(2**31), 2**31 - 1, 7])
        batches.append((int(rng.integers(1, 400)), starts))
    return batches


@pytest.mark.slow
def test_the_tiles_of_each_sequence_have_places_and_few_are_empty(program: Path) -> None:
    rng = np.random.default_rng(5)
    batches = []
    for _ in range(500):
        lengths = rng.integers(0, rng.choice([2, 30, 300]), rng.integers(1, 12))
        starts = rng.integers(0, 50) + np.concatenate([[0], np.cumsum(lengths)])
        batches.append((int(starts[-1] + rng.integers(0, 50)), starts))
    for (total, starts), parts in zip(batches, parts_of(batches, program), strict=True):
        places = parts.of_places
        own = np.bincount(places[:, 0], minlength=len(starts) - 1)
        tiles = -(-np.diff(starts) // ROWS)
        assert (own >= tiles).all(), starts
        # Rows outside of all sequences belong to the slots of the first or the last sequence.
        assert (own - tiles)[1:-1].max(initial=0) <= 1, starts
        assert len(places) == total // ROWS + len(tiles)
        own_rows = np.stack([np.arange(len(tiles)), starts[:-1], starts[1:]], axis=1)
        assert (parts.of_sequences == own_rows).all(), starts
        owned = parts.of_rows[starts[0] : starts[-1]]
        assert (owned == np.repeat(own_rows, np.diff(starts), axis=0)).all(), starts


def test_whatever_the_starts_are_a_place_is_one_sequences_and_all_agree_on_it(
    program: Path,
) -> None:
    batches = wild_batches()
    for (_, starts), (places, _, _) in zip(batches, parts_of(batches, program), strict=True):
        for place, (sequence, begin, end) in enumerate(places.tolist()):
            assert begin <= place < end, starts
            assert (places[begin:end] == (sequence, begin, end)).all(), starts
            assert (places[:, 0] == sequence).sum() == end - begin, starts


def test_whatever_the_starts_are_a_row_is_one_sequences_and_its_tiles_have_places(
    program: Path,
) -> None:
    batches = wild_batches()
    for (total, starts), parts in zip(batches, parts_of(batches, program), strict=True):
        owners = np.full(total, -1)
        taken = 0
        for sequence, begin, end in parts.of_sequences.tolist():
            if begin >= end:
                continue
            assert (owners[begin:end] == -1).all(), starts
            owners[begin:end] = sequence
            # Kernels number tile slots so that a sequence's slots come after those of earlier ones.
            tiles, first = -(-(end - begin) // ROWS), begin // ROWS + sequence
            assert taken <= first, starts
            taken = first + tiles
            assert (parts.of_places[:, 0] == sequence).sum() >= tiles, starts
        assert taken <= len(parts.of_places), starts
        _, begins, ends = parts.of_rows.T
        of_some = (begins <= np.arange(total)) & (np.arange(total) < ends)
        assert (np.where(of_some, parts.of_rows[:, 0], -1) == owners).all(), starts
