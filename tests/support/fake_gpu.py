"""A GPU that notes what it is asked to do: arrays without memory, kernels that do not run."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_flash.calls import on_host
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.options import Options
from cupy_flash.gpu import append, attention, gpu_calls, launch
from cupy_flash.gpu.append import APPEND_DTYPE, ENTRY
from cupy_flash.gpu.by_value import SLOT
from cupy_flash.gpu.counters import Shared
from cupy_flash.gpu.params import PARAMS_DTYPE, SEQUENCES_DTYPE
from cupy_flash.gpu.tensor_map import TensorMapSpec
from cupy_flash.problem.device import device_for_arch

# Where the first array lies, and how far apart they are: nothing that a test makes is as large.
_FIRST, _APART = 1 << 40, 1 << 30


class FakeArray:
    """A CuPy array as far as its address, shape, strides and dtype go."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        data: Any = None,
        strides: tuple[int, ...] | None = None,
        *,
        address: int = 0,
        device: int = 0,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = tuple(shape)
        steps = np.cumprod([self.itemsize, *self.shape[:0:-1]]).tolist()[::-1] if shape else []
        self.strides = tuple(steps) if strides is None else strides
        self.data = data or SimpleNamespace(ptr=address, device_id=device)
        self.filled: float | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def copy(self, order: str) -> FakeArray:
        assert order == "C"
        # As new memory is, it is aligned.
        address = self.data.ptr // 512 * 512 + _APART // 2
        return FakeArray(self.shape, self.dtype, address=address)

    def fill(self, value: float) -> None:
        self.filled = value


# What `cupy_flash.calls.arrays` knows CuPy's arrays by.
FakeArray.__module__ = "cupy"


class FakeTensorMaps:
    """Tensor maps that are nothing but their specs and the addresses that they are of."""

    def __init__(self, specs: tuple[TensorMapSpec, ...]) -> None:
        self._specs = specs

    def at(self, addresses: tuple[int, ...]) -> SimpleNamespace:
        return SimpleNamespace(pointers=((self._specs, addresses),))


class FakeArguments:
    """Where structs are written for a launch, and what kernels are given for them: their slots."""

    def __init__(self) -> None:
        self.memory = bytearray(2 * SLOT)
        self.pointers = (0, 1)

    def struct(self, slot: int, entry: str) -> Any:
        """The struct that lies in a slot as a kernel is launched."""
        dtype = SEQUENCES_DTYPE if slot else APPEND_DTYPE if entry == ENTRY else PARAMS_DTYPE
        return np.frombuffer(bytes(self.memory), dtype, 1, slot * SLOT)[0]


class FakeGpu:
    """The GPU, and what was asked of it since it was made.

    Attributes
    ----------
    launches
        Entry, and arguments by the name of their struct's dtype: what was launched, in order.
    allocations
        Address and bytes of each workspace.
    compiled
        Titles of the units that kernels were asked for.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[Any, ...]]] = []
        self.allocations: list[tuple[int, int]] = []
        self.compiled: list[str] = []
        self.counters: list[int] = []
        self.arguments = FakeArguments()
        self.device = 0
        self._next = _FIRST

    def address(self) -> int:
        self._next += _APART
        return self._next

    def array(self, *shape: int, dtype: Any = np.float16, **options: Any) -> FakeArray:
        return FakeArray(shape, dtype, **({"address": self.address()} | options))

    def lengths(self, *shape: int, **options: Any) -> FakeArray:
        return self.array(*shape, dtype=np.int32, **options)

    def alloc(self, size: int) -> SimpleNamespace:
        self.allocations.append((self.address(), size))
        return SimpleNamespace(ptr=self.allocations[-1][0])

    def shared(self, count: int) -> Shared:
        if count:
            self.counters.append(count)
        return Shared(0xC0DE00)

    def get(self, unit: Any, shared_memory: dict[str, int]) -> dict[str, Any]:
        self.compiled.append(unit.title)
        return {entry: self._kernel(entry) for entry in unit.entries}

    def _kernel(self, entry: str) -> Any:
        def launch(grid: Any, block: Any, arguments: Any, shared_memory: int = 0) -> None:
            assert min(*grid, *block) > 0
            structs = [
                self.arguments.struct(x, entry) if isinstance(x, int) else x for x in arguments
            ]
            self.launches.append((entry, tuple(structs)))

        return launch


def install(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A new fake GPU, which attention runs on until the test ends."""
    gpu = FakeGpu()

    class Array(FakeArray):
        """CuPy's constructor, which finds memory itself."""

        def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
            super().__init__(shape, dtype, address=gpu.address())

    runtime = SimpleNamespace(getDevice=lambda: gpu.device)
    cuda = SimpleNamespace(runtime=runtime, alloc=gpu.alloc)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=FakeArray))
    fake = SimpleNamespace(ndarray=Array, cuda=cuda)
    for module in (launch, attention, gpu_calls):
        monkeypatch.setattr(module, "cupy_module", lambda: fake)
    monkeypatch.setattr(launch, "_calls", {})
    monkeypatch.setattr(launch, "device_for_id", lambda _: device_for_arch("sm_90"))
    monkeypatch.setattr(attention, "shared", gpu.shared)
    monkeypatch.setattr(attention, "TensorMaps", FakeTensorMaps)
    for module in (attention, append):
        monkeypatch.setattr(module, "thread_arguments", lambda: gpu.arguments)
    for module in (gpu_calls, append):
        monkeypatch.setattr(module, "kernel_cache", gpu)
    return gpu


def compute_on_host(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have calls believe in a GPU that NumPy arrays are uploaded to, and compute them here.

    Returns
    -------
    The arrays of each call that was uploaded.
    """
    uploads: list[Any] = []
    here = functools.partial(np.array, copy=True)
    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0))
    cupy = SimpleNamespace(ndarray=FakeArray, asarray=here, asnumpy=np.asarray, cuda=cuda)

    def run(arguments: Arguments, options: Options, keys: int = 0) -> Any:
        uploads.append(arguments)
        assert keys == 0
        return on_host.forward(arguments, options, keys, "cpu")

    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(on_host, "_calls", {})
    monkeypatch.setattr(on_host, "runs_on_gpu", lambda problem, options, backend: backend != "cpu")
    monkeypatch.setattr(on_host, "device_for_id", lambda _: device_for_arch("sm_90"))
    monkeypatch.setattr(launch, "run", run)
    return uploads
