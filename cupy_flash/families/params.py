"""Argument structs of the attention kernels, which mirror `kernels_cu/params.cuh`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupy_flash.problem.problem import STATISTICS, Problem


def _fields(dtype: Any, names: str) -> list[tuple[str, Any]]:
    """Return consecutive fields of one dtype, given their names separated by spaces."""
    return [(name, dtype) for name in names.split()]


# With `align`, NumPy lays out a struct as C++ does.
TENSOR_DTYPE = np.dtype(
    _fields(np.uint64, "data") + _fields(np.int64, "batch_stride row_stride head_stride"),
    align=True,
)

# The second half has the lengths and offsets of sequences (varlen and KV cache), and the sizes of
# the arrays that hold them. The field `_` is the padding at the end of a struct.
_FORWARD = (
    _fields(TENSOR_DTYPE, "q k v out")
    + _fields(np.uint64, "lse workspace")
    + _fields(np.float64, "softmax_scale")
    + _fields(np.int32, "batch seqlen_q seqlen_k heads_q heads_kv")
    + _fields(np.int32, "q_offset num_splits section_heads")
    + _fields(np.uint64, "cu_seqlens_q cu_seqlens_k seqused_k")
    + _fields(np.uint64, "cache_batch_idx block_table counters")
    + _fields(np.int64, "block_table_stride")
    + _fields(np.int32, "total_q total_k caches pages max_pages keys new_keys _")
)
PARAMS_DTYPE = np.dtype(_FORWARD, align=True)

# The struct of a block mask, which mirrors block_mask/block_mask.cuh.
BLOCK_MASK_DTYPE = np.dtype(
    _fields(np.uint64, "memory")
    + _fields(np.int64, "full_offset slots_after_offset tiles_offset pairs_offset")
    + _fields(np.int64, "batch_stride head_stride")
    + _fields(np.int32, "words key_blocks slots lists"),
    align=True,
)

# This struct and the next one mirror backward/params.cuh.
BIAS_GRADIENT_DTYPE = np.dtype(
    _fields(np.uint64, "data")
    + _fields(np.int32, "batch heads rows keys")
    + _fields(np.int64, "parts"),
    align=True,
)

# Fields that the backward kernels have after all other fields.
_BACKWARD = (
    _fields(TENSOR_DTYPE, "dout dq dk dv")
    + _fields(np.uint64, "dlse dsinks")
    + _fields(BIAS_GRADIENT_DTYPE, "dbias")
    + _fields(np.uint64, "bias_parts bias_runs capture_sums kv_sums packed_tiles")
    + _fields(np.int32, "kv_semaphores head_chunks tile_chunks last_section")
)

# Fields of the tangent kernels, which follow all other fields, see tangents/params.cuh.
_TANGENT = _fields(TENSOR_DTYPE, "q_tangent k_tangent v_tangent out_tangent") + _fields(
    np.uint64, "lse_tangent"
)

# Fields that kernels which sum weights over queries have after all other fields, see
# received/params.cuh.
_RECEIVED = _fields(np.uint64, "received") + _fields(np.int32, "first_query last_query")
_MORE = {"backward": _BACKWARD, "tangent": _TANGENT, "received": _RECEIVED}


def params_dtype(problem: Problem) -> np.dtype:
    """Return the dtype of the argument struct of a problem's kernels.

    The common fields come first, then the data of modifications, then the addresses of row
    statistics. The last fields are the scales of an 8-bit KV cache or of float8 inputs, or the
    fields of another direction than the forward pass.
    """
    mods = captures = None
    if problem.score is not None:
        mods = problem.score.dtype
        captures = problem.score.differentiable or ("_",)
    scales: tuple[str, ...] = ()
    if problem.scales is not None:
        scales = ("q_scale", "k_scale", "v_scale")[0 if problem.is_float8 else 1 :]
    has_statistics = bool(problem.statistics)
    return _params_dtype(mods, captures, has_statistics, scales, problem.direction)


# Creating a dtype takes 15 us. The cache is bounded because users choose the names of captures.
@functools.lru_cache(maxsize=256)
def _params_dtype(
    mods: np.dtype | None,
    captures: tuple[str, ...] | None,
    has_statistics: bool,
    scales: tuple[str, ...],
    direction: str,
) -> np.dtype:
    fields = list(_FORWARD)
    if mods is not None:
        fields += [("mods", mods), ("block_mask", BLOCK_MASK_DTYPE)]
    if has_statistics:
        fields += _fields(np.uint64, " ".join(STATISTICS))
    fields += [(name, TENSOR_DTYPE) for name in scales]
    fields += _MORE.get(direction, ())
    if direction == "backward" and captures is not None:
        fields.append(("dcaptures", np.dtype([(name, np.uint64) for name in captures])))
    return np.dtype(fields, align=True)


# C++ type of the argument struct of each direction.
_STRUCTS = {
    "forward": "Params",
    "lse": "Params",
    "backward": "GradientParams",
    "tangent": "TangentParams",
    "received": "ReceivedParams",
}


def layout_assertions(problem: Problem) -> str:
    """Return C++ that fails to compile if the layouts of `params.cuh` and `params_dtype` differ."""
    name = _STRUCTS[problem.direction]
    if problem.scales is not None:
        name = "Float8Params" if problem.is_float8 else "QuantizedParams"
    structs = [("Tensor", TENSOR_DTYPE), (name, params_dtype(problem))]
    if problem.gradient is not None:
        structs.append(("BiasGradient", BIAS_GRADIENT_DTYPE))
    if problem.score is not None:
        structs += [("ModArguments", problem.score.dtype), ("BlockMask", BLOCK_MASK_DTYPE)]
    return assertions(*structs)


@functools.lru_cache(maxsize=256)
def assertions(*structs: tuple[str, np.dtype]) -> str:
    """Return C++ that fails to compile if a struct and its dtype have different layouts."""
    # NVRTC has no offsetof without a header. __INTADDR__ is the builtin that offsetof uses.
    lines = []
    for name, dtype in structs:
        lines.append(f"static_assert(sizeof({name}) == {dtype.itemsize});")
        assert dtype.fields is not None
        lines += [
            f"static_assert(__INTADDR__(&(({name}*)0)->{member}) == {field[1]});"
            for member, field in dtype.fields.items()
            if not member.startswith("_")
        ]
    return "\n".join(lines)
