"""Small calls on NumPy arrays that repeat an earlier call, and skip most checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.comparisons import assert_all_equal, assert_same_bits

from cupy_flash import flash_attention, flash_attention_backward
from cupy_flash.calls.host import backward as host_backward
from cupy_flash.calls.host import forward as host_forward
from cupy_flash.cpu import untiled
from cupy_flash.cpu.backward import untiled as untiled_backward


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_forward, "_calls", {})
    monkeypatch.setattr(host_backward, "_calls", {})


def arrays(rng: np.random.Generator, dtype: Any = np.float32, rows: int = 5) -> tuple[Any, ...]:
    lengths = (rows, 9, 9)
    return tuple(rng.standard_normal((2, n, 3, 16)).astype(dtype) for n in lengths)


def not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any) -> None:
        raise AssertionError("the call was not recognized")

    monkeypatch.setattr(host_forward, "compute", forward)
    monkeypatch.setattr(host_backward, "compute", forward)


def gradient_arrays(rng: np.random.Generator, dtype: Any = np.float32) -> tuple[Any, ...]:
    q, k, v = arrays(rng, dtype)
    out, lse = flash_attention(q, k, v, return_lse=True)
    return rng.standard_normal(q.shape).astype(dtype), q, k, v, out, lse


def assert_alike(found: Any, expected: Any) -> None:
    """Assert that results have the same dtypes, shapes and bytes."""
    assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in expected]
    assert_same_bits(found, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_repeated_call_gives_the_same_bits(
    dtype: Any, return_lse: bool, causal: bool, rng: Any, monkeypatch: Any
) -> None:
    options = {"causal": causal, "return_lse": return_lse}
    first, second = arrays(rng, dtype), arrays(rng, dtype)
    # With the calls in the opposite order, each is once the first of its kind.
    expected = flash_attention(*second, **options)
    host_forward._calls.clear()
    flash_attention(*first, **options)
    not_checked_again(monkeypatch)
    found = flash_attention(*second, **options)
    assert_alike(*(x if return_lse else (x,) for x in (found, expected)))


@pytest.mark.parametrize(
    "change",
    [
        {"causal": 1}, {"return_lse": 1}, {"layout": "sbhd"}, {"backend": "cuda"},
        {"softmax_scale": "1"}, {"softmax_scale": np.nan}, {"family": "hopper"},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_a_wrong_kind_are_still_refused(change: dict[str, Any], rng: Any) -> None:
    options: dict[str, Any] = {"causal": True, "return_lse": True, "backend": "cpu"}
    flash_attention(*arrays(rng), **options)
    with pytest.raises((TypeError, ValueError)):
        flash_attention(*arrays(rng), **(options | change))


def test_arrays_of_another_library_are_still_refused(rng: Any) -> None:
    class Foreign:
        """Object with the shape, strides and dtype of a NumPy array, but no access to elements."""

        def __init__(self, array: np.ndarray) -> None:
            self.shape, self.strides, self.dtype = array.shape, array.strides, array.dtype

    q, k, v = arrays(rng)
    flash_attention(q, k, v)
    for given in ((q, Foreign(k), v), (q, k, Foreign(v)), (Foreign(q), k, v)):
        with pytest.raises(TypeError):
            flash_attention(*given)


def test_other_shapes_strides_and_dtypes_are_other_calls(rng: Any) -> None:
    q, k, v = arrays(rng)
    flash_attention(q, k, v)
    with pytest.raises((TypeError, ValueError)):
        flash_attention(q, k[:, :8], v)
    with pytest.raises(TypeError):
        flash_attention(q, k.astype(np.float64), v)
    reversed_rows = flash_attention(q[:, ::-1], k, v)
    np.testing.assert_allclose(reversed_rows[:, ::-1], flash_attention(q, k, v), rtol=1e-5)


def test_rows_without_weight_are_left_to_the_other_code(rng: Any, monkeypatch: Any) -> None:
    q, k, v = arrays(rng)
    flash_attention(q, k, v, return_lse=True)
    k[:] = -np.inf
    q[:] = np.abs(q)
    calls = []
    at_once = untiled.forward_at_once
    monkeypatch.setattr(
        untiled, "forward_at_once", lambda *a: calls.append(at_once(*a)) or calls[-1]
    )
    found = flash_attention(q, k, v, return_lse=True)
    assert False in calls
    host_forward._calls.clear()
    assert_all_equal(found, flash_attention(q, k, v, return_lse=True))


def test_an_output_that_is_given_is_checked_at_each_call(rng: Any) -> None:
    q, k, v = arrays(rng, rows=9)
    flash_attention(q, k, v)
    out = np.empty_like(q)
    assert flash_attention(q, k, v, out=out) is out
    with pytest.raises(ValueError, match="overlaps"):
        flash_attention(q, k, v, out=v)


def test_the_error_state_of_numpy_changes_nothing(rng: Any) -> None:
    q, k, v = arrays(rng)
    expected = flash_attention(1e30 * q, k, v)
    with np.errstate(all="raise"):
        found = flash_attention(1e30 * q, k, v)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"wrt": ("q",)}, {"wrt": ("v", "q")}])
@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_repeated_gradients_have_the_same_bits(
    dtype: Any, has_dlse: bool, options: dict[str, Any], rng: Any, monkeypatch: Any
) -> None:
    first, second = gradient_arrays(rng, dtype), gradient_arrays(rng, dtype)
    if has_dlse:
        options = options | {"dlse": rng.standard_normal(first[-1].shape).astype(dtype)}
    expected = flash_attention_backward(*second, **options)
    host_backward._calls.clear()
    flash_attention_backward(*first, **options)
    not_checked_again(monkeypatch)
    assert_alike(flash_attention_backward(*second, **options), expected)


def test_gradients_that_are_given_are_checked_at_each_call(rng: Any) -> None:
    given = gradient_arrays(rng)
    flash_attention_backward(*given)
    q = given[1]
    dq = np.full_like(q, np.nan)
    for _ in range(2):
        assert flash_attention_backward(*given, dq=dq)[0] is dq
        assert np.isfinite(dq).all()
        with pytest.raises(ValueError, match="overlaps"):
            flash_attention_backward(*given, dq=q)


@pytest.mark.parametrize(
    "change", [{"causal": 1}, {"grad_dtype": "int8"}, {"wrt": ("x",)}, {"backend": "cuda"}], ids=str
)
def test_options_of_gradients_of_a_wrong_kind_are_still_refused(
    change: dict[str, Any], rng: Any
) -> None:
    given = gradient_arrays(rng)
    flash_attention_backward(*given, causal=True)
    with pytest.raises((TypeError, ValueError)):
        flash_attention_backward(*given, **({"causal": True} | change))


def test_gradients_in_another_dtype_are_other_calls(rng: Any) -> None:
    given = gradient_arrays(rng, np.float64)
    for _ in range(2):
        assert {x.dtype.name for x in flash_attention_backward(*given)} == {"float64"}
        narrow = flash_attention_backward(*given, grad_dtype="float32")
        assert {x.dtype.name for x in narrow} == {"float32"}


def test_infinite_queries_are_left_to_the_other_code(rng: Any, monkeypatch: Any) -> None:
    given = gradient_arrays(rng)
    flash_attention_backward(*given)
    given[1][0, 0] = np.inf
    calls = []
    formula_of = untiled_backward.backward_by_formula
    monkeypatch.setattr(
        untiled_backward,
        "backward_by_formula",
        lambda *a: calls.append(formula_of(*a)) or calls[-1],
    )
    found = flash_attention_backward(*given)
    assert calls[0] is False
    host_backward._calls.clear()
    assert_all_equal(found, flash_attention_backward(*given))
