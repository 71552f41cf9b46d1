"""Tests of `bias_work.cuh`, run on the host: gradient tiles of a bias and their score tiles."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from support.draws import few_then_slow
from support.host_programs import HostProgram, bounds_of, needs_host_compiler, windowed

from cupy_flash.problem.mask import Mask

# Same values as in `on_cpu/bias_work.cpp`.
ROWS, KEYS = 32, 16

pytestmark = needs_host_compiler


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> HostProgram:
    """Return the compiled program, which prints the work of each thread block."""
    return HostProgram("bias_work", tmp_path_factory)


def random_mask(rng: np.random.Generator) -> Mask:
    seqlen_q, seqlen_k = map(int, rng.integers(1, 130, 2))
    q_offset = int(rng.choice([seqlen_k - seqlen_q, rng.integers(-140, 140)]))
    mask = Mask(seqlen_q, seqlen_k, causal=bool(rng.integers(2)), q_offset=q_offset)
    return windowed(mask, rng)


def visible_tiles(mask: Mask) -> set[tuple[int, int]]:
    """Return the first row and the first key of each tile with a visible pair."""
    starts = itertools.product(range(0, mask.seqlen_q, ROWS), range(0, mask.seqlen_k, KEYS))

    def is_visible(row: int, key: int) -> bool:
        stop, end = min(row + ROWS, mask.seqlen_q), min(key + KEYS, mask.seqlen_k)
        return not bool(mask.masked(row, stop, key, end).all())

    return {start for start in starts if is_visible(*start)}


@pytest.mark.parametrize("count", few_then_slow([100, 1000], 1))
def test_each_visible_score_tile_is_summed_once(program: HostProgram, count: int) -> None:
    rng = np.random.default_rng(19)
    masks = [random_mask(rng) for _ in range(count)]
    settings = [
        (*rng.integers(1, 4, 2), *rng.integers(0, 2, 4), rng.integers(1, 5), rng.integers(1, 8))
        for _ in masks
    ]
    lines = (
        f"{int(m.causal)} {m.seqlen_q} {m.seqlen_k} {m.q_offset} {' '.join(map(str, more))} "
        + bounds_of(m)
        for m, more in zip(masks, settings, strict=True)
    )
    for mask, more, found in zip(masks, settings, program.rows(lines, 10), strict=True):
        batch, heads, *is_shared, parts, _ = map(int, more)
        counts = batch, heads, -(-mask.seqlen_q // ROWS), -(-mask.seqlen_k // KEYS)
        outputs = [1 if shared else n for n, shared in zip(counts, is_shared, strict=True)]
        owners = defaultdict(list)
        summed = []
        for cta, *output, part, b, h, row, key in found.tolist():
            if b < 0:
                owners[(*output, part)].append(cta)
                continue
            tile = (b, h, row // ROWS, key // KEYS)
            summed.append((b, h, row, key))
            # The score tile has the indices of the gradient tile along the axes of the bias.
            for index, own, shared in zip(tile, output, is_shared, strict=True):
                assert index == own or shared, (mask, more)
        # Exactly one thread block writes each partial sum, even if no pair is visible.
        everything = itertools.product(*map(range, outputs), range(parts))
        assert sorted(owners) == sorted(everything), (mask, more)
        assert all(len(ctas) == 1 for ctas in owners.values()), (mask, more)
        # The last tile of keys may also be processed for rows that attend to no key.
        tiles = itertools.product(range(batch), range(heads), visible_tiles(mask))
        expected = {(b, h, *start) for b, h, start in tiles}
        assert len(set(summed)) == len(summed), (mask, more)
        last = mask.seqlen_k - KEYS
        assert expected == {x for x in summed if x in expected or x[3] < last}, (mask, more)


def test_thread_blocks_share_a_causal_mask_evenly(program: HostProgram) -> None:
    # The number of thread blocks equals the number of tiles of keys.
    tiles = 12
    line = f"1 {tiles * ROWS} {tiles * KEYS} 0 1 1 0 0 0 0 1 {tiles} -1 -1 0"
    (found,) = program.rows([line], 10)
    ctas = found[found[:, 6] >= 0, 0]
    counts = np.bincount(ctas, minlength=tiles)
    assert counts.max() <= 1.5 * counts.mean()
