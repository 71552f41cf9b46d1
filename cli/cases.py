"""One attention call to bench or tune, as sizes and flags."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cupy_flash.problem import ITEMSIZE, ArraySpec, Problem, Strides, make_problem

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Case:
    """Sizes and flags of one call, on new contiguous arrays in `layout`."""

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    q_offset: int | None = None
    softmax_scale: float | None = None
    layout: str = "bshd"

    @property
    def bshd_shapes(self) -> tuple[Shape, Shape, Shape]:
        """Shapes of q, k and v in (batch, seqlen, heads, dim) order."""
        return (
            (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim_v),
        )

    def problem(self) -> Problem:
        """The library's record of the call; raises TypeError or ValueError as the library does."""
        q, k, v = (self._spec(shape) for shape in self.bshd_shapes)
        return make_problem(
            q,
            k,
            v,
            self._spec((*q.shape[:3], self.head_dim_v)),
            causal=self.causal,
            softmax_scale=self.softmax_scale,
            q_offset=self.q_offset,
        )

    def _spec(self, shape: Shape) -> ArraySpec:
        if self.layout == "bshd":
            return ArraySpec.contiguous(shape, self.dtype)
        _, seqlen, heads, dim = shape
        strides: Strides = (heads * seqlen * dim, dim, seqlen * dim)
        return ArraySpec(shape, strides, self.dtype)

    @property
    def array_bytes(self) -> int:
        """Bytes of q, k, v and the output."""
        rows_q = self.batch * self.seqlen_q * self.heads_q
        rows_k = self.batch * self.seqlen_k * self.heads_kv
        return (rows_q + rows_k) * (self.head_dim + self.head_dim_v) * ITEMSIZE[self.dtype]

    @property
    def scores(self) -> int:
        """Elements of the score matrix of all heads."""
        return self.batch * self.heads_q * self.seqlen_q * self.seqlen_k

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `flash_attention` and of the reference."""
        return {
            "causal": self.causal,
            "q_offset": self.q_offset,
            "softmax_scale": self.softmax_scale,
            "layout": self.layout,
        }

    @property
    def first_query(self) -> int:
        """Position of the first query among the keys."""
        return self.seqlen_k - self.seqlen_q if self.q_offset is None else self.q_offset


_PARTS = ("dtype", "batch", "heads", "seqlen", "head_dim", "mask", "scale", "layout")
SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def _texts(case: Case) -> dict[str, str]:
    """Each part of a case's description; empty where it is as usual."""
    mask = "causal" if case.causal else "full"
    if case.causal and case.q_offset is not None:
        mask += f"@{case.q_offset}"
    return {
        "dtype": SHORT_DTYPE[case.dtype],
        "batch": f"b{case.batch}",
        "heads": f"h{_pair(case.heads_q, case.heads_kv)}",
        "seqlen": f"s{_pair(case.seqlen_q, case.seqlen_k)}",
        "head_dim": f"d{_pair(case.head_dim, case.head_dim_v)}",
        "mask": mask,
        "scale": "" if case.softmax_scale is None else f"scale {case.softmax_scale:g}",
        "layout": case.layout if case.layout != "bshd" else "",
    }


def _pair(first: int, second: int) -> str:
    return str(first) if first == second else f"{first}/{second}"


def describe(cases: Sequence[Case]) -> tuple[str, list[str]]:
    """What all cases share, and for each what sets it apart, as short texts."""
    texts = [_texts(case) for case in cases]
    varying = {part for part in _PARTS if len({text[part] for text in texts}) > 1}
    shared = " ".join(t for part in _PARTS if part not in varying if (t := texts[0][part]))
    own = [" ".join(t for part in _PARTS if part in varying if (t := x[part])) for x in texts]
    return shared, own


def sweep(
    *,
    dtype: Iterable[str],
    batch: Iterable[int],
    seqlen_q: Iterable[int],
    seqlen_k: Iterable[int] | None,
    heads: Iterable[int],
    kv_heads: Iterable[int] | None,
    head_dim: Iterable[int],
    head_dim_v: Iterable[int] | None,
    causal: Sequence[bool],
    q_offset: Iterable[int] | None,
    softmax_scale: Iterable[float] | None,
    layout: Iterable[str],
) -> list[Case]:
    """Every combination; keys, kv heads and value dims follow the queries' where None.

    A q_offset applies to the causal cases of a sweep over both.
    """
    both = True in causal and False in causal
    cases = []
    combinations: Iterable[tuple[Any, ...]] = itertools.product(
        dtype,
        layout,
        head_dim,
        head_dim_v or (None,),
        causal,
        batch,
        heads,
        kv_heads or (None,),
        seqlen_q,
        seqlen_k or (None,),
        q_offset or (None,),
        softmax_scale or (None,),
    )
    for type_, lay, dim, dim_v, mask, b, h, h_kv, s_q, s_k, offset, scale in combinations:
        case = Case(
            dtype=type_,
            batch=b,
            seqlen_q=s_q,
            seqlen_k=s_q if s_k is None else s_k,
            heads_q=h,
            heads_kv=h if h_kv is None else h_kv,
            head_dim=dim,
            head_dim_v=dim if dim_v is None else dim_v,
            causal=mask,
            q_offset=None if both and not mask else offset,
            softmax_scale=scale,
            layout=lay,
        )
        if case not in cases:
            cases.append(case)
    return cases
