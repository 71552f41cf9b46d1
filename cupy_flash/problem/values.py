"""Options that are plain values: numbers, counts, bools and dtypes, refused where they are none."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

# Sequences, caches and pages, which kernels have in 32-bit integers.
MAX_COUNT = 2**31 - 1
_NUMBERS = (int, float)


def the_one(value: Any) -> Any:
    """Return the number in an array of one number; anything else unchanged.

    One that lies on a GPU is waited for.
    """
    if value.__class__ in _NUMBERS:
        return value
    shape = getattr(value, "shape", None)
    return value.item() if shape is not None and math.prod(shape) == 1 else value


def count(name: str, value: int | None) -> int:
    """An integer that is not negative; TypeError or ValueError, naming the option, for others."""
    if value is None:
        raise TypeError(f"{name} is None; expected an integer")
    number = integer(name, value)
    if number < 0:
        raise ValueError(f"{name} is {number}; expected at least 0")
    return number


def integer(name: str, value: int) -> int:
    """A value that can be an index as an int; TypeError, naming the option, for any other."""
    value = the_one(value)
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} is {value!r}; expected an integer")


def finite(name: str, value: float) -> float:
    """A number as a float; TypeError for what is none, ValueError for one that is not finite."""
    value = the_one(value)
    try:
        is_finite = math.isfinite(value)
    except OverflowError:
        # Not its digits, of which there are more than 300.
        raise ValueError(f"{name} is beyond any float; expected a finite number") from None
    except TypeError:
        raise TypeError(f"{name} is {value!r}; expected a number") from None
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}; expected a number")
    if not is_finite:
        raise ValueError(f"{name} is {value}; expected a finite number")
    # -0.0 becomes 0.0: they are equal as keys, so what is kept for one is used for both.
    return float(value) + 0.0


def check_count(name: str, count: int) -> None:
    """Raise ValueError for more than kernels count in 32 bits, as stride-0 views may have."""
    if count > MAX_COUNT:
        raise ValueError(f"{name} is {count}; expected at most {MAX_COUNT}")


def check_bool(name: str, value: bool) -> None:
    """Raise TypeError for what is neither True nor False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}; expected True or False")


def named_dtype(dtype: Any) -> Any:
    """Return the name of a dtype of NumPy, torch or JAX; anything else, a name too, unchanged."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    # PyTorch's are no dtypes of NumPy.
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except (TypeError, ValueError):
        return dtype
