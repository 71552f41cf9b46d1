"""Problems of contiguous arrays, and with mask functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cupy_flash.problem.problem import Problem, make_contiguous_problem
from cupy_flash.problem.score import ScoreSpec

NAMES = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v")


def dense_problem(dtype: str, *sizes: int, **options: Any) -> Problem:
    """Return the problem of contiguous arrays of these sizes, in the order of `NAMES`."""
    return make_contiguous_problem(dtype=dtype, **dict(zip(NAMES, sizes, strict=True)), **options)


def with_mask(
    problem: Problem, varies: tuple[bool, bool] = (False, False), **changed: bool
) -> Problem:
    """Return the problem with a mask function that may depend on the batch index and the head."""
    score = ScoreSpec(
        *(None, None, False, False, False, False, False, True, "", np.dtype([])),
        block_mask_suffices=True,
        mask_varies=varies,
        conceals=True,
    )
    return dataclasses.replace(problem, score=dataclasses.replace(score, **changed))
