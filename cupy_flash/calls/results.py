"""New arrays that calls on a GPU return, and where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_flash.arrays.kinds import to_torch
from cupy_flash.arrays.torch_arrays import tensor_maker, tensor_types
from cupy_flash.gpu.environment import cupy_module

# A shape and a dtype.
ResultSpec = tuple[tuple[int, ...], np.dtype]
# Makes a new array and says its address.
Maker = Callable[[], tuple[Any, int]]


def is_tensor(array: Any) -> bool:
    """Whether an array is torch's."""
    return array.__class__ in tensor_types()


def as_tensor(array: Any) -> Any:
    """A result of a call with tensors, which is CuPy's where kernels read a copy of q."""
    return array if is_tensor(array) else to_torch(array)


def memory_maker(size: int, *, of_torch: bool) -> Maker | None:
    """What makes workspaces of so many bytes, of torch's memory or CuPy's; None of none.

    Torch keeps the memory of its graphs apart, and so no pool of CuPy's has to.
    """
    if size == 0:
        return None
    if of_torch:
        return maker(((size,), np.dtype(np.uint8)), of_torch=True)
    alloc = cupy_module().cuda.alloc

    def new_memory() -> tuple[Any, int]:
        memory = alloc(size)
        return memory, memory.ptr

    return new_memory


def maker(spec: ResultSpec, *, of_torch: bool) -> Maker:
    """What makes C-contiguous arrays on the current device: tensors, else CuPy's."""
    shape, dtype = spec
    cupy = cupy_module()
    if not of_torch:
        ndarray = cupy.ndarray

        def new_array() -> tuple[Any, int]:
            array = ndarray(shape, dtype)
            return array, array.data.ptr

        return new_array
    make = tensor_maker(shape, dtype)

    def new_tensor() -> tuple[Any, int]:
        tensor = make()
        return tensor, tensor.data_ptr()

    return new_tensor
