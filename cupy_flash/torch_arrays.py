"""Tensors of torch on a GPU, read where they lie and answered by tensors of torch's own memory.

DLPack costs 25 us for each array that goes in or out; what a launch needs of a tensor can be asked
of it in 1 us.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np


def is_torch_on_gpu(*arrays: Any) -> bool:
    """Whether all are plain tensors of torch in CUDA memory that kernels may read.

    Others, such as those that require gradients, go through DLPack, which says why it takes them or
    not. So do subclasses, which may mean something else by their memory.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    tensor, strided = torch.Tensor, torch.strided
    for array in arrays:
        if not (
            type(array) is tensor
            and array.is_cuda
            and array.layout is strided
            and not array.requires_grad
            and array.dtype in _dtypes()
        ):
            return False
    return True


class TorchArray:
    """A tensor with the attributes of a CuPy array that a launch asks for.

    Attributes
    ----------
    tensor
        Of torch, see `is_torch_on_gpu`.
    ptr, device_id
        As of a CuPy array's `data`.
    """

    __slots__ = ("device_id", "ptr", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.ptr: int = tensor.data_ptr()
        self.device_id: int = tensor.get_device()

    @property
    def data(self) -> TorchArray:
        """What has `ptr` and `device_id`."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(self.tensor.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element of an axis to the next."""
        size = self.itemsize
        return tuple(stride * size for stride in self.tensor.stride())

    @property
    def dtype(self) -> np.dtype:
        """As NumPy has it."""
        return _dtypes()[self.tensor.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return int(self.tensor.ndim)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.tensor.numel())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> TorchArray:
        """A new tensor beside this one, of torch's memory and on its current stream."""
        return TorchArray(self.tensor.new_empty(shape, dtype=_torch_dtypes()[dtype.num]))

    def fill(self, value: float) -> None:
        """Set all elements, on CuPy's current stream."""
        as_cupy(self).fill(value)

    def behind_its_stream(self) -> TorchArray:
        """Have CuPy's current stream wait for what is queued on torch's; the array itself."""
        self._order(torch_first=True)
        return self

    def before_its_stream(self) -> TorchArray:
        """Have torch's current stream wait for what is queued on CuPy's; the array itself."""
        self._order(torch_first=False)
        return self

    def _order(self, *, torch_first: bool) -> None:
        cuda = _cuda()
        ours = cuda.get_current_stream().ptr
        theirs = _torch_stream()(self.device_id)
        # Of an array on another device than the current one a launch says that it may not.
        if ours == theirs or self.device_id != cuda.runtime.getDevice():
            return
        first, second = (theirs, ours) if torch_first else (ours, theirs)
        # An event of its own: another thread may be about to record one that is shared.
        event = cuda.Event(disable_timing=True)
        cuda.runtime.eventRecord(event.ptr, first)
        cuda.runtime.streamWaitEvent(second, event.ptr)


def as_cupy(array: Any) -> Any:
    """A CuPy array over the memory of a `TorchArray`; any other array as it is."""
    if not isinstance(array, TorchArray):
        return array
    cuda, tensor = _cuda(), array.tensor
    size = tensor.untyped_storage().nbytes()
    memory = cuda.UnownedMemory(array.ptr, size, tensor, array.device_id)
    return _cupy().ndarray(array.shape, array.dtype, cuda.MemoryPointer(memory, 0), array.strides)


@functools.cache
def _cupy() -> Any:
    import cupy

    return cupy


def _cuda() -> Any:
    return _cupy().cuda


@functools.cache
def _dtypes() -> dict[Any, np.dtype]:
    """NumPy's dtypes by torch's, of what attention is computed in and of lengths."""
    import ml_dtypes
    import torch

    return {
        torch.float16: np.dtype(np.float16),
        torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
        torch.float32: np.dtype(np.float32),
        torch.float64: np.dtype(np.float64),
        torch.int32: np.dtype(np.int32),
    }


@functools.cache
def _torch_dtypes() -> dict[int, Any]:
    # By number, as hashing a dtype takes a microsecond.
    return {dtype.num: other for other, dtype in _dtypes().items()}


@functools.cache
def _torch_stream() -> Any:
    """What gives the handle of torch's current stream on a device."""
    import torch

    # Where it is there: the public way takes 2 us and makes an object of each stream.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)
