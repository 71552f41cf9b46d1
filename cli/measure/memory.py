"""How much memory a call takes at its peak, besides its inputs."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

from .timing import Timed


def host_peak_bytes(timed: Timed) -> int:
    """Of a call on NumPy arrays: what Python and NumPy allocate, its output included.

    Parameters
    ----------
    timed
        A call that was made before, so that what it keeps for the next one is there.

    Returns
    -------
    int
        Bytes. What a BLAS allocates for itself is not among them.
    """
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        with timed.scope():
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            # Kept until the peak is read, as a caller keeps it.
            result = timed.call()
            peak = tracemalloc.get_traced_memory()[1]
            del result
    finally:
        if not was_tracing:
            tracemalloc.stop()
    return peak - before


def cupy_peak_bytes(timed: Timed) -> int:
    """Of a call on CuPy arrays: device memory that it takes out of CuPy's pool, output included.

    Parameters
    ----------
    timed
        A call that was made before.

    Returns
    -------
    int
        Bytes, each array's rounded up to the pool's 512. What libraries allocate past the pool is
        not among them.
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
            # What was allocated before the call does not count when it goes, either.
            live.pop(block["mem_ptr"], None)

    with timed.scope(), Ledger():
        # Kept until the hook is gone, as a caller keeps it.
        result = timed.call()
    del result
    return peak


def torch_peak_bytes(timed: Timed) -> int:
    """Of a call on torch tensors: device memory out of torch's own allocator, output included.

    Parameters
    ----------
    timed
        A call that was made before: torch keeps its libraries' workspaces from the first one on.

    Returns
    -------
    int
        Bytes, each tensor's rounded up to the allocator's 512.
    """
    cuda = sys.modules["torch"].cuda
    with timed.scope():
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        result = timed.call()
        peak = cuda.max_memory_allocated()
        del result
    return int(peak - before)
