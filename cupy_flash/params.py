"""The kernel argument struct: declared here, mirrored in `kernels_cu/params.cuh`."""

from __future__ import annotations

import struct

import numpy as np

from cupy_flash.problem import Problem

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

_FORMAT_CODE = {"uint64": "Q", "int64": "q", "float64": "d", "int32": "i"}


def _struct_format(dtype: np.dtype) -> str:
    if dtype.fields is None:
        return _FORMAT_CODE[dtype.name]
    return "".join(_struct_format(field[0]) for field in dtype.fields.values())


class PackedParams:
    """A problem's argument struct, all but the pointers fixed.

    Packing with `struct` takes 1.5 us, a tenth of what assigning fields of a NumPy record does.
    """

    def __init__(self, problem: Problem, *, num_splits: int, section_heads: int) -> None:
        self._struct = struct.Struct("=" + _struct_format(PARAMS_DTYPE))
        self._strides = (
            problem.q_strides,
            problem.k_strides,
            problem.v_strides,
            problem.out_strides,
        )
        self._tail = (
            abs(problem.softmax_scale),
            problem.batch,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.heads_q,
            problem.heads_kv,
            problem.q_offset,
            num_splits,
            section_heads,
        )

    def with_pointers(self, q: int, k: int, v: int, out: int, lse: int, workspace: int) -> np.void:
        """The struct for these device addresses, as a scalar that CuPy passes by value."""
        sq, sk, sv, so = self._strides
        data = self._struct.pack(q, *sq, k, *sk, v, *sv, out, *so, lse, workspace, *self._tail)
        return np.frombuffer(bytearray(data), PARAMS_DTYPE)[0]


def layout_assertions() -> str:
    """C++ that fails to compile unless `params.cuh` lays the struct out as `PARAMS_DTYPE` does.

    NVRTC has no ``offsetof`` without a header; ``__INTADDR__`` is what its own is made of.
    """
    lines = []
    for name, dtype in (("Tensor", TENSOR_DTYPE), ("Params", PARAMS_DTYPE)):
        lines.append(f"static_assert(sizeof({name}) == {dtype.itemsize});")
        assert dtype.fields is not None
        lines += [
            f"static_assert(__INTADDR__(&(({name}*)0)->{member}) == {field[1]});"
            for member, field in dtype.fields.items()
        ]
    return "\n".join(lines)
