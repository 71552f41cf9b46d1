"""Calls in graphs of `torch.compile`: which ones an operator accepts, and the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cupy_flash.arrays.strided import LAYOUTS
from cupy_flash.opaque import marked, outside


def are_tensors(*arrays: Any, optional: tuple[Any, ...] = ()) -> bool:
    """Return whether all arguments are tensors, and those in `optional` tensors or None.

    Nested tensors do not count, because no operator takes them.
    """
    return all(isinstance(x, Tensor) and not x.is_nested for x in arrays) and all(
        x is None or isinstance(x, Tensor) for x in optional
    )


def is_plain(causal: Any, softmax_scale: Any, layout: Any = "bshd") -> bool:
    """Return whether an operator accepts these options."""
    return (
        isinstance(causal, bool)
        and (softmax_scale is None or is_number(softmax_scale))
        and isinstance(layout, str)
        and layout in LAYOUTS
    )


def is_number(value: Any) -> bool:
    """Return whether a value is a number, which may be symbolic, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@functools.partial(marked, reason="an argument of the call is not one that a graph can hold")
def outside_graph(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function outside the graph of `torch.compile`.

    This splits the graph, or is an error with `fullgraph=True`. Wrong arguments raise the usual
    errors there.
    """
    return outside(function, arguments, options)
