"""Whether what a call writes overlaps anything else, from addresses alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_flash.arrays.strided import address_of

# Candidates that NumPy looks through to tell whether two arrays overlap; its stubs allow -1 and 0.
_MAX_WORK: Any = 100_000


class OverlapCheck:
    """Raises ValueError where an array that is written overlaps another.

    Made for arrays of certain shapes and strides, which may lie elsewhere in each call.

    Parameters
    ----------
    names
        Of all arrays, for messages.
    arrays
        NumPy or CuPy arrays in that order, or None where one is absent.
    written
        Names of those that are written.

    Attributes
    ----------
    pairs
        Indices of two arrays, and between which distances of their addresses their ranges meet.
    """

    # Sets of addresses that are remembered, and distances of interleaved arrays, such as those of a
    # cache's keys and values.
    _MAX_KNOWN = 1024

    def __init__(
        self, names: Sequence[str], arrays: Sequence[Any], written: tuple[str, ...]
    ) -> None:
        self._names = names
        self.pairs: list[tuple[int, int, int, int]] = []
        self._apart: set[tuple[int, ...]] = set()
        self._interleaved: set[tuple[int, int, int]] = set()
        places = [tuple(names).index(name) for name in written]
        if all(arrays[i] is None for i in places):
            return
        self._layouts = [None if a is None or not a.size else _Layout(a) for a in arrays]
        done: set[int] = set()
        for i in places:
            first = self._layouts[i]
            if first is None:
                continue
            done.add(i)
            for j, second in enumerate(self._layouts):
                if second is not None and j not in done:
                    pair = (i, j, first.low - second.high, first.high - second.low)
                    self.pairs.append(pair)

    def check(self, addresses: tuple[int, ...]) -> None:
        """Raise ValueError if they overlap at these addresses, one for each array."""
        # Calls mostly find their arrays where an earlier one did; 27 pairs, as an append has, would
        # take 2 us.
        if not self.pairs or addresses in self._apart:
            return
        for i, j, low, high in self.pairs:
            distance = addresses[j] - addresses[i]
            if low < distance < high and (i, j, distance) not in self._interleaved:
                if self._overlap(i, j, addresses):
                    raise ValueError(
                        f"{self._names[i]} overlaps {self._names[j]}; pass memory of its own"
                    )
                _remember(self._interleaved, (i, j, distance), self._MAX_KNOWN)
        _remember(self._apart, addresses, self._MAX_KNOWN)

    def _overlap(self, i: int, j: int, addresses: tuple[int, ...]) -> bool:
        first, second = self._layouts[i], self._layouts[j]
        assert first is not None
        assert second is not None
        return _share_memory(first.at(addresses[i]), second.at(addresses[j]))


def require_apart(names: Sequence[str], arrays: Sequence[Any], written: tuple[str, ...]) -> None:
    """Raise ValueError if one of the arrays that are written overlaps another."""
    addresses = tuple(0 if array is None else address_of(array) for array in arrays)
    OverlapCheck(names, arrays, written).check(addresses)


def _remember(known: set[Any], what: Any, most: int) -> None:
    if len(known) >= most:
        known.clear()
    known.add(what)


class _Layout:
    """How an array lies, and its first and last byte counted from its first element."""

    def __init__(self, array: Any) -> None:
        self.shape, self.strides, self.itemsize = array.shape, array.strides, array.itemsize
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        self.low = sum(step for step in steps if step < 0)
        self.high = sum(step for step in steps if step > 0) + self.itemsize

    def at(self, address: int) -> np.ndarray:
        """A stand-in that carries an address and is never dereferenced."""
        return np.asarray(_StandIn(self, address))


class _StandIn:
    def __init__(self, layout: _Layout, address: int) -> None:
        self.__array_interface__ = {
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": f"|V{layout.itemsize}",
            "data": (address, False),
            "version": 3,
        }


def _share_memory(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays share a byte; a case too hard for a bounded search counts as if."""
    if not np.may_share_memory(first, second):
        return False
    try:
        return np.shares_memory(first, second, max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return True
