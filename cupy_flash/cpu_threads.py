"""Threads of the CPU backend: how many, work shared out to them, and BLAS held to one for each."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, TypeVar

from threadpoolctl import ThreadpoolController

T = TypeVar("T")


def cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Stop:
    """Tells workers to leave off, between two tiles of keys at the latest."""

    requested = False


class _Queue(Iterator[T]):
    """An iterator that threads share."""

    def __init__(self, items: Iterator[T], stop: Stop) -> None:
        self._items, self._stop, self._lock = items, stop, threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            if self._stop.requested:
                raise StopIteration
            return next(self._items)


def share_out(
    workers: int, items: Iterator[T], work: Callable[[Iterator[T]], None], stop: Stop
) -> None:
    """Have threads call ``work`` with an iterator, between them, over all items.

    The calling thread is one of them, so that Ctrl-C interrupts it: then, or when any of them
    fails, all others are stopped, and the error is raised when they have.

    Parameters
    ----------
    workers : int
        At most so many threads, and not more than there are items.
    items : iterator
    work : callable
    stop : Stop
        What ``work`` looks at where one item takes long.
    """
    if workers > 1:
        first = list(islice(items, workers))
        workers, items = len(first), chain(first, items)
    if workers <= 1:
        work(items)
        return
    queue = _Queue(items, stop)
    errors: list[BaseException] = []

    def worker(at_work: threading.Lock) -> None:
        try:
            work(queue)
        except BaseException as error:
            stop.requested = True
            errors.append(error)
        finally:
            at_work.release()

    started: list[threading.Lock] = []
    try:
        for _ in range(workers - 1):
            at_work = threading.Lock()
            at_work.acquire()
            # Not by threading.Thread, which waits until the new thread runs: 220 us, this 90.
            _thread.start_new_thread(worker, (at_work,))
            started.append(at_work)
        work(queue)
    except BaseException:
        stop.requested = True
        raise
    finally:
        for at_work in started:
            at_work.acquire()
    if errors:
        raise errors[0]


class _SingleThreadedBlas:
    """Holds BLAS to one thread per call while any forward pass runs.

    The workers are the parallelism; a BLAS that fans out from each of them makes them queue for its
    one pool of threads. Measured with OpenBLAS on 4 busy cores: 0.28 s with the limit, 0.86 s to
    tens of seconds without. The limit is the process's, so overlapping passes share one and the
    last to leave restores what was there. A process that is forked meanwhile has none of the
    passes, and its own copy of the limit: there it is lifted at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._libraries: list[Any] | None = None
        # Threads of each library before.
        self._before: list[int] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._lift_in_child)

    def __enter__(self) -> None:
        with self._lock:
            if self._libraries is None:
                libraries = ThreadpoolController().lib_controllers
                self._libraries = [x for x in libraries if x.user_api == "blas"]
            if self._users == 0:
                # Not by ThreadpoolController.limit, which takes 8 us.
                self._before = [library.get_num_threads() for library in self._libraries]
                self._set([1] * len(self._before))
            self._users += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            # A child forked within the pass has lifted the limit already.
            if self._users == 0:
                return
            self._users -= 1
            if self._users == 0:
                self._set(self._before)

    def _set(self, counts: list[int]) -> None:
        for library, count in zip(self._libraries or (), counts, strict=True):
            library.set_num_threads(count)

    def _lift_in_child(self) -> None:
        # The thread that held the lock, if one did, is not here.
        self._lock = threading.Lock()
        if self._users:
            self._users = 0
            self._set(self._before)


single_threaded_blas = _SingleThreadedBlas()
