"""What values depend on, and how they change along a row: what device text is printed by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cupy_flash.mods.expression import INT, REAL, Node, cast, constant, fold, operation

Range = tuple[float, float]
_ANY: Range = (-math.inf, math.inf)
_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Linear:
    """An integer as ``key * j + offset`` and multiples of values that a row has.

    Attributes
    ----------
    key
        How much it grows from key to key.
    offset
        What is known of the rest.
    terms
        The others, each with its factor, not 0.
    """

    key: int
    offset: int
    terms: tuple[tuple[Node, int], ...]

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        """The sum of this and a multiple of another."""
        terms = dict(self.terms)
        for node, count in other.terms:
            terms[node] = terms.get(node, 0) + factor * count
        kept = tuple((node, count) for node, count in terms.items() if count)
        return Linear(self.key + factor * other.key, self.offset + factor * other.offset, kept)

    def times(self, factor: int) -> Linear:
        """A multiple."""
        return Linear(0, 0, ()).plus(self, factor)

    def of_row(self) -> Node:
        """What a row has of it, but for the offset."""
        # What is added stands first, as one writes it.
        total: Node | None = None
        for node, count in sorted(self.terms, key=lambda term: term[1] < 0):
            size = operation("mul", node, constant(abs(count), INT))
            if total is None:
                total = size if count > 0 else operation("neg", size)
            else:
                total = operation("add" if count > 0 else "sub", total, size)
        return constant(0, INT) if total is None else total


class Analysis:
    """Answers about nodes, each found once."""

    def __init__(self) -> None:
        self._of_row: dict[Node, bool] = {}
        self._linear: dict[Node, Linear | None] = {}
        self._slopes: dict[Node, Node | None] = {}
        self._not_negative: dict[Node, bool] = {}

    def is_of_row(self, node: Node) -> bool:
        """Whether a value depends neither on the key nor on the score."""
        known = self._of_row.get(node)
        if known is None:
            is_leaf = node.op == "symbol" and node.value in ("j", "score")
            known = not is_leaf and all(map(self.is_of_row, node.args))
            self._of_row[node] = known
        return known

    def linear(self, node: Node) -> Linear | None:
        """An integer as a linear function of the key, or None if it is none."""
        if node not in self._linear:
            self._linear[node] = self._find_linear(node)
        return self._linear[node]

    def _find_linear(self, node: Node) -> Linear | None:
        if node.type != INT:
            return None
        if node.is_constant:
            return Linear(0, node.value, ())
        if node.op == "symbol" and node.value == "j":
            return Linear(1, 0, ())
        if node.op in ("add", "sub"):
            left, right = map(self.linear, node.args)
            if left is not None and right is not None:
                return left.plus(right, 1 if node.op == "add" else -1)
        if node.op == "neg" or (node.op == "mul" and node.args[1].is_constant):
            factor = -1 if node.op == "neg" else node.args[1].value
            one = self.linear(node.args[0])
            if one is not None:
                return one.times(factor)
        return Linear(0, 0, ((node, 1),)) if self.is_of_row(node) else None

    def slope(self, node: Node) -> Node | None:
        """How much a real grows from key to key, the same along a row; None if it is not so."""
        if node not in self._slopes:
            self._slopes[node] = self._find_slope(node)
        return self._slopes[node]

    def _find_slope(self, node: Node) -> Node | None:
        if self.is_of_row(node):
            return constant(0, REAL)
        if node.op == "cast":
            linear = self.linear(node.args[0])
            return None if linear is None else constant(linear.key, REAL)
        slopes = [self.slope(x) for x in node.args if x.type == REAL]
        if node.op not in ("add", "sub", "neg", "mul") or None in slopes:
            return None
        if node.op == "mul":
            for x, y in (node.args, node.args[::-1]):
                slope = self.slope(x)
                if self.is_of_row(y) and slope is not None:
                    is_minus_1 = slope is constant(-1, REAL)
                    return operation("neg", y) if is_minus_1 else operation("mul", slope, y)
            return None
        found = [slope for slope in slopes if slope is not None]
        if node.op == "sub" and found[0] is constant(0, REAL):
            return operation("neg", found[1])
        return operation(node.op, *found)

    def is_not_negative(self, node: Node) -> bool:
        """Whether an integer is known to be 0 at least."""
        if node not in self._not_negative:
            self._not_negative[node] = self._find_not_negative(node)
        return self._not_negative[node]

    def _find_not_negative(self, node: Node) -> bool:
        known = [self.is_not_negative(x) for x in node.args if x.type == INT]
        if node.is_constant:
            return bool(node.value >= 0)
        if node.op == "symbol":
            # A query may stand before the first key.
            return node.value != "i"
        if node.op in ("add", "mul", "min", "floordiv", "where", "shr", "xor", "or"):
            return all(known) and bool(known)
        if node.op in ("max", "and"):
            return any(known)
        if node.op == "mod":
            return known[1]
        return node.op == "abs" or (node.op == "cast" and node.args[0].type == "bool")


def real_of_int(node: Node, analysis: Analysis) -> Node:
    """An integer as a real, converted where that costs least: linear ones once a row.

    Sums and the like of integers that are no linear functions of the key are computed as reals,
    which hold them to 2^24.
    """
    if analysis.is_of_row(node) or analysis.linear(node) is not None:
        return cast(node, REAL)
    by_parts = node.op in ("add", "sub", "neg", "abs", "min", "max", "where")
    if by_parts or (node.op == "mul" and node.args[1].is_constant):
        args = (real_of_int(x, analysis) if x.type == INT else x for x in node.args)
        return operation(node.op, *args)
    return cast(node, REAL)


def value_range(root: Node, numbers: Mapping[str, bool | int | float]) -> Range:
    """Ends of a range that a number does not leave unless it is NaN, whatever scores are.

    Parameters
    ----------
    root
        An expression.
    numbers
        What is known of its captured numbers.
    """

    def visit(node: Node, args: tuple[Range, ...]) -> Range:
        if node.type not in (INT, REAL):
            return _ANY
        if node.is_constant or (node.op == "scalar" and node.value in numbers):
            number = float(node.value if node.is_constant else numbers[node.value])
            return number, number
        if node.op in ("tanh", "sin", "cos"):
            return -1.0, 1.0
        if node.op == "cast" and node.args[0].type == INT:
            return args[0]
        if node.op == "where":
            ends = [end for part in args[1:] for end in part]
        elif node.op in ("min", "max"):
            pick = min if node.op == "min" else max
            ends = [pick(low_or_high) for low_or_high in zip(*args, strict=True)]
        elif node.op == "neg":
            ends = [-end for end in args[0]]
        elif node.op in ("add", "sub", "mul"):
            x, y = args
            by = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}
            ends = [by[node.op](a, b) for a in x for b in y]
        else:
            return _ANY
        if any(map(math.isnan, ends)):
            return _ANY
        low, high = min(ends), max(ends)
        # Integers may wrap.
        wraps = node.type == INT and node.op not in ("where", "min", "max")
        return _ANY if wraps and (low < _INT_MIN or high > _INT_MAX) else (low, high)

    return fold(root, visit)
