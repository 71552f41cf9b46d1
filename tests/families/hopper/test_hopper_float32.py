"""float32 in the `hopper` family: supported problems, and its components; without a GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.problems import dense_problem

from cupy_flash import flash_attention, plan
from cupy_flash.families.hopper import HopperFamily, HopperTile
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.arrays import ArraySpec
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.layout import Layout
from cupy_flash.problem.problem import Problem, make_problem

hopper = HopperFamily()
h100 = device_for_arch("sm_90")


def problem(seqlen: int = 4096, *, batch: int = 2, heads: int = 16, dim: int = 64) -> Problem:
    return dense_problem("float32", batch, seqlen, seqlen, heads, heads // 2, dim, dim)


@pytest.mark.parametrize("dim", [1, 33, 64, 128, 129, 192, 256])
def test_long_float32_is_its_own(dim):
    assert make_plan(problem(dim=dim), h100).family == "hopper"


def few_rows(seqlen_q: int, *, heads_kv: int) -> Problem:
    return dataclasses.replace(problem(), seqlen_q=seqlen_q, heads_kv=heads_kv)


SHAPE = (64, 2048, 16, 128)
EACH_ITS_OWN = ArraySpec(SHAPE, (2048 * 2048, 2048, 128), "float32")
ONE_FOR_ALL = ArraySpec(SHAPE, (0, 2048, 128), "float32")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            problem(511, batch=40),
            "is slower than other families for fewer than 512 keys",
        ),
        (few_rows(1, heads_kv=1), "for fewer than 512 keys, or 512 query rows per KV head"),
        (few_rows(255, heads_kv=8), "for fewer than 512 keys, or 512 query rows per KV head"),
        (dataclasses.replace(problem(1023), causal=True), "for fewer than 1024 keys"),
        (problem(2048, batch=1, heads=2), "32 query tiles leave most of 132 SMs idle"),
        (make_problem(EACH_ITS_OWN, ONE_FOR_ALL, ONE_FOR_ALL), "these arrays are broadcast"),
    ],
)
def test_where_splitting_does_not_pay_it_goes_to_mma_but_may_be_asked_for(case, words):
    chosen = make_plan(case, h100)
    assert chosen.family == "mma"
    assert words in chosen.rejected["hopper"]
    assert make_plan(case, h100, family="hopper").family == "hopper"


def test_wide_heads_leave_cuda_cores_earlier():
    assert make_plan(problem(256, batch=20, dim=192), h100).family == "hopper"
    chosen = make_plan(problem(255, batch=20, dim=192), h100)
    assert chosen.family == "simt"
    assert "for fewer than 256 keys" in chosen.rejected["hopper"]


@pytest.mark.parametrize(
    ("dims", "Bc"), [((160, 160), 64), ((192, 192), 64), ((224, 40), 48), ((256, 256), 32)]
)
def test_wide_heads_have_tiles_of_64_rows_and_as_many_keys_as_fit(dims, Bc):
    case = dataclasses.replace(problem(), head_dim=dims[0], head_dim_v=dims[1])
    tile = hopper.default_tile(case, h100)
    assert (tile.Br, tile.Bc) == (64, Bc)
    assert tile.stages >= 2


def test_many_heads_over_the_same_keys_are_many_rows():
    assert make_plan(few_rows(300, heads_kv=8), h100).family == "hopper"


def test_packed_and_modified_float32_and_a_single_key_are_not_its_own():
    case = problem()
    packed = dataclasses.replace(case, layout=Layout(kind="varlen", total_q=9000, total_k=9000))
    assert "float32 only in batches of equal lengths" in (hopper.why_not(packed, h100) or "")
    reason = hopper.why_not(problem(1), h100)
    assert "do not reproduce the value of a single key exactly" in (reason or "")
    q = np.zeros((1, 1024, 2, 64), np.float32)
    found = plan(flash_attention, q, q, q, window_size=(64, 0), causal=True, arch="sm_90")
    assert found.rejected["hopper"] == "supports float32 only without modifications"


def test_rows_may_lie_anyhow():
    backwards = ArraySpec((2, 203, 3, 61), (203 * 3 * 77, -3 * 77, 77), "float32", 4)
    case = make_problem(backwards, backwards, backwards)
    assert case.alignment == 4
    assert hopper.why_not(case, h100) is None


def test_components_are_arrays_of_three_bfloat16_for_an_element():
    case = problem(1000, batch=3, heads=4, dim=61)
    schedule = make_plan(case, h100, family="hopper").schedule
    queries, keys = 3 * 1000 * 4 * 64 * 6, 3 * 1000 * 2 * 64 * 6
    assert schedule.workspace == queries + 2 * keys
    offsets = {"q_pieces": 0, "k_pieces": queries, "v_pieces": queries + keys}
    assert schedule.workspace_offsets == offsets
    assert [launch.entry for launch in schedule.launches] == ["pieces", "attention"]
    maps = schedule.tensor_maps
    assert list(maps) == list(schedule.workspace_offsets)
    assert maps["q_pieces"].dtype == "bfloat16"
    # Each of the three components has its own batch entries.
    assert maps["q_pieces"].shape == (64, 1000, 4, 9)
    assert maps["q_pieces"].strides == (4 * 128, 128, 1000 * 4 * 128)
    assert maps["k_pieces"].shape == (64, 1000, 2, 9)
    tile = make_plan(case, h100, family="hopper").tile
    assert (maps["q_pieces"].box, maps["v_pieces"].box) == ((64, tile.Br), (64, tile.Bc))


def test_a_tile_has_space_for_all_components_and_keeps_no_queries():
    tile = HopperTile(128, 48, stages=3, turns=1)
    case = problem(dim=128)
    bfloat16 = dataclasses.replace(case, dtype="bfloat16")
    more = hopper.shared_memory(case, tile) - hopper.shared_memory(bfloat16, tile)
    assert more == 2 * (128 + 3 * 48) * 128 * 2
    kept = dataclasses.replace(tile, q_steps=1)
    assert "expected 0 for float32" in (hopper.why_not_tile(case, h100, kept) or "")
