"""Expressions computed on arrays of NumPy or CuPy, as a kernel computes them for a pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_flash.mods.captures import host_parameter
from cupy_flash.mods.expression import BOOL, INT, REAL, UINT64, Node, postorder

# The others are named as NumPy names them.
_NAMES = {
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "neg": "negative",
    "abs": "absolute",
    "min": "minimum",
    "max": "maximum",
    "lt": "less",
    "le": "less_equal",
    "eq": "equal",
    "ne": "not_equal",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "not": "invert",
    "shl": "left_shift",
    "shr": "right_shift",
    "mod": "remainder",
    "floordiv": "floor_divide",
}


class Interpreter:
    """Values of expressions of the same pairs, each node's found once.

    Parameters
    ----------
    score
        In whose dtype, float32 or float64, reals are computed.
    positions
        Integers or arrays of them by name, taken as int32.
    captures
        Arrays and numbers by name.
    xp
        NumPy or CuPy.
    """

    def __init__(
        self, score: Any, positions: Mapping[str, Any], captures: Mapping[str, Any], xp: Any
    ) -> None:
        self._xp, dtype = xp, score.dtype
        self._symbols = {name: xp.asarray(value, np.int32) for name, value in positions.items()}
        self._symbols["score"] = score
        self._captures = {
            name: host_parameter(name, value, xp, dtype) for name, value in captures.items()
        }
        self._types = {BOOL: np.bool_, INT: np.int32, UINT64: np.uint64, REAL: dtype.type}
        self._values: dict[Node, Any] = {}

    def value(self, root: Node) -> Any:
        """The array, or scalar of NumPy, of an expression without CUDA text."""
        # What comes of masked pairs is not looked at.
        with np.errstate(all="ignore"):
            for node in postorder(root):
                if node not in self._values:
                    self._values[node] = self._compute(node)
        return self._values[root]

    def _compute(self, node: Node) -> Any:
        if node.op == "const":
            return self._types[node.type](node.value)
        if node.op == "symbol":
            return self._symbols[node.value]
        if node.op in ("array", "scalar"):
            return self._captures[node.value]
        args = [self._values[argument] for argument in node.args]
        if node.op == "load":
            # One without axes is its element.
            return args[0][tuple(args[1:])] if args[1:] else args[0]
        if node.op == "cast":
            return args[0].astype(self._types[node.type])
        return getattr(self._xp, _NAMES.get(node.op, node.op))(*args)
