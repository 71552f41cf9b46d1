"""Rules by which `torch.vmap` maps attention over an axis of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from cupy_flash.folding import can_fold, fold_dense, unfold_gradient
from cupy_flash.mods.trace.traced import Traced


def mapped(
    operator: Callable[..., Any],
    kind: str,
    size: int,
    axes: Any,
    names: tuple[Any, ...],
    values: tuple[Any, ...],
    functions: Iterable[Traced],
    wrt: Sequence[str],
) -> tuple[Any, Any]:
    """Return the results of an operator for each element of an axis, and their axes, which are 0.

    One call computes all elements if it can, otherwise there is a call for each.

    Parameters
    ----------
    operator, values
        Operator and its arguments.
    kind
        Kind of the call: "dense" or "varlen".
    size, axes
        Number of elements, and for each tensor the axis of the elements, or None.
    names
        Arguments with the names of tensors instead of tensors.
    functions
        User's functions.
    wrt
        Names of the inputs whose gradients are the results; empty for out and lse.
    """
    leaves, structure = tree_flatten(values)
    flat_names, flat_axes = tree_leaves(names), tree_leaves(axes)
    leaves = [
        x if axis is None else x.movedim(axis, 0) for x, axis in zip(leaves, flat_axes, strict=True)
    ]
    moved = [n for n, axis in zip(flat_names, flat_axes, strict=True) if axis is not None]
    named = list(zip(flat_names, leaves, strict=True))
    tensors = {name: x for name, x in named if isinstance(x, Tensor)}

    def run(given: Mapping[str, Tensor]) -> Any:
        leaves = [given[name] if isinstance(x, Tensor) else x for name, x in named]
        return operator(*tree_unflatten(leaves, structure))

    results = mapped_results(run, kind, size, tensors, moved, functions, wrt)
    return results, tree_map(lambda _: 0, results)


def mapped_results(
    run: Callable[[Mapping[str, Tensor]], Any],
    kind: str,
    size: int,
    tensors: Mapping[str, Tensor],
    moved: Sequence[str],
    functions: Iterable[Traced],
    wrt: Sequence[str],
) -> Any:
    """Return the results for each element of the first axis of the tensors in `moved`.

    Parameters
    ----------
    run
        Function that returns the results as a list or tuple, given tensors by name.
    kind, size, functions, wrt
        See `mapped`.
    tensors
        Tensors by name.
    moved
        Names of the tensors whose first axis is that of the elements.

    Raises
    ------
    ValueError
        If there are no elements, and each would be a separate call.
    """
    # Only names of captures have a point.
    has_own_captures = any("." in name for name in moved)
    if has_own_captures or not can_fold(kind, tensors, moved, wrt, functions):
        if not size:
            raise ValueError(
                f"vmap maps an axis of length 0 of {', '.join(moved)}; expected a sample, because "
                "these samples are separate calls"
            )
        each = [
            run({name: x[n] if name in moved else x for name, x in tensors.items()})
            for n in range(size)
        ]
        return type(each[0])(map(torch.stack, zip(*each, strict=True)))
    folded, batch = fold_dense(torch, tensors, moved, size, wrt)
    results = run(folded)
    if not wrt:
        return results
    shapes = {n: tuple(x.shape[1:] if n in moved else x.shape) for n, x in tensors.items()}
    return type(results)(
        unfold_gradient(name, x, shapes[name], size, batch)
        for name, x in zip(wrt, results, strict=True)
    )
