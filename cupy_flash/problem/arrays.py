"""How the arrays of a problem lie: dtypes, strides, alignments; nothing in here has an address."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

DTYPES = ("float16", "bfloat16", "float32", "float64")
# Of q, k and v that stand for their numbers times scales, and of the output then.
FLOAT8 = "float8_e4m3fn"
FLOAT8_OUTPUTS = ("bfloat16", "float16")
# Of caches of 8 bits, by the largest number that each holds.
LARGEST_QUANTIZED = {"float8_e4m3fn": 448.0, "int8": 127.0}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "int8": 1}
# The widest single memory access, in bytes.
MAX_ALIGNMENT = 16

Strides = tuple[int, int, int]
Shape = tuple[int, int, int, int]


def contiguous_strides(shape: tuple[int, int, int, int]) -> Strides:
    """Strides of the first three axes of a C-contiguous array, in elements."""
    return (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3])


@dataclass(frozen=True)
class ArraySpec:
    """An array in (batch, seqlen, heads, dim) order, as the kernels address it.

    Attributes
    ----------
    shape
        (batch, seqlen, heads, dim).
    strides
        Of batch, row and head, in elements. The last axis is contiguous.
    dtype
        One of `DTYPES`, of a cache also of `LARGEST_QUANTIZED`.
    alignment
        Bytes (at most 16) that the address of the first element is a multiple of.
    """

    shape: tuple[int, int, int, int]
    strides: Strides
    dtype: str
    alignment: int = MAX_ALIGNMENT

    @classmethod
    def contiguous(cls, shape: tuple[int, int, int, int], dtype: str) -> ArraySpec:
        """Spec of a freshly allocated C-contiguous array."""
        return cls(shape, contiguous_strides(shape), dtype)

    def row_alignment(self) -> int:
        """Bytes (a power of two, at most 16) that every row's address is a multiple of."""
        size = ITEMSIZE[self.dtype]
        alignment = self.alignment
        for length, stride in zip(self.shape, self.strides, strict=False):
            if length > 1:
                alignment = math.gcd(alignment, stride * size)
        return math.gcd(alignment, MAX_ALIGNMENT)


class Tensor(NamedTuple):
    """An array of a problem, and how its rows lie.

    Attributes
    ----------
    dtype
        One of `DTYPES`, or `FLOAT8`; of a cache also of `LARGEST_QUANTIZED`.
    strides
        Of batch, row and head, in elements.
    alignment
        Bytes (a power of two, at most 16) that every row starts at a multiple of.
    """

    dtype: str
    strides: Strides
    alignment: int


class Scales(NamedTuple):
    """How the scales of a cache of 8 bits lie, or those of q, k and v of float8.

    Attributes
    ----------
    k, v
        Strides of cache or page (of float8 batch), row and head, in elements, 0 where all have one;
        None for 1.
    computed
        Whether an append computes those of the rows that it writes.
    q
        As k and v, of float8 queries.
    """

    k: Strides | None = None
    v: Strides | None = None
    computed: bool = False
    q: Strides | None = None

    @property
    def given(self) -> dict[str, Strides]:
        """Strides of those that are given, by the names of the arrays."""
        every = {"q_scale": self.q, "k_scale": self.k, "v_scale": self.v}
        return {name: strides for name, strides in every.items() if strides is not None}


class Tensors(Mapping[str, Tensor]):
    """Tensors by name; hashable, as a problem is."""

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
    """How the rows of an array lie, as kernels have it."""
    strides = (0, *spec.strides[1:]) if is_packed else spec.strides
    return Tensor(spec.dtype, strides, spec.row_alignment())


def check_no_self_overlap(name: str, spec: ArraySpec) -> None:
    """Raise ValueError if two elements of an array that is written share an address."""
    shape = spec.shape
    if 0 in shape:
        return
    # They do when a longer axis does not step over the shorter ones.
    extent = shape[3]
    for stride, length in sorted(zip((abs(s) for s in spec.strides), shape[:3], strict=True)):
        if length > 1:
            if stride < extent:
                raise ValueError(
                    f"{name} overlaps itself: shape {shape}, strides {spec.strides} in elements; "
                    "pass an array whose elements all have memory of their own"
                )
            extent = stride * (length - 1) + extent
