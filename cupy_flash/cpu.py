"""The tiled attention forward pass in NumPy: the backend where there is no GPU.

The algorithm is FlashAttention-2's (Dao, 2023, https://arxiv.org/abs/2307.08691, algorithm 1): a
tile of Br query rows stays put while tiles of Bc keys and values pass by; a running row maximum and
row sum replace the softmax over whole rows, and the division by the sum waits until the last tile.
The score matrix never exists as a whole, so scratch memory does not grow with the sequence.

One step goes beyond the paper. Where the norms of a tile's queries and of the keys they see bound
all scores to a range in which exp can neither overflow nor underflow, the running maximum is left
at 0: that saves two of the four passes over the scores that are not matrix products.

Threads share the tiles out. NumPy lets go of the GIL inside matmul and its ufuncs, which is where
the time is.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.cpu_threads import cpus, single_threaded_blas
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
    sizes = _scratch_sizes(tile.Br, tile.Bc, problem.head_dim, problem.head_dim_v)
    return sum(sizes.values()) * itemsize


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
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    if batch * seqlen_q * heads_q == 0:
        return
    group = heads_q // heads_kv
    heads_per_tile = min(group, max(1, tile.Br // seqlen_q))
    Br = min(tile.Br, seqlen_q)
    Bc = min(tile.Bc, max(seqlen_k, 1))
    compute = compute_dtype(q.dtype)
    sizes = _scratch_sizes(Br * heads_per_tile, Bc, head_dim, head_dim_v)
    worker_bytes = sum(sizes.values()) * compute.itemsize
    if worker_bytes > SCRATCH_LIMIT:
        raise ValueError(
            f"tile {tile} needs {worker_bytes} bytes of scratch per worker, more than "
            f"{SCRATCH_LIMIT}; choose a smaller Br or Bc"
        )
    use_bounds = group * seqlen_q >= MIN_ROWS_FOR_BOUNDS and Bc >= KEY_GROUP
    bounds_shape = (batch, heads_kv, seqlen_k // KEY_GROUP if use_bounds else 0)
    job = _Pass(
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        causal=causal,
        # Further out makes no difference, and would not fit the index arithmetic.
        q_offset=min(max(q_offset, -seqlen_q), seqlen_k),
        softmax_scale=softmax_scale,
        Br=Br,
        Bc=Bc,
        heads_per_tile=heads_per_tile,
        compute=compute,
        key_norm=np.empty(bounds_shape, compute),
        value_max=np.empty(bounds_shape, compute),
    )
    tiles = list(job.tiles())
    pairs = batch * heads_q * seqlen_q * seqlen_k
    workers = min(
        threads or cpus(),
        len(tiles),
        SCRATCH_LIMIT // worker_bytes,
        math.ceil(max(pairs, 1) / MIN_PAIRS_PER_WORKER),
    )
    with single_threaded_blas:
        if job.key_norm.size:
            heads = [(b, h) for b in range(batch) for h in range(heads_kv)]
            _share_out(min(workers, len(heads)), job, heads, _find_bounds)
        _share_out(workers, job, tiles, _attend)


@dataclass(frozen=True)
class _Pass:
    """One forward pass: the arrays, and what all its tiles share."""

    q: Array  # (batch, seqlen_q, heads_q, head_dim)
    k: Array | PagedRows  # (batch, seqlen_k, heads_kv, head_dim)
    v: Array | PagedRows  # (batch, seqlen_k, heads_kv, head_dim_v)
    out: Array  # (batch, seqlen_q, heads_q, head_dim_v)
    lse: Array | None  # (batch, heads_q, seqlen_q)
    causal: bool
    q_offset: int
    softmax_scale: float
    Br: int
    Bc: int
    heads_per_tile: int  # query heads of one kv head whose rows, if few, are stacked in one tile
    compute: np.dtype[Any]
    # The largest norm of a key, and magnitude of a value, up to the end of each KEY_GROUP keys;
    # (batch, heads_kv, groups), with no groups where bounds are not used.
    key_norm: Array
    value_max: Array

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    def keys_seen(self, row: int) -> int:
        """How many keys, from the first on, query ``row`` sees."""
        seqlen_k = self.k.shape[1]
        if not self.causal:
            return seqlen_k
        return min(max(row + self.q_offset + 1, 0), seqlen_k)

    def tiles(self) -> Iterator[tuple[int, int, int, int]]:
        """(batch, first head, heads, first row) of every tile, those that see most keys first."""
        batch, seqlen_q, heads_q, _ = self.q.shape
        for row in reversed(range(0, seqlen_q, self.Br)):
            for b in range(batch):
                for first in range(0, heads_q, self.group):
                    last = first + self.group
                    for head in range(first, last, self.heads_per_tile):
                        yield b, head, min(self.heads_per_tile, last - head), row

    def key_tiles(self, seen_by_all: int, seen_by_any: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of the key tiles: first those that need no mask, then those that do."""
        for first, last in ((0, seen_by_all), (seen_by_all, seen_by_any)):
            for start in range(first, last, self.Bc):
                yield start, min(start + self.Bc, last)


def _scratch_sizes(rows: int, Bc: int, head_dim: int, head_dim_v: int) -> dict[str, int]:
    return {
        "q": rows * head_dim,
        "k": Bc * head_dim,
        "v": Bc * head_dim_v,
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
    """One worker's buffers: allocated once, cut to each tile's size."""

    def __init__(self, job: _Pass) -> None:
        sizes = _scratch_sizes(job.Br * job.heads_per_tile, job.Bc, job.q.shape[3], job.v.shape[3])
        self._flat = {name: np.empty(size, job.compute) for name, size in sizes.items()}
        self._flat["ones"].fill(1)

    def cut(self, name: str, *shape: int) -> Array:
        return self._flat[name][: math.prod(shape)].reshape(shape)

    def operand(self, name: str, source: Array) -> Array:
        """``source`` (rows, columns) as BLAS reads it: itself if possible, else a copy."""
        row, column = source.strides
        if (
            source.dtype == self._flat[name].dtype
            and column == source.itemsize
            and row >= source.shape[1] * column
            and row % column == 0
            and source.flags.aligned
        ):
            return source
        copy = self.cut(name, *source.shape)
        np.copyto(copy, source, casting="same_kind")
        return copy


def _share_out(workers: int, job: _Pass, items: list[Any], work: Callable[..., None]) -> None:
    """Call ``work(job, scratch, *item)`` for every item, from ``workers`` threads."""
    queue = deque(items)

    def worker() -> None:
        scratch = _Scratch(job)
        # NumPy keeps its error state per thread. What it would warn of is meant: exp of -inf, the
        # logarithm of an empty row's sum, NaN on their way through.
        with np.errstate(all="ignore"):
            while True:
                try:
                    item = queue.popleft()
                except IndexError:
                    return
                work(job, scratch, *item)

    if workers == 1:
        worker()
        return
    with ThreadPoolExecutor(workers, "cupy_flash") as pool:
        for future in [pool.submit(worker) for _ in range(workers)]:
            future.result()


def _find_bounds(job: _Pass, scratch: _Scratch, b: int, kv_head: int) -> None:
    """Fill ``key_norm`` and ``value_max`` for one key/value head."""
    key_norm, value_max = job.key_norm[b, kv_head], job.value_max[b, kv_head]
    step = job.Bc // KEY_GROUP
    for first in range(0, len(key_norm), step):
        groups = slice(first, min(first + step, len(key_norm)))
        count = groups.stop - first
        keys = slice(first * KEY_GROUP, groups.stop * KEY_GROUP)
        k = scratch.operand("k", job.k[b, keys, kv_head])
        v = scratch.operand("v", job.v[b, keys, kv_head]).reshape(count, KEY_GROUP, -1)
        squares = np.einsum("jd,jd->j", k, k).reshape(count, KEY_GROUP)
        np.sqrt(squares.max(axis=1), out=key_norm[groups])
        np.maximum(v.max(axis=(1, 2)), -v.min(axis=(1, 2)), out=value_max[groups])
    np.maximum.accumulate(key_norm, out=key_norm)
    np.maximum.accumulate(value_max, out=value_max)


def _scores_are_bounded(job: _Pass, q: Array, b: int, kv_head: int, keys: int) -> bool:
    """Whether the scaled queries ``q`` can do without a running maximum over the first ``keys``.

    Asks only about keys that every row of the tile sees: a masked key must leave no trace, not even
    in the rounding. False if anything it looks at is NaN or inf.
    """
    groups = keys // KEY_GROUP
    if groups == 0 or job.key_norm.shape[2] == 0:
        return False
    q_norm = np.sqrt(np.einsum("id,id->i", q, q).max())
    value_max = job.value_max[b, kv_head, groups - 1]
    return bool(
        q_norm * job.key_norm[b, kv_head, groups - 1] <= SCORE_BOUND
        and (value_max == 0 or 1 / VALUE_BOUND <= value_max <= VALUE_BOUND)
    )


def _attend(job: _Pass, scratch: _Scratch, b: int, head: int, heads: int, row: int) -> None:
    """Output and lse of ``heads`` query heads, which share a kv head, from query ``row`` on."""
    rows = min(job.Br, job.q.shape[1] - row)
    head_dim, head_dim_v = job.q.shape[3], job.v.shape[3]
    kv_head = head // job.group
    m = heads * rows

    # With the scale folded in here, no pass over the scores is needed for it.
    q = scratch.cut("q", m, head_dim)
    tile_q = job.q[b, row : row + rows, head : head + heads].swapaxes(0, 1)
    np.copyto(q.reshape(heads, rows, head_dim), tile_q, casting="same_kind")
    q *= job.compute.type(job.softmax_scale)
    # Rounded down to where the bounds are known; from there on the running maximum is kept.
    seen_by_all = job.keys_seen(row) // KEY_GROUP * KEY_GROUP
    seen_by_any = job.keys_seen(row + rows - 1)
    bounded = _scores_are_bounded(job, q, b, kv_head, seen_by_all)

    acc = scratch.cut("acc", m, head_dim_v)
    product = scratch.cut("product", m, head_dim_v)
    row_max, new_max = scratch.cut("row_max", m), scratch.cut("new_max", m)
    row_sum, tile_sum = scratch.cut("row_sum", m), scratch.cut("tile_sum", m)
    ones = scratch.cut("ones", job.Bc)
    acc.fill(0)
    row_sum.fill(0)
    row_max.fill(0 if bounded else -np.inf)
    for start, stop in job.key_tiles(seen_by_all, seen_by_any):
        k = scratch.operand("k", job.k[b, start:stop, kv_head])
        v = scratch.operand("v", job.v[b, start:stop, kv_head])
        scores = scratch.cut("scores", m, stop - start)
        np.matmul(q, k.T, out=scores)
        if job.causal and start >= seen_by_all:
            last_seen = np.arange(row, row + rows)[:, None] + job.q_offset
            masked = np.arange(start, stop)[None, :] > last_seen
            np.copyto(scores.reshape(heads, rows, stop - start), -np.inf, where=masked)
        if not bounded or start >= seen_by_all:
            np.max(scores, axis=1, out=new_max)
            np.maximum(new_max, row_max, out=new_max)
            # -inf - -inf would be NaN; subtracting 0 leaves exp(-inf) = 0.
            safe = np.where(new_max == -np.inf, 0, new_max)
            # The maxima seldom move after the first tiles; comparing them is cheap.
            if start and not np.array_equal(new_max, row_max):
                row_max -= safe
                np.exp(row_max, out=row_max)
                row_sum *= row_max
                acc *= row_max[:, None]
            row_max[...] = new_max
            np.subtract(scores, safe[:, None], out=scores)
        np.exp(scores, out=scores)
        # A product with ones sums rows three times as fast as add.reduce.
        np.matmul(scores, ones[: stop - start], out=tile_sum)
        np.matmul(scores, v, out=product)
        row_sum += tile_sum
        acc += product

    # Nothing seen. Only then is the sum 0: the row's largest term is exp(0), or bounded from below.
    empty = row_sum == 0
    acc /= row_sum[:, None]
    acc[empty] = 0
    target = job.out[b, row : row + rows, head : head + heads].swapaxes(0, 1)
    np.copyto(target, acc.reshape(heads, rows, head_dim_v), casting="same_kind")
    if job.lse is not None:
        np.log(row_sum, out=row_sum)
        row_sum += row_max
        row_sum[empty] = -np.inf
        job.lse[b, head : head + heads, row : row + rows] = row_sum.reshape(heads, rows)
