"""Tensor maps, which describe arrays to TMA.

See the CUDA driver API, "Tensor Map Object Management".
"""

from __future__ import annotations

import ctypes
import operator
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupy_flash.errors import DriverError
from cupy_flash.families.schedule import TensorMapSpec
from cupy_flash.gpu.by_value import ByValue
from cupy_flash.gpu.driver import driver_function
from cupy_flash.problem.arrays import ITEMSIZE

_MAP_BYTES = 128
# cuTensorMapEncodeTiled requires that the map is aligned to 64 bytes.
_MAP_ALIGNMENT = 64
# Enumerators of cuda.h. TMA treats float8 as bytes.
_DATA_TYPE = {"float16": 6, "bfloat16": 9, "float8_e4m3fn": 0}
_SWIZZLE = {64: 2, 128: 3}
_NO_INTERLEAVE = 0
_PROMOTE_TO_128_BYTES = 2
_FILL_WITH_ZEROS = 0
# Largest number of sets of addresses that a `TensorMaps` caches; a set takes 0.5 KiB.
_MAX_SETS = 64
# Bits to flip in an address to find where the driver stores it. The lowest bits must stay 0, and
# the driver might reject the highest bits.
_PROBES = (0x2AAAAAAAAA00, 0x155555555500)
# For each kind of map (dtypes, boxes and ranks): whether maps of it differ only in their addresses.
# The dict is bounded because boxes depend on tiles.
_only_addresses_differ: dict[tuple[Any, ...], bool] = {}
_MAX_KINDS = 256


class TensorMaps:
    """Tensor maps of the arrays of a call, encoded once for each set of addresses.

    Parameters
    ----------
    specs
        Specification of each map, by its name, in the order of the kernel argument.
    names
        Names of the values that `at` receives, in order.
    sources
        Name of the value that is the address of an array, if it differs from the array's name.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorMapSpec],
        names: Sequence[str],
        sources: Mapping[str, str] | None = None,
    ) -> None:
        sources = sources or {}
        arrays = [spec.array or name for name, spec in specs.items()]
        self._pick = operator.itemgetter(
            *(tuple(names).index(sources.get(name, name)) for name in arrays)
        )
        size = len(specs) * _MAP_BYTES
        buffer = np.zeros(size + _MAP_ALIGNMENT, np.uint8)
        start = -buffer.ctypes.data % _MAP_ALIGNMENT
        # Buffer for the maps that the driver writes.
        self._target = buffer[start : start + size]
        address = self._target.ctypes.data
        self._requests = [
            _request(spec, address + i * _MAP_BYTES) for i, spec in enumerate(specs.values())
        ]
        # The format alternates the first word of a map and its remaining bytes.
        self._struct = struct.Struct("=" + f"Q{_MAP_BYTES - 8}s" * len(specs))
        self._parts: list[Any] = []
        self._kind = tuple([(spec.dtype, spec.box, len(spec.shape)) for spec in specs.values()])
        self._only_address_changes: bool | None = None
        self._encoded: dict[tuple[int, ...], ByValue] = {}
        self._lock = threading.Lock()

    def maps_for(self, values: tuple[int, ...]) -> ByValue:
        """Return the maps for the addresses of a call, consecutively.

        Parameters
        ----------
        values
            Values in the order of `names`; addresses are aligned to 16 bytes.
        """
        addresses = self._pick(values)
        maps = self._encoded.get(addresses)
        if maps is None:
            with self._lock:
                maps = ByValue(bytearray(self._encode(addresses)))
                if len(self._encoded) >= _MAX_SETS:
                    self._encoded.clear()
                self._encoded[addresses] = maps
        return maps

    def _encode(self, addresses: tuple[int, ...]) -> bytes:
        if self._only_address_changes is None:
            self._only_address_changes = self._learn(addresses)
        # A map is opaque, and encoding one takes 6 us. If maps of addresses that differ in every
        # bit differ only in the first word, it is enough to write the address there.
        if self._only_address_changes:
            self._parts[::2] = addresses
            return self._struct.pack(*self._parts)
        self._ask_driver(addresses)
        return self._target.tobytes()

    def _learn(self, addresses: tuple[int, ...]) -> bool:
        """Return whether maps of different addresses differ only in their first words.

        Maps of one kind are probed once, because calls with new lengths are common in training.
        """
        self._ask_driver(addresses)
        self._parts = list(self._struct.unpack(self._target.tobytes()))
        if tuple(self._parts[::2]) != addresses:
            return False
        known = _only_addresses_differ.get(self._kind)
        if known is None:
            known = self._probe(addresses)
            if len(_only_addresses_differ) >= _MAX_KINDS:
                _only_addresses_differ.clear()
            _only_addresses_differ[self._kind] = known
        return known

    def _probe(self, addresses: tuple[int, ...]) -> bool:
        """Return whether maps of very different addresses differ only in their first words."""
        for probe in _PROBES:
            others = tuple(address ^ probe for address in addresses)
            try:
                self._ask_driver(others)
            except DriverError:
                return False
            parts = self._struct.unpack(self._target.tobytes())
            if parts[::2] != others or list(parts[1::2]) != self._parts[1::2]:
                return False
        return True

    def _ask_driver(self, addresses: tuple[int, ...]) -> None:
        encode = driver_function("cuTensorMapEncodeTiled")
        for (pointer, arguments), address in zip(self._requests, addresses, strict=True):
            pointer.value = address
            status = encode(*arguments)
            if status:
                raise DriverError(f"cuTensorMapEncodeTiled failed with CUresult {status}")


# The arguments are created once: a ctypes call takes 1 us with ctypes objects, but 4 us if it has
# to convert Python objects.
def _request(spec: TensorMapSpec, target: int) -> tuple[ctypes.c_void_p, tuple[Any, ...]]:
    columns, rows = spec.box
    rank = len(spec.shape)
    pointer = ctypes.c_void_p()
    arguments = (
        ctypes.c_void_p(target),
        ctypes.c_int(_DATA_TYPE[spec.dtype]),
        ctypes.c_uint32(rank),
        pointer,
        (ctypes.c_uint64 * rank)(*spec.shape),
        (ctypes.c_uint64 * (rank - 1))(*spec.strides),
        (ctypes.c_uint32 * rank)(columns, rows, 1, 1),
        (ctypes.c_uint32 * rank)(1, 1, 1, 1),
        ctypes.c_int(_NO_INTERLEAVE),
        ctypes.c_int(_SWIZZLE[ITEMSIZE[spec.dtype] * columns]),
        ctypes.c_int(_PROMOTE_TO_128_BYTES),
        ctypes.c_int(_FILL_WITH_ZEROS),
    )
    return pointer, arguments
