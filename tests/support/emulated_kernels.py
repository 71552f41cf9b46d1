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

import pytest

from cupy_flash.calls.check.modifications import packed_arguments
from cupy_flash.calls.gpu.forward import fixed_fields
from cupy_flash.calls.options import Options
from cupy_flash.families.contract import KERNEL_DIR
from cupy_flash.families.params import params_dtype
from cupy_flash.gpu.params import PackedStruct
from cupy_flash.planning.planner import Plan

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = (
    TESTS / "kernels" / "emulated",
    TESTS / "kernels" / "on_cpu",
    TESTS / "mods" / "on_cpu",
    KERNEL_DIR,
)
COMPILER = shutil.which("g++")

_RUN = """
extern "C" void run(const void* params, int blocks, int threads) {{
  const auto& argument = *static_cast<const {type}*>(params);
  run_grid(blocks, threads, [&] {{ {entry}(argument); }});
}}
"""


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
    run(buffer, launch.grid[0], launch.threads)


def _compiled(plan: Plan, folder: Path) -> Any:
    if COMPILER is None:
        pytest.skip("no g++ to compile the kernel with")
    assert plan.unit is not None
    [launch] = plan.launches
    # Only CUDA's compiler accepts the asserted offsets of members as constants.
    lines = [line for line in plan.unit.text.splitlines() if "__INTADDR__" not in line]
    type_of = {"params": "Params", "tangents": "TangentParams", "received": "ReceivedParams"}
    text = '#include "cuda.h"\n'
    text += "\n".join(lines) + _RUN.format(type=type_of[launch.arguments[0]], entry=launch.entry)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    library = folder / f"{name}.so"
    if not library.exists():
        source = folder / f"{name}.cpp"
        source.write_text(text, encoding="utf-8")
        # Sums of integers wrap, as on a GPU.
        command = [COMPILER, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-fwrapv"]
        command += ["-D__CUDA_ARCH__=800", *(f"-I{path}" for path in FOLDERS)]
        done = subprocess.run(
            [*command, str(source), "-o", str(library)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library)).run
