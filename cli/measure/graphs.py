"""CUDA graphs of calls: what a call costs the GPU, without what it costs the host."""

from __future__ import annotations

import functools
from typing import Any

from .timing import Timed


def replayed(timed: Timed) -> Timed | None:
    """The GPU's part of a call on CuPy arrays: its work, captured once, to be launched repeatedly.

    Parameters
    ----------
    timed
        A call that was made before, so that nothing is compiled any more.

    Returns
    -------
    Timed
        Launches the work on CuPy's current stream. None if the call cannot be captured.
    """
    import cupy

    # Memory of the graph's own: what a shared pool hands back to the system may be unmapped while
    # the graph still writes to it.
    pool = cupy.cuda.MemoryPool()
    # Not the default stream, which cannot be captured.
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    try:
        with stream, cupy.cuda.using_allocator(pool.malloc), timed.scope():
            # What the capture allocates is in the pool after this.
            timed.call()
            stream.synchronize()
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
            try:
                result = timed.call()
            finally:
                graph = stream.end_capture()
    except (RuntimeError, MemoryError):
        return None
    return Timed(functools.partial(_launch, graph, (stream, pool, result)))


def _launch(graph: Any, held: tuple[Any, ...]) -> None:
    # What is held lives as long as the graph, which uses it.
    graph.launch()
