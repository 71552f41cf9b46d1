"""The decode family on a GPU: few query rows over many keys, dense, in KV caches and packed."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sanitize import clustered_calls
from support import hard_values
from support.calls.sequence_support import KVCacheCase, VarlenCase, ragged_lengths
from support.gpu.gpu_sequences import (
    CPU,
    Target,
    check_sequences,
    cluster_of,
    decode_on_h100,
    jobs_of,
)
from support.gpu.gpu_support import (
    Case,
    bits,
    check,
    check_same_bits,
    checks_of,
    current_device,
    of_cases,
    random_values,
    run,
)
from support.prebuilt import jobs_of_cases, selected_calls, use_cubins, write_cubins

from cupy_flash.cli.build.build import Job
from cupy_flash.families import FORWARD
from cupy_flash.families.decode import DecodeTile
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch

__all__ = ["use_cubins"]  # fixture

DECODE = Target("decode")
FEW = Case("decode", "float16", 1, 1003, batch=3, heads_q=8, heads_kv=2)

needs_decode = pytest.mark.skipif(
    not FEW.is_supported(), reason="the decode family needs sm_80 or newer"
)


def on_gpu(function: Any) -> Any:
    return pytest.mark.gpu(needs_decode(function))


@pytest.fixture(scope="module")
def cubins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the kernels of the selected cases on all CPUs, instead of one by one in each call."""
    folder: Path = tmp_path_factory.mktemp("cubins")
    if gpu_unavailable():
        return folder
    selected = selected_calls(request)
    jobs = jobs_of_cases(one["case"] for one in selected if "case" in one)
    calls = [call for one in selected if one.get("target") == DECODE for call in one["calls"]]
    jobs += itertools.chain.from_iterable(call.jobs() for call in calls)
    write_cubins(folder, jobs)
    return folder


def checks_of_decode(cases: Iterable[Case]) -> Any:
    return on_gpu(checks_of(cases))


# ---- Dense problems with few rows


test_few_rows_over_many_keys_are_right = checks_of_decode(
    dataclasses.replace(FEW, dtype=dtype, seqlen_q=seqlen_q, heads_q=2 * group, causal=causal)
    for index, (seqlen_q, group) in enumerate(
        [(1, 1), (1, 4), (1, 8), (1, 16), (1, 32), (2, 4), (3, 5), (5, 1), (7, 4), (17, 1), (32, 1)]
    )
    for causal in (False, True)
    for dtype in (("float16", "bfloat16")[index % 2],)
)

test_any_number_of_keys_is_right = checks_of_decode(
    dataclasses.replace(FEW, dtype=dtype, seqlen_k=seqlen_k, batch=batch, heads_kv=heads_kv)
    for dtype, heads_kv in (("float16", 8), ("bfloat16", 1))
    # The numbers of keys are near one tile, near all tiles of a thread block, or larger.
    for batch, seqlen_k in ((1, 1), (2, 15), (2, 17), (1, 63), (1, 65), (3, 129), (1, 20011))
)


HEAD_DIMS = [(d, d) for d in (1, 7, 40, 96, 128, 160, 192, 256)]
HEAD_DIMS += [(33, 40), (72, 96), (192, 128), (64, 128), (1, 256), (256, 1), (256, 64)]


test_any_head_dims_are_right = checks_of_decode(
    dataclasses.replace(FEW, dtype=dtype, seqlen_q=2, head_dim=dim, head_dim_v=dim_v, causal=True)
    for index, (dim, dim_v) in enumerate(HEAD_DIMS)
    for dtype in (("float16", "bfloat16")[index % 2],)
)

test_rows_of_any_alignment_and_both_layouts_are_read_and_written_in_place = checks_of_decode(
    dataclasses.replace(
        FEW, dtype="bfloat16", head_dim=40, head_dim_v=33, layout=layout, alignment=alignment
    )
    for alignment in (16, 8, 4, 2)
    for layout in ("bshd", "bhsd")
)

test_q_offset_moves_the_causal_mask_and_rows_without_keys_are_zero = checks_of_decode(
    dataclasses.replace(FEW, seqlen_q=5, seqlen_k=150, causal=True, q_offset=q_offset)
    for q_offset in (-(2**40), -5, -4, -1, 0, 36, 144, 145, 149, 150, 2**40)
)

test_blocks_whose_keys_no_row_sees_add_nothing = checks_of_decode(
    dataclasses.replace(FEW, batch=1, seqlen_q=5, seqlen_k=9999, causal=True, q_offset=q_offset)
    for q_offset in (-4, 0, 5, 100, 5000)
)

test_any_softmax_scale_is_right = checks_of_decode(
    dataclasses.replace(FEW, dtype=dtype, seqlen_q=3, causal=causal, softmax_scale=scale)
    for dtype in ("float16", "bfloat16")
    for scale, causal in ((0.0, True), (-0.2, True), (-1.5, False), (1e-4, False), (5.0, True))
)

test_nothing_at_all_or_hundreds_of_short_sequences_are_right = checks_of_decode(
    dataclasses.replace(FEW, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=True)
    for batch, seqlen_q, seqlen_k in ((0, 1, 5), (2, 0, 5), (2, 3, 0), (500, 1, 3), (300, 2, 33))
)


@on_gpu
@of_cases(
    dataclasses.replace(case, family=None)
    for case in (
        dataclasses.replace(FEW, batch=8, heads_q=32, heads_kv=8, seqlen_k=4096),
        dataclasses.replace(FEW, dtype="bfloat16", batch=1, heads_q=32, heads_kv=32, causal=True),
        dataclasses.replace(FEW, seqlen_q=4, causal=True, q_offset=700),
        dataclasses.replace(FEW, head_dim=128, head_dim_v=128, heads_q=8, heads_kv=1),
    )
)
def test_few_rows_go_to_this_family_unasked(case: Case) -> None:
    assert case.plan().family == "decode"
    check(case)


# ---- Tiles


def sampled_tiles(case: Case, count: int) -> Iterator[Case]:
    """Yield the case with each tile of a fixed random sample of the legal ones."""
    if case.is_supported():
        tiles = list(FORWARD["decode"].tiles(case.problem(), current_device()))
        for tile in random.Random(0).sample(tiles, min(count, len(tiles))):
            yield dataclasses.replace(case, tile=tile)


test_any_legal_tile_is_right = checks_of_decode(
    tiled
    for case, count in (
        (dataclasses.replace(FEW, seqlen_q=3, causal=True), 24),
        (dataclasses.replace(FEW, dtype="bfloat16", head_dim=128, head_dim_v=96, heads_q=16), 12),
        (dataclasses.replace(FEW, batch=1, heads_kv=8, seqlen_k=5003), 12),
        (dataclasses.replace(FEW, head_dim=256, head_dim_v=256), 4),
    )
    for tiled in sampled_tiles(case, count)
)


# ---- Values for which the softmax base (a possibly stale row maximum) changes, or does not exist

# Without clusters, partial results are merged through device memory on any GPU.
NO_CLUSTERS = DecodeTile(16, 16, warps=4, stages=3, min_blocks=2)
LONG = [
    dataclasses.replace(FEW, dtype=dtype, seqlen_q=3, causal=True, **changes)
    for dtype, changes in (
        ("float16", {"seqlen_k": 2777, "batch": 1}),
        ("bfloat16", {"seqlen_k": 2777, "batch": 40}),
        ("bfloat16", {"seqlen_k": 2777, "batch": 1, "tile": NO_CLUSTERS}),
        ("float16", {"seqlen_k": 20011, "batch": 1, "heads_kv": 1, "tile": NO_CLUSTERS}),
    )
]


def test_of_the_long_problems_some_leave_many_results_in_device_memory() -> None:
    plans = [
        make_plan(case.problem(), device_for_arch("sm_90"), family="decode", tile=case.tile)
        for case in LONG
    ]
    # Each thread block or cluster has two slots per KV head, with a counter per block of a cluster.
    most = [
        plan.schedule.counters
        // (2 * plan.problem.heads_kv * max(1, plan.schedule.launches[0].cluster))
        for plan in plans
    ]
    assert most == [0, 4, 44, 264]


@on_gpu
@of_cases(LONG)
@pytest.mark.parametrize("ends", [(0.01, 40), (40, 0.01), (3, 6)])
def test_keys_that_grow_along_the_sequence_either_way_are_right(
    case: Case, ends: tuple[float, float]
) -> None:
    # Thread blocks and warps then hold partial results with very different maxima, in any order.
    check(case, hard_values.with_growing_keys(case, ends))


@on_gpu
@of_cases(LONG)
@pytest.mark.parametrize("key", [0, 16, 130, 1500, 2770])
def test_one_key_far_above_the_others_anywhere_is_right(case: Case, key: int) -> None:
    check(case, hard_values.with_one_key_far_above(case, key))


@on_gpu
@of_cases(LONG)
def test_scores_far_below_zero_are_right(case: Case) -> None:
    check(case, hard_values.with_scores_far_below_zero(case))


@on_gpu
@of_cases(LONG)
@pytest.mark.parametrize(
    "hidden", [slice(400, None), slice(0, 2300), slice(100, 2650), slice(None)]
)
def test_keys_of_score_minus_infinity_count_for_nothing(case: Case, hidden: slice) -> None:
    check(case, hard_values.with_keys_at_minus_infinity(case, hidden))


@on_gpu
@of_cases([dataclasses.replace(case, causal=False) for case in LONG])
@pytest.mark.parametrize(
    "what", ["NaN query", "infinite query", "NaN key", "infinite key", "NaN value"]
)
def test_nan_and_infinity_propagate_as_in_the_reference(case: Case, what: str) -> None:
    q, k, v = random_values(case)
    number, name = what.split()
    array = {"query": q, "key": k, "value": v}[name]
    array[0, min(1234, array.shape[1] - 1), -1, 5] = np.nan if number == "NaN" else np.inf
    check(case, (q, k, v))


@on_gpu
@of_cases([dataclasses.replace(case, q_offset=1500) for case in LONG])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_keys_never_reach_the_output(case: Case, poison: float) -> None:
    hard_values.check_masked_keys(case, 1503, poison)


@on_gpu
@of_cases(LONG)
def test_a_row_has_the_same_bits_whatever_its_neighbours_hold(case: Case) -> None:
    # All query heads of a KV head are rows of one tile.
    q, k, v = random_values(case)
    usual = run(case, (q, k, v))
    odd = np.arange(case.heads_q) % 2 == 1
    q[:, :, odd] = (q[:, :, odd].astype(np.float32) * 40).astype(q.dtype)
    changed = run(case, (q, k, v))
    np.testing.assert_array_equal(bits(usual[0][:, :, ~odd]), bits(changed[0][:, :, ~odd]))
    np.testing.assert_array_equal(usual[1][:, ~odd], changed[1][:, ~odd])


# ---- Reproducible bits, and counters that kernels reset to zero


@on_gpu
@of_cases(
    [
        *LONG,
        dataclasses.replace(FEW, batch=1, heads_q=32, heads_kv=1, seqlen_k=20011),
        dataclasses.replace(FEW, batch=7, heads_q=32, heads_kv=32, seqlen_k=517),
    ]
)
def test_a_hundred_calls_give_the_same_bits(case: Case) -> None:
    check_same_bits(case, 100)
    check(case)


# ---- Random problems: dense, with a KV cache, and packed

# There are few combinations of dtype and head dims, to limit the number of kernels.
DIMS = (
    ("float16", 64, 64),
    ("bfloat16", 128, 128),
    ("bfloat16", 64, 64),
    ("float16", 192, 128),
    ("bfloat16", 40, 96),
    ("float16", 256, 256),
)
PROBLEMS, CHUNK = 300, 25


@dataclasses.dataclass(frozen=True)
class Call:
    """Random case, with the options of its call."""

    case: Case | KVCacheCase | VarlenCase
    num_splits: int = 0

    def jobs(self) -> Iterator[Job]:
        if isinstance(self.case, Case):
            return iter([Job.of(self.case.plan())])
        return jobs_of(self.case, "decode", num_splits=self.num_splits)

    def check(self, target: Target) -> None:
        if isinstance(self.case, Case):
            if target.is_gpu:
                check(self.case)
        else:
            check_sequences(target, self.case, num_splits=self.num_splits)


def random_call(draw: random.Random) -> Call:
    dtype, head_dim, head_dim_v = draw.choice(DIMS[:3] if draw.random() < 0.7 else DIMS)
    heads_kv, group = draw.randint(1, 4), draw.choice((1, 2, 4, 5, 8))
    common: dict[str, Any] = {
        "dtype": dtype,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "heads_q": heads_kv * group,
        "heads_kv": heads_kv,
        "causal": draw.random() < 0.6,
        "softmax_scale": draw.choice((None, None, None, 0.0, draw.uniform(0.01, 1))),
    }
    kind = draw.random()
    if kind < 0.2:
        rows = draw.randint(1, 32 // group)
        keys = draw.choice((draw.randint(0, 100), draw.randint(0, 5000)))
        q_offset = draw.randint(-rows - 9, keys + 9) if common["causal"] else None
        batch = draw.randint(1, 9)
        return Call(
            Case("decode", seqlen_q=rows, seqlen_k=keys, batch=batch, q_offset=q_offset, **common)
        )
    rng = np.random.default_rng(draw.randrange(2**32))
    batch = draw.choice((1, 2, 5, 30, 70))
    longest = draw.choice((3, 100, 1000, 5000)) if batch <= 5 else draw.choice((3, 50, 300))
    common |= {
        "page_size": draw.choice((0, 0, 16, 1, 48) if common["dtype"] == "float16" else (0, 16)),
        "seed": draw.randrange(2**32),
    }
    num_splits = draw.choice((0, 0, 0, 1, 2, 3, 9, 70))
    lengths = ragged_lengths(rng, batch, longest)
    if kind < 0.75:
        seqlen_q = draw.choice((1, 1, 1, 2, 5, 17, 100 if batch <= 5 else 9))
        seqlen_new = draw.choice((0, seqlen_q, seqlen_q, 3))
        rotary_dim = draw.choice((0, 0, 32)) if seqlen_new else 0
        return Call(
            KVCacheCase(
                lengths,
                seqlen_q=seqlen_q,
                seqlen_new=seqlen_new,
                rotary_dim=rotary_dim,
                rotary_interleaved=draw.random() < 0.5,
                indexed=not common["page_size"] and draw.random() < 0.5,
                **common,
            ),
            num_splits,
        )
    seqlens_q = ragged_lengths(rng, batch, draw.choice((3, 40, 200 if batch <= 5 else 40)))
    return Call(VarlenCase(seqlens_q, lengths, seqused=draw.random() < 0.4, **common), num_splits)


def random_chunks() -> list[list[Call]]:
    draw = random.Random(20261)
    return [[random_call(draw) for _ in range(CHUNK)] for _ in range(PROBLEMS // CHUNK)]


CLUSTERED = 40


def clustered_call(draw: random.Random) -> Call:
    """Return a call of few sequences: some too short to fill a cluster, some that span several."""
    dtype, head_dim, head_dim_v = draw.choice(DIMS[:3])
    # With few heads, a head takes several clusters. With many, it takes one of 8, 4, 2 or 1 blocks.
    heads_kv, group = draw.choice(
        ((8, 4), (8, 1), (7, 4), (16, 2), (32, 1), (64, 1), (1, 32), (1, 8), (2, 4), (3, 16))
    )
    seqlen_q = draw.randint(1, 4 if group <= 8 else 1)
    most = draw.choice((20, 300, 2000))
    if heads_kv <= 3 and group <= 16:
        most = draw.choice((300, 4000, 9000))
    # These lengths are zero, one key, one tile of 16 keys, and less than a tile per thread block.
    shares = (0, 1, 16, draw.randint(2, 127))
    lengths = tuple(
        draw.choice((*shares, draw.randint(0, most), most))
        for _ in range(draw.randint(1, min(9, 127 // heads_kv)))
    )
    # Paged caches of more than 64 MiB are computed without clusters.
    size = len(lengths) * (max(lengths) + 64) * heads_kv * 2 * (head_dim + head_dim_v)
    return Call(
        KVCacheCase(
            *(lengths, dtype, seqlen_q, draw.choice((0, seqlen_q))),
            *(heads_kv * group, heads_kv, head_dim, head_dim_v),
            causal=draw.random() < 0.5,
            page_size=draw.choice((0, 1, 16, 64) if size <= 60 << 20 else (0,)),
            seed=draw.randrange(2**32),
        )
    )


def clustered_chunks() -> list[list[Call]]:
    draw = random.Random(20262)
    return [[clustered_call(draw) for _ in range(10)] for _ in range(CLUSTERED // 10)]


@pytest.mark.parametrize("calls", clustered_chunks(), ids=lambda calls: f"{len(calls)} calls")
def test_the_random_problems_for_clusters_are_computed_by_them(calls: list[Call]) -> None:
    for call in calls:
        assert isinstance(call.case, KVCacheCase)
        assert cluster_of(decode_on_h100(call.case.problem().arguments())) >= 1, call


def test_of_the_random_problems_for_clusters_many_are_for_several_of_a_head() -> None:
    calls = itertools.chain.from_iterable(clustered_chunks())
    plans = [decode_on_h100(call.case.problem().arguments()) for call in calls]
    assert sum(plan.schedule.counters > 0 for plan in plans) >= CLUSTERED // 4


def test_calls_that_are_sanitized_launch_clusters_too() -> None:
    calls = list(clustered_calls())
    plans = [decode_on_h100(call.arguments) for call in calls]
    assert [cluster_of(plan) for plan in plans] == [8, 8, 8, 8, 4]
    assert [plan.schedule.counters > 0 for plan in plans] == [False, False, False, True, False]
    assert {call.what.page_size for call in calls if isinstance(call.what, KVCacheCase)} == {
        *(0, 1, 16)
    }


@pytest.mark.parametrize(
    ("target", "calls"),
    [
        pytest.param(target, calls, id=f"{target}-{index}", marks=marks)
        # Other tests cover the CPU backend; one chunk checks that these problems are valid.
        for target, marks, chunks in (
            (CPU, (), random_chunks()[:1]),
            (DECODE, (pytest.mark.gpu, needs_decode), [*random_chunks(), *clustered_chunks()]),
        )
        for index, calls in enumerate(chunks)
    ],
)
def test_random_problems_are_right(target: Target, calls: list[Call]) -> None:
    failures = []
    for call in calls:
        try:
            call.check(target)
        except AssertionError as error:
            failures.append(f"{call}: {error}")
    assert not failures, "\n".join(failures)
