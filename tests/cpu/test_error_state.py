"""NumPy's error state of the caller: it neither reaches the library nor changes a result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.calls.every_array import Call, calls_of, functions_of
from support.gpu import fake_gpu

import cupy_flash
from cupy_flash import flash_attention, flash_attention_backward

DTYPES = [np.float16, np.float32, np.float64]

SCALES = ("q_scale", "k_scale", "v_scale")

# Exponents of the factor on all real arguments. Products of the small values underflow in every
# dtype, and scores of the large values overflow.
POWERS = {"small": -0.6, "large": 0.55}


def calls() -> Iterator[Any]:
    for function in functions_of(cupy_flash):
        if function.__name__ == "check_mod" or function.__name__.startswith(("plan", "plot")):
            # `check_mod` runs on a GPU, plans read no array, and Matplotlib computes in the
            # caller's error state.
            continue
        for dtype in DTYPES:
            for call in calls_in(function, dtype):
                yield pytest.param(call, id=f"{call} {np.dtype(dtype).name}")


def calls_in(function: Callable[..., Any], dtype: Any) -> Iterator[Call]:
    """Yield the calls of a function on arrays of a dtype; float64 allows no 8-bit arrays."""
    for call in calls_of(function, dtype):
        if dtype is not np.float64 or call.argument not in SCALES:
            yield call


def scaled(call: Call, power: float) -> Call:
    """Return the call with every real array multiplied by a power of the dtype's largest value."""

    def times(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype.kind in "biu" or x.dtype.itemsize == 1:
            return x
        largest = float(ml_dtypes.finfo(x.dtype).max)
        with np.errstate(all="ignore"):
            return (x.astype(np.float64) * largest**power).astype(x.dtype)

    return Call(call.function, call.argument, {n: times(x) for n, x in call.values.items()})


# These numbers are zero, subnormal or infinite in float32; float64 represents them.
BEYOND = [1e-50, -1e300, 1e-40, float(np.finfo(np.float64).min)]


def of_other_dtypes() -> Iterator[Any]:
    """Yield calls that convert numbers to dtypes which do not represent them."""
    for function in functions_of(cupy_flash):
        if function.__name__ == "check_mod" or function.__name__.startswith("plot"):
            continue
        for dtype in DTYPES:
            for call in calls_in(function, dtype):
                for what, values in changes(call, dtype):
                    changed = Call(function, call.argument, call.values | values)
                    yield pytest.param(changed, id=f"{call} {np.dtype(dtype).name} {what}")


def changes(call: Call, dtype: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield labels, and other values of the arguments of a call."""
    name = call.argument
    known = inspect.signature(call.function).parameters
    if name is None:
        for scale in ("softmax_scale", "scale"):
            if scale in known:
                yield from ((f"{scale} {x}", {scale: x}) for x in (1e-50, -1e-42, 1e38))
        if "softmax_scale" in known:
            yield from ((f"softcap {x}", {"softcap": x}) for x in (1e-30, 1e30))
    elif name in ("alibi_slopes", "sinks"):
        yield "array", {name: np.array(BEYOND)}
        yield "list", {name: BEYOND}
        yield from ((f"{x}", {name: x}) for x in (*BEYOND, np.longdouble("1e-4000")))
    elif name in SCALES:
        yield from ((f"{x}", {name: x}) for x in (1e-50, np.float64(1e-42), 3e38))
    elif name in ("bias", "attn_mask", "rotary_cos") and dtype is not np.float64:
        names = ("rotary_cos", "rotary_sin") if name == "rotary_cos" else (name,)
        extremes = np.array([1e-45, 3e38, -1e-38, -3e38], np.float32)
        tables = {n: np.resize(extremes, call.values[n].shape) for n in names}
        yield "float32", tables


@pytest.mark.parametrize("call", list(of_other_dtypes()))
def test_conversions_are_silent(call: Call) -> None:
    assert_same_without_errors(call)


@pytest.mark.parametrize("call", list(calls()))
def test_errors_that_raise_change_nothing(call: Call) -> None:
    for power in POWERS.values():
        assert_same_without_errors(scaled(call, power))


def assert_same_without_errors(call: Call) -> None:
    options = {"backend": "cpu"}
    # This call comes first, because later calls like it skip checks and conversions.
    with np.errstate(all="raise"):
        found = call.run(np.copy, **options)
    with np.errstate(all="ignore"):
        expected = call.run(np.copy, **options)
    found, expected = ([*results, *written.values()] for results, written in (found, expected))
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, (np.ndarray, np.generic)):
            assert one.tobytes() == other.tobytes()
        else:
            assert one == other


def test_gradients_of_sinks_are_rounded_silently() -> None:
    q = np.ones((1, 3, 2, 8), np.float32)
    for sinks in (np.full(2, 0.5, np.float16), np.float16(0.5)):
        out, lse = flash_attention(q, q, q, sinks=sinks, return_lse=True, backend="cpu")
        call = functools.partial(
            flash_attention_backward, q=q, k=q, v=q, out=out, lse=lse, sinks=sinks, wrt=("sinks",)
        )
        for factor, expected in ((1e30, -np.inf), (1e-30, 0)):
            with np.errstate(all="raise"):
                (found,) = call(q * np.float32(factor), backend="cpu")
            assert found.dtype == np.float16
            np.testing.assert_array_equal(found, np.full(np.shape(sinks), expected, np.float16))


@pytest.mark.parametrize("softmax_scale", [1e-50, -1e-42, 1e38])
def test_calls_on_a_gpu_are_prepared_silently(
    monkeypatch: pytest.MonkeyPatch, softmax_scale: float
) -> None:
    gpu = fake_gpu.install(monkeypatch)
    q, lse = gpu.array(2, 100, 4, 64), gpu.array(2, 4, 100, dtype=np.float32)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": 1e30}
    with np.errstate(all="raise"):
        for sinks in (BEYOND, 1e-50):
            vectors = {"sinks": sinks, "alibi_slopes": sinks}
            flash_attention(q, q, q, **options, **vectors)
            flash_attention_backward(q, q, q, q, q, lse, **options, **vectors)
    assert len(gpu.launches) >= 4
