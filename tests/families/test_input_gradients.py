"""Kernels for gradients of biases, sinks and captures, launched after those of every family."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import ScoreMod, flash_attention_backward
from cupy_flash.families import FAMILIES
from cupy_flash.planning.planner import Plan

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 6, 300, 500
TABLE = (HEADS, 41)


def plan(
    *wrt: str, dtype: str = "float16", bias: tuple[int, ...] = (1, 1, 1, 1), **how: Any
) -> Plan:
    q = np.empty((BATCH, SEQLEN_Q, HEADS, 64), dtype)
    k = np.empty((BATCH, SEQLEN_K, HEADS // 2, 64), dtype)
    mod = ScoreMod(
        lambda score, h, i, j, table, gain: score * gain[h] + table[h, i - j],
        table=np.zeros(TABLE, np.float32),
        gain=np.zeros(HEADS, np.float32),
        differentiable=("table", "gain"),
    )
    modifications = {"bias": np.zeros(bias, dtype), "sinks": np.zeros(HEADS, dtype)}
    how = {"arch": "sm_90", "score_mod": mod} | modifications | how
    return cupy_flash.plan(flash_attention_backward, q=q, k=k, v=k, wrt=wrt, **how)


def entries(of: Plan) -> list[str]:
    return [launch.entry for launch in of.launches]


OF_CAPTURES = ["measure_captures", "add_captures", "write_captures"]


@pytest.mark.parametrize(
    ("wrt", "expected"),
    [
        (("sinks",), ["sink_gradients"]),
        (("score_mod.gain",), OF_CAPTURES),
        (("score_mod.gain", "score_mod.table"), OF_CAPTURES),
        (("bias",), ["bias_gradients", "bias_sums"]),
        (("bias", "sinks"), ["sink_gradients", "bias_gradients", "bias_sums"]),
    ],
)
@pytest.mark.parametrize("family", FAMILIES["backward"])
def test_only_kernels_of_what_is_wanted_are_launched_in_every_family(
    wrt: tuple[str, ...], expected: list[str], family: str
) -> None:
    assert entries(plan(*wrt, family=family)) == ["row_terms", *expected]
    with_rows = entries(plan("q", "k", "v", *wrt, family=family))
    assert with_rows == [*entries(plan("q", "k", "v", family=family)), *expected]


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((BATCH, HEADS, SEQLEN_Q, SEQLEN_K), BATCH * HEADS * 5 * 8),
        ((1, HEADS, SEQLEN_Q, SEQLEN_K), HEADS * 5 * 8),
        ((SEQLEN_Q, SEQLEN_K), 5 * 8),
        ((BATCH, 1, 1, SEQLEN_K), BATCH * 8),
        ((HEADS, 1, 1), HEADS),
        ((1,), 1),
    ],
)
def test_blocks_share_what_is_added_up_to_few_tiles_of_a_bias(
    shape: tuple[int, ...], tiles: int
) -> None:
    of = plan("bias", bias=shape, family="mma")
    assert of.device is not None
    wanted = 2 * of.device.sm_count
    (launch,) = (x for x in of.launches if x.entry == "bias_gradients")
    blocks = launch.grid[0]
    parts, rest = divmod(blocks, tiles)
    assert rest == 0
    everything = BATCH * HEADS * 5 * 8
    assert parts == max(1, min(everything // tiles, -(-wanted // tiles)))
    assert ("bias_sums" in entries(of)) == (parts > 1)
    without = plan("sinks", bias=shape, family="mma").workspace
    assert (of.workspace == without) == (parts == 1)
    if parts > 1:
        assert 0 <= of.workspace - without - 4 * parts * math.prod(shape) < 512


def test_captures_have_sums_in_the_workspace() -> None:
    without = plan("sinks").workspace
    gain, both = plan("score_mod.gain"), plan("score_mod.gain", "score_mod.table")
    assert both.workspace - gain.workspace >= 16 * math.prod(TABLE)
    assert gain.workspace - without >= 16 * HEADS
    offsets = [of.schedule.workspace_offsets.keys() for of in (gain, both)]
    assert offsets == [{"capture_sums"}] * 2


def test_a_unit_includes_a_file_once_and_says_what_was_in_it() -> None:
    of = plan("score_mod.gain", "bias", "sinks")
    assert of.unit is not None
    for name in ("captures", "bias", "sinks"):
        assert of.unit.text.count(f'#include "backward/inputs/{name}.cuh"  // sources ') == 1
    plain = plan("q")
    assert plain.unit is not None
    assert "inputs/captures.cuh" not in plain.unit.text


def test_a_bias_without_elements_has_no_kernel() -> None:
    q, k = np.empty((1, 3, 1, 8), np.float32), np.empty((1, 0, 1, 8), np.float32)
    arrays = {"q": q, "k": k, "v": k, "bias": np.empty((3, 0), np.float32)}
    of = cupy_flash.plan(flash_attention_backward, **arrays, wrt=("bias",), arch="sm_90")
    assert entries(of) == ["row_terms"]
