"""Exchanges over NCCL without a GPU: calls of CUDA and NCCL, and the guard of timeouts."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_flash.errors import ParallelError
from cupy_flash.parallel import exchange_nccl
from cupy_flash.parallel.exchange import Message
from cupy_flash.parallel.exchange_nccl import NcclExchange


class NcclError(RuntimeError):
    pass


class Pinned(bytearray):
    """Fake of pinned host memory; `ptr` is the address that copies get."""

    ptr = 0


class Event:
    """Fake CUDA event that is done once its stream has finished."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._recorded = gpu, ""

    def record(self, stream: Any) -> None:
        self._recorded = stream.name
        self._gpu.said.append(f"record on {stream.name}")

    @property
    def done(self) -> bool:
        assert threading.current_thread() is threading.main_thread(), "the guard asks CUDA"
        return self._recorded in self._gpu.finished


class Gpu:
    """Fake CuPy that records calls in order, and whose streams finish when a test says so."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.finished = {"current"}
        self.pinned: dict[int, Pinned] = {}
        # Streams and addresses in pinned memory: a mark is set once its stream has finished.
        self.marks: list[tuple[str, int]] = []
        self.is_capturing = False
        self.fails = False
        # Errors that the next queries for asynchronous errors raise.
        self.errors: list[Exception] = []
        self.device = 5
        self.nccl = SimpleNamespace(
            NcclError=NcclError,
            NCCL_INT8=0,
            groupStart=lambda: self.said.append("start"),
            groupEnd=lambda: self.said.append("end"),
        )
        runtime = SimpleNamespace(
            streamIsCapturing=lambda stream: self.is_capturing,
            memcpyDeviceToHost=2,
            memcpyAsync=self._copy,
        )
        self.ones = lambda count, dtype: SimpleNamespace(data=SimpleNamespace(ptr=7))
        self.cuda = SimpleNamespace(
            Device=self._as_device,
            Event=lambda disable_timing: self._made(Event(self)),
            Stream=lambda non_blocking, priority=0: self._made(
                self._stream("messages" if priority else "marks")
            ),
            get_current_stream=lambda: self._stream("current"),
            runtime=runtime,
            alloc_pinned_memory=self._alloc_pinned,
        )

    def _as_device(self, number: int) -> Any:
        @contextlib.contextmanager
        def current() -> Iterator[None]:
            before, self.device = self.device, number
            yield
            self.device = before

        found: Any = current()
        found.use = lambda: None
        return found

    def _alloc_pinned(self, size: int) -> Pinned:
        found = Pinned(b"\xff" * size)
        found.ptr = 1000 * (len(self.pinned) + 1)
        self.pinned[found.ptr] = found
        return found

    def _copy(self, target: int, source: int, size: int, kind: int, stream: Any) -> None:
        """Copy a mark: mark 0 waits for the current stream, mark 1 for the stream of messages."""
        assert (source, size, kind, stream) == (7, 1, 2, "marks")
        self.said.append(f"mark {target % 1000}")
        self.marks.append(("messages" if target % 1000 else "current", target))
        self.finish()

    def finish(self, *streams: str) -> None:
        """Finish these streams, and set the marks (bytes) that finished streams were to write."""
        self.finished |= set(streams)
        for stream, target in self.marks:
            if stream in self.finished:
                self.pinned[target // 1000 * 1000][target % 1000] = 1

    def _made(self, what: Any) -> Any:
        assert self.device == 0, "not made on the communicator's device"
        return what

    def _stream(self, name: str) -> Any:
        def wait_event(event: Event) -> None:
            self.said.append(f"{name} waits")

        class Stream(contextlib.nullcontext[None]):
            ptr = name

        found: Any = Stream()
        found.name, found.wait_event = name, wait_event
        return found

    # Methods of a communicator
    rank_id = staticmethod(lambda: 1)
    size = staticmethod(lambda: 3)
    device_id = staticmethod(lambda: 0)

    def send(self, *what: Any) -> None:
        if self.fails:
            raise NcclError("unhandled system error")
        self.said.append(f"send {what}")

    def recv(self, *what: Any) -> None:
        self.said.append(f"recv {what}")

    def check_async_error(self) -> None:
        if self.errors:
            raise self.errors.pop()

    def abort(self) -> None:
        self.said.append("abort")
        self.finish("messages")


def array(address: int, nbytes: int) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=address), nbytes=nbytes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(exchange_nccl, "cupy_module", lambda: made)
    monkeypatch.setattr(exchange_nccl, "nccl_module", lambda: made.nccl)
    return made


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_messages_go_as_bytes_on_a_stream_that_first_waits_for_the_current_one(gpu: Gpu) -> None:
    exchange = NcclExchange(gpu, timeout=60)
    transfer = exchange.start([Message(array(64, 6), 2)], [Message(array(128, 10), 0)])
    assert gpu.said == [
        "record on current", "messages waits", "marks waits", "mark 0",
        "start", "send (64, 6, 0, 2, 'messages')", "recv (128, 10, 0, 0, 'messages')", "end",
        "record on messages", "marks waits", "mark 1",
    ]  # fmt: skip
    transfer.wait()
    assert gpu.said[-1] == "current waits"


def test_an_exchange_that_takes_too_long_ends_the_communicator(gpu: Gpu) -> None:
    exchange = NcclExchange(gpu, timeout=0.05)
    transfer = exchange.start([], [Message(array(0, 1), 0)])
    exchange.check()
    with pytest.raises(ParallelError, match=r"rank 1 waited 0\.05 s .* the other 2"):
        transfer.finish()
    until(lambda: "abort" in gpu.said)
    for call in (exchange.check, lambda: exchange.start([], [])):
        with pytest.raises(ParallelError, match="has been aborted"):
            call()


def test_time_counts_from_when_the_gpu_has_come_to_the_exchange(gpu: Gpu) -> None:
    gpu.finished.clear()
    exchange = NcclExchange(gpu, timeout=0.05)
    exchange.start([], [Message(array(0, 1), 0)])
    time.sleep(0.3)
    exchange.check()
    gpu.finish("current")
    until(lambda: "abort" in gpu.said)


def test_exchanges_that_end_in_time_are_let_be(gpu: Gpu) -> None:
    gpu.finish("messages")
    exchange = NcclExchange(gpu, timeout=0.05)
    for _ in range(5):
        exchange.start([], [Message(array(0, 1), 0)]).finish()
    time.sleep(0.3)
    exchange.check()
    assert "abort" not in gpu.said


def test_what_nccl_refuses_is_an_error_of_ranks(gpu: Gpu) -> None:
    gpu.fails = True
    exchange = NcclExchange(gpu, timeout=60)
    with pytest.raises(ParallelError, match="rank 1: NCCL reports unhandled system error"):
        exchange.start([Message(array(0, 1), 0)], [])
    with pytest.raises(ParallelError, match="NCCL reports"):
        exchange.check()
    # An open NCCL group would include the next operations of any communicator.
    assert gpu.said[-2:] == ["end", "abort"]


@pytest.mark.parametrize("error", [NcclError("remote error"), KeyError(7)])
def test_any_error_that_the_guard_meets_ends_the_group(gpu: Gpu, error: Exception) -> None:
    gpu.errors.append(error)
    exchange = NcclExchange(gpu, timeout=60)
    exchange.start([], [Message(array(0, 1), 0)])
    until(lambda: "abort" in gpu.said)
    with pytest.raises(ParallelError, match=r"NCCL reports .*(remote error|7)"):
        exchange.check()


def test_nothing_keeps_an_exchange_that_is_no_longer_used(gpu: Gpu) -> None:
    gpu.finish("messages")
    exchange = NcclExchange(gpu, timeout=0.05)
    exchange.start([], [Message(array(0, 1), 0)]).finish()
    reference = weakref.ref(exchange)
    del exchange

    def is_gone() -> bool:
        gc.collect()
        return reference() is None

    until(is_gone)


def test_a_group_that_is_ended_keeps_its_first_reason(gpu: Gpu) -> None:
    exchange = NcclExchange(gpu, timeout=60)
    exchange.end("first")
    exchange.end("second")
    with pytest.raises(ParallelError, match="first"):
        exchange.check()
    assert gpu.said == ["abort"]


def test_what_is_captured_has_no_time_limit(gpu: Gpu) -> None:
    gpu.is_capturing = True
    exchange = NcclExchange(gpu, timeout=0.05)
    exchange.start([], [Message(array(0, 1), 0)])
    time.sleep(0.3)
    exchange.check()
