"""Tangents of gradients, compared with difference quotients and the error rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.calls.modified_calls import ModifiedCall
from support.comparisons import assert_all_close, assert_all_equal, peak_memory
from support.foreign import Foreign
from support.gradients.directions import (
    STEP,
    arrays_of_rows,
    every_modification,
    largest_product,
    moving_modifications,
    random_arrays,
    size_of,
)
from support.gradients.gradient_calls import (
    GradientCall,
    random_gradient_call,
    smooth_gradient_call,
)
from support.gradients.hessian_rule import (
    REFERENCES,
    WRT,
    Direction,
    check_products,
    exact_products,
    sizes_of_results,
)

import cupy_flash
from cupy_flash import (
    attention_backward_reference,
    attention_hvp_reference,
    flash_attention_hvp,
    flash_attention_jvp,
    flash_attention_varlen_hvp,
)
from cupy_flash.reference import rows
from cupy_flash.reference.dense import max_error

KINDS = ("dense", "padded", "varlen")
FUNCTIONS = pytest.mark.parametrize("function", [attention_hvp_reference, flash_attention_hvp])
# Order of the arguments of both functions, without dlse and its tangent.
NAMES = ("dout", *WRT)


# ---- The definition


def check_by_differences(
    call: GradientCall, rng: np.random.Generator, function: Callable[..., Any]
) -> None:
    """Compare tangents of gradients with differences of the gradients of the reference."""
    direction = Direction(call, rng, of_mods=True)
    found = direction.find(function)

    def quotients(step: float) -> list[np.ndarray]:
        both = zip(direction.gradients(step), direction.gradients(-step), strict=True)
        return [(above - below) / (2 * step) for above, below in both]

    sizes = [size_of(x) for x in direction.gradients(0)]
    of_scores = largest_product([direction.arrays[n] for n in WRT], direction.options)
    for wide, narrow, tangent, size, name in zip(
        *(quotients(STEP), quotients(STEP / 2), found, sizes, direction.wrt), strict=True
    ):
        # As in test_tangents.py, the error of the extrapolation is below 1% of its correction.
        right = narrow + (narrow - wide) / 3
        allowed = np.abs(narrow - wide).max(initial=0) / 100
        allowed += 50 * 2.0**-52 * size * max(of_scores, 1) / STEP
        error = np.abs(tangent - right).max(initial=0)
        assert error <= allowed, f"tangent of d{name} off by {error:.3g} > {allowed:.3g}: {call}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(30))
def test_tangents_of_gradients_agree_with_differences(kind: str, number: int, rng: Any) -> None:
    _, reference = REFERENCES[kind]
    check_by_differences(smooth_gradient_call(rng, kind), rng, reference)


def modified_call(rng: np.random.Generator) -> GradientCall:
    """Return a call with most modifications at once."""
    q, k, v = arrays_of_rows(rng)
    options = every_modification(rng)
    call = ModifiedCall("dense", "float64", {"q": q, "k": k, "v": v}, options)
    return GradientCall(call, rng.standard_normal(q.shape), rng.standard_normal((2, 4, 7)))


@pytest.mark.parametrize("i", range(8))
def test_differences_detect_tangents_that_are_almost_right(i: int, rng: Any) -> None:
    def find(**given: Any) -> list[np.ndarray]:
        results = list(attention_hvp_reference(**given))
        results[i].flat[np.abs(results[i]).argmax()] *= 1 + 1e-4
        return results

    call = modified_call(rng)
    with pytest.raises(AssertionError, match=r"tangent of d.* off by"):
        check_by_differences(call, rng, find)


def test_every_modification_is_part_of_the_definition(rng: Any) -> None:
    """The random calls above may lack one; this call has most of them at once."""
    call = modified_call(rng)
    check_by_differences(call, rng, attention_hvp_reference)
    direction = Direction(call, rng, of_mods=True)
    found, options = direction.find(attention_hvp_reference), dict(direction.options)
    assert direction.wrt[3:] == (
        *("bias", "sinks", "alibi_slopes", "score_mod.gain", "score_mod.shift"),
    )
    for tangents in (direction.tangents, direction.of_mods):
        for name, tangent in list(tangents.items()):
            del tangents[name]
            others = direction.find(attention_hvp_reference)
            assert any(np.abs(x - y).max() > 1e-3 for x, y in zip(others, found, strict=True)), name
            tangents[name] = tangent
    direction.of_mods, direction.wrt = {}, WRT
    found = direction.find(attention_hvp_reference)
    for name in options.keys() - {"dropout_seed"}:
        direction.options = {n: x for n, x in options.items() if n != name}
        for one, other in zip(direction.find(attention_hvp_reference), found, strict=True):
            assert np.abs(one - other).max() > 1e-3, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(30))
def test_the_hessian_is_symmetric(kind: str, number: int, rng: Any) -> None:
    """This also holds for functions with kinks, which differences cannot check."""
    call = random_gradient_call(rng, "float64", kind, head_dims=(1, 5, 24), longest=(30, 60))
    one, other = Direction(call, rng, of_mods=True), Direction(call, rng, of_mods=True)
    terms = []
    for first, second in ((one, other), (other, one)):
        for name in ("dout", "dlse"):
            first.tangents.pop(name, None)
        found = first.find(first.reference)
        # The results of padding are 0, and its tangents NaN.
        moving = second.tangents | second.of_mods
        products = [
            np.where(x == 0, 0, x * moving[name]).ravel()
            for name, x in zip(first.wrt, found, strict=True)
        ]
        terms.append(np.concatenate(products))
    left, right = terms
    size = np.abs(left).sum() + np.abs(right).sum()
    assert np.isfinite(size)
    of_scores = largest_product([one.arrays[n] for n in WRT], one.options)
    assert abs(left.sum() - right.sum()) <= 1e-12 * max(of_scores, 1) * max(size, 1), str(call)


def test_directions_of_dout_are_gradients(rng: Any) -> None:
    q, k, v, *tangents = random_arrays(rng)
    dout = rng.standard_normal((2, 11, 4, 5))
    options: dict[str, Any] = {"causal": True, "softcap": 2.0}
    for function in (attention_hvp_reference, flash_attention_hvp):
        found = function(
            *(np.full_like(dout, 7), q, k, v),
            dout_tangent=dout,
            dlse_tangent=dout[..., 0].swapaxes(1, 2),
            **options,
        )
        expected = attention_backward_reference(
            *(dout, q, k, v), dlse=dout[..., 0].swapaxes(1, 2), **options
        )
        assert_all_close(found, expected, rtol=0, atol=1e-13)
    # A dot product with the gradients has tangents as its gradients of dout and dlse.
    out_tangent, lse_tangent = flash_attention_jvp(q, k, v, *tangents, **options, return_lse=True)[
        1::2
    ]
    moved, of_lse = rng.standard_normal(dout.shape), rng.standard_normal(lse_tangent.shape)
    gradients = attention_hvp_reference(
        *(dout, q, k, v), dout_tangent=moved, dlse_tangent=of_lse, **options
    )
    left = sum((x * y).sum() for x, y in zip(gradients, tangents, strict=True))
    right = (out_tangent * moved).sum() + (lse_tangent * of_lse).sum()
    np.testing.assert_allclose(left, right, rtol=1e-11)


# ---- Precision


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("number", range(10))
def test_results_obey_the_error_rule(dtype: str, number: int, rng: Any) -> None:
    call = random_gradient_call(rng, dtype, "dense", head_dims=(5, 24, 64), longest=(60, 90))
    direction = Direction(call, rng)
    check_products(direction.find(flash_attention_hvp), direction)
    compute = np.dtype(np.float64 if dtype == "float64" else np.float32)
    bounds = (x.bound for x in exact_products(direction, compute))
    for bound, size in zip(bounds, sizes_of_results(direction), strict=True):
        if dtype in ("float32", "float64") and size.max(initial=0) > 1e-6:
            # The bound is tight enough to detect roundings to a coarser dtype.
            assert bound <= 1000 * float(np.finfo(compute).eps) * size.max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("number", range(8))
def test_results_of_modifications_are_close_to_the_reference(
    dtype: str, number: int, rng: Any
) -> None:
    """The library computes the formula of the reference, in the precision of the inputs."""
    kind = KINDS[number % 3]
    call = random_gradient_call(rng, dtype, kind, head_dims=(5, 24), longest=(40, 50))
    direction = Direction(call, rng, of_mods=True)
    function = flash_attention_varlen_hvp if kind == "varlen" else flash_attention_hvp
    results, exact = direction.find(function), direction.find(direction.reference)
    eps = 1e-11 if dtype == "float64" else 1e-3
    arrays = call.inputs | moving_modifications(direction.options)
    for name, found, right in zip(direction.wrt, results, exact, strict=True):
        assert found.dtype == arrays[name].dtype
        allowed = (eps + float(ml_dtypes.finfo(found.dtype).eps)) * np.abs(right).max(initial=1)
        assert max_error(found, right) <= allowed, f"{name}: {call}"


# ---- Edge cases


def arguments(
    rng: np.random.Generator, seqlens: tuple[int, int] = (11, 23), dtype: Any = np.float64
) -> list[np.ndarray]:
    """Return dout, q, k, v, and the tangents of q, k, v and dout."""
    q, k, v, *tangents = random_arrays(rng, seqlens, dtype)
    dout, dout_tangent = (
        rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(dtype) for _ in range(2)
    )
    return [dout, q, k, v, *tangents, dout_tangent]


# Positions of the arrays of queries and of keys among these arguments.
OF_QUERIES, OF_KEYS = (0, 1, 4, 7), (2, 3, 5, 6)


@FUNCTIONS
def test_masked_pairs_do_not_affect_results(function: Any, rng: Any) -> None:
    arrays = arguments(rng)
    # The first rows attend to no key, and no row attends to key 7. Key 9 is hidden from some rows.
    mask = rng.random((11, 23)) < 0.7
    mask[:3] = mask[:, 7] = mask[5:, 9] = False
    mask[4, 9] = True
    bias = rng.standard_normal((2, 4, 11, 23))
    dlse, dlse_tangent = rng.standard_normal((2, 2, 4, 11))
    options = {"mask": mask, "dlse": dlse, "dlse_tangent": dlse_tangent, "softcap": 3.0}
    expected = function(*arrays, bias=bias, **options)
    for i in OF_QUERIES:
        arrays[i][:, :3] = rng.choice([np.nan, np.inf])
    for i in OF_KEYS:
        arrays[i][:, 7] = rng.choice([np.nan, -np.inf])
    dlse[..., :3] = dlse_tangent[..., :3] = np.nan
    bias[..., ~mask] = np.nan
    assert_all_equal(function(*arrays, bias=bias, **options), expected)
    dq, dk, dv = expected
    assert all(np.isfinite(x).all() for x in expected)
    assert not any(x.any() for x in (dq[:, :3], dk[:, 7], dv[:, 7]))
    # NaN in each array of key 9 reaches the rows that attend to it, and no other.
    for i in OF_KEYS:
        poisoned = [x.copy() for x in arrays]
        poisoned[i][:, 9] = np.nan
        found, *_ = function(*poisoned, bias=bias, **options)
        assert np.isnan(found[:, 4]).all()
        np.testing.assert_array_equal(found[:, 5:], dq[:, 5:])


@FUNCTIONS
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_a_row_with_one_key_has_only_a_gradient_of_its_value(
    function: Any, dtype: Any, rng: Any
) -> None:
    arrays = arguments(rng, (5, 5), dtype)
    dq, dk, dv = function(*arrays, window_size=(0, 0), softcap=5.0)
    assert not dq.any()
    assert not dk.any()
    exact = arrays[7].astype(np.float64).reshape(2, 5, 2, 2, 5).sum(axis=3)
    assert max_error(dv, exact) <= float(ml_dtypes.finfo(dtype).eps) * np.abs(exact).max()


@FUNCTIONS
def test_rows_without_keys_have_zeros_whatever_their_sink_is(function: Any, rng: Any) -> None:
    arrays = arguments(rng, (5, 3))
    dlse = rng.standard_normal((2, 4, 5))
    sinks = np.array([0.5, -2, -np.inf, 3])
    # The offset is -2, so that two rows attend to no key.
    dq, dk, dv = function(*arrays, dlse=dlse, dlse_tangent=dlse, causal=True, sinks=sinks)
    assert not dq[:, :2].any()
    assert all(x.all() for x in (dq[:, 2:], dk, dv))


@pytest.mark.parametrize("has_dlse", [False, True])
def test_rows_without_keys_have_a_gradient_of_their_sink(has_dlse: bool, rng: Any) -> None:
    q, k, v, *_ = random_arrays(rng, (5, 3))
    # The offset is -2, so that two rows attend to no key.
    options = {"causal": True, "sinks": rng.standard_normal(4)}
    forward = ModifiedCall("dense", "float64", {"q": q, "k": k, "v": v}, options)
    dlse = rng.standard_normal((2, 4, 5)) if has_dlse else None
    call = GradientCall(forward, rng.standard_normal((2, 5, 4, 5)), dlse)
    check_by_differences(call, rng, attention_hvp_reference)
    direction = Direction(call, rng, of_mods=True)
    direction.options["sinks"] = np.full(4, -np.inf)
    *_, of_sinks = direction.find(attention_hvp_reference)
    assert not of_sinks.any()


@FUNCTIONS
@pytest.mark.parametrize("given", range(16))
def test_missing_tangents_are_zeros(function: Any, given: int, rng: Any) -> None:
    arrays = arguments(rng)
    tangents = [x if given >> i & 1 else None for i, x in enumerate(arrays[4:])]
    like = [*arrays[1:4], arrays[0]]
    zeros = [np.zeros_like(x) if y is None else y for x, y in zip(like, tangents, strict=True)]
    found = function(*arrays[:4], *tangents, causal=True, softcap=2.0)
    expected = function(*arrays[:4], *zeros, causal=True, softcap=2.0)
    assert_all_close(found, expected, rtol=0, atol=1e-14)
    # The output is linear in the values, so dv depends on everything else.
    assert [x.any() for x in found] == [given > 0, given > 0, given & 11 > 0]


@FUNCTIONS
def test_the_results_have_the_layout_and_the_batch_axes_of_the_inputs(
    function: Any, rng: Any
) -> None:
    arrays = arguments(rng)
    dlse, dlse_tangent = rng.standard_normal((2, 2, 4, 11))
    of_lse = {"dlse": dlse, "dlse_tangent": dlse_tangent}
    expected = function(*arrays, causal=True, **of_lse)
    swapped = [x.swapaxes(1, 2) for x in arrays]
    found = function(*swapped, layout="bhsd", causal=True, **of_lse)
    assert_all_close([x.swapaxes(1, 2) for x in found], expected, rtol=0, atol=1e-13)
    for batch in ((1, 2), (2, 1, 1), ()):
        # Without a batch axis, the sequence is the second one.
        of_batch = [
            x.reshape(*batch, *x.shape[1:]) if batch else x[1] for x in (*arrays, *expected)
        ]
        of_rows = {n: x.reshape(*batch, *x.shape[1:]) if batch else x[1] for n, x in of_lse.items()}
        found = function(*of_batch[:8], causal=True, **of_rows)
        assert_all_close(found, of_batch[8:], rtol=0, atol=1e-13)


@FUNCTIONS
@pytest.mark.parametrize("empty", ["batch", "queries", "keys", "columns", "columns of values"])
def test_empty_arrays(function: Any, empty: str, rng: Any) -> None:
    arrays = arguments(rng)
    for i, x in enumerate(arrays):
        if empty == "batch":
            x = x[:0]
        elif empty in ("queries", "keys"):
            x = x[:, :0] if (i in OF_QUERIES) == (empty == "queries") else x
        elif (i in (0, 3, 6, 7)) == (empty == "columns of values"):
            x = x[..., :0]
        arrays[i] = x
    found = function(*arrays)
    assert [x.shape for x in found] == [x.shape for x in arrays[1:4]]
    if empty != "columns":
        assert not any(x.any() for x in found)


def test_chunks_do_not_change_results(rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = arguments(rng)
    whole = flash_attention_hvp(*arrays, causal=True, softcap=2.0)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 3 * 8 * 23)
    found = flash_attention_hvp(*arrays, causal=True, softcap=2.0)
    assert_all_close(found, whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_memory_does_not_grow_with_the_number_of_pairs(
    dtype: Any, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = 1 << 18
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk)
    arrays = [rng.standard_normal((1, 2048, 1, 8)).astype(dtype) for _ in range(8)]
    # All scores in float32 take 16 MiB. A chunk of 128 MiB of float64 scores takes 2 GiB in all.
    limit = 16 * chunk if dtype is np.float64 else 8 * chunk
    results = 8 * arrays[0].size * 8
    assert (
        peak_memory(lambda: flash_attention_hvp(*arrays, causal=True, softcap=2.0))
        < limit + results
    )


def test_results_are_arrays_of_the_library_of_q(rng: Any) -> None:
    arrays = arguments(rng, dtype=np.float32)
    for function in (attention_hvp_reference, flash_attention_hvp):
        found = function(*map(Foreign, arrays))
        assert all(isinstance(x, Foreign) for x in found)
        assert_all_equal((x.array for x in found), function(*arrays))


def test_the_reference_takes_mixed_dtypes(rng: Any) -> None:
    dtypes = [np.float64, np.float16, np.float32, ml_dtypes.float8_e4m3fn] + [np.float32] * 4
    arrays = [x.astype(dtype) for x, dtype in zip(arguments(rng), dtypes, strict=True)]
    found = attention_hvp_reference(*arrays)
    expected = attention_hvp_reference(*(x.astype(np.float64) for x in arrays))
    assert [x.dtype for x in found] == [np.float64] * 3
    assert_all_equal(found, expected)


def test_only_requested_results_are_returned(rng: Any) -> None:
    direction = Direction(modified_call(rng), rng, of_mods=True)
    every = dict(zip(direction.wrt, direction.find(flash_attention_hvp), strict=True))
    for names in (["score_mod.shift", "q"], ("bias",), (), ("v", "alibi_slopes", "sinks")):
        direction.wrt = names
        found = direction.find(flash_attention_hvp)
        assert_all_close(found, [every[name] for name in names], rtol=0, atol=1e-13)
    for names, error, message in (
        ("q", TypeError, r"wrt is 'q', one name; expected a sequence of names: \('q',\)"),
        (("q", "q"), ValueError, "wrt names 'q' 2 times; expected it once"),
        (("mask",), ValueError, "wrt names 'mask'; expected some of q, k, v, bias"),
    ):
        direction.wrt = names
        with pytest.raises(error, match=message):
            direction.find(flash_attention_hvp)


@FUNCTIONS
def test_wrong_arguments(function: Any, rng: Any) -> None:
    arrays = arguments(rng)
    given = dict(zip(NAMES, arrays[:4], strict=True))
    tangents = dict(zip((*WRT, "dout"), arrays[4:], strict=True))
    for name, tangent in tangents.items():
        with pytest.raises(ValueError, match=f"{name}_tangent has shape .*; expected .*{name}$"):
            function(**given, **{f"{name}_tangent": tangent[:, :-1]})
        with pytest.raises(TypeError, match=f"^{name}_tangent is a list; expected a NumPy"):
            function(**given, **{f"{name}_tangent": tangent.tolist()})
    for name in ("dlse", "dlse_tangent"):
        with pytest.raises(
            ValueError, match=rf"{name} has shape .*; expected \(2, 4, 11\), as lse"
        ):
            function(**given, **{name: np.ones((2, 11, 4))})
    with pytest.raises(
        ValueError, match=r"dout has shape .*; expected \(2, 11, 4, 5\), as the out"
    ):
        function(**given | {"dout": arrays[0][:, :-1]})
    with pytest.raises(
        ValueError, match=r"dout has shape .*; expected \(11, 4, 5\), as the output"
    ):
        function(*(x if i == 0 else x[0] for i, x in enumerate(arrays[:4])))
    with pytest.raises(ValueError, match="must agree in batch"):
        function(**given | {"k": arrays[2][..., :-1]})
    with pytest.raises(ValueError, match="layout must be 'bshd' or 'bhsd'"):
        function(*arrays, layout="sbhd")
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'; pass causal"):
        function(*arrays, is_causal=True)


def test_wrong_dtypes(rng: Any) -> None:
    arrays = arguments(rng, dtype=np.float32)
    names = (*NAMES, "q_tangent", "k_tangent", "v_tangent", "dout_tangent")
    for i, name in enumerate(names):
        for dtype in (np.float16, np.int32, ml_dtypes.float8_e4m3fn):
            given = [x.astype(dtype) if j == i else x for j, x in enumerate(arrays)]
            message = f"{name} has dtype {np.dtype(dtype)}; expected "
            if name in WRT and dtype is np.float16:
                message = "q, k and v must have one dtype, but are .*float16"
            elif name not in NAMES or (name == "dout" and dtype is np.float16):
                message += "float32, as q has$"
            with pytest.raises(TypeError, match=message):
                flash_attention_hvp(*given)
    for name in ("dlse", "dlse_tangent"):
        with pytest.raises(TypeError, match=f"{name} has dtype int64; expected"):
            flash_attention_hvp(*arrays, **{name: np.ones((2, 4, 11), np.int64)})


def test_both_functions_have_the_same_arguments() -> None:
    names = ("attention_hvp_reference", "flash_attention_hvp")
    one, other = (inspect.signature(getattr(cupy_flash, name)) for name in names)
    assert one == other
