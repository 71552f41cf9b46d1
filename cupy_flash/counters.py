"""Zeroed words of device memory that kernels count arrivals in.

Kernels leave their counters zero, so that one block serves all launches of a stream: they run one
after another. What is captured in a graph may run beside anything later on, and gets words of its
own for good; a capture may not be able to allocate, so these come from a reserve that calls outside
of captures keep filled.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

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
# CUDA's handles of the two default streams: one that cannot be captured, and one that is another
# stream in each thread (driver API, "Stream synchronization behavior").
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


# By device and stream. A block that was outgrown stays, as kernels may still count in it.
_blocks: dict[tuple[Any, ...], _Zeros] = {}
_reserves: dict[int, _Zeros] = {}
_kept: list[Any] = []
_lock = threading.Lock()
_thread = threading.local()


def zeroed(count: int) -> int:
    """Address of `count` 32-bit zeros that no other running kernel counts in.

    Parameters
    ----------
    count
        Words needed, at least 1.

    Returns
    -------
    address
        On the current device, for the kernel that is launched next on the current stream. It
        leaves them zero. Where the stream is being captured, the words belong to that launch for
        the life of the process.

    Raises
    ------
    CUDARuntimeError
        If memory runs out; or if a capture needs more than the reserve holds and is of a mode that
        forbids to allocate (CuPy's default mode, relaxed, does not).
    """
    cuda = _cuda()
    device = cuda.runtime.getDevice()
    stream = cuda.get_current_stream().ptr
    if stream not in _LEGACY_STREAMS and cuda.runtime.streamIsCapturing(stream):
        return _captured(device, count)
    key: tuple[Any, ...] = (device, stream)
    if stream == _PER_THREAD_STREAM:
        key = (device, stream, _this_thread())
    block = _blocks.get(key)
    if block is None or block.words < count:
        block = _grow(key, count)
    reserve = _reserves.get(device)
    if reserve is None or reserve.words - reserve.used < _ready(count):
        _refill(device, count)
    return int(block.memory.ptr)


@functools.cache
def _cuda() -> Any:
    import cupy

    return cupy.cuda


def _this_thread() -> object:
    """A key of the thread that no later one has, as a thread's number may be given again."""
    try:
        return _thread.token
    except AttributeError:
        _thread.token = object()
        return _thread.token


def _grow(key: tuple[Any, ...], count: int) -> _Zeros:
    with _lock:
        block = _blocks.get(key)
        if block is None or block.words < count:
            words = max(_BLOCK_WORDS, count, 2 * block.words if block else 0)
            block = _blocks[key] = _zeros(words)
    return block


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
