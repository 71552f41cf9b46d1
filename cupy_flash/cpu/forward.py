"""Forward pass of the CPU backend: tiled attention in NumPy.

The algorithm is FlashAttention-2's (Dao, 2023, https://arxiv.org/abs/2307.08691, algorithm 1). For
each query tile of Br rows, a loop runs over KV tiles of Bc keys and updates a running row maximum
and row sum (online softmax). The output is divided by the row sum after the last KV tile. The full
score matrix is never stored, so scratch memory does not grow with the sequence length.

If one KV tile holds all keys that a query tile attends to, no running maximum is needed, and
`cupy_flash.cpu.untiled` computes the plain softmax. One step, a few NumPy calls, processes several
heads and sequences if their scores fit the cache. A small attention call takes a single step.

The query tiles are distributed over threads. NumPy releases the GIL inside matmul and ufuncs, where
most of the time is spent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from cupy_flash.arrays.numpy_errors import ignore_fp_errors
from cupy_flash.arrays.sequences import PagedRows
from cupy_flash.cpu import tiled, untiled
from cupy_flash.cpu.forward_pass import SCRATCH_LIMIT as SCRATCH_LIMIT
from cupy_flash.cpu.forward_pass import Block, Pass, Scratch, Tiling, scratch_elements
from cupy_flash.cpu.row_results import RowResults
from cupy_flash.cpu.thread_pool import Stop, cpus, run_in_parallel, single_threaded_blas
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]

# Minimum number of query-key pairs per thread: about 0.5 ms of work. Waking a thread takes 0.1 ms.
MIN_PAIRS_PER_WORKER = 1 << 16
# Number of keys up to which a query tile has 512 rows: its scores still fit the cache.
_FEW_KEYS = 32


def default_tile(problem: Problem) -> Tile:
    """Return the tile to use if none was requested or tuned.

    The tile does not depend on the number of threads, and therefore neither do the results.
    """
    # Half of a tile on the diagonal of a causal mask is wasted work. A smaller Br wastes less, but
    # its matrix products are slower. Causal, batch 8, seqlen 512: 51 ms with Br = 128, 59 ms with
    # Br = 256 (2 threads of an AMD Zen 3, 8 heads, head_dim 64).
    long_causal = problem.causal and problem.seqlen_q > 1024
    Br = 128 if problem.causal and not long_causal else 256
    if problem.seqlen_k <= _FEW_KEYS:
        # 512 queries, 8 keys, 8 heads, head_dim 64: 452 us; with Br = 256 582 us.
        Br = 512
    # A query tile may hold rows of all query heads of a KV head (GQA).
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    Br = min(Br, max(rows, 1))
    Bc = 2048 if long_causal else 1024 * max(1, min(4, 128 // Br))
    while Bc > 512 and 4 * scratch_bytes(problem, Tile(Br, Bc)) > SCRATCH_LIMIT:
        Bc //= 2
    return Tile(Br, min(Bc, max(problem.seqlen_k, 1)))


def candidate_tiles(problem: Problem) -> Iterator[Tile]:
    """Yield the tiles worth timing for a problem: powers of two that its sequences can fill.

    Each tile fits the scratch of at least four workers into `SCRATCH_LIMIT`.
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
    """Return the bytes of scratch memory that one worker needs."""
    itemsize = 8 if problem.dtype == "float64" else 4
    dims = problem.head_dim, problem.head_dim_v
    one = scratch_elements(tile.Br, tile.Bc, *dims, copies=True)
    tiling = Tiling.make(
        problem.batch,
        max(problem.seqlen_q, 1),
        problem.seqlen_k,
        problem.heads_kv,
        problem.heads_q // problem.heads_kv,
        *dims,
        copies=True,
        tile=tile,
    )
    return max(one, tiling.elements) * itemsize


@ignore_fp_errors
def forward(
    q: Array,
    k: Array | PagedRows,
    v: Array | PagedRows,
    out: Array,
    rows: RowResults,
    *,
    causal: bool,
    q_offset: int,
    softmax_scale: float,
    tile: Tile,
    threads: int | None = None,
    bound_mods: BoundModifications | None = None,
) -> None:
    """Write attention of ``q`` over ``k`` and ``v`` to ``out``, and results per row to ``rows``.

    The caller has checked the arguments. float64 inputs are computed in float64, all others in
    float32. The same inputs and tile give the same bits for any number of threads. Unless the call
    is small, BLAS is limited to one thread in the whole process until the call returns.

    Parameters
    ----------
    q : numpy.ndarray, (batch, seqlen_q, heads_q, head_dim)
        Queries in float16, bfloat16 (ml_dtypes), float32 or float64. Any strides are allowed.
    k : numpy.ndarray or PagedRows, (batch, seqlen_k, heads_kv, head_dim)
        Keys; ``heads_q`` is a multiple of ``heads_kv``.
    v : numpy.ndarray or PagedRows, (batch, seqlen_k, heads_kv, head_dim_v)
        Values.
    out : numpy.ndarray, (batch, seqlen_q, heads_q, head_dim_v)
        Output; must not overlap the inputs.
    rows : RowResults
        Outputs of shape (batch, heads_q, seqlen_q).
    causal : bool
        Whether query ``i`` attends only to the keys ``j <= i + q_offset``.
    q_offset : int
        Position of the first query among the keys.
    softmax_scale : float
        Factor on the scores.
    tile : Tile
        Tile size; clipped to the sequence lengths.
    threads : int, optional
        Maximum number of workers; by default the number of CPUs of this process. Fewer run if the
        work is small or their scratch would exceed :data:`SCRATCH_LIMIT`.
    bound_mods : BoundModifications, optional
        Masks and score modifications; bias and mask have four axes.

    Raises
    ------
    ValueError
        If the scratch of one worker exceeds :data:`SCRATCH_LIMIT` with this tile.
    """
    if q.size == 0:
        # head_dim is at least 1.
        return
    visible = Mask(q.shape[1], k.shape[1], causal, q_offset)
    if causal and bound_mods is None and (first := visible.first_row(0)):
        # These rows attend to no key, whatever values their queries hold.
        out[:, :first] = 0
        rows.each(lambda array: array[:, :, :first]).write_empty()
        rows = rows.each(lambda array: array[:, :, first:])
        q, out, q_offset = q[:, first:], out[:, first:], visible.skip_rows(first).q_offset
        if not q.size:
            return
    options = causal, q_offset, softmax_scale, tile
    is_plain = bound_mods is None and not rows.has_statistics
    if is_plain and untiled.forward_small(q, k, v, out, rows.lse, *options):
        return
    job = Pass.make(q, k, v, out, rows, *options, bound_mods)
    run(iter((job,)), job.pairs, job.scratch_bytes, threads)


@ignore_fp_errors
def forward_at_once(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    small: untiled.SmallCall,
    scale: Any,
    *,
    bound_mods: None,
) -> bool:
    """Call `untiled.forward_at_once` with NumPy's floating-point errors ignored."""
    return untiled.forward_at_once(q, k, v, out, lse, small, scale)


def run(passes: Iterator[Pass], pairs: int, worker_bytes: int, threads: int | None) -> None:
    """Compute forward passes, with their query tiles distributed over threads.

    Parameters
    ----------
    passes : iterator of Pass
        Forward passes; the next is fetched when threads have taken all tiles of the previous ones.
    pairs : int
        Number of query-key pairs of all passes.
    worker_bytes : int
        Largest `Pass.scratch_bytes` of the passes.
    threads : int, optional
        Maximum number of workers, see `forward`.
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
                    untiled.attend(job, scratch, block, *(tiles or [(0, 0)]))
                else:
                    tiled.attend(job, scratch, block, tiles, stop)

    with single_threaded_blas:
        run_in_parallel(
            workers, ((job, block) for job in passes for block in job.blocks()), work, stop
        )
