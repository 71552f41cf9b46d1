"""Tangents of attention, compared with difference quotients, gradients and the error rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.calls.modified_calls import DTYPES, ModifiedCall
from support.comparisons import assert_all_close, assert_all_equal, peak_memory
from support.foreign import Foreign
from support.gradients.directions import (
    STEP,
    arrays_of_rows,
    every_modification,
    largest_product,
    moved,
    moving_modifications,
    random_arrays,
    size_of,
    tangents_of,
)
from support.gradients.gradient_calls import (
    GradientCall,
    random_gradient_call,
    smooth_gradient_call,
)
from support.gradients.tangent_rule import check_packed_tangents, packed_call, tangent_sizes

import cupy_flash
from cupy_flash import (
    ScoreMod,
    attention_backward_reference,
    attention_jvp_reference,
    attention_reference,
    attention_varlen_jvp_reference,
    attention_varlen_reference,
    flash_attention_jvp,
    flash_attention_varlen_jvp,
)
from cupy_flash.reference import rows
from cupy_flash.reference.dense import error_bound, max_error

KINDS = ("dense", "padded")
FUNCTIONS = pytest.mark.parametrize("function", [attention_jvp_reference, flash_attention_jvp])


# ---- The definition


def check_by_differences(call: GradientCall, rng: np.random.Generator, find: Callable) -> None:
    """Compare out, lse and their tangents with the forward reference and its differences."""
    given, options = call.forward.given(np)
    inputs, lengths = given[:3], given[3:]
    direction, modifications = tangents_of(inputs, rng), moving_modifications(options)
    of_mods = dict(zip(modifications, tangents_of(modifications.values(), rng), strict=True))
    named = {**options, "modification_tangents": of_mods}
    results = find(*inputs, *lengths, *direction, **named, return_lse=True)
    out, out_tangent, lse, lse_tangent = results

    def forward(*inputs: np.ndarray, step: float = 0) -> tuple[np.ndarray, np.ndarray]:
        options = moved(named, of_mods, step)
        del options["modification_tangents"]
        if lengths:
            return attention_varlen_reference(*inputs, *lengths, **options)
        return attention_reference(*inputs, **options, return_lse=True)

    expected = forward(*inputs)
    scores, values = size_of(expected[1]), size_of(inputs[2])
    assert_all_close((out, lse), expected, rtol=0, atol=1e-14 * scores * values)

    def quotients(step: float) -> list[np.ndarray]:
        above, below = (
            forward(
                *(x + sign * step * t for x, t in zip(inputs, direction, strict=True)),
                step=sign * step,
            )
            for sign in (1, -1)
        )
        # The log-sum-exp of a row without keys is -inf at both ends.
        return [
            np.where(np.isfinite(x), x - y, 0) / (2 * step)
            for x, y in zip(above, below, strict=True)
        ]

    with np.errstate(invalid="ignore"):
        both = zip(quotients(STEP), quotients(STEP / 2), (out_tangent, lse_tangent), strict=True)
    for (wide, narrow, found), name in zip(both, ("out", "lse"), strict=True):
        # Richardson extrapolation leaves an error of the fourth power of the step, below 1% of
        # its correction. Results have errors of some 50 ulps, divided by twice the step.
        right = narrow + (narrow - wide) / 3
        allowed = np.abs(narrow - wide).max(initial=0) / 100
        allowed += 50 * 2.0**-52 * scores * values / STEP
        error = np.abs(found - right).max(initial=0)
        assert error <= allowed, f"tangent of {name} off by {error:.3g} > {allowed:.3g}: {call}"


@pytest.mark.parametrize("kind", [*KINDS, "varlen"])
@pytest.mark.parametrize("number", range(30))
def test_tangents_are_what_differences_say(kind: str, number: int, rng: Any) -> None:
    is_packed = kind == "varlen"
    find = attention_varlen_jvp_reference if is_packed else attention_jvp_reference
    check_by_differences(smooth_gradient_call(rng, kind), rng, find)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("number", range(3))
def test_packed_sequences_obey_the_error_rule(dtype: str, number: int, rng: Any) -> None:
    inputs, direction, lengths, options = packed_call(rng, DTYPES[dtype])
    for function in (attention_varlen_jvp_reference, flash_attention_varlen_jvp):
        results = function(*inputs, *lengths, *direction, **options, return_lse=True)
        check_packed_tangents(results, inputs, direction, lengths, options)
        for found, expected in zip(
            function(*inputs, *lengths, *direction, **options), results[:2], strict=True
        ):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("i", [1, 3])
def test_differences_tell_tangents_apart_that_are_almost_right(i: int, rng: Any) -> None:
    def find(*arrays: Any, **options: Any) -> list[np.ndarray]:
        results = list(attention_jvp_reference(*arrays, **options))
        largest.append(np.abs(results[i]).max(initial=0))
        results[i].flat[np.abs(results[i]).argmax()] *= 1 + 1e-4
        return results

    largest: list[float] = []
    while True:
        call = smooth_gradient_call(rng, "dense")
        arrays = call.forward.arrays
        if arrays["q"].size and min(arrays["k"].shape[1:3]) > 1:
            break
    # Without masks, some row attends to several keys, so that no tangent is 0 everywhere.
    names = {"causal", "softmax_scale", "layout"}
    call.forward.mods.clear()
    call.forward.options = {n: x for n, x in call.forward.options.items() if n in names}
    call.forward.options["softmax_scale"] = 0.5
    call.forward.arrays = {n: x for n, x in arrays.items() if n in "qkv"}
    with pytest.raises(AssertionError, match=r"tangent of (out|lse) off by"):
        check_by_differences(call, rng, find)
    assert largest[0] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(30))
def test_gradients_are_the_transpose_of_tangents(kind: str, number: int, rng: Any) -> None:
    call = random_gradient_call(rng, "float64", kind, head_dims=(1, 5, 24), longest=(30, 60))
    inputs, options = call.forward.given(np)
    direction = tangents_of(inputs, rng)
    results = attention_jvp_reference(*inputs, *direction, **options, return_lse=True)
    _, out_tangent, lse, lse_tangent = results
    dout, dlse = (rng.standard_normal(x.shape) for x in (out_tangent, lse_tangent))
    gradients = attention_backward_reference(
        dout, *inputs, dlse=dlse, wrt=("q", "k", "v"), **options
    )
    terms = [(dout * out_tangent).ravel(), (dlse * lse_tangent).ravel()]
    # The gradients of padding are 0, and its tangents NaN.
    pulled = [
        np.where(gradient == 0, 0, gradient * tangent).ravel()
        for gradient, tangent in zip(gradients, direction, strict=True)
    ]
    left, right = np.concatenate(terms), np.concatenate(pulled)
    size = np.abs(left).sum() + np.abs(right).sum()
    assert np.isfinite(size)
    allowed = 1e-12 * size_of(lse) * max(size, 1)
    assert abs(left.sum() - right.sum()) <= allowed, str(call)


def test_every_modification_is_part_of_the_definition(rng: Any) -> None:
    """The random calls above may lack one; this call has most of them at once."""
    q, k, v = arrays_of_rows(rng)
    options = every_modification(rng)
    call = GradientCall(ModifiedCall("dense", "float64", {"q": q, "k": k, "v": v}, options), q)
    check_by_differences(call, rng, attention_jvp_reference)
    direction = tangents_of((q, k, v), rng)
    found = attention_jvp_reference(q, k, v, *direction, **options)
    for name in options.keys() - {"dropout_seed"}:
        left = {n: x for n, x in options.items() if n != name}
        other = attention_jvp_reference(q, k, v, *direction, **left)
        assert np.abs(found[1] - other[1]).max() > 1e-3, name


# ---- Precision


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("number", range(10))
def test_results_obey_the_error_rule(dtype: str, number: int, rng: Any) -> None:
    call = random_gradient_call(rng, dtype, "dense", head_dims=(5, 24, 64), longest=(60, 90))
    inputs, options = call.forward.given(np)
    direction = tangents_of(inputs, rng)
    results = flash_attention_jvp(*inputs, *direction, **options, return_lse=True)
    exact = attention_jvp_reference(*inputs, *direction, **options, return_lse=True)
    compute = np.dtype(np.float64 if dtype == "float64" else np.float32)
    assert [x.dtype for x in results] == [inputs[0].dtype] * 2 + [compute] * 2
    call.forward.compare(results[0], results[2])
    sizes = tangent_sizes(inputs, direction, options)
    # With sinks, the scores of keys may be larger than the log-sum-exp.
    _, lse = attention_reference(*inputs, **options | {"sinks": None}, return_lse=True)
    ulps = 4 * largest_product(inputs, options) * float(np.finfo(compute).eps)
    for found, right, size in zip(results[1::2], exact[1::2], sizes, strict=True):
        # The bound is that of gradients: a few ulps of the result, and of the sum of the
        # magnitudes of its terms, which may cancel. Scores have errors of ulps of their products.
        bound = error_bound(right, right, found.dtype)
        bound += error_bound(size, size, compute, lse=lse) + ulps * size.max(initial=0)
        error = max_error(found, right)
        assert error <= bound, f"off by {error:.3g}, allowed {bound:.3g}: {call}"
        if dtype in ("float32", "float64") and size.max(initial=0) > 1e-6:
            # The bound would find the roundings of a coarser dtype.
            assert bound <= 1000 * float(np.finfo(compute).eps) * size.max()


# ---- Edge cases


@FUNCTIONS
def test_what_is_hidden_leaves_no_trace(function: Any, rng: Any) -> None:
    arrays = random_arrays(rng)
    # The first rows attend to no key, and no row attends to key 7. Key 9 is hidden from some rows.
    mask = rng.random((11, 23)) < 0.7
    mask[:3] = mask[:, 7] = mask[5:, 9] = False
    mask[4, 9] = True
    bias = rng.standard_normal((2, 4, 11, 23))
    options = {"mask": mask, "return_lse": True}
    expected = function(*arrays, bias=bias, **options)
    for i in (0, 3):
        arrays[i][:, :3] = rng.choice([np.nan, np.inf])
    for i in (1, 2, 4, 5):
        arrays[i][:, 7] = rng.choice([np.nan, -np.inf])
    bias[..., ~mask] = np.nan
    assert_all_equal(function(*arrays, bias=bias, **options), expected)
    out, out_tangent, lse, lse_tangent = expected
    assert (lse[..., :3] == -np.inf).all()
    assert not any(x[:, :3].any() for x in (out, out_tangent))
    assert not lse_tangent[..., :3].any()
    # NaN in each array of key 9 reaches the rows that attend to it, and no other.
    for i in (1, 2, 4, 5):
        poisoned = [x.copy() for x in arrays]
        poisoned[i][:, 9] = np.nan
        found = function(*poisoned, bias=bias, **options)
        assert np.isnan(found[1][:, 4]).all()
        for one, other in zip(found[:2], expected[:2], strict=True):
            np.testing.assert_array_equal(one[:, 5:], other[:, 5:])
        assert_all_equal([x[..., 5:] for x in found[2:]], [x[..., 5:] for x in expected[2:]])


@FUNCTIONS
def test_rows_without_keys_have_the_log_sum_exp_of_their_sink(function: Any, rng: Any) -> None:
    arrays = random_arrays(rng, (5, 3))
    sinks = np.array([0.5, -2, -np.inf, 3])
    results = function(*arrays, causal=True, sinks=sinks, return_lse=True)
    out, out_tangent, lse, lse_tangent = results
    # The offset is -2, so that two rows attend to no key.
    np.testing.assert_array_equal(lse[..., :2], np.broadcast_to(sinks[:, None], (2, 4, 2)))
    for x in (out[:, :2], out_tangent[:, :2], lse_tangent[..., :2]):
        assert not x.any()
    assert all(x.all() for x in (out[:, 2:], out_tangent[:, 2:], lse_tangent[..., 2:]))


@FUNCTIONS
def test_tangents_of_modifications_at_the_edges(function: Any, rng: Any) -> None:
    arrays = random_arrays(rng, (5, 3))
    sinks, moving = np.array([0.5, -2, -np.inf, 3]), rng.standard_normal(4)
    mask, bias = np.ones((5, 3), bool), rng.standard_normal((4, 5, 3))
    mask[3, 1] = False
    bias[:, 3, 1] = np.nan
    options = {"causal": True, "sinks": sinks, "bias": bias, "mask": mask, "return_lse": True}
    still = {"sinks": moving, "bias": None}
    results = function(*arrays[:3], modification_tangents=still, **options)
    _, out_tangent, lse, lse_tangent = results
    # Two rows attend to no key. A sink of -inf stays there.
    finite = np.where(np.isfinite(sinks), moving, 0)
    np.testing.assert_array_equal(lse_tangent[..., :2], np.broadcast_to(finite[:, None], (2, 4, 2)))
    assert not out_tangent[:, :2].any()
    weights = np.exp(sinks[:, None] - lse[..., 2:])
    np.testing.assert_allclose(lse_tangent[..., 2:], weights * finite[:, None])
    # A masked pair of a bias has no effect, whatever its tangent is.
    found = [
        function(*arrays, modification_tangents={"bias": np.where(mask, bias, x)}, **options)
        for x in (0, np.nan)
    ]
    assert_all_equal(*found)
    assert all(np.isfinite(x).all() for x in found[0][1::2])


@FUNCTIONS
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_a_row_with_one_key_has_the_tangent_of_its_value(
    function: Any, dtype: Any, rng: Any
) -> None:
    arrays = random_arrays(rng, (5, 5), dtype)
    out, out_tangent = function(*arrays, window_size=(0, 0), softcap=5.0)
    for found, i in ((out, 2), (out_tangent, 5)):
        np.testing.assert_array_equal(found, arrays[i].repeat(2, 2).astype(found.dtype))


@FUNCTIONS
@pytest.mark.parametrize("given", range(8))
def test_missing_tangents_are_zeros(function: Any, given: int, rng: Any) -> None:
    arrays = random_arrays(rng)
    tangents = [x if given >> i & 1 else None for i, x in enumerate(arrays[3:])]
    zeros = [np.zeros_like(x) if y is None else y for x, y in zip(arrays, tangents, strict=False)]
    options = {"causal": True, "return_lse": True}
    found = function(*arrays[:3], *tangents, **options)
    expected = function(*arrays[:3], *zeros, **options)
    assert_all_close(found, expected, rtol=0, atol=1e-15)
    assert found[1].any() == (given > 0)
    assert found[3].any() == (given % 4 > 0)


@FUNCTIONS
def test_the_result_has_the_layout_and_the_batch_axes_of_q(function: Any, rng: Any) -> None:
    arrays = random_arrays(rng)
    options = {"causal": True, "return_lse": True}
    expected = function(*arrays, **options)
    swapped = [x.swapaxes(1, 2) for x in arrays]
    found = function(*swapped, layout="bhsd", **options)
    assert_all_close([x.swapaxes(1, 2) for x in found[:2]], expected[:2], rtol=0, atol=1e-14)
    assert_all_close(found[2:], expected[2:], rtol=0, atol=1e-14)
    for batch in ((1, 2), (2, 1, 1)):
        found = function(*(x.reshape(*batch, *x.shape[1:]) for x in arrays), **options)
        assert_all_equal(found, [x.reshape(*batch, *x.shape[1:]) for x in expected])
    found = function(*(x[1] for x in arrays), **options)
    assert_all_close(found, [x[1] for x in expected], rtol=0, atol=1e-14)


@FUNCTIONS
@pytest.mark.parametrize("empty", ["batch", "queries", "keys", "columns", "columns of values"])
def test_empty_arrays(function: Any, empty: str, rng: Any) -> None:
    arrays = random_arrays(rng)
    for i, x in enumerate(arrays):
        is_q, is_v = i % 3 == 0, i % 3 == 2
        if empty == "batch":
            x = x[:0]
        elif empty in ("queries", "keys"):
            x = x[:, :0] if is_q == (empty == "queries") else x
        elif is_v == (empty == "columns of values"):
            x = x[..., :0]
        arrays[i] = x
    out, out_tangent, lse, lse_tangent = function(*arrays, return_lse=True)
    assert out.shape == out_tangent.shape == (*arrays[0].shape[:-1], arrays[2].shape[-1])
    assert lse.shape == lse_tangent.shape == (len(arrays[0]), 4, arrays[0].shape[1])
    assert not lse_tangent.any() or empty == "columns of values"
    if empty == "keys":
        assert not out.any()
        assert not out_tangent.any()
        assert (lse == -np.inf).all()
    if empty == "columns":
        # All scores are 0.
        mean = arrays[5].mean(axis=1, keepdims=True).repeat(2, 2)
        np.testing.assert_allclose(out_tangent, np.broadcast_to(mean, out.shape), atol=1e-14)


def test_chunks_do_not_change_results(rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, options = random_arrays(rng), {"causal": True, "return_lse": True}
    whole = flash_attention_jvp(*arrays, **options)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 3 * 8 * 23)
    assert_all_close(flash_attention_jvp(*arrays, **options), whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_memory_does_not_grow_with_the_number_of_pairs(
    dtype: Any, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1 << 18)
    arrays = [rng.standard_normal((1, 2048, 1, 8)).astype(dtype) for _ in range(6)]
    # All scores in float32 take 16 MiB.
    assert peak_memory(lambda: flash_attention_jvp(*arrays, causal=True)) < 6 << 20


def test_results_are_arrays_of_the_library_of_q(rng: Any) -> None:
    arrays = random_arrays(rng, dtype=np.float32)
    for function in (attention_jvp_reference, flash_attention_jvp):
        found = function(*map(Foreign, arrays), return_lse=True)
        assert all(isinstance(x, Foreign) for x in found)
        assert_all_equal((x.array for x in found), function(*arrays, return_lse=True))


def test_the_reference_takes_mixed_dtypes(rng: Any) -> None:
    arrays = [
        x.astype(dtype)
        for x, dtype in zip(
            random_arrays(rng),
            [np.float16, np.float32, ml_dtypes.float8_e4m3fn, np.float64] + [np.float32] * 2,
            strict=True,
        )
    ]
    found = attention_jvp_reference(*arrays)
    expected = attention_jvp_reference(*(x.astype(np.float64) for x in arrays))
    assert [x.dtype for x in found] == [np.float64] * 2
    assert_all_equal(found, expected)


@FUNCTIONS
def test_wrong_arguments(function: Any, rng: Any) -> None:
    arrays = random_arrays(rng)
    q, k, v, q_tangent, k_tangent, v_tangent = arrays
    for name, tangent in zip("qkv", (q_tangent, k_tangent, v_tangent), strict=True):
        with pytest.raises(ValueError, match=f"{name}_tangent has shape .*; expected .*{name}$"):
            function(q, k, v, **{f"{name}_tangent": tangent[:, :-1]})
        with pytest.raises(TypeError, match=f"^{name}_tangent is a list; expected a NumPy"):
            function(q, k, v, **{f"{name}_tangent": tangent.tolist()})
    with pytest.raises(ValueError, match="must agree in batch"):
        function(q, k[..., :-1], v)
    with pytest.raises(ValueError, match="layout must be 'bshd' or 'bhsd'"):
        function(*arrays, layout="sbhd")
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'; pass causal"):
        function(*arrays, is_causal=True)


@FUNCTIONS
def test_wrong_tangents_of_modifications(function: Any, rng: Any) -> None:
    q, k, v, *_ = random_arrays(rng)
    options = {"bias": rng.standard_normal((4, 11, 23)), "sinks": rng.standard_normal(4)}
    mod = ScoreMod(
        lambda score, h, gain, still: score * gain[h] + still[h],
        gain=np.ones(4),
        still=np.ones(4),
        differentiable=("gain",),
    )
    for tangents, error, message in (
        ({"bias": options["bias"][:, 1:]}, ValueError, r"tangent of bias has shape .* of bias$"),
        ({"sinks": np.ones(3)}, ValueError, r"tangent of sinks has shape \(3,\); expected \(4,\)"),
        ({"sinks": np.ones(4, int)}, TypeError, "the tangent of sinks has dtype int64"),
        ({"sinks": [1.0] * 4}, TypeError, "^the tangent of sinks is a list"),
        ({"score_mod.gain": np.ones(5)}, ValueError, r"tangent of score_mod\.gain has shape"),
        (
            {"score_mod.still": np.ones(4)},
            ValueError,
            r"names 'score_mod\.still'; expected some of score_mod\.gain, bias, sinks$",
        ),
        ({"alibi_slopes": np.ones(4)}, ValueError, "modification_tangents names 'alibi_slopes'"),
    ):
        with pytest.raises(error, match=message):
            function(q, k, v, modification_tangents=tangents, score_mod=mod, **options)
    with pytest.raises(ValueError, match=r"expected some of none, because the call has no array"):
        function(q, k, v, modification_tangents={"bias": options["bias"]})
    with pytest.raises(TypeError, match="alibi_slopes is of type list; pass an array"):
        function(q, k, v, modification_tangents={"alibi_slopes": np.ones(4)}, alibi_slopes=[1] * 4)


def test_wrong_dtypes(rng: Any) -> None:
    arrays = random_arrays(rng, dtype=np.float32)
    for i, name in enumerate(("q", "k", "v", "q_tangent", "k_tangent", "v_tangent")):
        for dtype in (np.float16, np.int32, ml_dtypes.float8_e4m3fn):
            given = [x.astype(dtype) if j == i else x for j, x in enumerate(arrays)]
            message = f"{name} has dtype {np.dtype(dtype)}; expected "
            if i < 3 and dtype is np.float16:
                message = "q, k and v must have one dtype, but are .*float16"
            elif i >= 3:
                message += "float32, as q has$"
            with pytest.raises(TypeError, match=message):
                flash_attention_jvp(*given)


def test_both_functions_have_the_same_arguments() -> None:
    names = ("attention_jvp_reference", "flash_attention_jvp")
    one, other = (inspect.signature(getattr(cupy_flash, name)) for name in names)
    assert one == other
