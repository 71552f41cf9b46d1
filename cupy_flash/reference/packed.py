"""Reference formula of attention for varlen and KV cache calls, with or without pages.

Each sequence is one call of :func:`~cupy_flash.reference.dense.formula` in float64. Arrays may be
of any type that :func:`~cupy_flash.reference.attention_reference` takes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module, dtype_name
from cupy_flash.mods.keywords import Window, refuse_dropout, window_of
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR, Pairs
from cupy_flash.mods.shapes import Sizes, refuse_other_lengths
from cupy_flash.opaque import opaque
from cupy_flash.problem.arrays import LARGEST_QUANTIZED
from cupy_flash.reference.dense import FormulaResult, formula
from cupy_flash.reference.eight_bits import (
    as_bytes,
    dequantized,
    largest_scales,
    quantized,
    widened,
)
from cupy_flash.reference.key_lists import dense_lists, packed_lists, read_meaning
from cupy_flash.reference.modifications import fitting_modifications, integers, read_scale
from cupy_flash.reference.rotary import rotated
from cupy_flash.reference.sequences import (
    Ints,
    cached_rows,
    flat,
    packed_spans,
    paged_rows,
    put,
    take,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import CacheModifications, PackedModifications


class KVCacheResult(NamedTuple):
    """Result of :func:`attention_with_kvcache_reference`.

    Attributes
    ----------
    out : float64 array, shape (batch, seqlen_q, heads_q, head_dim_v)
    lse : float64 array, shape (batch, heads_q, seqlen_q)
    k_cache, v_cache : arrays
        Caches after the append, of the dtype of the given caches.
    k_scale, v_scale : arrays, or None
        Scales after the append: one per row and head if the append computes them.
    """

    out: Any
    lse: Any
    k_cache: Any
    v_cache: Any
    k_scale: Any = None
    v_scale: Any = None


@opaque
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
    return_max_logits: bool = False,
    return_entropy: bool = False,
    stream: Any | None = None,
    key_indices: Any | None = None,
    key_indices_in: str = "sequence",
    **modifications: Unpack[PackedModifications],
) -> tuple[Any, ...]:
    """Compute attention on consecutively packed sequences, in float64 by the plain formula.

    Parameters
    ----------
    q : array, shape (total_q, heads_q, head_dim)
        Queries, of any float dtype.
    k : array, shape (total_k, heads_kv, head_dim)
        Keys; with ``block_table`` (pages, page_size, heads_kv, head_dim).
    v : array, shape (total_k, heads_kv, head_dim_v)
        Values; with ``block_table`` (pages, page_size, heads_kv, head_dim_v).
    cu_seqlens_q : integer array, shape (batch + 1,)
        Offsets of the sequences: ``b`` has rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1``
        of q. This and the other integer arrays may have any array type.
    cu_seqlens_k : integer array, shape (batch + 1,), or None
        Offsets of the sequences in k and v; with ``block_table`` only the differences are used.
        None, which requires a ``block_table``, stands for ``max_seqlen_k`` keys per sequence.
    max_seqlen_q, max_seqlen_k : int
        Maximum numbers of queries and keys of a sequence; further rows are ignored.
    causal : bool
        Whether query ``i`` of a sequence attends only to keys ``j <= i + seqlen_k - seqlen_q``.
    softmax_scale : float, optional
        Factor on the scores, by default ``1 / sqrt(head_dim)``.
    seqused_k : integer array, shape (batch,), optional
        Number of keys of each sequence, instead of the differences in ``cu_seqlens_k``.
    block_table : integer array, shape (batch, max_pages), optional
        Page numbers of each sequence, in order.
    k_scale, v_scale : numbers or float32 arrays, optional
        Scales of 8-bit keys and values, broadcast to (total_k, heads_kv) or (pages, page_size,
        heads_kv).
    return_max_logits, return_entropy : bool
        Whether to return the largest score of each query row, and the entropy of its weights, too.
    stream : stream, optional
        Stream to run on instead of the current one, see `cupy_flash.flash_attention`.
    key_indices : array of integers, optional
        Lists of the keys that each query attends to, see the function of the same call.
    key_indices_in : {"sequence", "pages"}
        Meaning of an index: its key's index in the sequence, or its row in all pages.
    **modifications
        Masks and changes of scores, see `cupy_flash.Modifications`; without seqlens_k.

    Returns
    -------
    out : float64 array, shape (total_q, heads_q, head_dim_v)
        Output. Rows that belong to no sequence are 0.
    lse : float64 array, shape (heads_q, total_q)
        Log-sum-exp, natural logarithm. It is -inf in rows that belong to no sequence.
    max_logits, entropy : float64 arrays, shape (heads_q, total_q)
        Row statistics, see `cupy_flash.flash_attention_varlen`; each only if requested.

    Notes
    -----
    The contents of integer arrays are not checked, not even on the host. They are clamped as on a
    GPU, so that no access is outside the arrays. Offsets are clamped to [0, total], and lengths to
    [0, max_seqlen] and to the rows of the array or of the pages. A decreasing pair of offsets is an
    empty sequence. A page outside [0, pages) reads as zeros. If sequences overlap in q, the last
    one determines the result.
    """
    with on_stream(stream, q):
        convert = result_converter("q", q)
        q, k, v = (read(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        q = widened(q)
        k_scale, v_scale = read_scale("k_scale", k_scale, q), read_scale("v_scale", v_scale, q)
        xp = array_module(q)
        out = xp.zeros((*q.shape[:2], v.shape[-1]), np.float64)
        lse = xp.full((q.shape[1], q.shape[0]), -np.inf, np.float64)
        max_logits, entropy = lse.copy(), xp.zeros_like(lse) if return_entropy else None
        bound_mods = packed_modifications(
            modifications, q, cu_seqlens_q, max_seqlen_q, max_seqlen_k, causal=causal
        )
        table, lists = integers(block_table), packed_lists(xp, key_indices)
        stored = [
            (x[None] if table is None else x, scale) for x, scale in ((k, k_scale), (v, v_scale))
        ]
        in_pages = read_meaning(key_indices_in, table is not None, causal, modifications)
        for rows, keys, sequence in packed_sequences(
            *(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            seqused_k=seqused_k,
            block_table=table,
        ):
            places = (
                np.arange(len(k)) if table is None else paged_rows(table[sequence.b], *k.shape[:2])
            )
            own = np.arange(k.shape[0] * k.shape[1]) if in_pages else places[keys]
            k_own, v_own = (standing_for(x, scale, own) for x, scale in stored)
            one = q[rows], k_own, v_own
            own_lists = None if lists is None else lists[None, :, rows]
            one_result = _sequence_result(
                *one, causal, softmax_scale, bound_mods, sequence, return_entropy, own_lists
            )
            out[rows], lse[:, rows], max_logits[:, rows], of_entropy = one_result
            if entropy is not None:
                entropy[:, rows] = of_entropy
        result = FormulaResult(out, lse, max_logits, entropy)
        requested = result.requested(True, return_max_logits, return_entropy)
        return tuple(map(convert, (out, *requested)))


def packed_modifications(
    modifications: Mapping[str, Any],
    q: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
) -> BoundModifications:
    """Return the modifications of a varlen call; see `fitting_modifications`."""
    total_q, heads_q, _ = q.shape
    refuse_other_lengths(modifications.get, "varlen")
    batch = len(integers(cu_seqlens_q)) - 1
    sizes = Sizes(dtype_name(q), batch, heads_q, max_seqlen_q, max_seqlen_k, total_q)
    return fitting_modifications(modifications, q, sizes, causal=causal)


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
) -> Iterator[tuple[slice, slice, Pairs]]:
    """Yield the query rows and the keys of each sequence, and its index and offsets as `Pairs`.

    Keys are given as rows of k, or as rows of the sequence's pages.
    """
    starts, counts = integers(cu_seqlens_q), integers(seqused_k)
    batch = len(starts) - 1
    if block_table is None:
        keys = packed_spans(integers(cu_seqlens_k), max_seqlen_k, len(k), counts)
    else:
        longest = min(max_seqlen_k, block_table.shape[1] * k.shape[1])
        if counts is None and cu_seqlens_k is None:
            counts = np.full(batch, longest)
        elif counts is None:
            counts = np.diff(np.maximum(integers(cu_seqlens_k).astype(np.int64), 0))
        keys = [slice(0, n) for n in np.clip(counts, 0, longest).tolist()]
    for b, rows in enumerate(packed_spans(starts, max_seqlen_q, len(q))):
        k_start = keys[b].start
        yield rows, keys[b], FIRST_PAIR._replace(b=b, q_start=rows.start, k_start=k_start)


def part_of(name: str, x: Any, rows: slice, keys: slice) -> Any:
    """Return the rows of one sequence as a view of shape (1, heads, seqlen, dim).

    `rows` and `keys` are the rows of queries and of keys. `name` is that of a packed array.
    """
    return x[keys if name in ("k", "v") else rows][None].swapaxes(1, 2)


@opaque
def attention_with_kvcache_reference(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    cache_seqlens: Any,
    cu_seqlens_k_new: Any = None,
    cache_batch_idx: Any = None,
    block_table: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    compute_scales: bool = False,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    stream: Any | None = None,
    key_indices: Any | None = None,
    key_indices_in: str = "sequence",
    **modifications: Unpack[CacheModifications],
) -> Any:
    """Compute attention to a KV cache after appending to it, in float64 by the plain formula.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries, of any float dtype.
    k_cache : array, shape (caches, seqlen_cache, heads_kv, head_dim)
        Keys; with ``block_table`` (pages, page_size, heads_kv, head_dim).
    v_cache : array, shape (caches, seqlen_cache, heads_kv, head_dim_v)
        Values; with ``block_table`` (pages, page_size, heads_kv, head_dim_v).
    k, v : array, shape (batch, seqlen_new, heads_kv, dim), optional
        New rows, which are appended after the rows that ``cache_seqlens`` counts.
    cache_seqlens : int or integer array, shape (batch,)
        Number of rows of each sequence in the cache before the append. This and the other integer
        arrays may have any array type.
    cu_seqlens_k_new : integer array, shape (batch + 1,), optional
        Offsets of the new rows of each sequence in packed ``k`` and ``v``, (total_new, heads_kv,
        dim).
    cache_batch_idx : integer array, shape (batch,), optional
        Index of the cache of each sequence, by default 0, 1, ...
    block_table : integer array, shape (batch, max_pages), optional
        Page numbers of each sequence, in order.
    rotary_cos, rotary_sin : array, shape (rows, rotary_dim / 2), optional
        Cosine and sine tables that rotate the first ``rotary_dim`` columns. New key ``j`` is at
        position ``cache_seqlens[b] + j``, and so is query ``j`` if the call is causal or has a
        window; otherwise all queries are at ``cache_seqlens[b]``.
    rotary_interleaved : bool
        Whether columns 2i and 2i + 1 form a pair; otherwise columns i and i + rotary_dim / 2 do.
    rotary_seqlens : integer array, shape (batch,), optional
        Position of the first new row of each sequence, by default ``cache_seqlens``.
    k_scale, v_scale : numbers or float32 arrays, optional
        Scales of 8-bit caches, broadcast to (caches, seqlen_cache, heads_kv) or (pages, page_size,
        heads_kv).
    compute_scales : bool
        Whether the scales of new rows are computed and written.
    causal : bool
        Whether query ``i`` attends only to the keys ``j <= i + seqlen_k - seqlen_q``, where
        ``seqlen_k`` is the length after the append.
    softmax_scale : float, optional
        Factor on the scores, by default ``1 / sqrt(head_dim)``.
    return_max_logits, return_entropy : bool
        Whether to return the largest score of each query row, and the entropy of its weights, too.
    stream : stream, optional
        Stream to run on instead of the current one, see `cupy_flash.flash_attention`.
    key_indices : array of integers, optional
        Lists of the keys that each query attends to, see the function of the same call.
    key_indices_in : {"sequence", "pages"}
        Meaning of an index: its key's index in the sequence, or its row in all pages.
    **modifications
        Masks and changes of scores, see `cupy_flash.Modifications`; without seqlens_k.

    Returns
    -------
    KVCacheResult
        Output, log-sum-exp and new caches. The arguments are not written.
    max_logits, entropy : float64 arrays, shape (batch, heads_q, seqlen_q)
        Row statistics, see `cupy_flash.flash_attention`; each only if requested.

    Notes
    -----
    New keys are rotated in float64 and rounded to their own dtype, because a cache stores them.
    Rotated queries stay in float64: rounding them counts as an error of an implementation. Its size
    follows from :func:`~cupy_flash.reference.attention_naive` of rounded queries.

    The contents of integer arrays are not checked, not even on the host. They are clamped as on a
    GPU, so that no access is outside the arrays. Lengths are clamped to [0, capacity], where
    capacity is ``seqlen_cache`` or ``max_pages * page_size``; rows past it are not appended.
    ``cu_seqlens_k_new`` is clamped to [0, total_new], and should increase. A sequence whose
    ``cache_batch_idx`` is out of range has no keys. A page outside [0, pages) reads as zeros, and
    rows for it are dropped. Positions outside the rotary tables use the nearest row.
    """
    with on_stream(stream, q):
        convert, block_table = result_converter("q", q), integers(block_table)
        q, k_cache, v_cache = (
            read(name, x) for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache))
        )
        q = widened(q)
        k_scale, v_scale = read_scale("k_scale", k_scale, q), read_scale("v_scale", v_scale, q)
        k, v, rotary_cos, rotary_sin = (
            None if x is None else widened(read(name, x))
            for name, x in (
                ("k", k),
                ("v", v),
                ("rotary_cos", rotary_cos),
                ("rotary_sin", rotary_sin),
            )
        )
        xp = array_module(q)
        batch, seqlen_q, heads_q, _ = q.shape
        places = places_of_sequences(k_cache, batch, cache_batch_idx, block_table)
        before = lengths_in_cache(cache_seqlens, places)
        new_k, new_v = (_of_sequences(x, cu_seqlens_k_new) for x in (k, v))
        if rotary_cos is not None:
            starts = before if rotary_seqlens is None else integers(rotary_seqlens)
            first = np.array(starts, np.int64)[:, None]
            window = window_of(modifications.get("window_size") or (None, None))
            is_local = causal or window != Window()
            advance = np.arange(seqlen_q) if is_local else np.zeros(seqlen_q, np.int64)
            rotate = functools.partial(
                rotated, cos=rotary_cos, sin=rotary_sin, interleaved=rotary_interleaved
            )
            q = rotate(q, positions=first + advance)
            for b, rows in enumerate(new_k):
                positions = first[b] + np.arange(len(rows))
                rotated_k = rotate(rows[None], positions=positions[None])
                with np.errstate(all="ignore"):
                    new_k[b] = rotated_k[0].astype(k.dtype)
        k_cache, v_cache = (as_bytes(x).copy().view(x.dtype) for x in (k_cache, v_cache))
        is_quantized = dtype_name(k_cache) in LARGEST_QUANTIZED
        k_scale, v_scale = (
            _scales(scale, k_cache, of_rows=compute_scales) if is_quantized else None
            for scale in (k_scale, v_scale)
        )
        after = before
        if k is not None:
            counts = [n + len(rows) for n, rows in zip(before, new_k, strict=True)]
            after = [min(n, len(p)) for n, p in zip(counts, places, strict=True)]
            for cache, scale, new in (k_cache, k_scale, new_k), (v_cache, v_scale, new_v):
                for p, begin, end, rows in zip(places, before, after, new, strict=True):
                    _append(cache, scale, p[begin:end], rows[: end - begin], compute_scales)
        out = xp.empty((batch, seqlen_q, heads_q, v_cache.shape[-1]), np.float64)
        lse, max_logits = xp.empty((2, batch, heads_q, seqlen_q), np.float64)
        entropy = xp.empty_like(lse) if return_entropy else None
        bound_mods = cache_modifications(
            modifications, q, capacity_of(k_cache, block_table), causal=causal
        )
        lists = dense_lists(xp, key_indices, seqlen_q)
        in_pages = read_meaning(key_indices_in, block_table is not None, causal, modifications)
        for b in range(batch):
            own = places[b][: after[b]]
            if in_pages:
                own = np.arange(k_cache.shape[0] * k_cache.shape[1])
            own_lists = None if lists is None else lists[b : b + 1]
            one = q[b], standing_for(k_cache, k_scale, own), standing_for(v_cache, v_scale, own)
            sequence = FIRST_PAIR._replace(b=b)
            out[b], lse[b], max_logits[b], of_entropy = _sequence_result(
                *one, causal, softmax_scale, bound_mods, sequence, return_entropy, own_lists
            )
            if entropy is not None:
                entropy[b] = of_entropy
        scales = (None if x is None else convert(x) for x in (k_scale, v_scale))
        result = KVCacheResult(*map(convert, (out, lse, k_cache, v_cache)), *scales)
        of_rows = FormulaResult(out, lse, max_logits, entropy)
        statistics = of_rows.requested(False, return_max_logits, return_entropy)
        return (result, *map(convert, statistics)) if statistics else result


def places_of_sequences(
    k_cache: Any, batch: int, cache_batch_idx: Any, block_table: Ints | None
) -> list[Ints]:
    """Return, for each sequence, the row index of each position in its cache or its pages."""
    if block_table is not None:
        return [paged_rows(row, *k_cache.shape[:2]) for row in block_table]
    caches = np.arange(batch) if cache_batch_idx is None else integers(cache_batch_idx)
    return cached_rows(caches, *k_cache.shape[:2])


def lengths_in_cache(cache_seqlens: Any, places: list[Ints]) -> list[int]:
    """Return the number of rows of each sequence, clamped to the rows that it may have."""
    lengths = np.broadcast_to(integers(cache_seqlens), (len(places),)).tolist()
    return [min(max(n, 0), len(p)) for n, p in zip(lengths, places, strict=True)]


def capacity_of(k_cache: Any, block_table: Ints | None) -> int:
    """Return the largest number of rows that a sequence may have."""
    return int(k_cache.shape[1] * (1 if block_table is None else block_table.shape[1]))


def cache_modifications(
    modifications: Mapping[str, Any], q: Any, capacity: int, *, causal: bool
) -> BoundModifications:
    """Return the modifications of a call on a KV cache; see `fitting_modifications`."""
    batch, seqlen_q, heads_q, _ = q.shape
    refuse_other_lengths(modifications.get, "kvcache")
    changes = refuse_dropout(modifications, "calls on KV caches")
    sizes = Sizes(dtype_name(q), batch, heads_q, seqlen_q, capacity)
    return fitting_modifications(changes, q, sizes, causal=causal)


def _of_sequences(new: Any, cu_seqlens_k_new: Any) -> list[Any]:
    """Return the new rows of each sequence, (seqlen_new, heads_kv, dim); [] without new rows."""
    if new is None:
        return []
    if cu_seqlens_k_new is None:
        return list(new)
    starts = np.clip(integers(cu_seqlens_k_new), 0, len(new)).tolist()
    return [new[begin : max(begin, end)] for begin, end in itertools.pairwise(starts)]


def standing_for(blocks: Any, scale: Any, rows: Ints) -> Any:
    """Return rows of keys or values; 8-bit rows are multiplied by their scales (None means 1)."""
    own = take(flat(blocks), rows)
    if dtype_name(blocks) not in LARGEST_QUANTIZED:
        return own
    return dequantized(own, take(_flat_scales(scale, blocks), rows))


def _append(cache: Any, scale: Any, rows: Ints, new: Any, compute_scales: bool) -> None:
    """Write new rows to a cache and, if `compute_scales`, their scales to `scale`."""
    if dtype_name(cache) in LARGEST_QUANTIZED and len(new):
        if compute_scales:
            scales = largest_scales(new, cache.dtype)
            put(flat(scale), rows, scales)
        else:
            scales = take(_flat_scales(scale, cache), rows)
        new = quantized(new, scales, cache.dtype)
    put(flat(cache), rows, new)


def _flat_scales(scale: Any, blocks: Any) -> Any:
    """Return the scales of a cache with one per row and head: (blocks * rows, heads)."""
    return flat(_scales(scale, blocks, of_rows=True))


def _scales(scale: Any, cache: Any, *, of_rows: bool) -> Any:
    """Return a copy of a cache's scales, by default 1; if `of_rows`, with one per row and head."""
    xp = array_module(cache)
    with np.errstate(all="ignore"):
        scales = xp.array(1 if scale is None else scale, xp.float32)
    return xp.array(xp.broadcast_to(scales, cache.shape[:3]), order="C") if of_rows else scales


def _sequence_result(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    softmax_scale: float | None,
    bound_mods: BoundModifications,
    sequence: Pairs,
    with_entropy: bool,
    lists: Any | None,
) -> FormulaResult:
    """Return the results of one sequence, whose arrays are (seqlen, heads, dim)."""
    result = formula(
        *(x[None].swapaxes(1, 2) for x in (q, k, v)),
        causal=causal,
        softmax_scale=softmax_scale,
        bound_mods=bound_mods,
        sequence=sequence,
        with_entropy=with_entropy,
        lists=lists,
    )
    of_rows = (None if x is None else x[0] for x in result[1:])
    return FormulaResult(result.out[0].swapaxes(0, 1), *of_rows)
