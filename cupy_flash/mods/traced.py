"""What device text and derivatives depend on of a modification, apart from what is captured."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from cupy_flash.mods.captures import CaptureSpec
from cupy_flash.mods.expression import Node


class Traced:
    """What device text depends on of a modification: the same object for the same parts.

    So it is hashed and compared by its identity. It holds nothing that was captured.

    Attributes
    ----------
    expression
        What a kernel computes.
    specs
        Of captures, by name.
    block
        Rows and keys of the blocks that a mask is the same in, if any.
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
        """The object of these parts, a new one only where there is none."""
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
    """What derivatives of a `ScoreMod` are taken of.

    Attributes
    ----------
    graph
        What the Python function computes, whether or not there is CUDA text beside it; None where
        there is no function.
    differentiable
        Captured arrays whose gradients are asked for, by number.
    """

    graph: Node | None
    differentiable: tuple[str, ...]

    def traced(self, score_mod: Traced | None) -> Traced | None:
        """What text would depend on without CUDA text in it."""
        if score_mod is None or self.graph is None:
            return None
        return Traced(self.graph, score_mod.specs)


NOT_DERIVABLE = Derivable(None, ())
