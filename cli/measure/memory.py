"""Peak memory of a call, in addition to its inputs."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

from .timing import Timed


def host_peak_bytes(timed: Timed) -> int:
    """Measure a call on NumPy arrays: peak of what Python and NumPy allocate, output included.

    Parameters
    ----------
    timed
        Call that was made before, so that everything that it caches exists.

    Returns
    -------
    int
        Number of bytes, without memory that a BLAS allocates for itself.
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
    """Measure a call on CuPy arrays: peak of the device memory from CuPy's pool, output included.

    Parameters
    ----------
    timed
        Call that was made before.

    Returns
    -------
    int
        Number of bytes, with each array rounded up to a multiple of 512 bytes. Memory that
        libraries allocate outside the pool is not counted.
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
    """Measure a call on torch tensors: peak of torch's own device memory, output included.

    Parameters
    ----------
    timed
        Call that was made before: torch keeps its libraries' workspaces from the first call on.

    Returns
    -------
    int
        Number of bytes, with each tensor rounded up to a multiple of 512 bytes.
    """
    cuda = sys.modules["torch"].cuda
    with timed.scope():
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        result = timed.call()
        peak = cuda.max_memory_allocated()
        del result
    return int(peak - before)
