"""Location of each sequence of a batch in the arrays, and access to its keys, for the CPU backend.

The counterpart for the kernels is `kernels_cu/scheduler/sequences.cuh`. Both interpret any
contents of cu_seqlens, cache_seqlens, block_table and cache_batch_idx in the same way, so that no
element outside of the arrays is accessed, and the CPU backend returns the results of the kernels.

Keys and values are NumPy or CuPy arrays. Lengths, offsets and page numbers are in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.strided import array_module

Ints = NDArray[Any]


class Keys(NamedTuple):
    """Location of the keys and values of one sequence in an array (blocks, rows, heads, dim).

    Attributes
    ----------
    seqlen
        Number of keys.
    capacity
        Maximum number of keys.
    block, first
        Index along the first axis, and first row in that block.
    pages
        Page numbers of the sequence, in order: indices along the first axis. None if the sequence
        is not paged. An index outside of the array counts as a page of zeros.
    """

    seqlen: int
    capacity: int
    block: int
    first: int
    pages: Ints | None


class Queries(NamedTuple):
    """Query rows of one sequence in packed q and out."""

    first: int
    seqlen: int

    @property
    def rows(self) -> slice:
        """Slice of the rows."""
        return slice(self.first, self.first + self.seqlen)


@dataclass(frozen=True)
class AllQueries:
    """Query rows of all sequences: arrays of the fields of `Queries`, indexed by sequence."""

    firsts: Ints
    seqlens: Ints

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, b: int) -> Queries:
        return Queries(int(self.firsts[b]), int(self.seqlens[b]))

    def __iter__(self) -> Iterator[Queries]:
        return map(Queries, self.firsts.tolist(), self.seqlens.tolist())


@dataclass(frozen=True)
class AllKeys:
    """Keys of all sequences: arrays of the fields of `Keys`, indexed by sequence."""

    seqlens: Ints
    capacities: Ints
    blocks: Ints
    firsts: Ints
    block_table: Ints | None

    def __len__(self) -> int:
        return len(self.seqlens)

    def __getitem__(self, b: int) -> Keys:
        return Keys(
            int(self.seqlens[b]),
            int(self.capacities[b]),
            int(self.blocks[b]),
            int(self.firsts[b]),
            None if self.block_table is None else self.block_table[b],
        )

    def __iter__(self) -> Iterator[Keys]:
        pages = repeat(None) if self.block_table is None else self.block_table
        columns = self.seqlens, self.capacities, self.blocks, self.firsts
        return map(Keys, *(column.tolist() for column in columns), pages)


def find_queries(cu_seqlens_q: Ints, total_q: int, max_seqlen_q: int) -> AllQueries:
    """Return the query rows of packed sequences within q; none where cu_seqlens_q decreases."""
    ends = np.clip(cu_seqlens_q.astype(np.int64), 0, total_q)
    firsts = ends[:-1]
    return AllQueries(firsts, np.clip(ends[1:] - firsts, 0, max_seqlen_q))


def unassigned_rows(queries: AllQueries, total_q: int) -> list[slice]:
    """Return the ranges of rows in packed q and out that belong to no sequence."""
    nonempty = queries.seqlens > 0
    firsts, seqlens = queries.firsts[nonempty], queries.seqlens[nonempty]
    order = np.argsort(firsts, kind="stable")
    ends = np.maximum.accumulate((firsts + seqlens)[order])
    begins, ends = np.append(0, ends), np.append(firsts[order], total_q)
    missing = begins < ends
    return list(map(slice, begins[missing].tolist(), ends[missing].tolist()))


def find_packed_keys(
    cu_seqlens_k: Ints | None,
    max_seqlen_k: int,
    *,
    batch: int,
    total_k: int,
    page_size: int,
    seqused_k: Ints | None,
    block_table: Ints | None,
) -> AllKeys:
    """Return the keys of each sequence of a `flash_attention_varlen` call.

    cu_seqlens_k gives the first row of a packed sequence. seqused_k, or the difference in
    cu_seqlens_k, gives its length, limited by max_seqlen_k and by the packed array or the pages.
    """
    zeros = np.zeros(batch, np.int64)
    firsts, capacities = zeros, zeros + max_seqlen_k
    ends = None if cu_seqlens_k is None else cu_seqlens_k.astype(np.int64)
    if block_table is not None:
        capacities = np.minimum(capacities, block_table.shape[1] * page_size)
    elif ends is not None:
        firsts = np.clip(ends[:-1], 0, total_k)
        capacities = np.minimum(capacities, total_k - firsts)
    keys = capacities
    if seqused_k is not None:
        keys = seqused_k.astype(np.int64)
    elif ends is not None:
        clipped = np.maximum(ends, 0)
        keys = clipped[1:] - clipped[:-1]
    return AllKeys(np.clip(keys, 0, capacities), capacities, zeros, firsts, block_table)


def find_cached_keys(
    cache_seqlens: Ints,
    *,
    cache_shape: tuple[int, ...],
    cache_batch_idx: Ints | None,
    block_table: Ints | None,
) -> AllKeys:
    """Return the keys of each sequence in a KV cache.

    Parameters
    ----------
    cache_seqlens
        Number of keys of each sequence, limited by the capacity of the cache.
    cache_shape
        Shape (caches, capacity, heads_kv, dim) or (pages, page_size, heads_kv, dim) of the cache.
    cache_batch_idx
        Index of each sequence's cache. An index out of range gives the sequence capacity 0.
    block_table
        Page numbers of each sequence, (batch, max_pages).
    """
    caches, rows = cache_shape[:2]
    batch = len(cache_seqlens)
    zeros = np.zeros(batch, np.int64)
    blocks, capacities = np.arange(batch), zeros + rows
    if block_table is not None:
        blocks, capacities = zeros, zeros + block_table.shape[1] * rows
    elif cache_batch_idx is not None:
        blocks = cache_batch_idx.astype(np.int64)
        is_valid = (blocks >= 0) & (blocks < caches)
        blocks, capacities = np.where(is_valid, blocks, 0), np.where(is_valid, rows, 0)
    seqlens = np.clip(cache_seqlens, 0, capacities)
    return AllKeys(seqlens, capacities, blocks, zeros, block_table)


def read(blocks: Any, keys: Keys, first: int = 0, stop: int | None = None) -> Any:
    """Return rows [first, stop) of one sequence, by default all, as (rows, heads_kv, dim).

    The result is a view unless the rows are in pages.
    """
    stop = keys.seqlen if stop is None else stop
    xp = array_module(blocks)
    if first >= stop or len(blocks) == 0:
        return xp.zeros((max(stop - first, 0), *blocks.shape[2:]), blocks.dtype)
    if keys.pages is None:
        return blocks[keys.block, keys.first + first : keys.first + stop]
    pages, page_size = blocks.shape[:2]
    if stop - first < page_size:
        # Copy only the needed rows: indexing whole pages would copy more.
        rows = xp.empty((stop - first, *blocks.shape[2:]), blocks.dtype)
        for page, in_page, in_result in _rows_of_pages(keys.pages, page_size, first, stop):
            rows[in_result] = blocks[page, in_page] if 0 <= page < pages else 0
        return rows
    first_page = first // page_size
    needed = keys.pages[first_page : -(-stop // page_size)]
    missing = (needed < 0) | (needed >= pages)
    rows = blocks[xp.asarray(np.where(missing, 0, needed))]
    if missing.any():
        rows[xp.asarray(missing)] = 0
    skipped = first_page * page_size
    return rows.reshape(-1, *blocks.shape[2:])[first - skipped : stop - skipped]


def _rows_of_pages(
    pages: Ints, page_size: int, first: int, stop: int
) -> Iterator[tuple[int, slice, slice]]:
    """Yield, for each page that holds some of the rows [first, stop), its number and two slices.

    The slices are the rows within the page, and the same rows counted from `first`.
    """
    row = first
    while row < stop:
        index, start = divmod(row, page_size)
        count = min(page_size - start, stop - row)
        in_result = slice(row - first, row - first + count)
        yield int(pages[index]), slice(start, start + count), in_result
        row += count


class PagedRows:
    """View of one sequence's paged keys or values as an array (1, seqlen, heads, dim).

    An index ``[0:1, first:stop, heads]`` gathers the selected rows; no other index is supported.
    """

    def __init__(self, blocks: Any, keys: Keys) -> None:
        self._blocks, self._keys = blocks, keys
        self.shape = (1, keys.seqlen, *blocks.shape[2:])
        self.dtype = blocks.dtype

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Any:
        _, rows, heads = index
        return read(select_heads(self._blocks, heads), self._keys, rows.start, rows.stop)[None]


def select_heads(blocks: Any, heads: slice) -> Any:
    """Return some heads of an array (blocks, rows, heads, dim), or of a `QuantizedBlocks`."""
    select = getattr(blocks, "select_heads", None)
    return blocks[:, :, heads] if select is None else select(heads)


def append(blocks: Any, keys: Keys, new: Any) -> None:
    """Append rows (seqlen_new, heads_kv, dim) to a sequence, up to its capacity.

    Rows for a page number outside of the array are dropped.
    """
    stop = min(keys.seqlen + len(new), keys.capacity)
    if keys.seqlen >= stop:
        return
    if keys.pages is None:
        blocks[keys.block, keys.seqlen : stop] = new[: stop - keys.seqlen]
        return
    pages, page_size = blocks.shape[:2]
    for page, in_page, in_result in _rows_of_pages(keys.pages, page_size, keys.seqlen, stop):
        if 0 <= page < pages:
            blocks[page, in_page] = new[in_result]


def longer(keys: Keys, seqlen_new: int) -> Keys:
    """Return the sequence's `Keys` after `append` of `seqlen_new` rows."""
    return keys._replace(seqlen=min(keys.seqlen + seqlen_new, keys.capacity))
