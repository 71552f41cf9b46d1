"""The library on several GPUs, each of which holds a part of the tokens or of the cache."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from cupy_flash import parallel
from cupy_flash.gpu.environment import gpu_unavailable, nccl_unavailable
from cupy_flash.parallel.heads import chosen_head_ranks, why_not_head_ranks

from ..cases.cases import Case
from ..cases.inputs import Inputs, random_inputs
from ..measure.ranks import RankError, RankProcesses
from ..measure.timing import Timed, replayed
from .contract import Prepared, Provider

# Seconds that a rank waits for the others, which may first have to draw inputs or compile.
_TIMEOUT = 300.0


class ShardedCall:
    """One rank's part of a case.

    Parameters
    ----------
    group
        Group of all ranks.
    inputs
        Inputs of the whole case; only this rank's part is kept.
    head_ranks
        Number of ranks over which heads are distributed; None lets the library choose.
    on_gpu
        Whether to take CuPy arrays.
    """

    def __init__(
        self, group: parallel.Group, inputs: Inputs, head_ranks: int | None, *, on_gpu: bool = True
    ) -> None:
        self._group, self._case, self._head_ranks = group, inputs.case, head_ranks
        q, k, v = inputs.gpu if on_gpu else inputs.host
        self._token = q.ravel()[:1].copy()
        self._call: Callable[[], Any]
        if self._case.is_cached:
            self._call = self._step(q, k, v, inputs.more_gpu if on_gpu else inputs.more)
        else:
            local = [self._shard(array) for array in (q, k, v)]
            dout = inputs.dout(on_gpu=on_gpu) if self._case.is_backward else None
            self._call = self._forward(local)
            if dout is not None:
                self._call = self._backward(self._shard(dout), local)

    def call(self) -> Any:
        """Return this rank's result; an exchange before and after synchronizes all ranks."""
        self._group.gather(self._token)
        result = self._call()
        self._group.gather(self._token)
        return result

    def captured(self) -> Timed:
        """Return `call` as a CUDA graph that all ranks launch together, once all have captured it.

        Raise ParallelError if this rank cannot capture it, or if another rank does not answer. The
        group cannot be used afterwards, because messages of an unfinished call may remain.
        """
        result = replayed(Timed(self.call))
        if result is None:
            raise parallel.ParallelError(f"rank {self._group.rank} cannot capture its part")
        # All ranks are waited for here, because graphs that wait for a rank have no time limit.
        (gathered,) = self._group.gather(self._token)
        gathered.get()
        self._group.check()
        return result

    def whole(self, result: Any) -> Any:
        """Return the whole result, gathered from all ranks."""
        if self._case.is_cached:
            return result
        if not self._case.is_backward:
            return parallel.gather(result, self._group, seqlen=self._case.seqlen_q)
        lengths = self._case.seqlen_q, self._case.seqlen_k, self._case.seqlen_k
        return tuple(
            parallel.gather(array, self._group, seqlen=seqlen)
            for array, seqlen in zip(result, lengths, strict=True)
        )

    def _shard(self, array: Any) -> Any:
        return parallel.shard(array, self._group.size, self._group.rank)

    @property
    def _options(self) -> dict[str, Any]:
        case = self._case
        return {
            "seqlen": case.seqlen_q,
            "seqlen_k": case.seqlen_k,
            "causal": case.causal,
            "softmax_scale": case.softmax_scale,
            "head_ranks": self._head_ranks,
        }

    def _forward(self, local: list[Any]) -> Callable[[], Any]:
        q, k, v = local
        return lambda: parallel.flash_attention(q, k, v, self._group, **self._options)

    def _backward(self, dout: Any, local: list[Any]) -> Callable[[], Any]:
        q, k, v = local
        out, lse = parallel.flash_attention(q, k, v, self._group, **self._options, return_lse=True)
        arguments = (dout, *local, out, lse, self._group)
        return lambda: parallel.flash_attention_backward(*arguments, **self._options)

    def _step(self, q: Any, k: Any, v: Any, more: Any) -> Callable[[], Any]:
        size, rank, case = self._group.size, self._group.rank, self._case
        caches = [parallel.cache_shard(cache, size, rank) for cache in (k, v)]
        return lambda: parallel.flash_attention_with_kvcache(
            *(q, *caches, more.get("k"), more.get("v")),
            group=self._group,
            cache_seqlens=more["cache_seqlens"],
            causal=case.causal,
            softmax_scale=case.softmax_scale,
        )


def serve(communicator: Any, orders: Connection) -> None:
    """Execute orders, one case after another, on a rank other than the first."""
    group = parallel.Group(communicator, timeout=_TIMEOUT)
    sharded_call, result, graph = None, None, None
    while True:
        order, *arguments = orders.recv()
        if order == "prepare":
            sharded_call = result = graph = None
            case, seed, head_ranks = arguments
            sharded_call = ShardedCall(group, random_inputs(case, seed, on_gpu=True), head_ranks)
        elif sharded_call is not None and order == "call":
            result = sharded_call.call()
        elif sharded_call is not None and order == "capture":
            graph = sharded_call.captured()
        elif graph is not None and order == "replay":
            graph.call()
        elif sharded_call is not None:
            sharded_call.whole(result)


class SeveralGpus(Provider):
    """`cupy_flash.parallel` on several GPUs, one of which is this process's."""

    on_gpu = True
    ours = True

    def __init__(self, gpus: int, head_ranks: int | None = None) -> None:
        self.gpus, self.head_ranks = gpus, head_ranks
        self.name = f"cupy_flash-{gpus}gpus"
        self._processes: RankProcesses | None = None
        self._group: parallel.Group | None = None
        self._sharded_call: ShardedCall | None = None
        # Reason why the ranks have ended; None while they run.
        self._ended: str | None = None

    def missing(self) -> str | None:
        if reason := gpu_unavailable():
            return reason
        import cupy

        result = cupy.cuda.runtime.getDeviceCount()
        if result < self.gpus:
            return f"there are {result} GPUs here, not {self.gpus}"
        return nccl_unavailable()

    def why_not(self, case: Case) -> str | None:
        if reason := self._ended or self.missing():
            return reason
        heads = case.heads_q, case.heads_kv
        requested = self.head_ranks
        if requested and (reason := why_not_head_ranks(requested, self.gpus, *heads)):
            return f"--head-ranks is {requested}, which {reason}"
        if case.mods or case.q_offset is not None or case.layout != "bshd":
            return "on several GPUs, bench times attention without modifications, in bshd layout"
        if case.is_cached:
            if case.page_size or case.cache_dtype or case.values_in_keys or case.rotary:
                return "caches on several GPUs take no pages, 8-bit dtypes, MLA or rotary embedding"
            if case.asked_splits or (case.causal and case.seqlen_q > 1 and not case.append):
                return "caches on several GPUs take no --num-splits; --causal needs --append"
        elif not case.is_dense or case.seqlen_q != case.seqlen_k:
            return "sharding needs batches of equal length, with as many queries as keys"
        return None

    def scratch_bytes(self, case: Case) -> int:
        if case.is_cached:
            return case.array_bytes // self.gpus
        # A rank holds its own tokens, those received from another rank, and two partial results.
        return 3 * (case.array_bytes + case.result_bytes) // self.gpus

    def prepare(self, inputs: Inputs) -> Prepared:
        if self._processes is None:
            self._processes = RankProcesses(serve, self.gpus)
            atexit.register(self._processes.close)
            self._group = parallel.Group(self._processes.communicator, timeout=_TIMEOUT)
        group = self._group
        assert group is not None
        self._send_order("prepare", inputs.case, inputs.seed, self.head_ranks)
        sharded_call = self._sharded_call = ShardedCall(group, inputs, self.head_ranks)

        def call() -> Any:
            self._send_order("call")
            return sharded_call.call()

        def to_result(result: Any) -> Any:
            self._send_order("whole")
            return sharded_call.whole(result)

        return Prepared(call, to_result, note=self.note_of(inputs.case))

    def note_of(self, case: Case) -> str:
        """Return how the GPUs divide the work, as a note."""
        if case.is_cached:
            return f"{self.gpus} GPUs, each with a part of the keys"
        result = self.head_ranks or chosen_head_ranks(self.gpus, case.heads_kv)
        scheme = "a ring" if result == 1 else f"heads distributed over {result}"
        return f"{self.gpus} GPUs, each with a part of the tokens: {scheme}"

    def replayed(self, prepared: Prepared) -> Timed:
        sharded_call = self._sharded_call
        assert sharded_call is not None
        self._send_order("capture")
        try:
            graph = sharded_call.captured()
        except Exception as error:
            self._end(f"the {self.gpus} ranks ended while they captured a call: {error}")
            raise

        def launch() -> Any:
            self._send_order("replay")
            return graph.call()

        return Timed(launch)

    def _send_order(self, *order: Any) -> None:
        """Send an order to the other ranks; raise RankError with the reason if they have ended."""
        if self._ended:
            raise RankError(self._ended)
        assert self._processes is not None
        self._processes.send_order(*order)

    def _end(self, why: str) -> None:
        assert self._processes is not None
        self._ended = why
        # Without an abort, this process would wait for the other ranks when it exits.
        self._processes.communicator.abort()
        self._processes.close()
