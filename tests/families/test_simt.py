"""The `simt` family, on CUDA cores: plans and tiles, without a GPU."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash.families import query_tiles, split_kv
from cupy_flash.families.contract import heads_in_l2
from cupy_flash.families.schedule import UNSPLIT
from cupy_flash.families.simt.forward import SimtFamily, SimtTile
from cupy_flash.problem.arrays import DTYPES
from cupy_flash.problem.device import ARCHITECTURES, device_for_arch
from cupy_flash.problem.layout import Layout
from cupy_flash.problem.problem import MAX_HEAD_DIM, make_contiguous_problem

simt = SimtFamily()
h100 = device_for_arch("sm_90")


def problem(dtype="float32", head_dim=64, head_dim_v=None, **sizes):
    sizes = {"batch": 4, "seqlen_q": 799, "seqlen_k": 799, "heads_q": 16, "heads_kv": 8} | sizes
    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v or head_dim}
    return make_contiguous_problem(dtype=dtype, **dims, **sizes)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_architecture_has_a_default_tile_for_every_head_dim(arch, dtype):
    device = device_for_arch(arch)
    # 16 float64 keys with more columns do not fit into Turing's 64 KiB of shared memory.
    widest = 384 if (arch, dtype) == (75, "float64") else MAX_HEAD_DIM
    for head_dim in (1, 31, 32, 64, 80, 96, 128, 192, 255, 256, 257, 384, widest):
        for head_dim_v in (1, 33, head_dim, 256, widest):
            for seqlen_q in (1, 799):
                case = problem(dtype, head_dim, head_dim_v, seqlen_q=seqlen_q)
                tile = simt.default_tile(case, device)
                assert simt.why_not(case, device) is None
                assert simt.why_not_tile(case, device, tile) is None


@pytest.mark.parametrize("dims", [(576, 512), (1, 512), (512, 1)])
def test_float64_heads_that_do_not_fit_turing_are_refused_with_both_sizes(dims):
    reason = simt.why_not(problem("float64", *dims), device_for_arch(75))
    words = r"needs \d+ bytes of shared memory, and sm_75 allows 65536 per block"
    assert re.fullmatch(words, reason)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_heads_have_a_search_space(dtype):
    assert len(list(simt.tiles(problem(dtype, 512), h100))) >= 4


def test_an_architecture_before_turing_is_refused_by_name():
    volta = dataclasses.replace(h100, name="V100", arch=70)
    assert simt.why_not(problem(), volta) == "needs sm_75 or later, and V100 is sm_70"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"Bc": 60}, "multiple of the 8 threads of a row"),
        ({"Br": 96}, "expected 4, 8, 16 or 32"),
        ({"Br": 512}, "expected 4, 8, 16 or 32"),
        ({"threads": 48}, "multiple of 32"),
        ({"share_kv": 2}, "expected 0 or 1"),
        ({"unroll": 0}, "must be positive"),
        ({"unroll": 64}, "at most 16"),
        ({"rows_per_thread": 0}, "must be positive"),
        ({"Bc": 256}, "registers"),
    ],
)
def test_a_tile_that_cannot_run_is_told_why(changes, words):
    tile = dataclasses.replace(SimtTile(128, 64, 128, 8, 0, 2), **changes)
    assert words in simt.why_not_tile(problem(), h100, tile)


def test_a_tile_that_fits_hopper_but_not_turing_is_refused_there_with_both_sizes():
    tile, turing = SimtTile(128, 64, 128, 8, 0, 2), device_for_arch("sm_75")
    assert simt.why_not_tile(problem(), h100, tile) is None
    reason = simt.why_not_tile(problem(), turing, tile)
    assert reason == "needs 105472 bytes of shared memory, and sm_75 allows 65536 per block"


def test_more_thread_blocks_than_a_launch_takes_are_refused():
    case = problem(batch=2**20, heads_q=2**12, heads_kv=1, seqlen_q=1, head_dim=1)
    assert "thread blocks" in simt.why_not_tile(case, h100, SimtTile(16, 32, 128, 2, 0, 2))


def test_sharing_a_buffer_takes_the_larger_of_k_and_v_instead_of_their_sum():
    apart, shared = (SimtTile(128, 64, 128, 8, share, 2) for share in (0, 1))
    case = problem(head_dim=64, head_dim_v=128)
    # A K row takes 64 floats and 4 of padding; a V row takes 128 floats.
    k_bytes, v_bytes = 64 * 68 * 4, 64 * 128 * 4
    difference = simt.shared_memory(case, apart) - simt.shared_memory(case, shared)
    assert difference == min(k_bytes, v_bytes)


def test_the_search_space_holds_legal_tiles_and_the_default():
    case = problem()
    tiles = list(simt.tiles(case, h100))
    assert simt.default_tile(case, h100) in tiles
    assert len(tiles) == len(set(tiles)) > 50
    assert {tile.share_kv for tile in tiles} == {0, 1}


def test_many_heads_leave_the_keys_whole_and_one_head_splits_them():
    many = problem(seqlen_q=4096, seqlen_k=4096)
    one = problem(seqlen_q=4096, seqlen_k=4096, batch=1, heads_q=1, heads_kv=1)
    assert simt.schedule(many, h100, simt.default_tile(many, h100)).split == UNSPLIT
    schedule = simt.schedule(one, h100, simt.default_tile(one, h100))
    forward, combine = schedule.launches
    assert 0.8 * h100.sm_count <= forward.grid[0] <= 2 * h100.sm_count
    assert combine.grid[0] * combine.threads // 32 >= one.rows
    assert schedule.workspace == schedule.split.parts * 4096 * (64 + 1) * 4


def test_no_workspace_is_needed_where_keys_are_whole():
    case = problem()
    schedule = simt.schedule(case, h100, simt.default_tile(case, h100))
    assert (schedule.split, schedule.workspace) == (UNSPLIT, 0)


def test_splits_never_get_less_than_two_key_tiles():
    case = problem(batch=1, heads_q=1, heads_kv=1)
    for key_tiles in (1, 2, 3, 4, 7, 63, 64, 1000):
        sizes = {"q_tiles": 1, "key_tiles": key_tiles, "blocks_per_sm": 2}
        splits = split_kv.choose(case, h100, **sizes).parts
        assert splits == 1 or key_tiles / splits >= split_kv.MIN_KEY_TILES
        assert splits <= split_kv.MAX_CHOSEN_PARTS


def test_an_empty_problem_is_not_split():
    empty = dataclasses.replace(problem(), seqlen_q=0)
    assert split_kv.choose(empty, h100, q_tiles=0, key_tiles=9, blocks_per_sm=2) == UNSPLIT


def test_sections_hold_whole_groups_whose_keys_and_values_fit_half_the_l2():
    case = problem(seqlen_k=16384, heads_q=32, heads_kv=8)
    heads = heads_in_l2(case, h100)
    one_head = 16384 * 128 * 4
    assert heads % 4 == 0
    assert heads // 4 * one_head <= h100.l2_cache // 2 < (heads // 4 + 1) * one_head


def test_a_section_is_at_least_one_group_and_at_most_all_heads():
    assert heads_in_l2(problem(seqlen_k=2**24), h100) == 2
    assert heads_in_l2(problem(seqlen_k=0), h100) == 4 * 16


numbers = st.integers(1, 8)


@given(st.sampled_from(ARCHITECTURES), st.integers(0, 2**20), numbers, numbers, numbers)
def test_a_section_is_whole_groups_between_one_and_all(arch, seqlen_k, batch, heads_kv, group):
    device = device_for_arch(arch)
    heads = {"heads_q": heads_kv * group, "heads_kv": heads_kv}
    case = problem("float16", batch=batch, seqlen_k=seqlen_k, **heads)
    heads = heads_in_l2(case, device)
    assert heads % group == 0
    assert group <= heads <= batch * heads_kv * group
    if heads > group:
        assert heads // group * seqlen_k * (64 + 64) * 2 <= device.l2_cache // 2


def ragged_problem(dtype="float32", head_dim=64, *, page_size=0, causal=True, **changes):
    """Return a problem with packed queries over a KV cache, which may be paged."""
    options = {f: changes.pop(f) for f in ("num_splits", "batch_invariant") if f in changes}
    case = problem(dtype, head_dim, causal=causal, **changes)
    pages = {"page_size": page_size, "pages": 77, "max_pages": -(-799 // (page_size or 1))}
    cache = pages if page_size else {"caches": 5}
    layout = Layout(kind="varlen", total_q=2 * case.seqlen_q, **cache, **options)
    return dataclasses.replace(case, q_offset=0, layout=layout)


def test_the_rows_of_a_tile_are_those_of_all_heads_that_share_keys():
    case = ragged_problem(seqlen_q=3, heads_q=16, heads_kv=4, num_splits=3)
    tile = SimtTile(16, 32, 128, 2, 0, 2)
    schedule = simt.schedule(case, h100, tile)
    assert simt.config(case, tile, schedule.split)["group"] == 4
    (forward, *_) = schedule.launches
    # 3 queries of 4 heads fill 12 of 16 rows: one tile for each of 4 sequences, 4 groups, 3 splits.
    assert forward.grid == (4 * 4 * 3, 1, 1)


def test_sequences_of_equal_length_have_a_tile_for_each_head():
    assert query_tiles.group_size(problem()) == 1


def test_rows_too_many_to_count_with_all_heads_are_tiled_head_by_head():
    case = ragged_problem(seqlen_q=2**29, heads_q=16, heads_kv=4)
    assert query_tiles.group_size(case) == 1


def test_a_few_queries_of_many_heads_take_the_low_tile_only_where_their_rows_fit_it():
    few, many = (ragged_problem(seqlen_q=2, heads_q=8 * group, heads_kv=8) for group in (8, 9))
    assert simt.default_tile(few, h100).Br == 16
    assert simt.default_tile(many, h100).Br > 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_invariant_tile_does_not_depend_on_lengths(dtype):
    tiles = {
        simt.default_tile(ragged_problem(dtype, **lengths, batch_invariant=True), h100)
        for seqlen_q in (1, 5, 799)
        for lengths in ({"seqlen_q": seqlen_q, "seqlen_k": n} for n in (1, 8192))
    }
    assert len(tiles) == 1


def test_splits_that_were_asked_for_count_among_the_blocks_of_a_launch():
    case = ragged_problem(batch=2**14, heads_q=2**8, heads_kv=2**8, seqlen_q=1, num_splits=2**10)
    assert "thread blocks" in simt.why_not_tile(case, h100, SimtTile(16, 32, 128, 2, 0, 2))
