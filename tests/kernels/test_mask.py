"""Tests of `mask.cuh`, run on the host and compared with `problem/mask.py`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.draws import few_then_slow

from cupy_flash.families.contract import KERNEL_DIR
from cupy_flash.problem.mask import Mask

# Same values as in `on_cpu/visible_tiles.cpp`.
BR, BC = 16, 24
FOLDER = Path(__file__).resolve().parent / "on_cpu"
COMPILER = shutil.which("g++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernel's code with")


def random_problem(rng: np.random.Generator) -> tuple[int, Mask, int]:
    """Return the number of query heads in a tile, a mask, and the number of KV splits."""
    seqlen_q, seqlen_k = map(int, rng.integers(1, 130, 2))
    q_offset = int(rng.integers(-140, 140))
    mask = Mask(seqlen_q, seqlen_k, causal=bool(rng.integers(2)), q_offset=q_offset)
    if rng.integers(2):
        left, right = (None if rng.integers(3) == 0 else int(rng.integers(140)) for _ in range(2))
        prefix = int(rng.integers(140)) if rng.integers(2) else 0
        mask = mask._replace(left=None if prefix else left, right=right, prefix=prefix)
    return int(rng.choice([1, 3])), mask, int(rng.integers(1, 5))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that runs the program on problems and returns its numbers, line by line."""
    program = tmp_path_factory.mktemp("cpu") / "visible_tiles"
    options = ["-std=c++20", "-O1", "-pthread", "-fsanitize=address,undefined"]
    options += ["-fno-sanitize-recover=all", f"-I{KERNEL_DIR}", f"-I{FOLDER}"]
    source = str(FOLDER / "visible_tiles.cpp")
    subprocess.run([str(COMPILER), *options, source, "-o", str(program)], check=True)

    def run(problems: list[tuple[int, Mask, int]]) -> list[list[list[int]]]:
        lines = "".join(
            f"{int(m.causal)} {group} {m.seqlen_q} {m.seqlen_k} {m.q_offset} {splits} "
            f"{-1 if m.left is None else m.left} {-1 if m.right is None else m.right} {m.prefix}\n"
            for group, m, splits in problems
        )
        done = subprocess.run(
            [str(program)], input=lines, capture_output=True, text=True, check=True
        )
        numbers = [list(map(int, line.split())) for line in done.stdout.splitlines()]
        assert len(numbers) == 4 * len(problems)
        return [numbers[i : i + 4] for i in range(0, len(numbers), 4)]

    return run


@pytest.mark.parametrize("count", few_then_slow([20, 300], 1))
def test_kernels_and_library_agree_on_visible_keys_and_on_tiles_that_need_a_mask(answers, count):
    rng = np.random.default_rng(15)
    problems = [random_problem(rng) for _ in range(count)]
    for (group, mask, splits), answer in zip(problems, answers(problems), strict=True):
        bounds, key_tiles, first_full, query_tiles = answer
        # A row of the kernel's tile is a pair of a query and one of the group's heads.
        rows = group * mask.seqlen_q
        assert bounds[0::2] == [mask.begin(row // group) for row in range(rows)]
        assert bounds[1::2] == [mask.end(row // group) for row in range(rows)]
        begins, ends = (np.asarray(bounds[i::2])[:, None] for i in (0, 1))
        shares = np.reshape(key_tiles, (-1, splits, 3))
        for i, share in enumerate(shares.tolist()):
            first, last = i * BR // group, (min(i * BR + BR, rows) - 1) // group
            begin, full_begin, full_end, end = mask.blocks_of_keys(first, last + 1, BC)
            tiles = [tile for begin, _, end in share for tile in range(begin, end)]
            assert tiles == list(range(begin, end))
            unmasked = [
                tile for begin, full, _ in share for tile in range(max(begin, first_full[i]), full)
            ]
            assert unmasked == list(range(full_begin, full_end))
        for i, tiles in enumerate(np.reshape(query_tiles, (-1, 4)).tolist()):
            keys = (i * BC, min(i * BC + BC, mask.seqlen_k))
            if group == 1:
                assert tuple(tiles) == mask.tiles_of_rows(*keys, BR)
            begin, full_begin, full_end, end = tiles
            columns = np.arange(*keys)
            visible = (ends > columns) & (begins <= columns)
            by_tile = [visible[row : row + BR] for row in range(0, rows, BR)]
            some = [t for t, tile in enumerate(by_tile) if tile.any()]
            assert set(some) <= set(range(begin, end))
            full = [t for t, tile in enumerate(by_tile) if tile.all()]
            assert full == list(range(full_begin, full_end))
