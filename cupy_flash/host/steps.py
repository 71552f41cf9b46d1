"""The steps in which packed and cached sequences are computed on the CPU.

A run is sequences of one shape at equal distances: one forward pass. Short packed sequences of
unequal lengths are padded together (`cupy_flash.host.padding`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host import padding
from cupy_flash.host.sequence_places import (
    Keys,
    Queries,
    find_packed_keys,
    find_queries,
    rows_of_none,
)


class Run(NamedTuple):
    """Consecutive sequences of one shape at equal distances.

    Attributes
    ----------
    first
        Index of the first sequence among all.
    queries, keys
        Rows and keys of the first sequence.
    sequences
        Number of sequences.
    """

    first: int
    queries: Queries
    keys: Keys
    sequences: int


def equal_runs(sequences: Iterable[tuple[Queries, Keys]], join: bool) -> Iterator[Run]:
    """Yield the runs of sequences that have queries.

    Runs of sequences with keys are of one sequence each if `join` is False. Sequences without keys
    are joined in any case, as nothing is computed for them.
    """
    first: Run | None = None
    count = 0
    for index, (queries, keys) in enumerate(sequences):
        if not queries.seqlen:
            continue
        joins = join or not keys.seqlen
        if first is not None and joins and _continues(first, count, queries, keys):
            count += 1
            continue
        if first is not None:
            yield first._replace(sequences=count)
        first, count = Run(index, queries, keys, 1), 1
    if first is not None:
        yield first._replace(sequences=count)


def _continues(run: Run, count: int, queries: Queries, keys: Keys) -> bool:
    """Return whether a sequence is where sequence `count` of a run would be."""
    _, q0, k0, _ = run
    if (
        queries.seqlen != q0.seqlen
        or queries.first != q0.first + count * q0.seqlen
        or keys.seqlen != k0.seqlen
    ):
        return False
    return not keys.seqlen or (
        keys.pages is None
        and (keys.block, keys.first)
        in (
            (k0.block, k0.first + count * k0.seqlen),
            (k0.block + count, k0.first),
        )
    )


# Integers as part of a key.
_Frozen = tuple[bytes, np.dtype[Any]]


class Steps(NamedTuple):
    """Packed sequences in the steps that they are computed in."""

    sequences: list[tuple[Queries, Keys]]
    groups: list[padding.Group]
    padded_pairs: int  # query-key pairs of all groups
    runs: list[Run]  # of the other sequences
    rows_of_none: list[slice]  # ranges of rows in q that belong to no sequence

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
        """Sequences at these places.

        Parameters
        ----------
        rows_k : int
            Of all packed keys, or of a page.
        join, pad : bool
            Whether a step may hold several sequences, and those of unequal lengths.
        """
        cu_q = np.frombuffer(*cu_seqlens_q)
        cu_k = None if cu_seqlens_k is None else np.frombuffer(*cu_seqlens_k)
        used = None if seqused_k is None else np.frombuffer(*seqused_k)
        paged = block_table is not None
        places = find_packed_keys(
            cu_k,
            max_seqlen_k,
            batch=len(cu_q) - 1,
            total_k=0 if paged else rows_k,
            page_size=rows_k if paged else 0,
            seqused_k=used,
            block_table=block_table,
        )
        queries = find_queries(cu_q, total_q, max_seqlen_q)
        sequences = list(zip(queries, places, strict=True))
        groups: list[padding.Group] = []
        pairs, rest = 0, sequences
        if join and pad and not paged:
            facts = [(rows.first, rows.seqlen, keys.first, keys.seqlen) for rows, keys in sequences]
            columns = np.array(facts, np.int64).reshape(-1, 4).T
            _, seqlens_q, _, seqlens_k = columns
            short = padding.are_worth_it(seqlens_q, seqlens_k, heads_q)
            indices = np.flatnonzero(short)
            pairs = heads_q * int((seqlens_q * seqlens_k)[indices].sum())
            elements = 2 * (heads_q + heads_kv) * head_dim
            parts = padding.groups(seqlens_q[indices], seqlens_k[indices], elements)
            groups = [padding.Group.make(indices[part], *columns) for part in parts]
            rest = [
                pair for pair, padded in zip(sequences, short.tolist(), strict=True) if not padded
            ]
        unowned = rows_of_none((rows for rows, _ in sequences), total_q)
        return cls(sequences, groups, pairs, list(equal_runs(rest, join)), unowned)


# The layers of a model are called with the same lengths, one after the other. Of 8 sequences of 4
# to 16 tokens, 12 heads of 32, finding the steps takes 150 us of 500.
kept_steps = functools.lru_cache(16)(functools.partial(Steps.make, None))
