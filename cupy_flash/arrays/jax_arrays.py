"""JAX arrays on a GPU, read without a copy, and conversion of results to JAX arrays.

DLPack and the Python code that JAX runs around it take 30 us per input array, and more per output
array. Reading the address and layout directly, as this module does, takes 2 us.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from cupy_flash.arrays.torch_arrays import order
from cupy_flash.errors import needs_cupy
from cupy_flash.problem.arrays import FLOAT8, MAX_ALIGNMENT

# DLPack's code of CUDA memory.
_DLPACK_CUDA = 2


class JaxMemory:
    """Memory of a concrete C-contiguous JAX array on one GPU, in a form that launches accept.

    Attributes
    ----------
    array
        The JAX array, which keeps the memory alive.
    device
        JAX device on which the array is stored.
    address
        Address of the first element.
    array_key
        Shape, dtype, device and alignment, as part of a cache key.
    """

    __slots__ = ("address", "array", "array_key", "device")

    def __init__(self, array: Any, device: Any) -> None:
        address = array.unsafe_buffer_pointer()
        self.array, self.device, self.address = array, device, address
        self.array_key = (
            array.shape,
            array.dtype,
            device.local_hardware_id,
            address & (MAX_ALIGNMENT - 1),
        )

    def as_cupy(self) -> Any:
        """Return a CuPy array over the memory."""
        array, device = self.array, self.device.local_hardware_id
        return array_at(self.address, array.shape, array.dtype, device, array)


def array_at(
    address: int, shape: tuple[int, ...], dtype: Any, device: int, owner: Any = None
) -> Any:
    """Return a C-contiguous CuPy array over memory that `owner`, if given, keeps alive."""
    cupy = _cupy()
    memory = cupy.cuda.UnownedMemory(address, math.prod(shape) * dtype.itemsize, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def is_jax(array: Any) -> bool:
    """Return whether the type of an array is defined in `jax` or `jaxlib`."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def is_traced(value: Any) -> bool:
    """Return whether a value is traced by JAX, for gradients or a compiled function."""
    if not is_jax(value):
        return False
    import jax

    return isinstance(value, jax.core.Tracer)


def from_jax(name: str, array: Any) -> JaxMemory | None:
    """Return the memory of a JAX array, after making CuPy's stream wait for its computation.

    The result is None if the array is not a concrete JAX array on exactly one GPU with its axes in
    C order. The caller then reads it by DLPack.

    Raises
    ------
    ValueError
        If the array was deleted. The message names the argument.
    TypeError
        If CuPy is not installed.
    """
    if not _is_concrete(array.__class__):
        return None
    # JAX crashes if the layout of a deleted array is read.
    if array.is_deleted():
        raise ValueError(f"{name} is a JAX array that was deleted or donated")
    device = _gpu_of_sharding(array.sharding)
    if device is None or not _has_axes_in_order(array):
        return None
    try:
        cuda = _cupy().cuda
    except ImportError as error:
        raise needs_cupy(name) from error
    if not array.is_ready():
        # Called only to make CuPy's current stream wait for the computation of the array.
        # Stream 1 is the legacy default stream in Python's DLPack protocol.
        array.__dlpack__(stream=cuda.get_current_stream().ptr or 1)
    return JaxMemory(array, device)


def to_jax(result: Any, device: Any | None) -> Any:
    """Return a CuPy array as a JAX array. JAX's stream waits for the result to be computed.

    Parameters
    ----------
    result
        C-contiguous CuPy array.
    device
        JAX device on which the result is stored; None if it is not known.
    """
    if result.dtype.name == FLOAT8:
        import jax

        # CuPy's DLPack does not support float8.
        bits = to_jax(result.view("uint8"), device)
        return jax.lax.bitcast_convert_type(bits, result.dtype)
    adopt = _adopt()
    # Only JAX's public function converts 64-bit numbers to 32 bits, if JAX is configured to do so.
    if adopt is None or device is None or result.dtype.itemsize > 4:
        import jax

        return jax.dlpack.from_dlpack(result)
    ours = _cupy().cuda.get_current_stream().ptr
    theirs = device.get_stream_for_external_ready_events()
    if ours != theirs:
        order(ours, theirs)
    # With stream -1, CuPy does not synchronize the streams, because `order` has done so. That is 2
    # us faster.
    return adopt(result.__dlpack__(stream=-1), device, theirs, None, _DLPACK_CUDA)


def gpu_of(array: Any) -> Any | None:
    """Return the GPU on which a concrete JAX array is stored; None if there is not exactly one."""
    return _gpu_of_sharding(array.sharding) if _is_concrete(array.__class__) else None


@functools.lru_cache(256)
def _is_concrete(kind: type) -> bool:
    """Return whether a type is that of JAX arrays with memory; traced arrays have none."""
    root = kind.__module__.partition(".")[0]
    return kind.__name__ == "ArrayImpl" and root in ("jax", "jaxlib")


def _gpu_of_sharding(sharding: Any) -> Any | None:
    # Keyed by id(), because JAX takes 1 us to compare shardings in Python. All results of a
    # compiled function refer to the same sharding object. The dictionary keeps that object alive,
    # so that no other object gets its id.
    known = _known_shardings.get(id(sharding))
    if known is None:
        if len(_known_shardings) >= _MAX_SHARDINGS:
            _known_shardings.clear()
        known = _known_shardings[id(sharding)] = sharding, _only_gpu_of(sharding)
    return known[1]


_MAX_SHARDINGS = 256
_known_shardings: dict[int, tuple[Any, Any | None]] = {}


def _only_gpu_of(sharding: Any) -> Any | None:
    if len(sharding.device_set) != 1 or sharding.memory_kind != "device":
        return None
    (device,) = sharding.device_set
    return device if device.platform == "gpu" else None


def _has_axes_in_order(array: Any) -> bool:
    # JAX builds the public `format` of an array again at each access, which takes 3 us. The private
    # compiled layout is one object for all arrays with that layout.
    layout = getattr(array, "_pjrt_layout", None)
    known = _in_order.get(layout)
    if known is not None:
        return known
    public = getattr(getattr(array, "format", None), "layout", None)
    in_order = public is not None and tuple(public.major_to_minor) == tuple(range(array.ndim))
    if layout is not None:
        if len(_in_order) >= _MAX_LAYOUTS:
            _in_order.clear()
        _in_order[layout] = in_order
    return in_order


_MAX_LAYOUTS = 256
_in_order: dict[Any, bool] = {}


@functools.cache
def _cupy() -> Any:
    import cupy

    return cupy


@functools.cache
def _adopt() -> Any | None:
    """Return the function that `jax.dlpack.from_dlpack` calls; None if its arguments changed.

    A direct call avoids 30 us of Python code. The function is not public, so its name and arguments
    may change.
    """
    try:
        from jaxlib import _jax

        adopt = _jax.dlpack_managed_tensor_to_buffer
    except (ImportError, AttributeError):
        return None
    return adopt if "dl_device_type" in (adopt.__doc__ or "") else None
