"""The way of every backward call: as that of forward calls in `run.py`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupy_flash.arrays.kinds import no_array
from cupy_flash.calls import on_gpu
from cupy_flash.calls.arguments import normalized, with_modifiers
from cupy_flash.calls.backends import require_backend, require_gpu_backend
from cupy_flash.calls.gradients import WRITTEN, GradientArguments
from cupy_flash.calls.modifiers import NO_FUNCTIONS, Functions, read_modifiers
from cupy_flash.calls.options import Options, plain_options
from cupy_flash.problem.gradient import ROWS

_REQUIRED = ("q", "k", "v", "out", "dout", "lse")


def wanted(wrt: Sequence[str] | None) -> tuple[str, ...]:
    """The inputs whose gradients are wanted.

    Raises
    ------
    TypeError
        For what is no sequence of names.
    ValueError
        For none, a name twice, or of no input that has a gradient.
    """
    if wrt is None:
        return ROWS
    if isinstance(wrt, str) or not isinstance(wrt, Sequence):
        raise TypeError(f"wrt is {wrt!r}; expected a sequence of names, as ('q', 'k')")
    names = tuple(wrt)
    for name in names:
        if name not in ROWS:
            raise ValueError(f"wrt names {name!r}; expected some of {', '.join(ROWS)}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"wrt is {wrt!r}; expected at least one name, and each once")
    return names


def gradients(
    arguments: GradientArguments,
    options: Options,
    backend: str,
    modifications: Mapping[str, Any],
) -> tuple[Any, ...]:
    """What the public functions of gradients return."""
    functions: Functions = NO_FUNCTIONS
    found = read_modifiers(modifications) if modifications else None
    if found is not None:
        modifiers, arrays, functions = found
        if arrays:
            arguments = with_modifiers(arguments, modifiers.names, arrays)
        options = options.with_modifiers(modifiers)
    options = plain_options(options)
    cupy = sys.modules.get("cupy")
    if backend == "auto" and cupy is not None and arguments.q.__class__ is cupy.ndarray:
        results = on_gpu.run(arguments, options, 0, True, functions)
        if results is not None:
            return tuple(results)
    require_backend(backend)
    for name in _REQUIRED:
        if getattr(arguments, name) is None:
            raise no_array(name, None)
    given = {name: getattr(arguments, name) for name in WRITTEN}
    arguments, convert = normalized(arguments, WRITTEN)
    if isinstance(arguments.q, np.ndarray):
        raise NotImplementedError
    require_gpu_backend(backend)
    results = on_gpu.run(arguments, options, 0, False, functions)
    assert options.wrt is not None
    # Converting also orders the consumer's stream after ours.
    named = {name: convert(x) for name, x in zip(options.wrt, results, strict=True)}
    return tuple(
        named[name] if given[f"d{name}"] is None else given[f"d{name}"] for name in options.wrt
    )
