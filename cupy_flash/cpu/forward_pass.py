"""One forward pass of the CPU backend: its arrays, its division into tiles, and scratch memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.sequences import PagedRows
from cupy_flash.cpu.row_results import RowResults
from cupy_flash.mods.keywords import FURTHEST
from cupy_flash.mods.on_arrays.block_visibility import BlockVisibility, block_visibility_of
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.dropout import kept_pairs, key_of
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR, Pairs
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]

#: Limit of the scratch memory of all workers together, in bytes. It also limits their number.
SCRATCH_LIMIT = 60 << 20

# Limits of the scratch memory that is kept for later calls: number of workers, bytes per worker.
MAX_KEPT = 8
MAX_BYTES_KEPT = 4 << 20

# Large buffers begin at page boundaries. Each buffer is shifted by this many bytes more than the
# previous one, because processors at first mistake a store and a load at equal page offsets for the
# same address (4K aliasing). Batch 64, 8 queries, 8 keys, 8 heads of 64: 620 instead of 663 us.
BYTES_BETWEEN_BUFFERS = 17 * 64

# Factor on the values of rows whose sum of p * v overflows. Multiplication by a power of two does
# not round, and this power leaves headroom for 2**32 keys.
SHRINK = 2.0**-32

# Scratch elements up to which one step computes several heads and sequences. A smaller limit makes
# more and shorter NumPy calls, a larger one leaves a second thread without work. Two threads,
# batch 8, seqlen 128, 8 heads of 128: 6.2 ms; with 2**18 elements 7.0 ms.
ELEMENTS_AT_ONCE = 1 << 19

# Number of keys in a block of the score matrix that a user's mask_mod may mask as a whole.
KEYS_OF_BLOCK = 64

# Minimum number of query-key pairs per head for which blocks that a mask_mod masks are looked up,
# which takes 0.2 ms or more.
MIN_PAIRS_TO_LOOK_AT_BLOCKS = 1 << 18


@functools.cache
def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype to compute in: float64 for float64 arrays, float32 for all others."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


class Block(NamedTuple):
    """A query tile: query rows of one or several sequences and KV heads, given by index ranges."""

    batch: slice
    kv_heads: slice
    heads: slice  # query heads within the group of a KV head
    rows: slice


class Tiling(NamedTuple):
    """Sizes of the query tiles (`Block`) and KV tiles that a pass is divided into."""

    Br: int
    Bc: int
    heads_per_tile: int  # query heads of a KV head whose rows, if few, are stacked in one tile
    kv_heads: int  # KV heads per query tile
    batch: int  # sequences per query tile
    elements: int  # scratch elements per query tile

    @classmethod
    def make(
        cls,
        batch: int,
        seqlen_q: int,
        seqlen_k: int,
        heads_kv: int,
        group: int,
        head_dim: int,
        head_dim_v: int,
        copies: bool,
        tile: Tile,
    ) -> Tiling:
        """Return a `Tiling` with as many heads and sequences per tile as one step may take."""
        heads_per_tile = min(group, max(1, tile.Br // seqlen_q))
        Br = min(tile.Br, seqlen_q)
        Bc = min(tile.Bc, max(seqlen_k, 1))
        one = scratch_elements(Br * heads_per_tile, Bc, head_dim, head_dim_v, copies)
        at_once = ELEMENTS_AT_ONCE // one
        some_heads = even_part_size(heads_kv, at_once)
        some_sequences = even_part_size(batch, at_once // heads_kv)
        elements = one * some_heads * some_sequences
        return cls(Br, Bc, heads_per_tile, some_heads, some_sequences, elements)


class Pass(NamedTuple):
    """One forward pass: its arrays, and the parameters that are the same for all of its tiles."""

    q: Array  # (batch, heads_kv, group, seqlen_q, head_dim)
    k: Array | PagedRows  # (batch, seqlen_k, heads_kv, head_dim)
    v: Array | PagedRows  # (batch, seqlen_k, heads_kv, head_dim_v)
    out: Array  # (batch, heads_kv, group, seqlen_q, head_dim_v)
    rows: RowResults  # arrays (batch, heads_kv, group, seqlen_q)
    visible: Mask  # mask by position; modifications may change it per sequence, see `mask_of`
    bound_mods: BoundModifications | None
    first: Pairs  # indices, within the call, of the first query-key pair of this pass
    softmax_scale: float
    compute: np.dtype[Any]
    tiling: Tiling
    copies: bool  # whether BLAS reads copies of k and v
    scratch_bytes: int
    block_visibility: (
        BlockVisibility | None
    )  # visibility of blocks, tiling.Br x KEYS_OF_BLOCK, under a mask_mod

    @classmethod
    def make(
        cls,
        q: Array,
        k: Array | PagedRows,
        v: Array | PagedRows,
        out: Array,
        rows: RowResults,
        causal: bool,
        q_offset: int,
        softmax_scale: float,
        tile: Tile,
        bound_mods: BoundModifications | None = None,
        first: Pairs = FIRST_PAIR,
    ) -> Pass:
        """Return the pass that computes the arguments of `cupy_flash.cpu.forward.forward`."""
        batch, seqlen_q, heads_q, head_dim = q.shape
        _, seqlen_k, heads_kv, head_dim_v = v.shape
        group = heads_q // heads_kv
        compute = compute_dtype(q.dtype)
        copies = not (_is_operand(k, compute) and _is_operand(v, compute))
        tiling = Tiling.make(
            batch, seqlen_q, seqlen_k, heads_kv, group, head_dim, head_dim_v, copies, tile
        )
        # Clamp q_offset: larger offsets mask no other pairs, but overflow the index arithmetic.
        nearest, furthest = -seqlen_q, seqlen_k
        if bound_mods is not None:
            nearest, furthest = -FURTHEST, FURTHEST
            if bound_mods.masks_differ:
                tiling = tiling._replace(batch=1)
        worker_bytes = tiling.elements * compute.itemsize
        if worker_bytes > SCRATCH_LIMIT:
            raise ValueError(
                f"tile {tile} needs {worker_bytes} bytes of scratch per worker, more than "
                f"{SCRATCH_LIMIT}; choose a smaller Br or Bc"
            )
        split = (batch, seqlen_q, heads_kv, group)
        visible = Mask(seqlen_q, seqlen_k, causal, min(max(q_offset, nearest), furthest))
        return cls(
            q=q.reshape(*split, head_dim).transpose(0, 2, 3, 1, 4),
            k=k,
            v=v,
            out=out.reshape(*split, head_dim_v).transpose(0, 2, 3, 1, 4),
            rows=rows.each(lambda array: array.reshape(batch, heads_kv, group, seqlen_q)),
            visible=visible,
            bound_mods=bound_mods,
            first=first,
            softmax_scale=softmax_scale,
            compute=compute,
            tiling=tiling,
            copies=copies,
            scratch_bytes=worker_bytes,
            block_visibility=_mask_mod_visibility(
                bound_mods, first, visible, batch, heads_q, tiling.Br, compute
            ),
        )

    @property
    def pairs(self) -> int:
        """Number of query-key pairs, including masked pairs."""
        batch, heads_kv, group, seqlen_q, _ = self.q.shape
        return batch * heads_kv * group * seqlen_q * self.k.shape[1]

    def blocks(self) -> Iterator[Block]:
        """Yield the query tiles, last rows first: in causal calls these attend to the most keys."""
        batch, heads_kv, group, seqlen_q, _ = self.q.shape
        tiling = self.tiling
        for rows in reversed(list(slices(seqlen_q, tiling.Br))):
            for sequences in slices(batch, tiling.batch):
                for kv_heads in slices(heads_kv, tiling.kv_heads):
                    for heads in slices(group, tiling.heads_per_tile):
                        yield Block(sequences, kv_heads, heads, rows)

    def mask_of(self, block: Block) -> Mask:
        """Return the mask by position for a query tile, including the modifications of the call."""
        if self.bound_mods is None:
            return self.visible
        return self.bound_mods.mask_with(self.visible, self.first.b + block.batch.start)

    def tiles_of_keys(self, block: Block) -> list[tuple[int, int]]:
        """Return the KV tiles that rows of a query tile attend to, in order, as [start, stop)."""
        visible = self.mask_of(block)
        begin, end = visible.begin(block.rows.start), visible.end(block.rows.stop - 1)
        runs = [(begin, end)] if begin < end else []
        if self.block_visibility is not None and runs:
            flags = self._select_block(self.block_visibility.any_visible, block, begin, end).any(
                axis=(0, 1)
            )
            edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
            edges = np.clip((edges + begin // KEYS_OF_BLOCK) * KEYS_OF_BLOCK, begin, end)
            runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
            if runs and runs[-1][1] - runs[0][0] <= self.tiling.Bc:
                runs = [(runs[0][0], runs[-1][1])]
        return [
            (start, min(start + self.tiling.Bc, stop))
            for first, stop in runs
            for start in range(first, stop, self.tiling.Bc)
        ]

    def is_fully_visible(self, block: Block, start: int, stop: int) -> bool:
        """Return whether a mask_mod surely masks no pair of a query tile and keys [start, stop)."""
        return self.block_visibility is not None and bool(
            self._select_block(self.block_visibility.all_visible, block, start, stop).all()
        )

    def _select_block(self, block_flags: Array, block: Block, start: int, stop: int) -> Array:
        """Return the part of a `BlockVisibility` array for a query tile and some keys."""
        sequences, heads = block_flags.shape[:2]
        sequence_index = block.batch if sequences > 1 else slice(None)
        head_index = self._query_heads(block).reshape(-1) if heads > 1 else slice(None)
        keys = slice(start // KEYS_OF_BLOCK, -(-stop // KEYS_OF_BLOCK))
        return block_flags[sequence_index, :, block.rows.start // self.tiling.Br, keys][
            :, head_index
        ]

    def pairs_of(self, block: Block, start: int, stop: int) -> Pairs:
        """Return indices of pairs that broadcast to (sequences, KV heads, heads, rows, keys)."""
        return self.first._replace(
            b=self.first.b + _integers(block.batch)[:, None, None, None, None],
            h=self._query_heads(block)[..., None, None],
            row=_integers(block.rows)[:, None],
            j=_integers(slice(start, stop)),
            q_offset=self._q_offset(block),
        )

    def _q_offset(self, block: Block) -> int:
        """Return the position among the keys of the first query of a query tile's sequences."""
        if self.bound_mods is None or self.bound_mods.q_offset is None:
            return self.visible.q_offset
        return int(self.bound_mods.q_offset[self.first.b + block.batch.start])

    def sinks_of(self, block: Block) -> Array | None:
        """Return the sinks of a query tile's heads, (KV heads, heads, 1, 1); None without sinks."""
        if self.bound_mods is None or self.bound_mods.sinks is None:
            return None
        sinks: Array = self.bound_mods.sinks[self._query_heads(block)].astype(self.compute)
        return sinks[..., None, None]

    @property
    def kept_share(self) -> float | None:
        """Probability with which dropout keeps a weight; None without dropout."""
        if self.bound_mods is None or self.bound_mods.dropout is None:
            return None
        return self.bound_mods.dropout.kept_share

    def kept_by_dropout(self, block: Block, start: int, stop: int) -> Array | None:
        """Return which weights of a query tile and keys [start, stop) dropout keeps.

        The bool array has the axes (sequences, KV heads, heads, rows, keys). None without dropout.
        """
        if self.bound_mods is None or self.bound_mods.dropout is None:
            return None
        dropout = self.bound_mods.dropout
        sequences = self.first.b + _integers(block.batch)[:, None, None]
        heads = self._query_heads(block)
        kept: Array = kept_pairs(
            *(dropout.threshold, key_of(dropout), sequences, heads, block.rows, slice(start, stop))
        )
        return kept

    def _query_heads(self, block: Block) -> Array:
        heads = _integers(slice(0, self.q.shape[1] * self.q.shape[2]))
        return heads.reshape(self.q.shape[1:3])[block.kv_heads, block.heads]

    def queries(self, block: Block, scratch: Scratch) -> Array:
        """Return the scaled queries, (sequences, KV heads, heads, rows, head_dim)."""
        source = self.q[tuple(block)]
        if source.shape[2] == 1:
            # The copy has the axis order that q most likely has in memory, so NumPy copies it fast.
            b, h, g, s, d = source.shape
            q = scratch.array("q", (b, s, h, g, d), self.compute).transpose(0, 2, 3, 1, 4)
        else:
            q = scratch.array("q", source.shape, self.compute)
        # Scaling the queries is cheaper than scaling the scores, which are more.
        scale = self.compute.type(self.softmax_scale)
        if source.dtype == self.compute:
            np.multiply(source, scale, out=q)
        else:
            np.copyto(q, source, casting="same_kind")
            q *= scale
        return q

    def keys(self, block: Block, start: int, stop: int, scratch: Scratch) -> Array:
        """Return keys [start, stop) for BLAS: (sequences, KV heads, stop - start, head_dim)."""
        k = self.k[block.batch, start:stop, block.kv_heads].swapaxes(1, 2)
        return scratch.copy("k", k, self.compute) if self.copies else k

    def values(self, block: Block, start: int, stop: int, scratch: Scratch) -> Array:
        """Return values [start, stop) for BLAS: (sequences, KV heads, stop - start, head_dim_v)."""
        v = self.v[block.batch, start:stop, block.kv_heads].swapaxes(1, 2)
        return scratch.copy("v", v, self.compute) if self.copies else v


def _mask_mod_visibility(
    bound_mods: BoundModifications | None,
    first: Pairs,
    visible: Mask,
    batch: int,
    heads: int,
    Br: int,
    compute: np.dtype[Any],
) -> BlockVisibility | None:
    """Return the visibility of blocks under a mask_mod; None without one or for small problems."""
    pairs = visible.seqlen_q * visible.seqlen_k
    if (
        bound_mods is None
        or bound_mods.scores.mask_mod is None
        or pairs < MIN_PAIRS_TO_LOOK_AT_BLOCKS
    ):
        return None
    offset: Any = visible.q_offset
    if bound_mods.q_offset is not None:
        offset = bound_mods.q_offset[first.b : first.b + batch, None, None, None]
    positions = {
        "b": (first.b + _integers(slice(0, batch)))[:, None, None, None],
        "h": _integers(slice(0, heads))[:, None, None],
        "i": _integers(slice(0, visible.seqlen_q))[None, None, :, None] + offset,
        "j": _integers(slice(0, visible.seqlen_k))[None, None, None],
        "q_start": first.q_start,
        "k_start": first.k_start,
    }
    return block_visibility_of(bound_mods.scores.mask_mod, positions, Br, KEYS_OF_BLOCK, compute)


def _is_operand(x: Array | PagedRows, compute: np.dtype[Any]) -> bool:
    """Return whether BLAS can read the rows of x (batch, seqlen, heads, dim) without a copy."""
    if isinstance(x, PagedRows):
        # Indexing gathers the rows into a new, contiguous array.
        return x.dtype == compute
    row, _, column = x.strides[1:]
    return (
        x.dtype == compute
        and column == x.itemsize
        and row >= x.shape[3] * column
        and row % column == 0
        and x.flags.aligned
    )


def slices(count: int, size: int) -> Iterator[slice]:
    """Yield consecutive ranges of `size` of the indices [0, count); the last may be shorter."""
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def _integers(span: slice) -> Array:
    return np.arange(span.start, span.stop, dtype=np.int32)


def even_part_size(count: int, most: int) -> int:
    """Return the size of nearly equal parts of `count` items, at most `most` but at least 1."""
    return max(1, -(-count // max(1, -(-count // max(most, 1)))))


def scratch_elements(m: int, Bc: int, head_dim: int, head_dim_v: int, copies: bool) -> int:
    """Return the number of elements of all scratch buffers for a query tile of m rows."""
    q, k, v = m * head_dim, Bc * head_dim, Bc * head_dim_v
    acc = product = m * head_dim_v
    row_max = new_max = row_sum = tile_sum = m
    scores = m * Bc
    row_elements = q + scores + acc + product + row_max + new_max + row_sum + tile_sum
    return row_elements + (k + v if copies else 0)


class Scratch:
    """Scratch buffers of one worker, by name. A buffer grows to the largest tile so far."""

    # Buffers of finished workers, kept for later ones: the system maps new memory page by page, at
    # the first write. Batch 1, seqlen 128, 8 heads of 64: 0.95 ms, with new buffers 1.6 ms.
    _kept: ClassVar[list[Scratch]] = []

    def __init__(self) -> None:
        self._flat: dict[str, Array] = {}

    @classmethod
    @contextmanager
    def borrowed(cls) -> Iterator[Scratch]:
        """Return a context manager that lends kept or new buffers to a worker."""
        try:
            scratch = cls._kept.pop()
        except IndexError:
            scratch = cls()
        yield scratch
        size = sum(flat.nbytes for flat in scratch._flat.values())
        if len(cls._kept) < MAX_KEPT and size <= MAX_BYTES_KEPT:
            cls._kept.append(scratch)

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return the start of a buffer as an uninitialized array of a shape."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size or flat.dtype != dtype:
            # Free the old buffer first, so that the two never exist at the same time.
            self._flat.pop(name, None)
            skipped = len(self._flat) * BYTES_BETWEEN_BUFFERS // dtype.itemsize
            flat = self._flat[name] = np.empty(skipped + size, dtype)[skipped:]
        return flat[:size].reshape(shape)

    def copy(self, name: str, source: Array, dtype: np.dtype[Any]) -> Array:
        """Return a contiguous copy of an array in a buffer, converted to a dtype."""
        copy = self.array(name, source.shape, dtype)
        np.copyto(copy, source, casting="same_kind")
        return copy


def apply_mask(job: Pass, block: Block, scores: Array, start: int, stop: int) -> None:
    """Modify and mask (-inf) the scores of a query tile and keys [start, stop), in place."""
    if job.bound_mods is not None:
        bound_mods = job.bound_mods
        if job.is_fully_visible(block, start, stop):
            bound_mods = bound_mods._replace(scores=bound_mods.scores._replace(mask_mod=None))
        modify_scores(scores, bound_mods, job.pairs_of(block, start, stop))
    rows, visible = block.rows, job.mask_of(block)
    for first, end in visible.edges(rows.start, rows.stop, start, stop):
        masked = visible.masked(rows.start, rows.stop, first, end)
        np.copyto(scores[..., first - start : end - start], -np.inf, where=masked)


def modify_scores(scores: Array, bound_mods: BoundModifications, pair_indices: Pairs) -> None:
    """Apply the modifications of a call to scores, in place."""
    if not bound_mods.scores.changes_nothing:
        np.copyto(scores, bound_mods.scores.apply(scores, pair_indices), casting="same_kind")


def include_sink(row_max: Array, row_sum: Array, sink: Array) -> Array:
    """Add a sink to row sums of exp(score - row_max), and update the row maxima, both in place.

    Returns the factor by which the caller must multiply sums that used the old weights. Results
    for rows without a score above -inf are meaningless; the caller replaces them.
    """
    new_max = np.maximum(row_max, sink)
    factor: Array = np.exp(row_max - new_max)
    row_sum *= factor
    row_sum += np.exp(sink - new_max)
    row_max[...] = new_max
    return factor


def find_nan_rows(job: Pass, block: Block, scratch: Scratch, empty: Array) -> Array:
    """Return which of the `empty` rows (no score above -inf) have scores that overflowed to -inf.

    Such a row attends to at least one key, and its query and all of these keys are finite. The
    formula gives NaN for it, not 0. If scores are modified, the result has no such row, because the
    modification itself may have made the scores -inf.
    """
    if job.bound_mods is not None and not job.bound_mods.scores.changes_nothing:
        return np.zeros_like(empty)
    source, visible = job.q[tuple(block)], job.mask_of(block)
    rows = np.arange(block.rows.start, block.rows.stop)
    begins, ends = visible.begins(rows), visible.ends(rows)
    nan_rows: Array = empty & (begins < ends)[:, None]
    if not nan_rows.any():
        return nan_rows
    nan_rows &= np.isfinite(source).all(axis=-1, keepdims=True)
    tiles = (
        (start, min(start + job.tiling.Bc, ends[-1])) for start in range(0, ends[-1], job.tiling.Bc)
    )
    keys = (job.keys(block, start, stop, scratch) for start, stop in tiles)
    finite = np.concatenate([np.isfinite(k).all(axis=-1) for k in keys], axis=-1)
    return nan_rows & all_set_in_ranges(finite, begins, ends)[:, :, None, :, None]


def all_set_in_ranges(flags: Array, begins: Array, ends: Array) -> Array:
    """Return for each row whether all of flags[..., begin:end] are set, shape (..., rows)."""
    missing = np.zeros((*flags.shape[:-1], flags.shape[-1] + 1), np.int32)
    np.cumsum(~flags, axis=-1, out=missing[..., 1:])
    all_set: Array = missing[..., np.minimum(begins, ends)] == missing[..., ends]
    return all_set


@functools.cache
def lowest(dtype: str) -> float:
    """Return the lowest finite number of a dtype, given by its character."""
    return float(np.finfo(dtype).min)


def ones(count: int, dtype: str) -> Array:
    """Return a cached vector of `count` ones, which the caller must not modify."""
    return _ones((count - 1).bit_length(), dtype)[:count]


@functools.cache
def _ones(bits: int, dtype: str) -> Array:
    return np.ones(1 << bits, dtype)
