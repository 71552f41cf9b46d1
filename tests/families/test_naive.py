"""The `naive` family: its three kernels, workspace, and refusals, without a GPU."""

from __future__ import annotations

import dataclasses

import pytest

from cupy_flash.families.naive import NaiveFamily, NaiveTile
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.problem import make_contiguous_problem

naive = NaiveFamily()
h100 = device_for_arch("sm_90")


def problem(dtype="float32", **sizes):
    lengths = {"batch": 2, "seqlen_q": 113, "seqlen_k": 203, "heads_q": 6, "heads_kv": 3}
    return make_contiguous_problem(
        dtype=dtype, **(lengths | {"head_dim": 40, "head_dim_v": 72} | sizes)
    )


def test_it_is_never_chosen_unasked():
    assert not naive.automatic


@pytest.mark.parametrize(("dtype", "size"), [("float16", 4), ("float32", 4), ("float64", 8)])
def test_the_workspace_is_the_score_matrix_in_the_accumulators_type(dtype, size):
    schedule = naive.schedule(problem(dtype), h100, NaiveTile())
    assert schedule.workspace == 2 * 6 * 113 * 203 * size


def test_three_kernels_cover_scores_rows_and_outputs():
    scores, softmax, output = naive.schedule(problem(), h100, NaiveTile()).launches
    assert [x.entry for x in (scores, softmax, output)] == ["scores", "softmax", "output"]
    assert scores.grid[0] == 2 * 6 * 4 * 7
    assert softmax.grid[0] * softmax.threads // 32 >= 2 * 6 * 113
    assert output.grid[0] == 2 * 6 * 4 * 3
    assert scores.threads == output.threads == 32 * 32


def test_without_keys_every_launch_still_has_a_block():
    schedule = naive.schedule(problem(seqlen_k=0), h100, NaiveTile())
    assert schedule.workspace == 0
    assert all(launch.grid[0] >= 1 for launch in schedule.launches)


def test_its_tile_is_fixed():
    assert list(naive.tiles(problem(), h100)) == [NaiveTile()]
    assert naive.default_tile(problem(), h100) == NaiveTile()
    reason = naive.why_not_tile(problem(), h100, NaiveTile(64, 32))
    assert reason == "the naive kernels' tile is always 32x32, not 64x32"


def test_a_score_matrix_beyond_any_gpu_is_refused_with_its_size():
    case = problem(batch=1, heads_q=1, heads_kv=1, seqlen_q=2**20, seqlen_k=2**20)
    assert "4 TiB" in naive.why_not(case, h100)


def test_more_thread_blocks_than_a_launch_takes_are_refused():
    case = problem(batch=2**20, heads_q=2**12, heads_kv=1, seqlen_q=1, seqlen_k=1)
    assert "thread blocks" in naive.why_not(case, h100)


def test_an_architecture_before_turing_is_refused_by_name():
    volta = dataclasses.replace(h100, name="V100", arch=70)
    assert naive.why_not(problem(), volta) == "needs sm_75 or later, and V100 is sm_70"
