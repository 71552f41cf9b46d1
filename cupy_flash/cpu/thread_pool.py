"""Thread pool of the CPU backend, and the limit of BLAS to one thread per call."""

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

# Time without work after which a thread of the pool ends.
IDLE_SECONDS = 5.0


def cpus() -> int:
    """Return the number of CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Stop:
    """Flag that stops the workers of a call; they check it at least once per KV tile."""

    requested = False


class _Queue(Iterator[T]):
    """Thread-safe iterator over the work items of a call; ends early once a stop is requested."""

    def __init__(self, items: Iterator[T], stop: Stop) -> None:
        self._items, self._stop, self._lock = items, stop, threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            if self._stop.requested:
                raise StopIteration
            return next(self._items)


class _Worker:
    """Thread of the pool: runs one task at a time, and ends after `IDLE_SECONDS` without a task."""

    def __init__(self, pool: _ThreadPool) -> None:
        self._pool, self._wake = pool, threading.Lock()
        self._wake.acquire()
        # threading.Thread would wait until the new thread runs.
        _thread.start_new_thread(self._run_tasks, ())

    def begin(self, task: Callable[[], None]) -> threading.Lock:
        """Start a task; the thread releases the returned lock when the task is done."""
        done = threading.Lock()
        done.acquire()
        self._task, self._done = task, done
        self._wake.release()
        # Not self._done: the thread may have finished the task and deleted that attribute.
        return done

    def _run_tasks(self) -> None:
        while True:
            if not self._wake.acquire(timeout=IDLE_SECONDS):
                if self._pool.remove_idle(self):
                    return
                continue
            self._task()
            done = self._done
            # The task keeps arrays alive as long as it is referenced.
            del self._task, self._done
            self._pool.add_idle(self)
            done.release()


class _ThreadPool:
    """Thread pool. A task on a new thread costs 220 us, on a waiting thread of the pool 50 us.

    A forked child process begins with an empty pool.
    """

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def begin(self, task: Callable[[], None]) -> threading.Lock:
        """Start a task on a waiting or new thread; return a lock that it releases at its end."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        return (worker or _Worker(self)).begin(task)

    def add_idle(self, worker: _Worker) -> None:
        """Return a worker to the pool, where it waits for its next task."""
        with self._lock:
            self._idle.append(worker)

    def remove_idle(self, worker: _Worker) -> bool:
        """Remove a worker from the pool; return False if it has just been assigned a task."""
        with self._lock:
            if worker in self._idle:
                self._idle.remove(worker)
                return True
            return False


_pool = _ThreadPool()


def run_in_parallel(
    workers: int, items: Iterator[T], work: Callable[[Iterator[T]], None], stop: Stop
) -> None:
    """Call ``work`` in several threads with a common iterator that distributes the items.

    The calling thread is one of the workers, so that Ctrl-C interrupts it. On an interrupt or an
    error in any thread, the other threads are stopped, and then the error is raised.

    Parameters
    ----------
    workers : int
        Maximum number of threads; no more than the number of items are used.
    items : iterator
        Work items.
    work : callable
        Function of an iterator over work items, called once per thread.
    stop : Stop
        Flag that is set on an error; ``work`` should check it during long items.
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
            # A thread does not inherit NumPy's error state from the thread that started it.
            with np.errstate(all="ignore"):
                work(queue)
        except BaseException as error:
            stop.requested = True
            errors.append(error)

    running: list[threading.Lock] = []
    try:
        for _ in range(workers - 1):
            running.append(_pool.begin(task))
        work(queue)
    except BaseException:
        stop.requested = True
        raise
    finally:
        for done in running:
            done.acquire()
    if errors:
        raise errors[0]


class _SingleThreadedBlas:
    """Context manager that limits BLAS to one thread per call while any call of the backend runs.

    The workers run in parallel already. A multithreaded BLAS would make them queue for its single
    thread pool: 0.28 s with the limit, at least 0.86 s without (OpenBLAS, 4 busy cores). The limit
    applies to the whole process: it remains while calls overlap, and the last one restores the
    previous thread counts. In a forked child no call runs, so the child lifts its limit at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._libraries: list[Any] | None = None
        # Thread count of each BLAS library before the limit.
        self._before: list[int] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._lift_in_child)

    def __enter__(self) -> None:
        with self._lock:
            if self._libraries is None:
                libraries = ThreadpoolController().lib_controllers
                self._libraries = [x for x in libraries if x.user_api == "blas"]
            if self._users == 0:
                # Faster than ThreadpoolController.limit, which takes 8 us.
                self._before = [library.get_num_threads() for library in self._libraries]
            # The count is positive whenever the limit is set, as a fork may happen at any time.
            self._users += 1
            if self._users == 1 and self._is_limit_needed:
                self._set([1] * len(self._before))

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            # In a child that was forked during this call, the limit is lifted already.
            if self._users == 0:
                return
            if self._users == 1 and self._is_limit_needed:
                self._set(self._before)
            self._users -= 1

    @property
    def _is_limit_needed(self) -> bool:
        """Whether a BLAS library used more than one thread before the limit."""
        return any(count != 1 for count in self._before)

    def _set(self, counts: list[int]) -> None:
        for library, count in zip(self._libraries or (), counts, strict=True):
            # Newer versions of threadpoolctl accept limits only from the first thread that set one.
            # Calls begin and end in any thread, so this restriction is cleared before and after.
            clear_owner = getattr(library, "clear_controlling_thread", lambda force: None)
            clear_owner(force=True)
            library.set_num_threads(count)
            clear_owner(force=True)

    def _lift_in_child(self) -> None:
        # The old lock may be held by a thread that does not exist in the child.
        self._lock = threading.Lock()
        if self._users:
            self._users = 0
            self._set(self._before)


single_threaded_blas = _SingleThreadedBlas()
