"""Public functions that sum the attention weights of each key over the queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupy_flash.calls.arguments import ReceivedArguments, given_lengths
from cupy_flash.calls.dispatch_received import on_gpu, require_valid
from cupy_flash.calls.options import Options
from cupy_flash.opaque import opaque
from cupy_flash.problem.values import check_bool, integer
from cupy_flash.reference.weights.received import (
    cached_received_weights,
    packed_received_weights,
    received_weights,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import CacheModifications, Modifications, PackedModifications

# Largest index of a query that kernels take; no sequence is longer.
_LAST = 2**31 - 1


@opaque
def attention_received(
    q: Any,
    k: Any,
    *,
    lse: Any | None = None,
    queries: slice | None = None,
    grouped: bool = False,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    stream: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute how much attention each key receives: the sum of its weights over the queries.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    The sums are those of ``attention_weights(q, k, ...)`` along the axis of queries, without the
    weights themselves. Methods that evict keys from a cache rank keys by them: H2O by the sum over
    all queries, SnapKV by the sum over the last ones.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries in float16, bfloat16, float32 or float64, of any array type and with any batch axes
        that `flash_attention` takes.
    k : array, shape (batch, seqlen_k, heads_kv, head_dim)
        Keys, with the dtype and the array type of q.
    lse : float32 or float64 array, shape (batch, heads_q, seqlen_q), optional
        Log-sum-exp that `flash_attention` returns for the same arguments; float64 for float64
        inputs. Without it, a forward pass computes it first. The CPU does not read it.
    queries : slice, optional
        Queries whose weights are summed, such as ``slice(-32, None)`` for the last 32; consecutive
        ones. By default all.
    grouped : bool
        Whether to add up the sums of the query heads of each KV head.
    causal, softmax_scale, q_offset, layout, stream
        See `flash_attention`.
    **modifications
        Masks and changes of scores, see `Modifications`.

    Returns
    -------
    received : float32 or float64 array, shape (batch, heads_q or heads_kv, seqlen_k)
        Sums of weights, with the array type of q; float64 for float64 inputs. The axes have this
        order for both layouts. If `grouped`, there is one sum for each KV head.

    Raises
    ------
    TypeError
        If an input is not an array or has a wrong dtype, `queries` is not a slice, or a
        modification has a wrong type.
    ValueError
        If the shapes or the layout are wrong, `queries` has a step, or the shape of a modification
        does not fit.
    UnsupportedError
        If `stream` is given, and no GPU can be used.

    Notes
    -----
    On a GPU, one kernel computes the scores tile by tile, and sums in float32, or float64 for
    float64 inputs. On the CPU, and with dropout, array operations compute chunks of weights in
    float64. Either way the memory grows with the lengths of the sequences, not with their product.

    References
    ----------
    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
    Models" (2023). Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation"
    (2024).

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import attention_received
    >>> q = k = np.ones((1, 3, 1, 8), np.float32)
    >>> attention_received(q, k, causal=True).round(3)
    array([[[1.833, 0.833, 0.333]]], dtype=float32)
    """
    chosen = _consecutive(queries)
    shape = getattr(q, "shape", ())
    seqlen = shape[-2 if layout == "bhsd" else -3] if len(shape) >= 3 else 0
    first, last, _ = chosen.indices(int(seqlen))
    options = Options(
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        layout=layout,
        received=(_kind(grouped), first, max(first, last)),
    )
    arguments = ReceivedArguments(q, k, lse)
    result = on_gpu(arguments, options, modifications, stream=stream)
    if result is not None:
        return result
    return received_weights(
        *(q, k),
        queries=chosen,
        grouped=bool(grouped),
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        layout=layout,
        stream=stream,
        modifications=modifications,
    )


@opaque
def attention_received_varlen(
    q: Any,
    k: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    lse: Any | None = None,
    queries: slice | None = None,
    grouped: bool = False,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any | None = None,
    k_scale: Any | None = None,
    stream: Any | None = None,
    **modifications: Unpack[PackedModifications],
) -> Any:
    """Compute `attention_received` for packed sequences, such as at the end of a prefill.

    Parameters
    ----------
    q : array, shape (total_q, heads_q, head_dim)
        Queries of all sequences in float16, bfloat16, float32 or float64.
    k : array, shape (total_k, heads_kv, head_dim)
        Keys, with the dtype and the array type of q, or 8 bits (int8 or float8_e4m3fn).
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        See `flash_attention_varlen`; pages are not supported.
    lse : float32 or float64 array, shape (heads_q, total_q), optional
        Log-sum-exp that `flash_attention_varlen` returns for the same arguments; float64 for
        float64 inputs. Without it, a forward pass computes it first. The CPU does not read it.
    queries : slice, optional
        Queries of each sequence whose weights are summed, such as ``slice(-32, None)`` for the last
        32 of every sequence; consecutive ones. By default all. With ``seqused_q``, only the queries
        in use count, and negative indices count from the last of these.
    grouped : bool
        Whether to add up the sums of the query heads of each KV head.
    causal, softmax_scale, stream
        See `flash_attention_varlen`.
    seqused_k : array of integers, shape (batch,), optional
        Number of keys of each sequence, at most the difference in cu_seqlens_k.
    k_scale : float32 array, or number, optional
        Scales of 8-bit keys, see `flash_attention_varlen`.
    **modifications
        Masks and changes of scores, see `Modifications`.

    Returns
    -------
    received : float32 or float64 array, shape (heads_q or heads_kv, total_k)
        Sums of weights, with the array type of q; float64 for float64 inputs. Keys that belong to
        no sequence have 0. If `grouped`, there is one sum for each KV head.

    Raises
    ------
    TypeError
        If an argument has a wrong array type or dtype, or `queries` is not a slice.
    ValueError
        If shapes do not match, a value is wrong, or `queries` has a step; and if NumPy arrays hold
        lengths or offsets that are out of range or exceed max_seqlen_q or max_seqlen_k.
    UnsupportedError
        If `stream` is given, and no GPU can be used.

    Notes
    -----
    The kernels are those of `attention_received`. On the CPU, with dropout and for 8-bit keys,
    array operations compute the sums sequence by sequence; on a GPU they wait for the lengths. The
    contents of arrays on a GPU are not checked on the host, see `flash_attention_varlen`.

    References
    ----------
    Li et al., see `attention_received`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import attention_received_varlen
    >>> q = k = np.ones((5, 1, 8), np.float32)
    >>> ends = [0, 2, 5]
    >>> last = slice(-1, None)
    >>> attention_received_varlen(q, k, ends, ends, 3, 3, causal=True, queries=last).round(3)
    array([[0.5  , 0.5  , 0.333, 0.333, 0.333]], dtype=float32)
    """
    chosen = _consecutive(queries)
    options = Options(
        "varlen",
        causal=causal,
        softmax_scale=softmax_scale,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        received=(_kind(grouped), *_of_each_sequence(chosen)),
    )
    arguments = ReceivedArguments(
        *(q, k, lse),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        k_scale=k_scale,
    )
    result = on_gpu(arguments, options, modifications, stream=stream)
    if result is not None:
        return result
    require_valid(arguments, options, modifications, stream=stream)
    return packed_received_weights(
        *(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        seqused_k=seqused_k,
        k_scale=k_scale,
        queries=chosen,
        grouped=bool(grouped),
        causal=causal,
        softmax_scale=softmax_scale,
        stream=stream,
        modifications=modifications,
    )


@opaque
def attention_received_with_kvcache(
    q: Any,
    k_cache: Any,
    *,
    cache_seqlens: Any,
    cache_batch_idx: Any | None = None,
    block_table: Any | None = None,
    k_scale: Any | None = None,
    lse: Any | None = None,
    queries: slice | None = None,
    grouped: bool = False,
    causal: bool = False,
    softmax_scale: float | None = None,
    stream: Any | None = None,
    **modifications: Unpack[CacheModifications],
) -> Any:
    """Compute `attention_received` for the keys of a cache, such as after each decoding step.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries in float16, bfloat16, float32 or float64. If the decoding step rotates its queries,
        they have to be rotated here, see `apply_rotary`.
    k_cache : array, shape (caches, seqlen_cache, heads_kv, head_dim)
        Keys; with block_table (pages, page_size, heads_kv, head_dim). Array type and dtype of q, or
        8 bits (int8 or float8_e4m3fn). It is not written.
    cache_seqlens : int or array of integers, shape (batch,)
        Lengths of the cached sequences: those after the decoding step has appended its rows.
    cache_batch_idx, block_table
        See `flash_attention_with_kvcache`.
    k_scale : float32 array, or number, optional
        Scales of an 8-bit cache, see `flash_attention_with_kvcache`.
    lse : float32 or float64 array, shape (batch, heads_q, seqlen_q), optional
        Log-sum-exp that `flash_attention_with_kvcache` returns for the same queries and cache;
        float64 for float64 inputs. Without it, a forward pass computes it first. The CPU does not
        read it.
    queries : slice, optional
        Queries whose weights are summed; consecutive ones. By default all.
    grouped : bool
        Whether to add up the sums of the query heads of each KV head.
    causal, softmax_scale, stream
        See `flash_attention_with_kvcache`.
    **modifications
        Masks and changes of scores, see `Modifications`.

    Returns
    -------
    received : float32 or float64 array, shape (batch, heads_q or heads_kv, capacity)
        Sums of weights, with the array type of q; float64 for float64 inputs. The capacity is
        seqlen_cache or max_pages * page_size. Positions past the length of a sequence have 0. If
        `grouped`, there is one sum for each KV head.

    Raises
    ------
    TypeError
        If an argument has a wrong array type or dtype, or `queries` is not a slice.
    ValueError
        If shapes do not match, a value is wrong, or `queries` has a step; and if lengths, cache or
        page indices are out of range, as far as they are Python integers or NumPy arrays.
    UnsupportedError
        If `stream` is given and no GPU can be used; and for dropout.

    Notes
    -----
    The kernels are those of `attention_received`. On the CPU, for 8-bit caches, and for float32 or
    float64 pages of another size than a multiple of 16 rows, array operations compute the sums
    sequence by sequence; on a GPU they wait for the lengths. The contents of arrays on a GPU are
    not checked on the host, see `flash_attention_with_kvcache`.

    References
    ----------
    Zhang et al., see `attention_received`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import attention_received_with_kvcache
    >>> q, k_cache = np.ones((1, 1, 2, 8), np.float32), np.ones((1, 4, 1, 8), np.float32)
    >>> attention_received_with_kvcache(q, k_cache, cache_seqlens=2, grouped=True).round(3)
    array([[[1., 1., 0., 0.]]], dtype=float32)
    """
    chosen = _consecutive(queries)
    keys, lengths = given_lengths(cache_seqlens)
    options = Options(
        "kvcache",
        causal=causal,
        softmax_scale=softmax_scale,
        received=(_kind(grouped), *_of_each_sequence(chosen)),
    )
    arguments = ReceivedArguments(
        q,
        lse=lse,
        block_table=block_table,
        k_scale=k_scale,
        k_cache=k_cache,
        cache_seqlens=lengths,
        cache_batch_idx=cache_batch_idx,
    )
    result = on_gpu(arguments, options, modifications, keys, stream)
    if result is not None:
        return result
    require_valid(arguments, options, modifications, keys, stream)
    return cached_received_weights(
        *(q, k_cache),
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
        k_scale=k_scale,
        queries=chosen,
        grouped=bool(grouped),
        causal=causal,
        softmax_scale=softmax_scale,
        stream=stream,
        modifications=modifications,
    )


def _kind(grouped: bool) -> str:
    """Return the kind of heads of the result, see `Problem.received`."""
    check_bool("grouped", grouped)
    return "groups" if grouped else "heads"


def _consecutive(queries: slice | None) -> slice:
    """Return the argument `queries`, by default all; raise an error unless it is a plain slice."""
    chosen = slice(None) if queries is None else queries
    if not isinstance(chosen, slice):
        raise TypeError(f"queries is {queries!r}; expected a slice, such as slice(-32, None)")
    if chosen.step not in (None, 1):
        raise ValueError(f"queries is {queries!r}; expected consecutive queries, without a step")
    for end in (chosen.start, chosen.stop):
        if end is not None:
            integer("queries", end)
    return chosen


def _of_each_sequence(queries: slice) -> tuple[int, int]:
    """Return the first query and the one after the last as indices that fit 32 bits."""
    ends = (0 if queries.start is None else queries.start, queries.stop)
    first, last = (_LAST if end is None else min(max(int(end), -_LAST), _LAST) for end in ends)
    return first, last
