"""Checks of the arrays of a backward call, and the problem that they describe."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash.arrays.strided import (
    address_of,
    dtype_name,
    new_spec,
    require_batch_axes,
    require_float,
    require_in_place,
    require_shape,
    spec_of,
    to_bshd,
    with_one_batch_axis,
)
from cupy_flash.calls.arguments import GradientArguments
from cupy_flash.calls.check.problems import CheckedCall, check_call, lse_shape
from cupy_flash.calls.gpu.allocate import ResultSpec
from cupy_flash.calls.options import Options
from cupy_flash.problem.backward import with_gradient
from cupy_flash.problem.gradient import OF_MOD, ROWS, GradientSpec
from cupy_flash.problem.problem import Problem

_OTHERS = ("dout", "out")


def require_grad_dtype(grad_dtype: Any) -> None:
    """Raise ValueError unless `grad_dtype` is None or "float32"."""
    if grad_dtype is not None and not (isinstance(grad_dtype, str) and grad_dtype == "float32"):
        raise ValueError(
            f"grad_dtype is {grad_dtype!r}; expected 'float32', or None for the inputs' dtypes"
        )


def check_gradient_call(arguments: GradientArguments, options: Options) -> CheckedCall:
    """Check the NumPy or CuPy arrays and the options of a backward call; return its problem.

    Raises
    ------
    TypeError, ValueError
        If no kernel computes the problem; the message names the argument.
    """
    assert options.wrt is not None
    require_grad_dtype(options.grad_dtype)
    for name in _OTHERS:
        array = getattr(arguments, name)
        require_float(name, array)
    problem, mod_arrays = check_call(arguments.forward, options)
    if options.is_dense:
        require_batch_axes("dout", arguments.dout, arguments.q)
    _require_row_values(arguments, problem)
    layout = options.layout
    dout = spec_of(to_bshd(arguments.dout, layout), address_of(arguments.dout))
    dtype = options.grad_dtype or problem.dtype
    gradients = {}
    for name in ROWS:
        given = getattr(arguments, f"d{name}")
        if given is None:
            if name in options.wrt:
                like = with_one_batch_axis(getattr(arguments, name))
                gradients[name] = new_spec(tuple(like.shape), layout, dtype)
            continue
        if name not in options.wrt:
            raise ValueError(f"d{name} is given, but wrt does not name {name!r}")
        if options.is_dense:
            require_batch_axes(f"d{name}", given, arguments.q)
        require_float(f"d{name}", given)
        require_in_place(f"d{name}", given)
        gradients[name] = spec_of(to_bshd(given, layout), address_of(given))
    spec = GradientSpec(
        options.wrt,
        dtype,
        arguments.dlse is not None,
        as_inputs=options.grad_dtype is None,
        bias=_bias_axes(arguments) if "bias" in options.wrt else None,
        captured=sum(_input(arguments, n).size for n in options.wrt if n.startswith(OF_MOD)),
    )
    return CheckedCall(with_gradient(problem, spec, dout, gradients), mod_arrays)


def _bias_axes(arguments: GradientArguments) -> tuple[int, int, int, int]:
    shape = tuple(_input(arguments, "bias").shape)
    batch, heads, rows, keys = (1,) * (4 - len(shape)) + shape
    return batch, heads, rows, keys


def _input(arguments: GradientArguments, name: str) -> Any:
    """Return the input with this name in `Options.wrt`."""
    # The field of a captured array has an underscore instead of the dot: "score_mod_NAME".
    return getattr(arguments, name.replace(".", "_"))


def result_spec(arguments: GradientArguments, options: Options, name: str) -> ResultSpec:
    """Return the shape and dtype of a newly allocated gradient of an input."""
    like = _input(arguments, name)
    dtype = like.dtype if options.grad_dtype is None else np.dtype(options.grad_dtype)
    return tuple(like.shape), dtype


def _require_row_values(arguments: GradientArguments, problem: Problem) -> None:
    for name in ("lse", "dlse"):
        array = getattr(arguments, name)
        if array is None:
            continue
        if dtype_name(array) != problem.lse_dtype or not array.dtype.isnative:
            raise TypeError(f"{name} has dtype {array.dtype}; expected {problem.lse_dtype}")
        expected = lse_shape(arguments.q, problem)
        require_shape(name, array, expected, "one for each query row of each head")
