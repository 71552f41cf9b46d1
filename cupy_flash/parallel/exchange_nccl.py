"""Arrays on GPUs, carried by NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_flash.arrays.strided import is_cupy, kind_of
from cupy_flash.errors import ParallelError
from cupy_flash.gpu.environment import cupy_module, nccl_module
from cupy_flash.parallel.exchange import Message

# Of streams: above any that a device has, which CUDA then takes.
_FIRST = -100
# Seconds between two looks of the guard, at most.
_LOOKS = 0.2
# Between two looks of a host that waits for bytes.
_PAUSE = 20e-6
# Marks of an exchange.
_BEGUN, _OVER = range(2)


class NcclExchange:
    """See `Exchange`.

    Messages have a stream of their own, which first waits for what the current one has by then:

        current stream  ... keys 0 ready | attention 0 .......... | wait | attention 1
        stream of NCCL                   | keys 1 arrive ... done |

    Nothing here waits for the GPU, so nothing here sees that a rank is missing. A thread does, the
    guard: while exchanges are under way it looks at them, and ends the communicator when one takes
    longer than it may, which frees the stream, and a host that is stuck in NCCL's first contact
    with a rank. Every later call then raises what it noted.

    The guard asks CUDA nothing. Who copies an array to the host holds a lock of the driver until
    the array is there, which it never is while a rank is missing; a query, or the end of an event,
    would wait for that lock, and CuPy keeps Python's own meanwhile. Instead the GPU tells how far
    it is, by bytes in memory of the host:

        stream of NCCL   wait | messages ................... |
        stream of marks       | begun                        | over
        guard                        time counts: too long? end the communicator

    To end one, NCCL first sets a flag that its kernels read: they stop, the copy ends, and the lock
    is free for what else NCCL does.

    Parameters
    ----------
    comm : cupy.cuda.nccl.NcclCommunicator
        Stays the caller's, but ends when an exchange fails.
    timeout : float
        Seconds that an exchange may take from when the GPU has come to it.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        self.xp, self._nccl = cupy_module(), nccl_module()
        self.rank, self.size, self._device = comm.rank_id(), comm.size(), comm.device_id()
        self._comm, self._timeout = comm, timeout
        # Where thread blocks of attention end, those of messages are the next to start.
        with self.on_device():
            self._stream = self.xp.cuda.Stream(non_blocking=True, priority=_FIRST)
            # Beside that of messages, which a copy would hold up.
            self._marking = self.xp.cuda.Stream(non_blocking=True)
            with self._marking:
                self._one = self.xp.ones(1, np.uint8)
        self._broken: str | None = None
        self._open: list[_Marks] = []
        self._is_guarded = False
        self._lock = threading.Lock()

    def on_device(self) -> Any:
        """See `Exchange`: the communicator's device."""
        return self.xp.cuda.Device(self._device)

    def is_capturing(self) -> bool:
        """See `Exchange`."""
        with self.on_device():
            current = self.xp.cuda.get_current_stream()
            return bool(self.xp.cuda.runtime.streamIsCapturing(current.ptr))

    def begin(self) -> None:
        """See `Exchange`; NCCL tells messages by their order alone."""

    def check(self) -> None:
        """See `Exchange`."""
        if self._broken:
            raise ParallelError(self._broken)

    def why_not(self, array: Any) -> str | None:
        """See `Exchange`."""
        if not is_cupy(array):
            return f"is {kind_of(array)}; a communicator of NCCL carries arrays of CuPy"
        if array.device.id != self._device:
            return f"lies on device {array.device.id}, but the communicator's is {self._device}"
        return None

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> _NcclTransfer:
        """See `Exchange`."""
        self.check()
        with self.on_device():
            current = self.xp.cuda.get_current_stream()
            transfer = _NcclTransfer(self)
            transfer.ready.record(current)
            self._stream.wait_event(transfer.ready)
            # What is captured runs later, and then nobody can tell when.
            is_watched = not self.is_capturing()
            if is_watched:
                marks = _Marks(self.xp.cuda.alloc_pinned_memory(2))
                self._mark(marks, _BEGUN, transfer.ready)
                self._watch(marks)
            try:
                self._enqueue(sends, receives)
            except Exception as error:  # CuPy raises KeyError for an error it has no text of
                self.end(f"rank {self.rank}: NCCL reports {_text(error)}")
                self.check()
            transfer.done.record(self._stream)
            if is_watched:
                self._mark(marks, _OVER, transfer.done)
                marks.is_enqueued = True
        return transfer

    def _mark(self, marks: _Marks, which: int, event: Any) -> None:
        """Have the GPU set a mark after an event: by a copy, which needs no multiprocessor."""
        self._marking.wait_event(event)
        runtime = self.xp.cuda.runtime
        to_host, stream = runtime.memcpyDeviceToHost, self._marking.ptr
        runtime.memcpyAsync(marks.memory.ptr + which, self._one.data.ptr, 1, to_host, stream)

    def _enqueue(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        nccl, stream = self._nccl, self._stream.ptr
        nccl.groupStart()
        try:
            for array, peer in sends:
                self._comm.send(*_place(array), nccl.NCCL_INT8, peer, stream)
            for array, peer in receives:
                self._comm.recv(*_place(array), nccl.NCCL_INT8, peer, stream)
        finally:
            # A group that stays open would take in what this thread asks of any communicator.
            nccl.groupEnd()

    def _watch(self, marks: _Marks) -> None:
        """Have the guard look at an exchange; it lives as long as it has some, and so does this."""
        with self._lock:
            self._open.append(marks)
            if self._is_guarded:
                return
            self._is_guarded = True
        threading.Thread(target=self._guard, name="cupy_flash nccl guard", daemon=True).start()

    def _guard(self) -> None:
        """Look at open exchanges until none is left."""
        while self._broken is None:
            try:
                self._look()
            except Exception as error:
                # Without a guard nobody would keep the time.
                self.end(f"rank {self.rank}: NCCL reports {_text(error)}")
            with self._lock:
                if not self._open:
                    self._is_guarded = False
                    return
            time.sleep(min(_LOOKS, self._timeout / 10))

    def _look(self) -> None:
        """Forget exchanges that are over; end the communicator if one has failed."""
        with self._lock:
            while self._open and self._open[0].are_over():
                del self._open[0]
            if not self._open:
                return
            first = self._open[0]
        if first.seconds() > self._timeout:
            self.end(
                f"rank {self.rank} waited {self._timeout:g} s for an exchange with the other "
                f"{self.size - 1}: one has failed, makes another call or takes longer; the "
                "communicator has been ended"
            )
        elif first.is_enqueued:
            with self._lock:
                # What was ended is not there to be asked.
                if not self._broken:
                    self._comm.check_async_error()

    def end(self, why: str) -> None:
        """See `Exchange`."""
        with self._lock:
            if self._broken:
                return
            self._broken = why
            self._comm.abort()


class _Marks:
    """How far the GPU is with an exchange, for the guard.

    Parameters
    ----------
    memory
        Two pinned bytes; the GPU sets them.

    Attributes
    ----------
    is_enqueued
        Whether the host has left NCCL.
    """

    def __init__(self, memory: Any) -> None:
        self.memory, self.is_enqueued = memory, False
        self._set = np.frombuffer(memory, np.uint8, 2)
        self._set[:] = 0
        self._begun: float | None = None

    def are_over(self) -> bool:
        """Whether the messages have arrived."""
        return bool(self._set[_OVER])

    def seconds(self) -> float:
        """Time since the GPU was first seen to have come to it; asked when it is the next."""
        if self._begun is None and self._set[_BEGUN]:
            self._begun = time.monotonic()
        return 0.0 if self._begun is None else time.monotonic() - self._begun


class _NcclTransfer:
    """See `Transfer`."""

    def __init__(self, exchange: NcclExchange) -> None:
        cuda = exchange.xp.cuda
        self._exchange = exchange
        self.ready, self.done = (cuda.Event(disable_timing=True) for _ in range(2))

    def wait(self) -> None:
        """See `Transfer`."""
        with self._exchange.on_device():
            self._exchange.xp.cuda.get_current_stream().wait_event(self.done)

    def finish(self) -> None:
        """See `Transfer`."""
        while not self.done.done:
            self._exchange.check()
            time.sleep(_PAUSE)
        self._exchange.check()
        self.wait()


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, RuntimeError) else repr(error)


def _place(array: Any) -> tuple[int, int]:
    """Address and bytes."""
    return array.data.ptr, array.nbytes


def communicator_of(comm: Any) -> Any | None:
    """The communicator of NCCL that an object is, or has: `cupyx.distributed`'s; None if none."""
    for candidate in (comm, getattr(comm, "_comm", None)):
        # Whoever made one has loaded NCCL; nobody else is to.
        if type(candidate).__name__ == "NcclCommunicator":
            return candidate
    return None
