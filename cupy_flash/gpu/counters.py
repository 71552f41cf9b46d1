"""Zeroed counters for the kernels of a stream, and the order of kernels that reuse its memory.

Kernels leave their counters zero. So one block of counters serves all launches of a stream, which
run one after another. A captured launch may later run concurrently with others, so it keeps its own
counters permanently. A capture may be unable to allocate, so these counters come from a reserve,
which calls outside of captures refill. Launches that write the same memory never run concurrently,
so a library that captures a graph again and again, and tells this memory, gets the same counters.

If a stream is destroyed while its kernels run, a new stream may get its handle. The unique ids that
CUDA gives to streams reveal this. Each launch is followed by an event, and the new stream waits for
the last one. The new stream then uses the same counters, and the memory that CuPy's pool keeps for
the handle. So there are never more blocks of counters than streams at one time.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any

from cupy_flash.errors import DriverError
from cupy_flash.gpu.driver import driver_function

# Numbers of 32-bit words: the smallest block of counters (4 KiB), the smallest reserve (1 MiB), and
# the largest number that is kept ready for captures (8 MiB).
_BLOCK_WORDS = 1 << 10
_RESERVE_WORDS = 1 << 18
_MOST_READY_WORDS = 1 << 21
# Number of captured calls that the reserve has counters for: more than a model has layers.
_READY_CALLS = 128
# Words of a cache line: the counters of captured calls are in different cache lines.
_LINE_WORDS = 32
_WORD = 4
# CUDA's handles of the two default streams: the legacy one, which cannot be captured or destroyed,
# and the per-thread one (driver API, "Stream synchronization behavior").
_LEGACY_STREAMS = (0, 1)
_PER_THREAD_STREAM = 2


@dataclass
class _Zeros:
    """Memory of zeroed words, and the number of words that are in use."""

    memory: Any
    words: int
    used: int = 0

    def take(self, words: int) -> int:
        address = int(self.memory.ptr) + self.used * _WORD
        self.used += words
        return address


class Shared:
    """Counters of launches that run one after another, or of a single captured launch.

    Attributes
    ----------
    address
        Address of zeroed words on the current device.
    """

    def __init__(self, address: int = 0) -> None:
        self.address = address

    def launched(self) -> None:
        """Record the launch; call this after the kernels that use the counters are enqueued."""


class _Queue(Shared):
    """Counters of a stream, which later streams with the same handle take over."""

    def __init__(self, stream: int) -> None:
        super().__init__()
        self.words = 0
        self._stream = stream
        self._stream_id = _StreamId(stream)
        self._id = self._stream_id()
        # CUDA treats an event that was never recorded as completed.
        self.event = _cuda().Event(disable_timing=True)

    def check_stream(self) -> None:
        """If the handle belongs to a new stream, make it wait for kernels of the previous one."""
        number = self._stream_id()
        if number != self._id:
            self.wait(self._stream)
            self._id = number

    def wait(self, stream: int) -> None:
        _cuda().runtime.streamWaitEvent(stream, self.event.ptr)

    def launched(self) -> None:
        _cuda().runtime.eventRecord(self.event.ptr, self._stream)


class _LegacyQueue(Shared):
    """Counters of the legacy default stream, which is never destroyed."""

    words = 0


# Counters of streams, by device and stream handle.
_queues: dict[tuple[int, int], Any] = {}
# Counters of the per-thread default streams of threads that ended, by device.
_ended: dict[int, list[_Queue]] = {}
_reserves: dict[int, _Zeros] = {}
# Addresses of the counters of captured launches, by device, number of words and `result` of
# `shared`.
_of_results: dict[tuple[int, int, int], int] = {}
# All memory that was ever allocated: kernels may still use a block that was replaced by a larger.
_kept: list[Any] = []
_lock = threading.Lock()
_thread = threading.local()


class _ThreadQueues(dict[int, _Queue]):
    """Counters of a thread's default stream, by device; the stream ends with the thread."""

    # `_ended` is a default argument because the module may be gone at the end of the process.
    def __del__(self, ended: dict[int, list[_Queue]] = _ended) -> None:
        for device, queue in self.items():
            ended.setdefault(device, []).append(queue)


def shared(count: int, device: int, stream: int, result: int | None = None) -> Shared:
    """Return counters for the next launch on a stream, at least `count` zeroed words.

    Call this before memory from CuPy's pool is used, which launches of a stream reuse as well.

    Parameters
    ----------
    count
        Number of 32-bit words that no other running kernel uses; may be 0.
    device, stream
        Index of the current device, and handle of the current stream.
    result
        Address of memory that the kernels write. Captured launches with the same `result` share
        their counters. None if the address does not identify launches that run one after another.

    Returns
    -------
    Shared
        Counters on the device, for the next kernels on the stream. The kernels must leave them
        zero, and `Shared.launched` must be called after their launch. If the stream is being
        captured, the counters belong to that launch for the life of the process.

    Raises
    ------
    CUDARuntimeError
        If memory runs out, or if a capture needs more than the reserve holds and its mode forbids
        allocations (CuPy's default mode, relaxed, allows them).
    """
    if stream in _LEGACY_STREAMS:
        queue = _queues.get((device, stream)) or _queues.setdefault(
            (device, stream), _LegacyQueue()
        )
    elif _cuda().runtime.streamIsCapturing(stream):
        return Shared(_captured(device, count, result) if count else 0)
    elif stream == _PER_THREAD_STREAM:
        queue = _queue_of_thread(device)
    else:
        queue = _queues.get((device, stream))
        if queue is None:
            queue = _queues.setdefault((device, stream), _Queue(stream))
        queue.check_stream()
    if count:
        if queue.words < count:
            _grow(queue, count)
        reserve = _reserves.get(device)
        if reserve is None or reserve.words - reserve.used < _ready(count):
            _refill(device, count)
    return queue


@functools.cache
def _cuda() -> Any:
    import cupy

    return cupy.cuda


class _StreamId:
    """Function that returns the unique id of the stream that has a handle now."""

    def __init__(self, stream: int) -> None:
        # The arguments are created once, because this takes as long as the call.
        self._number = ctypes.c_ulonglong()
        self._arguments = ctypes.c_void_p(stream), ctypes.byref(self._number)
        self._ask = driver_function("cuStreamGetId")

    def __call__(self) -> int:
        if status := self._ask(*self._arguments):
            raise DriverError(f"cuStreamGetId failed with CUresult {status}")
        return self._number.value


def _queue_of_thread(device: int) -> _Queue:
    try:
        queues = _thread.queues
    except AttributeError:
        queues = _thread.queues = _ThreadQueues()
    queue = queues.get(device)
    if queue is None:
        queue = queues[device] = _next_queue(device)
    return queue


def _next_queue(device: int) -> _Queue:
    """Return counters for a thread that is new to the device: those of an ended thread, or new."""
    ended = _ended.get(device, [])
    # Wait for all ended threads, because this thread may get pool memory that any of them used.
    for queue in list(ended):
        queue.wait(_PER_THREAD_STREAM)
    try:
        return ended.pop()
    except IndexError:
        return _Queue(_PER_THREAD_STREAM)


def _grow(queue: Any, count: int) -> None:
    with _lock:
        if queue.words < count:
            words = max(_BLOCK_WORDS, count, 2 * queue.words)
            queue.address = int(_zeros(words).memory.ptr)
            queue.words = words


def _ready(count: int) -> int:
    """Return the number of words to keep in reserve if a call needs `count` words."""
    return min(_READY_CALLS * _lines(count), _MOST_READY_WORDS)


def _refill(device: int, count: int) -> None:
    with _lock:
        reserve = _reserves.get(device)
        if reserve is None or reserve.words - reserve.used < _ready(count):
            # Twice as many, so that half of a reserve is used before the rest is abandoned.
            _reserves[device] = _zeros(max(_RESERVE_WORDS, 2 * _ready(count)))


def _captured(device: int, count: int, result: int | None) -> int:
    words = _lines(count)
    with _lock:
        known = None if result is None else _of_results.get((device, words, result))
        if known is not None:
            return known
        reserve = _reserves.get(device)
        if reserve is None or reserve.words - reserve.used < words:
            reserve = _reserves[device] = _zeros(max(_RESERVE_WORDS, words))
        address = reserve.take(words)
        if result is not None:
            _of_results[device, words, result] = address
        return address


def _lines(count: int) -> int:
    """Return `count` words rounded up to whole cache lines."""
    return -(-count // _LINE_WORDS) * _LINE_WORDS


def _zeros(words: int) -> _Zeros:
    """Return new zeroed words on the current device, ready for all streams.

    The memory is not from CuPy's pool, which may be short-lived. It is zeroed on a separate stream,
    because the current one may be capturing. This function waits for it, which is rarely needed.
    """
    cuda = _cuda()
    memory = cuda.memory.Memory(words * _WORD)
    stream = cuda.Stream(non_blocking=True)
    cuda.runtime.memsetAsync(memory.ptr, 0, words * _WORD, stream.ptr)
    stream.synchronize()
    _kept.append(memory)
    return _Zeros(memory, words)
