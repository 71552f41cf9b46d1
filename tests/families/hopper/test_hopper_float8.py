"""float8 in the `hopper` family: supported problems, and the layout of values; without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.calls.float8_support import FLOAT8 as FLOAT8_DTYPE

from cupy_flash import flash_attention, plan
from cupy_flash.errors import UnsupportedError
from cupy_flash.families import FORWARD
from cupy_flash.families.contract import round_up
from cupy_flash.families.hopper import HopperFamily, HopperTile, float8
from cupy_flash.families.params import params_dtype
from cupy_flash.planning.planner import make_plan
from cupy_flash.planning.problem_class import ProblemClass
from cupy_flash.problem.arrays import FLOAT8, ArraySpec
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.problem import Problem, make_problem

hopper = HopperFamily()
h100 = device_for_arch("sm_90")


def problem(dim: int = 128, seqlen: int = 1000, dim_v: int | None = None, **more: Any) -> Problem:
    q, k, v = (
        ArraySpec.contiguous((2, seqlen, heads, width), FLOAT8)
        for heads, width in ((6, dim), (3, dim), (3, dim_v or dim))
    )
    return make_problem(q, k, v, **more)


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
def test_it_goes_to_hopper_and_nowhere_else(dim):
    case = problem(dim)
    assert make_plan(case, h100).family == "hopper"
    for name, family in FORWARD.items():
        if name != "hopper":
            reason = "does not support q, k and v of float8_e4m3fn"
            assert family.why_not(case, h100) == reason
    with pytest.raises(UnsupportedError, match="needs sm_90 for wgmma"):
        make_plan(case, device_for_arch("sm_100"))


def test_the_output_is_of_16_bits():
    assert problem().out_dtype == "bfloat16"
    out = ArraySpec.contiguous((2, 1000, 6, 128), "float16")
    assert problem(out=out).out_dtype == "float16"
    wide = ArraySpec.contiguous((2, 1000, 6, 128), "float32")
    with pytest.raises(TypeError, match="expected bfloat16 or float16, for float8 q, k and v"):
        problem(out=wide)


def test_all_inputs_are_of_float8():
    q = ArraySpec.contiguous((2, 64, 1, 64), FLOAT8)
    k = ArraySpec.contiguous((2, 64, 1, 64), "bfloat16")
    with pytest.raises(TypeError, match="k has dtype bfloat16; expected float8_e4m3fn"):
        make_problem(q, k, k)


def test_wider_heads_are_refused():
    reason = hopper.why_not(problem(272), h100)
    assert "too few registers for float8 with head dims over 256" in (reason or "")


def test_values_may_lie_anyhow_but_not_queries_and_keys():
    odd = problem(dim=64, dim_v=61)
    assert odd.alignment == 1
    assert hopper.why_not(odd, h100) is None
    words = "rows of q and k that are aligned to 16 bytes; these are aligned to 1"
    assert words in (hopper.why_not(problem(dim=61, dim_v=64), h100) or "")


def test_values_become_columns_of_whole_tiles_of_keys():
    case = problem(dim=80, dim_v=61)
    schedule = make_plan(case, h100).schedule
    assert [launch.entry for launch in schedule.launches] == ["values", "attention"]
    assert schedule.workspace == 2 * 3 * 61 * 1024
    assert schedule.workspace_offsets == {"values": 0}
    maps = schedule.tensor_maps
    assert list(maps) == ["q", "k", "values"]
    assert maps["values"].shape == (1024, 61, 3, 2)
    assert maps["values"].strides == (1024, 61 * 1024, 3 * 61 * 1024)
    # A box row of 64 or 128 bytes holds as many float8 numbers.
    tile = make_plan(case, h100).tile
    assert maps["q"].box == (128, tile.Br)
    assert maps["k"].box == (128, tile.Bc)
    assert maps["values"].box == (tile.Bc, float8.value_rows(case, tile))


def test_tiles_take_half_of_the_shared_memory():
    tile = HopperTile(128, 128, stages=4, q_stages=1, turns=1)
    narrow = hopper.shared_memory(problem(), tile)
    wide = hopper.shared_memory(dataclasses.replace(problem(), dtype="bfloat16"), tile)
    scales = 3 * 8
    assert wide - narrow == (128 + 4 * 128) * 128 - scales


def test_a_block_is_whole_steps_of_32_keys():
    tile = HopperTile(128, 80, stages=2, turns=1)
    reason = hopper.why_not_tile(problem(), h100, tile)
    assert reason == "Bc is 80; expected a multiple of 32 for float8"


def test_shares_of_the_output_are_as_wide_as_a_block_of_keys_or_half():
    """The partial output of a KV tile uses the registers of the scores."""
    tile = HopperTile(128, 128, stages=4, q_stages=1, turns=1)
    rows = [float8.value_rows(problem(dim=64, dim_v=dim), tile) for dim in (16, 64, 80, 128, 160)]
    assert rows == [64, 64, 128, 128, 256]
    for dim in (48, 64, 80, 96, 128, 192, 256):
        case = problem(dim, 4096)
        chosen = make_plan(case, h100).tile
        assert float8.value_rows(case, chosen) == round_up(dim, 64 if dim <= 64 else 32)
    reason = hopper.why_not_tile(problem(256), h100, HopperTile(192, 128, stages=2, turns=1))
    assert "registers" in (reason or "")


def test_scales_lie_after_the_params():
    fields = params_dtype(problem()).fields
    assert fields is not None
    assert list(fields)[-3:] == ["q_scale", "k_scale", "v_scale"]


def test_classes_of_tuned_tiles():
    case = problem()
    text = str(ProblemClass.of(case))
    assert text.startswith("bfloat16 d128 dv128 full")
    assert text.endswith(FLOAT8)
    found = ProblemClass.parse(text)
    assert found == ProblemClass.of(case)
    assert (found.cache_dtype, found.page_size, found.packed) == (FLOAT8, 0, False)


def test_a_plan_says_what_the_output_is():
    q = np.zeros((1, 4096, 16, 128), FLOAT8_DTYPE)
    found = plan(flash_attention, q, q, q, arch="sm_90")
    assert found.unit is not None
    assert "float8_e4m3fn head_dim 128 to bfloat16" in found.unit.title
    assert found.family == "hopper"
