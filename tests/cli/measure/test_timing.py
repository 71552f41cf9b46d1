"""Timing of calls, with fake clocks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_flash.cli.measure import timing


class FakeClock:
    """Fake clock that advances only while a fake call runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def call(self, seconds: float) -> timing.Timed:
        def work() -> None:
            self.now += seconds

        return timing.Timed(work)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_the_spread_is_the_median_and_the_quartiles() -> None:
    result = timing.spread([5.0, 1.0, 2.0, 4.0, 3.0])

    assert (result.low, result.median, result.high, result.repeats) == (2.0, 3.0, 4.0, 5)
    assert result.relative == pytest.approx(1 / 3)


def test_a_single_timing_has_no_spread() -> None:
    assert timing.spread([7.0]).relative == 0.0


def test_host_times_are_milliseconds_without_the_warm_up(clock: FakeClock) -> None:
    times = timing.HostTimer(clock).interleaved([clock.call(0.25), clock.call(0.5)], 3, [2, 2])

    assert times == [[250.0, 250.0], [500.0, 500.0]]
    assert clock.now == 5 * 0.25 + 5 * 0.5


def test_providers_take_turns_and_one_with_fewer_repeats_sits_out_the_last_rounds() -> None:
    order: list[str] = []
    first, second = timing.Timed(lambda: None), timing.Timed(lambda: 1)
    names = {first: "first", second: "second"}

    def measure(timed: timing.Timed) -> str:
        order.append(names[timed])
        return names[timed]

    results = timing.alternate(measure, [first, second], [3, 1])

    assert order == ["first", "second", "first", "first"]
    assert [len(result) for result in results] == [3, 1]


def test_entering_a_scope_is_not_timed(clock: FakeClock) -> None:
    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        clock.now += 100
        yield
        clock.now += 100

    assert timing.HostTimer(clock).once(timing.Timed(clock.call(0.5).call, scope)) == 0.5


def test_the_host_time_of_a_call_leaves_the_wait_for_the_gpu_out(clock: FakeClock) -> None:
    def synchronize() -> None:
        clock.now += 10

    result = timing.host_microseconds(clock.call(2e-6), synchronize, calls=40, clock=clock)

    assert result.median == pytest.approx(2.0, rel=1e-3)
    assert result.repeats == 40


@pytest.mark.parametrize(
    ("one_repeat", "expected"), [(0.0, 20), (0.1, 20), (1.0, 17), (3.0, 3), (4.0, 0), (100.0, 0)]
)
def test_repeats_are_cut_to_the_seconds_of_a_cell_and_refused_below_three(
    one_repeat: float, expected: int
) -> None:
    assert timing.repeats_within(20.0, one_repeat, 3, 20) == expected


@pytest.mark.parametrize("one_repeat", [0.0, 0.1, 1e9])
def test_without_a_limit_all_repeats_are_made(one_repeat: float) -> None:
    assert timing.repeats_within(float("inf"), one_repeat, 3, 20) == 20


def test_the_rest_before_each_call_on_the_host_is_what_a_repeat_costs_besides_it(
    clock: FakeClock,
) -> None:
    def sleep(seconds: float) -> None:
        clock.now += seconds

    timer = timing.HostTimer(clock, sleep)
    timer.pause = 0.1
    one_call = timer.once(clock.call(0.25))
    before = clock.now
    timer.interleaved([clock.call(0.25)], 1, [4])

    assert one_call == pytest.approx(0.25)
    assert clock.now - before == pytest.approx(5 * (one_call + timer.pause))


class FakeGpu:
    """Fake of the part of CuPy that a timer uses; `stream` records the operations in order."""

    def __init__(self) -> None:
        self.stream: list[str] = []
        self.synchronizations = 0
        gpu = self

        class Event:
            def record(self, stream: object) -> None:
                gpu.stream.append("event")

        # Only copies of this array are recorded; `empty` makes the buffer that flushes L2.
        copied = SimpleNamespace(
            copy_from_device_async=lambda source, size, stream: self.stream.append("copy")
        )
        self.zeros = lambda size, dtype: SimpleNamespace(data=copied)
        self.cuda = SimpleNamespace(
            Event=Event,
            get_current_stream=lambda: self,
            get_elapsed_time=lambda start, end: 1.5,
            runtime=SimpleNamespace(
                getDevice=lambda: 0, getDeviceProperties=lambda _: {"l2CacheSize": 50 << 20}
            ),
        )

    def synchronize(self) -> None:
        self.synchronizations += 1

    def empty(self, size: int, dtype: str) -> Any:
        def memset_async(value: int, count: int, stream: object) -> None:
            assert (count, stream) == (size, self)
            self.stream.append(f"flush {count >> 20} MiB")

        return SimpleNamespace(nbytes=size, data=SimpleNamespace(memset_async=memset_async))

    def call(self, name: str) -> timing.Timed:
        return timing.Timed(lambda: self.stream.append(name))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Fake GPU on which timers find CuPy."""
    fake = FakeGpu()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def test_on_a_gpu_the_l2_is_flushed_before_the_events_around_each_call(gpu: FakeGpu) -> None:
    times = timing.GpuTimer().interleaved([gpu.call("ours"), gpu.call("theirs")], 1, [2, 2])
    timed = [entry for entry in gpu.stream if not entry.startswith("flush")]

    assert times == [[1.5, 1.5], [1.5, 1.5]]
    repeat = ["event", "ours", "event", "event", "theirs", "event"]
    assert timed == ["ours", "theirs", *(repeat * 2)]
    assert gpu.stream[2].startswith("flush 100 MiB")
    assert all(
        gpu.stream[index - 1].startswith("flush")
        for index, entry in enumerate(gpu.stream[:-1])
        if entry == "event" and gpu.stream[index + 1] in ("ours", "theirs")
    )


def test_repeats_on_a_gpu_are_enqueued_without_waiting_in_between(gpu: FakeGpu) -> None:
    timing.GpuTimer().interleaved([gpu.call("ours")], 3, [20])

    assert gpu.synchronizations == 1


def test_one_call_on_a_gpu_lasts_from_an_idle_gpu_to_its_end(
    gpu: FakeGpu, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"theirs": 100.0, "ours": 0.25}

    def synchronize() -> None:
        clock.now += sum(map(seconds.get, gpu.stream))
        gpu.stream.clear()

    monkeypatch.setattr(gpu, "synchronize", synchronize)
    monkeypatch.setattr("cupy_flash.cli.measure.timing.time.perf_counter", clock)
    gpu.call("theirs").call()

    assert timing.GpuTimer().once(gpu.call("ours")) == seconds["ours"]


def test_a_copy_counts_bytes_read_and_bytes_written(gpu: FakeGpu) -> None:
    assert timing.copy_rate() == pytest.approx(2 * 2**30 / 1.5e-3 / 1e12)
    assert gpu.stream.count("copy") == 23


class FakeCapture:
    """Fake of the part of CuPy that captures a graph; also serves as device, stream and graph."""

    streamCaptureModeRelaxed = 2

    def __init__(self) -> None:
        self.capturing = False
        self.launched = 0
        self.cuda = SimpleNamespace(
            MemoryPool=lambda: SimpleNamespace(malloc=None),
            Stream=lambda **_: self,
            Device=lambda: self,
            using_allocator=contextlib.nullcontext,
            runtime=self,
        )

    def __enter__(self) -> FakeCapture:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        assert not self.capturing

    def begin_capture(self, mode: int) -> None:
        self.capturing = True

    def end_capture(self) -> FakeCapture:
        self.capturing = False
        return self

    def launch(self) -> None:
        self.launched += 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_is_captured_once_it_was_made_on_the_stream_and_what_cannot_be_is_none(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeCapture()
    monkeypatch.setitem(sys.modules, "cupy", gpu)
    made: list[bool] = []

    def call() -> None:
        made.append(gpu.capturing)
        if fails and gpu.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    graph = timing.replayed(timing.Timed(call))

    assert made == [False, True]
    assert not gpu.capturing
    assert (graph is None) is fails
    if graph is not None:
        graph.call()
        graph.call()
        assert (gpu.launched, len(made)) == (2, 2)
