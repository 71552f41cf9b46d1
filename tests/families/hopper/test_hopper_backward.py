"""The backward `hopper` family: plans and tiles, without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.problems import with_mask

import cupy_flash
from cupy_flash import flash_attention_varlen_backward
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


@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 136, 192, 256, 264, 384, 512])
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
    for dims in ((64, 128), (128, 64), (192, 128), (64, 256), (64, 512), (512, 8), (320, 448)):
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


def test_heads_over_512_columns_are_refused() -> None:
    reason = "accumulating dk and dv needs too many registers for head dims over 512"
    for head_dim, head_dim_v in ((520, 64), (64, 520), (576, 512)):
        assert hopper.why_not(problem(head_dim, head_dim_v=head_dim_v), h100) == reason


def test_heads_over_256_columns_are_refused_if_scores_are_modified_or_batches_not_dense() -> None:
    reason = "head dims over 256 need dense batches and unmodified scores"
    assert hopper.why_not(with_mask(problem(256)), h100) is None
    assert hopper.why_not(with_mask(problem(264)), h100) == reason
    lengths = dataclasses.replace(problem(64).layout, kind="padded")
    for head_dim, expected in ((256, None), (264, reason)):
        padded = dataclasses.replace(problem(head_dim), layout=lengths)
        assert hopper.why_not(padded, h100) == expected


def launches_of(schedule: Schedule) -> dict[str, tuple[tuple[int, int, int], int]]:
    """Return the grid and the cluster size of each launch, by entry point."""
    return {launch.entry: (launch.grid, launch.cluster) for launch in schedule.launches}


def test_two_thread_blocks_of_a_cluster_have_half_of_the_columns_of_wide_heads() -> None:
    whole, divided = problem(256, seqlen=4000, heads=4), problem(512, seqlen=4000, heads=4)
    tile = HopperBackwardTile(64, 64, dout_stages=1)
    of_whole, of_divided = (hopper.schedule(x, h100, tile) for x in (whole, divided))
    found = launches_of(of_divided)
    assert found["key_gradients"] == ((63 * 4 * 4, 1, 2), 2)
    assert found["query_gradients"] == ((63 * 4 * 4, 1, 2), 0)
    alone = launches_of(of_whole)
    assert alone["key_gradients"] == ((63 * 4 * 4, 1, 1), 0)
    assert alone["query_gradients"] == ((63 * 4 * 4, 1, 1), 0)
    # Each dq tile has one semaphore and the sums of both thread blocks.
    sums = 63 * 4 * 4 * 64 * 4
    assert of_divided.workspace - of_whole.workspace == sums * 256
    # Each consumer warp has a buffer and two barriers for the sums of the other thread block.
    more = hopper.shared_memory(divided, tile) - hopper.shared_memory(whole, tile)
    assert more == 8 * (16 * 64 * 4 + 2 * 8)


def test_clusters_of_the_last_section_are_half_as_many() -> None:
    def last(head_dim: int) -> int:
        how = {"head_dim": head_dim, "batch": 1, "seqlen": 512, "heads": 100}
        blocks, params = blocks_and_params(causal=True, **how)
        return blocks - params["last_section"]

    # The last section has 132 clusters: 33 heads of 4 pairs of KV tiles, or 16 heads of 8 KV tiles.
    assert (last(256), last(512)) == (33 * 4, 16 * 8)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256, 320, 512])
def test_the_search_space_is_small_and_holds_the_default(head_dim: int) -> None:
    of = problem(head_dim)
    tiles = list(hopper.tiles(of, h100))
    assert hopper.default_tile(of, h100) in tiles
    assert len(tiles) < 32


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (HopperBackwardTile(64, 64), "Bc is 64"),
        (HopperBackwardTile(96, 128), "Br is 96"),
        (HopperBackwardTile(64, 128, columns=24), "columns is 24"),
        (HopperBackwardTile(64, 128, q_stages=1), "q_stages is 1; expected at least 2"),
        (HopperBackwardTile(64, 128, dout_stages=0), "dout_stages is 0; expected at least 1"),
        (HopperBackwardTile(64, 128, exchange_stages=2), "exchange_stages is 2; expected 1"),
        (HopperBackwardTile(64, 128, buffers_dq=1), "buffers_dq is 1; expected 0"),
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
    assert maps["q"].box == (32, tile.Br)
    assert maps["v"].box == (32, tile.Bc)
    boxes = {
        dims: (maps["q"].box[0], maps["dout"].box[0])
        for dims in ((64, 64), (64, 96), (80, 40), (96, 128), (128, 128), (192, 96))
        for maps in [schedule_of(problem(*dims)).tensor_maps]
    }
    assert boxes == {
        (64, 64): (64, 64),
        (64, 96): (64, 32),
        (80, 40): (32, 64),
        (96, 128): (64, 64),
        (128, 128): (64, 64),
        (192, 96): (64, 64),
    }


@pytest.mark.parametrize(
    ("dims", "padded"),
    [
        ((8, 8), (64, 64)),
        ((72, 72), (96, 96)),
        ((96, 40), (96, 64)),
        ((104, 104), (128, 128)),
        ((80, 128), (128, 128)),
        ((136, 136), (192, 192)),
        ((192, 128), (192, 128)),
        ((64, 192), (128, 192)),
        ((200, 200), (256, 256)),
        # Above 256, the numbers of columns are those of each thread block of a cluster.
        ((264, 264), (192, 192)),
        ((384, 384), (192, 192)),
        ((392, 512), (256, 256)),
        ((40, 512), (128, 256)),
        ((512, 40), (256, 64)),
    ],
)
def test_columns_are_whole_boxes_and_no_more(
    dims: tuple[int, int], padded: tuple[int, int]
) -> None:
    of = problem(*dims)
    tile = hopper.default_tile(of, h100)
    config = hopper.config(of, tile, schedule_of(of).split)
    assert (config["padded_dim"], config["padded_dim_v"]) == padded


def test_wide_heads_have_the_buffers_that_shared_memory_has_space_for() -> None:
    plain = HopperBackwardTile(64, 64)
    assert hopper.default_tile(with_mask(problem(256)), h100) == plain
    buffered = dataclasses.replace(plain, exchange_stages=2, buffers_dq=1)
    assert hopper.default_tile(with_mask(problem(192)), h100) == buffered
    more = dataclasses.replace(buffered, q_stages=3)
    assert hopper.default_tile(problem(192, 128, seqlen=64), h100) == more
    added = hopper.shared_memory(problem(192), buffered) - hopper.shared_memory(problem(192), plain)
    assert added == 2 * 64 * 64 * 2 + 64 * 192 * 4


def test_halves_of_the_columns_compute_p_a_tile_ahead() -> None:
    ahead = HopperBackwardTile(64, 64, dout_stages=1, exchange_stages=2)
    assert hopper.default_tile(problem(512), h100) == ahead
    assert hopper.default_tile(problem(384), h100) == dataclasses.replace(ahead, dout_stages=2)


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (HopperBackwardTile(64, 64, exchange_stages=3), "exchange_stages is 3; expected 1 or 2"),
        (HopperBackwardTile(64, 64, buffers_dq=2), "buffers_dq is 2; expected 0 or 1"),
        (HopperBackwardTile(64, 128), "Bc is 128; expected 64"),
    ],
)
def test_a_tile_of_wide_heads_that_cannot_be_launched_has_a_reason(
    tile: HopperBackwardTile, reason: str
) -> None:
    assert reason in (hopper.why_not_tile(problem(192), h100, tile) or "")


PAIR = HopperBackwardTile(64, 64, pair=2)


def test_dense_batches_without_mask_functions_have_pairs_of_kv_tiles() -> None:
    whole = dataclasses.replace(PAIR, exchange_stages=2, buffers_dq=1)
    one_dout = {"dout_stages": 1}
    assert hopper.default_tile(problem(192, 128), h100) == whole
    assert hopper.default_tile(problem(192), h100) == dataclasses.replace(whole, **one_dout)
    assert hopper.default_tile(problem(256), h100) == dataclasses.replace(PAIR, **one_dout)
    assert hopper.default_tile(problem(256, causal=True), h100).pair == 2
    for of in (problem(256, wrt=("k", "v")), with_mask(problem(256)), problem(256, seqlen_k=64)):
        assert hopper.default_tile(of, h100).pair == 1


@pytest.mark.parametrize(
    ("of", "pair", "reason"),
    [
        (problem(128), 2, "Bc is 64"),
        (problem(192), 3, "pair is 3; expected 1 or 2"),
        (problem(512), 2, "pair is 2; expected 1"),
        (problem(192, wrt=("k", "v")), 2, "not wanted"),
    ],
    ids=["narrow", "three", "halves of the columns", "no dq"],
)
def test_a_pair_that_is_not_possible_has_a_reason(of: Problem, pair: int, reason: str) -> None:
    tile = dataclasses.replace(PAIR, pair=pair)
    assert reason in (hopper.why_not_tile(of, h100, tile) or "")


def test_narrow_heads_and_masks_by_functions_have_no_pairs() -> None:
    narrow = HopperBackwardTile(64, 128, pair=2)
    assert hopper.why_not_tile(problem(), h100, narrow) == "pair is 2; expected 1"
    found = hopper.why_not_tile(with_mask(problem(192)), h100, PAIR)
    assert "position alone masks pairs" in (found or "")


def test_consumers_of_a_pair_have_whole_boxes_of_keys() -> None:
    columns = {}
    for dims in ((64, 256), (192, 128), (256, 256)):
        of, tile = problem(*dims), dataclasses.replace(PAIR, dout_stages=1)
        maps = hopper.schedule(of, h100, tile).tensor_maps
        columns[dims] = tuple(maps[name].box[0] for name in ("k", "q", "v", "dout"))
    assert columns == {
        (64, 256): (32, 64, 64, 64),
        (192, 128): (32, 64, 64, 64),
        (256, 256): (64, 64, 64, 64),
    }


def test_a_pair_shares_two_kv_tiles_and_half_of_a_dq_buffer() -> None:
    single = HopperBackwardTile(64, 64, exchange_stages=2, buffers_dq=1)
    pair = dataclasses.replace(single, pair=2)
    of = problem(192, 128, seqlen_k=64 * 7, heads=3, batch=5)
    found = launches_of(hopper.schedule(of, h100, pair))
    assert found["key_gradients"] == ((4 * 3 * 5, 1, 2), 2)
    # One thread block converts all columns of a dq tile.
    assert found["query_gradients"][0][2] == 1
    more = hopper.shared_memory(of, pair) - hopper.shared_memory(of, single)
    # A pair adds the peer's keys, three buffers of its dS and their barriers. It saves half of the
    # dq buffer.
    assert more == 64 * 96 * 2 + 3 * (64 * 64 * 2 + 8) - 64 * 96 * 4


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


def blocks_and_params(**how: Any) -> tuple[int, dict[str, int]]:
    """Return the number of thread blocks that compute dk and dv, and fields of the parameters."""
    schedule = schedule_of(problem(**how))
    (blocks,) = (x.grid[0] for x in schedule.launches if x.entry == "key_gradients")
    return blocks, dict(schedule.params)


@pytest.mark.parametrize(
    ("how", "heads", "tiles"),
    [
        ({"causal": True, "heads_kv": 8}, 1, 1),
        ({"causal": True, "heads_kv": 4}, 2, 1),
        ({"causal": True, "heads_kv": 1}, 8, 1),
        ({"causal": True}, 1, 1),
        ({"heads_kv": 1}, 16, 1),
        ({"causal": True, "heads_kv": 1, "seqlen": 100}, 32, 1),
        ({"causal": True, "heads_kv": 1, "head_dim": 256}, 1, 1),
        # 64 KV tiles on 132 SMs: two thread blocks for each.
        ({"heads": 1, "seqlen": 4096}, 1, 2),
        # One KV tile and one query tile, which is not divided.
        ({"heads": 1, "seqlen": 64}, 1, 1),
    ],
    ids=str,
)
def test_queries_of_a_kv_tile_are_divided_until_there_are_enough_thread_blocks(
    how: dict[str, Any], heads: int, tiles: int
) -> None:
    how = {"batch": 2, "seqlen": 8192, "heads": 32} | how
    blocks, params = blocks_and_params(**how)
    kv_tiles = -(-how["seqlen"] // 128)
    assert (params["head_chunks"], params["tile_chunks"]) == (heads, tiles)
    assert blocks == kv_tiles * how["batch"] * how.get("heads_kv", how["heads"]) * heads * tiles


def test_chunks_have_sums_and_semaphores_in_the_workspace() -> None:
    whole = schedule_of(problem(batch=1, seqlen=256, heads=2))
    divided = schedule_of(problem(batch=1, seqlen=256, heads=2, heads_kv=1))
    assert "kv_sums" not in whole.workspace_offsets
    assert divided.workspace_offsets["kv_sums"] == whole.workspace
    # There are two KV tiles, each with float32 sums of dk and dv. The semaphores take 512 bytes.
    assert divided.workspace - whole.workspace == 512 + 2 * 128 * (128 + 128) * 4


FEW_QUERIES: dict[str, Any] = {"batch": 2, "heads": 20, "seqlen": 448, "seqlen_k": 8192}


def test_thread_blocks_fetch_the_kv_tiles_of_few_queries() -> None:
    of = problem(64, **FEW_QUERIES)
    schedule, tile = schedule_of(of), hopper.default_tile(of, h100)
    found = launches_of(schedule)
    assert found["key_gradients"] == ((132, 1, 1), 0)
    # The counter, and the entries of 64 KV tiles of each head.
    offset = schedule.workspace_offsets["counters"]
    assert schedule.workspace - offset == 16 * (1 + 64 * 40)
    many = problem(64, **FEW_QUERIES | {"seqlen": 1025})
    # A second stage of k and v, ten barriers, and two fetched KV tiles.
    more = hopper.shared_memory(of, tile) - hopper.shared_memory(many, tile)
    assert more == 128 * (64 + 64) * 2 + 10 * 8 + 2 * 16


@pytest.mark.parametrize(
    ("head_dim", "how"),
    [
        (64, {"seqlen": 1025}),
        (64, {"seqlen": 513, "heads_kv": 10}),
        (64, {"seqlen": 1, "heads": 180, "heads_kv": 20}),
        (64, {"causal": True}),
        (64, {"seqlen_k": 1152}),
        (64, {"wrt": ("k", "v")}),
        (65, {}),
        (128, {}),
    ],
    ids=str,
)
def test_other_thread_blocks_have_one_kv_tile(head_dim: int, how: dict[str, Any]) -> None:
    of = problem(head_dim, **FEW_QUERIES | how)
    schedule, tile = schedule_of(of), hopper.default_tile(of, h100)
    assert "counters" not in schedule.workspace_offsets
    assert not hopper.config(of, tile, schedule.split)["fetches_kv_tiles"]
    assert launches_of(schedule)["key_gradients"][0][0] > 132


def test_a_tile_without_space_for_a_second_stage_of_keys_has_one_kv_tile() -> None:
    of, tile = problem(64, **FEW_QUERIES), HopperBackwardTile(128, 128, q_stages=3)
    assert hopper.why_not_tile(of, h100, tile) is None
    assert "counters" not in hopper.schedule(of, h100, tile).workspace_offsets


@pytest.mark.parametrize(
    ("how", "ascending"),
    [
        # The last section has two heads of 128 KV tiles, or 88 heads of 3 tiles.
        ({"seqlen": 16384, "heads": 16}, 14 * 128),
        ({"seqlen": 300, "heads": 100}, 12 * 3),
        ({"seqlen": 300, "heads": 50}, 0),
        # Pairs of thread blocks count as one.
        ({"seqlen": 16384, "heads": 16, "head_dim": 256}, 15 * 128),
    ],
    ids=str,
)
def test_the_last_section_of_a_causal_mask_has_two_thread_blocks_per_sm(
    how: dict[str, Any], ascending: int
) -> None:
    assert blocks_and_params(batch=1, causal=True, **how)[1]["last_section"] == ascending


@pytest.mark.parametrize(
    ("how", "tiles", "whole"),
    [
        # There are 31.03 and 15.5 waves of 132 thread blocks. The last head is divided.
        ({"seqlen": 16384, "heads": 32, "head_dim": 64}, 4, 31 * 128),
        ({"seqlen": 16384, "heads": 16}, 3, 15 * 128),
        # There are 1.2 waves. The last four heads of 32 KV tiles are divided. At head_dim 64, a
        # head has half as many query tiles.
        ({"seqlen": 4096, "heads": 5}, 4, 32),
        ({"seqlen": 4096, "heads": 5, "head_dim": 64}, 3, 32),
        # There are 4 waves.
        ({"seqlen": 16896, "heads": 4}, 1, 4 * 132),
        # Pairs of thread blocks divide no queries.
        ({"seqlen": 4096, "heads": 5, "head_dim": 256}, 1, 5 * 32),
    ],
    ids=str,
)
def test_queries_of_the_last_heads_are_divided_if_the_last_wave_is_not_full(
    how: dict[str, Any], tiles: int, whole: int
) -> None:
    blocks, params = blocks_and_params(batch=1, **how)
    assert (params["tile_chunks"], params["last_section"]) == (tiles, whole)
    keys = 128 * how["heads"] * -(-how["seqlen"] // 128)
    assert blocks == whole + (keys // 128 - whole) * tiles


def lists_of(of: Problem, **tile: int) -> tuple[int, bool] | None:
    return hopper.query_tile_lists(of, dataclasses.replace(hopper.default_tile(of, h100), **tile))


def test_a_mask_function_has_lists_and_stored_pairs() -> None:
    assert lists_of(problem()) is None
    assert lists_of(with_mask(problem(heads_kv=4))) == (4, True)
    assert lists_of(with_mask(problem(64, heads_kv=4), (True, False))) == (4, True)
    assert lists_of(with_mask(problem(256), (True, True))) == (1, True)


def test_pairs_are_not_stored_if_heads_of_a_list_differ_or_there_are_too_many() -> None:
    assert lists_of(with_mask(problem(heads_kv=4), (False, True))) == (4, False)
    assert lists_of(with_mask(problem(), prefix=True)) == (1, False)
    assert lists_of(with_mask(problem(64)), columns=32) == (1, False)
    assert lists_of(with_mask(problem(seqlen=32768))) == (1, True)
    assert lists_of(with_mask(problem(seqlen=32768), (True, False))) == (1, False)


def test_very_long_sequences_have_no_lists() -> None:
    assert lists_of(with_mask(problem(seqlen=2**19, batch=1))) == (1, False)
    assert lists_of(with_mask(problem(seqlen=2**20, batch=1))) is None


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_stored_pairs_and_steps_take_shared_memory(head_dim: int) -> None:
    plain, of_mask = problem(head_dim), with_mask(problem(head_dim))
    tile = hopper.default_tile(of_mask, h100)
    more = hopper.shared_memory(of_mask, tile) - hopper.shared_memory(plain, tile)
    stages = tile.q_stages
    arrived = (stages + tile.dout_stages) * 8
    step = 0 if head_dim > 128 else 8
    assert more == stages * (tile.Br * tile.Bc // 8 + step) + arrived


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lists_have_neither_descending_thread_blocks_nor_chunks(head_dim: int) -> None:
    of = with_mask(problem(head_dim, batch=1, causal=True, seqlen=8192, heads=32, heads_kv=2))
    schedule = schedule_of(of)
    config = hopper.config(of, hopper.default_tile(of, h100), schedule.split)
    (blocks,) = (x.grid[0] for x in schedule.launches if x.entry == "key_gradients")
    assert not config["may_descend"]
    assert schedule.params["last_section"] == blocks
    assert (schedule.params["head_chunks"], schedule.params["tile_chunks"]) == (1, 1)
    too_long = with_mask(problem(head_dim, batch=1, causal=True, seqlen=2**20))
    tile = hopper.default_tile(too_long, h100)
    assert hopper.config(too_long, tile, schedule_of(too_long).split)["may_descend"]


def test_more_heads_with_lists_are_interleaved() -> None:
    of = problem(seqlen=8192)
    assert schedule_of(with_mask(of)).section_heads > 3 * schedule_of(of).section_heads


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_have_a_list_of_their_kv_tiles_and_never_descend(
    head_dim: int, causal: bool
) -> None:
    starts = np.array([0, 5000, 5000, 9001], np.int32)
    q = np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), (9001, 4, head_dim))
    made = cupy_flash.plan(
        flash_attention_varlen_backward,
        q=q,
        k=q,
        v=q,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=5000,
        max_seqlen_k=5000,
        causal=causal,
        arch="sm_90",
    )
    assert isinstance(made.tile, HopperBackwardTile)
    schedule = made.schedule
    offsets = dict(schedule.workspace_offsets)
    slots = 9001 // made.tile.Bc + 3
    end = min((x for x in offsets.values() if x > offsets["packed_tiles"]), default=made.workspace)
    assert end - offsets["packed_tiles"] >= 48 * slots
    config = hopper.config(made.problem, made.tile, schedule.split)
    assert config["packed"]
    assert not config["may_descend"]
    (blocks,) = (x.grid[0] for x in made.launches if x.entry == "key_gradients")
    assert schedule.params["last_section"] == blocks
    assert "packed_tiles" not in schedule_of(problem(head_dim, causal=causal)).workspace_offsets
