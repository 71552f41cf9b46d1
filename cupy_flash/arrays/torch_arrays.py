"""Torch tensors on a GPU, read without a copy, and results in memory that torch allocates.

DLPack takes 25 us for each array that is passed in or out. Reading what a launch needs from the
tensor itself takes 1 us.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np


def is_torch_on_gpu(*arrays: Any) -> bool:
    """Return whether each argument is None or a torch tensor on a GPU that kernels can read as is.

    `resolved` converts any other tensor to such a tensor, or raises an error that says why not.
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
            and not array.is_neg()
        ):
            return False
        requires_grad = requires_grad or array.requires_grad
    if requires_grad and torch.is_grad_enabled():
        return False
    return not may_be_transformed() or all(x is None or untracked_part(x) is None for x in arrays)


def is_any_tensor(array: Any) -> bool:
    """Return whether an array is a tensor of torch, possibly of a subclass."""
    torch = sys.modules.get("torch")
    # While another thread imports torch, its module exists but may be empty.
    return torch is not None and isinstance(array, getattr(torch, "Tensor", ()))


def random_seed(tensor: Any) -> Any:
    """Return a seed and an offset from PyTorch's default generator of a tensor's device.

    They are drawn by an operation on the device: it does not synchronize, and CUDA graphs and
    graphs of `torch.compile` draw other numbers each time they run. Checkpointing restores the
    generator before it computes the call again. `torch.compile` traces this function.
    """
    torch = sys.modules["torch"]
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=tensor.device)


def is_recorded(array: Any) -> bool:
    """Return whether an array is a tensor of torch that requires a gradient."""
    return is_any_tensor(array) and bool(array.requires_grad)


def is_tracked(array: Any) -> bool:
    """Return whether a tensor requires a gradient, or belongs to a torch.func transform."""
    return is_recorded(array) or (is_any_tensor(array) and _is_wrapped(array))


def _is_wrapped(tensor: Any) -> bool:
    return bool(sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(tensor))


def without_history(array: Any) -> Any:
    """Return a tensor without what autograd and transforms record of it; other objects unchanged.

    A tensor that belongs to a torch.func transform has no memory. The result for such a tensor of
    floats is an array of NaN with its dtype and shape.
    """
    if not is_tracked(array):
        return array
    if not _is_wrapped(array):
        return array.detach()
    dtype = _dtypes().get(array.dtype) if array.is_floating_point() else None
    return array if dtype is None else np.broadcast_to(np.array(np.nan, dtype), tuple(array.shape))


def memory_of(tensor: Any) -> tuple[Any, ...] | None:
    """Return what identifies the memory of a plain tensor; None for one that may have none.

    Subclasses such as fake tensors have no address, nor have tensors inside of transforms.
    """
    if tensor.__class__ not in tensor_types():
        return None
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    except RuntimeError:
        return None


def outside_transforms(array: Any) -> AbstractContextManager[Any]:
    """Return a context without torch.func transforms, to read a tensor that belongs to none."""
    if not (is_any_tensor(array) and is_in_transform()) or _is_wrapped(array):
        return contextlib.nullcontext()
    from torch._functorch import pyfunctorch

    without: AbstractContextManager[Any] = pyfunctorch.temporarily_clear_interpreter_stack()
    return without


def is_in_transform() -> bool:
    """Return whether a torch.func transform is active."""
    return _transform_state()[1]() is not None


def is_traced() -> bool:
    """Return whether torch traces a graph, or works on tensors without values."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    # Modes with a key are those of proxy tensors, fake tensors and functionalization. Other modes,
    # such as operation counters, do not change tensors.
    has_key = any(getattr(x, "_mode_key", None) for x in _get_current_dispatch_mode_stack())
    return has_key or torch._C._get_tracing_state() is not None


def may_be_transformed() -> bool:
    """Return whether tensors may carry more than their memory holds; see `untracked_part`.

    This is the case while a torch.func transform, a forward-mode level, a dispatch mode or
    torch.jit.trace is active.
    """
    forward_ad, top_interpreter, dispatch_modes, tracing_state = _transform_state()
    return (
        forward_ad._current_level >= 0
        or top_interpreter() is not None
        or dispatch_modes() > 0
        or tracing_state() is not None
    )


@functools.cache
def _transform_state() -> tuple[Any, ...]:
    """Return torch's module of forward-mode levels, and functions that return other states."""
    import torch

    private = torch._C
    forward_ad: Any = torch.autograd.forward_ad
    if not hasattr(forward_ad, "_current_level"):
        # A level counts as active.
        forward_ad = SimpleNamespace(_current_level=0)
    return (
        forward_ad,
        private._functorch.peek_interpreter_stack,
        private._len_torch_dispatch_stack,
        private._get_tracing_state,
    )


def in_forward_mode() -> bool:
    """Return whether tensors may have forward-mode tangents."""
    forward_ad, *_ = _transform_state()
    return bool(forward_ad._current_level >= 0)


def untracked_part(tensor: Any) -> str | None:
    """Return a message on what a read of a tensor's memory alone would lose, or None."""
    if is_traced():
        return (
            "is passed while torch traces a graph, which does not record attention and keeps its "
            "result as a constant; call a function of cupy_flash.torch under torch.compile or "
            "torch.export"
        )
    # Inside of a transform, torch wraps every tensor that is passed to an operation.
    if is_in_transform():
        return IN_TRANSFORM
    return NO_FORWARD_MODE if has_tangent(tensor) else None


IN_TRANSFORM = (
    "is passed inside of a transform such as torch.func.grad, jvp, vmap or is_grads_batched, which "
    "is not supported here; call a function of cupy_flash.torch, which supports grad, vjp, jvp and "
    "vmap"
)
NO_FORWARD_MODE = (
    "has a tangent, and only q, k, v, bias, sinks, slopes and, in torch.func.jvp, captures of a "
    "ScoreMod have forward-mode derivatives, in calls of cupy_flash.torch outside of graphs; pass "
    "a detached tensor, or compute gradients in reverse mode"
)


def has_tangent(tensor: Any) -> bool:
    """Return whether a tensor has a forward-mode tangent at the current level."""
    unpacked = sys.modules["torch"].autograd.forward_ad.unpack_dual(tensor)
    return unpacked.tangent is not None


def require_whole(name: str, tensor: Any) -> None:
    """Raise NotImplementedError for a tensor that carries more than its memory holds."""
    if may_be_transformed() and (part := untracked_part(tensor)) is not None:
        raise NotImplementedError(f"{name} {part}")


def resolved(name: str, array: Any, *, is_written: bool = False) -> Any:
    """Return a tensor as a plain tensor whose memory holds its values; other objects unchanged.

    Parameters
    ----------
    name
        Name of the argument, for messages.
    array
        Any object. The result for a tensor is the tensor itself, a view of it, or a copy if the
        tensor is lazy (a negation, a conjugation or zeros without memory).
    is_written
        Whether the array is written to, so that a copy would not be enough.

    Raises
    ------
    NotImplementedError
        For a tensor inside of a transform, with a tangent, or while a graph is traced.
    TypeError
        For a tensor that has no memory, is of a subclass with operations of its own, is not
        strided, requires a gradient while autograd records, or is lazy and written to.
    """
    if not is_any_tensor(array):
        return array
    import torch

    tensor, kind = array, type(array)
    require_whole(name, tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name} is a {kind.__name__}, a subclass of torch.Tensor whose memory may not hold "
            "its elements; pass a plain tensor"
        )
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor):
        raise NotImplementedError(f"{name} {IN_TRANSFORM}")
    if tensor.is_meta:
        raise TypeError(f"{name} is a meta tensor, which has no memory; pass a real tensor")
    if tensor.layout is not torch.strided or tensor.is_nested:
        if not tensor.is_nested:
            raise TypeError(f"{name} has the layout {tensor.layout}; expected torch.strided")
        raise _nested_error(name)
    if tensor.requires_grad:
        if torch.is_grad_enabled():
            raise TypeError(
                f"{name} requires a gradient, which is not recorded here; pass {name}.detach(), or "
                "call the function of cupy_flash.torch, which has gradients for q, k, v, bias, "
                "sinks, alibi_slopes and captures of a ScoreMod"
            )
        tensor = tensor.detach()
    if kind not in _plain_types():
        tensor = tensor.as_subclass(torch.Tensor)
    if not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()):
        return tensor
    if is_written:
        raise TypeError(
            f"{name} is a lazy view, whose memory does not hold its negated, conjugated or zero "
            f"elements; pass {name}.clone()"
        )
    # clone() allocates memory for zeros that have none.
    return tensor.clone().resolve_neg().resolve_conj()


def _nested_error(name: str) -> TypeError:
    return TypeError(
        f"{name} has the layout nested; expected torch.strided, or torch.jagged in a call of "
        "cupy_flash.torch: torch.nested.nested_tensor(..., layout=torch.jagged)"
    )


def unreadable(tensor: Any) -> Exception:
    """Return the error for a tensor that has no shape, or elements but no memory."""
    if tensor.is_nested:
        return _nested_error("a tensor")
    return NotImplementedError(
        f"a tensor of shape {tuple(tensor.shape)} has no memory: it represents zeros, or belongs "
        "to a transform such as vmap or is_grads_batched, which attention does not support; pass "
        "its clone()"
    )


def count_writes(*arrays: Any) -> None:
    """Increment the version counters of those arrays that are tensors.

    Autograd compares versions to detect writes to tensors that it saved for a backward pass.
    """
    written = [array for array in arrays if is_any_tensor(array)]
    if written:
        sys.modules["torch"].autograd.graph.increment_version(written)


def version_of(tensor: Any) -> int | None:
    """Return the number of writes that autograd counted; None for an inference tensor."""
    return None if tensor.is_inference() else int(tensor._version)


def tensor_types() -> tuple[Any, ...]:
    """Return the types of plain torch tensors, or an empty tuple if torch is not imported."""
    return () if sys.modules.get("torch") is None else _plain_types()


def tensor_maker(shape: tuple[int, ...], dtype: np.dtype) -> Callable[[], Any]:
    """Return a function that allocates C-contiguous tensors on torch's current stream."""
    import torch

    torch_dtype = _torch_dtypes()[dtype]
    # The strides of empty arrays are those that torch gives them.
    strides = tuple(math.prod(max(n, 1) for n in shape[axis:]) for axis in range(1, len(shape) + 1))
    if (empty_strided := _empty_strided()) is not None:
        return functools.partial(empty_strided, shape, strides, torch_dtype)
    # empty_like() is 2 us faster than empty() with a shape and strides. The tensor that it takes
    # the shape from has no memory of torch, because torch's CUDA graph trees count allocations.
    like = _without_memory(shape, strides, dtype.itemsize).view(torch_dtype)
    return functools.partial(torch.empty_like, like)


@functools.cache
def _empty_strided() -> Any:
    """Return torch's function that allocates a tensor of a shape, strides and dtype; else None.

    It allocates on the current device. The code that torch.compile generates calls this private
    function, because it skips torch's dispatcher: a tensor takes 0.3 us less than by empty_like().
    """
    import torch

    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(guards, "_empty_strided_cuda", None)


def _without_memory(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Any:
    """Return a tensor of integers on the current device that must not be accessed.

    Its address is that of a single element, in memory of CuPy's pool.
    """
    import torch

    dtype = f"int{8 * itemsize}"
    element = _cupy().zeros((), dtype)
    steps = tuple(itemsize * stride for stride in strides)
    return torch.from_dlpack(_cupy().ndarray(shape, dtype, element.data, steps))


def new_bytes(size: int) -> Any:
    """Return a tensor of `size` bytes on the current device.

    Unlike `tensor_maker`, this allocates nothing from CuPy, which would be an error while torch
    captures a graph in its default mode.
    """
    torch = sys.modules["torch"]
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def two_streams(tensor: Any) -> tuple[int, int] | None:
    """Return torch's and CuPy's current streams, or None if no synchronization is needed.

    No synchronization is needed if the streams are equal. If the tensor is not on the current
    device, the result is None as well, and the launch raises an error.
    """
    cuda = _cuda()
    device = tensor.get_device()
    ours = cuda.get_current_stream().ptr
    theirs = _torch_stream()(device)
    if ours == theirs or device != cuda.runtime.getDevice():
        return None
    return theirs, ours


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured from torch's current stream."""
    return bool(sys.modules["torch"].cuda.is_current_stream_capturing())


def with_torch_memory() -> AbstractContextManager[Any]:
    """Return a context in which torch allocates the memory of new CuPy arrays.

    A CUDA graph of torch keeps the memory that torch allocates while the graph is captured, but not
    that of CuPy's pool.
    """
    return _cuda().using_allocator(_torch_allocator().malloc)


@functools.cache
def _torch_allocator() -> Any:
    memory = sys.modules["torch"].cuda

    def allocate(size: int, device: int) -> int:
        address: int = memory.caching_allocator_alloc(size, device, current_stream(device))
        return address

    def free(address: int, device: int) -> None:
        memory.caching_allocator_delete(address)

    return _cuda().PythonFunctionAllocator(allocate, free)


def current_stream(device: int) -> int:
    """Return the handle of torch's current stream on a device."""
    return _torch_stream()(device)


class _ExternalStream(NamedTuple):
    """Handle of a stream, with the protocol by which CuPy adopts external streams."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


_AS_IT_IS = contextlib.nullcontext()


def on_stream_of(tensor: Any) -> AbstractContextManager[Any]:
    """Return a context in which CuPy's current stream is torch's, for calls of tensors only.

    Such calls become part of a CUDA graph that torch captures. In a backward pass, they run on the
    stream of the forward call, which autograd selects in its own thread.
    """
    streams = two_streams(tensor)
    if streams is None:
        return _AS_IT_IS
    theirs, _ = streams
    return external_stream(theirs, tensor.get_device())


def external_stream(handle: int, device: int) -> AbstractContextManager[Any]:
    """Return a context in which CuPy's current stream is another library's, given its handle."""
    cuda = _cuda()
    if hasattr(cuda.Stream, "from_external"):
        stream: AbstractContextManager[Any] = cuda.Stream.from_external(_ExternalStream(handle))
    else:  # CuPy 13
        stream = cuda.ExternalStream(handle, device)
    return stream


def order(first: int, second: int) -> None:
    """Make a stream of the current device wait for the work that is queued on another stream."""
    cuda = _cuda()
    # Each thread has its own event, because another thread might be about to record a shared one.
    # Events are kept, because creating one takes longer than recording it and waiting for it, which
    # takes 0.8 us.
    events, device = _thread_state.events, cuda.runtime.getDevice()
    event = events.get(device)
    if event is None:
        event = events[device] = cuda.Event(disable_timing=True)
    cuda.runtime.eventRecord(event.ptr, first)
    cuda.runtime.streamWaitEvent(second, event.ptr)


class _ThreadState(threading.local):
    """CUDA events of a thread, keyed by device."""

    def __init__(self) -> None:
        self.events: dict[int, Any] = {}


_thread_state = _ThreadState()


def tensor_as_cupy(tensor: Any) -> Any:
    """Return a CuPy array over the memory of a tensor on a GPU."""
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
    """Return NumPy's dtypes keyed by torch's: those of inputs, caches, lengths, masks, captures."""
    import ml_dtypes
    import torch

    names = "float16 bfloat16 float32 float64 int32 int8 float8_e4m3fn bool uint8 int64 uint64"
    # Older releases of torch have neither float8 nor uint64.
    return {
        getattr(torch, name): np.dtype(getattr(ml_dtypes, name, name))
        for name in names.split()
        if hasattr(torch, name)
    }


@functools.cache
def _torch_dtypes() -> dict[np.dtype, Any]:
    return {dtype: other for other, dtype in _dtypes().items()}


@functools.cache
def _torch_stream() -> Any:
    """Return a function that returns the handle of torch's current stream on a device."""
    import torch

    # The private function is faster: the public one takes 2 us and creates an object per stream.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)
