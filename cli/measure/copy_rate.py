"""How fast the GPU copies memory: what reading a cache is measured by."""

from __future__ import annotations

import functools

from .timing import GpuTimer, Timed, spread

COPIED_BYTES = 1 << 30
_WARMUP = 3
_REPEATS = 20


def measure() -> float:
    """TB/s of a plain copy on the current device, bytes read and bytes written together."""
    import cupy

    source, target = (cupy.zeros(COPIED_BYTES, "uint8") for _ in range(2))
    copy = functools.partial(
        target.data.copy_from_device_async,
        source.data,
        COPIED_BYTES,
        cupy.cuda.get_current_stream(),
    )
    (times,) = GpuTimer().interleaved([Timed(copy)], _WARMUP, [_REPEATS])
    return terabytes_per_second(spread(times).median)


def terabytes_per_second(milliseconds: float) -> float:
    """The rate of a copy that took so long."""
    return 2 * COPIED_BYTES / milliseconds / 1e9
