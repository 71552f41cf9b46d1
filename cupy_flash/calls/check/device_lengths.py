"""Checks of lengths, offsets and indices in device arrays if `CUPY_FLASH_CHECK` is set."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_flash.arrays.strided import as_cupy, convert_to
from cupy_flash.calls.arguments import INT32
from cupy_flash.calls.check.lengths import check_contents
from cupy_flash.calls.check.problems import CheckedCall
from cupy_flash.calls.options import Options
from cupy_flash.gpu.environment import cupy_module

VARIABLE = "CUPY_FLASH_CHECK"
# The variable is read once, because a call takes only a few microseconds.
is_enabled = os.environ.get(VARIABLE, "0") not in ("", "0")


def check(
    arrays: Any, options: Options, keys: int, check_call: Callable[[Any, Options], CheckedCall]
) -> None:
    """Raise ValueError for array contents that kernels would clamp; see `check_contents`.

    The arrays of lengths, offsets and indices are copied to the host, which waits for the current
    stream. The check is skipped while the stream is captured: arrays have no contents then.

    Parameters
    ----------
    arrays, options
        `Arguments` or `GradientArguments` of a call on the current GPU, and its options. They have
        passed all other checks.
    keys
        Length of every cached sequence, if no array gives the lengths.
    check_call
        Function that returns the `CheckedCall` of the arrays and options.
    """
    names = [name for name in arrays._fields if name in INT32 and getattr(arrays, name) is not None]
    if not names or _is_capturing():
        return
    plain = type(arrays)(*map(as_cupy, arrays))
    on_host = {name: convert_to(np, getattr(plain, name)) for name in names}
    problem, _ = check_call(plain, options)
    check_contents(plain._replace(**on_host).forward, options, problem, keys)


def contents(array: Any) -> Any | None:
    """Return a copy of a device array on the host if calls are checked, otherwise None.

    The copy waits for the current stream. The result is None while the stream is captured.
    """
    return convert_to(np, as_cupy(array)) if is_enabled and not _is_capturing() else None


def _is_capturing() -> bool:
    return bool(cupy_module().cuda.get_current_stream().is_capturing())
