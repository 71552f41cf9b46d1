"""Lists of keys as block tables of a cache whose pages have one row."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays import kinds
from cupy_flash.arrays.strided import array_module, as_cupy
from cupy_flash.calls.check.whole_call import WholeCall
from cupy_flash.calls.key_lists.modifications import depend_on_keys
from cupy_flash.calls.key_lists.queries import Queries
from cupy_flash.gpu import key_lists
from cupy_flash.problem.problem import Problem


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
    shape = checked_shape(tuple(indices.shape), problem)
    indices = indices.reshape(shape)
    if problem.layout.packed_q:
        return indices
    return xp.broadcast_to(indices, (problem.batch, problem.seqlen_q, *shape[2:]))


def checked_shape(shape: tuple[int, ...], problem: Problem) -> tuple[int, ...]:
    """Return the shape of lists with an axis for the queries of a sequence, or for packed ones 1.

    Raises
    ------
    ValueError
        For a shape that does not fit the call.
    """
    heads = f"{problem.heads_kv} or 1"
    rows: tuple[int, ...] = (problem.batch, problem.seqlen_q)
    axes = (
        f"(batch, seqlen_q or 1, heads, n) = ({rows[0]}, {rows[1]} or 1, {heads}, n), or without "
        "the second axis"
    )
    given = shape
    if problem.layout.packed_q:
        rows = (problem.layout.total_q,)
        axes = f"(total_q, heads, n) = ({rows[0]}, {heads}, n)"
    elif len(shape) == 3:
        shape = (shape[0], 1, *shape[1:])
    fits = len(shape) == len(rows) + 2 and shape[0] == rows[0]
    if not fits or shape[1:-2] not in ((1,), rows[1:]) or shape[-2] not in (1, problem.heads_kv):
        raise ValueError(f"key_indices has shape {given}; expected {axes}")
    return (shape[0], 1, *shape[1:]) if problem.layout.packed_q else shape


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
    if queries.first_rows is None:
        pages = whole.arguments.block_table[
            queries.sequence[of_list], keys // layout.page_size
        ].astype(np.int64)
        is_page = (pages >= 0) & (pages < layout.pages)
        rows = np.where(is_page, pages * layout.page_size + keys % layout.page_size, -1)
    else:
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
    needs_keys = depend_on_keys(whole)
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
    if queries.first_rows is None:
        arrays["block_table"] = whole.arguments.block_table
        arrays["sequences"] = queries.sequence.astype(np.int32)
        names = ("block_table_stride", "page_size", "pages")
        sizes |= {name: getattr(layout, name) for name in names}
    else:
        arrays["first_rows"] = queries.first_rows.astype(np.int64)
    key_lists.compact(arrays, sizes)
    return tables
