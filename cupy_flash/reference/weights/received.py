"""Sums of attention weights over queries, computed in float64 in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module
from cupy_flash.mods.keywords import with_offsets
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR, Pairs
from cupy_flash.mods.shapes import refuse_other_lengths
from cupy_flash.reference.eight_bits import widened
from cupy_flash.reference.modifications import fitting_modifications, integers
from cupy_flash.reference.packed import cache_modifications, capacity_of, packed_modifications
from cupy_flash.reference.rows import (
    Selection,
    chunks_of_rows,
    precision_of,
    queries_and_keys,
    resolve,
    sinks_of,
    sizes_of,
)
from cupy_flash.reference.weights.chosen import row_weights
from cupy_flash.reference.weights.sequences import of_cached_sequences, of_packed_sequences


def received_weights(
    q: Any,
    k: Any,
    *,
    queries: slice,
    grouped: bool,
    causal: bool,
    softmax_scale: float | None,
    q_offset: Any,
    layout: str,
    stream: Any,
    modifications: Mapping[str, Any],
) -> Any:
    """Return the sums over queries of the weights of each key.

    The parameters are those of `cupy_flash.attention_received`; `modifications` is a mapping.
    """
    with on_stream(stream, q):
        convert = result_converter("q", q)
        q_offset, others = with_offsets(q_offset, modifications)
        refuse_other_lengths(others.get, "dense")
        q = read("q", q)
        batch, dtype = q.shape[:-3], precision_of(q.dtype)
        q, k = queries_and_keys(q, k, layout)
        sums = _sums(
            *(q, k, queries),
            causal=causal,
            softmax_scale=softmax_scale,
            q_offset=q_offset,
            bound_mods=fitting_modifications(others, q, sizes_of(q, k), causal=causal),
        )
        result = _rounded(sums, dtype, k.shape[1] if grouped else None)
        return convert(result.reshape(*batch, *result.shape[1:]))


def packed_received_weights(
    q: Any,
    k: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Any,
    k_scale: Any,
    queries: slice,
    grouped: bool,
    causal: bool,
    softmax_scale: float | None,
    stream: Any,
    modifications: Mapping[str, Any],
) -> Any:
    """Return the sums over queries of the weights of each packed key.

    The parameters are those of `cupy_flash.attention_received_varlen`; `modifications` is a
    mapping. Lengths and offsets are clamped, see `cupy_flash.attention_varlen_reference`.
    """
    with on_stream(stream, q):
        convert = result_converter("q", q)
        q, k = read("q", q), read("k", k)
        dtype, xp = precision_of(q.dtype), array_module(q)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        bound_mods = packed_modifications(
            modifications, widened(q), cu_seqlens_q, max_seqlen_q, max_seqlen_k, causal=causal
        )
        sums = xp.zeros((1, q.shape[1], len(k)), np.float64)
        for each in of_packed_sequences(q, k, *lengths, seqused_k=seqused_k, k_scale=k_scale):
            sums[:, :, each.keys] = _sums(
                *(each.q, each.k, queries),
                causal=causal,
                softmax_scale=softmax_scale,
                q_offset=None,
                bound_mods=bound_mods,
                sequence=each.sequence,
            )
        return convert(_rounded(sums, dtype, k.shape[1] if grouped else None)[0])


def cached_received_weights(
    q: Any,
    k_cache: Any,
    *,
    cache_seqlens: Any,
    cache_batch_idx: Any,
    block_table: Any,
    k_scale: Any,
    queries: slice,
    grouped: bool,
    causal: bool,
    softmax_scale: float | None,
    stream: Any,
    modifications: Mapping[str, Any],
) -> Any:
    """Return the sums over queries of the weights of each key in a cache.

    The parameters are those of `cupy_flash.attention_received_with_kvcache`; `modifications` is a
    mapping. Lengths and indices are clamped, see `cupy_flash.attention_with_kvcache_reference`.
    """
    with on_stream(stream, q):
        convert, block_table = result_converter("q", q), integers(block_table)
        q, k_cache = read("q", q), read("k_cache", k_cache)
        dtype, xp = precision_of(q.dtype), array_module(q)
        capacity = capacity_of(k_cache, block_table)
        bound_mods = cache_modifications(modifications, widened(q), capacity, causal=causal)
        sums = xp.zeros((len(q), q.shape[2], capacity), np.float64)
        for each in of_cached_sequences(
            *(q, k_cache, cache_seqlens),
            cache_batch_idx=cache_batch_idx,
            block_table=block_table,
            k_scale=k_scale,
        ):
            sums[each.rows, :, each.keys] = _sums(
                *(each.q, each.k, queries),
                causal=causal,
                softmax_scale=softmax_scale,
                q_offset=None,
                bound_mods=bound_mods,
                sequence=each.sequence,
            )
        return convert(_rounded(sums, dtype, k_cache.shape[2] if grouped else None))


def _sums(
    q: Any,
    k: Any,
    queries: slice,
    *,
    causal: bool,
    softmax_scale: float | None,
    q_offset: int | None,
    bound_mods: BoundModifications,
    sequence: Pairs = FIRST_PAIR,
) -> Any:
    """Return the sums for each query head, (batch, heads_q, seqlen_k), in float64.

    Parameters
    ----------
    q, k : arrays, shape (batch, heads, seqlen, dim)
        Queries and keys, of all sequences or of a single one.
    queries
        Queries that count, among those that `seqused_q` says are used.
    causal, softmax_scale, q_offset, bound_mods
        See `resolve`, and modifications of the call.
    sequence
        Index of the first sequence, and its first rows in packed arrays.
    """
    xp, (batch, heads_q, seqlen_q, _), seqlen_k = array_module(q), q.shape, k.shape[2]
    used = seqlen_q
    if bound_mods.scores.seqused_q is not None:
        used = min(max(int(bound_mods.scores.seqused_q[sequence.b]), 0), seqlen_q)
    scale, visible = resolve(q, k, softmax_scale, causal, q_offset)
    sinks = sinks_of(xp, bound_mods, heads_q, np.float64)
    selection = Selection(np.arange(heads_q), np.arange(used)[queries], heads_q)
    chosen = q[:, :, :used][:, :, queries]
    sums = xp.zeros((batch, heads_q, seqlen_k), np.float64)
    for rows in chunks_of_rows(
        *(xp, chosen, k, visible, bound_mods), sequence=sequence, selection=selection
    ):
        if rows.end == 0:
            continue
        with np.errstate(all="ignore"):
            weights = row_weights(rows, chosen, k, scale, bound_mods, sinks, xp)
            sums[rows.b, rows.head, : rows.end] += weights.sum(axis=0)
    return sums


def _rounded(sums: Any, dtype: np.dtype[Any], heads_kv: int | None) -> Any:
    """Return the sums of each query head in a dtype, or those of `heads_kv` groups of heads."""
    if heads_kv is not None:
        batch, heads_q, keys = sums.shape
        sums = sums.reshape(batch, heads_kv, heads_q // heads_kv, keys).sum(axis=2)
    with np.errstate(all="ignore"):
        return sums.astype(dtype, copy=False)
