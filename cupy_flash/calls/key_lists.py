"""Attention of queries to listed keys: each query has a list of the keys that it attends to.

The call becomes one over a paged cache whose pages have one row. Each query is a sequence of its
own, and its list, without the keys that masks hide, is the row of the block table:

    key_indices of a query     5 -1  2  9  2          causal: the query is at position 7
    row of the block table     5  2  2  .  .          length 3

The order of a list affects a result only by the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays import kinds
from cupy_flash.arrays.numpy_errors import ignore_fp_errors
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module, as_cupy, to_bshd
from cupy_flash.arrays.torch_arrays import count_writes
from cupy_flash.calls import dispatch, rotary
from cupy_flash.calls.arguments import CACHES, Arguments
from cupy_flash.calls.check.whole_call import (
    WholeCall,
    check_whole,
    is_capturing_tensors,
    on_stream_of_tensors,
)
from cupy_flash.calls.options import Options
from cupy_flash.errors import UnsupportedError
from cupy_flash.gpu import key_lists
from cupy_flash.opaque import is_dynamo_tracing, outside
from cupy_flash.problem.problem import MAX_SEQLEN

# Arrays of modifications that calls with lists support, and those that have an element per pair.
_SUPPORTED = {"alibi_slopes", "sinks", "bias", "mask", "prefix_lens", "seqlens_k", "q_offset"}
_OF_PAIRS = ("bias", "mask")
# Modifications that depend on the keys of a list.
_OF_KEYS = (*_OF_PAIRS, "alibi_slopes")


class Queries(NamedTuple):
    """Queries of a call in one row each, and the keys that they may attend to; all (R,) or None.

    Attributes
    ----------
    sequence, query, position
        Sequence of each query, its index there, and its position among the keys.
    begins, ends, prefixes
        A query may attend to the keys j with begins <= j < ends, and to those before `prefixes`.
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
    """Block tables of a cache with pages of one row: one table for each of G lists of a query.

    Attributes
    ----------
    rows
        Rows of the visible keys of each query, in the order of its list, (G, R, K). Entries after
        the last visible key are no rows.
    keys
        Indices of the same keys in their sequences, (G, R, K); None if nothing depends on them.
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
    with on_stream(stream, arguments.like), on_stream_of_tensors(arguments.q):
        if is_capturing_tensors(arguments.q):
            raise UnsupportedError(
                "a call of tensors with key_indices cannot be captured in a CUDA graph of PyTorch, "
                "which does not keep CuPy's memory; capture a call of CuPy arrays"
            )
        whole = check_whole(arguments, options, keys, modifications)
        require_supported(whole)
        convert = kinds.result_converter("q", arguments.q)
        indices = read_indices(key_indices, whole)
        if whole.problem.batch == 0 or whole.problem.seqlen_k == 0:
            # No query attends to a key.
            return dispatch.attention(*call)
        queries = queries_of(whole, keys)
        inner = _Inner(
            whole, backend, keys, queries, tables_of(whole, queries, indices), modifications
        )
        if whole.problem.layout.appends:
            inner.require_family()
            _append(whole, backend, keys)
        out, *of_rows = inner.compute()
        count_writes(*arguments.written(options).values())
        results = [convert(x) for x in of_rows]
        if arguments.out is not None:
            bits(whole.arguments.out)[...] = bits(out)
            # The conversion makes the caller's stream wait for ours.
            convert(out)
            out = arguments.out
        else:
            out = convert(out)
        return (out, *results) if results else out


def require_supported(whole: WholeCall) -> None:
    """Raise an error for calls and modifications that lists do not support.

    Raises
    ------
    UnsupportedError
        For float8 queries, and modifications that are not in `_SUPPORTED`.
    ValueError
        For several batch axes, none, and caches whose rows cannot be numbered without a copy.
    """
    key = whole.options.mod_key
    if whole.options.kind not in ("dense", "varlen", "kvcache"):
        raise UnsupportedError("key_indices are not supported by calls with float8 queries")
    if whole.arguments.q.ndim != (3 if whole.problem.layout.packed_q else 4):
        raise ValueError(f"q has {whole.arguments.q.ndim} axes; with key_indices expected 4")
    if whole.options.kind == "kvcache":
        for name in CACHES:
            _require_rows(name, getattr(whole.arguments, name))
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


def _require_rows(name: str, cache: Any) -> None:
    """Raise ValueError unless the rows of a cache have one distance, over all pages or caches."""
    if cache is None or len(cache) < 2 or cache.shape[1] == 0:
        return
    if cache.strides[0] != cache.shape[1] * cache.strides[1]:
        raise ValueError(
            f"{name} has strides {cache.strides}; with key_indices expected "
            f"{cache.shape[1] * cache.strides[1]} as the first one, since a cache is not copied"
        )


def read_indices(key_indices: Any, whole: WholeCall) -> Any:
    """Return the lists as integers (batch, queries of a sequence, G, K)."""
    q, problem = whole.arguments.q, whole.problem
    xp = array_module(q)
    given = kinds.normalize_int32("key_indices", key_indices, on_host=whole.is_on_host)
    indices = as_cupy(given)
    if indices.dtype.kind not in "iu":
        raise TypeError(f"key_indices has dtype {indices.dtype}; expected integers")
    # Other integers wrap around in int32. A key that int32 cannot count exists in no sequence.
    if indices.dtype.kind == "i" and indices.itemsize > 4:
        indices = xp.maximum(indices, -1)
    if indices.itemsize >= 4 and indices.dtype != np.int32:
        indices = xp.minimum(indices, np.iinfo(np.int32).max)
    indices = indices.astype(np.int32, copy=False)
    heads = f"{problem.heads_kv} or 1"
    rows: tuple[int, ...] = (problem.batch, problem.seqlen_q)
    axes = (
        f"(batch, seqlen_q or 1, heads, n) = ({rows[0]}, {rows[1]} or 1, {heads}, n), or without "
        "the second axis"
    )
    if problem.layout.packed_q:
        rows = (problem.layout.total_q,)
        axes = f"(total_q, heads, n) = ({rows[0]}, {heads}, n)"
    elif indices.ndim == 3:
        indices = indices[:, None]
    shape = tuple(indices.shape)
    fits = len(shape) == len(rows) + 2 and shape[0] == rows[0]
    if not fits or shape[1:-2] not in ((1,), rows[1:]) or shape[-2] not in (1, problem.heads_kv):
        raise ValueError(f"key_indices has shape {shape}; expected {axes}")
    if problem.layout.packed_q:
        return indices[:, None]
    return xp.broadcast_to(indices, (*rows, *shape[-2:]))


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
        most = MAX_SEQLEN if layout.page_size else layout.total_k
        if arguments.cu_seqlens_k is not None:
            ends = arguments.cu_seqlens_k.clip(0, most)
            lengths = xp.diff(ends) if lengths is None else lengths
            lengths = lengths if layout.page_size else xp.minimum(lengths, most - ends[:-1])
    else:
        lengths = getattr(arguments, "seqlens_k", None)
        if lengths is None:
            lengths = xp.full(problem.batch, problem.seqlen_k, np.int64)
    return lengths.clip(0, problem.seqlen_k).astype(np.int64)


def queries_of(whole: WholeCall, keys: int) -> Queries:
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


def tables_of(whole: WholeCall, queries: Queries, indices: Any) -> Tables:
    """Return the block tables of the lists."""
    make = _tables_on_host if whole.is_on_host else _tables_on_gpu
    return make(whole, queries, indices)


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
    if entries > 1 and indices.strides[-1] != indices.itemsize:
        indices = xp.ascontiguousarray(indices)
    rows = len(queries.query)
    shape = (lists, rows, entries)
    needs_keys = any(getattr(whole.arguments, name, None) is not None for name in _OF_KEYS)
    tables = Tables(
        xp.empty(shape, np.int32),
        xp.empty(shape, np.int32) if needs_keys else None,
        xp.empty((lists, rows), np.int32),
    )
    arrays = {
        "indices": indices,
        **{name: getattr(queries, name).astype(np.int32) for name in ("begins", "ends")},
        **{"table": tables.rows, "counts": tables.counts},
    }
    if tables.keys is not None:
        arrays["keys"] = tables.keys
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


class _Inner:
    """Call over the block tables, for each list of a query one.

    Parameters
    ----------
    whole, backend, modifications
        The call of the user.
    keys_before
        Length of all cached sequences before the append if no array gives it.
    queries, tables
        Queries of the call, and the block tables of their lists.
    """

    def __init__(
        self,
        whole: WholeCall,
        backend: str,
        keys_before: int,
        queries: Queries,
        tables: Tables,
        modifications: Mapping[str, Any],
    ) -> None:
        problem, options = whole.problem, whole.options
        self._whole, self._backend, self._queries, self._tables = whole, backend, queries, tables
        self._modifications = modifications or {}
        q = _rotated(whole, keys_before)
        q = q if problem.layout.packed_q else to_bshd(q, options.layout)
        self._q = reshaped(q, (len(queries.query), 1, problem.heads_q, problem.head_dim))
        self._stored = {n: x for n, x in stored_rows(whole).items() if x is not None}
        self._options = Options(
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

    def _call(self, group: int) -> tuple[Arguments, slice, dict[str, Any]]:
        """Return the arrays of a call, its query heads, and its modifications."""
        problem, xp = self._whole.problem, array_module(self._q)
        counts = (n // len(self._tables.rows) for n in (problem.heads_q, problem.heads_kv))
        heads, kv = (slice(group * n, (group + 1) * n) for n in counts)
        table, lengths = self._tables.rows[group], self._tables.counts[group]
        keys = None if self._tables.keys is None else self._tables.keys[group]
        if table.shape[1] == 0:
            table = keys = xp.zeros((len(table), 1), np.int32)
        rows = Arguments(
            q=self._q[:, :, heads],
            block_table=table,
            cache_seqlens=lengths,
            **{name: x[:, :, kv] for name, x in self._stored.items()},
        )
        own = modifications_of(self._whole, self._queries, keys, heads, self._modifications)
        return rows, heads, own

    def require_family(self) -> None:
        """Raise the error of a family or tile that does not fit, before anything is appended."""
        if self._options.family is not None or self._options.tile is not None:
            rows, _, own = self._call(0)
            dispatch.plan(rows, self._options, self._backend, None, own, compiles=False)

    def compute(self) -> tuple[Any, ...]:
        """Return out, and lse and row statistics if requested, with the axes of the call."""
        problem, options = self._whole.problem, self._whole.options
        xp, shape = array_module(self._q), (problem.batch, problem.seqlen_q)
        out = xp.empty((*self._q.shape[:-1], problem.head_dim_v), self._q.dtype)
        found = []
        for group in range(len(self._tables.rows)):
            rows, heads, own = self._call(group)
            rows = rows._replace(out=out[:, :, heads])
            found.append(dispatch.attention(rows, self._options, self._backend, 0, own)[1:])
        of_rows = [xp.concatenate(x, axis=1) for x in zip(*found, strict=True)]
        if problem.layout.packed_q:
            out = out[:, 0]
            of_rows = [x[:, :, 0].T for x in of_rows]
            # The log-sum-exp of a row of no sequence has no sink.
            lse = xp.where(self._queries.is_owned, of_rows[0], -np.inf)
            of_rows[0] = lse.astype(of_rows[0].dtype)
        else:
            out = out.reshape(*shape, *out.shape[2:])
            of_rows = [x.reshape(*shape, problem.heads_q).swapaxes(1, 2) for x in of_rows]
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


def stored_rows(whole: WholeCall) -> dict[str, Any]:
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
    return reshaped(array, (-1, 1, *last))


def bits(array: Any) -> Any:
    """Return an array as unsigned integers, which CuPy can copy in every dtype."""
    return array.view(f"uint{8 * array.itemsize}")


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """Return an array with another shape, a view where this is possible."""
    return bits(array).reshape(shape).view(array.dtype)


@ignore_fp_errors
def modifications_of(
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
        sizes = (1, problem.layout.total_q, whole.options.max_seqlen_k)
        sequence, query = xp.zeros_like(queries.query), xp.arange(len(keys))
    else:
        sizes = (problem.batch, problem.seqlen_q, problem.seqlen_k)
        sequence, query = queries.sequence, queries.query
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    array = xp.broadcast_to(array, (sizes[0], array.shape[1], *sizes[1:]))
    if array.shape[1] > 1:
        array = array[:, heads]
    own = xp.arange(array.shape[1])[:, None]
    return array[sequence[:, None, None], own, query[:, None, None], keys[:, None]]
