"""Attention weights of chosen query rows and heads of packed and cached sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module
from cupy_flash.opaque import opaque
from cupy_flash.problem.values import count
from cupy_flash.reference.eight_bits import widened
from cupy_flash.reference.modifications import integers
from cupy_flash.reference.packed import cache_modifications, capacity_of, packed_modifications
from cupy_flash.reference.rows import Selection, precision_of
from cupy_flash.reference.weights.chosen import indices_of, weights_of_rows
from cupy_flash.reference.weights.sequences import of_cached_sequences, of_packed_sequences

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import CacheModifications, PackedModifications


@opaque
def attention_weights_varlen(
    q: Any,
    k: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    queries: Any = None,
    heads: Any = None,
    top_k: int | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any = None,
    block_table: Any = None,
    k_scale: Any | None = None,
    stream: Any | None = None,
    **modifications: Unpack[PackedModifications],
) -> Any:
    """Compute `attention_weights` of chosen rows of packed sequences.

    Parameters
    ----------
    q : array, shape (total_q, heads_q, head_dim)
        Queries of all sequences, of any float dtype.
    k : array, shape (total_k, heads_kv, head_dim) or (pages, page_size, heads_kv, head_dim)
        Keys; in pages if block_table is given. They may have 8 bits.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        See `attention_varlen_reference`.
    queries : int, slice, or list or integer array with one axis, optional
        Indices of the rows of q, in any order and with repetitions; by default all. Negative
        indices count from the last row.
    heads : int, slice, or list or integer array with one axis, optional
        Indices of the query heads, likewise.
    top_k : int, optional
        Number of keys per row whose weights are returned. The default returns the weights of all
        keys, which takes memory for all of these pairs.
    causal, softmax_scale, seqused_k, block_table, k_scale, stream
        See `attention_varlen_reference`.
    **modifications
        Masks and changes of scores, see `Modifications`.

    Returns
    -------
    weights : float32 or float64 array, shape (heads, queries, max_seqlen_k)
        Weights of the keys of the row's own sequence, with the array type of q; float64 if q is
        float64. They are 0 past the sequence's last key, and in rows that belong to no sequence.
        With ``top_k``, the last axis has length ``min(top_k, max_seqlen_k)``, and the weights of a
        row are in descending order.
    keys : int64 array, shape (heads, queries, min(top_k, max_seqlen_k))
        Indices of the keys of these weights within their sequences; only with ``top_k``. See
        `attention_weights` for keys with equal weights.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        See `attention_weights`.

    Notes
    -----
    The contents of lengths and offsets are clamped, see `attention_varlen_reference`. If q is on a
    GPU, the call waits for them.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import attention_weights_varlen
    >>> q = k = np.ones((5, 1, 8), np.float32)
    >>> ends = [0, 2, 5]
    >>> attention_weights_varlen(q, k, ends, ends, 3, 3, causal=True, queries=[1, -1])
    array([[[0.5       , 0.5       , 0.        ],
            [0.33333334, 0.33333334, 0.33333334]]], dtype=float32)
    """
    with on_stream(stream, q):
        convert, block_table = result_converter("q", q), integers(block_table)
        q, k = read("q", q), read("k", k)
        xp, (total_q, heads_q, _) = array_module(q), q.shape
        bound_mods = packed_modifications(
            modifications, widened(q), cu_seqlens_q, max_seqlen_q, max_seqlen_k, causal=causal
        )
        rows = indices_of("queries", queries, total_q)
        chosen_heads = indices_of("heads", heads, heads_q)
        results = _no_weights(xp, (len(chosen_heads), len(rows)), max_seqlen_k, top_k, q.dtype)
        for each in of_packed_sequences(
            *(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            seqused_k=seqused_k,
            k_scale=k_scale,
            block_table=block_table,
        ):
            of_sequence = np.flatnonzero((rows >= each.rows.start) & (rows < each.rows.stop))
            selection = Selection(chosen_heads, rows[of_sequence] - each.rows.start, heads_q)
            found = weights_of_rows(
                *(each.q, each.k, selection, results[0].dtype),
                top_k=None if top_k is None else count("top_k", top_k),
                causal=causal,
                softmax_scale=softmax_scale,
                q_offset=None,
                bound_mods=bound_mods,
                sequence=each.sequence,
            )
            for result, part in zip(results, found, strict=True):
                result[:, xp.asarray(of_sequence), : part.shape[-1]] = part[0]
        results = tuple(map(convert, results))
        return results[0] if top_k is None else results


@opaque
def attention_weights_with_kvcache(
    q: Any,
    k_cache: Any,
    *,
    cache_seqlens: Any,
    cache_batch_idx: Any = None,
    block_table: Any = None,
    k_scale: Any | None = None,
    queries: Any = None,
    heads: Any = None,
    top_k: int | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    stream: Any | None = None,
    **modifications: Unpack[CacheModifications],
) -> Any:
    """Compute `attention_weights` of chosen rows over the keys of a cache.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries, of any float dtype. If the decoding step rotates its queries, they have to be
        rotated here, see `apply_rotary`.
    k_cache : array, shape (caches, seqlen_cache, heads_kv, head_dim)
        Keys; with ``block_table`` (pages, page_size, heads_kv, head_dim). They may have 8 bits.
    cache_seqlens : int or integer array, shape (batch,)
        Number of rows of each sequence: after the decoding step has appended its rows.
    cache_batch_idx, block_table, k_scale
        See `attention_with_kvcache_reference`.
    queries : int, slice, or list or integer array with one axis, optional
        Indices of the query rows, see `attention_weights`.
    heads : int, slice, or list or integer array with one axis, optional
        Indices of the query heads, likewise.
    top_k : int, optional
        Number of keys per row whose weights are returned. The default returns the weights of all
        keys, which takes memory for all of these pairs.
    causal, softmax_scale, stream
        See `attention_with_kvcache_reference`.
    **modifications
        Masks and changes of scores, see `Modifications`.

    Returns
    -------
    weights : float32 or float64 array, shape (batch, heads, queries, capacity)
        Weights, with the array type of q; float64 if q is float64. The capacity is ``seqlen_cache``
        or ``max_pages * page_size``. Positions past the length of a sequence have 0. With
        ``top_k``, the last axis has length ``min(top_k, capacity)``, and the weights of a row are
        in descending order.
    keys : int64 array, shape (batch, heads, queries, min(top_k, capacity))
        Positions of the keys of these weights; only with ``top_k``. See `attention_weights` for
        keys with equal weights.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        See `attention_weights`; UnsupportedError also for dropout.

    Notes
    -----
    The contents of lengths and indices are clamped, see `attention_with_kvcache_reference`. If q is
    on a GPU, the call waits for them.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import attention_weights_with_kvcache
    >>> q, k_cache = np.ones((1, 1, 1, 8), np.float32), np.ones((1, 4, 1, 8), np.float32)
    >>> attention_weights_with_kvcache(q, k_cache, cache_seqlens=2)
    array([[[[0.5, 0.5, 0. , 0. ]]]], dtype=float32)
    """
    with on_stream(stream, q):
        convert, block_table = result_converter("q", q), integers(block_table)
        q, k_cache = read("q", q), read("k_cache", k_cache)
        xp, (batch, seqlen_q, heads_q, _) = array_module(q), q.shape
        capacity = capacity_of(k_cache, block_table)
        bound_mods = cache_modifications(modifications, widened(q), capacity, causal=causal)
        selection = Selection(
            indices_of("heads", heads, heads_q), indices_of("queries", queries, seqlen_q), heads_q
        )
        shape = batch, len(selection.heads), len(selection.queries)
        results = _no_weights(xp, shape, capacity, top_k, q.dtype)
        for each in of_cached_sequences(
            *(q, k_cache, cache_seqlens),
            cache_batch_idx=cache_batch_idx,
            block_table=block_table,
            k_scale=k_scale,
        ):
            found = weights_of_rows(
                *(each.q, each.k, selection, results[0].dtype),
                top_k=None if top_k is None else count("top_k", top_k),
                causal=causal,
                softmax_scale=softmax_scale,
                q_offset=None,
                bound_mods=bound_mods,
                sequence=each.sequence,
            )
            for result, part in zip(results, found, strict=True):
                result[each.rows, ..., : part.shape[-1]] = part
        results = tuple(map(convert, results))
        return results[0] if top_k is None else results


def _no_weights(
    xp: Any, shape: tuple[int, ...], keys: int, top_k: int | None, dtype: np.dtype[Any]
) -> tuple[Any, ...]:
    """Return weights of 0 and, with `top_k`, the indices of the first keys, for rows of a shape.

    The weights have the precision of q, whose dtype is given.
    """
    columns = keys if top_k is None else min(count("top_k", top_k), keys)
    weights = xp.zeros((*shape, columns), precision_of(dtype))
    if top_k is None:
        return (weights,)
    return weights, xp.zeros(weights.shape, np.int64) + xp.arange(columns)
