"""The attention formula over packed, cached and paged sequences: what results are compared with.

One call of :func:`~cupy_flash.reference.attention_reference` for each sequence, in float64, on the
kinds of array that it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import read, way_back
from cupy_flash.arrays.strided import array_module, dtype_name
from cupy_flash.host import quantized, sequence_places
from cupy_flash.host.passes import FIRST
from cupy_flash.host.quantized import QuantizedBlocks
from cupy_flash.host.rotary import rotated
from cupy_flash.host.sequence_places import (
    Keys,
    Queries,
    find_cached_keys,
    find_packed_keys,
    find_queries,
    longer,
)
from cupy_flash.mods.modified import Modified
from cupy_flash.mods.scores import Pairs
from cupy_flash.mods.shapes import Sizes, refuse_seqlens
from cupy_flash.problem.arrays import LARGEST_QUANTIZED
from cupy_flash.reference.dense import formula
from cupy_flash.reference.modifications import fitting_modifications, integers, read_scale

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications


class KVCacheResult(NamedTuple):
    """What :func:`attention_with_kvcache_reference` gives.

    Attributes
    ----------
    out : float64 array, (batch, seqlen_q, heads_q, head_dim_v)
    lse : float64 array, (batch, heads_q, seqlen_q)
    k_cache, v_cache : arrays
        The caches after the append, of their own dtype.
    k_scale, v_scale : arrays, or None
        The scales after the append, of each row where they are computed.
    """

    out: Any
    lse: Any
    k_cache: Any
    v_cache: Any
    k_scale: Any = None
    v_scale: Any = None


def attention_varlen_reference(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any = None,
    block_table: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    **modifications: Unpack[Modifications],
) -> tuple[Any, Any]:
    """Attention of sequences packed one behind the other, in float64 by the plain formula.

    Parameters
    ----------
    q : array, (total_q, heads_q, head_dim)
        Queries, of any float dtype.
    k : same kind of array, (total_k, heads_kv, head_dim)
        Keys; with ``block_table`` (pages, page_size, heads_kv, head_dim).
    v : same kind of array, (total_k, heads_kv, head_dim_v)
        Values; with ``block_table`` (pages, page_size, heads_kv, head_dim_v).
    cu_seqlens_q : integer array, (batch + 1,)
        Sequence ``b`` has the rows from ``cu_seqlens_q[b]`` up to ``cu_seqlens_q[b + 1]`` of q.
        These integers, as the others, may be of any kind, whatever q is.
    cu_seqlens_k : integer array, (batch + 1,), or None
        Likewise for k and v; with ``block_table`` only the differences count. None, which needs a
        ``block_table``, counts ``max_seqlen_k`` keys.
    max_seqlen_q, max_seqlen_k : int
        No more rows of a sequence than these are looked at.
    causal : bool
        Query ``i`` of a sequence sees only its keys ``j <= i + seqlen_k - seqlen_q``.
    softmax_scale : float, optional
        Factor on the scores; ``1 / sqrt(head_dim)`` if not given.
    seqused_k : integer array, (batch,), optional
        The number of keys of each sequence, in place of the difference in ``cu_seqlens_k``.
    block_table : integer array, (batch, max_pages), optional
        The pages of each sequence in order.
    k_scale, v_scale : numbers or float32 arrays, optional
        Of keys and values of 8 bits, broadcast to (total_k, heads_kv) or (pages, page_size,
        heads_kv).
    **modifications
        As of :func:`~cupy_flash.reference.attention_reference`; without seqlens_k.

    Returns
    -------
    out : float64 array, (total_q, heads_q, head_dim_v)
        NaN in the rows of no sequence.
    lse : float64 array, (heads_q, total_q)
        Natural logarithm; likewise.

    Notes
    -----
    What the integers hold is not checked, on the host either, but clamped as a GPU does it, so that
    nothing outside of the arrays is read: rows are clamped to [0, total], lengths to
    [0, max_seqlen] and to what the array or the pages hold, a decreasing pair is an empty sequence,
    and a page outside of [0, pages) reads as zeros. Where sequences overlap in q, the last one
    counts.
    """
    convert = way_back("q", q)
    q, k, v = (read(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    k_scale, v_scale = read_scale("k_scale", k_scale), read_scale("v_scale", v_scale)
    xp = array_module(q)
    out = xp.full((*q.shape[:2], v.shape[-1]), np.nan, np.float64)
    lse = xp.full((q.shape[1], q.shape[0]), np.nan, np.float64)
    modified = packed_modifications(
        modifications, q, cu_seqlens_q, max_seqlen_q, max_seqlen_k, causal=causal
    )
    k_blocks, v_blocks = (
        _standing_for(x if block_table is not None else x[None], scale)
        for x, scale in ((k, k_scale), (v, v_scale))
    )
    for found, keys, at in packed_sequences(
        *(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        seqused_k=seqused_k,
        block_table=block_table,
    ):
        k_own, v_own = (sequence_places.read(x, keys) for x in (k_blocks, v_blocks))
        one = q[found.rows], k_own, v_own
        one_out, one_lse = _of_sequence(*one, causal, softmax_scale, modified, at)
        out[found.rows], lse[:, found.rows] = one_out, one_lse
    return convert(out), convert(lse)


def packed_modifications(
    modifications: Mapping[str, Any],
    q: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
) -> Modified:
    """`fitting_modifications` of packed sequences."""
    total_q, heads_q, _ = q.shape
    refuse_seqlens(modifications.get("seqlens_k"), "seqused_k")
    batch = len(integers(cu_seqlens_q)) - 1
    sizes = Sizes(dtype_name(q), batch, heads_q, max_seqlen_q, max_seqlen_k, total_q)
    return fitting_modifications(modifications, sizes, causal=causal)


def packed_sequences(
    q: Any,
    k: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Any,
    block_table: Any = None,
) -> Iterator[tuple[Queries, Keys, Pairs]]:
    """Where each sequence's rows and keys lie, and its number and beginning for modifications."""
    cu_seqlens_q = integers(cu_seqlens_q)
    paged = block_table is not None
    queries = find_queries(cu_seqlens_q, len(q), max_seqlen_q)
    places = find_packed_keys(
        integers(cu_seqlens_k),
        max_seqlen_k,
        batch=len(cu_seqlens_q) - 1,
        total_k=0 if paged else len(k),
        page_size=k.shape[1] if paged else 0,
        seqused_k=integers(seqused_k),
        block_table=integers(block_table),
    )
    for b, (found, keys) in enumerate(zip(queries, places, strict=True)):
        k_start = 0 if paged else keys.first
        yield found, keys, FIRST._replace(b=b, q_start=found.first, k_start=k_start)


def keys_of(x: Any, keys: Keys) -> Any:
    """Of packed k, v or a gradient, the rows of one sequence: a view."""
    return sequence_places.read(x[None], keys)


def attention_with_kvcache_reference(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    cache_seqlens: Any,
    cache_batch_idx: Any = None,
    block_table: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = True,
    k_scale: Any = None,
    v_scale: Any = None,
    compute_scales: bool = False,
    causal: bool = False,
    softmax_scale: float | None = None,
    **modifications: Unpack[Modifications],
) -> KVCacheResult:
    """Attention over a cache after appending to it, in float64 by the plain formula.

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads_q, head_dim)
        Queries, of any float dtype.
    k_cache : same kind of array, (caches, seqlen_cache, heads_kv, head_dim)
        Keys; with ``block_table`` (pages, page_size, heads_kv, head_dim).
    v_cache : same kind of array, (caches, seqlen_cache, heads_kv, head_dim_v)
        Values; with ``block_table`` (pages, page_size, heads_kv, head_dim_v).
    k, v : same kind of array, (batch, seqlen_new, heads_kv, dim), optional
        Appended behind the rows that ``cache_seqlens`` counts.
    cache_seqlens : int or integer array, (batch,)
        Rows of each sequence in the cache before the append. These integers, as the others, may be
        of any kind, whatever q is.
    cache_batch_idx : integer array, (batch,), optional
        The index of each sequence's cache; 0, 1, ... if not given.
    block_table : integer array, (batch, max_pages), optional
        The pages of each sequence in order.
    rotary_cos, rotary_sin : same kind of array as q, (rows, rotary_dim / 2), optional
        Turn the first ``rotary_dim`` columns of the new keys, row ``j`` at position
        ``cache_seqlens[b] + j``, and of the queries, row ``i`` at ``cache_seqlens[b] + i`` if
        ``causal``, else all at ``cache_seqlens[b]``.
    rotary_interleaved : bool
        Whether columns (2i, 2i + 1) are a pair; else (i, i + rotary_dim / 2) are.
    k_scale, v_scale : numbers or float32 arrays, optional
        Of caches of 8 bits, broadcast to (caches, seqlen_cache, heads_kv) or (pages, page_size,
        heads_kv).
    compute_scales : bool
        Whether the scales of new rows are computed, and written.
    causal : bool
        Query ``i`` sees only the keys ``j <= i + seqlen_k - seqlen_q``, with ``seqlen_k`` counted
        after the append.
    softmax_scale : float, optional
        Factor on the scores; ``1 / sqrt(head_dim)`` if not given.
    **modifications
        As of :func:`~cupy_flash.reference.attention_reference`; without seqlens_k.

    Returns
    -------
    KVCacheResult
        ``out``, ``lse`` and new caches; the arguments are left alone.

    Notes
    -----
    New keys are turned in float64 and then rounded to the cache's dtype, for that is what a cache
    holds. Turned queries stay in float64: rounding them is an error of an implementation like any
    other, which :func:`~cupy_flash.reference.attention_naive` on rounded ones shows the size of.

    What the integers hold is not checked, on the host either, but clamped as a GPU does it, so that
    nothing outside of the arrays is read or written: lengths are clamped to [0, capacity], which is
    ``seqlen_cache`` or ``max_pages * page_size``; rows past it are not appended. A
    ``cache_batch_idx`` that is no index leaves the sequence without keys. A page outside of
    [0, pages) reads as zeros, and nothing is appended to it. Positions outside of the rotary table
    take the nearest row of it.
    """
    convert, block_table = way_back("q", q), integers(block_table)
    k_scale, v_scale = read_scale("k_scale", k_scale), read_scale("v_scale", v_scale)
    q, k_cache, v_cache = (
        read(name, x) for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache))
    )
    k, v, rotary_cos, rotary_sin = (
        None if x is None else read(name, x)
        for name, x in (("k", k), ("v", v), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin))
    )
    xp = array_module(q)
    batch, seqlen_q, heads_q, _ = q.shape
    lengths = np.broadcast_to(integers(cache_seqlens), (batch,))
    before = list(
        find_cached_keys(
            lengths,
            cache_shape=k_cache.shape,
            cache_batch_idx=None if cache_batch_idx is None else integers(cache_batch_idx),
            block_table=block_table,
        )
    )
    if rotary_cos is not None:
        rotate = functools.partial(
            rotated,
            cos=rotary_cos,
            sin=rotary_sin,
            first_positions=np.array([keys.seqlen for keys in before], np.int64),
            interleaved=rotary_interleaved,
            compute=np.float64,
        )
        q = rotate(q, advance=causal)
        k = rotate(k, advance=True).astype(k.dtype)
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    is_quantized = dtype_name(k_cache) in LARGEST_QUANTIZED
    k_scale, v_scale = (
        _scales(scale, k_cache, of_rows=compute_scales) if is_quantized else None
        for scale in (k_scale, v_scale)
    )
    caches = (k_cache, k_scale, k), (v_cache, v_scale, v)
    for cache, scale, new in caches if k is not None else ():
        for b, keys in enumerate(before):
            if is_quantized:
                quantized.append(cache, scale, keys, new[b], compute_scales=compute_scales)
            else:
                sequence_places.append(cache, keys, new[b])
    k_blocks, v_blocks = (
        QuantizedBlocks(cache, scale, xp.float64) if is_quantized else cache
        for cache, scale, _ in caches
    )
    out = xp.empty((batch, seqlen_q, heads_q, v_cache.shape[-1]), np.float64)
    lse = xp.empty((batch, heads_q, seqlen_q), np.float64)
    refuse_seqlens(modifications.get("seqlens_k"), "cache_seqlens")
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    sizes = Sizes(dtype_name(q), batch, heads_q, seqlen_q, capacity)
    modified = fitting_modifications(modifications, sizes, causal=causal)
    for b, keys in enumerate(before):
        after = longer(keys, 0 if k is None else k.shape[1])
        one = (q[b], sequence_places.read(k_blocks, after), sequence_places.read(v_blocks, after))
        at = FIRST._replace(b=b)
        out[b], lse[b] = _of_sequence(*one, causal, softmax_scale, modified, at)
    scales = (None if x is None else convert(x) for x in (k_scale, v_scale))
    return KVCacheResult(*map(convert, (out, lse, k_cache, v_cache)), *scales)


def _standing_for(blocks: Any, scale: Any) -> Any:
    """What keys or values of 8 bits stand for; others as they are."""
    if dtype_name(blocks) not in LARGEST_QUANTIZED:
        return blocks
    scales = _scales(scale, blocks, of_rows=False)
    return QuantizedBlocks(blocks, scales, array_module(blocks).float64)


def _scales(scale: Any, cache: Any, *, of_rows: bool) -> Any:
    """A copy of a cache's scales, 1 if not given; with `of_rows` one for each row and head."""
    xp = array_module(cache)
    scales = xp.array(1 if scale is None else scale, xp.float32)
    return xp.array(xp.broadcast_to(scales, cache.shape[:3])) if of_rows else scales


def _of_sequence(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    softmax_scale: float | None,
    modified: Modified,
    at: Pairs,
) -> tuple[Any, Any]:
    """Output and lse of one sequence, whose arrays are (seqlen, heads, dim)."""
    out, lse = formula(
        *(x[None].swapaxes(1, 2) for x in (q, k, v)),
        causal=causal,
        softmax_scale=softmax_scale,
        modified=modified,
        sequence=at,
    )
    return out[0].swapaxes(0, 1), lse[0]
