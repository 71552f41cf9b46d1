"""Columns of a head that a thread block works on: all, or of wide heads a part as one of a pair."""

from __future__ import annotations

from cupy_flash.families.contract import ceil_div, round_up
from cupy_flash.problem.problem import Problem

# Columns that a block multiplies at most; wider heads are a pair's.
MOST_COLUMNS = 256
# Bytes of what the products take of a row of each operand in one step.
_STEP_BYTES = 32


def ranks(problem: Problem) -> int:
    """Thread blocks that a query tile is worked on by, each with a part of the columns."""
    return 1 if max(problem.head_dim, problem.head_dim_v) <= MOST_COLUMNS else 2


def block_columns(problem: Problem, dim: int) -> int:
    """Columns of each of these blocks, of a head's `dim`; the last may have fewer."""
    blocks = ranks(problem)
    return dim if blocks == 1 else round_up(ceil_div(dim, blocks), 16)


def k_steps(problem: Problem) -> int:
    """Products that one product of Q and K takes, of 16 columns each, of float8 32."""
    return ceil_div(block_columns(problem, problem.head_dim), _STEP_BYTES // operand_bytes(problem))


def operand_bytes(problem: Problem) -> int:
    """Bytes of what the products take."""
    return 1 if problem.is_float8 else 2
