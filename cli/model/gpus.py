"""Published peak rates and bandwidths of GPUs, for which no GPU is needed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cupy_flash.problem.device import ARCHITECTURES, KIB, Device, device_for_arch


@dataclass(frozen=True)
class Peak:
    """Peak rate in one dtype, in FLOP/s, and the units that reach it."""

    flops: float
    units: str


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU.

    Attributes
    ----------
    name
        Name that `--gpu` takes.
    arch
        Compute capability times ten.
    sm_count
        Number of streaming multiprocessors.
    l2_bytes
        Size of the L2 cache in bytes.
    hbm_bytes_per_second
        Bandwidth of the device memory in bytes per second.
    peak_flops
        FLOP/s of dense products by dtype, on the fastest units: tensor cores with float32
        accumulation for float16, bfloat16 and tf32, CUDA cores for float32. Dtypes for which the
        source states no rate are missing.
    source
        Published document.
    aliases
        Other names; the first is the one that the driver reports.
    """

    name: str
    arch: int
    sm_count: int
    l2_bytes: int
    hbm_bytes_per_second: float
    peak_flops: Mapping[str, float]
    source: str
    aliases: tuple[str, ...]

    def peak(self, dtype: str) -> Peak:
        """Return the peak rate for products of a dtype in its own precision.

        A float32 product may consist of three tf32 products if that is faster. A 16-bit dtype that
        the tensor cores do not support is computed in float32. Raise ValueError if the source
        states no rate for the dtype.
        """
        flops = self.peak_flops
        if dtype in ("float16", "bfloat16") and dtype in flops:
            return Peak(flops[dtype], "tensor cores")
        if dtype == "float64":
            if dtype not in flops:
                raise ValueError(
                    f"{self.source} states no float64 rate for {self.name}; "
                    "take another dtype or GPU"
                )
            return Peak(flops[dtype], "its fastest float64 units")
        if flops.get("tf32", 0) / 3 > flops["float32"]:
            return Peak(flops["tf32"] / 3, "tensor cores, three TF32 products for one")
        return Peak(flops["float32"], "CUDA cores")

    def device(self) -> Device | None:
        """Return the GPU as a device for the planner; None if its architecture has no kernels."""
        if self.arch not in ARCHITECTURES:
            return None
        return dataclasses.replace(
            device_for_arch(self.arch),
            name=self.aliases[0],
            sm_count=self.sm_count,
            l2_cache=self.l2_bytes,
        )


def _gpu(
    name: str,
    aliases: tuple[str, ...],
    source: str,
    *,
    arch: int,
    sms: int,
    l2_mib: int,
    gb_per_s: float,
    half: float,
    bf16: bool = True,
    **rates: float,
) -> Gpu:
    """Return an entry of the table.

    `half` is the rate for float16 and, if `bf16`, for bfloat16; `rates` has those of other dtypes.
    All are in TFLOP/s, without sparsity.
    """
    rates |= {"float16": half, "bfloat16": half} if bf16 else {"float16": half}
    return Gpu(
        name=name,
        arch=arch,
        sm_count=sms,
        l2_bytes=l2_mib * KIB * KIB,
        hbm_bytes_per_second=gb_per_s * 1e9,
        peak_flops={dtype: rate * 1e12 for dtype, rate in rates.items()},
        source=source,
        aliases=aliases,
    )


_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet"

# Rates that a datasheet gives "with sparsity" are halved. GeForce rates are those with float32
# accumulation. SM counts and L2 sizes are from the architectures' whitepapers.
GPUS: tuple[Gpu, ...] = (
    _gpu(
        "T4", ("Tesla T4",), "NVIDIA T4 datasheet",
        arch=75, sms=40, l2_mib=4, gb_per_s=320, half=65, bf16=False, float32=8.1,
    ),
    _gpu(
        "V100", ("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-16GB", "V100-SXM2"),
        "NVIDIA V100 Tensor Core GPU datasheet",
        arch=70, sms=80, l2_mib=6, gb_per_s=900, half=125, bf16=False, float32=15.7, float64=7.8,
    ),
    _gpu(
        "A10", ("NVIDIA A10",), "NVIDIA A10 datasheet",
        arch=86, sms=72, l2_mib=6, gb_per_s=600, half=125, tf32=62.5, float32=31.2,
    ),
    _gpu(
        "A10G", ("NVIDIA A10G",), "NVIDIA A10G datasheet (Amazon EC2 G5)",
        arch=86, sms=80, l2_mib=6, gb_per_s=600, half=70, tf32=35, float32=35,
    ),
    _gpu(
        "A100", ("NVIDIA A100-SXM4-80GB", "A100-80GB", "A100-SXM", "A100-SXM-80GB"), _A100,
        arch=80, sms=108, l2_mib=40, gb_per_s=2039, half=312, tf32=156, float32=19.5, float64=19.5,
    ),
    _gpu(
        "A100-40GB", ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"), _A100,
        arch=80, sms=108, l2_mib=40, gb_per_s=1555, half=312, tf32=156, float32=19.5, float64=19.5,
    ),
    _gpu(
        "A100-PCIe", ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"), _A100,
        arch=80, sms=108, l2_mib=40, gb_per_s=1935, half=312, tf32=156, float32=19.5, float64=19.5,
    ),
    _gpu(
        "RTX-3090", ("NVIDIA GeForce RTX 3090", "3090"),
        "NVIDIA Ampere GA102 GPU Architecture whitepaper",
        arch=86, sms=82, l2_mib=6, gb_per_s=936, half=71, tf32=35.6, float32=35.6,
    ),
    _gpu(
        "RTX-4090", ("NVIDIA GeForce RTX 4090", "4090"),
        "NVIDIA Ada GPU Architecture whitepaper",
        arch=89, sms=128, l2_mib=72, gb_per_s=1008, half=165.2, tf32=82.6, float32=82.6,
    ),
    _gpu(
        "RTX-5090", ("NVIDIA GeForce RTX 5090", "5090"),
        "NVIDIA RTX Blackwell GPU Architecture whitepaper",
        arch=120, sms=170, l2_mib=96, gb_per_s=1792, half=209.5, tf32=104.8, float32=104.8,
    ),
    _gpu(
        "L4", ("NVIDIA L4",), "NVIDIA L4 Tensor Core GPU datasheet",
        arch=89, sms=58, l2_mib=48, gb_per_s=300, half=121, tf32=60, float32=30.3,
    ),
    _gpu(
        "L40S", ("NVIDIA L40S",), "NVIDIA L40S datasheet",
        arch=89, sms=142, l2_mib=96, gb_per_s=864, half=362.05, tf32=183, float32=91.6,
    ),
    _gpu(
        "H100", ("NVIDIA H100 80GB HBM3", "H100-SXM", "H100-SXM5"), _H100,
        arch=90, sms=132, l2_mib=50, gb_per_s=3350, half=989.5, tf32=494.5, float32=67, float64=67,
    ),
    _gpu(
        "H100-PCIe", ("NVIDIA H100 PCIe",), _H100,
        arch=90, sms=114, l2_mib=50, gb_per_s=2000, half=756.5, tf32=378, float32=51, float64=51,
    ),
    _gpu(
        "H100-NVL", ("NVIDIA H100 NVL",), _H100,
        arch=90, sms=132, l2_mib=50, gb_per_s=3900, half=835.5, tf32=417.5, float32=60, float64=60,
    ),
    _gpu(
        "H200", ("NVIDIA H200", "H200-SXM"), "NVIDIA H200 Tensor Core GPU datasheet",
        arch=90, sms=132, l2_mib=50, gb_per_s=4800, half=989.5, tf32=494.5, float32=67, float64=67,
    ),
    _gpu(
        "B200", ("NVIDIA B200", "HGX B200", "B200-SXM"),
        "NVIDIA Blackwell Architecture technical brief (HGX B200)",
        arch=100, sms=148, l2_mib=126, gb_per_s=8000, half=2250, tf32=1100, float32=80, float64=40,
    ),
)  # fmt: skip


def names() -> tuple[str, ...]:
    """Return the names that `find` knows, without aliases."""
    return tuple(gpu.name for gpu in GPUS)


def find(name: str) -> Gpu:
    """Return the entry of a GPU by its name or an alias, in upper or lower case.

    Raise ValueError if the GPU is not in the table; the message lists the names.
    """
    wanted = _key(name)
    for gpu in GPUS:
        if wanted in map(_key, (gpu.name, *gpu.aliases)):
            return gpu
    raise ValueError(f"no datasheet of a GPU {name!r} here; expected one of {', '.join(names())}")


def _key(name: str) -> str:
    """Return a name in lower case, without its maker, product line and separators."""
    return re.sub(r"[\s_-]+|nvidia|tesla|geforce", "", name.casefold())
