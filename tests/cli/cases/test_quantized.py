"""8-bit KV caches of benchmarks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupy_flash.cli.cases.quantized import SCALE, quantized, restored

# Largest relative error, from dropped mantissa bits, and largest absolute error, by dtype.
ERRORS = {"float8_e4m3fn": (1 / 8, SCALE * 2**-6), "int8": (0, SCALE / 2)}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("cache_dtype", ERRORS)
def test_a_cache_stands_for_numbers_near_its_own(cache_dtype: str, dtype: type) -> None:
    cache = np.random.default_rng(0).standard_normal((3, 40, 2, 16)).clip(-3.9, 3.9).astype(dtype)
    stored = quantized(cache, cache_dtype)
    assert (stored.dtype.name, stored.shape) == (cache_dtype, cache.shape)
    found = restored(stored, np.dtype(dtype))
    exact = stored.astype(np.float32) * np.float32(SCALE)
    np.testing.assert_array_equal(found.astype(np.float32), exact)
    relative, absolute = ERRORS[cache_dtype]
    before = cache.astype(np.float32)
    assert (np.abs(exact - before) <= relative * np.abs(before) + absolute).all()
    assert np.abs(exact).max() > 2
