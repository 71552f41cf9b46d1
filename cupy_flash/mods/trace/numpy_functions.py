"""NumPy's functions on nodes: their result types, and the operations that compute them."""

from __future__ import annotations

import math
from collections.abc import Callable

from cupy_flash.mods.ir import operations
from cupy_flash.mods.ir.expression import BOOL, INT, REAL, UINT64, Node, constant
from cupy_flash.mods.ir.operations import OPERATIONS, cast, logical_not, operation

# Larger powers of integers would need long source, and would wrap.
_LARGEST_POWER = 64


def promote(*nodes: Node) -> tuple[Node, ...]:
    """Return the values converted to the type in which NumPy computes them.

    Raises
    ------
    TypeError
        For uint64 with int32, which NumPy converts to float64.
    """
    types = {node.type for node in nodes}
    kind = next(t for t in (REAL, UINT64, INT, BOOL) if t in types)
    if kind == UINT64:
        for node in nodes:
            if node.type == INT and not (node.is_constant and node.value >= 0):
                raise TypeError(
                    "uint64 with int32: NumPy would convert both to float64; write "
                    "x.astype(np.uint64), or x.astype(np.int32), for one of them"
                )
    return tuple(cast(node, kind) for node in nodes)


def _arithmetic(op: str) -> Callable[[Node, Node], Node]:
    on_bools = {"add": "or", "mul": "and", "min": "and", "max": "or"}

    def apply(x: Node, y: Node) -> Node:
        x, y = promote(x, y)
        if x.type == BOOL and op == "sub":
            raise TypeError("NumPy does not subtract bools; write p ^ q, or np.logical_xor(p, q)")
        return operation(on_bools[op] if x.type == BOOL else op, x, y)

    return apply


def _comparison(op: str, *, swapped: bool = False) -> Callable[[Node, Node], Node]:
    def apply(x: Node, y: Node) -> Node:
        x, y = promote(x, y)
        if x.type == BOOL:
            if op in ("eq", "ne"):
                differ = operation("xor", x, y)
                return differ if op == "ne" else logical_not(differ)
            x, y = cast(x, INT), cast(y, INT)
        return operation(op, y, x) if swapped else operation(op, x, y)

    return apply


def _bitwise(op: str) -> Callable[[Node, Node], Node]:
    def apply(x: Node, y: Node) -> Node:
        x, y = promote(x, y)
        _refuse_reals(op, x)
        return operation(op, x, y)

    return apply


def _logical(op: str) -> Callable[[Node, Node], Node]:
    return lambda x, y: operation(op, cast(x, BOOL), cast(y, BOOL))


def _shift(op: str) -> Callable[[Node, Node], Node]:
    def apply(x: Node, y: Node) -> Node:
        x, y = _numbers(*promote(x, y))
        _refuse_reals(op, x)
        return operation(op, x, y)

    return apply


def _refuse_reals(op: str, x: Node) -> None:
    if x.type == REAL:
        raise TypeError(
            f"{op} of real numbers; expected integers or bools: write x.astype(np.int32), or a "
            "function such as np.logical_and"
        )


def _numbers(*nodes: Node) -> tuple[Node, ...]:
    return tuple(cast(node, INT) if node.type == BOOL else node for node in nodes)


def _on_numbers(op: str) -> Callable[..., Node]:
    return lambda *args: operation(op, *_numbers(*promote(*args)))


def _on_reals(op: str) -> Callable[..., Node]:
    return lambda *args: operation(op, *(cast(node, REAL) for node in args))


def _rounding(op: str) -> Callable[[Node], Node]:
    return lambda x: operation(op, x) if x.type == REAL else x


def negative(x: Node) -> Node:
    """Return ``-x``."""
    if x.type == BOOL:
        raise TypeError("NumPy does not negate bools; write ~p, or np.logical_not(p)")
    return operation("neg", x)


def absolute(x: Node) -> Node:
    """Return ``abs(x)``."""
    return x if x.type in (BOOL, UINT64) else operation("abs", x)


def sign(x: Node) -> Node:
    """Return the sign, which is -1, 0 or 1."""
    if x.type == UINT64:
        return cast(cast(x, BOOL), UINT64)
    return x if x.type == BOOL else operation("sign", x)


def invert(x: Node) -> Node:
    """Return ``~x``."""
    _refuse_reals("not", x)
    return operation("not", x)


def where(condition: Node, x: Node, y: Node) -> Node:
    """Return x if the condition is true, otherwise y."""
    return operation("where", cast(condition, BOOL), *promote(x, y))


def clip(x: Node, low: Node | None, high: Node | None) -> Node:
    """Return a value limited to bounds; None is no bound."""
    for op, bound in (("max", low), ("min", high)):
        if bound is not None:
            x = _arithmetic(op)(x, bound)
    return x


def power(x: Node, exponent: Node) -> Node:
    """Return ``x ** exponent`` for a constant exponent."""
    if not exponent.is_constant:
        raise TypeError(
            "the exponent of a power must be a constant; otherwise write np.exp2(y) for 2 ** y, "
            "and np.exp2(y * np.log2(x)) for x ** y"
        )
    n = exponent.value
    if REAL in (x.type, exponent.type):
        return operations.power(cast(x, REAL), constant(n, REAL))
    if abs(n) > _LARGEST_POWER:
        raise TypeError(
            f"an integer to the power of {n}; expected at most {_LARGEST_POWER}; otherwise write "
            f"x.astype(np.float32) ** {n}"
        )
    (x,) = _numbers(x)
    if n < 0:
        raise TypeError(
            f"an integer to the power of {n}, which NumPy does not compute; write "
            f"x.astype(np.float32) ** {n}"
        )
    return _whole_power(x, n)


def _whole_power(x: Node, n: int) -> Node:
    if n == 0:
        return constant(1, x.type)
    half = _whole_power(x, n // 2)
    square = operation("mul", half, half)
    return operation("mul", square, x) if n % 2 else square


def square(x: Node) -> Node:
    """Return ``x * x``."""
    return _arithmetic("mul")(x, x)


def reciprocal(x: Node) -> Node:
    """Return ``1 / x`` for reals."""
    if x.type != REAL:
        raise TypeError("NumPy's reciprocal of an integer is an integer; write 1 / x")
    return operation("div", constant(1, REAL), x)


def _is_nan(x: Node) -> Node:
    x = cast(x, REAL)
    return operation("ne", x, x)


def _compared_with_infinity(op: str) -> Callable[[Node], Node]:
    def apply(x: Node) -> Node:
        magnitude = operation("abs", cast(x, REAL))
        return operation(op, magnitude, constant(math.inf, REAL))

    return apply


# Functions by their names in NumPy.
FUNCTIONS: dict[str, Callable[..., Node]] = {
    "add": _arithmetic("add"),
    "subtract": _arithmetic("sub"),
    "multiply": _arithmetic("mul"),
    "divide": _on_reals("div"),
    "true_divide": _on_reals("div"),
    "floor_divide": _on_numbers("floordiv"),
    "remainder": _on_numbers("mod"),
    "power": power,
    "float_power": lambda x, n: power(cast(x, REAL), cast(n, REAL)),
    "negative": negative,
    "positive": lambda x: x,
    "absolute": absolute,
    "fabs": lambda x: absolute(cast(x, REAL)),
    "sign": sign,
    "square": square,
    "reciprocal": reciprocal,
    "minimum": _arithmetic("min"),
    "maximum": _arithmetic("max"),
    "clip": clip,
    "where": where,
    **{name: _rounding(name) for name in ("floor", "ceil", "trunc", "rint")},
    "less": _comparison("lt"),
    "less_equal": _comparison("le"),
    "greater": _comparison("lt", swapped=True),
    "greater_equal": _comparison("le", swapped=True),
    "equal": _comparison("eq"),
    "not_equal": _comparison("ne"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": lambda x: logical_not(cast(x, BOOL)),
    "bitwise_and": _bitwise("and"),
    "bitwise_or": _bitwise("or"),
    "bitwise_xor": _bitwise("xor"),
    "invert": invert,
    "left_shift": _shift("shl"),
    "right_shift": _shift("shr"),
    "isnan": _is_nan,
    "isinf": _compared_with_infinity("eq"),
    "isfinite": _compared_with_infinity("lt"),
    **{
        name: _on_reals(name)
        for name, row in OPERATIONS.items()
        if name == "sqrt" or (not row.exact and name != "power")
    },
}
