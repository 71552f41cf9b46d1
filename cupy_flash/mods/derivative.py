"""Derivatives of expressions: what a new score changes by with the old one, or with a capture.

Where a function has none, what PyTorch's autograd takes: ``abs`` has 0 at 0, ``minimum`` and
``maximum`` (so `clip`, and a ReLU written as ``np.maximum(score, 0)``) have half of each side's
where both are equal, and what gives whole numbers has 0. A `where` has the derivative of the value
that it chooses, whatever the other one is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from cupy_flash.mods.captures import array_node
from cupy_flash.mods.expression import REAL, SCORE, Node, constant, operation, postorder

ZERO, ONE = constant(0, REAL), constant(1, REAL)
_HALF, _MINUS_ONE = constant(0.5, REAL), constant(-1, REAL)


def is_zero(node: Node) -> bool:
    """Whether a real is the literal 0."""
    return node.is_constant and node.value == 0


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
    return _Tangents(root, of).of[root]


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


def partials(root: Node, names: tuple[str, ...]) -> tuple[Partial, ...]:
    """Derivatives by the elements of some captures, without those that are 0 everywhere."""
    numbers = {array_node(name): number for number, name in enumerate(names)}
    found = (
        Partial(numbers[node.args[0]], node, derivative(root, node))
        for node in postorder(root)
        if node.op == "load" and node.args[0] in numbers
    )
    return tuple(partial for partial in found if not is_zero(partial.derivative))


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
    """Derivatives of all nodes that a root is computed from.

    Attributes
    ----------
    of
        By node.
    """

    def __init__(self, root: Node, of: Node) -> None:
        self._products: dict[tuple[Node, Node], Node] = {}
        self.of: dict[Node, Node] = {}
        for node in postorder(root):
            self.of[node] = ONE if node is of else self._tangent(node)

    def _tangent(self, node: Node) -> Node:
        if node.op == "cuda":
            raise TypeError("CUDA text has no derivative; that of the function beside it is taken")
        tangents = [self.of[argument] for argument in node.args]
        if node.type != REAL or all(map(is_zero, tangents)):
            return ZERO
        return _RULES[node.op](self, node, *tangents)

    def times(self, factor: Node, tangent: Node) -> Node:
        """The product, in which 0 stays 0, also as what a `where` may choose.

        So a factor that is infinite where the tangent is 0 leaves no NaN.
        """
        key = factor, tangent
        if key not in self._products:
            self._products[key] = self._times(factor, tangent)
        return self._products[key]

    def _times(self, factor: Node, tangent: Node) -> Node:
        if is_zero(factor) or is_zero(tangent):
            return ZERO
        if _may_choose_zero(tangent):
            is_where = tangent.op == "where"
            kept = tangent.args[:1] if is_where else ()
            parts = (self.times(factor, part) for part in tangent.args[len(kept) :])
            return operation(tangent.op, *kept, *parts)
        if factor is _MINUS_ONE:
            return operation("neg", tangent)
        if factor.op == "div" and factor.args[0] is ONE:
            return operation("div", tangent, factor.args[1])
        if tangent.op == "div":
            numerator, divisor = tangent.args
            # As of cap * tanh(score / cap).
            if divisor is factor:
                return numerator
            return operation("div", self.times(factor, numerator), divisor)
        if tangent.op == "mul" and tangent.args[1].is_constant and factor.is_constant:
            return operation("mul", tangent.args[0], operation("mul", factor, tangent.args[1]))
        return operation("mul", factor, tangent)


def _may_choose_zero(node: Node) -> bool:
    """Whether a literal 0 is all that is left where a `where`, or several, choose so."""
    if node.op == "where":
        return any(is_zero(part) or _may_choose_zero(part) for part in node.args[1:])
    return node.op in ("add", "sub") and all(map(_may_choose_zero, node.args))


def _sum(x: Node, y: Node) -> Node:
    if is_zero(x):
        return y
    return x if is_zero(y) else operation("add", x, y)


def _of_add(t: _Tangents, node: Node, dx: Node, dy: Node) -> Node:
    return _sum(dx, dy)


def _of_sub(t: _Tangents, node: Node, dx: Node, dy: Node) -> Node:
    if is_zero(dx):
        return t.times(_MINUS_ONE, dy)
    return dx if is_zero(dy) else operation("sub", dx, dy)


def _of_mul(t: _Tangents, node: Node, dx: Node, dy: Node) -> Node:
    x, y = node.args
    if x is y:
        return t.times(operation("mul", x, constant(2, REAL)), dx)
    return _sum(t.times(y, dx), t.times(x, dy))


def _of_div(t: _Tangents, node: Node, dx: Node, dy: Node) -> Node:
    # Of the quotient, which is there already.
    return _divided(t, _of_sub(t, node, dx, t.times(node, dy)), node.args[1])


def _divided(t: _Tangents, tangent: Node, divisor: Node) -> Node:
    return t.times(operation("div", ONE, divisor), tangent)


def _of_neg(t: _Tangents, node: Node, dx: Node) -> Node:
    return t.times(_MINUS_ONE, dx)


def _of_abs(t: _Tangents, node: Node, dx: Node) -> Node:
    x = node.args[0]
    below = operation("where", operation("lt", x, ZERO), t.times(_MINUS_ONE, dx), ZERO)
    return operation("where", operation("lt", ZERO, x), dx, below)


def _of_extreme(t: _Tangents, node: Node, dx: Node, dy: Node) -> Node:
    x, y = node.args
    takes_x, takes_y = operation("lt", y, x), operation("lt", x, y)
    if node.op == "min":
        takes_x, takes_y = takes_y, takes_x
    of_equals = t.times(_HALF, _sum(dx, dy))
    return operation("where", takes_x, dx, operation("where", takes_y, dy, of_equals))


def _of_where(t: _Tangents, node: Node, condition: Node, dx: Node, dy: Node) -> Node:
    return operation("where", node.args[0], dx, dy)


def _of_mod(t: _Tangents, node: Node, dx: Node, dy: Node) -> Node:
    return _of_sub(t, node, dx, t.times(operation("floordiv", *node.args), dy))


def _of_exp2(t: _Tangents, node: Node, dx: Node) -> Node:
    power = node.args[0]
    if power.op == "mul" and power.args[0].op == "log2" and power.args[1].is_constant:
        return _of_power(t, power)
    return t.times(operation("mul", node, constant(math.log(2), REAL)), dx)


def _of_power(t: _Tangents, power: Node) -> Node:
    """Of x ** n, which is traced as 2 ** (n log2(x)): n x ** (n - 1), at 0 too."""
    log, n = power.args
    less = operation("mul", log, constant(n.value - 1, REAL))
    return t.times(operation("mul", operation("exp2", less), n), t.of[log.args[0]])


def _by(factor: Callable[[Node, Node], Node]) -> Callable[..., Node]:
    """The rule of a function of one argument, by the factor of it and of its value."""
    return lambda t, node, dx: t.times(factor(node.args[0], node), dx)


def _nothing(t: _Tangents, node: Node, *tangents: Node) -> Node:
    return ZERO


# By operation: of a node and of its arguments' derivatives, not all of which are 0.
_RULES: dict[str, Callable[..., Node]] = {
    "add": _of_add,
    "sub": _of_sub,
    "mul": _of_mul,
    "div": _of_div,
    "neg": _of_neg,
    "abs": _of_abs,
    "min": _of_extreme,
    "max": _of_extreme,
    "where": _of_where,
    "mod": _of_mod,
    "exp2": _of_exp2,
    "exp": _by(lambda x, y: y),
    # Not 1 more than the value: that is rounded where the exponential is small.
    "expm1": _by(lambda x, y: operation("exp", x)),
    "tanh": _by(lambda x, y: operation("sub", ONE, operation("mul", y, y))),
    "sin": _by(lambda x, y: operation("cos", x)),
    "cos": _by(lambda x, y: operation("neg", operation("sin", x))),
    "log": lambda t, node, dx: _divided(t, dx, node.args[0]),
    "log1p": lambda t, node, dx: _divided(t, dx, operation("add", node.args[0], ONE)),
    "log2": lambda t, node, dx: _divided(
        t, t.times(constant(1 / math.log(2), REAL), dx), node.args[0]
    ),
    "sqrt": lambda t, node, dx: _divided(t, t.times(_HALF, dx), node),
    **dict.fromkeys(("sign", "floor", "ceil", "trunc", "rint", "floordiv"), _nothing),
}
