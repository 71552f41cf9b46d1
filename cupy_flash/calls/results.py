"""New arrays that calls on a GPU return, and where they lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupy_flash.arrays.kinds import to_torch
from cupy_flash.arrays.torch_arrays import new_bytes, tensor_maker, tensor_types
from cupy_flash.gpu.environment import cupy_module

# Bytes: what parts of an allocation begin at multiples of, and the most that is shared.
_ALIGNMENT, _MOST_TOGETHER = 512, 1 << 20
# How many times as large as another an array may be that shares an allocation with it.
_MOST_TIMES = 4
# A shape and a dtype.
ResultSpec = tuple[tuple[int, ...], np.dtype]
# Makes new arrays, None where none is asked for, and says their addresses, or 0.
Maker = Callable[[], tuple[list[Any], list[int]]]
# Makes memory, and says its address.
MemoryMaker = Callable[[], tuple[Any, int]]


def is_tensor(array: Any) -> bool:
    """Whether an array is torch's."""
    return array.__class__ in tensor_types()


def as_tensor(array: Any) -> Any:
    """A result of a call with tensors, which is CuPy's where kernels read a copy of q."""
    return array if is_tensor(array) else to_torch(array)


def memory_maker(size: int, *, of_torch: bool) -> MemoryMaker | None:
    """What makes workspaces of so many bytes, of torch's memory or CuPy's; None of none.

    Torch keeps the memory of its graphs apart, and so no pool of CuPy's has to.
    """
    if size == 0:
        return None
    if of_torch:
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
    """Allocate `size` bytes of torch's memory; return the tensor and its address."""
    tensor = new_bytes(size)
    return tensor, tensor.data_ptr()


def maker(specs: Sequence[ResultSpec | None], *, of_torch: bool) -> Maker:
    """What makes C-contiguous arrays on the current device: tensors, else CuPy's."""
    wanted = [(index, *spec) for index, spec in enumerate(specs) if spec is not None]
    none, nowhere = [None] * len(specs), [0] * len(specs)
    # Loops, as in each call a comprehension would cost as much as a function.
    if of_torch:
        makers = [(index, tensor_maker(shape, dtype)) for index, shape, dtype in wanted]

        def new_tensors() -> tuple[list[Any], list[int]]:
            tensors: list[Any] = none.copy()
            at = nowhere.copy()
            for index, make in makers:
                tensor = tensors[index] = make()
                at[index] = tensor.data_ptr()
            return tensors, at

        return new_tensors
    ndarray, alloc = cupy_module().ndarray, cupy_module().cuda.alloc
    groups = _allocations(wanted)

    def new_arrays() -> tuple[list[Any], list[int]]:
        arrays: list[Any] = none.copy()
        at = nowhere.copy()
        for size, parts in groups:
            memory = alloc(size)
            for offset, index, shape, dtype in parts:
                place = memory + offset
                arrays[index], at[index] = ndarray(shape, dtype, place), place.ptr
        return arrays, at

    return new_arrays


def _allocations(
    wanted: Sequence[tuple[int, tuple[int, ...], np.dtype]],
) -> list[tuple[int, list[tuple[int, int, tuple[int, ...], np.dtype]]]]:
    """Bytes of each allocation, and what lies at which offsets in it.

    Small arrays of about one size, as gradients, lie in one: there the host's time counts, of which
    an allocation takes 1 us. The last of them that is kept holds little more than its own memory.
    """
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in wanted]
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    if sum(padded) > _MOST_TOGETHER or max(sizes, default=0) > _MOST_TIMES * min(sizes, default=0):
        return [(size, [(0, *one)]) for size, one in zip(sizes, wanted, strict=True)]
    offsets = itertools.accumulate(padded, initial=0)
    parts = [(offset, *one) for offset, one in zip(offsets, wanted, strict=False)]
    return [(sum(padded), parts)] if wanted else []
