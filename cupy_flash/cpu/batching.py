"""Batching of packed and cached sequences into the steps that the CPU backend computes.

A run (`Run`) is consecutive sequences of one shape, stored at equal distances: it is one forward
pass. Short packed sequences of unequal lengths are padded and grouped
(`cupy_flash.cpu.padding`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.sequences import (
    AllKeys,
    AllQueries,
    Keys,
    Queries,
    find_packed_keys,
    find_queries,
    unassigned_rows,
)
from cupy_flash.cpu import padding


class Run(NamedTuple):
    """Consecutive sequences of one shape, stored at equal distances.

    Attributes
    ----------
    first
        Index of the run's first sequence in the batch.
    queries, keys
        Query rows and keys of the first sequence.
    sequences
        Number of sequences.
    """

    first: int
    queries: Queries
    keys: Keys
    sequences: int


def equal_runs(
    queries: AllQueries, keys: AllKeys, join: bool, among: NDArray[Any] | None = None
) -> list[Run]:
    """Return the runs of all sequences that have queries.

    If `join` is False, a sequence with keys is a run by itself. Sequences without keys are joined
    anyway, as nothing is computed for them. `among` holds the indices of the sequences to include,
    in ascending order; None includes all.
    """
    included = (
        np.flatnonzero(queries.seqlens) if among is None else among[queries.seqlens[among] > 0]
    )
    if not included.size:
        return []
    seqlens_q, seqlens_k = queries.seqlens[included], keys.seqlens[included]
    joins = _are_adjacent(queries.firsts[included], seqlens_q) & (seqlens_q[1:] == seqlens_q[:-1])
    joins &= seqlens_k[1:] == seqlens_k[:-1]
    has_none = seqlens_k[1:] == 0
    if join and keys.block_table is None:
        blocks, firsts = keys.blocks[included], keys.firsts[included]
        is_same = blocks[1:] == blocks[:-1]
        is_next = (blocks[1:] == blocks[:-1] + 1) & (firsts[1:] == firsts[:-1])
        joins &= has_none | is_next | (is_same & _are_adjacent(firsts, seqlens_k))
    else:
        joins &= has_none
    run_starts = np.append(0, np.flatnonzero(~joins) + 1)
    counts = np.append(run_starts[1:], included.size) - run_starts
    return [
        Run(b, queries[b], keys[b], count)
        for b, count in zip(included[run_starts].tolist(), counts.tolist(), strict=True)
    ]


def _are_adjacent(firsts: NDArray[Any], seqlens: NDArray[Any]) -> NDArray[Any]:
    """Return, for each sequence except the first, whether it begins where the previous one ends."""
    are_adjacent: NDArray[Any] = firsts[1:] == firsts[:-1] + seqlens[:-1]
    return are_adjacent


# Integer array as a hashable part of a cache key: its bytes and dtype.
_Frozen = tuple[bytes, np.dtype[Any]]


class Steps(NamedTuple):
    """Packed sequences, divided into the steps that compute them."""

    queries: AllQueries
    keys: AllKeys
    groups: list[padding.Group]
    padded_pairs: int  # number of query-key pairs of all groups
    runs: list[Run]  # runs of the sequences that belong to no group
    unassigned_rows: list[slice]  # ranges of rows in q that belong to no sequence

    @classmethod
    def make(
        cls,
        block_table: NDArray[Any] | None,
        cu_seqlens_q: _Frozen,
        cu_seqlens_k: _Frozen | None,
        seqused_k: _Frozen | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        total_q: int,
        rows_k: int,
        heads_q: int,
        heads_kv: int,
        head_dim: int,
        join: bool,
        pad: bool,
    ) -> Steps:
        """Return the steps of packed sequences; `varlen_forward` describes most parameters.

        Parameters
        ----------
        rows_k : int
            Number of all packed keys or, with a block table, number of keys per page.
        join, pad : bool
            Whether a step may hold several sequences, and whether their lengths may differ.
        """
        cu_q = np.frombuffer(*cu_seqlens_q)
        cu_k = None if cu_seqlens_k is None else np.frombuffer(*cu_seqlens_k)
        used = None if seqused_k is None else np.frombuffer(*seqused_k)
        paged = block_table is not None
        keys = find_packed_keys(
            cu_k,
            max_seqlen_k,
            batch=len(cu_q) - 1,
            total_k=0 if paged else rows_k,
            page_size=rows_k if paged else 0,
            seqused_k=used,
            block_table=block_table,
        )
        queries = find_queries(cu_q, total_q, max_seqlen_q)
        groups: list[padding.Group] = []
        pairs, unpadded = 0, None
        if join and pad and not paged:
            seqlens_q, seqlens_k = queries.seqlens, keys.seqlens
            short = padding.are_worth_it(seqlens_q, seqlens_k, heads_q)
            indices = np.flatnonzero(short)
            pairs = heads_q * int((seqlens_q * seqlens_k)[indices].sum())
            elements = 2 * (heads_q + heads_kv) * head_dim
            parts = padding.groups(seqlens_q[indices], seqlens_k[indices], elements)
            columns = queries.firsts, seqlens_q, keys.firsts, seqlens_k
            groups = [padding.Group.make(indices[part], *columns) for part in parts]
            unpadded = np.flatnonzero(~short)
        runs = equal_runs(queries, keys, join, unpadded)
        return cls(queries, keys, groups, pairs, runs, unassigned_rows(queries, total_q))


# Cached, because the layers of a model are called with the same lengths. For 8 sequences of 4 to 16
# tokens with 12 heads of 32, finding the steps takes 150 of the 500 us of a call.
cached_steps = functools.lru_cache(16)(functools.partial(Steps.make, None))
