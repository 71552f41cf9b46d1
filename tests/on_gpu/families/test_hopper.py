"""The Hopper family against the reference, on a GPU, in cases that its mechanisms could break."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import hard_values
from support.gpu import cupy
from support.gpu.gpu_support import (
    DTYPES,
    Case,
    Truth,
    bits,
    check,
    check_all,
    check_captured_call,
    check_same_bits,
    checks_of,
    current_device,
    of_cases,
    on_gpu,
    random_values,
    run,
    with_zero_stride,
)
from support.gpu.hopper_support import marks, random_chunks, tiled
from support.prebuilt import cubins, use_cubins

from cupy_flash import flash_attention, flash_attention_qkvpacked, plan
from cupy_flash.arrays import strided
from cupy_flash.families import FORWARD
from cupy_flash.families.hopper import HopperTile
from cupy_flash.gpu import tensor_map
from cupy_flash.gpu.tensor_map import TensorMaps

__all__ = ["cubins", "use_cubins"]  # fixtures

pytestmark = marks()

# There are more query tiles than SMs, so each thread block processes several.
MANY = Case("hopper", "float16", 133, 450, batch=4, heads_q=60, heads_kv=20, causal=True)


# ---- Random problems

# To limit the number of kernels, some head dims have one dtype, and few scales are negative.
USUAL_DIMS = {
    (64, 64): ("float16", "bfloat16"),
    (128, 128): ("float16", "bfloat16"),
    (96, 96): ("bfloat16",),
    (192, 128): ("float16",),
    (256, 256): ("bfloat16",),
}
RARE_DIMS = {
    (8, 256): ("float16",),
    (40, 72): ("bfloat16",),
    (256, 16): ("float16",),
    (160, 80): ("bfloat16",),
    (224, 224): ("float16",),
}
PROBLEMS, CHUNK = 1000, 50


def random_case(draw: random.Random) -> Case:
    choices = RARE_DIMS if draw.random() < 0.05 else USUAL_DIMS
    dims = draw.choice(list(choices))
    dtype = draw.choice(choices[dims])
    kind = draw.random()
    seqlen_q, seqlen_k = draw.randint(1, 700), draw.randint(1, 700)
    batch, heads_kv, group = draw.randint(1, 3), draw.randint(1, 3), draw.choice((1, 1, 2, 3))
    if kind < 0.1:
        seqlen_q = draw.choice((0, 1, 2, 3, 7))
    elif kind < 0.15:
        seqlen_k = draw.randint(1, 9)
    elif kind < 0.2:
        seqlen_k, batch, heads_kv = draw.randint(700, 5000), 1, 1
    elif kind < 0.3:
        # These sizes have more query tiles than a GPU has SMs.
        seqlen_q, batch, heads_kv, group = draw.randint(1, 300), 3, 8, 7
    causal = draw.random() < 0.5
    scale = draw.random()
    softmax_scale = None
    if scale < 0.06:
        softmax_scale = 0.0
    elif scale < 0.3:
        softmax_scale = draw.uniform(0.01, 1)
    elif scale < 0.4 and (dtype, dims) == ("bfloat16", (128, 128)):
        softmax_scale = draw.uniform(-1, -0.01)
    return Case(
        "hopper",
        *(dtype, seqlen_q, seqlen_k, batch, heads_kv * group, heads_kv, *dims, causal),
        q_offset=draw.randint(-seqlen_q - 9, seqlen_k + 9) if causal and kind < 0.7 else None,
        softmax_scale=softmax_scale,
        layout=draw.choice(("bshd", "bhsd")),
    )


@pytest.mark.parametrize(
    "cases",
    random_chunks(random_case, 20260, problems=PROBLEMS, chunk=CHUNK),
    ids=lambda _: "chunk",
)
def test_random_problems_are_right(cases: list[Case]) -> None:
    for case in cases:
        # The planner chooses this family by itself, except for few rows over many keys.
        assert dataclasses.replace(case, family=None).plan().family in ("hopper", "decode")
    check_all(cases)


# ---- Reproducible bits


@of_cases(
    dataclasses.replace(case, head_dim=head_dim, head_dim_v=head_dim, causal=causal)
    # With 6 heads the keys are split, with 60 heads they are not.
    for heads in (6, 60)
    for dtype, head_dim in (("bfloat16", 64), ("float16", 96), ("bfloat16", 128), ("float16", 256))
    for case in (Case("hopper", dtype, 333, 533, heads_q=heads, heads_kv=heads // 2),)
    for causal in (False, True)
)
def test_a_hundred_calls_give_the_same_bits(case: Case) -> None:
    check_same_bits(case, 100)


# ---- Tiles


def fields_of_tiles() -> Iterator[dict[str, int]]:
    rest = itertools.cycle(itertools.product((64, 80, 32, 96, 48), (0, 1, 4)))
    for Br, q_stages, turns in 2 * list(itertools.product((64, 128, 192), (1, 2), (0, 1))):
        Bc, q_steps = next(rest)
        yield {"Br": Br, "Bc": Bc, "q_stages": q_stages, "q_steps": q_steps, "turns": turns}


def with_widths(Br: int, *widths: int, **fields: int) -> list[dict[str, int]]:
    return [{"Br": Br, "Bc": width, **fields} for width in widths]


WIDE = dataclasses.replace(MANY, dtype="bfloat16", head_dim=128, head_dim_v=128, causal=False)


test_other_tiles_than_the_default_are_right = checks_of(
    case
    for start, fields in (
        (MANY, list(fields_of_tiles())),
        (MANY, with_widths(128, 48, 128, 144, 160, 176, 192)),
        (WIDE, with_widths(128, 32, 80, 112, 128, 176)),
        (WIDE, with_widths(128, 64, 128, q_steps=8)),
        (WIDE, with_widths(192, 32, 80)),
        # TMA boxes have rows of 64 bytes, and some or all query columns stay in registers.
        (
            dataclasses.replace(MANY, head_dim=96, head_dim_v=40),
            [*with_widths(128, 80, 128, q_steps=6), *with_widths(64, 112, q_steps=3)],
        ),
        (
            dataclasses.replace(MANY, head_dim=192, head_dim_v=128),
            [
                *with_widths(64, 96, q_stages=2),
                *with_widths(128, 80, 112, q_steps=12),
                *with_widths(128, 96, turns=0),
            ],
        ),
        (
            dataclasses.replace(MANY, dtype="bfloat16", head_dim=256, head_dim_v=256),
            [*with_widths(64, 80), *with_widths(128, 48, 64, q_steps=4)],
        ),
    )
    if start.is_supported()
    for case in tiled(start, fields)
)


def short_ring(case: Case, stages: int) -> Case:
    tile = FORWARD["hopper"].default_tile(case.problem(), current_device())
    assert isinstance(tile, HopperTile)
    return dataclasses.replace(case, tile=dataclasses.replace(tile, stages=stages))


test_a_ring_of_few_stages_goes_round_without_a_hitch = checks_of(
    short_ring(case, stages)
    for case in (MANY, dataclasses.replace(MANY, causal=False), dataclasses.replace(MANY, batch=1))
    if case.is_supported()
    for stages in (2, 3)
)


# ---- Addresses


def test_more_sets_of_addresses_than_are_kept_are_right_the_second_time_too() -> None:
    count = tensor_map._MAX_SETS + 50
    rng = np.random.default_rng(3)
    values = rng.standard_normal((3, count, 1, 9, 1, 64)).astype(np.float16)
    q, k, v = on_gpu(values)
    out = cupy.ndarray((count, 1, 9, 1, 64), np.float16)
    truth = Truth.of((values[0][:, 0], values[1][:, 0], values[2][:, 0]))
    for order in (range(count), reversed(range(count))):
        out.data.memset_async(0xFF, out.nbytes)
        for i in order:
            flash_attention(q[i], k[i], v[i], out=out[i], family="hopper")
        truth.check(out[:, 0].get())


def test_maps_written_without_the_driver_are_those_that_it_encodes(monkeypatch) -> None:
    case = Case("hopper", "bfloat16", 70, 150)
    made = plan(flash_attention, *on_gpu(random_values(case)), family="hopper")
    specs = made.schedule.tensor_maps
    rng = np.random.default_rng(5)
    # The driver is probed once; tensor maps of other lengths reuse the result.
    for length in (None, 1, 70, 100_000):
        for name, spec in specs.items() if length is not None else ():
            shape = (spec.shape[0], length, *spec.shape[2:])
            specs = specs | {name: dataclasses.replace(spec, shape=shape)}
        learnt, asked = (TensorMaps(specs, ("q", "k", "v")) for _ in range(2))
        monkeypatch.setattr(asked, "_learn", lambda addresses: False)
        for _ in range(100):
            q, k, v = (int(address) * 16 for address in rng.integers(1, 2**43, 3))
            assert learnt.maps_for((q, k, v)).memory == asked.maps_for((q, k, v)).memory


def test_each_call_reads_the_arrays_it_is_given() -> None:
    # All combinations of two arrays each for q, k and v: often only one of three addresses changes.
    case = Case("hopper", "bfloat16", 70, 150)
    first = random_values(case)
    second = tuple(array[::-1].copy() for array in first)
    sets = list(zip(on_gpu(first), on_gpu(second), strict=True))
    host = list(zip(first, second, strict=True))
    for _ in range(2):
        for q, k, v in itertools.product((0, 1), repeat=3):
            out = flash_attention(sets[0][q], sets[1][k], sets[2][v], family="hopper")
            Truth.of((host[0][q], host[1][k], host[2][v])).check(out.get())


# ---- Views


VIEWS: dict[str, Callable[[Any], Any]] = {
    "some_heads": lambda array: array[:, :, 1:3],
    "some_rows": lambda array: array[:, 3:-5],
    "every_third_row": lambda array: array[:, 1::3],
    "some_columns": lambda array: array[..., 8:-16],
    "last_sequence": lambda array: array[-1:],
    "one_sequence_for_all": lambda array: with_zero_stride(array, 0),
    "one_head_for_all": lambda array: with_zero_stride(array, 2),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_read_in_place(name: str, causal: bool) -> None:
    case = Case("hopper", "float16", 113, 150, batch=3, heads_kv=4, head_dim=96, head_dim_v=96)
    q, k, v = random_values(case)
    # q must have the same batch and head_dim as the views of k and v.
    view = VIEWS[name]
    q_view = view if name in ("some_columns", "last_sequence") else VIEWS["some_rows"]
    truth = Truth.of((q_view(q), view(k), view(v)), causal=causal)
    q_gpu, k_gpu, v_gpu = on_gpu((q, k, v))
    q_gpu, k_gpu, v_gpu = q_view(q_gpu), view(k_gpu), view(v_gpu)
    assert all(strided.is_readable_in_place(array) for array in (q_gpu, k_gpu, v_gpu))
    assert plan(flash_attention, q_gpu, k_gpu, v_gpu, causal=causal).family == "hopper"
    out, lse = flash_attention(q_gpu, k_gpu, v_gpu, causal=causal, family="hopper", return_lse=True)
    truth.check(out.get(), lse.get())


def test_out_may_be_a_view_too() -> None:
    case = Case("hopper", "bfloat16", 113, 150)
    values = random_values(case)
    buffer = cupy.asarray(np.full((2, 113, 3, 4, 64), np.nan, DTYPES["bfloat16"]))
    out = buffer[:, :, 1]
    assert flash_attention(*on_gpu(values), out=out, family="hopper") is out
    host = buffer.get()
    Truth.of(values).check(host[:, :, 1])
    assert np.isnan(host[:, :, [0, 2]].astype(np.float32)).all(), "memory around was written"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_qkv_is_read_in_place(head_dim: int) -> None:
    rng = np.random.default_rng(5)
    qkv = rng.standard_normal((2, 313, 3, 6, head_dim)).astype(DTYPES["bfloat16"])
    truth = Truth.of((qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]), causal=True)
    out = flash_attention_qkvpacked(cupy.asarray(qkv), causal=True, family="hopper")
    truth.check(out.get())


# ---- Values for which the softmax base (a possibly stale row maximum) changes, or does not exist

LONG = Case("hopper", "float16", 213, 700, heads_q=4, heads_kv=2)
LONG_CASES = [
    dataclasses.replace(LONG, dtype=dtype, head_dim=dim, head_dim_v=dim, causal=causal)
    for dtype, dim in (("float16", 64), ("bfloat16", 128))
    for causal in (False, True)
]
# These cases repeat the above with more heads, so that the keys are not split.
LONG_CASES += [dataclasses.replace(case, batch=4, heads_q=30, heads_kv=10) for case in LONG_CASES]


test_huge_scores_are_right = checks_of(
    dataclasses.replace(case, softmax_scale=scale)
    for case in LONG_CASES
    for scale in (50.0, 5.0, -5.0)
)


@of_cases(LONG_CASES)
@pytest.mark.parametrize("ends", [(0.01, 40), (40, 0.01), (3, 6)])
def test_keys_that_grow_along_the_sequence_either_way_are_right(
    case: Case, ends: tuple[float, float]
) -> None:
    # KV tiles are processed from the last to the first, so scores grow in every tile, or shrink.
    check(case, hard_values.with_growing_keys(case, ends))


@of_cases(LONG_CASES)
@pytest.mark.parametrize("key", [0, 5, 130, 511, 699])
def test_one_key_far_above_the_others_anywhere_is_right(case: Case, key: int) -> None:
    # The softmax base changes by about 30, in some rows only.
    check(case, hard_values.with_one_key_far_above(case, key))


@of_cases(LONG_CASES)
def test_scores_far_below_zero_are_right(case: Case) -> None:
    # The initial softmax base is kept unless the first scores of a row are far from it.
    check(case, hard_values.with_scores_far_below_zero(case))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 200], ids=["split", "whole"])
@pytest.mark.parametrize("peak", [-30, -5.5, -5, -4.7, -3, -1, 0.5, 6, 9])
@pytest.mark.parametrize("gap", [9, 12])
def test_many_small_probabilities_beside_one_large_are_not_lost(
    dtype: str, heads: int, peak: float, gap: float
) -> None:
    # The output comes only from keys whose scores are far below that of the last key, which is
    # processed first. If it sets too high a base, the other p underflow in float16.
    case = Case("hopper", dtype, 9, 2048, batch=1, heads_q=heads, heads_kv=1, softmax_scale=1.0)
    q, k, v = random_values(case)
    q[...] = 0
    q[..., 0] = 1
    k[..., 0] = peak - gap
    k[:, -1, :, 0] = peak
    v[...] = np.abs(v) + DTYPES[dtype].type(1)
    v[:, -1] = 0
    check(case, (q, k, v))


@of_cases(LONG_CASES)
@pytest.mark.parametrize("hidden", [slice(400, None), slice(0, 300), slice(100, 650), slice(None)])
def test_keys_of_score_minus_infinity_count_for_nothing(case: Case, hidden: slice) -> None:
    check(case, hard_values.with_keys_at_minus_infinity(case, hidden))


@of_cases(
    dataclasses.replace(case, q_offset=offset)
    for case in LONG_CASES
    # Only cases without splits are tested, as a merge of splits returns the value of this key.
    if case.causal and case.batch == 4
    for offset in (0, -9)
)
def test_a_row_whose_only_key_is_of_score_minus_infinity_sees_none(case: Case) -> None:
    check(case, hard_values.with_keys_at_minus_infinity(case, slice(0, 1)))


@of_cases(case for case in LONG_CASES if case.causal)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_keys_never_reach_the_output(case: Case, poison: float) -> None:
    # Rows before 100 attend to no poisoned key, but are in the same tiles as rows that do.
    hard_values.check_masked_keys(dataclasses.replace(case, q_offset=150), 250, poison, rows=100)


@of_cases(
    case
    for dtype, causal in (("float16", False), ("bfloat16", True), ("float32", True))
    if (case := dataclasses.replace(MANY, dtype=dtype, causal=causal)).is_supported()
)
@pytest.mark.parametrize("scores", ["large", "far below zero"])
def test_a_row_has_the_same_bits_whatever_its_neighbours_hold(case: Case, scores: str) -> None:
    # A warp votes on base changes, but the base of a row depends on the scores of this row only.
    q, k, v = random_values(case)
    q[..., 0], k[..., 0] = 0, -30
    usual = run(case, (q, k, v))
    odd = np.arange(case.seqlen_q) % 2 == 1
    if scores == "large":
        q[:, odd] = (q[:, odd].astype(np.float32) * 40).astype(q.dtype)
    else:
        q[:, odd, :, 0] = 30
    changed = run(case, (q, k, v))
    np.testing.assert_array_equal(bits(usual[0][:, ~odd]), bits(changed[0][:, ~odd]))
    np.testing.assert_array_equal(usual[1][:, :, ~odd], changed[1][:, :, ~odd])


# ---- Graphs


@of_cases([dataclasses.replace(MANY, head_dim=dim, head_dim_v=dim) for dim in (64, 128)])
def test_a_captured_call_replays_on_new_contents(case: Case) -> None:
    def other_call() -> None:
        # The graph holds its own tensor maps, so a call in between does not affect it.
        flash_attention(*on_gpu(random_values(case)), family="hopper")

    check_captured_call(case, other_call)


# ---- Many tiles that are short, or attend to no key

TINY = Case("hopper", "float16", 3, 3, batch=300, heads_q=16, heads_kv=4)


test_thousands_of_tiny_sequences_are_right = checks_of(
    dataclasses.replace(TINY, dtype=dtype, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal)
    for dtype, causal in (("float16", False), ("bfloat16", True))
    for seqlen_q, seqlen_k in ((1, 1), (3, 1), (1, 3), (2, 3), (3, 2))
)

test_tiny_sequences_are_right_with_one_query_tile_or_two_on_their_way = checks_of(
    tiled(
        TINY,
        [
            {"Br": Br, "Bc": 32, "q_stages": q_stages}
            for Br in (64, 128, 192)
            for q_stages in (1, 2)
        ],
    )
)


# With query tiles of 128 rows and a q_offset of -900, 7 of a head's 8 tiles attend to no key. The
# tiles of several heads are interleaved, so a thread block processes tiles of both kinds.
BLIND = Case("hopper", "float16", 1000, 100, batch=8, heads_q=32, heads_kv=8, causal=True)


test_query_tiles_that_see_no_key_among_others_are_right = checks_of(
    dataclasses.replace(BLIND, dtype=dtype, q_offset=q_offset)
    for dtype in ("float16", "bfloat16")
    for q_offset in (-900, -990, -500, -300, -1000, -(2**40))
)

test_tiles_that_see_no_key_are_right_with_any_number_of_warpgroups = checks_of(
    tiled_case
    for q_offset in (-900, -500)
    for tiled_case in tiled(
        dataclasses.replace(BLIND, q_offset=q_offset),
        [
            {"Br": Br, "Bc": 32, "q_stages": q_stages, "turns": turns}
            for Br, turns in ((64, 0), (128, 0), (128, 1), (192, 1))
            for q_stages in (1, 2)
        ],
    )
)


@of_cases(
    dataclasses.replace(BLIND, batch=1, heads_q=3, heads_kv=3, seqlen_k=4099, q_offset=q_offset)
    for q_offset in (-900, -500, 5)
)
def test_splits_that_see_no_key_are_right(case: Case) -> None:
    assert case.plan().num_splits > 1
    check(case)


test_tiny_sequences_whose_queries_see_nothing_are_right = checks_of(
    dataclasses.replace(TINY, seqlen_q=2, seqlen_k=3, causal=True, q_offset=q_offset)
    for q_offset in (-2, -1, 0, 1)
)
