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


def result_allocator(
    specs: Sequence[ResultSpec | None], *, uses_torch: bool, workspace: int | None = None
) -> ResultAllocator:
    """Return a function that allocates C-contiguous torch tensors or CuPy arrays of these specs.

    Parameters
    ----------
    specs
        Shape and dtype of each result, or None for a result that is not requested.
    uses_torch
        Whether torch allocates the results.
    workspace
        Size in bytes of a workspace, which is allocated after the results: the object that owns it
        and its address follow those of the results. None if nothing follows the results.
    """
    wanted = [(index, *spec) for index, spec in enumerate(specs) if spec is not None]
    count = len(specs) + (workspace is not None)
    none, nowhere = [None] * count, [0] * count
    # The functions below use loops, because a comprehension costs a Python function call.
    if uses_torch:
        if workspace:
            wanted.append((len(specs), (workspace,), np.dtype(np.uint8)))
        allocators = [(index, tensor_maker(shape, dtype)) for index, shape, dtype in wanted]

        def new_tensors() -> tuple[list[Any], list[int]]:
            tensors: list[Any] = none.copy()
            addresses = nowhere.copy()
            for index, make in allocators:
                tensor = tensors[index] = make()
                addresses[index] = tensor.data_ptr()
            return tensors, addresses

        return new_tensors
    make_array, alloc = _array_maker(), cupy_module().cuda.alloc
    groups = _allocations(wanted, workspace or 0)

    def new_arrays() -> tuple[list[Any], list[int]]:
        arrays: list[Any] = none.copy()
        addresses = nowhere.copy()
        for size, parts, workspace_offset in groups:
            memory = alloc(size)
            address = memory.ptr
            for offset, index, shape, dtype in parts:
                # `memory + 0` would create a second object for the same address.
                place = memory + offset if offset else memory
                arrays[index], addresses[index] = make_array(shape, dtype, place), address + offset
            if workspace_offset is not None:
                arrays[-1], addresses[-1] = memory, address + workspace_offset
        return arrays, addresses

    return new_arrays


def _array_maker() -> Callable[[tuple[int, ...], np.dtype, Any], Any]:
    """Return a function that creates a C-contiguous CuPy array of a shape and dtype in memory."""
    ndarray = cupy_module().ndarray
    base = ndarray.__base__
    # The constructor of `ndarray` is a Python-level wrapper of these two methods, and takes 0.4 us
    # longer. A CuPy without the private method is used through the constructor.
    new, initialize = base.__new__, getattr(base, "_init", None)
    if initialize is None:
        return ndarray

    def make_array(shape: tuple[int, ...], dtype: np.dtype, memory: Any) -> Any:
        array = new(ndarray)
        initialize(array, shape, dtype, memory)
        return array

    return make_array


# Size in bytes, the offset, index, shape and dtype of each array, and the offset of the workspace.
_Allocation = tuple[int, list[tuple[int, int, tuple[int, ...], np.dtype]], int | None]


def _allocations(
    wanted: Sequence[tuple[int, tuple[int, ...], np.dtype]], workspace: int
) -> list[_Allocation]:
    """Return the allocations of the arrays, and of a workspace unless its size is 0.

    Small arrays of similar size, such as gradients, are placed in one allocation, because each
    takes 1 us of host time. A workspace that is not much larger joins them. An array that outlives
    the others then wastes little memory.
    """
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in wanted]
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    total, smallest = sum(padded), min(sizes, default=0)
    result: list[_Allocation]
    if total > _MOST_TOGETHER or max(sizes, default=0) > _MOST_TIMES * smallest:
        result = [(size, [(0, *array)], None) for size, array in zip(sizes, wanted, strict=True)]
    else:
        offsets = itertools.accumulate(padded, initial=0)
        parts = [(offset, *array) for offset, array in zip(offsets, wanted, strict=False)]
        if (
            workspace
            and total + workspace <= _MOST_TOGETHER
            and workspace <= _MOST_TIMES * smallest
        ):
            return [(total + workspace, parts, total)]
        result = [(total, parts, None)] if wanted else []
    return [*result, (workspace, [], 0)] if workspace else result
