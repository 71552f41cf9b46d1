"""Compilation of translation units to loaded kernels or, without a GPU, to cubins."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupy_flash.errors import CompileError
from cupy_flash.families.contract import KERNEL_DIR, TranslationUnit
from cupy_flash.families.tokens import token_stream
from cupy_flash.gpu.environment import (
    IN_MEMORY_VARIABLE,
    device_for_id,
    kernel_cache_dir,
    prepare_cupy_cache,
    why_refused,
)
from cupy_flash.problem.device import ARCHITECTURES, Device, Resources

logger = logging.getLogger("cupy_flash")

# NVRTC 12.0 is the first version that supports sm_90 and the C++17 features of the kernels.
OLDEST_NVRTC = (12, 0)
# CuPy adds -ftz by itself. Cubins that are compiled ahead of time need it here to be identical.
_OPTIONS = ("-std=c++17", "-ftz=true", "-default-device")
CUBINS_VARIABLE = "CUPY_FLASH_CUBINS"


@dataclass(frozen=True)
class Cubin:
    """Machine code of a translation unit for one architecture."""

    image: bytes
    resources: dict[str, Resources]
    log: str
    seconds: float


def compile_options() -> tuple[str, ...]:
    """Return the NVRTC options without the architecture."""
    return (*_OPTIONS, f"-I{KERNEL_DIR}")


def _module_options(unit: TranslationUnit, device: Device) -> tuple[str, ...]:
    # CuPy appends the architecture. From NVRTC 12.9 on, a more specific one may precede it.
    specific = (f"-arch={unit.target(device)}",) if unit.arch_specific else ()
    return (*compile_options(), *specific)


def unit_digest(unit: TranslationUnit, device: Device) -> str:
    """Return the key of a unit's machine code: a hash of its tokens, target and options."""
    text = "\0".join([token_stream(unit.text, KERNEL_DIR), unit.target(device), *_OPTIONS])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def why_no_compiler() -> str | None:
    """Return why NVRTC cannot be used here, or None if it can."""
    prepare_cupy_cache()
    try:
        from cupy.cuda import nvrtc

        version = nvrtc.getVersion()
    except Exception as error:  # CuPy missing, or its NVRTC library missing or broken
        return f"NVRTC cannot be loaded: {error}"
    if version < OLDEST_NVRTC:
        return (
            f"NVRTC {version[0]}.{version[1]} is too old; "
            f"{OLDEST_NVRTC[0]}.{OLDEST_NVRTC[1]} or newer is needed"
        )
    return None


def known_architectures() -> tuple[int, ...]:
    """Return the architectures of `ARCHITECTURES` that NVRTC supports; none without NVRTC."""
    if why_no_compiler():
        return ()
    from cupy.cuda import nvrtc

    return tuple(arch for arch in nvrtc.getSupportedArchs() if arch in ARCHITECTURES)


def compile_cubin(unit: TranslationUnit, device: Device) -> Cubin:
    """Compile a translation unit with NVRTC; no GPU is needed.

    Raises
    ------
    CompileError
        If the compilation fails; the message has the compiler's log and the unit.
    """
    if reason := why_no_compiler():
        raise CompileError(f"{unit.title} for {device.sm}: {reason}")
    from cupy.cuda import nvrtc

    if device.arch not in nvrtc.getSupportedArchs():
        known = ", ".join(f"sm_{arch}" for arch in known_architectures())
        raise CompileError(f"{unit.title} for {device.sm}: this NVRTC supports {known} only")
    start = time.perf_counter()
    program = nvrtc.createProgram(unit.text, "unit.cu", (), ())
    try:
        options = (*compile_options(), f"-arch={unit.target(device)}", "--ptxas-options=-v")
        if nvrtc.getVersion() >= (13, 0):
            # With its own cache, NVRTC would return the image without the register report.
            options += ("-no-cache",)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise CompileError(
                _compile_message(unit, device, nvrtc.getProgramLog(program))
            ) from error
        log = nvrtc.getProgramLog(program)
        # CuPy treats the image as a C string and drops its last byte, which is 0.
        image = nvrtc.getCUBIN(program) + b"\0"
    finally:
        nvrtc.destroyProgram(program)
    return Cubin(image, _parse_resources(log), log, time.perf_counter() - start)


def _compile_message(unit: TranslationUnit, device: Device, log: str) -> str:
    numbered = "\n".join(f"{i:4} {t}" for i, t in enumerate(unit.text.splitlines(), 1))
    return (
        f"{unit.title} does not compile for {device.sm}.\n"
        f"Compiler log:\n{log.strip() or '(empty)'}\n"
        f"Translation unit (headers in {KERNEL_DIR}):\n{numbered}"
    )


def _parse_resources(log: str) -> dict[str, Resources]:
    resources = {}
    for block in re.split(r"Compiling entry function", log)[1:]:
        name = re.search(r"'(\w+)'", block)
        registers = re.search(r"Used (\d+) registers", block)
        if name is None or registers is None:
            continue
        local = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", block)
        shared = re.search(r"(\d+) bytes smem", block)
        resources[name[1]] = Resources(
            registers=int(registers[1]),
            spill_bytes=max(map(int, local), default=0),
            static_shared_memory=int(shared[1]) if shared else 0,
        )
    return resources


@functools.cache
def _warn_of_cache(folder: Path, reason: str) -> None:
    """Warn once that kernels are not cached on disk, so that each process compiles them."""
    logger.warning("%s cannot be written (%s): kernels are not cached on disk", folder, reason)


class KernelCache:
    """Loaded kernels, by device and translation unit.

    Kernels are never unloaded, because captured graphs may still launch them.
    """

    def __init__(self) -> None:
        self._kernels: dict[tuple[int, str], dict[str, Any]] = {}
        self._lock = threading.Lock()

    def get(self, unit: TranslationUnit, shared_memory: dict[str, int]) -> dict[str, Any]:
        """Return the kernels of a unit on the current device, compiled on first use.

        Parameters
        ----------
        unit
            Translation unit.
        shared_memory
            Dynamic shared memory of each entry, in bytes.

        Returns
        -------
        dict
            Kernel (`cupy.cuda.Function`) of each entry, by name.

        Raises
        ------
        CompileError
            If the compilation fails; the message has the compiler's log and the unit.
        """
        import cupy

        device_id = cupy.cuda.runtime.getDevice()
        key = (device_id, unit.text)
        kernels = self._kernels.get(key)
        if kernels is None:
            with self._lock:
                kernels = self._kernels.get(key)
                if kernels is None:
                    kernels = _load(unit, device_for_id(device_id), shared_memory)
                    self._kernels[key] = kernels
        return kernels

    @property
    def is_used(self) -> bool:
        """Whether any kernel was loaded in this process."""
        return bool(self._kernels)

    def find(self, device_id: int, unit: TranslationUnit) -> dict[str, Any] | None:
        """Return the kernels of a unit if they are loaded on the device, otherwise None."""
        return self._kernels.get((device_id, unit.text))


kernel_cache = KernelCache()


def _load(unit: TranslationUnit, device: Device, shared_memory: dict[str, int]) -> dict[str, Any]:
    start = time.perf_counter()
    module, origin = _load_module(unit, device)
    kernels = {}
    for entry in unit.entries:
        raw = module.get_function(entry)
        if shared_memory[entry]:
            raw.max_dynamic_shared_size_bytes = shared_memory[entry]
            # Use all of the unified L1 as shared memory, so that the planned occupancy is reached.
            raw.preferred_shared_memory_carveout = 100
        kernels[entry] = raw.kernel
    logger.info(
        "%s for %s: ready in %.2f s (%s)",
        unit.title,
        device.name,
        time.perf_counter() - start,
        origin,
    )
    return kernels


def _load_module(unit: TranslationUnit, device: Device) -> tuple[Any, str]:
    import cupy

    if prebuilt := find_prebuilt(unit, device):
        return cupy.RawModule(path=str(prebuilt)), f"prebuilt in {prebuilt.parent}"
    if reason := why_no_compiler():
        raise CompileError(f"{unit.title} for {device.sm}: {reason}")
    cache = kernel_cache_dir()
    if refused := prepare_cupy_cache():
        _warn_of_cache(cache, refused)
    logger.info("%s for %s: compiling unless cached in %s", unit.title, device.name, cache)
    module = cupy.RawModule(code=unit.text, options=_module_options(unit, device))
    try:
        module.compile()
    except cupy.cuda.compiler.CompileException as error:
        raise CompileError(_compile_message(unit, device, error.get_message())) from None
    except OSError as error:
        _warn_of_cache(cache, why_refused(error))
        # The variable stays set: CuPy detects the error only after it has compiled a kernel.
        os.environ[IN_MEMORY_VARIABLE] = "1"
        module = cupy.RawModule(code=unit.text, options=_module_options(unit, device))
        module.compile()
    return module, f"cache {cache}"


def prebuilt_name(unit: TranslationUnit, device: Device) -> str:
    """Return the file name of a prebuilt cubin; it has a digest, so stale files are not found."""
    return f"{unit_digest(unit, device)}.{device.sm}.cubin"


def find_prebuilt(unit: TranslationUnit, device: Device) -> Path | None:
    """Return the path of the unit's cubin in the folder ``CUPY_FLASH_CUBINS``, or None."""
    folder = os.environ.get(CUBINS_VARIABLE)
    if not folder:
        return None
    path = Path(folder) / prebuilt_name(unit, device)
    return path if path.is_file() else None


def loaded_resources(unit: TranslationUnit) -> Resources | None:
    """Return the resources of the main kernel, or None if it is not loaded on this device."""
    if not kernel_cache.is_used:
        return None
    import cupy

    kernels = kernel_cache.find(cupy.cuda.runtime.getDevice(), unit)
    if kernels is None:
        return None
    attribute = cupy.cuda.driver.funcGetAttribute
    pointer = kernels[unit.main_entry].ptr
    return Resources(
        registers=attribute(cupy.cuda.driver.CU_FUNC_ATTRIBUTE_NUM_REGS, pointer),
        spill_bytes=attribute(cupy.cuda.driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, pointer),
        static_shared_memory=attribute(
            cupy.cuda.driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, pointer
        ),
    )
