"""Random combinations of mask and score modifications on a GPU, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES, KINDS, ModifiedCall, padded_call, random_call
from support.gpu import cupy
from support.gpu.gpu_support import bits, capture_call

from cupy_flash import UnsupportedError, flash_attention, plan
from cupy_flash.families import FORWARD
from cupy_flash.problem.score import LARGEST_BOUNDED
from cupy_flash.reference.dense import error_bound, max_error

pytestmark = pytest.mark.gpu

# A test has ten calls, because collecting a test per call would take longer than running it.
TESTS, CALLS = 200, 10


def draw(seed: int) -> tuple[ModifiedCall, str | None]:
    """Return a call and the requested family, or None for the planner's choice."""
    rng = np.random.default_rng(seed)
    family = str(rng.choice(["any", *FORWARD]))
    dtypes = ["float16", "bfloat16"] if family in ("hopper", "decode") else list(DTYPES)
    kinds = ["dense", *KINDS] if family != "naive" else ["dense"]
    few_rows = family == "decode" or rng.integers(4) == 0
    call = random_call(rng, str(rng.choice(dtypes)), str(rng.choice(kinds)), few_rows=few_rows)
    return call, None if family == "any" else family


@pytest.mark.parametrize("test", range(TESTS))
def test_random_combinations_are_right_in_every_family(test: int) -> None:
    for seed in range(test * CALLS, (test + 1) * CALLS):
        call, family = draw(seed)
        try:
            call.check(cupy, family=family)
        except UnsupportedError:
            # If the requested family does not support the call, another one does.
            assert family is not None
            call.check(cupy)


@pytest.mark.parametrize("cap", [LARGEST_BOUNDED, LARGEST_BOUNDED + 1])
@pytest.mark.parametrize("size", [1e-13, 1.0, 1e9])
@pytest.mark.parametrize("sign", ["low", "high", "both"])
def test_scores_at_their_cap_keep_the_precision_of_values(cap, size, sign, rng) -> None:
    real = DTYPES["bfloat16"]
    q = np.full((1, 200, 2, 64), 30, real)
    signs = {"low": [-30], "high": [30], "both": [-30, 30]}[sign]
    k = np.broadcast_to(rng.choice(signs, (1, 300, 1, 1)), (1, 300, 2, 64)).astype(real)
    v = (size * rng.standard_normal((1, 300, 2, 64))).astype(real)
    call = ModifiedCall("dense", "bfloat16", {"q": q, "k": k, "v": v}, {"softcap": cap})
    call.check(cupy)


# Queries come after all keys, so ALiBi makes all scores low, and the last KV tile is partly masked.
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("rows", [3, 34, 130])
def test_low_scores_beside_hidden_ones_find_their_base(
    dtype: str, head_dim: int, rows: int, rng: np.random.Generator
) -> None:
    arrays = {
        name: rng.standard_normal((2, length, 2, head_dim)).astype(DTYPES[dtype])
        for name, length in (("q", rows), ("k", 305), ("v", 305))
    }
    arrays["alibi_slopes"] = np.array([0.5, 0.1], np.float32)
    for causal in (False, True):
        options = {"causal": causal, "q_offset": 400}
        ModifiedCall("dense", dtype, arrays, options).check(cupy)


# Bias values of padding, from finfo(float16).min to finfo(float32).min.
LOW = [-65504.0, -1e6, -1e9, -1e30, float(np.finfo(np.float32).min)]


def check_with_and_without_lse(call: ModifiedCall, **how: Any) -> None:
    """Check a call, and that its output is the same if no log-sum-exp is requested."""
    out, lse = call.run(cupy, **how)
    call.compare(out, lse)
    positional, named = call.given(cupy)
    alone = call.function(*positional, **named, **how).get()
    np.testing.assert_array_equal(bits(alone), bits(out))


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_low_scores_use_all_their_keys(
    kind: str, dtype: str, low: float, rng: np.random.Generator
) -> None:
    for family in ("hopper", "mma", None):
        for _ in range(3):
            call = padded_call(rng, dtype, kind, low)
            try:
                check_with_and_without_lse(call, family=family)
            except UnsupportedError:
                assert family is not None


@pytest.mark.parametrize("low", [-1e9, -1e30])
@pytest.mark.parametrize("family", ["mma", "simt"])
@pytest.mark.parametrize("kind", ["varlen", "kvcache", "paged"])
def test_rows_of_low_scores_use_the_keys_of_all_parts(
    kind: str, family: str, low: float, rng: np.random.Generator
) -> None:
    for _ in range(3):
        call = padded_call(rng, "float16", kind, low)
        call.options["num_splits"] = 3
        check_with_and_without_lse(call, family=family)


# There are several query tiles and KV tiles, and some query tiles have no row of low scores.
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_padded_rows_of_long_calls_use_keys_of_all_tiles(
    head_dim: int, low: float, rng: np.random.Generator
) -> None:
    real = DTYPES["bfloat16"]
    arrays = {
        name: rng.standard_normal((2, length, 2, head_dim)).astype(real)
        for name, length in (("q", 500), ("k", 777), ("v", 777))
    }
    hidden = np.zeros((2, 1, 500, 777), bool)
    hidden[0, :, :70] = hidden[1, :, 300] = True
    arrays["bias"] = np.where(hidden, low, 0).astype(np.float32)
    call = ModifiedCall("dense", "bfloat16", arrays, {"causal": False})
    check_with_and_without_lse(call)


# Scores of different KV tiles are on both sides of the threshold below which a score is low.
@pytest.mark.parametrize("above", [-25.0, -3.0, 0.0, 3.0, 25.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_around_the_lowest_that_count_keep_their_weights(
    head_dim: int, dtype: str, above: float, rng: np.random.Generator
) -> None:
    arrays = {
        name: rng.standard_normal((2, length, 2, head_dim)).astype(DTYPES[dtype])
        for name, length in (("q", 200), ("k", 777), ("v", 777))
    }
    arrays["q"][...] = 0
    # At this magnitude, float32 represents multiples of 2^-4 exactly.
    lowest = -np.round(2**20 * np.log(2))
    steps = rng.integers(-16, 17, (2, 1, 200, 777)) / 16
    arrays["bias"] = (lowest + above + steps).astype(np.float32)
    check_with_and_without_lse(ModifiedCall("dense", dtype, arrays, {"causal": False}))


# `high` is the highest score of a row, which keys in several splits have; `others` is the score of
# the other keys. Times log2(e), 2.5e38 and more exceed the largest float32.
@pytest.mark.parametrize(
    ("high", "others"),
    [
        (2e4, 0.0),
        (1e9, 0.0),
        (1e30, 0.0),
        (2.5e38, 0.0),
        (float(np.finfo(np.float32).max), 0.0),
        (-1e9, -2e9),
        (-1e38, -2e38),
        (float(np.finfo(np.float32).min), -np.inf),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen_q", [20, 200])
def test_keys_of_the_highest_scores_have_equal_weights(
    seqlen_q: int, head_dim: int, dtype: str, high: float, others: float, rng: np.random.Generator
) -> None:
    real = DTYPES[dtype]
    q = np.zeros((1, seqlen_q, 2, head_dim), real)
    k, v = (rng.standard_normal((1, 777, 2, head_dim)).astype(real) for _ in range(2))
    share = rng.choice([0.01, 0.3], (1, 2, seqlen_q, 1))
    chosen = rng.random((1, 2, seqlen_q, 777)) < share
    chosen[..., rng.integers(777)] = True
    wide = np.float64 if dtype == "float64" else np.float32
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    bias = cupy.asarray(np.where(chosen, high, others).astype(wide))
    count = chosen.sum(-1, keepdims=True)
    weights = chosen / count
    right = np.einsum("bhij,bjhd->bihd", weights, v.astype(np.float64))
    rounded = weights.astype(real).astype(wide)
    naive = np.einsum("bhij,bjhd->bihd", rounded, v.astype(wide)).astype(real)
    bound = error_bound(naive, right, real, lse=np.log(count))
    limit = float(np.finfo(wide).max) * np.log(2)
    largest = np.clip(high, -limit, limit)
    for family in ("hopper", "mma", "simt", "decode", "naive", None):
        poisoned = cupy.full(q.shape, np.nan, real)
        options = {"bias": bias, "family": family, "return_lse": True, "out": poisoned}
        try:
            made = plan(flash_attention, *arrays, **options)
        except UnsupportedError:
            assert family is not None
            continue
        is_split = made.schedule.split.parts > 1
        assert is_split or family not in ("hopper", "mma", "simt") or seqlen_q > 20, made
        out, lse = flash_attention(*arrays, **options)
        assert max_error(out.get(), right) <= bound, family
        np.testing.assert_allclose(
            lse.get(), largest + np.log(count)[..., 0], rtol=1e-6, err_msg=str(family)
        )


@pytest.mark.parametrize("sink", [-np.inf, -1e10, -1e9, 0.0])
@pytest.mark.parametrize("kind", ["dense", "varlen", "kvcache"])
def test_rows_of_low_scores_beside_a_sink(kind: str, sink: float, rng: np.random.Generator) -> None:
    call = padded_call(rng, "bfloat16", kind, -1e9)
    call.arrays["sinks"] = np.full(call.arrays["q"].shape[-2], sink, np.float32)
    for family in ("hopper", None):
        try:
            check_with_and_without_lse(call, family=family)
        except UnsupportedError:
            assert family is not None


def test_rows_of_low_scores_are_found_at_each_replay_of_a_graph(rng: np.random.Generator) -> None:
    """A replay resets the counters, and the next one finds rows that were not low before."""
    real = DTYPES["bfloat16"]
    q, k, v = (cupy.asarray(rng.standard_normal((1, 300, 2, 64)).astype(real)) for _ in range(3))
    bias = cupy.zeros((1, 1, 300, 300), np.float32)
    out = cupy.empty_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        options = {"bias": bias, "out": out, "family": "hopper"}
        graph, _ = capture_call(stream, flash_attention, q, k, v, **options)
    for rows in (slice(0, 0), slice(40, 90), slice(0, 0), slice(299, 300)):
        bias[...] = 0
        bias[:, :, rows] = -1e9
        out[...] = np.nan
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        arrays = {"q": q.get(), "k": k.get(), "v": v.get(), "bias": bias.get()}
        call = ModifiedCall("dense", "bfloat16", arrays, {})
        _, lse = call.run(cupy)
        call.compare(out.get(), lse)
