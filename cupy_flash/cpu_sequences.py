"""Packed, cached and paged sequences on the CPU: one tiled forward pass for each.

Keys are read where they lie; those in pages are gathered, a tile at a time, or all of a sequence's
where they are read again and again. Long sequences go one after the other, the threads sharing out
each one's tiles (`cupy_flash.cpu`); shorter ones are themselves shared out, so that the threads
start once; the shortest, for which no thread pays, are computed by the calling one
(`cupy_flash.cpu_rows`).

The caller has checked the arguments. Integers that point outside of the arrays are nevertheless
taken as the kernels take them (`cupy_flash.host_sequences`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash import cpu, cpu_rows, host_sequences
from cupy_flash.cpu_threads import cpus, single_threaded_blas
from cupy_flash.host_sequences import (
    Keys,
    PagedRows,
    find_cached_keys,
    find_packed_keys,
    find_queries,
)
from cupy_flash.problem import make_contiguous_problem
from cupy_flash.rotary import rotated
from cupy_flash.tile import Tile

Array = NDArray[Any]

# Query-key pairs of a sequence, over all heads, up to which `cpu_rows` is taken: all heads at once,
# and a matrix product for each row. Measured against `cpu`, one thread, float32, head_dim 64, us:
# 1 x 100 with 8/2 heads 96 : 271, 16 x 64 203 : 253, 64 x 64 with 8/8 886 : 1017, 512 x 512 with
# 2/2 6058 : 2839. Its calls of NumPy are short, and threads would wait for each other's turn with
# the GIL: 1000 of 1 x 20 take 97 ms on one thread, 147 on two, 261 on four.
MAX_PAIRS_BY_ROWS = 1 << 15

# Rows that a key tile is read for by `cpu_rows`, and query-key pairs that are not cut any further.
MAX_ROWS_OF_PIECE = 128
MAX_PAIRS_OF_PIECE = 1 << 16


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
    tile: Tile | None = None,
    batch_invariant: bool = False,
    threads: int | None = None,
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
        Written where a row belongs to a sequence; must not overlap the inputs.
    lse : numpy.ndarray, (heads_q, total_q), or None
        Likewise, with natural logarithms.
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
    tile : Tile, optional
        A default if not given. With ``batch_invariant`` only its Bc has an influence on the bits.
    batch_invariant : bool
        The bits of a row then depend on its query and the keys it sees, and on nothing else: not on
        other sequences, nor on the rows and keys before and behind it in its own (but for NaN and
        inf among the values of keys that it does not see). See `cupy_flash.cpu_rows` for the cost.
    threads : int, optional
        At most this many workers; as many as there are CPUs for this process if not given.
    """
    paged = block_table is not None
    queries = find_queries(cu_seqlens_q, len(q), max_seqlen_q)
    places = find_packed_keys(
        cu_seqlens_k,
        max_seqlen_k,
        batch=len(cu_seqlens_q) - 1,
        total_k=0 if paged else len(k),
        page_size=k.shape[1] if paged else 0,
        seqused_k=seqused_k,
        block_table=block_table,
    )
    sequences = [
        _Piece.whole(q[rows], out[rows], None if lse is None else lse[:, rows], keys)
        for rows, keys in zip((found.rows for found in queries), places, strict=True)
    ]
    k, v = (k, v) if paged else (k[None], v[None])
    batch = _Batch(k, v, causal, softmax_scale)
    _forward(sequences, batch, tile, batch_invariant, threads)


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
    tile: Tile | None = None,
    batch_invariant: bool = False,
    threads: int | None = None,
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
    block_table, causal, softmax_scale, tile, batch_invariant, threads
        As in :func:`varlen_forward`.
    """
    places = find_cached_keys(
        lengths,
        cache_shape=k_cache.shape,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
    )
    sequences = [
        _Piece.whole(q[b], out[b], None if lse is None else lse[b], keys)
        for b, keys in enumerate(places)
    ]
    batch = _Batch(k_cache, v_cache, causal, softmax_scale)
    _forward(sequences, batch, tile, batch_invariant, threads)


def append(
    k_cache: Array,
    v_cache: Array,
    k: Array,
    v: Array,
    *,
    lengths: Array,
    cache_batch_idx: Array | None,
    block_table: Array | None,
) -> None:
    """Write new keys and values into a cache, behind those of each sequence.

    Parameters
    ----------
    k_cache, v_cache, cache_batch_idx, block_table
        As in :func:`kvcache_forward`. Only the appended rows change.
    k, v : numpy.ndarray, (batch, seqlen_new, heads_kv, dim)
        Of the caches' dtype. Rows that the cache has no room for are dropped.
    lengths : numpy.ndarray, (batch,)
        Rows of each sequence in the cache before.
    """
    places = find_cached_keys(
        lengths,
        cache_shape=k_cache.shape,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
    )
    for b, keys in enumerate(places):
        host_sequences.append(k_cache, keys, k[b])
        host_sequences.append(v_cache, keys, v[b])


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
        compute=cpu.compute_dtype(x.dtype),
    )
    return turned.astype(x.dtype, copy=False)


class _Piece(NamedTuple):
    """A sequence, or some of its rows and heads."""

    q: Array  # (rows, heads, head_dim)
    out: Array  # (rows, heads, head_dim_v)
    lse: Array | None  # (heads, rows)
    keys: Keys
    q_offset: int  # absolute position of the first row
    kv_heads: slice  # those that the heads share

    @classmethod
    def whole(cls, q: Array, out: Array, lse: Array | None, keys: Keys) -> _Piece:
        return cls(q, out, lse, keys, keys.seqlen - len(q), slice(None))

    @property
    def pairs(self) -> int:
        return self.q.shape[0] * self.q.shape[1] * self.keys.seqlen

    def cut(self, heads_kv: int) -> Iterator[_Piece]:
        """Pieces for `cpu_rows`, small enough for its scratch and for all threads to have some."""
        group = self.q.shape[1] // heads_kv
        if max(self.pairs, self.q.size) <= MAX_PAIRS_OF_PIECE:
            yield self
            return
        step = max(1, MAX_ROWS_OF_PIECE // group)
        # The rows that see most keys first.
        for first in reversed(range(0, len(self.q), step)):
            rows = slice(first, first + step)
            for kv_head in range(heads_kv):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                yield _Piece(
                    self.q[rows, heads],
                    self.out[rows, heads],
                    None if self.lse is None else self.lse[heads, rows],
                    self.keys,
                    self.q_offset + first,
                    slice(kv_head, kv_head + 1),
                )


@dataclass(frozen=True)
class _Batch:
    """What all sequences share."""

    k: Array  # (blocks, rows, heads_kv, head_dim)
    v: Array  # (blocks, rows, heads_kv, head_dim_v)
    causal: bool
    softmax_scale: float

    def by_tiles(self, sequence: _Piece, tile: Tile, workers: int, at_once: int = 1) -> None:
        """One sequence by `workers` threads, as one of so many that are computed at once."""
        keys = sequence.keys
        at_hand = keys.pages is None or self._copies_pages(sequence, cpu.SCRATCH_LIMIT // at_once)
        k, v = (
            host_sequences.read(x, keys)[None] if at_hand else PagedRows(x, keys)
            for x in (self.k, self.v)
        )
        cpu.forward(
            sequence.q[None],
            k,
            v,
            sequence.out[None],
            None if sequence.lse is None else sequence.lse[None],
            causal=self.causal,
            q_offset=sequence.q_offset,
            softmax_scale=self.softmax_scale,
            tile=tile,
            threads=workers,
        )

    def _copies_pages(self, sequence: _Piece, most_bytes: int) -> bool:
        """Whether to gather all pages first: where each key is read again and again.

        512 rows over 8192 keys in pages of 16, 8 heads of 128, float16: 200 ms, a tile at a time
        413; one row 90 and 72.
        """
        heads_kv = self.k.shape[2]
        rows = len(sequence.q) * (sequence.q.shape[1] // heads_kv)
        columns = self.k.shape[3] + self.v.shape[3]
        size = sequence.keys.seqlen * heads_kv * columns * self.k.itemsize
        return rows >= cpu.MIN_ROWS_FOR_BOUNDS and size <= most_bytes

    def by_rows(self, piece: _Piece, Bc: int) -> None:
        # What NumPy would warn of is meant, as in `cpu`.
        with np.errstate(all="ignore"):
            cpu_rows.forward(
                piece.q,
                self.k[:, :, piece.kv_heads],
                self.v[:, :, piece.kv_heads],
                piece.out,
                piece.lse,
                keys=piece.keys,
                causal=self.causal,
                q_offset=piece.q_offset,
                softmax_scale=self.softmax_scale,
                Bc=Bc,
            )


def _forward(
    sequences: list[_Piece],
    batch: _Batch,
    tile: Tile | None,
    batch_invariant: bool,
    threads: int | None,
) -> None:
    sequences = [sequence for sequence in sequences if sequence.q.size]
    if not sequences:
        return
    workers = threads or cpus()
    # Held from here on: `cpu.forward` would set and restore it for each sequence.
    with single_threaded_blas:
        if batch_invariant:
            Bc = cpu_rows.DEFAULT_BC if tile is None else tile.Bc
            heads_kv = batch.k.shape[2]
            pieces = [piece for sequence in sequences for piece in sequence.cut(heads_kv)]
            _share_out(workers, pieces, lambda piece: batch.by_rows(piece, Bc))
            return
        default, room = _tile_and_room(sequences, batch, tile)
        enough_for_all = workers * cpu.MIN_PAIRS_PER_WORKER
        to_share = []
        for sequence in sequences:
            if tile is None and sequence.pairs <= MAX_PAIRS_BY_ROWS:
                Bc = min(max(sequence.keys.seqlen, 1), cpu_rows.DEFAULT_BC)
                batch.by_rows(sequence, Bc)
            elif sequence.pairs >= enough_for_all:
                batch.by_tiles(sequence, default, workers)
            else:
                to_share.append(sequence)
        workers = min(workers, room)
        _share_out(workers, to_share, lambda piece: batch.by_tiles(piece, default, 1, workers))


def _tile_and_room(sequences: list[_Piece], batch: _Batch, tile: Tile | None) -> tuple[Tile, int]:
    """The tile to use, and for how many workers' scratch there is room."""
    seqlen_k = max(sequence.keys.seqlen for sequence in sequences)
    problem = make_contiguous_problem(
        dtype=batch.k.dtype.name,
        batch=1,
        seqlen_q=max(len(sequence.q) for sequence in sequences),
        seqlen_k=seqlen_k,
        heads_q=sequences[0].q.shape[1],
        heads_kv=batch.k.shape[2],
        head_dim=batch.k.shape[3],
        head_dim_v=batch.v.shape[3],
    )
    tile = cpu.default_tile(problem) if tile is None else tile
    return tile, max(1, cpu.SCRATCH_LIMIT // cpu.scratch_bytes(problem, tile))


def _share_out(workers: int, pieces: list[_Piece], work: Callable[[_Piece], None]) -> None:
    """Call ``work`` for every piece, the largest first, from up to ``workers`` threads."""
    pairs = sum(piece.pairs for piece in pieces)
    workers = min(workers, len(pieces), math.ceil(max(pairs, 1) / cpu.MIN_PAIRS_PER_WORKER))
    if workers <= 1:
        for piece in pieces:
            work(piece)
        return
    with ThreadPoolExecutor(workers, "cupy_flash") as pool:
        for _ in pool.map(work, sorted(pieces, key=lambda piece: -piece.pairs)):
            pass
