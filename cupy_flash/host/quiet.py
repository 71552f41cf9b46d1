"""The error state of NumPy within the CPU backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import Context
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def _silent_context() -> Context | None:
    """Return a context in which NumPy ignores errors; None before NumPy 2, which has none."""
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return None
    context = Context()
    context.run(np.seterr, all="ignore")
    return context


_silent = _silent_context()


def quiet(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with every floating-point error of NumPy ignored while it runs.

    The conditions that NumPy reports are intended: exp of -inf, the logarithm of an empty row's
    sum, rounding to a subnormal number. The caller's `numpy.seterr` must not change a result.
    `numpy.errstate` as a decorator keeps the previous state in one object that all threads share,
    before NumPy 2.

    A call whose argument `modified` is None runs in a context of its own, which takes 0.3 us where
    `numpy.errstate` takes 3. The user's functions, which `modified` may hold, see the context of
    the caller.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _silent is not None and kwargs.get("modified", True) is None:
            return _silent.copy().run(function, *args, **kwargs)
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return run
