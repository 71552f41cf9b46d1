"""`quantize_kv`: error of the quantized values, and calls that read such caches."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.calls.quantized_support import CACHE_DTYPES
from support.libraries import HOST_LIBRARIES, host_array

from cupy_flash import (
    attention_varlen_reference,
    attention_with_kvcache_reference,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
    quantize_kv,
)
from cupy_flash.arrays.float8 import float8_codes

Array = np.ndarray
Shape = tuple[int, ...]
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
# Axes of a cache, or of packed rows, that share a scale, and the shape of the scales.
SHARED = {
    "tensor": ((0, 1, 2, 3), ()),
    "head": ((0, 1, 3), (3,)),
    "page": ((1, 3), (5, 1, 3)),
    "row": ((3,), (5, 8, 3)),
}
OF_PACKED = {"tensor": ((0, 1, 2), ()), "head": ((0, 2), (3,)), "row": ((2,), (40, 3))}
CASES = [((5, 8, 3, 20), per, *of) for per, of in SHARED.items()]
CASES += [((40, 3, 20), per, *of) for per, of in OF_PACKED.items()]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def spread(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Return random numbers whose magnitude differs between heads and between pages."""
    sizes = 2.0 ** rng.integers(-6, 6, (*shape[:-3], 1, shape[-2], 1))
    return (rng.standard_normal(shape) * sizes).astype(dtype)


def restored(values: Array, scales: Array) -> Array:
    """Return the quantized values times their scales, in float64."""
    return values.astype(np.float64) * scales[..., None].astype(np.float64)


def half_units(x: Array, scales: Array, dtype: str) -> Array:
    """Return half of the distance between the two 8-bit numbers around each number."""
    if dtype == "int8":
        return np.broadcast_to(scales[..., None] / 2, x.shape)
    quotients = x.astype(np.float64) / scales[..., None]
    _, exponents = np.frexp(quotients)
    # float8_e4m3fn has four significant bits; subnormal numbers are multiples of 2^-9.
    return scales[..., None] * 2.0 ** (np.maximum(exponents - 4, -9) - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", CACHE_DTYPES)
@pytest.mark.parametrize(("shape", "per", "axes", "of_scales"), CASES)
def test_a_number_is_off_by_at_most_half_a_unit(
    shape: Shape, per: str, axes: Shape, of_scales: Shape, stored: str, dtype: Any, rng: Any
) -> None:
    x = spread(rng, shape, dtype)
    before = x.copy()
    values, scales = quantize_kv(x, stored, per)
    kind, largest = CACHE_DTYPES[stored]
    assert values.dtype == kind
    assert values.shape == shape
    assert (scales.dtype, scales.shape) == (np.float32, of_scales)
    exact = np.abs(x.astype(np.float64)).max(axis=axes).reshape(of_scales) / largest
    np.testing.assert_allclose(scales, exact, rtol=2.0**-23, atol=0)
    errors = np.abs(restored(values, scales) - x.astype(np.float64))
    # The quotients x / scale are rounded to float32 before they are quantized.
    rounding = 2.0**-23 * np.abs(x.astype(np.float64))
    assert (errors <= half_units(x, scales, stored) + rounding).all()
    # The largest magnitude is quantized to the largest number of the dtype.
    assert np.abs(values.astype(np.float32)).max() == largest
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("stored", CACHE_DTYPES)
@pytest.mark.parametrize("per", SHARED)
def test_a_cache_is_taken_with_its_scales(per: str, stored: str, rng: np.random.Generator) -> None:
    k, v = spread(rng, (5, 8, 3, 20)), spread(rng, (5, 8, 3, 12))
    q = rng.standard_normal((2, 1, 6, 20), np.float32)
    table = np.array([[4, 0], [2, 1]], np.int32)
    (k_bytes, k_scale), (v_bytes, v_scale) = (quantize_kv(x, stored, per) for x in (k, v))
    given = {"cache_seqlens": [13, 16], "block_table": table, "causal": True}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    found = flash_attention_with_kvcache(q, k_bytes, v_bytes, **given, **scales, backend="cpu")
    k, v = restored(k_bytes, k_scale), restored(v_bytes, v_scale)
    given["cache_seqlens"] = np.array([13, 16], np.int32)
    expected = attention_with_kvcache_reference(q.astype(np.float64), k, v, None, None, **given)
    assert_alike(found, expected.out, q, k, v)


@pytest.mark.parametrize("stored", CACHE_DTYPES)
@pytest.mark.parametrize("per", OF_PACKED)
def test_packed_rows_are_taken_with_their_scales(per: str, stored: str, rng: Any) -> None:
    k, v = spread(rng, (40, 3, 20)), spread(rng, (40, 3, 12))
    q = rng.standard_normal((9, 6, 20), np.float32)
    (k_bytes, k_scale), (v_bytes, v_scale) = (quantize_kv(x, stored, per) for x in (k, v))
    lengths = np.array([0, 4, 9], np.int32), np.array([0, 27, 40], np.int32), 5, 27
    found = flash_attention_varlen(
        *(q, k_bytes, v_bytes, *lengths), k_scale=k_scale, v_scale=v_scale, backend="cpu"
    )
    k, v = restored(k_bytes, k_scale), restored(v_bytes, v_scale)
    expected, _ = attention_varlen_reference(q.astype(np.float64), k, v, *lengths)
    assert_alike(found, expected, q, k, v)


def assert_alike(found: Array, expected: Array, q: Array, k: Array, v: Array) -> None:
    """Assert that results differ by no more than rounding errors of scores and means in float32."""
    of_scores = 2.0**-23 * q.shape[-1] ** 0.5 * float(np.abs(q).max() * np.abs(k).max())
    bound = (2.0**-18 + 4 * of_scores) * float(np.abs(v).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("stored", CACHE_DTYPES)
def test_rows_have_the_scales_that_an_append_computes(stored: str, rng: Any) -> None:
    k, v = (spread(rng, (3, 4, 2, 16)) for _ in range(2))
    kind, _ = CACHE_DTYPES[stored]
    k_cache, v_cache = np.zeros((2, 3, 4, 2, 16), kind)
    k_scale, v_scale = np.zeros((2, 3, 4, 2), np.float32)
    q = rng.standard_normal((3, 1, 2, 16), np.float32)
    given = {"k_scale": k_scale, "v_scale": v_scale, "compute_scales": True, "backend": "cpu"}
    flash_attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0, **given)
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        values, scales = quantize_kv(x, stored, per="row")
        np.testing.assert_array_equal(values.view(np.uint8), cache.view(np.uint8))
        np.testing.assert_array_equal(scales, scale)


@pytest.mark.parametrize("stored", CACHE_DTYPES)
@pytest.mark.parametrize("per", SHARED)
def test_zeros_and_nothing(per: str, stored: str) -> None:
    for shape in ((5, 8, 3, 20), (0, 8, 3, 20), (5, 0, 3, 20), (5, 8, 0, 20)):
        values, scales = quantize_kv(np.zeros(shape, np.float32), stored, per)
        assert values.shape == shape
        assert not values.astype(np.float32).any()
        assert not scales.any()
        _, expected = SHARED[per]
        assert scales.ndim == len(expected)


def test_float8_codes_are_those_of_ml_dtypes(rng: np.random.Generator) -> None:
    bits = rng.integers(2**32, size=1 << 20, dtype=np.uint32)
    numbers = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)
    # All float8 numbers, the midpoints between neighbours, and the float32 numbers around these.
    finite = np.sort(numbers[np.isfinite(numbers)])
    edges = np.concatenate([numbers, (finite[1:] + finite[:-1]) / 2])
    near = [np.nextafter(edges, np.float32(to)) for to in (-np.inf, np.inf)]
    with np.errstate(invalid="ignore"):
        x = np.clip(np.concatenate([bits.view(np.float32), edges, *near]), -448, 448)
        expected = x.astype(FLOAT8).view(np.uint8)
    # The sign of NaN has no meaning, so NaNs are compared separately.
    known = ~np.isnan(x)
    np.testing.assert_array_equal(float8_codes(x)[known], expected[known])
    assert np.isnan(float8_codes(x[~known]).view(FLOAT8).astype(np.float32)).all()


@pytest.mark.parametrize("library", ["torch", "dlpack"])
@pytest.mark.parametrize("stored", CACHE_DTYPES)
def test_arrays_of_other_libraries(stored: str, library: str, rng: np.random.Generator) -> None:
    to = HOST_LIBRARIES[library]()
    if library == "dlpack" and stored == "float8_e4m3fn":
        pytest.skip("DLPack of NumPy has no float8")
    x = spread(rng, (5, 8, 3, 20))
    found = quantize_kv(to.convert(x), stored, "page")
    for one, expected in zip(found, quantize_kv(x, stored, "page"), strict=True):
        assert type(one) is to.type
        np.testing.assert_array_equal(host_array(one), expected)


def test_dtypes_by_any_name() -> None:
    x = np.ones((2, 3, 4), np.float32)
    for dtype in ("int8", np.int8, np.dtype("int8")):
        assert quantize_kv(x, dtype)[0].dtype == np.int8
    for dtype in ("float8_e4m3fn", FLOAT8, ml_dtypes.float8_e4m3fn):
        assert quantize_kv(x, dtype)[0].dtype == FLOAT8


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": None}, TypeError, "x is a NoneType; expected a NumPy or CuPy array"),
        ({"x": np.ones((2, 3, 4), int)}, TypeError, "x has dtype int64; expected one of float16"),
        ({"x": np.ones((3, 4))}, ValueError, "x has shape (3, 4); expected (pages, page_size"),
        ({"dtype": np.uint8}, TypeError, "expected one of float8_e4m3fn, int8"),
        ({"dtype": None}, TypeError, "dtype is None; expected one of float8_e4m3fn, int8"),
        ({"per": "column"}, ValueError, "per is 'column'; expected one of tensor, head, page, row"),
        ({"per": "page"}, ValueError,
         "x has shape (2, 3, 4); expected (pages, page_size, heads_kv, head_dim), "
         "as per is 'page'"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(change: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        quantize_kv(**{"x": np.ones((2, 3, 4), np.float32), "dtype": np.int8, **change})


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_numbers_of_8_bits_of_other_libraries_are_read_on_the_host(library: str, rng: Any) -> None:
    module = pytest.importorskip(library)
    q, *caches = rng.standard_normal((3, 1, 9, 2, 16)).astype(FLOAT8)
    step = np.ones((1, 1, 2, 16), np.float32)

    def converted(array: np.ndarray) -> object:
        if library == "jax":
            (cpu,) = module.devices("cpu")[:1]
            return module.device_put(array, cpu)
        if array.dtype != FLOAT8:
            return module.from_numpy(array)
        return module.from_numpy(array.view(np.uint8)).view(module.float8_e4m3fn)

    for call, arrays in (
        (flash_attention, (q, q, q)),
        (lambda q, k, v: flash_attention_with_kvcache(q, k, v, cache_seqlens=7), (step, *caches)),
    ):
        out = call(*map(converted, arrays))
        assert type(out) is type(converted(step))
        expected = call(*arrays).astype(np.float32)
        found = np.asarray(out.float() if library == "torch" else out).astype(np.float32)
        np.testing.assert_array_equal(found, expected)
