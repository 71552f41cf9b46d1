"""Attention of queries to listed keys: each query has a list of the keys that it attends to.

The call becomes one over a paged cache whose pages have one row. Each query is a sequence of its
own, and its list, without the keys that masks hide, is the row of the block table:

    key_indices of a query     5 -1  2  9  2          causal: the query is at position 7
    row of the block table     5  2  2  .  .          length 3
"""

from __future__ import annotations

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
from cupy_flash.gpu import key_lists
from cupy_flash.opaque import is_dynamo_tracing, outside

# Arrays of modifications that calls with lists support, and those that have an element per pair.
_SUPPORTED = {"alibi_slopes", "sinks", "bias", "mask", "prefix_lens", "seqlens_k", "q_offset"}
_OF_PAIRS = ("bias", "mask")


class Queries(NamedTuple):
    """Queries of a call in one row each, and the keys that they may attend to; all (R,) or None.

    Attributes
    ----------
    sequence, query, position
        Sequence of each query, its index there, and its position among the keys.
    begins, ends, prefixes
        A query may attend to the keys from `begins` to `ends`, and to those before `prefixes`.
    first_rows
        Row of the sequence's first key in the arrays without their batch axes; None with pages.
    is_owned
        Whether the query belongs to a sequence.
    """

    sequence: Any
    query: Any
    position: Any
    begins: Any
    ends: Any
    prefixes: Any | None
    first_rows: Any | None
    is_owned: Any


class Tables(NamedTuple):
    """Block tables of a cache with pages of one row: one table for each of G queries.

    Attributes
    ----------
    rows
        Rows of the visible keys of each query, in the order of its list, (G, R, K). Entries after
        the last visible key are no rows.
    keys
        Indices of the same keys in their sequences, (G, R, K).
    counts
        Number of visible keys of each query, (G, R).
    """

    rows: Any
    keys: Any
    counts: Any


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
        queries = _queries(whole, keys)
        make = _tables_on_host if whole.is_on_host else _tables_on_gpu
        tables = make(whole, queries, indices)
        results = _attend(whole, backend, keys, queries, tables, modifications or {})
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
    """Return the lists as integers (batch, queries of a sequence, G, K)."""
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
    if problem.layout.packed_q:
        return indices[:, None]
    return array_module(q).broadcast_to(indices, (*rows, *shape[-2:]))


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


def _queries(whole: WholeCall, keys: int) -> Queries:
    """Return the queries of a call, and what they may attend to by length and position."""
    arguments, problem = whole.arguments, whole.problem
    layout, xp = problem.layout, array_module(arguments.q)
    lengths, offsets = _lengths(whole, keys), getattr(arguments, "q_offset", None)
    first = None if offsets is None else offsets.astype(np.int64)
    if layout.packed_q:
        starts = arguments.cu_seqlens_q.clip(0, layout.total_q).astype(np.int64)
        row = xp.arange(layout.total_q)
        sequence = (xp.searchsorted(starts, row, side="right") - 1).clip(0, problem.batch - 1)
        query = row - starts[sequence]
        seqlens_q = xp.diff(starts).clip(0, problem.seqlen_q)
        is_owned = (query >= 0) & (query < seqlens_q[sequence])
        first = lengths - seqlens_q if first is None else first
    else:
        sequence = xp.repeat(xp.arange(problem.batch), problem.seqlen_q)
        query = xp.tile(xp.arange(problem.seqlen_q), problem.batch)
        is_owned = xp.ones(len(query), bool)
        if first is None and layout.kind == "kvcache":
            first = lengths - problem.seqlen_q
        elif first is None:
            first = xp.full(problem.batch, problem.q_offset)
    position, length = first[sequence] + query, xp.where(is_owned, lengths[sequence], 0)
    begins, ends, prefixes = xp.zeros_like(length), length, None
    window = None if whole.options.mod_key is None else whole.options.mod_key.window
    if window is not None and window.left is not None:
        begins = position - window.left
    rights = [0] * problem.causal
    if window is not None and window.right is not None:
        rights.append(window.right)
    if rights:
        ends = xp.minimum(length, position + min(rights) + 1)
    if (lifted := getattr(arguments, "prefix_lens", None)) is not None:
        prefixes = xp.minimum(length, lifted[sequence])
    first_rows = None
    if not layout.page_size:
        if layout.packed_q:
            starts = arguments.cu_seqlens_k.clip(0, layout.total_k)
        else:
            caches = arguments.cache_batch_idx
            caches = (
                xp.arange(problem.batch) if caches is None else caches.clip(0, layout.caches - 1)
            )
            starts = caches.astype(np.int64) * problem.seqlen_k
        first_rows = starts[sequence]
    return Queries(sequence, query, position, begins, ends, prefixes, first_rows, is_owned)


def _tables_on_host(whole: WholeCall, queries: Queries, indices: Any) -> Tables:
    """Return the block tables, computed by NumPy as the kernel computes them."""
    layout, of_list = whole.problem.layout, (slice(None), None, None)
    keys = indices.reshape(len(queries.query), *indices.shape[-2:]).astype(np.int64)
    visible = (keys >= queries.begins[of_list]) & (keys < queries.ends[of_list])
    if queries.prefixes is not None:
        visible |= keys < queries.prefixes[of_list]
    visible &= keys >= 0
    # A stable order: the visible keys first.
    order = np.argsort(~visible, axis=-1, kind="stable")
    keys = np.take_along_axis(np.where(visible, keys, 0), order, -1)
    if layout.page_size:
        pages = whole.arguments.block_table[
            queries.sequence[of_list], keys // layout.page_size
        ].astype(np.int64)
        is_page = (pages >= 0) & (pages < layout.pages)
        rows = np.where(is_page, pages * layout.page_size + keys % layout.page_size, -1)
    else:
        assert queries.first_rows is not None
        rows = queries.first_rows[of_list] + keys
    counts = visible.sum(axis=-1).astype(np.int32)
    rows, keys = (x.astype(np.int32).swapaxes(0, 1) for x in (rows, keys))
    return Tables(rows, keys, counts.T)


def _tables_on_gpu(whole: WholeCall, queries: Queries, indices: Any) -> Tables:
    """Return the block tables, which a kernel computes."""
    layout, xp = whole.problem.layout, array_module(indices)
    of_sequence, lists, entries = indices.shape[1:]
    indices = indices.astype(np.int32, copy=False)
    if entries > 1 and indices.strides[-1] != indices.itemsize:
        indices = xp.ascontiguousarray(indices)
    rows = len(queries.query)
    table, keys = (xp.empty((lists, rows, entries), np.int32) for _ in range(2))
    tables = Tables(table, keys, xp.empty((lists, rows), np.int32))
    arrays = {
        "indices": indices,
        **{name: getattr(queries, name).astype(np.int32) for name in ("begins", "ends")},
        **{"table": tables.rows, "keys": tables.keys, "counts": tables.counts},
    }
    if queries.prefixes is not None:
        arrays["prefixes"] = queries.prefixes.astype(np.int32)
    sizes = {"queries": of_sequence, "lists": lists, "entries": entries, "rows": rows}
    strides = zip(("batch_stride", "query_stride", "list_stride"), indices.strides, strict=False)
    sizes |= {name: stride // indices.itemsize for name, stride in strides}
    if layout.page_size:
        arrays["block_table"] = whole.arguments.block_table
        arrays["sequences"] = queries.sequence.astype(np.int32)
        names = ("block_table_stride", "page_size", "pages")
        sizes |= {name: getattr(layout, name) for name in names}
    else:
        assert queries.first_rows is not None
        arrays["first_rows"] = queries.first_rows.astype(np.int64)
    key_lists.compact(arrays, sizes)
    return tables


def _attend(
    whole: WholeCall,
    backend: str,
    keys_before: int,
    queries: Queries,
    tables: Tables,
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
    groups = len(tables.rows)
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
        table, keys, counts = (x[group] for x in tables)
        if table.shape[1] == 0:
            table = keys = xp.zeros((len(table), 1), np.int32)
        rows = Arguments(
            q=q[:, :, heads],
            block_table=table,
            cache_seqlens=counts,
            **{name: x[:, :, kv] for name, x in stored.items()},
        )
        own = _modifications(whole, queries, keys, heads, modifications)
        found.append(dispatch.attention(rows, inner, backend, 0, own))
    outs, *of_rows = zip(*found, strict=True)
    together = [xp.concatenate(outs, axis=2), *(xp.concatenate(x, axis=1) for x in of_rows)]
    return _assembled(whole, queries, together)


def _assembled(whole: WholeCall, queries: Queries, results: list[Any]) -> tuple[Any, ...]:
    """Return the requested results with the axes of the call."""
    problem, options = whole.problem, whole.options
    out, *of_rows = results
    shape = (problem.batch, problem.seqlen_q)
    if problem.layout.packed_q:
        out = out[:, 0]
        of_rows = [x[:, :, 0].T for x in of_rows]
        # The log-sum-exp of a row of no sequence has no sink.
        lse = array_module(out).where(queries.is_owned, of_rows[0], -np.inf)
        of_rows[0] = lse.astype(of_rows[0].dtype)
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
    whole: WholeCall, queries: Queries, keys: Any, heads: slice, modifications: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the modifications of the inner call of these heads; `keys` are those of its table."""
    arguments, xp = whole.arguments, array_module(whole.arguments.q)
    result: dict[str, Any] = {}
    if modifications.get("softcap") is not None:
        result["softcap"] = modifications["softcap"]
    sinks = getattr(arguments, "sinks", None)
    if sinks is not None:
        result["sinks"] = sinks[heads]
    of_pairs = {
        name: _of_pairs(whole, queries, keys, heads, name)
        for name in _OF_PAIRS
        if getattr(arguments, name, None) is not None
    }
    slopes = getattr(arguments, "alibi_slopes", None)
    if slopes is not None:
        slopes = slopes[queries.sequence][:, heads] if slopes.ndim == 2 else slopes[None, heads]
        distance = abs(queries.position[:, None] - keys)
        bias = -slopes[:, :, None] * distance[:, None]
        bias = bias.astype(slopes.dtype)
        if "bias" in of_pairs:
            bias = bias + of_pairs["bias"].astype(slopes.dtype)
        of_pairs["bias"] = bias
    return result | {name: xp.ascontiguousarray(x[:, :, None]) for name, x in of_pairs.items()}


def _of_pairs(whole: WholeCall, queries: Queries, keys: Any, heads: slice, name: str) -> Any:
    """Return the elements of a bias or mask for the listed keys, (R, heads or 1, K)."""
    array, problem = getattr(whole.arguments, name), whole.problem
    xp = array_module(array)
    if problem.layout.packed_q:
        # One batch, whose queries are the rows.
        array, sequence, query = array[None], xp.zeros_like(queries.query), xp.arange(len(keys))
    else:
        sizes = (problem.seqlen_q, problem.seqlen_k)
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)
        array = xp.broadcast_to(array, (problem.batch, array.shape[1], *sizes))
        sequence, query = queries.sequence, queries.query
    if array.shape[1] > 1:
        array = array[:, heads]
    own = xp.arange(array.shape[1])[:, None]
    return array[sequence[:, None, None], own, query[:, None, None], keys[:, None]]
