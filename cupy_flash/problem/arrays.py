"""Dtypes, strides and alignments of the arrays of a problem, without their addresses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

DTYPES = ("float16", "bfloat16", "float32", "float64")
# Dtype of quantized q, k and v, which come with scales, and the dtypes of their output.
FLOAT8 = "float8_e4m3fn"
FLOAT8_OUTPUTS = ("bfloat16", "float16")
# Dtypes of 8-bit KV caches, each with the largest number that it holds.
LARGEST_QUANTIZED = {"float8_e4m3fn": 448.0, "int8": 127.0}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "int8": 1}
# Largest alignment that matters, in bytes: the width of the widest memory access.
MAX_ALIGNMENT = 16

Strides = tuple[int, int, int]
Shape = tuple[int, int, int, int]


def contiguous_strides(shape: tuple[int, int, int, int]) -> Strides:
    """Return the strides of the first three axes of a C-contiguous array, in elements."""
    return (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3])


@dataclass(frozen=True)
class ArraySpec:
    """Shape, strides, dtype and alignment of an array in (batch, seqlen, heads, dim) order.

    Attributes
    ----------
    shape
        Lengths of the axes (batch, seqlen, heads, dim).
    strides
        Strides of the batch, row and head axes, in elements. The last axis is contiguous.
    dtype
        Name of the dtype: one of `DTYPES` or `FLOAT8`; for a cache also of `LARGEST_QUANTIZED`.
    alignment
        Alignment of the address of the first element, in bytes, at most 16.
    """

    shape: tuple[int, int, int, int]
    strides: Strides
    dtype: str
    alignment: int = MAX_ALIGNMENT

    @classmethod
    def contiguous(cls, shape: tuple[int, int, int, int], dtype: str) -> ArraySpec:
        """Return the spec of a new C-contiguous array."""
        return cls(shape, contiguous_strides(shape), dtype)

    def row_alignment(self) -> int:
        """Return the alignment of every row's address in bytes: a power of two, at most 16."""
        size = ITEMSIZE[self.dtype]
        alignment = self.alignment
        for length, stride in zip(self.shape, self.strides, strict=False):
            if length > 1:
                alignment = math.gcd(alignment, stride * size)
        return math.gcd(alignment, MAX_ALIGNMENT)


class Tensor(NamedTuple):
    """Dtype, strides and row alignment of an array of a problem.

    Attributes
    ----------
    dtype
        Name of the dtype: one of `DTYPES` or `FLOAT8`; for a cache also of `LARGEST_QUANTIZED`.
    strides
        Strides of the batch, row and head axes, in elements.
    alignment
        Alignment of every row's address in bytes: a power of two, at most 16.
    """

    dtype: str
    strides: Strides
    alignment: int


class Scales(NamedTuple):
    """Strides of the scales of an 8-bit KV cache, or of float8 q, k and v.

    Attributes
    ----------
    k, v
        Strides of the first axis (cache, page or, for float8, batch), rows and heads, in elements;
        0 along an axis with a single scale. None if there are no scales.
    computed
        Whether an append computes the scales of the rows that it writes.
    q
        Strides of the scales of float8 queries, in the same form as `k` and `v`.
    """

    k: Strides | None = None
    v: Strides | None = None
    computed: bool = False
    q: Strides | None = None

    @property
    def given(self) -> dict[str, Strides]:
        """Strides that are not None, keyed by the name of the array of scales."""
        every = {"q_scale": self.q, "k_scale": self.k, "v_scale": self.v}
        return {name: strides for name, strides in every.items() if strides is not None}


class Tensors(Mapping[str, Tensor]):
    """Mapping from names to tensors. It is hashable, so that a problem is hashable, too."""

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._tensors.items())))

    def __repr__(self) -> str:
        return f"Tensors(**{self._tensors})"


def tensor_of(spec: ArraySpec, *, is_packed: bool) -> Tensor:
    """Return the `Tensor` of an array; the batch stride of a packed array is 0."""
    strides = (0, *spec.strides[1:]) if is_packed else spec.strides
    return Tensor(spec.dtype, strides, spec.row_alignment())


def check_no_self_overlap(name: str, spec: ArraySpec) -> None:
    """Raise ValueError if two elements of an array that is written have the same address."""
    shape = spec.shape
    if 0 in shape:
        return
    # Elements collide if a stride is less than the extent of the axes with smaller strides.
    extent = shape[3]
    for stride, length in sorted(zip((abs(s) for s in spec.strides), shape[:3], strict=True)):
        if length > 1:
            if stride < extent:
                raise ValueError(
                    f"{name} overlaps itself: shape {shape}, strides {spec.strides} in elements; "
                    "pass an array whose elements do not share memory"
                )
            extent = stride * (length - 1) + extent
