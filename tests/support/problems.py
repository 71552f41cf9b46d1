"""Problems of contiguous arrays."""

from __future__ import annotations

from typing import Any

from cupy_flash.problem.problem import Problem, make_contiguous_problem

NAMES = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v")


def dense_problem(dtype: str, *sizes: int, **options: Any) -> Problem:
    """Return the problem of contiguous arrays of these sizes, in the order of `NAMES`."""
    return make_contiguous_problem(dtype=dtype, **dict(zip(NAMES, sizes, strict=True)), **options)
