"""Arrays in host memory, carried by MPI."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

import numpy as np

from cupy_flash.arrays.strided import kind_of
from cupy_flash.errors import ParallelError
from cupy_flash.parallel.exchange import Message, bytes_of

# Of no meaning, but not what a program's own messages are likely to have. Each call has another, by
# its number, up to what every MPI has: calls of ranks that are apart do not take each other's.
_TAG, _TAGS = 20847, 8192
# Most bytes of a message. MPI before version 4 counts bytes in an int, which 2 GiB overflow. A
# longer array is sent in parts: MPI keeps the order of a rank's messages.
_MOST_BYTES = 1 << 30
# Looks at messages without a pause, and the pause from then on, in seconds: short exchanges are not
# held up, and where ranks share cores the one that computes gets them.
_BUSY_LOOKS, _PAUSE = 200, 50e-6
# What was under way when an exchange ended, for good: MPI may still read and write its memory when
# the group and its arrays are gone.
_abandoned: list[_MpiTransfer] = []


class MpiExchange:
    """See `Exchange`.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Stays the caller's.
    timeout : float
        Seconds that a wait may take.
    """

    xp: Any = np

    def __init__(self, comm: Any, timeout: float) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._comm, self._timeout = comm, timeout
        mpi = sys.modules["mpi4py.MPI"]
        self._status, self._error = mpi.Status(), mpi.Exception
        self._broken: str | None = None
        self._calls = 0
        # Also those whose owner has raised: MPI goes on to write to their memory.
        self._under_way: list[_MpiTransfer] = []

    def on_device(self) -> AbstractContextManager[Any]:
        """See `Exchange`: any."""
        return contextlib.nullcontext()

    def is_capturing(self) -> bool:
        """See `Exchange`."""
        return False

    def begin(self) -> None:
        """See `Exchange`."""
        self._calls += 1

    def check(self) -> None:
        """See `Exchange`."""
        if self._broken:
            raise ParallelError(self._broken)

    def why_not(self, array: Any) -> str | None:
        """See `Exchange`."""
        if isinstance(array, np.ndarray):
            return None
        return f"is {kind_of(array)}; a communicator of MPI carries arrays of NumPy"

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> _MpiTransfer:
        """See `Exchange`."""
        self.check()
        open_ones, tag = [], _TAG + self._calls % _TAGS
        for is_sent, messages in ((False, receives), (True, sends)):
            post = self._comm.Isend if is_sent else self._comm.Irecv
            for array, peer in messages:
                whole = bytes_of(array)
                for begin in range(0, max(whole.size, 1), _MOST_BYTES):
                    part = whole[begin : begin + _MOST_BYTES]
                    request = post([part, part.size], peer, tag)
                    open_ones.append(_Open(request, peer, None if is_sent else part.size))
        transfer = _MpiTransfer(self, open_ones)
        self._under_way.append(transfer)
        return transfer

    def wait_for(self, transfer: _MpiTransfer) -> None:
        """Return once all its messages are done."""
        give_up, looks, status = time.monotonic() + self._timeout, 0, self._status
        while transfer.open:
            still = []
            for message in transfer.open:
                try:
                    is_over = message.request.Test(status)
                except self._error as error:
                    # More bytes than there is room for, say; some MPIs tell that in many lines.
                    said = " ".join(str(error).split())
                    self._give_up(f"rank {self.rank}: {said}, of rank {message.peer}")
                if not is_over:
                    still.append(message)
                elif message.expected not in (None, status.Get_count()):
                    self._give_up(
                        f"rank {message.peer} sent {status.Get_count()} bytes where rank "
                        f"{self.rank} expects {message.expected}: it makes another call"
                    )
            transfer.open = still
            if still and time.monotonic() > give_up:
                names = ", ".join(map(str, sorted({message.peer for message in still})))
                self._give_up(
                    f"rank {self.rank} waited {self._timeout:g} s for rank {names}, which failed, "
                    "makes another call or takes longer"
                )
            looks += 1
            if looks > _BUSY_LOOKS:
                time.sleep(_PAUSE)
        if transfer in self._under_way:
            self._under_way.remove(transfer)

    def end(self, why: str) -> None:
        """See `Exchange`."""
        if self._broken:
            return
        self._broken = f"{why}; the group is of no use any more"
        _abandoned.extend(self._under_way)
        for transfer in self._under_way:
            for message in transfer.open:
                # Not one that is sent: MPICH crashes where its receiver has not taken it.
                if message.request and message.expected is not None:
                    message.request.Cancel()

    def _give_up(self, why: str) -> NoReturn:
        self.end(why)
        raise ParallelError(self._broken)


class _Open(NamedTuple):
    """A message that was not seen to arrive; of one that is received, how many bytes."""

    request: Any
    peer: int
    expected: int | None


class _MpiTransfer:
    """See `Transfer`."""

    def __init__(self, exchange: MpiExchange, open_ones: list[_Open]) -> None:
        self._exchange, self.open = exchange, open_ones

    def wait(self) -> None:
        """See `Transfer`."""
        self._exchange.wait_for(self)

    finish = wait
