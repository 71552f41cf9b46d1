"""Processes that work on several GPUs together: one rank each, with an NCCL communicator.

Rank 0 creates the unique id of the communicator; the parent process sends it to the other ranks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

# Module-level function of a rank; its arguments are the communicator and those of the caller.
Work = Callable[..., Any]
# Time limit for starting a process, loading CuPy and initializing its GPU.
_START_SECONDS = 120.0


class RankError(RuntimeError):
    """A rank failed, or did not finish in time."""


class _Rank(NamedTuple):
    """A process, and the parent's end of the pipe to it."""

    number: int
    process: SpawnProcess
    pipe: Connection

    def end(self) -> None:
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def on_ranks(work: Work, ranks: int, *arguments: Any, seconds: float) -> list[Any]:
    """Return the result of `work(communicator, *arguments)` in each of `ranks` processes.

    Process r is rank r, and GPU r is its current device. Processes that still run after `seconds`
    are killed. Raise RankError if a rank fails, with the traceback of the first one.
    """
    started = [_start(_send_result, ranks, rank, (work, *arguments)) for rank in range(ranks)]
    deadline = time.monotonic() + seconds
    try:
        name, *_ = _receive_all(started, deadline)
        for other in started[1:]:
            other.pipe.send(name)
        return _receive_all(started, deadline)
    finally:
        for result in started:
            result.end()


class RankProcesses:
    """This process as rank 0, and other processes that execute its orders.

    Parameters
    ----------
    work
        Function `work(communicator, orders)` of the other processes. It returns when
        `orders.recv()` raises EOFError.
    ranks
        Number of ranks, including this process.
    seconds
        Time limit for the start of the other processes, after which RankError is raised.
    """

    def __init__(self, work: Work, ranks: int, *, seconds: float = _START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        self._others = [_start(work, ranks, rank, ()) for rank in range(1, ranks)]
        try:
            # The ranks are awaited first, because creating a communicator has no time limit.
            _receive_all(self._others, deadline)
        except RankError:
            self.close()
            raise
        from cupy.cuda import nccl

        name = nccl.get_unique_id()
        for other in self._others:
            other.pipe.send(name)
        self.communicator = nccl.NcclCommunicator(ranks, name, 0)

    def send_order(self, *order: Any) -> None:
        """Send an order to all other ranks."""
        for other in self._others:
            try:
                other.pipe.send(order)
            except OSError:
                raise RankError("a rank has ended; its error is printed above") from None

    def close(self) -> None:
        """End the other processes."""
        for other in self._others:
            other.pipe.close()
        for other in self._others:
            other.end()


def _start(role: Work, ranks: int, rank: int, arguments: tuple[Any, ...]) -> _Rank:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(role, ranks, rank, theirs, arguments), daemon=True)
    process.start()
    # The child must hold the only copy of its end: then the pipe reports when the child exits.
    theirs.close()
    return _Rank(rank, process, ours)


def _run(role: Work, ranks: int, rank: int, parent: Connection, arguments: tuple[Any, ...]) -> None:
    """Run in a rank's process: create the communicator, and call `role` with it."""
    try:
        import cupy
        from cupy.cuda import nccl

        cupy.cuda.Device(rank).use()
        name = nccl.get_unique_id() if rank == 0 else None
        # Signals that this rank is ready; rank 0 also sends the communicator's unique id.
        parent.send((None, name))
        if name is None:
            name = parent.recv()
        role(nccl.NcclCommunicator(ranks, name, rank), parent, *arguments)
    except EOFError:
        # The parent has closed the pipe, which ends this rank.
        pass
    except BaseException:
        text = traceback.format_exc()
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
        # A parent that is gone has reported its own error.
        with contextlib.suppress(OSError):
            parent.send((text, None))


def _send_result(communicator: Any, parent: Connection, work: Work, *arguments: Any) -> None:
    parent.send((None, work(communicator, *arguments)))


def _receive_all(ranks: Sequence[_Rank], deadline: float) -> list[Any]:
    """Return the next message of each rank; raise RankError as soon as any rank fails."""
    waiting, result = {rank.pipe: rank.number for rank in ranks}, {}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"rank {min(waiting.values())} did not end in time")
        for pipe in waiting.keys() & ready:
            number = waiting.pop(pipe)
            result[number] = _receive(pipe, number)
    return [result[rank.number] for rank in ranks]


def _receive(pipe: Connection, number: int) -> Any:
    try:
        error, value = pipe.recv()
    except EOFError:
        raise RankError(f"rank {number} ended without a result") from None
    if error is not None:
        raise RankError(f"rank {number}: {error}")
    return value
