"""Arrays of JAX on a GPU, read where they lie, and results as such arrays.

DLPack, with what JAX does for it in Python, takes 30 us for each array that goes in, and more for
one that goes out; what is asked of an array here takes 2 us.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from cupy_flash.arrays.torch_arrays import order
from cupy_flash.errors import needs_cupy
from cupy_flash.problem.arrays import FLOAT8, MAX_ALIGNMENT

# What DLPack calls CUDA memory.
_DLPACK_CUDA = 2


class JaxMemory:
    """The memory of a concrete array of JAX on one GPU, C-contiguous, as launches take it.

    Attributes
    ----------
    array
        The array, which keeps the memory.
    device
        JAX's, that it lies on.
    address
        Of the first element.
    facts
        What plans and checks depend on, as part of a key.
    """

    __slots__ = ("address", "array", "device", "facts")

    def __init__(self, array: Any, device: Any) -> None:
        address = array.unsafe_buffer_pointer()
        self.array, self.device, self.address = array, device, address
        self.facts = (
            array.shape,
            array.dtype,
            device.local_hardware_id,
            address & (MAX_ALIGNMENT - 1),
        )

    def as_cupy(self) -> Any:
        """A CuPy array over the memory."""
        cupy, shape, dtype = _cupy(), self.array.shape, self.array.dtype
        size = math.prod(shape) * dtype.itemsize
        memory = cupy.cuda.UnownedMemory(
            self.address, size, self.array, self.device.local_hardware_id
        )
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def is_jax(array: Any) -> bool:
    """Whether JAX or its library of compiled code defines the array's type."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def is_traced(value: Any) -> bool:
    """Return whether a value is traced by JAX, for gradients or a compiled function."""
    if not is_jax(value):
        return False
    import jax

    return isinstance(value, jax.core.Tracer)


def from_jax(name: str, array: Any) -> JaxMemory | None:
    """The memory of an array of JAX, ordered after the work that computes it.

    None for what is no concrete array of JAX in the memory of one GPU, with its axes in order:
    DLPack has to say whether it can be read.

    Raises
    ------
    ValueError
        If the array was deleted, naming the argument.
    TypeError
        If there is no CuPy.
    """
    if not _is_concrete(array.__class__):
        return None
    # JAX crashes where the layout of such an array is asked for.
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
        # JAX has the stream wait for what computes the array; what it returns is not needed.
        # Python's DLPack calls the legacy default stream 1.
        array.__dlpack__(stream=cuda.get_current_stream().ptr or 1)
    return JaxMemory(array, device)


def to_jax(result: Any, device: Any | None) -> Any:
    """A CuPy array as an array of JAX, which then waits for it.

    Parameters
    ----------
    result
        C-contiguous.
    device
        JAX's, that the result lies on; None where it is not known.
    """
    if result.dtype.name == FLOAT8:
        import jax

        # CuPy's DLPack knows no float8.
        bits = to_jax(result.view("uint8"), device)
        return jax.lax.bitcast_convert_type(bits, result.dtype)
    adopt = _adopt()
    # JAX's own function also turns 64-bit numbers into 32-bit ones where it is told to.
    if adopt is None or device is None or result.dtype.itemsize > 4:
        import jax

        return jax.dlpack.from_dlpack(result)
    ours = _cupy().cuda.get_current_stream().ptr
    theirs = device.get_stream_for_external_ready_events()
    if ours != theirs:
        order(ours, theirs)
    # -1 as the order is seen to: CuPy would take 2 us more for it.
    return adopt(result.__dlpack__(stream=-1), device, theirs, None, _DLPACK_CUDA)


def gpu_of(array: Any) -> Any | None:
    """The GPU whose memory a concrete array lies in; None if there is no such, or more than one."""
    return _gpu_of_sharding(array.sharding) if _is_concrete(array.__class__) else None


@functools.lru_cache(256)
def _is_concrete(kind: type) -> bool:
    """Whether arrays of a type are JAX's and have memory; those in a trace have none."""
    root = kind.__module__.partition(".")[0]
    return kind.__name__ == "ArrayImpl" and root in ("jax", "jaxlib")


def _gpu_of_sharding(sharding: Any) -> Any | None:
    # By identity: JAX compares shardings in Python, which takes a microsecond, and arrays that one
    # compiled function gives have one object. It is kept, so that its id stays its own.
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
    # An array's format is made anew each time, which takes 3 us; the compiled layout behind it, no
    # public name, is the same object for all arrays of a kind.
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
    """What `jax.dlpack.from_dlpack` calls, without the 30 us of Python around it; None without it.

    It is no public function, so that it may go or take other arguments.
    """
    try:
        from jaxlib import _jax

        adopt = _jax.dlpack_managed_tensor_to_buffer
    except (ImportError, AttributeError):
        return None
    return adopt if "dl_device_type" in (adopt.__doc__ or "") else None
