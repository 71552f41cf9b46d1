"""Threads that add to the same elements: each waits for its turn, so that bits depend on no thread.

Items of work are numbered in the order in which threads take them up. An item that shares elements
with others enters a queue for them; there it is at a place, which only ever falls. It may add at a
place when all items before it in the queue are past it. As those began earlier, they mostly are;
none ever waits for a later one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from cupy_flash.host.crew import Stop


class Turns:
    """Whose turn it is, of all items of a call."""

    def __init__(self, stop: Stop) -> None:
        self._stop, self._changed = stop, threading.Condition()
        # By queue, and by the number of each item in it.
        self._places: dict[Hashable, dict[int, int]] = {}
        # Of items that are through, by number, while others are not that come before.
        self._results: dict[int, Callable[[], None]] = {}
        self._next_result = 0

    def enter(self, queue: Hashable, item: int, place: int) -> None:
        """An item begins at a place; to be called in the order of items."""
        with self._changed:
            self._places.setdefault(queue, {})[item] = place

    def wait(self, queue: Hashable, item: int, place: int) -> bool:
        """Wait until an item may add at a place; False if all work is to stop."""
        with self._changed:
            places = self._places[queue]
            while any(at >= place for other, at in places.items() if other < item):
                if self._stop.requested:
                    return False
                self._changed.wait()
            return True

    def move(self, queue: Hashable, item: int, place: int) -> None:
        """An item adds nothing any more at places above this one."""
        with self._changed:
            self._places[queue][item] = place
            self._changed.notify_all()

    def leave(self, queue: Hashable, item: int) -> None:
        """An item adds nothing any more."""
        with self._changed:
            places = self._places[queue]
            del places[item]
            if not places:
                del self._places[queue]
            self._changed.notify_all()

    def finish(self, item: int, result: Callable[[], None]) -> None:
        """An item is through; its result is taken up when those of all before it are."""
        with self._changed:
            self._results[item] = result
            while self._next_result in self._results:
                self._results.pop(self._next_result)()
                self._next_result += 1

    def give_up(self) -> None:
        """Let nobody wait any longer: a thread has failed."""
        with self._changed:
            self._stop.requested = True
            self._changed.notify_all()
