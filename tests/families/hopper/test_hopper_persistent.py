"""Order in which a persistent grid processes query tiles, and how many heads it interleaves."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupy_flash.families.hopper import persistent
from cupy_flash.problem.problem import Problem, make_contiguous_problem

SMS = 132
# Balance that a smaller section may lose, and the number of heads in the largest section.
NEAR_BEST, MOST_HEADS = 0.02, 48


def problem(**changes: int | bool) -> Problem:
    sizes = {"seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 16, "heads_kv": 16}
    sizes |= {"dtype": "bfloat16", "batch": 2, "head_dim": 128, "head_dim_v": 128, "causal": True}
    return make_contiguous_problem(**(sizes | changes))


def work_of(case: Problem, tile: int, *, section: int, Br: int) -> tuple[int, int]:
    """Return (batch and head, first query row) of a tile, as `tile_coord` of `tile_coord.cuh`."""
    q_tiles = -(-case.seqlen_q // Br)
    heads = case.batch * case.heads_q
    first_head = tile // (section * q_tiles) * section
    width = min(section, heads - first_head)
    within = tile - first_head * q_tiles
    return first_head + within % width, (q_tiles - 1 - within // width) * Br


def tiles_of_block(tiles: int, blocks: int, block: int) -> list[int]:
    """Return the tiles of a block: one per round over the grid; every other round is reversed."""
    taken = []
    for start in range(0, tiles, blocks):
        backwards = start // blocks % 2
        tile = start + (blocks - 1 - block if backwards else block)
        if tile < tiles:
            taken.append(tile)
    return taken


def cost_of_tile(case: Problem, q_begin: int, *, Br: int, Bc: int) -> int:
    """Return the number of KV tiles that the query tile attends to, plus 1 as its fixed cost."""
    last_row = min(q_begin + Br, case.seqlen_q) - 1
    visible = max(0, min(case.seqlen_k, last_row + case.q_offset + 1))
    return -(-visible // Bc) + 1


def evenness(case: Problem, *, section: int, blocks: int, Br: int, Bc: int) -> float:
    """Return the mean work of a thread block divided by the largest work."""
    tiles = -(-case.seqlen_q // Br) * case.batch * case.heads_q
    costs = [
        [
            cost_of_tile(case, work_of(case, tile, section=section, Br=Br)[1], Br=Br, Bc=Bc)
            for tile in tiles_of_block(tiles, blocks, block)
        ]
        for block in range(blocks)
    ]
    return sum(map(sum, costs)) / blocks / max(map(sum, costs))


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "section"),
    [(2, 6, 799, 1), (2, 6, 799, 4), (1, 7, 257, 3), (3, 5, 128, 48), (1, 1, 5, 1)],
)
def test_every_tile_of_every_head_is_taken_once_by_one_block(batch, heads, seqlen_q, section):
    case = problem(batch=batch, heads_q=heads, heads_kv=heads, seqlen_q=seqlen_q)
    tiles = -(-seqlen_q // 128) * batch * heads
    blocks = min(tiles, 5)
    taken = [
        work_of(case, tile, section=section, Br=128)
        for block in range(blocks)
        for tile in tiles_of_block(tiles, blocks, block)
    ]
    every = [(head, row) for head in range(batch * heads) for row in range(0, seqlen_q, 128)]
    assert sorted(taken) == every


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seqlen_q": 512, "seqlen_k": 512, "batch": 32},
        {"seqlen_q": 1024, "seqlen_k": 1024, "batch": 16},
        {"seqlen_q": 2048, "seqlen_k": 2048, "batch": 8, "heads_q": 32, "heads_kv": 32},
        {"seqlen_q": 16384, "seqlen_k": 16384, "batch": 1},
        {"seqlen_q": 799, "seqlen_k": 3001, "batch": 5, "heads_q": 12, "heads_kv": 4},
        {"seqlen_q": 3001, "seqlen_k": 799, "batch": 3, "heads_q": 14, "heads_kv": 2},
        {"seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 64, "heads_kv": 1},
        {"seqlen_q": 2000, "seqlen_k": 2000, "heads_q": 20, "heads_kv": 20, "q_offset": -1500},
    ],
)
@pytest.mark.parametrize(("Br", "Bc", "blocks"), [(128, 128, SMS), (192, 128, SMS), (64, 80, 114)])
def test_a_section_is_the_fewest_heads_with_nearly_the_most_even_shares(changes, Br, Bc, blocks):
    given = problem(**changes)
    chosen = persistent.section_heads(given, blocks=blocks, Br=Br, Bc=Bc)
    # `section_heads` rounds lengths to whole query tiles and KV tiles.
    lengths = {"seqlen_q": -(-given.seqlen_q // Br) * Br, "seqlen_k": -(-given.seqlen_k // Bc) * Bc}
    case = problem(**changes | lengths | {"q_offset": round(given.q_offset / Bc) * Bc})
    sections = range(1, min(case.batch * case.heads_q, MOST_HEADS) + 1)
    even = {s: evenness(case, section=s, blocks=blocks, Br=Br, Bc=Bc) for s in sections}
    best = max(even.values())
    assert even[chosen] >= best - NEAR_BEST
    assert all(value < best - NEAR_BEST for section, value in even.items() if section < chosen)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 8),
    st.tuples(st.integers(1, 8), st.integers(1, 12)),
    st.integers(0, 5000),
    st.integers(1, 5000),
    st.booleans(),
    st.sampled_from([64, 128, 192]),
    st.integers(1, 160),
)
def test_a_section_is_one_head_at_least_and_one_group_without_a_mask(
    batch, heads, seqlen_q, seqlen_k, causal, Br, blocks
):
    heads_kv, group = heads
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "causal": causal}
    case = problem(batch=batch, heads_q=heads_kv * group, heads_kv=heads_kv, **sizes)
    section = persistent.section_heads(case, blocks=blocks, Br=Br, Bc=128)
    assert 1 <= section <= max(group, MOST_HEADS)
    assert causal or section == group


@pytest.mark.parametrize("group", [1, 4, 16])
def test_without_a_mask_tiles_are_equal_and_a_section_is_one_group(group):
    case = problem(heads_q=16, heads_kv=16 // group, causal=False)
    assert persistent.section_heads(case, blocks=SMS, Br=128, Bc=128) == group


def test_where_every_block_has_one_tile_at_most_a_section_is_one_group():
    case = problem(batch=1, heads_q=4, heads_kv=2)
    assert persistent.section_heads(case, blocks=4 * 32, Br=128, Bc=128) == 2


def test_a_problem_of_very_many_tiles_is_answered_at_once():
    case = problem(batch=64, seqlen_q=2**20, seqlen_k=2**20, heads_q=64, heads_kv=8)
    assert 1 <= persistent.section_heads(case, blocks=SMS, Br=64, Bc=64) <= MOST_HEADS
    endless = problem(seqlen_q=2**29, seqlen_k=2**29)
    assert persistent.section_heads(endless, blocks=SMS, Br=64, Bc=64) == 1
