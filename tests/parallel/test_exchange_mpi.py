"""Exchanges over MPI of a process with itself: messages of a call, and the end of a group."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from cupy_flash.arrays.strided import unallocated
from cupy_flash.errors import ParallelError
from cupy_flash.parallel import exchange_mpi
from cupy_flash.parallel.exchange import Message
from cupy_flash.parallel.exchange_mpi import MpiExchange


@pytest.fixture
def comm() -> Any:
    mpi = pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    return mpi.COMM_SELF.Dup()


def test_a_message_of_another_call_is_not_taken(comm: Any) -> None:
    exchange, received = MpiExchange(comm, 0.2), np.zeros(4)
    exchange.begin()
    exchange.start([Message(np.ones(4), 0)], [])
    exchange.begin()
    with pytest.raises(ParallelError, match=r"waited 0\.2 s for rank 0"):
        exchange.start([], [Message(received, 0)]).wait()
    assert not received.any()


@pytest.mark.parametrize("elements", [0, 1, 5, 6, 41])
def test_what_is_longer_than_a_message_arrives_in_parts(
    comm: Any, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    monkeypatch.setattr(exchange_mpi, "_MOST_BYTES", 24)
    exchange, posted = MpiExchange(comm, 60), []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            def post(buffer: list[Any], *where: int) -> Any:
                posted.append(buffer[1])
                return getattr(comm, name)(buffer, *where)

            return post

    exchange._comm = Recorded()
    sent = [np.arange(elements, dtype=np.float64), -np.arange(elements + 2, dtype=np.float32)]
    received = [np.zeros_like(array) for array in sent]
    exchange.start([Message(x, 0) for x in sent], [Message(x, 0) for x in received]).wait()
    for one, other in zip(sent, received, strict=True):
        np.testing.assert_array_equal(one, other)
    assert max(posted) <= 24
    assert sum(posted) == 2 * sum(array.nbytes for array in sent)


def test_no_message_has_a_count_beyond_an_int(comm: Any) -> None:
    counts = []

    class NoMpi:
        def Isend(self, buffer: list[Any], *where: int) -> Any:
            counts.append(buffer[1])

        Irecv = Isend

    exchange = MpiExchange(comm, 60)
    exchange._comm = NoMpi()
    # The array has no memory, and the fake MPI reads none.
    exchange.start([Message(unallocated((5 << 30,), np.uint8), 0)], [])
    assert sum(counts) == 5 << 30
    assert max(counts) < 2**31


def test_an_end_takes_back_all_that_is_under_way(comm: Any) -> None:
    exchange, places = MpiExchange(comm, 60), np.zeros((2, 4))
    for place in places:
        exchange.start([], [Message(place, 0)])
    exchange.end("one rank is missing")
    sent = comm.Isend(np.ones(4), 0, exchange_mpi._TAG)
    # No receive that was pending at the end has taken the message.
    assert comm.Iprobe(0, exchange_mpi._TAG)
    sent.Cancel()
    assert not places.any()
    with pytest.raises(ParallelError, match="one rank is missing; the group can no longer be used"):
        exchange.start([], [])


def test_what_is_sent_outlives_an_end(comm: Any) -> None:
    exchange, sent = MpiExchange(comm, 60), np.arange(1e5)
    exchange.start([Message(sent, 0)], [])
    exchange.end("one rank is missing")
    alive = weakref.ref(sent)
    del exchange, sent
    gc.collect()
    assert alive() is not None
    assert comm.Iprobe(0, exchange_mpi._TAG)
    received = np.zeros(100_000)
    comm.Recv(received, 0, exchange_mpi._TAG)
    np.testing.assert_array_equal(received, np.arange(1e5))
