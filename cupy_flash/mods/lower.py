"""An expression in the operations that cost least on a GPU: before it is printed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cupy_flash.mods.analysis import Analysis, real_of_int
from cupy_flash.mods.expression import (
    BASE,
    INT,
    REAL,
    SCORE,
    Node,
    constant,
    fold,
    operation,
    postorder,
    rebuilt,
)

# tanh(x) = 1 - 2 / (1 + 2^(2 log2(e) x)).
_TANH_FACTOR = 2 * math.log2(math.e)


def lower(root: Node, analysis: Analysis, *, fast: bool, fast_tanh: bool) -> Node:
    """The same value with other operations; besides those of `Node` there are then these.

    ``reciprocal``; ``logistic``, which is 1 / (1 + 2^x); ``tanh_approx``, to 2^-11.

    Parameters
    ----------
    root
        The expression.
    analysis
        Whose answers are kept.
    fast
        Whether exponentials and tanh are made of the hardware's powers of 2: absolute errors of
        2^-23, more than a float32 call may have.
    fast_tanh
        Whether tanh may be the one of the hardware.
    """

    def visit(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op == "div":
            return _quotient(args[0], args[1], analysis)
        if node.op == "mul" and node.type == REAL:
            return _product(args[0], args[1], analysis)
        if node.op == "cast" and node.type == REAL and args[0].type == INT:
            return real_of_int(args[0], analysis)
        if fast and node.op == "tanh":
            return _tanh(args[0], fast_tanh, analysis)
        if fast and node.op == "exp":
            return operation("exp2", _scaled(args[0], math.log2(math.e), analysis))
        if node.op == "log":
            return _product(operation("log2", *args), constant(math.log(2), REAL), analysis)
        if node.type == INT and node.op in ("floordiv", "mod"):
            return _by_power_of_2(node.op, *args) or rebuilt(node, args)
        return rebuilt(node, args)

    return fold(root, visit)


def exponent(score: Node, analysis: Analysis) -> Node:
    """Of a score that was lowered, ``log2(e) * score - base``, to be taken 2 to the power of.

    Factors of the score join those that it has, and what is added to it the base, so that neither
    costs more.
    """
    of_score: list[Node] = []
    even, others = operation("neg", BASE), list[Node]()
    for term, sign in _summands(score, 1):
        product = _scaled(term, sign * math.log2(math.e), analysis)
        if analysis.slope(term) is not None:
            # Grows evenly from key to key, as the base does: by nothing.
            even = operation("add", product, even)
        else:
            depends = any(node is SCORE for node in postorder(term))
            (of_score if depends else others).append(product)
    total = even
    for product in (*others, *of_score):
        total = operation("add", product, total)
    return total


def _summands(node: Node, sign: int) -> Iterator[tuple[Node, int]]:
    if node.op in ("add", "sub"):
        yield from _summands(node.args[0], sign)
        yield from _summands(node.args[1], -sign if node.op == "sub" else sign)
    elif node.op == "neg":
        yield from _summands(node.args[0], -sign)
    else:
        yield node, sign


def _quotient(x: Node, y: Node, analysis: Analysis) -> Node:
    if y.is_constant:
        inverse = 1 / y.value if y.value else math.inf
        # One that float has no normal number for would be lost.
        if 2.0**-126 <= abs(inverse) < 2.0**126:
            return _product(x, constant(inverse, REAL), analysis)
    # The inverse of what a row has is found once.
    if analysis.is_of_row(y) and analysis.is_of_row(x):
        return operation("div", x, y)
    return _product(x, operation("reciprocal", y), analysis)


def _product(x: Node, y: Node, analysis: Analysis) -> Node:
    """X * y; of a sigmoid and a factor of the row one multiply-add."""
    for value, factor in ((x, y), (y, x)):
        if _is_tanh(value) and analysis.is_of_row(factor):
            one, twice = value.args[0], value.args[1]
            logistic, two = twice.args
            slope = operation("mul", factor, two)
            return operation(
                "sub", operation("mul", factor, one), operation("mul", slope, logistic)
            )
    if y.is_constant:
        return _scaled(x, y.value, analysis)
    for value, factor in ((x, y), (y, x)):
        if value.op == "mul" and not analysis.is_of_row(value) and analysis.is_of_row(factor):
            for of_pair, of_row in (value.args, value.args[::-1]):
                if analysis.is_of_row(of_row):
                    return operation("mul", of_pair, operation("mul", of_row, factor))
    return operation("mul", x, y)


def _scaled(x: Node, factor: float, analysis: Analysis) -> Node:
    """X times a literal, which joins a factor that x has already."""
    if x.op == "mul" and x.args[1].is_constant:
        together = x.args[1].value * factor
        if 2.0**-126 <= abs(together) < 2.0**126:
            return operation("mul", x.args[0], constant(together, REAL))
    if x.op == "mul" and not analysis.is_of_row(x):
        for value, of_row in (x.args, x.args[::-1]):
            if analysis.is_of_row(of_row):
                return operation("mul", value, operation("mul", of_row, constant(factor, REAL)))
    return operation("mul", x, constant(factor, REAL))


def _tanh(x: Node, fast: bool, analysis: Analysis) -> Node:
    if fast:
        return operation("tanh_approx", x)
    logistic = operation("logistic", _scaled(x, _TANH_FACTOR, analysis))
    twice = operation("mul", logistic, constant(2, REAL))
    return operation("sub", constant(1, REAL), twice)


def _is_tanh(node: Node) -> bool:
    return node.op == "sub" and node.args[1].op == "mul" and node.args[1].args[0].op == "logistic"


def _by_power_of_2(op: str, x: Node, divisor: Node) -> Node | None:
    """Floored quotient and remainder of a literal power of 2, by bits; else None."""
    n = divisor.value if divisor.is_constant else 0
    if n < 1 or n & (n - 1):
        return None
    if op == "floordiv":
        return operation("shr", x, constant(n.bit_length() - 1, INT)) if n > 1 else x
    return operation("and", x, constant(n - 1, INT))
