"""Comparisons of several arrays with as many others, and the memory that a call allocates."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np


def assert_same_bits(found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Assert that each array has the same bytes as its counterpart."""
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()


def assert_all_equal(found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Assert that each array has the elements of its counterpart; NaN equals NaN."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_all_close(found: Iterable[Any], expected: Iterable[Any], **tolerances: float) -> None:
    """Assert that each array is close to its counterpart, with `rtol` and `atol` as in NumPy."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **tolerances)


def with_arrays(convert: Callable[[np.ndarray], Any], arguments: Mapping[str, Any]) -> dict:
    """Return the arguments of a call with every NumPy array converted."""
    return {
        name: convert(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def peak_memory(call: Callable[[], object]) -> int:
    """Return the largest number of bytes that Python and NumPy hold at once during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
