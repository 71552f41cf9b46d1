"""Processes of several GPUs, where there are none: what is wrong is told."""

from __future__ import annotations

import pytest

from cupy_flash.cli.measure.ranks import Crew, RankError, on_ranks
from cupy_flash.gpu.environment import gpu_unavailable


def work(communicator: object) -> None:
    raise AssertionError("there is no GPU to have a communicator")


def test_a_rank_that_fails_is_named_with_its_error() -> None:
    if gpu_unavailable() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(RankError, match=r"rank 0: Traceback"):
        on_ranks(work, 2, seconds=60)


def test_a_crew_does_not_wait_for_a_rank_that_has_failed() -> None:
    if gpu_unavailable() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(RankError, match=r"rank 1: Traceback"):
        Crew(work, 2, seconds=60)


def test_a_crew_waits_for_no_rank_longer_than_it_may() -> None:
    with pytest.raises(RankError, match="rank 1 did not end in time"):
        Crew(work, 2, seconds=0)
