"""The environment of GPU calls: CuPy, its kernel cache and the GPUs, or why none can be used."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cupy_flash.problem.device import Device

_CACHE_VARIABLE = "CUPY_CACHE_DIR"
IN_MEMORY_VARIABLE = "CUPY_CACHE_IN_MEMORY"


@functools.cache
def cupy_module() -> Any:
    """Return the module `cupy`, imported when the first call needs it."""
    # An import statement would take 0.5 us in each call.
    import cupy

    return cupy


@functools.cache
def nccl_module() -> Any:
    """Return CuPy's interface to NCCL, whose `available` tells whether NCCL is installed."""
    with warnings.catch_warnings():
        # CuPy warns if NCCL is not installed; callers check `available` instead.
        warnings.simplefilter("ignore", UserWarning)
        return importlib.import_module("cupy.cuda.nccl")


@functools.cache
def nccl_unavailable() -> str | None:
    """Return why GPUs cannot exchange arrays through NCCL here, or None if they can."""
    if reason := gpu_unavailable():
        return reason
    if not nccl_module().available:
        return "NCCL is not installed; pip install nvidia-nccl-cu13, or -cu12"
    return None


def current_device() -> Device:
    """Return the current GPU of this thread."""
    return device_for_id(cupy_module().cuda.runtime.getDevice())


@functools.cache
def device_for_id(device_id: int) -> Device:
    """Return the GPU of a device number, as the CUDA runtime describes it."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    name = properties["name"]
    return Device(
        name=name.decode() if isinstance(name, bytes) else name,
        arch=properties["major"] * 10 + properties["minor"],
        sm_count=properties["multiProcessorCount"],
        shared_memory_per_block=properties["sharedMemPerBlockOptin"],
        shared_memory_per_sm=properties["sharedMemPerMultiprocessor"],
        registers_per_sm=properties["regsPerMultiprocessor"],
        threads_per_sm=properties["maxThreadsPerMultiProcessor"],
        max_blocks_per_sm=properties["maxBlocksPerMultiProcessor"],
        l2_cache=properties["l2CacheSize"],
        arch_specific=_nvrtc_takes_two_targets(),
    )


def _nvrtc_takes_two_targets() -> bool:
    """Return whether NVRTC accepts another target before CuPy's own option: from 12.9 on."""
    try:
        from cupy.cuda import nvrtc

        return bool(nvrtc.getVersion() >= (12, 9))
    except Exception:  # without NVRTC, only prebuilt kernels are used
        return True


@functools.cache
def gpu_unavailable() -> str | None:
    """Return why no GPU can be used from this process, or None if one can."""
    prepare_cupy_cache()
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error}); pip install 'cupy_flash[cuda13]' or [cuda12]"
    except Exception as error:  # a broken driver or toolkit raises various exceptions at import
        return f"CuPy does not load: {error}"
    try:
        if cupy.cuda.runtime.getDeviceCount() == 0:
            return "the CUDA driver reports no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        # Without a driver, the runtime's error is about the driver version.
        return (
            f"CUDA reports no usable GPU: {error}" if _nvidia_is_here() else "no NVIDIA GPU found"
        )
    return None


# Files that a driver creates (also on WSL and Tegra), and the folder where Linux lists PCI cards.
_DRIVER_PLACES = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl")
_PCI_DEVICES = "/sys/bus/pci/devices"
_NVIDIA_PCI_VENDOR = "0x10de"


def _nvidia_is_here() -> bool:
    """Return whether there may be an NVIDIA GPU; True if the system does not list PCI cards."""
    cards = Path(_PCI_DEVICES)
    if any(map(os.path.exists, _DRIVER_PLACES)) or not cards.is_dir():
        return True
    for vendor in cards.glob("*/vendor"):
        with contextlib.suppress(OSError):
            if vendor.read_text(encoding="ascii").strip() == _NVIDIA_PCI_VENDOR:
                return True
    return False


def kernel_cache_dir() -> Path:
    """Return the folder where CuPy caches compiled kernels."""
    # CuPy finds it in the same way. Path.home() would raise for a user without a home directory.
    default = os.path.expanduser("~/.cupy/kernel_cache")
    return Path(os.environ.get(_CACHE_VARIABLE, default))


def prepare_cupy_cache() -> str | None:
    """Make sure that CuPy can be imported even if its cache folder cannot be created.

    CuPy creates the folder on import, and the import fails if it cannot. In that case, this
    function imports CuPy with an in-memory cache, for this process and those that it starts.

    Returns
    -------
    str or None
        Reason why the folder cannot be created. None if it can, or if the parent process has
        already reported the reason.
    """
    # Otherwise a second thread could take the temporary folder for the user's, and restore that.
    with _preparation:
        return _prepared_cache()


_preparation = threading.Lock()


@functools.cache
def _prepared_cache() -> str | None:
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is None:
        return None
    folder = kernel_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        is_known = IN_MEMORY_VARIABLE in os.environ
        os.environ[IN_MEMORY_VARIABLE] = "1"
        # Any existing folder is suitable, because nothing is written to it.
        with _environment(_CACHE_VARIABLE, tempfile.gettempdir()), contextlib.suppress(Exception):
            importlib.import_module("cupy")
        return None if is_known else why_refused(error)
    return None


@contextlib.contextmanager
def _environment(variable: str, value: str) -> Iterator[None]:
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def why_refused(error: OSError) -> str:
    """Return the system's message on why a file or folder cannot be accessed."""
    return error.strerror or str(error)
