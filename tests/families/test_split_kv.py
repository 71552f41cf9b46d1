"""Splitting the keys over thread blocks: when, into how many splits, and at what cost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import dense_problem

from cupy_flash.families import split_kv
from cupy_flash.families.schedule import UNSPLIT, Split
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.arrays import DTYPES
from cupy_flash.problem.device import ARCHITECTURES, device_for_arch
from cupy_flash.problem.layout import Layout
from cupy_flash.problem.problem import make_contiguous_problem
from cupy_flash.problem.score import ScoreSpec

h100 = device_for_arch("sm_90")


def problem(**changes):
    lengths = {"batch": 2, "seqlen_q": 113, "seqlen_k": 203, "heads_q": 6, "heads_kv": 3}
    sizes = {"dtype": "float16", "head_dim": 64, "head_dim_v": 64} | lengths
    return make_contiguous_problem(**(sizes | changes))


def count(case, *, q_tiles, key_tiles, blocks_per_sm=1, device=h100, **options):
    tiles = {"q_tiles": q_tiles, "key_tiles": key_tiles, "blocks_per_sm": blocks_per_sm}
    cut = split_kv.choose(case, device, **tiles, **options)
    assert cut == Split.into(cut.parts)
    return cut.parts


@given(
    st.sampled_from(ARCHITECTURES),
    st.integers(0, 5),
    st.integers(1, 40),
    st.integers(0, 500),
    st.integers(0, 5000),
    st.integers(0, 8),
)
def test_every_split_has_keys_of_its_own(arch, batch, heads, q_tiles, key_tiles, blocks_per_sm):
    case = problem(batch=batch, heads_q=heads, heads_kv=1)
    tiles = {"q_tiles": q_tiles, "key_tiles": key_tiles, "blocks_per_sm": blocks_per_sm}
    splits = count(case, **tiles, device=device_for_arch(arch))
    assert 1 <= splits <= split_kv.MAX_CHOSEN_PARTS
    assert splits == 1 or splits * split_kv.MIN_KEY_TILES <= key_tiles


@given(st.integers(1, 200), st.integers(2, 2000))
def test_splitting_never_makes_the_longest_slot_longer(blocks, key_tiles):
    case = problem(batch=1, heads_q=1, heads_kv=1)
    splits = count(case, q_tiles=blocks, key_tiles=key_tiles)

    def longest(n):
        return math.ceil(blocks * n / h100.sm_count) * math.ceil(key_tiles / n)

    assert longest(splits) <= longest(1)
    most = min(split_kv.MAX_CHOSEN_PARTS, key_tiles // split_kv.MIN_KEY_TILES)
    if splits > 1:
        best = min(longest(n) for n in range(1, most + 1))
        assert best >= split_kv.NEAR_BEST * longest(splits)
        # No smaller number will do: each further split is a partial result to write and merge.
        assert all(best < split_kv.NEAR_BEST * longest(n) for n in range(1, splits))


def fused(dtype, seqlen_q, seqlen_k, heads, head_dim=128, family="mma"):
    case = dense_problem(dtype, 1, seqlen_q, seqlen_k, heads, heads, head_dim, head_dim)
    return make_plan(case, h100, family=family)


def test_splits_that_cost_more_to_merge_than_they_save_are_not_made():
    # On an H200, this takes 72 us without splits and 111 us with 3 splits.
    assert fused("float16", 1280, 1536, 16).num_splits == 1


def test_many_keys_of_as_many_rows_are_split_all_the_same():
    assert fused("float16", 1280, 16 * 1536, 16).num_splits > 1


@pytest.mark.parametrize(
    ("dtype", "family"), [("float16", "mma"), ("float32", "mma"), ("float32", "simt")]
)
def test_one_tile_of_queries_over_long_keys_is_split_until_the_gpu_is_busy(dtype, family):
    plan = fused(dtype, 64, 16384, 4, family=family)
    assert plan.launches[0].grid[0] >= 0.8 * h100.sm_count


tile_times = st.builds(
    split_kv.TileTime.estimate,
    flops=st.integers(1, 10**7),
    read_bytes=st.integers(1, 10**5),
    tflops_per_sm=st.floats(0.1, 5),
)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 2000), tile_times)
def test_keys_are_split_only_where_that_is_expected_to_be_faster(heads, q_tiles, key_tiles, tile):
    case = problem(batch=1, heads_q=heads, heads_kv=heads, seqlen_q=64 * q_tiles)
    splits = count(case, q_tiles=q_tiles, key_tiles=key_tiles, blocks_per_sm=2, tile_time=tile)

    def time(n):
        attention = math.ceil(key_tiles / n) * tile.of(math.ceil(heads * q_tiles * n / 132))
        return attention + split_kv.combine_time(case, Split.into(n))

    assert splits == 1 or time(splits) < time(1)
    # No smaller number will do: each further split is a partial result to write and merge.
    most = max(1, min(split_kv.MAX_CHOSEN_PARTS, key_tiles // split_kv.MIN_KEY_TILES))
    best = min(time(n) for n in range(1, most + 1))
    assert time(splits) == best
    assert all(time(n) > best for n in range(1, splits))


def test_a_block_alone_on_an_sm_is_faster_than_one_of_two_but_not_twice_as_fast():
    tile = split_kv.TileTime.estimate(flops=4_000_000, read_bytes=32768, tflops_per_sm=3.0)
    assert tile.of(2) / 2 < tile.of(1) < tile.of(2) < tile.of(3)


def test_a_full_gpu_leaves_the_keys_whole():
    case = problem(batch=4, heads_q=32, heads_kv=32)
    assert count(case, q_tiles=2, key_tiles=1000) == 1


def test_one_query_over_long_keys_fills_the_gpu():
    case = problem(batch=1, heads_q=8, heads_kv=8, seqlen_q=1)
    assert 8 * count(case, q_tiles=1, key_tiles=1000) >= 0.8 * h100.sm_count


def test_an_sm_that_holds_more_blocks_is_filled_with_more_splits():
    case = problem(batch=1, heads_q=16, heads_kv=16, seqlen_q=1)
    one, two = (count(case, q_tiles=1, key_tiles=1000, blocks_per_sm=n) for n in (1, 2))
    assert two > one


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_workspace_holds_an_output_row_and_its_lse_for_each_split(dtype):
    size = 8 if dtype == "float64" else 4
    case = problem(dtype=dtype, head_dim_v=72)
    assert split_kv.workspace(case, Split.into(3)) == 3 * (2 * 6 * 113) * (72 + 1) * size
    assert split_kv.workspace(case, UNSPLIT) == 0


@pytest.mark.parametrize(("changes_scores", "numbers"), [(True, 2), (False, 1)])
def test_a_part_of_changed_scores_has_an_lse_of_two_numbers(changes_scores, numbers):
    flags = (None, None, False, False, False, True, changes_scores, True)
    score = ScoreSpec(*flags, cuda_source="", dtype=np.dtype([]))
    case = replace(problem(head_dim_v=72), score=score)
    assert split_kv.workspace(case, Split.into(3)) == 3 * (2 * 6 * 113) * (72 + numbers) * 4


def test_whole_keys_need_no_second_kernel():
    assert split_kv.combine_launches(problem(), UNSPLIT) == ()


def test_the_second_kernel_has_a_warp_for_each_query_row():
    (launch,) = split_kv.combine_launches(problem(), Split.into(2))
    assert f"{launch.entry}(const __grid_constant__ Params params)" in launch.definition()
    warps = launch.grid[0] * launch.threads // 32
    assert 2 * 6 * 113 <= warps < 2 * 6 * 113 + launch.threads // 32


def ragged(case, **changes):
    return replace(case, layout=replace(Layout("kvcache"), **changes))


def test_a_number_of_splits_that_was_asked_for_is_taken_as_it_is():
    case = ragged(problem(batch=64, heads_q=32, heads_kv=32), num_splits=5)
    assert count(case, q_tiles=9, key_tiles=3) == 5


def test_a_result_that_may_not_depend_on_the_batch_leaves_the_keys_whole():
    case = ragged(problem(batch=1, heads_q=1, heads_kv=1), batch_invariant=True)
    assert count(case, q_tiles=1, key_tiles=1000) == 1


def test_heads_that_share_a_tile_are_split_further():
    case = ragged(problem(batch=1, heads_q=32, heads_kv=4, seqlen_q=1))
    apart = count(case, q_tiles=1, key_tiles=1000)
    assert count(case, q_tiles=1, key_tiles=1000, group=8) > apart


def test_packed_queries_take_the_workspace_of_their_rows_alone():
    case = ragged(problem(head_dim_v=72), kind="varlen", total_q=150)
    assert split_kv.workspace(case, Split.into(3)) == 3 * (6 * 150) * (72 + 1) * 4
