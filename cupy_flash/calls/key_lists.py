"""Attention of queries to listed keys: each query has a list of the keys that it attends to.

The call becomes one over a paged cache whose pages have one row. Each query is a sequence of its
own, and its list, without the keys that masks hide, is the row of the block table:

    key_indices of a query     5 -1  2  9  2          causal: the query is at position 7
    row of the block table     5  2  2  .  .          length 3
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays import kinds
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module, to_bshd
from cupy_flash.arrays.torch_arrays import count_writes
from cupy_flash.calls import dispatch, rotary
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.check.whole_call import WholeCall, check_whole
from cupy_flash.calls.options import Options
from cupy_flash.errors import UnsupportedError
from cupy_flash.opaque import is_dynamo_tracing, outside

# Arrays of modifications that calls with lists support, and those that have an element per pair.
_SUPPORTED = {"alibi_slopes", "sinks", "bias", "mask", "prefix_lens", "seqlens_k", "q_offset"}
_OF_PAIRS = ("bias", "mask")


class Lists(NamedTuple):
    """Lists of keys, as module `xp` holds them. R rows of queries have G lists of K keys each.

    Attributes
    ----------
    sequence, query, position
        Sequence of each row, index of the query in it, and its position among the keys, (R,).
    keys
        Index of each key in its sequence, (R, G, K); 0 for an entry that counts for nothing.
    is_visible
        Whether the query attends to the key, (R, G, K).
    rows
        Row of each key in the arrays of keys and values, without their batch axes, (R, G, K).
    """

    sequence: Any
    query: Any
    position: Any
    keys: Any
    is_visible: Any
    rows: Any


def attention(
    arguments: Arguments,
    options: Options,
    backend: str,
    keys: int,
    modifications: Mapping[str, Any],
    stream: Any | None,
    key_indices: Any,
) -> Any:
    """Return the result of a call whose queries attend to listed keys.

    `dispatch.attention` describes the other arguments.
    """
    call = (arguments, options, backend, keys, modifications)
    if is_dynamo_tracing():
        return outside(attention, (*call, stream, key_indices))
    with on_stream(stream, arguments.like):
        whole = check_whole(arguments, options, keys, modifications)
        _require_supported(whole)
        convert = kinds.result_converter("q", arguments.q)
        indices = _read_indices(key_indices, whole)
        if whole.problem.layout.appends:
            _append(whole, backend, keys)
        lists = _lists(whole, keys, indices)
        results = _attend(whole, backend, keys, lists, modifications or {})
        count_writes(*arguments.written(options).values())
        out = results[0]
        if arguments.out is not None:
            whole.arguments.out[...] = out
            first = arguments.out
        else:
            first = convert(out)
        others = [convert(x) for x in results[1:]]
        return (first, *others) if others else first


def _require_supported(whole: WholeCall) -> None:
    """Raise UnsupportedError for options and modifications that lists do not support."""
    key = whole.options.mod_key
    if whole.options.kind not in ("dense", "varlen", "kvcache"):
        raise UnsupportedError("key_indices are not supported by calls with float8 queries")
    if whole.arguments.q.ndim != (3 if whole.problem.layout.packed_q else 4):
        raise ValueError(f"q has {whole.arguments.q.ndim} axes; with key_indices expected 4")
    if key is None:
        return
    names = sorted(set(key.names) - _SUPPORTED)
    names += [name for name in ("score_mod", "mask_mod") if getattr(key, name) is not None]
    if key.dropout_threshold is not None:
        names.append("dropout_p")
    # Captured arrays have the names of their functions in front.
    names = list(dict.fromkeys(name.split(".")[0] for name in names))
    if names:
        raise UnsupportedError(
            f"{names[0]} is not supported together with key_indices; expected only masks by "
            f"position, softcap and {', '.join(sorted(_SUPPORTED))}"
        )


def _read_indices(key_indices: Any, whole: WholeCall) -> Any:
    """Return the lists as integers (R, G, K), one row for each query."""
    q, problem = whole.arguments.q, whole.problem
    if isinstance(key_indices, (list, tuple)):
        key_indices = np.asarray(key_indices)
    indices = kinds.normalize_int32("key_indices", key_indices, on_host=whole.is_on_host)
    if indices.dtype.kind not in "iu":
        raise TypeError(f"key_indices has dtype {indices.dtype}; expected integers")
    heads = f"{problem.heads_kv} or 1"
    rows: tuple[int, ...] = (problem.batch, problem.seqlen_q)
    axes = f"(batch, seqlen_q or 1, heads, top_k) = ({rows[0]}, {rows[1]} or 1, {heads}, n)"
    if problem.layout.packed_q:
        rows = (problem.layout.total_q,)
        axes = f"(total_q, heads, top_k) = ({rows[0]}, {heads}, n)"
    elif indices.ndim == 3:
        indices = indices[:, None]
    shape = tuple(indices.shape)
    fits = len(shape) == len(rows) + 2 and shape[0] == rows[0]
    if not fits or shape[1:-2] not in ((1,), rows[1:]) or shape[-2] not in (1, problem.heads_kv):
        raise ValueError(f"key_indices has shape {shape}; expected {axes}")
    every = array_module(q).broadcast_to(indices, (*rows, *shape[-2:]))
    return every.reshape(math.prod(rows), *shape[-2:])


def _append(whole: WholeCall, backend: str, keys: int) -> None:
    """Append the new rows of a call: a call without queries does nothing else."""
    without = whole.arguments._replace(q=whole.arguments.q[:, :0], out=None)
    fixed = Arguments(*without[: len(Arguments._fields)])
    dispatch.attention(fixed, whole.options._replace(mod_key=None), backend, keys)


def _lengths(whole: WholeCall, keys: int) -> Any:
    """Return the number of keys of each sequence, (batch,), clamped to the arrays."""
    arguments, problem = whole.arguments, whole.problem
    xp, layout = array_module(arguments.q), problem.layout
    if layout.kind == "kvcache":
        lengths = arguments.cache_seqlens
        if lengths is None:
            lengths = xp.full(problem.batch, keys, np.int64)
        lengths = lengths.clip(0, problem.seqlen_k)
        if layout.packed_new:
            lengths = lengths + xp.diff(arguments.cu_seqlens_k_new)
        else:
            lengths = lengths + layout.new_keys
        if (places := arguments.cache_batch_idx) is not None:
            lengths = lengths * ((places >= 0) & (places < layout.caches))
    elif layout.packed_q:
        lengths = arguments.seqused_k
        if lengths is None:
            lengths = xp.diff(arguments.cu_seqlens_k)
        if not layout.page_size:
            starts = arguments.cu_seqlens_k[:-1].clip(0, layout.total_k)
            lengths = xp.minimum(lengths, layout.total_k - starts)
    else:
        lengths = getattr(arguments, "seqlens_k", None)
        if lengths is None:
            lengths = xp.full(problem.batch, problem.seqlen_k, np.int64)
    return lengths.clip(0, problem.seqlen_k).astype(np.int64)


def _queries(whole: WholeCall, lengths: Any) -> tuple[Any, Any, Any, Any]:
    """Return sequence, index in it, position, and whether it counts, of each row, all (R,)."""
    arguments, problem = whole.arguments, whole.problem
    xp, offsets = array_module(arguments.q), getattr(arguments, "q_offset", None)
    if problem.layout.packed_q:
        starts = arguments.cu_seqlens_q.clip(0, problem.layout.total_q).astype(np.int64)
        rows = xp.arange(problem.layout.total_q)
        sequence = (xp.searchsorted(starts, rows, side="right") - 1).clip(0, problem.batch - 1)
        query = rows - starts[sequence]
        seqlens_q = xp.diff(starts).clip(0, problem.seqlen_q)
        counts = (query >= 0) & (query < seqlens_q[sequence])
        first = lengths - seqlens_q if offsets is None else offsets
        return sequence, query, first[sequence] + query, counts
    sequence = xp.repeat(xp.arange(problem.batch), problem.seqlen_q)
    query = xp.tile(xp.arange(problem.seqlen_q), problem.batch)
    if offsets is not None:
        first = offsets.astype(np.int64)[sequence]
    elif problem.layout.kind == "kvcache":
        first = (lengths - problem.seqlen_q)[sequence]
    else:
        first = problem.q_offset
    return sequence, query, first + query, xp.ones(len(query), bool)


def _lists(whole: WholeCall, keys: int, indices: Any) -> Lists:
    """Return the lists, with the keys that length and position hide marked as such."""
    arguments, problem = whole.arguments, whole.problem
    layout, xp = problem.layout, array_module(arguments.q)
    lengths = _lengths(whole, keys)
    sequence, query, position, counts = _queries(whole, lengths)
    of_list = (slice(None), None, None)
    indices = indices.astype(np.int64)
    visible = (indices >= 0) & (indices < lengths[sequence][of_list]) & counts[of_list]
    key_window = None if whole.options.mod_key is None else whole.options.mod_key.window
    left = None if key_window is None else key_window.left
    right = None if key_window is None else key_window.right
    if problem.causal:
        right = 0 if right is None else min(right, 0)
    near, place = xp.ones(indices.shape, bool), position[of_list]
    if left is not None:
        near &= indices >= place - left
    if right is not None:
        near &= indices <= place + right
    if (prefixes := getattr(arguments, "prefix_lens", None)) is not None:
        near |= indices < prefixes[sequence][of_list]
    visible &= near
    found = xp.where(visible, indices, 0)
    if layout.page_size:
        page = arguments.block_table[sequence[of_list], found // layout.page_size]
        is_page = (page >= 0) & (page < layout.pages)
        # The rows of such a page are zeros, as in other calls: no row of the arrays has them.
        rows = xp.where(is_page, page * layout.page_size + found % layout.page_size, -1)
    elif layout.packed_q:
        rows = arguments.cu_seqlens_k.clip(0, layout.total_k)[sequence][of_list] + found
    else:
        caches = sequence
        if arguments.cache_batch_idx is not None:
            caches = arguments.cache_batch_idx[sequence].clip(0, layout.caches - 1)
        rows = caches[of_list] * problem.seqlen_k + found
    return Lists(sequence, query, position, found, visible, rows)


def _compacted(lists: Lists, group: int) -> tuple[Any, Any, Any]:
    """Return rows and keys with the visible ones first, (R, K), and their number, (R,)."""
    visible = lists.is_visible[:, group]
    xp, count = array_module(visible), visible.shape[1]
    places = xp.arange(count)
    order = xp.argsort(xp.where(visible, places, places + count), axis=1)
    taken = (xp.take_along_axis(x[:, group], order, 1) for x in (lists.rows, lists.keys))
    return (*taken, visible.sum(axis=1).astype(np.int32))


def _attend(
    whole: WholeCall,
    backend: str,
    keys_before: int,
    lists: Lists,
    modifications: Mapping[str, Any],
) -> tuple[Any, ...]:
    """Return out, and lse and row statistics if requested.

    `keys_before` is the length of all cached sequences before the append if no array gives it.
    """
    arguments, problem, options = whole.arguments, whole.problem, whole.options
    xp, layout = array_module(arguments.q), problem.layout
    q = _rotated(whole, keys_before)
    q = (q if layout.packed_q else to_bshd(q, options.layout)).reshape(
        -1, 1, problem.heads_q, problem.head_dim
    )
    groups = lists.rows.shape[1]
    heads_q, heads_kv = problem.heads_q // groups, problem.heads_kv // groups
    inner = Options(
        "kvcache",
        softmax_scale=options.softmax_scale,
        return_lse=True,
        family=options.family,
        tile=options.tile,
        num_splits=options.num_splits,
        batch_invariant=options.batch_invariant,
        head_dim_v=options.head_dim_v,
        return_max_logits=options.return_max_logits,
        return_entropy=options.return_entropy,
    )
    stored = {name: x for name, x in _stored_rows(whole).items() if x is not None}
    found = []
    for group in range(groups):
        heads, kv = (slice(group * n, (group + 1) * n) for n in (heads_q, heads_kv))
        table, keys, counts = _compacted(lists, group)
        if table.shape[1] == 0:
            table = xp.full((len(table), 1), -1)
            keys = xp.zeros((len(table), 1), np.int64)
        rows = Arguments(
            q=q[:, :, heads],
            block_table=table.astype(np.int32),
            cache_seqlens=counts,
            **{name: x[:, :, kv] for name, x in stored.items()},
        )
        own = _modifications(whole, lists, keys, heads, modifications)
        found.append(dispatch.attention(rows, inner, backend, 0, own))
    outs, *of_rows = zip(*found, strict=True)
    together = [xp.concatenate(outs, axis=2), *(xp.concatenate(x, axis=1) for x in of_rows)]
    return _assembled(whole, lists, together)


def _assembled(whole: WholeCall, lists: Lists, results: list[Any]) -> tuple[Any, ...]:
    """Return the requested results with the axes of the call."""
    problem, options = whole.problem, whole.options
    out, *of_rows = results
    shape = (problem.batch, problem.seqlen_q)
    if problem.layout.packed_q:
        out = out[:, 0]
        of_rows = [x[:, :, 0].T for x in of_rows]
        _, _, _, counts = _queries(whole, _lengths(whole, 0))
        # The log-sum-exp of a row of no sequence has no sink.
        of_rows[0] = array_module(out).where(counts, of_rows[0], -np.inf).astype(of_rows[0].dtype)
    else:
        out = out.reshape(*shape, *out.shape[2:])
        of_rows = [x.reshape(*shape, -1).swapaxes(1, 2) for x in of_rows]
        if options.layout == "bhsd":
            out = out.swapaxes(1, 2)
    lse, *statistics = of_rows
    return (out, *((lse,) if options.return_lse else ()), *statistics)


def _rotated(whole: WholeCall, keys_before: int) -> Any:
    """Return the queries, rotated as an append rotates them."""
    arguments, problem = whole.arguments, whole.problem
    q, xp = arguments.q, array_module(arguments.q)
    if arguments.rotary_cos is None:
        return q
    starts = arguments.rotary_seqlens
    if starts is None:
        starts = arguments.cache_seqlens
    if starts is None:
        starts = xp.full(len(q), keys_before, np.int32)
    places = starts[:, None] + xp.arange(problem.seqlen_q) * problem.is_local
    return rotary.rotate(
        *(q, arguments.rotary_cos, arguments.rotary_sin, places, whole.options.rotary_interleaved),
        None,
    )


def _stored_rows(whole: WholeCall) -> dict[str, Any]:
    """Return keys, values and scales as pages of one row, (rows, 1, heads_kv, dim)."""
    arguments, options = whole.arguments, whole.options
    names = ("k_cache", "v_cache") if options.kind == "kvcache" else ("k", "v")
    result: dict[str, Any] = {}
    for target, name in zip(("k_cache", "v_cache"), names, strict=True):
        array = getattr(arguments, name)
        if array is not None and not whole.problem.layout.packed_k and options.kind == "dense":
            array = to_bshd(array, options.layout)
        result[target] = None if array is None else _as_rows(array, array.shape[-2:])
    xp, shape = array_module(arguments.q), getattr(arguments, names[0]).shape
    for name in ("k_scale", "v_scale"):
        scale = getattr(arguments, name)
        if scale is not None:
            scale = xp.broadcast_to(scale, shape[:-1])
            scale = _as_rows(scale, shape[-2:-1])
        result[name] = scale
    return result


def _as_rows(array: Any, last: tuple[int, ...]) -> Any:
    return array.reshape(-1, 1, *last)


def _modifications(
    whole: WholeCall, lists: Lists, keys: Any, heads: slice, modifications: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the modifications of the inner call of these heads; `keys` are those of its lists."""
    arguments, xp = whole.arguments, array_module(whole.arguments.q)
    result: dict[str, Any] = {}
    if modifications.get("softcap") is not None:
        result["softcap"] = modifications["softcap"]
    sinks = getattr(arguments, "sinks", None)
    if sinks is not None:
        result["sinks"] = sinks[heads]
    of_pairs = {
        name: _of_pairs(whole, lists, keys, heads, name)
        for name in _OF_PAIRS
        if getattr(arguments, name, None) is not None
    }
    slopes = getattr(arguments, "alibi_slopes", None)
    if slopes is not None:
        slopes = slopes[lists.sequence][:, heads] if slopes.ndim == 2 else slopes[None, heads]
        distance = abs(lists.position[:, None] - keys)
        bias = -slopes[:, :, None] * distance[:, None]
        bias = bias.astype(slopes.dtype)
        if "bias" in of_pairs:
            bias = bias + of_pairs["bias"].astype(slopes.dtype)
        of_pairs["bias"] = bias
    return result | {name: xp.ascontiguousarray(x[:, :, None]) for name, x in of_pairs.items()}


def _of_pairs(whole: WholeCall, lists: Lists, keys: Any, heads: slice, name: str) -> Any:
    """Return the elements of a bias or mask for the listed keys, (R, heads or 1, K)."""
    array, problem = getattr(whole.arguments, name), whole.problem
    xp = array_module(array)
    if problem.layout.packed_q:
        # One batch, whose queries are the rows.
        array, sequence, query = array[None], xp.zeros_like(lists.query), xp.arange(len(keys))
    else:
        sizes = (problem.seqlen_q, problem.seqlen_k)
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)
        array = xp.broadcast_to(array, (problem.batch, array.shape[1], *sizes))
        sequence, query = lists.sequence, lists.query
    if array.shape[1] > 1:
        array = array[:, heads]
    own = xp.arange(array.shape[1])[:, None]
    return array[sequence[:, None, None], own, query[:, None, None], keys[:, None]]
