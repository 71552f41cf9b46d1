"""Checks, by addresses alone, that the arrays that a call writes overlap no other array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_flash.arrays.strided import address_of

# Limit of the search in which NumPy decides whether two arrays overlap. Its type is Any, because
# NumPy's stubs allow only -1 and 0.
_MAX_WORK: Any = 100_000


class OverlapCheck:
    """Check that raises ValueError if an array that is written overlaps another array.

    A check is built for given shapes and strides. The addresses may differ from call to call.

    Parameters
    ----------
    names
        Names of all arrays, for messages.
    arrays
        NumPy or CuPy arrays in the order of `names`, or None for an absent array.
    written
        Names of the arrays that are written.

    Attributes
    ----------
    pairs
        Indices of two arrays, and the bounds between which the distance of their addresses lies if
        they overlap.
    """

    # Largest number of remembered tuples of addresses, and of remembered distances of interleaved
    # arrays, such as a cache's keys and values.
    _MAX_KNOWN = 1024

    def __init__(
        self, names: Sequence[str], arrays: Sequence[Any], written: tuple[str, ...]
    ) -> None:
        self._names = names
        self.pairs: list[tuple[int, int, int, int]] = []
        self._checked: set[tuple[int, ...]] = set()
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
        """Raise ValueError if arrays overlap at these addresses, one address for each array."""
        # Most calls repeat the addresses of an earlier call. The 27 pairs of an append take 2 us.
        if not self.pairs or addresses in self._checked:
            return
        for i, j, low, high in self.pairs:
            distance = addresses[j] - addresses[i]
            if low < distance < high and (i, j, distance) not in self._interleaved:
                if self._overlap(i, j, addresses):
                    raise ValueError(
                        f"{self._names[i]} overlaps {self._names[j]}; pass separate memory"
                    )
                _remember(self._interleaved, (i, j, distance), self._MAX_KNOWN)
        _remember(self._checked, addresses, self._MAX_KNOWN)

    def _overlap(self, i: int, j: int, addresses: tuple[int, ...]) -> bool:
        first, second = self._layouts[i], self._layouts[j]
        assert first is not None
        assert second is not None
        return _share_memory(first.array_at(addresses[i]), second.array_at(addresses[j]))


def require_no_overlap(
    names: Sequence[str], arrays: Sequence[Any], written: tuple[str, ...]
) -> OverlapCheck:
    """Raise ValueError if an array that is written overlaps another array; return the check."""
    check = OverlapCheck(names, arrays, written)
    check.check(tuple(0 if array is None else address_of(array) for array in arrays))
    return check


def _remember(known: set[Any], what: Any, most: int) -> None:
    if len(known) >= most:
        known.clear()
    known.add(what)


class _Layout:
    """Shape and strides of an array, and the range of its bytes relative to its first element."""

    def __init__(self, array: Any) -> None:
        self.shape, self.strides, self.itemsize = array.shape, array.strides, array.itemsize
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        self.low = sum(step for step in steps if step < 0)
        self.high = sum(step for step in steps if step > 0) + self.itemsize

    def array_at(self, address: int) -> np.ndarray:
        """Return an array of this layout at an address; its elements must not be accessed."""
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
    """Return whether two arrays have a byte in common; also True if the search takes too long."""
    if not np.may_share_memory(first, second):
        return False
    try:
        return np.shares_memory(first, second, max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return True
