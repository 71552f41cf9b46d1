"""Shared code of the families of tangents."""

from __future__ import annotations

from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.problem import Problem


def config(problem: Problem) -> dict[str, int | bool]:
    """Return the members of the `Config` struct that all tangent kernels read."""
    return {
        **{f"moves_{name}": name in problem.moves for name in ROWS},
        "has_seqlens": False,
        "may_mask_pairs": problem.score is not None and problem.score.conceals,
        # The tangents of rows that attend to one key need no correction, see tangents/row.cuh.
        "has_one_key_rows": False,
        "has_dlse": False,
    }
