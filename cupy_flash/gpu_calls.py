"""What the modules that launch kernels do alike: CuPy itself, keys of arrays, devices, kernels."""

from __future__ import annotations

import functools
from typing import Any

from cupy_flash.compiler import kernel_cache
from cupy_flash.planner import Plan
from cupy_flash.problem import MAX_ALIGNMENT

# A kernel, its grid, its thread block, and the dynamic shared memory of a block in bytes.
LoadedLaunch = tuple[Any, tuple[int, int, int], tuple[int, int, int], int]


@functools.cache
def cupy_module() -> Any:
    """CuPy, which is imported when the first call needs it."""
    # An import statement in the call path would take half a microsecond each time.
    import cupy

    return cupy


def array_key(array: Any) -> tuple[Any, ...]:
    """What plans and checks depend on in a CuPy array."""
    data, dtype = array.data, array.dtype
    alignment = data.ptr & (MAX_ALIGNMENT - 1)
    # dtype.num, as hashing a dtype takes a microsecond; it is that of both byte orders.
    return (data.device_id, array.shape, array.strides, dtype.num, dtype.isnative, alignment)


def require_device(device_id: int, **arrays: Any) -> None:
    """Raise ValueError, naming the array, unless all that are not None lie on the device."""
    for name, array in arrays.items():
        if array is not None and array.data.device_id != device_id:
            raise ValueError(
                f"{name} lies on device {array.data.device_id}, but the current device is "
                f"{device_id}; have all arrays on one device and call within "
                f"`with cupy.cuda.Device({array.data.device_id})`"
            )


def loaded_launches(plan: Plan) -> tuple[LoadedLaunch, ...]:
    """The plan's launches in order, compiled and loaded; none where there is nothing to compute."""
    if plan.unit is None or plan.problem.is_empty:
        return ()
    kernels = kernel_cache.get(plan.unit, {e.entry: e.shared_memory for e in plan.launches})
    return tuple(
        (kernels[e.entry], e.grid, (e.threads, 1, 1), e.shared_memory) for e in plan.launches
    )
