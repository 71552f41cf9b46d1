"""Group of ranks that compute a sharded sequence, and their agreement on each call."""

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

# A rank describes its call by a record: a mark, a digest, and text (sizes in bytes). The size is
# odd, unlike that of any array of 16-bit numbers, so that a rank that expects an array over MPI
# detects the record. NCCL does not compare sizes; there, a rank that expects a record detects an
# array because it does not begin with the mark.
_MARK = hashlib.sha256(b"cupy_flash.parallel: a call").digest()[:16]
_DIGEST, _TEXT = 32, 463
# Maximum number of agreed calls that a group remembers. All ranks clear them at the same call.
_MAX_AGREED = 4096

_Plan = TypeVar("_Plan")


class Group:
    """Ranks of a communicator, for the functions of `cupy_flash.parallel`.

    Every rank must make the same calls in the same order, each with its part of the arrays. In the
    first call with certain shapes and options, ranks exchange a description of the call, and all
    raise if the descriptions differ or a rank raised. Later such calls are not compared, and cost
    nothing. If ranks then make different calls, they wait until their timeout. If the messages of
    these calls have equal sizes, results may be wrong without an error.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, cupy.cuda.nccl.NcclCommunicator or cupyx.distributed.NCCLBackend
        Communicator: MPI for NumPy arrays, NCCL for CuPy arrays on the communicator's device. The
        caller remains its owner, but must not use it for other messages while the group is in use.
    timeout : float
        Seconds after which a rank stops waiting for another. This must exceed the time that any
        rank may be late for a call.

    Attributes
    ----------
    rank, size : int
        Rank of this process, from 0, and number of ranks.

    Raises
    ------
    TypeError
        If comm is not a communicator of these types.
    ValueError
        If timeout is not positive, or comm is a null communicator or an intercommunicator of MPI.
    """

    def __init__(self, comm: Any, *, timeout: float = 600.0) -> None:
        if finite("timeout", timeout) <= 0:
            raise ValueError(f"timeout is {timeout} s; expected a positive time")
        self._exchange = _exchange_of(comm, float(timeout))
        self._agreed: set[tuple[Any, ...]] = set()
        # Transfers that have not been waited for. Messages may still be written to their arrays,
        # even if the call that started them has raised.
        self._open: list[_Strided] = []

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return self._exchange.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._exchange.size

    def check(self) -> None:
        """Raise ParallelError if a rank has failed or not answered in time.

        On GPUs, calls do not wait for other ranks. Call this function after a stream has finished
        its work and before its results are used.
        """
        self._exchange.check()

    def require_carried(self, name: str, array: Any) -> None:
        """Raise TypeError if the communicator cannot send an array, or for a masked array."""
        if reason := self._exchange.why_not(array):
            raise TypeError(f"{name} {reason}")
        normalize(name, array)

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start to exchange arrays, contiguous or not; `wait` completes the received arrays.

        Messages between two ranks are matched by their order alone.
        """
        xp = self._exchange.xp
        sent = [Message(xp.ascontiguousarray(a), peer) for a, peer in sends if a.size]
        targets = [message for message in receives if message.array.size]
        received = [
            Message(a if a.flags.c_contiguous else xp.empty(a.shape, a.dtype), peer)
            for a, peer in targets
        ]
        transfer = self._exchange.start(sent, received)
        result = _Strided(transfer, sent, received, [array for array, _ in targets], self._open)
        self._open.append(result)
        return result

    def gather(self, *own: Any, room: int = 0) -> list[Any]:
        """Return, for each array, an array (size + room, ...) of the arrays of all ranks.

        All ranks must pass arrays of the same shapes. The last `room` entries are uninitialized.
        """
        xp, sends, receives, result = self._exchange.xp, [], [], []
        others = [rank for rank in range(self.size) if rank != self.rank]
        with self._exchange.on_device():
            for array in own:
                gathered = xp.empty((self.size + room, *array.shape), array.dtype)
                gathered[self.rank] = array
                sends += [Message(array, rank) for rank in others]
                receives += [Message(gathered[rank], rank) for rank in others]
                result.append(gathered)
            self.start(sends, receives).wait()
        return result

    def knows(self, call: tuple[Any, ...]) -> bool:
        """Return whether all ranks have agreed on such a call before."""
        return call in self._agreed

    @contextlib.contextmanager
    def call(
        self,
        planned: Callable[[], tuple[tuple[Any, ...], _Plan]],
        why_not_captured: str | None = None,
    ) -> Iterator[_Plan]:
        """Yield this rank's plan of a call after all ranks have agreed on the call.

        If the body of the context raises, the group ends: other ranks wait for messages of this
        call, and would take those of a later call for them.

        Parameters
        ----------
        planned
            Function that returns the values that all ranks must agree on, and the plan. It raises
            if the arguments of this rank are wrong.
        why_not_captured
            Reason why the call cannot be captured in a CUDA graph; None if it can.

        Raises
        ------
        UnsupportedError
            If a stream is being captured and `why_not_captured` is given; no message is sent.
        ParallelError
            If a rank makes another call, raises, or does not answer in time.
        """
        if why_not_captured and self._exchange.is_capturing():
            raise UnsupportedError(f"{why_not_captured}; a CUDA graph cannot capture the call")
        # Overflow and underflow are expected, so the error state of the caller does not apply.
        with self._exchange.on_device(), np.errstate(all="ignore"):
            plan = self._agree(planned)
            with self._or_end():
                yield plan

    @contextlib.contextmanager
    def _or_end(self) -> Iterator[None]:
        """End the group if the body raises, because other ranks wait for messages of this rank."""
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
            # Other ranks may wait for the record of this rank's call. They do not wait if they have
            # agreed on their call before; `_exchange_records` then ends the group.
            with contextlib.suppress(Exception):
                self._exchange_records(bytes(_DIGEST), f"{type(error).__name__}: {error}")
            raise
        if call in self._agreed:
            return plan
        digest = hashlib.sha256(repr(call).encode()).digest()
        received = self._exchange_records(digest, repr(call))
        for rank, (other, text) in enumerate(received):
            if not any(other):
                raise ParallelError(f"rank {rank} raised {text}")
        for rank, (other, text) in enumerate(received):
            if other != digest:
                raise ParallelError(
                    f"rank {rank} makes another call than rank {self.rank}: {text} and {call!r}"
                )
        if len(self._agreed) >= _MAX_AGREED:
            self._agreed.clear()
        self._agreed.add(call)
        return plan

    def _exchange_records(self, digest: bytes, text: str) -> list[tuple[bytes, str]]:
        """Send a digest and a text (truncated) to all ranks; return those of each rank.

        Ends the group and raises ParallelError if a rank sends messages of a call instead.
        """
        xp, length = self._exchange.xp, len(_MARK) + _DIGEST + _TEXT
        record = (_MARK + digest + text.encode())[:length].ljust(length, b"\0")
        with self._or_end():
            own = xp.asarray(np.frombuffer(record, np.uint8))
            received = xp.zeros((self.size, length), np.uint8)
            received[self.rank] = own
            others = [rank for rank in range(self.size) if rank != self.rank]
            self._exchange.start(
                [Message(own, rank) for rank in others],
                [Message(received[rank], rank) for rank in others],
            ).finish()
            rows = [row.tobytes() for row in (received if xp is np else received.get())]
        result = []
        for rank, row in enumerate(rows):
            if not row.startswith(_MARK):
                self._exchange.end(
                    f"rank {rank} makes another call than rank {self.rank}: one that all "
                    "ranks have made before"
                )
                self.check()
            payload = row[len(_MARK) :]
            result.append(
                (payload[:_DIGEST], payload[_DIGEST:].rstrip(b"\0").decode(errors="replace"))
            )
        return result


class _Strided:
    """Transfer with contiguous buffers, which are copied to the receiving arrays at the end."""

    def __init__(
        self,
        transfer: Transfer,
        sent: list[Message],
        received: list[Message],
        targets: list[Any],
        open_ones: list[_Strided],
    ) -> None:
        self._transfer, self._received, self._targets = transfer, received, targets
        self._open = open_ones
        # Keeps the sent arrays alive until the transfer has been waited for.
        self._sent = sent

    def wait(self) -> None:
        """See `Transfer`."""
        self._transfer.wait()
        self._put()

    def finish(self) -> None:
        """See `Transfer`."""
        self._transfer.finish()
        self._put()

    def _put(self) -> None:
        for (buffer, _), target in zip(self._received, self._targets, strict=True):
            if buffer is not target:
                target[...] = buffer
        self._sent, self._received, self._targets = [], [], []
        self._open.remove(self)


def run_collective(
    group: Group,
    planned: Callable[[], tuple[tuple[Any, ...], _Plan]],
    why_not_captured: str | None = None,
) -> AbstractContextManager[_Plan]:
    """Return `Group.call`; raise TypeError if `group` is not a `Group`."""
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
                "comm is an intercommunicator; expected an intracommunicator, whose ranks belong "
                "to one group"
            )
        return MpiExchange(comm, timeout)
    if (nccl_comm := communicator_of(comm)) is not None:
        return NcclExchange(nccl_comm, timeout)
    raise TypeError(f"comm is {kind_of(comm)}; expected a communicator of mpi4py or cupy.cuda.nccl")
