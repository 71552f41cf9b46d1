"""Ordered accumulation by several threads, so that results do not depend on thread timing.

Work items are numbered in the order in which threads begin them. The items of one queue add to the
same elements, each in the order of the keys. An item may add its contribution for some keys once
all earlier items of its queue have passed these keys. Usually they have, as they began earlier. No
item waits for a later one, so there is no deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple

from cupy_flash.cpu.thread_pool import Stop

# Interval in seconds at which a waiting thread checks for a requested stop, which does not wake it.
SECONDS_TO_LOOK = 0.1


class Turn(NamedTuple):
    """Number of a work item in the order of all items, and the queue that it belongs to."""

    number: int
    queue: Hashable


class Turns:
    """Order in which the work items of a call add their contributions."""

    def __init__(self, stop: Stop) -> None:
        self._stop, self._changed = stop, threading.Condition()
        # For each queue and each number of an unfinished item: the end of the keys it has passed.
        self._passed: dict[Hashable, dict[int, int]] = {}
        # Final additions of finished items that still wait for an earlier item to finish.
        self._rests: dict[int, Callable[[], None]] = {}
        self._next_rest = 0

    def enter(self, turn: Turn) -> None:
        """Register an item; must be called in the order of items."""
        with self._changed:
            self._passed.setdefault(turn.queue, {})[turn.number] = 0

    def wait(self, turn: Turn, key: int) -> bool:
        """Wait until an item may add to keys before `key`; return False if a stop is requested."""
        with self._changed:
            passed = self._passed[turn.queue]
            while any(at < key for number, at in passed.items() if number < turn.number):
                if self._stop.requested:
                    return False
                self._changed.wait(SECONDS_TO_LOOK)
        return True

    def passed(self, turn: Turn, key: int) -> None:
        """Record that an item has nothing more to add to keys before `key`."""
        with self._changed:
            self._passed[turn.queue][turn.number] = key
            self._changed.notify_all()

    def finish(self, turn: Turn, add_rest: Callable[[], None]) -> None:
        """Finish an item. `add_rest` is called after the `add_rest` of all earlier items."""
        with self._changed:
            passed = self._passed[turn.queue]
            del passed[turn.number]
            if not passed:
                del self._passed[turn.queue]
            self._changed.notify_all()
            self._rests[turn.number] = add_rest
            while self._next_rest in self._rests:
                self._rests.pop(self._next_rest)()
                self._next_rest += 1
