"""Processes that share work over several GPUs, a rank each, with a communicator of NCCL.

NCCL finds the other ranks by a name that rank 0 makes; whoever starts the processes passes it on.
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

# What a rank does, at the top of a module: it is given the communicator and what the caller passes.
Work = Callable[..., Any]
# In which a process starts, loads CuPy and has its GPU.
_START_SECONDS = 120.0


class RankError(RuntimeError):
    """A rank failed, or did not end in time."""


class _Rank(NamedTuple):
    """A process, and where it is told and tells things."""

    number: int
    process: SpawnProcess
    pipe: Connection

    def end(self) -> None:
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def on_ranks(work: Work, ranks: int, *arguments: Any, seconds: float) -> list[Any]:
    """What `work(communicator, *arguments)` returns in each of so many processes.

    Process r has GPU r as its current device, and is rank r.

    Parameters
    ----------
    seconds
        After which processes that still run are ended.

    Raises
    ------
    RankError
        With the traceback of the rank that failed first.
    """
    started = [_start(_answer, ranks, rank, (work, *arguments)) for rank in range(ranks)]
    give_up = time.monotonic() + seconds
    try:
        name, *_ = _said_by(started, give_up)
        for other in started[1:]:
            other.pipe.send(name)
        return _said_by(started, give_up)
    finally:
        for found in started:
            found.end()


class Crew:
    """This process as rank 0, and others that do what it tells them.

    Parameters
    ----------
    work
        Of the others: called as `work(communicator, orders)`, and over when `orders.recv()` raises
        EOFError.
    ranks
        How many there are, this one included.
    seconds
        In which the others have to be ready.

    Raises
    ------
    RankError
        If one of them is not.
    """

    def __init__(self, work: Work, ranks: int, *, seconds: float = _START_SECONDS) -> None:
        give_up = time.monotonic() + seconds
        self._others = [_start(work, ranks, rank, ()) for rank in range(1, ranks)]
        try:
            # A communicator waits for all ranks, however long it takes.
            _said_by(self._others, give_up)
        except RankError:
            self.close()
            raise
        from cupy.cuda import nccl

        name = nccl.get_unique_id()
        for other in self._others:
            other.pipe.send(name)
        self.communicator = nccl.NcclCommunicator(ranks, name, 0)

    def tell(self, *order: Any) -> None:
        """Tell all others."""
        for other in self._others:
            try:
                other.pipe.send(order)
            except OSError:
                raise RankError("a rank has ended; its error stands above") from None

    def close(self) -> None:
        """End the others."""
        for other in self._others:
            other.pipe.close()
        for other in self._others:
            other.end()


def _start(role: Work, ranks: int, rank: int, arguments: tuple[Any, ...]) -> _Rank:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(role, ranks, rank, theirs, arguments), daemon=True)
    process.start()
    # Else nobody would see that the process has ended.
    theirs.close()
    return _Rank(rank, process, ours)


def _run(role: Work, ranks: int, rank: int, parent: Connection, arguments: tuple[Any, ...]) -> None:
    """What a process does: find the others, and play its role."""
    try:
        import cupy
        from cupy.cuda import nccl

        cupy.cuda.Device(rank).use()
        name = nccl.get_unique_id() if rank == 0 else None
        # Ready, and where the others find rank 0.
        parent.send((None, name))
        if name is None:
            name = parent.recv()
        role(nccl.NcclCommunicator(ranks, name, rank), parent, *arguments)
    except EOFError:
        # The parent has closed.
        pass
    except BaseException:
        text = traceback.format_exc()
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
        # Who is gone has its own error.
        with contextlib.suppress(OSError):
            parent.send((text, None))


def _answer(communicator: Any, parent: Connection, work: Work, *arguments: Any) -> None:
    parent.send((None, work(communicator, *arguments)))


def _said_by(ranks: Sequence[_Rank], give_up: float) -> list[Any]:
    """What each says next; RankError as soon as one has failed, though others hang for it."""
    waiting, found = {rank.pipe: rank.number for rank in ranks}, {}
    while waiting:
        ready = wait(list(waiting), max(0.0, give_up - time.monotonic()))
        if not ready:
            raise RankError(f"rank {min(waiting.values())} did not end in time")
        for pipe in waiting.keys() & ready:
            number = waiting.pop(pipe)
            found[number] = _said(pipe, number)
    return [found[rank.number] for rank in ranks]


def _said(pipe: Connection, number: int) -> Any:
    try:
        error, value = pipe.recv()
    except EOFError:
        raise RankError(f"rank {number} ended without a result") from None
    if error is not None:
        raise RankError(f"rank {number}: {error}")
    return value
