"""Table of the operations in expressions, one row for each, that all passes over them read.

A row says what an operation computes on arrays, how it is written in CUDA, which values it can
have, what its derivative is, and whether its result has the same bits on every backend. A new
operation needs a row here and, in some cases, a function in ``kernels_cu/score/functions.cuh``.

Arithmetic is IEEE float32 (float64 in float64 problems) and two's-complement int32, in the order
in which the user wrote it. Cases that NumPy leaves to the platform are defined here. Conversion of
a real to an integer saturates, and NaN becomes 0. An integer quotient or remainder by 0 is 0. A
shift by the width or more, or by a negative count, gives 0, or -1 for a negative value that is
shifted right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cupy_flash.mods.ir.expression import BOOL, INT, REAL, UINT64, Node, constant, fold

Range = tuple[float, float]
ANY_RANGE: Range = (-math.inf, math.inf)
INT_RANGE: Range = (-(2**31), 2**31 - 1)

_NUMBERS = frozenset({INT, UINT64, REAL})
_BITS = frozenset({BOOL, INT, UINT64})
_REALS = frozenset({REAL})
_ALL = _NUMBERS | _BITS


class Tangents(Protocol):
    """Argument of derivative rules: builds products of tangents."""

    def times(self, factor: Node, tangent: Node) -> Node:
        """Return the product, in which a tangent of 0 stays 0 whatever the factor is."""


Derivative = Callable[..., Node]


@dataclass(frozen=True)
class Operation:
    """One row of the table.

    Attributes
    ----------
    types
        Types of the arguments that the operation takes; of ``where``, of its last two.
    numpy
        Name of the function of NumPy and CuPy that computes it, or a function that is called with
        the module (NumPy or CuPy), the scalar types by name, and the arguments.
    sign
        Infix or prefix operator of C++; empty if generated source calls ``mod_NAME`` instead.
    commutes
        Whether the order of the arguments does not matter. A constant then becomes the second one.
    compares
        Whether the operation compares two numbers, so that the result is a bool.
    decides
        Whether real arguments are compared or rounded, so that one unit in the last place may
        change the result by any amount.
    exact
        Whether the result is bit-identical on all backends. Results of other operations agree to 2
        units in the last place, and subnormal arguments and results may be treated as 0.
    value_range
        Function from bounds of the arguments to bounds of the result; None if nothing is known.
    bounded
        Types for which ``kernels_cu/block_mask/bounds.cuh`` has ``range_NAME``.
    derivative
        Function of `Tangents`, the node, and the derivatives of its arguments that returns the
        derivative; None if the operation has none.
    """

    types: frozenset[str]
    numpy: str | Callable[..., Any]
    sign: str = ""
    commutes: bool = False
    compares: bool = False
    decides: bool = False
    exact: bool = True
    value_range: Callable[..., Range] | None = None
    bounded: frozenset[str] = field(default=frozenset())
    derivative: Derivative | None = None


ZERO, ONE = constant(0, REAL), constant(1, REAL)
_TWO, _HALF, MINUS_ONE = constant(2, REAL), constant(0.5, REAL), constant(-1, REAL)


def is_zero(node: Node) -> bool:
    """Return whether a real is the literal 0."""
    return node.is_constant and node.value == 0


# ---- Derivatives


def _sum(x: Node, y: Node) -> Node:
    if is_zero(x):
        return y
    return x if is_zero(y) else operation("add", x, y)


def _of_sub(t: Tangents, node: Node, dx: Node, dy: Node) -> Node:
    if is_zero(dx):
        return t.times(MINUS_ONE, dy)
    return dx if is_zero(dy) else operation("sub", dx, dy)


def _of_mul(t: Tangents, node: Node, dx: Node, dy: Node) -> Node:
    x, y = node.args
    if x is y:
        return t.times(operation("mul", x, _TWO), dx)
    return _sum(t.times(y, dx), t.times(x, dy))


def _divided(t: Tangents, tangent: Node, divisor: Node) -> Node:
    return t.times(operation("div", ONE, divisor), tangent)


def _of_div(t: Tangents, node: Node, dx: Node, dy: Node) -> Node:
    # The rule reuses the quotient, which is computed anyway.
    return _divided(t, _of_sub(t, node, dx, t.times(node, dy)), node.args[1])


def _of_abs(t: Tangents, node: Node, dx: Node) -> Node:
    x = node.args[0]
    below = operation("where", operation("lt", x, ZERO), t.times(MINUS_ONE, dx), ZERO)
    return operation("where", operation("lt", ZERO, x), dx, below)


def _of_extreme(t: Tangents, node: Node, dx: Node, dy: Node) -> Node:
    x, y = node.args
    takes_x, takes_y = operation("lt", y, x), operation("lt", x, y)
    if node.op == "min":
        takes_x, takes_y = takes_y, takes_x
    of_equals = t.times(_HALF, _sum(dx, dy))
    return operation("where", takes_x, dx, operation("where", takes_y, dy, of_equals))


def _of_mod(t: Tangents, node: Node, dx: Node, dy: Node) -> Node:
    return _of_sub(t, node, dx, t.times(operation("floordiv", *node.args), dy))


def _of_power(t: Tangents, node: Node, dx: Node, dn: Node) -> Node:
    x, n = node.args
    less = power(x, constant(n.value - 1, REAL))
    return t.times(operation("mul", less, n), dx)


def _by(factor: Callable[[Node, Node], Node]) -> Derivative:
    """Return the rule of a function whose derivative is `factor(argument, value)`."""
    return lambda t, node, dx: t.times(factor(node.args[0], node), dx)


def _kept(t: Tangents, node: Node, dx: Node) -> Node:
    return operation(node.op, dx)


def _flat(t: Tangents, node: Node, *tangents: Node) -> Node:
    return ZERO


# ---- Values on arrays


def _floor_quotient(name: str) -> Callable[..., Any]:
    def compute(xp: Any, types: Mapping[str, Any], x: Any, y: Any) -> Any:
        if xp is np or x.dtype.kind == "f":
            return getattr(xp, name)(x, y)
        return xp.where(y == 0, y * 0, getattr(xp, name)(x, xp.where(y == 0, y * 0 + 1, y)))

    return compute


def _power_of(xp: Any, types: Mapping[str, Any], x: Any, n: Any) -> Any:
    """Return x to the power of one exponent, as NumPy computes it for scalars."""
    if n != 0.5:
        return xp.power(x, n)
    # For arrays NumPy computes the square root, which differs at -0.0 and -infinity.
    return xp.where(x == -np.inf, -x, xp.sqrt(x) + types[REAL](0))


def _converted(xp: Any, x: Any, types: Mapping[str, Any], type: str) -> Any:
    """Return values converted to another type, as the module's docstring defines it."""
    target = types[type]
    if type not in (INT, UINT64) or x.dtype.kind != "f":
        return x.astype(target)
    wide = xp.where(xp.isnan(x), 0.0, x).astype(np.float64)
    if type == INT:
        return xp.clip(wide, *INT_RANGE).astype(target)
    # The largest float64 below 2^64.
    whole = xp.clip(wide, 0.0, 2.0**64 - 2.0**11).astype(target)
    return xp.where(wide >= 2.0**64, target(2**64 - 1), whole)


# ---- Ranges of values, before rounding and wrapping


def _ends(compute: Callable[[float, float], float]) -> Callable[..., Range]:
    """Return the range of a function that is monotonic in each argument."""

    def of(*ranges: Range) -> Range:
        x, y = ranges
        ends = [compute(a, b) for a in x for b in y]
        return ANY_RANGE if any(map(math.isnan, ends)) else (min(ends), max(ends))

    return of


def _of_both(*ranges: Range) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _range_of_abs(x: Range) -> Range:
    low = x[0] if x[0] > 0 else -x[1] if x[1] < 0 else 0
    return low, max(-x[0], x[1])


def _range_of_mod(x: Range, y: Range) -> Range:
    # The result has the sign of the divisor, and is 0 if the divisor is 0.
    return min(y[0] + 1, 0) if y[0] < 0 else 0, max(y[1] - 1, 0)


def _range_of_floordiv(x: Range, y: Range) -> Range:
    if y[0] <= 0 or math.inf in (*x, *y) or -math.inf in (*x, *y):
        return ANY_RANGE
    ends = [a // b for a in x for b in y]
    return min(ends), max(ends)


def _range_of_and(x: Range, y: Range) -> Range:
    highest = [high for low, high in (x, y) if low >= 0]
    return (0, min(highest)) if highest else ANY_RANGE


def _range_of_or(x: Range, y: Range) -> Range:
    if x[0] < 0 or y[0] < 0 or math.inf in (x[1], y[1]):
        return ANY_RANGE
    return 0, (1 << int(max(x[1], y[1])).bit_length()) - 1


def _range_of_shr(x: Range, count: Range) -> Range:
    return min(x[0], 0), max(x[1], -1)


def _within_one(*ranges: Range) -> Range:
    return -1.0, 1.0


# ---- The table


def _comparison(numpy: str, sign: str, *, commutes: bool = False) -> Operation:
    return Operation(
        _NUMBERS, numpy, sign, commutes=commutes, compares=True, decides=True, bounded=_ALL
    )


OPERATIONS: dict[str, Operation] = {
    "add": Operation(
        _NUMBERS, "add", "+", commutes=True, value_range=_ends(lambda a, b: a + b),
        bounded=frozenset({INT, REAL}), derivative=lambda t, node, dx, dy: _sum(dx, dy),
    ),
    "sub": Operation(
        _NUMBERS, "subtract", "-", value_range=_ends(lambda a, b: a - b),
        bounded=frozenset({INT, REAL}), derivative=_of_sub,
    ),
    "mul": Operation(
        _NUMBERS, "multiply", "*", commutes=True, value_range=_ends(lambda a, b: a * b),
        bounded=frozenset({INT, REAL}), derivative=_of_mul,
    ),
    "div": Operation(_REALS, "divide", "/", bounded=_REALS, derivative=_of_div),
    "floordiv": Operation(
        _NUMBERS, _floor_quotient("floor_divide"), decides=True, value_range=_range_of_floordiv,
        bounded=frozenset({INT}), derivative=_flat,
    ),
    "mod": Operation(
        _NUMBERS, _floor_quotient("remainder"), decides=True, value_range=_range_of_mod,
        bounded=frozenset({INT}), derivative=_of_mod,
    ),
    "neg": Operation(
        _NUMBERS, "negative", "-", value_range=lambda x: (-x[1], -x[0]),
        bounded=frozenset({INT, REAL}), derivative=lambda t, node, dx: t.times(MINUS_ONE, dx),
    ),
    "abs": Operation(
        frozenset({INT, REAL}), "absolute", value_range=_range_of_abs,
        bounded=frozenset({INT, REAL}), derivative=_of_abs,
    ),
    "sign": Operation(
        frozenset({INT, REAL}), "sign", decides=True, value_range=_within_one,
        bounded=frozenset({INT}), derivative=_flat,
    ),
    "min": Operation(
        _NUMBERS, "minimum", commutes=True,
        value_range=lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
        bounded=_NUMBERS, derivative=_of_extreme,
    ),
    "max": Operation(
        _NUMBERS, "maximum", commutes=True,
        value_range=lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
        bounded=_NUMBERS, derivative=_of_extreme,
    ),
    "where": Operation(
        _ALL, "where", value_range=lambda condition, x, y: _of_both(x, y), bounded=_ALL,
        derivative=lambda t, node, condition, dx, dy: operation("where", node.args[0], dx, dy),
    ),
    "lt": _comparison("less", "<"),
    "le": _comparison("less_equal", "<="),
    "eq": _comparison("equal", "==", commutes=True),
    "ne": _comparison("not_equal", "!=", commutes=True),
    "and": Operation(
        _BITS, "bitwise_and", "&", commutes=True, value_range=_range_of_and, bounded=_BITS
    ),
    "or": Operation(
        _BITS, "bitwise_or", "|", commutes=True, value_range=_range_of_or,
        bounded=frozenset({BOOL, INT}),
    ),
    "xor": Operation(
        _BITS, "bitwise_xor", "^", commutes=True, value_range=_range_of_or,
        bounded=frozenset({BOOL, INT}),
    ),
    "not": Operation(
        _BITS, "invert", "~", value_range=lambda x: (-1 - x[1], -1 - x[0]),
        bounded=frozenset({BOOL, INT}),
    ),
    "shl": Operation(frozenset({INT, UINT64}), "left_shift", bounded=frozenset({INT})),
    "shr": Operation(
        frozenset({INT, UINT64}), "right_shift", value_range=_range_of_shr,
        bounded=frozenset({INT, UINT64}),
    ),
    **{
        name: Operation(_REALS, name, decides=True, bounded=_REALS, derivative=_flat)
        for name in ("floor", "ceil", "trunc", "rint")
    },
    "sqrt": Operation(
        _REALS, "sqrt", bounded=_REALS,
        derivative=lambda t, node, dx: _divided(t, t.times(_HALF, dx), node),
    ),
    "power": Operation(_REALS, _power_of, exact=False, derivative=_of_power),
    "exp": Operation(_REALS, "exp", exact=False, bounded=_REALS, derivative=_by(lambda x, y: y)),
    "exp2": Operation(
        _REALS, "exp2", exact=False, bounded=_REALS,
        derivative=_by(lambda x, y: operation("mul", y, constant(math.log(2), REAL))),
    ),
    "expm1": Operation(
        _REALS, "expm1", exact=False, bounded=_REALS,
        # value + 1 would be inexact where the exponential is small.
        derivative=_by(lambda x, y: operation("exp", x)),
    ),
    "log": Operation(
        _REALS, "log", exact=False, bounded=_REALS,
        derivative=lambda t, node, dx: _divided(t, dx, node.args[0]),
    ),
    "log2": Operation(
        _REALS, "log2", exact=False, bounded=_REALS,
        derivative=lambda t, node, dx: _divided(
            t, t.times(constant(1 / math.log(2), REAL), dx), node.args[0]
        ),
    ),
    "log10": Operation(
        _REALS, "log10", exact=False, bounded=_REALS,
        derivative=lambda t, node, dx: _divided(
            t, t.times(constant(1 / math.log(10), REAL), dx), node.args[0]
        ),
    ),
    "log1p": Operation(
        _REALS, "log1p", exact=False, bounded=_REALS,
        derivative=lambda t, node, dx: _divided(t, dx, operation("add", node.args[0], ONE)),
    ),
    "tanh": Operation(
        _REALS, "tanh", exact=False, value_range=_within_one, bounded=_REALS,
        derivative=_by(lambda x, y: operation("sub", ONE, operation("mul", y, y))),
    ),
    "sin": Operation(
        _REALS, "sin", exact=False, value_range=_within_one,
        derivative=_by(lambda x, y: operation("cos", x)),
    ),
    "cos": Operation(
        _REALS, "cos", exact=False, value_range=_within_one,
        derivative=_by(lambda x, y: operation("neg", operation("sin", x))),
    ),
    # Markers that change no value. `lower` keeps the order of operations inside `strict`, a user's
    # expression, and is free to reorder inside `free`, which the library substitutes for the score.
    "strict": Operation(_REALS, "positive", value_range=lambda x: x, derivative=_kept),
    "free": Operation(_REALS, "positive", value_range=lambda x: x, derivative=_kept),
}  # fmt: skip

COMPARISONS = frozenset(name for name, row in OPERATIONS.items() if row.compares)


def numpy_types(real: Any) -> dict[str, Any]:
    """Return NumPy's scalar types by the type of a node; that of reals is `real`."""
    return {BOOL: np.bool_, INT: np.int32, UINT64: np.uint64, REAL: np.dtype(real).type}


def evaluated(node: Node, args: tuple[Any, ...], types: Mapping[str, Any], xp: Any) -> Any:
    """Compute one operation on arrays of the module `xp`.

    The node is a cast or a row of the table. The values of its arguments, `args`, have the scalar
    types that `types` maps the types of their nodes to, see `numpy_types`.
    """
    if node.op == "cast":
        return _converted(xp, args[0], types, node.type)
    row = OPERATIONS[node.op]
    if isinstance(row.numpy, str):
        return getattr(xp, row.numpy)(*args)
    return row.numpy(xp, types, *args)


def operation(op: str, *args: Node) -> Node:
    """Return an operation as a node, simplified if that changes no bit of the result."""
    row = OPERATIONS[op]
    if row.commutes and args[0].is_constant:
        args = args[::-1]
    kind = args[1].type if op == "where" else args[0].type
    assert kind in row.types, f"{op} of {kind}"
    result = BOOL if row.compares else kind
    if op in ("strict", "free") and not args[0].args:
        return args[0]
    node = _simplified(op, args)
    if node is not None:
        return node
    node = Node(op, result, args)
    # The result for reals depends on whether a problem computes in float32 or float64.
    if all(argument.is_constant and argument.type != REAL for argument in args):
        return _folded(node)
    return _folded_reals(node)


def cast(x: Node, type: str) -> Node:
    """Return a conversion as a node; reals become integers by rounding toward zero."""
    if x.type == type:
        return x
    if type == BOOL:
        return operation("ne", x, constant(0, x.type))
    node = Node("cast", type, (x,))
    if not x.is_constant:
        return node
    if type == REAL:
        # A larger integer would be rounded twice, to float64 and then to float32.
        return constant(x.value, REAL) if abs(x.value) <= 2**53 else node
    if x.type == REAL and np.float32(x.value) != x.value:
        return node
    return _folded(node)


def logical_not(x: Node) -> Node:
    """Return the opposite of a bool."""
    return operation("not", x)


def power(x: Node, n: Node) -> Node:
    """Return a real to the power of a constant; exponents 0, 1, 2 and -1 are exact operations."""
    exact = {0: lambda: ONE, 1: lambda: x, 2: lambda: operation("mul", x, x)}
    if n.value in exact:
        return exact[n.value]()
    if n.value == -1:
        return operation("div", ONE, x)
    return operation("power", x, n)


def rebuilt(node: Node, args: tuple[Node, ...]) -> Node:
    """Return the node with other arguments, simplified again."""
    if args == node.args:
        return node
    if node.op in ("load", "cuda"):
        return Node(node.op, node.type, args, node.value)
    return cast(args[0], node.type) if node.op == "cast" else operation(node.op, *args)


def substitute(root: Node, replacements: Mapping[Node, Node]) -> Node:
    """Return the expression with some nodes, such as symbols and captures, replaced by others."""
    return fold(root, lambda node, args: replacements.get(node) or rebuilt(node, args))


def _folded(node: Node) -> Node:
    """Return the constant that an operation on constants gives, computed as the table says."""
    # float64 holds Python's floats exactly.
    types = numpy_types(np.float64)
    args = tuple(np.asarray(types[x.type](x.value)) for x in node.args)
    with np.errstate(all="ignore"):
        return constant(evaluated(node, args, types, np).item(), node.type)


def _folded_reals(node: Node) -> Node:
    """Return the constant if all numbers are whole and small enough for float32, else the node."""
    if node.op not in ("add", "sub", "mul", "neg") or not all(x.is_constant for x in node.args):
        return node
    result = _folded(node)
    values = [result.value, *(x.value for x in node.args)]
    is_unsplit = all(abs(value) <= 2**24 and value == int(value) for value in values)
    return result if is_unsplit else node


def _simplified(op: str, args: tuple[Node, ...]) -> Node | None:
    """Return the argument or the constant that an operation is equal to; None if there is none."""
    x, y = args[0], args[-1]
    if op == "where":
        if x.is_constant:
            return args[1] if x.value else y
        return y if args[1] is y else None
    if op in ("not", "neg") and x.op == op:
        return x.args[0]
    if x is y and len(args) == 2 and op in COMPARISONS and x.type != REAL:
        return constant(op in ("le", "eq"), BOOL)
    if not y.is_constant or len(args) != 2:
        return None
    value = y.value
    if y.type == BOOL:
        if op == "and":
            return x if value else y
        if op == "or":
            return y if value else x
        return None
    if op in ("mul", "div") and value == 1:
        return x
    if y.type != REAL:
        if op in ("add", "sub") and value == 0:
            return x
        return y if op == "mul" and value == 0 else None
    # x + 0.0 is not x if x is -0.0; x + -0.0 and x - 0.0 are x.
    is_nothing = value == 0 and (math.copysign(1, value) < 0) == (op == "add")
    return x if op in ("add", "sub") and is_nothing else None
