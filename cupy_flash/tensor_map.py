"""Tensor maps: what Hopper's copy engine needs to know of an array.

CUDA driver API, "Tensor Map Object Management".
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash.errors import DriverError

# Strides must be multiples of 16 bytes below 2^40.
STRIDE_UNIT = 16
MAX_STRIDE = 2**40

_MAP_BYTES = 128
# cuTensorMapEncodeTiled wants the record on 64 bytes.
_MAP_ALIGNMENT = 64
# Enumerators of cuda.h.
_DATA_TYPE = {"float16": 6, "bfloat16": 9}
_SWIZZLE = {64: 2, 128: 3}
_NO_INTERLEAVE = 0
_PROMOTE_TO_128_BYTES = 2
_FILL_WITH_ZEROS = 0
# Distinct sets of addresses kept by one call; a set takes 0.5 KiB.
_MAX_SETS = 256


@dataclass(frozen=True)
class TensorMapSpec:
    """A tensor map without its address.

    Attributes
    ----------
    dtype
        ``"float16"`` or ``"bfloat16"``.
    shape
        (dim, seqlen, heads, batch), none of them 0.
    strides
        Of seqlen, heads and batch, in bytes: multiples of 16 below 2^40.
    box
        Columns and rows of one copy. The columns are one line of shared memory, 64 or 128 bytes,
        which is also the swizzle.
    """

    dtype: str
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int]


@functools.cache
def _encode_tiled() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    function = ctypes.CDLL(name).cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = (pointer, number, ctypes.c_uint32) + 5 * (pointer,) + 4 * (number,)
    function.restype = number
    return function


class TensorMaps:
    """The tensor maps of a call's arrays, encoded once for each set of addresses."""

    def __init__(self, specs: Sequence[TensorMapSpec]) -> None:
        self._templates = [_arguments(spec) for spec in specs]
        self._buffer = ctypes.create_string_buffer(len(specs) * _MAP_BYTES + _MAP_ALIGNMENT)
        self._start = -ctypes.addressof(self._buffer) % _MAP_ALIGNMENT
        self._dtype = np.dtype([("maps", np.uint64, len(specs) * _MAP_BYTES // 8)])
        self._encoded: dict[tuple[int, ...], np.void] = {}

    def at(self, addresses: tuple[int, ...]) -> np.void:
        """The maps, one after another, as a scalar that CuPy passes by value.

        Parameters
        ----------
        addresses
            Device address of each array, a multiple of 16.
        """
        maps = self._encoded.get(addresses)
        if maps is None:
            maps = self._encode(addresses)
            if len(self._encoded) >= _MAX_SETS:
                self._encoded.clear()
            self._encoded[addresses] = maps
        return maps

    def _encode(self, addresses: tuple[int, ...]) -> np.void:
        encode = _encode_tiled()
        target = ctypes.addressof(self._buffer) + self._start
        for i, (template, address) in enumerate(zip(self._templates, addresses, strict=True)):
            before, after = template
            status = encode(target + i * _MAP_BYTES, *before, address, *after)
            if status:
                raise DriverError(f"cuTensorMapEncodeTiled failed with CUresult {status}")
        size = len(self._templates) * _MAP_BYTES
        return np.frombuffer(bytearray(ctypes.string_at(target, size)), self._dtype)[0]


def _arguments(spec: TensorMapSpec) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    columns, rows = spec.box
    rank = len(spec.shape)
    before = (_DATA_TYPE[spec.dtype], rank)
    after = (
        (ctypes.c_uint64 * rank)(*spec.shape),
        (ctypes.c_uint64 * (rank - 1))(*spec.strides),
        (ctypes.c_uint32 * rank)(columns, rows, 1, 1),
        (ctypes.c_uint32 * rank)(1, 1, 1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE[2 * columns],
        _PROMOTE_TO_128_BYTES,
        _FILL_WITH_ZEROS,
    )
    return before, after
