"""`return_max_logits` and `return_entropy` on a GPU, in every family, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from support.calls.float8_support import on_device as float8_on_device
from support.calls.float8_support import random_case as random_float8_case
from support.calls.float8_support import truth_of as float8_truth
from support.calls.latent_support import LATENT, after_the_append, latent_arguments
from support.calls.modified_calls import DTYPES, KINDS, ModifiedCall, padded_call, random_call
from support.calls.quantized_support import on_device, random_quantized_case
from support.calls.row_statistics import ALL, check, compare, run, truth, without_modifications
from support.calls.sequence_support import random_kvcache_case
from support.gpu import cupy
from support.gpu.gpu_support import bits, capture_call, current_device

from cupy_flash import (
    UnsupportedError,
    attention_reference,
    attention_with_kvcache_reference,
    flash_attention,
    flash_attention_with_kvcache,
    plan,
)
from cupy_flash.families import FORWARD

pytestmark = pytest.mark.gpu

TESTS, CALLS = 80, 10
STATISTICS = {"return_max_logits": True, "return_entropy": True}


def draw(seed: int) -> tuple[ModifiedCall, str | None]:
    """Return a call, which has modifications in half of the cases, and a family or None."""
    rng = np.random.default_rng([seed, 17])
    family = str(rng.choice(["any", *FORWARD]))
    dtypes = ["float16", "bfloat16"] if family == "decode" else list(DTYPES)
    kinds = ["dense", *KINDS] if family != "naive" else ["dense"]
    few_rows = family == "decode" or rng.integers(4) == 0
    call = random_call(
        rng, str(rng.choice(dtypes)), str(rng.choice(kinds)), few_rows=few_rows, empty=seed % 3 == 0
    )
    call = call if seed % 2 else without_modifications(call)
    if call.kind not in ("dense", "padded") and "num_splits" not in call.options and seed % 5 == 0:
        call.options["num_splits"] = int(rng.integers(2, 6))
    return call, None if family == "any" else family


@pytest.mark.parametrize("test", range(TESTS))
def test_random_calls_agree_with_the_reference_in_every_family(test: int) -> None:
    for seed in range(test * CALLS, (test + 1) * CALLS):
        call, family = draw(seed)
        try:
            check(call, cupy, family=family)
        except UnsupportedError:
            # If the requested family does not support the call, another one does.
            assert family is not None
            check(call, cupy)


@pytest.mark.parametrize("family", FORWARD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_long_calls_agree_with_the_reference(
    family: str, dtype: str, causal: bool, rng: np.random.Generator
) -> None:
    rows = 4 if family == "decode" else 517
    shapes = (2, rows, 4, 128), (2, 4099, 2, 128), (2, 4099, 2, 128)
    q, k, v = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
    # Scores that rise along the keys change the base often. Negative scores are compared as floats.
    for factor, shift in ((1.0, 0.0), (4.0, 0.0), (1.0, -20.0)):
        keys = (k * factor * np.linspace(0.1, 1, 4099)[:, None, None]).astype(k.dtype)
        first = q.copy()
        if shift:
            first[..., 0], keys[..., 0] = 11.3, shift * np.abs(keys[..., 0])
        call = ModifiedCall(
            "dense", dtype, {"q": first, "k": keys, "v": v}, {"causal": causal, "q_offset": 3600}
        )
        if not causal:
            call.options.pop("q_offset")
        try:
            check(call, cupy, family=family)
        except UnsupportedError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("family", FORWARD)
def test_one_statistic_has_the_same_bits_alone_and_with_the_other(
    family: str, name: str, rng: np.random.Generator
) -> None:
    rows = 3 if family == "decode" else 300
    q, k, v = (
        cupy.asarray(rng.standard_normal((1, length, 2, 64)).astype(np.float16))
        for length in (rows, 1111, 1111)
    )
    try:
        both = flash_attention(q, k, v, **STATISTICS, family=family)
        _, alone = flash_attention(q, k, v, **{name: True}, family=family)
    except UnsupportedError as error:
        pytest.skip(str(error))
    assert cupy.array_equal(alone, both[1 + list(STATISTICS).index(name)])


@pytest.mark.parametrize("test", range(20))
def test_out_and_lse_keep_their_bits(test: int) -> None:
    for seed in range(test * 5, (test + 1) * 5):
        call, _ = draw(seed)
        positional, named = call.given(cupy)
        plain = call.function(*positional, **named, return_lse=True)
        found = run(call, cupy)
        for name, x in zip(("out", "lse"), plain, strict=True):
            # float32 calls of `mma` with entropies use another tile.
            if call.dtype != "float32":
                np.testing.assert_array_equal(bits(found[name]), bits(cupy.asnumpy(x)))


@pytest.mark.parametrize("seed", range(30))
def test_float8_calls_agree_with_the_reference(seed: int) -> None:
    if current_device().arch != 90:
        pytest.skip("float8 needs sm_90")
    case = random_float8_case(np.random.default_rng(seed))
    arguments = case.arguments()
    _, *expected = attention_reference(**arguments, **case.formula, **ALL)
    given = float8_on_device(arguments, case.alignment)
    results = flash_attention(**given, **case.formula, **ALL)
    found = [x.get() for x in results[1:]]
    names = ("lse", "max_logits", "entropy")
    rows, true = (dict(zip(names, x, strict=True)) for x in (found, expected))
    compare(rows, true, str(case), more=float8_truth(case, arguments).lse_bound)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("is_latent", [False, True])
def test_calls_on_quantized_caches_and_of_mla_agree_with_the_reference(
    seed: int, is_latent: bool
) -> None:
    rng = np.random.default_rng(seed)
    if is_latent:
        case = random_kvcache_case(rng, **LATENT, dtype="bfloat16")
        arguments = latent_arguments(case, None, "none")
    else:
        dtype = str(rng.choice(["float16", "bfloat16"]))
        arguments = random_quantized_case(rng, dtype=dtype).arguments()
    given = {name: on_device(x) for name, x in arguments.items()}
    results = flash_attention_with_kvcache(**given, **ALL)
    found = dict(zip(("lse", "max_logits", "entropy"), (x.get() for x in results[1:]), strict=True))
    if is_latent:
        arguments, _ = after_the_append(arguments)
    result, *expected = attention_with_kvcache_reference(**arguments, **STATISTICS)
    true = dict(zip(("lse", "max_logits", "entropy"), (result.lse, *expected), strict=True))
    compare(found, true, str(seed), more=1e-3)


@pytest.mark.parametrize("low", [-65504.0, -1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_rows_with_low_scores_only_have_their_statistics(low: float, kind: str) -> None:
    for seed in range(6):
        call = padded_call(np.random.default_rng(seed), "bfloat16", kind, low)
        check(call, cupy)


@pytest.mark.parametrize("family", FORWARD)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_statistics_are_nan_where_lse_is(
    family: str, value: float, rng: np.random.Generator
) -> None:
    rows = 3 if family == "decode" else 70
    q, k, v = (
        rng.standard_normal((1, length, 2, 64)).astype(np.float16) for length in (rows, 600, 600)
    )
    q[0, 1, 1] = value
    call = ModifiedCall("dense", "float16", {"q": q, "k": k, "v": v}, {"causal": False})
    try:
        found = run(call, cupy, family=family)
    except UnsupportedError as error:
        pytest.skip(str(error))
    expected = truth(call)
    for name in ("max_logits", "entropy"):
        np.testing.assert_array_equal(np.isnan(found[name]), np.isnan(found["lse"]))
        np.testing.assert_array_equal(np.isnan(found[name]), np.isnan(expected[name]))


def test_empty_caches_and_sequences_have_the_statistics_of_no_keys() -> None:
    q = cupy.ones((2, 3, 4, 64), np.float16)
    cache = cupy.ones((2, 0, 2, 64), np.float16)
    sinks = cupy.ones(4, np.float32)
    _, max_logits, entropy = flash_attention_with_kvcache(
        q, cache, cache, cache_seqlens=0, sinks=sinks, **STATISTICS
    )
    assert (max_logits == -np.inf).all()
    assert (entropy == 0).all()


def test_replays_of_captured_calls_compute_statistics_again(rng: np.random.Generator) -> None:
    q, k, v = (
        cupy.asarray(rng.standard_normal((1, 200, 2, 64)).astype(np.float16)) for _ in range(3)
    )
    with cupy.cuda.Stream(non_blocking=True) as stream:
        graph, results = capture_call(stream, flash_attention, q, k, v, **STATISTICS)
        q[...] = k
        graph.launch(stream)
        stream.synchronize()
    for x, y in zip(results, flash_attention(q, k, v, **STATISTICS), strict=True):
        assert cupy.array_equal(x, y)


def test_the_planner_keeps_its_choice() -> None:
    q = cupy.empty((2, 4096, 8, 128), np.float16)
    plain, made = plan(flash_attention, q, q, q), plan(flash_attention, q, q, q, **STATISTICS)
    assert (made.family, made.tile) == (plain.family, plain.tile)
