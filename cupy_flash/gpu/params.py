"""The kernel argument struct: declared here, mirrored in `kernels_cu/params.cuh`."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

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
    ]
)

# The second argument of kernels that serve packed, cached or paged sequences, mirrored in
# `kernels_cu/grid/sequences.cuh`.
SEQUENCES_DTYPE = np.dtype(
    [
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
        ("num_splits", np.int32),
    ]
)

_FORMAT_CODE = {"uint64": "Q", "int64": "q", "float64": "d", "int32": "i"}


def struct_format(dtype: np.dtype) -> str:
    """What `struct` calls the fields of a struct's dtype, one behind the other."""
    if dtype.fields is None:
        return _FORMAT_CODE[dtype.name]
    return "".join(struct_format(field[0]) for field in dtype.fields.values())


def template(
    dtype: np.dtype, fixed: Mapping[str, Any], variable: Sequence[str]
) -> tuple[struct.Struct, list[bytes]]:
    """What packs a struct of which few fields change from call to call.

    Packing takes 0.2 us that way, with all fields as numbers 1 us, and filling a NumPy record 15.

    Parameters
    ----------
    dtype
        Of the struct.
    fixed
        Values by name; a tensor's are its strides.
    variable
        Names in the order of the struct; of a tensor it is the address.

    Returns
    -------
    struct.Struct
        Takes the variable values and what lies between them, in order.
    list of bytes
        What lies between.
    """
    record = np.zeros((), dtype)
    for name, value in fixed.items():
        record[name] = (0, *value) if isinstance(value, tuple) else value
    assert dtype.fields is not None
    data, codes, between, end = record.tobytes(), "=", [], 0
    for name in variable:
        field, start = dtype.fields[name][:2]
        if start > end:
            between.append(data[end:start])
            codes += f"{start - end}s"
        code = struct_format(field)[0]
        codes += code
        end = start + struct.calcsize("=" + code)
    between.append(data[end:])
    return struct.Struct(f"{codes}{dtype.itemsize - end}s"), between


class PackedParams:
    """A problem's argument struct, all but the pointers fixed."""

    def __init__(self, problem: Problem, *, num_splits: int, section_heads: int) -> None:
        fixed = {
            "q": problem.q_strides,
            "k": problem.k_strides,
            "v": problem.v_strides,
            "out": problem.out_strides,
            "softmax_scale": problem.score_factor[1],
            "batch": problem.batch,
            "seqlen_q": problem.seqlen_q,
            "seqlen_k": problem.seqlen_k,
            "heads_q": problem.heads_q,
            "heads_kv": problem.heads_kv,
            "q_offset": problem.q_offset,
            "num_splits": num_splits,
            "section_heads": section_heads,
        }
        pointers = ("q", "k", "v", "out", "lse", "workspace")
        self._struct, self._between = template(PARAMS_DTYPE, fixed, pointers)

    def pack_into(
        self,
        memory: bytearray,
        offset: int,
        q: int,
        k: int,
        v: int,
        out: int,
        lse: int,
        workspace: int,
    ) -> None:
        """Write the struct for these device addresses."""
        sq, sk, sv, so, rest = self._between
        self._struct.pack_into(memory, offset, q, sq, k, sk, v, sv, out, so, lse, workspace, rest)


class PackedSequences:
    """The struct of where a problem's sequences lie, all but the pointers and `keys` fixed.

    Of equal lengths it says nothing: all pointers are null.
    """

    def __init__(self, problem: Problem) -> None:
        names = (
            *("block_table_stride", "total_q", "total_k", "caches", "pages", "max_pages"),
            *("new_keys", "num_splits"),
        )
        fixed = {name: getattr(problem.layout, name) for name in names}
        pointers = (
            *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "cache_batch_idx", "block_table"),
            "counters",
        )
        self._struct, self._between = template(SEQUENCES_DTYPE, fixed, (*pointers, "keys"))

    def pack_into(
        self,
        memory: bytearray,
        offset: int,
        cu_seqlens_q: int,
        cu_seqlens_k: int,
        seqused_k: int,
        cache_batch_idx: int,
        block_table: int,
        counters: int,
        keys: int,
    ) -> None:
        """Write the struct for these device addresses."""
        pointers = (cu_seqlens_q, cu_seqlens_k, seqused_k, cache_batch_idx, block_table, counters)
        sizes, rest = self._between
        self._struct.pack_into(memory, offset, *pointers, sizes, keys, rest)


def sequences_assertions() -> str:
    """C++ that fails to compile unless `sequences.cuh` agrees with `SEQUENCES_DTYPE`."""
    return assertions(("Sequences", SEQUENCES_DTYPE))


def layout_assertions() -> str:
    """C++ that fails to compile unless `params.cuh` lays the struct out as `PARAMS_DTYPE` does."""
    return assertions(("Tensor", TENSOR_DTYPE), ("Params", PARAMS_DTYPE))


def assertions(*structs: tuple[str, np.dtype]) -> str:
    """C++ that fails to compile unless structs of these names are laid out as their dtypes."""
    # NVRTC has no offsetof without a header; __INTADDR__ is what its own is made of.
    lines = []
    for name, dtype in structs:
        lines.append(f"static_assert(sizeof({name}) == {dtype.itemsize});")
        assert dtype.fields is not None
        lines += [
            f"static_assert(__INTADDR__(&(({name}*)0)->{member}) == {field[1]});"
            for member, field in dtype.fields.items()
        ]
    return "\n".join(lines)
