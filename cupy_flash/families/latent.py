"""Latent attention, whose values are columns of their keys, as the `hopper` family works on it."""

from __future__ import annotations

import dataclasses

from cupy_flash.problem.arrays import Tensor, Tensors
from cupy_flash.problem.problem import Problem

# Columns of the values, and of the others, come in lines of shared memory, as many in both blocks.
_COLUMNS = 2 * 32


def posed(problem: Problem) -> Problem:
    """The problem with the query heads of a key/value head as rows, where that is the same.

    It is for one query of each sequence, which sees all keys: a tile then has many rows.
    """
    if not has_latent_tiles(problem) or problem.seqlen_q != 1:
        return problem
    group = problem.heads_q // problem.heads_kv
    changed = {name: _of_rows(problem.tensors[name], group) for name in ("q", "out")}
    return dataclasses.replace(
        problem,
        seqlen_q=group,
        heads_q=problem.heads_kv,
        causal=False,
        tensors=Tensors(**{**problem.tensors, **changed}),
    )


def has_latent_tiles(problem: Problem) -> bool:
    """Whether a tile of keys serves as that of their values, without more columns than they have.

    Each of two thread blocks takes half of the values' columns and half of the others.
    """
    if not problem.values_in_keys or problem.itemsize != 2:
        return False
    if problem.score is not None or problem.scales is not None or problem.layout.packed_q:
        return False
    return problem.head_dim % _COLUMNS == problem.head_dim_v % _COLUMNS == 0


def _of_rows(tensor: Tensor, group: int) -> Tensor:
    batch, _, head = tensor.strides
    return tensor._replace(strides=(batch, head, group * head))
