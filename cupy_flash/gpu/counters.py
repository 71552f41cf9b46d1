"""What the launches of one stream share: zeroed words to count arrivals in, and its pool's memory.

Kernels leave their counters zero, so that one block serves all launches of a stream: they run one
after another. What is captured in a graph may run beside anything later on, and gets words of its
own for good; a capture may not be able to allocate, so these come from a reserve that calls outside
of captures keep filled.

A stream that is destroyed while its kernels run gives its handle to a new one. CUDA also numbers
streams, and no two alike, so that this shows; and each launch is followed by an event, which the
new stream then waits for. So it takes over the block, as it takes over what CuPy's pool keeps for
the handle, and there are no more blocks than there were streams at a time.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any

from cupy_flash.errors import DriverError
from cupy_flash.gpu.driver import driver_function

# Words of the smallest block, 4 KiB; of the smallest reserve, 1 MiB; and the most that is kept
# ready for captures, 8 MiB.
_BLOCK_WORDS = 1 << 10
_RESERVE_WORDS = 1 << 18
_MOST_READY_WORDS = 1 << 21
# Captured calls like the last one that are kept ready for: more than a model has layers.
_READY_CALLS = 128
# Captured calls do not share a cache line.
_LINE_WORDS = 32
_WORD = 4
# CUDA's handles of the two default streams: one that cannot be captured or destroyed, and one that
# is another stream in each thread (driver API, "Stream synchronization behavior").
_LEGACY_STREAMS = (0, 1)
_PER_THREAD_STREAM = 2


@dataclass
class _Zeros:
    """A block of zeros, and how much of it is handed out."""

    memory: Any
    words: int
    used: int = 0

    def take(self, words: int) -> int:
        address = int(self.memory.ptr) + self.used * _WORD
        self.used += words
        return address


class Shared:
    """What launches that run one after another share; also of a launch that shares nothing.

    Attributes
    ----------
    address
        Of zeroed words on the current device.
    """

    def __init__(self, address: int = 0) -> None:
        self.address = address

    def launched(self) -> None:
        """To be called when the kernels that use it are enqueued."""


class _Queue(Shared):
    """The launches of a stream, or of those that had its handle one after another."""

    def __init__(self, stream: int) -> None:
        super().__init__()
        self.words = 0
        self._stream = stream
        self._stream_id = _StreamId(stream)
        self._id = self._stream_id()
        # CUDA takes one that was never recorded for one that has happened.
        self.event = _cuda().Event(disable_timing=True)

    def check_stream(self) -> None:
        """Have a new stream of the same handle wait for what the last one may still run."""
        number = self._stream_id()
        if number != self._id:
            self.wait(self._stream)
            self._id = number

    def wait(self, stream: int) -> None:
        _cuda().runtime.streamWaitEvent(stream, self.event.ptr)

    def launched(self) -> None:
        _cuda().runtime.eventRecord(self.event.ptr, self._stream)


class _LegacyQueue(Shared):
    """The launches of the legacy default stream, which is never destroyed."""

    words = 0


# By device and handle.
_queues: dict[tuple[int, int], Any] = {}
# By device, of threads that ended.
_ended: dict[int, list[_Queue]] = {}
_reserves: dict[int, _Zeros] = {}
# A block that was outgrown stays, as kernels may still count in it.
_kept: list[Any] = []
_lock = threading.Lock()
_thread = threading.local()


class _ThreadQueues(dict[int, _Queue]):
    """By device, those of a thread's default stream, which ends with the thread."""

    # A default, since at the end of the process the module may be gone.
    def __del__(self, ended: dict[int, list[_Queue]] = _ended) -> None:
        for device, queue in self.items():
            ended.setdefault(device, []).append(queue)


def shared(count: int) -> Shared:
    """What a launch on the current stream shares with those before it, with `count` zeros in it.

    To be called before memory of CuPy's pool is used, which launches of a stream share as well.

    Parameters
    ----------
    count
        32-bit words needed, that no other running kernel counts in; may be 0.

    Returns
    -------
    Shared
        On the current device, for the kernels that are launched next on the current stream. They
        leave the words zero, and `Shared.launched` is to be called behind them. Where the stream is
        being captured, the words belong to that launch for the life of the process.

    Raises
    ------
    CUDARuntimeError
        If memory runs out; or if a capture needs more than the reserve holds and is of a mode that
        forbids to allocate (CuPy's default mode, relaxed, does not).
    """
    cuda = _cuda()
    device = cuda.runtime.getDevice()
    stream = cuda.get_current_stream().ptr
    if stream in _LEGACY_STREAMS:
        queue = _queues.get((device, stream)) or _queues.setdefault(
            (device, stream), _LegacyQueue()
        )
    elif cuda.runtime.streamIsCapturing(stream):
        return Shared(_captured(device, count) if count else 0)
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
    """Asks for the number of the stream that has a handle now, and that no other one ever has."""

    def __init__(self, stream: int) -> None:
        # Made once, as that takes as long as the question does.
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
    """Of a thread that is new to the device: one that ended has left, or a new one."""
    ended = _ended.get(device, [])
    # All of them, as CuPy's pool does not say whose memory this thread is given.
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
    """Words that are kept ready where calls need `count`."""
    return min(_READY_CALLS * _lines(count), _MOST_READY_WORDS)


def _refill(device: int, count: int) -> None:
    with _lock:
        reserve = _reserves.get(device)
        if reserve is None or reserve.words - reserve.used < _ready(count):
            # Twice, so that half of a reserve is used before the rest of it is given up.
            _reserves[device] = _zeros(max(_RESERVE_WORDS, 2 * _ready(count)))


def _captured(device: int, count: int) -> int:
    words = _lines(count)
    with _lock:
        reserve = _reserves.get(device)
        if reserve is None or reserve.words - reserve.used < words:
            reserve = _reserves[device] = _zeros(max(_RESERVE_WORDS, words))
        return reserve.take(words)


def _lines(count: int) -> int:
    """Words of the whole cache lines that hold `count`."""
    return -(-count // _LINE_WORDS) * _LINE_WORDS


def _zeros(words: int) -> _Zeros:
    """New zeros on the current device, ready for every stream when this returns.

    Not from CuPy's pool, which may be the caller's own and short-lived. Zeroed on a stream of its
    own: the current one may be capturing. That is waited for; it happens a few times in a process.
    """
    cuda = _cuda()
    memory = cuda.memory.Memory(words * _WORD)
    stream = cuda.Stream(non_blocking=True)
    cuda.runtime.memsetAsync(memory.ptr, 0, words * _WORD, stream.ptr)
    stream.synchronize()
    _kept.append(memory)
    return _Zeros(memory, words)
