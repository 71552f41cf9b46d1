"""JAX arrays that a GPU has still to read: they are kept alive until it has read them.

JAX does not know which stream reads its memory. Once nobody refers to an array, JAX may overwrite
its memory at once, for example by the copy of another array to the GPU, while a kernel that reads
the array still waits in the queue of CuPy's stream.

    call            enqueues kernels -> drops the array -> event on the stream, array in `_kept`
    a later call    event has occurred                  -> array leaves `_kept`
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextlib import nullcontext, suppress
from typing import Any

# Pairs of an event and the array that is kept until the event has occurred, in order of time.
_kept: deque[tuple[Any, Any]] = deque()
_releasing = threading.Lock()


def keep_until_read(array: Any, device: int, stream: int) -> None:
    """Keep an array alive until the work that is queued on a stream of a device has been done.

    Does nothing while a graph is captured from the stream: a graph does not keep the arrays that
    its launches read.
    """
    cupy = sys.modules.get("cupy")
    # Python drops modules when it ends.
    if cupy is None or sys.is_finalizing():
        return
    cuda, runtime = cupy.cuda, cupy.cuda.runtime
    try:
        if runtime.streamIsCapturing(stream):
            return
        with nullcontext() if runtime.getDevice() == device else cuda.Device(device):
            event = cuda.Event(disable_timing=True)
            runtime.eventRecord(event.ptr, stream)
    except runtime.CUDARuntimeError:
        # The stream no longer exists, or another one is being captured. No event says when the
        # array has been read. If waiting fails, too, the GPU will not read it anymore.
        with suppress(runtime.CUDARuntimeError):
            cuda.Device(device).synchronize()
        return
    _kept.append((event, array))


def release_read() -> None:
    """Drop the arrays that have been read."""
    # If another thread releases arrays, that suffices. Dropping an array may call this function.
    if not _kept or not _releasing.acquire(blocking=False):
        return
    try:
        while _kept and _kept[0][0].done:
            _kept.popleft()
    finally:
        _releasing.release()
