"""Tests of `apply_rotary` against products of complex numbers."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.libraries import HOST_LIBRARIES, host_array

from cupy_flash import apply_rotary, apply_rotary_vjp, flash_attention_with_kvcache

Array = np.ndarray
ROWS = 40
SHAPES = [(2, 13, 3, 12), (1, 40, 1, 8), (13, 3, 12), (3, 0, 2, 8), (0, 5, 2, 8), (1, 2, 9)]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def tables(rng: np.random.Generator, half: int, dtype: Any = np.float64) -> tuple[Array, Array]:
    angles = rng.uniform(-np.pi, np.pi, (ROWS, half))
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def turned(x: Array, cos: Array, sin: Array, positions: Array, *, interleaved: bool) -> Array:
    """Return the rows in float64, with pairs of columns multiplied by cos + i sin."""
    half = cos.shape[1]
    first = np.arange(half) * 2 if interleaved else np.arange(half)
    second = first + (1 if interleaved else half)
    result = x.astype(np.float64)
    factors = (cos.astype(np.float64) + 1j * sin.astype(np.float64))[positions]
    numbers = (result[..., first] + 1j * result[..., second]) * factors[..., None, :]
    result[..., first], result[..., second] = numbers.real, numbers.imag
    return result


def assert_rounded(found: Array, expected: Array, x: Array, cos: Array, sin: Array) -> None:
    """Assert an error of at most three roundings in the sums and one to the dtype."""
    assert found.dtype == x.dtype
    assert found.shape == x.shape
    largest = float(np.abs(x.astype(np.float64)).max(initial=0))
    terms = 2 * largest * float(max(np.abs(cos).max(), np.abs(sin).max(), 1))
    sums = 2.0**-53 if x.dtype == np.float64 else 2.0**-24
    bound = (3 * sums + float(ml_dtypes.finfo(x.dtype).eps) / 2) * terms
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_turn_as_complex_numbers(
    shape: tuple[int, ...], dtype: Any, interleaved: bool, rng: np.random.Generator
) -> None:
    x = rng.standard_normal(shape).astype(dtype)
    before = x.copy()
    for half in {1, int(rng.integers(1, shape[-1] // 2 + 1)), shape[-1] // 2}:
        for of_table in {dtype, np.float64 if dtype is np.float64 else np.float32}:
            cos, sin = tables(rng, half, of_table)
            found = apply_rotary(x, cos, sin, interleaved=interleaved)
            places = np.broadcast_to(np.arange(shape[-3]), shape[:-2])
            expected = turned(x, cos, sin, places, interleaved=interleaved)
            assert_rounded(found, expected, x, cos, sin)
            # Columns past the rotary dimension do not change.
            np.testing.assert_array_equal(found[..., 2 * half :], x[..., 2 * half :])
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("shape", [(2, 13, 3, 12), (13, 3, 12)])
def test_positions_that_broadcast(shape: tuple[int, ...], kind: Any, rng: Any) -> None:
    x = rng.standard_normal(shape)
    cos, sin = tables(rng, 4)
    for of_positions in {shape[:-2], (13,), (1,), (), (*shape[:-3], 1)}:
        positions = rng.integers(ROWS, size=of_positions).astype(kind)
        places = np.broadcast_to(positions, shape[:-2])
        expected = turned(x, cos, sin, places, interleaved=False)
        for given in (positions, positions.tolist()):
            assert_rounded(apply_rotary(x, cos, sin, given), expected, x, cos, sin)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_with_a_cache_rotates_alike(dtype: Any, interleaved: bool, rng: Any) -> None:
    k, v = rng.standard_normal((2, 3, 2, 2, 16)).astype(dtype)
    q = rng.standard_normal((3, 2, 4, 16)).astype(dtype)
    cos, sin = tables(rng, 6, np.float64 if dtype is np.float64 else np.float32)
    lengths = np.array([5, 0, 38], np.int32)
    caches = np.zeros((2, 2, 3, ROWS, 2, 16), dtype)
    options = {"cache_seqlens": lengths, "causal": True, "backend": "cpu"}
    turn = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    expected = flash_attention_with_kvcache(q, *caches[0], k, v, **options, **turn)
    positions = lengths[:, None] + np.arange(2)
    q, k = (apply_rotary(x, cos, sin, positions, interleaved) for x in (q, k))
    found = flash_attention_with_kvcache(q, *caches[1], k, v, **options)
    np.testing.assert_array_equal(caches[1], caches[0])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(2, 13, 3, 12), (13, 3, 12)])
def test_the_pullback_is_the_transpose(shape: tuple[int, ...], interleaved: bool, rng: Any) -> None:
    x, dout = rng.standard_normal((2, *shape))
    # Random tables are not rotations, so their transpose differs from the inverse.
    cos, sin = rng.standard_normal((2, ROWS, 4))
    positions = rng.integers(ROWS, size=shape[:-2])
    out, pullback = apply_rotary_vjp(x, cos, sin, positions, interleaved)
    np.testing.assert_array_equal(out, apply_rotary(x, cos, sin, positions, interleaved))
    dx = pullback(dout)
    # The map is linear and rows are independent, so each row satisfies <out, dout> = <x, dx>.
    of_rows = (out * dout).sum(axis=-1), (x * dx).sum(axis=-1)
    np.testing.assert_allclose(*of_rows, rtol=0, atol=2.0**-40)
    for column in range(shape[-1]):
        unit = np.zeros(shape)
        unit[..., column] = 1
        derivative = apply_rotary(unit, cos, sin, positions, interleaved)
        expected = (derivative * dout).sum(axis=-1)
        np.testing.assert_allclose(dx[..., column], expected, rtol=0, atol=2.0**-40)


@pytest.mark.parametrize("library", ["torch", "dlpack"])
def test_arrays_of_other_libraries(library: str, rng: np.random.Generator) -> None:
    to = HOST_LIBRARIES[library]()
    x = rng.standard_normal((2, 13, 3, 12), np.float32)
    cos, sin = tables(rng, 6, np.float32)
    positions = rng.integers(ROWS, size=(2, 13))
    arguments = [to.convert(array) for array in (x, cos, sin, positions)]
    out, pullback = apply_rotary_vjp(*arguments)
    expected, of_numpy = apply_rotary_vjp(x, cos, sin, positions)
    dx = pullback(arguments[0])
    assert type(out) is type(dx) is to.type
    np.testing.assert_array_equal(host_array(out), expected)
    np.testing.assert_array_equal(host_array(dx), of_numpy(x))


_X, _COS = np.zeros((2, 5, 3, 8), np.float32), np.zeros((6, 4), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": None}, TypeError, "x is a NoneType; expected a NumPy or CuPy array"),
        ({"x": _X.astype(int)}, TypeError, "x has dtype int64; expected one of float16"),
        ({"x": _X[0, 0]}, ValueError, "x has 2 axes, shape (3, 8); expected (batch, seqlen"),
        ({"cos": _COS[0]}, ValueError, "cos has 1 axes, shape (4,); expected 2"),
        ({"cos": _COS[1:]}, ValueError, "sin has shape (6, 4); expected (5, 4), as cos"),
        ({"cos": _COS.astype(np.float64)}, TypeError,
         "cos has dtype float64; expected float32, as x is float32"),
        ({"x": _X[..., :7]}, ValueError,
         "cos has 4 columns for a rotary_dim of 8; expected a rotary_dim of 2 to 7"),
        ({"cos": _COS[:4], "sin": _COS[:4]}, ValueError,
         "cos has 4 rows; expected at least 5, one for each position; otherwise pass positions"),
        ({"positions": [1.0] * 5}, TypeError, "positions has dtype float64; expected integers"),
        ({"positions": [[1], [1, 2]]}, ValueError, "positions is not an array of integers"),
        ({"positions": np.zeros(5, bool)}, TypeError, "positions has dtype bool; expected"),
        ({"positions": [1, 2]}, ValueError,
         "positions has shape (2,); expected one that broadcasts to (2, 5), (batch, seqlen)"),
        ({"positions": [0, 1, 2, 3, 6]}, ValueError,
         "positions[4] is 6; expected 0 to 5, as cos has 6 rows"),
        ({"positions": [[0], [-1]]}, ValueError, "positions[1, 0] is -1; expected 0 to 5"),
        ({"positions": 6}, ValueError, "positions is 6; expected 0 to 5"),
        ({"interleaved": 1}, TypeError, "interleaved is 1; expected True or False"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(change: dict[str, Any], error: Any, message: str) -> None:
    for function in (apply_rotary, apply_rotary_vjp):
        with pytest.raises(error, match=re.escape(message)):
            function(**{"x": _X, "cos": _COS, "sin": _COS, **change})


def test_a_gradient_of_another_shape_or_dtype_is_refused() -> None:
    _, pullback = apply_rotary_vjp(_X, _COS, _COS)
    with pytest.raises(ValueError, match=r"dout has shape .*; expected \(2, 5, 3, 8\)"):
        pullback(_X[1:])
    with pytest.raises(TypeError, match="dout has dtype float64; expected float32, as x"):
        pullback(_X.astype(np.float64))
