"""Dependence and range analysis: which indices a value depends on, and which values it can have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from cupy_flash.mods.ir.expression import BOOL, INT, REAL, UINT64, Node, constant, memoized
from cupy_flash.mods.ir.operations import ANY_RANGE, INT_RANGE, OPERATIONS, Range, operation

# Ranges of the positions: problems have at most 2^30 - 2^10 queries and keys, and query offsets of
# that size. Kernels also call functions for up to 2^10 rows and keys past the last one.
_POSITION_RANGES: dict[str, Range] = {
    "i": (-(2**30), 2**31 - 1),
    "j": (0, 2**30 - 1),
    "row": (0, 2**30 - 1),
    **dict.fromkeys(("b", "h", "q_start", "k_start"), (0, INT_RANGE[1])),
}
# Largest number of terms into which a sum is split.
_MOST_TERMS = 8
# Upper bound of the distance of a key from the first key of its run.
STEPS = 2**10

# `Node.value` of an operation on reals in a lowered expression. ORDERED: the order of operations is
# the user's. EXACT: in addition, no multiplication may be contracted with an addition.
ORDERED, EXACT = "ordered", "exact"

T = TypeVar("T")


@dataclass(frozen=True)
class Linear:
    """An integer as ``key * j + offset`` plus multiples of values that are constant along a row.

    Attributes
    ----------
    key
        Factor of the key's index j.
    offset
        Constant summand.
    terms
        Values that depend on the row alone, each with its factor, which is not 0.
    """

    key: int
    offset: int
    terms: tuple[tuple[Node, int], ...]

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        """Return the sum of this function and `factor` times another."""
        terms = dict(self.terms)
        for node, count in other.terms:
            terms[node] = terms.get(node, 0) + factor * count
        kept = tuple((node, count) for node, count in terms.items() if count)
        return Linear(self.key + factor * other.key, self.offset + factor * other.offset, kept)

    def times(self, factor: int) -> Linear:
        """Return `factor` times this function."""
        return Linear(0, 0, ()).plus(self, factor)

    def without_offset(self) -> Linear:
        """Return this function with an offset of 0."""
        return Linear(self.key, 0, self.terms)

    @property
    def ordered_terms(self) -> list[tuple[Node, int]]:
        """Terms in the order in which they are summed: those with positive factors first."""
        return sorted(self.terms, key=lambda term: term[1] < 0)

    def of_row(self) -> Node:
        """Return the node of the part that depends on the row alone, without the offset."""
        total: Node | None = None
        for node, count in self.ordered_terms:
            size = operation("mul", node, constant(abs(count), INT))
            if total is None:
                total = size if count > 0 else operation("neg", size)
            else:
                total = operation("add" if count > 0 else "sub", total, size)
        return constant(0, INT) if total is None else total


class Analysis:
    """Memoized properties of nodes, computed after the properties of a node's arguments."""

    def __init__(self) -> None:
        self._of_row: dict[Node, bool] = {}
        self._linear: dict[Node, Linear | None] = {}
        self._slopes: dict[Node, Node | None] = {}
        self._exact_ranges: dict[Node, Range] = {}

    def is_of_row(self, node: Node) -> bool:
        """Return whether a value depends neither on the key nor on the score."""
        return _answer(self._of_row, node, self._find_of_row)

    def _find_of_row(self, node: Node) -> bool:
        is_leaf = node.op == "symbol" and node.value in ("j", "score")
        return not is_leaf and all(self._of_row[x] for x in node.args)

    def range(self, node: Node) -> Range:
        """Return bounds of a value. An integer that may wrap has the bounds of its type."""
        low, high = _answer(self._exact_ranges, node, self._find_exact_range)
        return (low, high) if _fits(node.type, (low, high)) else _type_range(node.type)

    def may_wrap(self, node: Node) -> bool:
        """Return whether the exact result of an integer operation may be outside of its type."""
        return not _fits(node.type, _answer(self._exact_ranges, node, self._find_exact_range))

    def is_not_negative(self, node: Node) -> bool:
        """Return whether an integer is known to be at least 0."""
        return self.range(node)[0] >= 0

    def _find_exact_range(self, node: Node) -> Range:
        return exact_range(node, [self.range(x) for x in node.args], {})

    def linear(self, node: Node) -> Linear | None:
        """Return an integer as a linear function of the key; None if it is not, or may wrap."""
        return _answer(self._linear, node, self._find_linear)

    def _find_linear(self, node: Node) -> Linear | None:
        if node.type != INT:
            return None
        if node.is_constant:
            return Linear(0, node.value, ())
        if node.op == "symbol" and node.value == "j":
            return Linear(1, 0, ())
        if not self.may_wrap(node):
            result = self._sum_of(node)
            if result is not None and len(result.terms) <= _MOST_TERMS and self.fits(result):
                return result
        return Linear(0, 0, ((node, 1),)) if self.is_of_row(node) else None

    def _sum_of(self, node: Node) -> Linear | None:
        if node.op in ("add", "sub"):
            left, right = (self.linear(x) for x in node.args)
            if left is not None and right is not None:
                return left.plus(right, 1 if node.op == "add" else -1)
        if node.op == "neg" or (node.op == "mul" and node.args[1].is_constant):
            factor = -1 if node.op == "neg" else node.args[1].value
            one = self.linear(node.args[0])
            if one is not None:
                return one.times(factor)
        return None

    def fits(self, linear: Linear) -> bool:
        """Return whether all partial sums of a linear function fit int32."""
        parts = [_times(self.range(node), count) for node, count in linear.ordered_terms]
        parts += [_times(_POSITION_RANGES["j"], linear.key), (linear.offset, linear.offset)]
        low, high = 0.0, 0.0
        for part in parts:
            low, high = low + min(part), high + max(part)
            if not all(_fits(INT, ends) for ends in (part, (low, high))):
                return False
        return True

    def slope(self, node: Node) -> Node | None:
        """Return how much a real changes from a key to the next, if the library composed the real.

        The result is None if the difference varies along the row, or if the order of operations is
        the user's.
        """
        return _answer(self._slopes, node, self._find_slope)

    def _find_slope(self, node: Node) -> Node | None:
        if node.type != REAL or node.value == ORDERED or node.value == EXACT:
            return None
        if self.is_of_row(node):
            return constant(0, REAL)
        if node.op == "cast":
            linear = self.linear(node.args[0])
            return None if linear is None else constant(linear.key, REAL)
        if node.op not in ("add", "sub", "neg", "mul"):
            return None
        if node.op == "mul":
            for x, y in (node.args, node.args[::-1]):
                slope = self.slope(x)
                if self.is_of_row(y) and slope is not None:
                    is_minus_1 = slope is constant(-1, REAL)
                    return operation("neg", y) if is_minus_1 else operation("mul", slope, y)
            return None
        slopes = [self.slope(x) for x in node.args]
        result = [slope for slope in slopes if slope is not None]
        if len(result) < len(slopes):
            return None
        if node.op == "sub" and result[0] is constant(0, REAL):
            return operation("neg", result[1])
        return operation(node.op, *result)


def _answer(known: dict[Node, T], node: Node, find: Callable[[Node], T]) -> T:
    """Return `known[node]`, after computing it with `find`, arguments first."""
    return memoized(node, known, attrgetter("args"), find)


def _type_range(type: str) -> Range:
    return {INT: INT_RANGE, UINT64: (0, 2**64 - 1), BOOL: (0, 1)}.get(type, ANY_RANGE)


def _fits(type: str, ends: Range) -> bool:
    low, high = _type_range(type)
    return low <= ends[0] and ends[1] <= high


def _times(ends: Range, factor: int) -> Range:
    a, b = ends[0] * factor, ends[1] * factor
    return min(a, b), max(a, b)


def exact_range(
    node: Node, args: Iterable[Range], numbers: Mapping[str, bool | int | float]
) -> Range:
    """Return bounds of an operation's results, before integers wrap.

    `args` are the bounds of the operation's arguments. `numbers` holds the known captured numbers.
    """
    ranges = list(args)
    if node.type == BOOL:
        return 0, 1
    if node.is_constant or (node.op == "scalar" and node.value in numbers):
        number = node.value if node.is_constant else numbers[node.value]
        return (number, number) if number == number else ANY_RANGE
    if node.op == "symbol":
        return _POSITION_RANGES.get(node.value, ANY_RANGE)
    if node.op == "cast":
        return _range_of_cast(node, ranges[0])
    row = OPERATIONS.get(node.op)
    # Real quotients and remainders are rounded, so that exact bounds would not hold.
    if row is None or row.value_range is None or (node.type == REAL and node.op in _ROUNDED):
        return _type_range(node.type)
    result = row.value_range(*ranges)
    return _type_range(node.type) if result == ANY_RANGE else result


_ROUNDED = ("mod", "floordiv")


def _range_of_cast(node: Node, ends: Range) -> Range:
    [x] = node.args
    if x.type == REAL and node.type != REAL:
        # The conversion saturates, and NaN becomes 0.
        low, high = _type_range(node.type)
        within = [min(max(end, low), high) for end in ends]
        return min(0, math.floor(within[0])), max(0, math.ceil(within[1]))
    if node.type != REAL and not _fits(node.type, ends):
        return _type_range(node.type)
    return ends


def value_range(root: Node, numbers: Mapping[str, bool | int | float]) -> Range:
    """Return bounds of an expression for all scores; NaN is the only value outside of them.

    `numbers` holds the captured numbers whose values are known.
    """
    result: dict[Node, Range] = {}

    def find(node: Node) -> Range:
        ends = exact_range(node, [result[x] for x in node.args], numbers)
        return ends if _fits(node.type, ends) else _type_range(node.type)

    return _answer(result, root, find)
