"""The one place that compiles: a translation unit to a loaded kernel, or to a cubin with no GPU."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupy_flash.errors import CompileError
from cupy_flash.families.contract import KERNEL_DIR, TranslationUnit
from cupy_flash.problem.device import ARCHITECTURES, Device, Resources, device_for_id

logger = logging.getLogger("cupy_flash")

# NVRTC 12.0 is the first that targets sm_90 and knows the C++17 the kernels use.
OLDEST_NVRTC = (12, 0)
# -ftz is what CuPy adds by itself; naming it here makes ahead-of-time cubins the same.
_OPTIONS = ("-std=c++17", "-ftz=true", "-default-device")
CUBINS_VARIABLE = "CUPY_FLASH_CUBINS"
_CACHE_VARIABLE = "CUPY_CACHE_DIR"
_IN_MEMORY_VARIABLE = "CUPY_CACHE_IN_MEMORY"


@dataclass(frozen=True)
class Cubin:
    """Machine code of a unit for one architecture."""

    image: bytes
    resources: dict[str, Resources]
    log: str
    seconds: float


def compile_options() -> tuple[str, ...]:
    """NVRTC options besides the architecture."""
    return (*_OPTIONS, f"-I{KERNEL_DIR}")


def _module_options(unit: TranslationUnit, device: Device) -> tuple[str, ...]:
    # CuPy appends the architecture; NVRTC 12.9 and newer let a more specific one stand before it.
    specific = (f"-arch={unit.target(device)}",) if unit.arch_specific else ()
    return (*compile_options(), *specific)


def unit_digest(unit: TranslationUnit, device: Device) -> str:
    """Key of a unit's machine code: its text (which holds the sources' digest), target, options."""
    text = "\0".join([unit.text, unit.target(device), *_OPTIONS])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def why_no_compiler() -> str | None:
    """Why NVRTC cannot be used here, or None if it can."""
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
    """Those of `ARCHITECTURES` that this NVRTC compiles for; none without it."""
    if why_no_compiler():
        return ()
    from cupy.cuda import nvrtc

    return tuple(arch for arch in nvrtc.getSupportedArchs() if arch in ARCHITECTURES)


def compile_cubin(unit: TranslationUnit, device: Device) -> Cubin:
    """Compile a unit with NVRTC, with or without a GPU.

    Raises
    ------
    CompileError
        With the compiler's log and the unit.
    """
    if reason := why_no_compiler():
        raise CompileError(f"{unit.title} for {device.sm}: {reason}")
    from cupy.cuda import nvrtc

    if device.arch not in nvrtc.getSupportedArchs():
        known = ", ".join(f"sm_{arch}" for arch in known_architectures())
        raise CompileError(f"{unit.title} for {device.sm}: this NVRTC knows {known} only")
    start = time.perf_counter()
    program = nvrtc.createProgram(unit.text, "unit.cu", (), ())
    try:
        options = (*compile_options(), f"-arch={unit.target(device)}", "--ptxas-options=-v")
        if nvrtc.getVersion() >= (13, 0):
            # From its own cache NVRTC returns the image without the report on registers.
            options += ("-no-cache",)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise CompileError(
                _compile_message(unit, device, nvrtc.getProgramLog(program))
            ) from error
        log = nvrtc.getProgramLog(program)
        # CuPy takes the image for a C string and drops its last byte, a zero.
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


def kernel_cache_dir() -> Path:
    """Where CuPy keeps compiled kernels."""
    # As CuPy finds it; Path.home() would raise for a user without one.
    default = os.path.expanduser("~/.cupy/kernel_cache")
    return Path(os.environ.get(_CACHE_VARIABLE, default))


@functools.cache
def prepare_cupy_cache() -> str | None:
    """See to it that CuPy can be imported where its cache folder cannot be made.

    CuPy makes the folder when it is imported, and an unusable one fails the import. Then it is
    imported here, to keep kernels in memory: in this process and those that it starts.

    Returns
    -------
    str or None
        Why the folder cannot be made; None if it can, or if the process that started this one
        knows.
    """
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is None:
        return None
    folder = kernel_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        is_known = _IN_MEMORY_VARIABLE in os.environ
        os.environ[_IN_MEMORY_VARIABLE] = "1"
        # Any folder that is there will do: nothing is written to it.
        with _environment(_CACHE_VARIABLE, tempfile.gettempdir()), contextlib.suppress(Exception):
            importlib.import_module("cupy")
        return None if is_known else _reason(error)
    return None


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


@functools.cache
def _warn_of_cache(folder: Path, reason: str) -> None:
    """Once: a cache that cannot be written costs a compilation in each process, no more."""
    logger.warning("%s cannot be written (%s): kernels are not kept on disk", folder, reason)


class KernelCache:
    """Loaded kernels, by device and unit."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[int, str], dict[str, Any]] = {}
        self._lock = threading.Lock()

    def get(self, unit: TranslationUnit, shared_memory: dict[str, int]) -> dict[str, Any]:
        """The unit's kernels on the current device, compiled on first use.

        Parameters
        ----------
        unit
            What to compile.
        shared_memory
            Dynamic shared memory of each entry, in bytes.

        Returns
        -------
        dict
            Entry name to a `cupy.cuda.Function`.

        Raises
        ------
        CompileError
            With the compiler's log and the unit.
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
        """The unit's kernels if they are loaded on that device."""
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
            # All of the unified L1 as shared memory, so that as many blocks fit as planned.
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
        _warn_of_cache(cache, _reason(error))
        # For good: CuPy finds out only when a kernel is compiled, which then was in vain.
        os.environ[_IN_MEMORY_VARIABLE] = "1"
        module = cupy.RawModule(code=unit.text, options=_module_options(unit, device))
        module.compile()
    return module, f"cache {cache}"


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


def prebuilt_name(unit: TranslationUnit, device: Device) -> str:
    """File name of a unit's cubin in a prebuilt set; its digest makes it valid or not found."""
    return f"{unit_digest(unit, device)}.{device.sm}.cubin"


def find_prebuilt(unit: TranslationUnit, device: Device) -> Path | None:
    """The unit's cubin under ``CUPY_FLASH_CUBINS``, or None."""
    folder = os.environ.get(CUBINS_VARIABLE)
    if not folder:
        return None
    path = Path(folder) / prebuilt_name(unit, device)
    return path if path.is_file() else None


def loaded_resources(unit: TranslationUnit) -> Resources | None:
    """Resources of the unit's main entry where it is loaded on the current device."""
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
