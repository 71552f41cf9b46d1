"""Threads that add to the same elements: each waits for its turn, so that bits depend on no thread.

Items of work are numbered in the order in which threads take them up. Those of one queue add to
the same elements, each in the order of the keys; an item may add what it has of some keys once all
items before it in the queue have passed them. As those began earlier, they mostly have; and as none
ever waits for a later one, all come to an end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple

from cupy_flash.host.crew import Stop

# After so long a waiting thread looks whether another has failed, which does not wake it.
SECONDS_TO_LOOK = 0.1


class Turn(NamedTuple):
    """An item's place among all items."""

    number: int
    queue: Hashable


class Turns:
    """Whose turn it is, of all items of a call."""

    def __init__(self, stop: Stop) -> None:
        self._stop, self._changed = stop, threading.Condition()
        # By queue: behind which keys its items are, by number.
        self._passed: dict[Hashable, dict[int, int]] = {}
        # What is left to add of items that are through, while others are not that come before.
        self._rests: dict[int, Callable[[], None]] = {}
        self._next_rest = 0

    def enter(self, turn: Turn) -> None:
        """Begin an item; to be called in the order of items."""
        with self._changed:
            self._passed.setdefault(turn.queue, {})[turn.number] = 0

    def wait(self, turn: Turn, key: int) -> bool:
        """Wait until an item may add what it has of keys before this one; False if all stop."""
        with self._changed:
            passed = self._passed[turn.queue]
            while any(at < key for number, at in passed.items() if number < turn.number):
                if self._stop.requested:
                    return False
                self._changed.wait(SECONDS_TO_LOOK)
        return True

    def passed(self, turn: Turn, key: int) -> None:
        """An item has nothing more to add of keys before this one."""
        with self._changed:
            self._passed[turn.queue][turn.number] = key
            self._changed.notify_all()

    def finish(self, turn: Turn, add_rest: Callable[[], None]) -> None:
        """An item is through; what is left to add is added when that of all before it is."""
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
