"""Sums of attention weights over queries on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_flash.arrays.kinds import read
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import dtype_name, is_cupy
from cupy_flash.calls.arguments import CACHES, ReceivedArguments
from cupy_flash.calls.check.lengths import check_contents
from cupy_flash.calls.check.received import check_received_call
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.dispatch import Computation, as_planned, attention, run
from cupy_flash.calls.gpu.received import RECEIVED
from cupy_flash.calls.options import Options
from cupy_flash.errors import UnsupportedError
from cupy_flash.problem.arrays import LARGEST_QUANTIZED

_RECEIVED = Computation(RECEIVED, None)
# Number of columns of the values of a forward pass whose output is not needed.
_COLUMNS = 16


def on_gpu(
    arguments: ReceivedArguments,
    options: Options,
    modifications: Mapping[str, Any],
    keys: int = 0,
    stream: Any | None = None,
) -> Any | None:
    """Return the sums of weights, or None if no kernel computes them.

    Kernels compute calls on a GPU without dropout and without 8-bit keys. A cache of float32 or
    float64 needs pages of a multiple of 16 rows.

    Parameters
    ----------
    arguments
        Arrays of the call. Without `lse`, a forward pass computes it first.
    options, modifications, keys, stream
        See `cupy_flash.calls.dispatch.attention`; the options have `received`.
    """
    if stream is not None:
        with on_stream(stream, arguments.q):
            return on_gpu(arguments, options, modifications, keys)
    if modifications.get("dropout_p") or not is_cupy(read("q", arguments.q)):
        return None
    of_keys, of_values = ("k", "v") if arguments.k_cache is None else CACHES
    stored = read(of_keys, getattr(arguments, of_keys))
    if dtype_name(stored) in LARGEST_QUANTIZED:
        return None
    if arguments.lse is None:
        forward = options._replace(return_lse=True, received=None, discards_out=True)
        values = stored[..., : min(_COLUMNS, stored.shape[-1])]
        inputs = arguments.forward._replace(**{of_values: values})
        _, lse = attention(inputs, forward, "auto", keys, modifications)
        arguments = arguments._replace(lse=lse)
    try:
        (result,) = run(_RECEIVED, arguments, options, "auto", keys, modifications)
    except UnsupportedError:
        # The caller has no other choice of a family than the planner.
        if options.family is not None or arguments.block_table is None:
            raise
        return None
    return result


def require_valid(
    arguments: ReceivedArguments,
    options: Options,
    modifications: Mapping[str, Any],
    keys: int = 0,
    stream: Any | None = None,
) -> None:
    """Raise an error for arguments of a packed or cached call that a kernel would refuse.

    The contents of lengths, offsets and indices are checked in host memory only.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        If an argument is wrong; the message names it.
    """
    arguments.require_given(options)
    with on_stream(stream, arguments.q):
        arguments, options = as_planned(arguments, options, modifications)
        arguments = converted(arguments, options)
        problem, _ = check_received_call(arguments, options)
        if isinstance(arguments.q, np.ndarray):
            check_contents(arguments.forward, options, problem, keys)
