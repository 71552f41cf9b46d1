"""Choice of family and tile for packed, cached and paged sequences, and what plans print."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cupy_flash.errors import UnsupportedError
from cupy_flash.families import FORWARD
from cupy_flash.families.contract import MAX_GRID
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.planning.tuning import Entry, problem_class
from cupy_flash.problem.arrays import DTYPES, ArraySpec
from cupy_flash.problem.device import ARCHITECTURES, device_for_arch
from cupy_flash.problem.layout import Layout
from cupy_flash.problem.problem import MAX_HEAD_DIM, Problem, make_problem

H100, A100, TURING = (device_for_arch(arch) for arch in ("sm_90", "sm_80", "sm_75"))
relaxed = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])


def packed(
    batch: int = 8,
    seqlen_q: int = 2048,
    seqlen_k: int = 2048,
    heads: tuple[int, int] = (16, 4),
    dims: tuple[int, int] = (128, 128),
    dtype: str = "float16",
    **options: Any,
) -> Problem:
    """Return a problem of packed sequences with at most `seqlen_q` queries and `seqlen_k` keys."""
    q = ArraySpec.contiguous((1, batch * seqlen_q, heads[0], dims[0]), dtype)
    k, v = (ArraySpec.contiguous((1, batch * seqlen_k, heads[1], dim), dtype) for dim in dims)
    longest = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    return make_problem(q, k, v, kind="varlen", batch=batch, **longest, **options)


def cached(
    batch: int = 8,
    seqlen_q: int = 1,
    seqlen_k: int = 8192,
    heads: tuple[int, int] = (16, 4),
    dims: tuple[int, int] = (128, 128),
    dtype: str = "float16",
    page_size: int = 0,
    **options: Any,
) -> Problem:
    """Return a problem of queries over KV caches of `seqlen_k` rows, paged if `page_size`."""
    max_pages = -(-seqlen_k // page_size) if page_size else 0
    places = (batch * max_pages, page_size) if page_size else (batch, seqlen_k)
    q = ArraySpec.contiguous((batch, seqlen_q, heads[0], dims[0]), dtype)
    k, v = (ArraySpec.contiguous((*places, heads[1], dim), dtype) for dim in dims)
    table = (max_pages, max_pages) if page_size else None
    return make_problem(q, k, v, kind="kvcache", block_table=table, **options)


@st.composite
def problems(draw: st.DrawFn, **fixed: Any) -> Problem:
    """Draw a problem of packed or cached sequences of any sizes."""
    heads_kv, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    dims = st.one_of(st.sampled_from([64, 128, 192, 256, 512]), st.integers(1, MAX_HEAD_DIM))
    sizes: dict[str, Any] = {
        "batch": draw(st.integers(0, 300)),
        "seqlen_q": draw(st.one_of(st.integers(0, 40), st.integers(0, 2**16))),
        "seqlen_k": draw(st.one_of(st.integers(0, 300), st.integers(0, 2**17))),
        "heads": (heads_kv * group, heads_kv),
        "dims": (draw(dims), draw(dims)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "causal": draw(st.booleans()),
        "num_splits": draw(st.integers(0, 9)),
    }
    if draw(st.booleans()):
        return packed(**(sizes | fixed))
    page_size = draw(st.sampled_from([0, 1, 3, 16, 64, 256]))
    return cached(page_size=page_size, **(sizes | fixed))


devices = st.sampled_from(ARCHITECTURES).map(device_for_arch)


@pytest.mark.slow
@relaxed
@given(problems(), devices)
def test_any_sequences_get_a_legal_tile_on_any_gpu(case, device):
    # 16 float64 keys with more than 384 columns do not fit into Turing's 64 KiB.
    is_wide = max(case.head_dim, case.head_dim_v) > 384
    assume(device.arch > 75 or case.dtype != "float64" or not is_wide)
    plan = make_plan(case, device)
    family = FORWARD[plan.family]
    assert family.serves_sequences
    assert "static constexpr bool has_seqlens = true;" in plan.unit.text
    assert family.why_not(case, device) is None
    assert family.why_not_tile(case, device, plan.tile) is None
    assert {plan.family, *plan.rejected} == set(FORWARD)
    assert plan.main is not None
    for launch in plan.launches:
        assert 32 <= launch.threads <= 1024
        assert launch.shared_memory <= device.shared_memory_per_block
        assert all(0 <= n < 2**31 for n in launch.grid)
        assert min(launch.grid) > 0 or case.is_empty
    if case.layout.num_splits:
        assert plan.num_splits == case.layout.num_splits
    assert plan.blocks_per_sm() >= 1


# ---- Choice of the family


@pytest.mark.parametrize(
    ("case", "device", "family"),
    [
        # Few query rows over many keys are bound by memory bandwidth.
        (cached(), H100, "decode"),
        (cached(page_size=16), A100, "decode"),
        (packed(seqlen_q=4, heads=(32, 4)), H100, "decode"),
        # Many query rows go to the fastest family on tensor cores.
        (packed(), H100, "hopper"),
        (cached(seqlen_q=1024), H100, "hopper"),
        (packed(), A100, "mma"),
        (cached(seqlen_q=1024), A100, "mma"),
        # TMA does not serve small pages or unaligned rows, and `hopper` does not split these keys.
        (cached(seqlen_q=1024, page_size=16), H100, "mma"),
        (packed(num_splits=3), H100, "mma"),
        (packed(dims=(33, 64)), H100, "mma"),
        # float32 goes to `mma` if it is served there; the rest goes to CUDA cores.
        (packed(dtype="float32"), H100, "mma"),
        (cached(dtype="float32"), H100, "mma"),
        (packed(dtype="float32", dims=(256, 256)), H100, "simt"),
        (cached(dtype="float64", page_size=3), H100, "simt"),
        (packed(), TURING, "simt"),
    ],
    ids=str,
)
def test_sequences_go_to_the_family_that_is_best_at_them(case, device, family):
    assert make_plan(case, device).family == family


def test_few_query_tiles_go_to_a_family_that_splits_keys():
    few = cached(batch=1, seqlen_q=512, seqlen_k=65536)
    plan = make_plan(few, H100)
    assert plan.family == "mma"
    assert plan.num_splits > 1
    assert "does not split the keys" in plan.rejected["hopper"]
    assert make_plan(cached(batch=8, seqlen_q=512, seqlen_k=65536), H100).family == "hopper"


def test_a_bound_that_is_not_tight_makes_no_query_tiles():
    """The number of query tiles follows from the rows of q, not from `max_seqlen_q`."""
    case = packed(batch=300, seqlen_q=8, heads=(4, 4))
    q = ArraySpec.contiguous((1, 2400, 4, 128), "float16")
    bounds = {"max_seqlen_q": 8192, "max_seqlen_k": 8192}
    loose = make_problem(q, q, q, kind="varlen", batch=300, **bounds)
    assert make_plan(loose, H100).family == "hopper"
    assert make_plan(case, H100).family == "decode"


@pytest.mark.parametrize("family", ["mma", "simt"])
def test_more_rows_to_merge_than_a_launch_has_blocks_for_are_refused(family):
    # Query tiles and splits are within limits, but the merge kernel has a block for 8 rows.
    q, k = (ArraySpec.contiguous((1, 131072, heads, 64), "float16") for heads in (64, 1))
    sizes = {"batch": 4096, "max_seqlen_q": 131072, "max_seqlen_k": 131072}
    case, whole = (make_problem(q, k, k, kind="varlen", num_splits=n, **sizes) for n in (2, 1))
    words = rf"needs \d+ thread blocks, more than the {MAX_GRID} of a launch"
    for choice in (family, None):
        with pytest.raises(UnsupportedError, match=words):
            make_plan(case, H100, family=choice)
    tile = FORWARD[family].default_tile(whole, H100)
    reason = f"needs {2**32} thread blocks, more than the {MAX_GRID} of a launch"
    assert FORWARD[family].why_not_tile(case, H100, tile) == reason
    assert make_plan(whole, H100, family=family).num_splits == 1


@pytest.mark.parametrize("family", ["mma", "simt"])
def test_more_heads_than_the_merging_kernel_counts_are_refused(family):
    q, k = (ArraySpec.contiguous((2**16, 1, heads, 1), "float16") for heads in (2**15, 1))
    case = make_problem(q, k, k, kind="kvcache", num_splits=2)
    reason = f"has {2**31} query heads in all sequences; expected at most {2**31 - 1}"
    with pytest.raises(UnsupportedError, match=reason):
        make_plan(case, H100, family=family)
    fewer = cached(batch=2**14, seqlen_q=1, seqlen_k=64, heads=(2**16, 1))
    assert make_plan(fewer, H100, family=family).family == family


@pytest.mark.parametrize("family", [None, *(f for f in FORWARD if FORWARD[f].serves_sequences)])
def test_queries_without_heads_are_planned(family):
    sizes = {"batch": 3, "heads": (0, 2)}
    for case in (packed(seqlen_q=7, **sizes), cached(seqlen_q=1, seqlen_k=500, **sizes)):
        assert case.is_empty
        assert make_plan(case, H100, family=family).problem is case


def test_few_rows_of_grouped_heads_go_to_a_family_that_has_them_in_one_tile():
    few = {"batch": 64, "seqlen_q": 20, "seqlen_k": 2048}
    plan = make_plan(cached(**few), H100)
    assert plan.family == "mma"
    assert "query rows of one head" in plan.rejected["hopper"]
    assert make_plan(cached(**few, heads=(16, 16)), H100).family == "decode"
    assert make_plan(cached(**(few | {"seqlen_q": 50}), heads=(16, 16)), H100).family == "hopper"


# ---- Batch invariance


@pytest.mark.parametrize(
    ("dtype", "dims", "device", "family"),
    [
        ("float16", (128, 128), H100, "mma"),
        ("bfloat16", (64, 64), A100, "mma"),
        ("float32", (64, 64), H100, "mma"),
        ("float32", (192, 64), H100, "simt"),
        ("float64", (64, 64), A100, "simt"),
        ("float16", (64, 64), TURING, "simt"),
    ],
)
def test_batch_invariant_sequences_of_any_number_of_rows_go_to_one_family(
    dtype, dims, device, family
):
    options = {"dtype": dtype, "dims": dims, "batch_invariant": True}
    for seqlen_q in (1, 30, 5000):
        for case in (cached(seqlen_q=seqlen_q, **options), packed(seqlen_q=seqlen_q, **options)):
            plan = make_plan(case, device)
            assert (plan.family, plan.num_splits) == (family, 1)
            others = {"decode", "hopper"} - {family}
            assert all(plan.rejected[name] for name in others)


@pytest.mark.slow
@relaxed
@given(st.data(), devices, st.sampled_from([0, 1, 16, 100, 256]), st.booleans())
def test_bits_of_a_batch_invariant_row_do_not_depend_on_what_it_is_planned_with(
    data, device, page_size, causal
):
    """Prefill, chunks and decoding steps have the same family, tile and split of the keys."""
    dims = data.draw(st.sampled_from([(64, 64), (128, 128), (33, 7), (192, 128), (256, 256)]))
    heads_kv, group = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    fixed = {
        "dtype": data.draw(st.sampled_from(DTYPES)),
        "dims": dims,
        "heads": (heads_kv * group, heads_kv),
        "page_size": page_size,
        "causal": causal,
        "batch_invariant": True,
    }
    found = set()
    for _ in range(4):
        case = cached(
            batch=data.draw(st.integers(1, 300)),
            seqlen_q=data.draw(st.sampled_from([1, 2, 40, 300, 9000])),
            seqlen_k=data.draw(st.sampled_from([1, 100, 1000, 5000, 70000])),
            **fixed,
        )
        plan = make_plan(case, device)
        found.add((plan.family, plan.tile, plan.num_splits))
    assert len(found) == 1


def test_a_tuned_tile_does_not_change_batch_invariant_bits(home):
    family = FORWARD["mma"]
    options = {"dtype": "bfloat16", "num_splits": 1}
    usual, invariant = (packed(batch_invariant=asked, **options) for asked in (False, True))
    tile = dataclasses.replace(family.default_tile(usual, A100), Bc=32)
    fields = dataclasses.asdict(tile)
    gpu = (A100.name, A100.arch, A100.sm_count)
    tuning.save(Entry(*gpu, "mma", family.digest(), problem_class(usual), fields, tflops=1.0))
    assert problem_class(usual) == problem_class(invariant)
    assert make_plan(usual, A100).tile == tile
    assert make_plan(invariant, A100).tile == family.default_tile(invariant, A100)


# ---- The attention kernel, if another kernel is launched before it


def prepared() -> Plan:
    return make_plan(packed(), H100)


def test_a_plan_shows_the_figures_of_the_kernel_that_attends():
    plan = prepared()
    first, main = plan.launches
    assert (first.entry, main.entry) == ("prepare", "attention")
    assert plan.main is main
    assert (plan.threads, plan.shared_memory) == (main.threads, main.shared_memory)
    assert plan.blocks_per_sm() == 1
    assert plan.unit.main_entry == "attention"


@pytest.mark.parametrize("name", FORWARD)
def test_the_first_kernel_is_the_main_one_where_none_is_called_attention(name):
    case = dataclasses.replace(packed(), layout=Layout())
    plan = make_plan(case, H100, family=name)
    assert plan.main is plan.launches[0]
    assert plan.unit.main_entry == plan.unit.entries[0]
