"""Arrays in GPU memory that describe it by ``__cuda_array_interface__``, as those of Numba do.

Arrays of libraries that support DLPack as well are read through DLPack.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_flash.arrays.torch_arrays import order
from cupy_flash.errors import needs_cupy

# Handle of the legacy default stream, in this protocol and in CUDA.
_DEFAULT_STREAM = 1


def is_foreign_array(value: Any) -> bool:
    """Return whether a value is an array that DLPack or this protocol can read."""
    # Torch computes the second attribute, and raises errors for some tensors.
    return hasattr(value, "__dlpack_device__") or hasattr(value, "__cuda_array_interface__")


def from_interface(name: str, array: Any) -> Any:
    """Return a CuPy array over the memory of an array.

    CuPy's current stream waits for the stream that the interface names.

    Raises
    ------
    TypeError
        If the array has a mask, or CuPy is not installed.
    """
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise TypeError(f"{name} has a mask, which would be lost; pass an array without a mask")
    try:
        cupy = _cupy()
    except ImportError as error:
        raise needs_cupy(name) from error
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    strides = interface.get("strides")
    address, _ = interface["data"]
    # Memory of no bytes has no address, and is on the current device. Otherwise CUDA tells CuPy the
    # device of the address.
    if math.prod(shape) == 0:
        size, device = 0, cupy.cuda.runtime.getDevice()
    elif strides is None:
        size, device = math.prod(shape) * dtype.itemsize, -1
    else:
        steps = ((n - 1) * abs(stride) for n, stride in zip(shape, strides, strict=True))
        size, device = sum(steps) + dtype.itemsize, -1
    stream = interface.get("stream")
    ours = cupy.cuda.get_current_stream().ptr
    if stream is not None and stream != (ours or _DEFAULT_STREAM):
        order(stream, ours)
    memory = cupy.cuda.UnownedMemory(address, size, array, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def is_read_only(array: Any) -> bool:
    """Return whether an array says by this protocol that its memory must not be written."""
    if hasattr(array, "__dlpack_device__"):
        return False
    interface = getattr(array, "__cuda_array_interface__", None)
    return interface is not None and bool(interface["data"][1])


def interface_converter(array: Any) -> Callable[[Any], Any]:
    """Return a function that converts a CuPy result to the library of an array.

    Numba and PyCUDA can adopt memory. For arrays of other libraries the result stays a CuPy array,
    which these libraries can read by the same protocol. The stream of the array, by default the
    legacy default stream, waits for the result. Arrays of Numba name CuPy's current stream.
    """
    stream = array.__cuda_array_interface__.get("stream") or _DEFAULT_STREAM
    adopt = _ADOPTIONS.get(type(array).__module__.partition(".")[0])

    def convert(result: Any) -> Any:
        cuda = _cupy().cuda
        ours = cuda.get_current_stream().ptr
        # While a graph is captured, no stream outside of the capture may wait for it.
        if (ours or _DEFAULT_STREAM) != stream and not cuda.runtime.streamIsCapturing(ours):
            order(ours, stream)
        return result if adopt is None else adopt(result)

    return convert


def _to_numba(result: Any) -> Any:
    from numba import cuda

    # The new array names the stream that CuPy's interface names: the current one, which is that of
    # the call. Without `sync=False`, Numba would wait for this stream on the host.
    return cuda.as_cuda_array(result, sync=False)


def _to_pycuda(result: Any) -> Any:
    from pycuda.gpuarray import GPUArray

    return GPUArray(
        result.shape, result.dtype, base=result, gpudata=result.data.ptr, strides=result.strides
    )


# Functions that adopt a CuPy array, by the root module of a library.
_ADOPTIONS: dict[str, Callable[[Any], Any]] = {"numba": _to_numba, "pycuda": _to_pycuda}


@functools.cache
def _cupy() -> Any:
    import cupy

    return cupy
