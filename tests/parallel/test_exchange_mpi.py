"""Exchanges over MPI of a process with itself: what is of a call, and what an end takes back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

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


def test_an_end_takes_back_all_that_is_under_way(comm: Any) -> None:
    exchange, places = MpiExchange(comm, 60), np.zeros((2, 4))
    for place in places:
        exchange.start([], [Message(place, 0)])
    exchange.end("one rank is missing")
    sent = comm.Isend(np.ones(4), 0, exchange_mpi._TAG)
    # Nothing that was under way has taken it.
    assert comm.Iprobe(0, exchange_mpi._TAG)
    sent.Cancel()
    assert not places.any()
    with pytest.raises(ParallelError, match="one rank is missing; the group is of no use any more"):
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
