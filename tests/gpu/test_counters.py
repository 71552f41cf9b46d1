"""Counters: zeroed words of one kernel at a time; a captured call has its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_flash.gpu import counters

LEGACY, PER_THREAD, OWN, OTHER = 0, 2, 0xA0, 0xB0


class FakeCuda:
    """Fake of CUDA's devices, streams, events and memory; it records which memory is zeroed.

    Attributes
    ----------
    ids
        Ids of the streams that own the handles at present; a thread's default stream has an id of
        its own.
    ordered
        Recorded events and waits: the kind, the event and the stream, in order.
    """

    def __init__(self) -> None:
        self.device, self.stream = 0, OWN
        self.ids = {OWN: 10, OTHER: 11}
        self.capturing: set[int] = set()
        self.asked: list[int] = []
        self.allocated: dict[int, int] = {}
        self.zeroed: dict[int, int] = {}
        self.waited: list[int] = []
        self.ordered: list[tuple[str, int, int]] = []
        self.events = 0
        self.runtime = SimpleNamespace(
            getDevice=lambda: self.device,
            streamIsCapturing=self._is_capturing,
            memsetAsync=self._memset,
            eventRecord=lambda event, stream: self.ordered.append(("record", event, stream)),
            streamWaitEvent=lambda stream, event: self.ordered.append(("wait", event, stream)),
        )
        self.memory = SimpleNamespace(Memory=self._allocate)

    def Event(self, *, disable_timing: bool) -> SimpleNamespace:
        assert disable_timing
        self.events += 1
        return SimpleNamespace(ptr=self.events)

    def cuStreamGetId(self, stream: Any, number: Any) -> int:
        number._obj.value = self.ids[stream.value]
        return 0

    def new_stream(self) -> None:
        """Destroy the current stream, and give its handle to a new stream."""
        self.ids[self.stream] = max(self.ids.values()) + 1

    def Stream(self, *, non_blocking: bool) -> SimpleNamespace:
        assert non_blocking, "would wait for the default stream, which may be capturing"
        return SimpleNamespace(ptr=0xEE, synchronize=lambda: self.waited.append(0xEE))

    def _is_capturing(self, stream: int) -> bool:
        self.asked.append(stream)
        return stream in self.capturing

    def _allocate(self, size: int) -> SimpleNamespace:
        address = 1 << 40 | len(self.allocated) << 32
        self.allocated[address] = size
        return SimpleNamespace(ptr=address)

    def _memset(self, address: int, value: int, size: int, stream: int) -> None:
        assert value == 0
        assert stream not in self.capturing | {self.stream}
        self.zeroed[address] = size

    def holds_zeros(self, address: int, count: int) -> bool:
        """Return whether these words lie in one allocation that was zeroed."""
        start = address >> 32 << 32
        end = start + self.zeroed.get(start, 0)
        return address % 4 == 0 and address + 4 * count <= end <= start + self.allocated[start]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setattr(counters, "_cuda", lambda: fake)
    monkeypatch.setattr(counters, "driver_function", lambda name: getattr(fake, name))
    monkeypatch.setattr(counters, "_thread", threading.local())
    for name, empty in (("_queues", {}), ("_reserves", {}), ("_of_results", {}), ("_kept", [])):
        monkeypatch.setattr(counters, name, empty)
    counters._ended.clear()
    yield fake
    counters._ended.clear()
    assert len(fake.waited) == len(fake.allocated), "zeros must be there before they are used"


def zeroed(count: int) -> int:
    """Return the address of the words for a launch that is enqueued at once."""
    cuda: Any = counters._cuda()
    queue = counters.shared(count, cuda.device, cuda.stream)
    queue.launched()
    return queue.address


def in_a_new_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a call in a thread that ends after the call."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def ranges_overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return first[0] < second[0] + 4 * second[1] and second[0] < first[0] + 4 * first[1]


@pytest.mark.parametrize("count", [1, 113, 1024, 5000])
def test_the_words_are_zeros(cuda, count):
    assert cuda.holds_zeros(zeroed(count), count)


def test_launches_on_one_stream_share_a_block_and_allocate_once(cuda):
    first = zeroed(40)
    allocated = len(cuda.allocated)
    assert {zeroed(count) for count in (40, 1, 7, 40)} == {first}
    assert len(cuda.allocated) == allocated


@pytest.mark.parametrize("change", [{"stream": OTHER}, {"device": 1}, {"stream": LEGACY}])
def test_another_stream_or_device_has_a_block_of_its_own(cuda, change):
    first = zeroed(40)
    for name, value in change.items():
        setattr(cuda, name, value)
    second = zeroed(40)
    assert not ranges_overlap((first, 40), (second, 40))


def test_the_default_streams_of_threads_at_a_time_have_blocks_of_their_own(cuda):
    cuda.stream, cuda.ids[PER_THREAD] = PER_THREAD, 20
    found = [zeroed(40)]
    hold, ready = threading.Event(), threading.Barrier(4)

    def call() -> None:
        found.append(zeroed(40))
        ready.wait(60)
        hold.wait(60)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    ready.wait(60)
    hold.set()
    for thread in threads:
        thread.join()
    assert zeroed(40) == found[0]
    assert len(set(found)) == 4


def test_a_thread_takes_over_the_block_of_one_that_ended_when_its_kernels_are_done(cuda):
    cuda.stream, cuda.ids[PER_THREAD] = PER_THREAD, 20
    mine = zeroed(40)
    first = in_a_new_thread(lambda: zeroed(40))
    ((_, event, _),) = cuda.ordered[-1:]
    for _ in range(200):
        cuda.ordered.clear()
        assert in_a_new_thread(lambda: zeroed(40)) == first
        assert cuda.ordered == [("wait", event, PER_THREAD), ("record", event, PER_THREAD)]
    assert mine != first
    assert len(cuda.allocated) == 3


def test_a_new_stream_with_the_handle_of_one_that_was_destroyed_waits_for_its_kernels(cuda):
    first = zeroed(40)
    zeroed(40)
    assert cuda.ordered == [("record", 1, OWN)] * 2
    allocated = len(cuda.allocated)
    for _ in range(300):
        cuda.new_stream()
        cuda.ordered.clear()
        assert [zeroed(40), zeroed(40)] == [first, first]
        assert cuda.ordered == [("wait", 1, OWN), ("record", 1, OWN), ("record", 1, OWN)]
    assert len(cuda.allocated) == allocated
    assert cuda.events == 1


def test_a_launch_that_counts_nothing_waits_for_a_stream_that_had_its_handle_too(cuda):
    """CuPy's pool may give the launch the workspace of the last launch with this handle."""
    zeroed(0)
    cuda.new_stream()
    zeroed(0)
    assert cuda.ordered == [("record", 1, OWN), ("wait", 1, OWN), ("record", 1, OWN)]
    assert cuda.allocated == {}


@pytest.mark.parametrize("stream", [0, 1])
def test_the_legacy_stream_is_never_destroyed_and_needs_no_event(cuda, stream):
    cuda.stream = stream
    zeroed(40)
    assert cuda.ordered == []


def test_a_captured_launch_is_not_followed_by_an_event(cuda):
    zeroed(40)
    cuda.ordered.clear()
    cuda.capturing.add(OWN)
    zeroed(40)
    zeroed(0)
    assert cuda.ordered == []


def test_a_block_that_is_outgrown_is_kept_for_the_kernels_that_count_in_it(cuda):
    first = zeroed(1000)
    grown = zeroed(100_000)
    assert grown != first
    assert cuda.holds_zeros(grown, 100_000)
    assert {block.ptr for block in counters._kept} == set(cuda.allocated)
    assert zeroed(1000) == grown


def test_each_captured_launch_has_words_of_its_own(cuda):
    running = zeroed(113)
    cuda.capturing.add(OWN)
    captured = [zeroed(113) for _ in range(50)]
    taken = [(running, 113), *((address, 113) for address in captured)]
    assert all(cuda.holds_zeros(*words) for words in taken)
    assert not any(ranges_overlap(a, b) for i, a in enumerate(taken) for b in taken[i + 1 :])


def test_a_graph_that_is_captured_again_keeps_its_words(cuda):
    cuda.capturing.add(OWN)
    first, again, other, longer = (
        counters.shared(count, 0, OWN, result).address
        for count, result in ((113, 0x100), (113, 0x100), (113, 0x200), (300, 0x100))
    )
    assert first == again
    assert len({first, other, longer, zeroed(113)}) == 4
    cuda.capturing.clear()
    # Other launches run on a stream, whatever they write.
    assert counters.shared(113, 0, OWN, 0x100).address == zeroed(113) != first


def test_captured_launches_do_not_share_a_cache_line(cuda):
    zeroed(1)
    cuda.capturing.add(OWN)
    first, second = zeroed(1), zeroed(1)
    assert abs(second - first) >= 128


@pytest.mark.parametrize("count", [1, 1000, 5000])
def test_a_capture_after_a_warm_up_allocates_nothing(cuda, count):
    zeroed(count)
    allocated = len(cuda.allocated)
    cuda.capturing.add(OWN)
    for _ in range(100):
        assert cuda.holds_zeros(zeroed(count), count)
    assert len(cuda.allocated) == allocated


def test_calls_outside_of_captures_fill_the_reserve_again(cuda):
    for _ in range(20):
        cuda.capturing.clear()
        zeroed(5000)
        allocated = len(cuda.allocated)
        cuda.capturing.add(OWN)
        for _ in range(100):
            zeroed(5000)
        assert len(cuda.allocated) == allocated


def test_a_capture_without_a_warm_up_finds_zeros_all_the_same(cuda):
    cuda.capturing.add(OWN)
    assert cuda.holds_zeros(zeroed(113), 113)
    assert cuda.holds_zeros(zeroed(10_000_000), 10_000_000)


def test_a_capture_leaves_other_streams_to_their_blocks(cuda):
    first = zeroed(40)
    cuda.capturing.add(OTHER)
    assert zeroed(40) == first


@pytest.mark.parametrize("stream", [0, 1])
def test_the_legacy_stream_is_not_asked_whether_it_is_captured(cuda, stream):
    """It cannot be captured, and the query raises an error while another stream is captured."""
    cuda.stream = stream
    zeroed(40)
    assert cuda.asked == []


def test_threads_that_capture_at_once_get_words_of_their_own(cuda):
    zeroed(40)
    cuda.capturing.add(OWN)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.extend(zeroed(40) for _ in range(200)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 800
