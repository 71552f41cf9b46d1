"""Structs of kernel arguments, of which few fields change from call to call."""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_FORMAT_CODE = {"uint64": "Q", "int64": "q", "float64": "d", "int32": "i"}


class PackedStruct:
    """A struct whose fields are fixed, but for some that each call gives by name.

    Packing takes 0.5 us that way, with all fields as numbers 1 us, and filling a NumPy record 15.

    Parameters
    ----------
    dtype
        Of the struct.
    fixed
        Values by field; a tensor's are its strides.
    sources
        Fields that change, of a tensor its address, and under which name their value comes.
        A field of a struct within is called ``mods.bias.data``.
    names
        Of the values that `pack_into` is given, in order.
    """

    def __init__(
        self,
        dtype: np.dtype,
        fixed: Mapping[str, Any],
        sources: Mapping[str, str],
        names: Sequence[str],
    ) -> None:
        layout = _layout(dtype, tuple(sources.items()), tuple(names))
        values = list(layout.zeros)
        for field, value in fixed.items():
            place, parts = layout.fields[field]
            has_no_address = isinstance(value, tuple) and len(value) < parts
            values[place] = (0, *value) if has_no_address else value
        data = np.array(tuple(values), dtype).tobytes()
        self._pack_into, self._pick = layout.pack_into, layout.pick
        self._between = tuple([data[start:end] for start, end in layout.between])

    def pack_into(self, memory: bytearray, values: tuple[int, ...]) -> None:
        """Write the struct to the begin of some memory."""
        self._pack_into(memory, 0, *self._pick(values + self._between))


class _Layout(NamedTuple):
    """Order and format of a struct's fields, which packing needs besides their values.

    Attributes
    ----------
    zeros
        Zeros of all fields, in order.
    fields
        Where in these each field is, and the number of its parts; 0 if it is a number.
    pack_into
        Method of a `struct.Struct`: of the fields that change, and of the bytes between them.
    pick
        Function that brings values, and these bytes behind them, into that order.
    between
        Where these bytes begin and end in the struct.
    """

    zeros: tuple[Any, ...]
    fields: dict[str, tuple[int, int]]
    pack_into: Callable[..., None]
    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    between: tuple[tuple[int, int], ...]


# Calls that differ only in lengths have the same layout. Bounded, as names may be those of users'
# captures.
@functools.lru_cache(maxsize=256)
def _layout(
    dtype: np.dtype, sources: tuple[tuple[str, str], ...], names: tuple[str, ...]
) -> _Layout:
    assert dtype.names is not None
    fields = {
        name: (place, len(dtype[name].fields or ())) for place, name in enumerate(dtype.names)
    }
    codes, end = "=", 0
    # Which of the values, and behind them of the bytes between those, come one after another.
    order: list[int] = []
    between: list[tuple[int, int]] = []
    places = {field: (*_place(dtype, field), name) for field, name in sources}
    for kind, start, name in sorted(places.values(), key=lambda place: place[1]):
        if start > end:
            codes += f"{start - end}s"
            order.append(len(names) + len(between))
            between.append((end, start))
        codes += _code(kind)
        order.append(names.index(name))
        end = start + struct.calcsize("=" + codes[-1])
    order.append(len(names) + len(between))
    between.append((end, dtype.itemsize))
    pack_into = struct.Struct(f"{codes}{dtype.itemsize - end}s").pack_into
    zeros = np.zeros((), dtype).item()
    return _Layout(zeros, fields, pack_into, operator.itemgetter(*order), tuple(between))


def _place(dtype: np.dtype, path: str) -> tuple[np.dtype, int]:
    """A field's type, and where it begins."""
    start = 0
    for name in path.split("."):
        assert dtype.fields is not None
        dtype, offset = dtype.fields[name][:2]
        start += offset
    return dtype, start


def _code(dtype: np.dtype) -> str:
    """What `struct` calls a field; of a tensor, its address."""
    if dtype.fields is not None:
        dtype = next(iter(dtype.fields.values()))[0]
    return _FORMAT_CODE[dtype.name]
