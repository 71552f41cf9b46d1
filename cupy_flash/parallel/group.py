"""The ranks that share a sequence."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np

from cupy_flash.arrays.kinds import normalize
from cupy_flash.arrays.strided import kind_of
from cupy_flash.errors import ParallelError, UnsupportedError
from cupy_flash.parallel.exchange import Exchange, Message, Transfer
from cupy_flash.parallel.exchange_mpi import MpiExchange
from cupy_flash.parallel.exchange_nccl import NcclExchange, communicator_of
from cupy_flash.problem.values import finite

# Of what a rank says of its call: a mark, a digest, and text. An odd number of bytes, as no array
# of 16-bit numbers has: who expects one, over MPI, finds that it is none. NCCL compares no sizes;
# there who expects what is said finds that an array does not begin with the mark, a text's hash.
_MARK = hashlib.sha256(b"cupy_flash.parallel: a call").digest()[:16]
_DIGEST, _TEXT = 32, 463
# Calls that were agreed upon; forgotten all at once, by all ranks alike.
_MAX_AGREED = 4096

_Plan = TypeVar("_Plan")


class Group:
    """A communicator's ranks, as the functions of `cupy_flash.parallel` take them.

    Every rank makes the same calls in the same order, each with its part of the arrays. The first
    time that a rank makes a call of some shapes and options it tells the others, so that all raise
    where they differ, or where one has raised. Later ones cost nothing and are not compared: ranks
    that differ then wait for each other until their time is over, or, where their messages have
    equal sizes (as of two `softmax_scale`), get wrong results unseen.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, cupy.cuda.nccl.NcclCommunicator or cupyx.distributed.NCCLBackend
        MPI carries arrays of NumPy, NCCL those of CuPy on the device that the communicator was made
        on. It stays the caller's; while the group is in use it carries no other messages.
    timeout : float
        Seconds that a rank waits for another before all give up. Longer than any rank may be busy
        with something else before it makes the same call.

    Attributes
    ----------
    rank, size : int
        Of this process, from 0, and of the communicator.

    Raises
    ------
    TypeError
        For what is no communicator.
    ValueError
        For a time that is not positive, or a communicator of MPI that is null or between two
        groups.
    """

    def __init__(self, comm: Any, *, timeout: float = 600.0) -> None:
        if finite("timeout", timeout) <= 0:
            raise ValueError(f"timeout is {timeout} s; expected a positive time")
        self._exchange = _exchange_of(comm, float(timeout))
        self._agreed: set[tuple[Any, ...]] = set()
        # Not yet waited for: whoever carries them writes to their memory, though a call may have
        # raised that started them.
        self._open: list[_Strided] = []

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self._exchange.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._exchange.size

    def check(self) -> None:
        """Raise ParallelError if a rank has failed or not answered in time.

        Where nothing waits, as on GPUs, this is what to ask between the end of a stream's work and
        the use of its results.
        """
        self._exchange.check()

    def require_carried(self, name: str, array: Any) -> None:
        """Raise TypeError for an array that the communicator does not carry, or a masked one."""
        if reason := self._exchange.why_not(array):
            raise TypeError(f"{name} {reason}")
        normalize(name, array)

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Exchange arrays that need not be contiguous; those received are written when waited for.

        Messages between two ranks are told apart by their order alone.
        """
        xp = self._exchange.xp
        leaving = [Message(xp.ascontiguousarray(a), peer) for a, peer in sends if a.size]
        places = [message for message in receives if message.array.size]
        landing = [
            Message(a if a.flags.c_contiguous else xp.empty(a.shape, a.dtype), peer)
            for a, peer in places
        ]
        transfer = self._exchange.start(leaving, landing)
        found = _Strided(transfer, leaving, landing, [array for array, _ in places], self._open)
        self._open.append(found)
        return found

    def gather(self, *own: Any, room: int = 0) -> list[Any]:
        """For each array, those of all ranks: (size + room, ...), the last ones left as they are.

        All ranks give arrays of the same shapes.
        """
        xp, sends, receives, found = self._exchange.xp, [], [], []
        others = [rank for rank in range(self.size) if rank != self.rank]
        with self._exchange.on_device():
            for array in own:
                of_all = xp.empty((self.size + room, *array.shape), array.dtype)
                of_all[self.rank] = array
                sends += [Message(array, rank) for rank in others]
                receives += [Message(of_all[rank], rank) for rank in others]
                found.append(of_all)
            self.start(sends, receives).wait()
        return found

    def knows(self, call: tuple[Any, ...]) -> bool:
        """Whether all ranks have agreed on such a call before."""
        return call in self._agreed

    @contextlib.contextmanager
    def call(
        self,
        planned: Callable[[], tuple[tuple[Any, ...], _Plan]],
        why_not_captured: str | None = None,
    ) -> Iterator[_Plan]:
        """What this rank plans to do, once all ranks are known to make the same call, to do it in.

        A rank that raises within leaves messages behind that the others wait for, and would take
        those of its next call for them: it makes none.

        Parameters
        ----------
        planned
            Gives all that must be the same, as plain values, and the plan; raises for arguments of
            this rank.
        why_not_captured
            Why the call cannot be in a CUDA graph; None if it can.

        Raises
        ------
        UnsupportedError
            If it is captured and cannot be; nothing was said by then.
        ParallelError
            If a rank makes another call, raises, or does not answer in time.
        """
        if why_not_captured and self._exchange.is_capturing():
            raise UnsupportedError(f"{why_not_captured}; no CUDA graph of it can be captured")
        # What ranks compute overflows and underflows as the formula does, whatever the error state
        # of the caller.
        with self._exchange.on_device(), np.errstate(all="ignore"):
            plan = self._agree(planned)
            with self._or_end():
                yield plan

    @contextlib.contextmanager
    def _or_end(self) -> Iterator[None]:
        """End the group if what is within raises, once there are messages that others wait for."""
        try:
            yield
        except BaseException as error:
            self._exchange.end(
                f"rank {self.rank} raised {type(error).__name__} in the middle of a call"
            )
            raise

    def _agree(self, planned: Callable[[], tuple[tuple[Any, ...], _Plan]]) -> _Plan:
        self.check()
        self._exchange.begin()
        try:
            call, plan = planned()
        except Exception as error:
            # The others may wait for this rank to say what it calls. Or they know their call and
            # do not: then the group is ended.
            with contextlib.suppress(Exception):
                self._say(bytes(_DIGEST), f"{type(error).__name__}: {error}")
            raise
        if call in self._agreed:
            return plan
        digest = hashlib.sha256(repr(call).encode()).digest()
        said = self._say(digest, repr(call))
        for rank, (other, text) in enumerate(said):
            if not any(other):
                raise ParallelError(f"rank {rank} raised {text}")
        for rank, (other, text) in enumerate(said):
            if other != digest:
                raise ParallelError(
                    f"rank {rank} makes another call than rank {self.rank}: {text} and {call!r}"
                )
        if len(self._agreed) >= _MAX_AGREED:
            self._agreed.clear()
        self._agreed.add(call)
        return plan

    def _say(self, digest: bytes, text: str) -> list[tuple[bytes, str]]:
        """Tell all ranks a digest and as much of a text as fits; what each says.

        Ends the group, and raises ParallelError, if one says nothing but is in a call already.
        """
        xp, room = self._exchange.xp, len(_MARK) + _DIGEST + _TEXT
        record = (_MARK + digest + text.encode())[:room].ljust(room, b"\0")
        with self._or_end():
            own = xp.asarray(np.frombuffer(record, np.uint8))
            said = xp.zeros((self.size, room), np.uint8)
            said[self.rank] = own
            others = [rank for rank in range(self.size) if rank != self.rank]
            self._exchange.start(
                [Message(own, rank) for rank in others],
                [Message(said[rank], rank) for rank in others],
            ).finish()
            rows = [row.tobytes() for row in (said if xp is np else said.get())]
        found = []
        for rank, row in enumerate(rows):
            if not row.startswith(_MARK):
                self._exchange.end(
                    f"rank {rank} makes another call than rank {self.rank}: one that all ranks know"
                )
                self.check()
            told = row[len(_MARK) :]
            found.append((told[:_DIGEST], told[_DIGEST:].rstrip(b"\0").decode(errors="replace")))
        return found


class _Strided:
    """A transfer whose arrays arrive in memory of their own, and are then put in their places."""

    def __init__(
        self,
        transfer: Transfer,
        leaving: list[Message],
        landing: list[Message],
        places: list[Any],
        open_ones: list[_Strided],
    ) -> None:
        self._transfer, self._landing, self._places = transfer, landing, places
        self._open = open_ones
        # Until it is waited for.
        self._leaving = leaving

    def wait(self) -> None:
        """See `Transfer`."""
        self._transfer.wait()
        self._put()

    def finish(self) -> None:
        """See `Transfer`."""
        self._transfer.finish()
        self._put()

    def _put(self) -> None:
        for (landed, _), place in zip(self._landing, self._places, strict=True):
            if landed is not place:
                place[...] = landed
        self._leaving, self._landing, self._places = [], [], []
        self._open.remove(self)


def together(
    group: Group,
    planned: Callable[[], tuple[tuple[Any, ...], _Plan]],
    why_not_captured: str | None = None,
) -> AbstractContextManager[_Plan]:
    """`Group.call`; TypeError for what is no group."""
    if not isinstance(group, Group):
        raise TypeError(f"group is {group!r}; expected a cupy_flash.parallel.Group")
    return group.call(planned, why_not_captured)


def _exchange_of(comm: Any, timeout: float) -> Exchange:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(comm, mpi.Comm):
        if comm == mpi.COMM_NULL:
            raise ValueError("comm is MPI.COMM_NULL; expected a communicator with this process")
        if comm.Is_inter():
            raise ValueError(
                "comm is an intercommunicator; expected an intracommunicator, whose ranks are all "
                "of one group"
            )
        return MpiExchange(comm, timeout)
    if (of_nccl := communicator_of(comm)) is not None:
        return NcclExchange(of_nccl, timeout)
    raise TypeError(
        f"comm is {kind_of(comm)}; expected a communicator of mpi4py or of cupy.cuda.nccl"
    )
