"""Parts of a modification on which generated CUDA source and derivatives depend."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from cupy_flash.mods.captures import CaptureSpec
from cupy_flash.mods.ir.expression import Node


class Traced:
    """Expression and specs of a modification. Objects with equal parts are the same object.

    It is hashed and compared by identity, and holds no captured arrays and numbers.

    Attributes
    ----------
    expression
        Expression that a kernel computes.
    specs
        Specs of captures by name.
    block
        Rows and keys of the blocks in which a mask is constant, or None.
    """

    __slots__ = ("__weakref__", "block", "expression", "specs")

    expression: Node
    specs: Mapping[str, CaptureSpec]
    block: tuple[int, int] | None

    def __new__(
        cls,
        expression: Node,
        specs: Mapping[str, CaptureSpec],
        block: tuple[int, int] | None = None,
    ) -> Traced:
        """Return the existing object with these parts, or a new object."""
        key = expression, tuple(specs.items()), block
        with _lock:
            traced = _known.get(key)
            if traced is None:
                traced = _known[key] = object.__new__(cls)
                traced.expression, traced.specs = expression, MappingProxyType(dict(specs))
                traced.block = block
        return traced


_known: weakref.WeakValueDictionary[Any, Traced] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Derivable(NamedTuple):
    """Function and captures for which derivatives of a `ScoreMod` are taken.

    Attributes
    ----------
    graph
        Expression of the Python function, whether or not there is CUDA source as well; None if
        there is no function.
    differentiable
        Names of captured arrays with gradients, in the order of their numbers.
    """

    graph: Node | None
    differentiable: tuple[str, ...]

    def traced(self, score_mod: Traced | None) -> Traced | None:
        """Return the modification with the expression of its Python function; None without one."""
        if score_mod is None or self.graph is None:
            return None
        return Traced(self.graph, score_mod.specs)


NOT_DERIVABLE = Derivable(None, ())
