"""Threads of the CPU backend: how many, work shared out to them, and BLAS held to one for each."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

T = TypeVar("T")

# After so long without work a thread ends.
IDLE_SECONDS = 5.0


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


class _Worker:
    """A thread that does a task when told to, and ends after a while without one."""

    def __init__(self, crew: _Crew) -> None:
        self._crew, self._told = crew, threading.Lock()
        self._told.acquire()
        # Not by threading.Thread, which waits until the new thread runs.
        _thread.start_new_thread(self._live, ())

    def begin(self, task: Callable[[], None]) -> threading.Lock:
        """Do a task, and then release the lock."""
        done = threading.Lock()
        done.acquire()
        self._task, self._done = task, done
        self._told.release()
        # By now the task may be done, and forgotten.
        return done

    def _live(self) -> None:
        while True:
            if not self._told.acquire(timeout=IDLE_SECONDS):
                if self._crew.leave(self):
                    return
                continue
            self._task()
            done = self._done
            # The task holds on to arrays.
            del self._task, self._done
            self._crew.rest(self)
            done.release()


class _Crew:
    """Threads that wait for work: one costs 220 us to start and to await, 50 if it is there.

    A process that is forked has none of them.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._resting: list[_Worker] = []

    def begin(self, task: Callable[[], None]) -> threading.Lock:
        """Have a thread do a task, and then release the lock."""
        with self._lock:
            worker = self._resting.pop() if self._resting else None
        return (worker or _Worker(self)).begin(task)

    def rest(self, worker: _Worker) -> None:
        """Wait for the next task."""
        with self._lock:
            self._resting.append(worker)

    def leave(self, worker: _Worker) -> bool:
        """Whether a worker waits for no task any more: not if it has just been given one."""
        with self._lock:
            if worker in self._resting:
                self._resting.remove(worker)
                return True
            return False


_crew = _Crew()


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

    def task() -> None:
        try:
            # A thread does not inherit the error state of the thread that started it.
            with np.errstate(all="ignore"):
                work(queue)
        except BaseException as error:
            stop.requested = True
            errors.append(error)

    at_work: list[threading.Lock] = []
    try:
        for _ in range(workers - 1):
            at_work.append(_crew.begin(task))
        work(queue)
    except BaseException:
        stop.requested = True
        raise
    finally:
        for done in at_work:
            done.acquire()
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
            # Counted before it is set, and lifted before it is counted off, for a fork meanwhile.
            self._users += 1
            if self._users == 1 and self._is_limit_needed:
                self._set([1] * len(self._before))

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            # A child forked within the pass has lifted the limit already.
            if self._users == 0:
                return
            if self._users == 1 and self._is_limit_needed:
                self._set(self._before)
            self._users -= 1

    @property
    def _is_limit_needed(self) -> bool:
        """Whether a library had more than one thread before."""
        return any(count != 1 for count in self._before)

    def _set(self, counts: list[int]) -> None:
        for library, count in zip(self._libraries or (), counts, strict=True):
            # Newer versions of threadpoolctl heed only one thread of a process, the first to set a
            # limit. Passes begin and end in any, and bar no other from limits of its own.
            let_any_thread = getattr(library, "clear_controlling_thread", lambda force: None)
            let_any_thread(force=True)
            library.set_num_threads(count)
            let_any_thread(force=True)

    def _lift_in_child(self) -> None:
        # The thread that held the lock, if one did, is not here.
        self._lock = threading.Lock()
        if self._users:
            self._users = 0
            self._set(self._before)


single_threaded_blas = _SingleThreadedBlas()
