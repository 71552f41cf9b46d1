"""Order of messages and attention in a ring, without other ranks and without computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_flash.parallel import calls, ring
from cupy_flash.parallel.score_blocks import Geometry
from cupy_flash.parallel.shards import shard_length


class Group:
    """Fake group that sends nothing, and records when messages start and are waited for."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def start(self, sends: Any, receives: Any) -> Group:
        self.events.append("start")
        return self

    def wait(self) -> None:
        self.events.append("wait")


@pytest.mark.parametrize(
    ("geometry", "events"),
    [
        (Geometry(4096, 4096, 3, "zigzag"),
         ["start", "shared", "wait", "start", "shared", "wait", "alone"]),
        (Geometry(4096, 4096, 1, "zigzag"), ["alone"]),
        # With this window, ranks attend to keys of their own shard and the previous one only.
        (Geometry(4096, 4096, 4, "contiguous", causal=True, left=5),
         ["start", "alone", "wait", "alone"]),
    ],
    ids=["all keys", "one rank", "a window"],
)  # fmt: skip
def test_attention_shares_the_gpu_while_keys_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch, geometry: Geometry, events: list[str]
) -> None:
    found: list[str] = []

    def attend(*_: Any, shares_gpu: bool) -> None:
        found.append("shared" if shares_gpu else "alone")

    monkeypatch.setattr(calls, "attend", attend)
    place = geometry.ranks - 1
    rows = shard_length(geometry.seqlen_q, geometry.ranks, place, order=geometry.order)
    q = np.zeros((1, rows, 2, 8), np.float32)
    group: Any = Group(found)
    of_all = ring.Ring(group, range(geometry.ranks), place)
    ring.forward(q, q, q, of_all, geometry, calls.Scores(1.0), None)
    assert found == events
