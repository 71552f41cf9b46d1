"""Replacement of CuPy by NumPy, which lets the commands run as on a GPU without one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupy_flash.cli.main  # imports every command, so that `install` can patch it
from cupy_flash.cli.measure import check
from cupy_flash.cli.providers import torch_providers
from cupy_flash.cli.records import environment
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.problem.device import Device, device_for_arch

MILLISECONDS = 1.5


class _OnDevice(np.ndarray):
    """Array that has CuPy's `data.memset_async`."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(memset_async=lambda value, size, stream: None)


class FakeCupy:
    """The part of CuPy that the commands use, with NumPy arrays; any work takes 1.5 ms."""

    __version__ = "14.5.6"

    def __init__(self) -> None:
        # Numbers of arrays that were copied to the GPU, and back.
        self.uploads = self.downloads = 0
        # Bytes of free memory on the GPU, and of unused memory in the pool.
        self.free, self.idle = 3 << 30, 1 << 30
        self.cuda = SimpleNamespace(
            Device=lambda: SimpleNamespace(pci_bus_id="0000:1B:00.0"),
            Event=lambda: SimpleNamespace(record=lambda stream: None),
            MemoryHook=_Hook,
            get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
            get_elapsed_time=lambda start, end: MILLISECONDS,
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 1)),
            runtime=SimpleNamespace(
                getDevice=lambda: 0,
                getDeviceCount=lambda: 2,
                getDeviceProperties=lambda _: {"l2CacheSize": 1 << 20},
                memGetInfo=lambda: (self.free, 80 << 30),
                runtimeGetVersion=lambda: 13010,
                driverGetVersion=lambda: 12080,
            ),
        )

    class ndarray:
        """Type by which the library recognizes arrays in GPU memory; no array has it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def asarray(self, array: np.ndarray) -> np.ndarray:
        self.uploads += 1
        return np.array(array)

    def asnumpy(self, array: np.ndarray) -> np.ndarray:
        self.downloads += 1
        return np.array(array)

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype).view(_OnDevice)

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_bytes=lambda: self.idle, free_all_blocks=self._free_all_blocks)

    def _free_all_blocks(self) -> None:
        self.free, self.idle = self.free + self.idle, 0


class _Hook:
    """Memory hook that sees no allocation, because NumPy does not use the pool."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """Make the commands find CuPy and GPUs, but no torch, until the test ends.

    The library itself finds no GPU, so its calls are computed on the CPU.
    """
    # The result for the real CuPy is cached now, before the fake one is installed.
    gpu_unavailable()
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "cupy_flash":
            continue
        reason = None if name.startswith(f"{cupy_flash.cli.__name__}.") else "the tests have none"
        if hasattr(module, "gpu_unavailable"):
            monkeypatch.setattr(module, "gpu_unavailable", lambda reason=reason: reason)
        if reason is None and hasattr(module, "current_device"):
            monkeypatch.setattr(module, "current_device", device)
    monkeypatch.setattr(environment, "device_for_id", lambda index: device())
    monkeypatch.setattr(torch_providers, "why_no_torch", lambda: "torch is not installed")
    # The undecorated function does not return a cached result.
    monkeypatch.setattr(check, "why_no_matmul", check.why_no_matmul.__wrapped__)
    return cupy


def device() -> Device:
    """Return the device that each of the fake GPUs is."""
    return device_for_arch("sm_90")
