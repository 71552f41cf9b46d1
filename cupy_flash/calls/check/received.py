"""Checks of the arrays of a call that sums attention weights, and the problem they describe."""

from __future__ import annotations

import dataclasses

from cupy_flash.arrays.strided import dtype_name, require_shape
from cupy_flash.calls.arguments import ReceivedArguments
from cupy_flash.calls.check.problems import CheckedCall, check_call, lse_shape
from cupy_flash.calls.options import Options
from cupy_flash.problem.arrays import Tensors


def check_received_call(arguments: ReceivedArguments, options: Options) -> CheckedCall:
    """Check the CuPy arrays and the options of a call, and return its problem.

    Raises
    ------
    TypeError, ValueError
        If no kernel computes the problem; the message names the argument.
    """
    problem, mod_arrays = check_call(arguments.forward, options)
    lse = arguments.lse
    # A call without lse computes it.
    if lse is not None:
        if dtype_name(lse) != problem.lse_dtype or not lse.dtype.isnative:
            raise TypeError(f"lse has dtype {lse.dtype}; expected {problem.lse_dtype}")
        expected = lse_shape(arguments.q, problem)
        require_shape("lse", lse, expected, "one for each query row of each head")
    assert options.received is not None
    kind, _, _ = options.received
    tensors = Tensors(**{name: problem.tensors[name] for name in ("q", "k")})
    return CheckedCall(dataclasses.replace(problem, tensors=tensors, received=kind), mod_arrays)
