"""float32 on the Hopper family (as sums of bfloat16 components), against the reference."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
from support.gpu.gpu_support import (
    Case,
    Truth,
    check,
    check_all,
    check_captured_call,
    on_gpu,
    random_values,
)
from support.gpu.hopper_support import marks
from support.hard_values import (
    with_growing_keys,
    with_keys_at_minus_infinity,
    with_one_key_far_above,
    with_scores_far_below_zero,
)

from cupy_flash import flash_attention, flash_attention_qkvpacked, plan
from cupy_flash.families.hopper import HopperTile

pytestmark = marks("float32")

MANY = Case("hopper", "float32", 133, 450, batch=4, heads_q=60, heads_kv=20, causal=True)
WIDE = dataclasses.replace(MANY, head_dim=128, head_dim_v=128, causal=False)
WIDEST = dataclasses.replace(WIDE, head_dim=256, head_dim_v=256, batch=1)
PROBLEMS, CHUNK = 400, 20
NARROW = ((64, 64), (64, 64), (128, 128), (128, 128), (96, 96), (40, 72), (17, 33), (128, 8))
DIMS = (*NARROW, (256, 256), (192, 192), (192, 128), (129, 241), (72, 160), (200, 17))


def random_case(draw: random.Random) -> Case:
    head_dim, head_dim_v = draw.choice(DIMS)
    shifted = draw.random() < 0.7
    causal, group, heads_kv = draw.random() < 0.5, draw.choice((1, 1, 3)), draw.randint(1, 3)
    seqlen_q, seqlen_k = draw.randint(1, 500), draw.randint(2, 700)
    batch, kind = draw.randint(1, 3), draw.random()
    if kind < 0.1:
        seqlen_q = draw.randint(0, 7)
    elif kind < 0.2:
        # These sizes have more query tiles than a GPU has SMs.
        seqlen_q, seqlen_k, batch = draw.randint(1, 200), draw.randint(2, 200), 20
    return Case(
        "hopper",
        *(
            "float32",
            seqlen_q,
            seqlen_k,
            batch,
            heads_kv * group,
            heads_kv,
            head_dim,
            head_dim_v,
            causal,
        ),
        q_offset=draw.randint(-seqlen_q - 9, seqlen_k + 9) if causal and shifted else None,
        softmax_scale=draw.uniform(0.01, 1) if draw.random() < 0.2 else None,
        layout=draw.choice(("bshd", "bhsd")),
    )


def random_chunks() -> Iterator[list[Case]]:
    draw = random.Random(20261)
    for _ in range(PROBLEMS // CHUNK):
        yield [random_case(draw) for _ in range(CHUNK)]


@pytest.mark.parametrize("cases", list(random_chunks()), ids=lambda _: "chunk")
def test_random_problems_are_right(cases: list[Case]) -> None:
    check_all(cases)


@pytest.mark.parametrize("alignment", [4, 8, 16])
@pytest.mark.parametrize("dims", [(64, 64), (37, 128), (102, 5), (131, 150)], ids=str)
def test_rows_may_begin_anywhere(dims: tuple[int, int], alignment: int) -> None:
    check(dataclasses.replace(MANY, head_dim=dims[0], head_dim_v=dims[1], alignment=alignment))


@pytest.mark.parametrize(
    "tile",
    [
        HopperTile(128, 96, stages=2, turns=1),
        HopperTile(128, 32, stages=4, q_stages=1, turns=0),
        HopperTile(64, 64, stages=3, turns=0),
        HopperTile(192, 48, stages=3, turns=1),
        HopperTile(128, 16, stages=8, turns=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_other_tiles_than_the_default_are_right(tile: HopperTile, causal: bool) -> None:
    check(dataclasses.replace(MANY, tile=tile, causal=causal))


@pytest.mark.parametrize(
    "tile", [HopperTile(64, 32, stages=3, turns=0), HopperTile(128, 16, stages=3, turns=1)], ids=str
)
@pytest.mark.parametrize("head_dim_v", [20, 100, 192])
def test_other_tiles_of_wide_heads_are_right(tile: HopperTile, head_dim_v: int) -> None:
    check(dataclasses.replace(MANY, tile=tile, batch=1, head_dim=192, head_dim_v=head_dim_v))


@pytest.mark.parametrize(
    "case", [MANY, WIDE, WIDEST, dataclasses.replace(WIDE, causal=True, batch=1)], ids=str
)
def test_a_hundred_calls_give_the_same_bits(case: Case) -> None:
    inputs = on_gpu(random_values(case))
    results = set()
    for _ in range(100):
        out, lse = flash_attention(*inputs, return_lse=True, **case.formula, **case.choice)
        results.add((out.get().tobytes(), lse.get().tobytes()))
    assert len(results) == 1


LONG_CASES = [
    dataclasses.replace(case, causal=causal, seqlen_k=700)
    for case in (MANY, WIDE, WIDEST)
    for causal in (False, True)
]


@pytest.mark.parametrize("case", LONG_CASES, ids=str)
@pytest.mark.parametrize("ends", [(0.01, 40), (40, 0.01)])
def test_keys_that_grow_along_the_sequence_are_right(case: Case, ends: tuple[float, float]) -> None:
    check(case, with_growing_keys(case, ends))


@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_hard_values_are_right(case: Case) -> None:
    check(case, with_one_key_far_above(case, 3))
    check(case, with_scores_far_below_zero(case))
    check(case, with_keys_at_minus_infinity(case, slice(100, 300)))


@pytest.mark.parametrize("exponent", [-24, 30])
def test_small_and_large_values_keep_their_digits(exponent: int) -> None:
    case = dataclasses.replace(WIDE, seqlen_k=200)
    q, k, v = random_values(case)
    q, k = q * np.float32(10.0**-20), k * np.float32(10.0**20)
    check(case, (q, k, v * np.float32(10.0) ** exponent))


def test_every_column_counts_whatever_its_length() -> None:
    # Column norms differ by up to 2^30, but all columns contribute equally to the scores.
    case = dataclasses.replace(WIDE, batch=1, heads_q=4, heads_kv=4)
    q, k, v = random_values(case)
    lengths = np.exp2(np.linspace(-15, 15, case.head_dim)).astype(np.float32)
    check(case, (q * lengths, k / lengths, v))


def test_rows_of_one_key_or_none_are_right() -> None:
    check(dataclasses.replace(MANY, q_offset=0))
    check(dataclasses.replace(MANY, q_offset=-40))
    check(dataclasses.replace(MANY, q_offset=-200))


def test_views_and_packed_qkv_are_read_in_place() -> None:
    rng = np.random.default_rng(5)
    qkv = rng.standard_normal((2, 513, 3, 6, 64)).astype(np.float32)
    truth = Truth.of((qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]), causal=True)
    (on_device,) = on_gpu((qkv,))
    truth.check(flash_attention_qkvpacked(on_device, causal=True, family="hopper").get())
    views = [on_device[:, ::-1, i] for i in range(3)]
    truth = Truth.of(tuple(qkv[:, ::-1, i] for i in range(3)))
    truth.check(flash_attention(*views, family="hopper").get())


def test_a_captured_call_reads_what_lies_there_at_replay() -> None:
    check_captured_call(WIDE)


def test_long_sequences_take_it_unasked_and_short_ones_do_not() -> None:
    arrays = on_gpu(random_values(dataclasses.replace(WIDE, seqlen_q=1024, seqlen_k=1024)))
    assert plan(flash_attention, *arrays).family == "hopper"
    assert plan(flash_attention, *(array[:, :100] for array in arrays)).family == "mma"
