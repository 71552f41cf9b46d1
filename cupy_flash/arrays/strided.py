"""Properties of arrays of any library that kernels depend on: axes, dtype, strides, alignment."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from cupy_flash.arrays.jax_arrays import JaxMemory, is_jax
from cupy_flash.arrays.torch_arrays import is_any_tensor, tensor_as_cupy, tensor_types
from cupy_flash.problem.arrays import DTYPES, FLOAT8, MAX_ALIGNMENT, ArraySpec, contiguous_strides

LAYOUTS = ("bshd", "bhsd")


# Largest number of types that are remembered, because a program may keep creating new types.
_MAX_TYPES = 256


class _IsCupyType(dict[type, bool]):
    """Cache, keyed by type, of whether the type is that of CuPy arrays."""

    def __missing__(self, kind: type) -> bool:
        # Compares names, not `cupy.ndarray`: while another thread imports CuPy, its module exists
        # but may be empty. Other classes of CuPy have no attribute itemsize.
        is_it = kind.__module__.partition(".")[0] == "cupy" and hasattr(kind, "itemsize")
        if len(self) >= _MAX_TYPES:
            self.clear()
        self[kind] = is_it
        return is_it


#: Return whether a type is that of CuPy arrays. Calls start with this check: it is 9 ns faster than
#: looking up `cupy.ndarray`, and 5 ns faster than `is_cupy`.
is_cupy_type = _IsCupyType().__getitem__


def is_cupy(array: Any) -> bool:
    """Return whether an array is CuPy's, without importing CuPy."""
    return is_cupy_type(array.__class__)


def kind_of(value: Any) -> str:
    """Return the name of a value's type with an article, for messages."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def array_module(array: Any) -> Any:
    """Return the module whose functions accept an array: CuPy for CuPy arrays, otherwise NumPy."""
    return importlib.import_module("cupy") if is_cupy(array) else np


def convert_to(xp: Any, array: Any) -> Any:
    """Return an array of the module `xp`, NumPy or CuPy: the given array, or a converted copy."""
    if xp is np:
        return array.get() if is_cupy(array) else array
    return xp.asarray(array)


def require_layout(layout: str) -> None:
    """Raise ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")


def to_bshd(array: Any, layout: str) -> Any:
    """Return a view in (batch, seqlen, heads, dim) order, see `with_one_batch_axis`."""
    array = with_one_batch_axis(array)
    return array.swapaxes(1, 2) if layout == "bhsd" else array


def with_one_batch_axis(array: Any) -> Any:
    """Return an array of three axes, preceded by any number of batch axes, with one batch axis.

    The result is a view if `has_one_batch_stride(array)`, otherwise a copy.
    """
    if array.ndim == 4:
        return array
    *batch, first, second, dim = array.shape
    return array.reshape((math.prod(batch), first, second, dim))


def has_one_batch_stride(array: Any, inner: int = 3) -> bool:
    """Return whether the axes before the last `inner` can be merged into one without a copy."""
    if array.ndim <= inner + 1 or array.size == 0:
        return True
    axes = zip(array.shape[:-inner], array.strides[:-inner], strict=True)
    outer = [(length, stride) for length, stride in axes if length > 1]
    return all(stride == n * step for (_, stride), (n, step) in itertools.pairwise(outer))


def require_batch_axes(name: str, array: Any, q: Any) -> None:
    """Raise ValueError unless an array of a dense call has 3 or more axes, with q's batch axes."""
    if array.ndim < 3 or array.ndim != q.ndim:
        expected = f"{q.ndim}, as q has" if q.ndim >= 3 and array is not q else "3 or more"
        raise ValueError(
            f"{name} has {array.ndim} axes, shape {tuple(array.shape)}; expected {expected}: any "
            "batch axes, and seqlen, heads and head_dim in the order of layout"
        )
    if array.ndim > 4 and array.shape[:-3] != q.shape[:-3]:
        raise ValueError(
            f"{name} has the batch axes {tuple(array.shape[:-3])}, but q has {tuple(q.shape[:-3])}"
        )


def require_axes(name: str, array: Any, count: int, meaning: str) -> None:
    """Raise ValueError unless an array has `count` axes."""
    if array.ndim != count:
        raise ValueError(
            f"{name} has {array.ndim} axes, shape {tuple(array.shape)}; expected {count}: {meaning}"
        )


def require_shape(name: str, array: Any, expected: tuple[int, ...], meaning: str) -> None:
    """Raise ValueError unless an array has the expected shape."""
    if tuple(array.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; expected {expected}, {meaning}")


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return whether an array of a shape broadcasts to another shape."""
    axes = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, m) for n, m in axes)


def dtype_name(array: Any) -> str:
    """Return the name of the dtype in the spelling of `cupy_flash.problem.arrays.DTYPES`."""
    return _dtype_name(array.dtype)


@functools.lru_cache(maxsize=256)
def _dtype_name(dtype: Any) -> str:
    # NumPy takes 4 us to compute the name.
    return str(dtype.name)


def has_contiguous_rows(array: Any) -> bool:
    """Return whether kernels can address the rows of an array.

    The last axis must be contiguous, or of length 1, and strides must be whole elements. An array
    without elements or axes always qualifies.
    """
    if array.ndim == 0 or array.size == 0:
        return True
    is_contiguous = array.strides[-1] == array.itemsize or array.shape[-1] <= 1
    return is_contiguous and has_whole_strides(array)


def has_whole_strides(array: Any) -> bool:
    """Return whether all strides are multiples of the size of an element."""
    return not any(stride % array.itemsize for stride in array.strides)


def is_aligned(array: Any) -> bool:
    """Return whether elements are at multiples of their size, as loads on a GPU require."""
    if isinstance(array, np.ndarray):
        # Reading the address takes 1 us.
        return array.flags.aligned
    return array.size == 0 or address_of(array) % array.itemsize == 0


def is_readable_in_place(array: Any) -> bool:
    """Return whether kernels can read an array without a copy."""
    return has_contiguous_rows(array) and is_aligned(array)


def as_cupy(array: Any) -> Any:
    """Return a tensor or JAX array on a GPU as a CuPy array over its memory; others unchanged."""
    if array.__class__ is JaxMemory:
        return array.as_cupy()
    return tensor_as_cupy(array) if array.__class__ in tensor_types() else array


def readable_in_place(array: Any, *, one_batch: bool = False, inner: int = 3) -> Any:
    """Return the array itself if `is_readable_in_place`, otherwise a C-contiguous copy.

    With `one_batch`, an array is also copied if `has_one_batch_stride(array, inner)` is false.
    """
    on_gpu = as_cupy(array)
    if is_readable_in_place(on_gpu) and (not one_batch or has_one_batch_stride(on_gpu, inner)):
        return array
    if isinstance(array, np.ndarray):
        return array.copy(order="C")
    # CuPy cannot copy float8 arrays.
    as_bytes = not is_aligned(on_gpu) or dtype_name(on_gpu) == FLOAT8
    return _copied_as_bytes(on_gpu) if as_bytes else on_gpu.copy(order="C")


def require_in_place(name: str, array: Any, why: str = "") -> None:
    """Raise ValueError unless kernels can address an array, which must not be copied.

    An array in host memory may have any alignment, because NumPy reads and writes it.
    """
    if not has_contiguous_rows(array):
        raise ValueError(
            f"{name} has strides {array.strides}; expected a contiguous last axis{why}"
        )
    if not has_one_batch_stride(array):
        raise ValueError(
            f"{name} has shape {tuple(array.shape)} and strides {array.strides}; expected batch "
            "axes that can be merged without a copy, as those of a contiguous array"
        )
    if not isinstance(array, np.ndarray) and not is_aligned(array):
        raise ValueError(
            f"{name} lies at address {address_of(array):#x}; expected a multiple of "
            f"{array.itemsize}, the size of a {dtype_name(array)}{why}"
        )


def _copied_as_bytes(array: Any) -> Any:
    """Return a contiguous copy of a CuPy array, made byte by byte."""
    ndarray = array_module(array).ndarray
    shape, strides = (*array.shape, array.itemsize), (*array.strides, 1)
    copy = ndarray(shape, "uint8", array.data, strides).copy(order="C")
    return ndarray(array.shape, array.dtype, copy.data)


def address_of(array: Any) -> int:
    """Return the address of the first element of a NumPy or CuPy array."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def spec_of(array: Any, address: int) -> ArraySpec:
    """Return the spec of a (batch, seqlen, heads, dim) array with a contiguous last axis.

    An array with three axes gets a batch axis of length 1. `address` is that of the first element.
    """
    size = array.itemsize
    shape, strides = tuple(array.shape), array.strides
    if len(shape) == 3:
        shape, strides = (1, *shape), (0, *strides)
    batch, seqlen, heads, _ = (stride // size for stride in strides)
    alignment = address & -address if address else MAX_ALIGNMENT
    return ArraySpec(
        shape=shape,
        strides=(batch, seqlen, heads),
        dtype=dtype_name(array),
        alignment=min(alignment, MAX_ALIGNMENT),
    )


def new_spec(shape: tuple[int, ...], layout: str, dtype: str) -> ArraySpec:
    """Return the spec of a new C-contiguous array whose axes are in the order of `layout`."""
    if len(shape) == 3:
        return ArraySpec.contiguous((1, shape[0], shape[1], shape[2]), dtype)
    first, second, third, dim = shape
    batch, outer, inner = contiguous_strides((first, second, third, dim))
    if layout == "bhsd":
        return ArraySpec((first, third, second, dim), (batch, inner, outer), dtype)
    return ArraySpec((first, second, third, dim), (batch, outer, inner), dtype)


class _Unallocated(np.ndarray):
    """Array without memory. It hides its elements from debuggers and tracebacks."""

    def __repr__(self) -> str:
        return f"unallocated({self.shape}, {self.dtype})"

    __str__ = __repr__


class _NoMemory:
    """Array interface of memory that does not exist, at an address that is never mapped."""

    # A multiple of every alignment that kernels require.
    _ADDRESS = 1 << 12

    def __init__(self, shape: tuple[int, ...], itemsize: int) -> None:
        self.__array_interface__ = {
            "shape": shape,
            "typestr": f"|V{itemsize}",
            "data": (self._ADDRESS, False),
            "version": 3,
        }


def unallocated(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return a C-contiguous array that takes no memory. Its elements must not be accessed.

    It serves code that reads only the shape, strides, dtype and alignment of an array.
    """
    dtype = np.dtype(dtype)
    return np.asarray(_NoMemory(shape, dtype.itemsize)).view(dtype).view(_Unallocated)


def unallocated_copy(array: Any, order: Literal["K", "C"] = "C") -> np.ndarray:
    """Return an unallocated array like another; order "K" keeps the order of axes in memory."""
    if order == "C" or array.flags.c_contiguous:
        return unallocated(array.shape, array.dtype)
    outer_first = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    if array.flags.f_contiguous:
        outer_first = [*reversed(range(array.ndim))]
    copy = unallocated(tuple(array.shape[axis] for axis in outer_first), array.dtype)
    return copy.transpose(np.argsort(outer_first))


def require_int32(name: str, array: Any) -> None:
    """Raise TypeError unless the dtype is native int32, as lengths and offsets must have."""
    if dtype_name(array) != "int32" or not array.dtype.isnative:
        raise TypeError(f"{name} has dtype {array.dtype}; pass {cast(name, array, 'int32')}")


def as_int32(name: str, array: Any) -> Any:
    """Return lengths or offsets in int32; the array itself if it has that dtype.

    Raises
    ------
    TypeError
        If the dtype is not an integer dtype.
    ValueError
        For integers in a NumPy array that int32 cannot hold. On a GPU they wrap around.
    """
    if array.dtype.kind not in "iu":
        require_int32(name, array)
    if array.dtype == np.int32:
        return array
    if isinstance(array, np.ndarray) and array.size:
        bounds = np.iinfo(np.int32)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise ValueError(f"{name} holds integers that do not fit int32; expected smaller ones")
    return array.astype(np.int32, order="C")


def require_dtype(name: str, array: Any, dtypes: Iterable[str]) -> None:
    """Raise TypeError unless the dtype is one of `dtypes`."""
    if dtype_name(array) not in dtypes:
        raise TypeError(f"{name} has dtype {array.dtype}; expected one of {', '.join(dtypes)}")


def require_float(name: str, array: Any, dtypes: Iterable[str] = DTYPES) -> None:
    """Raise TypeError unless the dtype is one of `dtypes`, in this machine's byte order."""
    require_dtype(name, array, dtypes)
    require_native(name, array)


def require_native(name: str, array: Any) -> None:
    """Raise TypeError for numbers that are not in this machine's byte order."""
    if not array.dtype.isnative:
        raise TypeError(
            f"{name} has dtype {array.dtype.str}, in another byte order than this machine's; pass "
            f"{cast(name, array, dtype_name(array))}"
        )


def cast(name: str, array: Any, dtype: str) -> str:
    """Return the expression that converts the argument `name` to a dtype in the caller's library.

    `array` is a NumPy or CuPy array over the memory of the argument.
    """
    owner = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if is_cupy(owner):
        owner = getattr(getattr(owner.data, "mem", None), "_owner", None)
    if is_any_tensor(owner):
        return f"{name}.to(torch.{dtype})"
    return f"{name}.astype(jnp.{dtype})" if is_jax(owner) else f"{name}.astype({dtype!r})"
