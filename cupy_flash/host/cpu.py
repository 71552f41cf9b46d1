"""The tiled attention forward pass in NumPy: the backend where there is no GPU.

The algorithm is FlashAttention-2's (Dao, 2023, https://arxiv.org/abs/2307.08691, algorithm 1): a
tile of Br query rows stays put while tiles of Bc keys and values pass by; a running row maximum and
row sum replace the softmax over whole rows, and the division by the sum waits until the last tile.
The score matrix never exists as a whole, so scratch memory does not grow with the sequence.

Where a tile spans all keys that its rows see, there is nothing to run on: that is the plain
formula on these rows (`cupy_flash.host.formula`). Rows of several heads, and sequences of a batch,
share each call of NumPy while their scores fit the cache, and a small call is one such step.

Threads share the tiles out. NumPy lets go of the GIL inside matmul and its ufuncs, which is where
the time is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host import formula, online
from cupy_flash.host.crew import Stop, cpus, share_out, single_threaded_blas
from cupy_flash.host.passes import SCRATCH_LIMIT as SCRATCH_LIMIT
from cupy_flash.host.passes import Block, Cut, Pass, Scratch, scratch_elements
from cupy_flash.host.quiet import quiet
from cupy_flash.host.sequence_places import PagedRows
from cupy_flash.mods.modified import Modified
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]

# Query-key pairs that make a worker worthwhile: they take one about 0.5 ms, waking it 0.05 to 0.1.
MIN_PAIRS_PER_WORKER = 1 << 16
# Number of keys up to which a tile has 512 rows: its scores still fit the cache.
_FEW_KEYS = 32


def default_tile(problem: Problem) -> Tile:
    """The tile to use where none was tuned.

    Does not depend on the number of threads, so that results do not either.
    """
    # Best of interleaved runs, ms; AMD Zen 3 at 2 threads, OpenBLAS 0.3.31, float32, heads of 64,
    # by Br = 128, 256, 512: 8 x 512 x 8 full 83, 80, 78, causal 51, 59, 66; 1 x 1024 x 8 full 30,
    # 28, 31, causal 20, 21, 24. By tile, 128x2048, 256x512, 256x1024, 256x2048, 512x1024: 1 x 4096
    # x 8 full 489, 415, 388, 438, 405, causal 300, 289, 300, 301, 270. Causal, by Bc = 1024, 2048,
    # 4096, Br = 256: 1 x 2048 x 8 70, 58, 59, heads of 128 98, 100, 99; 1 x 4096 x 8 274, 274, 265,
    # heads of 128 418, 349, 381; 8 x 2048 x 8, heads of 128, 1025, 872, 954; 8 x 4096 x 8 2370,
    # 2062, 1768.
    # Along the edge of a mask half a tile's rows is wasted; low tiles make poor matrix products.
    long_causal = problem.causal and problem.seqlen_q > 1024
    Br = 128 if problem.causal and not long_causal else 256
    if problem.seqlen_k <= _FEW_KEYS:
        # Br = 256, 512, us, 8 heads, 512 x 1 of 64 492, 400; 512 x 8 of 32, 64, 128 359, 247, 582,
        # 452, 1066, 782; 2048 x 8 of 64 1980, 1840; 512 x 32 844, 836.
        Br = 512
    # Rows of a tile are those of all query heads that share a key/value head.
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    Br = min(Br, max(rows, 1))
    Bc = 2048 if long_causal else 1024 * max(1, min(4, 128 // Br))
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
    dims = problem.head_dim, problem.head_dim_v
    one = scratch_elements(tile.Br, tile.Bc, *dims, copies=True)
    cut = Cut.make(
        problem.batch,
        max(problem.seqlen_q, 1),
        problem.seqlen_k,
        problem.heads_kv,
        problem.heads_q // problem.heads_kv,
        *dims,
        copies=True,
        tile=tile,
    )
    return max(one, cut.elements) * itemsize


@quiet
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
    modified: Modified | None = None,
) -> None:
    """Attention of ``q`` over ``k`` and ``v`` into ``out``, and its log-sum-exp into ``lse``.

    The arguments are taken as checked. float64 computes in float64, everything else in float32.
    The same inputs and tile give the same bits, whatever the number of threads. While a call
    lasts that is not small, BLAS is held to one thread per call in the whole process.

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
    modified : Modified, optional
        Masks, and what becomes of scores; with a bias and mask of four axes.

    Raises
    ------
    ValueError
        The scratch of one worker passes :data:`SCRATCH_LIMIT` with this tile.
    """
    if q.size == 0:
        # head_dim is at least 1.
        return
    visible = Mask(q.shape[1], k.shape[1], causal, q_offset)
    if causal and modified is None and (first := visible.first_row(0)):
        # These rows attend to no key, whatever their queries are.
        out[:, :first] = 0
        if lse is not None:
            lse[:, :, :first] = -np.inf
            lse = lse[:, :, first:]
        q, out, q_offset = q[:, first:], out[:, first:], visible.behind(first).q_offset
        if not q.size:
            return
    options = causal, q_offset, softmax_scale, tile
    if modified is None and formula.forward_small(q, k, v, out, lse, *options):
        return
    job = Pass.make(q, k, v, out, lse, *options, modified)
    run(iter((job,)), job.pairs, job.scratch_bytes, threads)


@quiet
def forward_at_once(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    small: formula.SmallCall,
    scale: Any,
    *,
    modified: None,
) -> bool:
    """See `formula.forward_at_once`."""
    return formula.forward_at_once(q, k, v, out, lse, small, scale)


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

    def work(items: Iterator[tuple[Pass, Block]]) -> None:
        with Scratch.borrowed() as scratch:
            for job, block in items:
                tiles = job.tiles_of_keys(block)
                if len(tiles) <= 1:
                    formula.attend(job, scratch, block, *(tiles or [(0, 0)]))
                else:
                    online.attend(job, scratch, block, tiles, stop)

    with single_threaded_blas:
        share_out(workers, ((job, block) for job in passes for block in job.blocks()), work, stop)
