"""Lists of each KV head as one call: a query becomes one query for each of its KV heads.

A row of keys then is one row for each KV head, without a copy if the heads of a row are stored
consecutively:

    rows     k[5] of head 0 and 1, k[6] of head 0 and 1        10: k[5, 0], 11: k[5, 1], 12: k[6, 0]
    lists    query 3: head 0 lists 5 6, head 1 lists 5         query 6: 10 12, query 7: 11
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.strided import array_module
from cupy_flash.calls.key_lists.queries import Queries
from cupy_flash.calls.key_lists.stored import reshaped
from cupy_flash.calls.key_lists.tables import Tables

# Arrays of queries that modifications read.
_READ = ("sequence", "query", "position", "row")


class Listed(NamedTuple):
    """Queries, block tables and stored rows of a call.

    Attributes
    ----------
    queries, tables, stored
        See `Queries`, `Tables` and `stored_rows`; None for arrays that are not stored.
    folded
        Number of queries that each query of the call has become: 1, or its number of KV heads.
    """

    queries: Queries
    tables: Tables
    stored: Mapping[str, Any]
    folded: int


def fold_heads(queries: Queries, tables: Tables, stored: Mapping[str, Any]) -> Listed:
    """Return the call with a query for each KV head if each has a list and rows need no copy.

    Only those arrays of queries are repeated that modifications read, if they depend on keys.
    """
    heads, count = tables.rows.shape[:2]
    given = {name: x for name, x in stored.items() if x is not None}
    limit = np.iinfo(np.int32).max
    if heads == 1 or any(len(x) * heads > limit or not _can_fold(x) for x in given.values()):
        return Listed(queries, tables, stored, 1)
    xp = array_module(tables.rows)

    def of_queries(x: Any) -> Any:
        return xp.ascontiguousarray(x.swapaxes(0, 1)).reshape(1, count * heads, *x.shape[2:])

    head = xp.arange(heads, dtype=np.int32)[:, None, None]
    table = xp.where(tables.rows < 0, tables.rows, tables.rows * heads + head)
    keys = None if tables.keys is None else of_queries(tables.keys)
    if keys is not None:
        read = {name: x for name in _READ if (x := getattr(queries, name)) is not None}
        queries = queries._replace(
            **{name: xp.repeat(x, heads) for name, x in read.items()},
            kv_head=xp.tile(xp.arange(heads), count),
        )
    rows = {name: reshaped(x, (-1, 1, 1, *x.shape[3:])) for name, x in given.items()}
    tables = Tables(of_queries(table), keys, of_queries(tables.counts))
    return Listed(queries, tables, rows, heads)


def _can_fold(array: Any) -> bool:
    """Return whether the heads of rows (rows, 1, heads, ...) have one distance, over all rows."""
    return len(array) < 2 or array.strides[0] == array.shape[2] * array.strides[2]
