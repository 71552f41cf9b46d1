"""The struct ``ModArguments``, which passes captures to kernels: its C++, dtype and contents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_flash.mods.captures import CaptureSpec

Captures = Mapping[str, CaptureSpec]


def real_type(dtype: str) -> str:
    """Return the C++ type of scores in a kernel, given the dtype of queries and keys."""
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
# Member of a struct without captures: C++ and NumPy would lay out an empty struct differently.
_NOTHING = "_"


def arguments_struct(captures: Captures, real: str) -> str:
    """Return C++ of ``ModArguments``: a `Capture` for each array, a number for each number.

    The members are sorted by name. `real` is the C++ type of reals, ``"float"`` or ``"double"``.
    """
    lines = [f"  {capture_type(captures[name], real)} {name};" for name in sorted(captures)]
    return "\n".join(["struct ModArguments {", *(lines or [f"  int {_NOTHING};"]), "};"])


def capture_type(spec: CaptureSpec, real: str) -> str:
    """Return the C++ type of a capture."""
    if spec.rank is None:
        return real if spec.dtype == "real" else "int"
    contiguous = str(spec.contiguous_last).lower()
    return f"Capture<{_ELEMENT[spec.dtype]}, {offset_type(spec)}, {spec.rank}, {contiguous}>"


def offset_type(spec: CaptureSpec) -> str:
    """Return the C++ type of offsets in a captured array."""
    return "long long" if spec.is_wide else "int"


def arguments_dtype(captures: Captures, real: str) -> np.dtype:
    """Return ``ModArguments`` as a NumPy dtype.

    Fields have the names of the captures. The field of an array has fields ``data``, the address;
    ``shape``, int32; and ``strides``, int32 or int64, in elements, without the last stride if the
    last axis is contiguous.
    """
    names = sorted(captures) or [_NOTHING]
    number = {"real": np.float32 if real == "float" else np.float64}
    formats: list[Any] = []
    for name in names:
        spec = captures.get(name, CaptureSpec("int32"))
        is_array = spec.rank is not None
        formats.append(_array_dtype(spec) if is_array else number.get(spec.dtype, np.int32))
    return _struct(names, formats)


def _array_dtype(spec: CaptureSpec) -> np.dtype:
    assert spec.rank is not None
    formats: dict[str, Any] = {"data": np.uint64}
    if spec.rank:
        formats["shape"] = (np.int32, (spec.rank,))
    if strides := max(0, spec.rank - spec.contiguous_last):
        formats["strides"] = (np.int64 if spec.is_wide else np.int32, (strides,))
    return _struct(list(formats), list(formats.values()))


def _struct(names: list[str], formats: list[Any]) -> np.dtype:
    """Return a dtype with these fields, laid out as in C++."""
    return np.dtype(list(zip(names, formats, strict=True)), align=True)


def array_fields(array: Any, address: int, spec: CaptureSpec) -> tuple[Any, ...]:
    """Return the values of an array's fields in `arguments_dtype`.

    `address` is the address of the first element that the kernel receives.
    """
    if not spec.rank:
        return (address,)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    counted = strides[:-1] if spec.contiguous_last else strides
    return (address, tuple(array.shape), counted) if counted else (address, tuple(array.shape))


def pack_arguments(
    captures: Captures, values: Mapping[str, Any], addresses: Mapping[str, int], real: str
) -> np.ndarray:
    """Return ``ModArguments`` filled in, as an array without axes of dtype `arguments_dtype`.

    All mappings are keyed by the name of the capture; `values` holds arrays and numbers.
    """
    record = np.zeros((), arguments_dtype(captures, real))
    for name, spec in captures.items():
        value = values[name]
        if spec.rank is None:
            record[name] = value
        else:
            record[name] = array_fields(value, addresses[name], spec)
    return record
