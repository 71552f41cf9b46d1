"""Columns of a head that a thread block processes: all, or half for wide heads (a cluster of 2)."""

from __future__ import annotations

from cupy_flash.families.contract import ceil_div, round_up
from cupy_flash.problem.problem import Problem

# Largest number of head_dim columns of a thread block; a cluster of two processes wider heads.
MAX_COLUMNS = 256
# Size in bytes of a row of each operand that one wgmma instruction multiplies (k).
_STEP_BYTES = 32


def cta_ranks(problem: Problem) -> int:
    """Return the number of thread blocks of a query tile (1 or 2), which divide its columns."""
    return 1 if max(problem.head_dim, problem.head_dim_v) <= MAX_COLUMNS else 2


def block_columns(problem: Problem, dim: int) -> int:
    """Return the number of columns of `dim` per thread block; the last block may have fewer."""
    blocks = cta_ranks(problem)
    return dim if blocks == 1 else round_up(ceil_div(dim, blocks), 16)


def k_steps(problem: Problem) -> int:
    """Return the number of k steps of S = Q K^T: 16 columns each, or 32 for float8."""
    return ceil_div(block_columns(problem, problem.head_dim), _STEP_BYTES // operand_bytes(problem))


def operand_bytes(problem: Problem) -> int:
    """Return the size in bytes of an operand element of the matrix products."""
    return 1 if problem.is_float8 else 2
