"""Gradients in every family if rows attend to one key or none, or no row attends to some keys.

Also float32 gradients if the rows of dout differ widely in magnitude.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.gpu import cupy
from support.gpu.gpu_support import DTYPES
from support.gradients.edge_gradients import (
    EXTREME_SCORES,
    NONE,
    ONE_KEY,
    EdgeCall,
    confident_call,
    gradients_of_padding,
    has_no_digits,
    large_scores_of_one_key,
)
from support.gradients.gradient_rule import check_gradients

import cupy_flash

pytestmark = pytest.mark.gpu

WIDTHS = (40, 64, 96, 128, 192, 256)
KERNELS = [
    (family, dtype, head_dim)
    for family, dtypes in (
        ("hopper", ("bfloat16", "float16")),
        ("mma", ("bfloat16", "float16", "float32")),
    )
    for dtype in dtypes
    for head_dim in WIDTHS
]
KERNELS += [("mma", dtype, 512) for dtype in ("bfloat16", "float16", "float32")]
KERNELS += [("hopper", "bfloat16", 320), ("hopper", "float16", 512)]
KERNELS += [("simt", dtype, 40) for dtype in DTYPES]
of_kernels = pytest.mark.parametrize(("family", "dtype", "head_dim"), KERNELS)


def backward(call: EdgeCall, arrays: dict[str, np.ndarray], results: Any, family: str) -> Any:
    """Return the gradients of a family; skip the test if it does not support the call."""
    try:
        return call.backward(arrays, results, cupy, family=family)
    except cupy_flash.UnsupportedError as error:
        pytest.skip(str(error))


def assert_same(found: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    """Fail unless numbers are equal or, in float32, close relative to the largest one."""
    one, other = (x.astype(np.float64) for x in (found, expected))
    tolerance = 1e-5 * np.abs(other).max() if dtype == "float32" else 0
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@of_kernels
@pytest.mark.parametrize("size_of_q", [1, 4])
@pytest.mark.parametrize("way", ONE_KEY)
def test_scores_of_a_row_that_sees_one_key_have_no_gradient(
    way: str, size_of_q: float, family: str, dtype: str, head_dim: int, rng: Any
) -> None:
    call = ONE_KEY[way](rng)
    arrays = call.arrays(dtype, head_dim, rng, size_of_q)
    dq, dk, dv = backward(call, arrays, call.forward(arrays, cupy), family)
    assert not dq[:, call.rows].any()
    assert dv.any()
    if call.rows == slice(None):
        assert not dk.any()
    else:
        assert dq.any()


@of_kernels
def test_rounding_of_lse_leaves_the_scores_of_one_key_no_gradient(
    family: str, dtype: str, head_dim: int, rng: Any
) -> None:
    arrays = large_scores_of_one_key(dtype, head_dim, rng)
    call = ONE_KEY["key"](rng)
    out, lse = call.forward(arrays, cupy)
    rounding = cupy.asarray(2 * np.spacing(lse.get()))
    dq, dk, dv = backward(call, arrays, (out, lse + rounding), family)
    assert not dq.any()
    assert not dk.any()
    assert dv.any()


@of_kernels
def test_rows_that_see_other_keys_with_little_weight_have_gradients(
    family: str, dtype: str, head_dim: int, rng: Any
) -> None:
    call = confident_call(dtype, head_dim, rng)
    try:
        check_gradients(call, call.run(cupy, family=family))
    except cupy_flash.UnsupportedError as error:
        pytest.skip(str(error))


@of_kernels
@pytest.mark.parametrize("way", NONE)
def test_what_nobody_sees_leaves_no_trace(
    way: str, family: str, dtype: str, head_dim: int, rng: Any
) -> None:
    call = NONE[way](rng)
    arrays = call.poisoned(call.arrays(dtype, head_dim, rng), 0)
    results = call.forward(arrays, cupy)
    expected = backward(call, arrays, results, family)
    for value in (np.nan, np.inf):
        found = backward(call, call.poisoned(arrays, value), results, family)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, dtype)


@of_kernels
@pytest.mark.parametrize("name", ["q", "k"])
def test_what_some_see_reaches_only_those(
    name: str, family: str, dtype: str, head_dim: int, rng: Any
) -> None:
    # Kernels remove NaN from tiles only if a mask may hide whole rows or keys, as this array may.
    call = EdgeCall(150, 150, {"mask": np.tri(150, dtype=bool)[None, None]})
    arrays = call.arrays(dtype, head_dim, rng)
    out, lse = call.forward(arrays, cupy)
    expected = backward(call, arrays, (out, lse), family)
    arrays[name][:, 70] = np.nan
    lse[:, :, slice(70, 71) if name == "q" else slice(70, None)] = np.nan
    dq, dk, dv = backward(call, arrays, (out, lse), family)
    assert np.isnan(dq[:, 70].astype(np.float64)).all()
    assert_same(dq[:, :70], expected[0][:, :70], dtype)
    if name == "q":
        for got, right in ((dk, expected[1]), (dv, expected[2])):
            assert_same(got[:, 71:], right[:, 71:], dtype)
            assert np.isnan(got[:, :71].astype(np.float64)).all()


@pytest.mark.parametrize(("family", "dtype", "head_dim"), [k for k in KERNELS if k[2] != 192])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_packed_rows_without_keys_leave_no_trace(
    family: str, dtype: str, head_dim: int, value: float, rng: Any
) -> None:
    # The first 20 queries of sequence 0 and all queries of sequence 1 attend to no key.
    lengths = tuple(map(cupy.asarray, np.array([[0, 70, 90, 160], [0, 50, 50, 150]], np.int32)))
    options: dict[str, Any] = {"causal": True}
    given = (*lengths, 70, 100)
    shapes = {"q": (160, 4), "k": (150, 2), "v": (150, 2), "dout": (160, 4)}
    arrays = {
        name: cupy.asarray(rng.standard_normal((*shape, head_dim)).astype(DTYPES[dtype]))
        for name, shape in shapes.items()
    }
    hidden = np.r_[0:20, 70:90]
    for name in ("q", "dout"):
        arrays[name][hidden] = 0
    q, k, v, dout = arrays.values()
    out, lse = cupy_flash.flash_attention_varlen(q, k, v, *given, return_lse=True, **options)

    def run() -> list[np.ndarray]:
        try:
            found = cupy_flash.flash_attention_varlen_backward(
                dout, q, k, v, out, lse, *given, **options, family=family
            )
        except cupy_flash.UnsupportedError as error:
            pytest.skip(str(error))
        return [x.get() for x in found]

    expected = run()
    q[hidden], dout[hidden] = value, value
    for one, other in zip(run(), expected, strict=True):
        assert_same(one, other, dtype)


@pytest.mark.parametrize("family", ["mma", "simt"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256, 512])
@pytest.mark.parametrize("size", [1e-3, 1e-8, 1e-12, 1e-20])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 10.0}], ids=str)
def test_float32_rows_of_a_small_dout_are_as_exact_as_others(
    family: str, head_dim: int, size: float, options: dict[str, Any], rng: Any
) -> None:
    q, k, v, dout = rng.standard_normal((4, 2, 200, 2, head_dim)).astype(np.float32)
    dout[:, 1::2] *= size
    if options:
        dout[:, 150:] *= 1e-8
    on_gpu = [cupy.asarray(x) for x in (q, k, v)]
    out, lse = cupy_flash.flash_attention(*on_gpu, return_lse=True, **options)
    found = cupy_flash.flash_attention_backward(
        cupy.asarray(dout), *on_gpu, out, lse, **options, family=family
    )
    exact = cupy_flash.attention_backward_reference(dout, q, k, v, **options)
    error = np.abs(found[0].get() - exact[0]).max(-1)
    # With a causal mask the gradients of the first rows cancel; that of row 0 is 0.
    rows = slice(8, None) if "causal" in options else slice(None)
    assert (error[:, rows] < 1e-3 * np.abs(exact[0]).max(-1)[:, rows]).all()
    for gradient, right in zip(found[1:], exact[1:], strict=True):
        assert np.abs(gradient.get() - right).max() < 1e-4 * np.abs(right).max()


@pytest.mark.parametrize(
    ("family", "dtype", "head_dim", "score"),
    [(*kernel, s) for kernel in KERNELS for s in EXTREME_SCORES if has_no_digits(s, kernel[1])],
)
def test_rows_of_extreme_scores_have_no_gradient(
    family: str, dtype: str, head_dim: int, score: float, rng: Any
) -> None:
    try:
        found, zeroed = gradients_of_padding(rng, cupy, dtype, head_dim, score, family=family)
    except cupy_flash.UnsupportedError as error:
        pytest.skip(str(error))
    assert not found[0][0, :20].any()
    assert not found[0][1, 69].any()
    for one, other in zip(found, zeroed, strict=True):
        assert other.any()
        assert_same(one, other, dtype)
