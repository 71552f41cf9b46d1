"""The `hopper` family: plans, tiles, and compilation without a GPU."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.problems import dense_problem

from cupy_flash import MaskMod, ScoreMod, flash_attention, plan
from cupy_flash.errors import CompileError, UnsupportedError
from cupy_flash.families.contract import TranslationUnit
from cupy_flash.families.hopper import HopperFamily, HopperTile, scores
from cupy_flash.families.schedule import TensorMapSpec
from cupy_flash.gpu.compiler import Cubin, compile_cubin
from cupy_flash.planning.planner import Plan, make_plan, plan_tile
from cupy_flash.problem.arrays import ArraySpec, Tensors
from cupy_flash.problem.device import ARCHITECTURES, Device, device_for_arch
from cupy_flash.problem.layout import Layout
from cupy_flash.problem.problem import Problem, make_problem

hopper = HopperFamily()
h100 = device_for_arch("sm_90")
KIB = 1024


def problem(
    dtype: str = "bfloat16",
    head_dim: int = 128,
    head_dim_v: int | None = None,
    *,
    batch: int = 4,
    seqlen: int = 4096,
    seqlen_q: int | None = None,
    heads: int = 16,
    heads_kv: int | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Problem:
    seqlens, all_heads = (
        (seqlen if seqlen_q is None else seqlen_q, seqlen),
        (heads, heads_kv or heads),
    )
    options = {"causal": causal, "softmax_scale": softmax_scale}
    dims = (head_dim, head_dim_v or head_dim)
    return dense_problem(dtype, batch, *seqlens, *all_heads, *dims, **options)


def packed(case: Problem, *, sequences: int = 64, **changes: bool | int | None) -> Problem:
    """Return `case` with its rows in packed sequences, the longest of which keeps its lengths."""
    totals = {"total_q": case.batch * case.seqlen_q, "total_k": case.batch * case.seqlen_k}
    layout = replace(Layout(kind="varlen", **totals), **changes)
    tensors = Tensors(
        **{n: t._replace(strides=(0, *t.strides[1:])) for n, t in case.tensors.items()}
    )
    return replace(case, batch=sequences, q_offset=0, tensors=tensors, layout=layout)


def cached(case: Problem, *, caches: int, **changes: bool | int) -> Problem:
    """Return `case` with keys in `caches` KV caches, whose rows are filled in part."""
    layout = replace(Layout("kvcache", caches=caches), **changes)
    return replace(case, q_offset=0, layout=layout)


def default_tile(case: Problem) -> HopperTile:
    tile = hopper.default_tile(case, h100)
    assert isinstance(tile, HopperTile)
    return tile


def why_not(case: Problem, device: Device = h100) -> str:
    """Return the reason why the family does not serve a problem, or an empty text."""
    return hopper.why_not(case, device) or ""


# ---- Supported problems


def strided(strides: tuple[int, int, int], *, alignment: int = 16) -> Problem:
    """Return a problem with these strides of k by batch, row and head; q and v are contiguous."""
    usual = ArraySpec.contiguous((2, 203, 3, 64), "float16")
    return make_problem(usual, ArraySpec(usual.shape, strides, "float16", alignment), usual)


REFUSED: dict[str, tuple[Problem, Device, str]] = {
    "float64": (problem("float64"), h100, "its tensor-core products take no float64"),
    **{
        f"sm_{arch}": (problem(), device_for_arch(arch), f"needs sm_90 for wgmma, not sm_{arch}")
        for arch in ARCHITECTURES
        if arch != 90
    },
    "old NVRTC": (
        problem(),
        replace(h100, arch_specific=False),
        "needs NVRTC 12.9 or newer: through CuPy, older ones cannot compile for sm_90a",
    ),
    "no keys": (problem(seqlen=0, seqlen_q=5), h100, "arrays without keys"),
    "rows on 8 bytes": (
        strided((203 * 3 * 64, 3 * 64, 64), alignment=8),
        h100,
        "needs rows that are aligned to 16 bytes; these are aligned to 8",
    ),
    "an odd head_dim": (problem(head_dim=33), h100, "these are aligned to 2"),
    "rows backwards": (
        strided((203 * 3 * 64, -3 * 64, 64)),
        h100,
        "TMA does not support a stride of -384 bytes",
    ),
    "a stride of 2^40 bytes": (
        strided((2**39, 3 * 64, 64)),
        h100,
        f"TMA does not support a stride of {2**40} bytes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_serve_is_told_why_and_goes_to_the_next_family_that_can(name):
    case, device, words = REFUSED[name]
    assert words in why_not(case, device)
    plan = make_plan(case, device)
    needs_simt = case.dtype == "float64" or device.arch < 80
    assert plan.family == ("simt" if needs_simt else "mma")
    assert words in plan.rejected["hopper"]
    assert f"not hopper     {plan.rejected['hopper']}" in str(plan).splitlines()
    with pytest.raises(UnsupportedError, match=f"'hopper' cannot serve this: .*{re.escape(words)}"):
        make_plan(case, device, family="hopper")


def test_heads_too_wide_for_two_blocks_and_wide_float32_are_refused():
    words = "two thread blocks compute at most 512 output columns of a head, not 576"
    assert hopper.why_not(problem(head_dim=576), h100) == words
    words = "supports float32 only for head dims up to 256"
    assert hopper.why_not(problem("float32", 264), h100) == words


@pytest.mark.parametrize(
    "case",
    [
        strided((203 * 3 * 64, 3 * 64, 64)),
        # The next two have a broadcast batch, and the largest stride that TMA accepts.
        strided((0, 3 * 64, 64)),
        strided((2**39 - 8, 3 * 64, 64)),
        problem(head_dim=8),
        problem(head_dim=256, head_dim_v=8),
        problem(head_dim=512),
        problem(head_dim=576, head_dim_v=512),
        problem(seqlen=1),
        problem(seqlen_q=0),
        problem(batch=0),
    ],
)
def test_the_two_16_bit_dtypes_in_rows_of_16_bytes_are_its_own_on_sm_90(case):
    for dtype in ("float16", "bfloat16"):
        plan = make_plan(replace(case, dtype=dtype), h100)
        assert plan.family == "hopper"
        assert plan.reason == "first choice for this dtype and GPU; default tile"


def test_a_step_that_is_never_taken_may_be_of_any_size():
    one = ArraySpec((1, 203, 1, 64), (-(2**41), 64, 2**50), "float16")
    assert hopper.why_not(make_problem(one, one, one), h100) is None


def test_padded_rows_make_every_head_dim_its_own():
    for head_dim in (1, 33, 100, 255, 257, 511):
        row = -(-head_dim // 8) * 8
        spec = ArraySpec((2, 203, 3, head_dim), (203 * 3 * row, 3 * row, row), "float16")
        assert make_plan(make_problem(spec, spec, spec), h100).family == "hopper"


def test_packed_and_cached_sequences_are_its_own_but_not_pages_nor_shares_of_their_keys():
    for case in (packed(problem()), cached(problem(), caches=9)):
        assert hopper.serves_sequences
        assert hopper.why_not(case, h100) is None
        plan = make_plan(case, h100, family="hopper")
        assert plan.num_splits == 1
        assert plan.schedule.counters == 0
    paged = cached(problem(), caches=0, page_size=16, pages=100, max_pages=10)
    assert "not pages" in why_not(paged)
    for splits in (None, 1):
        assert hopper.why_not(packed(problem(), num_splits=splits), h100) is None
    split = packed(problem(), num_splits=2)
    assert "splits the keys only in batches of equal lengths" in why_not(split)
    assert "without keys" in why_not(cached(problem(), caches=0))


# ---- Tiles


@pytest.mark.parametrize(
    ("tile", "words"),
    [
        (HopperTile(96, 128), "Br is 96; expected 64, 128 or 192"),
        (HopperTile(256, 128), "Br is 256; expected 64, 128 or 192"),
        (HopperTile(128, 120), "Bc is 120; expected a multiple of 16 up to 256"),
        (HopperTile(128, 272), "Bc is 272; expected a multiple of 16 up to 256"),
        (HopperTile(128, 128, stages=1), "stages is 1; expected at least 2"),
        (HopperTile(128, 128, q_stages=0), "q_stages is 0; expected 1 or 2"),
        (HopperTile(128, 128, q_stages=3), "q_stages is 3; expected 1 or 2"),
        (HopperTile(128, 128, turns=2), "turns (ping-pong order) is 2; expected 0, or 1 if"),
        (HopperTile(64, 128, turns=1), "turns (ping-pong order) is 1; expected 0, or 1 if"),
        (HopperTile(128, 64, q_steps=9), "q_steps is 9; expected at most 8"),
        (HopperTile(128, 128, stages=7), "KiB of shared memory; sm_90 has 227 KiB per block"),
        (HopperTile(128, 240), "registers"),
        (HopperTile(192, 128), "registers"),
    ],
)
def test_a_tile_that_cannot_run_is_told_why(tile, words):
    assert words in (hopper.why_not_tile(problem(), h100, tile) or "")


def test_more_query_tiles_than_can_be_counted_are_refused():
    case = problem(batch=2**10, seqlen=2**20, heads=2**10)
    words = "query tiles; expected at most 2147483647"
    assert words in (hopper.why_not_tile(case, h100, HopperTile(128, 64)) or "")


VARIED = [
    problem(head_dim=64),
    problem("float16", 128, causal=True),
    problem(head_dim=256),
    problem(head_dim=192, head_dim_v=128, causal=True),
    problem(head_dim=8, head_dim_v=256),
    problem(head_dim=512, causal=True),
    problem("float16", 576, 424),
    problem(head_dim=80, batch=1, heads=1),
    problem(head_dim=40, seqlen=1),
    problem(head_dim=96, seqlen=65536, seqlen_q=1, heads=32, heads_kv=4),
]


@pytest.mark.parametrize("case", VARIED)
def test_every_legal_tile_fits_the_registers_and_the_shared_memory_of_an_sm(case):
    count = 0
    for tile in hopper.tiles(case, h100):
        assert isinstance(tile, HopperTile)
        count += 1
        plan = plan_tile(hopper, case, h100, tile, reason="")
        assert plan.shared_memory <= h100.shared_memory_per_block
        consumers = tile.Br // 64
        assert plan.threads == 128 * (consumers + 1)
        config = hopper.config(case, tile, plan.schedule.split)
        producer, consumer = config["producer_registers"], config["consumer_registers"]
        # setmaxnreg takes multiples of 8. It waits forever if all warps request more registers than
        # the launch allocated, which are a multiple of 8 per thread.
        assert producer % 8 == consumer % 8 == 0
        assert 24 <= producer <= consumer <= 240
        allotted = min(255, h100.registers_per_sm // plan.threads) // 8 * 8
        assert producer + consumers * consumer <= allotted * (consumers + 1)
        # S, P and O are live at once. For wide heads, each thread block holds half of O's columns.
        columns = case.head_dim_v if plan.launches[0].grid[2] == 1 else case.head_dim_v / 2
        output = math.ceil(columns / 16) * 16
        assert tile.Bc // 2 + tile.Bc // 4 + output // 2 < consumer
    assert count > 20


@pytest.mark.parametrize("case", VARIED)
def test_the_search_fills_shared_memory_with_stages(case):
    for tile in hopper.tiles(case, h100):
        most = h100.shared_memory_per_block
        more = hopper.shared_memory(case, replace(tile, stages=tile.stages + 1))
        assert tile.stages == 8 or more > most, tile


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "columns"), [(128, 128, 128), (64, 96, 96), (40, 40, 64), (8, 8, 32)]
)
def test_shared_memory_is_query_tiles_a_ring_barriers_and_work_tiles(head_dim, head_dim_v, columns):
    case = problem(head_dim=head_dim, head_dim_v=head_dim_v)
    queries = 128 * -(-head_dim // 32) * 32 * 2
    for stages, q_stages in ((2, 1), (5, 2)):
        tile = HopperTile(128, 80, stages=stages, q_stages=q_stages)
        barriers, work_tiles = 16 * (stages + q_stages), 32 * (q_stages + 2)
        ring = q_stages * queries + stages * 80 * columns * 2
        assert hopper.shared_memory(case, tile) == ring + barriers + work_tiles


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "columns", "columns_v"),
    [(512, 512, 256, 256), (264, 512, 160, 256), (8, 424, 32, 224)],
)
def test_blocks_of_a_pair_have_half_of_the_columns_and_two_tiles_of_scores_to_receive(
    head_dim, head_dim_v, columns, columns_v
):
    case, tile = problem(head_dim=head_dim, head_dim_v=head_dim_v), HopperTile(128, 32, stages=3)
    one_block, scores = problem(head_dim=columns, head_dim_v=columns_v), 128 * 32 * 4
    # For each of the two score tiles, each of eight warps has a barrier.
    apart = hopper.shared_memory(one_block, tile) + 2 * (scores + 8 * 8)
    assert hopper.shared_memory(case, tile) == apart


@pytest.mark.parametrize(("stages", "q_stages"), [(2, 1), (5, 2)])
def test_varlen_fetches_work_tiles_ahead_and_stores_their_sequences_and_tails(stages, q_stages):
    tile = HopperTile(128, 80, stages=stages, q_stages=q_stages)
    more = hopper.shared_memory(packed(problem()), tile) - hopper.shared_memory(problem(), tile)
    views, work_tiles, barriers, tails = 24 * (q_stages + 4), 2 * 32, 2 * 8, (stages + 1) * (8 + 8)
    assert more == views + work_tiles + barriers + tails


@pytest.mark.parametrize(
    ("case", "Br", "Bc"),
    [
        (problem(head_dim=64), 192, 128),
        (problem(head_dim=64, causal=True), 192, 128),
        (problem(head_dim=64, causal=True, seqlen=512), 128, 128),
        (problem(head_dim=128), 192, 80),
        (problem(head_dim=128, seqlen=2048), 192, 80),
        (problem(head_dim=128, seqlen=1024), 128, 128),
        (problem(head_dim=128, causal=True), 128, 128),
        (problem(head_dim=128, causal=True, seqlen=8192), 192, 80),
        (problem(head_dim=128, causal=True, seqlen=512), 128, 128),
        (problem(head_dim=128, seqlen_q=1), 64, 128),
        (problem(head_dim=192, head_dim_v=128), 128, 128),
        (problem(head_dim=256), 128, 64),
        (problem(head_dim=256, seqlen_q=1), 64, 64),
        (problem(head_dim=512, causal=True), 128, 64),
    ],
)
def test_common_problems_have_the_tile_that_was_measured_best(case, Br, Bc):
    tile = default_tile(case)
    assert (tile.Br, tile.Bc) == (Br, Bc)
    assert hopper.why_not_tile(case, h100, tile) is None


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_have_the_tile_of_a_batch_of_their_longest(causal):
    for seqlen in (300, 4096, 16384):
        case = problem(batch=4, seqlen=seqlen, causal=causal)
        tile, usual = default_tile(packed(case)), default_tile(case)
        assert (tile.Br, tile.Bc) == (usual.Br, usual.Bc)
        assert hopper.why_not_tile(packed(case), h100, tile) is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_batch_invariant_tile_is_the_same_for_every_batch_and_length(head_dim, causal):
    fixed = {"head_dim": head_dim, "causal": causal}
    cases = [
        packed(
            problem(batch=batch, seqlen=seqlen, seqlen_q=seqlen_q, **fixed),
            sequences=batch + 3,
            batch_invariant=True,
        )
        for batch in (1, 300)
        for seqlen in (5, 300, 9000)
        for seqlen_q in (1, seqlen)
    ]
    cases.append(cached(problem(**fixed), caches=7, batch_invariant=True))
    assert len({default_tile(case) for case in cases}) == 1


def test_every_problem_that_it_serves_has_a_default_tile_that_is_no_makeshift():
    for head_dim in (*range(8, 257, 8), *range(264, 577, 24)):
        for head_dim_v in (8, 64, 104, 120, 128, min(head_dim, 512), 256, 360):
            for seqlen_q in (1, 799):
                case = problem(head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=seqlen_q)
                assert hopper.why_not(case, h100) is None
                tile = default_tile(case)
                assert hopper.why_not_tile(case, h100, tile) is None
                assert tile.turns or seqlen_q == 1
                assert tile.Bc >= 64
                assert tile.stages >= 2


# ---- Launch


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "splits", "blocks"),
    [
        (1, 1, 1, 1, 1),
        (1, 1, 128, 1, 1),
        (1, 1, 129, 1, 2),
        (2, 3, 799, 1, 2 * 3 * 7),
        (2, 3, 799, 3, 2 * 3 * 7 * 3),
        (4, 16, 4096, 1, 132),
        (1, 44, 257, 1, 132),
        (1, 132, 5, 1, 132),
        (1, 133, 5, 1, 132),
    ],
)
def test_the_grid_has_a_block_for_each_query_tile_and_split_but_no_more_than_sms(
    batch, heads, seqlen_q, splits, blocks
):
    case = problem(batch=batch, heads=heads, seqlen_q=seqlen_q)
    case = replace(case, layout=Layout(num_splits=splits))
    tile = HopperTile(128, 128)
    (launch, *_) = hopper.schedule(case, h100, tile).launches
    assert launch.grid == (blocks, 1, 1)
    assert launch.threads == 3 * 128
    assert launch.shared_memory == hopper.shared_memory(case, tile)


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "splits", "pairs"),
    [(1, 128, 1, 1), (3, 799, 1, 21), (3, 799, 2, 42), (16, 4096, 1, 66)],
)
def test_wide_heads_have_a_pair_of_blocks_in_place_of_a_block(heads, seqlen_q, splits, pairs):
    case = problem(head_dim=512, batch=1, heads=heads, seqlen_q=seqlen_q)
    case = replace(case, layout=Layout(num_splits=splits))
    for each in (case, packed(case)) if splits == 1 else (case,):
        launches = hopper.schedule(each, h100, default_tile(each)).launches
        (launch,) = (launch for launch in launches if launch.entry == "attention")
        assert launch.grid[1:] == (1, 2)
        assert launch.cluster == 2
        assert each is not case or launch.grid[0] == pairs


def test_split_keys_are_merged_by_a_second_kernel():
    case = problem(batch=1, heads=1, seqlen_q=1, seqlen=65536)
    plan = make_plan(case, h100, family="hopper")
    assert plan.num_splits > 1
    assert [launch.entry for launch in plan.launches] == ["attention", "combine"]
    assert plan.launches[0].grid == (plan.num_splits, 1, 1)


def test_sequences_are_put_in_order_by_one_block_of_a_kernel_that_comes_first():
    plan = make_plan(packed(problem(), sequences=77), h100, family="hopper")
    prepare, attention = plan.launches
    assert (prepare.entry, prepare.grid, prepare.threads) == ("prepare", (1, 1, 1), 1024)
    assert (attention.entry, attention.grid) == ("attention", (132, 1, 1))
    assert plan.unit is not None
    assert plan.unit.entries == ("prepare", "attention")
    # In words: a counter of tiles, their prefix sums over the sequences, and the order.
    assert plan.workspace == 4 * (1 + 78 + 77)


# ---- Tensor maps


def maps_of(case: Problem, tile: HopperTile) -> tuple[TensorMapSpec, ...]:
    assert hopper.why_not(case, h100) is None
    maps = hopper.schedule(case, h100, tile).tensor_maps
    assert tuple(maps) == ("q", "k", "v")
    return tuple(maps.values())


def test_a_tensor_map_has_the_arrays_sizes_innermost_first_and_its_strides_in_bytes():
    case = problem("float16", 128, 64, batch=2, seqlen=203, seqlen_q=799, heads=6, heads_kv=3)
    q, k, v = maps_of(case, HopperTile(192, 80))
    strides = [(6 * 256, 256, 799 * 6 * 256), *((3 * n, n, 203 * 3 * n) for n in (256, 128))]
    shapes = [(128, 799, 6, 2), (128, 203, 3, 2), (64, 203, 3, 2)]
    assert q == TensorMapSpec("float16", shapes[0], strides[0], box=(64, 192))
    assert k == TensorMapSpec("float16", shapes[1], strides[1], box=(64, 80))
    assert v == TensorMapSpec("float16", shapes[2], strides[2], box=(64, 80))


def test_the_other_layout_and_views_of_it_differ_in_strides_only():
    shape, bhsd = (2, 203, 3, 64), (3 * 203 * 64, 64, 203 * 64)
    of_packed = (203 * 3 * 3 * 64, 3 * 3 * 64, 64)
    views = [ArraySpec(shape, strides, "bfloat16") for strides in (bhsd, of_packed)]
    case = make_problem(*views, ArraySpec.contiguous(shape, "bfloat16"))
    q, k, v = maps_of(case, HopperTile(128, 128))
    assert q.shape == k.shape == v.shape == (64, 203, 3, 2)
    assert q.strides == (128, 203 * 128, 3 * 203 * 128)
    assert k.strides == (9 * 128, 128, 203 * 9 * 128)
    assert v.strides == (3 * 128, 128, 203 * 3 * 128)


def test_beside_other_kernels_a_grid_has_a_block_for_each_tile() -> None:
    """A grid over sequences stays persistent, because its blocks fetch tiles when they are idle."""
    case, tile = problem(batch=2), HopperTile(128, 128)
    tiles = 4096 // 128 * 2 * 16
    wide = packed(problem(head_dim=512), sequences=4096)
    for each, grid in (
        (case, (tiles, 1, 1)),
        (packed(case), (h100.sm_count, 1, 1)),
        (wide, (h100.sm_count // 2, 1, 2)),
    ):
        of_tile = default_tile(each) if each is wide else tile
        alone = hopper.schedule(each, h100, of_tile)
        shared = hopper.schedule(dataclasses.replace(each, shares_gpu=True), h100, of_tile)
        assert max(alone.main.grid) <= h100.sm_count
        assert shared.main.grid == grid
        assert shared.workspace == alone.workspace


def test_packed_rows_are_one_batch_and_a_cache_has_a_batch_of_its_own():
    case = problem("float16", 128, 64, batch=2, seqlen=203, seqlen_q=799, heads=6, heads_kv=3)
    q, k, v = maps_of(packed(case, sequences=5), HopperTile(192, 80))
    assert (q.shape, q.strides) == ((128, 2 * 799, 6, 1), (6 * 256, 256, 16))
    assert (k.shape, k.strides) == ((128, 2 * 203, 3, 1), (3 * 256, 256, 16))
    assert (v.shape, v.strides) == ((64, 2 * 203, 3, 1), (3 * 128, 128, 16))
    q, k, v = maps_of(cached(case, caches=9), HopperTile(192, 80))
    assert q == maps_of(case, HopperTile(192, 80))[0]
    assert (k.shape, k.strides) == ((128, 203, 3, 9), (3 * 256, 256, 203 * 3 * 256))
    assert (v.shape, v.strides) == ((64, 203, 3, 9), (3 * 128, 128, 203 * 3 * 128))


def test_an_axis_of_length_one_gets_a_stride_that_the_driver_takes():
    # The stride of such an axis is never used, so it may be odd, negative, or beyond 2^40.
    one = ArraySpec((1, 203, 1, 64), (-5, 64, 2**50), "float16")
    for spec in maps_of(make_problem(one, one, one), HopperTile(128, 128)):
        assert spec.strides == (128, 16, 16)


def test_a_broadcast_axis_keeps_its_stride_of_zero():
    _, k, _ = maps_of(strided((0, 3 * 64, 64)), HopperTile(128, 128))
    assert k.strides == (3 * 128, 128, 0)


@pytest.mark.parametrize(
    ("head_dim", "columns"),
    [
        *((8, 32), (32, 32), (40, 64), (64, 64), (72, 32), (96, 32), (104, 64), (160, 32)),
        # For wide heads, each thread block of a pair has half of the columns.
        *((256, 64), (264, 32), (384, 64), (448, 32), (512, 64)),
    ],
)
def test_a_box_is_one_line_of_128_bytes_or_where_head_dim_wastes_half_of_one_64(head_dim, columns):
    for spec in maps_of(problem(head_dim=head_dim), HopperTile(128, 128)):
        assert spec.box == (columns, 128)


# ---- TMA tiles: descriptors and swizzle, which the compiler compares with values from here


@dataclass(frozen=True)
class TmaTile:
    """Expected members of `TmaTile` of `tma_tile.cuh` for rows x columns 16-bit elements."""

    rows: int
    columns: int

    @property
    def box_row_bytes(self) -> int:
        """128, the widest swizzle, or 64 if the last half of a 128-byte box row would be empty."""
        return 64 if -(-self.columns // 32) % 2 else 128

    @property
    def boxes(self) -> int:
        return -(-self.columns * 2 // self.box_row_bytes)

    def offset(self, row: int, column: int) -> int:
        """Return the byte offset at which TMA stores an element, before the swizzle."""
        box, byte = divmod(2 * column, self.box_row_bytes)
        return (box * self.rows + row) * self.box_row_bytes + byte

    def descriptor(self, leading: int) -> int:
        """Return a matrix descriptor of the PTX ISA, with byte offsets in units of 16 bytes.

        Bits 16-29: leading offset; 32-45: stride between groups of 8 rows; 62-63: swizzle mode.
        """
        swizzle = {128: 1, 64: 2}[self.box_row_bytes]
        stride = self.offset(8, 0)
        return swizzle << 62 | stride // 16 << 32 | leading // 16 << 16

    def assertions(self) -> list[str]:
        box_bytes = self.rows * self.box_row_bytes
        values = {
            "box_row_bytes": self.box_row_bytes,
            "boxes": self.boxes,
            "box_bytes": box_bytes,
            "bytes": self.boxes * box_bytes,
            # A k step lies within a box row, so the leading offset is unused, and 1 by convention.
            "k_along_columns()": self.descriptor(16),
            # Along n, the elements continue in the next box.
            "k_along_rows()": self.descriptor(box_bytes),
        }
        steps = -(-self.columns // 16)
        values |= {f"column_step({s})": self.offset(0, 16 * s) for s in range(steps)}
        values |= {f"row_step({s})": self.offset(16 * s, 0) for s in range(self.rows // 16)}
        tile = f"TmaTile<{self.rows}, {self.columns}>"
        return [
            f'static_assert({tile}::{name} == {value:#x}ull, "{name} of {tile}");'
            for name, value in values.items()
        ]


TMA_TILES = [
    TmaTile(rows, columns)
    for rows in (16, 64, 80, 112, 128, 176, 192, 256)
    for columns in (8, 32, 40, 64, 72, 96, 128, 160, 192, 200, 256)
]

# Descriptors with which wgmma gave right products on a GPU.
MEASURED = [
    "TmaTile<128, 128>::k_along_columns() == 0x4000004000010000",
    "TmaTile<192, 64>::k_along_columns() == 0x4000004000010000",
    "TmaTile<128, 128>::k_along_rows() == 0x4000004004000000",
    "TmaTile<176, 128>::k_along_rows() == 0x4000004005800000",
    "TmaTile<80, 256>::k_along_rows() == 0x4000004002800000",
    # These tiles have box rows of 64 bytes.
    "TmaTile<128, 96>::k_along_columns() == 0x8000002000010000",
    "TmaTile<128, 96>::k_along_rows() == 0x8000002002000000",
]


def compile_slabs(assertions: list[str]) -> Cubin:
    text = "\n".join(
        ['#include "tile/tma_tile.cuh"', *assertions, 'extern "C" __global__ void none() {}']
    )
    return compile_cubin(TranslationUnit(text, ("none",), "boxes", arch_specific=True), h100)


def test_descriptors_steps_and_sizes_of_slabs_are_what_the_isa_says():
    measured = [f'static_assert({condition}, "");' for condition in MEASURED]
    compile_slabs(measured + [line for boxes in TMA_TILES for line in boxes.assertions()])


@pytest.mark.parametrize(
    "name", ["box_bytes", "k_along_columns", "k_along_rows", "column_step(5)", "row_step(3)"]
)
def test_a_wrong_value_does_not_compile(name):
    (right,) = (line for line in TmaTile(128, 128).assertions() if f"::{name}" in line)
    wrong = re.sub("0x([0-9a-f]+)ull", lambda value: f"{int(value[1], 16) ^ 0x10000:#x}ull", right)
    compile_slabs([right])
    with pytest.raises(CompileError, match=re.escape(name)):
        compile_slabs([wrong])


# Swizzle modes of the PTX ISA: address bits 4 to 6 (4 and 5 for 64 bytes) are XORed with the three
# (two) bits from bit 7 on.
def swizzled(address: int, box_row_bytes: int) -> int:
    return address ^ (address >> 7 & box_row_bytes // 16 - 1) << 4


@pytest.mark.parametrize("boxes", [TmaTile(64, 128), TmaTile(48, 96), TmaTile(32, 8)])
def test_eight_rows_of_a_chunk_lie_in_eight_bank_groups(boxes):
    columns = range(0, boxes.boxes * boxes.box_row_bytes // 2, 8)
    for column in columns:
        for first in range(0, boxes.rows, 8):
            rows = range(first, first + 8)
            addresses = [swizzled(boxes.offset(row, column), boxes.box_row_bytes) for row in rows]
            assert len({address // 16 % 8 for address in addresses}) == 8
    every = {
        swizzled(boxes.offset(row, column), boxes.box_row_bytes)
        for row in range(boxes.rows)
        for column in columns
    }
    assert len(every) == boxes.rows * len(columns)


def test_slabs_begin_where_the_swizzle_does():
    # The swizzle repeats after 1024 or 512 bytes; a descriptor with another start address would
    # need a base offset.
    for boxes in TMA_TILES:
        assert boxes.rows * boxes.box_row_bytes % (8 * boxes.box_row_bytes) == 0


def test_a_unit_is_compiled_for_its_own_architecture_only():
    unit = make_plan(problem(), h100, family="hopper").unit
    assert unit is not None
    assert unit.arch_specific
    assert unit.target(h100) == "sm_90a"
    assert dataclasses.replace(unit, arch_specific=False).target(h100) == "sm_90"


# ---- Multi-head latent attention (MLA): the values are columns of the keys


def latent(
    *,
    batch: int = 128,
    seqlen: int = 8192,
    seqlen_q: int = 1,
    heads: int = 128,
    heads_kv: int = 1,
    page_size: int = 0,
    dims: tuple[int, int] = (576, 512),
    **more: Any,
) -> Problem:
    """Return an MLA problem with `heads` query heads over a KV cache."""
    caches = (batch, seqlen) if not page_size else (batch * seqlen // page_size, page_size)
    k = ArraySpec.contiguous((*caches, heads_kv, dims[0]), "bfloat16")
    return make_problem(
        ArraySpec.contiguous((batch, seqlen_q, heads, dims[0]), "bfloat16"),
        k,
        ArraySpec((*k.shape[:3], dims[1]), k.strides, "bfloat16"),
        kind="kvcache",
        block_table=(seqlen // page_size, seqlen // page_size) if page_size else None,
        values_in_keys=True,
        **more,
    )


def test_query_heads_of_one_query_are_the_rows_of_a_tile():
    case = latent(heads=256, heads_kv=2, causal=True)
    schedule = hopper.schedule(case, h100, default_tile(case))
    strides = {"q": (256 * 576, 576, 128 * 576), "out": (256 * 512, 512, 128 * 512)}
    assert schedule.params == {"seqlen_q": 128, "heads_q": 2, **strides}
    maps = schedule.tensor_maps
    q, k = maps["q"], maps["k"]
    assert (q.shape, q.strides) == ((576, 128, 2, 128), (1152, 128 * 1152, 256 * 1152))
    assert (k.shape, k.strides) == ((576, 8192, 2, 128), (2304, 1152, 8192 * 2304))
    # 64 key columns hold no values; a thread block's half of them fills half a 128-byte box row.
    assert (q.box, k.box) == ((64, 128), (64, 64))
    assert maps["q_rest"] == replace(q, box=(32, 128), array="q")
    assert maps["k_rest"] == replace(k, box=(32, 64), array="k")
    unit = hopper.unit(case, default_tile(case), schedule)
    assert "bool values_in_keys = true;" in unit.text
    assert "bool causal = false;" in unit.text


@pytest.mark.parametrize(
    "case",
    [
        replace(latent(), values_in_keys=False),
        latent(dims=(560, 512)),
        latent(dims=(544, 480)),
        latent(dims=(256, 192)),
    ],
)
def test_other_values_are_loaded_as_their_own_and_heads_stay_heads(case):
    schedule = hopper.schedule(case, h100, default_tile(case))
    assert schedule.params == {}
    assert "bool values_in_keys = false;" in hopper.unit(case, default_tile(case), schedule).text


def test_heads_of_several_queries_stay_heads():
    case = latent(seqlen_q=2, causal=True)
    schedule = hopper.schedule(case, h100, default_tile(case))
    assert schedule.params == {}
    assert "bool values_in_keys = true;" in hopper.unit(case, default_tile(case), schedule).text


def test_a_slot_holds_keys_and_their_values_and_one_buffer_what_the_other_block_sends():
    tile = HopperTile(128, 64, stages=3)
    apart = replace(latent(heads_kv=128), values_in_keys=False, seqlen_q=128)
    # Stages have the same size in both cases, because keys have more columns than values.
    less = hopper.shared_memory(apart, tile) - hopper.shared_memory(latent(), tile)
    assert less == 128 * 64 * 4
    assert default_tile(latent()).stages == 3


@pytest.mark.parametrize(("page_size", "Bc"), [(64, 64), (32, 32), (128, 64), (96, 48)])
def test_a_tile_of_latent_keys_is_of_one_page(page_size, Bc):
    case = latent(page_size=page_size, seqlen=page_size * 10)
    tile = default_tile(case)
    assert tile.Bc == Bc
    k = hopper.schedule(case, h100, tile).tensor_maps["k"]
    assert k.shape == (576, page_size, 1, 1280)
    assert k.box == (64, Bc)
    reason = hopper.why_not_tile(case, h100, replace(tile, Bc=80))
    assert reason == f"Bc is 80; expected a divisor of page_size, {page_size}"


def test_pages_of_other_sizes_and_of_keys_with_values_of_their_own_are_refused():
    assert "page_size is 16; expected a multiple of" in why_not(latent(page_size=16))
    apart = replace(latent(page_size=64), values_in_keys=False)
    assert "not pages" in why_not(apart)
    assert "without keys" in why_not(latent(batch=0))


def test_keys_of_latent_attention_are_split_where_query_tiles_are_few():
    whole, cut = (make_plan(latent(batch=n), h100, family="hopper") for n in (128, 4))
    assert whole.num_splits == 1
    assert [launch.entry for launch in whole.launches] == ["attention"]
    assert cut.num_splits is not None
    assert 8 <= cut.num_splits <= 16
    assert [launch.entry for launch in cut.launches] == ["attention", "combine"]
    # The workspace holds partial results and, per thread block, an order of the four sequences.
    blocks = math.prod(cut.launches[0].grid)
    assert cut.workspace == 4 * (cut.num_splits * 4 * 128 * 513 + blocks * (2 * 4 + 2))
    asked = make_plan(latent(num_splits=5), h100, family="hopper")
    assert asked.num_splits == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [latent(), latent(page_size=64, heads=64), latent(batch=4), latent(dims=(512, 512))],
    ids=["whole", "pages", "split", "all columns are values"],
)
def test_default_tiles_of_latent_attention_compile_and_spill_little(case):
    made = make_plan(case, h100, family="hopper")
    assert made.unit is not None
    cubin = compile_cubin(made.unit, h100)
    assert "serialized" not in cubin.log
    assert "warning" not in cubin.log
    # Kernels that write partial results spill a few more bytes.
    most = 32 if made.num_splits == 1 else 48
    assert max(found.spill_bytes for found in cubin.resources.values()) <= most


# ---- Biases, and KV tiles that some consumers skip


def planned(head_dim: int = 128, dtype: Any = np.float16, **more: Any) -> Plan:
    """Return the plan of a call with batch 2, 2048 queries and keys, and 4 heads."""
    q = np.empty((2, 2048, 4, head_dim), dtype)
    return plan(flash_attention, q, q, q, arch="sm_90", family="hopper", **more)


def text_of(made: Plan) -> str:
    """Return the source text of the unit of a plan."""
    assert made.unit is not None
    return made.unit.text


def bias_of(*shape: int, dtype: str = "float16") -> np.ndarray:
    # Plans read no elements, and untouched pages take no memory.
    return np.empty(shape, dtype)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 4, 2048, 2048), (2048, 2048**2, 4 * 2048**2)),
        ((1, 4, 2048, 2048), (2048, 2048**2, 0)),
        ((2048, 2048), (2048, 0, 0)),
        ((2, 1, 1, 2048), (0, 0, 2048)),
    ],
)
def test_a_bias_of_the_queries_dtype_comes_beside_the_keys(shape, strides):
    made = planned(bias=bias_of(*shape))
    spec = made.schedule.tensor_maps["bias"]
    assert spec.shape == (2048, 2048, 4, 2)
    assert spec.strides == tuple(2 * stride for stride in strides)
    assert spec.box == (64, made.tile.Br)
    assert made.launches[0].arguments == ("biased_maps", "params")


@pytest.mark.parametrize(
    ("bias", "more"),
    [
        (bias_of(1, 4, 2048, 2048, dtype="float32"), {}),
        (bias_of(1, 4, 2048, 2050)[..., :2048], {}),
        (bias_of(1, 4, 2048, 2048)[..., ::-1], {}),
        (bias_of(1, 4, 2048, 2048), {"window_size": (9, 9)}),
    ],
    ids=["float32", "rows at odd addresses", "backwards", "window"],
)
def test_other_biases_are_read_one_by_one(bias, more):
    made = planned(bias=bias, **more)
    assert list(made.schedule.tensor_maps) == ["q", "k", "v"]
    assert "bias_stages = 0" in text_of(made)


@pytest.mark.parametrize(
    ("more", "is_noted"),
    [
        ({"window_size": (255, 0), "tile": {"Br": 192, "Bc": 64}}, True),
        ({"window_size": (255, 0), "tile": {"Br": 128, "Bc": 128}}, False),
        ({"window_size": (255, 0), "tile": {"Br": 64, "Bc": 32}}, False),
        (
            {"mask_mod": MaskMod(lambda i, j: (i - j) % 2 == 0), "tile": {"Br": 128, "Bc": 128}},
            True,
        ),
        ({"softcap": 20.0}, False),
    ],
)
def test_consumers_leave_blocks_out_where_their_rows_may_see_fewer(more, is_noted):
    text = text_of(planned(head_dim=64, **more))
    assert f"bool skips_tiles = {str(is_noted).lower()};" in text


@pytest.mark.parametrize(
    ("dtype", "more", "is_bounded"),
    [
        ("bfloat16", {"softcap": 50.0}, True),
        ("bfloat16", {"softcap": 50.0, "window_size": (9, 0), "sinks": np.zeros(4)}, True),
        ("bfloat16", {"score_mod": ScoreMod(lambda score: np.clip(score, -9, 9) + 40)}, True),
        ("bfloat16", {"softcap": 56.0}, False),
        ("bfloat16", {"softcap": 50.0, "alibi_slopes": np.ones(4)}, False),
        ("bfloat16", {"window_size": (9, 0)}, False),
        ("float16", {"softcap": 50.0}, False),
        ("bfloat16 192", {"softcap": 50.0}, False),
    ],
)
def test_the_maximum_of_bounded_scores_is_not_looked_for(dtype, more, is_bounded):
    dtype, _, head_dim = dtype.partition(" ")
    real = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    arrays = {n: x.astype(np.float32) for n, x in more.items() if isinstance(x, np.ndarray)}
    text = text_of(planned(int(head_dim or 128), real, **more | arrays))
    assert f"bool bounded = {str(is_bounded).lower()};" in text


def test_windows_with_a_row_of_one_later_key_are_looked_through():
    rng = np.random.default_rng(7)
    found = set()
    for _ in range(300):
        seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, 24, 2))
        left, right = (int(n) for n in rng.integers(0, 6, 2))
        q = np.empty((1, seqlen_q, 2, 64), ml_dtypes.bfloat16)
        k = np.empty((1, seqlen_k, 2, 64), ml_dtypes.bfloat16)
        offset = int(rng.integers(0, 12))
        case = plan(
            flash_attention, q, k, k, window_size=(left, right), q_offset=offset, arch="sm_90"
        ).problem
        rows = np.arange(seqlen_q)
        begins, ends = case.mask.begins(rows), case.mask.ends(rows)
        has_only_keys = bool(np.any((begins > 0) & (ends - begins == 1)))
        looks = scores.finds_only_keys(case)
        assert looks or not has_only_keys, (left, right, case.mask)
        found.add((has_only_keys, looks))
    assert found >= {(True, True), (False, False)}


@pytest.mark.parametrize(
    ("more", "computes"),
    [
        ({"bias": np.empty((1, 4, 512, 512), np.float32)}, True),
        ({"bias": np.empty((1, 4, 512, 512), np.float32), "sinks": np.empty(4, np.float32)}, True),
        ({"window_size": (64, 0)}, False),
        ({"softcap": 30.0}, False),
        ({}, False),
    ],
)
def test_rows_of_low_scores_have_a_launch_where_scores_may_be_low(more, computes):
    q = np.empty((2, 512, 4, 64), ml_dtypes.bfloat16)
    made = plan(flash_attention, q, q, q, arch="sm_90", family="hopper", **more)
    assert ("low_rows" in [launch.entry for launch in made.launches]) == computes
    assert (made.schedule.counters > 0) == computes
