"""Captures: arrays and numbers that a modification receives by name, and reads at run time."""

from __future__ import annotations

import numbers
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash.arrays.kinds import read
from cupy_flash.arrays.strided import cast, convert_to, dtype_name, is_aligned, kind_of
from cupy_flash.mods.ir.expression import ARRAY, BOOL, INT, REAL, UINT64, Node
from cupy_flash.mods.trace.symbols import Symbol, TracedArray, require_indices

MAX_RANK = 4
# Node type of the elements that are read, by the dtype of the array.
ELEMENT_TYPES = {
    "bool": BOOL,
    "uint8": INT,
    "int32": INT,
    "int64": INT,
    "uint64": UINT64,
    "float16": REAL,
    "bfloat16": REAL,
    "float32": REAL,
    "float64": REAL,
}


@dataclass(frozen=True)
class CaptureSpec:
    """Properties of a capture on which generated CUDA source depends, without values and shape.

    Attributes
    ----------
    dtype
        Dtype of an array, a key of `ELEMENT_TYPES`; for numbers "bool", "int32" or "real".
    rank
        Number of axes of an array; None for a number.
    contiguous_last
        Whether the last axis is contiguous.
    is_wide
        Whether the distance of two elements, counted in elements, may exceed int32.
    """

    dtype: str
    rank: int | None = None
    contiguous_last: bool = True
    is_wide: bool = False

    @property
    def type(self) -> str:
        """Node type of an array's elements, or of a number."""
        return self.dtype if self.rank is None else ELEMENT_TYPES[self.dtype]

    def parameter(self, name: str) -> Symbol | TracedArray:
        """Return the argument with which a function is traced."""
        if self.rank is None:
            return Symbol(Node("scalar", self.type, (), name))
        if self.rank == 0:
            return Symbol(Node("load", self.type, (array_node(name),)))
        return TracedArray(name, self.rank, self.type)


def prefixed(kind: str, name: str) -> str:
    """Return the name of a capture of a modification among all arrays of a call.

    The name is valid in C++. Letters outside of ASCII are written as their code points after a
    separate prefix, so that no two captures have the same name.
    """
    if name.isascii():
        return f"{kind}_{name}"
    letters = (x if x.isascii() and x != "_" else f"_{ord(x):x}_" for x in name)
    return f"{kind}u_{''.join(letters)}"


def unused_name(name: str, used: Container[str]) -> str:
    """Return a name for a capture that differs from the used names."""
    chosen, number = name, 1
    while chosen in used:
        number += 1
        chosen = f"{name}_{number}"
    return chosen


def array_node(name: str) -> Node:
    """Return the leaf node of a captured array."""
    return Node("array", ARRAY, (), name)


def read_capture(name: str, value: Any) -> tuple[Any, CaptureSpec]:
    """Return a capture as a NumPy or CuPy array or a Python number, and its spec.

    Raises
    ------
    TypeError
        For a name that is not an identifier, and for a value that is neither a number nor an array
        of a supported dtype.
    ValueError
        For an array with more than 4 axes, without elements or with misaligned elements; for an
        integer that int32 cannot hold.
    """
    if not name.isidentifier():
        raise TypeError(f"a capture is named {name!r}; expected the name of a parameter")
    if isinstance(value, (bool, np.bool_)):
        return bool(value), CaptureSpec("bool")
    if isinstance(value, numbers.Integral):
        number = int(value)
        if not -(2**31) <= number < 2**31:
            raise ValueError(f"{name} is {number}, which does not fit int32; pass a float")
        return number, CaptureSpec("int32")
    if isinstance(value, numbers.Real):
        return float(value), CaptureSpec("real")
    if isinstance(value, (list, tuple)):
        raise TypeError(f"{name} is {kind_of(value)}; expected an array: pass np.array({name})")
    # Not copied, because calls read what the array holds at that time.
    array = read(name, value, is_written=True, reads_later=True)
    dtype = dtype_name(array)
    if dtype not in ELEMENT_TYPES or not array.dtype.isnative:
        raise TypeError(
            f"{name} has dtype {array.dtype}; expected one of {', '.join(ELEMENT_TYPES)}"
        )
    if array.ndim > MAX_RANK:
        raise ValueError(f"{name} has {array.ndim} axes; expected at most {MAX_RANK}")
    if array.size == 0:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; expected at least one element, because an "
            "index out of range reads the nearest one"
        )
    size, strides = array.itemsize, array.strides
    if any(stride % size for stride in strides) or not is_aligned(array):
        raise ValueError(
            f"{name} has misaligned elements (strides {strides}, elements of {size} bytes); pass a "
            "copy"
        )
    contiguous = array.ndim == 0 or array.shape[-1] == 1 or strides[-1] == size
    extent = sum(abs(s) // size * (n - 1) for n, s in zip(array.shape, strides, strict=True))
    return array, CaptureSpec(dtype, array.ndim, contiguous, extent >= 2**31)


def number_key(value: bool | int | float) -> bool | int | str:
    """Return a hashable form of a captured number that is equal only for the same bits.

    A real becomes hexadecimal text, because 0.0 equals -0.0, and NaN does not equal itself.
    """
    return value.hex() if isinstance(value, float) else value


def number_of(key: bool | int | str) -> bool | int | float:
    """Return the number from which `number_key` has made a key."""
    return float.fromhex(key) if isinstance(key, str) else key


def require_int32_values(name: str, array: Any) -> None:
    """Raise ValueError if a NumPy array holds integers that int32 cannot hold."""
    if isinstance(array, np.ndarray):
        for number in (array.min(), array.max()):
            if not -(2**31) <= number < 2**31:
                raise ValueError(
                    f"{name} holds {number}, but int64 is read as int32, which cannot hold it; "
                    f"pass {cast(name, array, 'uint64')}, or floats"
                )


def require_differentiable(
    names: Iterable[str], specs: Mapping[str, CaptureSpec]
) -> tuple[str, ...]:
    """Return the names of captures whose gradients are requested.

    Raises
    ------
    TypeError
        If a name is not that of a captured array of reals.
    ValueError
        If a name occurs twice.
    """
    if isinstance(names, str):
        raise TypeError(f"differentiable is {names!r}; expected a tuple such as ({names!r},)")
    result = tuple(names)
    for name in result:
        spec = specs.get(name)
        if spec is None:
            known = ", ".join(specs) or "none"
            raise TypeError(f"differentiable has {name!r}; expected names of captures: {known}")
        if spec.rank is None:
            raise TypeError(
                f"differentiable has {name!r}, which is a number and has no gradient; pass it as "
                "an array, such as np.array(0.5)"
            )
        if spec.type != REAL:
            raise TypeError(
                f"differentiable has {name!r} of dtype {spec.dtype}; expected one of "
                f"{', '.join(dtype for dtype, kind in ELEMENT_TYPES.items() if kind == REAL)}"
            )
        if result.count(name) > 1:
            raise ValueError(f"differentiable has {name!r} twice")
    return result


class HostArray:
    """Captured array on the host. Index arrays of the module `xp` read elements as in kernels.

    An index outside of the array reads the nearest element. Elements become int32, or reals of
    `dtype`.
    """

    def __init__(self, name: str, array: Any, xp: Any, dtype: Any) -> None:
        self._name, self._xp = name, xp
        types = {BOOL: np.bool_, INT: np.int32, UINT64: np.uint64, REAL: dtype}
        self._dtype = types[ELEMENT_TYPES[dtype_name(array)]]
        self._array = convert_to(xp, array)

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        array, xp = self._array, self._xp
        require_indices(self._name, array.ndim, indices)
        inside = [
            min(max(int(i), 0), n - 1) if isinstance(i, (int, np.integer)) else xp.clip(i, 0, n - 1)
            for i, n in zip(indices, array.shape, strict=True)
        ]
        return array[tuple(inside)].astype(self._dtype)


def host_parameter(name: str, value: Any, xp: Any, dtype: Any) -> Any:
    """Return the argument of a function on the host: a number, or an array to be indexed."""
    if isinstance(value, bool):
        # For a Python bool, ~value would be -1 or -2.
        return np.bool_(value)
    if isinstance(value, (int, float)):
        return (np.int32 if isinstance(value, int) else np.dtype(dtype).type)(value)
    array = HostArray(name, value, xp, dtype)
    return array[()] if value.ndim == 0 else array
