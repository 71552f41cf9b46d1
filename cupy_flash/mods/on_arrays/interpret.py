"""Evaluation of expressions on NumPy or CuPy arrays, as kernels evaluate them for a pair."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.mods.captures import host_parameter
from cupy_flash.mods.ir.expression import REAL, Node, memoized
from cupy_flash.mods.ir.operations import OPERATIONS, evaluated, numpy_types

# A node, and whether its value decides: whether it is compared, rounded, converted to an integer,
# or used as an index.
_NodeUse = tuple[Node, bool]


class Interpreter:
    """Evaluator of expressions for given pairs.

    Parameters
    ----------
    score
        Scaled scores, float32 or float64, and the dtype of reals that do not decide (`_NodeUse`).
    positions
        Positions by name: integers, or arrays of integers, converted to int32.
    captures
        Captured arrays and numbers by name.
    xp
        Module of the arrays, NumPy or CuPy.
    real
        Dtype of the problem's reals, in which captures are read and deciding values computed. So a
        float64 reference masks the same pairs as a kernel. Default: the dtype of the scores.
    """

    def __init__(
        self,
        score: Any,
        positions: Mapping[str, Any],
        captures: Mapping[str, Any],
        xp: Any,
        real: Any = None,
    ) -> None:
        self._xp, self._score = xp, score
        self._positions = {name: xp.asarray(value, np.int32) for name, value in positions.items()}
        deciding = np.dtype(score.dtype if real is None else real)
        # With a single dtype a node has one value, whether or not it decides.
        self._is_split = deciding != score.dtype
        self._deciding, self._types = numpy_types(deciding), numpy_types(score.dtype)
        self._captures = {
            name: host_parameter(name, value, xp, deciding.type) for name, value in captures.items()
        }

    def value(self, root: Node, *, decides: bool = False) -> Any:
        """Return the value of an expression without CUDA source of the user.

        Parameters
        ----------
        root
            Root of the expression.
        decides
            Whether the result itself decides, as a mask does.
        """
        steps = _steps(root, decides and self._is_split, self._is_split)
        uses = Counter(argument for step in steps for argument in step.arguments)
        values: dict[_NodeUse, Any] = {}
        # Values of masked pairs, which may be infinite or NaN, are not used.
        with np.errstate(all="ignore"):
            for step in steps:
                args = [values[x] for x in step.arguments]
                values[step.use] = self._compute(step, args)
                # Deletes values after their last use, so that few arrays exist at a time.
                for argument in step.arguments:
                    uses[argument] -= 1
                    if not uses[argument]:
                        del values[argument]
        return values[steps[-1].use]

    def _compute(self, step: _Step, args: list[Any]) -> Any:
        node, decides = step.use
        if node.op == "const":
            return self._deciding[node.type](node.value)
        if node.op == "symbol":
            if node.value != "score":
                return self._positions[node.value]
            return self._score.astype(self._deciding[REAL]) if decides else self._score
        if node.op in ("array", "scalar"):
            return self._captures[node.value]
        if node.op == "load":
            # An array without axes is its element.
            return args[0][tuple(args[1:])] if args[1:] else args[0]
        types = self._deciding if decides or step.rounds else self._types
        if self._is_split and node.type == REAL:
            # Captured numbers, and results of rounding, are reals of the deciding dtype.
            args = [
                x.astype(types[REAL]) if argument.type == REAL else x
                for x, argument in zip(args, node.args, strict=True)
            ]
        return evaluated(node, tuple(args), types, self._xp)


class _Step(NamedTuple):
    """Computation of one value.

    Attributes
    ----------
    use
        Node of the value, and whether it decides.
    arguments
        Values of the arguments.
    rounds
        Whether the operation compares or rounds its real arguments.
    """

    use: _NodeUse
    arguments: tuple[_NodeUse, ...]
    rounds: bool


# Cached, because the CPU backend needs the same steps for each block of scores.
@functools.lru_cache(maxsize=256)
def _steps(root: Node, decides: bool, is_split: bool) -> tuple[_Step, ...]:
    """Return the steps that compute an expression, each after those of its arguments."""
    steps: dict[_NodeUse, _Step] = {}

    def step(use: _NodeUse) -> _Step:
        return _step(*use, is_split)

    memoized((root, decides), steps, lambda use: step(use).arguments, step)
    return tuple(steps.values())


def _step(node: Node, decides: bool, is_split: bool) -> _Step:
    row = OPERATIONS.get(node.op)
    rounds = (row is not None and row.decides) or (node.op == "cast" and node.type != REAL)
    inherits = node.type == REAL and not rounds
    arguments = tuple(
        (x, is_split and (decides or not inherits or x.type != REAL)) for x in node.args
    )
    return _Step((node, decides), arguments, rounds)
