"""The `decode` family, for few query rows and many keys: plans and tiles, without a GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from cupy_flash.families.contract import MAX_GRID, MAX_GRID_Y
from cupy_flash.families.decode import DecodeFamily, DecodeTile
from cupy_flash.families.schedule import EVEN, UNSPLIT, Launch, Split
from cupy_flash.gpu.compiler import known_architectures
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.arrays import ArraySpec, contiguous_strides
from cupy_flash.problem.device import Device, device_for_arch
from cupy_flash.problem.problem import MAX_SEQLEN, Problem, make_problem

decode = DecodeFamily()
h100 = device_for_arch("sm_90")
TILE = DecodeTile(16, 16, warps=4, stages=3, min_blocks=1)
HEAD_DIMS = (64, 96, 128, 192, 256)
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
LAYOUTS = ("cache", "pages of 16", "pages of 1")


def problem(
    layout: str = "cache",
    *,
    rows: int = 4,
    batch: int = 8,
    seqlen_k: int = 8192,
    heads_kv: int = 8,
    group: int = 4,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: str = "bfloat16",
    alignment: int = 16,
    causal: bool = False,
    softmax_scale: float | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    values_in_keys: bool = False,
) -> Problem:
    """Return a problem with `rows` query rows for each KV head.

    `layout` is "dense" for the arrays of `flash_attention`, "varlen", "cache" or "pages of n".
    Rows in memory are padded to 16 bytes, and start at a multiple of `alignment`.
    """
    seqlen_q = rows // group

    def spec(shape: tuple[int, int, int], dim: int) -> ArraySpec:
        strides = contiguous_strides((*shape, -(-dim // 8) * 8))
        return ArraySpec((*shape, dim), strides, dtype, alignment)

    dims = (head_dim, head_dim_v or head_dim)
    heads_q = heads_kv * group
    options = {"causal": causal, "softmax_scale": softmax_scale}
    if layout == "dense":
        q = spec((batch, seqlen_q, heads_q), head_dim)
        k, v = (spec((batch, seqlen_k, heads_kv), dim) for dim in dims)
        return make_problem(q, k, v, **options)
    options |= {"batch": batch, "num_splits": num_splits}
    options |= {"batch_invariant": batch_invariant, "values_in_keys": values_in_keys}
    if layout == "varlen":
        q = spec((1, batch * seqlen_q, heads_q), head_dim)
        k, v = (spec((1, batch * seqlen_k, heads_kv), dim) for dim in dims)
        longest = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
        return make_problem(q, k, v, kind="varlen", **longest, **options)
    q = spec((batch, seqlen_q, heads_q), head_dim)
    if layout == "cache":
        k, v = (spec((batch, seqlen_k, heads_kv), dim) for dim in dims)
        return make_problem(q, k, v, kind="kvcache", **options)
    page_size = int(layout.removeprefix("pages of "))
    pages = -(-seqlen_k // page_size)
    k, v = (spec((batch * pages, page_size, heads_kv), dim) for dim in dims)
    return make_problem(q, k, v, kind="kvcache", block_table=(pages, pages), **options)


def default_tile(case: Problem, device: Device = h100) -> DecodeTile:
    tile = decode.default_tile(case, device)
    assert isinstance(tile, DecodeTile)
    return tile


def launch_of(case: Problem, tile: DecodeTile) -> Launch:
    (launch,) = decode.schedule(case, h100, tile).launches
    return launch


def why_not_tile(case: Problem, tile: DecodeTile, device: Device = h100) -> str:
    """Return the reason against a tile, or an empty text."""
    return decode.why_not_tile(case, device, tile) or ""


# ---- Supported problems, and when the family is preferred


def test_other_dtypes_and_gpus_before_ampere_are_refused_with_the_reason():
    for dtype in ("float32", "float64"):
        reason = decode.why_not(problem(dtype=dtype), h100)
        assert f"float16 or bfloat16, not {dtype}" in (reason or "")
    assert "needs sm_80 or newer" in (decode.why_not(problem(), device_for_arch("sm_75")) or "")


@pytest.mark.parametrize("layout", ["dense", "varlen", *LAYOUTS])
@pytest.mark.parametrize("rows", [4, 32, 4 * 799])
def test_sequences_of_every_layout_and_any_number_of_rows_are_served(layout, rows):
    for arch in (arch for arch in known_architectures() if arch >= 80):
        for head_dim in (1, 64, 256):
            case = problem(layout, rows=rows, head_dim=head_dim)
            assert decode.why_not(case, device_for_arch(arch)) is None


def test_a_cache_without_pages_is_refused():
    paged = problem("pages of 16")
    empty = replace(paged, layout=replace(paged.layout, max_pages=0, block_table_stride=0))
    assert not paged.layout.is_dense
    assert decode.why_not(empty, h100) == "block_table has no pages"


@pytest.mark.parametrize(
    ("rows", "seqlen_k", "says"),
    [
        (4, 8192, None),
        (4, 256, None),
        (32, 8192, None),
        (36, 8192, "is for 1 to 32 query rows per KV head; this problem has 36"),
        (0, 8192, "is for 1 to 32 query rows per KV head; this problem has 0"),
        (4, 255, "is for at least 256 keys; this problem has 255"),
    ],
)
def test_it_is_the_better_choice_for_few_rows_and_many_keys(rows, seqlen_k, says):
    assert decode.why_not_first(problem(rows=rows, seqlen_k=seqlen_k), h100) == says


def test_the_query_heads_of_a_key_value_head_count_as_rows():
    assert decode.why_not_first(problem(rows=32, group=32), h100) is None
    assert decode.why_not_first(problem(rows=2 * 32, group=32), h100) is not None


# ---- Default tiles


@pytest.mark.parametrize(
    ("rows", "head_dim", "Br"),
    [(4, 128, 16), (16, 128, 16), (20, 128, 16), (32, 64, 16), (32, 192, 16), (32, 256, 16)],
)
def test_default_tiles_have_as_few_rows_as_a_product_takes(rows, head_dim, Br):
    for arch in ARCHITECTURES:
        assert default_tile(problem(rows=rows, head_dim=head_dim), device_for_arch(arch)).Br == Br


@pytest.mark.parametrize("arch", [arch for arch in known_architectures() if arch >= 80])
def test_clusters_are_for_the_architectures_that_have_them(arch):
    device = device_for_arch(arch)
    has_clusters = arch // 10 in (9, 10)
    for head_dim, rows in itertools.product(HEAD_DIMS, (4, 32)):
        case = problem(rows=rows, head_dim=head_dim)
        assert has_clusters or default_tile(case, device).cluster == 0
    reason = decode.why_not_tile(problem(), device, replace(TILE, cluster=2))
    assert (reason is None) == has_clusters
    assert has_clusters or f"needs sm_90 or sm_100 for clusters, not sm_{arch}" in (reason or "")


@pytest.mark.parametrize(
    ("heads_kv", "group", "cluster", "clusters"),
    [
        # Loads by 42% of the 132 SMs, which is 55.4, saturate the memory bandwidth. If there are
        # several clusters, their number is a power of two.
        (1, 8, 8, 8),
        (2, 4, 8, 4),
        (3, 4, 8, 4),
        (4, 4, 8, 2),
        (7, 1, 8, 1),
        (8, 4, 8, 1),
        (16, 4, 4, 1),
        (32, 1, 2, 1),
        (64, 1, 1, 1),
    ],
)
def test_clusters_are_as_small_and_few_as_is_enough_for_the_bandwidth(
    heads_kv, group, cluster, clusters
):
    case = problem(heads_kv=heads_kv, rows=group, group=group, batch=1, seqlen_k=65536)
    tile = default_tile(case)
    assert tile.cluster == cluster
    assert launch_of(case, tile).grid == (1, heads_kv, cluster * clusters)


@pytest.mark.parametrize(("seqlen_k", "clusters"), [(1024, 1), (3072, 1), (3073, 4), (8192, 8)])
def test_more_clusters_are_for_more_keys_than_one_has_three_units_of_for_each_block(
    seqlen_k, clusters
):
    case = problem(heads_kv=1, rows=8, group=8, batch=1, seqlen_k=seqlen_k)
    tile = default_tile(case)
    assert launch_of(case, tile).grid == (1, 1, 8 * clusters)
    # A cluster writes partial results where its range of keys begins and where it ends.
    slots = 0 if clusters == 1 else 2 * clusters
    assert planned(case, tile) == (8 * clusters, slots, slots, EVEN)


@pytest.mark.parametrize(
    ("heads_kv", "batch", "seqlen_k", "warps"),
    [(4, 1, 1024, 4), (8, 2, 512, 4), (8, 2, 513, 8), (8, 1, 1025, 8), (3, 1, 1024, 8)],
)
def test_few_keys_of_several_heads_are_for_few_warps(heads_kv, batch, seqlen_k, warps):
    case = problem(heads_kv=heads_kv, batch=batch, seqlen_k=seqlen_k)
    tile = default_tile(case)
    assert (tile.warps, tile.cluster) == (warps, 8)
    assert launch_of(case, tile).grid == (1, heads_kv, 8)


@pytest.mark.parametrize(
    ("batch", "cluster", "stages"),
    # At batch 2, keys and values take 64 MiB.
    [(2, 8, 2), (3, 4, 3)],
)
def test_clusters_are_smaller_where_many_rows_leave_no_space_for_keys_in_flight(
    batch, cluster, stages
):
    tile = default_tile(problem(heads_kv=8, rows=16, group=16, batch=batch))
    assert (tile.cluster, tile.stages) == (cluster, stages)


@pytest.mark.parametrize(("batch", "cluster"), [(1, 4), (2, 4), (4, 8), (5, 0)])
def test_keys_that_two_row_tiles_read_are_for_clusters_where_they_are_few(batch, cluster):
    # At batch 4, keys and values take 16 MiB.
    case = problem(heads_kv=1, rows=32, group=32, batch=batch)
    assert default_tile(case).cluster == cluster


@pytest.mark.parametrize(
    ("batch", "seqlen_k", "cluster", "warps", "min_blocks"),
    [
        (1, 1024, 8, 4, 1),
        (15, 8192, 8, 8, 1),
        (16, 8192, 0, 8, 1),
        (33, 1024, 0, 4, 2),
        (62, 8192, 0, 8, 1),
        (64, 1024, 0, 2, 4),
        (64, 8192, 0, 2, 4),
        (64, 65536, 0, 2, 4),
    ],
)
def test_many_sequences_are_merged_through_device_memory(
    batch, seqlen_k, cluster, warps, min_blocks
):
    tile = default_tile(problem(batch=batch, seqlen_k=seqlen_k))
    assert (tile.cluster, tile.warps, tile.min_blocks) == (cluster, warps, min_blocks)


@pytest.mark.parametrize("arch", [arch for arch in known_architectures() if arch >= 80])
@pytest.mark.parametrize("layout", ["dense", "varlen", *LAYOUTS])
def test_default_tiles_are_legal_and_take_all_stages_that_there_is_room_for(arch, layout):
    device = device_for_arch(arch)
    for head_dim, rows, seqlen_k in itertools.product((17, *HEAD_DIMS), (4, 32), (255, 65536)):
        case = problem(layout, rows=rows, head_dim=head_dim, seqlen_k=seqlen_k)
        tile = default_tile(case, device)
        assert decode.why_not_tile(case, device, tile) is None
        deeper = replace(tile, stages=tile.stages + 1)
        if decode.why_not_tile(case, device, deeper) is None:
            # Stages that fit are left out only if loads of 128 KiB are in flight in bfloat16.
            assert (arch, tile.cluster, seqlen_k) == (90, 0, 65536)
            key_bytes = 2 * 2 * (-(-head_dim // 16) * 16)
            warps = tile.min_blocks * tile.warps
            assert warps * tile.stages * tile.Bc * key_bytes >= 128 << 10


@pytest.mark.parametrize(
    ("layout", "batch", "seqlen_k", "cluster", "stages"),
    [
        ("pages of 16", 8, 1024, 8, 3),
        ("pages of 1", 8, 65536, 0, 3),
        ("pages of 16", 8, 65536, 0, 2),
        ("cache", 8, 65536, 8, 3),
        ("cache", 64, 8192, 0, 2),
        ("pages of 1", 64, 8192, 0, 3),
        ("pages of 64", 64, 8192, 0, 2),
    ],
)
def test_pages_of_much_are_for_all_sms_and_short_ones_for_all_stages(
    layout, batch, seqlen_k, cluster, stages
):
    tile = default_tile(problem(layout, batch=batch, seqlen_k=seqlen_k))
    assert (tile.cluster, tile.stages) == (cluster, stages)


def assert_sums_in_one_order(
    device: Device, rows: tuple[int, ...], seqlens: tuple[int, ...], **sizes: int
) -> None:
    """Assert that batch-invariant tiles sum in one order, whatever layout, batch and lengths."""
    cases = [
        problem(layout, rows=n, batch=batch, seqlen_k=seqlen, batch_invariant=True, **sizes)
        for layout, n, batch, seqlen in itertools.product(
            ("varlen", "cache", "pages of 16"), rows, (1, 64), seqlens
        )
    ]
    tiles = [default_tile(case, device) for case in cases]
    assert len({(tile.Bc, tile.warps) for tile in tiles}) == 1
    for case, tile in zip(cases, tiles, strict=True):
        assert decode.schedule(case, device, tile).split == UNSPLIT


@pytest.mark.parametrize("arch", [arch for arch in known_architectures() if arch >= 80])
@pytest.mark.parametrize("head_dim", [17, *HEAD_DIMS])
def test_with_batch_invariant_nothing_around_a_row_decides_in_which_order_it_is_summed_up(
    arch, head_dim
):
    rows, seqlens = (4, 16, 20, 32, 4 * 113), (16, 1024, 65536)
    assert_sums_in_one_order(device_for_arch(arch), rows, seqlens, head_dim=head_dim)


# If values are narrower than keys, the queries of 32 rows do not fit into a stage.
DIM_PAIRS = [
    *((64, 64), (128, 128), (33, 33), (64, 128), (33, 72), (1, 256), (192, 128), (256, 16)),
    *((128, 64), (96, 64), (80, 64), (72, 64), (65, 64), (17, 16), (128, 1)),
]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), DIM_PAIRS)
def test_with_batch_invariant_the_number_of_rows_decides_nothing_whatever_the_head_dims(
    head_dim, head_dim_v
):
    sizes = {"group": 1, "head_dim": head_dim, "head_dim_v": head_dim_v}
    for arch in ARCHITECTURES:
        device = device_for_arch(arch)
        assert_sums_in_one_order(device, (1, 16, 17, 32, 113), (16, 65536), **sizes)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(128, 64), (96, 64), (80, 64), (65, 64)])
@pytest.mark.parametrize("rows", [1, 16, 17, 32])
def test_values_narrower_than_keys_cost_a_default_tile_none_of_its_warps(
    head_dim, head_dim_v, rows
):
    for arch, batch, seqlen_k in itertools.product(ARCHITECTURES, (1, 64), (1024, 8192, 65536)):
        device = device_for_arch(arch)
        sizes = {"rows": rows, "group": 1, "batch": batch, "seqlen_k": seqlen_k}
        narrow = default_tile(problem(head_dim=head_dim, head_dim_v=head_dim_v, **sizes), device)
        equal = default_tile(problem(head_dim=head_dim, **sizes), device)
        assert narrow.warps >= equal.warps


# ---- Tiles


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"Br": 64}, "Br is 64; expected 16 or 32"),
        ({"Bc": 64}, "Bc is 64; expected 16 or 32"),
        ({"warps": 0}, "warps is 0; expected 1 to 16"),
        ({"warps": 17}, "warps is 17; expected 1 to 16"),
        ({"stages": 1}, "stages is 1; expected 2 to 8"),
        ({"stages": 9}, "stages is 9; expected 2 to 8"),
        ({"cluster": 3}, "cluster is 3; expected 0, 1, 2, 4 or 8"),
        ({"min_blocks": 0}, "min_blocks is 0; expected at least 1"),
        ({"warps": 8, "stages": 8}, "KiB of shared memory; sm_90 has 227 KiB per block"),
        ({"min_blocks": 3}, "fewer than 3 thread blocks fit the shared memory of an SM"),
    ],
)
def test_a_tile_that_cannot_run_is_told_why(changes, words):
    assert words in why_not_tile(problem(), replace(TILE, **changes))


def test_a_tile_that_needs_more_registers_than_its_threads_leave_it_is_refused():
    reason = why_not_tile(problem(head_dim=64), replace(TILE, Br=32, warps=16))
    assert reason == "needs about 152 registers per thread; 128 are available"


def test_queries_must_fit_a_stage_and_a_result_the_ring_of_a_warp():
    wide_keys, wide_values = problem(head_dim=256, head_dim_v=16), problem(head_dim_v=256)
    tile = replace(TILE, Br=32, stages=2)
    assert "its queries must fit a stage" in why_not_tile(wide_keys, tile)
    assert "the result of a warp must fit its stages" in why_not_tile(wide_values, tile)


def test_more_rows_than_32_bits_count_are_refused():
    group = 2**15
    most = MAX_SEQLEN // group
    fitting = problem("dense", rows=most * group, group=group, heads_kv=1, batch=1)
    assert decode.why_not_tile(fitting, h100, TILE) is None
    beyond = problem("dense", rows=(most + 1) * group, group=group, heads_kv=1, batch=1)
    reason = f"has {(most + 1) * group} query rows per KV head; expected at most {MAX_SEQLEN}"
    assert decode.why_not_tile(beyond, h100, TILE) == reason
    assert decode.why_not(beyond, h100) is not None


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_120"])
@pytest.mark.parametrize("layout", ["dense", "pages of 1"])
def test_legal_tiles_fit_the_gpu_as_often_as_they_say(arch, layout):
    device = device_for_arch(arch)
    for head_dim, rows in itertools.product((64, 128, 256), (4, 32)):
        case = problem(layout, rows=rows, head_dim=head_dim)
        tiles = list(decode.tiles(case, device))
        assert len(tiles) == len(set(tiles)) > 0
        for tile in tiles:
            assert isinstance(tile, DecodeTile)
            shared_memory, threads = decode.shared_memory(case, tile), decode.threads(tile)
            assert shared_memory <= device.shared_memory_per_block
            assert threads == 32 * tile.warps
            assert device.blocks_per_sm(threads, shared_memory, 1) >= tile.min_blocks


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "columns"), [(128, 128, (128, 128)), (33, 72, (48, 80))]
)
@pytest.mark.parametrize("rows", [4, 32])
def test_shared_memory_is_a_ring_for_each_warp_and_a_slot_for_each_result_of_a_cluster(
    head_dim, head_dim_v, columns, rows
):
    case = problem(rows=rows, head_dim=head_dim, head_dim_v=head_dim_v)
    tile = replace(TILE, Br=32, stages=2)
    stage = 16 * sum(columns) * 2

    before = decode.shared_memory(case, tile)

    def more(**changes: int) -> int:
        return decode.shared_memory(case, replace(tile, **changes)) - before

    assert more(stages=5) == 3 * tile.warps * stage
    assert more(warps=7) == 3 * tile.stages * stage
    # A row of a result has its columns, and 8 floats for the softmax base and the row sum.
    assert more(cluster=8) == 8 * rows * (columns[1] + 8) * 4
    # The remaining bytes hold the common state of all warps.
    state = before - tile.warps * tile.stages * stage
    assert 0 < state <= 256
    assert state % 16 == 0


# ---- Grid, workspace and counters


def planned(case: Problem, tile: DecodeTile, device: Device = h100) -> tuple[int, int, int, Split]:
    """Return thread blocks, workspace slots, counters, and the split of the keys."""
    schedule = decode.schedule(case, device, tile)
    (launch,) = schedule.launches
    assert launch.entry == "attention"
    assert launch.threads == 32 * tile.warps
    # Without an even split there are no clusters.
    launched = tile if schedule.split == EVEN else replace(tile, cluster=0)
    assert launch.shared_memory == decode.shared_memory(case, launched)
    # A slot holds the whole result of a row tile or, from each block of a cluster, some columns.
    columns, slices = -(-case.head_dim_v // 16) * 16, max(1, launched.cluster)
    slice_columns = -(-columns // (4 * slices)) * 4
    slot = tile.Br * max(columns + 8, slices * (slice_columns + 4)) * 4
    assert schedule.workspace % slot == schedule.counters % slices == 0
    slots, counters = schedule.workspace // slot, schedule.counters // slices
    return math.prod(launch.grid), slots, counters, schedule.split


@pytest.mark.parametrize(("rows", "row_tiles"), [(4, 1), (16, 1), (20, 2), (8 * 16, 8)])
@pytest.mark.parametrize("min_blocks", [1, 2])
def test_balanced_as_many_blocks_as_run_at_once_share_the_keys_of_each_head(
    rows, row_tiles, min_blocks
):
    tile = replace(TILE, min_blocks=min_blocks)
    case = problem(rows=rows)
    places = 132 * min_blocks // (8 * row_tiles)
    assert launch_of(case, tile).grid == (row_tiles, 8, places)
    # A block writes partial results where its range of keys begins and where it ends.
    blocks = row_tiles * 8 * places
    assert planned(case, tile) == (blocks, 2 * blocks, 2 * blocks, EVEN)


@pytest.mark.parametrize(
    ("batch", "places"),
    [(64, 32), (128, 32), (32, 32), (33, 33), (99, 33), (31, 33), (48, 33), (100, 33), (1, 33)],
)
def test_blocks_take_whole_sequences_where_that_leaves_few_idle(batch, places):
    tile = replace(TILE, min_blocks=2)
    assert planned(problem(batch=batch), tile)[0] == 8 * places


@pytest.mark.parametrize(
    ("arch", "layout", "batch", "heads_kv", "warps"),
    [
        (90, "cache", 64, 8, 2),
        (90, "pages of 16", 64, 8, 2),
        (90, "pages of 1", 64, 8, 4),
        (90, "cache", 66, 8, 2),
        (90, "cache", 62, 8, 4),
        (90, "cache", 512, 1, 4),
        (80, "cache", 64, 8, 4),
    ],
)
def test_four_blocks_of_two_warps_are_for_whole_sequences(arch, layout, batch, heads_kv, warps):
    device = h100 if arch == 90 else device_for_arch(arch)
    case = problem(layout, batch=batch, heads_kv=heads_kv, seqlen_k=1024)
    tile = default_tile(case, device)
    assert (tile.warps, tile.min_blocks == 4) == (warps, warps == 2)


def test_no_more_blocks_share_the_keys_than_there_are_units_of_them():
    # The 3 sequences have 2 units of keys each.
    case = problem(batch=3, seqlen_k=65, heads_kv=1)
    assert planned(case, TILE) == (6, 12, 12, EVEN)
    assert planned(problem(batch=3, seqlen_k=65), TILE)[0] == 8 * 6


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_one_cluster_for_each_line_needs_neither_workspace_nor_counters(cluster):
    tile = replace(TILE, cluster=cluster)
    for rows, row_tiles in ((4, 1), (32, 2)):
        # There are three units of keys per block of a cluster, which one cluster still processes.
        case = problem(rows=rows, batch=3, seqlen_k=64 * cluster)
        assert launch_of(case, tile).grid == (row_tiles, 8, cluster)
        assert planned(case, tile) == (row_tiles * 8 * cluster, 0, 0, EVEN)
    text = decode.unit(problem(), tile, decode.schedule(problem(), h100, tile)).text
    assert f"__cluster_dims__(1, 1, {cluster})" in text


@pytest.mark.parametrize("layout", ["varlen", "cache", "pages of 1"])
@pytest.mark.parametrize("cluster", [0, 8])
def test_given_splits_have_a_block_a_slot_and_a_counter_for_each_item(layout, cluster):
    case = problem(layout, rows=20, batch=3, num_splits=5)
    items = 3 * 8 * 2
    tile = replace(TILE, cluster=cluster)
    assert planned(case, tile) == (5 * items, 5 * items, 5 * items, Split.into(5))
    text = decode.unit(case, tile, decode.schedule(case, h100, tile)).text
    assert "__cluster_dims__" not in text


@pytest.mark.parametrize("options", [{"num_splits": 1}, {"batch_invariant": True}])
def test_keys_left_whole_need_neither_workspace_nor_counters(options):
    assert planned(problem(rows=20, batch=3, **options), TILE) == (3 * 8 * 2, 0, 0, UNSPLIT)


def test_many_row_tiles_and_packed_queries_are_not_balanced():
    for case in (problem(rows=9 * 16), problem("varlen", rows=9 * 16)):
        assert planned(case, TILE) == (8 * 8 * 9, 0, 0, UNSPLIT)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("batch", "heads_kv"), [(1, 4), (1, 8), (3, 2), (8, 8)])
def test_keys_of_packed_sequences_are_cut_until_their_blocks_fill_the_gpu(group, batch, heads_kv):
    sizes = {"rows": group, "group": group, "batch": batch, "heads_kv": heads_kv}
    case = problem("varlen", **sizes, seqlen_k=65536)
    tile = default_tile(case)
    blocks, slots, counters, split = planned(case, tile)
    items = batch * heads_kv
    assert (blocks, slots, counters) == (items * split.parts,) * 3
    places = h100.sm_count * tile.min_blocks
    # The split rule accepts 80% of the slots, and gives up to 15% for fewer splits.
    assert 0.8 * 0.85 * places <= blocks <= places


@pytest.mark.parametrize("num_splits", [2, 200, 5000])
def test_any_number_of_splits_can_be_merged(num_splits):
    case = problem(num_splits=num_splits)
    assert decode.why_not_tile(case, h100, TILE) is None
    assert planned(case, TILE)[3] == Split.into(num_splits)


@pytest.mark.parametrize("layout", ["dense", "cache", "pages of 16"])
@pytest.mark.parametrize("heads_kv", [65535, 65536, 70000])
def test_more_heads_than_a_grid_s_second_axis_counts_are_along_the_first(layout, heads_kv):
    case = problem(layout, rows=1, group=1, heads_kv=heads_kv, batch=1, seqlen_k=256, head_dim=64)
    plan = make_plan(case, h100, family="decode")
    (launch,) = plan.launches
    assert launch.grid[0] <= MAX_GRID
    assert launch.grid[1] <= MAX_GRID_Y
    assert launch.grid[2] <= MAX_GRID_Y
    # Each head has at least one block.
    assert math.prod(launch.grid) >= heads_kv
    assert (plan.schedule.split == EVEN) == (heads_kv <= MAX_GRID_Y)


def test_a_workspace_is_there_for_all_slots_that_blocks_may_use_on_any_gpu():
    layouts, all_rows = ("dense", "varlen", *LAYOUTS), (4, 32, 4 * 113)
    for arch, layout, rows in itertools.product(ARCHITECTURES, layouts, all_rows):
        device = device_for_arch(arch)
        case = problem(layout, rows=rows)
        tile = default_tile(case, device)
        blocks, slots, counters, split = planned(case, tile, device)
        clusters = 2 * blocks // max(1, tile.cluster) if split == EVEN else blocks
        lines = case.heads_kv * -(-rows // tile.Br)
        alone = split == UNSPLIT or (split == EVEN and clusters == 2 * lines)
        assert slots == counters == (0 if alone else clusters)


# ---- Wide heads, whose columns are distributed over the warps that share a row

WIDE = DecodeTile(16, 16, warps=8, stages=4, min_blocks=1)


def latent(**more: Any) -> Problem:
    """Return a problem with the sizes of multi-head latent attention (MLA)."""
    sizes = {"heads_kv": 1, "rows": 16, "group": 16, "head_dim": 576, "head_dim_v": 512}
    return problem(**{**sizes, "values_in_keys": True, **more})


def test_heads_of_more_than_256_columns_are_shared_by_four_column_warps():
    for dims, column_warps in (((256, 256), 1), ((257, 8), 4), ((8, 257), 4), ((576, 512), 4)):
        case = problem(head_dim=dims[0], head_dim_v=dims[1])
        assert decode.config(case, WIDE, EVEN)["column_warps"] == column_warps


def test_warps_are_a_multiple_of_the_column_warps_and_share_16_rows():
    case = latent()
    assert decode.why_not_tile(case, h100, WIDE) is None
    reason = decode.why_not_tile(case, h100, replace(WIDE, warps=6))
    assert reason == "warps is 6; expected a multiple of 4, as 4 share a row"
    reason = decode.why_not_tile(case, h100, replace(WIDE, Br=32))
    assert reason == "Br is 32; expected 16 if several warps share a row"
    assert {t.warps for t in decode.tiles(case, h100)} == {4, 8}


def test_a_ring_holds_values_that_are_columns_of_their_keys_once():
    in_keys, apart = latent(), latent(values_in_keys=False)
    # Both groups of column warps have four stages of 16 keys with 576 columns, and each warp has
    # two score buffers.
    rings, scores = 2 * 4 * 16 * 576 * 2, 8 * 2 * 16 * 16 * 4
    assert decode.shared_memory(in_keys, WIDE) == rings + scores + 160
    tile = replace(WIDE, stages=2)
    rings = 2 * 2 * 16 * (576 + 512) * 2
    assert decode.shared_memory(apart, tile) == rings + scores + 160


@pytest.mark.parametrize("dims", [(257, 300), (576, 512), (512, 512), (40, 576), (576, 1)])
def test_wide_heads_are_served_from_sm_80_on(dims):
    for arch in (arch for arch in known_architectures() if arch >= 80):
        device = device_for_arch(f"sm_{arch}")
        for alignment in (2, 16):
            case = problem(head_dim=dims[0], head_dim_v=dims[1], alignment=alignment)
            assert decode.why_not(case, device) is None
            assert decode.why_not_tile(case, device, default_tile(case, device)) is None


def test_a_unit_of_keys_is_a_tile_of_each_group_of_column_warps():
    case = latent(batch=1, seqlen_k=320)
    # The 320 keys are 10 units of two tiles.
    assert launch_of(case, WIDE).grid == (1, 1, 10)


def test_default_tiles_of_wide_heads_have_two_groups_of_column_warps_on_an_sm():
    together, apart = DecodeTile(16, 32, 8, 2, 1), DecodeTile(16, 32, 4, 2, 2)
    assert default_tile(latent()) == together
    assert default_tile(latent(values_in_keys=False)).warps == 8
    assert default_tile(latent(rows=128, group=128)) == apart
    # With less shared memory, tiles have fewer keys.
    assert default_tile(latent(), device_for_arch("sm_80")).Bc == 16
    # The tile fixes the order of sums over keys, so it does not depend on the number of rows.
    for rows in (16, 128):
        assert default_tile(latent(rows=rows, group=16, batch_invariant=True)) == together


def test_a_query_of_up_to_128_wide_heads_that_share_keys_goes_to_decode_where_hopper_takes_longer():
    for layout, batch, seqlen_k, rows, family in (
        # These pages are smaller than a KV tile.
        ("pages of 16", 128, 8192, 128, "decode"),
        ("pages of 64", 128, 8192, 128, "hopper"),
        ("cache", 128, 8192, 128, "hopper"),
        ("cache", 128, 8192, 33, "hopper"),
        ("cache", 128, 8192, 32, "decode"),
        # With few query tiles the keys are split; short splits are faster in `decode`.
        ("cache", 1, 4096, 128, "decode"),
        ("cache", 4, 32768, 128, "hopper"),
        ("cache", 4, 4096, 64, "decode"),
    ):
        case = latent(layout=layout, batch=batch, seqlen_k=seqlen_k, rows=rows, group=rows)
        assert make_plan(case, h100).family == family, (layout, batch, seqlen_k, rows)
        assert make_plan(case, device_for_arch("sm_100")).family == "decode"
    for rows, group, most in ((144, 144, 128), (33, 1, 32), (128, 16, 32)):
        reason = decode.why_not_first(latent(rows=rows, group=group), h100)
        assert reason == f"is for 1 to {most} query rows per KV head; this problem has {rows}"
