"""Printing of expressions as C++ in generated functions of a row, a run of keys, or a pair."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from cupy_flash.mods.codegen.arguments import Captures
from cupy_flash.mods.codegen.members import Indices, Members
from cupy_flash.mods.ir.analysis import EXACT, STEPS, Analysis, Linear
from cupy_flash.mods.ir.expression import BOOL, INT, REAL, UINT64, Node, memoized
from cupy_flash.mods.ir.operations import COMPARISONS, OPERATIONS

C_TYPES = {BOOL: "bool", INT: "int", UINT64: "unsigned long long", REAL: "Real"}

# C++ text that costs nothing if it is repeated.
_PLAIN = re.compile(r"[\w.]+|a\.\w+ != 0")
# Longer text becomes a local variable even if it is used once, because compilers take more than
# linear time for deeply nested text.
_LONGEST = 500
# Comparison operators for negated operands.
_FLIPPED = {"<": ">", "<=": ">="}


class Printer:
    """Printer of a function's values as C++. A value that is used twice becomes a local.

    The printer adds the members of ``Row`` and ``Keys`` that it uses to `members`. `real` is the
    C++ type of reals, ``"float"`` or ``"double"``.
    """

    def __init__(self, members: Members, analysis: Analysis, captures: Captures, real: str) -> None:
        self.members, self.analysis = members, analysis
        self.captures, self.real = captures, real
        self._uses: Counter[Node] = Counter()
        self._known: dict[Node, str] = {}
        self._locals: list[str] | None = None

    def body(self, print_lines: Callable[[], Iterable[str]]) -> list[str]:
        """Return the statements of a function, after those of the locals that they use.

        Parameters
        ----------
        print_lines
            Function that prints the statements with `text`. The first of two calls counts uses.
        """
        self._uses, self._known, self._locals = Counter(), {}, None
        list(print_lines())
        self._known, self._locals = {}, []
        lines = list(print_lines())
        return [*self._locals, *lines]

    def text(self, node: Node) -> str:
        """Return a value as C++ that may be part of any expression."""
        text = memoized(node, self._known, self._operands, self._printed)
        if self._locals is None:
            self._uses[node] += 1
        return text

    def _printed(self, node: Node) -> str:
        """Return the C++ that refers to a value: the name of a local, or the text of the value."""
        text = self._print(node)
        if self._locals is None:
            # The first pass only counts uses, in time that is linear in the nodes.
            return "_"
        is_reused = self._uses[node] > 1 and not _PLAIN.fullmatch(text)
        if not is_reused and len(text) <= _LONGEST:
            return text
        name = f"t{len(self._locals)}"
        self._locals.append(f"const {C_TYPES[node.type]} {name} = {unwrapped(text)};")
        return name

    def _operands(self, node: Node) -> Iterable[Node]:
        """Return the nodes whose C++ becomes part of the C++ of a value."""
        return node.args

    def _print(self, node: Node) -> str:
        if node.is_constant:
            return literal(node.value, node.type, self.real)
        if node.op == "array":
            return f"a.{node.value}"
        if node.op == "scalar":
            return f"(a.{node.value} != 0)" if node.type == BOOL else f"a.{node.value}"
        return self._print_value(node)

    def _print_value(self, node: Node) -> str:
        """Return C++ of a value that is neither a literal nor an argument of the launch."""
        return self._print_operation(node)

    def _print_operation(self, node: Node) -> str:
        op, of_ints = node.op, node.type == INT
        if op == "load":
            return self._print_load(node)
        if op in ("floordiv", "mod") and of_ints and self._rounds_down(node):
            x, y = map(self.text, node.args)
            return f"int(unsigned({unwrapped(x)}) {'/' if op == 'floordiv' else '%'} {y}u)"
        if of_ints and (negation := self._negation(node)):
            return negation
        args = [self.text(argument) for argument in node.args]
        if op == "cast" and node.value != EXACT:
            return f"{_CASTS[node.type]}({unwrapped(args[0])})"
        if op == "where":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        if op == "cuda":
            return f"{self.members.function(node)}({', '.join(map(unwrapped, args))})"
        if node.value == EXACT:
            name = _EXACT_CASTS[node.type] if op == "cast" else f"exact_{op}"
            return _call(name, args)
        sign = OPERATIONS[op].sign if op in OPERATIONS else ""
        # Overflow of int is undefined in C++, but the functions ``mod_*`` wrap.
        if not sign or (of_ints and self.analysis.may_wrap(node)):
            return _call(f"mod_{op}", args)
        if len(args) == 1:
            return f"({'!' if node.type == BOOL else sign}{args[0]})"
        if op == "xor" and node.type == BOOL:
            sign = "!="
        return f"({args[0]} {sign} {args[1]})"

    def _negation(self, node: Node) -> str | None:
        """Return an integer's product with a negative constant as a call of ``mod_neg``.

        Compilers replace such products by negations, which some versions of ptxas miscompile; see
        `mod_neg` in `kernels_cu/score/functions.cuh`.
        """
        if node.op == "neg":
            return _call("mod_neg", [self.text(node.args[0])])
        if node.op == "sub" and node.args[0].is_constant and node.args[0].value == 0:
            return _call("mod_neg", [self.text(node.args[1])])
        if node.op != "mul":
            return None
        for x, factor in (node.args, node.args[::-1]):
            if factor.is_constant and -_INT_MAX <= factor.value < 0:
                size = -factor.value
                text = self.text(x)
                return _call("mod_neg", [_call("mod_mul", [text, str(size)]) if size > 1 else text])
        return None

    def _rounds_down(self, node: Node) -> bool:
        """Return whether C++'s integer quotient equals NumPy's, because no operand is negative."""
        x, y = node.args
        return y.is_constant and y.value > 0 and self.analysis.is_not_negative(x)

    def _print_load(self, node: Node) -> str:
        array, *indices = node.args
        text = ", ".join(unwrapped(self.text(index)) for index in indices)
        return self.as_real(node, f"a.{array.value}.at({text})")

    def as_real(self, load: Node, text: str) -> str:
        """Return C++ of an element that is read, converted if reals have another type."""
        is_double = self.captures[load.args[0].value].dtype == "float64"
        if load.type != REAL or is_double == (self.real == "double"):
            return text
        return _call("exact_narrowed" if is_double else "exact_widened", [text])

    def offsets(self, array: str, indices: Indices) -> list[str]:
        """Return C++ of the offset in an array that each index adds, in elements."""
        result = []
        for axis, index in indices:
            kind = "offset_from_0" if self.analysis.is_not_negative(index) else "offset"
            options = self.offset_options(array, axis, index)
            result.append(f"a.{array}.{kind}<{options}>({unwrapped(self.text(index))})")
        return result

    def offset_options(self, array: str, axis: int, index: Node) -> str:
        """Return the template arguments of an offset as C++."""
        return str(axis)

    def row_offset(self, array: str, indices: Indices) -> str:
        """Return C++ of the offset in an array that the row's indices add."""
        # Offsets are summed before they are added to the address: a sum of ints is one instruction.
        return " + ".join(self.offsets(array, indices))


class RowPrinter(Printer):
    """Printer for the function ``row``, in which symbols are parameters."""

    def _print_value(self, node: Node) -> str:
        return str(node.value) if node.op == "symbol" else self._print_operation(node)


class KeysPrinter(Printer):
    """Printer for the function ``keys``, with the first key, and the row's values in ``r``."""

    def _operands(self, node: Node) -> Iterable[Node]:
        is_member = self.analysis.is_of_row(node) or self.analysis.linear(node) is not None
        return () if is_member else node.args

    def _print_value(self, node: Node) -> str:
        if self.analysis.is_of_row(node):
            return self.members.value(node)
        linear = self.analysis.linear(node)
        if linear is not None:
            position = self.position(linear)
            return f"({position} + {linear.offset})" if linear.offset else f"({position})"
        return self._print_operation(node)

    def position(self, linear: Linear) -> str:
        """Return C++ of a position at the first key, without offset, saturated to int."""
        if not self.analysis.fits(linear.without_offset()):
            sizes = [f"{count}ll * {self.text(node)}" for node, count in linear.ordered_terms]
            return f"mod_saturated({' + '.join([*sizes, f'{linear.key}ll * first_key'])})"
        count = "first_key" if abs(linear.key) == 1 else f"{abs(linear.key)} * first_key"
        signed = count if linear.key > 0 else f"mod_neg({count})"
        if not linear.terms:
            return signed
        if all(factor < 0 for _, factor in linear.terms):
            # The row stores i for both i - j and j - i.
            return f"{signed} - {self.text(linear.times(-1).of_row())}"
        return f"{self.text(linear.of_row())} {'+' if linear.key > 0 else '-'} {count}"


class PairPrinter(Printer):
    """Printer for functions of a pair, with key ``first_key + step``, and start values in ``k``."""

    # Captures that are read by ``pairs.name(step, load)``.
    pairwise: frozenset[str] = frozenset()

    def _operands(self, node: Node) -> Iterable[Node]:
        if self.analysis.is_of_row(node) or self.analysis.linear(node) is not None:
            return ()
        if self.analysis.slope(node) is not None or self._compared(node) is not None:
            return ()
        if node.op == "load":
            return [x for x in node.args[1:] if not self.analysis.is_of_row(x)]
        return node.args

    def _print_value(self, node: Node) -> str:
        if self.analysis.is_of_row(node):
            return self.members.value(node)
        if node.op == "symbol" and node.value == "score":
            return "x"
        linear = self.analysis.linear(node)
        if linear is not None:
            return self._at_step(self.members.position(linear), linear)
        if node.type == REAL:
            slope = self.analysis.slope(node)
            if slope is not None:
                return f"({self.members.real(node)} {self._growth(slope)})"
        difference = self._compared(node)
        if difference is not None:
            return self._print_comparison(node, difference)
        return self._print_operation(node)

    def _at_step(self, position: str, linear: Linear) -> str:
        if linear.key == -1 and not linear.offset:
            return f"({position} - step)"
        steps = steps_text(linear.key, linear.offset)
        return f"({position} + ({steps}))" if " " in steps else f"({position} + {steps})"

    def offset_options(self, array: str, axis: int, index: Node) -> str:
        """Return template arguments of an offset; ``Inside`` if is_inside() checks the index."""
        return f"{axis}, Inside" if self._asks_for(array, axis, index) else str(axis)

    def _asks_for(self, array: str, axis: int, index: Node) -> bool:
        """Return whether ``Inside`` implies that an index is in bounds."""
        bounds = self._bounds(f"a.{array}.shape[{axis}]", index)
        self.members.bounds |= dict.fromkeys(bounds)
        return bool(bounds)

    def element(self, array: str, indices: Iterable[Node]) -> str:
        """Return C++ of the index, in C order, of the element of an array that is read."""
        element = "0ll"
        for axis, index in enumerate(indices):
            length, at = f"a.{array}.shape[{axis}]", unwrapped(self.text(index))
            nearest = f"max(0, min({at}, {length} - 1))"
            if not self.analysis.is_of_row(index) and self._asks_for(array, axis, index):
                nearest = f"(Inside ? {at} : {nearest})"
            element = f"({element} * {length} + {nearest})" if axis else f"(long long)({nearest})"
        return unwrapped(element)

    def _bounds(self, length: str, index: Node) -> list[str]:
        """Return C++ conditions for an index to be in bounds; [] if they are not known."""
        linear = self.analysis.linear(index)
        if linear is None or abs(linear.key) != 1:
            least, most = self.analysis.range(index)
            return [f"{int(most)} < {length}"] if least >= 0 and most < _INT_MAX else []
        position, offset = self.members.position(linear), linear.offset
        start = f"{position} {'+' if offset > 0 else '-'} {abs(offset)}" if offset else position
        end = f"{start} {'+' if linear.key > 0 else '-'} last"
        low, high = (start, end) if linear.key > 0 else (end, start)
        lowest = [] if self.analysis.is_not_negative(index) else [f"{low} >= 0"]
        return [*lowest, f"{high} < {length}"]

    def _growth(self, slope: Node) -> str:
        """Return C++ that adds what a real has grown by at a step; it follows the real."""
        if slope.is_constant and math.isfinite(slope.value) and slope.value == int(slope.value):
            sign = "-" if slope.value < 0 else "+"
            return f"{sign} Real({steps_text(abs(int(slope.value)), 0)})"
        if slope.op == "neg":
            return f"- {self.text(slope.args[0])} * Real(step)"
        return f"+ {self.text(slope)} * Real(step)"

    def _compared(self, node: Node) -> Linear | None:
        """Return the difference of compared integers if it is linear in the key, otherwise None."""
        if node.op not in COMPARISONS or node.args[0].type != INT:
            return None
        left, right = (self.analysis.linear(x) for x in node.args)
        if left is None or right is None or left.key == right.key:
            return None
        difference = left.plus(right, -1)
        is_small = abs(difference.offset) + abs(difference.key) * STEPS < _INT_MAX
        return difference if is_small else None

    def _print_comparison(self, node: Node, difference: Linear) -> str:
        """Return C++ of a comparison that is linear in the key: the step against a row's limit."""
        sign = OPERATIONS[node.op].sign
        if difference.key < 0:
            difference, sign = difference.times(-1), _FLIPPED.get(sign, sign)
        limit = self.members.position(difference.times(-1))
        return f"({steps_text(difference.key, difference.offset)} {sign} {limit})"

    def _print_load(self, node: Node) -> str:
        array, *indices = node.args
        axes = list(enumerate(indices))
        of_row = tuple((axis, x) for axis, x in axes if self.analysis.is_of_row(x))
        others = tuple((axis, x) for axis, x in axes if not self.analysis.is_of_row(x))
        name = array.value
        offsets = [self.members.row_offset(name, of_row)] if of_row else []
        offset = " + ".join(offsets + self.offsets(name, others))
        read = f"read_capture(a.{name}.data + ({offset}))"
        if name in self.pairwise:
            read = f"pairs.{name}(step, [&] {{ return {read}; }})"
        return self.as_real(node, read)


_CASTS = {INT: "int", UINT64: "(unsigned long long)", REAL: "Real"}
_EXACT_CASTS = {INT: "exact_int", UINT64: "exact_word", REAL: "Real"}
_INT_MAX = 2**31 - 1


def literal(value: bool | int | float, type: str, real: str) -> str:
    """Return a constant as C++."""
    if type == BOOL:
        return str(value).lower()
    if type == UINT64:
        return f"{value}ull"
    if type == INT:
        # C++ has no literal for the least int.
        lowest = f"({value + 1} - 1)" if value == -(2**31) else f"({value})"
        return str(value) if value >= 0 else lowest
    with np.errstate(over="ignore"):
        number = np.float32(value) if real == "float" else np.float64(value)
    if np.isnan(number):
        return "(0 * mod_infinity<Real>())"
    if np.isinf(number):
        return "mod_infinity<Real>()" if number > 0 else "(-mod_infinity<Real>())"
    text = f"{number!s}f" if real == "float" else str(number)
    return text if not text.startswith("-") else f"({text})"


def steps_text(key: int, offset: int) -> str:
    """Return C++ of ``key * step + offset``, a constant if the step is constant."""
    steps = "step" if key == 1 else f"{key} * step"
    if not offset:
        return steps
    return f"{steps} {'+' if offset > 0 else '-'} {abs(offset)}"


def unwrapped(text: str) -> str:
    """Return an expression without parentheses that enclose all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[1:-1] if place == len(text) - 1 else text
    return text


def _call(name: str, args: Iterable[str]) -> str:
    return f"{name}({', '.join(map(unwrapped, args))})"


def function_lines(declaration: str, body: Iterable[str]) -> list[str]:
    """Return the lines of a C++ function on the device."""
    head = f"static __device__ __forceinline__ {declaration} {{"
    return [head, *(f"  {line}" for line in body), "}"]
