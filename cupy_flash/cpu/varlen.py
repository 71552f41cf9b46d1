"""Forward pass of packed, cached and paged sequences on the CPU.

Sequences of one shape at equal distances form one forward pass. Keys are read in place. Keys in
pages are gathered: one KV tile at a time, or all keys of a sequence if they are read many times.
Threads compute the query tiles of all sequences (`cupy_flash.cpu.forward`), but the calling thread
computes short sequences alone. With ``batch_invariant``, `cupy_flash.cpu.rowwise` computes all
sequences.

The caller has checked the arguments. Nevertheless, lengths and offsets outside of the arrays have
the same meaning as in the kernels (`cupy_flash.arrays.sequences`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays import quantized, sequences
from cupy_flash.arrays.numpy_errors import ignore_fp_errors
from cupy_flash.arrays.quantized import QuantizedBlocks
from cupy_flash.arrays.rotary import rotated
from cupy_flash.arrays.sequences import (
    AllQueries,
    Keys,
    PagedRows,
    find_cached_keys,
)
from cupy_flash.arrays.strided import dtype_name
from cupy_flash.cpu import forward as cpu_forward
from cupy_flash.cpu import padding, rowwise, untiled
from cupy_flash.cpu.batching import Run, Steps, cached_steps, equal_runs
from cupy_flash.cpu.forward_pass import ELEMENTS_AT_ONCE, Pass, Scratch, compute_dtype
from cupy_flash.cpu.row_results import RowResults
from cupy_flash.cpu.thread_pool import Stop, cpus, run_in_parallel, single_threaded_blas
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR, Pairs
from cupy_flash.problem.problem import make_contiguous_problem
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]
Blocks = Array | QuantizedBlocks

# Minimum number of query-key pairs, over all heads, of a sequence that several threads compute. The
# NumPy calls for smaller sequences are so short that threads mostly wait for the GIL: 1000
# sequences with 1 query and 20 keys take 97 ms on one thread, 147 ms on two.
MIN_PAIRS_FOR_THREADS = 1 << 15

# Minimum number of query rows per key for which all pages of a sequence are gathered first.
MIN_ROWS_TO_GATHER_FOR = 128

# Maximum number of packed query rows of a call whose steps are cached.
MAX_ROWS_TO_CACHE = 1 << 16

# Limits in batch-invariant calls: query rows per work item, and query-key pairs of a sequence that
# is a single work item.
MAX_ROWS_PER_ITEM = 128
MAX_PAIRS_PER_ITEM = 1 << 16


@ignore_fp_errors
def varlen_forward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    results: RowResults,
    *,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Array | None,
    block_table: Array | None,
    causal: bool,
    softmax_scale: float,
    scales: CacheScales | None = None,
    tile: Tile | None = None,
    batch_invariant: bool = False,
    threads: int | None = None,
    bound_mods: BoundModifications | None = None,
) -> None:
    """Write attention of packed sequences to ``out``, and results per row to ``results``.

    Parameters
    ----------
    q : numpy.ndarray, (total_q, heads_q, head_dim)
        Queries in float16, bfloat16 (ml_dtypes), float32 or float64. Any strides are allowed.
    k : numpy.ndarray, (total_k, heads_kv, head_dim)
        Keys; with ``block_table`` (pages, page_size, heads_kv, head_dim).
    v : numpy.ndarray, (total_k, heads_kv, head_dim_v)
        Values; with ``block_table`` (pages, page_size, heads_kv, head_dim_v).
    out : numpy.ndarray, (total_q, heads_q, head_dim_v)
        Output; 0 in the rows that belong to no sequence. Must not overlap the inputs.
    results : RowResults
        Outputs of shape (heads_q, total_q). Rows that belong to no sequence attend to no key.
    cu_seqlens_q : numpy.ndarray, (batch + 1,)
        First row of each sequence in q, then the end of the last sequence.
    cu_seqlens_k : numpy.ndarray, (batch + 1,), or None
        The same for k and v. With ``block_table`` only the differences are used, as lengths.
    max_seqlen_q, max_seqlen_k : int
        Maximum number of query rows and keys of a sequence; any further ones are ignored.
    seqused_k : numpy.ndarray, (batch,), or None
        Number of keys of each sequence; overrides the lengths in ``cu_seqlens_k``.
    block_table : numpy.ndarray, (batch, max_pages), or None
        Page numbers of each sequence, in order.
    causal : bool
        Whether query ``i`` of a sequence attends only to its keys ``j <= i + seqlen_k - seqlen_q``.
    softmax_scale : float
        Factor on the scores.
    scales : CacheScales, optional
        Scales of 8-bit keys and values.
    tile : Tile, optional
        Tile size; chosen by default. With ``batch_invariant``, only its Bc affects the bits.
    batch_invariant : bool
        Whether the bits of a row depend only on its query and on the keys that it attends to. NaN
        and inf in the values of masked keys may still matter, see `cupy_flash.cpu.rowwise`.
    threads : int, optional
        Maximum number of workers; by default the number of CPUs of this process.
    bound_mods : BoundModifications, optional
        Masks and score modifications, without seqlens_k; bias and mask have three axes.
    """
    if not out.size:
        return
    paged = block_table is not None
    integers = cu_seqlens_q, cu_seqlens_k, seqused_k
    # Modifications use indices within a sequence, and 8-bit keys are dequantized one sequence at a
    # time. In these cases, each sequence is a separate pass. The same holds for row
    # statistics, which the code for padded sequences does not compute.
    join = not batch_invariant and bound_mods is None and scales is None
    join = join and not results.has_statistics
    step_key: tuple[Any, ...] = (
        *(None if x is None else (x.tobytes(), x.dtype) for x in integers),
        *(max_seqlen_q, max_seqlen_k, len(q), k.shape[1] if paged else len(k)),
        *(q.shape[1], k.shape[-2], q.shape[2], join, tile is None),
    )
    if paged or len(q) > MAX_ROWS_TO_CACHE:
        steps = Steps.make(block_table, *step_key)
    else:
        steps = cached_steps(*step_key)
    for unassigned in steps.unassigned_rows:
        out[unassigned] = 0
        results.each(operator.itemgetter((slice(None), unassigned))).write_empty()
    runs = steps.runs
    if steps.groups:
        runs = runs + _pad(steps, q, k, v, out, results.lse, causal, softmax_scale, threads)
    items = []
    for b, rows, keys, count in runs:
        # Reshape (total, ...) to (count, seqlen, ...).
        span = slice(rows.first, rows.first + count * rows.seqlen)
        q_rows, out_rows = (x[span].reshape(count, rows.seqlen, *x.shape[1:]) for x in (q, out))
        result_rows = _by_sequence(results, span, count, rows.seqlen)
        first = FIRST_PAIR
        if bound_mods is not None:
            first = FIRST_PAIR._replace(b=b, q_start=rows.first, k_start=keys.first)
        items.append(_WorkItem.whole(q_rows, out_rows, result_rows, keys, first))
    k, v = (k, v) if paged else (k[None], v[None])
    batch = _Batch(*_blocks(k, v, scales, q.dtype), causal, softmax_scale, bound_mods)
    _forward(items, batch, tile, batch_invariant, threads)


@ignore_fp_errors
def kvcache_forward(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    out: Array,
    results: RowResults,
    *,
    lengths: Array,
    cache_batch_idx: Array | None,
    block_table: Array | None,
    causal: bool,
    softmax_scale: float,
    scales: CacheScales | None = None,
    tile: Tile | None = None,
    batch_invariant: bool = False,
    threads: int | None = None,
    bound_mods: BoundModifications | None = None,
) -> None:
    """Write attention over a KV cache to ``out``, and results per row to ``results``.

    Parameters
    ----------
    q : numpy.ndarray, (batch, seqlen_q, heads_q, head_dim)
        Queries, see :func:`varlen_forward`.
    k_cache : numpy.ndarray, (caches, seqlen_cache, heads_kv, head_dim)
        Keys; with ``block_table`` (pages, page_size, heads_kv, head_dim).
    v_cache : numpy.ndarray, (caches, seqlen_cache, heads_kv, head_dim_v)
        Values; with ``block_table`` (pages, page_size, heads_kv, head_dim_v).
    out : numpy.ndarray, (batch, seqlen_q, heads_q, head_dim_v)
        Output; must not overlap the inputs.
    results : RowResults
        Outputs of shape (batch, heads_q, seqlen_q).
    lengths : numpy.ndarray, (batch,)
        Number of rows of each sequence in the cache, including rows that :func:`append` wrote.
    cache_batch_idx : numpy.ndarray, (batch,), or None
        Index of each sequence's cache; 0, 1, ... if None.
    block_table, causal, softmax_scale, scales, tile, batch_invariant, threads, bound_mods
        Arguments of :func:`varlen_forward`, except that bias and mask have four axes.
    """
    all_keys = find_cached_keys(
        lengths,
        cache_shape=k_cache.shape,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
    )
    seqlen_q = q.shape[1]
    queries = AllQueries(np.arange(len(q)) * seqlen_q, np.full(len(q), seqlen_q))
    items = []
    joins = not batch_invariant and scales is None
    for b, _, keys, count in equal_runs(queries, all_keys, joins):
        batch_range = slice(b, b + count)
        result_rows = results.each(operator.itemgetter(batch_range))
        first = FIRST_PAIR if bound_mods is None else FIRST_PAIR._replace(b=b)
        items.append(_WorkItem.whole(q[batch_range], out[batch_range], result_rows, keys, first))
    batch = _Batch(*_blocks(k_cache, v_cache, scales, q.dtype), causal, softmax_scale, bound_mods)
    _forward(items, batch, tile, batch_invariant, threads)


def _blocks(
    k: Array, v: Array, scales: CacheScales | None, dtype: np.dtype[Any]
) -> tuple[Blocks, Blocks]:
    """Return keys and values; 8-bit ones are wrapped, so that indexing dequantizes them."""
    if scales is None:
        return k, v
    compute = compute_dtype(dtype)
    return QuantizedBlocks(k, scales.k, compute), QuantizedBlocks(v, scales.v, compute)


@ignore_fp_errors
def append(
    k_cache: Array,
    v_cache: Array | None,
    k: Array | list[Array],
    v: Array | list[Array] | None,
    *,
    lengths: Array,
    cache_batch_idx: Array | None,
    block_table: Array | None,
    scales: CacheScales | None = None,
) -> None:
    """Append new keys and values to each sequence in a KV cache.

    Parameters
    ----------
    k_cache, v_cache, cache_batch_idx, block_table
        Arguments of :func:`kvcache_forward`. Only the appended rows of the caches change.
    k, v : numpy.ndarray, (batch, seqlen_new, heads_kv, dim), or list of arrays
        New rows in the dtype of the caches, or to be quantized. A list holds one array (seqlen_new,
        heads_kv, dim) per sequence. Rows past the capacity of the cache are dropped. v and v_cache
        are None if the keys hold the values (MLA).
    lengths : numpy.ndarray, (batch,)
        Number of rows of each sequence in the cache before the call.
    scales : CacheScales, optional
        Scales of 8-bit caches.
    """
    all_keys = find_cached_keys(
        lengths,
        cache_shape=k_cache.shape,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
    )
    of_keys, of_values = (None, None) if scales is None else scales[:2]
    both = (k_cache, of_keys, k), (v_cache, of_values, v)
    for b, keys in enumerate(all_keys):
        for cache, scale, new in both:
            if cache is None or new is None:
                continue
            if scales is None:
                sequences.append(cache, keys, new[b])
            else:
                quantized.append(cache, scale, keys, new[b], compute_scales=scales.computed)


@ignore_fp_errors
def rotate(
    x: Array,
    cos: Array,
    sin: Array,
    first_positions: Array,
    *,
    interleaved: bool,
    advance: bool,
) -> Array:
    """Return a copy of ``x`` with rotary position embedding applied to its leading columns.

    The arguments are those of `cupy_flash.arrays.rotary.rotated`. float64 arrays are computed in
    float64, all others in float32.
    """
    rotated_rows: Array = rotated(
        x,
        cos,
        sin,
        first_positions,
        interleaved=interleaved,
        advance=advance,
        compute=compute_dtype(x.dtype),
    )
    return rotated_rows.astype(x.dtype, copy=False)


def _pad(
    steps: Steps,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    causal: bool,
    softmax_scale: float,
    threads: int | None,
) -> list[Run]:
    """Compute the padded groups; return a run for each sequence that remains to be computed."""
    left: list[int] = []

    def work(groups: Iterator[padding.Group]) -> None:
        with Scratch.borrowed() as scratch:
            for group in groups:
                done = padding.forward(
                    *(group, q, k, v, out, lse),
                    scratch=scratch,
                    causal=causal,
                    softmax_scale=softmax_scale,
                )
                if not done:
                    left.extend(group.members)

    workers = min(threads or cpus(), max(1, steps.padded_pairs // cpu_forward.MIN_PAIRS_PER_WORKER))
    with single_threaded_blas:
        run_in_parallel(workers, iter(steps.groups), work, Stop())
    return [Run(b, steps.queries[b], steps.keys[b], 1) for b in sorted(left)]


def _by_sequence(results: RowResults, span: slice, count: int, seqlen: int) -> RowResults:
    """Return views of packed rows, each of shape (count, heads, seqlen)."""
    return results.each(lambda x: x[:, span].reshape(len(x), count, seqlen).swapaxes(0, 1))


class CacheScales(NamedTuple):
    """Scales of 8-bit caches: numbers or arrays that broadcast to (blocks, rows, heads_kv).

    If `computed` is set, :func:`append` computes the scales of the rows that it writes.
    """

    k: Any
    v: Any
    computed: bool = False


class _WorkItem(NamedTuple):
    """Work item: sequences of one shape, or some rows and heads of one sequence."""

    q: Array  # (sequences, rows, heads, head_dim)
    out: Array  # (sequences, rows, heads, head_dim_v)
    results: RowResults  # arrays (sequences, heads, rows)
    keys: Keys  # keys of the first sequence; the other sequences follow, or are in the next blocks
    q_offset: int  # position of the sequence's first row among its keys
    first: Pairs  # indices of the first row and head; in modified calls also of the sequence
    kv_heads: slice  # KV heads of the item's query heads

    @classmethod
    def whole(
        cls, q: Array, out: Array, results: RowResults, keys: Keys, first: Pairs
    ) -> _WorkItem:
        """Return a work item of all rows and heads of the sequences."""
        return cls(q, out, results, keys, keys.seqlen - q.shape[1], first, slice(None))

    @property
    def pairs(self) -> int:
        """Number of query-key pairs, including masked pairs."""
        return self.q.shape[0] * self.q.shape[1] * self.q.shape[2] * self.keys.seqlen

    def write_without_keys(self, sinks: Array | None) -> None:
        """Write the results of sequences that have no keys."""
        self.out[...] = 0
        self.results.write_empty(-np.inf if sinks is None else sinks[:, None])

    def split(self, heads_kv: int) -> Iterator[_WorkItem]:
        """Yield work items for `rowwise`, small enough for its scratch and for all threads."""
        group = self.q.shape[2] // heads_kv
        if max(self.pairs, self.q.size) <= MAX_PAIRS_PER_ITEM:
            yield self
            return
        step = max(1, MAX_ROWS_PER_ITEM // group)
        # The last rows come first, as they attend to the most keys in causal calls.
        for first in reversed(range(0, self.q.shape[1], step)):
            rows = slice(first, first + step)
            for kv_head in range(heads_kv):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                yield _WorkItem(
                    self.q[:, rows, heads],
                    self.out[:, rows, heads],
                    self.results.each(operator.itemgetter((slice(None), heads, rows))),
                    self.keys,
                    self.q_offset,
                    self.first._replace(h=heads.start, row=first),
                    slice(kv_head, kv_head + 1),
                )


@dataclass(frozen=True)
class _Batch:
    """Keys, values and parameters that are the same for all sequences of a call."""

    k: Blocks  # (blocks, rows, heads_kv, head_dim)
    v: Blocks  # (blocks, rows, heads_kv, head_dim_v)
    causal: bool
    softmax_scale: float
    bound_mods: BoundModifications | None

    def as_pass(self, item: _WorkItem, tile: Tile, most_bytes: int) -> Pass:
        """Return the pass of a work item with all heads; copy at most `most_bytes` of pages."""
        keys, count = item.keys, len(item.q)
        k: Array | PagedRows
        v: Array | PagedRows
        if self._is_scattered(keys) and not self._copies_rows(item, most_bytes):
            k, v = PagedRows(self.k, keys), PagedRows(self.v, keys)
        else:
            k, v = (_gather_keys(x, keys, count) for x in (self.k, self.v))
        return Pass.make(
            item.q,
            k,
            v,
            item.out,
            item.results,
            self.causal,
            item.q_offset,
            self.softmax_scale,
            tile,
            self.bound_mods,
            item.first,
        )

    def computes_small(self, item: _WorkItem, tile: Tile) -> bool:
        """Compute a small work item in one step; return False, without output, for others."""
        if self.bound_mods is not None or item.keys.pages is not None:
            return False
        if item.results.has_statistics:
            return False
        k, v = (_gather_keys(x, item.keys, len(item.q)) for x in (self.k, self.v))
        return untiled.forward_small(
            item.q,
            k,
            v,
            item.out,
            item.results.lse,
            self.causal,
            item.q_offset,
            self.softmax_scale,
            tile,
        )

    def _is_scattered(self, keys: Keys) -> bool:
        """Return whether keys must be gathered or dequantized before they are multiplied."""
        return keys.pages is not None or isinstance(self.k, QuantizedBlocks)

    def _copies_rows(self, item: _WorkItem, most_bytes: int) -> bool:
        """Return whether to gather all keys of a sequence first, as each is read for many rows.

        512 rows, 8192 keys in pages of 16, 8 heads of 128, float16: 200 ms instead of 413 ms with
        one KV tile gathered at a time.
        """
        heads_kv = self.k.shape[2]
        rows = item.q.shape[1] * (item.q.shape[2] // heads_kv)
        columns = self.k.shape[3] + self.v.shape[3]
        size = item.keys.seqlen * heads_kv * columns * self.k.itemsize
        return rows >= MIN_ROWS_TO_GATHER_FOR and size <= most_bytes

    def compute_rowwise(self, item: _WorkItem, Bc: int) -> None:
        """Compute a work item by `rowwise`."""
        rowwise.forward(
            item.q[0],
            sequences.select_heads(self.k, item.kv_heads),
            sequences.select_heads(self.v, item.kv_heads),
            item.out[0],
            item.results.each(operator.itemgetter(0)),
            keys=item.keys,
            first=item.first,
            causal=self.causal,
            q_offset=item.q_offset,
            softmax_scale=self.softmax_scale,
            Bc=Bc,
            bound_mods=self.bound_mods,
        )


def _gather_keys(blocks: Blocks, keys: Keys, count: int) -> Array:
    """Return the keys of `count` sequences of one shape: (sequences, rows, heads, dim)."""
    if count == 1:
        one: Array = sequences.read(blocks, keys)
        return one[None]
    if len(blocks) == 1:
        rows = blocks[0, keys.first : keys.first + count * keys.seqlen]
        return rows.reshape(count, keys.seqlen, *rows.shape[1:])
    return blocks[keys.block : keys.block + count, keys.first : keys.first + keys.seqlen]


def _forward(
    items: list[_WorkItem],
    batch: _Batch,
    tile: Tile | None,
    batch_invariant: bool,
    threads: int | None,
) -> None:
    sinks = None if batch.bound_mods is None else batch.bound_mods.sinks
    for item in items:
        if not item.keys.seqlen:
            item.write_without_keys(sinks)
    items = [item for item in items if item.pairs]
    if not items:
        return
    if batch_invariant:
        _forward_rowwise(items, batch, rowwise.DEFAULT_BC if tile is None else tile.Bc, threads)
        return
    tile, worker_bytes = _tile_and_scratch(
        dtype_name(batch.k),
        max(item.q.shape[1] for item in items),
        max(item.keys.seqlen for item in items),
        items[0].q.shape[2],
        batch.k.shape[2],
        batch.k.shape[3],
        batch.v.shape[3],
        tile,
    )
    # One thread computes the short sequences, because several threads would mostly wait for the
    # GIL.
    short = [item for item in items if item.pairs < MIN_PAIRS_FOR_THREADS]
    long = [item for item in items if item.pairs >= MIN_PAIRS_FOR_THREADS]
    long.sort(key=lambda item: -item.pairs)
    short = [item for item in short if not batch.computes_small(item, tile)]
    with single_threaded_blas:
        for group, workers in ((long, threads or cpus()), (short, 1)):
            if not group:
                continue
            pairs = sum(item.pairs for item in group)
            # Each worker may keep the copied pages of two passes alive: current and next.
            most_bytes = cpu_forward.SCRATCH_LIMIT // (2 * workers)
            passes = (batch.as_pass(item, tile, most_bytes) for item in group)
            cpu_forward.run(passes, pairs, worker_bytes, workers)


def _forward_rowwise(items: list[_WorkItem], batch: _Batch, Bc: int, threads: int | None) -> None:
    heads_kv = batch.k.shape[2]
    row_items = [row_item for item in items for row_item in item.split(heads_kv)]
    row_items.sort(key=lambda row_item: -row_item.pairs)
    pairs = sum(row_item.pairs for row_item in row_items)
    workers = min(threads or cpus(), max(1, pairs // cpu_forward.MIN_PAIRS_PER_WORKER))

    def work(assigned: Iterator[_WorkItem]) -> None:
        for row_item in assigned:
            batch.compute_rowwise(row_item, Bc)

    with single_threaded_blas:
        run_in_parallel(workers, iter(row_items), work, Stop())


@functools.lru_cache(256)
def _tile_and_scratch(
    dtype: str,
    seqlen_q: int,
    seqlen_k: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    head_dim_v: int,
    tile: Tile | None,
) -> tuple[Tile, int]:
    """Return the tile to use, and bytes of scratch that suffice for a pass over any sequence.

    The result is cached, because this takes as long as a short sequence.
    """
    problem = make_contiguous_problem(
        dtype=dtype,
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
    )
    tile = cpu_forward.default_tile(problem) if tile is None else tile
    at_once = ELEMENTS_AT_ONCE * (8 if dtype == "float64" else 4)
    return tile, max(cpu_forward.scratch_bytes(problem, tile), at_once)
