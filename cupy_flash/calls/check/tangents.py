"""Checks of the arrays of a call that computes tangents, and the problem that they describe."""

from __future__ import annotations

from cupy_flash.arrays.strided import (
    address_of,
    new_spec,
    require_batch_axes,
    require_float,
    spec_of,
    to_bshd,
    with_one_batch_axis,
)
from cupy_flash.calls.arguments import TangentArguments
from cupy_flash.calls.check.problems import CheckedCall, check_call
from cupy_flash.calls.options import Options
from cupy_flash.problem.backward import with_tangents
from cupy_flash.problem.gradient import ROWS, tangent_of


def check_tangent_call(arguments: TangentArguments, options: Options) -> CheckedCall:
    """Check the CuPy arrays and the options of a call, and return its problem.

    Raises
    ------
    TypeError, ValueError
        If no kernel computes the problem; the message names the argument.
    """
    problem, mod_arrays = check_call(arguments.forward, options)
    tangents = {}
    for name in ROWS:
        tangent = getattr(arguments, tangent_of(name))
        if tangent is not None:
            if options.is_dense:
                require_batch_axes(tangent_of(name), tangent, arguments.q)
            require_float(tangent_of(name), tangent)
            tangents[name] = spec_of(to_bshd(tangent, options.layout), address_of(tangent))
    out = with_one_batch_axis(arguments.out)
    out_tangent = new_spec(tuple(out.shape), options.layout, problem.dtype)
    return CheckedCall(with_tangents(problem, tangents, out_tangent), mod_arrays)
