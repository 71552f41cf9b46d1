"""`return_max_logits` and `return_entropy` of NumPy calls, and of the references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES, KINDS, ModifiedCall, random_call
from support.calls.row_statistics import check, without_modifications

import cupy_flash
from cupy_flash import (
    attention_reference,
    attention_varlen_reference,
    attention_with_kvcache_reference,
    flash_attention,
    flash_attention_qkvpacked,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)
from cupy_flash.problem.tile import Tile

STATISTICS = {"return_max_logits": True, "return_entropy": True}


def rows(rng: np.random.Generator, dtype: Any = np.float32) -> list[np.ndarray]:
    shapes = (2, 11, 4, 8), (2, 300, 2, 8), (2, 300, 2, 6)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("modified", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_calls_on_the_cpu_agree_with_the_reference(
    dtype: str, kind: str, modified: bool
) -> None:
    for seed in range(6):
        rng = np.random.default_rng([seed, KINDS.index(kind), list(DTYPES).index(dtype)])
        call = random_call(rng, dtype, kind, few_rows=seed % 3 == 0, empty=seed % 2 == 0)
        call = call if modified else without_modifications(call)
        how: dict[str, Any] = {"backend": "cpu"}
        if seed % 2:
            how["tile"] = Tile(int(rng.integers(3, 60)), int(rng.integers(8, 90)))
        if kind not in ("dense", "padded") and seed % 3 == 1:
            how["batch_invariant"] = True
            call.options.pop("num_splits", None)
        check(call, np, **how)


def test_the_reference_agrees_with_the_definition(rng: np.random.Generator) -> None:
    q, k, v = rows(rng, np.float64)
    sinks, bias = rng.standard_normal(4), rng.standard_normal((2, 4, 11, 300))
    mask = rng.random((2, 4, 11, 300)) < 0.3
    mask[0, 1, 2] = False
    found = attention_reference(q, k, v, bias=bias, mask=mask, sinks=sinks, **STATISTICS)[1:]
    for b, h, i in np.ndindex(2, 4, 11):
        scores = k[b, :, h // 2] @ q[b, i, h] / np.sqrt(8) + bias[b, h, i]
        scores = scores[mask[b, h, i]]
        weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(sinks[h]))
        expected = scores.max(initial=-np.inf), -(weights * np.log(weights)).sum()
        np.testing.assert_allclose([x[b, h, i] for x in found], expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("max_logits", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_results_follow_out_in_the_documented_order(
    lse: bool, max_logits: bool, entropy: bool, rng: np.random.Generator
) -> None:
    q, k, v = rows(rng)
    flags = {"return_lse": lse, "return_max_logits": max_logits, "return_entropy": entropy}
    out, *everything = flash_attention(q, k, v, return_lse=True, **STATISTICS, backend="cpu")
    expected = [x for x, flag in zip(everything, flags.values(), strict=True) if flag]
    for function in (flash_attention, attention_reference):
        how = {"backend": "cpu"} if function is flash_attention else {}
        found = function(q, k, v, **flags, **how)
        found = found if isinstance(found, tuple) else (found,)
        assert len(found) == 1 + len(expected)
        for x, y in zip(found, (out, *expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_all_functions_return_statistics(rng: np.random.Generator) -> None:
    q, k, v = rows(rng)
    out, max_logits, entropy = flash_attention(q, k, v, **STATISTICS, backend="cpu")
    lengths = [300, 300]
    found = flash_attention_with_kvcache(
        q, k, v, cache_seqlens=lengths, **STATISTICS, backend="cpu"
    )
    for x, y in zip(found, (out, max_logits, entropy), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    starts_q, starts_k = np.array([0, 11, 22], np.int32), np.array([0, 300, 600], np.int32)
    packed = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    _, *found = flash_attention_varlen(
        *packed, starts_q, starts_k, 11, 300, **STATISTICS, backend="cpu"
    )
    for x, y in zip(found, (max_logits, entropy), strict=True):
        np.testing.assert_allclose(x, np.concatenate(list(y), axis=-1), rtol=1e-4, atol=1e-5)
    qkv = np.stack([q, q, q], axis=-3)
    results = flash_attention_qkvpacked(qkv, **STATISTICS, backend="cpu")
    expected = flash_attention(q, q, q, **STATISTICS, backend="cpu")
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_statistics_have_the_layout_and_batch_axes_of_lse(rng: np.random.Generator) -> None:
    q, k, v = rows(rng)
    expected = flash_attention(q, k, v, **STATISTICS, backend="cpu")[1:]
    swapped = (x.swapaxes(1, 2) for x in (q, k, v))
    found = flash_attention(*swapped, layout="bhsd", **STATISTICS, backend="cpu")[1:]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    found = flash_attention(q[0], k[0], v[0], **STATISTICS, backend="cpu")[1:]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile", [None, Tile(4, 16)])
def test_rows_without_keys_and_with_one_key(tile: Tile | None, rng: np.random.Generator) -> None:
    q, k, v = rows(rng)
    _, max_logits, entropy = flash_attention(
        q, k[:, :9], v[:, :9], causal=True, **STATISTICS, tile=tile, backend="cpu"
    )
    assert (max_logits[:, :, :2] == -np.inf).all()
    assert (entropy[:, :, :3] == 0).all()
    scores = np.einsum("bhd,bhd->bh", q[:, 2], k[:, 0].repeat(2, axis=1)) / np.sqrt(8)
    np.testing.assert_allclose(max_logits[:, :, 2], scores, rtol=1e-5, atol=1e-6)
    assert (entropy[:, :, 3:] > 0).all()


@pytest.mark.parametrize("tile", [None, Tile(4, 16)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_statistics_are_nan_where_lse_is(
    value: float, tile: Tile | None, rng: np.random.Generator
) -> None:
    q, k, v = rows(rng)
    q[0, 3, 1] = value
    results = flash_attention(q, k, v, return_lse=True, **STATISTICS, tile=tile, backend="cpu")
    is_nan = np.isnan(results[1])
    assert is_nan.sum() == 1
    for array in results[2:]:
        np.testing.assert_array_equal(np.isnan(array), is_nan)


def test_equal_scores_have_the_entropy_of_a_uniform_distribution(
    rng: np.random.Generator,
) -> None:
    q, k, v = rows(rng)
    sinks = np.zeros(4, np.float32)
    options = {"return_entropy": True, "backend": "cpu"}
    for tile in (None, Tile(4, 16)):
        _, entropy = flash_attention(q, 0 * k, v, tile=tile, **options)
        np.testing.assert_allclose(entropy, np.log(300), rtol=1e-6)
        _, entropy = flash_attention(q, 0 * k, v, sinks=sinks, tile=tile, **options)
        np.testing.assert_allclose(entropy, 300 / 301 * np.log(301), rtol=1e-6)


def test_repeated_small_calls_return_statistics(rng: np.random.Generator) -> None:
    q = rng.standard_normal((1, 4, 2, 8)).astype(np.float32)
    first = flash_attention(q, q, q, **STATISTICS, backend="cpu")
    assert flash_attention(q, q, q, backend="cpu").shape == q.shape
    for _ in range(2):
        again = flash_attention(q, q, q, **STATISTICS, backend="cpu")
        for x, y in zip(again, first, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("value", [1, "yes", None, np.ones(2)])
def test_arguments_other_than_bools_are_refused(
    name: str, value: Any, rng: np.random.Generator
) -> None:
    q, k, v = rows(rng)
    with pytest.raises(TypeError, match=f"{name} is .*; expected True or False"):
        flash_attention(q, k, v, **{name: value})


@pytest.mark.parametrize("rows", [1, 40, 4096])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_plans_have_the_tile_and_splits_of_calls_without_statistics(rows: int, dtype: Any) -> None:
    q, k = np.empty((1, rows, 8, 128), dtype), np.empty((1, 8192, 8, 128), dtype)
    for arch in ("sm_80", "sm_90", "sm_120"):
        plain = cupy_flash.plan(flash_attention, q, k, k, arch=arch)
        made = cupy_flash.plan(flash_attention, q, k, k, arch=arch, **STATISTICS)
        assert (made.family, made.tile) == (plain.family, plain.tile)
        assert made.schedule.split == plain.schedule.split
        assert made.problem.statistics == ("max_logits", "entropy")


def test_references_of_packed_and_cached_calls_return_only_what_is_requested(
    rng: np.random.Generator,
) -> None:
    q, k, v = (x[0] for x in rows(rng))
    starts = np.array([0, 11]), np.array([0, 300])
    assert len(attention_varlen_reference(q, k, v, *starts, 11, 300)) == 2
    found = attention_varlen_reference(q, k, v, *starts, 11, 300, return_entropy=True)
    cached = (x[None] for x in (q, k, v))
    result, entropy = attention_with_kvcache_reference(
        *cached, cache_seqlens=300, return_entropy=True
    )
    np.testing.assert_array_equal(result.lse[0], found[1])
    np.testing.assert_array_equal(entropy[0], found[2])


def test_errors_of_other_functions_name_those_with_statistics(rng: np.random.Generator) -> None:
    q, _, _ = rows(rng)
    with pytest.raises(TypeError, match="it is an argument of flash_attention"):
        cupy_flash.flash_attention_vjp(q, q, q, return_entropy=True)


def test_dropout_does_not_change_statistics(rng: np.random.Generator) -> None:
    q, k, v = rows(rng)
    plain = ModifiedCall("dense", "float32", {"q": q, "k": k, "v": v}, {"causal": False})
    results = check(plain, np, backend="cpu")
    found = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=3, **STATISTICS, backend="cpu")[1:]
    for name, x in zip(("max_logits", "entropy"), found, strict=True):
        np.testing.assert_allclose(x, results[name], rtol=1e-5, atol=1e-6)
