"""Checks of options that are plain values: numbers, counts, bools and dtypes."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

# Largest number of sequences, caches or pages: kernels hold these counts in 32-bit integers.
MAX_COUNT = 2**31 - 1
_NUMBERS = (int, float)


def the_one(value: Any) -> Any:
    """Return the number in an array of one element; return any other value unchanged.

    If the array is on a GPU, this waits for the GPU.
    """
    if value.__class__ in _NUMBERS:
        return value
    shape = getattr(value, "shape", None)
    return value.item() if shape is not None and math.prod(shape) == 1 else value


def count(name: str, value: int | None) -> int:
    """Return a non-negative integer; raise TypeError or ValueError, naming the option, if not."""
    if value is None:
        raise TypeError(f"{name} is None; expected an integer")
    number = integer(name, value)
    if number < 0:
        raise ValueError(f"{name} is {number}; expected at least 0")
    return number


def integer(name: str, value: int) -> int:
    """Return an integer as an int; raise TypeError, naming the option, for any other value."""
    value = the_one(value)
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} is {value!r}; expected an integer")


def finite(name: str, value: float) -> float:
    """Return a finite number as a float; raise TypeError or ValueError for other values."""
    value = the_one(value)
    try:
        is_finite = math.isfinite(value)
    except OverflowError:
        # The message omits the number, which has more than 300 digits.
        raise ValueError(f"{name} is too large for a float; expected a finite number") from None
    except TypeError:
        raise TypeError(f"{name} is {value!r}; expected a number") from None
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}; expected a number")
    if not is_finite:
        raise ValueError(f"{name} is {value}; expected a finite number")
    # -0.0 becomes 0.0: they are equal as cache keys, so a cached result of one would be used for
    # the other.
    return float(value) + 0.0


def check_count(name: str, count: int) -> None:
    """Raise ValueError if a count exceeds 32 bits, as is possible for stride-0 views."""
    if count > MAX_COUNT:
        raise ValueError(f"{name} is {count}; expected at most {MAX_COUNT}")


def check_bool(name: str, value: bool) -> None:
    """Raise TypeError unless a value is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}; expected True or False")


def named_dtype(dtype: Any) -> Any:
    """Return the name of a NumPy, torch or JAX dtype; return names and other values unchanged."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    # NumPy does not know torch's dtypes.
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except (TypeError, ValueError):
        return dtype
