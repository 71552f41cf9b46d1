"""The table of published figures of GPUs."""

from __future__ import annotations

import pytest

from cupy_flash.cli.model import gpus
from cupy_flash.problem.device import ARCHITECTURES


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("h100", "H100"),
        ("H100 SXM", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("nvidia a100 80gb pcie", "A100-PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx4090", "RTX-4090"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
    ],
)
def test_a_gpu_is_found_by_its_name_in_any_case_and_by_the_drivers(name: str, entry: str) -> None:
    assert gpus.find(name).name == entry


@pytest.mark.parametrize("name", ["K80", "NVIDIA GeForce RTX 3090 Ti", "H10", ""])
def test_an_unknown_gpu_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of T4, .*H100, .*B200"):
        gpus.find(name)


def test_every_name_and_alias_is_of_one_gpu() -> None:
    for gpu in gpus.GPUS:
        assert {gpus.find(name) is gpu for name in (gpu.name, *gpu.aliases)} == {True}


def test_every_gpu_of_an_architecture_with_kernels_can_be_planned_for() -> None:
    for gpu in gpus.GPUS:
        device = gpu.device()
        assert (device is None) == (gpu.arch not in ARCHITECTURES)
        if device:
            assert (device.sm_count, device.l2_cache) == (gpu.sm_count, gpu.l2_bytes)
            assert device.name == gpu.aliases[0]


def test_rates_are_without_sparsity() -> None:
    # The datasheets print 1979 and 4500 TFLOP/s "with sparsity".
    assert gpus.find("H100").peak("bfloat16").flops == 989.5e12
    assert gpus.find("B200").peak("bfloat16").flops == 2250e12


def test_16_bit_rates_are_those_of_tensor_cores() -> None:
    assert gpus.find("A100").peak("float16") == gpus.Peak(312e12, "tensor cores")


def test_float32_counts_three_tf32_products_where_they_are_faster() -> None:
    a100, rtx = gpus.find("A100").peak("float32"), gpus.find("RTX-3090").peak("float32")

    assert a100 == gpus.Peak(52e12, "tensor cores, three TF32 products for one")
    assert rtx == gpus.Peak(35.6e12, "CUDA cores")


def test_bfloat16_is_float32s_work_where_tensor_cores_do_not_take_it() -> None:
    assert gpus.find("T4").peak("bfloat16") == gpus.Peak(8.1e12, "CUDA cores")


def test_a_rate_that_no_source_states_is_not_made_up() -> None:
    with pytest.raises(ValueError, match="states no float64 rate for L4"):
        gpus.find("L4").peak("float64")
