"""Peak memory of a call, in addition to its inputs."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

from .timing import Timed


def host_peak_bytes(timed: Timed) -> int:
    """Return the peak of the bytes that Python and NumPy allocate in a call, output included.

    The call was made before, so that everything that it caches exists. Memory that a BLAS allocates
    for itself does not count.
    """
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        with timed.scope():
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            # The result is held until the peak is read, as a caller would hold it.
            result = timed.call()
            peak = tracemalloc.get_traced_memory()[1]
            del result
    finally:
        if not was_tracing:
            tracemalloc.stop()
    return peak - before


def cupy_peak_bytes(timed: Timed) -> int:
    """Return the peak of the bytes that a call takes from CuPy's memory pool, output included.

    The call was made before. Each array counts with its size rounded up to a multiple of 512 bytes.
    Memory that libraries allocate outside the pool does not count.
    """
    import cupy

    live: dict[int, int] = {}
    peak = 0

    class Ledger(cupy.cuda.MemoryHook):  # type: ignore[misc]  # CuPy is untyped
        name = "cupy_flash ledger"

        def malloc_postprocess(self, **block: Any) -> None:
            nonlocal peak
            live[block["mem_ptr"]] = block["mem_size"]
            peak = max(peak, sum(live.values()))

        def free_postprocess(self, **block: Any) -> None:
            # Memory that was allocated before the call is not in `live` and does not count.
            live.pop(block["mem_ptr"], None)

    with timed.scope(), Ledger():
        # The result is held until the hook is removed, as a caller would hold it.
        result = timed.call()
    del result
    return peak


def torch_peak_bytes(timed: Timed) -> int:
    """Return the peak of the bytes of device memory that a call takes from torch, output included.

    The call was made before: torch keeps its libraries' workspaces from the first call on. Each
    tensor counts with its size rounded up to a multiple of 512 bytes.
    """
    cuda = sys.modules["torch"].cuda
    with timed.scope():
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        result = timed.call()
        peak = cuda.max_memory_allocated()
        del result
    return int(peak - before)
