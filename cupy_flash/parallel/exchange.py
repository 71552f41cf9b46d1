"""What carries bytes between ranks: the one interface of MPI and NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np


class Message(NamedTuple):
    """A contiguous array, and the rank that it goes to or comes from."""

    array: Any
    peer: int


class Transfer(Protocol):
    """Messages under way; whoever started them keeps the arrays until they have arrived."""

    def wait(self) -> None:
        """From here on what arrives may be read, and what leaves be written.

        On a GPU by what is enqueued on the current stream; elsewhere at once.

        Raises
        ------
        ParallelError
            If a rank does not answer in time.
        """

    def finish(self) -> None:
        """The same, for the host to read what arrives: waits for a GPU too."""


class Exchange(Protocol):
    """Carries arrays between the ranks of a communicator, and knows no more of them.

    Attributes
    ----------
    rank, size
        Of this process, and of the communicator.
    xp
        Whose arrays it carries: NumPy or CuPy.
    """

    rank: int
    size: int
    xp: Any

    def on_device(self) -> AbstractContextManager[Any]:
        """What to be in while arrays are made and computed with that it carries."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """All of them at once; both ends start them in the same order.

        Raises
        ------
        ParallelError
            Once a rank has failed or not answered.
        """

    def is_capturing(self) -> bool:
        """Whether the current stream's work goes to a CUDA graph."""

    def begin(self) -> None:
        """A call begins: messages of another one are none of its own, where a carrier can tell."""

    def check(self) -> None:
        """Raise ParallelError once a rank has failed or not answered."""

    def end(self, why: str) -> None:
        """Receive nothing more of what is under way, and carry no more.

        The first reason is what `check` says.
        """

    def why_not(self, array: Any) -> str | None:
        """Why it cannot carry an array; None if it can."""


def bytes_of(array: Any) -> Any:
    """A contiguous array as bytes, which carriers know where they do not know a dtype."""
    return array.reshape(-1).view(np.uint8)
