"""Backward pass of the CPU backend: tiled gradients of attention in NumPy.

The algorithm is FlashAttention-2's (Dao, 2023, https://arxiv.org/abs/2307.08691, algorithm 2) with
its loops exchanged: the outer loop runs over query tiles of Br rows, the inner one over KV tiles of
Bc keys. Softmax weights are recomputed from the log-sum-exp. A query tile accumulates its own dq,
and adds its contributions to dk and dv in memory. Scores and weights are never stored as a whole.

The query tiles are distributed over threads, as in `cupy_flash.cpu.forward`. They add to dk and
dv in an order that does not depend on thread timing, see `cupy_flash.cpu.backward.ordered_sum`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.numpy_errors import ignore_fp_errors
from cupy_flash.arrays.sequences import find_packed_keys, find_queries
from cupy_flash.cpu.backward import untiled as untiled_backward
from cupy_flash.cpu.backward.backward_pass import GradientPass, scratch_elements, smaller
from cupy_flash.cpu.backward.ordered_sum import OrderedSum, Ticket
from cupy_flash.cpu.backward.tiled import differentiate
from cupy_flash.cpu.backward.untiled import MAX_SCORES_OF_STEP, backward_small
from cupy_flash.cpu.batching import equal_runs
from cupy_flash.cpu.forward import MIN_PAIRS_PER_WORKER
from cupy_flash.cpu.forward_pass import (
    SCRATCH_LIMIT,
    Block,
    Pass,
    Scratch,
    Tiling,
    compute_dtype,
)
from cupy_flash.cpu.forward_pass import scratch_elements as forward_elements
from cupy_flash.cpu.row_results import RowResults
from cupy_flash.cpu.thread_pool import Stop, cpus, run_in_parallel, single_threaded_blas
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.scores import FIRST_PAIR
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]

# Minimum average number of query-key pairs per pass for which several threads are used, see
# `cupy_flash.cpu.varlen`.
MIN_PAIRS_FOR_THREADS = 1 << 15

# Number of query tiles below which `default_tile` reduces Br, so that all threads have work.
MIN_TILES = 16

# Number of scores of a call up to which one tile holds all of them.
MAX_SCORES = 1 << 17


def default_tile(problem: Problem) -> Tile:
    """Return the tile to use by default; it does not depend on the number of threads."""
    # A small Br adds to dk and dv more often, but wastes less work on the diagonal of a mask.
    # Without a mask, 1024x256 takes 272 ms and 256x256 takes 310 ms. With a causal mask, they take
    # 215 and 176 ms (one thread of an AMD EPYC with AVX-512, seqlen 2048, 8 heads of 64, float32).
    Br, Bc = 1024 if problem.mask.is_full else 256, 256
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    if _is_single_tile(problem):
        whole = Tile(problem.seqlen_q, problem.seqlen_k)
        if 4 * scratch_bytes(problem, whole) <= SCRATCH_LIMIT:
            return whole
    while Br > 256 and rows < MIN_TILES * Br:
        Br //= 2
    while Bc > 64 and 4 * scratch_bytes(problem, Tile(Br, Bc)) > SCRATCH_LIMIT:
        Bc //= 2
    return Tile(Br, Bc)


def _is_single_tile(problem: Problem) -> bool:
    """Return whether one tile should hold all scores of a head, if they fit into its scratch."""
    scores_per_head = problem.seqlen_q * problem.seqlen_k
    is_by_formula = (
        problem.layout.kind == "dense"
        and problem.score is None
        and problem.heads_q == problem.heads_kv
        and problem.dtype in ("float32", "float64")
    )
    if is_by_formula:
        return 0 < scores_per_head <= MAX_SCORES_OF_STEP
    return 0 < problem.batch * problem.heads_q * scores_per_head <= MAX_SCORES


def scratch_bytes(problem: Problem, tile: Tile) -> int:
    """Return the bytes of scratch that one worker needs for the problem or shorter sequences."""
    dims = problem.head_dim, problem.head_dim_v
    itemsize = 8 if problem.dtype == "float64" else 4
    rows = problem.seqlen_q * problem.heads_q // problem.heads_kv
    # For a shorter sequence, a tile may hold the rows of more heads.
    one = max(min(tile.Br, rows), 1), min(tile.Bc, max(problem.seqlen_k, 1)), *dims
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
    tiling = smaller(tiling, *dims, itemsize)
    block = (
        tiling.batch
        * tiling.kv_heads
        * scratch_elements(tiling.Br * tiling.heads_per_tile, tiling.Bc, *dims)
    )
    return itemsize * max(block, scratch_elements(*one), forward_elements(*one, copies=True))


def require_scratch(problem: Problem, tile: Tile) -> None:
    """Raise ValueError if the scratch of one worker exceeds `SCRATCH_LIMIT`."""
    _require_scratch(tile, scratch_bytes(problem, tile))


def _require_scratch(tile: Tile, worker_bytes: int) -> None:
    if worker_bytes > SCRATCH_LIMIT:
        raise ValueError(
            f"tile {tile} needs {worker_bytes} bytes of scratch per worker, more than "
            f"{SCRATCH_LIMIT}; choose a smaller Br or Bc"
        )


def workspace_bytes(problem: Problem, tile: Tile) -> int:
    """Return the bytes of memory that a call with one worker needs in addition to its arrays."""
    assert problem.gradient is not None
    is_wide = problem.dtype == "float64" or problem.gradient.dtype == "float32"
    # 16-bit dk and dv are accumulated in float32 arrays.
    dims = {"k": problem.head_dim, "v": problem.head_dim_v}
    columns = (
        0 if is_wide else sum(dim for name, dim in dims.items() if problem.gradient.wants(name))
    )
    keys = problem.layout.total_k if problem.layout.packed_k else problem.batch * problem.seqlen_k
    return scratch_bytes(problem, tile) + 4 * keys * problem.heads_kv * columns


@ignore_fp_errors
def backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dlse: Array | None,
    results: Mapping[str, Array],
    *,
    causal: bool,
    q_offset: int,
    softmax_scale: float,
    tile: Tile,
    threads: int | None = None,
    bound_mods: BoundModifications | None = None,
) -> None:
    """Write the gradients of attention to the arrays in ``results``.

    The caller has checked the arguments. float64 inputs are computed in float64, all others in
    float32. The same inputs and tile give the same bits for any number of threads.

    Parameters
    ----------
    q, k, v, causal, q_offset, softmax_scale, tile, threads, bound_mods
        Arguments of `cupy_flash.cpu.forward.forward`.
    out, dout : numpy.ndarray, (batch, seqlen_q, heads_q, head_dim_v)
        Output of the forward pass, and its gradient.
    lse, dlse : numpy.ndarray, (batch, heads_q, seqlen_q)
        Log-sum-exp, and its gradient or None.
    results : mapping of numpy.ndarray
        Arrays to overwrite with gradients, of the shapes of the inputs, keyed by input: "q", "k",
        "v"; "bias" with four axes, those along which it broadcasts of length 1; "sinks"; and
        "score_mod.NAME" for each differentiable array that the score_mod captures.

    Raises
    ------
    ValueError
        If the scratch of one worker exceeds :data:`SCRATCH_LIMIT` with this tile.
    """
    visible = Mask(q.shape[1], k.shape[1], causal, q_offset)
    if causal and bound_mods is None and (first := visible.first_row(0)):
        # These rows attend to no key: their gradients are 0, and they add nothing to the gradients
        # of keys and values.
        if "q" in results:
            dq = results["q"]
            dq[:, :first] = 0
            results = {**results, "q": dq[:, first:]}
        q, out, dout = q[:, first:], out[:, first:], dout[:, first:]
        lse, dlse = lse[:, :, first:], None if dlse is None else dlse[:, :, first:]
        q_offset = visible.skip_rows(first).q_offset
    call = q, k, v, out, dout, lse, dlse, results, causal, q_offset, softmax_scale, tile, threads
    if bound_mods is None and backward_small(*call):
        return
    totals = _totals(results, q.shape[2], k.shape[2], compute_dtype(q.dtype))
    if q.size:
        job = Pass.make(
            *(q, k, v, out, RowResults()),
            *(causal, q_offset, softmax_scale, tile, bound_mods),
        )
        bias = totals.get("bias")
        is_shared = bias is not None and bias.shape[:3] != job.q.shape[:3]
        _run([GradientPass.make(job, dout, lse, dlse, totals, is_shared=is_shared)], tile, threads)
    _write(results, totals)


@ignore_fp_errors
def backward_by_formula(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dlse: Array | None,
    results: Mapping[str, Array],
    small: untiled_backward.SmallGradients,
    scale: Any,
    *,
    bound_mods: None,
) -> bool:
    """Call `untiled_backward.backward_by_formula` with NumPy's floating-point errors ignored."""
    arrays = q, k, v, out, dout, lse, dlse
    return untiled_backward.backward_by_formula(*arrays, results, small, scale)


@ignore_fp_errors
def varlen_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dlse: Array | None,
    results: Mapping[str, Array],
    *,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Array | None,
    causal: bool,
    softmax_scale: float,
    tile: Tile,
    threads: int | None = None,
    bound_mods: BoundModifications | None = None,
) -> None:
    """Write the gradients of attention of packed sequences to the arrays in ``results``.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, bound_mods
        Arguments of `cupy_flash.cpu.varlen.varlen_forward`.
    out, dout : numpy.ndarray, (total_q, heads_q, head_dim_v)
    lse, dlse : numpy.ndarray, (heads_q, total_q)
    results : mapping of numpy.ndarray
        Gradients, see :func:`backward`. The axes of a bias are (heads_q, total_q, max_seqlen_k).
        Rows that belong to no sequence are set to 0.
    causal, softmax_scale, tile, threads
        Arguments of :func:`backward`.
    """
    totals = _totals(results, q.shape[1], k.shape[1], compute_dtype(q.dtype))
    bias = totals.get("bias")
    group = q.shape[1] // k.shape[1]
    is_shared = bias is not None and (bias.shape[1:3] != (k.shape[1], group) or bias.shape[3] == 1)
    all_keys = find_packed_keys(
        cu_seqlens_k,
        max_seqlen_k,
        batch=len(cu_seqlens_q) - 1,
        total_k=len(k),
        page_size=0,
        seqused_k=seqused_k,
        block_table=None,
    )
    all_queries = find_queries(cu_seqlens_q, len(q), max_seqlen_q)
    passes = []
    # Modifications use indices within a sequence. With modifications, each sequence is therefore a
    # separate pass.
    for b, queries, keys, count in equal_runs(all_queries, all_keys, bound_mods is None):
        # In a sequence without keys, only sinks have a gradient, through dlse.
        if not keys.seqlen and "sinks" not in totals:
            continue
        run_q, run_k = (
            _Run(queries.first, queries.seqlen, count),
            _Run(keys.first, keys.seqlen, count),
        )
        first = FIRST_PAIR
        if bound_mods is not None:
            first = FIRST_PAIR._replace(b=b, q_start=queries.first, k_start=keys.first)
        job = Pass.make(
            *(run_q.rows(q), run_k.rows(k), run_k.rows(v), run_q.rows(out), RowResults()),
            causal,
            keys.seqlen - queries.seqlen,
            softmax_scale,
            tile,
            bound_mods,
            first,
        )
        run_totals = {
            n: (run_q if n == "q" else run_k).rows(totals[n]) for n in ROWS if n in totals
        }
        if bias is not None:
            bias_rows = slice(None) if bias.shape[3] == 1 else run_q.span
            run_totals["bias"] = bias[:, :, :, bias_rows, : max(keys.seqlen, 1)]
        gradient_pass = GradientPass.make(
            job,
            run_q.rows(dout),
            run_q.values(lse),
            None if dlse is None else run_q.values(dlse),
            totals | run_totals,
            is_shared=is_shared,
        )
        passes.append(gradient_pass)
    _run(passes, tile, threads)
    _write(results, totals)


class _Run(NamedTuple):
    """Consecutive packed sequences of one length."""

    first: int
    seqlen: int
    sequences: int

    @property
    def span(self) -> slice:
        """Slice of the rows of all sequences."""
        return slice(self.first, self.first + self.sequences * self.seqlen)

    def rows(self, x: Array) -> Array:
        """Return the run's rows of x (total, heads, dim) as (sequences, seqlen, heads, dim)."""
        return x[self.span].reshape(self.sequences, self.seqlen, *x.shape[1:])

    def values(self, x: Array) -> Array:
        """Return the run's rows of x (heads, total) as (sequences, heads, seqlen)."""
        return x[:, self.span].reshape(len(x), self.sequences, self.seqlen).swapaxes(0, 1)


def _totals(
    results: Mapping[str, Array], heads_q: int, heads_kv: int, compute: np.dtype[Any]
) -> dict[str, Array]:
    """Return zeroed arrays to accumulate gradients in, or the results if their dtype suffices.

    Their shapes are those of `GradientPass`, except that packed sequences are not yet separated.
    """
    totals = {}
    for name, result in results.items():
        result[...] = 0
        # Each element of dq is written once. Other gradients are sums over pairs and need a wider
        # dtype: float64 if many pairs add to one element.
        dtype = np.dtype(np.float64)
        if name in ROWS:
            dtype = result.dtype if name == "q" else compute
        elif name == "bias" and 1 not in result.shape[-2:]:
            dtype = compute
        total = result if result.dtype == dtype else np.zeros(result.shape, dtype)
        totals[name] = _by_group(total, heads_q, heads_kv) if name == "bias" else total
    return totals


def _by_group(bias: Array, heads_q: int, heads_kv: int) -> Array:
    """Return a bias as (batch, heads_kv, group, seqlen_q, seqlen_k); packed ones have batch 1."""
    if bias.ndim == 3:
        bias = bias[None]
    batch, heads, *pairs = bias.shape
    head_axes = (1, 1) if heads == 1 else (heads_kv, heads_q // heads_kv)
    return bias.reshape(batch, *head_axes, *pairs)


def _write(results: Mapping[str, Array], totals: Mapping[str, Array]) -> None:
    """Copy gradients that were not accumulated in the results to the results, and round them."""
    for name, result in results.items():
        if totals[name].dtype != result.dtype:
            np.copyto(result, totals[name].reshape(result.shape), casting="same_kind")


def _run(passes: list[GradientPass], tile: Tile, threads: int | None) -> None:
    """Compute passes, with their query tiles distributed over threads."""
    worker_bytes = max((gradient_pass.scratch_bytes for gradient_pass in passes), default=0)
    _require_scratch(tile, worker_bytes)
    pairs = sum(gradient_pass.job.pairs for gradient_pass in passes)
    # One thread computes short sequences, because several threads would mostly wait for the GIL.
    most = pairs // MIN_PAIRS_PER_WORKER if pairs >= MIN_PAIRS_FOR_THREADS * len(passes) else 1
    workers = min(threads or cpus(), SCRATCH_LIMIT // max(worker_bytes, 1), max(most, 1))
    stop = Stop()
    ordered_sum = OrderedSum(stop)

    def items() -> Iterator[tuple[GradientPass, Block, Ticket]]:
        numbers = itertools.count()
        for number, gradient_pass in enumerate(passes):
            for block in gradient_pass.job.blocks():
                queue = number, block.batch.start, block.kv_heads.start
                ticket = Ticket(next(numbers), None if gradient_pass.is_shared else queue)
                ordered_sum.enter(ticket)
                yield gradient_pass, block, ticket

    def compute(items: Iterator[tuple[GradientPass, Block, Ticket]]) -> None:
        with Scratch.borrowed() as scratch:
            for gradient_pass, block, ticket in items:
                differentiate(gradient_pass, scratch, block, ticket, ordered_sum, stop)

    with single_threaded_blas:
        run_in_parallel(workers, items(), compute, stop)
