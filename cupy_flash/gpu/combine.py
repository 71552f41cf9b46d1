"""Merge of partial results on a GPU: the host side of `kernels_cu/cache/combine.cu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_flash.errors import UnsupportedError
from cupy_flash.families.contract import (
    ELEMENT_TYPES,
    TranslationUnit,
    ceil_div,
    config_struct,
    source_digest,
)
from cupy_flash.families.params import TENSOR_DTYPE, assertions
from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.gpu.launch import StructLaunch
from cupy_flash.gpu.params import PackedStruct
from cupy_flash.problem.device import Device
from cupy_flash.problem.partials import CombineSpec

SOURCE = "cache/combine.cu"
ENTRY = "combine_partials"

# Argument struct, which mirrors combine.cu.
COMBINE_DTYPE = np.dtype(
    [
        ("out_partial", TENSOR_DTYPE),
        ("out", TENSOR_DTYPE),
        ("split_stride", np.int64),
        ("lse_partial", np.uint64),
        ("lse", np.uint64),
        ("num_splits", np.int64),
        ("batch", np.int32),
        ("seqlen_q", np.int32),
        ("heads_q", np.int32),
        ("head_dim_v", np.int32),
        ("sinks", np.uint64),
    ]
)

# Names of the values of the struct's pointers, by field.
_SOURCES = {
    "out_partial": "out_partial",
    "out": "result",
    "lse_partial": "lse_partial",
    "lse": "lse",
    "sinks": "sinks",
}

_THREADS = 128


def combine_unit(spec: CombineSpec) -> TranslationUnit:
    """Return the translation unit that merges partial results."""
    members = {
        "lanes": spec.lanes,
        "alignment": spec.alignment,
        "out_alignment": spec.out_alignment,
        "sinks": spec.sinks is not None,
    }
    element = ELEMENT_TYPES[spec.dtype]
    sink = element if spec.sinks is None else ELEMENT_TYPES[spec.sinks]
    lines = [
        f"// cupy_flash combine, sources {source_digest(SOURCE)}",
        f'#include "{SOURCE}"',
        assertions(("Tensor", TENSOR_DTYPE), ("CombineParams", COMBINE_DTYPE)),
        config_struct({"Element": element, "SinkElement": sink}, members),
        # A bound of one block per SM keeps the compiler from spilling for a higher occupancy.
        f'extern "C" __global__ void __launch_bounds__({_THREADS}, 1)',
        f"{ENTRY}(const __grid_constant__ CombineParams params) "
        "{ combine::combine<Config>(params); }",
    ]
    with_sinks = "" if spec.sinks is None else f", {spec.sinks} sinks"
    title = f"combine {spec.dtype}, {spec.lanes} threads to a row{with_sinks}"
    return TranslationUnit("\n".join(lines) + "\n", (ENTRY,), title)


class Combine(StructLaunch):
    """Merge that is ready to run on the device for which it was prepared."""

    def __init__(self, spec: CombineSpec, kernel: Any | None, names: Sequence[str]) -> None:
        sizes = ("split_stride", "num_splits", "batch", "seqlen_q", "heads_q", "head_dim_v")
        fixed = {name: getattr(spec, name) for name in sizes}
        fixed |= {"out_partial": spec.partial_strides, "out": spec.out_strides}
        params = PackedStruct(COMBINE_DTYPE, fixed, _SOURCES, names)
        grid = (ceil_div(spec.rows, _THREADS // spec.lanes), 1, 1)
        super().__init__(params, kernel, grid, (_THREADS, 1, 1))


def prepare(spec: CombineSpec, device: Device, names: Sequence[str]) -> Combine:
    """Compile and load a merge for the current device.

    Parameters
    ----------
    spec
        Specification of the merge.
    device
        Current device.
    names
        Names of the addresses that each run receives, in order: "out_partial", "lse_partial",
        "sinks", and "result" and "lse" for the results.

    Raises
    ------
    UnsupportedError
        If the GPU is older than sm_75.
    CompileError
        If the kernel does not compile.
    """
    if device.arch < 75:
        raise UnsupportedError(f"combine needs sm_75 or later, and {device.name} is {device.sm}")
    kernel = kernel_cache.get(combine_unit(spec), {ENTRY: 0})[ENTRY] if spec.rows else None
    return Combine(spec, kernel, names)
