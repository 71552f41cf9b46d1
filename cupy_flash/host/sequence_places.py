"""Where each sequence of a batch lies, found on the host; and its keys, read and written.

The counterpart of `kernels_cu/grid/sequences.cuh` for the CPU backend. It gives the same meaning to
any contents of cu_seqlens, cache_seqlens, block_table and cache_batch_idx, so that no element
outside of the arrays is accessed, and results agree with the kernels'.

The arrays of keys and values are NumPy's or CuPy's; those of lengths and places are brought here.
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
    """Where the keys, and values, of one sequence lie.

    Attributes
    ----------
    seqlen
        How many there are.
    capacity
        How many there can be.
    block, first
        Index along the first axis of an array (blocks, rows, heads, dim), and the first row there.
    pages
        Indices along that axis, in order, where each holds a page of the sequence; None where it
        is not paged. Those outside of the array are pages of zeros.
    """

    seqlen: int
    capacity: int
    block: int
    first: int
    pages: Ints | None


class Queries(NamedTuple):
    """The rows of one sequence in packed q and out."""

    first: int
    seqlen: int

    @property
    def rows(self) -> slice:
        """The rows as an index."""
        return slice(self.first, self.first + self.seqlen)


@dataclass(frozen=True)
class AllQueries:
    """The rows of all sequences, as columns that are indexed by the sequence."""

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
    """The keys of all sequences, as columns that are indexed by the sequence; see `Keys`."""

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
    """The rows of each packed sequence: within the array, and none where cu_seqlens_q decreases."""
    ends = np.clip(cu_seqlens_q.astype(np.int64), 0, total_q)
    firsts = ends[:-1]
    return AllQueries(firsts, np.clip(ends[1:] - firsts, 0, max_seqlen_q))


def rows_of_none(queries: AllQueries, total_q: int) -> list[slice]:
    """Return the ranges of rows in packed q and out that belong to no sequence."""
    some = queries.seqlens > 0
    firsts, seqlens = queries.firsts[some], queries.seqlens[some]
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
    """The keys of each sequence of a `flash_attention_varlen`.

    Packed ones begin where cu_seqlens_k says. Their number is seqused_k's, or the difference in
    cu_seqlens_k, but no more than max_seqlen_k, than the packed array or the pages hold.
    """
    none = np.zeros(batch, np.int64)
    firsts, capacities = none, none + max_seqlen_k
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
        some = np.maximum(ends, 0)
        keys = some[1:] - some[:-1]
    return AllKeys(np.clip(keys, 0, capacities), capacities, none, firsts, block_table)


def find_cached_keys(
    cache_seqlens: Ints,
    *,
    cache_shape: tuple[int, ...],
    cache_batch_idx: Ints | None,
    block_table: Ints | None,
) -> AllKeys:
    """The keys of each sequence in a cache.

    Parameters
    ----------
    cache_seqlens
        Their number, no more of which counts than the cache has room for.
    cache_shape
        (caches, capacity, heads_kv, dim) or (pages, page_size, heads_kv, dim).
    cache_batch_idx
        Which cache each sequence has; one that is none of them leaves it without room for a key.
    block_table
        (batch, max_pages)
    """
    caches, rows = cache_shape[:2]
    batch = len(cache_seqlens)
    none = np.zeros(batch, np.int64)
    blocks, capacities = np.arange(batch), none + rows
    if block_table is not None:
        blocks, capacities = none, none + block_table.shape[1] * rows
    elif cache_batch_idx is not None:
        blocks = cache_batch_idx.astype(np.int64)
        is_one = (blocks >= 0) & (blocks < caches)
        blocks, capacities = np.where(is_one, blocks, 0), np.where(is_one, rows, 0)
    seqlens = np.clip(cache_seqlens, 0, capacities)
    return AllKeys(seqlens, capacities, blocks, none, block_table)


def read(blocks: Any, keys: Keys, first: int = 0, stop: int | None = None) -> Any:
    """Rows ``first`` to ``stop``, all if not given, of one sequence: (rows, heads_kv, dim).

    A view, unless they are in pages.
    """
    stop = keys.seqlen if stop is None else stop
    xp = array_module(blocks)
    if first >= stop or len(blocks) == 0:
        return xp.zeros((max(stop - first, 0), *blocks.shape[2:]), blocks.dtype)
    if keys.pages is None:
        return blocks[keys.block, keys.first + first : keys.first + stop]
    pages, page_size = blocks.shape[:2]
    if stop - first < page_size:
        # Of large pages not all of their rows.
        rows = xp.empty((stop - first, *blocks.shape[2:]), blocks.dtype)
        for page, there, here in _rows_of_pages(keys.pages, page_size, first, stop):
            rows[here] = blocks[page, there] if 0 <= page < pages else 0
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
    """Each page that has some of a sequence's rows ``first`` to ``stop``.

    Yields its number, which of its rows they are, and which of those asked for.
    """
    row = first
    while row < stop:
        index, start = divmod(row, page_size)
        count = min(page_size - start, stop - row)
        here = slice(row - first, row - first + count)
        yield int(pages[index]), slice(start, start + count), here
        row += count


class PagedRows:
    """One sequence's keys or values in pages, read where an index asks for some.

    Stands for an array (1, seqlen, heads, dim) that is indexed as ``[0:1, first:stop, heads]``.
    """

    def __init__(self, blocks: Any, keys: Keys) -> None:
        self._blocks, self._keys = blocks, keys
        self.shape = (1, keys.seqlen, *blocks.shape[2:])
        self.dtype = blocks.dtype

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Any:
        _, rows, heads = index
        return read(heads_of(self._blocks, heads), self._keys, rows.start, rows.stop)[None]


def heads_of(blocks: Any, heads: slice) -> Any:
    """Some heads of an array (blocks, rows, heads, dim), or of what stands for one."""
    of_heads = getattr(blocks, "of_heads", None)
    return blocks[:, :, heads] if of_heads is None else of_heads(heads)


def append(blocks: Any, keys: Keys, new: Any) -> None:
    """Write rows (seqlen_new, heads_kv, dim) behind those of a sequence, as many as there is room.

    What would go to a page outside of the array is dropped.
    """
    stop = min(keys.seqlen + len(new), keys.capacity)
    if keys.seqlen >= stop:
        return
    if keys.pages is None:
        blocks[keys.block, keys.seqlen : stop] = new[: stop - keys.seqlen]
        return
    pages, page_size = blocks.shape[:2]
    for page, there, here in _rows_of_pages(keys.pages, page_size, keys.seqlen, stop):
        if 0 <= page < pages:
            blocks[page, there] = new[here]


def longer(keys: Keys, seqlen_new: int) -> Keys:
    """The keys after `append`."""
    return keys._replace(seqlen=min(keys.seqlen + seqlen_new, keys.capacity))
