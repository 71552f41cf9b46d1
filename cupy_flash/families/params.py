"""Argument structs of the attention kernels, which mirror `kernels_cu/params.cuh`."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from cupy_flash.problem.problem import Problem

TENSOR_DTYPE = np.dtype(
    [
        ("data", np.uint64),
        ("batch_stride", np.int64),
        ("row_stride", np.int64),
        ("head_stride", np.int64),
    ]
)

PARAMS_DTYPE = np.dtype(
    [
        ("q", TENSOR_DTYPE),
        ("k", TENSOR_DTYPE),
        ("v", TENSOR_DTYPE),
        ("out", TENSOR_DTYPE),
        ("lse", np.uint64),
        ("workspace", np.uint64),
        ("softmax_scale", np.float64),
        ("batch", np.int32),
        ("seqlen_q", np.int32),
        ("seqlen_k", np.int32),
        ("heads_q", np.int32),
        ("heads_kv", np.int32),
        ("q_offset", np.int32),
        ("num_splits", np.int32),
        ("section_heads", np.int32),
        # Lengths and offsets of sequences (varlen and KV cache), and sizes of their arrays.
        ("cu_seqlens_q", np.uint64),
        ("cu_seqlens_k", np.uint64),
        ("seqused_k", np.uint64),
        ("cache_batch_idx", np.uint64),
        ("block_table", np.uint64),
        ("counters", np.uint64),
        ("block_table_stride", np.int64),
        ("total_q", np.int32),
        ("total_k", np.int32),
        ("caches", np.int32),
        ("pages", np.int32),
        ("max_pages", np.int32),
        ("keys", np.int32),
        ("new_keys", np.int32),
        # Padding, as in C++.
        ("_", np.int32),
    ]
)


# The struct of a block mask, which mirrors block_mask/block_mask.cuh.
BLOCK_MASK_DTYPE = np.dtype(
    [
        ("memory", np.uint64),
        ("full_offset", np.int64),
        ("slots_after_offset", np.int64),
        ("tiles_offset", np.int64),
        ("pairs_offset", np.int64),
        ("batch_stride", np.int64),
        ("head_stride", np.int64),
        ("words", np.int32),
        ("key_blocks", np.int32),
        ("slots", np.int32),
        # Padding, as in C++.
        ("_", np.int32),
    ]
)


# This struct and the next one mirror backward/params.cuh.
BIAS_GRADIENT_DTYPE = np.dtype(
    [
        ("data", np.uint64),
        ("batch", np.int32),
        ("heads", np.int32),
        ("rows", np.int32),
        ("keys", np.int32),
        ("parts", np.int64),
    ]
)

# Fields that the backward kernels have after all other fields.
GRADIENTS_DTYPE = np.dtype(
    [
        ("dout", TENSOR_DTYPE),
        ("dq", TENSOR_DTYPE),
        ("dk", TENSOR_DTYPE),
        ("dv", TENSOR_DTYPE),
        ("dlse", np.uint64),
        ("dsinks", np.uint64),
        ("dbias", BIAS_GRADIENT_DTYPE),
        ("bias_parts", np.uint64),
        ("capture_sums", np.uint64),
    ]
)


def params_dtype(problem: Problem) -> np.dtype:
    """Return the dtype of the argument struct of a problem's kernels.

    The common fields come first, then the data of modifications. The last fields are the scales of
    an 8-bit KV cache or of float8 inputs, or the fields of the backward pass.
    """
    mods = captures = None
    if problem.score is not None:
        mods = problem.score.dtype
        captures = problem.score.differentiable or ("_",)
    scales: tuple[str, ...] = ()
    if problem.scales is not None:
        scales = ("q_scale", "k_scale", "v_scale")[0 if problem.is_float8 else 1 :]
    return _params_dtype(mods, captures, scales, problem.gradient is not None)


# Creating a dtype takes 15 us. The cache is bounded because users choose the names of captures.
@functools.lru_cache(maxsize=256)
def _params_dtype(
    mods: np.dtype | None,
    captures: tuple[str, ...] | None,
    scales: tuple[str, ...],
    has_gradients: bool,
) -> np.dtype:
    forward = _forward_dtype(mods)
    assert forward.fields is not None
    fields = {name: field[:2] for name, field in forward.fields.items()}
    end = forward.itemsize
    if scales:
        for name in scales:
            fields[name] = (TENSOR_DTYPE, end)
            end += TENSOR_DTYPE.itemsize
        return _struct(fields, end)
    if not has_gradients:
        return forward
    assert GRADIENTS_DTYPE.fields is not None
    fields |= {n: (f[0], end + f[1]) for n, f in GRADIENTS_DTYPE.fields.items()}
    end += GRADIENTS_DTYPE.itemsize
    if captures is not None:
        fields["dcaptures"] = (np.dtype([(name, np.uint64) for name in captures]), end)
        end += fields["dcaptures"][0].itemsize
    return _struct(fields, end)


def _forward_dtype(mods: np.dtype | None) -> np.dtype:
    if mods is None:
        return PARAMS_DTYPE
    alignment = 8
    maps = PARAMS_DTYPE.itemsize + -(-mods.itemsize // alignment) * alignment
    assert PARAMS_DTYPE.fields is not None
    fields = {name: field[:2] for name, field in PARAMS_DTYPE.fields.items()}
    fields["mods"] = (mods, PARAMS_DTYPE.itemsize)
    fields["block_mask"] = (BLOCK_MASK_DTYPE, maps)
    return _struct(fields, maps + BLOCK_MASK_DTYPE.itemsize)


def _struct(fields: Mapping[str, tuple[np.dtype, int]], itemsize: int) -> np.dtype:
    """Return a struct dtype of fields with a type and a byte offset each."""
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype(
        {"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": itemsize}
    )


def layout_assertions(problem: Problem) -> str:
    """Return C++ that fails to compile if the layouts of `params.cuh` and `params_dtype` differ."""
    name = "Params" if problem.gradient is None else "GradientParams"
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
