"""Processes for several GPUs on a machine without GPUs: failures of ranks are reported."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest

from cupy_flash.cli.measure import ranks
from cupy_flash.cli.measure.ranks import RankError, RankProcesses, on_ranks
from cupy_flash.gpu.environment import gpu_unavailable


def work(communicator: object) -> None:
    raise AssertionError("there is no GPU to have a communicator")


@pytest.mark.slow
def test_a_rank_that_fails_is_named_with_its_error() -> None:
    if gpu_unavailable() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(RankError, match=r"rank [01]: Traceback"):
        on_ranks(work, 2, seconds=60)


@pytest.mark.slow
def test_rank_processes_do_not_wait_for_a_rank_that_has_failed() -> None:
    if gpu_unavailable() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(RankError, match=r"rank 1: Traceback"):
        RankProcesses(work, 2, seconds=60)


def test_rank_processes_wait_for_no_rank_longer_than_they_may() -> None:
    with pytest.raises(RankError, match="rank 1 did not end in time"):
        RankProcesses(work, 2, seconds=0)


def started(count: int) -> tuple[list[Any], list[Any]]:
    """Return ranks, and the pipe ends through which these ranks report."""
    pipes = [multiprocessing.Pipe() for _ in range(count)]
    found: list[Any] = [
        ranks._Rank(number, multiprocessing.get_context("spawn").Process(), ours)
        for number, (ours, _) in enumerate(pipes)
    ]
    return found, [theirs for _, theirs in pipes]


def test_a_rank_that_fails_is_heard_while_one_before_it_hangs() -> None:
    found, (_, second) = started(2)
    second.send(("Traceback", None))
    with pytest.raises(RankError, match="rank 1: Traceback"):
        ranks._receive_all(found, time.monotonic() + 60)
    second.close()
    with pytest.raises(RankError, match="rank 1 ended without a result"):
        ranks._receive_all(found, time.monotonic() + 60)


def test_what_ranks_say_is_in_their_order() -> None:
    found, theirs = started(3)
    for number in (2, 0, 1):
        theirs[number].send((None, number))
    assert ranks._receive_all(found, time.monotonic() + 60) == [0, 1, 2]
