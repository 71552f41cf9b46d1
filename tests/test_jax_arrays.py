"""Arrays of JAX: read where they lie, and results that become such arrays."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import fake_gpu
import numpy as np
import pytest

from cupy_flash import flash_attention, jax_arrays

OURS, THEIRS = 0xA0, 0xB0


class Device(NamedTuple):
    platform: str = "gpu"
    local_hardware_id: int = 0

    def get_stream_for_external_ready_events(self) -> int:
        return THEIRS


class Sharding(NamedTuple):
    device_set: frozenset[Device] = frozenset([Device()])
    memory_kind: str = "device"


def format_of(*major_to_minor: int) -> Any:
    return SimpleNamespace(layout=SimpleNamespace(major_to_minor=major_to_minor))


class ArrayImpl:
    """An array of JAX on a GPU, as far as it is asked without DLPack."""

    def __init__(self, gpu: Any, shape: tuple[int, ...], dtype: Any = np.float16) -> None:
        self.shape, self.dtype, self.ndim = shape, np.dtype(dtype), len(shape)
        self.address = gpu.address()
        self.ready = True
        self.exported_to: list[int] = []
        self.sharding = Sharding()
        self.format = format_of(*range(self.ndim))

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.ready

    def unsafe_buffer_pointer(self) -> int:
        return self.address

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int) -> None:
        self.exported_to.append(stream)


# What a library is known by.
ArrayImpl.__module__ = "jaxlib._jax"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_gpu.FakeGpu:
    fake = fake_gpu.install(monkeypatch)
    cuda = SimpleNamespace(
        UnownedMemory=lambda ptr, size, owner, device: SimpleNamespace(ptr=ptr, device_id=device),
        MemoryPointer=lambda memory, offset: memory,
        get_current_stream=lambda: SimpleNamespace(ptr=fake.stream),
    )
    fake.stream = 0
    module = SimpleNamespace(ndarray=fake_gpu.FakeArray, cuda=cuda)
    monkeypatch.setattr(jax_arrays, "_cupy", lambda: module)
    monkeypatch.setattr(
        fake_gpu.FakeArray, "__dlpack__", lambda self, stream: (self, stream), raising=False
    )
    monkeypatch.setitem(
        sys.modules,
        "jax",
        SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=lambda array: ("public", array))),
    )
    monkeypatch.setattr(
        jax_arrays, "_adopt", lambda: lambda capsule, *others: ("private", *capsule, *others)
    )
    return fake


def qkv(gpu: Any, dtype: Any = np.float16) -> list[ArrayImpl]:
    return [ArrayImpl(gpu, (2, 113, 6, 40), dtype) for _ in range(3)]


def test_arrays_are_read_where_they_lie(gpu):
    q, k, v = qkv(gpu)
    flash_attention(q, k, v)
    _, (params, *_) = gpu.launches[0]
    assert [params[name]["data"] for name in "qkv"] == [q.address, k.address, v.address]
    assert q.exported_to == k.exported_to == v.exported_to == []


@pytest.mark.parametrize(("stream", "in_dlpack"), [(0, 1), (OURS, OURS)])
def test_our_stream_waits_for_what_is_still_computed(gpu, stream, in_dlpack):
    gpu.stream = stream
    q, k, v = qkv(gpu)
    k.ready = False
    flash_attention(q, k, v)
    assert (q.exported_to, k.exported_to, v.exported_to) == ([], [in_dlpack], [])


@pytest.mark.parametrize(
    "other",
    [
        {"sharding": Sharding(frozenset([Device(), Device(local_hardware_id=1)]))},
        {"sharding": Sharding(frozenset([Device("cpu")]))},
        {"sharding": Sharding(memory_kind="pinned_host")},
        {"format": format_of(0, 2, 1, 3)},
        {"format": SimpleNamespace(layout=None)},
    ],
    ids=["two devices", "host", "pinned memory", "axes in another order", "unknown layout"],
)
def test_what_lies_otherwise_is_left_to_dlpack(gpu, other):
    array = ArrayImpl(gpu, (2, 113, 6, 40))
    assert jax_arrays.from_jax("q", array) is not None
    vars(array).update(other)
    assert jax_arrays.from_jax("q", array) is None


def test_arrays_of_one_compiled_layout_are_asked_for_it_once(gpu):
    arrays = [ArrayImpl(gpu, (2, 113, 6, 40)) for _ in range(3)]
    ours, same, other = arrays
    ours._pjrt_layout = same._pjrt_layout = object()
    other._pjrt_layout, other.format = object(), format_of(0, 2, 1, 3)
    same.format = None
    assert [jax_arrays.from_jax("q", array) is not None for array in arrays] == [True, True, False]
    assert jax_arrays.from_jax("q", other) is None


def test_a_result_is_adopted_on_the_stream_that_jax_waits_for(gpu):
    out, lse = flash_attention(*qkv(gpu), return_lse=True)
    for way, array, stream, *others in (out, lse):
        assert (way, stream, others) == ("private", THEIRS, [Device(), THEIRS, None, 2])
        assert isinstance(array, fake_gpu.FakeArray)
    assert out[1].data.ptr == gpu.launches[0][1][0]["out"]["data"]


def test_the_public_function_adopts_what_the_private_one_cannot(gpu, monkeypatch):
    assert flash_attention(*qkv(gpu, np.float64))[0] == "public"
    monkeypatch.setattr(jax_arrays, "_adopt", lambda: None)
    assert flash_attention(*qkv(gpu))[0] == "public"


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


def test_jax_says_of_an_array_what_is_asked_of_it(jax, monkeypatch):
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    array = jax.numpy.asarray(values).block_until_ready()
    (device,) = array.devices()
    seen: list[Any] = []
    cuda = SimpleNamespace(
        UnownedMemory=lambda *memory: memory, MemoryPointer=lambda memory, offset: memory
    )
    module = SimpleNamespace(cuda=cuda, ndarray=lambda *of: seen.append(of) or of)
    monkeypatch.setattr(jax_arrays, "_cupy", lambda: module)
    assert jax_arrays.from_jax("q", array) is None
    monkeypatch.setattr(jax_arrays, "_gpu_of", lambda array: device)
    assert jax_arrays.from_jax("q", array) is not None
    ((shape, dtype, (address, size, owner, _)),) = seen
    assert (shape, dtype, size) == (values.shape, values.dtype, values.nbytes)
    assert owner is array
    np.testing.assert_array_equal(
        np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape), values
    )


def test_an_array_that_was_donated_is_refused(jax):
    q, donated = (jax.numpy.ones((1, 4, 2, 8), np.float32) for _ in range(2))
    donated.delete()
    with pytest.raises(ValueError, match="k is a JAX array that was deleted or donated"):
        flash_attention(q, donated, q)


@pytest.mark.parametrize("way", ["private", "public"])
def test_both_ways_to_adopt_memory_give_the_same_array(jax, way):
    values = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    like = jax.device_put(values)
    (device,) = like.devices()
    if way == "private":
        adopt = jax_arrays._adopt()
        if adopt is None:
            pytest.skip("this JAX has no such function")
        array = adopt(values.__dlpack__(), device, None, None, 1)
    else:
        array = jax.dlpack.from_dlpack(values)
    assert type(array) is type(like)
    assert (array.shape, array.dtype, array.devices()) == (like.shape, like.dtype, {device})
    assert (array.committed, array.weak_type) == (True, False)
    np.testing.assert_array_equal(np.asarray(array + 1), values + 1)
