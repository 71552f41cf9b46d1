"""Derivatives of a new score with respect to the old score, or to a captured element.

Where a function is not differentiable, its derivative is that of PyTorch's autograd. ``abs`` has
the derivative 0 at 0. If the arguments of ``minimum`` or ``maximum`` are equal, each has half of
the derivative, also in `clip` and in a ReLU written as ``np.maximum(score, 0)``. Functions with
integer results have the derivative 0. A `where` has the derivative of the value that it selects,
whatever the other value is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cupy_flash.mods.captures import array_node
from cupy_flash.mods.ir.expression import REAL, SCORE, Node, postorder
from cupy_flash.mods.ir.operations import MINUS_ONE, ONE, OPERATIONS, ZERO, is_zero, operation

# Largest number of alternatives of a `where` into each of which a factor is multiplied. If there
# are more alternatives, the factor is multiplied into the selected value.
_MOST_CHOICES = 8
# Largest number of nested quotients through which a factor is moved into the inner numerator.
_MOST_DIVISORS = 8


# Cached, because the CPU backend requests the same derivative for each block of scores.
@functools.lru_cache(maxsize=256)
def derivative(root: Node, of: Node, order: int = 1) -> Node:
    """Return the derivative of the expression `root` with respect to the node `of`.

    The node `of` is the score or the load of an element. A derivative that is 0 or 1 everywhere is
    returned as this literal. `order` is 1, or 2 for the second derivative.

    Raises
    ------
    TypeError
        If the expression has CUDA source of the user, which is not analyzed.
    """
    seeds = {of: ONE}
    tangents = _Tangents(postorder(root), seeds)
    for _ in range(order - 1):
        root = tangents.of[root]
        tangents = _Tangents(postorder(root), seeds, tangents)
    return tangents.of[root]


class Partial(NamedTuple):
    """Derivative of an expression with respect to an array element that it reads.

    Attributes
    ----------
    number
        Number of the array among those with gradients.
    load
        Node that reads the element.
    derivative
        Derivative with respect to the element.
    """

    number: int
    load: Node
    derivative: Node


@functools.lru_cache(maxsize=256)
def partials(root: Node, names: tuple[str, ...]) -> tuple[Partial, ...]:
    """Return derivatives with respect to elements of captures, except those that are always 0."""
    return tuple(partial for partial, _ in _partials(root, names))


def _partials(root: Node, names: tuple[str, ...]) -> Iterator[tuple[Partial, _Tangents]]:
    """Yield the results of `partials`, with the derivatives of all nodes."""
    numbers = {array_node(name): number for number, name in enumerate(names)}
    places: dict[Node, int] = {}
    users: dict[Node, list[Node]] = {}
    for place, node in enumerate(postorder(root)):
        places[node] = place
        for argument in node.args:
            users.setdefault(argument, []).append(node)
    for load in places:
        if load.op != "load" or load.args[0] not in numbers:
            continue
        # Only nodes that depend on the element matter. With 1000 elements, all nodes take 17 s.
        dependents = sorted(_reached(load, users), key=places.__getitem__)
        tangents = _Tangents(dependents, {load: ONE})
        if not is_zero(tangents.of[root]):
            yield Partial(numbers[load.args[0]], load, tangents.of[root]), tangents


def tangent_array(name: str) -> str:
    """Return the name of the array with the tangent of a capture, which no capture can have."""
    return f"{name}.tangent"


class Change(NamedTuple):
    """Derivatives of an expression that depends on the score and on captures with tangents.

    Attributes
    ----------
    of_score
        Derivative with respect to the score.
    of_captures
        Derivative along the tangents of captures. It reads the tangent of the capture `name` from
        an array named `tangent_array(name)`, at the indices of the load from the capture.
    """

    of_score: Node
    of_captures: Node


@functools.lru_cache(maxsize=256)
def tangent_along(root: Node, moving: tuple[str, ...]) -> Node:
    """Return the derivative along the tangents of the captures in `moving`, see `Change`."""
    return _change(root, moving, None).of_captures


@functools.lru_cache(maxsize=256)
def change_of_slope(root: Node, moving: tuple[str, ...]) -> Change:
    """Return the derivatives of the derivative with respect to the score, see `Change`."""
    tangents = _Tangents(postorder(root), {SCORE: ONE})
    return _change(tangents.of[root], moving, tangents)


@functools.lru_cache(maxsize=256)
def changes_of_partials(
    root: Node, names: tuple[str, ...], moving: tuple[str, ...]
) -> tuple[tuple[Partial, Change], ...]:
    """Return the derivatives with respect to elements of captures, with their own derivatives.

    See `partials` and `Change`. `moving` names the captures with tangents.
    """
    return tuple(
        (partial, _change(partial.derivative, moving, tangents))
        for partial, tangents in _partials(root, names)
    )


def _change(root: Node, moving: tuple[str, ...], before: _Tangents | None) -> Change:
    """Return the derivatives of an expression; `before` has computed it if it is a derivative."""
    nodes = list(postorder(root))
    arrays = {array_node(name): array_node(tangent_array(name)) for name in moving}
    loads = {
        node: Node(node.op, node.type, (arrays[node.args[0]], *node.args[1:]))
        for node in nodes
        if node.op == "load" and node.args[0] in arrays
    }
    return Change(*(_Tangents(nodes, seeds, before).of[root] for seeds in ({SCORE: ONE}, loads)))


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
    """Derivatives of a new score that a backward pass needs.

    Attributes
    ----------
    slope
        Derivative with respect to the scaled score.
    partials
        Derivatives with respect to elements of captures.
    names
        Names of the captures with gradients, in the order of their numbers.
    """

    slope: Node
    partials: tuple[Partial, ...]
    names: tuple[str, ...]


def slopes_of(score: Node | None, names: tuple[str, ...]) -> Slopes:
    """Return the derivatives of a new score; None stands for an unchanged score.

    `names` are the captured arrays with gradients, in the order of their numbers.
    """
    if score is None:
        return Slopes(ONE, (), names)
    return Slopes(derivative(score, SCORE), partials(score, names), names)


class _Tangents:
    """Derivatives of nodes, each after its arguments, along tangents of some nodes.

    `seeds` holds the tangents of these nodes. Other leaves have the derivative 0. The attribute
    `of` holds the derivatives, keyed by node. If the nodes are those of a first derivative,
    `before` is the object that computed it.
    """

    def __init__(
        self, nodes: Iterable[Node], seeds: Mapping[Node, Node], before: _Tangents | None = None
    ) -> None:
        self._products: dict[tuple[Node, Node], Node] = {}
        self._choices: dict[Node, int] = {} if before is None else before._choices
        # Tangent of each product that `_times` computes only where this tangent is not 0.
        self._guards: dict[Node, Node] = {}
        self._guards_before = {} if before is None else before._guards
        self.of: dict[Node, Node] = {}
        for node in nodes:
            seed = seeds.get(node)
            self.of[node] = self._tangent(node) if seed is None else seed
            # Counting here, from the leaves on, keeps the recursion of later counts shallow.
            self._zero_choices(self.of[node])

    def _tangent(self, node: Node) -> Node:
        if node.op == "cuda":
            raise TypeError("CUDA source has no derivative; differentiate the Python function")
        if node in self._guards_before:
            return self._of_guarded(node, self._guards_before[node])
        tangents = [self.of.get(argument, ZERO) for argument in node.args]
        if node.type != REAL or all(map(is_zero, tangents)):
            return ZERO
        rule = OPERATIONS[node.op].derivative
        assert rule is not None
        return rule(self, node, *tangents)

    def _of_guarded(self, node: Node, tangent: Node) -> Node:
        """Return the derivative of a product that is computed only where `tangent` is not 0.

        The tangent may be 0 at a point where it changes its sign. The product has a derivative
        there. Where a `where` selects 0, the derivative of the tangent is 0, too.
        """
        are_zero = (operation("eq", x, ZERO) for x in (tangent, self.of[tangent]))
        return operation("where", operation("and", *are_zero), ZERO, self.of[node.args[2]])

    def times(self, factor: Node, tangent: Node) -> Node:
        """Return the product, which is 0 where the tangent is 0 or where a `where` selects 0.

        An infinite factor then gives no NaN where the tangent is 0.
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
            guarded = operation("where", operation("eq", tangent, ZERO), ZERO, product)
            self._guards[guarded] = tangent
            return guarded
        if choices:
            is_where = tangent.op == "where"
            kept = tangent.args[:1] if is_where else ()
            parts = (self.times(factor, part) for part in tangent.args[len(kept) :])
            result = operation(tangent.op, *kept, *parts)
            if tangent in self._guards:
                self._guards[result] = self._guards[tangent]
            return result
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
            # The factor cancels, as in the derivative of cap * tanh(score / cap).
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
        """Return the number of alternatives of a `where`, or 0 if none of them is a literal 0."""
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
