"""Short-lived streams never use the same counters or workspace; calls run on their `stream`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import libraries
from support.gpu import cupy
from support.gpu.gpu_support import BUSY, bits, keep_busy

import cupy_flash
from cupy_flash import flash_attention, flash_attention_with_kvcache
from cupy_flash.arrays.streams import handle_of
from cupy_flash.cli.measure.check import why_no_matmul
from cupy_flash.gpu import counters

pytestmark = pytest.mark.gpu

PAIRS = 148
# Calls per stream, enough that its kernels still run when the stream is destroyed.
CALLS = 4


class Steps:
    """Decoding steps over long caches, whose KV splits are merged through device memory."""

    def __init__(self, rng: np.random.Generator, family: str) -> None:
        def random(*shape: int) -> Any:
            return cupy.asarray(rng.standard_normal(shape, np.float32).astype(np.float16))

        self.q = random(2, 1, 8, 128)
        self.caches = [random(2, 20_000, 2, 128) for _ in range(2)]
        self.lengths = cupy.asarray(np.array([20_000, 13_331], np.int32))
        self.options = {"family": family, "num_splits": 24}

    def __call__(self, out: Any) -> None:
        flash_attention_with_kvcache(
            self.q, *self.caches, cache_seqlens=self.lengths, out=out, **self.options
        )

    def bits_alone(self) -> np.ndarray:
        """Return the bits of the output of a call while no other one runs."""
        out = cupy.ndarray(self.q.shape, np.float16)
        self(out)
        expected = bits(out.get())
        cupy.cuda.Device().synchronize()
        return expected


@pytest.mark.parametrize("family", ["decode", "mma"])
def test_a_stream_with_the_handle_of_one_that_was_destroyed_is_not_disturbed_by_its_kernels(
    rng: np.random.Generator, family: str
) -> None:
    steps = Steps(rng, family)
    outs = cupy.asarray(np.full((PAIRS, 2, CALLS, *steps.q.shape), np.nan, np.float16))
    expected = steps.bits_alone()
    for pair in outs:
        for results in pair:
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                for out in results:
                    steps(out)
            # The kernels still run, and the next stream may get the handle of this one. It always
            # did before each call recorded an event; since then it never did on the tested driver.
            del stream
    cupy.cuda.Device().synchronize()
    wrong = [i for i, pair in enumerate(outs.get()) if not all_alike(pair, expected)]
    assert wrong == []


def all_alike(results: np.ndarray, expected: np.ndarray) -> bool:
    return bool((bits(results) == expected).all())


def test_threads_that_come_and_go_on_their_default_streams_do_not_disturb_each_other(
    rng: np.random.Generator,
) -> None:
    steps = Steps(rng, "decode")
    outs = cupy.asarray(np.full((60, CALLS, *steps.q.shape), np.nan, np.float16))
    expected = steps.bits_alone()

    def work(results: Any) -> None:
        with cupy.cuda.Stream.ptds:
            for out in results:
                steps(out)

    for results in outs:
        thread = threading.Thread(target=work, args=(results,))
        thread.start()
        thread.join()
    cupy.cuda.Device().synchronize()
    assert all_alike(outs.get(), expected)


def test_calls_on_a_stream_of_ones_own_take_words_only_once(rng: np.random.Generator) -> None:
    steps = Steps(rng, "decode")
    out = cupy.ndarray(steps.q.shape, np.float16)
    steps(out)
    kept = 0
    for index in range(300):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            steps(out)
            stream.synchronize()
        if index == 100:
            kept = len(counters._kept)
    assert len(counters._kept) == kept > 0


# ---- Options in GPU memory


def test_a_scale_on_the_gpu_that_was_changed_in_place_counts_by_its_present_value(
    rng: np.random.Generator,
) -> None:
    q, k, v = (cupy.asarray(rng.standard_normal((1, 70, 2, 64), np.float32)) for _ in range(3))
    scale = cupy.asarray(np.float32(0.125))
    for value in (0.125, 0.5, 2.0):
        scale[...] = value
        out = flash_attention(q, k, v, softmax_scale=scale)
        expected = flash_attention(q, k, v, softmax_scale=value)
        np.testing.assert_array_equal(out.get(), expected.get())


def stream_of(library: str) -> Any:
    """Return a new stream of a library, which does not wait for the null stream."""
    if library == "cupy":
        return cupy.cuda.Stream(non_blocking=True)
    if library == "torch":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("this torch has no GPU")
        return torch.cuda.Stream()
    return pytest.importorskip("numba.cuda").stream()


def as_cupys(stream: Any) -> Any:
    """Return a stream of any library as one of CuPy."""
    with warnings.catch_warnings():
        # The replacement of this deprecated class supports fewer versions of torch.
        warnings.simplefilter("ignore", DeprecationWarning)
        return cupy.cuda.ExternalStream(handle_of(stream))


@pytest.mark.parametrize("library", ["cupy", "torch", "numba"])
@pytest.mark.parametrize("arrays", ["cupy", "torch"])
def test_a_call_is_captured_on_the_stream_that_it_is_given(
    arrays: str, library: str, rng: np.random.Generator
) -> None:
    stream = stream_of(library)
    q, k, v = (cupy.asarray(rng.standard_normal((2, 113, 4, 64), np.float32)) for _ in range(3))
    out = cupy.zeros_like(q)
    expected = flash_attention(q, k, v).get()
    given = [q, k, v, out]
    if arrays == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.from_dlpack(x) for x in given]
    q, k, v, written = given
    cupy.cuda.Device().synchronize()
    flash_attention(q, k, v, out=written, stream=stream)
    cupy.cuda.Device().synchronize()
    np.testing.assert_array_equal(out.get(), expected)
    out.fill(0)
    cupy.cuda.Device().synchronize()
    capturing = as_cupys(stream)
    capturing.begin_capture()
    assert flash_attention(q, k, v, out=written, stream=stream) is written
    graph = capturing.end_capture()
    cupy.cuda.Device().synchronize()
    assert not out.any()
    graph.launch(capturing)
    cupy.cuda.Device().synchronize()
    np.testing.assert_array_equal(out.get(), expected)


SHAPE = (2, 113, 4, 64)


class Inputs:
    """Arrays that calls read besides the one that is computed late."""

    def __init__(self, convert: Callable[[np.ndarray], Any]) -> None:
        rows, pairs = np.arange(SHAPE[1]), np.arange(1, 9)
        angles = rows[:, None].astype(np.float32) / pairs.astype(np.float32)
        self.tables = convert(np.cos(angles)), convert(np.sin(angles))
        self.mask = convert(np.tri(SHAPE[2], dtype=bool))


def with_gradient(out: Any, pullback: Callable[[Any], Any]) -> tuple[Any, Any]:
    return out, pullback(out)


CALLS_OF_ONE: dict[str, Callable[..., Any]] = {
    "flash_attention": lambda x, _, **stream: flash_attention(x, x, x, **stream),
    "scaled_dot_product_attention": lambda x, given, **stream: (
        cupy_flash.scaled_dot_product_attention(x, x, x, given.mask, **stream)
    ),
    "apply_rotary": lambda x, given, **stream: cupy_flash.apply_rotary(x, *given.tables, **stream),
    "apply_rotary_vjp": lambda x, given, **stream: with_gradient(
        *cupy_flash.apply_rotary_vjp(x, *given.tables, **stream)
    ),
    "quantize_kv": lambda x, _, **stream: cupy_flash.quantize_kv(x, "int8", **stream),
    "attention_reference": lambda x, _, **stream: cupy_flash.attention_reference(
        x, x, x, return_lse=True, **stream
    ),
    "attention_backward_reference": lambda x, _, **stream: cupy_flash.attention_backward_reference(
        x, x, x, x, **stream
    ),
    "attention_hvp_reference": lambda x, _, **stream: cupy_flash.attention_hvp_reference(
        *[x] * 8, **stream
    ),
    "attention_jvp_reference": lambda x, _, **stream: cupy_flash.attention_jvp_reference(
        *[x] * 6, **stream
    ),
    "attention_received": lambda x, _, **stream: cupy_flash.attention_received(x, x, **stream),
    "attention_received_varlen": lambda x, _, **stream: cupy_flash.attention_received_varlen(
        x[0], x[0], [0, 50, 113], [0, 50, 113], 63, 63, **stream
    ),
    "attention_received_with_kvcache": lambda x, _, **stream: (
        cupy_flash.attention_received_with_kvcache(x, x, cache_seqlens=x.shape[1], **stream)
    ),
    "attention_weights": lambda x, _, **stream: cupy_flash.attention_weights(
        x, x, top_k=5, **stream
    ),
    "attention_weights_varlen": lambda x, _, **stream: cupy_flash.attention_weights_varlen(
        x[0], x[0], [0, 50, 113], [0, 50, 113], 63, 63, **stream
    ),
    "attention_weights_with_kvcache": lambda x, _, **stream: (
        cupy_flash.attention_weights_with_kvcache(x, x, cache_seqlens=[50, 113], **stream)
    ),
    "attention_with_kvcache_reference": lambda x, _, **stream: (
        cupy_flash.attention_with_kvcache_reference(x, x, x, cache_seqlens=[50, 113], **stream)
    ),
}


def results_of(name: str, x: Any, given: Inputs, **stream: Any) -> list[Any]:
    """Return the arrays that a call of `CALLS_OF_ONE` returns."""
    if name.startswith("attention") and (reason := why_no_matmul()):
        pytest.skip(reason)
    results = CALLS_OF_ONE[name](x, given, **stream)
    results = results if isinstance(results, tuple) else (results,)
    return [result for result in results if result is not None]


def assert_alike(found: list[np.ndarray], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        # cuBLAS, which references use, does not promise the same bits on every stream.
        np.testing.assert_allclose(one, other.get(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("library", ["cupy", "torch", "numba"])
@pytest.mark.parametrize("name", CALLS_OF_ONE)
def test_every_function_reads_what_was_enqueued_before_on_the_stream_that_it_is_given(
    name: str, library: str, rng: np.random.Generator
) -> None:
    stream = stream_of(library)
    values = cupy.asarray(rng.standard_normal(SHAPE, np.float32))
    given, late = Inputs(cupy.asarray), cupy.zeros_like(values)
    # This call loads all kernels, which could wait for the GPU.
    expected = results_of(name, values, given)
    keep_busy(1)
    cupy.cuda.Device().synchronize()
    with as_cupys(stream) as ours:
        keep_busy(BUSY // 5)
        # On any other stream, the call would read zeros.
        late.data.copy_from_device_async(values.data, values.nbytes, ours)
    found = results_of(name, late, given, stream=stream)
    ours.synchronize()
    assert_alike([one.get() for one in found], expected)


@pytest.mark.parametrize("name", CALLS_OF_ONE)
def test_a_result_for_numba_names_the_stream_that_computes_it(
    name: str, rng: np.random.Generator
) -> None:
    convert = libraries.numba_library().convert
    stream = stream_of("numba")
    values = rng.standard_normal(SHAPE, np.float32)
    expected = results_of(name, cupy.asarray(values), Inputs(cupy.asarray))
    cupy.cuda.Device().synchronize()
    found = results_of(name, convert(values), Inputs(convert), stream=stream)
    for one in found:
        assert one.__cuda_array_interface__["stream"] == handle_of(stream)
    # Numba copies an array on the stream that it names.
    on_host = [one.copy_to_host() for one in found]
    stream.synchronize()
    assert_alike(on_host, expected)
