"""Gradients of the reference, compared with difference quotients, and edge cases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.comparisons import assert_all_close, assert_all_equal
from support.foreign import Foreign
from support.gradients.gradient_calls import (
    KINDS,
    OF_MOD,
    GradientCall,
    random_gradient_call,
    smooth_gradient_call,
)

from cupy_flash import ScoreMod, attention_backward_reference, attention_varlen_backward_reference
from cupy_flash.reference import rows

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
# Step of the difference quotients.
STEP = 1e-4


def with_input(call: GradientCall, name: str, array: np.ndarray) -> GradientCall:
    """Return the call with another array."""
    forward = call.forward
    if name.startswith(OF_MOD):
        mod, captures = forward.mods["score_mod"]
        mods = forward.mods | {"score_mod": (mod, captures | {name.removeprefix(OF_MOD): array})}
        forward = dataclasses.replace(forward, mods=mods)
    else:
        forward = dataclasses.replace(forward, arrays=forward.arrays | {name: array})
    return dataclasses.replace(call, forward=forward)


def terms(call: GradientCall) -> np.ndarray:
    """Return the terms whose sum is the number that is differentiated."""
    out, lse = call.exact_results()
    found = [(call.dout * out).ravel()]
    if call.dlse is not None:
        found.append((call.dlse * np.where(np.isfinite(lse), lse, 0)).ravel())
    return np.nan_to_num(np.concatenate(found))


def quotient(call: GradientCall, name: str, direction: np.ndarray, step: float) -> float:
    """Return the difference quotient of the sum of `terms` along a direction in one input."""
    ends = (with_input(call, name, call.inputs[name] + x * direction) for x in (step, -step))
    with np.errstate(invalid="ignore"):
        above, below = (terms(end) for end in ends)
    return math.fsum(above - below) / (2 * step)


def check_by_differences(call: GradientCall, rng: np.random.Generator) -> None:
    """Compare gradients with difference quotients along a random direction in each input."""
    call.wrt = tuple(call.inputs)
    size = float(np.abs(terms(call)).sum())
    for name, gradient in call.truth.exact.items():
        assert gradient.shape == call.inputs[name].shape
        assert np.isfinite(gradient).all(), f"d{name}: {call}"
        direction = rng.standard_normal(gradient.shape)
        wide, narrow = (quotient(call, name, direction, step) for step in (STEP, STEP / 2))
        # Richardson extrapolation leaves an error of the fourth power of the step, below 1% of its
        # correction. Terms also have errors of some 50 ulps, divided by twice the step.
        expected = narrow + (narrow - wide) / 3
        allowed = abs(narrow - wide) / 100 + 50 * 2.0**-52 * max(size, 1.0) / STEP
        found = float((gradient * direction).sum())
        assert abs(found - expected) <= allowed, (
            f"d{name} along a direction is {found:.12g}, by differences {expected:.12g}, allowed "
            f"{allowed:.3g}: {call}"
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(30))
def test_gradients_are_what_differences_say(kind: str, number: int, rng: Any) -> None:
    check_by_differences(smooth_gradient_call(rng, kind), rng)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks", "score_mod.gain"])
def test_differences_tell_gradients_apart_that_are_almost_right(name: str, rng: Any) -> None:
    call = smooth_gradient_call(rng, "dense")
    while name not in call.inputs or np.abs(exact_gradient(call, name)).max(initial=0) < 0.1:
        call = smooth_gradient_call(rng, "dense")
    exact = call.truth.exact[name]
    exact.flat[np.abs(exact).argmax()] *= 1 + 1e-5
    with pytest.raises(AssertionError, match=f"d{name} along a direction"):
        check_by_differences(call, rng)


def exact_gradient(call: GradientCall, name: str) -> np.ndarray:
    call.wrt = tuple(call.inputs)
    return call.truth.exact[name]


# P, dX, the output that D is made of, and the result each have errors of half of eps. Below the
# smallest normal number, errors are half of the smallest subnormal number.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("number", range(4))
def test_the_naive_formula_is_off_by_its_roundings(
    kind: str, dtype: str, number: int, rng: Any
) -> None:
    call = random_gradient_call(rng, dtype, kind, head_dims=(8, 40), longest=(20, 50))
    call.wrt = tuple(call.inputs)
    compute = np.finfo(np.float32).eps * (4 + 2 * np.abs(finite(call.truth.lse)).max(initial=0))
    for name, exact in call.truth.exact.items():
        stored = ml_dtypes.finfo(call.forward.arrays["q"].dtype)
        result = ml_dtypes.finfo(call.dtype_of(name))
        eps = 1.5 * float(stored.eps) + 0.5 * float(result.eps) + compute
        size = call.truth.sizes[name].max(initial=0)
        tiny = 4 * 150 * float(stored.smallest_subnormal) if dtype == "float16" else 0
        allowed = eps * size + tiny + call.truth.score_errors[name].max(initial=0)
        error = np.abs(call.truth.naive[name].astype(np.float64) - exact).max(initial=0)
        assert error <= allowed, f"d{name} is off by {error:.3g}, allowed {allowed:.3g}: {call}"


def finite(x: np.ndarray) -> np.ndarray:
    return x[np.isfinite(x)]


# ---- Edge cases


def random_arrays(
    rng: np.random.Generator, seqlens: tuple[int, int] = (11, 23), dtype: Any = np.float64
) -> list[np.ndarray]:
    """Return dout, q, k and v: batch 2, 4 query heads, 2 KV heads, head dims 8 and 5."""
    shapes = [(seqlens[0], 4, 5), (seqlens[0], 4, 8), (seqlens[1], 2, 8), (seqlens[1], 2, 5)]
    return [rng.standard_normal((2, *shape)).astype(dtype) for shape in shapes]


def gain(rng: np.random.Generator) -> ScoreMod:
    return ScoreMod(
        lambda score, h, gain: gain[h] * score, gain=rng.random(4), differentiable=["gain"]
    )


def test_what_is_hidden_leaves_no_trace_and_gets_nothing(rng: Any) -> None:
    dout, q, k, v = random_arrays(rng)
    # The first rows attend to no key, no row to key 7, and only the last row to key 9.
    mask = rng.random((11, 23)) < 0.7
    mask[:3] = mask[:, 7] = mask[:-1, 9] = False
    mask[-1, 9] = True
    bias = rng.standard_normal((2, 4, 11, 23))
    options = {"mask": mask, "score_mod": gain(rng)}
    wrt = ("q", "k", "v", "bias", "score_mod.gain")
    expected = attention_backward_reference(dout, q, k, v, bias=bias, wrt=wrt, **options)
    for array in (dout, q):
        array[:, :3] = rng.choice([np.nan, np.inf])
    k[:, 7] = v[:, 7] = rng.choice([np.nan, -np.inf])
    bias[..., ~mask] = np.nan
    found = attention_backward_reference(dout, q, k, v, bias=bias, wrt=wrt, **options)
    assert_all_close(found, expected, rtol=1e-12, atol=1e-14)
    dq, dk, dv, dbias, _ = found
    assert not dq[:, :3].any()
    assert not dk[:, 7].any()
    assert not dv[:, 7].any()
    assert not dbias[..., ~mask].any()
    # Key 9, to which only the last row attends, changes only that row's gradient.
    v[:, 9] = np.nan
    dq = attention_backward_reference(dout, q, k, v, bias=bias, wrt=["q"], **options)[0]
    assert np.isfinite(dq[:, :-1]).all()
    assert np.isnan(dq[:, -1]).all()


def test_without_rows_or_keys_gradients_are_zeros(rng: Any) -> None:
    for seqlens in ((0, 23), (11, 0), (0, 0)):
        found = attention_backward_reference(*random_arrays(rng, seqlens), causal=True)
        assert [x.shape[1] for x in found] == [seqlens[0], seqlens[1], seqlens[1]]
        assert not any(x.any() for x in found)


def test_the_gradient_of_lse_reaches_a_sink_through_rows_that_see_nothing(rng: Any) -> None:
    dout, q, k, v = random_arrays(rng)
    dlse = rng.standard_normal((2, 4, 11))
    options = {"mask": np.zeros((1, 1), bool), "sinks": rng.standard_normal(4), "dlse": dlse}
    dq, dsinks = attention_backward_reference(dout, q, k, v, wrt=["q", "sinks"], **options)
    np.testing.assert_allclose(dsinks, dlse.sum(axis=(0, 2)), rtol=1e-13)
    assert not dq.any()


@pytest.mark.parametrize("chunk_bytes", [1, 8 * 23 * 4])
def test_chunks_do_not_change_gradients(monkeypatch: Any, chunk_bytes: int, rng: Any) -> None:
    arrays, options = random_arrays(rng), {"causal": True, "score_mod": gain(rng)}
    whole = attention_backward_reference(*arrays, **options)
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk_bytes)
    found = attention_backward_reference(*arrays, **options)
    assert_all_close(found, whole, rtol=1e-12, atol=1e-14)


def test_bhsd_is_bshd_with_the_axes_swapped(rng: Any) -> None:
    arrays = random_arrays(rng)
    swapped = [x.swapaxes(1, 2).copy() for x in arrays]
    found = attention_backward_reference(*swapped, layout="bhsd", causal=True)
    expected = attention_backward_reference(*arrays, causal=True)
    assert_all_equal(found, (x.swapaxes(1, 2) for x in expected))


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float_dtype_is_computed_in_float64(dtype: Any, rng: Any) -> None:
    arrays = random_arrays(rng, dtype=dtype)
    found = attention_backward_reference(*arrays)
    expected = attention_backward_reference(*(x.astype(np.float64) for x in arrays))
    assert all(gradient.dtype == np.float64 for gradient in found)
    assert_all_equal(found, expected)


def test_arrays_of_other_libraries_come_back_as_theirs(rng: Any) -> None:
    arrays = random_arrays(rng)
    found = attention_backward_reference(*map(Foreign, arrays))
    assert all(type(gradient) is Foreign for gradient in found)
    assert_all_equal((x.array for x in found), attention_backward_reference(*arrays))


def test_packed_sequences_have_the_gradients_that_each_has(rng: Any) -> None:
    starts_q, starts_k = np.array([0, 4, 4, 11]), np.array([0, 9, 14, 23])
    dout, q, k, v = (np.concatenate([x[0], x[1, :2]]) for x in random_arrays(rng))
    for array in (dout, q, k, v):
        array[-2:] = np.nan
    lengths = (starts_q, starts_k, 7, 9)
    found = attention_varlen_backward_reference(dout, q, k, v, *lengths, causal=True)
    expected = [np.zeros(x.shape) for x in (q, k, v)]
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        queries, keys = slice(q0, q1), slice(k0, k1)
        one = dout[None, queries], q[None, queries], k[None, keys], v[None, keys]
        dq, dk, dv = attention_backward_reference(*one, causal=True)
        expected[0][queries], expected[1][keys], expected[2][keys] = dq[0], dk[0], dv[0]
    assert_all_equal(found, expected)


def test_gradients_come_in_the_order_that_is_asked_for(rng: Any) -> None:
    arrays = random_arrays(rng)
    options = {"score_mod": gain(rng), "sinks": rng.standard_normal(4)}
    dq, dk, dv, dgain = attention_backward_reference(*arrays, **options)
    wrt = ("score_mod.gain", "v", "sinks", "q")
    of_gain, of_v, of_sinks, of_q = attention_backward_reference(*arrays, wrt=wrt, **options)
    assert_all_equal((of_gain, of_v, of_q), (dgain, dv, dq))
    assert of_sinks.shape == (4,)
    assert attention_backward_reference(*arrays, wrt=()) == ()
    assert_all_equal(attention_backward_reference(*arrays, wrt=["k"], **options)[:1], [dk])


def test_what_has_no_gradient_is_refused(rng: Any) -> None:
    dout, q, k, v = arrays = random_arrays(rng)
    with pytest.raises(TypeError, match=r"one name; expected a sequence of names: \('q',\)"):
        attention_backward_reference(*arrays, wrt="q")
    for name in ("sinks", "mask", "score_mod.gain"):
        with pytest.raises(ValueError, match=f"wrt names '{name}'; expected some of q, k, v, "):
            attention_backward_reference(*arrays, wrt=[name])
    with pytest.raises(ValueError, match="wrt names 'q' 2 times"):
        attention_backward_reference(*arrays, wrt=["q", "v", "q"])
    with pytest.raises(ValueError, match="dout has shape"):
        attention_backward_reference(dout[..., 1:], q, k, v)
    with pytest.raises(ValueError, match="dlse has shape"):
        attention_backward_reference(*arrays, dlse=np.zeros((2, 11, 4)))
    with pytest.raises(TypeError, match="dout"):
        attention_backward_reference(None, q, k, v)
