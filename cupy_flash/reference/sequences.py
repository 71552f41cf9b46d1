"""Row indices of the sequences of a varlen or KV cache call.

A row index is an index into an array (rows, heads, dim): a packed array, or a cache whose blocks or
pages are consecutive. The contents of integer arrays are clamped, see the notes of
`cupy_flash.attention_varlen_reference`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.strided import array_module
from cupy_flash.reference.eight_bits import as_bytes

Ints = NDArray[Any]

#: Row index of a key in a page that does not exist. Such a key reads as zeros.
MISSING = -1


def packed_spans(
    cu_seqlens: Ints, longest: int, total: int, lengths: Ints | None = None
) -> list[slice]:
    """Return the rows of each packed sequence.

    Parameters
    ----------
    cu_seqlens : integer array, shape (batch + 1,)
        Offset of the first row of each sequence, then the end of the last sequence.
    longest
        Maximum number of rows of a sequence.
    total
        Number of rows of the packed array.
    lengths : integer array, shape (batch,), optional
        Number of rows of each sequence, instead of the differences of `cu_seqlens`.
    """
    ends = np.clip(cu_seqlens.astype(np.int64), 0, total)
    first = ends[:-1]
    counts = np.diff(ends) if lengths is None else lengths.astype(np.int64)
    counts = np.clip(counts, 0, np.minimum(total - first, longest))
    return [slice(int(a), int(a + n)) for a, n in zip(first, counts, strict=True)]


def paged_rows(block_table: Ints, pages: int, page_size: int) -> Ints:
    """Return the row index of each position in the pages of one sequence.

    Parameters
    ----------
    block_table : integer array, shape (max_pages,)
        Page numbers of the sequence, ordered by position.
    pages, page_size
        Number of pages of the cache, and number of rows of a page.
    """
    page = np.repeat(block_table.astype(np.int64), page_size)
    row = page * page_size + np.tile(np.arange(page_size), len(block_table))
    return np.where((page < 0) | (page >= pages), MISSING, row)


def cached_rows(caches: Ints, blocks: int, capacity: int) -> list[Ints]:
    """Return, for each sequence, the row index of each position in its cache.

    Parameters
    ----------
    caches : integer array, shape (batch,)
        Index of the cache of each sequence. A sequence with an index out of range has no rows.
    blocks, capacity
        Number of caches, and number of rows of a cache.
    """
    return [
        np.arange(b * capacity, (b + 1) * capacity if 0 <= b < blocks else b * capacity)
        for b in caches.tolist()
    ]


def flat(blocks: Any) -> Any:
    """Return an array (blocks, rows, ...) as (blocks * rows, ...), a view if its memory allows."""
    rows = as_bytes(blocks).reshape(blocks.shape[0] * blocks.shape[1], *blocks.shape[2:])
    return rows.view(blocks.dtype)


def take(array: Any, rows: Ints) -> Any:
    """Return the rows of an array at these indices; rows with the index `MISSING` are zeros."""
    xp, stored = array_module(array), as_bytes(array)
    taken = xp.zeros((len(rows), *stored.shape[1:]), stored.dtype)
    exists = rows != MISSING
    taken[xp.asarray(exists)] = stored[xp.asarray(rows[exists])]
    return taken.view(array.dtype)


def put(array: Any, rows: Ints, new: Any) -> None:
    """Write new rows to an array at these indices; rows with the index `MISSING` are dropped.

    If the array is float8, the new rows must be float8, too.
    """
    xp = array_module(array)
    exists = rows != MISSING
    as_bytes(array)[xp.asarray(rows[exists])] = as_bytes(new)[xp.asarray(exists)]
