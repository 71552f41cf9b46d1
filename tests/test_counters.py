"""Counters: zeros that no two kernels which may run at once share, and that a capture can have."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from cupy_flash import counters

LEGACY, PER_THREAD, OWN, OTHER = 0, 2, 0xA0, 0xB0


class FakeCuda:
    """CUDA's part in it: devices, streams, and memory that says when it was zeroed."""

    def __init__(self) -> None:
        self.device, self.stream = 0, OWN
        self.capturing: set[int] = set()
        self.asked: list[int] = []
        self.allocated: dict[int, int] = {}
        self.zeroed: dict[int, int] = {}
        self.waited: list[int] = []
        self.runtime = SimpleNamespace(
            getDevice=lambda: self.device,
            streamIsCapturing=self._is_capturing,
            memsetAsync=self._memset,
        )
        self.memory = SimpleNamespace(Memory=self._allocate)

    def get_current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.stream)

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
        """Whether these words lie in one allocation, and it was zeroed."""
        start = address >> 32 << 32
        end = start + self.zeroed.get(start, 0)
        return address % 4 == 0 and address + 4 * count <= end <= start + self.allocated[start]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setattr(counters, "_cuda", lambda: fake)
    for name, empty in (("_blocks", {}), ("_reserves", {}), ("_kept", [])):
        monkeypatch.setattr(counters, name, empty)
    yield fake
    assert len(fake.waited) == len(fake.allocated), "zeros must be there before they are used"


def ranges_overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return first[0] < second[0] + 4 * second[1] and second[0] < first[0] + 4 * first[1]


@pytest.mark.parametrize("count", [1, 113, 1024, 5000])
def test_the_words_are_zeros(cuda, count):
    assert cuda.holds_zeros(counters.zeroed(count), count)


def test_launches_on_one_stream_share_a_block_and_allocate_once(cuda):
    first = counters.zeroed(40)
    allocated = len(cuda.allocated)
    assert {counters.zeroed(count) for count in (40, 1, 7, 40)} == {first}
    assert len(cuda.allocated) == allocated


@pytest.mark.parametrize("change", [{"stream": OTHER}, {"device": 1}, {"stream": LEGACY}])
def test_another_stream_or_device_has_a_block_of_its_own(cuda, change):
    first = counters.zeroed(40)
    for name, value in change.items():
        setattr(cuda, name, value)
    second = counters.zeroed(40)
    assert not ranges_overlap((first, 40), (second, 40))


def test_the_default_stream_of_each_thread_has_a_block_of_its_own(cuda):
    cuda.stream = PER_THREAD
    found = [counters.zeroed(40)]
    for _ in range(3):
        # One after the other, so that the later threads may get the numbers of those that ended.
        thread = threading.Thread(target=lambda: found.append(counters.zeroed(40)))
        thread.start()
        thread.join()
    assert counters.zeroed(40) == found[0]
    assert len(set(found)) == 4


def test_a_block_that_is_outgrown_is_kept_for_the_kernels_that_count_in_it(cuda):
    first = counters.zeroed(1000)
    grown = counters.zeroed(100_000)
    assert grown != first
    assert cuda.holds_zeros(grown, 100_000)
    assert {block.ptr for block in counters._kept} == set(cuda.allocated)
    assert counters.zeroed(1000) == grown


def test_each_captured_launch_has_words_of_its_own(cuda):
    running = counters.zeroed(113)
    cuda.capturing.add(OWN)
    captured = [counters.zeroed(113) for _ in range(50)]
    taken = [(running, 113), *((address, 113) for address in captured)]
    assert all(cuda.holds_zeros(*words) for words in taken)
    assert not any(ranges_overlap(a, b) for i, a in enumerate(taken) for b in taken[i + 1 :])


def test_captured_launches_do_not_share_a_cache_line(cuda):
    counters.zeroed(1)
    cuda.capturing.add(OWN)
    first, second = counters.zeroed(1), counters.zeroed(1)
    assert abs(second - first) >= 128


@pytest.mark.parametrize("count", [1, 1000, 5000])
def test_a_capture_after_a_warm_up_allocates_nothing(cuda, count):
    counters.zeroed(count)
    allocated = len(cuda.allocated)
    cuda.capturing.add(OWN)
    for _ in range(100):
        assert cuda.holds_zeros(counters.zeroed(count), count)
    assert len(cuda.allocated) == allocated


def test_calls_outside_of_captures_fill_the_reserve_again(cuda):
    for _ in range(20):
        cuda.capturing.clear()
        counters.zeroed(5000)
        allocated = len(cuda.allocated)
        cuda.capturing.add(OWN)
        for _ in range(100):
            counters.zeroed(5000)
        assert len(cuda.allocated) == allocated


def test_a_capture_without_a_warm_up_finds_zeros_all_the_same(cuda):
    cuda.capturing.add(OWN)
    assert cuda.holds_zeros(counters.zeroed(113), 113)
    assert cuda.holds_zeros(counters.zeroed(10_000_000), 10_000_000)


def test_a_capture_leaves_other_streams_to_their_blocks(cuda):
    first = counters.zeroed(40)
    cuda.capturing.add(OTHER)
    assert counters.zeroed(40) == first


@pytest.mark.parametrize("stream", [0, 1])
def test_the_legacy_stream_is_not_asked_whether_it_is_captured(cuda, stream):
    """While another one is, asking would be an error; captured it cannot be."""
    cuda.stream = stream
    counters.zeroed(40)
    assert cuda.asked == []


def test_threads_that_capture_at_once_get_words_of_their_own(cuda):
    counters.zeroed(40)
    cuda.capturing.add(OWN)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.extend(counters.zeroed(40) for _ in range(200)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 800
