"""Versions and devices of this machine, for records and for `info`."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import cupy_flash
from cupy_flash.cpu import sources
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.environment import device_for_id, gpu_unavailable
from cupy_flash.problem.device import Device

if TYPE_CHECKING:
    from ..cases.cases import Case

FLOP_CONVENTION = (
    "FLOPs = 2 * batch * heads_q * seqlen_q * seqlen_k * (head_dim + head_dim_v); "
    "if causal, of the visible pairs: half if seqlen_q = seqlen_k"
)
FLOPS_OF_GRADIENTS = (
    "FLOPs of gradients = 2 * batch * heads_q * seqlen_q * seqlen_k * (3 * head_dim + 2 * "
    "head_dim_v), 2.5 times those of the output if the head_dims are equal; if causal, of the "
    "visible pairs. Products that a kernel computes twice count once"
)
FLOPS_OF_MODS = (
    "FLOPs of windows, documents, prefixes and dilated masks are of the visible pairs; pairs that "
    "mask arrays hide count"
)
# Packages of other libraries and of their kernels' compilers, by the modules that are imported.
_PACKAGES = {
    "flash_attn.flash_attn_interface": ("flash-attn",),
    "flash_attn_interface": ("flash-attn-3",),
    "flash_attn.cute": ("flash-attn-4", "nvidia-cutlass-dsl"),
    "flashinfer": ("flashinfer-python",),
}


def flop_conventions(cases: Sequence[Case]) -> list[str]:
    """Return one sentence for each way in which the FLOPs of some cases are counted."""
    said = {
        FLOP_CONVENTION: not all(case.is_backward for case in cases),
        FLOPS_OF_GRADIENTS: any(case.is_backward for case in cases),
        FLOPS_OF_MODS: any(case.mods for case in cases),
    }
    return [text for text, applies in said.items() if applies]


def digest_of(family: str, direction: str = "forward") -> str | None:
    """Return the digest of the sources of a family or "cpu"; None if the family is unknown."""
    if family == "cpu":
        return sources.digest(direction)
    known = FAMILIES[direction].get(family)
    return known.digest() if known else None


def kernel_name(family: str, direction: str) -> str:
    """Return a family's name, with its direction if that is not forward."""
    return family if direction == "forward" else f"{family} {direction}"


def versions() -> dict[str, str]:
    """Return the versions of everything that a result depends on, without missing packages.

    torch and cuDNN are included if this process has imported torch, FlashAttention and FlashInfer
    if it has imported them, and NCCL if it uses that.
    """
    result: dict[str, str | None] = {
        "cupy_flash": cupy_flash.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    result |= _cupy_versions()
    torch = sys.modules.get("torch")
    if torch is not None:
        result["torch"] = str(torch.__version__)
        cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
        result["cudnn"] = None if cudnn is None else str(cudnn)
    for module, packages in _PACKAGES.items():
        if module in sys.modules:
            result |= {name: _installed_version(name) for name in packages}
    nccl = sys.modules.get("cupy.cuda.nccl")
    if nccl is not None and nccl.available:
        number = nccl.get_version()
        result["nccl"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return {name: version for name, version in result.items() if version}


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # The module was imported from a folder of sources.
        return None


def _cupy_versions() -> dict[str, str | None]:
    try:
        import cupy
        from cupy.cuda import nvrtc
    except Exception:  # CuPy is missing or broken; `info` reports the reason
        return {}
    result: dict[str, str | None] = {"cupy": cupy.__version__}
    try:
        result["nvrtc"] = ".".join(map(str, nvrtc.getVersion()))
    except Exception:  # the first call loads NVRTC's library, which may be missing
        result["nvrtc"] = None
    if gpu_unavailable() is None:
        result["cuda_runtime"] = _cuda_version(cupy.cuda.runtime.runtimeGetVersion())
        result["driver"] = driver_version()
    return result


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_version() -> str:
    """Return the driver's version, if it can be read, and the CUDA version that it supports."""
    import cupy

    cuda = f"CUDA {_cuda_version(cupy.cuda.runtime.driverGetVersion())}"
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return cuda
    result = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return f"{result[1]} ({cuda})" if result else cuda


def available_cpus() -> int:
    """Return the number of CPUs that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_name() -> str:
    """Return the processor's name and the number of CPUs that the CPU backend may use."""
    name = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    if result := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
        name = result[1].strip()
    return f"{name} ({available_cpus()} CPUs)"


def gpus() -> list[Device]:
    """Return every GPU that CUDA lists."""
    if gpu_unavailable() is not None:
        return []
    import cupy

    return [device_for_id(index) for index in range(cupy.cuda.runtime.getDeviceCount())]


def metadata(device: str) -> dict[str, Any]:
    """Return the metadata of a record: date, device, versions and FLOP convention."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.isoformat(timespec="seconds"),
        "device": device,
        "system": platform.platform(),
        "versions": versions(),
        "flop_convention": FLOP_CONVENTION,
    }
