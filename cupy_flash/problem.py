"""What one attention call asks for, validated once, with no arrays and no pointers in it."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import numpy as np

from cupy_flash.sequences import Sequences

DTYPES = ("float16", "bfloat16", "float32", "float64")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
MAX_HEAD_DIM = 256
# Kernels count rows in 32 bits and add a tile's width to them.
# Positions, which an offset can double, and a tile's rows past the end are 32-bit integers.
MAX_SEQLEN = 2**30 - 2**10
# The widest single memory access, in bytes.
MAX_ALIGNMENT = 16

Strides = tuple[int, int, int]


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
        One of `DTYPES`.
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


@dataclass(frozen=True)
class Problem:
    """One forward attention problem.

    Attributes
    ----------
    dtype
        Of q, k, v and out: one of `DTYPES`.
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v
        Sizes; heads_q is a multiple of heads_kv.
    causal
        Whether query i sees only the keys j <= i + q_offset.
    q_offset
        Position of the first query among the keys, kept within [-seqlen_q, seqlen_k], beyond
        which it changes nothing. 0 when not causal.
    softmax_scale
        Factor on the scores.
    q_strides, k_strides, v_strides, out_strides
        Of batch, row and head, in elements.
    alignment
        Bytes that every row of q, k and v starts at a multiple of: 16, 8, 4 or 2.
    out_alignment
        The same of out.
    sequences
        How the sequences lie where they are not blocks of equal length; then seqlen_q and seqlen_k
        are the most that one may have, and each has a causal mask of its own, aligned at the
        bottom right. The first of the strides is 0 for packed arrays, a page's for paged ones.
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    q_offset: int
    softmax_scale: float
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    out_strides: Strides
    alignment: int
    out_alignment: int
    sequences: Sequences | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]

    @property
    def rows(self) -> int:
        """Query rows over the whole batch and all heads."""
        return self.batch * self.heads_q * self.seqlen_q

    @property
    def is_empty(self) -> bool:
        """Whether the output has no element, so that there is nothing to compute."""
        return self.rows == 0

    def flops(self) -> float:
        """Floating-point operations by the field's convention.

        4 * batch * heads_q * seqlen_q * seqlen_k * head_dim (the mean of both head dims), of
        which a causal problem counts the fraction of pairs that are seen; for seqlen_q =
        seqlen_k that is half (FlashAttention-3 paper, section 4.1).
        """
        pairs: float = self.seqlen_q * self.seqlen_k
        if self.causal:
            pairs = self._seen_pairs()
        return 2.0 * self.batch * self.heads_q * pairs * (self.head_dim + self.head_dim_v)

    def _seen_pairs(self) -> float:
        # Row i sees clamp(i + q_offset + 1/2, 0, seqlen_k) keys; the half makes a square problem
        # count exactly half of its pairs, as the papers do.
        low = min(self.seqlen_q, max(0, -self.q_offset))
        high = min(self.seqlen_q, max(0, self.seqlen_k - self.q_offset))
        rising = (high - low) * (low + high) / 2 + (high - low) * self.q_offset
        return rising + (self.seqlen_q - high) * float(self.seqlen_k)


def make_problem(
    q: ArraySpec,
    k: ArraySpec,
    v: ArraySpec,
    out: ArraySpec | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: int | None = None,
) -> Problem:
    """Check the caller's input and put it in a `Problem`.

    Parameters
    ----------
    q, k, v
        Specs of shapes (batch, seqlen_q, heads_q, head_dim), (batch, seqlen_k, heads_kv,
        head_dim) and (batch, seqlen_k, heads_kv, head_dim_v).
    out
        Spec of the output; None for a new contiguous one.
    causal, softmax_scale, q_offset
        As in `cupy_flash.flash_attention`.

    Raises
    ------
    TypeError
        For dtypes that are not supported or differ, or an option of the wrong kind.
    ValueError
        For shapes that do not go together, or values out of range.
    """
    for name, spec in (("q", q), ("k", k), ("v", v)):
        if spec.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {spec.dtype}; expected one of {', '.join(DTYPES)}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype, but are {q.dtype}, {k.dtype} and {v.dtype}"
        )
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    _check_shapes(q.shape, k.shape, v.shape)
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal is {causal!r}; expected True or False")
    if q_offset is None:
        q_offset = seqlen_k - seqlen_q
    elif not causal:
        raise ValueError("q_offset places a causal mask; pass causal=True or leave q_offset out")
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(head_dim)
    out_shape = (batch, seqlen_q, heads_q, head_dim_v)
    if out is None:
        out = ArraySpec.contiguous(out_shape, q.dtype)
    _check_out(out, out_shape, q.dtype)
    return Problem(
        dtype=q.dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=bool(causal),
        q_offset=max(-seqlen_q, min(_integer("q_offset", q_offset), seqlen_k)) if causal else 0,
        softmax_scale=_finite("softmax_scale", softmax_scale),
        q_strides=q.strides,
        k_strides=k.strides,
        v_strides=v.strides,
        out_strides=out.strides,
        alignment=min(q.row_alignment(), k.row_alignment(), v.row_alignment()),
        out_alignment=out.row_alignment(),
    )


def make_contiguous_problem(
    *,
    dtype: str,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    head_dim_v: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: int | None = None,
) -> Problem:
    """`make_problem` for new contiguous arrays of the given sizes."""
    return make_problem(
        ArraySpec.contiguous((batch, seqlen_q, heads_q, head_dim), dtype),
        ArraySpec.contiguous((batch, seqlen_k, heads_kv, head_dim), dtype),
        ArraySpec.contiguous((batch, seqlen_k, heads_kv, head_dim_v), dtype),
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
    )


def _integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; expected an integer") from None


def _finite(name: str, value: float) -> float:
    try:
        is_finite = math.isfinite(value)
    except OverflowError:
        is_finite = False
    except TypeError:
        raise TypeError(f"{name} is {value!r}; expected a number") from None
    if not is_finite:
        raise ValueError(f"{name} is {value}; expected a finite number")
    return float(value)


def _check_shapes(
    q: tuple[int, int, int, int], k: tuple[int, int, int, int], v: tuple[int, int, int, int]
) -> None:
    for name, shape in (("k", k), ("v", v)):
        if shape[0] != q[0]:
            raise ValueError(f"{name} has batch {shape[0]}, but q has {q[0]}")
    if k[3] != q[3]:
        raise ValueError(f"k has head_dim {k[3]}, but q has {q[3]}")
    if k[1] != v[1]:
        raise ValueError(f"k and v must have one seqlen, but have {k[1]} and {v[1]}")
    if k[2] != v[2]:
        raise ValueError(f"k and v must have one number of heads, but have {k[2]} and {v[2]}")
    if k[2] == 0:
        raise ValueError("k and v have no heads; expected at least 1")
    if q[2] % k[2]:
        raise ValueError(f"q has {q[2]} heads; expected a multiple of the {k[2]} heads of k and v")
    for name, dim in (("head_dim of q and k", q[3]), ("head_dim of v", v[3])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name} is {dim}; expected 1 to {MAX_HEAD_DIM}")
    for name, seqlen in (("seqlen of q", q[1]), ("seqlen of k and v", k[1])):
        if seqlen > MAX_SEQLEN:
            raise ValueError(f"{name} is {seqlen}; expected at most {MAX_SEQLEN}")


def _check_out(out: ArraySpec, shape: tuple[int, int, int, int], dtype: str) -> None:
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}; expected {dtype}, as q has")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; expected {shape}")
    if 0 in shape:
        return
    # Two elements of out share an address when a longer axis does not step over the shorter ones.
    extent = shape[3]
    for stride, length in sorted(zip((abs(s) for s in out.strides), shape[:3], strict=True)):
        if length > 1:
            if stride < extent:
                raise ValueError(
                    f"out overlaps itself: shape {shape}, strides {out.strides} in elements; "
                    "pass an array whose elements all have memory of their own"
                )
            extent = stride * (length - 1) + extent
