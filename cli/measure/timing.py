"""Timing of calls on the GPU and on the host."""

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

# Passes over the flush buffer before each timed call. One pass over twice the L2 takes 40 us on an
# H100, about as long as the slowest host takes to enqueue a call. With four, the call is enqueued
# before they end, so that the events measure GPU time only.
_FLUSH_PASSES = 4
_FLUSH_SECONDS = 40e-6
# Number of calls between two synchronizations while host time is measured; with more, the launch
# queue might fill up.
_QUEUED_CALLS = 20
# Number of calls whose wall time from an idle GPU to their end is measured, and the time limit for
# all of them.
_QUIET_CALLS = 20
_QUIET_SECONDS = 1.0
# Size of the array whose copy gives the rate of copies.
_COPIED_BYTES = 1 << 30


@dataclass(frozen=True)
class Timed:
    """A call to time, and a scope that is entered before and left after the timed span."""

    call: Callable[[], Any]
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated timings, in the unit of the timings."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def relative(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0

    def scaled(self, factor: float) -> Spread:
        """Return the spread with every timing multiplied by a factor."""
        return Spread(factor * self.median, factor * self.low, factor * self.high, self.repeats)


def spread(times: Sequence[float]) -> Spread:
    """Return median and quartiles of at least one timing."""
    if len(times) == 1:
        return Spread(times[0], times[0], times[0], 1)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Spread(median, low, high, len(times))


class Timer(Protocol):
    """Timer of calls on one kind of processor.

    Attributes
    ----------
    pause
        Seconds that a repeat takes in addition to its call.
    """

    pause: float

    def once(self, timed: Timed) -> float:
        """Return the seconds of one call, which begins while the processor that runs it is idle."""

    def interleaved(
        self, calls: Sequence[Timed], warmup: int, repeats: Sequence[int]
    ) -> list[list[float]]:
        """Return the milliseconds of each repeat of each call; the calls alternate."""


# The threads of a BLAS spin for some 20 to 30 ms after a product before they sleep. Until then
# they would take cores from the next timed call.
_SETTLE_SECONDS = 0.1


class HostTimer:
    """Timer of calls that return when they are done; it waits for idle BLAS threads before each."""

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
        return alternate(lambda timed: 1e3 * self.once(timed), calls, repeats)


class GpuTimer:
    """Timer, by events, of calls that enqueue work on CuPy's current stream; flushes the L2.

    Parameters
    ----------
    passes
        Number of passes over the flush buffer before each call. While they run, the host enqueues
        the call.
    """

    def __init__(self, passes: int = _FLUSH_PASSES) -> None:
        import cupy

        self._cupy = cupy
        self._passes = passes
        self.pause = passes * _FLUSH_SECONDS
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
        events = alternate(self._enqueue, calls, repeats)
        self._stream.synchronize()
        elapsed = self._cupy.cuda.get_elapsed_time
        return [[float(elapsed(start, end)) for start, end in pairs] for pairs in events]

    def _enqueue(self, timed: Timed) -> tuple[Any, Any]:
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        with timed.scope():
            for _ in range(self._passes):
                self._flush_buffer.data.memset_async(0, self._flush_buffer.nbytes, self._stream)
            start.record(self._stream)
            timed.call()
            end.record(self._stream)
        return start, end


def alternate(
    measure: Callable[[Timed], Any], calls: Sequence[Timed], repeats: Sequence[int]
) -> list[list[Any]]:
    """Return the values of `measure` for each repeat of each call; the calls alternate.

    A call with fewer repeats than the others is not measured in the last rounds.
    """
    results: list[list[Any]] = [[] for _ in calls]
    for repeat in range(max(repeats, default=0)):
        for timed, wanted, result in zip(calls, repeats, results, strict=True):
            if repeat < wanted:
                result.append(measure(timed))
    return results


def call_milliseconds(timer: Timer, timed: Timed, one_call: float) -> Spread:
    """Measure the wall time of a call from an idle processor to its end, in milliseconds.

    The call was made before. `one_call` is its approximate duration in seconds; long calls are
    repeated less often.
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
    """Measure the microseconds until a call returns to Python; the GPU may still be busy then."""
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
    """Return how many repeats fit into the time limit after the warm-up; 0 if fewer than 3.

    A median of fewer than three timings has no meaning.

    Parameters
    ----------
    seconds
        Time limit for warm-up and repeats together; may be infinite.
    one_repeat
        Seconds of a call and the pause before it.
    """
    if seconds >= (warmup + repeats) * one_repeat:
        return repeats
    fit = int(seconds / one_repeat) - warmup
    return min(fit, repeats) if fit >= 3 else 0


def replayed(timed: Timed) -> Timed | None:
    """Capture the GPU work of a call on CuPy arrays in a CUDA graph, to launch it repeatedly.

    The call must have been made before, so that it compiles nothing. Return a call that launches
    the graph on CuPy's current stream, or None if the call cannot be captured.
    """
    import cupy

    # The graph gets its own pool: a shared one may return memory to the system, which unmaps it
    # while the graph still uses it.
    pool = cupy.cuda.MemoryPool()
    # A new stream, because the default stream cannot be captured.
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    try:
        with stream, cupy.cuda.using_allocator(pool.malloc), timed.scope():
            # This call fills the pool, so that the capture finds its memory there.
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
    # `held` keeps the stream, the pool and the result alive as long as the graph.
    graph.launch()


def copy_rate() -> float:
    """Measure the rate of a plain copy on the current device in TB/s: bytes read plus written.

    The rate of reading a cache is compared with it.
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
