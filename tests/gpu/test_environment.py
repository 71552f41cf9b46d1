"""Detection of GPUs, the reason if there is none, and the folder of cached kernels."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cupy_flash.gpu import environment
from cupy_flash.gpu.environment import device_for_id, gpu_unavailable, kernel_cache_dir
from cupy_flash.problem.device import device_for_arch


def test_without_cupy_the_answer_is_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    reason = gpu_unavailable.__wrapped__()
    assert reason.startswith("CuPy is not installed")
    assert "pip install 'cupy_flash[cuda13]' or [cuda12]" in reason


def test_a_driver_without_gpus_is_named_as_the_reason(monkeypatch):
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    assert gpu_unavailable.__wrapped__() == "the CUDA driver reports no GPU"


@pytest.mark.gpu
def test_the_current_gpu_is_described_as_its_architecture_is():
    import cupy

    device = device_for_id(cupy.cuda.runtime.getDevice())
    usual = device_for_arch(device.arch)
    for name in (
        "shared_memory_per_block",
        "shared_memory_per_sm",
        "registers_per_sm",
        "threads_per_sm",
        "max_blocks_per_sm",
    ):
        assert getattr(device, name) == getattr(usual, name), name


def insufficient_driver():
    raise cupy_runtime().CUDARuntimeError(35)


def cupy_runtime():
    return pytest.importorskip("cupy").cuda.runtime


@pytest.mark.parametrize("vendors", [(), ("0x8086", "0x1002")])
def test_without_nvidia_hardware_the_reason_is_that_and_no_driver_version(
    vendors, monkeypatch, tmp_path
):
    monkeypatch.setattr(cupy_runtime(), "getDeviceCount", insufficient_driver)
    monkeypatch.setattr(environment, "_DRIVER_PLACES", (str(tmp_path / "none"),))
    monkeypatch.setattr(environment, "_PCI_DEVICES", str(pci_cards(tmp_path, *vendors)))
    assert gpu_unavailable.__wrapped__() == "no NVIDIA GPU found"


def test_with_nvidia_hardware_the_reason_is_the_drivers(monkeypatch, tmp_path):
    monkeypatch.setattr(cupy_runtime(), "getDeviceCount", insufficient_driver)
    monkeypatch.setattr(environment, "_DRIVER_PLACES", (str(tmp_path / "none"),))
    monkeypatch.setattr(environment, "_PCI_DEVICES", str(pci_cards(tmp_path, "0x8086", "0x10de")))
    assert gpu_unavailable.__wrapped__().startswith("CUDA reports no usable GPU: ")
    # WSL and Tegra have a driver, but no card in the PCI list.
    monkeypatch.setattr(environment, "_PCI_DEVICES", str(pci_cards(tmp_path / "wsl")))
    monkeypatch.setattr(environment, "_DRIVER_PLACES", (str(tmp_path),))
    assert gpu_unavailable.__wrapped__().startswith("CUDA reports no usable GPU: ")


def test_a_system_that_does_not_list_its_cards_is_not_said_to_have_none(monkeypatch, tmp_path):
    monkeypatch.setattr(cupy_runtime(), "getDeviceCount", insufficient_driver)
    monkeypatch.setattr(environment, "_DRIVER_PLACES", ())
    monkeypatch.setattr(environment, "_PCI_DEVICES", str(tmp_path / "none"))
    assert gpu_unavailable.__wrapped__().startswith("CUDA reports no usable GPU: ")


def pci_cards(folder, *vendors):
    """Return a folder like the system's list of PCI cards."""
    cards = folder / "devices"
    cards.mkdir(parents=True)
    for place, vendor in enumerate(vendors):
        (cards / str(place)).mkdir()
        (cards / str(place) / "vendor").write_text(f"{vendor}\n")
    return cards


def test_kernels_are_cached_where_cupy_caches_them(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    assert kernel_cache_dir() == tmp_path / "kernels"
    monkeypatch.delenv("CUPY_CACHE_DIR")
    assert kernel_cache_dir() == type(tmp_path)(os.path.expanduser("~/.cupy/kernel_cache"))


def test_threads_that_prepare_cupys_cache_at_once_agree_and_leave_its_variable(
    monkeypatch, tmp_path
):
    file = tmp_path / "file"
    file.touch()
    refused = str(file / "kernels")
    monkeypatch.setenv("CUPY_CACHE_DIR", refused)
    monkeypatch.setenv(environment.IN_MEMORY_VARIABLE, "")
    monkeypatch.delenv(environment.IN_MEMORY_VARIABLE)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: time.sleep(0.05))
    threads = 4
    start = threading.Barrier(threads)

    def prepare(number):
        start.wait(10)
        return environment.prepare_cupy_cache()

    environment._prepared_cache.cache_clear()
    with ThreadPoolExecutor(threads) as pool:
        reasons = list(pool.map(prepare, range(threads)))
    environment._prepared_cache.cache_clear()

    assert len(set(reasons)) == 1
    assert reasons[0] is not None
    assert os.environ["CUPY_CACHE_DIR"] == refused
