"""Limits of GPUs by architecture, and how many blocks these let an SM hold."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash.problem.device import ARCHITECTURES, KIB, device_for_arch

h100 = device_for_arch("sm_90")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_has_limits_that_go_together(arch):
    device = device_for_arch(arch)
    assert (device.arch, device.sm, device.name) == (arch, f"sm_{arch}", f"sm_{arch}")
    assert 48 * KIB <= device.shared_memory_per_block <= device.shared_memory_per_sm
    # A block with the maximum of shared memory leaves exactly what the system reserves.
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
        (128, 100 * KIB, 0, 2),  # 228 KiB / (100 KiB + 1 KiB reserved)
        (128, 227 * KIB, 0, 1),
        (128, 0, 255, 2),  # 65536 / (4 warps of 32 x 256)
        (128, 0, 128, 4),
        (128, 0, 129, 3),  # a warp takes registers in steps of 256: 136 per thread
        (32, 0, 16, 32),  # the maximum of blocks per SM
    ],
)
def test_blocks_per_sm_is_what_the_scarcest_resource_allows(
    threads, shared_memory, registers, blocks
):
    assert h100.blocks_per_sm(threads, shared_memory, registers) == blocks


def test_more_shared_memory_than_an_sm_has_leaves_no_block():
    assert h100.blocks_per_sm(128, 228 * KIB, 32) == 0


@given(
    *(st.sampled_from(ARCHITECTURES), st.integers(1, 32)),
    *(st.integers(0, 227 * KIB), st.integers(0, 255)),
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
