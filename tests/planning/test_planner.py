"""Choice of family and tile for a problem, its reasons, and requests of the caller."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.problems import dense_problem

import cupy_flash
from cupy_flash import Tile
from cupy_flash.cpu import forward as cpu_forward
from cupy_flash.cpu import sources
from cupy_flash.cpu.plan import choose_cpu_tile, make_cpu_plan
from cupy_flash.errors import UnsupportedError
from cupy_flash.families import FORWARD
from cupy_flash.families.mma.forward import MmaTile
from cupy_flash.families.schedule import MAIN_ENTRY
from cupy_flash.families.simt.forward import SimtTile
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import count_blocks, make_plan, plan_tile
from cupy_flash.planning.tuning import Entry, problem_class
from cupy_flash.problem.arrays import DTYPES, ArraySpec
from cupy_flash.problem.device import ARCHITECTURES, Resources, device_for_arch
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.problem import MAX_HEAD_DIM, make_contiguous_problem, make_problem
from cupy_flash.problem.tile import freeze_tile

h100 = device_for_arch("sm_90")
relaxed = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])


def problem(**changes):
    sizes = {"seqlen_q": 1024, "seqlen_k": 1024, "heads_q": 8, "heads_kv": 2}
    sizes |= {"dtype": "float16", "batch": 2, "head_dim": 64, "head_dim_v": 64}
    return make_contiguous_problem(**(sizes | changes))


@st.composite
def problems(draw):
    """Draw any problem: ragged sizes, strides of any alignment, causal or not."""
    dtype = draw(st.sampled_from(DTYPES))
    seqlens = st.one_of(st.integers(0, 300), st.integers(0, 2**20))
    common = st.sampled_from([32, 64, 96, 128, 192, 256, 512])
    dims = st.one_of(common, st.integers(1, MAX_HEAD_DIM))
    batch, seqlen_q, seqlen_k = draw(st.integers(0, 64)), draw(seqlens), draw(seqlens)
    heads_kv, group = draw(st.integers(1, 8)), draw(st.integers(0, 8))
    head_dim, head_dim_v = draw(dims), draw(dims)

    def spec(seqlen, heads, dim):
        row = draw(st.sampled_from([-(-dim // 8) * 8, dim + draw(st.integers(0, 16))]))
        alignment = draw(st.sampled_from([16, 16, 8, 4, 2]))
        shape = (batch, seqlen, heads, dim)
        return ArraySpec(shape, (seqlen * heads * row, heads * row, row), dtype, alignment)

    return make_problem(
        spec(seqlen_q, heads_kv * group, head_dim),
        spec(seqlen_k, heads_kv, head_dim),
        spec(seqlen_k, heads_kv, head_dim_v),
        causal=draw(st.booleans()),
        softmax_scale=draw(st.sampled_from([None, -0.5, 0.0])),
    )


devices = st.sampled_from(ARCHITECTURES).map(device_for_arch)


def assert_fits(family, case, device, tile):
    plan = plan_tile(family, case, device, tile, reason="")
    assert plan.shared_memory <= device.shared_memory_per_block
    for launch in plan.launches:
        assert launch.threads % 32 == 0
        assert 32 <= launch.threads <= 1024
        assert launch.shared_memory <= device.shared_memory_per_block
        assert all(0 <= n < 2**31 for n in launch.grid)
        assert launch.grid[0] > 0 or case.is_empty
    assert plan.blocks_per_sm() >= 1
    # The grid covers all query rows, once for each split of a fused kernel.
    if family.automatic and not case.is_empty:
        # In `decode`, the query heads of a KV head are rows of the same tile.
        group = case.heads_q // case.heads_kv if family.name == "decode" else 1
        row_tiles = -(-case.seqlen_q * group // tile.Br)
        # With an even split, work ranges begin and end anywhere.
        parts = plan.num_splits or 0
        tiles = row_tiles * case.batch * (case.heads_q // group) * parts
        mains = [launch for launch in plan.launches if launch.entry == MAIN_ENTRY]
        blocks, _, ranks = (mains or plan.launches)[0].grid
        if family.name == "hopper":
            # Its grid is persistent: blocks, or for wide heads pairs of blocks, fetch more tiles.
            most = device.sm_count // ranks
            assert min(tiles, most) <= blocks <= most
        else:
            assert blocks >= tiles


@relaxed
@given(problems(), devices)
def test_any_problem_gets_a_legal_tile_on_any_gpu(case, device):
    # 16 float64 keys with more than 384 columns do not fit into Turing's 64 KiB.
    is_wide = max(case.head_dim, case.head_dim_v) > 384
    assume(device.arch > 75 or case.dtype != "float64" or not is_wide)
    plan = make_plan(case, device)
    family = FORWARD[plan.family]
    assert family.why_not(case, device) is None
    assert family.why_not_tile(case, device, plan.tile) is None
    assert isinstance(plan.tile, family.tile_type)
    assert {plan.family, *plan.rejected} == set(FORWARD)
    assert_fits(family, case, device, plan.tile)


@relaxed
@given(problems(), devices, st.sampled_from(list(FORWARD)))
def test_a_family_that_is_asked_for_serves_or_says_why_not(case, device, name):
    reason = FORWARD[name].why_not(case, device)
    if reason is None:
        plan = make_plan(case, device, family=name)
        assert plan.family == name
        assert FORWARD[name].why_not_tile(case, device, plan.tile) is None
    else:
        with pytest.raises(UnsupportedError, match=f"family '{name}' cannot serve this"):
            make_plan(case, device, family=name)


@settings(relaxed, max_examples=60)
@given(problems(), devices, st.sampled_from(list(FORWARD)))
def test_every_legal_tile_fits_the_gpu(case, device, name):
    family = FORWARD[name]
    assume(family.why_not(case, device) is None)
    for tile in family.tiles(case, device):
        assert_fits(family, case, device, tile)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", FORWARD)
def test_a_family_searches_several_tiles_or_has_only_one(arch, name):
    device, family = device_for_arch(arch), FORWARD[name]
    case = problem()
    if family.why_not(case, device) is None:
        tiles = list(family.tiles(case, device))
        assert len(tiles) == len(set(tiles))
        assert len(tiles) == 1 if name == "naive" else len(tiles) > 4


def test_tensor_cores_come_first_and_the_other_families_say_why_not():
    plan = make_plan(problem(), h100)
    assert plan.family == "hopper"
    assert plan.reason == "first choice for this dtype and GPU; default tile"
    assert plan.rejected == {
        "decode": FORWARD["decode"].why_not_first(problem(), h100),
        "mma": "hopper comes first",
        "simt": "hopper comes first",
        "naive": "used only on request",
    }


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 4096), (4096, 4096)])
@pytest.mark.parametrize(("scale", "is_huge"), [(1.0, False), (1e6, True), (-1e6, True)])
def test_scores_that_a_scale_may_make_infinite_are_for_kernels_that_tell_them_from_masked_ones(
    seqlen_q, seqlen_k, scale, is_huge
):
    case = dense_problem("bfloat16", 1, seqlen_q, seqlen_k, 2, 2, 64, 64, softmax_scale=scale)
    made = make_plan(case, device_for_arch("sm_90"))
    assert (made.family == "mma") == is_huge
    if is_huge:
        assert made.num_splits == 1
        assert "a scale of" in made.rejected["hopper"]


def test_float64_and_old_gpus_run_on_cuda_cores():
    double = make_plan(problem(dtype="float64"), h100)
    assert (double.family, "float64" in double.rejected["mma"]) == ("simt", True)
    turing = make_plan(problem(), device_for_arch("sm_75"))
    assert (turing.family, "sm_80" in turing.rejected["mma"]) == ("simt", True)


def test_where_no_family_serves_every_reason_is_given():
    volta = dataclasses.replace(h100, name="V100", arch=70)
    with pytest.raises(UnsupportedError, match="no kernel family serves") as caught:
        make_plan(problem(), volta)
    assert all(f"{name}: " in str(caught.value) for name in FORWARD)


def test_the_baseline_is_used_on_request_only():
    assert make_plan(problem(), h100, family="naive").family == "naive"


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        ((64, 32), {"Br": 64, "Bc": 32}),
        ([64, 32], {"Br": 64, "Bc": 32}),
        (np.array([64, 32]), {"Br": 64, "Bc": 32}),
        ({"Bc": 32}, {"Bc": 32}),
        (Tile(64, 32), {"Br": 64, "Bc": 32}),
        ({"Br": 128, "warps": 8}, {"Br": 128, "warps": 8}),
        (MmaTile(64, 32, warps=4, stages=3), {"Br": 64, "Bc": 32, "stages": 3}),
    ],
)
def test_a_tile_is_asked_for_as_a_pair_a_mapping_or_a_tile(request_, fields):
    plan = make_plan(problem(), h100, family="mma", tile=freeze_tile(request_))
    assert {name: getattr(plan.tile, name) for name in fields} == fields
    assert plan.reason.endswith("requested tile")


@given(st.dictionaries(st.sampled_from(["Br", "Bc", "warps"]), st.integers(1, 512)))
def test_freezing_keeps_every_field_and_can_be_part_of_a_key(fields):
    frozen = freeze_tile(fields)
    assert dict(frozen) == fields
    assert hash(frozen) == hash(freeze_tile(fields))


def test_no_tile_and_a_whole_tile_freeze_to_themselves():
    tile = MmaTile(64, 64)
    assert freeze_tile(None) is None
    assert freeze_tile(tile) is tile


@pytest.mark.parametrize("request_", ["64", 64, (64.5, 64), {"Br": "64"}, ("a", "b"), 1.5])
def test_a_tile_of_the_wrong_kind_is_told_the_right_ones(request_):
    with pytest.raises(TypeError, match=r"tile is .*; expected a Tile, a mapping .* or \(Br, Bc\)"):
        freeze_tile(request_)


@pytest.mark.parametrize("request_", [(64,), (64, 64, 4), (), "64x64"])
def test_a_tile_of_another_length_is_refused(request_):
    with pytest.raises(ValueError, match=r"tile is .*; expected a Tile"):
        freeze_tile(request_)


def test_an_unknown_tile_field_is_told_the_known_ones():
    message = "unknown tile field 'warp'; expected one of Br, Bc, warps"
    with pytest.raises(ValueError, match=message):
        make_plan(problem(), h100, family="mma", tile=freeze_tile({"warp": 4}))


def test_a_tile_of_another_family_is_refused():
    tile = SimtTile(128, 64, 128, 8, 0, 2)
    with pytest.raises(ValueError, match="tile is a SimtTile; family 'mma' takes a MmaTile"):
        make_plan(problem(), h100, family="mma", tile=tile)


def test_a_tile_that_does_not_fit_the_gpu_says_what_it_needs_and_what_there_is():
    turing = device_for_arch("sm_75")
    tile = SimtTile(128, 64, 128, 8, 0, 2)
    with pytest.raises(UnsupportedError, match=r"needs 105472 bytes .* sm_75 allows 65536"):
        make_plan(problem(dtype="float32"), turing, tile=tile)


@pytest.mark.parametrize(
    ("head_dim", "asked", "kept"),
    [
        (128, {"Br": 128, "Bc": 160}, {"turns": 1, "q_stages": 2}),
        (128, {"q_stages": 1}, {"Br": 128, "Bc": 128, "turns": 1}),
        (64, {"Bc": 176}, {"Br": 128, "turns": 1}),
        (256, {"Br": 128, "Bc": 96}, {"turns": 1, "q_stages": 1}),
    ],
)
def test_the_rest_of_a_tile_stays_as_near_the_default_as_it_can(head_dim, asked, kept):
    case = problem(head_dim=head_dim, head_dim_v=head_dim)
    tile = make_plan(case, h100, family="hopper", tile=freeze_tile(asked)).tile
    assert {name: getattr(tile, name) for name in asked | kept} == asked | kept


def test_the_reason_against_a_tile_is_not_one_of_fields_that_could_be_other():
    case = problem(head_dim=256, head_dim_v=256)
    with pytest.raises(UnsupportedError, match="needs about 256 registers per thread; 240 are"):
        make_plan(case, h100, family="hopper", tile=freeze_tile((64, 128)))


def test_part_of_a_tile_that_no_legal_tile_has_is_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match="family 'mma' has no tile with Br=4096 Bc=64 here:"):
        make_plan(problem(), h100, family="mma", tile=freeze_tile((4096, 64)))


def test_an_unknown_family_is_told_the_known_ones():
    message = "unknown family 'flash'; expected one of decode, hopper, mma, simt"
    with pytest.raises(ValueError, match=message):
        make_plan(problem(), h100, family="flash")


def tune(case, tile, *, gpu="sm_90", sm_count=132, digest=None):
    key = ("hopper", digest or FORWARD["hopper"].digest(), problem_class(case))
    tuning.save(Entry(gpu, 90, sm_count, *key, tile, tflops=123.4))


def tune_on_cpu(tile):
    tuning.save(Entry("cpu", 0, 0, "cpu", sources.digest(), problem_class(problem()), tile, 0.1))


def other_tile(case):
    default = FORWARD["hopper"].default_tile(case, h100)
    return next(t for t in FORWARD["hopper"].tiles(case, h100) if t != default)


def test_the_tuned_tile_is_used_and_named_as_the_reason():
    tile = other_tile(problem())
    tune(problem(), dataclasses.asdict(tile))
    plan = make_plan(problem(), h100)
    assert plan.tile == tile
    assert plan.reason.endswith("tile from the tuned table (123 TFLOP/s)")


def test_the_plan_names_the_gpu_whose_tile_it_took():
    tile = other_tile(problem())
    tune(problem(), dataclasses.asdict(tile), gpu="NVIDIA H100 PCIe", sm_count=114)
    plan = make_plan(problem(), dataclasses.replace(h100, name="NVIDIA H20", sm_count=78))
    assert plan.tile == tile
    words = "tuned on NVIDIA H100 PCIe, the nearest GPU with a table (123 TFLOP/s there)"
    assert words in str(plan)


def test_the_nearest_gpus_tile_that_does_not_fit_is_passed_over():
    tile = FORWARD["hopper"].tile_type(128, 176, 4, 1, 0, 1)
    assert FORWARD["hopper"].why_not_tile(problem(), h100, tile) is None
    tune(problem(), dataclasses.asdict(tile), gpu="another")
    small = dataclasses.replace(h100, name="small", shared_memory_per_block=64 * 1024)
    assert make_plan(problem(), h100).tile == tile
    assert make_plan(problem(), small, family="hopper").reason == "requested; default tile"


def test_a_tile_that_is_asked_for_goes_before_the_tuned_one():
    tune(problem(), dataclasses.asdict(other_tile(problem())))
    default = FORWARD["hopper"].default_tile(problem(), h100)
    assert make_plan(problem(), h100, tile=default).tile == default


@pytest.mark.parametrize(
    "tile",
    [
        *({"Br": 0, "Bc": 64}, {"Br": -128, "Bc": 64}, {"Br": 128}),
        *({"Br": 128, "Bc": 64, "colour": 3}, {"Br": 2**20, "Bc": 64}, {}),
    ],
)
def test_a_tuned_tile_that_is_no_legal_tile_is_passed_over(tile):
    tune(problem(), tile)
    assert make_plan(problem(), h100).tile == FORWARD["hopper"].default_tile(problem(), h100)


def test_a_tile_tuned_on_other_sources_is_passed_over():
    tune(problem(), dataclasses.asdict(other_tile(problem())), digest="0" * 16)
    assert make_plan(problem(), h100).reason.endswith("default tile")


@pytest.mark.parametrize(
    "tile",
    [{"Br": 0, "Bc": 1}, {"Br": 64}, {"Br": 64, "Bc": 64, "warps": 4}, {"Br": 2**20, "Bc": 2**20}],
)
def test_a_bad_tile_tuned_for_the_cpu_is_passed_over(tile):
    tune_on_cpu(tile)
    assert choose_cpu_tile(problem(), None) == cpu_forward.default_tile(problem())


def test_the_tile_tuned_for_the_cpu_is_used():
    tune_on_cpu({"Br": 96, "Bc": 80})
    assert choose_cpu_tile(problem(), None) == Tile(96, 80)


def test_part_of_a_cpu_tile_may_be_asked_for():
    default = cpu_forward.default_tile(problem())
    assert choose_cpu_tile(problem(), freeze_tile({"Bc": 48})) == Tile(default.Br, 48)
    assert choose_cpu_tile(problem(), Tile(32, 48)) == Tile(32, 48)


def test_a_gpu_tile_on_the_cpu_is_refused_by_its_extra_field():
    with pytest.raises(ValueError, match="unknown tile field 'warps'; expected one of Br, Bc"):
        choose_cpu_tile(problem(), MmaTile(64, 64))


def test_a_plan_prints_what_where_how_and_why():
    text = str(make_plan(problem(causal=True), h100))
    for line in (
        "problem        float16, batch 2, seqlen 1024 x 1024, heads 8 (2 KV), head_dim 64, causal "
        "(q_offset 0)",
        "device         sm_90 (sm_90, 132 SMs)",
        "registers      not compiled yet",
        "family         hopper",
        "why            first choice for this dtype and GPU; default tile",
        "not mma        hopper comes first",
        "not simt       hopper comes first",
        "not naive      used only on request",
    ):
        assert line in text.splitlines(), line


def test_a_full_gpu_needs_no_workspace():
    plan = make_plan(problem(batch=64), h100)
    assert (plan.num_splits, plan.workspace, len(plan.launches)) == (1, 0, 1)
    assert "workspace      none" in str(plan).splitlines()


def test_a_plan_prints_different_head_dims_splits_and_workspace():
    sizes = {"batch": 1, "heads_q": 1, "heads_kv": 1, "seqlen_q": 33, "seqlen_k": 2**16}
    case = problem(**sizes, head_dim=64, head_dim_v=128)
    plan = make_plan(case, h100)
    lines = str(plan).splitlines()
    assert plan.num_splits > 1
    assert lines[0].endswith("heads 1, head_dim 64/128")
    assert any(line.startswith("grid") and "combine" in line for line in lines)
    assert f"workspace      {plan.workspace:,} bytes" in lines


def test_launches_of_one_unit_ask_for_the_same_shared_memory():
    """The limit of shared memory is set once for each unit."""
    for name, family in FORWARD.items():
        asked: dict[str, set[int]] = {}
        for seqlen_q, seqlen_k in ((799, 3), (257, 129), (1, 4096), (64, 64), (500, 5000)):
            sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": 4, "heads_kv": 2}
            for case in (problem(batch=batch, **sizes) for batch in (1, 2, 40)):
                if family.why_not(case, h100) is None:
                    plan = make_plan(case, h100, family=name)
                    asked.setdefault(plan.unit.text, set()).add(plan.shared_memory)
        assert all(len(sizes) == 1 for sizes in asked.values())


def test_registers_once_known_bound_the_blocks_of_an_sm():
    plan = make_plan(problem(), h100, family="mma")
    compiled = dataclasses.replace(plan, resources=Resources(255, 0, 0))
    assert compiled.blocks_per_sm() <= plan.blocks_per_sm()
    lines, now = str(plan).splitlines(), str(compiled).splitlines()
    assert "registers      255 per thread" in now
    assert f"blocks per SM  {compiled.blocks_per_sm()}" in now
    assert f"blocks per SM  at most {plan.blocks_per_sm()}" in lines


def blocks_row(plan):
    """Return what a plan prints about blocks of the score matrix, or None."""
    rows = [line.split(maxsplit=1) for line in str(plan).splitlines()]
    return next((text for name, text in rows if name == "blocks" and "computed" in text), None)


def blocks_of_call(q, k, arch="sm_90", **options):
    """Return what the plan of a call with queries `q`, and keys and values `k`, says of blocks."""
    return blocks_row(cupy_flash.plan(cupy_flash.flash_attention, q, k, k, arch=arch, **options))


def test_blocks_are_counted_as_each_tile_processes_them(rng):
    for _ in range(200):
        seqlen_q, seqlen_k, Br, Bc = (int(n) for n in rng.integers(1, 40, 4))
        sides = [None if rng.integers(3) == 0 else int(n) for n in rng.integers(0, 45, 2)]
        offset = int(rng.integers(-seqlen_q, seqlen_k + 1))
        mask = Mask(seqlen_q, seqlen_k, bool(rng.integers(2)), offset, *sides)
        seen = ~mask.masked(0, seqlen_q, 0, seqlen_k)
        parts = [
            seen[row : row + Br, key : key + Bc]
            for row in range(0, seqlen_q, Br)
            for key in range(0, seqlen_k, Bc)
        ]
        computed, partial, skipped = count_blocks(mask, Br, Bc)

        # A tile that also has fully masked rows may include empty blocks.
        assert computed >= sum(part.any() for part in parts)
        assert computed - partial == sum(part.all() and part.shape[1] == Bc for part in parts)
        assert computed + skipped == len(parts)


def test_a_plan_counts_the_blocks_that_positions_leave():
    q = np.empty((1, 1024, 2, 64), np.float16)
    tile = {"tile": {"Br": 128, "Bc": 128}}
    causal = blocks_of_call(q, q, causal=True, **tile)
    windowed = blocks_of_call(q, q, causal=True, window_size=(255, None), **tile)

    assert causal == "36 computed, 8 of them partial, 28 skipped in each head"
    assert windowed == "21 computed, 14 of them partial, 43 skipped in each head"
    assert blocks_of_call(q, q, **tile) is None
    assert blocks_of_call(q, q, softcap=5.0, **tile) is None
    naive = make_plan(problem(causal=True), h100, family="naive")
    assert blocks_row(naive) is None


def test_a_plan_of_a_users_mask_says_that_a_block_mask_decides():
    q = np.empty((1, 1024, 2, 64), np.float16)
    near = cupy_flash.MaskMod(lambda i, j: i // 100 == j // 100)
    masked, unmasked = (blocks_of_call(q, q, arch, mask_mod=near) for arch in ("sm_90", "sm_80"))
    prefixed = blocks_of_call(q, q, causal=True, prefix_lens=np.array([5], np.int32))
    of_tree = np.zeros((1, 64), np.uint64)
    tree = blocks_of_call(q[:, :64], q, tree_mask=of_tree, family="mma")

    leaves = "of these, the GPU skips blocks without visible pairs"
    assert masked.endswith(f"computed, 0 skipped in each head; {leaves}")
    assert unmasked.endswith("computed, 0 skipped in each head; any block may contain masked pairs")
    assert tree.endswith("; any block may contain masked pairs")
    assert prefixed.endswith(", more computed if prefixes make keys visible")


def test_the_plan_of_a_cache_counts_the_blocks_of_the_longest_sequence():
    cache = np.empty((2, 65536, 8, 128), np.float16)
    q = np.empty((2, 1, 32, 128), np.float16)
    options = {"cache_seqlens": 9, "window_size": (1023, 0), "arch": "sm_90"}
    plan = cupy_flash.plan(cupy_flash.flash_attention_with_kvcache, q, cache, cache, **options)
    Bc = plan.tile.Bc

    assert blocks_row(plan).startswith(f"{1024 // Bc} computed, 0 of them partial,")
    assert blocks_row(plan).endswith(" in each head of a sequence of maximum length")


def test_a_cpu_plan_says_why_no_gpu_computes_it():
    plan = make_cpu_plan(problem(), Tile(64, 64), "the CUDA driver reports no GPU")
    assert (plan.family, plan.device, plan.unit, plan.launches) == ("cpu", None, None, ())
    assert (plan.threads, plan.shared_memory, plan.blocks_per_sm()) == (0, 0, 0)
    text = str(plan)
    assert "no GPU is available" in text
    assert all(f"not {name}" in text for name in FORWARD)


def test_a_cpu_plan_that_was_asked_for_rejects_nobody():
    plan = make_cpu_plan(problem(), Tile(64, 64), None)
    assert plan.reason == "the CPU backend was requested"
    assert plan.rejected == {}
