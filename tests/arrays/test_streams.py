"""The argument `stream`: handles of streams of several libraries, and calls on a fake GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.gpu import fake_gpu

import cupy_flash
from cupy_flash.arrays.streams import handle_of

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


def backward(name: str) -> Callable[[Any], Any]:
    def call(stream: Any) -> Any:
        rows = (2, 113, 6, 40)
        packed = "qkvpacked" in name
        inputs = arrays((2, 113, 3, 6, 40)) if packed else arrays(rows, rows, rows)
        dout, out = arrays(rows, rows)
        (lse,) = arrays((2, 6, 113), dtype=np.float32)
        return getattr(cupy_flash, name)(dout, *inputs, out, lse, stream=stream)

    return call


def combine(stream: Any) -> Any:
    (lse,) = arrays((3, 2, 6, 113), dtype=np.float32)
    return cupy_flash.combine(*arrays((3, 2, 113, 6, 40)), lse, stream=stream)


def packed(stream: Any) -> Any:
    rows, ends = arrays((226, 6, 40))[0], arrays((3,), dtype=np.int32)[0]
    return cupy_flash.flash_attention_varlen(rows, rows, rows, ends, ends, 113, 113, stream=stream)


def cached(stream: Any) -> Any:
    q, *caches, k, v = arrays(*[(2, n, 6, 40) for n in (1, 64, 64, 1, 1)])
    return cupy_flash.flash_attention_with_kvcache(q, *caches, k, v, cache_seqlens=5, stream=stream)


CALLS: dict[str, Callable[[Any], Any]] = {
    "qkvpacked": lambda stream: cupy_flash.flash_attention_qkvpacked(
        *arrays((2, 113, 3, 6, 40)), stream=stream
    ),
    "varlen": packed,
    "kvcache": cached,
    "backward": backward("flash_attention_backward"),
    "combine": combine,
}


@pytest.mark.parametrize("name", CALLS)
def test_every_function_runs_on_its_stream(name: str, gpu: fake_gpu.FakeGpu) -> None:
    gpu.stream = OURS
    CALLS[name](Protocol())
    assert gpu.streams
    assert set(gpu.streams) == {THEIRS}
    gpu.streams.clear()
    CALLS[name](None)
    assert set(gpu.streams) == {OURS}


def test_a_pullback_runs_on_the_stream_of_its_call(gpu: fake_gpu.FakeGpu) -> None:
    q, dout = arrays((2, 113, 6, 40), (2, 113, 6, 40))
    _, pullback = cupy_flash.flash_attention_vjp(q, q, q, stream=Protocol())
    pullback(dout)
    assert len(gpu.streams) > 1
    assert set(gpu.streams) == {THEIRS}


@pytest.mark.parametrize("stream", [3, "stream", np.zeros(3, np.float32)])
def test_what_is_no_stream_is_refused(stream: Any, gpu: fake_gpu.FakeGpu) -> None:
    q = fake_gpu.FakeArray((2, 113, 6, 40), np.float16)
    with pytest.raises(TypeError, match="; expected a stream of CuPy, PyTorch or Numba"):
        cupy_flash.flash_attention(q, q, q, stream=stream)


def test_a_stream_needs_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    rows = np.zeros((1, 3, 2, 4), np.float32)
    with pytest.raises(TypeError, match="stream is given, but CuPy, which runs calls on a GPU"):
        cupy_flash.flash_attention(rows, rows, rows, stream=Protocol())
