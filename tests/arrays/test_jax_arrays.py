"""JAX arrays: inputs that are read in place, and results that are JAX arrays."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.gpu import fake_gpu

from cupy_flash import combine, flash_attention, flash_attention_varlen, plan
from cupy_flash.arrays import jax_arrays, torch_arrays
from cupy_flash.calls.gpu import forward as gpu_forward
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.reference import rows

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
    """Fake JAX array on a GPU: the attributes that the library reads without DLPack."""

    def __init__(self, gpu: Any, shape: tuple[int, ...], dtype: Any = np.float16) -> None:
        self.shape, self.dtype, self.ndim = shape, np.dtype(dtype), len(shape)
        self.address = gpu.address()
        self.ready, self.deleted = True, False
        self.exported_to: list[int] = []
        self.sharding = Sharding()
        self.format = format_of(*range(self.ndim))

    def is_deleted(self) -> bool:
        return self.deleted

    def is_ready(self) -> bool:
        return self.ready

    def unsafe_buffer_pointer(self) -> int:
        return self.address

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int) -> None:
        self.exported_to.append(stream)


# The library recognizes arrays of JAX by the module of their type.
ArrayImpl.__module__ = "jaxlib._jax"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_gpu.FakeGpu:
    fake = fake_gpu.install(monkeypatch)
    monkeypatch.setattr(jax_arrays, "_known_shardings", {})
    monkeypatch.setattr(
        fake_gpu.FakeArray, "__dlpack__", lambda self, stream: (self, stream), raising=False
    )
    dlpack = SimpleNamespace(from_dlpack=lambda array: ("public", array))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(dlpack=dlpack))
    monkeypatch.setattr(
        jax_arrays, "_adopt", lambda: lambda capsule, *others: ("private", *capsule, *others)
    )
    return fake


def qkv(gpu: Any, dtype: Any = np.float16) -> list[ArrayImpl]:
    return [ArrayImpl(gpu, (2, 113, 6, 40), dtype) for _ in range(3)]


def test_arrays_are_read_where_they_lie(gpu):
    q, k, v = qkv(gpu)
    flash_attention(q, k, v)
    _, params = gpu.launches[0]
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


def test_arrays_of_the_same_shapes_are_planned_for_once_and_no_cupy_array_is_made_again(
    gpu, monkeypatch
):
    flash_attention(*qkv(gpu))
    monkeypatch.setattr(gpu_forward, "make_plan", None)
    monkeypatch.setattr(jax_arrays.JaxMemory, "as_cupy", None)
    flash_attention(*qkv(gpu))
    assert len(prepared_calls._calls) == 1
    assert len(gpu.launches) == 2


@pytest.mark.parametrize(
    "other", [{"shape": (2, 113, 3, 80)}, {"dtype": np.dtype(np.float32)}], ids=["shape", "dtype"]
)
def test_what_plans_depend_on_is_told_apart(gpu, other):
    ours, others = qkv(gpu), qkv(gpu)
    for array in others:
        vars(array).update(other)
    flash_attention(*ours)
    flash_attention(*others)
    assert len(prepared_calls._calls) == 2
    assert gpu.launches[0][1]["heads_q"] == 6
    assert gpu.launches[1][1]["heads_q"] == others[0].shape[2]


def test_jax_and_cupy_arrays_go_together_and_q_says_what_the_result_is(gpu):
    q, k, v = qkv(gpu)
    on_cupy = gpu.array(*k.shape)
    assert flash_attention(q, on_cupy, v)[0] == "private"
    assert type(flash_attention(on_cupy, k, v)) is not tuple
    for _, params in gpu.launches:
        assert params["v"]["data"] == v.address
    assert gpu.launches[0][1]["k"]["data"] == on_cupy.data.ptr
    assert gpu.launches[1][1]["k"]["data"] == k.address


@pytest.mark.parametrize("place", range(3))
def test_a_deleted_array_is_refused_before_anything_runs(gpu, place):
    arrays = qkv(gpu)
    arrays[place].deleted = True
    with pytest.raises(ValueError, match=f"{'qkv'[place]} is a JAX array that was deleted"):
        flash_attention(*arrays)
    assert gpu.launches == []


def test_arrays_on_another_device_than_the_current_one_are_refused(gpu):
    arrays = qkv(gpu)
    flash_attention(*arrays)
    arrays[1].sharding = Sharding(frozenset([Device(local_hardware_id=1)]))
    with pytest.raises(ValueError, match="k lies on device 1, but the current device is 0"):
        flash_attention(*arrays)


def test_without_cupy_the_message_says_what_to_install(gpu, monkeypatch):
    def missing() -> Any:
        raise ImportError("No module named 'cupy'")

    monkeypatch.setattr(jax_arrays, "_cupy", missing)
    with pytest.raises(TypeError, match=r"q lies in GPU memory.*pip install"):
        flash_attention(*qkv(gpu))


def test_packed_sequences_take_arrays_of_jax_by_their_address_too(gpu):
    q, k, v = (ArrayImpl(gpu, (113, 6, 40)) for _ in range(3))
    offsets = ArrayImpl(gpu, (4,), np.int32)
    assert flash_attention_varlen(q, k, v, offsets, offsets, 63, 63)[0] == "private"
    _, params = gpu.launches[-1]
    assert [params[name]["data"] for name in "qkv"] == [q.address, k.address, v.address]
    assert params["cu_seqlens_q"] == offsets.address
    wide = ArrayImpl(gpu, (4,), np.int64)
    flash_attention_varlen(q, k, v, wide, wide, 63, 63)
    _, params = gpu.launches[-1]
    assert params["cu_seqlens_q"] not in (0, wide.address)
    wrong = ArrayImpl(gpu, (4,), np.float32)
    with pytest.raises(TypeError, match=r"pass cu_seqlens_\w\.astype\(jnp\.int32\)"):
        flash_attention_varlen(q, k, v, wrong, wrong, 63, 63)


def test_plans_and_references_read_arrays_as_cupy_ones(gpu):
    array = ArrayImpl(gpu, (2, 113, 6, 40))
    for read in rows.as_bhsd(array, array, array, "bhsd"):
        assert type(read) is fake_gpu.FakeArray
        assert (read.shape, read.dtype) == (array.shape, array.dtype)
        assert read.data.ptr == array.address
    assert plan(flash_attention, array, array, array, arch="sm_90").problem.heads_q == 6


def test_shardings_that_are_not_kept_any_more_are_not_mistaken_for_others(gpu):
    array = ArrayImpl(gpu, (2, 113, 6, 40))
    for i in range(3 * jax_arrays._MAX_SHARDINGS):
        on_host = i % 3 == 0
        array.sharding = Sharding(memory_kind="pinned_host" if on_host else "device")
        assert (jax_arrays.gpu_of(array) is None) == on_host
    assert len(jax_arrays._known_shardings) <= jax_arrays._MAX_SHARDINGS


def test_jaxs_stream_waits_for_ours_before_a_result_is_adopted(gpu):
    gpu.stream = OURS
    flash_attention(*qkv(gpu))
    assert gpu.order == [(THEIRS, OURS)]
    gpu.order.clear()
    gpu.stream = THEIRS
    flash_attention(*qkv(gpu))
    assert gpu.order == []


def test_a_thread_orders_streams_with_an_event_of_its_own(gpu, monkeypatch):
    made: list[int] = []

    def event(disable_timing: bool) -> Any:
        made.append(threading.get_ident())
        return SimpleNamespace(ptr=len(made))

    monkeypatch.setattr(jax_arrays._cupy().cuda, "Event", event)
    for _ in range(2):
        torch_arrays.order(OURS, THEIRS)
    other = threading.Thread(target=torch_arrays.order, args=(THEIRS, OURS))
    other.start()
    other.join()
    assert made == [threading.get_ident(), other.ident]
    assert gpu.order == [(THEIRS, OURS), (THEIRS, OURS), (OURS, THEIRS)]


def test_a_result_is_adopted_on_the_stream_that_jax_waits_for(gpu):
    out, lse = flash_attention(*qkv(gpu), return_lse=True)
    for way, array, stream, *others in (out, lse):
        assert (way, stream, others) == ("private", -1, [Device(), THEIRS, None, 2])
        assert isinstance(array, fake_gpu.FakeArray)
    assert out[1].data.ptr == gpu.launches[0][1]["out"]["data"]


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
    assert jax_arrays.from_jax("q", array) is None
    monkeypatch.setattr(jax_arrays, "_cupy", lambda: SimpleNamespace(cuda=None))
    monkeypatch.setattr(jax_arrays, "_only_gpu_of", lambda sharding: device)
    monkeypatch.setattr(jax_arrays, "_known_shardings", {})
    memory = jax_arrays.from_jax("q", array)
    assert memory is not None
    assert (memory.array, memory.device) == (array, device)
    # `array_key` equals that of a CuPy array with the same shape, dtype and device.
    assert memory.array_key[:2] == (values.shape, values.dtype)
    assert memory.array_key[2] == device.local_hardware_id
    read_back = ctypes.string_at(memory.address, values.nbytes)
    np.testing.assert_array_equal(np.frombuffer(read_back, values.dtype).reshape(2, 3, 4), values)


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


def test_parts_that_are_arrays_of_jax_are_merged_where_they_lie(gpu):
    parts, lse = ArrayImpl(gpu, (3, 2, 113, 6, 40)), ArrayImpl(gpu, (3, 2, 6, 113), np.float32)
    sinks = ArrayImpl(gpu, (6,), np.float32)
    combine(parts, lse, sinks=sinks)
    ((entry, params),) = gpu.launches
    assert entry == "combine_partials"
    assert params["out_partial"]["data"] == parts.address
    assert (params["lse_partial"], params["sinks"]) == (lse.address, sinks.address)
