"""Short-lived streams never use the same counters or workspace; calls run on their `stream`."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest
from support.gpu import cupy
from support.gpu.gpu_support import bits

from cupy_flash import flash_attention, flash_attention_with_kvcache
from cupy_flash.arrays.streams import handle_of
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
    with warnings.catch_warnings():
        # The replacement of this deprecated class supports fewer versions of torch.
        warnings.simplefilter("ignore", DeprecationWarning)
        capturing = cupy.cuda.ExternalStream(handle_of(stream))
    capturing.begin_capture()
    assert flash_attention(q, k, v, out=written, stream=stream) is written
    graph = capturing.end_capture()
    cupy.cuda.Device().synchronize()
    assert not out.any()
    graph.launch(capturing)
    cupy.cuda.Device().synchronize()
    np.testing.assert_array_equal(out.get(), expected)
