"""Hopper kernels that need scores only, and tangents on Hopper: choice of the family and tiles."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from cupy_flash.families import FAMILIES
from cupy_flash.families.hopper.received import HopperScoreTile
from cupy_flash.families.hopper.tangents import HopperTangentTile
from cupy_flash.planning.planner import make_plan
from cupy_flash.planning.tuning import problem_class
from cupy_flash.problem.arrays import ArraySpec, Tensors
from cupy_flash.problem.backward import with_tangents
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.problem import Problem, make_problem

DEVICE = device_for_arch("sm_90")
RECEIVED, LSE = FAMILIES["received"]["hopper"], FAMILIES["lse"]["hopper_lse"]
TANGENTS = FAMILIES["tangent"]["hopper"]


def forward(head_dim: int, rows: int = 4096, keys: int = 4096, batch: int = 2) -> Problem:
    q, k = ((batch, n, 8, head_dim) for n in (rows, keys))
    specs = [ArraySpec.contiguous(shape, "bfloat16") for shape in (q, k, k)]
    return make_problem(*specs, kind="dense", causal=True)


def lse(head_dim: int, **sizes: int) -> Problem:
    return dataclasses.replace(forward(head_dim, **sizes), discards_out=True)


def received(head_dim: int) -> Problem:
    problem = forward(head_dim)
    tensors = Tensors(q=problem.tensors["q"], k=problem.tensors["k"])
    return dataclasses.replace(problem, tensors=tensors, received="heads")


def tangents(head_dim: int) -> Problem:
    problem = forward(head_dim)
    spec = ArraySpec.contiguous((2, 4096, 8, head_dim), "bfloat16")
    return with_tangents(problem, dict.fromkeys(ROWS, spec), spec)


@pytest.mark.parametrize("rows", [1, 8, 64, 128])
def test_few_queries_are_left_to_families_that_split_keys(rows: int) -> None:
    plan = make_plan(lse(128, rows=rows, keys=65536, batch=1), DEVICE)
    assert plan.family in ("decode", "hopper")
    assert "does not split the keys" in plan.rejected["hopper_lse"]


def test_many_queries_need_no_output() -> None:
    assert make_plan(lse(128), DEVICE).family == "hopper_lse"


def test_a_discarded_output_has_the_tuned_tiles_of_the_forward_pass() -> None:
    assert problem_class(lse(64)) == problem_class(forward(64))


@pytest.mark.parametrize("head_dim", [8, 64, 128, 192, 256])
@pytest.mark.parametrize("family", [RECEIVED, LSE], ids=lambda family: family.name)
def test_tiles_fit(family: object, head_dim: int) -> None:
    assert family in (RECEIVED, LSE)
    problem = received(head_dim) if family is RECEIVED else lse(head_dim)
    of_family = RECEIVED if family is RECEIVED else LSE
    tiles = list(of_family.tiles(problem, DEVICE))
    assert tiles
    assert of_family.default_tile(problem, DEVICE).stages >= 2
    no_stage = dataclasses.replace(tiles[0], stages=0)
    reason = "stages and left_stages must be positive"
    assert of_family.why_not_tile(problem, DEVICE, no_stage) == reason


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (HopperScoreTile(128, 96, 2), "Bc is 96; expected 64, 128, 192 or 256"),
        (HopperScoreTile(24, 128, 2), "Br is 24; expected a multiple of 16 up to 256"),
        (HopperScoreTile(144, 256, 2), "needs about 112 registers per thread; 104 are available"),
        (HopperScoreTile(128, 128, 9), "needs 325 KiB of shared memory"),
    ],
)
def test_other_tiles_are_refused(tile: HopperScoreTile, reason: str) -> None:
    assert (RECEIVED.why_not_tile(received(128), DEVICE, tile) or "").startswith(reason)


@pytest.mark.parametrize("head_dim", [8, 64, 96, 128])
def test_tiles_of_tangents_fit(head_dim: int) -> None:
    tiles = list(TANGENTS.tiles(tangents(head_dim), DEVICE))
    assert {tile.Br for tile in tiles} == {64, 128}
    assert all(tile.stages >= 2 for tile in tiles)


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (HopperTangentTile(192, 64, 2), "Br is 192; expected 64 or 128"),
        (HopperTangentTile(128, 72, 2), "Bc is 72; expected a multiple of 16 up to 128"),
        (HopperTangentTile(128, 64, 1), "stages is 1; expected at least 2"),
        (HopperTangentTile(128, 64, 2, 9), "q_steps is 9; expected at most 8"),
        (HopperTangentTile(128, 64, 2, 8), "needs about 256 registers per thread"),
        (HopperTangentTile(128, 64, 3), "needs 256 KiB of shared memory"),
    ],
)
def test_other_tiles_of_tangents_are_refused(tile: HopperTangentTile, reason: str) -> None:
    found = TANGENTS.why_not_tile(tangents(128), DEVICE, tile)
    assert (found or "").startswith(reason), found


def test_calls_that_tma_cannot_load_are_left_to_others() -> None:
    for problem, direction in itertools.product((received(12), tangents(12)), ("hopper",)):
        reason = FAMILIES[problem.direction][direction].why_not(problem, DEVICE)
        assert reason is not None
        assert "TMA needs rows that are aligned" in reason
