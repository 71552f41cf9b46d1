"""Groups with a fake second rank: how rank 0 reacts to what rank 1 would send."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from cupy_flash import parallel
from cupy_flash.errors import UnsupportedError
from cupy_flash.parallel import group as group_module
from cupy_flash.parallel.exchange import Message

Fill = Callable[[np.ndarray, np.ndarray], None]


class Sizeless:
    """Fake exchange that, like NCCL's, compares no sizes; `fill` writes what rank 0 receives."""

    rank, size, xp = 0, 2, np

    def __init__(self, fill: Fill) -> None:
        self._fill, self._broken = fill, ""
        self.is_on_device = False
        self.captures = False
        self.sent = 0

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        self.is_on_device = True
        yield
        self.is_on_device = False

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sizeless:
        assert self.is_on_device
        self.sent += len(sends)
        for (own, _), (place, _) in zip(sends, receives, strict=False):
            self._fill(place, own)
        return self

    def wait(self) -> None:
        pass

    finish = wait

    def is_capturing(self) -> bool:
        return self.captures

    def begin(self) -> None:
        pass

    def check(self) -> None:
        if self._broken:
            raise parallel.ParallelError(self._broken)

    def end(self, why: str) -> None:
        self._broken = self._broken or why

    def why_not(self, array: Any) -> str | None:
        return None


def the_same(place: np.ndarray, own: np.ndarray) -> None:
    place[...] = own


def keys(place: np.ndarray, own: np.ndarray) -> None:
    place[...] = np.random.default_rng(0).integers(0, 256, place.shape)


def nothing(place: np.ndarray, own: np.ndarray) -> None:
    raise parallel.ParallelError("rank 0 waited 1 s")


def grouped(fill: Fill, monkeypatch: pytest.MonkeyPatch) -> parallel.Group:
    monkeypatch.setattr(group_module, "_exchange_of", lambda comm, timeout: Sizeless(fill))
    return parallel.Group(None)


def make(group: parallel.Group, *, raises: bool = False) -> None:
    def planned() -> tuple[tuple[str], None]:
        if raises:
            raise ValueError("q is wrong")
        return ("a call",), None

    with group.call(planned):
        pass


@pytest.mark.parametrize("fill", [keys, nothing])
def test_who_raises_while_others_are_in_a_call_that_they_know_makes_no_other(
    fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = grouped(fill, monkeypatch)
    with pytest.raises(ValueError, match="q is wrong"):
        make(group, raises=True)
    with pytest.raises(parallel.ParallelError, match=r"another call than rank 0|in the middle"):
        make(group)


def test_a_new_call_of_one_rank_and_a_known_one_of_another_end_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = grouped(keys, monkeypatch)
    for _ in range(2):
        with pytest.raises(parallel.ParallelError, match="rank 1 makes another call than rank 0"):
            make(group)


def test_who_raises_in_a_call_that_is_new_to_all_keeps_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = grouped(the_same, monkeypatch)
    with pytest.raises(ValueError, match="q is wrong"):
        make(group, raises=True)
    make(group)
    # A call that all ranks know is not announced again.
    exchange: Any = group._exchange
    sent = exchange.sent
    make(group)
    assert exchange.sent == sent


def test_packed_sequences_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before anything is sent, so the group stays usable."""
    group = grouped(the_same, monkeypatch)
    exchange: Any = group._exchange
    exchange.captures = True
    x = np.ones((1, 4, 1, 8), np.float32)
    message = "cu_seqlens is copied to the GPU in each call; a CUDA"
    with pytest.raises(UnsupportedError, match=message):
        parallel.flash_attention(x, x, x, group, seqlen=8, cu_seqlens=[0, 3, 8])
    assert not exchange.sent
    exchange.captures = False
    parallel.flash_attention(x, x, x, group, seqlen=8, cu_seqlens=[0, 3, 8])


def test_arrays_are_made_on_the_device_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    group = grouped(the_same, monkeypatch)
    (found,) = group.gather(np.arange(3))
    np.testing.assert_array_equal(found, [[0, 1, 2]] * 2)
