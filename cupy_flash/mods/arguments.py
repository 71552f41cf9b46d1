"""The struct that captures reach kernels in: as C++, as a NumPy dtype, and filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_flash.mods.captures import CaptureSpec

Captures = Mapping[str, CaptureSpec]


def real_type(dtype: str) -> str:
    """In which type a kernel keeps the scores of queries and keys of a dtype."""
    return "double" if dtype == "float64" else "float"


_ELEMENT = {
    "bool": "bool",
    "uint8": "unsigned char",
    "int32": "int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
}
# C++ refuses a struct without members that NumPy could lay out.
_NOTHING = "_"


def arguments_struct(captures: Captures, real: str) -> str:
    """C++ definition of ``ModArguments``: a `Capture` for each array, a number for each number.

    Parameters
    ----------
    captures
        By name, in any order.
    real
        ``"float"`` or ``"double"``.
    """
    lines = [f"  {capture_type(captures[name], real)} {name};" for name in _ordered(captures)]
    return "\n".join(["struct ModArguments {", *(lines or [f"  int {_NOTHING};"]), "};"])


def capture_type(spec: CaptureSpec, real: str) -> str:
    """What C++ calls a capture's type."""
    if spec.rank is None:
        return real if spec.dtype == "real" else "int"
    contiguous = str(spec.contiguous_last).lower()
    return f"Capture<{element_type(spec)}, {offset_type(spec)}, {spec.rank}, {contiguous}>"


def offset_type(spec: CaptureSpec) -> str:
    """What C++ calls the type of an array's offsets."""
    return "long long" if spec.is_wide else "int"


def element_type(spec: CaptureSpec) -> str:
    """What C++ calls the type of an array's elements."""
    return _ELEMENT[spec.dtype]


def arguments_dtype(captures: Captures, real: str) -> np.dtype:
    """``ModArguments`` as a NumPy dtype.

    Fields are named as the captures. An array's has fields of its own: ``data``, the address;
    ``shape``, int32; ``strides``, int32 or int64 in elements, without the last if that axis is
    contiguous.
    """
    names = _ordered(captures) or [_NOTHING]
    number = {"real": np.float32 if real == "float" else np.float64}
    formats: list[Any] = []
    for name in names:
        spec = captures.get(name, CaptureSpec("int32"))
        is_array = spec.rank is not None
        formats.append(_array_dtype(spec) if is_array else number.get(spec.dtype, np.int32))
    return _struct(names, formats)


def _ordered(captures: Captures) -> list[str]:
    """Names in the order of members: the same for any order of arguments."""
    return sorted(captures)


def _array_dtype(spec: CaptureSpec) -> np.dtype:
    assert spec.rank is not None
    formats: dict[str, Any] = {"data": np.uint64}
    if spec.rank:
        formats["shape"] = (np.int32, (spec.rank,))
    if strides := max(0, spec.rank - spec.contiguous_last):
        formats["strides"] = (np.int64 if spec.is_wide else np.int32, (strides,))
    return _struct(list(formats), list(formats.values()))


def _struct(names: list[str], formats: list[Any]) -> np.dtype:
    """Fields laid out as C++ does."""
    offsets, end, largest = [], 0, 1
    for form in map(np.dtype, formats):
        alignment = _alignment(form)
        end = -(-end // alignment) * alignment
        offsets.append(end)
        end += form.itemsize
        largest = max(largest, alignment)
    size = -(-end // largest) * largest
    layout: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
    return np.dtype(layout)


def _alignment(dtype: np.dtype) -> int:
    if dtype.fields is not None:
        return max(_alignment(field[0]) for field in dtype.fields.values())
    return dtype.base.itemsize


def array_fields(array: Any, address: int, spec: CaptureSpec) -> tuple[Any, ...]:
    """The values of an array's fields in `arguments_dtype`.

    Parameters
    ----------
    array
        NumPy or CuPy.
    address
        Of its first element, where the kernel reads it.
    spec
        Its spec.
    """
    if not spec.rank:
        return (address,)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    counted = strides[:-1] if spec.contiguous_last else strides
    return (address, tuple(array.shape), counted) if counted else (address, tuple(array.shape))


def pack_arguments(
    captures: Captures, values: Mapping[str, Any], addresses: Mapping[str, int], real: str
) -> np.ndarray:
    """``ModArguments`` filled in, of `arguments_dtype` and no axes.

    Parameters
    ----------
    captures
        By name.
    values
        Arrays and numbers by name.
    addresses
        Of the arrays, by name.
    real
        ``"float"`` or ``"double"``.
    """
    record = np.zeros((), arguments_dtype(captures, real))
    for name, spec in captures.items():
        value = values[name]
        if spec.rank is None:
            record[name] = value
        else:
            record[name] = array_fields(value, addresses[name], spec)
    return record
