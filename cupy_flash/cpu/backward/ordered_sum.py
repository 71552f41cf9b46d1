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

# Interval in seconds at which a waiting thread checks whether a stop is requested: the request
# itself does not wake the thread.
POLL_SECONDS = 0.1


class Ticket(NamedTuple):
    """Number of a work item in the order of all items, and the queue that it belongs to."""

    number: int
    queue: Hashable


class OrderedSum:
    """Order in which the work items of a call add their contributions."""

    def __init__(self, stop: Stop) -> None:
        self._stop, self._changed = stop, threading.Condition()
        # For each queue, and the number of each unfinished item: the end of the keys that it has
        # passed.
        self._passed: dict[Hashable, dict[int, int]] = {}
        # Final additions of finished items that still wait for an earlier item to finish.
        self._final_adds: dict[int, Callable[[], None]] = {}
        self._next_final_add = 0

    def enter(self, ticket: Ticket) -> None:
        """Register an item; must be called in the order of items."""
        with self._changed:
            self._passed.setdefault(ticket.queue, {})[ticket.number] = 0

    def wait(self, ticket: Ticket, key: int) -> bool:
        """Wait until an item may add to keys before `key`; return False if a stop is requested."""
        with self._changed:
            passed = self._passed[ticket.queue]
            while any(end < key for number, end in passed.items() if number < ticket.number):
                if self._stop.requested:
                    return False
                self._changed.wait(POLL_SECONDS)
        return True

    def release(self, ticket: Ticket, key: int) -> None:
        """Record that an item has nothing more to add to keys before `key`."""
        with self._changed:
            self._passed[ticket.queue][ticket.number] = key
            self._changed.notify_all()

    def finish(self, ticket: Ticket, add_final: Callable[[], None]) -> None:
        """Finish an item. `add_final` is called after the `add_final` of all earlier items."""
        with self._changed:
            passed = self._passed[ticket.queue]
            del passed[ticket.number]
            if not passed:
                del self._passed[ticket.queue]
            self._changed.notify_all()
            self._final_adds[ticket.number] = add_final
            while self._next_final_add in self._final_adds:
                self._final_adds.pop(self._next_final_add)()
                self._next_final_add += 1
