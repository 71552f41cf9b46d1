"""How long a call takes, on the GPU and on the host."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

Clock = Callable[[], float]

# Passes of the flush before each timed call. One pass over twice the L2 takes 40 us on an H100,
# about what the slowest host needs to enqueue a call; four keep the launch queued behind them, so
# that the events see the GPU's time alone.
_FLUSH_PASSES = 4
_FLUSH_SECONDS = 40e-6
# Calls between synchronizations while the host's time is taken: the launch queue never fills up.
_QUEUED_CALLS = 20
# Calls from a quiet start whose wall time is taken, and seconds for all of them.
_QUIET_CALLS = 20
_QUIET_SECONDS = 1.0
_COPIED_BYTES = 1 << 30


@dataclass(frozen=True)
class Timed:
    """A call to time, within a scope that is entered and left outside the timed span."""

    call: Callable[[], Any]
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated timings, in the unit they were taken in."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def relative(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0

    def scaled(self, factor: float) -> Spread:
        """The same with every timing multiplied."""
        return Spread(factor * self.median, factor * self.low, factor * self.high, self.repeats)


def spread(times: Sequence[float]) -> Spread:
    """Median and quartiles of at least one timing."""
    if len(times) == 1:
        return Spread(times[0], times[0], times[0], 1)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Spread(median, low, high, len(times))


class Timer(Protocol):
    """Times calls on one kind of processor.

    Attributes
    ----------
    pause
        Seconds that a repeat takes besides its call.
    """

    pause: float

    def once(self, timed: Timed) -> float:
        """Seconds of one call, from a quiet start to its end."""

    def interleaved(
        self, calls: Sequence[Timed], warmup: int, repeats: Sequence[int]
    ) -> list[list[float]]:
        """Milliseconds of each repeat of each call, taking turns."""


# Threads of a BLAS that had several spin for some 20 to 30 ms after a product before they sleep;
# until then they take the cores from whoever is timed next.
_SETTLE_SECONDS = 0.1


class HostTimer:
    """Times calls that return when they are done, each on cores that have come to rest."""

    pause = _SETTLE_SECONDS

    def __init__(
        self, clock: Clock = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep

    def once(self, timed: Timed) -> float:
        with timed.scope():
            self._sleep(self.pause)
            start = self._clock()
            timed.call()
            return self._clock() - start

    def interleaved(
        self, calls: Sequence[Timed], warmup: int, repeats: Sequence[int]
    ) -> list[list[float]]:
        for timed in calls:
            for _ in range(warmup):
                self.once(timed)
        return take_turns(lambda timed: 1e3 * self.once(timed), calls, repeats)


class GpuTimer:
    """Times calls that enqueue work on CuPy's current stream, by events, with the L2 flushed."""

    pause = _FLUSH_PASSES * _FLUSH_SECONDS

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._stream = cupy.cuda.get_current_stream()
        device = cupy.cuda.runtime.getDevice()
        l2_bytes = cupy.cuda.runtime.getDeviceProperties(device)["l2CacheSize"]
        self._flush_buffer = cupy.empty(max(2 * l2_bytes, 1 << 20), "uint8")

    def once(self, timed: Timed) -> float:
        with timed.scope():
            self._stream.synchronize()
            start = time.perf_counter()
            timed.call()
            self._stream.synchronize()
            return time.perf_counter() - start

    def interleaved(
        self, calls: Sequence[Timed], warmup: int, repeats: Sequence[int]
    ) -> list[list[float]]:
        for timed in calls:
            with timed.scope():
                for _ in range(warmup):
                    timed.call()
        events = take_turns(self._enqueue, calls, repeats)
        self._stream.synchronize()
        elapsed = self._cupy.cuda.get_elapsed_time
        return [[float(elapsed(start, end)) for start, end in pairs] for pairs in events]

    def _enqueue(self, timed: Timed) -> tuple[Any, Any]:
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        with timed.scope():
            for _ in range(_FLUSH_PASSES):
                self._flush_buffer.data.memset_async(0, self._flush_buffer.nbytes, self._stream)
            start.record(self._stream)
            timed.call()
            end.record(self._stream)
        return start, end


def take_turns(
    measure: Callable[[Timed], Any], calls: Sequence[Timed], repeats: Sequence[int]
) -> list[list[Any]]:
    """What `measure` gives for each repeat of each call, repeat by repeat.

    A call with fewer repeats than the others sits out the last rounds.
    """
    results: list[list[Any]] = [[] for _ in calls]
    for turn in range(max(repeats, default=0)):
        for timed, wanted, result in zip(calls, repeats, results, strict=True):
            if turn < wanted:
                result.append(measure(timed))
    return results


def call_milliseconds(timer: Timer, timed: Timed, one_call: float) -> Spread:
    """Wall time of a call from a quiet start to its end, in milliseconds.

    Parameters
    ----------
    timer
        Whose `once` times it.
    timed
        A call that was made before.
    one_call
        Seconds that it takes, about: long calls are repeated less often.
    """
    affordable = int(_QUIET_SECONDS / max(one_call, 1e-6))
    count = min(_QUIET_CALLS, max(1, affordable))
    return spread([1e3 * timer.once(timed) for _ in range(count)])


def host_microseconds(
    timed: Timed,
    synchronize: Callable[[], None],
    *,
    calls: int,
    clock: Clock = time.perf_counter,
) -> Spread:
    """Microseconds until a call returns to Python, whatever the GPU still has to do."""
    times = []
    with timed.scope():
        for index in range(calls):
            if index % _QUEUED_CALLS == 0:
                synchronize()
            start = clock()
            timed.call()
            times.append(1e6 * (clock() - start))
    synchronize()
    return spread(times)


def repeats_within(seconds: float, one_repeat: float, warmup: int, repeats: int) -> int:
    """How many repeats, at most those asked for, fit the seconds after the warm-up; 0 if under 3.

    A median of fewer than three says nothing.

    Parameters
    ----------
    seconds
        For warm-up and repeats together; may be infinite.
    one_repeat
        Seconds of a call and the pause before it.
    """
    if seconds >= (warmup + repeats) * one_repeat:
        return repeats
    fit = int(seconds / one_repeat) - warmup
    return min(fit, repeats) if fit >= 3 else 0


def replayed(timed: Timed) -> Timed | None:
    """The GPU's part of a call on CuPy arrays: its work, captured once, to be launched repeatedly.

    Parameters
    ----------
    timed
        A call that was made before, so that nothing is compiled any more.

    Returns
    -------
    Timed
        Launches the work on CuPy's current stream. None if the call cannot be captured.
    """
    import cupy

    # Memory of the graph's own: what a shared pool hands back to the system may be unmapped while
    # the graph still writes to it.
    pool = cupy.cuda.MemoryPool()
    # Not the default stream, which cannot be captured.
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    try:
        with stream, cupy.cuda.using_allocator(pool.malloc), timed.scope():
            # What the capture allocates is in the pool after this.
            timed.call()
            stream.synchronize()
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
            try:
                result = timed.call()
            finally:
                graph = stream.end_capture()
    except (RuntimeError, MemoryError):
        return None
    return Timed(functools.partial(_launch, graph, (stream, pool, result)))


def _launch(graph: Any, held: tuple[Any, ...]) -> None:
    # What is held lives as long as the graph, which uses it.
    graph.launch()


def copy_rate() -> float:
    """TB/s of a plain copy on the current device, bytes read and bytes written together.

    What reading a cache is measured by.
    """
    import cupy

    source, target = (cupy.zeros(_COPIED_BYTES, "uint8") for _ in range(2))
    copy = functools.partial(
        target.data.copy_from_device_async,
        source.data,
        _COPIED_BYTES,
        cupy.cuda.get_current_stream(),
    )
    (times,) = GpuTimer().interleaved([Timed(copy)], 3, [20])
    return 2 * _COPIED_BYTES / spread(times).median / 1e9
