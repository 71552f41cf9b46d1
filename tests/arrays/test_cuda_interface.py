"""Arrays of `__cuda_array_interface__` on a fake GPU: read in place, stream order, and results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.gpu import fake_gpu

from cupy_flash import (
    combine,
    flash_attention,
    flash_attention_backward,
    flash_attention_qkvpacked_vjp,
    flash_attention_varlen,
    flash_attention_vjp,
    flash_attention_with_kvcache,
    scaled_dot_product_attention,
)
from cupy_flash.arrays import kinds
from cupy_flash.arrays.cuda_interface import is_foreign_array

OURS, THEIRS, DEFAULT = 0xA0, 0xB0, 1


class Array:
    """Array of a library that describes GPU memory by this protocol only."""

    def __init__(self, gpu: Any, shape: tuple[int, ...], dtype: Any = "f2", **others: Any) -> None:
        self.address = gpu.address()
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": np.dtype(dtype).str,
            "data": (self.address, False),
            "version": 3,
            **others,
        }


class NumbaArray(Array):
    """Array that the library takes for one of Numba."""


NumbaArray.__module__ = "numba.cuda.cudadrv.devicearray"


class PycudaArray(Array):
    """Array that the library takes for one of PyCUDA."""


PycudaArray.__module__ = "pycuda.gpuarray"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_gpu.FakeGpu:
    fake = fake_gpu.install(monkeypatch)

    def as_cuda_array(array: Any, sync: bool) -> NumbaArray:
        assert not sync
        # It names the stream that CuPy's interface names: the current one.
        interface = {"data": (array.data.ptr, False), "stream": fake.stream or DEFAULT}
        return NumbaArray(fake, array.shape, array.dtype, **interface)

    numba = SimpleNamespace(cuda=SimpleNamespace(as_cuda_array=as_cuda_array))
    gpuarray = SimpleNamespace(
        GPUArray=lambda shape, dtype, **others: ("pycuda", shape, dtype, others)
    )
    monkeypatch.setitem(sys.modules, "numba", numba)
    monkeypatch.setitem(sys.modules, "pycuda", SimpleNamespace(gpuarray=gpuarray))
    monkeypatch.setitem(sys.modules, "pycuda.gpuarray", gpuarray)
    return fake


def qkv(gpu: Any, kind: type[Array] = Array, **others: Any) -> list[Array]:
    return [kind(gpu, (2, 113, 6, 40), **others) for _ in range(3)]


def test_arrays_are_read_where_they_are(gpu: fake_gpu.FakeGpu) -> None:
    q, k, v = qkv(gpu)
    out = flash_attention(q, k, v)
    assert isinstance(out, fake_gpu.FakeArray)
    assert (out.shape, out.dtype) == ((2, 113, 6, 40), np.float16)
    _, params = gpu.launches[0]
    assert [params[name]["data"] for name in "qkv"] == [q.address, k.address, v.address]
    assert gpu.order == []


def test_strides_are_those_of_the_interface(gpu: fake_gpu.FakeGpu) -> None:
    strides = (2 * 6 * 113 * 40, 80, 113 * 80, 2)
    q, k, v = qkv(gpu, strides=strides)
    flash_attention(q, k, v)
    _, params = gpu.launches[0]
    assert params["q"]["row_stride"] == 40
    assert params["q"]["head_stride"] == 113 * 40


@pytest.mark.parametrize(
    ("theirs", "ours", "order"),
    [
        (None, 0, []),
        (THEIRS, OURS, [(OURS, THEIRS), (THEIRS, OURS)]),
        (THEIRS, 0, [(0, THEIRS), (THEIRS, 0)]),
        (DEFAULT, 0, []),
        (OURS, OURS, []),
        # The interface names no stream, so nobody waits before the call.
        (None, OURS, [(DEFAULT, OURS)]),
    ],
)
def test_streams_wait_for_each_other(
    gpu: fake_gpu.FakeGpu, theirs: int | None, ours: int, order: list[tuple[int, int]]
) -> None:
    gpu.stream = ours
    q, _, _ = qkv(gpu, stream=theirs)
    k, v = (Array(gpu, (2, 113, 6, 40)) for _ in range(2))
    flash_attention(q, k, v)
    assert gpu.order == order


def test_no_stream_waits_for_a_captured_call(gpu: fake_gpu.FakeGpu) -> None:
    gpu.stream, gpu.captures = OURS, True
    flash_attention(*qkv(gpu))
    assert gpu.order == []


def test_results_for_numba_and_pycuda_are_of_these_libraries(gpu: fake_gpu.FakeGpu) -> None:
    array = flash_attention(*qkv(gpu, NumbaArray))
    assert isinstance(array, NumbaArray)
    assert array.__cuda_array_interface__["shape"] == (2, 113, 6, 40)
    out, lse = flash_attention(*qkv(gpu, PycudaArray), return_lse=True)
    for result, shape, dtype in ((out, (2, 113, 6, 40), "f2"), (lse, (2, 6, 113), "f4")):
        name, its_shape, its_dtype, others = result
        assert (name, its_shape, its_dtype) == ("pycuda", shape, np.dtype(dtype))
        assert others["gpudata"] == others["base"].data.ptr
        assert others["strides"] == others["base"].strides


def gradients(gpu: fake_gpu.FakeGpu, **options: Any) -> Any:
    dout, out = (NumbaArray(gpu, (2, 113, 6, 40)) for _ in range(2))
    lse = NumbaArray(gpu, (2, 6, 113), "f4")
    return flash_attention_backward(dout, *qkv(gpu, NumbaArray), out, lse, **options)


def pulled_back(gpu: fake_gpu.FakeGpu, **options: Any) -> Any:
    out, pullback = flash_attention_vjp(*qkv(gpu, NumbaArray), **options)
    return (out, *pullback(NumbaArray(gpu, (2, 113, 6, 40))))


def packed_gradients(gpu: fake_gpu.FakeGpu, **options: Any) -> Any:
    out, pullback = flash_attention_qkvpacked_vjp(
        NumbaArray(gpu, (2, 113, 3, 6, 40)), return_lse=True, **options
    )
    return (*out, pullback(NumbaArray(gpu, (2, 113, 6, 40))))


def merged(gpu: fake_gpu.FakeGpu, **options: Any) -> Any:
    lse = NumbaArray(gpu, (3, 2, 6, 113), "f4")
    return combine(NumbaArray(gpu, (3, 2, 113, 6, 40)), lse, **options)


NUMBA_CALLS: dict[str, Callable[..., Any]] = {
    "dense": lambda gpu, **options: flash_attention(
        *qkv(gpu, NumbaArray), return_lse=True, **options
    ),
    "scaled dot product": lambda gpu, **options: [
        scaled_dot_product_attention(*qkv(gpu, NumbaArray), **options)
    ],
    "gradients": gradients,
    "pullback": pulled_back,
    "packed pullback": packed_gradients,
    "merge": merged,
}


@pytest.mark.parametrize("name", NUMBA_CALLS)
def test_results_for_numba_name_the_stream_of_their_call(name: str, gpu: fake_gpu.FakeGpu) -> None:
    gpu.stream = OURS
    for stream in (THEIRS, OURS):
        gpu.forget()
        results = NUMBA_CALLS[name](gpu, stream=SimpleNamespace(handle=stream))
        assert all(isinstance(result, NumbaArray) for result in results)
        assert {result.__cuda_array_interface__["stream"] for result in results} == {stream}
        # The stream of q, which here is the legacy default stream, waits for the results.
        assert gpu.order[-1] == (DEFAULT, stream)


def test_written_arrays_are_written_in_place_and_returned(gpu: fake_gpu.FakeGpu) -> None:
    q, k, v = qkv(gpu)
    out = Array(gpu, (2, 113, 6, 40))
    assert flash_attention(q, k, v, out=out) is out
    _, params = gpu.launches[0]
    assert params["out"]["data"] == out.address
    read_only = Array(gpu, (2, 113, 6, 40), data=(gpu.address(), True))
    flash_attention(q, read_only, v)
    with pytest.raises(ValueError, match="out is read-only; pass an array that can be written"):
        flash_attention(q, k, v, out=read_only)
    cache = Array(gpu, (2, 64, 6, 40), data=(gpu.address(), True))
    flash_attention_with_kvcache(q, cache, cache, cache_seqlens=3)
    rows = Array(gpu, (2, 1, 6, 40))
    other = Array(gpu, (2, 64, 6, 40))
    with pytest.raises(ValueError, match="v_cache is read-only; pass an array that can be"):
        flash_attention_with_kvcache(q, other, cache, rows, rows, cache_seqlens=3)


def test_lengths_and_slopes_may_be_such_arrays(gpu: fake_gpu.FakeGpu) -> None:
    q = fake_gpu.FakeArray((226, 6, 40), np.float16)
    ends = Array(gpu, (3,), "i4")
    flash_attention_varlen(q, q, q, ends, ends, 113, 113, alibi_slopes=Array(gpu, (6,), "f4"))
    rows = fake_gpu.FakeArray((2, 113, 6, 40), np.float16)
    flash_attention(rows, rows, rows, causal=True, q_offset=Array(gpu, (2,), "i4"))
    (_, first), (_, second) = gpu.launches[0], gpu.launches[-1]
    assert first["cu_seqlens_q"] == first["cu_seqlens_k"] == ends.address
    assert second["q"]["data"] == rows.data.ptr


def test_an_empty_array_has_no_address(gpu: fake_gpu.FakeGpu) -> None:
    q, _, _ = qkv(gpu)
    empty = Array(gpu, (2, 0, 6, 40), data=(0, False))
    assert flash_attention(q, empty, empty).shape == (2, 113, 6, 40)


def test_what_cannot_be_read_is_refused(gpu: fake_gpu.FakeGpu) -> None:
    q, k, v = qkv(gpu)
    with pytest.raises(TypeError, match="k has a mask, which would be lost"):
        flash_attention(q, qkv(gpu, mask=q)[0], v)
    with pytest.raises(TypeError, match="q has dtype int16; expected one of"):
        flash_attention(*qkv(gpu, dtype="i2"))
    with pytest.raises(TypeError, match="q lies in host memory and k on a GPU"):
        flash_attention(np.zeros((2, 113, 6, 40), np.float16), k, v)


def test_without_cupy_such_an_array_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(address=lambda: 512)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("cupy_flash.arrays.cuda_interface._cupy", lambda: __import__("cupy"))
    with pytest.raises(TypeError, match="q lies in GPU memory, which only CuPy can access"):
        kinds.normalize("q", Array(gpu, (2, 3)))


def test_arrays_are_told_from_other_objects(gpu: fake_gpu.FakeGpu) -> None:
    assert is_foreign_array(Array(gpu, (2, 3)))
    assert is_foreign_array(np.zeros(3))
    assert not any(map(is_foreign_array, (1, [1.0], None, np.float32(1), "text")))
