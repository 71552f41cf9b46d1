"""The argument `stream`: handles of streams of several libraries, and calls on a fake GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.calls.every_array import functions_of
from support.gpu import fake_gpu
from support.libraries import OnlyDlpack, OnlyDlpackNamespace

import cupy_flash
from cupy_flash import UnsupportedError
from cupy_flash.arrays.streams import handle_of
from cupy_flash.gpu.environment import gpu_unavailable

OURS, THEIRS = 0xA0, 0xB0


class Protocol:
    """Stream with the protocol as it is defined."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, THEIRS


class EarlyProtocol:
    """Stream with the protocol as it first was."""

    __cuda_stream__ = (0, THEIRS)


STREAMS: dict[str, tuple[Any, int]] = {
    "protocol": (Protocol(), THEIRS),
    "early protocol": (EarlyProtocol(), THEIRS),
    "torch": (SimpleNamespace(cuda_stream=THEIRS), THEIRS),
    "cupy 13": (SimpleNamespace(ptr=THEIRS), THEIRS),
    "numba": (SimpleNamespace(handle=ctypes.c_void_p(THEIRS)), THEIRS),
    "null of numba": (SimpleNamespace(handle=ctypes.c_void_p(None)), 0),
    "pycuda": (SimpleNamespace(handle=THEIRS), THEIRS),
    "null of cupy": (SimpleNamespace(ptr=0), 0),
    "legacy": (SimpleNamespace(ptr=1), 1),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_gpu.FakeGpu:
    return fake_gpu.install(monkeypatch)


@pytest.mark.parametrize("name", STREAMS)
def test_a_call_runs_on_its_stream(name: str, gpu: fake_gpu.FakeGpu) -> None:
    stream, handle = STREAMS[name]
    assert handle_of(stream) == handle
    gpu.stream = OURS
    q = fake_gpu.FakeArray((2, 113, 6, 40), np.float16)
    cupy_flash.flash_attention(q, q, q, stream=stream)
    cupy_flash.flash_attention(q, q, q)
    # Handle 1 is the null stream, too.
    assert gpu.streams == [0 if handle == 1 else handle, OURS]
    assert gpu.stream == OURS


def arrays(*shapes: tuple[int, ...], dtype: Any = np.float16) -> list[Any]:
    return [fake_gpu.FakeArray(shape, dtype) for shape in shapes]


class Watched(OnlyDlpack):
    """Array in host memory that notes CuPy's current stream when it is read."""

    def __dlpack__(self, **options: Any) -> Any:
        note_stream()
        return super().__dlpack__(**options)

    def __array_namespace__(self, api_version: str | None = None) -> type[WatchedNamespace]:
        return WatchedNamespace


class WatchedNamespace(OnlyDlpackNamespace):
    """Namespace of `Watched`, which notes CuPy's current stream when a result is converted."""

    @staticmethod
    def from_dlpack(array: Any) -> Watched:
        note_stream()
        return Watched(array)


def note_stream() -> None:
    gpu = sys.modules["cupy"].gpu
    gpu.streams.append(gpu.stream)


def watched(*shape: int) -> Watched:
    return Watched(np.ones(shape, np.float32))


ROWS, PACKED, QKV = (2, 113, 6, 40), (226, 6, 40), (2, 113, 3, 6, 40)


def dense(name: str, count: int, *shape: int) -> Callable[[Any], Any]:
    """Return a call of a function on arrays of this shape."""
    return lambda stream: getattr(cupy_flash, name)(*arrays(*[shape] * count), stream=stream)


def packed(name: str) -> Callable[[Any], Any]:
    def call(stream: Any) -> Any:
        rows, ends = arrays(PACKED)[0], arrays((3,), dtype=np.int32)[0]
        lengths = (ends, ends, 113, 113)
        return getattr(cupy_flash, name)(rows, rows, rows, *lengths, stream=stream)

    return call


def cached(stream: Any) -> Any:
    q, *caches, k, v = arrays(*[(2, n, 6, 40) for n in (1, 64, 64, 1, 1)])
    return cupy_flash.flash_attention_with_kvcache(q, *caches, k, v, cache_seqlens=5, stream=stream)


def backward(name: str, count: int, *shape: int) -> Callable[[Any], Any]:
    """Return a call of a function that computes the gradients of arrays of this shape."""

    def call(stream: Any) -> Any:
        dout, out = arrays(*[PACKED if shape == PACKED else ROWS] * 2)
        (lse,) = arrays((6, 226) if shape == PACKED else (2, 6, 113), dtype=np.float32)
        ends = arrays((3,), dtype=np.int32) * 2
        lengths = (*ends, 113, 113) if shape == PACKED else ()
        inputs = arrays(*[shape] * count)
        return getattr(cupy_flash, name)(dout, *inputs, out, lse, *lengths, stream=stream)

    return call


def with_pullback(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a call of a function that returns a pullback, followed by that of the pullback."""

    def both(stream: Any) -> Any:
        out, pullback = call(stream)
        return pullback(out)

    return both


def combine(stream: Any) -> Any:
    (lse,) = arrays((3, 2, 6, 113), dtype=np.float32)
    return cupy_flash.combine(*arrays((3, 2, 113, 6, 40)), lse, stream=stream)


def rotary(name: str) -> Callable[[Any], Any]:
    tables = watched(5, 4), watched(5, 4)
    return lambda stream: getattr(cupy_flash, name)(watched(2, 5, 3, 8), *tables, stream=stream)


def reference(name: str, count: int, *lengths: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a call of a reference; the arrays are packed if lengths are given."""
    shape = (5, 3, 8) if lengths else (2, 5, 3, 8)
    function = getattr(cupy_flash, name)
    return lambda stream: function(
        *(watched(*shape) for _ in range(count)), *lengths, **options, stream=stream
    )


SPANS = ([0, 2, 5], [0, 2, 5], 3, 3)
CALLS: dict[str, Callable[[Any], Any]] = {
    "flash_attention": dense("flash_attention", 3, *ROWS),
    "flash_attention_qkvpacked": dense("flash_attention_qkvpacked", 1, *QKV),
    "flash_attention_varlen": packed("flash_attention_varlen"),
    "flash_attention_with_kvcache": cached,
    "flash_attention_backward": backward("flash_attention_backward", 3, *ROWS),
    "flash_attention_qkvpacked_backward": backward("flash_attention_qkvpacked_backward", 1, *QKV),
    "flash_attention_varlen_backward": backward("flash_attention_varlen_backward", 3, *PACKED),
    "flash_attention_vjp": with_pullback(dense("flash_attention_vjp", 3, *ROWS)),
    "flash_attention_qkvpacked_vjp": with_pullback(dense("flash_attention_qkvpacked_vjp", 1, *QKV)),
    "flash_attention_varlen_vjp": with_pullback(packed("flash_attention_varlen_vjp")),
    "scaled_dot_product_attention": dense("scaled_dot_product_attention", 3, *ROWS),
    "combine": combine,
    "apply_rotary": rotary("apply_rotary"),
    "apply_rotary_vjp": with_pullback(rotary("apply_rotary_vjp")),
    "quantize_kv": lambda stream: cupy_flash.quantize_kv(watched(9, 3, 8), "int8", stream=stream),
    "attention_reference": reference("attention_reference", 3),
    "attention_backward_reference": reference("attention_backward_reference", 4),
    "attention_varlen_reference": reference("attention_varlen_reference", 3, *SPANS),
    "attention_varlen_backward_reference": reference(
        "attention_varlen_backward_reference", 4, *SPANS
    ),
    "attention_hvp_reference": reference("attention_hvp_reference", 8),
    "flash_attention_hvp": reference("flash_attention_hvp", 8),
    "attention_jvp_reference": reference("attention_jvp_reference", 6),
    "flash_attention_jvp": reference("flash_attention_jvp", 6),
    "attention_varlen_hvp_reference": reference("attention_varlen_hvp_reference", 4, *SPANS),
    "flash_attention_varlen_hvp": reference("flash_attention_varlen_hvp", 4, *SPANS),
    "attention_varlen_jvp_reference": reference("attention_varlen_jvp_reference", 3, *SPANS),
    "flash_attention_varlen_jvp": reference("flash_attention_varlen_jvp", 3, *SPANS),
    "attention_received": reference("attention_received", 2),
    "attention_received_varlen": reference("attention_received_varlen", 2, *SPANS),
    "attention_received_with_kvcache": reference(
        "attention_received_with_kvcache", 2, cache_seqlens=[2, 4]
    ),
    "attention_weights": reference("attention_weights", 2),
    "attention_weights_varlen": reference("attention_weights_varlen", 2, *SPANS),
    "attention_weights_with_kvcache": reference(
        "attention_weights_with_kvcache", 2, cache_seqlens=[2, 4]
    ),
    "attention_with_kvcache_reference": reference(
        "attention_with_kvcache_reference", 3, cache_seqlens=[2, 4]
    ),
}
# Functions whose results are in host memory, so that a call ends when its work does.
ON_HOST = {"check_mod", "plot_attention", "plot_mask", "seen_pairs"}
# Functions that compute with CuPy's own operations, on CuPy's current stream.
BY_CUPY = {"dropout_mask"}


def test_every_function_that_returns_arrays_takes_a_stream() -> None:
    functions = {f.__name__ for f in functions_of(cupy_flash)}
    others = functions - ON_HOST - BY_CUPY
    assert CALLS.keys() == {name for name in others if not name.startswith("plan")}


@pytest.mark.parametrize("name", CALLS)
def test_every_function_runs_on_its_stream(name: str, gpu: fake_gpu.FakeGpu) -> None:
    gpu.stream = OURS
    CALLS[name](Protocol())
    assert gpu.streams
    assert set(gpu.streams) == {THEIRS}
    gpu.forget()
    CALLS[name](None)
    assert set(gpu.streams) == {OURS}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("stream", [3, "stream", np.zeros(3, np.float32)])
def test_what_is_no_stream_is_refused(stream: Any, name: str, gpu: fake_gpu.FakeGpu) -> None:
    with pytest.raises(TypeError, match="; expected a stream of CuPy, PyTorch or Numba"):
        CALLS[name](stream)
    assert gpu.streams == []


@pytest.mark.parametrize("name", CALLS)
def test_a_stream_needs_cupy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TypeError, match="stream is given, but CuPy, which runs calls on a GPU"):
        CALLS[name](Protocol())


NO_GPU = "stream is given, but no GPU can be used; 'cupy-flash info' tells why"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("stream", ["protocol", "null of cupy"])
def test_a_stream_needs_a_driver(
    stream: str, name: str, gpu: fake_gpu.FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_device() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    runtime = sys.modules["cupy"].cuda.runtime
    monkeypatch.setattr(runtime, "CUDARuntimeError", RuntimeError, raising=False)
    monkeypatch.setattr(runtime, "getDevice", get_device)
    with pytest.raises(UnsupportedError, match=NO_GPU):
        CALLS[name](STREAMS[stream][0])
    assert gpu.streams == []


@pytest.mark.skipif(gpu_unavailable() is None, reason="a GPU can be used")
@pytest.mark.parametrize("backend", ["auto", "cpu", "gpu"])
@pytest.mark.parametrize("stream", ["protocol", "null of cupy"])
def test_on_a_machine_without_a_gpu_a_stream_is_refused(stream: str, backend: str) -> None:
    pytest.importorskip("cupy")
    rows = np.zeros((1, 3, 2, 4), np.float32)
    with pytest.raises(UnsupportedError, match=NO_GPU):
        cupy_flash.flash_attention(rows, rows, rows, backend=backend, stream=STREAMS[stream][0])
