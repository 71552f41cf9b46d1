"""The reference's conversions of 8-bit numbers, compared with the list of all such numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupy_flash.reference.eight_bits import dequantized, largest_scales, quantized

QUANTIZED = [np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)]


def all_numbers(dtype: np.dtype) -> np.ndarray:
    numbers = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    if dtype.kind == "i":
        numbers = numbers[numbers >= -127]
    return np.unique(numbers[np.isfinite(numbers)])


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_a_quantized_number_is_the_nearest_that_there_is(rng, dtype):
    numbers = all_numbers(dtype)
    # All numbers, the midpoints of neighbours, and the float32 numbers next to these.
    middles = (numbers[1:] + numbers[:-1]) / 2
    exact = np.concatenate([numbers, middles, [-1e30, 1e30, -np.inf, np.inf, 0.0]])
    exact = exact.astype(np.float32)
    below, above = (np.nextafter(exact, np.float32(side)) for side in (-np.inf, np.inf))
    others = (rng.normal(size=500) * numbers[-1] / 2).astype(np.float32)
    x = np.concatenate([exact, below, above, others])
    result = quantized(x[:, None], np.ones(len(x), np.float32), dtype)[:, 0]
    assert result.dtype == dtype
    for value, stored in zip(x.astype(np.float64), result.astype(np.float64), strict=True):
        with np.errstate(invalid="ignore"):
            distance = np.abs(numbers - np.clip(value, numbers[0], numbers[-1]))
        nearest = numbers[distance == distance.min()]
        assert stored in nearest
        if len(nearest) == 2:
            # A tie goes to the neighbour whose last bit is 0.
            last_bit = np.array([stored]).astype(dtype).view(np.uint8)[0] & 1
            assert last_bit == 0


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_quotients_without_a_value(dtype):
    rows = np.array([[np.nan, 1.0], [3.0, -np.inf], [0.0, np.nan]], np.float32)
    result = quantized(rows, np.array([1, 0, 0], np.float32), dtype).astype(np.float64)
    assert np.isnan(result[0, 0]) if dtype.kind != "i" else result[0, 0] == 0
    np.testing.assert_array_equal(result[1:], np.zeros((2, 2)))


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_computed_scales_and_products_are_exact(rng, dtype):
    rows = rng.normal(size=(5, 3, 7)).astype(np.float32)
    rows[2, 1] = 0
    scales = largest_scales(rows, dtype)
    assert scales.dtype == np.float32
    stored = quantized(rows, scales, dtype)
    largest = np.abs(stored.astype(np.float64)).max(axis=-1)
    assert largest[2, 1] == 0
    largest[2, 1] = 448 if dtype.kind != "i" else 127
    assert (largest == (448 if dtype.kind != "i" else 127)).all()
    back = dequantized(stored, scales)
    for index in np.ndindex(*rows.shape):
        # Exact: the numerator is small, and the denominator is a power of two.
        product = float(stored[index]).as_integer_ratio(), float(scales[index[:2]])
        assert back[index] == product[0][0] * product[1] / product[0][1]
