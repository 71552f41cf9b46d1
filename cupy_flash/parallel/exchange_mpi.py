"""Communication of NumPy arrays between ranks by MPI."""

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

# First message tag, an arbitrary number that a program's own messages are unlikely to use, and
# number of tags, which every MPI supports. Consecutive calls use different tags, so that ranks in
# different calls do not receive each other's messages.
_TAG, _TAGS = 20847, 8192
# Maximum number of bytes in a message. Before version 4, MPI counts bytes in an int, which 2 GiB
# overflow. A longer array is sent in parts; MPI preserves the order of messages between two ranks.
_MOST_BYTES = 1 << 30
# Number of polls without a pause, and the pause between later polls, in seconds. Short exchanges
# are not delayed, and a waiting rank leaves a shared core to ranks that compute.
_BUSY_LOOKS, _PAUSE = 200, 50e-6
# Transfers that were pending when an exchange ended. They are kept forever, because MPI may still
# access their memory after the group and its arrays have been deleted.
_abandoned: list[_MpiTransfer] = []


class MpiExchange:
    """Implementation of `Exchange` by MPI.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Communicator; the caller remains its owner.
    timeout : float
        Maximum duration of a wait, in seconds.
    """

    xp: Any = np

    def __init__(self, comm: Any, timeout: float) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._comm, self._timeout = comm, timeout
        mpi = sys.modules["mpi4py.MPI"]
        self._status, self._error = mpi.Status(), mpi.Exception
        self._broken: str | None = None
        self._calls = 0
        # Includes transfers of calls that raised, because MPI continues to write to their memory.
        self._under_way: list[_MpiTransfer] = []

    def on_device(self) -> AbstractContextManager[Any]:
        """See `Exchange`; there is no device to select."""
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
        return f"is {kind_of(array)}; an MPI communicator exchanges NumPy arrays"

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
        """Wait until all messages of a transfer are done."""
        give_up, looks, status = time.monotonic() + self._timeout, 0, self._status
        while transfer.open:
            still = []
            for message in transfer.open:
                try:
                    is_over = message.request.Test(status)
                except self._error as error:
                    # For example, a message that is too long; some MPIs report it in many lines.
                    said = " ".join(str(error).split())
                    self._give_up(f"rank {self.rank}: {said} (exchange with rank {message.peer})")
                if not is_over:
                    still.append(message)
                elif message.expected not in (None, status.Get_count()):
                    self._give_up(
                        f"rank {message.peer} sent {status.Get_count()} bytes, but rank "
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
        self._broken = f"{why}; the group can no longer be used"
        _abandoned.extend(self._under_way)
        for transfer in self._under_way:
            for message in transfer.open:
                # Only receives are cancelled: MPICH crashes if a cancelled send was not received.
                if message.request and message.expected is not None:
                    message.request.Cancel()

    def _give_up(self, why: str) -> NoReturn:
        self.end(why)
        raise ParallelError(self._broken)


class _Open(NamedTuple):
    """Pending message, and the number of bytes to receive (None for a message that is sent)."""

    request: Any
    peer: int
    expected: int | None


class _MpiTransfer:
    """Implementation of `Transfer` by MPI."""

    def __init__(self, exchange: MpiExchange, open_ones: list[_Open]) -> None:
        self._exchange, self.open = exchange, open_ones

    def wait(self) -> None:
        """See `Transfer`."""
        self._exchange.wait_for(self)

    finish = wait
