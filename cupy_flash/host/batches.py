"""Packed, cached and paged sequences on the CPU: one forward pass for each run of equal ones.

Keys are read where they lie; those in pages are gathered, a tile at a time, or all of a sequence's
where they are read again and again. Threads share out the tiles of all sequences
(`cupy_flash.host.cpu`), but for the shortest, which the calling one computes. With
``batch_invariant`` each row is computed on its own (`cupy_flash.host.row_by_row`).

The caller has checked the arguments. Integers that point outside of the arrays are nevertheless
taken as the kernels take them (`cupy_flash.host.sequence_places`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.strided import dtype_name
from cupy_flash.host import cpu, formula, padding, quantized, row_by_row, sequence_places
from cupy_flash.host.crew import Stop, cpus, share_out, single_threaded_blas
from cupy_flash.host.passes import ELEMENTS_AT_ONCE, Pass, Scratch, compute_dtype
from cupy_flash.host.quantized import QuantizedBlocks
from cupy_flash.host.quiet import quiet
from cupy_flash.host.rotary import rotated
from cupy_flash.host.sequence_places import (
    AllQueries,
    Keys,
    PagedRows,
    find_cached_keys,
)
from cupy_flash.host.steps import Run, Steps, equal_runs, kept_steps
from cupy_flash.mods.modified import Modified
from cupy_flash.mods.scores import FIRST, Pairs
from cupy_flash.problem.problem import make_contiguous_problem
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]
Blocks = Array | QuantizedBlocks

# Query-key pairs of a sequence, over all heads, from which on threads share such sequences out. In
# the short calls of NumPy that fewer make, threads wait for each other's turn with the GIL: 1000 of
# 1 x 20 take 97 ms on one thread, 147 on two, 261 on four.
MIN_PAIRS_TO_SHARE = 1 << 15

# Rows that each key is read for, from which on all pages are gathered first.
MIN_ROWS_TO_GATHER_FOR = 128

# Rows of packed queries up to which it is kept how their sequences are computed.
MAX_ROWS_TO_KEEP = 1 << 16

# Rows that a key tile is read for by `cpu_rows`, and query-key pairs that are not cut any further.
MAX_ROWS_OF_PIECE = 128
MAX_PAIRS_OF_PIECE = 1 << 16


@quiet
def varlen_forward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
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
    modified: Modified | None = None,
) -> None:
    """Attention of packed sequences into ``out``, and its log-sum-exp into ``lse``.

    Parameters
    ----------
    q : numpy.ndarray, (total_q, heads_q, head_dim)
        float16, bfloat16 (ml_dtypes), float32 or float64; any strides, as for the other arrays.
    k : numpy.ndarray, (total_k, heads_kv, head_dim)
        With ``block_table`` (pages, page_size, heads_kv, head_dim).
    v : numpy.ndarray, (total_k, heads_kv, head_dim_v)
        With ``block_table`` (pages, page_size, heads_kv, head_dim_v).
    out : numpy.ndarray, (total_q, heads_q, head_dim_v)
        Output; 0 in the rows that belong to no sequence. Must not overlap the inputs.
    lse : numpy.ndarray, (heads_q, total_q), or None
        Output, in natural logarithms; -inf in the rows that belong to no sequence.
    cu_seqlens_q : numpy.ndarray, (batch + 1,)
        First row of each sequence in q, and the last one's end.
    cu_seqlens_k : numpy.ndarray, (batch + 1,), or None
        Likewise in k and v; with ``block_table`` only the differences count.
    max_seqlen_q, max_seqlen_k : int
        No more rows of a sequence than these are looked at.
    seqused_k : numpy.ndarray, (batch,), or None
        The number of keys of each sequence, in place of the difference in ``cu_seqlens_k``.
    block_table : numpy.ndarray, (batch, max_pages), or None
        The pages of each sequence in order.
    causal : bool
        Query ``i`` of a sequence sees only its keys ``j <= i + seqlen_k - seqlen_q``.
    softmax_scale : float
        Factor on the scores.
    scales : CacheScales, optional
        Of keys and values of 8 bits.
    tile : Tile, optional
        A default if not given. With ``batch_invariant`` only its Bc has an influence on the bits.
    batch_invariant : bool
        The bits of a row then depend on its query and the keys it sees, and on nothing else: not on
        other sequences, nor on the rows and keys before and behind it in its own (but for NaN and
        inf among the values of keys that it does not see). See `cupy_flash.host.row_by_row`.
    threads : int, optional
        At most this many workers; as many as there are CPUs for this process if not given.
    modified : Modified, optional
        Masks, and what becomes of scores; with a bias and mask of three axes, and no seqlens_k.
    """
    if not out.size:
        return
    paged = block_table is not None
    integers = cu_seqlens_q, cu_seqlens_k, seqused_k
    # Modifications count from the beginning of each sequence, and what 8 bits stand for is made of
    # one sequence at a time.
    join = not batch_invariant and modified is None and scales is None
    facts: tuple[Any, ...] = (
        *(None if x is None else (x.tobytes(), x.dtype) for x in integers),
        *(max_seqlen_q, max_seqlen_k, len(q), k.shape[1] if paged else len(k)),
        *(q.shape[1], k.shape[-2], q.shape[2], join, tile is None),
    )
    if paged or len(q) > MAX_ROWS_TO_KEEP:
        steps = Steps.make(block_table, *facts)
    else:
        steps = kept_steps(*facts)
    for unowned in steps.rows_of_none:
        out[unowned] = 0
        if lse is not None:
            lse[:, unowned] = -np.inf
    runs = steps.runs
    if steps.groups:
        runs = runs + _pad(steps, q, k, v, out, lse, causal, softmax_scale, threads)
    pieces = []
    for b, rows, keys, count in runs:
        # (total, ...) as (count, seqlen, ...)
        span = slice(rows.first, rows.first + count * rows.seqlen)
        q_rows, out_rows = (x[span].reshape(count, rows.seqlen, *x.shape[1:]) for x in (q, out))
        lse_rows = None
        if lse is not None:
            lse_rows = lse[:, span].reshape(len(lse), count, rows.seqlen).swapaxes(0, 1)
        first = FIRST
        if modified is not None:
            first = FIRST._replace(b=b, q_start=rows.first, k_start=keys.first)
        pieces.append(_Piece.whole(q_rows, out_rows, lse_rows, keys, first))
    k, v = (k, v) if paged else (k[None], v[None])
    batch = _Batch(*_blocks(k, v, scales, q.dtype), causal, softmax_scale, modified)
    _forward(pieces, batch, tile, batch_invariant, threads)


@quiet
def kvcache_forward(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    out: Array,
    lse: Array | None,
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
    modified: Modified | None = None,
) -> None:
    """Attention over a cache into ``out``, and its log-sum-exp into ``lse``.

    Parameters
    ----------
    q : numpy.ndarray, (batch, seqlen_q, heads_q, head_dim)
        As in :func:`varlen_forward`.
    k_cache : numpy.ndarray, (caches, seqlen_cache, heads_kv, head_dim)
        With ``block_table`` (pages, page_size, heads_kv, head_dim).
    v_cache : numpy.ndarray, (caches, seqlen_cache, heads_kv, head_dim_v)
        With ``block_table`` (pages, page_size, heads_kv, head_dim_v).
    out : numpy.ndarray, (batch, seqlen_q, heads_q, head_dim_v)
        Overwritten; must not overlap the inputs.
    lse : numpy.ndarray, (batch, heads_q, seqlen_q), or None
        Overwritten with natural logarithms.
    lengths : numpy.ndarray, (batch,)
        Rows of each sequence in the cache, those of :func:`append` included.
    cache_batch_idx : numpy.ndarray, (batch,), or None
        The index of each sequence's cache; 0, 1, ... if None.
    block_table, causal, softmax_scale, scales, tile, batch_invariant, threads, modified
        As in :func:`varlen_forward`, but with a bias and mask of four axes.
    """
    places = find_cached_keys(
        lengths,
        cache_shape=k_cache.shape,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
    )
    seqlen_q = q.shape[1]
    queries = AllQueries(np.arange(len(q)) * seqlen_q, np.full(len(q), seqlen_q))
    pieces = []
    joins = not batch_invariant and scales is None
    for b, _, keys, count in equal_runs(queries, places, joins):
        some = slice(b, b + count)
        lse_rows = None if lse is None else lse[some]
        first = FIRST if modified is None else FIRST._replace(b=b)
        pieces.append(_Piece.whole(q[some], out[some], lse_rows, keys, first))
    batch = _Batch(*_blocks(k_cache, v_cache, scales, q.dtype), causal, softmax_scale, modified)
    _forward(pieces, batch, tile, batch_invariant, threads)


def _blocks(
    k: Array, v: Array, scales: CacheScales | None, dtype: np.dtype[Any]
) -> tuple[Blocks, Blocks]:
    """Keys and values, or what those of 8 bits stand for beside queries of a dtype."""
    if scales is None:
        return k, v
    compute = compute_dtype(dtype)
    return QuantizedBlocks(k, scales.k, compute), QuantizedBlocks(v, scales.v, compute)


@quiet
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
    """Write new keys and values into a cache, behind those of each sequence.

    Parameters
    ----------
    k_cache, v_cache, cache_batch_idx, block_table
        As in :func:`kvcache_forward`. Only the appended rows change.
    k, v : numpy.ndarray, (batch, seqlen_new, heads_kv, dim), or list of arrays
        New rows of the caches' dtype, or to be quantized; a list has an array (seqlen_new,
        heads_kv, dim) for each sequence. Rows that the cache has no room for are dropped. Without v
        and v_cache the keys hold the values.
    lengths : numpy.ndarray, (batch,)
        Rows of each sequence in the cache before.
    scales : CacheScales, optional
        Of caches of 8 bits.
    """
    places = find_cached_keys(
        lengths,
        cache_shape=k_cache.shape,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
    )
    of_keys, of_values = (None, None) if scales is None else scales[:2]
    both = (k_cache, of_keys, k), (v_cache, of_values, v)
    for b, keys in enumerate(places):
        for cache, scale, new in both:
            if cache is None or new is None:
                continue
            if scales is None:
                sequence_places.append(cache, keys, new[b])
            else:
                quantized.append(cache, scale, keys, new[b], compute_scales=scales.computed)


@quiet
def rotate(
    x: Array,
    cos: Array,
    sin: Array,
    first_positions: Array,
    *,
    interleaved: bool,
    advance: bool,
) -> Array:
    """A new array of the dtype of ``x``, its leading columns turned by the rows' positions.

    Computed in float32, in float64 for float64.

    Parameters
    ----------
    x : numpy.ndarray, (batch, seqlen, heads, head_dim)
    cos, sin : numpy.ndarray, (rows, rotary_dim / 2)
        Of the angle of each position and pair of columns.
    first_positions : numpy.ndarray, (batch,)
        Position of the first row of each sequence.
    interleaved : bool
        Whether columns (2i, 2i + 1) are a pair; else (i, i + rotary_dim / 2) are.
    advance : bool
        Whether row ``i`` is ``i`` positions further; else all rows are at the first position.
    """
    turned: Array = rotated(
        x,
        cos,
        sin,
        first_positions,
        interleaved=interleaved,
        advance=advance,
        compute=compute_dtype(x.dtype),
    )
    return turned.astype(x.dtype, copy=False)


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
    """Compute the padded groups; return sequences that are left to do, each by itself."""
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

    workers = min(threads or cpus(), max(1, steps.padded_pairs // cpu.MIN_PAIRS_PER_WORKER))
    with single_threaded_blas:
        share_out(workers, iter(steps.groups), work, Stop())
    return [Run(b, steps.queries[b], steps.keys[b], 1) for b in sorted(left)]


class CacheScales(NamedTuple):
    """Scales of caches of 8 bits: numbers or arrays that broadcast to (blocks, rows, heads_kv).

    `computed` says that an append computes those of the rows that it writes.
    """

    k: Any
    v: Any
    computed: bool = False


class _Piece(NamedTuple):
    """Sequences of one shape, or some rows and heads of one sequence."""

    q: Array  # (sequences, rows, heads, head_dim)
    out: Array  # (sequences, rows, heads, head_dim_v)
    lse: Array | None  # (sequences, heads, rows)
    keys: Keys  # of the first sequence; those of the others lie behind, or in the next blocks
    q_offset: int  # absolute position of the sequence's first row
    first: Pairs  # head and row that the piece begins with; of modified calls the sequence, too
    kv_heads: slice  # those that the heads share

    @classmethod
    def whole(cls, q: Array, out: Array, lse: Array | None, keys: Keys, first: Pairs) -> _Piece:
        """All rows and heads."""
        return cls(q, out, lse, keys, keys.seqlen - q.shape[1], first, slice(None))

    @property
    def pairs(self) -> int:
        """Query-key pairs, masked ones too."""
        return self.q.shape[0] * self.q.shape[1] * self.q.shape[2] * self.keys.seqlen

    def write_without_keys(self, sinks: Array | None) -> None:
        """Write the results of sequences that have no keys."""
        self.out[...] = 0
        if self.lse is not None:
            self.lse[...] = -np.inf if sinks is None else sinks[:, None]

    def cut(self, heads_kv: int) -> Iterator[_Piece]:
        """Pieces of a sequence for `cpu_rows`: for its scratch, and some for all threads."""
        group = self.q.shape[2] // heads_kv
        if max(self.pairs, self.q.size) <= MAX_PAIRS_OF_PIECE:
            yield self
            return
        step = max(1, MAX_ROWS_OF_PIECE // group)
        # The rows that see most keys first.
        for first in reversed(range(0, self.q.shape[1], step)):
            rows = slice(first, first + step)
            for kv_head in range(heads_kv):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                yield _Piece(
                    self.q[:, rows, heads],
                    self.out[:, rows, heads],
                    None if self.lse is None else self.lse[:, heads, rows],
                    self.keys,
                    self.q_offset,
                    self.first._replace(h=heads.start, row=first),
                    slice(kv_head, kv_head + 1),
                )


@dataclass(frozen=True)
class _Batch:
    """What all sequences share."""

    k: Blocks  # (blocks, rows, heads_kv, head_dim)
    v: Blocks  # (blocks, rows, heads_kv, head_dim_v)
    causal: bool
    softmax_scale: float
    modified: Modified | None

    def as_pass(self, piece: _Piece, tile: Tile, most_bytes: int) -> Pass:
        """The forward pass of a piece of all heads; no more than `most_bytes` of pages copied."""
        keys, count = piece.keys, len(piece.q)
        k: Array | PagedRows
        v: Array | PagedRows
        if self._is_scattered(keys) and not self._copies_rows(piece, most_bytes):
            k, v = PagedRows(self.k, keys), PagedRows(self.v, keys)
        else:
            k, v = (_keys_of_all(x, keys, count) for x in (self.k, self.v))
        return Pass.make(
            piece.q,
            k,
            v,
            piece.out,
            piece.lse,
            self.causal,
            piece.q_offset,
            self.softmax_scale,
            tile,
            self.modified,
            piece.first,
        )

    def computes_small(self, piece: _Piece, tile: Tile) -> bool:
        """Compute a small piece in one go; False if it is none, and is left as it was."""
        if self.modified is not None or piece.keys.pages is not None:
            return False
        k, v = (_keys_of_all(x, piece.keys, len(piece.q)) for x in (self.k, self.v))
        return formula.forward_small(
            piece.q,
            k,
            v,
            piece.out,
            piece.lse,
            self.causal,
            piece.q_offset,
            self.softmax_scale,
            tile,
        )

    def _is_scattered(self, keys: Keys) -> bool:
        """Whether keys are made into an array before they are multiplied."""
        return keys.pages is not None or isinstance(self.k, QuantizedBlocks)

    def _copies_rows(self, piece: _Piece, most_bytes: int) -> bool:
        """Whether to gather all rows first: where each key is read again and again.

        512 rows over 8192 keys in pages of 16, 8 heads of 128, float16: 200 ms, a tile at a time
        413; one row 90 and 72.
        """
        heads_kv = self.k.shape[2]
        rows = piece.q.shape[1] * (piece.q.shape[2] // heads_kv)
        columns = self.k.shape[3] + self.v.shape[3]
        size = piece.keys.seqlen * heads_kv * columns * self.k.itemsize
        return rows >= MIN_ROWS_TO_GATHER_FOR and size <= most_bytes

    def by_rows(self, piece: _Piece, Bc: int) -> None:
        """One piece by `cpu_rows`."""
        row_by_row.forward(
            piece.q[0],
            sequence_places.heads_of(self.k, piece.kv_heads),
            sequence_places.heads_of(self.v, piece.kv_heads),
            piece.out[0],
            None if piece.lse is None else piece.lse[0],
            keys=piece.keys,
            first=piece.first,
            causal=self.causal,
            q_offset=piece.q_offset,
            softmax_scale=self.softmax_scale,
            Bc=Bc,
            modified=self.modified,
        )


def _keys_of_all(blocks: Blocks, keys: Keys, count: int) -> Array:
    """The rows of so many sequences: (sequences, rows, heads, dim)."""
    if count == 1:
        one: Array = sequence_places.read(blocks, keys)
        return one[None]
    if len(blocks) == 1:
        rows = blocks[0, keys.first : keys.first + count * keys.seqlen]
        return rows.reshape(count, keys.seqlen, *rows.shape[1:])
    return blocks[keys.block : keys.block + count, keys.first : keys.first + keys.seqlen]


def _forward(
    pieces: list[_Piece],
    batch: _Batch,
    tile: Tile | None,
    batch_invariant: bool,
    threads: int | None,
) -> None:
    sinks = None if batch.modified is None else batch.modified.sinks
    for piece in pieces:
        if not piece.keys.seqlen:
            piece.write_without_keys(sinks)
    pieces = [piece for piece in pieces if piece.pairs]
    if not pieces:
        return
    if batch_invariant:
        _by_rows(pieces, batch, row_by_row.DEFAULT_BC if tile is None else tile.Bc, threads)
        return
    tile, worker_bytes = _tile_and_scratch(
        dtype_name(batch.k),
        max(piece.q.shape[1] for piece in pieces),
        max(piece.keys.seqlen for piece in pieces),
        pieces[0].q.shape[2],
        batch.k.shape[2],
        batch.k.shape[3],
        batch.v.shape[3],
        tile,
    )
    # Of threads that work on short sequences, each waits for the other's turn with the GIL.
    short = [piece for piece in pieces if piece.pairs < MIN_PAIRS_TO_SHARE]
    long = [piece for piece in pieces if piece.pairs >= MIN_PAIRS_TO_SHARE]
    long.sort(key=lambda piece: -piece.pairs)
    short = [piece for piece in short if not batch.computes_small(piece, tile)]
    with single_threaded_blas:
        for some, workers in ((long, threads or cpus()), (short, 1)):
            if not some:
                continue
            pairs = sum(piece.pairs for piece in some)
            # Copied pages are there for a tile at work and for one that waits, of each worker.
            most_bytes = cpu.SCRATCH_LIMIT // (2 * workers)
            passes = (batch.as_pass(piece, tile, most_bytes) for piece in some)
            cpu.run(passes, pairs, worker_bytes, workers)


def _by_rows(pieces: list[_Piece], batch: _Batch, Bc: int, threads: int | None) -> None:
    heads_kv = batch.k.shape[2]
    cut = [part for piece in pieces for part in piece.cut(heads_kv)]
    cut.sort(key=lambda part: -part.pairs)
    pairs = sum(part.pairs for part in cut)
    workers = min(threads or cpus(), max(1, pairs // cpu.MIN_PAIRS_PER_WORKER))

    def work(parts: Iterator[_Piece]) -> None:
        for part in parts:
            batch.by_rows(part, Bc)

    with single_threaded_blas:
        share_out(workers, iter(cut), work, Stop())


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
    """The tile to use, and bytes that are enough scratch for a pass of each sequence.

    Kept for the steps and layers to come, as it takes as long as a short sequence.
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
    tile = cpu.default_tile(problem) if tile is None else tile
    at_once = ELEMENTS_AT_ONCE * (8 if dtype == "float64" else 4)
    return tile, max(cpu.scratch_bytes(problem, tile), at_once)
