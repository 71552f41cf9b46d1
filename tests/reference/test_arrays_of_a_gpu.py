"""Arrays in GPU memory as arguments of the reference, with fakes that have CuPy's limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.libraries import cupy_library, host_array

from cupy_flash import (
    ScoreMod,
    attention_backward_reference,
    attention_hvp_reference,
    attention_jvp_reference,
    attention_reference,
    attention_varlen_reference,
    attention_weights,
    attention_with_kvcache_reference,
    flash_attention_hvp,
    flash_attention_jvp,
    seen_pairs,
)
from cupy_flash.cli.measure.check import why_no_matmul
from cupy_flash.reference.dense import attention_naive
from cupy_flash.reference.packed_gradients import attention_varlen_backward_reference

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
BATCH, QUERIES, KEYS, HEADS, HEADS_KV, DIM = 2, 5, 7, 4, 2, 8


class OnGpu:
    """Fake CuPy array, which NumPy's functions can read only after a copy to the host."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    @property
    def itemsize(self) -> int:
        return self._array.itemsize

    def get(self) -> np.ndarray:
        return self._array

    def __dlpack_device__(self) -> tuple[int, int]:
        raise AssertionError("an array of CuPy is not read through DLPack")

    __dlpack__ = __dlpack_device__


# `cupy_flash.arrays.strided` recognizes CuPy's arrays by this module.
OnGpu.__module__ = "cupy"


class LikeCupy(np.ndarray):
    """Fake CuPy array that, like CuPy's, neither converts nor copies float8."""

    def _refuse_float8(self, *dtypes: Any) -> None:
        if FLOAT8 in (self.dtype, *map(np.dtype, dtypes)):
            raise ValueError("Unsupported dtype float8_e4m3fn")

    def astype(self, dtype: Any, *arguments: Any, **options: Any) -> Any:
        self._refuse_float8(dtype)
        return super().astype(dtype, *arguments, **options)

    def copy(self, *arguments: Any, **options: Any) -> Any:
        self._refuse_float8()
        return super().copy(*arguments, **options)

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, np.ndarray) for part in parts):
            self._refuse_float8()
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._refuse_float8(np.asarray(value).dtype)
        super().__setitem__(index, value)


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "mask": rng.random((BATCH, HEADS, QUERIES, KEYS)) < 0.6,
        "tree_mask": rng.integers(0, 2**QUERIES, (BATCH, QUERIES), dtype=np.uint64),
        "prefix_lens": np.array([3, 1], np.int32),
        "seqlens_k": np.array([4, 6], np.int32),
        "bias": rng.standard_normal((BATCH, HEADS, QUERIES, KEYS)).astype(np.float32),
        "alibi_slopes": rng.random(HEADS).astype(np.float32),
        "sinks": rng.standard_normal(HEADS).astype(np.float32),
    }


NAMES = ("mask", "tree_mask", "prefix_lens", "seqlens_k", "bias", "alibi_slopes", "sinks")


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_those_of_host_arrays(name: str, arrays: dict[str, np.ndarray]) -> None:
    given = {"b": 1, "h": 2, "causal": name == "prefix_lens"}
    seen = seen_pairs(QUERIES, KEYS, **given, **{name: OnGpu(arrays[name])})
    np.testing.assert_array_equal(seen, seen_pairs(QUERIES, KEYS, **given, **{name: arrays[name]}))


@pytest.mark.parametrize("name", NAMES)
def test_modifications_of_host_queries_may_lie_on_a_gpu(
    name: str, arrays: dict[str, np.ndarray], rng: np.random.Generator
) -> None:
    q = rng.standard_normal((BATCH, QUERIES, HEADS, DIM))
    k, v = rng.standard_normal((2, BATCH, KEYS, HEADS_KV, DIM))
    given = {"causal": name == "prefix_lens"}
    for function, inputs in (
        (attention_reference, (q, k, v)),
        (attention_naive, (q, k, v)),
        (attention_backward_reference, (q, q, k, v)),
        (attention_hvp_reference, (q, q, k, v, q)),
        (attention_jvp_reference, (q, k, v, q)),
        (attention_weights, (q, k)),
    ):
        found = function(*inputs, **given, **{name: OnGpu(arrays[name])})
        np.testing.assert_equal(found, function(*inputs, **given, **{name: arrays[name]}))


def test_scales_of_host_arrays_may_lie_on_a_gpu(rng: np.random.Generator) -> None:
    q = rng.standard_normal((BATCH, QUERIES, HEADS, DIM)).astype(FLOAT8)
    scale = rng.random((BATCH, 1, HEADS)).astype(np.float32)
    names = "q_scale", "k_scale", "v_scale"
    found = attention_reference(q, q, q, **dict.fromkeys(names, OnGpu(scale)))
    expected = attention_reference(q, q, q, **dict.fromkeys(names, scale))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "function",
    [
        *(attention_jvp_reference, flash_attention_jvp),
        *(attention_hvp_reference, flash_attention_hvp),
    ],
)
def test_tangents_of_two_memories_are_refused(function: Any, rng: np.random.Generator) -> None:
    shapes = [(BATCH, QUERIES, HEADS, DIM), *[(BATCH, KEYS, HEADS_KV, DIM)] * 2] * 2
    names = ["q", "k", "v", "q_tangent", "k_tangent", "v_tangent"]
    if "hvp" in function.__name__:
        names += ["dout", "dout_tangent", "dlse", "dlse_tangent"]
        shapes += [shapes[0]] * 2 + [(BATCH, HEADS, QUERIES)] * 2
    arrays = {n: rng.standard_normal(shape) for n, shape in zip(names, shapes, strict=True)}
    for name in names[1:]:
        with pytest.raises(TypeError, match=f"^q lies in host memory and {name} on a GPU; move"):
            function(**arrays | {name: OnGpu(arrays[name])})
    with pytest.raises(TypeError, match=r"^k lies in host memory and q on a GPU"):
        function(**arrays | {"q": OnGpu(arrays["q"])})


def test_tangents_of_modifications_may_lie_on_a_gpu(rng: np.random.Generator) -> None:
    q, k, v = (
        rng.standard_normal((BATCH, rows, heads, DIM))
        for rows, heads in ((QUERIES, HEADS), (KEYS, HEADS_KV), (KEYS, HEADS_KV))
    )
    gain = rng.random(HEADS)
    options = {
        "bias": rng.standard_normal((HEADS, QUERIES, KEYS)),
        "sinks": rng.standard_normal(HEADS),
        "score_mod": ScoreMod(
            lambda score, h, gain: score * gain[h], gain=gain, differentiable=("gain",)
        ),
    }
    tangents = {"bias": options["bias"], "sinks": options["sinks"], "score_mod.gain": gain}
    elsewhere = {name: OnGpu(x) for name, x in tangents.items()}
    for function, inputs in ((flash_attention_jvp, (q, k, v)), (flash_attention_hvp, (q, q, k, v))):
        found, expected = (
            function(*inputs, modification_tangents=x, **options) for x in (elsewhere, tangents)
        )
        np.testing.assert_equal(found, expected)


def dense(rng: Any, function: Callable[..., Any], *lengths: Any, **scales: Any) -> Any:
    """Return a call with float8 arrays, which are packed if lengths are given."""

    def call(convert: Callable[[Any], Any]) -> Any:
        return function(*map(convert, inputs), *lengths, **scales)

    batch = () if lengths else (BATCH,)
    q, k, v = (
        rng.standard_normal((*batch, rows, heads, DIM)).astype(FLOAT8)
        for rows, heads in ((QUERIES, HEADS), (KEYS, HEADS_KV), (KEYS, HEADS_KV))
    )
    inputs = (q, k, v) if "backward" not in function.__name__ else (q, q, k, v)
    return call


def weights_of_two_rows(q: Any, k: Any, _: Any, **scales: Any) -> Any:
    return attention_weights(q, k, queries=[3, 1], heads=[2, 0], **scales)


def with_tangents_of_inputs(q: Any, k: Any, v: Any) -> Any:
    return attention_jvp_reference(q, k, v, q, k, v)


def with_directions_of_inputs(q: Any, k: Any, v: Any) -> Any:
    return attention_hvp_reference(q, q, k, v, q, k, v, q)


def packed(rng: np.random.Generator, function: Callable[..., Any], **scales: Any) -> Any:
    return dense(rng, function, np.array([0, 2, 5]), np.array([0, 4, 7]), 3, 4, **scales)


def cached(rng: np.random.Generator, **options: Any) -> Any:
    def call(convert: Callable[[Any], Any]) -> Any:
        of_8_bits = (convert(x) for x in (q, k_cache, v_cache))
        result = attention_with_kvcache_reference(
            *of_8_bits, convert(k), convert(v), cache_seqlens=[2, 6], **options
        )
        # Return the codes of float8, which show the sign of 0.
        caches = (x.view(np.uint8) for x in (result.k_cache, result.v_cache))
        return (*result[:2], *caches, *result[4:])

    q = rng.standard_normal((BATCH, 2, HEADS, DIM)).astype(FLOAT8)
    k_cache, v_cache = rng.standard_normal((2, BATCH, 8, HEADS_KV, DIM)).astype(FLOAT8)
    k, v = 300 * rng.standard_normal((2, BATCH, 2, HEADS_KV, DIM)).astype(np.float16)
    k[0, 0, 0, :3] = [np.nan, -0.0, -1e-4]
    return call


CALLS: dict[str, Callable[[np.random.Generator], Any]] = {
    "dense": lambda rng: dense(rng, attention_reference),
    "dense with scales": lambda rng: dense(rng, attention_reference, q_scale=2.0, v_scale=0.3),
    "weights": lambda rng: dense(rng, weights_of_two_rows, k_scale=0.3),
    "naive": lambda rng: dense(rng, attention_naive, dtype=np.float32),
    "gradients": lambda rng: dense(rng, attention_backward_reference),
    "tangents": lambda rng: dense(rng, with_tangents_of_inputs),
    "second derivatives": lambda rng: dense(rng, with_directions_of_inputs),
    "packed": lambda rng: packed(rng, attention_varlen_reference),
    "packed with scales": lambda rng: packed(rng, attention_varlen_reference, k_scale=0.3),
    "gradients of packed": lambda rng: packed(rng, attention_varlen_backward_reference),
    "cached": cached,
    "cached with scales": lambda rng: cached(rng, k_scale=0.3, v_scale=2.0),
    "cached with computed scales": lambda rng: cached(rng, compute_scales=True),
    "paged": lambda rng: cached(rng, block_table=np.array([[0], [1]], np.int32)),
}


@pytest.mark.parametrize("name", CALLS)
def test_float8_is_read_and_written_by_its_codes(name: str, rng: np.random.Generator) -> None:
    call = CALLS[name](rng)
    results = call(lambda array: array.view(LikeCupy))
    np.testing.assert_equal(results, call(lambda array: array))


# The naive formula is left out: it rounds to float8, where the last bit of exp may decide.
@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"naive"}))
def test_float8_of_cupy(name: str, rng: np.random.Generator) -> None:
    if reason := why_no_matmul():
        pytest.skip(reason)
    call = CALLS[name](rng)
    results, expected = call(cupy_library().convert), call(lambda array: array)
    if not isinstance(expected, tuple):
        results, expected = (results,), (expected,)
    for one, other in zip(results, expected, strict=True):
        if other is None:
            assert one is None
        elif other.dtype == np.uint8:
            # NaN has a code of each sign.
            codes = host_array(one), other
            np.testing.assert_array_equal(*(x.view(FLOAT8).astype(np.float32) for x in codes))
        else:
            # Scores of up to 2^12, sums of 8 products, have errors of 2^-37, and change results by
            # at most twice that fraction of the largest value. Weights are rounded to float32.
            largest = np.abs(other[np.isfinite(other)]).max(initial=1)
            error = max(2.0**-36, float(np.finfo(other.dtype).eps))
            np.testing.assert_allclose(host_array(one), other, rtol=0, atol=error * largest)
