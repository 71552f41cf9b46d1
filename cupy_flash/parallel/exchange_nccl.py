"""Communication of CuPy arrays between ranks by NCCL."""

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

# Stream priority beyond the range of any device, for which CUDA uses the highest priority.
_FIRST = -100
# Maximum interval, in seconds, at which the guard thread checks exchanges.
_LOOKS = 0.2
# Interval, in seconds, at which a host that waits for received bytes polls.
_PAUSE = 20e-6
# Indices of the two bytes (marks) that the GPU sets when an exchange begins and when it ends.
_BEGUN, _OVER = range(2)


class NcclExchange:
    """Implementation of `Exchange` by NCCL.

    Messages run on a stream of their own, which first waits for prior work of the current stream:

        current stream  ... keys 0 ready | attention 0 .......... | wait | attention 1
        stream of NCCL                   | keys 1 arrive ... done |

    The host never waits for the GPU, so a call cannot detect that a rank is missing. A guard thread
    does: it checks pending exchanges, and aborts the communicator if one exceeds the timeout. That
    releases the stream, and a host that is blocked in NCCL's connection setup. Every later call
    raises the error that the guard recorded.

    The guard does not call CUDA. A thread that copies an array to the host holds a driver lock
    until the copy ends, which never happens while a rank is missing. An event query would wait for
    that lock, and CuPy would hold the GIL meanwhile. Instead, the GPU writes its progress as marks,
    which are bytes in pinned host memory:

        stream of NCCL   wait | messages ................... |
        stream of marks       | begun                        | over
        guard                        time counts: too long? end the communicator

    To abort, NCCL first sets a flag that its kernels poll. The kernels stop, the copy ends, and the
    driver lock is free for the rest of the abort.

    Parameters
    ----------
    comm : cupy.cuda.nccl.NcclCommunicator
        Communicator; the caller remains its owner, but it is aborted if an exchange fails.
    timeout : float
        Maximum duration of an exchange, in seconds, from the time that the GPU begins it.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        self.xp, self._nccl = cupy_module(), nccl_module()
        self.rank, self.size, self._device = comm.rank_id(), comm.size(), comm.device_id()
        self._comm, self._timeout = comm, timeout
        # With the highest priority, thread blocks of NCCL start as soon as any of attention end.
        with self.on_device():
            self._stream = self.xp.cuda.Stream(non_blocking=True, priority=_FIRST)
            # Marks have their own stream, because a copy would delay the messages.
            self._marking = self.xp.cuda.Stream(non_blocking=True)
            with self._marking:
                self._one = self.xp.ones(1, np.uint8)
        self._broken: str | None = None
        self._open: list[_Marks] = []
        self._is_guarded = False
        self._lock = threading.Lock()

    def on_device(self) -> Any:
        """See `Exchange`; this is the communicator's device."""
        return self.xp.cuda.Device(self._device)

    def is_capturing(self) -> bool:
        """See `Exchange`."""
        with self.on_device():
            current = self.xp.cuda.get_current_stream()
            return bool(self.xp.cuda.runtime.streamIsCapturing(current.ptr))

    def begin(self) -> None:
        """See `Exchange`; NCCL has no tags and matches messages by their order alone."""

    def check(self) -> None:
        """See `Exchange`."""
        if self._broken:
            raise ParallelError(self._broken)

    def why_not(self, array: Any) -> str | None:
        """See `Exchange`."""
        if not is_cupy(array):
            return f"is {kind_of(array)}; an NCCL communicator exchanges CuPy arrays"
        if array.device.id != self._device:
            return f"lies on device {array.device.id}, but the communicator is for {self._device}"
        return None

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> _NcclTransfer:
        """See `Exchange`."""
        self.check()
        with self.on_device():
            current = self.xp.cuda.get_current_stream()
            transfer = _NcclTransfer(self)
            transfer.ready.record(current)
            self._stream.wait_event(transfer.ready)
            # A captured exchange runs at graph launches, of which the guard knows nothing.
            is_watched = not self.is_capturing()
            if is_watched:
                marks = _Marks(self.xp.cuda.alloc_pinned_memory(2))
                self._mark(marks, _BEGUN, transfer.ready)
                self._watch(marks)
            try:
                self._enqueue(sends, receives)
            except Exception as error:  # CuPy raises KeyError for an error without a text
                self.end(f"rank {self.rank}: NCCL reports {_text(error)}")
                self.check()
            transfer.done.record(self._stream)
            if is_watched:
                self._mark(marks, _OVER, transfer.done)
                marks.is_enqueued = True
        return transfer

    def _mark(self, marks: _Marks, which: int, event: Any) -> None:
        """Enqueue a write of a mark after an event. The write is a copy, which needs no SM."""
        self._marking.wait_event(event)
        runtime = self.xp.cuda.runtime
        to_host, stream = runtime.memcpyDeviceToHost, self._marking.ptr
        runtime.memcpyAsync(marks.memory.ptr + which, self._one.data.ptr, 1, to_host, stream)

    def _enqueue(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        nccl, stream = self._nccl, self._stream.ptr
        nccl.groupStart()
        try:
            for array, peer in sends:
                self._comm.send(*_address_and_size(array), nccl.NCCL_INT8, peer, stream)
            for array, peer in receives:
                self._comm.recv(*_address_and_size(array), nccl.NCCL_INT8, peer, stream)
        finally:
            # An open group would swallow later NCCL calls of this thread on any communicator.
            nccl.groupEnd()

    def _watch(self, marks: _Marks) -> None:
        """Register an exchange with the guard thread, which runs while exchanges are pending."""
        with self._lock:
            self._open.append(marks)
            if self._is_guarded:
                return
            self._is_guarded = True
        threading.Thread(target=self._guard, name="cupy_flash nccl guard", daemon=True).start()

    def _guard(self) -> None:
        """Check pending exchanges until none is left; this is the main function of the thread."""
        while self._broken is None:
            try:
                self._look()
            except Exception as error:
                # Without a guard there would be no timeout, so its failure ends the exchange.
                self.end(f"rank {self.rank}: NCCL reports {_text(error)}")
            with self._lock:
                if not self._open:
                    self._is_guarded = False
                    return
            time.sleep(min(_LOOKS, self._timeout / 10))

    def _look(self) -> None:
        """Remove exchanges that are over; end the communicator if one has failed."""
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
                "communicator has been aborted"
            )
        elif first.is_enqueued:
            with self._lock:
                # An aborted communicator must not be queried.
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
    """Progress of an exchange on the GPU, which the guard thread reads.

    Parameters
    ----------
    memory
        Two pinned bytes, which the GPU sets.

    Attributes
    ----------
    is_enqueued
        Whether the host has returned from NCCL.
    """

    def __init__(self, memory: Any) -> None:
        self.memory, self.is_enqueued = memory, False
        self._set = np.frombuffer(memory, np.uint8, 2)
        self._set[:] = 0
        self._begun: float | None = None

    def are_over(self) -> bool:
        """Return whether the messages have arrived."""
        return bool(self._set[_OVER])

    def seconds(self) -> float:
        """Return the seconds since a call of this method first found that the GPU has begun."""
        if self._begun is None and self._set[_BEGUN]:
            self._begun = time.monotonic()
        return 0.0 if self._begun is None else time.monotonic() - self._begun


class _NcclTransfer:
    """Implementation of `Transfer` by NCCL."""

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


def _address_and_size(array: Any) -> tuple[int, int]:
    """Return the address and the number of bytes of an array."""
    return array.data.ptr, array.nbytes


def communicator_of(comm: Any) -> Any | None:
    """Return an NCCL communicator, or the one inside a `cupyx.distributed` backend; else None."""
    for candidate in (comm, getattr(comm, "_comm", None)):
        # Compared by name: importing the class would load NCCL for callers that do not use it.
        if type(candidate).__name__ == "NcclCommunicator":
            return candidate
    return None
