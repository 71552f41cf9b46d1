"""Arrays of JAX on a GPU, read where they lie, and results as such arrays.

DLPack, with what JAX does for it in Python, takes 30 us for each array that goes in, and more for
one that goes out; what is asked of an array here takes 4 us.
"""

from __future__ import annotations

import functools
import math
from typing import Any

# What DLPack calls CUDA memory.
_DLPACK_CUDA = 2


def is_jax(array: Any) -> bool:
    """Whether JAX or its library of compiled code defines the array's type."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def from_jax(name: str, array: Any) -> Any | None:
    """A CuPy array over the memory of an array, ordered after the work that computes it.

    None where DLPack has to say whether it can be read: for what is no concrete array in the memory
    of one GPU, with its axes in order.

    Raises
    ------
    ValueError
        If the array was deleted, naming the argument.
    """
    # JAX crashes where the layout of such an array is asked for.
    if _is_concrete(array) and array.is_deleted():
        raise ValueError(f"{name} is a JAX array that was deleted or donated")
    device = _gpu_of(array)
    if device is None or not _has_axes_in_order(array):
        return None
    shape, dtype = array.shape, array.dtype
    cupy = _cupy()
    cuda = cupy.cuda
    if not array.is_ready():
        # JAX has the stream wait for what computes the array; what it returns is not needed.
        # Python's DLPack calls the legacy default stream 1.
        array.__dlpack__(stream=cuda.get_current_stream().ptr or 1)
    size = math.prod(shape) * dtype.itemsize
    memory = cuda.UnownedMemory(
        array.unsafe_buffer_pointer(), size, array, device.local_hardware_id
    )
    return cupy.ndarray(shape, dtype, cuda.MemoryPointer(memory, 0))


def to_jax(result: Any, like: Any) -> Any:
    """A CuPy array as an array of JAX, which then waits for it.

    Parameters
    ----------
    result
        C-contiguous.
    like
        An array of JAX that the result was computed from.
    """
    device = _gpu_of(like)
    adopt = _adopt()
    # JAX's own function also turns 64-bit numbers into 32-bit ones where it is told to.
    if adopt is None or device is None or result.dtype.itemsize > 4:
        import jax

        return jax.dlpack.from_dlpack(result)
    stream = device.get_stream_for_external_ready_events()
    return adopt(result.__dlpack__(stream=stream), device, stream, None, _DLPACK_CUDA)


def _gpu_of(array: Any) -> Any | None:
    """The GPU whose memory a concrete array lies in; None if there is no such, or more than one."""
    return _gpu_of_sharding(array.sharding) if _is_concrete(array) else None


def _is_concrete(array: Any) -> bool:
    """Whether an array of JAX has memory, as those that stand for others in a trace have not."""
    return type(array).__name__ == "ArrayImpl"


@functools.lru_cache(256)
def _gpu_of_sharding(sharding: Any) -> Any | None:
    if len(sharding.device_set) != 1 or sharding.memory_kind != "device":
        return None
    (device,) = sharding.device_set
    return device if device.platform == "gpu" else None


def _has_axes_in_order(array: Any) -> bool:
    # An array's format is made anew each time, which takes 3 us; the compiled layout behind it, no
    # public name, is the same object for all arrays of a kind.
    layout = getattr(array, "_pjrt_layout", None)
    known = _in_order.get(layout)
    if known is not None:
        return known
    public = getattr(getattr(array, "format", None), "layout", None)
    in_order = public is not None and tuple(public.major_to_minor) == tuple(range(array.ndim))
    if layout is not None:
        _in_order[layout] = in_order
    return in_order


_in_order: dict[Any, bool] = {}


@functools.cache
def _cupy() -> Any:
    import cupy

    return cupy


@functools.cache
def _adopt() -> Any | None:
    """What `jax.dlpack.from_dlpack` calls, without the 30 us of Python around it; None without it.

    It is no public function, so that it may go or take other arguments.
    """
    try:
        from jaxlib import _jax

        adopt = _jax.dlpack_managed_tensor_to_buffer
    except (ImportError, AttributeError):
        return None
    return adopt if "dl_device_type" in (adopt.__doc__ or "") else None
