"""Rotary embedding and 8-bit quantization of CuPy arrays, against those of NumPy arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.calls.quantized_support import CACHE_DTYPES
from support.libraries import cupy_library, host_array

from cupy_flash import apply_rotary, apply_rotary_vjp, quantize_kv

pytestmark = pytest.mark.gpu

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.mark.parametrize("per", ["tensor", "head", "page", "row"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", CACHE_DTYPES)
def test_numbers_of_8_bits_have_the_bits_of_numpys(
    stored: str, dtype: Any, per: str, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((5, 8, 3, 20)).astype(dtype)
    x[2, 3] = 0
    found = quantize_kv(cupy_library().convert(x), stored, per)
    for array, expected in zip(found, quantize_kv(x, stored, per), strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(host_array(array), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rotated_as_numpys(
    dtype: Any, interleaved: bool, rng: np.random.Generator
) -> None:
    convert = cupy_library().convert
    x, dout = (rng.standard_normal((2, 13, 3, 12)).astype(dtype) for _ in range(2))
    cos, sin = (rng.standard_normal((40, 5)).astype(dtype) for _ in range(2))
    positions = rng.integers(40, size=(2, 13))
    expected, of_numpy = apply_rotary_vjp(x, cos, sin, positions, interleaved)
    arrays = [convert(array) for array in (x, cos, sin)]
    for places in (convert(positions), positions, positions.tolist()):
        out, pullback = apply_rotary_vjp(*arrays, places, interleaved)
        results = (out, expected), (pullback(convert(dout)), of_numpy(dout))
        for found, right in results:
            assert found.dtype == dtype
            wide = right.astype(np.float64)
            # The factors are at most 6. Their products may be fused (FMA), and are rounded once.
            bound = float(ml_dtypes.finfo(dtype).eps) * np.maximum(np.abs(wide), 36)
            assert (np.abs(host_array(found).astype(np.float64) - wide) <= bound).all()


def test_a_position_on_a_gpu_without_a_row_takes_the_nearest(rng: np.random.Generator) -> None:
    convert = cupy_library().convert
    arrays = [convert(rng.standard_normal(shape)) for shape in ((1, 3, 2, 8), (6, 4), (6, 4))]
    found = apply_rotary(*arrays, convert(np.array([-3, 6, 100])))
    expected = apply_rotary(*arrays, convert(np.array([0, 5, 5])))
    np.testing.assert_array_equal(host_array(found), host_array(expected))


def test_positions_on_a_gpu_are_for_rows_on_a_gpu(rng: np.random.Generator) -> None:
    x, cos = rng.standard_normal((3, 2, 8)), rng.standard_normal((6, 4))
    with pytest.raises(TypeError, match="x lies in host memory and positions on a GPU"):
        apply_rotary(x, cos, cos, cupy_library().convert(np.arange(3)))
