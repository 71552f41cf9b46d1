"""The backward `hopper` family: plans and tiles, without a GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cupy_flash.families import FAMILIES
from cupy_flash.families.hopper import HopperBackwardFamily, HopperBackwardTile
from cupy_flash.families.schedule import Schedule
from cupy_flash.gpu.compiler import compile_cubin
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.arrays import ArraySpec
from cupy_flash.problem.backward import with_gradient
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.gradient import GradientSpec
from cupy_flash.problem.problem import Problem, make_problem
from cupy_flash.problem.score import ScoreSpec

hopper = HopperBackwardFamily()
h100 = device_for_arch("sm_90")


def problem(
    head_dim: int = 128,
    head_dim_v: int | None = None,
    *,
    dtype: str = "bfloat16",
    seqlen: int = 4096,
    seqlen_k: int | None = None,
    batch: int = 4,
    heads: int = 16,
    heads_kv: int | None = None,
    causal: bool = False,
    wrt: tuple[str, ...] = ("q", "k", "v"),
    alignment: int = 16,
    grad_dtype: str | None = None,
) -> Problem:
    """Return the backward problem of contiguous arrays."""
    heads_kv, head_dim_v = heads_kv or heads, head_dim_v or head_dim
    keys = seqlen if seqlen_k is None else seqlen_k

    def spec(rows: int, count: int, dim: int, dtype: str = dtype) -> ArraySpec:
        whole = ArraySpec.contiguous((batch, rows, count, dim), dtype)
        return dataclasses.replace(whole, alignment=alignment)

    q = spec(seqlen, heads, head_dim)
    k, v = (spec(keys, heads_kv, dim) for dim in (head_dim, head_dim_v))
    arrays, of_gradients = {"q": q, "k": k, "v": v}, grad_dtype or dtype
    gradients = {name: spec(*arrays[name].shape[1:], of_gradients) for name in wrt}
    dout, forward = spec(seqlen, heads, head_dim_v), make_problem(q, k, v, causal=causal)
    return with_gradient(forward, GradientSpec(wrt, of_gradients), dout, gradients)


def schedule_of(of: Problem) -> Schedule:
    return hopper.schedule(of, h100, hopper.default_tile(of, h100))


def entries(schedule: Schedule) -> list[str]:
    return [launch.entry for launch in schedule.launches]


def test_it_is_the_first_choice_where_it_serves() -> None:
    assert next(iter(FAMILIES["backward"])) == "hopper"


@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 136, 192, 256])
@pytest.mark.parametrize("wrt", [("q", "k", "v"), ("q",), ("k",), ("v",)])
def test_every_head_dim_whose_rows_are_whole_chunks_has_a_tile_that_fits(
    head_dim: int, wrt: tuple[str, ...]
) -> None:
    of = problem(head_dim, wrt=wrt)
    assert hopper.why_not(of, h100) is None
    tile = hopper.default_tile(of, h100)
    assert hopper.why_not_tile(of, h100, tile) is None
    assert hopper.shared_memory(of, tile) <= h100.shared_memory_per_block


def test_head_dims_that_differ_have_a_tile_too() -> None:
    for dims in ((64, 128), (128, 64), (192, 128), (64, 256)):
        assert hopper.why_not(problem(*dims), h100) is None, dims


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": "float32"}, "float16 or bfloat16"),
        ({"head_dim": 100}, "16 bytes"),
        ({"alignment": 8}, "16 bytes"),
        ({"seqlen_k": 0}, "without rows"),
    ],
)
def test_what_it_does_not_serve_has_a_reason(changed: dict[str, object], reason: str) -> None:
    found = hopper.why_not(problem(**changed), h100)  # type: ignore[arg-type]
    assert reason in (found or "")


def test_other_architectures_have_no_wgmma() -> None:
    for name in ("sm_80", "sm_89"):
        assert "wgmma" in (hopper.why_not(problem(), device_for_arch(name)) or "")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_search_space_is_small_and_holds_the_default(head_dim: int) -> None:
    of = problem(head_dim)
    tiles = list(hopper.tiles(of, h100))
    assert hopper.default_tile(of, h100) in tiles
    assert len(tiles) < 20


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (HopperBackwardTile(64, 64), "Bc is 64"),
        (HopperBackwardTile(96, 128), "Br is 96"),
        (HopperBackwardTile(64, 128, columns=24), "columns is 24"),
        (HopperBackwardTile(64, 128, q_stages=1), "q_stages is 1; expected at least 2"),
        (HopperBackwardTile(64, 128, dout_stages=0), "dout_stages is 0; expected at least 1"),
        (HopperBackwardTile(128, 128), "shared memory"),
    ],
)
def test_a_tile_that_cannot_be_launched_has_a_reason(tile: HopperBackwardTile, reason: str) -> None:
    assert reason in (hopper.why_not_tile(problem(), h100, tile) or "")


def test_tensor_maps_are_of_what_is_read_and_boxes_are_tiles() -> None:
    of = problem(96, seqlen=1000, seqlen_k=500, heads_kv=4)
    tile = hopper.default_tile(of, h100)
    maps = schedule_of(of).tensor_maps
    assert list(maps) == ["q", "k", "v", "dout"]
    assert maps["dout"].shape == (96, 1000, 16, 4)
    assert maps["k"].shape == (96, 500, 4, 4)
    assert maps["q"].box == (64, tile.Br)
    assert maps["v"].box == (64, tile.Bc)


def test_nobody_adds_what_nobody_wants() -> None:
    schedule = schedule_of(problem(wrt=("k", "v")))
    assert "query_gradients" not in entries(schedule)
    assert schedule.workspace < schedule_of(problem()).workspace


@pytest.mark.parametrize(
    ("of", "is_apart"),
    [
        (problem(), False),
        (problem(grad_dtype="float32"), True),
        (problem(256), True),
        (problem(grad_dtype="float32", wrt=("k", "v")), False),
    ],
    ids=["16 bits", "float32", "wide", "not wanted"],
)
def test_a_kernel_of_its_own_writes_dq_where_blocks_have_no_registers(
    of: Problem, is_apart: bool
) -> None:
    assert ("query_gradients" in entries(schedule_of(of))) == is_apart


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("wrt", [("q", "k", "v"), ("k", "v")])
def test_float32_gradients_spill_nothing(head_dim: int, wrt: tuple[str, ...]) -> None:
    plan = make_plan(problem(head_dim, grad_dtype="float32", wrt=wrt), h100, family="hopper")
    assert plan.unit is not None
    cubin = compile_cubin(plan.unit, h100)
    assert max(found.spill_bytes for found in cubin.resources.values()) == 0


def test_heads_are_interleaved_as_far_as_l2_holds_what_they_move() -> None:
    def heads(**how: int) -> int:
        return schedule_of(problem(**how)).section_heads

    assert heads(seqlen=16384) == 1
    assert heads(seqlen=1024) > heads(seqlen=4096) > 1
    assert heads(seqlen=16384, heads_kv=4) == 4


def masked(of: Problem, varies: tuple[bool, bool] = (False, False), **changed: bool) -> Problem:
    """Return the problem with a mask function that differs between batches, or heads."""
    score = ScoreSpec(
        *(None, None, False, False, False, False, False, True, "", np.dtype([])),
        block_mask_suffices=True,
        mask_varies=varies,
        conceals=True,
    )
    return dataclasses.replace(of, score=dataclasses.replace(score, **changed))


def lists_of(of: Problem, **tile: int) -> tuple[int, bool] | None:
    return hopper.query_tile_lists(of, dataclasses.replace(hopper.default_tile(of, h100), **tile))


def test_a_mask_function_has_lists_and_stored_pairs() -> None:
    assert lists_of(problem()) is None
    assert lists_of(masked(problem(heads_kv=4))) == (4, True)
    assert lists_of(masked(problem(64, heads_kv=4), (True, False))) == (4, True)
    assert lists_of(masked(problem(256), (True, True))) == (1, True)


def test_pairs_are_not_stored_if_heads_of_a_list_differ_or_there_are_too_many() -> None:
    assert lists_of(masked(problem(heads_kv=4), (False, True))) == (4, False)
    assert lists_of(masked(problem(), prefix=True)) == (1, False)
    assert lists_of(masked(problem(64)), columns=32) == (1, False)
    assert lists_of(masked(problem(seqlen=32768))) == (1, True)
    assert lists_of(masked(problem(seqlen=32768), (True, False))) == (1, False)


def test_very_long_sequences_have_no_lists() -> None:
    assert lists_of(masked(problem(seqlen=2**19, batch=1))) == (1, False)
    assert lists_of(masked(problem(seqlen=2**20, batch=1))) is None


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_stored_pairs_and_steps_take_shared_memory(head_dim: int) -> None:
    plain, of_mask = problem(head_dim), masked(problem(head_dim))
    tile = hopper.default_tile(of_mask, h100)
    assert tile == hopper.default_tile(plain, h100)
    more = hopper.shared_memory(of_mask, tile) - hopper.shared_memory(plain, tile)
    stages = tile.q_stages
    arrived = (stages + tile.dout_stages) * 8
    step = 0 if head_dim > 128 else 8
    assert more == stages * (tile.Br * tile.Bc // 8 + step) + arrived


def test_more_heads_with_lists_are_interleaved() -> None:
    of = problem(seqlen=8192)
    assert schedule_of(masked(of)).section_heads > 3 * schedule_of(of).section_heads
