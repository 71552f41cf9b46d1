"""What kernels ask of an array, whichever library's it is: axes, dtype, strides, alignment."""

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
from cupy_flash.problem.arrays import (
    DTYPES,
    FLOAT8,
    MAX_ALIGNMENT,
    ArraySpec,
    contiguous_strides,
)

LAYOUTS = ("bshd", "bhsd")


# Largest number of types that are remembered; a program may keep creating new ones.
_MAX_TYPES = 256


class _OfCupy(dict[type, bool]):
    """Which types are those of CuPy's arrays, of all that were asked for."""

    def __missing__(self, kind: type) -> bool:
        # By their names, and not by `cupy.ndarray`: while another thread imports CuPy its module is
        # there, but nothing in it yet. CuPy's other types have no elements.
        is_it = kind.__module__.partition(".")[0] == "cupy" and hasattr(kind, "itemsize")
        if len(self) >= _MAX_TYPES:
            self.clear()
        self[kind] = is_it
        return is_it


#: Whether a type is that of CuPy's arrays. For the first lines of a call: 9 ns less than to look up
#: CuPy's module and its class, where `is_cupy` takes 5 ns more than that.
is_cupy_type = _OfCupy().__getitem__


def is_cupy(array: Any) -> bool:
    """Whether an array is CuPy's, without importing CuPy."""
    return is_cupy_type(array.__class__)


def kind_of(value: Any) -> str:
    """A value's type with its article, for messages."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def array_module(array: Any) -> Any:
    """The module whose functions take an array: CuPy for CuPy's, else NumPy."""
    return importlib.import_module("cupy") if is_cupy(array) else np


def taken_by(xp: Any, array: Any) -> Any:
    """The NumPy or CuPy array as functions of module `xp` take it, a copy if `xp` is the other."""
    if xp is np:
        return array.get() if is_cupy(array) else array
    return xp.asarray(array)


def require_layout(layout: str) -> None:
    """Raise ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")


def to_bshd(array: Any, layout: str) -> Any:
    """View of an array in (batch, seqlen, heads, dim) order, see `with_one_batch_axis`."""
    array = with_one_batch_axis(array)
    return array.swapaxes(1, 2) if layout == "bhsd" else array


def with_one_batch_axis(array: Any) -> Any:
    """Return an array of three axes, or of any batch axes before these, with one batch axis.

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
    """Raise ValueError unless an array of equal lengths has three axes and batch axes as q."""
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
    """Raise ValueError unless an array has so many axes."""
    if array.ndim != count:
        raise ValueError(
            f"{name} has {array.ndim} axes, shape {tuple(array.shape)}; expected {count}: {meaning}"
        )


def require_shape(name: str, array: Any, expected: tuple[int, ...], meaning: str) -> None:
    """Raise ValueError unless an array has a shape."""
    if tuple(array.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; expected {expected}, {meaning}")


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return whether an array of a shape broadcasts to another shape."""
    axes = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, m) for n, m in axes)


def dtype_name(array: Any) -> str:
    """The dtype's name as `cupy_flash.problem.arrays.DTYPES` spells it."""
    return _dtype_name(array.dtype)


@functools.lru_cache(maxsize=256)
def _dtype_name(dtype: Any) -> str:
    # NumPy takes 4 us to tell.
    return str(dtype.name)


def has_contiguous_rows(array: Any) -> bool:
    """Whether the last axis is contiguous, or of length 1, and strides are whole elements.

    Or there is nothing to address.
    """
    if array.ndim == 0 or array.size == 0:
        return True
    is_contiguous = array.strides[-1] == array.itemsize or array.shape[-1] <= 1
    return is_contiguous and has_whole_strides(array)


def has_whole_strides(array: Any) -> bool:
    """Return whether strides are whole elements."""
    return not any(stride % array.itemsize for stride in array.strides)


def is_aligned(array: Any) -> bool:
    """Whether elements lie at multiples of their size, as loads on a GPU need them."""
    if isinstance(array, np.ndarray):
        # The address takes 1 us.
        return array.flags.aligned
    return array.size == 0 or address_of(array) % array.itemsize == 0


def is_readable_in_place(array: Any) -> bool:
    """Whether kernels can address an array as it lies."""
    return has_contiguous_rows(array) and is_aligned(array)


def as_cupy(array: Any) -> Any:
    """A CuPy array over the memory of a tensor or an array of JAX on a GPU; any other as it is."""
    if array.__class__ is JaxMemory:
        return array.as_cupy()
    return tensor_as_cupy(array) if array.__class__ in tensor_types() else array


def readable_in_place(array: Any, *, one_batch: bool = False, inner: int = 3) -> Any:
    """Return the array itself if `is_readable_in_place`, otherwise a C-contiguous copy.

    With `one_batch`, an array without `has_one_batch_stride` is copied, too.
    """
    on_gpu = as_cupy(array)
    if is_readable_in_place(on_gpu) and (not one_batch or has_one_batch_stride(on_gpu, inner)):
        return array
    if isinstance(array, np.ndarray):
        return array.copy(order="C")
    # CuPy copies no float8.
    as_bytes = not is_aligned(on_gpu) or dtype_name(on_gpu) == FLOAT8
    return _copied_as_bytes(on_gpu) if as_bytes else on_gpu.copy(order="C")


def require_in_place(name: str, array: Any, why: str = "") -> None:
    """Raise ValueError unless an array that is no mere input can be addressed as it lies.

    NumPy reads and writes at any address.
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
    """A contiguous copy of a CuPy array whose elements are taken byte by byte."""
    ndarray = array_module(array).ndarray
    shape, strides = (*array.shape, array.itemsize), (*array.strides, 1)
    copy = ndarray(shape, "uint8", array.data, strides).copy(order="C")
    return ndarray(array.shape, array.dtype, copy.data)


def address_of(array: Any) -> int:
    """Address of the first element of a NumPy or CuPy array."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def spec_of(array: Any, address: int) -> ArraySpec:
    """How a (batch, seqlen, heads, dim) array lies in memory, or a packed one without batch.

    Parameters
    ----------
    array
        NumPy or CuPy array with a contiguous last axis. Of three axes it is taken for a batch of
        one.
    address
        Of its first element.
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
    """`spec_of` a new C-contiguous array of this shape, whose axes are in the order of a layout."""
    if len(shape) == 3:
        return ArraySpec.contiguous((1, shape[0], shape[1], shape[2]), dtype)
    first, second, third, dim = shape
    batch, outer, inner = contiguous_strides((first, second, third, dim))
    if layout == "bhsd":
        return ArraySpec((first, third, second, dim), (batch, inner, outer), dtype)
    return ArraySpec((first, second, third, dim), (batch, outer, inner), dtype)


class _Unallocated(np.ndarray):
    """Array that does not show its elements, because a debugger or traceback would read them."""

    def __repr__(self) -> str:
        return f"unallocated({self.shape}, {self.dtype})"

    __str__ = __repr__


class _NoMemory:
    """Array interface of memory that does not exist, at an address that is never mapped."""

    # A multiple of every alignment that is asked for.
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
    """Return an unallocated copy of an array; order "K" keeps the order of its axes in memory."""
    if order == "C" or array.flags.c_contiguous:
        return unallocated(array.shape, array.dtype)
    outer_first = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    if array.flags.f_contiguous:
        outer_first = [*reversed(range(array.ndim))]
    copy = unallocated(tuple(array.shape[axis] for axis in outer_first), array.dtype)
    return copy.transpose(np.argsort(outer_first))


def require_int32(name: str, array: Any) -> None:
    """Raise TypeError unless the dtype is that of lengths and places."""
    if dtype_name(array) != "int32" or not array.dtype.isnative:
        raise TypeError(f"{name} has dtype {array.dtype}; pass {cast(name, array, 'int32')}")


def as_int32(name: str, array: Any) -> Any:
    """Return lengths or places in int32; the array itself if it has that dtype.

    Raises
    ------
    TypeError
        For an array of other numbers than integers.
    ValueError
        For integers in a NumPy array that int32 does not hold. On a GPU they wrap around.
    """
    if array.dtype.kind not in "iu":
        require_int32(name, array)
    if array.dtype == np.int32:
        return array
    if isinstance(array, np.ndarray) and array.size:
        bounds = np.iinfo(np.int32)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise ValueError(f"{name} holds integers that int32 does not; expected smaller ones")
    return array.astype(np.int32, order="C")


def require_dtype(name: str, array: Any, dtypes: Iterable[str]) -> None:
    """Raise TypeError unless the dtype is one of these."""
    if dtype_name(array) not in dtypes:
        raise TypeError(f"{name} has dtype {array.dtype}; expected one of {', '.join(dtypes)}")


def require_float(name: str, array: Any, dtypes: Iterable[str] = DTYPES) -> None:
    """Raise TypeError unless the dtype is one that attention is computed in, or of `dtypes`."""
    require_dtype(name, array, dtypes)
    require_native(name, array)


def require_native(name: str, array: Any) -> None:
    """Raise TypeError for numbers in another byte order than this machine's."""
    if not array.dtype.isnative:
        raise TypeError(
            f"{name} has dtype {array.dtype.str}, in another byte order than this machine's; pass "
            f"{cast(name, array, dtype_name(array))}"
        )


def cast(name: str, array: Any, dtype: str) -> str:
    """Return how an argument is converted to a dtype, in the terms of the caller's library.

    Parameters
    ----------
    name
        Name of the argument.
    array
        NumPy or CuPy array over its memory.
    dtype
        Name of the dtype.
    """
    owner = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if is_cupy(owner):
        owner = getattr(getattr(owner.data, "mem", None), "_owner", None)
    if is_any_tensor(owner):
        return f"{name}.to(torch.{dtype})"
    return f"{name}.astype(jnp.{dtype})" if is_jax(owner) else f"{name}.astype({dtype!r})"
