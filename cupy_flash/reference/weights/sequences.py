"""Queries and keys of each sequence of a packed or cached call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.mods.on_arrays.scores import FIRST_PAIR, Pairs
from cupy_flash.reference.eight_bits import widened
from cupy_flash.reference.modifications import integers, read_scale
from cupy_flash.reference.packed import (
    lengths_in_cache,
    packed_sequences,
    places_of_sequences,
    standing_for,
)
from cupy_flash.reference.rows import queries_and_keys
from cupy_flash.reference.sequences import paged_rows


class SequenceInputs(NamedTuple):
    """Queries and keys of one sequence.

    Attributes
    ----------
    q, k : arrays, shape (1, heads, seqlen, dim)
        Queries, and keys, which are multiplied by their scales if they have 8 bits.
    rows
        Rows of the sequence in packed queries; its index in a dense batch of queries.
    keys
        Rows of the sequence in packed keys, or its positions in its cache or pages.
    sequence
        Index of the sequence, and its first rows in packed arrays.
    """

    q: Any
    k: Any
    rows: slice
    keys: slice
    sequence: Pairs


def of_packed_sequences(
    q: Any,
    k: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Any,
    k_scale: Any,
    block_table: Any = None,
) -> Iterator[SequenceInputs]:
    """Yield the sequences of a varlen call; see `packed_sequences` for lengths and pages."""
    k_scale = read_scale("k_scale", k_scale, q)
    blocks = k[None] if block_table is None else k
    for rows, keys, sequence in packed_sequences(
        *(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        seqused_k=seqused_k,
        block_table=block_table,
    ):
        places = (
            np.arange(len(k))
            if block_table is None
            else paged_rows(block_table[sequence.b], *k.shape[:2])
        )
        inputs = _as_batch(q[rows], standing_for(blocks, k_scale, places[keys]))
        yield SequenceInputs(*inputs, rows, keys, sequence)


def of_cached_sequences(
    q: Any,
    k_cache: Any,
    cache_seqlens: Any,
    *,
    cache_batch_idx: Any,
    block_table: Any,
    k_scale: Any,
) -> Iterator[SequenceInputs]:
    """Yield the sequences of a call on a KV cache; `block_table` is in host memory or None."""
    k_scale = read_scale("k_scale", k_scale, q)
    places = places_of_sequences(k_cache, len(q), integers(cache_batch_idx), block_table)
    for b, length in enumerate(lengths_in_cache(cache_seqlens, places)):
        inputs = _as_batch(q[b], standing_for(k_cache, k_scale, places[b][:length]))
        sequence = FIRST_PAIR._replace(b=b)
        yield SequenceInputs(*inputs, slice(b, b + 1), slice(0, length), sequence)


def _as_batch(q: Any, k: Any) -> tuple[Any, Any]:
    """Return the rows (seqlen, heads, dim) of one sequence as (1, heads, seqlen, dim)."""
    q, k = queries_and_keys(widened(q)[None], k[None], "bshd")
    return q, k
