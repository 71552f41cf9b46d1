"""Derivatives of expressions: what a new score changes by with the old one, or with a capture.

Where a function has none, what PyTorch's autograd takes: ``abs`` has 0 at 0, ``minimum`` and
``maximum`` (so `clip`, and a ReLU written as ``np.maximum(score, 0)``) have half of each side's
where both are equal, and what gives whole numbers has 0. A `where` has the derivative of the value
that it chooses, whatever the other one is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cupy_flash.mods.captures import array_node
from cupy_flash.mods.expression import REAL, SCORE, Node, postorder
from cupy_flash.mods.operations import MINUS_ONE, ONE, OPERATIONS, ZERO, is_zero, operation

# A factor is multiplied into each of the values that a tangent chooses from, up to this many of
# them, and otherwise into the chosen value.
_MOST_CHOICES = 8
# A factor is multiplied into the numerator of up to this many nested quotients.
_MOST_DIVISORS = 8


# Graphs are as many as modifications; a call on the host asks for each of its blocks.
@functools.lru_cache(maxsize=256)
def derivative(root: Node, of: Node) -> Node:
    """The derivative of a real with respect to a real that it is computed from.

    Parameters
    ----------
    root
        An expression without CUDA text.
    of
        The score, or the load of an element: the very node.

    Returns
    -------
    Node
        The literals 0 and 1 where it is that for all values.

    Raises
    ------
    TypeError
        For CUDA text, which is not looked into.
    """
    return _Tangents(postorder(root), of).of[root]


class Partial(NamedTuple):
    """How an expression changes with an element that it reads.

    Attributes
    ----------
    number
        Of the array, among those whose gradients are asked for.
    load
        What reads the element.
    derivative
        With respect to it.
    """

    number: int
    load: Node
    derivative: Node


@functools.lru_cache(maxsize=256)
def partials(root: Node, names: tuple[str, ...]) -> tuple[Partial, ...]:
    """Derivatives by the elements of some captures, without those that are 0 everywhere."""
    numbers = {array_node(name): number for number, name in enumerate(names)}
    places: dict[Node, int] = {}
    users: dict[Node, list[Node]] = {}
    for place, node in enumerate(postorder(root)):
        places[node] = place
        for argument in node.args:
            users.setdefault(argument, []).append(node)
    found = []
    for load in places:
        if load.op != "load" or load.args[0] not in numbers:
            continue
        # Only these depend on the element: with 1000 elements a pass over all takes 17 s.
        dependents = sorted(_reached(load, users), key=places.__getitem__)
        tangent = _Tangents(dependents, load).of[root]
        if not is_zero(tangent):
            found.append(Partial(numbers[load.args[0]], load, tangent))
    return tuple(found)


def _reached(start: Node, users: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """Return a node and all nodes that are computed from it."""
    reached, stack = {start}, [start]
    while stack:
        for user in users.get(stack.pop(), ()):
            if user not in reached:
                reached.add(user)
                stack.append(user)
    return reached


class Slopes(NamedTuple):
    """What a backward pass asks of the text of a new score.

    Attributes
    ----------
    slope
        The derivative by the scaled score.
    partials
        Derivatives by elements of captures.
    names
        Of the captures that have gradients, by number.
    """

    slope: Node
    partials: tuple[Partial, ...]
    names: tuple[str, ...]


def slopes_of(score: Node | None, names: tuple[str, ...]) -> Slopes:
    """Derivatives of a new score, which None leaves as it is.

    Parameters
    ----------
    score
        A real without CUDA text.
    names
        Of the captured arrays of reals whose gradients are asked for, by number.
    """
    if score is None:
        return Slopes(ONE, (), names)
    return Slopes(derivative(score, SCORE), partials(score, names), names)


class _Tangents:
    """Derivatives of nodes with respect to one of them.

    Parameters
    ----------
    nodes
        Nodes, each after its arguments. The derivative of other nodes is 0.
    of
        The node.

    Attributes
    ----------
    of
        Derivative by node.
    """

    def __init__(self, nodes: Iterable[Node], of: Node) -> None:
        self._products: dict[tuple[Node, Node], Node] = {}
        self._choices: dict[Node, int] = {}
        self.of: dict[Node, Node] = {}
        for node in nodes:
            self.of[node] = ONE if node is of else self._tangent(node)
            # Counting from the leaves on keeps the recursion shallow.
            self._zero_choices(self.of[node])

    def _tangent(self, node: Node) -> Node:
        if node.op == "cuda":
            raise TypeError("CUDA text has no derivative; that of the function beside it is taken")
        tangents = [self.of.get(argument, ZERO) for argument in node.args]
        if node.type != REAL or all(map(is_zero, tangents)):
            return ZERO
        rule = OPERATIONS[node.op].derivative
        assert rule is not None
        return rule(self, node, *tangents)

    def times(self, factor: Node, tangent: Node) -> Node:
        """Return the product, in which a 0 stays 0, even one that only a `where` chooses.

        So a factor that is infinite at a tangent of 0 gives no NaN.
        """
        key = factor, tangent
        if key not in self._products:
            self._products[key] = self._times(factor, tangent)
            self._zero_choices(self._products[key])
        return self._products[key]

    def _times(self, factor: Node, tangent: Node) -> Node:
        if is_zero(factor) or is_zero(tangent):
            return ZERO
        choices = self._zero_choices(tangent)
        if choices > _MOST_CHOICES:
            product = operation("mul", factor, tangent)
            return operation("where", operation("eq", tangent, ZERO), ZERO, product)
        if choices:
            is_where = tangent.op == "where"
            kept = tangent.args[:1] if is_where else ()
            parts = (self.times(factor, part) for part in tangent.args[len(kept) :])
            return operation(tangent.op, *kept, *parts)
        if factor is MINUS_ONE:
            return operation("neg", tangent)
        if factor.op == "div" and factor.args[0] is ONE:
            return operation("div", tangent, factor.args[1])
        if tangent.op == "div":
            return self._times_quotient(factor, tangent)
        if tangent.op == "mul" and tangent.args[1].is_constant and factor.is_constant:
            return operation("mul", tangent.args[0], operation("mul", factor, tangent.args[1]))
        return operation("mul", factor, tangent)

    def _times_quotient(self, factor: Node, tangent: Node) -> Node:
        divisors: list[Node] = []
        while tangent.op == "div" and len(divisors) < _MOST_DIVISORS:
            tangent, divisor = tangent.args
            # The derivative of cap * tanh(score / cap) has such a product.
            if divisor is factor:
                product = tangent
                break
            divisors.append(divisor)
        else:
            is_quotient = tangent.op == "div"
            product = (
                operation("mul", factor, tangent) if is_quotient else self.times(factor, tangent)
            )
        for divisor in reversed(divisors):
            product = operation("div", product, divisor)
        return product

    def _zero_choices(self, node: Node) -> int:
        """Return how many values `where` chooses from, or 0 if it cannot choose a literal 0."""
        if node not in self._choices:
            self._choices[node] = self._count_choices(node)
        return self._choices[node]

    def _count_choices(self, node: Node) -> int:
        if node.op not in ("where", "add", "sub"):
            return 0
        parts = node.args[1:] if node.op == "where" else node.args
        counts = list(map(self._zero_choices, parts))
        if node.op == "where" and (any(counts) or any(map(is_zero, parts))):
            return sum(max(count, 1) for count in counts)
        return sum(counts) if all(counts) else 0
