"""Merging partial results on a GPU: the host's side of `kernels_cu/cache/combine.cu`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash.calls.arrays import as_cupy, is_aligned, readable_in_place
from cupy_flash.calls.overlap import OverlapCheck
from cupy_flash.calls.partials import Partials, spec_of_call
from cupy_flash.errors import UnsupportedError
from cupy_flash.families.contract import TranslationUnit, ceil_div, config_struct, source_digest
from cupy_flash.gpu.by_value import thread_arguments
from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.gpu.gpu_calls import address_of_result, cupy_module, empty
from cupy_flash.gpu.params import TENSOR_DTYPE, assertions, struct_format
from cupy_flash.problem.device import Device
from cupy_flash.problem.partials import CombineSpec

SOURCE = "cache/combine.cu"
ENTRY = "combine_partials"

# Mirrored in combine.cu.
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
    ]
)

_THREADS = 128


def combine_unit(spec: CombineSpec) -> TranslationUnit:
    """The translation unit that merges."""
    members = {
        "lanes": spec.lanes,
        "alignment": spec.alignment,
        "out_alignment": spec.out_alignment,
    }
    lines = [
        f"// cupy_flash combine, sources {source_digest(SOURCE)}",
        f'#include "{SOURCE}"',
        assertions(("Tensor", TENSOR_DTYPE), ("CombineParams", COMBINE_DTYPE)),
        config_struct({"Element": spec.dtype}, members),
        # A bound of one block per SM keeps the compiler from spilling for a higher occupancy.
        f'extern "C" __global__ void __launch_bounds__({_THREADS}, 1)',
        f"{ENTRY}(const __grid_constant__ CombineParams params) "
        "{ combine::combine<Config>(params); }",
    ]
    title = f"combine {spec.dtype}, {spec.lanes} threads to a row"
    return TranslationUnit("\n".join(lines) + "\n", (ENTRY,), title)


class PackedCombine:
    """The argument struct of a merge, all but the pointers fixed."""

    def __init__(self, spec: CombineSpec) -> None:
        self._struct = struct.Struct("=" + struct_format(COMBINE_DTYPE))
        self._spec = spec

    def pack_into(
        self, memory: bytearray, offset: int, out_partial: int, lse_partial: int, out: int, lse: int
    ) -> None:
        """Write the struct for these device addresses."""
        spec = self._spec
        tensors = (out_partial, *spec.partial_strides, out, *spec.out_strides)
        sizes = (spec.num_splits, spec.batch, spec.seqlen_q, spec.heads_q, spec.head_dim_v)
        self._struct.pack_into(
            memory, offset, *tensors, spec.split_stride, lse_partial, lse, *sizes
        )


@dataclass(frozen=True)
class Call:
    """What does not change about a merge while its key stays the same."""

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    dtype: np.dtype
    lse_dtype: np.dtype
    apart: OverlapCheck
    params: PackedCombine
    kernel: Any | None
    grid: tuple[int, int, int]

    def run(self, partials: Partials, addresses: tuple[int, ...], _: int) -> tuple[Any, Any]:
        """Enqueue the merge of arrays at these addresses; out and lse."""
        self.apart.check(addresses)
        like, _, out = partials
        if out is None:
            out = empty(like, self.out_shape, self.dtype)
        lse = empty(like, self.lse_shape, self.lse_dtype)
        if self.kernel is not None:
            arguments = thread_arguments()
            partial, lses, _ = addresses
            written = address_of_result(out), address_of_result(lse)
            self.params.pack_into(arguments.memory, 0, partial, lses, *written)
            self.kernel(self.grid, (_THREADS, 1, 1), arguments.pointers[:1])
        return out, lse


def readable(partials: Partials) -> Partials:
    """The arrays, copied where the kernel cannot read them as they lie."""
    lse = as_cupy(partials.lse_partial)
    if not (lse.flags.c_contiguous and is_aligned(lse)):
        lse_partial = cupy_module().ascontiguousarray(readable_in_place(lse))
        partials = partials._replace(lse_partial=lse_partial)
    return partials._replace(out_partial=readable_in_place(partials.out_partial))


def prepare(partials: Partials, device: Device) -> Call:
    """Check a merge of CuPy arrays like these, and compile and load its kernel."""
    spec = spec_of_call(*partials)
    if device.arch < 75:
        raise UnsupportedError(f"combine needs sm_75 or later, and {device.name} is {device.sm}")
    out_partial, lse_partial, _ = partials
    kernel = None
    if spec.rows:
        kernel = kernel_cache.get(combine_unit(spec), {ENTRY: 0})[ENTRY]
    return Call(
        out_shape=out_partial.shape[1:],
        lse_shape=lse_partial.shape[1:],
        dtype=out_partial.dtype,
        lse_dtype=lse_partial.dtype,
        apart=OverlapCheck(partials._fields, partials, ("out",)),
        params=PackedCombine(spec),
        kernel=kernel,
        grid=(ceil_div(spec.rows, _THREADS // spec.lanes), 1, 1),
    )
