"""Former faults of generated CUDA code. If a fault is put back, the random functions must find it.

Most faults are rewrites of the traced expression, which compute what the faulty code computed. The
others change a line of a header or a part of the library.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cupy_flash.families.contract import KERNEL_DIR
from cupy_flash.mods import base
from cupy_flash.mods.base import Modification
from cupy_flash.mods.ir import compose, lower
from cupy_flash.mods.ir.analysis import EXACT, ORDERED, Analysis
from cupy_flash.mods.ir.expression import (
    INT,
    REAL,
    SCORE,
    UINT64,
    J,
    Node,
    constant,
    fold,
    postorder,
)
from cupy_flash.mods.ir.operations import INT_RANGE, Range, cast, operation, rebuilt
from cupy_flash.mods.signature import parameters_of
from support.mods.function_runs import Case, wrong_on_cpu, wrong_on_host_text
from support.mods.random_functions import Function

Rule = Callable[[Node, tuple[Node, ...]], "Node | None"]


@dataclass(frozen=True)
class Fault:
    """Fault that can be put back.

    `rule` is a function of a node and its new arguments that returns a faulty node, or None to keep
    the node. `patches` are parts of the library: an object, the name of an attribute, and a
    function from the attribute to the faulty one.
    """

    rule: Rule | None = None
    patches: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = ()
    header: str = ""  # file in the folder of kernels, in which `new` replaces `old`
    old: str = ""
    new: str = ""
    concerns: str = ""  # pattern in the Python text of functions in which the fault may show
    on_cpu: bool = False  # whether the CPU backend has the fault
    stops: bool = False  # whether generated source with the fault does not compile

    def rewrite(self, expression: Node) -> Node:
        """Return the expression with the fault."""
        rule = self.rule
        if rule is None:
            return expression
        return fold(expression, lambda node, args: rule(node, args) or rebuilt(node, args))

    @contextlib.contextmanager
    def put_back(self, folder: Path) -> Iterator[Path]:
        """Patch the library while the context lasts, and yield the folder of the headers."""
        headers = KERNEL_DIR
        if self.header:
            headers = folder / "kernels"
            shutil.copytree(KERNEL_DIR, headers, dirs_exist_ok=True)
            path = headers / self.header
            text = path.read_text(encoding="utf-8")
            assert self.old in text, f"{self.header} has other text now"
            path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, make in self.patches:
                patch.setattr(owner, name, make(getattr(owner, name)))
            yield headers

    def found(
        self, folder: Path, cases: Sequence[Case], headers: Path = KERNEL_DIR
    ) -> dict[int, str]:
        """Return how results of functions are wrong because of the fault, by function number."""
        if self.on_cpu:
            wrong = {case.function.number: wrong_on_cpu(case) for case in cases}
        else:
            how = {"kernel_dir": headers, "rewrite": self.rewrite}
            wrong = dict(wrong_on_host_text(folder, cases, **how))
        # A failed generation or compilation does not reveal a fault, unless the fault causes it.
        others = ("raises",) if self.stops else ("raises", "does not compile")
        return {n: why for n, why in wrong.items() if why and not why.startswith(others)}

    def may_show(self, function: Function, expression: Node) -> bool:
        """Return whether the fault may show in a function."""
        if re.search(self.concerns, function.text) is None:
            return False
        return self.rule is None or self.rewrite(expression) is not expression


def _real(x: float) -> Node:
    return constant(x, REAL)


def _quotient_as_product(node: Node, args: tuple[Node, ...]) -> Node | None:
    if node.op != "div":
        return None
    x, y = args
    if y.is_constant:
        return operation("mul", x, _real(1 / y.value)) if y.value else None
    return operation("mul", x, operation("div", _real(1), y))


def _stepped(node: Node, args: tuple[Node, ...]) -> Node | None:
    """Return a product with the key position as a product of an earlier key plus float steps."""
    if node.op not in ("mul", "div") or node.type != REAL or args[0] is not cast(J, REAL):
        return None
    first = cast(operation("sub", J, constant(7, INT)), REAL)
    begin, step = (operation(node.op, x, args[1]) for x in (first, _real(7)))
    return operation("add", begin, step)


def _unsigned_remainder(node: Node, args: tuple[Node, ...]) -> Node | None:
    if node.op not in ("mod", "floordiv") or node.type != INT or not args[1].is_constant:
        return None
    if args[1].value <= 0:
        return None
    low = operation("and", cast(args[0], UINT64), constant(2**32 - 1, UINT64))
    return cast(operation(node.op, low, constant(args[1].value, UINT64)), INT)


def _index_from_above(node: Node, args: tuple[Node, ...]) -> Node | None:
    """Return a load whose wrapped negative index is clamped from above only."""
    if node.op != "load":
        return None
    last, zero = constant(2**31 - 1, INT), constant(0, INT)
    indices = [
        operation("where", operation("lt", x, zero), last, x) if _wraps(x) else x for x in args[1:]
    ]
    return Node("load", node.type, (args[0], *indices))


def _wraps(index: Node) -> bool:
    return any(node.op == "mul" for node in postorder(index) if node.type == INT)


def _difference_of_reals(node: Node, args: tuple[Node, ...]) -> Node | None:
    """Return the conversion of an integer to a float, with the parts converted separately."""
    if node.op != "cast" or node.type != REAL or args[0].type != INT:
        return None
    return _by_parts(args[0])


def _by_parts(x: Node) -> Node:
    if x.op in ("add", "sub", "neg", "abs", "min", "max"):
        return operation(x.op, *map(_by_parts, x.args))
    return cast(x, REAL)


def _split_offset(node: Node, args: tuple[Node, ...]) -> Node | None:
    if node.op != "add" or node.type != REAL:
        return None
    for x, y in (args, args[::-1]):
        if x is SCORE and y.op == "cast" and y.args[0].op == "sub":
            y = operation("sub", *(cast(part, REAL) for part in y.args[0].args))
        if x is SCORE and y.op == "sub":
            return operation("sub", operation("add", x, y.args[0]), y.args[1])
    return None


def _scaled(node: Node, args: tuple[Node, ...]) -> Node | None:
    if node.op != "strict":
        return None
    scaled = operation("mul", args[0], _real(math.log2(math.e)))
    return operation("strict", operation("mul", scaled, _real(math.log(2))))


def _floor_of_quotient(node: Node, args: tuple[Node, ...]) -> Node | None:
    """Return a floor division by the former formula, which gives NaN for infinite divisors."""
    if node.op != "floordiv" or node.type != REAL:
        return None
    x, y = args
    difference = operation("sub", x, operation("mod", x, y))
    return operation("floor", operation("div", difference, y))


def _inverse_flushed(node: Node, args: tuple[Node, ...]) -> Node | None:
    """Return a quotient in which a subnormal inverse of the divisor becomes 0."""
    if node.op != "div":
        return None
    x, y = args
    is_large = operation("lt", _real(2.0**126), operation("abs", y))
    inverse = operation("where", is_large, _real(0), operation("div", _real(1), y))
    return operation("where", is_large, operation("mul", x, inverse), operation("div", x, y))


def _power_by_logarithm(node: Node, args: tuple[Node, ...]) -> Node | None:
    if node.op not in ("power", "pow", "sqrt"):
        return None
    n = 0.5 if node.op == "sqrt" else args[1].value
    logarithm = operation("log2", args[0])
    return operation("exp2", operation("mul", logarithm, _real(n)))


def _one_zero(node: Node, args: tuple[Node, ...]) -> Node | None:
    """Return a captured number in which -0.0 becomes 0.0."""
    if node.op != "scalar" or node.type != REAL:
        return None
    is_zero = operation("eq", node, _real(0))
    return operation("where", is_zero, _real(0), node)


def _cast_wraps(node: Node, args: tuple[Node, ...]) -> Node | None:
    """Return a cast that maps floats out of range to the least integer, as some CPUs do."""
    if node.op != "cast" or node.type != INT or args[0].type != REAL:
        return None
    inside = operation("lt", operation("abs", args[0]), _real(2.0**31))
    return operation("where", inside, Node("cast", INT, args), constant(-(2**31), INT))


# ---- Former versions of parts of the library


def _never_wrapping(range_of: Any) -> Any:
    """Return a range analysis that assumes that no integer wraps."""

    def range(self: Analysis, node: Node) -> Range:
        range_of(self, node)
        low, high = self._exact_ranges[node]
        if node.type != INT:
            return range_of(self, node)
        return max(low, INT_RANGE[0]), min(high, INT_RANGE[1])

    return range


def _without_manner(find: Any) -> Any:
    """Return a slope analysis that ignores that user expressions must keep their order."""

    def find_slope(self: Analysis, node: Node) -> Node | None:
        is_users = node.type == REAL and node.value in (ORDERED, EXACT)
        return find(self, Node(node.op, node.type, node.args) if is_users else node)

    return find_slope


def _all_summands(summands: Any) -> Any:
    def of(node: Node, sign: int) -> Iterator[tuple[Node, int]]:
        if node.op in ("add", "sub"):
            yield from of(node.args[0], sign)
            yield from of(node.args[1], -sign if node.op == "sub" else sign)
        else:
            yield node, sign

    return of


def _none_is_large(may_be_large: Any) -> Any:
    return lambda term, is_large: False


def _same_key(number_key: Any) -> Any:
    """Return a function that uses a number as its own key, so that 0.0 equals -0.0."""
    return lambda value: value


def _unprefixed(prefixed: Any) -> Any:
    return lambda kind, name: name


def _traced_anew(evaluate: Any) -> Any:
    """Return an evaluation that traces again, and so reads the present values of variables."""

    def evaluated(self: Modification, *args: Any) -> Any:
        names = parameters_of(self.function, self._first, self.specs)
        object.__setattr__(self, "_graph", self._traced(self.function, names, self.specs))
        return evaluate(self, *args)

    return evaluated


_LARGE = r"e\+38"

# Faults by description; the number at its start is the kind of fault.
FAULTS: dict[str, Fault] = {
    "1: a quotient is a product with the inverse": Fault(
        _quotient_as_product, concerns=r"(floor|trunc|rint|ceil)\((np.divide\(|\()[ij][, ]"
    ),
    "1: a product with the key is stepped along": Fault(_stepped),
    "1: what the user wrote grows evenly along keys": Fault(
        patches=((Analysis, "_find_slope", _without_manner),), concerns=r"floor|astype|\* 0\."
    ),
    "2: a remainder of what wraps is unsigned": Fault(_unsigned_remainder),
    "2: an index that wraps is clamped from above": Fault(_index_from_above),
    "2: integers are taken not to wrap": Fault(
        patches=((Analysis, "range", _never_wrapping),), concerns=r"j \* |j, \d{4}|multiply"
    ),
    "3: differences of integers are those of reals": Fault(_difference_of_reals),
    "4: a sum is taken apart": Fault(_split_offset),
    "4: log2(e) is distributed over the user's sums": Fault(
        patches=((lower, "_summands", _all_summands),), concerns=r"score \+"
    ),
    "5: scores overflow times log2(e)": Fault(_scaled, concerns=_LARGE),
    "5: a sum with a large leaf is like any other": Fault(
        patches=((lower, "_may_be_large", _none_is_large),), concerns=_LARGE
    ),
    "6: a whole quotient by infinity": Fault(_floor_of_quotient),
    "6: inverses of large divisors are flushed": Fault(_inverse_flushed),
    "6: powers by logarithms": Fault(_power_by_logarithm),
    "6: powers that decide by logarithms": Fault(
        header="score/exact.cuh",
        old="exact_narrowed(exact_power(ptx::cvt_f64_f32(x), ptx::cvt_f64_f32(n)))",
        new="exact_exp2(n * exact_log2(x))",
        concerns=r"\*\*|power",
    ),
    "6: zeros without a sign": Fault(_one_zero),
    "6: calls with 0.0 and -0.0 are one": Fault(
        patches=((base, "number_key", _same_key),), concerns="reciprocal|/"
    ),
    "6: captures have the names of parameters": Fault(
        patches=((base, "prefixed", _unprefixed), (compose, "prefixed", _unprefixed)),
        concerns=r"\b(xor|bitand|typeid)\b",
        stops=True,
    ),
    "6: the CPU backend follows what helpers read": Fault(
        patches=((Modification, "_evaluate", _traced_anew),), concerns=r"\bg0\b", on_cpu=True
    ),
    "casts wrap": Fault(_cast_wraps),
    "whole quotients round toward zero": Fault(
        header="score/functions.cuh",
        old="return quotient - ((x % y != 0) & ((x < 0) != (y < 0)));",
        new="return quotient;",
        concerns="//|floor_divide",
    ),
}
