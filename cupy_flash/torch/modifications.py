"""Modifications of a call as arguments of an operator, and their reconstruction from these.

A graph holds tensors, numbers and text. A `ScoreMod` or `MaskMod` therefore becomes the handle of
its `Template`, and its captures, which may be inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cupy_flash.differentiable import WITH_GRADIENT
from cupy_flash.mods.keywords import (
    ARRAYS,
    DROPOUT,
    DROPOUT_P,
    DROPOUT_SEED,
    MODS,
    NAMES,
    VECTORS,
)
from cupy_flash.mods.template import Template, keep, place, template_of
from cupy_flash.mods.trace.traced import Traced
from cupy_flash.problem.gradient import OF_MOD
from cupy_flash.torch.dropout import seed_fits_graph, seed_tensor
from cupy_flash.torch.graphs import is_number

# Arrays of modifications that have gradients.
DIFFERENTIABLE = (*WITH_GRADIENT, "alibi_slopes")
# Arguments of an operator that describe modifications, in the order of `packed`: the names of those
# that are given, followed by the handle if it is a function, and lists of what belongs to them, in
# the same order. `tensors` are arrays and captured ones, `integers` bounds of windows and captured
# ones, and `reals` softcaps, probabilities of dropout and captured ones. All are None in a call
# without modifications.
# PyTorch passes these few arguments in half the time of an argument for each modification. They
# have no default values, because generated code passes those as keywords, which takes longer.
SCHEMA = "Tensor[]? tensors, str[]? modifications, SymInt[]? integers, float[]? reals"
COUNT = SCHEMA.count(",") + 1
_NO_WINDOW = (-1, -1)
_REALS = ("softcap", DROPOUT_P)
# Prefixes of the names of captures among all inputs of a call.
_PREFIXES = dict(zip(MODS, (OF_MOD, "mask_mod."), strict=True))


def fits_graph(modifications: Mapping[str, Any]) -> bool:
    """Return whether `packed` accepts modifications; `torch.compile` traces this function."""
    for name, value in modifications.items():
        if value is None:
            continue
        if name not in NAMES:
            return False
        if name in DROPOUT:
            fits = seed_fits_graph(modifications)
        elif name in MODS:
            fits = isinstance(value, MODS[name]) and _has_tensors(value)
            # A mask has no derivative.
            fits = fits and not (name == "mask_mod" and _requires_grad(value))
        elif name == "window_size":
            pair = (None, None) if value == -1 else value
            fits = isinstance(pair, (tuple, list)) and len(pair) == 2
            fits = fits and all(x is None or is_integer(x) for x in pair)
        elif name == "softcap":
            fits = is_number(value)
        elif isinstance(value, Tensor):
            fits = name in DIFFERENTIABLE or not value.requires_grad
        elif name in VECTORS:
            fits = is_number(value) or _is_list(value, is_number)
        else:
            # Arrays of numbers of sequences; the others have more axes and are no lists.
            fits = name not in ("bias", "mask", "tree_mask") and _is_list(value, is_integer)
        if not fits:
            return False
    return True


def need_gradients(modifications: Mapping[str, Any]) -> bool:
    """Return whether autograd records modifications that satisfy `fits_graph`.

    `torch.compile` traces this function.
    """
    if not torch.is_grad_enabled():
        return False
    for name in ARRAYS:
        array = modifications.get(name)
        if isinstance(array, Tensor) and array.requires_grad:
            return True
    for name in MODS:
        mod = modifications.get(name)
        if mod is not None:
            tensors = mod.tensors
            for capture in mod.template.arrays:
                if capture in tensors and tensors[capture].requires_grad:
                    return True
    return False


def packed(
    modifications: Mapping[str, Any], q: Tensor, heads: int, *, has_gradient: bool = True
) -> tuple[Any, ...]:
    """Return modifications as arguments of an operator; `torch.compile` traces this function.

    Parameters
    ----------
    modifications
        Modifications that satisfy `fits_graph`.
    q
        Queries, whose dtype and device those tensors have that are made of lists and numbers.
    heads
        Number of query heads.
    has_gradient
        Whether the operator has a gradient.
    """
    # A tensor in the memory of a NumPy array has no version that would tell the backward pass that
    # the array has been written.
    as_capture = (
        torch.ops.cupy_flash.copy_of_capture
        if has_gradient and torch.is_grad_enabled()
        else _unchanged
    )
    packed_tensors: list[Tensor] = []
    names: list[str] = []
    integers: list[int] = []
    reals: list[float] = []
    for name in ARRAYS:
        array = _as_tensor(name, modifications.get(name), q, heads)
        if array is not None:
            names.append(name)
            packed_tensors.append(array)
    window, softcap = modifications.get("window_size"), modifications.get("softcap")
    if window is not None and window != -1:
        names.append("window_size")
        # -1 stands for a missing bound.
        integers += [-1 if x is None else x for x in window]
    if softcap is not None:
        names.append("softcap")
        reals.append(softcap)
    if modifications.get(DROPOUT_P):
        names += DROPOUT
        reals.append(modifications[DROPOUT_P])
        packed_tensors.append(seed_tensor(modifications[DROPOUT_SEED], q.device))
    for name in MODS:
        mod = modifications.get(name)
        if mod is None:
            continue
        template, given, tensors = mod.template, mod.captures, mod.tensors
        names.append(f"{name} {template.handle}")
        packed_tensors += [
            tensors[x] if x in tensors else as_capture(torch.as_tensor(given[x]))
            for x in template.arrays
        ]
        integers += [int(given[x]) for x in template.integers]
        reals += [given[x] for x in template.reals]
    return tuple(x if len(x) else None for x in (packed_tensors, names, integers, reals))


def unpacked(tensors: Any, names: Any, integers: Any, reals: Any) -> dict[str, Any]:
    """Return modifications by name, given the arguments that `packed` returned."""
    if names is None:
        return {}
    arrays, whole, real = iter(tensors or ()), iter(integers or ()), iter(reals or ())
    result: dict[str, Any] = {}
    for name, handle in _named(names):
        if handle:
            result[name] = _modification(handle, arrays, whole, real)
        elif name in _REALS:
            result[name] = next(real)
        elif name != "window_size":
            result[name] = next(arrays)
        elif (window := (next(whole), next(whole))) != _NO_WINDOW:
            result[name] = window
    return result


def tensor_names(_tensors: Any, names: Any, *_others: Any) -> list[str]:
    """Return the names of the tensors, given the arguments that `packed` returned."""
    result: list[str] = []
    for name, handle in _named(names):
        if handle:
            result += [_PREFIXES[name] + x for x in template_of(handle).arrays]
        elif name in ARRAYS or name == DROPOUT_SEED:
            result.append(name)
    return result


def templates(_tensors: Any, names: Any, *_others: Any) -> list[Template]:
    """Return the templates of the user's functions, given the arguments that `packed` returned."""
    return [template_of(handle) for _, handle in _named(names) if handle]


def _named(names: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    """Yield the name of each modification, and the handle of a function or an empty string."""
    for text in names or ():
        name, _, handle = text.partition(" ")
        yield name, handle


def keep_templates(*values: Any) -> None:
    """Keep the templates for the graph that is traced with these arguments of `packed`."""
    for template in templates(*values):
        keep(template.handle)


def functions_of(*values: Any) -> list[Traced]:
    """Return the user's functions, given the arguments that `packed` returned."""
    # The specs of captures make no difference to those who ask for the functions.
    return [Traced(template.parts.expression, {}) for template in templates(*values)]


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, which may be symbolic, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _modification(
    handle: str, captures: Iterator[Any], integers: Iterator[int], reals: Iterator[float]
) -> Any:
    template = template_of(handle)
    arrays = [next(captures) for _ in template.arrays]
    numbers = [*(next(integers) for _ in template.integers), *(next(reals) for _ in template.reals)]
    return template.modification(arrays, [_place(x) for x in arrays], numbers)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    size, dtype = tensor.element_size(), str(tensor.dtype).removeprefix("torch.")
    return place(tensor.data_ptr(), dtype, tensor.shape, [size * n for n in tensor.stride()])


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _requires_grad(mod: Any) -> bool:
    return any(mod.tensors[x].requires_grad for x in mod.template.arrays if x in mod.tensors)


def _has_tensors(mod: Any) -> bool:
    """Return whether captured arrays are tensors, or NumPy arrays that torch reads in place."""
    return all(
        name in mod.tensors
        or (mod.specs[name].dtype != "bfloat16" and _is_readable(mod.captures[name]))
        for name in mod.template.arrays
    )


def _is_readable(array: Any) -> bool:
    """Return whether an array is a NumPy array of which torch can make a tensor."""
    # Dynamo splits the graph at an array with a negative stride, and cannot trace `strides`.
    return isinstance(array, np.ndarray) and (
        torch.compiler.is_compiling() or all(stride >= 0 for stride in array.strides)
    )


def _as_tensor(name: str, value: Any, q: Tensor, heads: int) -> Tensor | None:
    """Return an array of a modification as a tensor; lists and numbers become constants."""
    if value is None or isinstance(value, Tensor):
        return value
    if name not in VECTORS:
        return torch.tensor(value, dtype=torch.int32, device=q.device)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if is_number(value):
        return torch.full((heads,), value, dtype=dtype, device=q.device)
    return torch.tensor(value, dtype=dtype, device=q.device)


def _is_list(value: Any, is_element: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list of such elements, or of such lists."""
    return isinstance(value, (list, tuple)) and all(
        is_element(x) or _is_list(x, is_element) for x in value
    )
