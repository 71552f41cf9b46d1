"""One forward pass of the CPU backend as a record: arrays, how it is cut up, scratch memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host.sequence_places import PagedRows
from cupy_flash.mods.keywords import FURTHEST
from cupy_flash.mods.modified import Modified
from cupy_flash.mods.scores import FIRST, Pairs
from cupy_flash.mods.seen_blocks import SeenBlocks, seen_blocks
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]

#: Bytes that the scratch of all workers together stays under; no more workers start than fit.
SCRATCH_LIMIT = 60 << 20

# Scratch that is kept for calls to come: of so many workers, each at most so large.
MAX_KEPT = 8
MAX_BYTES_KEPT = 4 << 20

# Large buffers begin at pages. Each buffer begins some cache lines further in its page than the one
# before it, because processors take a store and a load at equal offsets in two pages for the same
# address at first. 64 x 8 queries over 8 keys, 8 heads of 64: 620 us, without the offset 663.
BYTES_BETWEEN_BUFFERS = 17 * 64

# Values are multiplied by this where sums of p * v overflow: exact, and room for 2**32 keys.
SHRINK = 2.0**-32

# Elements of scratch of the heads, and sequences, that are taken up in one step. Fewer make more
# and shorter calls of NumPy, more leave a second thread without work. Two threads, ms, at 2**18,
# 3 * 2**17, 2**19: 8 x 32 x 8 x 128 1.02, 0.96, 0.89; 8 x 128 x 8 x 128 7.0, 7.6, 6.2, causal 8.2,
# 7.7, 7.6.
ELEMENTS_AT_ONCE = 1 << 19


# Keys of a block that a user's mask may hide as a whole.
KEYS_OF_BLOCK = 64

# Query-key pairs of a head from which on blocks are looked at, which takes 0.2 ms or more.
MIN_PAIRS_TO_LOOK_AT_BLOCKS = 1 << 18


@functools.cache
def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What arrays of a dtype are computed in: float64 in itself, all others in float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


class Block(NamedTuple):
    """A tile of query rows: some rows of some query heads, of one or several key/value heads."""

    batch: slice
    kv_heads: slice
    heads: slice  # of those that share a kv head
    rows: slice


class Cut(NamedTuple):
    """How a pass is cut up into blocks."""

    Br: int
    Bc: int
    heads_per_tile: int  # query heads of one kv head whose rows, if few, are stacked in one tile
    kv_heads: int  # of a block
    batch: int  # sequences of a block
    elements: int  # of scratch

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
    ) -> Cut:
        """As many whole heads and sequences to a block as one step takes."""
        heads_per_tile = min(group, max(1, tile.Br // seqlen_q))
        Br = min(tile.Br, seqlen_q)
        Bc = min(tile.Bc, max(seqlen_k, 1))
        one = scratch_elements(Br * heads_per_tile, Bc, head_dim, head_dim_v, copies)
        at_once = ELEMENTS_AT_ONCE // one
        some_heads = even_share(heads_kv, at_once)
        some_sequences = even_share(batch, at_once // heads_kv)
        elements = one * some_heads * some_sequences
        return cls(Br, Bc, heads_per_tile, some_heads, some_sequences, elements)


class Pass(NamedTuple):
    """One forward pass: the arrays, and what all its tiles share."""

    q: Array  # (batch, heads_kv, group, seqlen_q, head_dim)
    k: Array | PagedRows  # (batch, seqlen_k, heads_kv, head_dim)
    v: Array | PagedRows  # (batch, seqlen_k, heads_kv, head_dim_v)
    out: Array  # (batch, heads_kv, group, seqlen_q, head_dim_v)
    lse: Array | None  # (batch, heads_kv, group, seqlen_q)
    visible: Mask  # but for what modifications say of each sequence: see `mask_of`
    modified: Modified | None
    first: Pairs  # of the call, with which the pass begins
    softmax_scale: float
    compute: np.dtype[Any]
    cut: Cut
    copies: bool  # whether BLAS reads copies of k and v
    scratch_bytes: int
    seen: SeenBlocks | None  # blocks of cut.Br rows and KEYS_OF_BLOCK keys that a mask_mod shows

    @classmethod
    def make(
        cls,
        q: Array,
        k: Array | PagedRows,
        v: Array | PagedRows,
        out: Array,
        lse: Array | None,
        causal: bool,
        q_offset: int,
        softmax_scale: float,
        tile: Tile,
        modified: Modified | None = None,
        first: Pairs = FIRST,
    ) -> Pass:
        """A pass over what `forward` is given."""
        batch, seqlen_q, heads_q, head_dim = q.shape
        _, seqlen_k, heads_kv, head_dim_v = v.shape
        group = heads_q // heads_kv
        compute = compute_dtype(q.dtype)
        copies = not (_is_operand(k, compute) and _is_operand(v, compute))
        cut = Cut.make(
            batch, seqlen_q, seqlen_k, heads_kv, group, head_dim, head_dim_v, copies, tile
        )
        # Further out makes no difference, and would not fit the index arithmetic.
        nearest, furthest = -seqlen_q, seqlen_k
        if modified is not None:
            nearest, furthest = -FURTHEST, FURTHEST
            if modified.masks_differ:
                cut = cut._replace(batch=1)
        worker_bytes = cut.elements * compute.itemsize
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
            lse=None if lse is None else lse.reshape(batch, heads_kv, group, seqlen_q),
            visible=visible,
            modified=modified,
            first=first,
            softmax_scale=softmax_scale,
            compute=compute,
            cut=cut,
            copies=copies,
            scratch_bytes=worker_bytes,
            seen=_seen_by_mask_mod(modified, first, visible, batch, heads_q, cut.Br, compute),
        )

    @property
    def pairs(self) -> int:
        """Query-key pairs, masked ones too."""
        batch, heads_kv, group, seqlen_q, _ = self.q.shape
        return batch * heads_kv * group * seqlen_q * self.k.shape[1]

    def blocks(self) -> Iterator[Block]:
        """The tiles of query rows, those that see most keys first."""
        batch, heads_kv, group, seqlen_q, _ = self.q.shape
        cut = self.cut
        for rows in reversed(list(slices(seqlen_q, cut.Br))):
            for sequences in slices(batch, cut.batch):
                for kv_heads in slices(heads_kv, cut.kv_heads):
                    for heads in slices(group, cut.heads_per_tile):
                        yield Block(sequences, kv_heads, heads, rows)

    def mask_of(self, block: Block) -> Mask:
        """What the rows of a block's sequences see by their positions."""
        if self.modified is None:
            return self.visible
        return self.modified.of_mask(self.visible, self.first.b + block.batch.start)

    def tiles_of_keys(self, block: Block) -> list[tuple[int, int]]:
        """Return the ranges of at most Bc keys that rows of a block attend to, in order."""
        visible = self.mask_of(block)
        begin, end = visible.begin(block.rows.start), visible.end(block.rows.stop - 1)
        runs = [(begin, end)] if begin < end else []
        if self.seen is not None and runs:
            some = self._of_block(self.seen.some, block, begin, end).any(axis=(0, 1))
            edges = np.flatnonzero(np.diff(some, prepend=False, append=False))
            edges = np.clip((edges + begin // KEYS_OF_BLOCK) * KEYS_OF_BLOCK, begin, end)
            runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
            if runs and runs[-1][1] - runs[0][0] <= self.cut.Bc:
                runs = [(runs[0][0], runs[-1][1])]
        return [
            (start, min(start + self.cut.Bc, stop))
            for first, stop in runs
            for start in range(first, stop, self.cut.Bc)
        ]

    def is_shown(self, block: Block, start: int, stop: int) -> bool:
        """Return whether the user's mask is known to show all pairs of rows and some keys."""
        return self.seen is not None and bool(
            self._of_block(self.seen.all, block, start, stop).all()
        )

    def _of_block(self, of_blocks: Array, block: Block, start: int, stop: int) -> Array:
        """Return the values of (batch or 1, heads or 1, row blocks, key blocks) for some keys."""
        sequences, heads = of_blocks.shape[:2]
        some = block.batch if sequences > 1 else slice(None)
        of_heads = self._heads_of(block).reshape(-1) if heads > 1 else slice(None)
        keys = slice(start // KEYS_OF_BLOCK, -(-stop // KEYS_OF_BLOCK))
        return of_blocks[some, :, block.rows.start // self.cut.Br, keys][:, of_heads]

    def pairs_of(self, block: Block, start: int, stop: int) -> Pairs:
        """Pairs of a block's rows and some keys, as (sequences, kv heads, heads, rows, keys)."""
        return self.first._replace(
            b=self.first.b + _integers(block.batch)[:, None, None, None, None],
            h=self._heads_of(block)[..., None, None],
            row=_integers(block.rows)[:, None],
            j=_integers(slice(start, stop)),
            q_offset=self._offset_of(block),
        )

    def _offset_of(self, block: Block) -> int:
        """Return the position of the first query of a block's sequences among their keys."""
        if self.modified is None or self.modified.q_offset is None:
            return self.visible.q_offset
        return int(self.modified.q_offset[self.first.b + block.batch.start])

    def sinks_of(self, block: Block) -> Array | None:
        """The sinks of a block's heads, if there are any: (kv heads, heads, 1, 1)."""
        if self.modified is None or self.modified.sinks is None:
            return None
        sinks: Array = self.modified.sinks[self._heads_of(block)].astype(self.compute)
        return sinks[..., None, None]

    def _heads_of(self, block: Block) -> Array:
        heads = _integers(slice(0, self.q.shape[1] * self.q.shape[2]))
        return heads.reshape(self.q.shape[1:3])[block.kv_heads, block.heads]

    def queries(self, block: Block, scratch: Scratch) -> Array:
        """Scaled queries, (sequences, kv heads, heads, rows, head_dim)."""
        source = self.q[tuple(block)]
        if source.shape[2] == 1:
            # As they most likely lie in q: in one piece for NumPy.
            b, h, g, s, d = source.shape
            q = scratch.cut("q", (b, s, h, g, d), self.compute).transpose(0, 2, 3, 1, 4)
        else:
            q = scratch.cut("q", source.shape, self.compute)
        # With the scale folded in here, no pass over the scores is needed for it.
        scale = self.compute.type(self.softmax_scale)
        if source.dtype == self.compute:
            np.multiply(source, scale, out=q)
        else:
            np.copyto(q, source, casting="same_kind")
            q *= scale
        return q

    def keys(self, block: Block, start: int, stop: int, scratch: Scratch) -> Array:
        """Keys as BLAS reads them: (sequences, kv heads, stop - start, head_dim)."""
        k = self.k[block.batch, start:stop, block.kv_heads].swapaxes(1, 2)
        return scratch.copy("k", k, self.compute) if self.copies else k

    def values(self, block: Block, start: int, stop: int, scratch: Scratch) -> Array:
        """Values likewise."""
        v = self.v[block.batch, start:stop, block.kv_heads].swapaxes(1, 2)
        return scratch.copy("v", v, self.compute) if self.copies else v


def _seen_by_mask_mod(
    modified: Modified | None,
    first: Pairs,
    visible: Mask,
    batch: int,
    heads: int,
    Br: int,
    compute: np.dtype[Any],
) -> SeenBlocks | None:
    """Return which blocks the user's mask shows, if there is one and blocks are worth a look."""
    pairs = visible.seqlen_q * visible.seqlen_k
    if modified is None or modified.scores.mask_mod is None or pairs < MIN_PAIRS_TO_LOOK_AT_BLOCKS:
        return None
    offset: Any = visible.q_offset
    if modified.q_offset is not None:
        offset = modified.q_offset[first.b : first.b + batch, None, None, None]
    positions = {
        "b": (first.b + _integers(slice(0, batch)))[:, None, None, None],
        "h": _integers(slice(0, heads))[:, None, None],
        "i": _integers(slice(0, visible.seqlen_q))[None, None, :, None] + offset,
        "j": _integers(slice(0, visible.seqlen_k))[None, None, None],
        "q_start": first.q_start,
        "k_start": first.k_start,
    }
    return seen_blocks(modified.scores.mask_mod, positions, Br, KEYS_OF_BLOCK, compute)


def _is_operand(x: Array | PagedRows, compute: np.dtype[Any]) -> bool:
    """Whether BLAS reads the rows of (batch, seqlen, heads, dim) where they lie."""
    if isinstance(x, PagedRows):
        # The rows at hand are a new array.
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
    """Yield consecutive ranges of `size` indices, and the rest."""
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def _integers(span: slice) -> Array:
    return np.arange(span.start, span.stop, dtype=np.int32)


def even_share(count: int, most: int) -> int:
    """The size of equal parts, each of at most `most` or of one; 1 where there is nothing."""
    return max(1, -(-count // max(1, -(-count // max(most, 1)))))


def scratch_elements(m: int, Bc: int, head_dim: int, head_dim_v: int, copies: bool) -> int:
    """Elements of all buffers for a tile of m rows."""
    q, k, v = m * head_dim, Bc * head_dim, Bc * head_dim_v
    acc = product = m * head_dim_v
    row_max = new_max = row_sum = tile_sum = m
    scores = m * Bc
    of_rows = q + scores + acc + product + row_max + new_max + row_sum + tile_sum
    return of_rows + (k + v if copies else 0)


class Scratch:
    """One worker's buffers, cut to each tile's size; as large as the largest yet."""

    # Of workers that are through, for those to come: the system hands out new memory page by page,
    # at the first write to each. 1 x 128 x 8 x 64 takes 1.6 ms, in buffers at hand 0.95.
    _kept: ClassVar[list[Scratch]] = []

    def __init__(self) -> None:
        self._flat: dict[str, Array] = {}

    @classmethod
    @contextmanager
    def borrowed(cls) -> Iterator[Scratch]:
        """Buffers for a worker."""
        try:
            scratch = cls._kept.pop()
        except IndexError:
            scratch = cls()
        yield scratch
        size = sum(flat.nbytes for flat in scratch._flat.values())
        if len(cls._kept) < MAX_KEPT and size <= MAX_BYTES_KEPT:
            cls._kept.append(scratch)

    def cut(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of any content."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size or flat.dtype != dtype:
            # First let go of, lest both be there at once.
            self._flat.pop(name, None)
            skipped = len(self._flat) * BYTES_BETWEEN_BUFFERS // dtype.itemsize
            flat = self._flat[name] = np.empty(skipped + size, dtype)[skipped:]
        return flat[:size].reshape(shape)

    def copy(self, name: str, source: Array, dtype: np.dtype[Any]) -> Array:
        """A contiguous copy in another dtype."""
        copy = self.cut(name, source.shape, dtype)
        np.copyto(copy, source, casting="same_kind")
        return copy


def mask(job: Pass, block: Block, scores: Array, start: int, stop: int) -> None:
    """Set to -inf the scores, (..., rows, keys), of keys that a row does not see.

    Before, a modified call's become what its modifications make of them.
    """
    if job.modified is not None:
        modified = job.modified
        if job.is_shown(block, start, stop):
            modified = modified._replace(scores=modified.scores._replace(mask_mod=None))
        change(scores, modified, job.pairs_of(block, start, stop))
    rows, visible = block.rows, job.mask_of(block)
    for first, end in visible.edges(rows.start, rows.stop, start, stop):
        hidden = visible.hidden(rows.start, rows.stop, first, end)
        np.copyto(scores[..., first - start : end - start], -np.inf, where=hidden)


def change(scores: Array, modified: Modified, at: Pairs) -> None:
    """Put in the place of scores what the modifications make of them."""
    if not modified.scores.changes_nothing:
        np.copyto(scores, modified.scores.apply(scores, at), casting="same_kind")


def count_sink(row_max: Array, row_sum: Array, sink: Array) -> Array:
    """Add a sink to row sums of exp(score - row_max), in place.

    Returns what all else that was multiplied by these weights is to be multiplied by. What comes of
    rows without a score above -inf is of no use.
    """
    new_max = np.maximum(row_max, sink)
    factor: Array = np.exp(row_max - new_max)
    row_sum *= factor
    row_sum += np.exp(sink - new_max)
    row_max[...] = new_max
    return factor


def lost_rows(job: Pass, block: Block, scratch: Scratch, empty: Array) -> Array:
    """Which rows without a score above -inf have finite queries and see finite keys, but some.

    The formula then gives NaN, not 0: such scores are too large for the dtype. But where scores are
    modified, that may have made them -inf.
    """
    if job.modified is not None and not job.modified.scores.changes_nothing:
        return np.zeros_like(empty)
    source, visible = job.q[tuple(block)], job.mask_of(block)
    rows = np.arange(block.rows.start, block.rows.stop)
    begins, ends = visible.begins(rows), visible.ends(rows)
    lost: Array = empty & (begins < ends)[:, None]
    if not lost.any():
        return lost
    lost &= np.isfinite(source).all(axis=-1, keepdims=True)
    tiles = ((start, min(start + job.cut.Bc, ends[-1])) for start in range(0, ends[-1], job.cut.Bc))
    keys = (job.keys(block, start, stop, scratch) for start, stop in tiles)
    finite = np.concatenate([np.isfinite(k).all(axis=-1) for k in keys], axis=-1)
    return lost & all_between(finite, begins, ends)[:, :, None, :, None]


def all_between(flags: Array, begins: Array, ends: Array) -> Array:
    """Whether all of flags[..., begin:end] are set, of each row: (..., rows)."""
    missing = np.zeros((*flags.shape[:-1], flags.shape[-1] + 1), np.int32)
    np.cumsum(~flags, axis=-1, out=missing[..., 1:])
    all_set: Array = missing[..., np.minimum(begins, ends)] == missing[..., ends]
    return all_set


@functools.cache
def lowest(dtype: str) -> float:
    """The lowest finite number of a dtype, given by its character."""
    return float(np.finfo(dtype).min)


def ones(count: int, dtype: str) -> Array:
    """A vector of ones, not to be written."""
    return _ones((count - 1).bit_length(), dtype)[:count]


@functools.cache
def _ones(bits: int, dtype: str) -> Array:
    return np.ones(1 << bits, dtype)
