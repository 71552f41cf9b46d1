"""Merging results of attention over parts of the keys, from wherever they come."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash.calls import arrays
from cupy_flash.calls.overlap import OverlapCheck, require_apart
from cupy_flash.errors import UnsupportedError
from cupy_flash.families.contract import TranslationUnit, ceil_div, config_struct, source_digest
from cupy_flash.gpu.by_value import thread_arguments
from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.gpu.gpu_calls import (
    address_of_result,
    cupy_module,
    empty,
    facts_of,
    remember,
    require_device,
)
from cupy_flash.gpu.params import TENSOR_DTYPE, assertions, struct_format
from cupy_flash.problem.device import device_for_id
from cupy_flash.problem.problem import (
    ITEMSIZE,
    MAX_ALIGNMENT,
    MAX_SEQLEN,
    ArraySpec,
    Strides,
    check_no_self_overlap,
)

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
_NAMES = ("out_partial", "lse_partial", "out")


def combine(out_partial: Any, lse_partial: Any, *, out: Any | None = None) -> tuple[Any, Any]:
    """Attention over all keys from normalized results over parts of them.

    out = sum_s exp(lse_s - lse) out_s with lse = log sum_s exp(lse_s), as in Flash-Decoding (Dao
    et al. 2023). With the lse that `flash_attention(..., return_lse=True)` gives, keys may be
    attended to in parts, at different times or places: a prefix that many sequences share, a ring
    of GPUs.

    Parameters
    ----------
    out_partial : array, shape (num_splits, batch, seqlen_q, heads_q, head_dim_v)
        Result of attention over each part of the keys, or packed (num_splits, total_q, heads_q,
        head_dim_v). float16, bfloat16, float32 or float64; NumPy, CuPy, or any array that speaks
        DLPack. Read in place where the last axis is contiguous.
    lse_partial : array, shape (num_splits, batch, heads_q, seqlen_q)
        Log-sum-exp of each part, natural; packed (num_splits, heads_q, total_q). float32, with
        float64 results float64. A part whose lse is -inf counts nothing, whatever its result holds.
    out : array, optional
        Where to write the result; same kind, dtype and shape as the result, contiguous last axis,
        no overlap with the inputs.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, head_dim_v)
        Of out_partial's kind and dtype. A row that no part has seen a key for is 0.
    lse : array, shape (batch, heads_q, seqlen_q) or (heads_q, total_q)
        Of all parts, of lse_partial's dtype; -inf for a row that saw no key.

    Raises
    ------
    TypeError
        For a wrong kind of array or dtype.
    ValueError
        For shapes that do not go together, or an out that cannot be written to.
    CompileError
        If the kernel does not compile.

    Notes
    -----
    Arrays on a GPU are merged there, on the current device and stream, without synchronizing; NumPy
    arrays by NumPy. Sums are taken in float32, for float64 in float64; the result is rounded
    once. Same inputs give the same bits. A NaN in lse_partial makes the row and its lse NaN, an
    lse of +inf the row NaN and its lse +inf.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import combine
    >>> parts = np.array([1.0, 4.0], np.float32).reshape(2, 1, 1, 1)
    >>> out, lse = combine(parts, np.log([[[1.0]], [[2.0]]]).astype(np.float32))
    >>> float(out.round(5).item())
    3.0
    """
    given = out_partial
    out_partial = arrays.normalize("out_partial", out_partial)
    convert = arrays.way_back("out_partial", given)
    lse_partial = arrays.normalize("lse_partial", lse_partial)
    target = None if out is None else arrays.normalize_out("out", out)
    on_host = isinstance(out_partial, np.ndarray)
    for name, array in (("lse_partial", lse_partial), ("out", target)):
        if array is not None and isinstance(array, np.ndarray) != on_host:
            host, device = ("out_partial", name) if on_host else (name, "out_partial")
            raise TypeError(f"{host} lies in host memory and {device} on a GPU; move one of them")
    merge = _on_host if on_host else _on_gpu
    result, lse = merge(out_partial, lse_partial, target)
    # Converting also orders the consumer's stream after ours, so it is done for `out` as well.
    result = convert(result) if out is None else (convert(result), out)[1]
    return result, convert(lse)


@dataclass(frozen=True)
class CombineSpec:
    """What merging depends on besides addresses; packed arrays are one sequence.

    Attributes
    ----------
    dtype
        Of out_partial and out.
    num_splits, batch, seqlen_q, heads_q, head_dim_v
        Shape of out_partial.
    split_stride
        Between the splits of out_partial, in elements.
    partial_strides, out_strides
        Of batch, row and head, in elements.
    alignment, out_alignment
        Bytes (a power of two, at most 16) that every row of out_partial and of out starts at a
        multiple of.
    """

    dtype: str
    num_splits: int
    batch: int
    seqlen_q: int
    heads_q: int
    head_dim_v: int
    split_stride: int
    partial_strides: Strides
    out_strides: Strides
    alignment: int
    out_alignment: int

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return self.batch * self.heads_q * self.seqlen_q

    @property
    def lanes(self) -> int:
        """Threads that merge one row: as many of a warp as have columns, a power of two."""
        pieces = ceil_div(self.head_dim_v, MAX_ALIGNMENT // ITEMSIZE[self.dtype])
        return min(32, 1 << max(0, pieces - 1).bit_length())


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


def spec_of_call(out_partial: Any, lse_partial: Any, out: Any | None) -> CombineSpec:
    """What these NumPy or CuPy arrays ask for; out_partial's last axis is contiguous.

    Raises
    ------
    TypeError, ValueError
        For what cannot be merged; the message names the argument.
    """
    dtype = _check(out_partial, lse_partial)
    spec = arrays.spec_of(out_partial[0], arrays.address_of(out_partial))
    if out is None:
        out_spec = ArraySpec.contiguous(spec.shape, dtype)
    else:
        _check_out(out, out_partial)
        out_spec = arrays.spec_of(out, arrays.address_of(out))
        check_no_self_overlap("out", out_spec)
    # The splits are one axis more that every row of out_partial must be aligned along.
    split_stride = out_partial.strides[0]
    along_splits = split_stride & -split_stride if len(out_partial) > 1 else 0
    num_splits, (batch, seqlen_q, heads_q, head_dim_v) = len(out_partial), spec.shape
    return CombineSpec(
        dtype=dtype,
        num_splits=num_splits,
        batch=batch,
        seqlen_q=seqlen_q,
        heads_q=heads_q,
        head_dim_v=head_dim_v,
        split_stride=split_stride // out_partial.itemsize,
        partial_strides=spec.strides,
        out_strides=out_spec.strides,
        alignment=min(spec.row_alignment(), along_splits or MAX_ALIGNMENT),
        out_alignment=out_spec.row_alignment(),
    )


def _check(out_partial: Any, lse_partial: Any) -> str:
    arrays.require_float("out_partial", out_partial)
    dtype = arrays.dtype_name(out_partial)
    lse_dtype = "float64" if dtype == "float64" else "float32"
    if arrays.dtype_name(lse_partial) != lse_dtype:
        raise TypeError(
            f"lse_partial has dtype {lse_partial.dtype}; expected {lse_dtype} beside an "
            f"out_partial of {dtype}"
        )
    arrays.require_float("lse_partial", lse_partial)
    shape = tuple(out_partial.shape)
    if len(shape) not in (4, 5):
        raise ValueError(
            f"out_partial has shape {shape}; expected (num_splits, batch, seqlen_q, heads_q, "
            "head_dim_v) or packed (num_splits, total_q, heads_q, head_dim_v)"
        )
    if shape[0] == 0:
        raise ValueError(f"out_partial has shape {shape}, no splits; expected at least 1")
    if max(shape) > MAX_SEQLEN:
        raise ValueError(f"out_partial has shape {shape}; expected at most {MAX_SEQLEN} of each")
    expected = (*shape[:-3], shape[-2], shape[-3])
    arrays.require_shape("lse_partial", lse_partial, expected, f"beside an out_partial of {shape}")
    return dtype


def _check_out(out: Any, out_partial: Any) -> None:
    arrays.require_float("out", out)
    if arrays.dtype_name(out) != arrays.dtype_name(out_partial):
        raise TypeError(
            f"out has dtype {out.dtype}; expected {out_partial.dtype}, as out_partial has"
        )
    arrays.require_shape("out", out, tuple(out_partial.shape[1:]), "that of one split")
    arrays.require_in_place("out", out)


def _on_host(
    out_partial: np.ndarray, lse_partial: np.ndarray, out: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    if out is not None and not out.flags.writeable:
        raise ValueError("out is read-only; pass an array that can be written")
    spec_of_call(out_partial, lse_partial, out)
    if out is None:
        out = np.empty(out_partial.shape[1:], out_partial.dtype)
    else:
        require_apart(_NAMES, (out_partial, lse_partial, out), ("out",))
    with np.errstate(all="ignore"):
        largest = lse_partial.max(axis=0)
        # As in combine.cu: of no use where it is infinite.
        base = np.where(np.isfinite(largest), largest, largest.dtype.type(0))
        weights = np.exp(lse_partial - base)
        total = weights.sum(axis=0)
        lse = base + np.log(total)
        weights /= np.where(total == 0, total.dtype.type(1), total)
        # From (..., heads_q, seqlen_q) to the order of out, one split at a time: at most a copy
        # of out is held in the precision of the sums.
        by_row = weights.swapaxes(-1, -2)[..., None]
        saw_nothing = (lse_partial == -np.inf).swapaxes(-1, -2)[..., None]
        merged = np.zeros(out.shape, lse.dtype)
        for partial, weight, excluded in zip(out_partial, by_row, saw_nothing, strict=True):
            merged += weight * np.where(excluded, 0, partial.astype(lse.dtype, copy=False))
        out[...] = merged
    return out, lse


@dataclass(frozen=True)
class _Call:
    """What does not change about a call on a GPU while its key stays the same."""

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    dtype: np.dtype
    lse_dtype: np.dtype
    apart: OverlapCheck
    params: PackedCombine
    kernel: Any | None
    grid: tuple[int, int, int]


_calls: dict[tuple[Any, ...], _Call] = {}


def _on_gpu(out_partial: Any, lse_partial: Any, out: Any | None) -> tuple[Any, Any]:
    device_id = cupy_module().cuda.runtime.getDevice()
    facts, addresses = facts_of((out_partial, lse_partial, out))
    key = (device_id, facts)
    call = _calls.get(key)
    if call is None:
        require_device(device_id, out_partial=out_partial, lse_partial=lse_partial, out=out)
        both = arrays.as_cupy(out_partial), arrays.as_cupy(lse_partial)
        _check(*both)
        readable = arrays.readable_in_place(out_partial), _contiguous(lse_partial)
        if readable[0] is not out_partial or readable[1] is not lse_partial:
            return _on_gpu(*readable, out)
        spec = spec_of_call(*both, arrays.as_cupy(out))
        call = remember(_calls, key, _prepare(spec, *both, arrays.as_cupy(out)))
    call.apart.check(addresses)
    if out is None:
        out = empty(out_partial, call.out_shape, call.dtype)
    lse = empty(out_partial, call.lse_shape, call.lse_dtype)
    if call.kernel is not None:
        partials, lses, _ = addresses
        arguments = thread_arguments()
        written = address_of_result(out), address_of_result(lse)
        call.params.pack_into(arguments.memory, 0, partials, lses, *written)
        call.kernel(call.grid, (_THREADS, 1, 1), arguments.pointers[:1])
    return out, lse


def _contiguous(lse_partial: Any) -> Any:
    """The array itself where kernels can read it as C-contiguous, else a copy."""
    array = arrays.as_cupy(lse_partial)
    if array.flags.c_contiguous and arrays.is_aligned(array):
        return lse_partial
    return cupy_module().ascontiguousarray(arrays.readable_in_place(array))


def _prepare(spec: CombineSpec, out_partial: Any, lse_partial: Any, out: Any | None) -> _Call:
    device = device_for_id(cupy_module().cuda.runtime.getDevice())
    if device.arch < 75:
        raise UnsupportedError(f"combine needs sm_75 or later, and {device.name} is {device.sm}")
    apart = OverlapCheck(_NAMES, (out_partial, lse_partial, out), ("out",))
    kernel = None
    if spec.rows:
        kernel = kernel_cache.get(combine_unit(spec), {ENTRY: 0})[ENTRY]
    return _Call(
        out_shape=out_partial.shape[1:],
        lse_shape=lse_partial.shape[1:],
        dtype=out_partial.dtype,
        lse_dtype=lse_partial.dtype,
        apart=apart,
        params=PackedCombine(spec),
        kernel=kernel,
        grid=(ceil_div(spec.rows, _THREADS // spec.lanes), 1, 1),
    )
