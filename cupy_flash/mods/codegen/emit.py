"""Generated CUDA source of modifications: the structs ``ModArguments`` and ``Mods``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from cupy_flash.mods.codegen.arguments import (
    Captures,
    arguments_struct,
    capture_type,
    offset_type,
    real_type,
)
from cupy_flash.mods.codegen.members import Members
from cupy_flash.mods.codegen.printer import (
    C_TYPES,
    KeysPrinter,
    PairPrinter,
    Printer,
    RowPrinter,
    function_lines,
    unwrapped,
)
from cupy_flash.mods.ir.analysis import Analysis
from cupy_flash.mods.ir.derivative import Partial, Slopes
from cupy_flash.mods.ir.expression import REAL, SCORE, TRUE, Node, constant, postorder
from cupy_flash.mods.ir.lower import exponent, lower
from cupy_flash.mods.ir.operations import ONE, operation, substitute

PrinterT = TypeVar("PrinterT", bound=Printer)

# Headers that a translation unit includes before the generated source.
HEADERS = ("score/capture.cuh", "score/functions.cuh")

# Operations that use the special function unit of an SM.
_FUNCTIONS = frozenset(
    {"tanh", "tanh_approx", "logistic", "exp", "exp2", "log", "log2", "sqrt", "sin", "cos"}
    | {"power", "power_approx"}
)

# Line of generated source that declares that scores may become the lowest finite number.
LOW_SCORES = "static constexpr bool has_low_scores = true;"

# Name of the capture that holds the softmax scale.
SCALE = "softmax_scale"

_ROW_PARAMETERS = (
    "const ModArguments& a, int b, int h, int i, int row, int q_start, int k_start, Real base"
)
_KEYS_PARAMETERS = "const ModArguments& a, const Row& r, int first_key"
_BOUNDS_PARAMETERS = "const ModArguments& a, const Row& r, const Keys& k, int last"
_PAIR_PARAMETERS = "const ModArguments& a, const Row& r, const Keys& k, int step"
_SCATTER_PARAMETERS = f"{_PAIR_PARAMETERS}, Real x, Real weight, Add&& add"


def emit(
    score: Node | None,
    visible: Node | None,
    captures: Captures,
    *,
    dtype: str = "float32",
    pairwise: frozenset[str] = frozenset(),
    slopes: Slopes | None = None,
) -> str:
    """Return C++ of the structs through which a kernel changes scores and masks pairs.

    ``Mods`` has the constants ``changes_scores``, ``masks_pairs``, ``calls_functions`` (each score
    uses the special function unit) and ``has_low_scores`` (a finite score may become the lowest
    finite exponent of two). It also has these functions. A kernel calls ``row`` for a query row,
    ``keys`` for that row and a run of keys, and the others for each pair:

    - ``Row row(a, b, h, i, row, q_start, k_start, base)``,
    - ``Keys keys(a, row, first_key)``,
    - ``Real exponent(a, row, keys, step, x, pairs)``, which is log2(e) times the new score, minus
      the base, for the key ``first_key + step``, where x is the product of query and key,
    - ``bool is_visible(a, row, keys, step)``, which is whether the pair is visible.

    ``exponent`` and ``is_visible`` have a variant ``Inside`` for pairs whose array indices are in
    bounds. ``has_bounds`` says that the variant differs, and ``bool is_inside(a, row, keys, last)``
    whether it may be used for all steps from 0 to ``last``.

    ``step`` should be a constant after unrolling. ``row`` computes values that are constant along a
    row, and ``keys`` computes values that are linear in the key, for ``first_key``. The other
    functions only add multiples of ``step``. Equal arguments give the same source.

    For a backward pass, with `slopes`, there are also

    - ``changes_slope``, false if new scores have derivative 1 with respect to scaled scores,
    - ``Real slope(a, row, keys, step, x, pairs)``, that derivative, for the same x as
      ``exponent``; it may be NaN or infinite for masked pairs,
    - ``differentiable``, the number of captures with gradients, and ``loads``, the number of their
      elements that a pair reads at most,
    - ``void for_each_differentiable(a, function)``, which calls ``function(number, capture)`` for
      each,
    - ``void scatter(a, row, keys, step, x, weight, add)``, which calls ``add(number, element,
      gradient)`` for each load of such a capture, with its number, the index of the element in C
      order, and the product of ``weight``, the gradient of the new score, with the derivative.
      The product is 0 if the weight is.

    Parameters
    ----------
    score
        New score as a function of the scaled score; None leaves scores unchanged. If there is a new
        score, the captures include `SCALE`.
    visible
        Mask, a bool expression; None masks nothing.
    captures
        Specs of all arrays and numbers that the expressions read.
    dtype
        Dtype of queries and keys. For 16-bit dtypes, functions use the hardware's powers of 2, with
        an error below that of the dtype. For bfloat16, tanh is the hardware's instruction.
    pairwise
        Captures with one element per score, which the kernel may have loaded already. They are read
        by ``pairs.name(step, load)``, which by default returns ``load()``.
    slopes
        Derivatives of the new score, for a backward pass.

    Returns
    -------
    str
        C++ source, to be placed after the headers of `HEADERS`.
    """
    return _Emission(captures, dtype, pairwise).text(
        score, TRUE if visible is None else visible, slopes
    )


class _Emission:
    def __init__(self, captures: Captures, dtype: str, pairwise: frozenset[str]) -> None:
        self._captures, self._dtype, self._real = captures, dtype, real_type(dtype)
        self._pairwise = pairwise
        self._analysis, self._members = Analysis(), Members()

    def text(self, score: Node | None, visible: Node, slopes: Slopes | None) -> str:
        members = self._members
        power = constant(0, REAL)
        if score is not None:
            lowered = self._lowered(_of_product(score))
            power = exponent(lowered, self._analysis, self._is_large, fast=self._is_fast)
        # Printed first: members that these functions use have to be computed by keys() and row().
        power_text = self._returned(power, self._pairwise)
        visible_text = self._returned(self._lowered(visible, exact=True), frozenset())
        constants, functions = ([], []) if slopes is None else self._backward(slopes)
        keys_text, row_text = self._found_for_keys(), self._found_for_row()
        row_fields = [f"{C_TYPES[node.type]} {name};" for node, name in members.values.items()]
        row_fields += [
            f"{offset_type(self._captures[array])} {name};"
            for (array, _), name in members.row_offsets.items()
        ]
        keys_fields = [f"int {name};" for name, _ in members.positions.values()]
        keys_fields += [f"Real {name};" for name in members.reals.values()]
        lines = [
            f"using Real = {self._real};",
            f"static constexpr bool changes_scores = {_bool(score is not None)};",
            f"static constexpr bool masks_pairs = {_bool(visible is not TRUE)};",
            f"static constexpr bool has_bounds = {_bool(bool(members.bounds))};",
            f"static constexpr bool calls_functions = {_bool(self._calls_functions(power))};",
            f"static constexpr bool has_low_scores = {_bool(_has_low_scores(power))};",
            *constants,
            *_struct("Row", row_fields),
            *_struct("Keys", keys_fields),
            *self._functions(),
            *function_lines(f"Row row({_ROW_PARAMETERS})", ["Row r;", *row_text, "return r;"]),
            *function_lines(f"Keys keys({_KEYS_PARAMETERS})", ["Keys k;", *keys_text, "return k;"]),
            *self._is_inside(),
            *_function_of_score("exponent", power_text),
            "template <bool Inside = false>",
            *function_lines(f"bool is_visible({_PAIR_PARAMETERS})", visible_text),
            *functions,
        ]
        struct = "\n".join(["struct Mods {", *(f"  {line}" for line in lines), "};"])
        return f"{arguments_struct(self._captures, self._real)}\n\n{struct}\n"

    def _backward(self, slopes: Slopes) -> tuple[list[str], list[str]]:
        """Return the constants and functions of ``Mods`` for a backward pass."""
        of_slope = self._returned(self._lowered(_of_product(slopes.slope)), self._pairwise)
        constants = [
            f"static constexpr bool changes_slope = {_bool(slopes.slope is not ONE)};",
            f"static constexpr int differentiable = {len(slopes.names)};",
            f"static constexpr int loads = {len(slopes.partials)};",
        ]
        calls = [f"function({number}, a.{name});" for number, name in enumerate(slopes.names)]
        functions = [
            "template <class Function>",
            *function_lines(
                "void for_each_differentiable(const ModArguments& a, Function&& function)", calls
            ),
            *_function_of_score("slope", of_slope),
            "template <bool Inside = false, class Add>",
            *function_lines(f"void scatter({_SCATTER_PARAMETERS})", self._scatter(slopes.partials)),
        ]
        return constants, functions

    def _scatter(self, partials: tuple[Partial, ...]) -> list[str]:
        printer = self._printer(PairPrinter)
        lowered = [(x, self._lowered(_of_product(x.derivative))) for x in partials]

        def lines() -> Iterator[str]:
            for partial, factor in lowered:
                array, *indices = partial.load.args
                element = printer.element(array.value, map(self._lowered, indices))
                weight = "weight"
                if factor is not ONE:
                    # The product must be 0 for a masked pair, also if the factor is NaN.
                    weight = f"weight != 0 ? weight * {printer.text(factor)} : 0"
                yield f"add({partial.number}, {element}, {weight});"

        return printer.body(lines)

    @property
    def _is_fast(self) -> bool:
        return self._dtype in ("float16", "bfloat16")

    def _lowered(self, node: Node, *, exact: bool = False) -> Node:
        fast_tanh = self._dtype == "bfloat16"
        return lower(node, self._analysis, fast=self._is_fast, fast_tanh=fast_tanh, exact=exact)

    def _is_large(self, node: Node) -> bool:
        """Return whether log2(e) times a finite leaf may be infinite.

        Products of queries and keys are assumed not to be so large.
        """
        if node.op == "load":
            return node.type == REAL and self._captures[node.args[0].value].dtype != "float16"
        if node.is_constant:
            largest = 2.0**127 if self._real == "float" else 2.0**1023
            return abs(node.value) >= largest
        return node.op == "cuda" or (node.op == "scalar" and node.value not in (SCALE, "softcap"))

    def _printer(self, kind: type[PrinterT]) -> PrinterT:
        return kind(self._members, self._analysis, self._captures, self._real)

    def _returned(self, node: Node, pairwise: frozenset[str]) -> list[str]:
        printer = self._printer(PairPrinter)
        printer.pairwise = pairwise
        return printer.body(lambda: [f"return {unwrapped(printer.text(node))};"])

    def _found_for_keys(self) -> list[str]:
        printer, members = self._printer(KeysPrinter), self._members

        def lines() -> Iterator[str]:
            for name, linear in members.positions.values():
                yield f"k.{name} = {printer.position(linear)};"
            for node, name in members.reals.items():
                yield f"k.{name} = {unwrapped(printer.text(node))};"

        return printer.body(lines)

    def _found_for_row(self) -> list[str]:
        printer, members = self._printer(RowPrinter), self._members

        def lines() -> Iterator[str]:
            for node, name in members.values.items():
                yield f"r.{name} = {unwrapped(printer.text(node))};"
            for (array, indices), name in members.row_offsets.items():
                yield f"r.{name} = {printer.row_offset(array, indices)};"

        return printer.body(lines)

    def _calls_functions(self, power: Node) -> bool:
        return any(
            node.op in _FUNCTIONS and not self._analysis.is_of_row(node)
            for node in postorder(power)
        )

    def _is_inside(self) -> list[str]:
        if not self._members.bounds:
            return []
        body = f"return {' && '.join(self._members.bounds)};"
        return function_lines(f"bool is_inside({_BOUNDS_PARAMETERS})", [body])

    def _functions(self) -> Iterator[str]:
        """Yield functions of the user's CUDA source, with the Python functions' parameters."""
        for name, node in self._members.functions.values():
            text, parameters = node.value
            declared = ", ".join(
                f"{self._parameter_type(argument)} {parameter}"
                for parameter, argument in zip(parameters, node.args, strict=True)
            )
            yield from function_lines(f"{C_TYPES[node.type]} {name}({declared})", text.splitlines())

    def _parameter_type(self, argument: Node) -> str:
        if argument.op != "array":
            return C_TYPES[argument.type]
        return f"const {capture_type(self._captures[argument.value], self._real)}&"


def _has_low_scores(power: Node) -> bool:
    return any(node.op in ("finite_sum", "fast_finite_sum") for node in postorder(power))


def _of_product(node: Node) -> Node:
    """Return an expression with the score replaced by the scale times the product of q and k."""
    scale = Node("scalar", REAL, (), SCALE)
    return substitute(node, {SCORE: operation("mul", SCORE, scale)})


def _function_of_score(name: str, body: list[str]) -> list[str]:
    declaration = f"Real {name}({_PAIR_PARAMETERS}, Real x, const Pairs& pairs = {{}})"
    template = "template <bool Inside = false, class Pairs = LoadOnDemand>"
    return [template, *function_lines(declaration, body)]


def _bool(value: bool) -> str:
    return str(value).lower()


def _struct(name: str, fields: list[str]) -> list[str]:
    return [f"struct {name} {{", *(f"  {field}" for field in fields), "};"]
