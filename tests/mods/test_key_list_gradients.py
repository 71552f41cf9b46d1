"""Gradients of attention to listed keys."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from support.calls.key_list_calls import KeyListCall, random_call
from support.comparisons import with_arrays

import cupy_flash
from cupy_flash import UnsupportedError, flash_attention, flash_attention_backward
from cupy_flash.calls.key_lists import backward as key_list_gradients
from cupy_flash.calls.key_lists import fold
from cupy_flash.reference import gradients as dense
from cupy_flash.reference import packed_gradients as packed

KINDS = ("dense", "bhsd", "padded", "varlen")
INPUTS = ("q", "k", "v")


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> Any:
    """Module of an array library, NumPy or CuPy."""
    return importlib.import_module(request.param)


def on_host(array: Any) -> np.ndarray:
    host: np.ndarray = array.get() if hasattr(array, "get") else array
    return host


def check(call: KeyListCall, xp: Any, rng: np.random.Generator, **options: Any) -> None:
    """Fail unless the gradients of a call obey the error rule."""
    is_packed = call.function is not flash_attention
    module = packed if is_packed else dense
    names = (
        "attention_varlen_backward_reference",
        "backward_varlen_naive",
        "gradient_varlen_sizes",
    )
    if not is_packed:
        names = ("attention_backward_reference", "backward_naive", "gradient_sizes")
    reference, naive, sizes = (getattr(module, name) for name in names)
    given = call.arguments | {"key_indices": call.key_indices}
    q = given["q"]
    on_device = with_arrays(xp.asarray, given)
    out, lse = call.function(**on_device, return_lse=True)
    dout = rng.standard_normal(out.shape).astype(q.dtype)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype) if rng.random() < 0.5 else None
    others = {name: x for name, x in on_device.items() if name not in INPUTS}
    backward = flash_attention_backward
    if is_packed:
        backward = cupy_flash.flash_attention_varlen_backward
    rows = [on_device[name] for name in INPUTS]
    found = backward(
        *(xp.asarray(dout), *rows, out, lse),
        dlse=None if dlse is None else xp.asarray(dlse),
        **options,
        **others,
    )
    plain = {name: x for name, x in given.items() if name not in INPUTS} | {"dlse": dlse}
    inputs = dout, *(given[name] for name in INPUTS)
    exact = reference(*inputs, **plain)
    rough = naive(*inputs, out=on_host(out), **plain)
    terms = sizes(*inputs, **plain)
    lse_exact = on_host(lse).astype(np.float64)
    for name, gradient, right, near, size in zip(INPUTS, found, exact, rough, terms, strict=True):
        host = on_host(gradient)
        assert host.dtype == (options.get("grad_dtype") or given[name].dtype)
        bound = dense.gradient_bound(near, right, size, q.dtype, lse=lse_exact, result=host.dtype)
        # Rows of padding hold NaN, and have no gradient.
        assert np.abs(host.astype(np.float64) - right).max(initial=0) <= bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(6))
def test_random_calls_obey_the_error_rule(
    number: int, kind: str, xp: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    if number % 2:
        # Few queries at a time.
        monkeypatch.setattr(key_list_gradients, "_CHUNK_BYTES", 1 << 14)
    kernels = int(rng.integers(2**32))
    for _ in range(40 if xp is not np else 2):
        call = random_call(rng, kind, choices=np.random.default_rng(kernels))
        check(call, xp, rng)


def test_gradients_in_float32(xp: Any, rng: np.random.Generator) -> None:
    compared = 0
    while compared < 3:
        call = random_call(rng, "dense")
        if call.arguments["q"].dtype.itemsize == 2:
            check(call, xp, rng, grad_dtype=np.float32)
            compared += 1


def arrays(xp: Any = np) -> tuple[Any, ...]:
    """Return q, k, v, lists with repeated keys, dout, out and lse."""
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((2, n, 2, 8)) for n in (3, 9, 9, 3))
    lists = rng.integers(-1, 9, (2, 3, 1, 12)).astype(np.int32)
    q, k, v, lists, dout = map(xp.asarray, (q, k, v, lists, dout))
    out, lse = flash_attention(q, k, v, key_indices=lists, return_lse=True)
    return q, k, v, lists, dout, out, lse


def test_finite_differences_agree() -> None:
    q, k, v, lists, dout, out, lse = arrays()
    found = flash_attention_backward(dout, q, k, v, out, lse, key_indices=lists)
    step = 1e-6
    for index, gradient in enumerate(found):
        direction = np.random.default_rng(index).standard_normal(gradient.shape)
        ends = []
        for sign in (1, -1):
            moved = [q, k, v]
            moved[index] = moved[index] + sign * step * direction
            ends.append((flash_attention(*moved, key_indices=lists) * dout).sum())
        assert abs((ends[0] - ends[1]) / (2 * step) - (gradient * direction).sum()) < 1e-7


def test_the_same_call_gives_the_same_bits(xp: Any) -> None:
    q, k, v, lists, dout, out, lse = arrays(xp)
    first = flash_attention_backward(dout, q, k, v, out, lse, key_indices=lists)
    for _ in range(3):
        again = flash_attention_backward(dout, q, k, v, out, lse, key_indices=lists)
        for one, other in zip(first, again, strict=True):
            assert on_host(one).tobytes() == on_host(other).tobytes()


def test_gradients_are_written_to_given_arrays(xp: Any) -> None:
    q, k, v, lists, dout, out, lse = arrays(xp)
    expected = flash_attention_backward(dout, q, k, v, out, lse, key_indices=lists, wrt=("k", "q"))
    dk = xp.full((2, 9, 4, 8), np.nan)[:, :, ::2]
    found = flash_attention_backward(
        *(dout, q, k, v, out, lse), key_indices=lists, wrt=("k", "q"), dk=dk
    )
    assert found[0] is dk
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(on_host(one), on_host(other))


def test_calls_without_queries_or_keys_have_gradients_of_zero(xp: Any) -> None:
    q, k, v, lists, dout, out, lse = arrays(xp)
    for rows, listed in (
        ((dout[:, :0], q[:, :0], k, v, out[:, :0], lse[..., :0]), lists[:, :0]),
        ((dout, q, k, v, 0 * out, xp.full_like(lse, -np.inf)), lists[..., :0]),
        ((dout, q, k[:, :0], v[:, :0], 0 * out, xp.full_like(lse, -np.inf)), lists),
    ):
        for gradient, like in zip(
            flash_attention_backward(*rows, key_indices=listed), rows[1:4], strict=True
        ):
            assert gradient.shape == like.shape
            assert not on_host(gradient).any()


def test_only_q_k_and_v_have_gradients() -> None:
    q, k, v, lists, dout, out, lse = arrays()
    with pytest.raises(UnsupportedError, match=r"wrt names 'sinks'; with key_indices expected"):
        flash_attention_backward(
            *(dout, q, k, v, out, lse), key_indices=lists, sinks=np.zeros(2), wrt=("q", "sinks")
        )


def test_lists_of_each_kv_head_take_one_call(
    xp: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    q, k, v, dout = (
        xp.asarray(rng.standard_normal((2, n, heads, 8)))
        for n, heads in ((3, 4), (9, 2), (9, 2), (3, 4))
    )
    lists = xp.asarray(rng.integers(-1, 9, (2, 3, 2, 12)).astype(np.int32))
    options = {"key_indices": lists, "bias": xp.asarray(rng.standard_normal((1, 4, 3, 9)))}
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    calls = []
    run = key_list_gradients.dispatch_backward.gradients
    monkeypatch.setattr(
        key_list_gradients.dispatch_backward,
        "gradients",
        lambda *x: calls.append(x) or run(*x),
    )
    found = flash_attention_backward(dout, q, k, v, out, lse, **options)
    assert len(calls) == 1
    monkeypatch.setattr(fold, "_can_fold", lambda _: False)
    expected = flash_attention_backward(dout, q, k, v, out, lse, **options)
    assert len(calls) == 3
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(on_host(one), on_host(other), rtol=0, atol=1e-13)


def test_a_bias_of_packed_queries_in_several_passes(
    xp: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(key_list_gradients, "_CHUNK_BYTES", 1)
    q, k, v, dout = (rng.standard_normal((n, 2, 8)) for n in (6, 18, 18, 6))
    ends = [0, 3, 6], [0, 9, 18], 3, 9
    given = {
        "key_indices": rng.integers(-1, 9, (6, 1, 12)).astype(np.int32),
        "bias": rng.standard_normal((2, 6, 9)),
    }
    expected = cupy_flash.attention_varlen_backward_reference(dout, q, k, v, *ends, **given)
    q, k, v, dout = map(xp.asarray, (q, k, v, dout))
    given = with_arrays(xp.asarray, given)
    results = cupy_flash.flash_attention_varlen(q, k, v, *ends, return_lse=True, **given)
    found = cupy_flash.flash_attention_varlen_backward(dout, q, k, v, *results, *ends, **given)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(on_host(one), on_host(other), rtol=0, atol=1e-12)


def test_pullback_functions_take_lists(xp: Any) -> None:
    q, k, v, lists, dout, out, lse = arrays(xp)
    expected = flash_attention_backward(dout, q, k, v, out, lse, key_indices=lists)
    again, pullback = cupy_flash.flash_attention_vjp(q, k, v, key_indices=lists)
    np.testing.assert_array_equal(on_host(again), on_host(out))
    for one, other in zip(pullback(dout), expected, strict=True):
        np.testing.assert_array_equal(on_host(one), on_host(other))
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v, lists, dout)]
    ends = [0, 3, 6], [0, 9, 18], 3, 9
    again, pullback = cupy_flash.flash_attention_varlen_vjp(
        *packed[:3], *ends, key_indices=packed[3]
    )
    for one, other in zip((again, *pullback(packed[4])), (out, *expected), strict=True):
        np.testing.assert_allclose(
            on_host(one), on_host(other).reshape(one.shape), rtol=0, atol=1e-13
        )
