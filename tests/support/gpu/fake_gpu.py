"""Fake GPU that records what it is asked to do: arrays have no memory, and kernels do not run."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupy_flash.arrays import cuda_interface, jax_arrays, strided, torch_arrays
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.check.modifications import UserMods
from cupy_flash.calls.gpu import allocate, prepared_calls, repeated_gradients, torch_autograd
from cupy_flash.calls.gpu import backward as gpu_backward
from cupy_flash.calls.gpu import forward as gpu_forward
from cupy_flash.calls.gpu import received as gpu_received
from cupy_flash.calls.host import forward as host_forward
from cupy_flash.calls.options import Options
from cupy_flash.families.params import PARAMS_DTYPE
from cupy_flash.families.schedule import TensorMapSpec
from cupy_flash.gpu import append, block_masks, combine, launch
from cupy_flash.gpu.by_value import MAX_BYTES
from cupy_flash.gpu.counters import Shared
from cupy_flash.problem.device import device_for_arch

# Argument structs of the append and merge launches; all others take that of attention.
_STRUCTS = {append.ENTRY: append.APPEND_DTYPE, combine.ENTRY: combine.COMBINE_DTYPE}
# Address of the first array, and distance between arrays, which exceeds the size of any array.
_FIRST, _APART = 1 << 40, 1 << 30


class FakeArray:
    """CuPy array without memory: it has an address, a shape, strides and a dtype."""

    @staticmethod
    def new_address() -> int:
        """Return the address of an array that is given none."""
        return 0

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        data: Any = None,
        strides: tuple[int, ...] | None = None,
        *,
        address: int | None = None,
        device: int = 0,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = tuple(shape)
        steps = np.cumprod([self.itemsize, *self.shape[:0:-1]]).tolist()[::-1] if shape else []
        self.strides = tuple(steps) if strides is None else strides
        lengths = zip(self.shape, steps, self.strides, strict=True)
        self._c_contiguous = 0 in self.shape or all(n == 1 or a == b for n, a, b in lengths)
        if data is None and address is None:
            address = FakeArray.new_address()
        self.data = data or SimpleNamespace(ptr=address, device_id=device)
        self.filled: float | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def flags(self) -> SimpleNamespace:
        return SimpleNamespace(c_contiguous=self._c_contiguous)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | tuple[Any, ...] | None) -> FakeArray:
        """Return the first element, an element of the third last axis, or the first columns.

        With None, return the array with one more axis in front.
        """
        if index is None:
            return FakeArray((1, *self.shape), self.dtype, self.data, (0, *self.strides))
        if isinstance(index, int):
            assert index == 0
            return FakeArray(self.shape[1:], self.dtype, self.data, self.strides[1:])
        _, part, *_ = index
        if isinstance(part, slice):
            assert index == (Ellipsis, slice(part.stop))
            shape = (*self.shape[:-1], min(self.shape[-1], part.stop))
            return FakeArray(shape, self.dtype, self.data, self.strides)
        assert index == (Ellipsis, part, slice(None), slice(None))
        shape = (*self.shape[:-3], *self.shape[-2:])
        strides = (*self.strides[:-3], *self.strides[-2:])
        address = self.data.ptr + part * self.strides[-3]
        return FakeArray(shape, self.dtype, strides=strides, address=address)

    def swapaxes(self, one: int, other: int) -> FakeArray:
        order = list(range(self.ndim))
        order[one], order[other] = order[other], order[one]
        shape, strides = ([values[i] for i in order] for values in (self.shape, self.strides))
        return FakeArray(tuple(shape), self.dtype, self.data, tuple(strides))

    def copy(self, order: str) -> FakeArray:
        assert order == "C"
        # A copy is aligned, as new memory is.
        address = self.data.ptr // 512 * 512 + _APART // 2
        return FakeArray(self.shape, self.dtype, address=address)

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> FakeArray:
        if not copy and self.dtype == dtype:
            return self
        return FakeArray(self.shape, dtype)

    def reshape(self, shape: tuple[int, ...]) -> FakeArray:
        """Return a view that joins all axes before the last three."""
        assert strided.has_one_batch_stride(self)
        assert shape[1:] == self.shape[-3:]
        steps = [s for n, s in zip(self.shape[:-3], self.strides, strict=False) if n > 1]
        return FakeArray(shape, self.dtype, self.data, (*(steps or [0])[-1:], *self.strides[-3:]))

    def fill(self, value: float) -> None:
        self.filled = value


# `cupy_flash.arrays.strided` recognizes CuPy arrays by this.
FakeArray.__module__ = "cupy"


@dataclass(frozen=True)
class FakeMemory:
    """Memory pointer that supports adding an offset."""

    ptr: int
    device_id: int = 0

    def __add__(self, offset: int) -> FakeMemory:
        return FakeMemory(self.ptr + offset, self.device_id)


def _broadcast(array: FakeArray, shape: tuple[int, ...]) -> FakeArray:
    before = len(shape) - array.ndim
    strides = [
        0 if length == 1 and wanted > 1 else stride
        for length, wanted, stride in zip(array.shape, shape[before:], array.strides, strict=True)
    ]
    return FakeArray(shape, array.dtype, array.data, (*[0] * before, *strides))


class _Unowned:
    """Memory of another library's array; it also serves as the pointer to this memory."""

    def __init__(self, ptr: int, size: int, owner: Any, device: int) -> None:
        # CuPy asks CUDA for the device of the address if the device is -1.
        self.ptr, self.device_id, self._owner, self.mem = ptr, max(device, 0), owner, self


class FakeTensorMaps:
    """Tensor maps that consist of their specs and array addresses only."""

    def __init__(
        self,
        specs: Mapping[str, TensorMapSpec],
        names: Sequence[str],
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self._specs, self._names, self._sources = specs, names, sources or {}

    def maps_for(self, values: tuple[int, ...]) -> SimpleNamespace:
        of = dict(zip(self._names, values, strict=True))
        addresses = tuple(of[self._sources.get(name, name)] for name in self._specs)
        return SimpleNamespace(address=(tuple(self._specs.values()), addresses))


class FakeArguments:
    """Replacement of `ThreadArguments` that keeps the objects themselves instead of addresses."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = self.pointer = memory
        self.alone: list[Any] = [memory]
        self.with_maps: list[Any] = [None, memory]

    def set_maps(self, maps: Any) -> None:
        self.with_maps[0] = maps


class FakeKernel(NamedTuple):
    """Kernel that can be called through CuPy and launched by the driver function."""

    call: Callable[..., None]

    @property
    def ptr(self) -> Any:
        return self.call

    def __call__(self, *arguments: Any) -> None:
        self.call(*arguments)


def launch_kernel(call: Any, *numbers_and_arguments: Any) -> None:
    """Launch a fake kernel with the arguments of the driver's launch function."""
    *numbers, stream, arguments, extra = numbers_and_arguments
    grid, block, shared_memory = numbers[:3], numbers[3:6], numbers[6]
    assert extra == 0
    call(grid, block, arguments, shared_memory, stream)


class FakeGpu:
    """Fake GPU, and a record of the calls since it was created or `forget` was called."""

    def __init__(self) -> None:
        # Entry and argument struct of each launch, bytes of the struct, and handle of the stream.
        self.launches: list[tuple[str, Any]] = []
        self.structs: list[bytes] = []
        self.streams: list[int] = []
        # Specs and addresses of the tensor maps, for each launch that takes some.
        self.maps: list[tuple[tuple[TensorMapSpec, ...], tuple[int, ...]]] = []
        # Address and size in bytes of each allocation: the results of a call, then its workspace.
        self.allocations: list[tuple[int, int]] = []
        self.permanent_allocations: list[tuple[int, int]] = []  # the same of `permanent`
        self.compiled: list[str] = []  # titles of translation units whose kernels were requested
        self.counters: list[int] = []
        self.results: list[int | None] = []  # `result` of each request for counters
        self.counter_streams: list[int] = []  # stream of each request
        # Memory to which the struct of a launch is written, and the arguments that refer to it.
        self.arguments = FakeArguments(bytearray(MAX_BYTES))
        self.device = self.stream = 0  # the current device, and the handle of the current stream
        self.captures = False  # whether the current stream captures a graph
        self.refuses = False  # whether CUDA refuses to allocate memory and load kernels
        self.order: list[tuple[int, int]] = []  # a stream that waits, and the one it waits for
        self.uploads: list[np.ndarray] = []  # arrays that were copied from host memory
        self.upload_streams: list[int] = []  # handle of the stream of each of these copies
        self.waited: list[int] = []  # handles of streams that the host has waited for
        self.devices: list[int] = []  # devices that were made current
        self.copies: list[tuple[int, ...]] = []  # target, source, size and stream of each copy
        self._next = _FIRST

    def forget(self) -> None:
        """Clear the record of the calls so far."""
        for noted in vars(self).values():
            if isinstance(noted, list):
                noted.clear()

    def address(self) -> int:
        self._next += _APART
        return self._next

    def array(self, *shape: int, dtype: Any = np.float16, **options: Any) -> FakeArray:
        return FakeArray(shape, dtype, **({"address": self.address()} | options))

    def lengths(self, *shape: int, **options: Any) -> FakeArray:
        return self.array(*shape, dtype=np.int32, **options)

    def set_device(self, device: int) -> None:
        self.device = device
        self.devices.append(device)

    def alloc(self, size: int) -> FakeMemory:
        assert not self.refuses
        self.allocations.append((self.address(), size))
        return FakeMemory(self.allocations[-1][0])

    def permanent(self, size: int) -> FakeMemory:
        """Allocate memory that CuPy's pool does not manage."""
        assert not self.refuses
        self.permanent_allocations.append((self.address(), size))
        return FakeMemory(self.permanent_allocations[-1][0])

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        before, self.refuses = self.refuses, False
        yield
        self.refuses = before

    def upload(self, array: np.ndarray) -> FakeArray:
        self.uploads.append(array)
        self.upload_streams.append(self.stream)
        return self.array(*array.shape, dtype=array.dtype, device=self.device)

    def shared(self, count: int, device: int, stream: int, result: int | None = None) -> Shared:
        assert device == self.device
        self.counter_streams.append(stream)
        if count:
            self.counters.append(count)
            self.results.append(result)
        return Shared(0xC0DE00)

    def get(self, unit: Any, shared_memory: dict[str, int]) -> dict[str, Any]:
        assert not self.refuses
        self.compiled.append(unit.title)
        is_of_maps = block_masks.BUILD in unit.entries
        return {entry: self._kernel(entry, is_of_maps) for entry in unit.entries}

    def _kernel(self, entry: str, is_of_maps: bool) -> Any:
        def launch(
            grid: Any,
            block: Any,
            arguments: Any,
            shared_memory: int = 0,
            stream: int | None = None,
        ) -> None:
            assert min(*grid, *block) > 0
            self.streams.append(self.stream if stream is None else stream)
            # A block mask may be built on a stream of its own.
            assert is_of_maps or self.counter_streams[-1:] in ([], self.streams[-1:])
            *maps, memory = arguments
            self.structs.append(bytes(memory))
            if is_of_maps:
                self.launches.append((entry, bytes(memory)))
                return
            dtype = _STRUCTS.get(entry, PARAMS_DTYPE)
            self.launches.append((entry, np.frombuffer(bytes(memory), dtype, 1)[0]))
            self.maps += maps

        return FakeKernel(launch)


class _Stream:
    """New stream."""

    ptr = 0x57

    def __init__(self, non_blocking: bool = True) -> None:
        self._contexts: list[Any] = []

    def __enter__(self) -> None:
        self._contexts.append(_current(self.ptr))
        self._contexts[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)

    def synchronize(self) -> None:
        sys.modules["cupy"].gpu.waited.append(self.ptr)

    @staticmethod
    def from_external(other: Any) -> AbstractContextManager[None]:
        """Make another library's stream current within the context."""
        return _current(other.__cuda_stream__()[1])


@contextlib.contextmanager
def _current(handle: int) -> Iterator[None]:
    gpu = sys.modules["cupy"].gpu
    before, gpu.stream = gpu.stream, handle
    yield
    gpu.stream = before


def install(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Return a new fake GPU, on which attention runs until the test ends."""
    gpu = FakeGpu()
    last_of: dict[int, int] = {}
    runtime = SimpleNamespace(
        getDevice=lambda: gpu.device,
        eventRecord=last_of.__setitem__,
        streamWaitEvent=lambda stream, event: gpu.order.append((stream, last_of[event])),
        memsetAsync=lambda *_: None,
        streamIsCapturing=lambda stream: gpu.captures,
        setDevice=gpu.set_device,
        getDeviceCount=lambda: 2,
        pointerGetAttributes=lambda address: SimpleNamespace(device=1),
        memcpyAsync=lambda to, of, size, kind, stream: gpu.copies.append((to, of, size, stream)),
        memcpyDeviceToDevice=3,
    )
    monkeypatch.setattr(_Stream, "null", _current(0), raising=False)
    cuda = SimpleNamespace(
        runtime=runtime,
        alloc=gpu.alloc,
        memory=SimpleNamespace(Memory=gpu.permanent),
        get_current_stream=lambda device=0: SimpleNamespace(ptr=gpu.stream),
        Event=lambda disable_timing: SimpleNamespace(ptr=0xE0),
        Stream=_Stream,
        UnownedMemory=_Unowned,
        MemoryPointer=lambda memory, offset: memory,
    )
    fake = SimpleNamespace(
        ndarray=FakeArray,
        empty=FakeArray,
        cuda=cuda,
        gpu=gpu,
        ascontiguousarray=lambda array: array,
        asarray=gpu.upload,
        broadcast_to=_broadcast,
    )
    monkeypatch.setattr(FakeArray, "new_address", gpu.address)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(launch, "_launch_function", lambda: launch_kernel)
    users = (prepared_calls, gpu_forward, gpu_backward, gpu_received, torch_autograd, allocate)
    for module in (*users, block_masks, repeated_gradients):
        monkeypatch.setattr(module, "cupy_module", lambda: fake)
    for module in (torch_arrays, jax_arrays, cuda_interface):
        monkeypatch.setattr(module, "_cupy", lambda: fake)
    monkeypatch.setattr(torch_arrays, "_thread_state", torch_arrays._ThreadState())
    for module in (prepared_calls, repeated_gradients):
        monkeypatch.setattr(module, "_calls", {})
    monkeypatch.setattr(prepared_calls, "device_for_id", lambda _: device_for_arch("sm_90"))
    for module in (gpu_forward, gpu_backward):
        monkeypatch.setattr(module, "shared", gpu.shared)
    monkeypatch.setattr(gpu_forward, "TensorMaps", FakeTensorMaps)
    monkeypatch.setattr(launch, "thread_arguments", lambda: gpu.arguments)
    monkeypatch.setattr(block_masks, "_streams", {})
    monkeypatch.setattr(block_masks, "ByValue", lambda memory: SimpleNamespace(pointer=memory))
    for module in (launch, append, combine, block_masks):
        monkeypatch.setattr(module, "kernel_cache", gpu)
    return gpu


def compute_on_host(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make calls upload NumPy arrays to a pretended GPU, and compute them on the CPU.

    Return the list to which each call adds its uploaded arrays.
    """
    uploads: list[Any] = []
    here = functools.partial(np.array, copy=True)
    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0))
    cupy = SimpleNamespace(ndarray=FakeArray, asarray=here, asnumpy=np.asarray, cuda=cuda)

    def run(_: Any, arguments: Arguments, options: Options, *, user_mods: UserMods) -> Any:
        uploads.append(arguments)
        return host_forward.compute(arguments, options, 0, "cpu", user_mods)

    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(host_forward, "_calls", {})
    monkeypatch.setattr(
        host_forward, "runs_on_gpu", lambda problem, options, backend: backend != "cpu"
    )
    monkeypatch.setattr(host_forward, "cupy_module", lambda: cupy)
    monkeypatch.setattr(host_forward, "current_device", lambda: device_for_arch("sm_90"))
    monkeypatch.setattr(prepared_calls, "run", run)
    return uploads
