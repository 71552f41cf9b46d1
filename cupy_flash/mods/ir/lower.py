"""Lowering: rewrites an expression into the operations that cost least on a GPU.

How far an operation on reals may be rewritten depends on the use of its result:

- A value that decides is *exact*: one that is compared, rounded, converted to an integer or used as
  an index, and every value of a mask. It is computed in the order of the expression, without
  contraction, by functions that keep subnormal numbers, so that all kernels and all tiles mask the
  same pairs.
- Any other value of a user's function is *ordered*: the order of operations is the user's, and no
  reciprocal replaces a division. But multiplications and additions may be contracted, and functions
  may be those of the hardware.
- A value that the library composes (softcap, ALiBi, bias, the scale) is *free* to be reordered.

The node ``strict`` is the root of a user's expression. The node ``free`` inside it holds the
expression that the library substitutes for the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from cupy_flash.mods.ir.analysis import EXACT, ORDERED, Analysis
from cupy_flash.mods.ir.expression import (
    BASE,
    INT,
    REAL,
    SCORE,
    Node,
    constant,
    memoized,
    postorder,
)
from cupy_flash.mods.ir.operations import OPERATIONS, cast, operation, rebuilt

# tanh(x) = 1 - 2 / (1 + 2^(2 log2(e) x)).
_TANH_FACTOR = 2 * math.log2(math.e)
_LOG2_E = math.log2(math.e)
_FREE = "free"
# Larger powers use a logarithm, which takes the same time for any exponent.
_LONGEST_PRODUCT = 16

# A node, and how it may be computed: exact, ordered or free.
_NodeUse = tuple[Node, str]


def lower(
    root: Node, analysis: Analysis, *, fast: bool, fast_tanh: bool, exact: bool = False
) -> Node:
    """Return an expression of the same value in other operations.

    The result has further operations in addition to those of `OPERATIONS`: ``reciprocal``;
    ``logistic``, which is 1 / (1 + 2^x); ``tanh_approx``, to 2^-11; ``power_approx``; and
    ``quotient``. Arguments of ``quotient`` are the dividend, a divisor that is constant along the
    row, the divisor's reciprocal, and a power of two (``quotient_scale``) that keeps both within
    the range of normal numbers.

    Parameters
    ----------
    root
        Root of the expression.
    analysis
        Analysis, which memoizes its results.
    fast
        Whether exponentials and tanh that do not decide may use the hardware's powers of 2. Their
        absolute error of 2^-23 is too large for float32 calls.
    fast_tanh
        Whether such a tanh may be the hardware's instruction.
    exact
        Whether the root decides, as a mask does.
    """
    return _Lowering(analysis, fast, fast_tanh).of((root, EXACT if exact else _FREE))


class _Lowering:
    def __init__(self, analysis: Analysis, fast: bool, fast_tanh: bool) -> None:
        self._analysis, self._fast, self._fast_tanh = analysis, fast, fast_tanh
        self._known: dict[_NodeUse, Node] = {}

    def of(self, root: _NodeUse) -> Node:
        return memoized(root, self._known, _arguments, self._lowered)

    def _lowered(self, use: _NodeUse) -> Node:
        node, manner = use
        args = tuple(self._known[x] for x in _arguments(use))
        if node.op in ("strict", "free"):
            return args[0]
        if node.type != REAL and not any(x.type == REAL for x in args):
            return self._of_integers(node, args)
        if not args or node.op in ("load", "cuda"):
            return rebuilt(node, args)
        if _decides(node):
            return Node(node.op, node.type, args, EXACT)
        if node.op == "where":
            return operation("where", *args)
        if manner == EXACT:
            return Node(node.op, node.type, args, EXACT)
        if manner == ORDERED:
            return self._ordered(node, args)
        return self._free(node, args)

    def _of_integers(self, node: Node, args: tuple[Node, ...]) -> Node:
        if node.type == INT and node.op in ("floordiv", "mod"):
            return _by_power_of_2(node.op, *args) or rebuilt(node, args)
        return rebuilt(node, args)

    def _ordered(self, node: Node, args: tuple[Node, ...]) -> Node:
        if node.op == "div" and self._analysis.is_of_row(args[1]):
            if self._analysis.is_of_row(args[0]):
                return Node("div", REAL, args, ORDERED)
            return _corrected_quotient(*args)
        return self._function(node, args) or Node(node.op, node.type, args, ORDERED)

    def _free(self, node: Node, args: tuple[Node, ...]) -> Node:
        if node.op == "div":
            return _quotient(args[0], args[1], self._analysis)
        if node.op == "mul":
            return _product(args[0], args[1], self._analysis)
        if node.op == "cast" and args[0].type == INT:
            return _real_of_int(args[0], self._analysis)
        return self._function(node, args) or rebuilt(node, args)

    def _function(self, node: Node, args: tuple[Node, ...]) -> Node | None:
        """Return the hardware's form of a function that does not decide; None if there is none."""
        if node.op == "power":
            return _power(args[0], args[1].value)
        if node.op == "log":
            return _scaled(operation("log2", *args), math.log(2), self._analysis)
        if self._fast and node.op == "tanh":
            return _tanh(args[0], self._fast_tanh, self._analysis)
        if self._fast and node.op == "exp":
            return operation("exp2", _scaled(args[0], _LOG2_E, self._analysis))
        return None


def _decides(node: Node) -> bool:
    """Return whether an operation compares or rounds real arguments, which then decide."""
    if node.op == "cast":
        return node.type != REAL
    row = OPERATIONS.get(node.op)
    return row is not None and row.decides


def _arguments(use: _NodeUse) -> tuple[_NodeUse, ...]:
    """Return the arguments of a node, and how each may be computed."""
    node, manner = use
    if node.op == "strict":
        return ((node.args[0], EXACT if manner == EXACT else ORDERED),)
    if node.op == "free":
        return ((node.args[0], EXACT if manner == EXACT else _FREE),)
    inherits = node.type == REAL and not _decides(node)
    return tuple((x, manner if inherits and x.type == REAL else EXACT) for x in node.args)


def exponent(
    score: Node, analysis: Analysis, is_large: Callable[[Node], bool], *, fast: bool
) -> Node:
    """Return the exponent of 2, ``log2(e) * score - base``, of a lowered score.

    The factor log2(e) is merged into factors of the score, and the base into its summands, so that
    neither takes an instruction of its own.

    Parameters
    ----------
    score
        Lowered score.
    analysis
        Analysis, which memoizes its results.
    is_large
        Function that returns whether log2(e) times a finite leaf may be infinite. A sum with such a
        leaf is kept finite, so that a row of finite scores never looks fully masked.
    fast
        Whether such sums may be rounded toward zero, which costs no instruction.
    """
    of_score: list[Node] = []
    even, others = operation("neg", BASE), list[Node]()
    large: list[tuple[Node, Node]] = []
    for term, sign in _summands(score, 1):
        if _may_be_large(term, is_large):
            large.append((term, constant(sign * _LOG2_E, REAL)))
            continue
        product = _scaled(term, sign * _LOG2_E, analysis)
        if analysis.slope(term) is not None:
            # Linear in the key, as is the base, whose slope is 0.
            even = operation("add", product, even)
        else:
            depends = any(node is SCORE for node in postorder(term))
            (of_score if depends else others).append(product)
    total = even
    for product in others:
        total = operation("add", product, total)
    for term, factor in large:
        op = "fast_finite_sum" if fast else "finite_sum"
        total = Node(op, REAL, (term, factor, total))
    for product in of_score:
        total = operation("add", product, total)
    return total


def _may_be_large(term: Node, is_large: Callable[[Node], bool]) -> bool:
    """Return whether a term may be so large that log2(e) times it is infinite.

    A value that the library composes is so large only if one of its summands is, such as a bias;
    factors, such as slopes, are assumed to be small. A user's function may compute any number.
    """
    stack = [term]
    while stack:
        node = stack.pop()
        if node.value in (ORDERED, EXACT) or is_large(node):
            return True
        if node.op in ("add", "sub", "min", "max", "neg", "abs", "where"):
            stack += [x for x in node.args if x.type == REAL]
    return False


def _summands(node: Node, sign: int) -> Iterator[tuple[Node, int]]:
    if node.value in (ORDERED, EXACT):
        yield node, sign
    elif node.op in ("add", "sub"):
        yield from _summands(node.args[0], sign)
        yield from _summands(node.args[1], -sign if node.op == "sub" else sign)
    elif node.op == "neg":
        yield from _summands(node.args[0], -sign)
    else:
        yield node, sign


def _real_of_int(node: Node, analysis: Analysis) -> Node:
    """Return an integer as a real, converted where that costs least.

    Linear functions of the key are converted once for each row. For other sums and similar
    operations, the operands are converted, because reals hold integers up to 2^24.
    """
    if analysis.is_of_row(node) or analysis.linear(node) is not None:
        return cast(node, REAL)
    by_parts = node.op in ("add", "sub", "neg", "abs", "min", "max", "where")
    if by_parts or (node.op == "mul" and node.args[1].is_constant):
        args = (_real_of_int(x, analysis) if x.type == INT else x for x in node.args)
        return operation(node.op, *args)
    return cast(node, REAL)


def _quotient(x: Node, y: Node, analysis: Analysis) -> Node:
    if y.is_constant:
        inverse = 1 / y.value if y.value else math.inf
        # Otherwise float32 has no normal number for the inverse.
        if 2.0**-126 <= abs(inverse) < 2.0**126:
            return _product(x, constant(inverse, REAL), analysis)
    # The inverse of a value that is constant along the row is computed once.
    if analysis.is_of_row(y) and analysis.is_of_row(x):
        return operation("div", x, y)
    return _product(x, Node("reciprocal", REAL, (y,)), analysis)


def _corrected_quotient(x: Node, y: Node) -> Node:
    """Return x / y, to 1 ulp, for a divisor that is constant along the row."""
    scale: Node = Node("quotient_scale", REAL, (y,), ORDERED)
    if y.is_constant and 2.0**-64 <= abs(y.value) <= 2.0**64:
        scale = constant(1, REAL)
    scaled = operation("mul", y, scale)
    inverse = Node("div", REAL, (constant(1, REAL), scaled), ORDERED)
    return Node("quotient", REAL, (x, scaled, inverse, scale), ORDERED)


def _product(x: Node, y: Node, analysis: Analysis) -> Node:
    """Return x * y; a tanh times a factor of the row takes one multiply-add."""
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
        if _is_free(value) and not analysis.is_of_row(value) and analysis.is_of_row(factor):
            for of_pair, of_row in (value.args, value.args[::-1]):
                if analysis.is_of_row(of_row):
                    return operation("mul", of_pair, operation("mul", of_row, factor))
    return operation("mul", x, y)


def _scaled(x: Node, factor: float, analysis: Analysis) -> Node:
    """Return x times a literal, merged into a factor of x that the library composed."""
    if _is_free(x) and x.args[1].is_constant:
        together = x.args[1].value * factor
        if 2.0**-126 <= abs(together) < 2.0**126:
            return operation("mul", x.args[0], constant(together, REAL))
    if _is_free(x) and not analysis.is_of_row(x):
        for value, of_row in (x.args, x.args[::-1]):
            if analysis.is_of_row(of_row):
                return operation("mul", value, operation("mul", of_row, constant(factor, REAL)))
    return operation("mul", x, constant(factor, REAL))


def _is_free(node: Node) -> bool:
    return node.op == "mul" and node.value is None


def _tanh(x: Node, fast: bool, analysis: Analysis) -> Node:
    if fast:
        return Node("tanh_approx", REAL, (x,))
    logistic = Node("logistic", REAL, (_scaled(x, _TANH_FACTOR, analysis),))
    twice = operation("mul", logistic, constant(2, REAL))
    return operation("sub", constant(1, REAL), twice)


def _is_tanh(node: Node) -> bool:
    return node.op == "sub" and node.args[1].op == "mul" and node.args[1].args[0].op == "logistic"


def _power(x: Node, n: float) -> Node:
    """Return x to the power of n, for a result that does not decide."""
    if n != int(n) or abs(n) > _LONGEST_PRODUCT:
        return Node("power_approx", REAL, (x, constant(n, REAL)), ORDERED)
    product: Node | None = None
    square, left = x, abs(int(n))
    while left:
        if left % 2:
            product = square if product is None else _ordered_product(product, square)
        square, left = _ordered_product(square, square), left // 2
    assert product is not None
    if n > 0:
        return product
    return Node("div", REAL, (constant(1, REAL), product), ORDERED)


def _ordered_product(x: Node, y: Node) -> Node:
    return Node("mul", REAL, (x, y), ORDERED)


def _by_power_of_2(op: str, x: Node, divisor: Node) -> Node | None:
    """Return a floored quotient or remainder by a literal power of 2 as bit operations, or None."""
    n = divisor.value if divisor.is_constant else 0
    if n < 1 or n & (n - 1):
        return None
    if op == "floordiv":
        return operation("shr", x, constant(n.bit_length() - 1, INT)) if n > 1 else x
    return operation("and", x, constant(n - 1, INT))
