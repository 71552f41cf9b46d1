"""The backward `mma` family, with all gradients in one pass: problems, tiles, and memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.problems import with_mask

from cupy_flash.families.contract import QueryTileLists
from cupy_flash.families.mma.backward import PRESWIZZLED_TILES, MmaBackwardFamily, MmaBackwardTile
from cupy_flash.families.schedule import KEY_GRADIENTS, QUERY_GRADIENTS, ROW_TERMS, Schedule
from cupy_flash.problem.arrays import ArraySpec
from cupy_flash.problem.backward import with_gradient
from cupy_flash.problem.device import ARCHITECTURES, device_for_arch
from cupy_flash.problem.gradient import GradientSpec
from cupy_flash.problem.problem import Problem, make_contiguous_problem
from cupy_flash.problem.score import ScoreSpec

mma = MmaBackwardFamily()
h200 = device_for_arch("sm_90")
TILE = MmaBackwardTile(32, 128, 4, 4, columns=32, stages=2)


def problem(
    dtype: str = "float32", head_dim: int = 64, wrt: tuple[str, ...] = ("q", "k", "v"), **sizes: int
) -> Problem:
    sizes = {"batch": 2, "seqlen_q": 799, "seqlen_k": 701, "heads_q": 8, "heads_kv": 4} | sizes
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim} | sizes
    forward = make_contiguous_problem(dtype=dtype, **sizes)
    dout, *inputs = (ArraySpec.contiguous(forward.shape_of(n), dtype) for n in ("out", *wrt))
    return with_gradient(
        forward, GradientSpec(wrt, dtype), dout, dict(zip(wrt, inputs, strict=True))
    )


def modified(dtype: str, **changes: bool) -> Problem:
    """Return a problem with modified scores and these attributes of `ScoreSpec`."""
    score = ScoreSpec(None, None, False, False, False, False, True, False, "", np.dtype([]))
    return dataclasses.replace(problem(dtype), score=dataclasses.replace(score, **changes))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_default_tiles_are_legal_on_every_architecture(arch: int, dtype: str) -> None:
    device = device_for_arch(arch)
    for head_dim in (1, 31, 64, 96, 128, 192, 256, 257, 384, 512, 576):
        for head_dim_v in (1, head_dim, 256, 512):
            case = problem(dtype, head_dim, head_dim_v=head_dim_v)
            if mma.why_not(case, device) is None:
                assert mma.why_not_tile(case, device, mma.default_tile(case, device)) is None


@pytest.mark.parametrize("head_dim", [1, 31, 64, 96, 128, 192, 256, 257, 400, 512, 576])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gpus_with_much_shared_memory_serve_every_head_dim(dtype: str, head_dim: int) -> None:
    # An A100 has 163 KiB of shared memory, too few for k, v and 32 queries of wide float32 heads.
    for arch in (80, 90, 100) if dtype != "float32" or head_dim < 400 else (90, 100):
        assert mma.why_not(problem(dtype, head_dim), device_for_arch(arch)) is None


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "head_dim_v", "reason"),
    [
        (86, "bfloat16", 512, 512, None),
        (86, "bfloat16", 576, 512, "needs 104 KiB of shared memory; sm_86 has 99 KiB per block"),
        (120, "float32", 320, 320, "needs 124 KiB of shared memory; sm_120 has 99 KiB per block"),
        (80, "float32", 512, 512, "needs 196 KiB of shared memory; sm_80 has 163 KiB per block"),
        (90, "float32", 576, 576, None),
    ],
)
def test_wide_heads_are_refused_where_the_smallest_tile_does_not_fit(
    arch: int, dtype: str, head_dim: int, head_dim_v: int, reason: str | None
) -> None:
    case = problem(dtype, head_dim, head_dim_v=head_dim_v)
    assert mma.why_not(case, device_for_arch(arch)) == reason


@pytest.mark.parametrize(
    ("head_dims", "tile", "padded", "row_warps", "steps"),
    [
        # Eight warps divide 512 columns. Each computes 32 rows and its 64 columns at once.
        ((512, 512), {}, (512, 512), 1, 4),
        # 576 columns are a multiple of 16 columns for each of four warps, but not of eight.
        ((576, 512), {}, (576, 512), 2, 9),
        ((576, 576), {}, (576, 576), 2, 3),
        ((64, 512), {}, (64, 512), 2, 1),
        # Four warps with the same 32 rows have 128 columns each.
        ((512, 512), {"Br": 64, "columns": 16, "stages": 1}, (512, 512), 2, 4),
        ((257, 33), {}, (320, 64), 2, 5),
    ],
)
def test_warps_divide_the_columns_of_dq_and_sum_as_many_as_registers_hold(
    head_dims: tuple[int, int],
    tile: dict[str, int],
    padded: tuple[int, int],
    row_warps: int,
    steps: int,
) -> None:
    case = problem("bfloat16", head_dims[0], head_dim_v=head_dims[1])
    wide = MmaBackwardTile(**{"Br": 32, "Bc": 32, "warps": 8, "key_warps": 2, "columns": 8} | tile)
    wide = dataclasses.replace(wide, paired=1)
    assert mma.why_not_tile(case, h200, wide) is None
    config = mma.config(case, wide, mma.schedule(case, h200, wide).split)
    assert (config["padded_dim"], config["padded_dim_v"]) == padded
    assert (config["dq_row_warps"], config["dq_steps"]) == (row_warps, steps)


@pytest.mark.parametrize("head_dims", [(64, 512), (320, 320), (512, 512), (576, 576)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_tuner_tries_tiles_of_wide_heads(dtype: str, head_dims: tuple[int, int]) -> None:
    case = problem(dtype, head_dims[0], head_dim_v=head_dims[1])
    assert mma.default_tile(case, h200) in set(mma.tiles(case, h200))


def test_eight_queries_of_a_warp_need_a_second_warp_to_make_an_operand() -> None:
    tile = MmaBackwardTile(32, 32, 8, 2, columns=8)
    reason = mma.why_not_tile(problem("bfloat16", 512), h200, tile)
    assert reason == "columns is 8 and paired is 0; expected at least 16 columns, or paired = 1"


def test_float64_and_old_gpus_are_refused_by_name() -> None:
    assert mma.why_not(problem("float64"), h200) == "its tensor-core products do not take float64"
    reason = mma.why_not(problem(), device_for_arch(75))
    assert reason is not None
    assert reason.startswith("needs sm_80 or later")


@pytest.mark.parametrize("changes_slope", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_may_have_any_slope(dtype: str, changes_slope: bool) -> None:
    assert mma.why_not(modified(dtype, changes_slope=changes_slope), h200) is None


@pytest.mark.parametrize(
    ("dtype", "changes", "units"),
    [
        ("float32", {}, 0),
        ("float32", {"changes_slope": True}, 64),
        ("float32", {"sinks": True}, 128),
        ("bfloat16", {"changes_slope": True, "sinks": True}, 0),
    ],
)
def test_float32_needs_space_for_units_that_slopes_and_sinks_make_warps_find(
    dtype: str, changes: dict[str, bool], units: int
) -> None:
    # The warps divide the tile into 8 parts of the keys by 8 of the queries.
    tile = MmaBackwardTile(128, 128, 8, 8, columns=16, stages=1)
    reason = mma.why_not_tile(modified(dtype, **changes), h200, tile)
    sizes = "Br is 128, key_warps 8 and columns 16"
    expected = f"{sizes}, which need {units} scale factors; expected at most 20"
    assert reason == (expected if units else None)


@pytest.mark.parametrize(
    "tile",
    [
        MmaBackwardTile(48, 16, 3, 1, columns=16, stages=1),
        MmaBackwardTile(32, 48, 3, 3, columns=32, stages=1),
        MmaBackwardTile(64, 96, 6, 6, columns=32, stages=2),
    ],
    ids=str,
)
def test_a_power_of_two_of_warps_divides_columns(tile: MmaBackwardTile) -> None:
    reason = mma.why_not_tile(problem("bfloat16", 96), device_for_arch("sm_90"), tile)
    assert reason == "3 warps divide columns; expected a power of two"


def test_tiles_of_float32_are_made_into_images_first() -> None:
    def entries(dtype: str) -> list[str]:
        return [launch.entry for launch in mma.schedule(problem(dtype), h200, TILE).launches]

    assert entries("bfloat16") == [ROW_TERMS, KEY_GRADIENTS, QUERY_GRADIENTS]
    assert entries("float32") == [ROW_TERMS, PRESWIZZLED_TILES, KEY_GRADIENTS, QUERY_GRADIENTS]


def test_preswizzled_tiles_take_as_much_of_the_workspace_as_whole_tiles_of_the_inputs() -> None:
    def workspace(dtype: str, **sizes: int) -> int:
        return mma.schedule(problem(dtype, **sizes), h200, TILE).workspace

    # Queries: 2 x 8 heads of 25 tiles with 32 rows, which have 8 bytes of statistics each. Keys:
    # 2 x 4 heads of 6 tiles with 128 keys. The scales after each tile take 128 bytes.
    preswizzled_tiles = 2 * 8 * 25 * (32 * (512 + 8) + 128) + 2 * 4 * 6 * (128 * 512 + 128)
    assert workspace("float32") - workspace("bfloat16") == preswizzled_tiles


def test_a_tile_of_float32_takes_the_shared_memory_of_its_preswizzled_tiles_and_of_pairs() -> None:
    keys, pairs, stage = 128 * 512 + 128, 128 * 32 * 4, 32 * (512 + 8) + 128
    assert mma.shared_memory(problem(), TILE) == keys + pairs + 2 * stage
    keys, pairs, stage = 128 * 256, 128 * 32 * 2, 32 * (256 + 8)
    assert mma.shared_memory(problem("bfloat16"), TILE) == keys + pairs + 2 * stage


def test_thread_blocks_of_eight_warps_have_shared_memory_for_a_barrier() -> None:
    tile = MmaBackwardTile(64, 128, 8, 4)
    keys, pairs, stage = 128 * 512, 2 * 128 * 64 * 2, 64 * (512 + 8)
    assert mma.shared_memory(problem("bfloat16", 128), tile) == keys + pairs + 2 * stage + 16
    # Two thread blocks of four warps fill the shared memory of an A100.
    assert mma.default_tile(problem("bfloat16"), device_for_arch("sm_80")).min_blocks == 2


def test_sections_are_of_one_size_and_larger_where_blocks_have_fewer_steps() -> None:
    def section(causal: bool) -> int:
        one = problem("bfloat16", 256, batch=8, heads_q=8, heads_kv=8, seqlen_q=2048, seqlen_k=2048)
        one = dataclasses.replace(one, causal=causal)
        return mma.schedule(one, h200, mma.default_tile(one, h200)).section_heads

    # 9 heads of 16 blocks each fill 132 SMs, but 64 heads are 7 sections of 9, and one more.
    assert (section(causal=False), section(causal=True)) == (8, 16)


def lists_of(of: Problem, tile: MmaBackwardTile = TILE) -> QueryTileLists | None:
    return mma.query_tile_lists(of, tile)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_mask_function_has_lists_without_stored_pairs(dtype: str) -> None:
    assert lists_of(problem(dtype)) is None
    assert lists_of(with_mask(problem(dtype))) == QueryTileLists(2, stores_pairs=False)
    assert lists_of(with_mask(problem(dtype), block_mask_suffices=False)) is None
    config = mma.config(of := with_mask(problem(dtype)), TILE, schedule_of(of).split)
    assert not config["may_descend"]


def test_a_call_without_queries_has_no_lists() -> None:
    assert lists_of(with_mask(problem(seqlen_q=0))) is None


@pytest.mark.parametrize(
    ("sizes", "varies", "tile", "has_lists"),
    [
        # An entry has 16 bits for the query tile and 13 bits for the index in the dq order.
        ({"seqlen_q": 32 * (2**16 - 1)}, (False, False), {}, True),
        ({"seqlen_q": 32 * 2**16}, (False, False), {}, False),
        ({"seqlen_k": 128 * (2**13 - 1)}, (False, False), {}, True),
        ({"seqlen_k": 128 * 2**13}, (False, False), {}, False),
        # The 8 lists of 65536 queries and keys take 34 MB, or 537 MB with small tiles.
        ({"seqlen_q": 2**16, "seqlen_k": 2**16}, (True, True), {}, True),
        ({"seqlen_q": 2**16, "seqlen_k": 2**16}, (True, True), {"Bc": 16, "key_warps": 1}, False),
    ],
)
def test_the_tile_determines_whether_long_sequences_have_lists(
    sizes: dict[str, int], varies: tuple[bool, bool], tile: dict[str, int], has_lists: bool
) -> None:
    of = with_mask(problem("bfloat16", **sizes), varies)
    found = lists_of(of, dataclasses.replace(TILE, **tile))
    assert found == (QueryTileLists(2, stores_pairs=False) if has_lists else None)
    assert mma.uses_block_mask(of, dataclasses.replace(TILE, **tile)) == has_lists


def test_thread_blocks_with_lists_do_not_divide_queries() -> None:
    of = problem("bfloat16", 128, batch=1, heads_kv=1, seqlen_q=8192, seqlen_k=8192)
    assert schedule_of(of).params["head_chunks"] > 1
    params = schedule_of(with_mask(of)).params
    assert (params["head_chunks"], params["tile_chunks"]) == (1, 1)


def test_more_heads_with_lists_are_interleaved() -> None:
    of = problem("bfloat16", 128, batch=8, heads_q=16, heads_kv=16, seqlen_q=8192, seqlen_k=8192)
    assert schedule_of(with_mask(of)).section_heads > schedule_of(of).section_heads


def schedule_of(of: Problem) -> Schedule:
    return mma.schedule(of, h200, mma.default_tile(of, h200))
