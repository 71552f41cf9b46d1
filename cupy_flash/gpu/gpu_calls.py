"""What the modules that launch kernels do alike: CuPy itself, keys of arrays, devices, kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from cupy_flash.calls.arrays import as_cupy
from cupy_flash.calls.jax_arrays import JaxMemory
from cupy_flash.calls.torch_arrays import new_tensor, tensor_type
from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.problem import MAX_ALIGNMENT

# A kernel, its grid, its thread block, and the dynamic shared memory of a block in bytes.
LoadedLaunch = tuple[Any, tuple[int, int, int], tuple[int, int, int], int]


@functools.cache
def cupy_module() -> Any:
    """CuPy, which is imported when the first call needs it."""
    # An import statement in the call path would take half a microsecond each time.
    import cupy

    return cupy


def facts_of(arrays: Iterable[Any]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """What plans and checks depend on in arrays on a GPU, as part of a key; and their addresses.

    Of an array that is absent, None and 0.
    """
    facts: list[Any] = []
    addresses: list[int] = []
    tensor = tensor_type()
    within = MAX_ALIGNMENT - 1
    # A loop, as a function for each array would cost half a microsecond a call.
    for array in arrays:
        if array is None:
            facts.append(None)
            addresses.append(0)
            continue
        kind = array.__class__
        if kind is tensor:
            address = array.data_ptr()
            addresses.append(address)
            facts += (
                array.shape,
                array.stride(),
                array.dtype,
                array.get_device(),
                address & within,
            )
        elif kind is JaxMemory:
            addresses.append(array.address)
            facts += array.facts
        else:
            data, dtype = array.data, array.dtype
            address = data.ptr
            addresses.append(address)
            facts += (
                array.shape,
                array.strides,
                # dtype.num, as hashing a dtype takes a microsecond; it is that of both byte orders.
                dtype.num,
                dtype.isnative,
                data.device_id,
                address & within,
            )
    return tuple(facts), tuple(addresses)


def require_device(device_id: int, arrays: Any) -> None:
    """Raise ValueError, naming the field, unless all that are not None lie on the device."""
    for name, array in zip(arrays._fields, arrays, strict=True):
        if array is not None and (its_id := as_cupy(array).data.device_id) != device_id:
            raise ValueError(
                f"{name} lies on device {its_id}, but the current device is {device_id}; have all "
                f"arrays on one device and call within `with cupy.cuda.Device({its_id})`"
            )


def loaded_launches(plan: Plan) -> tuple[LoadedLaunch, ...]:
    """The plan's launches in order, compiled and loaded; none where there is nothing to compute."""
    if plan.unit is None or plan.problem.is_empty:
        return ()
    kernels = kernel_cache.get(plan.unit, {e.entry: e.shared_memory for e in plan.launches})
    return tuple(
        (kernels[e.entry], e.grid, (e.threads, 1, 1), e.shared_memory) for e in plan.launches
    )


def empty(like: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A new array, of the same library as another."""
    if like.__class__ is tensor_type():
        return new_tensor(like, shape, dtype)
    return cupy_module().ndarray(shape, dtype)


def address_of_result(array: Any) -> int:
    """Address of the first element of a CuPy array or a tensor."""
    if array.__class__ is tensor_type():
        return int(array.data_ptr())
    return int(array.data.ptr)
