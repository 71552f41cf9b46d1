"""Interface of point-to-point communication between ranks, implemented for MPI and NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np


class Message(NamedTuple):
    """Contiguous array to send or receive, and the rank at the other end (`peer`)."""

    array: Any
    peer: int


class Transfer(Protocol):
    """Messages in transit. The caller that started them keeps their arrays alive until the end."""

    def wait(self) -> None:
        """Wait until received arrays may be read and sent arrays may be overwritten.

        On a GPU, only work that is enqueued on the current stream afterwards waits, not the host.

        Raises
        ------
        ParallelError
            If a rank does not answer in time.
        """

    def finish(self) -> None:
        """Wait until the host may read received arrays; on a GPU, this blocks the host."""


class Exchange(Protocol):
    """Point-to-point communication between the ranks of a communicator.

    Attributes
    ----------
    rank, size
        Rank of this process, and number of ranks of the communicator.
    xp
        Module whose arrays it sends and receives, NumPy or CuPy.
    """

    rank: int
    size: int
    xp: Any

    def on_device(self) -> AbstractContextManager[Any]:
        """Return a context manager for the device on which messages and results are allocated."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start all messages at once. Sender and receiver must start them in the same order.

        Raises
        ------
        ParallelError
            If a rank has failed or not answered.
        """

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured in a CUDA graph."""

    def begin(self) -> None:
        """Begin a call, so that messages of different calls are not confused if tags allow it."""

    def check(self) -> None:
        """Raise ParallelError if a rank has failed or not answered."""

    def end(self, why: str) -> None:
        """Cancel pending receives and refuse any further messages.

        `check` then raises ParallelError with the first reason `why`.
        """

    def why_not(self, array: Any) -> str | None:
        """Return why an array cannot be sent; None if it can."""


def bytes_of(array: Any) -> Any:
    """Return a contiguous array as bytes, as MPI does not know every dtype."""
    return array.reshape(-1).view(np.uint8)
