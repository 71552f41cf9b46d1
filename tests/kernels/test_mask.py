"""Tests of `mask.cuh`, run on the host and compared with `problem/mask.py`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.draws import few_then_slow
from support.host_programs import HostProgram, bounds_of, needs_host_compiler, windowed

from cupy_flash.problem.mask import Mask

# Same values as in `on_cpu/visible_tiles.cpp`.
BR, BC = 16, 24
Problem = tuple[int, Mask, int]  # number of query heads in a tile, mask, number of KV splits
Answers = Callable[[list[Problem]], list[list[list[int]]]]

pytestmark = needs_host_compiler


def random_problem(rng: np.random.Generator) -> Problem:
    seqlen_q, seqlen_k = map(int, rng.integers(1, 130, 2))
    q_offset = int(rng.integers(-140, 140))
    mask = Mask(seqlen_q, seqlen_k, causal=bool(rng.integers(2)), q_offset=q_offset)
    mask = windowed(mask, rng)
    return int(rng.choice([1, 3])), mask, int(rng.integers(1, 5))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return a function that runs the program on problems and returns its numbers, line by line."""
    program = HostProgram("visible_tiles", tmp_path_factory)

    def run(problems: list[Problem]) -> list[list[list[int]]]:
        lines = (
            f"{int(m.causal)} {group} {m.seqlen_q} {m.seqlen_k} {m.q_offset} {splits} "
            + bounds_of(m)
            for group, m, splits in problems
        )
        numbers = [list(map(int, line.split())) for line in program.output(lines).splitlines()]
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
