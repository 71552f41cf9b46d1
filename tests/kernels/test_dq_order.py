"""Tests of `order.cuh`, run on the host: the order in which blocks add to a dq tile."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from cupy_flash.families.contract import KERNEL_DIR
from cupy_flash.problem.mask import Mask

# Same values as in `on_cpu/dq_order.cpp`.
BR, BC = 16, 24
FOLDER = Path(__file__).resolve().parent / "on_cpu"
COMPILER = shutil.which("g++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernel's code with")


def random_mask(rng: np.random.Generator) -> Mask:
    seqlen_q, seqlen_k = map(int, rng.integers(1, 130, 2))
    q_offset = int(rng.choice([seqlen_k - seqlen_q, rng.integers(-140, 140)]))
    mask = Mask(seqlen_q, seqlen_k, causal=bool(rng.integers(2)), q_offset=q_offset)
    if rng.integers(2):
        left, right = (None if rng.integers(3) == 0 else int(rng.integers(140)) for _ in range(2))
        prefix = int(rng.integers(140)) if rng.integers(2) else 0
        mask = mask._replace(left=None if prefix else left, right=right, prefix=prefix)
    return mask


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the compiled program, which prints the dq order of each query tile."""
    program = tmp_path_factory.mktemp("cpu") / "dq_order"
    options = ["-std=c++20", "-O1", "-pthread", "-fsanitize=address,undefined"]
    options += ["-fno-sanitize-recover=all", f"-I{KERNEL_DIR}", f"-I{FOLDER}"]
    source = str(FOLDER / "dq_order.cpp")
    subprocess.run([str(COMPILER), *options, source, "-o", str(program)], check=True)
    return program


def order_of(masks: list[Mask], program: Path) -> list[np.ndarray]:
    """Return rows of (KV tile, query tile, index in the dq order, is last) for each mask."""
    lines = "".join(
        f"{int(m.causal)} {m.seqlen_q} {m.seqlen_k} {m.q_offset} "
        f"{-1 if m.left is None else m.left} {-1 if m.right is None else m.right} {m.prefix}\n"
        for m in masks
    )
    done = subprocess.run([str(program)], input=lines, capture_output=True, text=True, check=True)
    found = [np.array(line.split(), int).reshape(-1, 4) for line in done.stdout.splitlines()]
    assert len(found) == len(masks)
    return found


@pytest.mark.slow
def test_the_dq_order_of_a_tile_has_no_gaps_and_one_last_thread_block(program: Path) -> None:
    rng = np.random.default_rng(17)
    masks = [random_mask(rng) for _ in range(2000)]
    for mask, entries in zip(masks, order_of(masks, program), strict=True):
        by_tile = defaultdict(list)
        for keys, queries, index, is_last in entries.tolist():
            by_tile[queries].append((index, is_last, -keys))
        for indices in by_tile.values():
            indices.sort()
            # Indices have no gaps, so no block waits forever. A block waits only for blocks of
            # later keys, which start first.
            assert [index for index, _, _ in indices] == list(range(len(indices))), mask
            assert [bool(last) for _, last, _ in indices] == [False] * (len(indices) - 1) + [
                True
            ], mask
            assert indices == sorted(indices, key=lambda found: found[2]), mask


def test_every_visible_pair_is_in_the_dq_order(program: Path) -> None:
    rng = np.random.default_rng(18)
    masks = [random_mask(rng) for _ in range(200)]
    for mask, entries in zip(masks, order_of(masks, program), strict=True):
        processed = {(queries, keys) for keys, queries, _, _ in entries.tolist()}
        visible = {
            (row // BR, key // BC)
            for row in range(mask.seqlen_q)
            for key in range(mask.begin(row), mask.end(row))
        }
        assert visible <= processed, mask
