"""Kernels of a plan on the host: g++ compiles their translation units.

The threads of a CTA run one at a time, so a kernel is slow. Its results differ from those of a GPU
only by the rounding of sums.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_flash.calls.check.modifications import packed_arguments
from cupy_flash.calls.gpu.forward import fixed_fields
from cupy_flash.calls.options import Options
from cupy_flash.families.contract import KERNEL_DIR, TranslationUnit
from cupy_flash.families.params import params_dtype
from cupy_flash.gpu.params import PackedStruct
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.arrays import ITEMSIZE

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = (
    TESTS / "kernels" / "emulated",
    TESTS / "kernels" / "on_cpu",
    TESTS / "mods" / "on_cpu",
    KERNEL_DIR,
)
COMPILER = shutil.which("g++")

_RUN = """
extern "C" void run(const void* maps, const void* params, int blocks, int threads) {{
  run_grid(blocks, threads, [&] {{ {entry}({arguments}); }});
}}
"""
_TYPES = {
    "params": "Params",
    "tangents": "TangentParams",
    "received": "ReceivedParams",
    "score_maps": "ScoreMaps",
    "tangent_maps": "TangentMaps",
}
# Number of 64-bit words of a tensor map. Those for the host are described in ptx/sm90a.cuh.
_MAP_WORDS = 16


def run_on_host(
    plan: Plan,
    options: Options,
    mod_arrays: Mapping[str, Any],
    arrays: Mapping[str, Any],
    folder: Path,
    more: Mapping[str, int] | None = None,
) -> None:
    """Run the only kernel of a plan on NumPy arrays, some of which it writes.

    Parameters
    ----------
    plan, options, mod_arrays
        Plan of a call, its options, and the arrays of its modifications.
    arrays
        Array of each field of the argument struct by name; fields without one are null.
    folder
        Folder for compiled kernels.
    more
        Numbers of other fields of the argument struct, by name.
    """
    [launch] = plan.launches
    fixed, values = (
        {**fixed_fields(plan), **(more or {})},
        {n: x.ctypes.data for n, x in arrays.items()},
    )
    sources = {name: name for name in values}
    if options.mod_key is not None:
        fixed["mods"], captured = packed_arguments(
            options.mod_key, mod_arrays, plan.problem.dtype, plan.problem.softmax_scale
        )
        sources |= {f"mods.{name}.data": name for name in captured}
        values |= {name: mod_arrays[name].ctypes.data for name in captured}
    dtype = params_dtype(plan.problem)
    packed = PackedStruct(dtype, fixed, sources, tuple(values))
    memory = bytearray(dtype.itemsize)
    packed.pack_into(memory, tuple(values.values()))
    run = _compiled(plan, folder)
    buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
    maps = _tensor_maps(plan, arrays)
    run(ctypes.c_void_p(maps.ctypes.data), buffer, launch.grid[0], launch.threads)


def _tensor_maps(plan: Plan, arrays: Mapping[str, Any]) -> np.ndarray:
    """Return the tensor maps of a plan, in order, aligned as their type demands."""
    specs = plan.schedule.tensor_maps
    aligned = np.zeros((len(specs) + 1, _MAP_WORDS), np.uint64)
    start = -(aligned.ctypes.data // 8) % 8
    maps = aligned.reshape(-1)[start:][: len(specs) * _MAP_WORDS].reshape(-1, _MAP_WORDS)
    for words, (name, spec) in zip(maps, specs.items(), strict=True):
        address = arrays[spec.array or name].ctypes.data
        described = (address, *spec.shape, *spec.strides, *spec.box, ITEMSIZE[spec.dtype])
        words[: len(described)] = described
    return maps


def _compiled(plan: Plan, folder: Path) -> Any:
    assert plan.unit is not None
    [launch] = plan.launches
    given = ("maps", "params")[-len(launch.arguments) :]
    arguments = ", ".join(
        f"*static_cast<const {_TYPES[name]}*>({value})"
        for name, value in zip(launch.arguments, given, strict=True)
    )
    return compiled(plan.unit, launch.entry, arguments, folder)


def compiled(unit: TranslationUnit, entry: str, arguments: str, folder: Path) -> Any:
    """Return the function that runs a kernel of a translation unit, see `_RUN`.

    `arguments` are those of the kernel as C++ expressions of `maps` and `params`.
    """
    if COMPILER is None:
        pytest.skip("no g++ to compile the kernel with")
    # Only CUDA's compiler accepts the asserted offsets of members as constants.
    lines = [line for line in unit.text.splitlines() if "__INTADDR__" not in line]
    text = '#include "cuda.h"\n'
    text += "\n".join(lines) + _RUN.format(entry=entry, arguments=arguments)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    library = folder / f"{name}.so"
    if not library.exists():
        source = folder / f"{name}.cpp"
        source.write_text(text, encoding="utf-8")
        # Sums of integers wrap, as on a GPU.
        command = [COMPILER, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-fwrapv"]
        arch = 900 if unit.arch_specific else 800
        command += [f"-D__CUDA_ARCH__={arch}", *(f"-I{path}" for path in FOLDERS)]
        done = subprocess.run(
            [*command, str(source), "-o", str(library)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library)).run
