"""What a GPU offers, by architecture, and how many blocks that lets an SM hold."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash.problem import device as device_module
from cupy_flash.problem.device import ARCHITECTURES, KIB, device_for_arch, gpu_unavailable

h100 = device_for_arch("sm_90")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_has_limits_that_go_together(arch):
    device = device_for_arch(arch)
    assert (device.arch, device.sm, device.name) == (arch, f"sm_{arch}", f"sm_{arch}")
    assert 48 * KIB <= device.shared_memory_per_block <= device.shared_memory_per_sm
    # A block that takes all it may leaves what the system reserves.
    spare = device.shared_memory_per_sm - device.shared_memory_per_block
    assert spare == device.reserved_shared_memory
    assert device.threads_per_sm % 32 == 0
    assert device.max_blocks_per_sm <= device.threads_per_sm // 32


@pytest.mark.parametrize("spelling", ["sm_90", "90", 90, "sm_90a"])
def test_an_architecture_may_be_spelled_as_people_do(spelling):
    assert device_for_arch(spelling) == h100


@pytest.mark.parametrize("spelling", ["sm_70", "90.0", "hopper", "", "sm_", "²", 9, None])
def test_an_unknown_architecture_is_told_the_known_ones(spelling):
    with pytest.raises(ValueError, match=r"unknown architecture .*; expected one of sm_75, sm_80"):
        device_for_arch(spelling)


@pytest.mark.parametrize(
    ("threads", "shared_memory", "registers", "blocks"),
    [
        (128, 0, 0, 16),  # threads: 2048 / 128
        (128, 100 * KIB, 0, 2),  # 228 KiB / 101 KiB
        (128, 227 * KIB, 0, 1),
        (128, 0, 255, 2),  # 65536 / (4 warps of 32 x 256)
        (128, 0, 128, 4),
        (128, 0, 129, 3),  # a warp takes registers in steps of 256: 136 per thread
        (32, 0, 16, 32),  # no SM holds more blocks
    ],
)
def test_blocks_per_sm_is_what_the_scarcest_resource_allows(
    threads, shared_memory, registers, blocks
):
    assert h100.blocks_per_sm(threads, shared_memory, registers) == blocks


def test_more_shared_memory_than_an_sm_has_leaves_no_block():
    assert h100.blocks_per_sm(128, 228 * KIB, 32) == 0


@given(
    st.sampled_from(ARCHITECTURES),
    st.integers(1, 32),
    st.integers(0, 227 * KIB),
    st.integers(0, 255),
)
def test_the_blocks_of_an_sm_fit_it(arch, warps, shared_memory, registers):
    device = device_for_arch(arch)
    blocks = device.blocks_per_sm(32 * warps, shared_memory, registers)
    assert 0 <= blocks <= device.max_blocks_per_sm
    assert blocks * 32 * warps <= device.threads_per_sm
    assert blocks * (shared_memory + device.reserved_shared_memory) <= device.shared_memory_per_sm
    assert blocks * 32 * warps * registers <= device.registers_per_sm


def test_turing_reserves_no_shared_memory():
    assert device_for_arch("sm_75").blocks_per_sm(64, 32 * KIB, 0) == 2
    assert dataclasses.replace(h100, arch=75).reserved_shared_memory == 0


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

    from cupy_flash.problem.device import device_for_id

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
    monkeypatch.setattr(device_module, "_DRIVER_PLACES", (str(tmp_path / "none"),))
    monkeypatch.setattr(device_module, "_PCI_DEVICES", str(pci_cards(tmp_path, *vendors)))
    assert gpu_unavailable.__wrapped__() == "no NVIDIA GPU found"


def test_with_nvidia_hardware_the_reason_is_the_drivers(monkeypatch, tmp_path):
    monkeypatch.setattr(cupy_runtime(), "getDeviceCount", insufficient_driver)
    monkeypatch.setattr(device_module, "_DRIVER_PLACES", (str(tmp_path / "none"),))
    monkeypatch.setattr(device_module, "_PCI_DEVICES", str(pci_cards(tmp_path, "0x8086", "0x10de")))
    assert gpu_unavailable.__wrapped__().startswith("CUDA reports no usable GPU: ")
    # A driver without a card that PCI shows: WSL, Tegra.
    monkeypatch.setattr(device_module, "_PCI_DEVICES", str(pci_cards(tmp_path / "wsl")))
    monkeypatch.setattr(device_module, "_DRIVER_PLACES", (str(tmp_path),))
    assert gpu_unavailable.__wrapped__().startswith("CUDA reports no usable GPU: ")


def test_a_system_that_does_not_list_its_cards_is_not_said_to_have_none(monkeypatch, tmp_path):
    monkeypatch.setattr(cupy_runtime(), "getDeviceCount", insufficient_driver)
    monkeypatch.setattr(device_module, "_DRIVER_PLACES", ())
    monkeypatch.setattr(device_module, "_PCI_DEVICES", str(tmp_path / "none"))
    assert gpu_unavailable.__wrapped__().startswith("CUDA reports no usable GPU: ")


def pci_cards(folder, *vendors):
    """A folder like the system's list of PCI cards."""
    cards = folder / "devices"
    cards.mkdir(parents=True)
    for place, vendor in enumerate(vendors):
        (cards / str(place)).mkdir()
        (cards / str(place) / "vendor").write_text(f"{vendor}\n")
    return cards
