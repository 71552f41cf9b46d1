"""Attention over a sequence whose tokens are sharded over ranks, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from cupy_flash.arrays.strided import (
    array_module,
    dtype_name,
    require_axes,
    require_float,
    require_shape,
)
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.backends import require_backend
from cupy_flash.calls.options import Options
from cupy_flash.mods.keywords import Window, checked_softcap, window_of
from cupy_flash.parallel import calls, ring
from cupy_flash.parallel.calls import Rows, Scores
from cupy_flash.parallel.group import Group, run_collective
from cupy_flash.parallel.heads import HeadExchange, chosen_head_ranks, why_not_head_ranks
from cupy_flash.parallel.score_blocks import Geometry
from cupy_flash.parallel.shards import require_order, shard_length
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.values import check_bool, count, finite, integer

_AXES = "batch, tokens, heads and head_dim"


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    group: Group,
    *,
    seqlen: int,
    seqlen_k: int | None = None,
    order: str = "zigzag",
    cu_seqlens: Sequence[int] | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    sinks: Any | None = None,
    head_ranks: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Compute `cupy_flash.flash_attention` of a sequence whose tokens are sharded over ranks.

    Every rank calls it with its shard of q, k and v, and receives its shard of the result.

    Parameters
    ----------
    q : array, shape (batch, tokens, heads_q, head_dim)
        Queries of this rank's tokens, as returned by `shard`. A NumPy array for MPI, or a CuPy
        array for NCCL; float16, bfloat16, float32 or float64.
    k : array, shape (batch, tokens, heads_kv, head_dim)
        Keys of this rank's tokens, of the same dtype. heads_q is a multiple of heads_kv.
    v : array, shape (batch, tokens, heads_kv, head_dim_v)
        Values of this rank's tokens, of the same dtype.
    group : Group
        Group of all ranks.
    seqlen : int
        Number of tokens of the whole sequence.
    seqlen_k : int, optional
        Number of keys of the whole sequence, by default seqlen; sharded in the same order. The last
        query is aligned with the last key.
    order : {"zigzag", "contiguous"}
        Assignment of tokens to ranks, see `shard`.
    cu_seqlens : sequence of int, optional
        Boundaries of packed sequences, from 0 to seqlen, in host memory. Queries attend only to
        keys of their own sequence. The batch must be 1, and the call cannot be captured in a CUDA
        graph.
    causal : bool
        Whether queries attend to no later keys.
    softmax_scale : float, optional
        Factor on the scores, by default 1 / sqrt(head_dim).
    window_size, softcap
        Window and softcap, see `cupy_flash.Modifications`. Keys that the window masks for all
        queries of a rank are not sent to it.
    alibi_slopes, sinks : array, shape (heads_q,), optional
        ALiBi slopes and sinks, see `cupy_flash.Modifications`, the same on all ranks. The dtype is
        float32, or float64 if q is float64; sinks may have the dtype of q instead.
    head_ranks : int, optional
        Number of neighbouring ranks that heads are distributed over: 1 is ring attention,
        group.size head-parallel attention, and values in between combine the two. It must divide
        group.size and heads_q, and divide heads_kv or be a multiple of it. The default is 1 for two
        ranks, otherwise the largest number that divides group.size and heads_kv.
    return_lse : bool
        Whether to return the log-sum-exp, too.
    backend : {"auto", "gpu", "cpu"}
        Backend that computes NumPy arrays.

    Returns
    -------
    out : array, shape (batch, tokens, heads_q, head_dim_v)
        Output of this rank's tokens.
    lse : array, shape (batch, heads_q, tokens)
        Log-sum-exp, only with return_lse; see `cupy_flash.flash_attention`.

    Raises
    ------
    TypeError, ValueError
        For arguments that are wrong on this rank.
    ParallelError
        If another rank raises, calls with other arguments, or does not answer in time.
    UnsupportedError, CompileError
        See `cupy_flash.flash_attention`.

    Any other error in the middle of a call, such as a lack of memory, ends the group. The other
    ranks then wait until their timeout.

    Notes
    -----
    The same inputs on the same number of ranks give the same bits. On GPUs, the call runs on the
    current stream and on a stream of the group. It synchronizes only the first time that it is
    called with new shapes or options.

    Examples
    --------
    >>> from mpi4py import MPI  # doctest: +SKIP
    >>> group = parallel.Group(MPI.COMM_WORLD, timeout=60)  # doctest: +SKIP
    >>> out = parallel.flash_attention(q, k, v, group, seqlen=131072, causal=True)  # doctest: +SKIP
    """
    call = _Call(
        *("flash_attention", group, seqlen, seqlen_k, order, cu_seqlens, causal, softmax_scale),
        *(window_size, softcap, alibi_slopes, sinks, head_ranks, backend, return_lse),
    )
    with call.agreed(q, k, v) as plan:
        exchange, lengths = plan.exchange, (plan.seqlen_q, plan.seqlen_k, plan.seqlen_k)
        on_queries, on_keys = exchange.query_heads, exchange.key_heads
        heads_of = (on_queries, on_keys, on_keys)
        q, k, v = exchange.to_heads(list(zip((q, k, v), lengths, heads_of, strict=True)))
        own_sinks = None if sinks is None else sinks[on_queries(group.rank)]
        out, lse = ring.forward(q, k, v, exchange.ring, plan.geometry, plan.scores, own_sinks)
        back = [(out, plan.seqlen_q, exchange.heads_q, on_queries)]
        if return_lse:
            back.append((_as_rows(lse), plan.seqlen_q, exchange.heads_q, on_queries))
        result = exchange.to_tokens(back)
        return (result[0], _from_rows(result[1])) if return_lse else result[0]


def flash_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    group: Group,
    *,
    seqlen: int,
    seqlen_k: int | None = None,
    order: str = "zigzag",
    cu_seqlens: Sequence[int] | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    sinks: Any | None = None,
    head_ranks: int | None = None,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """Compute the gradients of `flash_attention` of a sequence that is sharded over ranks.

    Parameters
    ----------
    dout : array, shape (batch, tokens, heads_q, head_dim_v)
        Gradient of this rank's output.
    q, k, v, group
        Arguments of the call of `flash_attention` to differentiate, with its keyword arguments.
    out, lse : arrays
        Results of that call.

    Returns
    -------
    dq, dk, dv : arrays
        Gradients of this rank's q, k and v.
    dsinks : array, shape (heads_q,)
        Gradient of the sinks, of their dtype, only with sinks; summed over all ranks.

    Raises
    ------
    TypeError, ValueError, ParallelError, UnsupportedError, CompileError
        See `flash_attention`.

    Notes
    -----
    Sums over ranks are kept in float32 (float64 for float64 inputs) and rounded once. The same
    inputs on the same number of ranks give the same bits.
    """
    call = _Call(
        *("flash_attention_backward", group, seqlen, seqlen_k, order, cu_seqlens, causal),
        *(softmax_scale, window_size, softcap, alibi_slopes, sinks, head_ranks, backend),
    )
    with call.agreed(q, k, v, dout, out, lse) as plan:
        return _gradients(plan, (q, k, v, dout, out, lse), sinks)


def _gradients(plan: _Plan, arrays: tuple[Any, ...], sinks: Any | None) -> tuple[Any, ...]:
    q, k, v, dout, out, lse = arrays
    exchange, dtype = plan.exchange, q.dtype
    on_queries, on_keys = exchange.query_heads, exchange.key_heads
    *of_rows, k, v = exchange.to_heads(
        [(array, plan.seqlen_q, on_queries) for array in (q, out, dout, _as_rows(lse))]
        + [(array, plan.seqlen_k, on_keys) for array in (k, v)]
    )
    q, out, dout, lse = of_rows
    rows = Rows(q, out, dout, _from_rows(lse))
    dq, dk, dv = ring.backward(rows, k, v, exchange.ring, plan.geometry, plan.scores)
    if not exchange.shares_key_heads:
        # No other rank adds to dk and dv, so they can be sent in the dtype of the results.
        dk, dv = (array.astype(dtype, copy=False) for array in (dk, dv))
    dq, dk, dv = exchange.to_tokens(
        [(dq.astype(dtype, copy=False), plan.seqlen_q, exchange.heads_q, on_queries)]
        + [(array, plan.seqlen_k, exchange.heads_kv, on_keys) for array in (dk, dv)]
    )
    gradients = (dq, dk.astype(dtype, copy=False), dv.astype(dtype, copy=False))
    if sinks is None:
        return gradients
    heads = on_queries(exchange.group.rank)
    own = calls.sink_gradients(rows, k, v, sinks[heads], plan.scores)
    return (*gradients, _sum_of_sinks(own, exchange).astype(sinks.dtype))


def _sum_of_sinks(own: Any, exchange: HeadExchange) -> Any:
    """Return the gradients of all sinks, summed over ranks; `own` is this rank's contribution."""
    (said,) = exchange.group.gather(own)
    total = array_module(own).zeros(exchange.heads_q, own.dtype)
    for rank, part in enumerate(said):
        total[exchange.query_heads(rank)] += part
    return total


def _as_rows(lse: Any) -> Any:
    """Return a log-sum-exp (batch, heads, rows) with the axes of q: (batch, rows, heads, 1)."""
    return lse.swapaxes(1, 2)[..., None]


def _from_rows(rows: Any) -> Any:
    return array_module(rows).ascontiguousarray(rows[..., 0].swapaxes(1, 2))


class _Plan(NamedTuple):
    """Parameters of a call that all ranks agreed on."""

    exchange: HeadExchange
    geometry: Geometry
    scores: Scores
    seqlen_q: int
    seqlen_k: int


class _Call(NamedTuple):
    """Arguments of a call, except its arrays of tokens."""

    name: str
    group: Group
    seqlen: int
    seqlen_k: int | None
    order: str
    cu_seqlens: Sequence[int] | None
    causal: bool
    softmax_scale: float | None
    window_size: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: Any
    sinks: Any
    head_ranks: int | None
    backend: str
    return_lse: bool = True

    def agreed(self, q: Any, k: Any, v: Any, *others: Any) -> AbstractContextManager[_Plan]:
        """Return a context manager that checks that all ranks agree, and yields the plan."""
        # A graph would copy cu_seqlens from host memory that has been reused by then.
        packed = None if self.cu_seqlens is None else "cu_seqlens is copied to the GPU in each call"
        return run_collective(self.group, lambda: self._planned(q, k, v, others), packed)

    def _planned(
        self, q: Any, k: Any, v: Any, others: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], _Plan]:
        """Check the arguments; return the values that all ranks must agree on, and the plan."""
        for name, array in (("q", q), ("k", k), ("v", v)):
            self.group.require_carried(name, array)
            require_axes(name, array, 4, _AXES)
        require_backend(self.backend)
        check_bool("causal", self.causal)
        check_bool("return_lse", self.return_lse)
        require_order(self.order)
        seqlen_q = count("seqlen", self.seqlen)
        seqlen_k = seqlen_q if self.seqlen_k is None else count("seqlen_k", self.seqlen_k)
        heads_q, heads_kv = q.shape[2], k.shape[2]
        self._check_shapes(q, k, v, seqlen_q, seqlen_k)
        accumulator = "float64" if dtype_name(q) == "float64" else "float32"
        alike_typed = {"q": q, "k": k, "v": v}
        for name, array in zip(("dout", "out", "lse"), others, strict=False):
            self.group.require_carried(name, array)
            expected = (*q.shape[:3], v.shape[3])
            if name == "lse":
                expected = (q.shape[0], heads_q, q.shape[1])
                require_float(name, array, (accumulator,))
            else:
                alike_typed[name] = array
            require_shape(name, array, expected, "for the tokens of this rank")
        calls.require_same_dtype(alike_typed)
        for name, array, dtypes in (
            ("alibi_slopes", self.alibi_slopes, (accumulator,)),
            ("sinks", self.sinks, tuple(dict.fromkeys((accumulator, dtype_name(q))))),
        ):
            if array is not None:
                self.group.require_carried(name, array)
                require_float(name, array, dtypes)
                require_shape(name, array, (heads_q,), "one for each query head")
        head_ranks = self._head_ranks(heads_q, heads_kv)
        window = Window() if self.window_size is None else window_of(self.window_size)
        geometry = Geometry(
            seqlen_q,
            seqlen_k,
            ranks=self.group.size // head_ranks,
            order=self.order,
            causal=bool(self.causal),
            left=window.left,
            right=window.right,
            cu_seqlens=self._cuts(q.shape[0], seqlen_q, seqlen_k),
            by_distance=self.alibi_slopes is not None,
        )
        exchange = HeadExchange(self.group, head_ranks, heads_q, heads_kv, self.order)
        scale = 1 / math.sqrt(q.shape[3])
        if self.softmax_scale is not None:
            scale = finite("softmax_scale", self.softmax_scale)
        scores = Scores(
            scale,
            None if self.softcap is None else checked_softcap(self.softcap),
            None
            if self.alibi_slopes is None
            else self.alibi_slopes[exchange.query_heads(self.group.rank)],
            self.backend,
        )
        alike = (
            *(self.name, q.dtype.name, q.shape[0], heads_q, heads_kv, q.shape[3], v.shape[3]),
            *(geometry, head_ranks, scores.scale, scores.softcap, scores.backend),
            bool(self.return_lse),
            None if self.sinks is None else dtype_name(self.sinks),
        )
        if not self.group.knows(alike):
            self._refuse(q, k, v, scale, is_backward=bool(others))
        return alike, _Plan(exchange, geometry, scores, seqlen_q, seqlen_k)

    def _refuse(self, q: Any, k: Any, v: Any, scale: float, *, is_backward: bool) -> None:
        options = Options("dense", causal=bool(self.causal), softmax_scale=scale, return_lse=True)
        if is_backward:
            options = options._replace(wrt=ROWS, grad_dtype=calls.accumulated_dtype(q))
        modifications = {
            "window_size": self.window_size,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }
        calls.refuse_alone(Arguments(q, k, v), options, self.backend, modifications)

    def _check_shapes(self, q: Any, k: Any, v: Any, seqlen_q: int, seqlen_k: int) -> None:
        ranks, rank = self.group.size, self.group.rank
        for name, array, seqlen in (("q", q, seqlen_q), ("k", k, seqlen_k), ("v", v, seqlen_k)):
            length = shard_length(seqlen, ranks, rank, self.order)
            if array.shape[1] != length:
                raise ValueError(
                    f"{name} has {array.shape[1]} tokens on rank {rank} of {ranks}; expected "
                    f"{length} for a sequence of {seqlen} in {self.order} order"
                )
        batch, heads_kv, head_dim = q.shape[0], k.shape[2], q.shape[3]
        if k.shape[0] != batch or v.shape[0] != batch:
            raise ValueError(f"q, k and v have batch {batch}, {k.shape[0]} and {v.shape[0]}")
        if k.shape[3] != head_dim or not head_dim:
            raise ValueError(
                f"k has head_dim {k.shape[3]}, but q has {head_dim}; expected the same, at least 1"
            )
        if v.shape[2] != heads_kv or not heads_kv or q.shape[2] % heads_kv:
            raise ValueError(
                f"q, k and v have {q.shape[2]}, {heads_kv} and {v.shape[2]} heads; expected the "
                "same number for k and v, and a multiple of it for q"
            )

    def _head_ranks(self, heads_q: int, heads_kv: int) -> int:
        if self.head_ranks is None:
            return chosen_head_ranks(self.group.size, heads_kv)
        requested = integer("head_ranks", self.head_ranks)
        if reason := why_not_head_ranks(requested, self.group.size, heads_q, heads_kv):
            raise ValueError(f"head_ranks is {requested}, which {reason}")
        return requested

    def _cuts(self, batch: int, seqlen_q: int, seqlen_k: int) -> tuple[int, ...] | None:
        """Return the distinct boundaries of packed sequences; None if cu_seqlens is not given."""
        if self.cu_seqlens is None:
            return None
        if not isinstance(self.cu_seqlens, Iterable):
            raise TypeError(f"cu_seqlens is {self.cu_seqlens!r}; expected a sequence of integers")
        cuts = [integer("cu_seqlens", cut) for cut in self.cu_seqlens]
        if cuts[:1] != [0] or cuts[-1:] != [seqlen_q] or cuts != sorted(cuts):
            raise ValueError(
                f"cu_seqlens goes from {cuts[:1]} to {cuts[-1:]}; expected totals that do not "
                f"decrease, from 0 to {seqlen_q}, the number of tokens"
            )
        if batch != 1 or seqlen_q != seqlen_k:
            raise ValueError(
                f"cu_seqlens is for a batch of 1 with as many queries as keys; the batch is "
                f"{batch}, and there are {seqlen_q} queries and {seqlen_k} keys"
            )
        return tuple(dict.fromkeys(cuts))
