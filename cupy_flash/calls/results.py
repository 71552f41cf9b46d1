"""New arrays that calls on a GPU return, and where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash.arrays.kinds import to_torch
from cupy_flash.arrays.torch_arrays import new_tensor, tensor_types
from cupy_flash.gpu.environment import cupy_module

# A shape and a dtype.
ResultSpec = tuple[tuple[int, ...], np.dtype]


def is_tensor(array: Any) -> bool:
    """Whether an array is torch's."""
    return array.__class__ in tensor_types()


def as_tensor(array: Any) -> Any:
    """A result of a call with tensors, which is CuPy's where kernels read a copy of q."""
    return array if is_tensor(array) else to_torch(array)


def empty(like: Any, spec: ResultSpec, *, of_torch: bool) -> tuple[Any, int]:
    """A new array on the current device and its address: a tensor beside a tensor, else CuPy's."""
    shape, dtype = spec
    if of_torch:
        tensor = new_tensor(like, shape, dtype)
        return tensor, tensor.data_ptr()
    array = cupy_module().ndarray(shape, dtype)
    return array, array.data.ptr
