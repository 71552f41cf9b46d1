"""What ran where: versions and devices, for records and for `info`."""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import cupy_flash
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.environment import device_for_id, gpu_unavailable
from cupy_flash.host import sources
from cupy_flash.problem.device import Device

if TYPE_CHECKING:
    from ..cases.cases import Case

FLOP_CONVENTION = (
    "FLOPs = 2 * batch * heads_q * seqlen_q * seqlen_k * (head_dim + head_dim_v); "
    "if causal, of the pairs that are seen: half if seqlen_q = seqlen_k"
)
FLOPS_OF_GRADIENTS = (
    "FLOPs of gradients = 2 * batch * heads_q * seqlen_q * seqlen_k * (3 * head_dim + 2 * "
    "head_dim_v), 2.5 times those of the output if the head_dims are equal; if causal, of the "
    "pairs that are seen. Products that a kernel computes twice count once"
)
FLOPS_OF_MODS = (
    "FLOPs of windows, documents, prefixes and dilated masks are of the pairs that are seen; masks "
    "in arrays hide none"
)


def flop_conventions(cases: Sequence[Case]) -> list[str]:
    """How FLOPs of some cases are counted, in a sentence each."""
    said = {
        FLOP_CONVENTION: not all(case.is_backward for case in cases),
        FLOPS_OF_GRADIENTS: any(case.is_backward for case in cases),
        FLOPS_OF_MODS: any(case.mods for case in cases),
    }
    return [text for text, applies in said.items() if applies]


def digest_of(family: str, direction: str = "forward") -> str | None:
    """Digest of a family's sources, or of the CPU backend's; None for an unknown one."""
    if family == "cpu":
        return sources.digest(direction)
    known = FAMILIES[direction].get(family)
    return known.digest() if known else None


def kernel_name(family: str, direction: str) -> str:
    """A family and what its kernels compute, as text."""
    return family if direction == "forward" else f"{family} {direction}"


def versions() -> dict[str, str]:
    """Versions of what a result depends on; what is not there is left out.

    torch and cuDNN are named where this process uses torch, and NCCL where it uses that.
    """
    found: dict[str, str | None] = {
        "cupy_flash": cupy_flash.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    found |= _cupy_versions()
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
        cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
        found["cudnn"] = None if cudnn is None else str(cudnn)
    nccl = sys.modules.get("cupy.cuda.nccl")
    if nccl is not None and nccl.available:
        number = nccl.get_version()
        found["nccl"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return {name: version for name, version in found.items() if version}


def _cupy_versions() -> dict[str, str | None]:
    try:
        import cupy
        from cupy.cuda import nvrtc
    except Exception:  # missing or broken: `info` says how, a record just has no such version
        return {}
    found: dict[str, str | None] = {"cupy": cupy.__version__}
    try:
        found["nvrtc"] = ".".join(map(str, nvrtc.getVersion()))
    except Exception:  # its library is loaded at the first call and may be missing
        found["nvrtc"] = None
    if gpu_unavailable() is None:
        found["cuda_runtime"] = _cuda_version(cupy.cuda.runtime.runtimeGetVersion())
        found["driver"] = driver_version()
    return found


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_version() -> str:
    """The driver's own version where the system tells it, and the CUDA version it serves."""
    import cupy

    cuda = f"CUDA {_cuda_version(cupy.cuda.runtime.driverGetVersion())}"
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return cuda
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return f"{found[1]} ({cuda})" if found else cuda


def available_cpus() -> int:
    """CPUs that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor, with the number of CPUs that the CPU backend may use."""
    name = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    if found := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
        name = found[1].strip()
    return f"{name} ({available_cpus()} CPUs)"


def gpus() -> list[Device]:
    """Every GPU that CUDA shows."""
    if gpu_unavailable() is not None:
        return []
    import cupy

    return [device_for_id(index) for index in range(cupy.cuda.runtime.getDeviceCount())]


def metadata(device: str) -> dict[str, Any]:
    """Head of a record: when, on what, with which versions, and how FLOPs are counted."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.isoformat(timespec="seconds"),
        "device": device,
        "system": platform.platform(),
        "versions": versions(),
        "flop_convention": FLOP_CONVENTION,
    }
