"""Conversion of the caller's arrays to NumPy or CuPy, and of results to the caller's library."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cupy_flash.arrays.cuda_interface import from_interface, interface_converter, is_read_only
from cupy_flash.arrays.jax_arrays import from_jax, gpu_of, is_jax, is_traced, to_jax
from cupy_flash.arrays.strided import as_cupy, dtype_name, is_cupy, kind_of
from cupy_flash.arrays.torch_arrays import (
    is_any_tensor,
    is_capturing,
    is_torch_on_gpu,
    on_stream_of,
    order,
    resolved,
    tensor_types,
    two_streams,
)
from cupy_flash.errors import needs_cupy
from cupy_flash.problem.arrays import FLOAT8
from cupy_flash.problem.values import finite

# DLPack device types (dlpack.h): host memory, and CUDA device, pinned and managed memory.
_DLPACK_CPU = 1
_DLPACK_CUDA = (2, 3, 13)


def normalize(name: str, array: Any, *, is_written: bool = False, reads_later: bool = False) -> Any:
    """Return an input as a NumPy or CuPy array over the same memory; see `result_converter`.

    Parameters
    ----------
    name
        Name of the argument, for messages.
    array
        NumPy array, CuPy array, or any array with ``__dlpack__`` or ``__cuda_array_interface__``.
    is_written
        Whether the caller needs the memory itself, to write it or to read it again later. A
        tensor whose memory does not hold its values, such as a lazy negation, is then an error.
    reads_later
        Whether only later calls read the values of a tensor. While a CUDA graph is captured from
        torch's stream, CuPy's stream then does not wait for it: the calls run on torch's stream.

    Returns
    -------
    array
        NumPy array for host memory and CuPy array for device memory. A tensor or JAX array on a
        GPU may stay a tensor or become a `JaxMemory`, which launches accept like CuPy arrays.
        CuPy's current stream waits for the current stream of the array's library.

    Raises
    ------
    TypeError
        For any other object.
    NotImplementedError
        For a tensor of torch that carries more than its values, such as a forward-mode tangent.
    """
    array = resolved(name, array, is_written=is_written)
    if array is not None and is_torch_on_gpu(array):
        try:
            streams = two_streams(array)
        except ImportError as error:
            raise needs_cupy(name) from error
        # The legacy stream cannot wait for a stream that a CUDA graph is captured from.
        if streams and not (reads_later and is_capturing()):
            order(*streams)
        return array
    if is_any_tensor(array) and array.is_cpu:
        # DLPack takes 8 us to return the device of the tensor.
        return _host_array(name, array)
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, whose mask would be lost; pass {name}.filled(...) or "
            f"{name}.data"
        )
    if isinstance(array, np.ndarray) or is_cupy(array):
        return array
    if (memory := from_jax(name, array)) is not None:
        return memory
    if not hasattr(array, "__dlpack_device__"):
        if hasattr(array, "__cuda_array_interface__"):
            return from_interface(name, array)
        raise no_array(name, array)
    device_type = int(array.__dlpack_device__()[0])
    if device_type in _DLPACK_CUDA:
        return _device_array(name, array)
    if device_type == _DLPACK_CPU:
        return _host_array(name, array)
    raise TypeError(
        f"{name} lies on DLPack device type {device_type}; expected host or CUDA memory"
    )


def no_array(name: str, value: Any) -> TypeError:
    """Return the error for an argument that is not an array of any supported library."""
    if is_traced(value):
        return TypeError(
            f"{name} is {kind_of(value)}, a tracer of JAX without values; inside its "
            "transformations, call the functions of cupy_flash.jax"
        )
    return TypeError(
        f"{name} is {kind_of(value)}; expected a NumPy or CuPy array, or one that supports DLPack "
        "or __cuda_array_interface__"
    )


def read(name: str, array: Any, *, is_written: bool = False, reads_later: bool = False) -> Any:
    """Return `normalize(name, array)` as an array that NumPy's or CuPy's functions accept."""
    return as_cupy(normalize(name, array, is_written=is_written, reads_later=reads_later))


def on_torch_stream(name: str, tensor: Any) -> AbstractContextManager[Any]:
    """Return `on_stream_of(tensor)`; raise an error if CuPy is not installed."""
    try:
        return on_stream_of(tensor)
    except ImportError as error:
        raise needs_cupy(name) from error


def normalize_out(name: str, array: Any) -> Any:
    """Return `normalize` of an output array, whose memory must be mutable.

    Raises
    ------
    TypeError
        For a JAX array, which is immutable, and in the cases of `normalize`.
    """
    require_mutable(name, array)
    return normalize(name, array, is_written=True)


def require_mutable(name: str, array: Any) -> None:
    """Raise TypeError for a JAX array, and ValueError for read-only memory on a GPU."""
    if is_jax(array):
        raise TypeError(
            f"{name} is a JAX array, which is immutable and cannot be written in place; pass a "
            "CuPy array with a copy of its elements"
        )
    if is_read_only(array):
        raise ValueError(f"{name} is read-only; pass an array that can be written")


def normalize_scale(name: str, scale: Any, *, on_host: bool) -> Any:
    """Return `normalize` of a cache's scale; a number becomes an array in the memory of q.

    Raises
    ------
    ValueError
        For a number that float32 cannot hold.
    """
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.integer, np.floating)):
        # An append that computes scales writes them to this array.
        return normalize(name, scale, is_written=True)
    if not on_host:
        return number_on_gpu(name, scale)
    return np.asarray(_float32(name, scale))


def number_on_gpu(name: str, number: Any, *, like: Any = None) -> Any:
    """Return a new float32 array without axes that holds a number; see `normalize_scale`.

    If `like` is a tensor of torch on a GPU, the result is a tensor on its device, filled on torch's
    current stream. Otherwise the result is a CuPy array on the current device, filled on CuPy's
    current stream.

    Raises
    ------
    ValueError
        For a number that float32 cannot hold.
    """
    value = float(_float32(name, number))
    if like is not None and is_torch_on_gpu(like):
        return _torch().full((), value, dtype=_torch().float32, device=like.device)
    import cupy

    array = cupy.ndarray((), np.float32)
    array.fill(value)
    return array


def _float32(name: str, value: Any) -> np.float32:
    number = finite(name, float(value))
    if abs(number) > float(np.finfo(np.float32).max):
        raise ValueError(f"{name} is {number:g}; expected a number in the range of float32")
    with np.errstate(all="ignore"):
        return np.float32(number)


def normalize_int32(name: str, array: Any, *, on_host: bool) -> Any:
    """Return an array of lengths or offsets as a NumPy or CuPy array; see `require_int32`.

    A list of integers is copied to the memory of q, which is host memory if `on_host`.

    Raises
    ------
    TypeError
        If the argument is not an array, or is not in the memory of q.
    ValueError
        For a list of integers that int32 cannot hold.
    """
    if isinstance(array, (list, tuple)):
        return _to_device(_int32_of_list(name, array), on_host=on_host)
    if isinstance(array, (int, np.integer)):
        raise TypeError(f"{name} is {array}, one integer; expected an int32 array, or a list")
    given, array = array, normalize(name, array)
    if isinstance(array, np.ndarray) != on_host:
        result, other = (
            ("on a GPU", "in host memory") if on_host else ("in host memory", "on a GPU")
        )
        instead = _move(name, given, on_host=on_host)
        raise TypeError(f"{name} lies {result} and q {other}; pass {instead}")
    return array


def _move(name: str, array: Any, *, on_host: bool) -> str:
    """Return the expression that copies an argument to the device of q, for messages."""
    if is_any_tensor(array):
        return f"{name}.cpu()" if on_host else f"{name}.cuda()"
    if is_jax(array):
        return f"jax.device_put({name}, device) with the device of q"
    return f"{name}.get()" if on_host else f"cupy.asarray({name})"


def host_array_on_gpu(name: str, array: Any) -> Any:
    """Return a NumPy array as a CuPy array; anything else unchanged."""
    return _to_device(array, on_host=False) if isinstance(array, np.ndarray) else array


def is_number_or_list(value: Any) -> bool:
    """Return whether a value is a number or a list, which kernels cannot read in place."""
    numbers = (int, float, np.integer, np.floating)
    return isinstance(value, (list, tuple, *numbers)) and not isinstance(value, bool)


def elements(value: Any) -> Iterator[Any]:
    """Yield the elements of nested lists and tuples, or the value itself if it is neither."""
    if isinstance(value, (list, tuple)):
        for element in value:
            yield from elements(element)
    else:
        yield value


def vector(name: str, values: Any, *, on_host: bool) -> Any:
    """Return a number, or a list of numbers, as a float64 array in the memory of q.

    A number becomes an array without axes. The memory of q is host memory if `on_host`.

    Raises
    ------
    TypeError
        For a list of anything but numbers.
    """
    for element in elements(values):
        if hasattr(element, "__dlpack__"):
            # An error is raised for an element that carries more than a number, such as a gradient.
            normalize(name, element)
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} is not a list of numbers: {error}") from error
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} is {values!r}; expected numbers, or an array of them")
    # Types such as longdouble may hold numbers that overflow float64.
    with np.errstate(all="ignore"):
        return _to_device(array.astype(np.float64), on_host=on_host)


def seed_and_offset(name: str, value: Any, *, on_host: bool) -> Any:
    """Return a seed, or a list of a seed and an offset, as an int64 array in the memory of q.

    The offset of an integer is 0. Integers from 2^63 to below 2^64 keep their 64 bits. The memory
    of q is host memory if `on_host`.

    Raises
    ------
    TypeError
        If a value is not an integer.
    ValueError
        If a list does not hold two integers, or an integer does not fit 64 bits.
    """
    numbers = list(value) if isinstance(value, (list, tuple)) else [value, 0]
    if len(numbers) != 2:
        raise ValueError(f"{name} is {value!r}; expected an integer, or two: a seed and an offset")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise TypeError(
                f"{name} is {value!r}; expected an integer, or an int64 array of a seed and an "
                "offset"
            )
        if not -(2**63) <= int(number) < 2**64:
            raise ValueError(f"{name} is {value!r}; expected integers of 64 bits")
    bits = np.array([int(number) % 2**64 for number in numbers], np.uint64)
    return _to_device(bits.view(np.int64), on_host=on_host)


def _to_device(array: np.ndarray, *, on_host: bool) -> Any:
    """Return a NumPy array, or its copy as a CuPy array if not `on_host`."""
    if on_host:
        return array
    import cupy

    return cupy.asarray(array)


def unshared(array: Any) -> Any:
    """Return a copy of a NumPy array, a CuPy array or a list; anything else unchanged."""
    if isinstance(array, (list, tuple)):
        return copy.deepcopy(array)
    return array.copy() if isinstance(array, np.ndarray) or is_cupy(array) else array


def _int32_of_list(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} is not a list of integers: {error}") from error
    # If an integer exceeds 64 bits, asarray() returns an array of objects or of float64.
    numbers = np.asarray(values, object).ravel().tolist()
    others = [x for x in numbers if isinstance(x, bool) or not isinstance(x, (int, np.integer))]
    if others:
        raise TypeError(f"{name} holds {kind_of(others[0])}; expected integers")
    bounds = np.iinfo(np.int32)
    if not all(bounds.min <= x <= bounds.max for x in numbers):
        raise ValueError(f"{name} holds integers that do not fit int32; expected smaller ones")
    return array.astype(np.int32)


def _identity(result: Any) -> Any:
    return result


def _device_array(name: str, array: Any) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise needs_cupy(name) from error
    try:
        return cupy.from_dlpack(array)
    except (TypeError, BufferError) as error:
        raise TypeError(f"{name} cannot be read through DLPack: {error}") from error


def _host_array(name: str, array: Any) -> np.ndarray:
    dtype = str(getattr(array, "dtype", "")).removeprefix("torch.")
    # NumPy's DLPack supports neither dtype.
    is_narrow = dtype in ("bfloat16", FLOAT8)
    try:
        if is_any_tensor(array):
            # DLPack would make `out` read-only.
            if not is_narrow:
                return array.numpy()
            import ml_dtypes

            torch, narrow = _torch(), np.dtype(getattr(ml_dtypes, dtype))
            bits = array.view(torch.int16 if narrow.itemsize == 2 else torch.int8)
            return bits.numpy().view(narrow)
        return np.asarray(array) if is_narrow else np.from_dlpack(array)
    except (TypeError, RuntimeError, BufferError) as error:
        raise TypeError(f"{name} cannot be read by NumPy: {error}") from error


def _torch() -> Any:
    import torch

    return torch


def result_converter(name: str, array: Any) -> Callable[[Any], Any]:
    """Return a function that converts a NumPy or CuPy result to the array library of `array`.

    Raises
    ------
    TypeError
        If `array` is not an array, or its library has no from_dlpack. The message names it.
    """
    if (device := gpu_of(array)) is not None:
        return functools.partial(to_jax, device=device)
    if isinstance(array, np.ndarray) or is_cupy(array):
        return _identity
    if is_any_tensor(array):
        return to_torch
    if is_jax(array):
        return functools.partial(_to_jax, like=array)
    namespace = getattr(array, "__array_namespace__", None)
    if namespace is not None and hasattr(namespace(), "from_dlpack"):
        return lambda result: namespace().from_dlpack(result)
    if hasattr(array, "__cuda_array_interface__"):
        return interface_converter(array)
    if not hasattr(array, "__dlpack_device__"):
        raise no_array(name, array)
    raise TypeError(
        f"{name} is {kind_of(array)}, whose library has no from_dlpack to convert the result with"
    )


def to_torch(result: Any) -> Any:
    """Return a result as a tensor, and make torch's current stream wait; see `result_converter`."""
    if result.__class__ in tensor_types():
        if streams := two_streams(result):
            order(*reversed(streams))
        return result
    torch = _torch()
    name = dtype_name(result)
    if name == FLOAT8 or (name == "bfloat16" and isinstance(result, np.ndarray)):
        # DLPack has no float8 in NumPy and CuPy, and no bfloat16 in NumPy.
        bits = torch.from_dlpack(result.view(f"int{8 * result.itemsize}"))
        return bits.view(getattr(torch, name))
    return torch.from_dlpack(result)


def _to_jax(result: Any, like: Any) -> Any:
    import jax

    if not isinstance(result, np.ndarray):
        return to_jax(result, None)
    # Without a device, JAX would copy the result to its default device, which may be a GPU.
    (device,) = like.devices()
    return jax.device_put(result, device)
