"""Evaluator of random functions in plain NumPy, with bounds of the errors of backends.

It defines the true values of traced functions, so it imports nothing of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

BOOL, INT, UINT64, REAL = "bool", "int32", "uint64", "real"
_INTEGERS = {BOOL: np.bool_, INT: np.int32, UINT64: np.uint64}
# Error bound of an inexact operation before a decision, in units in the last place: each of two
# backends may be off by 2 units.
_UNITS = 4.0

Array = Any


@dataclass(eq=False)
class Expr:
    """Operation of a random function. Shared subexpressions are one object.

    `op` is the name of a NumPy function, ``astype``, ``load`` (an element of a capture), ``call``
    (of a helper), or a leaf: ``symbol``, ``scalar`` (a captured number), ``literal`` or
    ``parameter`` (of a helper).
    """

    op: str
    type: str  # type of the result
    args: tuple[Expr, ...] = ()  # operands; indices of a load
    value: Any = None  # name of a symbol, capture or parameter, value of a literal, or `Helper`
    form: str = ""  # Python text with a replacement field for each operand


@dataclass(eq=False)
class Helper:
    """Helper function that a traced function calls."""

    name: str  # name in the text
    parameters: tuple[Expr, ...]  # leaves that stand for the arguments
    body: Expr  # expression that it returns


@dataclass
class Value:
    """Values `v` of an expression for many pairs, and bounds of the errors of backends.

    `e` is the error bound if a decision reads the value: 0 if every operation is exact, infinite if
    errors may change an earlier decision (it is open). It is a float64 array, or the number 0.0.
    `s` is the error bound if the value enters the score; then products and sums may be fused (FMA).
    `overflows` tells whether the value is infinite only because a result of finite operands was
    rounded. A sum that is fused with such a product does not round it.
    """

    v: Array  # in the dtype of the expression's type
    e: Array = 0.0
    s: Array = 0.0
    overflows: Array = False


class Oracle:
    """Evaluator of random functions at many pairs of query and key.

    `symbols` has positions (int32 arrays), and ``score`` (a float array). `captures` has arrays and
    numbers by name, and `real` is np.float32 or np.float64. `inputs` is the dtype of queries and
    keys; with 16 bits, functions that only enter the score may be approximations.
    """

    def __init__(
        self,
        symbols: Mapping[str, Array],
        captures: Mapping[str, Any],
        real: Any = np.float32,
        inputs: str = "float32",
        score_error: Array = 0.0,  # bound of the error of scores
    ) -> None:
        self._symbols, self._captures, self._real = symbols, captures, real
        self._inputs, self._score_error = inputs, score_error
        info = np.finfo(real)
        # `_u` is half the eps; the others are the least, the least normal and the largest number.
        self._u = float(info.eps) / 2
        self._tiny = float(info.smallest_subnormal)
        self._normal, self._most = float(info.tiny), float(info.max)

    def value(self, root: Expr) -> Value:
        """Return the value of an expression."""
        with np.errstate(all="ignore"):
            return self._value(root, {}, {})

    def _value(self, root: Expr, known: dict[int, Value], given: Mapping[str, Value]) -> Value:
        # A stack replaces recursion, because chains of operations may have any length.
        stack = [root]
        while stack:
            node = stack[-1]
            if id(node) in known:
                stack.pop()
                continue
            missing = [x for x in node.args if id(x) not in known]
            if missing:
                stack += missing
                continue
            stack.pop()
            known[id(node)] = self._compute(node, [known[id(x)] for x in node.args], given)
        return known[id(root)]

    def _compute(self, node: Expr, args: list[Value], given: Mapping[str, Value]) -> Value:
        op = node.op
        if op == "parameter":
            return given[node.value]
        if op == "call":
            names = (leaf.value for leaf in node.value.parameters)
            return self._value(node.value.body, {}, dict(zip(names, args, strict=True)))
        if op == "literal":
            return Value(self._number(node.value, node.type))
        if op == "symbol":
            error = self._score_error if node.value == "score" else 0.0
            return Value(self._symbols[node.value], error, error)
        if op == "scalar":
            return Value(self._number(self._captures[node.value], node.type))
        if op == "load":
            return self._load(node, args)
        types = [x.type for x in node.args]
        if op == "astype":
            return self._cast(args[0], types[0], node.type)
        return self._apply(op, args, types, node)

    def _number(self, value: Any, type: str) -> Array:
        return self._dtype(type)(value)

    def _dtype(self, type: str) -> Any:
        return self._real if type == REAL else _INTEGERS[type]

    def _load(self, node: Expr, args: list[Value]) -> Value:
        array = self._captures[node.value]
        places = tuple(
            np.clip(index.v.astype(np.int64), 0, length - 1)
            for index, length in zip(args, array.shape, strict=True)
        )
        element = np.asarray(array[places])
        if node.type == INT and element.dtype == np.int64:
            element = element.view(np.uint64).astype(np.uint32).view(np.int32)
        element = element.astype(self._dtype(node.type))
        error = _open(*args)
        return Value(element, error, error)

    # ---- Conversions

    def _cast(self, x: Value, source: str, type: str) -> Value:
        if source == type:
            return x
        if type == BOOL:
            if source == REAL:
                return _decided(x.v != 0, _where((np.abs(_f64(x.v)) > x.e), 0.0, x.e))
            return Value(x.v != 0, x.e, x.e)
        if source == REAL:
            low, high = self._ends(x)
            made, least, most = (_whole(y, type) for y in (x.v, low, high))
            if _is_exact(x.e):
                return Value(made)
            closed = (least == most) & np.isfinite(x.e)
            return _decided(made, np.where(closed, 0.0, np.inf))
        if type == REAL:
            return Value(x.v.astype(self._real), x.e, x.e)
        if source == UINT64:
            low_bits = (x.v & np.uint64(0xFFFFFFFF)).astype(np.uint32)
            return Value(np.asarray(low_bits).view(np.int32)[()], x.e, x.e)
        if type == UINT64:
            wide = np.asarray(x.v).astype(np.int64)
            return Value(wide.view(np.uint64)[()], x.e, x.e)
        return Value(x.v.astype(np.int32), x.e, x.e)

    def _ends(self, x: Value) -> tuple[Array, Array]:
        v = _f64(x.v)
        if _is_exact(x.e):
            return v, v
        return v - x.e, v + x.e

    def _promoted(self, args: list[Value], types: list[str]) -> tuple[list[Value], str]:
        kind = next(t for t in (REAL, UINT64, INT, BOOL) if t in types)
        return [self._cast(x, t, kind) for x, t in zip(args, types, strict=True)], kind

    # ---- Operations

    def _apply(self, op: str, args: list[Value], types: list[str], node: Expr) -> Value:
        if op == "where":
            parts, _ = self._promoted(args[1:], types[1:])
            return self._where(self._cast(args[0], types[0], BOOL), *parts)
        if op.startswith("logical_"):
            bools = [self._cast(x, t, BOOL) for x, t in zip(args, types, strict=True)]
            return self._logical(op.removeprefix("logical_"), bools)
        if op in _INEXACT:
            (x,) = (self._cast(x, t, REAL) for x, t in zip(args, types, strict=True))
            return self._approximated(op, x, getattr(np, op), _INEXACT[op])
        if op in ("power", "float_power"):
            return self._power(op, args[0], types, node.args[1].value)
        if op in ("isnan", "isinf", "isfinite"):
            x = self._cast(args[0], types[0], REAL)
            return _decided(getattr(np, op)(x.v), np.where(np.isfinite(x.e), 0.0, np.inf))
        if op in ("divide", "true_divide", "sqrt", "fabs"):
            args = [self._cast(x, t, REAL) for x, t in zip(args, types, strict=True)]
            types = [REAL] * len(args)
        args, kind = self._promoted(args, types)
        if op == "clip":
            return self._apply(
                "minimum", [self._apply("maximum", args[:2], [kind] * 2, node), args[2]],
                [kind] * 2, node,
            )  # fmt: skip
        if op in _COMPARED:
            return self._compared(_COMPARED[op], args)
        if kind == BOOL and op in _OF_BOOLS:
            return self._logical(_OF_BOOLS[op], args)
        if kind == REAL:
            return self._of_reals(op, args)
        if kind == BOOL and op in ("floor_divide", "remainder", "left_shift", "right_shift"):
            args, kind = [self._cast(x, BOOL, INT) for x in args], INT
        error = _open(*args)
        return Value(_of_integers(op, kind, *(x.v for x in args)), error, error)

    def _where(self, condition: Value, x: Value, y: Value) -> Value:
        chosen = np.where(condition.v, x.v, y.v)
        e = np.where(condition.e > 0, np.inf, np.where(condition.v, x.e, y.e))
        s = np.where(condition.e > 0, np.inf, np.where(condition.v, x.s, y.s))
        return Value(chosen, e, s, np.where(condition.v, x.overflows, y.overflows))

    def _logical(self, op: str, args: list[Value]) -> Value:
        if op == "not":
            return Value(~args[0].v, args[0].e, args[0].e)
        x, y = args
        error = _open(x, y)
        if op == "xor":
            return _decided(x.v ^ y.v, error)
        # One known operand may decide the result alone.
        if op == "and":
            known = ((x.e == 0) & ~x.v) | ((y.e == 0) & ~y.v)
            return _decided(x.v & y.v, np.where(known, 0.0, error))
        known = ((x.e == 0) & x.v) | ((y.e == 0) & y.v)
        return _decided(x.v | y.v, np.where(known, 0.0, error))

    def _compared(self, compare: Callable[[Array, Array], Array], args: list[Value]) -> Value:
        x, y = args
        together = x.e + y.e
        if _is_exact(together):
            return Value(compare(x.v, y.v))
        apart = np.abs(_f64(x.v) - _f64(y.v)) > together
        return _decided(compare(x.v, y.v), np.where((together == 0) | apart, 0.0, np.inf))

    def _of_reals(self, op: str, args: list[Value]) -> Value:
        x = args[0]
        if op in ("negative", "positive", "absolute", "fabs"):
            return Value(getattr(np, op)(x.v), x.e, x.s, x.overflows)
        if op in ("floor", "ceil", "trunc", "rint", "sign"):
            function = getattr(np, op)
            low, high = map(function, self._ends(x))
            open_ = (low != high) & (np.asarray(x.e) > 0)
            return _decided(function(x.v), np.where(open_, np.inf, 0.0))
        if op in ("minimum", "maximum"):
            return self._extreme(op, *args)
        if op in ("floor_divide", "remainder"):
            return self._floored(op, *args)
        if op == "reciprocal":
            op, args = "divide", [Value(np.broadcast_to(self._real(1), np.shape(x.v))), x]
        elif op == "square":
            op, args = "multiply", [x, x]
        function = getattr(np, op)
        v = function(*(y.v for y in args))
        e = self._spread(op, args, v, [y.e for y in args], contracts=False)
        s = self._spread(op, args, v, [self._in_score(y) for y in args], contracts=True)
        if op in ("add", "subtract"):
            x, y = args
            # The sum of an infinity and a product that overflows to the opposite infinity is NaN;
            # if the product is fused, it is not rounded, and the sum is the first infinity.
            differs = np.isinf(x.v) & np.isinf(y.v) & np.isnan(v)
            differs &= np.asarray(x.overflows) | np.asarray(y.overflows)
            return Value(v, e, np.where(differs, np.inf, s))
        return Value(v, e, s, _overflows(v, *(y.v for y in args)))

    def _in_score(self, x: Value) -> Array:
        """Return the error bound of an operand that enters the score; subnormal values may be 0."""
        if self._real is np.float64:
            return x.s
        size = np.abs(_f64(x.v))
        return x.s + np.where(size < self._normal, size, 0.0)

    def _spread(
        self, op: str, args: list[Value], v: Array, errors: list[Array], *, contracts: bool
    ) -> Array:
        """Return the error bound of a result `v`, given those of its operands."""
        if not contracts and all(map(_is_exact, errors)):
            return 0.0
        a, da = _f64(args[0].v), np.asarray(errors[0])
        if op == "sqrt":
            exact = np.sqrt(a)
            low, high = np.sqrt(np.maximum(a - da, 0)), np.sqrt(np.maximum(a + da, 0))
            d = np.maximum(exact - low, high - exact)
            d = np.where((a - da < 0) & (da > 0), np.inf, d)
            d = np.where(np.isfinite(a), d, np.where(da > 0, np.inf, 0.0))
            total = da
        else:
            b, db = _f64(args[1].v), np.asarray(errors[1])
            total = da + db
            if op in ("add", "subtract"):
                d = total
                exact = a + b if op == "add" else a - b
            elif op == "multiply":
                d = np.abs(a) * db + np.abs(b) * da + da * db
                exact = a * b
            else:
                exact = a / b
                margin = np.abs(b) - db
                d = (np.abs(a) * db + np.abs(b) * da) / (np.abs(b) * margin)
                d = np.where((db > 0) & ~(margin > 0), np.inf, d)
            # An operand that is certainly infinite or NaN determines the result.
            is_finite = np.isfinite(a) & np.isfinite(b)
            settled = (np.isfinite(a) | (da == 0)) & (np.isfinite(b) | (db == 0))
            settled &= np.isfinite(total)
            if op != "add" and op != "subtract":
                settled &= ((da == 0) | (np.abs(a) > da)) & ((db == 0) | (np.abs(b) > db))
            # A fused product may exceed the largest number.
            limit = (2.1 if op == "multiply" and contracts else 1.001) * self._most
            overflows = np.where(np.abs(exact) - d > limit, 0.0, np.inf)
            if self._real is np.float64:
                overflows = np.full(np.shape(d), np.inf)
            if not contracts:
                overflows = np.where(total == 0, 0.0, overflows)
            settled_d = np.where(settled, 0.0, np.inf)
            d = np.where(is_finite, np.where(np.isfinite(v), d, overflows), settled_d)
        least = self._normal if contracts and self._real is np.float32 else self._tiny
        rounding = 2 * self._u * np.abs(_f64(v)) + least
        rounding = np.where(np.isfinite(v), rounding, 0.0)
        if not contracts:
            rounding = np.where(total == 0, 0.0, rounding)
        d = np.where(total == 0, np.where(np.isnan(d), 0.0, d), np.where(np.isnan(d), np.inf, d))
        d = d * (1 + 1e-9) + rounding
        # A result that may exceed the largest number may be infinite.
        near = np.isfinite(v) & (d > rounding) & (np.abs(_f64(v)) + d >= self._most)
        return np.where(near, np.inf, d)

    def _extreme(self, op: str, x: Value, y: Value) -> Value:
        v = getattr(np, op)(x.v, y.v)
        # The sign of a zero is not determined.
        zeros = (x.v == 0) & (y.v == 0) & (np.signbit(x.v) != np.signbit(y.v))
        e, s = (np.maximum(a, b) for a, b in ((x.e, y.e), (x.s, y.s)))
        if zeros.any():
            e, s = (np.where(zeros, np.maximum(d, self._tiny), d) for d in (e, s))
        # If the operands are far apart, the error is at most that of the chosen one.
        return Value(v, e, s, np.asarray(x.overflows) | np.asarray(y.overflows))

    def _floored(self, op: str, x: Value, y: Value) -> Value:
        v = getattr(np, op)(x.v, y.v)
        total = x.e + y.e
        if _is_exact(total):
            return Value(v)
        quotient = Value(_f64(x.v) / _f64(y.v))
        spread = self._spread("divide", [x, y], quotient.v, [x.e, y.e], contracts=False)
        spread = spread + 4 * self._u * np.abs(quotient.v)
        same = np.floor(quotient.v - spread) == np.floor(quotient.v + spread)
        if op == "floor_divide":
            d = np.where(same, 0.0, np.inf)
        else:
            d = x.e + (np.abs(quotient.v) + 1) * y.e + 4 * self._u * np.abs(_f64(v)) + self._tiny
            d = np.where(same & np.isfinite(v), d, np.inf)
        return _decided(v, np.where(total == 0, 0.0, np.where(np.isnan(d), np.inf, d)))

    def _power(self, op: str, x: Value, types: list[str], n: Any) -> Value:
        is_real = REAL in types or op == "float_power"
        if not is_real:
            type = INT if types[0] == BOOL else types[0]
            x = self._cast(x, types[0], type)
            v = np.ones(np.shape(x.v), self._dtype(type))
            for _ in range(n):
                v = v * x.v
            return Value(v, x.e, x.e)
        x = self._cast(x, types[0], REAL)
        exponent = np.float64(self._real(n))

        def power(t: Array) -> Array:
            # For arrays and a scalar exponent of 0.5, NumPy computes the square root, which differs
            # from the power of scalars at -0.0 and -infinity.
            several = np.append(np.ravel(t), 1.0)
            return np.power(several, np.full(several.size, exponent))[:-1].reshape(np.shape(t))

        return self._approximated("power", x, power, None)

    def _approximated(
        self, op: str, x: Value, function: Callable[[Array], Array], bounded_slope: float | None
    ) -> Value:
        wide = _f64(x.v)
        exact = np.asarray(function(wide))
        v = exact.astype(self._real)
        unit = np.spacing(np.abs(v)).astype(np.float64)
        own = _UNITS * np.where(np.isfinite(v), unit, 0.0)
        margin = 4 * _UNITS * self._u
        near_end = (np.abs(exact) > self._most * (1 - margin)) & (
            np.abs(exact) < self._most * (1 + margin)
        )
        own = np.where(near_end, np.inf, own)
        if self._real is np.float64:
            own = np.where(np.isinf(v) & np.isfinite(wide) & (wide != 0), np.inf, own)
        own = own + self._flushed(wide, exact, function)
        e = own + self._carried(x.v, x.e, exact, function, bounded_slope)
        s = own + self._carried(x.v, self._in_score(x), exact, function, bounded_slope)
        s = s + self._approximation(op, wide, exact)
        return Value(v, e, s, _overflows(v, x.v))

    def _flushed(self, x: Array, exact: Array, function: Callable[[Array], Array]) -> Array:
        """Return the error if subnormal arguments and results are flushed to 0."""
        below = np.where(np.abs(exact) < self._normal, self._normal, 0.0)
        small = (x != 0) & (np.abs(x) < self._normal)
        if not small.any():
            return below
        d = np.abs(exact - function(np.where(small, 0.0, x)))
        return below + np.where(small, np.where(np.isnan(d), np.inf, d), 0.0)

    def _carried(
        self,
        v: Array,
        error: Array,
        exact: Array,
        function: Callable[[Array], Array],
        bounded_slope: float | None,
    ) -> Array:
        """Return the error of a function that comes from the error of its operand."""
        if _is_exact(error):
            return 0.0
        error = np.asarray(error)
        if bounded_slope is not None:
            d = bounded_slope * error
            d = np.where(np.isfinite(v) | (error == 0), d, np.inf)
        else:
            low, high = function(_f64(v) - error), function(_f64(v) + error)
            d = np.maximum(np.abs(exact - low), np.abs(high - exact))
            # An interval that contains 0 may contain a pole or the boundary of the domain.
            d = np.where(_f64(v) * (_f64(v) - error) <= 0, np.inf, d)
            d = np.where(_f64(v) * (_f64(v) + error) <= 0, np.inf, d)
            if function in (np.log1p, np.exp, np.exp2, np.expm1):
                again = np.maximum(np.abs(exact - low), np.abs(high - exact))
                d = np.where(np.isnan(again), np.inf, again)
        d = np.where(np.isnan(d), np.inf, d * (1 + 1e-9))
        # A result that certainly exceeds the largest number is infinite.
        beyond = (np.abs(exact) - d > 1.001 * self._most) & np.isfinite(d)
        d = np.where(beyond, 0.0, np.where(np.abs(exact) + d >= self._most, np.inf, d))
        return np.where(error == 0, 0.0, d)

    def _approximation(self, op: str, x: Array, exact: Array) -> Array:
        """Return the approximation error of a function that enters the score."""
        if self._real is np.float64:
            return 0.0
        size = np.where(np.abs(exact) <= self._most, np.abs(exact), 0.0)
        if op in ("exp", "exp2", "expm1", "power"):
            # Powers of two flush results below the least normal number to 0.
            d = self._normal + 4 * self._u * size
            if op == "exp" and self._inputs in ("float16", "bfloat16"):
                d = d + 2.0**-20 * size * np.maximum(1, np.where(np.isfinite(x), np.abs(x), 0))
            if op == "power":
                # A power is a product of many factors, or exp2 of a logarithm.
                d = d + 64 * self._u * size
                d = d + 2 * self._u * size * np.abs(np.nan_to_num(np.log2(size)))
            return d
        if op in ("log", "log10", "log2"):
            return 4 * self._u * size
        if op == "tanh" and self._inputs in ("float16", "bfloat16"):
            return 2.0**-10 if self._inputs == "bfloat16" else 2.0**-20
        return 0.0


# Approximated functions, and bounds of their slopes; None if a slope is unbounded.
_INEXACT: dict[str, float | None] = {
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log10", "log1p")),
    **dict.fromkeys(("tanh", "sin", "cos"), 1.0),
}
_COMPARED: dict[str, Callable[[Array, Array], Array]] = {
    name: getattr(np, name)
    for name in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
}
_OF_BOOLS = {
    **dict.fromkeys(("multiply", "minimum", "bitwise_and"), "and"),
    **dict.fromkeys(("add", "maximum", "bitwise_or"), "or"),
    **{"bitwise_xor": "xor", "invert": "not"},
}


def _f64(x: Array) -> Array:
    return np.asarray(x, np.float64)


def _is_exact(error: Array) -> bool:
    return isinstance(error, float) and error == 0


def _open(*args: Value) -> Array:
    """Return the error of an integer or bool: 0, or infinity if one of the operands is open."""
    errors = [x.e for x in args if not _is_exact(x.e)]
    if not errors:
        return 0.0
    total = sum(errors)
    return np.where(np.asarray(total) > 0, np.inf, 0.0)


def _overflows(v: Array, *args: Array) -> Array:
    found = np.isinf(v)
    for x in args:
        found = found & np.isfinite(x)
    return found


def _where(condition: Array, x: Array, y: Array) -> Array:
    return 0.0 if _is_exact(y) else np.where(condition, x, y)


def _decided(v: Array, error: Array) -> Value:
    """Return a decision as a value; if it is open, so is a score that it enters."""
    return Value(v, error, error)


def _whole(x: Array, type: str) -> Array:
    """Return floats as integers: rounded toward zero and saturated, with 0 for NaN."""
    x = np.trunc(_f64(x))
    if type == INT:
        return np.nan_to_num(np.clip(x, -(2.0**31), 2.0**31 - 1), nan=0).astype(np.int32)
    top = x >= 2.0**64
    inside = np.where((x > 0) & ~top, x, 0.0)
    return np.where(top, np.uint64(2**64 - 1), inside.astype(np.uint64))


def _of_integers(op: str, type: str, *args: Array) -> Array:
    x, y = args[0], args[-1]
    of_two = ("add", "subtract", "multiply", "minimum", "maximum")
    if op in (*of_two, "bitwise_and", "bitwise_or", "bitwise_xor"):
        return getattr(np, op)(x, y)
    if op in ("floor", "ceil", "trunc", "rint", "positive"):
        return x
    if op == "square":
        return x * x
    if op in ("negative", "absolute", "invert", "sign"):
        return getattr(np, op)(x)
    if op in ("floor_divide", "remainder"):
        return _divided(op, type, x, y)
    if op in ("left_shift", "right_shift"):
        return _shifted(op, type, x, y)
    raise NotImplementedError(op)


def _divided(op: str, type: str, x: Array, y: Array) -> Array:
    if type == UINT64:
        found = getattr(np, op)(x, np.where(y == 0, np.uint64(1), y))
        return np.where(y == 0, np.uint64(0), found)
    wide_x, wide_y = np.asarray(x).astype(np.int64), np.asarray(y).astype(np.int64)
    found = getattr(np, op)(wide_x, np.where(wide_y == 0, 1, wide_y))
    return np.where(wide_y == 0, 0, found).astype(np.int32)


def _shifted(op: str, type: str, x: Array, count: Array) -> Array:
    width = 64 if type == UINT64 else 32
    inside = (count >= 0) & (count < width)
    kept = np.where(inside, count, 0).astype(count.dtype)
    nothing = np.zeros_like(x) if op == "left_shift" or type == UINT64 else np.where(x < 0, -1, 0)
    return np.where(inside, getattr(np, op)(x, kept), nothing).astype(np.asarray(x).dtype)
