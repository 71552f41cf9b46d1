"""Tensors of torch on a GPU, read where they lie and answered by tensors of torch's own memory.

DLPack costs 25 us for each array that goes in or out; what a launch needs of a tensor can be asked
of it in 1 us.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np


def is_torch_on_gpu(*arrays: Any) -> bool:
    """Whether all are plain tensors of torch in CUDA memory that kernels may read, or None.

    Others go through DLPack, which says why it takes them or not: such as those that require
    gradients, unless autograd is not recording, and those of other subclasses than parameters,
    which may mean something else by their memory.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    plain, strided, dtypes = _plain_types(), torch.strided, _dtypes()
    requires_grad = False
    for array in arrays:
        if array is None:
            continue
        if not (
            array.__class__ in plain
            and array.is_cuda
            and array.layout is strided
            and array.dtype in dtypes
        ):
            return False
        requires_grad = requires_grad or array.requires_grad
    return not (requires_grad and torch.is_grad_enabled())


def tensor_types() -> tuple[Any, ...]:
    """Types of plain tensors of torch; none while torch is not imported."""
    return () if sys.modules.get("torch") is None else _plain_types()


def _one_of_cupy(itemsize: int) -> Any:
    """A tensor of one integer on the current device, in CuPy's memory."""
    import torch

    return torch.from_dlpack(_cupy().zeros((), f"int{8 * itemsize}"))


def tensor_maker(shape: tuple[int, ...], dtype: np.dtype) -> Callable[[], Any]:
    """What makes C-contiguous tensors of torch's memory on the current device and its stream.

    Parameters
    ----------
    shape, dtype
        Of the tensors.
    """
    import torch

    # Like one element that stands for all: a shape and strides as arguments take 2 us more. It lies
    # in CuPy's memory, as what makes graphs of compiled functions counts what lies in torch's.
    one = _one_of_cupy(dtype.itemsize).view(_torch_dtypes()[dtype])
    contiguous = torch.contiguous_format
    return functools.partial(torch.empty_like, one.expand(shape), memory_format=contiguous)


def two_streams(tensor: Any) -> tuple[int, int] | None:
    """Torch's and CuPy's current streams, where they are two and the tensor's device is current.

    Of a tensor on another device than the current one a launch says that it may not.
    """
    cuda = _cuda()
    device = tensor.get_device()
    ours = cuda.get_current_stream().ptr
    theirs = _torch_stream()(device)
    if ours == theirs or device != cuda.runtime.getDevice():
        return None
    return theirs, ours


class _OfTorch(NamedTuple):
    """A stream as CuPy takes those of others."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


_AS_IT_IS = contextlib.nullcontext()


def on_stream_of(tensor: Any) -> AbstractContextManager[Any]:
    """Where CuPy's current stream is torch's, for calls of nothing but tensors.

    Then they are part of what torch captures in a graph, and autograd, in a thread of its own, has
    them on the stream that its forward calls were on.
    """
    streams = two_streams(tensor)
    if streams is None:
        return _AS_IT_IS
    cuda = _cuda()
    theirs, _ = streams
    if hasattr(cuda.Stream, "from_external"):
        stream: AbstractContextManager[Any] = cuda.Stream.from_external(_OfTorch(theirs))
    else:  # CuPy 13
        stream = cuda.ExternalStream(theirs, tensor.get_device())
    return stream


def order(first: int, second: int) -> None:
    """Have one stream of the current device wait for what is queued on another."""
    cuda = _cuda()
    # An event of the thread's own: another may be about to record one that is shared. Making one
    # takes longer than recording it and waiting for it, 0.8 us.
    events, device = _of_thread.events, cuda.runtime.getDevice()
    event = events.get(device)
    if event is None:
        event = events[device] = cuda.Event(disable_timing=True)
    cuda.runtime.eventRecord(event.ptr, first)
    cuda.runtime.streamWaitEvent(second, event.ptr)


class _OfThread(threading.local):
    """Events of a thread by their device."""

    def __init__(self) -> None:
        self.events: dict[int, Any] = {}


_of_thread = _OfThread()


def tensor_as_cupy(tensor: Any) -> Any:
    """A CuPy array over the memory of a tensor on a GPU."""
    cuda, dtype = _cuda(), _dtypes()[tensor.dtype]
    size = tensor.untyped_storage().nbytes()
    memory = cuda.UnownedMemory(tensor.data_ptr(), size, tensor, tensor.get_device())
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    return _cupy().ndarray(tuple(tensor.shape), dtype, cuda.MemoryPointer(memory, 0), strides)


@functools.cache
def _cupy() -> Any:
    import cupy

    return cupy


def _cuda() -> Any:
    return _cupy().cuda


@functools.cache
def _plain_types() -> tuple[Any, ...]:
    import torch

    return torch.Tensor, torch.nn.Parameter


@functools.cache
def _dtypes() -> dict[Any, np.dtype]:
    """NumPy's dtypes by torch's, of what attention is computed in, of caches and of lengths."""
    import ml_dtypes
    import torch

    return {
        torch.float16: np.dtype(np.float16),
        torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
        torch.float32: np.dtype(np.float32),
        torch.float64: np.dtype(np.float64),
        torch.int32: np.dtype(np.int32),
    } | {
        # Of caches; older releases have no float8.
        getattr(torch, name): np.dtype(dtype)
        for name, dtype in (("int8", np.int8), ("float8_e4m3fn", ml_dtypes.float8_e4m3fn))
        if hasattr(torch, name)
    }


@functools.cache
def _torch_dtypes() -> dict[np.dtype, Any]:
    found = {dtype: other for other, dtype in _dtypes().items()}
    return found | {np.dtype(np.uint8): importlib.import_module("torch").uint8}


@functools.cache
def _torch_stream() -> Any:
    """What gives the handle of torch's current stream on a device."""
    import torch

    # Where it is there: the public way takes 2 us and makes an object of each stream.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)
