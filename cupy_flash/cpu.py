"""The tiled attention forward pass in NumPy: the backend where there is no GPU.

The algorithm is FlashAttention-2's (Dao, 2023, https://arxiv.org/abs/2307.08691, algorithm 1): a
tile of Br query rows stays put while tiles of Bc keys and values pass by; a running row maximum and
row sum replace the softmax over whole rows, and the division by the sum waits until the last tile.
The score matrix never exists as a whole, so scratch memory does not grow with the sequence.

Three steps go beyond the paper:

- Where the norms of a tile's queries and of the keys they see bound all scores to a range in which
  exp can neither overflow nor underflow, the running maximum is left at 0: that saves two of the
  four passes over the scores that are not matrix products.
- Short sequences leave room in a tile: as many heads, and sequences of a batch, as fit the cache
  are taken at once, in the same few calls of NumPy.
- Along a causal mask's edge, rows are taken in strips, each over the keys that it sees.

Threads share the tiles out. NumPy lets go of the GIL inside matmul and its ufuncs, which is where
the time is.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.cpu_threads import Stop, cpus, share_out, single_threaded_blas
from cupy_flash.host_sequences import PagedRows
from cupy_flash.problem import Problem
from cupy_flash.tile import Tile

Array = NDArray[Any]

#: Files beside this one that say what the CPU backend computes, and how fast.
SOURCES = ("cpu.py", "cpu_rows.py", "cpu_sequences.py", "cpu_threads.py", "host_sequences.py")

#: Bytes that the scratch of all workers together stays under; no more workers start than fit.
SCRATCH_LIMIT = 60 << 20

# Scores within [-SCORE_BOUND, SCORE_BOUND] need no running maximum: exp stays within [1e-13, 1e13],
# far from float32's ends even when multiplied by values of magnitude VALUE_BOUND, or its inverse,
# and summed. Normal random inputs of any head_dim stay below 25.
SCORE_BOUND = 30.0
VALUE_BOUND = 1e16

# Keys' norms and values' magnitudes are bounded per this many keys.
KEY_GROUP = 64

# Fewer query rows per key/value head do not pay back the pass over K and V that finds the bounds.
MIN_ROWS_FOR_BOUNDS = 128

# Query-key pairs that make a worker worthwhile: they take one about 1 ms, starting it 0.1 to 0.2
# ms.
MIN_PAIRS_PER_WORKER = 1 << 17

# Scratch elements that whole heads are taken together up to.
ELEMENTS_AT_ONCE = 1 << 17

# Rows of a strip along the edge of a causal mask.
STRIP_ROWS = 64

# Values are multiplied by this where sums of p * v overflow: exact, and room for 2**32 keys.
SHRINK = 2.0**-32


def default_tile(problem: Problem) -> Tile:
    """The tile to use where none was tuned.

    Does not depend on the number of threads, so that results do not either.
    """
    # Best of nine interleaved runs, ms; AMD Zen 3 at 2 threads, OpenBLAS 0.3.31, float32,
    # 1 x 8 x 4096 x 64:  256x512 598, 384x512 452, 512x256 522, 512x512 428, 768x512 397,
    # 1024x256 394, 1024x512 408. Wider tiles make better matrix products; past 512 rows little is
    # gained, and the tiles become too few to share out evenly. Short sequences have few to start
    # with.
    Br = 512 if problem.seqlen_q >= 2048 else 256
    # Rows of a tile are those of all query heads that share a key/value head.
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    Br = min(Br, max(rows, 1))
    # Of a low tile each step is little work for its many calls of NumPy, in which the threads wait
    # for one another. One query over 4 x 8192 keys, 32 heads over 8 of 128, 4 threads, ms by Bc:
    # 512 260, 1024 145, 2048 95, 4096 91, 8192 80; 1 x 65536 390, 191, 83, 65, 52; float16 320,
    # 192, 177, 168, 173.
    Bc = 512 * max(1, min(8, 256 // Br))
    while Bc > 512 and 4 * scratch_bytes(problem, Tile(Br, Bc)) > SCRATCH_LIMIT:
        Bc //= 2
    return Tile(Br, min(Bc, max(problem.seqlen_k, 1)))


def candidate_tiles(problem: Problem) -> Iterator[Tile]:
    """Tiles worth timing for a problem: powers of two that its sequences can fill.

    Each leaves room in `SCRATCH_LIMIT` for at least four workers.
    """

    def sizes(smallest: int, largest: int, seqlen: int) -> Iterator[int]:
        size = smallest
        while size <= largest:
            yield size
            if size >= seqlen:
                return
            size *= 2

    for Br in sizes(32, 2048, problem.seqlen_q):
        for Bc in sizes(64, 2048, problem.seqlen_k):
            tile = Tile(Br, Bc)
            if 4 * scratch_bytes(problem, tile) <= SCRATCH_LIMIT:
                yield tile


def scratch_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of scratch that one worker needs."""
    itemsize = 8 if problem.dtype == "float64" else 4
    sizes = _scratch_sizes(1, tile.Br, tile.Bc, problem.head_dim, problem.head_dim_v, copies=True)
    return sum(sizes.values()) * itemsize


@functools.cache
def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What arrays of a dtype are computed in: float64 in itself, all others in float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


@functools.cache
def digest() -> str:
    """Sixteen hex digits over `SOURCES`: what a tuned tile or a benchmark was measured on."""
    found = hashlib.sha256()
    for name in SOURCES:
        found.update(name.encode() + b"\0" + Path(__file__).with_name(name).read_bytes() + b"\0")
    return found.hexdigest()[:16]


def forward(
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
    threads: int | None = None,
) -> None:
    """Attention of ``q`` over ``k`` and ``v`` into ``out``, and its log-sum-exp into ``lse``.

    The arguments are taken as checked. float64 computes in float64, everything else in float32.
    The same inputs and tile give the same bits, whatever the number of threads. While the call
    lasts, BLAS is held to one thread per call in the whole process.

    Parameters
    ----------
    q : numpy.ndarray, (batch, seqlen_q, heads_q, head_dim)
        float16, bfloat16 (ml_dtypes), float32 or float64; any strides, as for the other arrays.
    k : numpy.ndarray or PagedRows, (batch, seqlen_k, heads_kv, head_dim)
        ``heads_q`` is a multiple of ``heads_kv``.
    v : numpy.ndarray or PagedRows, (batch, seqlen_k, heads_kv, head_dim_v)
    out : numpy.ndarray, (batch, seqlen_q, heads_q, head_dim_v)
        Overwritten; must not overlap the inputs.
    lse : numpy.ndarray, (batch, heads_q, seqlen_q), or None
        Overwritten with natural logarithms.
    causal : bool
        Query ``i`` sees only the keys ``j <= i + q_offset``.
    q_offset : int
        Absolute position of the first query.
    softmax_scale : float
        Factor on the scores.
    tile : Tile
        Clipped to the sequences.
    threads : int, optional
        At most this many workers; as many as there are CPUs for this process if not given. Fewer
        run where the work is small or the scratch of more would pass :data:`SCRATCH_LIMIT`.

    Raises
    ------
    ValueError
        The scratch of one worker passes :data:`SCRATCH_LIMIT` with this tile.
    """
    if q.size == 0:
        # head_dim is at least 1.
        return
    job = Pass.make(
        q,
        k,
        v,
        out,
        lse,
        causal=causal,
        q_offset=q_offset,
        softmax_scale=softmax_scale,
        tile=tile,
    )
    run(iter((job,)), job.pairs, job.scratch_bytes, threads)


def run(passes: Iterator[Pass], pairs: int, worker_bytes: int, threads: int | None) -> None:
    """Compute passes, their tiles shared out to threads.

    Parameters
    ----------
    passes : iterator of Pass
        Asked for the next when the tiles of those before are taken.
    pairs : int
        Query-key pairs of all of them.
    worker_bytes : int
        The largest `Pass.scratch_bytes`.
    threads : int, optional
        As in `forward`.
    """
    workers = min(
        threads or cpus(),
        SCRATCH_LIMIT // max(worker_bytes, 1),
        max(1, pairs // MIN_PAIRS_PER_WORKER),
    )
    stop = Stop()

    def work(items: Iterable[tuple[Pass, Block]]) -> None:
        scratch = _Scratch()
        # NumPy keeps its error state per thread. What it would warn of is meant: exp of -inf, the
        # logarithm of an empty row's sum, NaN on their way through.
        with np.errstate(all="ignore"):
            for job, block in items:
                _attend(job, scratch, block, stop)

    with single_threaded_blas:
        share_out(workers, ((job, block) for job in passes for block in job.blocks()), work, stop)


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
    kv_heads_at_once: int
    batch_at_once: int
    copies: bool  # whether BLAS reads copies of k and v
    bounds: _Bounds | None
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
        at_once = 1
        if m == group * seqlen_q:
            at_once = max(1, ELEMENTS_AT_ONCE // _elements(m, Bc, head_dim, head_dim_v, copies))
        kv_heads_at_once = _even_share(heads_kv, at_once)
        batch_at_once = _even_share(batch, at_once // heads_kv)
        heads = kv_heads_at_once * batch_at_once
        sizes = _scratch_sizes(heads, m, Bc, head_dim, head_dim_v, copies)
        worker_bytes = sum(sizes.values()) * compute.itemsize
        if worker_bytes > SCRATCH_LIMIT:
            raise ValueError(
                f"tile {tile} needs {worker_bytes} bytes of scratch per worker, more than "
                f"{SCRATCH_LIMIT}; choose a smaller Br or Bc"
            )
        use_bounds = group * seqlen_q >= MIN_ROWS_FOR_BOUNDS and Bc >= KEY_GROUP
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
            kv_heads_at_once=kv_heads_at_once,
            batch_at_once=batch_at_once,
            copies=copies,
            bounds=_Bounds(batch, heads_kv, seqlen_k, compute) if use_bounds else None,
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

    def keys(self, block: Block, start: int, stop: int, scratch: _Scratch) -> Array:
        """Keys as BLAS reads them: (sequences, kv heads, stop - start, head_dim)."""
        k = self.k[block.batch, start:stop, block.kv_heads].swapaxes(1, 2)
        return scratch.copy("k", k, self.compute) if self.copies else k

    def values(self, block: Block, start: int, stop: int, scratch: _Scratch) -> Array:
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


def _elements(m: int, Bc: int, head_dim: int, head_dim_v: int, copies: bool) -> int:
    """Elements of scratch for each head."""
    rows = m * (Bc + head_dim + 2 * head_dim_v + 4)
    return rows + (Bc * (head_dim + head_dim_v) if copies else 0)


def _even_share(count: int, most: int) -> int:
    """The size of equal parts, each of at most `most` or of one."""
    return -(-count // -(-count // max(most, 1)))


def _scratch_sizes(
    heads: int, m: int, Bc: int, head_dim: int, head_dim_v: int, copies: bool
) -> dict[str, int]:
    rows = heads * m
    return {
        "q": rows * head_dim,
        "k": heads * Bc * head_dim if copies else 0,
        "v": heads * Bc * head_dim_v if copies else 0,
        "ones": Bc,
        "scores": rows * Bc,
        "acc": rows * head_dim_v,
        "product": rows * head_dim_v,
        "row_max": rows,
        "new_max": rows,
        "row_sum": rows,
        "tile_sum": rows,
    }


class _Scratch:
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

    def ones(self, size: int, dtype: np.dtype[Any]) -> Array:
        """A vector of ones."""
        flat = self._flat.get("ones")
        if flat is None or flat.size < size or flat.dtype != dtype:
            flat = self._flat["ones"] = np.ones(size, dtype)
        return flat[:size]


class _Bounds:
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
        self, job: Pass, block: Block, scratch: _Scratch, count: int
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

    def _find(self, job: Pass, block: Block, scratch: _Scratch) -> None:
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


class _Step(NamedTuple):
    """Keys for some rows of a tile to take up."""

    rows: slice | None  # of the tile; None for all of them
    start: int
    stop: int
    masked: bool = False


def _attend(job: Pass, scratch: _Scratch, block: Block, stop: Stop) -> None:
    """Output and lse of one block; nothing is written once ``stop`` is requested."""
    tile = _Tile(job, scratch, block)
    if not tile.take_all(stop):
        return
    overflown = tile.overflown()
    tile.finish()
    if overflown is not None:
        # Of the other rows not a bit may change.
        tile = _Tile(job, scratch, block, shrink=True)
        if tile.take_all(stop):
            tile.finish_shrunk(overflown)


class _Tile:
    """The rows of a block on their way through the keys.

    Arrays are (sequences, kv heads, heads, rows, ...).
    """

    def __init__(
        self, job: Pass, scratch: _Scratch, block: Block, *, shrink: bool = False
    ) -> None:
        self.job, self.scratch, self.block, self.shrink = job, scratch, block, shrink
        self.source = job.q[block.batch, block.kv_heads, block.heads, block.rows]
        rows = self.source.shape[:4]
        self.q = self._cut("q", self.source.shape)
        # With the scale folded in here, no pass over the scores is needed for it.
        scale = job.compute.type(job.softmax_scale)
        if self.source.dtype == job.compute:
            np.multiply(self.source, scale, out=self.q)
        else:
            np.copyto(self.q, self.source, casting="same_kind")
            self.q *= scale
        self.acc = self._cut("acc", (*rows, job.v.shape[3]))
        self.row_sum = self._cut("row_sum", (*rows, 1))
        self.row_max = self._cut("row_max", (*rows, 1))
        self.lowest = _lowest(job.compute)
        self.at_once = False
        # Keys from the first on whose scores need no running maximum.
        self.bounded = 0

    def _cut(self, name: str, shape: tuple[int, ...]) -> Array:
        return self.scratch.cut(name, shape, self.job.compute)

    def take_all(self, stop: Stop) -> bool:
        """Take up all keys that a row sees; False if stopped on the way."""
        steps = self._steps()
        self._begin(steps)
        for step in steps:
            if stop.requested:
                return False
            self._take(step)
        return True

    def _steps(self) -> list[_Step]:
        """First the keys that all rows see, then those along the edge of the mask."""
        job, rows = self.job, self.block.rows
        seen_by_all, seen_by_any = job.keys_seen(rows.start), job.keys_seen(rows.stop - 1)
        if seen_by_all == seen_by_any:
            unmasked = seen_by_all
        else:
            # Rounded down to where the bounds are known.
            unmasked = seen_by_all // KEY_GROUP * KEY_GROUP
        if self._needs_no_maximum(unmasked):
            self.bounded = unmasked
        steps = [
            _Step(None, start, min(start + job.Bc, unmasked))
            for start in range(0, unmasked, job.Bc)
        ]
        if unmasked == seen_by_any:
            return steps
        for first in range(rows.start, rows.stop, STRIP_ROWS):
            last = min(first + STRIP_ROWS, rows.stop)
            strip = slice(first - rows.start, last - rows.start)
            seen, end = job.keys_seen(first), job.keys_seen(last - 1)
            for start in range(unmasked, end, job.Bc):
                key_stop = min(start + job.Bc, end)
                steps.append(_Step(strip, start, key_stop, masked=key_stop > seen))
        return steps

    def _needs_no_maximum(self, keys: int) -> bool:
        """Whether the scaled queries can do without a running maximum over some first keys.

        Asks only about keys that every row of the tile sees: a masked key must leave no trace, not
        even in the rounding. False if anything it looks at is NaN or inf.
        """
        job = self.job
        if job.bounds is None or self.shrink or keys < KEY_GROUP:
            return False
        if keys % KEY_GROUP and keys < job.k.shape[1]:
            return False
        key_norm, value_max = job.bounds.of_first(job, self.block, self.scratch, keys)
        q_norm = math.sqrt(np.einsum("...d,...d->...", self.q, self.q).max())
        return q_norm * key_norm <= SCORE_BOUND and (
            value_max == 0 or 1 / VALUE_BOUND <= value_max <= VALUE_BOUND
        )

    def _begin(self, steps: list[_Step]) -> None:
        """Before the first key."""
        rows = self.source.shape[3]
        # Where all rows take up their keys in one step, that writes what others add to.
        self.at_once = len(steps) == 1 and steps[0].rows in (None, slice(0, rows))
        if not self.at_once:
            self.acc.fill(0)
            self.row_sum.fill(0)
        if self.bounded or not self.at_once:
            self.row_max.fill(0 if self.bounded else self.lowest)

    def _take(self, step: _Step) -> None:
        """Take up some keys."""
        job, scratch = self.job, self.scratch
        k = job.keys(self.block, step.start, step.stop, scratch)
        v = job.values(self.block, step.start, step.stop, scratch)
        if self.shrink:
            v = v * job.compute.type(SHRINK)
        arrays = self.q, self.acc, self.row_sum, self.row_max
        if step.rows is None or self.at_once:
            # The rows of all heads are one matrix.
            shape = *self.q.shape[:2], -1
            q, acc, row_sum, row_max = (x.reshape(*shape, x.shape[4]) for x in arrays)
        else:
            q, acc, row_sum, row_max = (x[..., step.rows, :] for x in arrays)
            k, v = k[:, :, None], v[:, :, None]
        count = step.stop - step.start
        scores = self._cut("scores", (*q.shape[:-1], count))
        np.matmul(q, k.swapaxes(-1, -2), out=scores)
        if step.masked:
            self._mask(scores, step)
        if step.stop > self.bounded:
            new_max = self._cut("new_max", row_max.shape)
            # -inf - -inf would be NaN; subtracting the lowest number leaves exp(-inf) = 0.
            np.maximum.reduce(scores, axis=-1, keepdims=True, initial=self.lowest, out=new_max)
            if not self.at_once:
                np.maximum(new_max, row_max, out=new_max)
                # The maxima seldom move after the first tiles; comparing them is cheap.
                if step.start and not np.array_equal(new_max, row_max):
                    row_max -= new_max
                    np.exp(row_max, out=row_max)
                    row_sum *= row_max
                    acc *= row_max
            row_max[...] = new_max
            scores -= new_max
        np.exp(scores, out=scores)
        # A product with ones sums rows three times as fast as add.reduce.
        ones = scratch.ones(count, job.compute)
        if self.at_once:
            np.matmul(scores.reshape(-1, count), ones, out=row_sum.reshape(-1))
            np.matmul(scores, v, out=acc)
            return
        tile_sum = self._cut("tile_sum", row_sum.shape)
        np.matmul(scores.reshape(-1, count), ones, out=tile_sum.reshape(-1))
        product = self._cut("product", acc.shape)
        np.matmul(scores, v, out=product)
        row_sum += tile_sum
        acc += product

    def _mask(self, scores: Array, step: _Step) -> None:
        """Set to -inf what rows of a strip do not see."""
        rows = step.rows
        assert rows is not None
        first = self.block.rows.start + rows.start
        # Columns from here on are not seen by all.
        column = max(self.job.keys_seen(first) - step.start, 0)
        columns = step.stop - step.start - column
        last_seen = first + self.job.q_offset - step.start - column
        by_head = scores.reshape(*self.q.shape[:3], rows.stop - rows.start, -1)
        hidden = _hidden(rows.stop - rows.start, columns, last_seen)
        np.copyto(by_head[..., column:], -np.inf, where=hidden)

    def overflown(self) -> Array | None:
        """Rows with a sum of weighted values that is not finite, though the values may be."""
        acc = self.acc.reshape(-1)
        # The sum of squares, which takes no memory, is inf or NaN then, though not only then.
        if math.isfinite(np.dot(acc, acc)):
            return None
        overflown: Array = ~np.isfinite(self.acc).all(axis=-1, keepdims=True)
        # Rows without weight are 0, whatever the values.
        overflown &= self.row_sum != 0
        return overflown if overflown.any() else None

    def finish(self) -> None:
        """Write the output and the lse."""
        job, acc, row_sum = self.job, self.acc, self.row_sum
        # 0 only where no score is above -inf: the largest term is exp(0), or bounded from below.
        if not row_sum.all():
            empty = row_sum == 0
            row_sum[empty] = 1
            np.copyto(acc, 0, where=empty)
            self.row_max[empty] = -np.inf
            lost = self._lost(empty)
            np.copyto(acc, np.nan, where=lost)
            self.row_max[lost] = np.nan
        where = tuple(self.block)
        out = job.out[where]
        if out.dtype == job.compute:
            np.divide(acc, row_sum, out=out)
        else:
            acc /= row_sum
            np.copyto(out, acc, casting="same_kind")
        if job.lse is not None:
            np.log(row_sum, out=row_sum)
            row_sum += self.row_max
            job.lse[where] = row_sum[..., 0]

    def finish_shrunk(self, rows: Array) -> None:
        """Write the output of some rows, whose values were shrunk."""
        self.acc /= self.row_sum
        self.acc /= self.job.compute.type(SHRINK)
        np.copyto(self.job.out[tuple(self.block)], self.acc, casting="same_kind", where=rows)

    def _lost(self, empty: Array) -> Array:
        """Which rows without a score above -inf have finite queries and see finite keys, but some.

        The formula then gives NaN, not 0: such scores are too large for the dtype.
        """
        job, block = self.job, self.block
        seen = np.array([job.keys_seen(i) for i in range(block.rows.start, block.rows.stop)])
        lost: Array = empty & (seen > 0)[:, None]
        if not lost.any():
            return lost
        lost &= np.isfinite(self.source).all(axis=-1, keepdims=True)
        tiles = ((start, min(start + job.Bc, seen[-1])) for start in range(0, seen[-1], job.Bc))
        keys = (job.keys(block, start, stop, self.scratch) for start, stop in tiles)
        finite = np.concatenate([np.isfinite(k).all(axis=-1) for k in keys], axis=-1)
        finite = np.logical_and.accumulate(finite, axis=-1)[:, :, np.maximum(seen - 1, 0)]
        return lost & finite[:, :, None, :, None]


@functools.cache
def _lowest(dtype: np.dtype[Any]) -> float:
    return float(np.finfo(dtype).min)


@functools.lru_cache(256)
def _hidden(rows: int, columns: int, last_seen: int) -> Array:
    """Which of some columns a row does not see; the first sees those up to ``last_seen``."""
    return np.arange(columns) > np.arange(last_seen, last_seen + rows)[:, None]
