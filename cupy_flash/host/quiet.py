"""The error state of NumPy within the CPU backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def quiet(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with every floating-point error of NumPy ignored while it runs.

    The conditions that NumPy reports are intended: exp of -inf, the logarithm of an empty row's
    sum, rounding to a subnormal number. The caller's `numpy.seterr` must not change a result.
    `numpy.errstate` as a decorator keeps the previous state in one object that all threads share,
    before NumPy 2.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return run
