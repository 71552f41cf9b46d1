"""Tests of `order.cuh`, run on the host: the order in which blocks add to a dq tile."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from support.host_programs import HostProgram, bounds_of, needs_host_compiler, windowed

from cupy_flash.problem.mask import Mask

# Same values as in `on_cpu/dq_order.cpp`.
BR, BC = 16, 24

pytestmark = needs_host_compiler


def random_mask(rng: np.random.Generator) -> Mask:
    seqlen_q, seqlen_k = map(int, rng.integers(1, 130, 2))
    q_offset = int(rng.choice([seqlen_k - seqlen_q, rng.integers(-140, 140)]))
    causal = bool(rng.integers(2))
    return windowed(Mask(seqlen_q, seqlen_k, causal=causal, q_offset=q_offset), rng)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> HostProgram:
    """Return the compiled program, which prints the dq order of each query tile."""
    return HostProgram("dq_order", tmp_path_factory)


def order_of(masks: list[Mask], program: HostProgram) -> list[np.ndarray]:
    """Return an array for each mask, with a row for each pair of a KV tile and a query tile.

    A row has the KV tile, the query tile, the index in the dq order, whether it is the last index,
    and these last two again for the descending order.
    """
    lines = (
        f"{int(m.causal)} {m.seqlen_q} {m.seqlen_k} {m.q_offset} {bounds_of(m)}" for m in masks
    )
    found = program.rows(lines, 6)
    assert len(found) == len(masks)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("descends", [False, True])
def test_the_dq_order_of_a_tile_has_no_gaps_and_one_last_thread_block(
    program: HostProgram, descends: bool
) -> None:
    rng = np.random.default_rng(17)
    masks = [random_mask(rng) for _ in range(2000)]
    if descends:
        masks = [mask._replace(left=None) for mask in masks]
    for mask, entries in zip(masks, order_of(masks, program), strict=True):
        by_tile = defaultdict(list)
        for keys, queries, *both in entries.tolist():
            index, is_last = both[2:] if descends else both[:2]
            by_tile[queries].append((index, is_last, keys if descends else -keys))
        for indices in by_tile.values():
            indices.sort()
            # Indices have no gaps, so no block waits forever. A block waits only for blocks of
            # later keys or, in descending order, of earlier keys, which start first.
            assert [index for index, _, _ in indices] == list(range(len(indices))), mask
            flags = [bool(last) for _, last, _ in indices]
            assert flags == [False] * (len(indices) - 1) + [True], mask
            assert indices == sorted(indices, key=lambda found: found[2]), mask


def test_every_visible_pair_is_in_the_dq_order(program: HostProgram) -> None:
    rng = np.random.default_rng(18)
    masks = [random_mask(rng) for _ in range(200)]
    for mask, entries in zip(masks, order_of(masks, program), strict=True):
        processed = {(queries, keys) for keys, queries, *_ in entries.tolist()}
        visible = {
            (row // BR, key // BC)
            for row in range(mask.seqlen_q)
            for key in range(mask.begin(row), mask.end(row))
        }
        assert visible <= processed, mask
