"""The kernel argument struct: declared here, mirrored in `kernels_cu/params.cuh`."""

from __future__ import annotations

import struct

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
# `kernels_cu/work/sequences.cuh`.
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


class PackedParams:
    """A problem's argument struct, all but the pointers fixed.

    Packing with `struct` takes 1.5 us, a tenth of what assigning fields of a NumPy record does.
    """

    def __init__(self, problem: Problem, *, num_splits: int, section_heads: int) -> None:
        self._struct = struct.Struct("=" + struct_format(PARAMS_DTYPE))
        self._strides = (
            problem.q_strides,
            problem.k_strides,
            problem.v_strides,
            problem.out_strides,
        )
        self._tail = (
            problem.score_factor[1],
            problem.batch,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.heads_q,
            problem.heads_kv,
            problem.q_offset,
            num_splits,
            section_heads,
        )

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
        sq, sk, sv, so = self._strides
        self._struct.pack_into(
            memory, offset, q, *sq, k, *sk, v, *sv, out, *so, lse, workspace, *self._tail
        )


class PackedSequences:
    """The struct of where a problem's sequences lie, all but the pointers and `keys` fixed.

    Of equal lengths it says nothing: all pointers are null.
    """

    def __init__(self, problem: Problem) -> None:
        self._struct = struct.Struct("=" + struct_format(SEQUENCES_DTYPE))
        s = problem.layout
        self._stride = s.block_table_stride
        self._head = (s.total_q, s.total_k, s.caches, s.pages, s.max_pages)
        self._tail = (s.new_keys, s.num_splits)

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
        self._struct.pack_into(
            memory, offset, *pointers, self._stride, *self._head, keys, *self._tail
        )


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
