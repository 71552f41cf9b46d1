"""Dropout of public calls: the mask that they apply, its seed, and calls that refuse it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.gpu import fake_gpu

from cupy_flash import (
    UnsupportedError,
    attention_reference,
    attention_with_kvcache_reference,
    dropout_mask,
    flash_attention,
    flash_attention_backward,
    flash_attention_qkvpacked,
    flash_attention_qkvpacked_vjp,
    flash_attention_varlen,
    flash_attention_varlen_vjp,
    flash_attention_vjp,
    flash_attention_with_kvcache,
    parallel,
    plan,
    scaled_dot_product_attention,
)
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.calls.host import forward as host_forward

P, SEED = 0.3, [2**40 + 3, -7]
DROPOUT = {"dropout_p": P, "dropout_seed": SEED}
DROPPED = round(256 * P) / 256
BATCH, HEADS, ROWS, KEYS = 2, 4, 45, 70


def arrays(rng: np.random.Generator, dim: int = 8) -> tuple[np.ndarray, ...]:
    q = rng.standard_normal((BATCH, ROWS, HEADS, dim))
    return q, *rng.standard_normal((2, BATCH, KEYS, 2, dim))


def applied(out: np.ndarray) -> np.ndarray:
    """Return the mask that a call applied, whose scores were 0 and whose values a unit matrix.

    The axes of out are (..., rows, heads, keys), and those of the result (..., heads, rows, keys).
    """
    weights = out.swapaxes(-3, -2) * KEYS * (1 - DROPPED)
    np.testing.assert_allclose(weights, weights.round(), atol=1e-9)
    kept: np.ndarray = weights.round().astype(bool)
    return kept


def unit_values(*outer: int) -> np.ndarray:
    return np.broadcast_to(np.eye(KEYS)[:, None], (*outer, KEYS, HEADS, KEYS))


@pytest.fixture(scope="module")
def mask() -> np.ndarray:
    found: np.ndarray = dropout_mask(BATCH, HEADS, ROWS, KEYS, P, SEED)
    return found


@pytest.mark.parametrize("tile", [(1, 1), (7, 13), (16, 16), (45, 70), (200, 300)])
def test_every_tile_applies_the_mask(tile: tuple[int, int], mask: np.ndarray) -> None:
    q, k = np.zeros((BATCH, ROWS, HEADS, 8)), np.zeros((BATCH, KEYS, HEADS, 8))
    out, lse = flash_attention(q, k, unit_values(BATCH), tile=tile, return_lse=True, **DROPOUT)
    np.testing.assert_array_equal(applied(out), mask)
    # The log-sum-exp is that of all weights.
    np.testing.assert_allclose(lse, np.log(KEYS))
    swapped = (x.swapaxes(1, 2) for x in (q, k, unit_values(BATCH)))
    out = flash_attention(*swapped, layout="bhsd", tile=tile, **DROPOUT)
    np.testing.assert_array_equal(applied(out.swapaxes(1, 2)), mask)


@pytest.mark.parametrize("how", [{}, {"tile": (7, 13)}, {"batch_invariant": True}])
def test_packed_sequences_have_the_same_mask(how: dict[str, Any], mask: np.ndarray) -> None:
    counts = np.array([ROWS, 19])
    starts, lengths = np.concatenate([[0], np.cumsum(counts)]), np.arange(BATCH + 1) * KEYS
    q, k = np.zeros((counts.sum(), HEADS, 8)), np.zeros((BATCH * KEYS, HEADS, 8))
    values = np.concatenate([unit_values()] * BATCH)
    out = flash_attention_varlen(q, k, values, starts, lengths, ROWS, KEYS, **how, **DROPOUT)
    for b, part in enumerate(np.split(out, starts[1:-1])):
        np.testing.assert_array_equal(applied(part), mask[b, :, : counts[b]])


def test_modifications_do_not_change_the_mask(mask: np.ndarray) -> None:
    q, k = np.zeros((BATCH, ROWS, HEADS, 8)), np.zeros((BATCH, KEYS, HEADS, 8))
    out = flash_attention(
        *(q, k, unit_values(BATCH)), causal=True, window_size=(20, 0), q_offset=9, **DROPOUT
    )
    kept = (out != 0).swapaxes(1, 2)
    position, key = np.arange(ROWS)[:, None] + 9, np.arange(KEYS)
    visible = (key <= position) & (key >= position - 20)
    np.testing.assert_array_equal(kept, mask & visible)


def test_any_form_of_the_seed_gives_the_same_bits(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng)
    expected = flash_attention(q, k, v, dropout_p=P, dropout_seed=9)
    for seed in (np.int32(9), [9, 0], (9, 0), np.array([9, 0]), np.array([9, 0], np.uint16)):
        found = flash_attention(q, k, v, dropout_p=P, dropout_seed=seed)
        np.testing.assert_array_equal(found, expected)
    other = flash_attention(q, k, v, dropout_p=P, dropout_seed=[9, 1])
    assert not np.array_equal(other, expected)


@pytest.mark.parametrize("nothing", [{"dropout_p": 0}, {"dropout_p": 0.0, "dropout_seed": "any"},
                                     {"dropout_seed": 3}, {"dropout_p": None}])  # fmt: skip
def test_no_dropout_is_a_call_without_it(nothing: dict[str, Any], rng: np.random.Generator) -> None:
    q, k, v = arrays(rng)
    plain = flash_attention(q, k, v)
    known = len(host_forward._calls)
    np.testing.assert_array_equal(flash_attention(q, k, v, **nothing), plain)
    assert len(host_forward._calls) == known
    half = [x.astype(np.float16) for x in (q, k, v)]
    for arch in (None, "sm_90"):
        backend = "auto" if arch else "cpu"
        made = [
            plan(flash_attention, *half, backend=backend, arch=arch, **x) for x in ({}, nothing)
        ]
        assert made[0] == made[1]


def test_seeds_are_not_part_of_a_cache_key(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng)
    flash_attention(q, k, v, dropout_p=P, dropout_seed=1)
    known = len(host_forward._calls)
    for seed in (2, [3, 4], np.array([5, 6])):
        flash_attention(q, k, v, dropout_p=P, dropout_seed=seed)
    assert len(host_forward._calls) == known


def test_calls_on_a_gpu_are_prepared_once_for_all_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_gpu.install(monkeypatch)
    q = gpu.array(2, 64, 4, 64)
    seeds = [gpu.array(2, dtype=np.int64) for _ in range(3)]
    # Calls with integers, which are copied to the GPU, take another path.
    for count, same in enumerate((seeds, (5, [6, 7])), 1):
        for seed in same:
            flash_attention(q, q, q, dropout_p=P, dropout_seed=seed)
            assert len(prepared_calls._calls) == count
    flash_attention(q, q, q, dropout_p=0.5, dropout_seed=seeds[0])
    assert len(prepared_calls._calls) == 3


def test_the_seed_is_read_when_the_call_runs(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng)
    state = np.array([1, 0])
    first = flash_attention(q, k, v, dropout_p=P, dropout_seed=state)
    state += (0, 1)
    second = flash_attention(q, k, v, dropout_p=P, dropout_seed=state)
    np.testing.assert_array_equal(
        second, flash_attention(q, k, v, dropout_p=P, dropout_seed=[1, 1])
    )
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.999999])
def test_probabilities_are_multiples_of_one_256th(p: float, rng: np.random.Generator) -> None:
    q, k, v = arrays(rng)
    threshold = {1e-9: 1, 0.3: 77, 0.999999: 255}[p]
    exact = flash_attention(q, k, v, dropout_p=threshold / 256, dropout_seed=1)
    np.testing.assert_array_equal(flash_attention(q, k, v, dropout_p=p, dropout_seed=1), exact)


def test_a_row_with_one_key_has_no_gradient_of_its_score(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((1, 64, 2, 32)).astype(np.float16) for _ in range(3))
    given = {"window_size": (0, 0), **DROPOUT}
    out, lse = flash_attention(q, k, v, return_lse=True, **given)
    kept = dropout_mask(1, 2, 64, 64, P, SEED).diagonal(axis1=2, axis2=3).swapaxes(1, 2)
    scaled = (v.astype(np.float32) / np.float32(1 - DROPPED)).astype(np.float16)
    np.testing.assert_array_equal(out, np.where(kept[..., None], scaled, 0))
    dout = rng.standard_normal(out.shape).astype(np.float16)
    for tile in (None, (16, 16)):
        dq, dk, dv = flash_attention_backward(dout, q, k, v, out, lse, tile=tile, **given)
        assert not dq.any()
        assert not dk.any()
        assert (dv[~kept] == 0).all()
        assert dv[kept].all()


def test_gradients_are_finite_differences(rng: np.random.Generator) -> None:
    q, k, v = (0.5 * x for x in arrays(rng, 4))
    given: dict[str, Any] = {"causal": True, "q_offset": 20, **DROPOUT}
    given["sinks"] = rng.standard_normal(HEADS)
    bias = rng.standard_normal((HEADS, ROWS, KEYS))
    wrt = ("q", "k", "v", "bias", "sinks")
    _, pull_back = flash_attention_vjp(q, k, v, wrt=wrt, bias=bias, return_lse=True, **given)
    dout = rng.standard_normal((*q.shape[:3], 4))
    dlse = rng.standard_normal((BATCH, HEADS, ROWS))

    def loss(moved: dict[str, np.ndarray]) -> float:
        named = {"q": q, "k": k, "v": v, "bias": bias, **given} | moved
        out, lse = flash_attention(return_lse=True, **named)
        return float((out * dout).sum() + (lse * dlse).sum())

    inputs = {"q": q, "k": k, "v": v, "bias": bias, "sinks": given["sinks"]}
    for (name, x), gradient in zip(inputs.items(), pull_back(dout, dlse=dlse), strict=True):
        step = 1e-4 * rng.standard_normal(x.shape)
        change = loss({name: x + step}) - loss({name: x - step})
        np.testing.assert_allclose(change, 2 * (gradient * step).sum(), rtol=1e-5, atol=1e-9)


def test_pullbacks_use_the_mask_of_the_forward_call(rng: np.random.Generator) -> None:
    qkv = rng.standard_normal((BATCH, ROWS, 3, HEADS, 8))
    q, k, v = (np.ascontiguousarray(x) for x in np.moveaxis(qkv, 2, 0))
    out, pull_back = flash_attention_vjp(q, k, v, **DROPOUT)
    dout = rng.standard_normal(out.shape)
    expected = pull_back(dout)
    found, of_qkv = flash_attention_qkvpacked_vjp(qkv, **DROPOUT)
    np.testing.assert_array_equal(found, out)
    np.testing.assert_array_equal(flash_attention_qkvpacked(qkv, **DROPOUT), out)
    np.testing.assert_allclose(of_qkv(dout), np.stack(expected, 2), atol=1e-12)
    starts = np.arange(BATCH + 1) * ROWS
    rows = (x.reshape(-1, HEADS, 8) for x in (q, k, v))
    found, of_packed = flash_attention_varlen_vjp(*rows, starts, starts, ROWS, ROWS, **DROPOUT)
    np.testing.assert_allclose(found.reshape(out.shape), out, atol=1e-12)
    for gradient, right in zip(of_packed(dout.reshape(found.shape)), expected, strict=True):
        np.testing.assert_allclose(gradient.reshape(right.shape), right, atol=1e-12)


@pytest.mark.parametrize("kind", [list, np.array])
def test_pullbacks_keep_their_seed(kind: Any, rng: np.random.Generator) -> None:
    q, k, v = rng.standard_normal((3, BATCH, ROWS, HEADS, 8))
    seed = kind([3, 4])
    out, pull_back = flash_attention_vjp(q, k, v, dropout_p=P, dropout_seed=seed)
    dout = rng.standard_normal(out.shape)
    expected = pull_back(dout)
    seed[1] += 1
    for x, y in zip(pull_back(dout), expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_scaled_dot_product_attention_drops_weights(rng: np.random.Generator) -> None:
    q, k, v = (x.swapaxes(1, 2) for x in rng.standard_normal((3, BATCH, ROWS, HEADS, 8)))
    given = {"dropout_p": P, "dropout_seed": 4}
    expected = flash_attention(q, k, v, layout="bhsd", **given)
    np.testing.assert_array_equal(scaled_dot_product_attention(q, k, v, **given), expected)
    # Without a seed, each call draws its own.
    found = [scaled_dot_product_attention(q, k, v, dropout_p=P) for _ in range(2)]
    assert not np.array_equal(*found)
    plain = scaled_dot_product_attention(q, k, v)
    np.testing.assert_array_equal(scaled_dot_product_attention(q, k, v, dropout_seed=4), plain)


def test_the_reference_takes_the_same_arguments(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng)
    expected = attention_reference(q, k, v, **DROPOUT)
    np.testing.assert_allclose(flash_attention(q, k, v, **DROPOUT), expected, atol=1e-12)
    for seed in (SEED, np.array(SEED)):
        found = attention_reference(q, k, v, dropout_p=P, dropout_seed=seed)
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match=r"dropout_seed has shape \(3,\)"):
        attention_reference(q, k, v, dropout_p=P, dropout_seed=np.zeros(3, int))


def test_dropout_hides_no_values(rng: np.random.Generator, mask: np.ndarray) -> None:
    q, k, v = arrays(rng)
    v[:, 5] = np.nan
    # 0 * NaN is NaN: a weight that is dropped is not masked.
    assert np.isnan(flash_attention(q, k, v, **DROPOUT)).all()
    assert not mask[:, :, :, 5].all()


@pytest.mark.parametrize("function", [flash_attention_with_kvcache,
                                      attention_with_kvcache_reference])  # fmt: skip
def test_caches_refuse_dropout(function: Any, rng: np.random.Generator) -> None:
    q, k, v = arrays(rng)
    with pytest.raises(UnsupportedError, match="not supported by calls on KV caches"):
        function(q, k, v, cache_seqlens=KEYS, **DROPOUT)
    function(q, k, v, cache_seqlens=KEYS, dropout_p=0)


def test_eight_bits_refuse_dropout() -> None:
    x = np.zeros((1, 16, 2, 16), ml_dtypes.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="not supported by calls on float8_e4m3fn arrays"):
        flash_attention(x, x, x, **DROPOUT)
    q, k, starts = x[0].astype(np.float16), x[0].astype(np.int8), np.array([0, 16])
    with pytest.raises(UnsupportedError, match="not supported by calls on int8 keys and values"):
        flash_attention_varlen(q, k, k, starts, starts, 16, 16, **DROPOUT)


def test_parallel_functions_have_no_dropout(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng)
    given: Any = {"seqlen": ROWS, **DROPOUT}
    with pytest.raises(TypeError, match="dropout_p"):
        parallel.flash_attention(q, k, v, None, **given)
