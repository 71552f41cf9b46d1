"""Allocation of the results and workspaces of calls on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupy_flash.arrays.kinds import to_torch
from cupy_flash.arrays.torch_arrays import new_bytes, tensor_maker, tensor_types
from cupy_flash.gpu.environment import cupy_module

# Alignment of arrays in a common allocation, and maximum size of the allocation, in bytes.
_ALIGNMENT, _MOST_TOGETHER = 512, 1 << 20
# Largest ratio of the sizes of two arrays in one allocation.
_MOST_TIMES = 4
# Shape and dtype of a result.
ResultSpec = tuple[tuple[int, ...], np.dtype]
# Function that returns new arrays and their addresses; None and 0 for results not requested.
ResultAllocator = Callable[[], tuple[list[Any], list[int]]]
# Function that returns newly allocated memory and its address.
MemoryAllocator = Callable[[], tuple[Any, int]]


def is_tensor(array: Any) -> bool:
    """Return whether an array is a torch tensor."""
    return array.__class__ in tensor_types()


def as_tensor(array: Any) -> Any:
    """Return a result as a torch tensor; it is a CuPy array if kernels have read a copy of q.

    None, for a result that is not requested, stays None.
    """
    return array if array is None or is_tensor(array) else to_torch(array)


def memory_allocator(size: int, *, uses_torch: bool) -> MemoryAllocator | None:
    """Return a function that allocates `size` bytes by torch or CuPy, or None if `size` is 0.

    Torch keeps the memory of its CUDA graphs separate, so captured calls need no CuPy pool.
    """
    if size == 0:
        return None
    if uses_torch:
        make = tensor_maker((size,), np.dtype(np.uint8))

        def new_bytes_like() -> tuple[Any, int]:
            tensor = make()
            return tensor, tensor.data_ptr()

        return new_bytes_like
    alloc = cupy_module().cuda.alloc

    def new_memory() -> tuple[Any, int]:
        memory = alloc(size)
        return memory, memory.ptr

    return new_memory


def new_torch_memory(size: int) -> tuple[Any, int]:
    """Allocate `size` bytes by torch; return the tensor and its address."""
    tensor = new_bytes(size)
    return tensor, tensor.data_ptr()


def result_allocator(specs: Sequence[ResultSpec | None], *, uses_torch: bool) -> ResultAllocator:
    """Return a function that allocates C-contiguous torch tensors or CuPy arrays of these specs."""
    wanted = [(index, *spec) for index, spec in enumerate(specs) if spec is not None]
    none, nowhere = [None] * len(specs), [0] * len(specs)
    # The functions below use loops, because a comprehension costs a Python function call.
    if uses_torch:
        allocators = [(index, tensor_maker(shape, dtype)) for index, shape, dtype in wanted]

        def new_tensors() -> tuple[list[Any], list[int]]:
            tensors: list[Any] = none.copy()
            addresses = nowhere.copy()
            for index, make in allocators:
                tensor = tensors[index] = make()
                addresses[index] = tensor.data_ptr()
            return tensors, addresses

        return new_tensors
    ndarray, alloc = cupy_module().ndarray, cupy_module().cuda.alloc
    groups = _allocations(wanted)

    def new_arrays() -> tuple[list[Any], list[int]]:
        arrays: list[Any] = none.copy()
        addresses = nowhere.copy()
        for size, parts in groups:
            memory = alloc(size)
            address = memory.ptr
            for offset, index, shape, dtype in parts:
                # `memory + 0` would create a second object for the same address.
                place = memory + offset if offset else memory
                arrays[index], addresses[index] = ndarray(shape, dtype, place), address + offset
        return arrays, addresses

    return new_arrays


def _allocations(
    wanted: Sequence[tuple[int, tuple[int, ...], np.dtype]],
) -> list[tuple[int, list[tuple[int, int, tuple[int, ...], np.dtype]]]]:
    """Return the size in bytes of each allocation, and its arrays with their offsets.

    Small arrays of similar size, such as gradients, are placed in one allocation, because each
    takes 1 us of host time. An array that outlives the others then wastes little memory.
    """
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in wanted]
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    if sum(padded) > _MOST_TOGETHER or max(sizes, default=0) > _MOST_TIMES * min(sizes, default=0):
        return [(size, [(0, *allocation)]) for size, allocation in zip(sizes, wanted, strict=True)]
    offsets = itertools.accumulate(padded, initial=0)
    parts = [(offset, *allocation) for offset, allocation in zip(offsets, wanted, strict=False)]
    return [(sum(padded), parts)] if wanted else []
