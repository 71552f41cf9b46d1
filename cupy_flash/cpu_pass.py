"""One forward pass of the CPU backend as a record: arrays, how it is cut up, scratch memory."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host_sequences import PagedRows
from cupy_flash.tile import Tile

Array = NDArray[Any]

#: Bytes that the scratch of all workers together stays under; no more workers start than fit.
SCRATCH_LIMIT = 60 << 20

# Values are multiplied by this where sums of p * v overflow: exact, and room for 2**32 keys.
SHRINK = 2.0**-32

# Keys' norms and values' magnitudes are bounded per this many keys.
KEY_GROUP = 64

# Fewer query rows per key/value head do not pay back the pass over K and V that finds the bounds.
MIN_ROWS_FOR_BOUNDS = 128

# Query-key pairs of a head up to which it is computed as a whole, and rows under a causal mask, of
# which it also computes what is masked.
MAX_PAIRS_OF_HEAD = 1 << 17
MAX_CAUSAL_ROWS_OF_HEAD = 128

# Elements of scratch that whole heads are taken together up to. Fewer make more and shorter calls
# of NumPy, more leave a second thread without work. One thread, ms, at 2**16, 2**17, 2**18, 2**19:
# 128 x 32 x 12 x 32  32.7, 31.3, 26.0, 26.4; 8 x 32 x 8 x 128  2.17, 1.74, 1.72, 1.49.
ELEMENTS_AT_ONCE = 1 << 18


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


class Pass(NamedTuple):
    """One forward pass: the arrays, and what all its tiles share."""

    q: Array  # (batch, heads_kv, group, seqlen_q, head_dim)
    k: Array | PagedRows  # (batch, seqlen_k, heads_kv, head_dim)
    v: Array | PagedRows  # (batch, seqlen_k, heads_kv, head_dim_v)
    out: Array  # (batch, heads_kv, group, seqlen_q, head_dim_v)
    lse: Array | None  # (batch, heads_kv, group, seqlen_q)
    causal: bool
    q_offset: int
    softmax_scale: float
    compute: np.dtype[Any]
    Br: int
    Bc: int
    heads_per_tile: int  # query heads of one kv head whose rows, if few, are stacked in one tile
    whole: bool  # whether whole heads are computed at once (`cupy_flash.cpu_heads`)
    kv_heads_at_once: int
    batch_at_once: int
    copies: bool  # whether BLAS reads copies of k and v
    bounds: Bounds | None
    scratch_bytes: int

    @classmethod
    def make(
        cls,
        q: Array,
        k: Array | PagedRows,
        v: Array | PagedRows,
        out: Array,
        lse: Array | None,
        *,
        causal: bool,
        q_offset: int,
        softmax_scale: float,
        tile: Tile,
    ) -> Pass:
        """A pass over what `forward` is given."""
        batch, seqlen_q, heads_q, head_dim = q.shape
        _, seqlen_k, heads_kv, head_dim_v = v.shape
        group = heads_q // heads_kv
        compute = compute_dtype(q.dtype)
        heads_per_tile = min(group, max(1, tile.Br // seqlen_q))
        Br = min(tile.Br, seqlen_q)
        Bc = min(tile.Bc, max(seqlen_k, 1))
        m = Br * heads_per_tile
        copies = not (_is_operand(k, compute) and _is_operand(v, compute))
        whole = (
            m == group * seqlen_q
            and Bc == max(seqlen_k, 1)
            and m * Bc <= MAX_PAIRS_OF_HEAD
            and not (causal and seqlen_q > MAX_CAUSAL_ROWS_OF_HEAD)
        )
        kv_heads_at_once = batch_at_once = 1
        if whole:
            sizes = head_scratch_sizes(1, m, Bc, head_dim, head_dim_v, copies)
            at_once = ELEMENTS_AT_ONCE // sum(sizes.values())
            kv_heads_at_once = _even_share(heads_kv, at_once)
            batch_at_once = _even_share(batch, at_once // heads_kv)
            heads = kv_heads_at_once * batch_at_once
            sizes = head_scratch_sizes(heads, m, Bc, head_dim, head_dim_v, copies)
        else:
            sizes = tile_scratch_sizes(m, Bc, head_dim, head_dim_v, copies)
        worker_bytes = sum(sizes.values()) * compute.itemsize
        if worker_bytes > SCRATCH_LIMIT:
            raise ValueError(
                f"tile {tile} needs {worker_bytes} bytes of scratch per worker, more than "
                f"{SCRATCH_LIMIT}; choose a smaller Br or Bc"
            )
        use_bounds = not whole and group * seqlen_q >= MIN_ROWS_FOR_BOUNDS and Bc >= KEY_GROUP
        split = (batch, seqlen_q, heads_kv, group)
        return cls(
            q=q.reshape(*split, head_dim).transpose(0, 2, 3, 1, 4),
            k=k,
            v=v,
            out=out.reshape(*split, head_dim_v).transpose(0, 2, 3, 1, 4),
            lse=None if lse is None else lse.reshape(batch, heads_kv, group, seqlen_q),
            causal=causal,
            # Further out makes no difference, and would not fit the index arithmetic.
            q_offset=min(max(q_offset, -seqlen_q), seqlen_k),
            softmax_scale=softmax_scale,
            compute=compute,
            Br=Br,
            Bc=Bc,
            heads_per_tile=heads_per_tile,
            whole=whole,
            kv_heads_at_once=kv_heads_at_once,
            batch_at_once=batch_at_once,
            copies=copies,
            bounds=Bounds(batch, heads_kv, seqlen_k, compute) if use_bounds else None,
            scratch_bytes=worker_bytes,
        )

    @property
    def pairs(self) -> int:
        """Query-key pairs, masked ones too."""
        batch, heads_kv, group, seqlen_q, _ = self.q.shape
        return batch * heads_kv * group * seqlen_q * self.k.shape[1]

    def keys_seen(self, row: int) -> int:
        """How many keys, from the first on, query ``row`` sees."""
        seqlen_k = self.k.shape[1]
        if not self.causal:
            return seqlen_k
        return min(max(row + self.q_offset + 1, 0), seqlen_k)

    def blocks(self) -> Iterator[Block]:
        """The tiles of query rows, those that see most keys first."""
        batch, heads_kv, group, seqlen_q, _ = self.q.shape
        for row in reversed(range(0, seqlen_q, self.Br)):
            rows = slice(row, min(row + self.Br, seqlen_q))
            for b in range(0, batch, self.batch_at_once):
                sequences = slice(b, min(b + self.batch_at_once, batch))
                for kv_head in range(0, heads_kv, self.kv_heads_at_once):
                    kv_heads = slice(kv_head, min(kv_head + self.kv_heads_at_once, heads_kv))
                    for head in range(0, group, self.heads_per_tile):
                        heads = slice(head, min(head + self.heads_per_tile, group))
                        yield Block(sequences, kv_heads, heads, rows)

    def keys(self, block: Block, start: int, stop: int, scratch: Scratch) -> Array:
        """Keys as BLAS reads them: (sequences, kv heads, stop - start, head_dim)."""
        k = self.k[block.batch, start:stop, block.kv_heads].swapaxes(1, 2)
        return scratch.copy("k", k, self.compute) if self.copies else k

    def values(self, block: Block, start: int, stop: int, scratch: Scratch) -> Array:
        """Values likewise."""
        v = self.v[block.batch, start:stop, block.kv_heads].swapaxes(1, 2)
        return scratch.copy("v", v, self.compute) if self.copies else v


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


def _even_share(count: int, most: int) -> int:
    """The size of equal parts, each of at most `most` or of one."""
    return -(-count // -(-count // max(most, 1)))


def tile_scratch_sizes(
    m: int, Bc: int, head_dim: int, head_dim_v: int, copies: bool
) -> dict[str, int]:
    """Elements of each buffer for a tile of m rows."""
    return {
        "q": m * head_dim,
        "k": Bc * head_dim if copies else 0,
        "v": Bc * head_dim_v if copies else 0,
        "scores": m * Bc,
        "acc": m * head_dim_v,
        "product": m * head_dim_v,
        "row_max": m,
        "new_max": m,
        "row_sum": m,
        "tile_sum": m,
    }


def head_scratch_sizes(
    heads: int, m: int, seqlen_k: int, head_dim: int, head_dim_v: int, copies: bool
) -> dict[str, int]:
    """Elements of each buffer for whole heads of m rows."""
    return {
        "q": heads * m * head_dim,
        "k": heads * seqlen_k * head_dim if copies else 0,
        "v": heads * seqlen_k * head_dim_v if copies else 0,
        "scores": heads * m * seqlen_k,
        "acc": heads * m * head_dim_v,
    }


class Scratch:
    """One worker's buffers, cut to each tile's size; as large as the largest yet."""

    def __init__(self) -> None:
        self._flat: dict[str, Array] = {}

    def cut(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of any content."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size or flat.dtype != dtype:
            # First let go of, lest both be there at once.
            self._flat.pop(name, None)
            flat = self._flat[name] = np.empty(size, dtype)
        return flat[:size].reshape(shape)

    def copy(self, name: str, source: Array, dtype: np.dtype[Any]) -> Array:
        """A contiguous copy in another dtype."""
        copy = self.cut(name, source.shape, dtype)
        np.copyto(copy, source, casting="same_kind")
        return copy


class Bounds:
    """The largest norms of keys and magnitudes of values, found once for all tiles of a head.

    Whichever thread first asks about a head finds them.
    """

    def __init__(self, batch: int, heads_kv: int, seqlen_k: int, compute: np.dtype[Any]) -> None:
        # Up to the end of each KEY_GROUP keys, and up to the last.
        self._key_norm = np.empty((batch, heads_kv, -(-seqlen_k // KEY_GROUP)), compute)
        self._value_max = np.empty_like(self._key_norm)
        self._found = np.zeros((batch, heads_kv), bool)
        self._lock = threading.Lock()

    def of_first(
        self, job: Pass, block: Block, scratch: Scratch, count: int
    ) -> tuple[float, float]:
        """Bounds over the first ``count`` keys: a multiple of KEY_GROUP, or all."""
        where = block.batch, block.kv_heads
        if not self._found[where].all():
            with self._lock:
                if not self._found[where].all():
                    self._find(job, block, scratch)
                    self._found[where] = True
        last = -(-count // KEY_GROUP) - 1
        key_norm, value_max = self._key_norm[where][..., last], self._value_max[where][..., last]
        return float(key_norm.max()), float(value_max.max())

    def _find(self, job: Pass, block: Block, scratch: Scratch) -> None:
        where = block.batch, block.kv_heads
        key_norm, value_max = self._key_norm[where], self._value_max[where]
        seqlen_k = job.k.shape[1]
        step = job.Bc // KEY_GROUP * KEY_GROUP
        for start in range(0, seqlen_k, step):
            stop = min(start + step, seqlen_k)
            groups = slice(start // KEY_GROUP, -(-stop // KEY_GROUP))
            firsts = np.arange(0, stop - start, KEY_GROUP)
            k = job.keys(block, start, stop, scratch)
            squares = np.einsum("bhjd,bhjd->bhj", k, k)
            np.sqrt(np.maximum.reduceat(squares, firsts, axis=-1), out=key_norm[..., groups])
            v = job.values(block, start, stop, scratch)
            largest = np.maximum(v.max(axis=-1), -v.min(axis=-1))
            np.maximum.reduceat(largest, firsts, axis=-1, out=value_max[..., groups])
        np.maximum.accumulate(key_norm, axis=-1, out=key_norm)
        np.maximum.accumulate(value_max, axis=-1, out=value_max)


def lost_rows(job: Pass, block: Block, scratch: Scratch, empty: Array) -> Array:
    """Which rows without a score above -inf have finite queries and see finite keys, but some.

    The formula then gives NaN, not 0: such scores are too large for the dtype.
    """
    source = job.q[tuple(block)]
    seen = np.array([job.keys_seen(i) for i in range(block.rows.start, block.rows.stop)])
    lost: Array = empty & (seen > 0)[:, None]
    if not lost.any():
        return lost
    lost &= np.isfinite(source).all(axis=-1, keepdims=True)
    tiles = ((start, min(start + job.Bc, seen[-1])) for start in range(0, seen[-1], job.Bc))
    keys = (job.keys(block, start, stop, scratch) for start, stop in tiles)
    finite = np.concatenate([np.isfinite(k).all(axis=-1) for k in keys], axis=-1)
    finite = np.logical_and.accumulate(finite, axis=-1)[:, :, np.maximum(seen - 1, 0)]
    return lost & finite[:, :, None, :, None]


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


@functools.lru_cache(32)
def hidden(rows: int, columns: int, last_seen: int) -> Array:
    """Which of some columns a row does not see; the first sees those up to ``last_seen``."""
    return np.arange(columns) > np.arange(last_seen, last_seen + rows)[:, None]
