"""Generated CUDA source that bounds a mask over ranges of positions: the struct ``MaskBounds``.

It finds blocks of the score matrix that a mask leaves empty or full by interval arithmetic
(`kernels_cu/block_mask/bounds.cuh`), without computing pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from cupy_flash.mods.codegen.arguments import Captures, real_type
from cupy_flash.mods.codegen.members import Members
from cupy_flash.mods.codegen.printer import RowPrinter, function_lines, literal, unwrapped
from cupy_flash.mods.ir.analysis import Analysis
from cupy_flash.mods.ir.expression import ARRAY, BOOL, INT, REAL, UINT64, Node, memoized, postorder
from cupy_flash.mods.ir.lower import lower
from cupy_flash.mods.ir.operations import COMPARISONS, OPERATIONS

# Headers that a unit includes before the source, in addition to those of `codegen.emit`.
HEADERS = ("block_mask/bounds.cuh",)
# Largest size of a range in bytes: two doubles and a bool.
RANGE_BYTES = 24

_TYPES = {BOOL: "Truth", INT: "Ints", UINT64: "Words", REAL: "Reals"}
_CASTS = {INT: "ints_of", UINT64: "words_of", REAL: "reals_of<Real>"}
_BITS = {"and": "bit_and", "or": "bit_or", "xor": "bit_xor", "not": "bit_not"}
# Limits of the terms of a sum and of their factors, so that the sum fits 64 bits.
_MOST_TERMS, _LARGEST_FACTOR = 8, 1 << 20

_POSITIONS = "const ModArguments& a, int b, int h, int {}, int q_start, int k_start"


class Bounds(NamedTuple):
    """Source of ``MaskBounds``, and the number of ranges of positions that it stores.

    Attributes
    ----------
    text
        C++ source, to be placed after the headers and ``ModArguments``.
    row_ranges, key_ranges
        Number of ranges in ``MaskBounds::Rows`` and in ``MaskBounds::Keys``.
    """

    text: str
    row_ranges: int
    key_ranges: int


def emit_bounds(visible: Node, captures: Captures, *, dtype: str = "float32") -> Bounds:
    """Return C++ of the struct ``MaskBounds``, which has the following functions.

    - ``Visibility classify(a, b, h, i_low, i_high, j_low, j_high, q_start, k_start, rows, keys)``:
      over all pairs of two inclusive ranges, ``Visibility::all`` only if every pair is visible,
      ``Visibility::none`` only if none is, otherwise ``Visibility::some``.
    - ``Rows rows_at(a, b, h, i, q_start, k_start)``, ``Keys keys_at(a, b, h, j, ...)``: ranges, at
      one position, of values that read captured arrays and depend on that position alone;
      ``join(x, y)`` extends x to include y, and ``classify`` takes them joined over its ranges.
    - ``each(x, f)``: calls f with every range of x.

    Parameters
    ----------
    visible
        Expression of the mask.
    captures
        Specs of the arrays and numbers that the expression reads.
    dtype
        Dtype as in `codegen.emit.emit`, whose source computes the values that are bounded.
    """
    return _Emission(captures, dtype).bounds(visible)


class _NodeInfo(NamedTuple):
    """Dependencies of a value, and whether it can be printed.

    Attributes
    ----------
    positions
        Positions, i or j, on which the value depends.
    reads
        Whether the value reads an array.
    is_plain
        Whether `RowPrinter` can print the value.
    """

    positions: frozenset[str]
    reads: bool
    is_plain: bool


class _Sum(NamedTuple):
    """An integer as a sum of multiples of nodes, plus a constant."""

    terms: dict[Node, int]
    offset: int

    def plus(self, other: _Sum, factor: int) -> _Sum:
        terms = dict(self.terms)
        for node, count in other.terms.items():
            terms[node] = terms.get(node, 0) + factor * count
        kept = {node: count for node, count in terms.items() if count}
        return _Sum(kept, self.offset + factor * other.offset)

    @property
    def fits(self) -> bool:
        """Whether bounds of the sum can be computed in 64 bits."""
        factors = [*self.terms.values(), self.offset >> 31]
        return len(self.terms) <= _MOST_TERMS and all(abs(n) <= _LARGEST_FACTOR for n in factors)


class _Emission:
    def __init__(self, captures: Captures, dtype: str) -> None:
        self._captures, self._dtype, self._real = captures, dtype, real_type(dtype)
        self._analysis = Analysis()
        self._node_info: dict[Node, _NodeInfo] = {}
        self._sums: dict[Node, _Sum] = {}
        self._known: dict[Node, str] = {}
        self._locals: list[str] = []
        # Positions, i or j, whose range the generated source refers to.
        self._named_ends: set[str] = set()
        # Names of values that depend on no position; on the row alone; on the key alone.
        self._points: dict[Node, str] = {}
        self._rows: dict[Node, str] = {}
        self._keys: dict[Node, str] = {}

    def bounds(self, visible: Node) -> Bounds:
        # Lowered as for kernels, which compute all values of a mask exactly for any dtype.
        root = lower(visible, self._analysis, fast=False, fast_tanh=False, exact=True)
        for node in postorder(root):
            self._node_info[node] = self._find_node_info(node)
            if node.type == INT:
                self._sum(node)
        result = unwrapped(self._text(root))
        points = self._printed(
            self._points, lambda node, name: f"const {_TYPES[node.type]} {name} = "
        )
        classify = [
            *(f"const Ints {x} = {{{x}_low, {x}_high}};" for x in "ij" if x in self._named_ends),
            *points,
            *self._locals,
            f"return visibility_of({result});",
        ]
        ranges = "int i_low, int i_high, int j_low, int j_high"
        given = _POSITIONS.replace("int {}", ranges) + ", const Rows& rows, const Keys& keys"
        lines = [
            f"using Real = {self._real};",
            "using Reals = RealRange<Real>;",
            f"static constexpr int row_ranges = {len(self._rows)};",
            f"static constexpr int key_ranges = {len(self._keys)};",
            *self._of_positions("Rows", "rows", "i", self._rows),
            *self._of_positions("Keys", "keys", "j", self._keys),
            *function_lines(f"Visibility classify({given})", classify),
        ]
        text = "\n".join(["struct MaskBounds {", *(f"  {line}" for line in lines), "};"]) + "\n"
        return Bounds(text, len(self._rows), len(self._keys))

    def _find_node_info(self, node: Node) -> _NodeInfo:
        argument_infos = [self._node_info[x] for x in node.args]
        positions = frozenset[str]().union(*(info.positions for info in argument_infos))
        is_plain = all(info.is_plain for info in argument_infos)
        if node.op == "symbol":
            # Row indices and scores are not passed to the functions of ``MaskBounds``.
            is_known = node.value not in ("row", "score")
            return _NodeInfo(positions | ({node.value} & {"i", "j"}), False, is_known)
        if node.op == "cuda":
            # The user's CUDA source is not analyzed, and may read arrays.
            return _NodeInfo(positions, True, False)
        reads = node.op == "load" or any(info.reads for info in argument_infos)
        return _NodeInfo(positions, reads, is_plain)

    def _text(self, node: Node) -> str:
        """Return a value's range as C++."""
        return memoized(node, self._known, self._operands, self._find_text)

    def _operands(self, node: Node) -> Iterable[Node]:
        """Return the nodes whose C++ becomes part of the C++ of a value."""
        if node.is_constant or (self._node_info[node].is_plain and not self._is_operation(node)):
            return ()
        if node.type == INT and node.op not in ("cast", "where", "load"):
            total = self._sum(node)
            if node not in total.terms and total.fits:
                return total.terms
        return [x for x in node.args if x.type != ARRAY]

    def _is_operation(self, node: Node) -> bool:
        """Return whether the range of a value is computed from the ranges of its arguments."""
        info = self._node_info[node]
        is_looked_up = not info.positions or (info.reads and len(info.positions) == 1)
        return not is_looked_up and node.op != "symbol"

    def _find_text(self, node: Node) -> str:
        if node.is_constant:
            return f"range_at({literal(node.value, node.type, self._real)})"
        info = self._node_info[node]
        if info.is_plain:
            if not info.positions:
                return self._points.setdefault(node, f"p{len(self._points)}")
            if info.reads and info.positions == {"i"}:
                return "rows." + self._rows.setdefault(node, f"v{len(self._rows)}")
            if info.reads and info.positions == {"j"}:
                return "keys." + self._keys.setdefault(node, f"v{len(self._keys)}")
            if node.op == "symbol":
                self._named_ends.add(node.value)
                return str(node.value)
        return self._named(node, self._operation(node))

    def _named(self, node: Node, text: str) -> str:
        # The name differs from those of locals that the printer adds to the same function.
        name = f"x{len(self._locals)}"
        self._locals.append(f"const {_TYPES[node.type]} {name} = {text};")
        return name

    def _operation(self, node: Node) -> str:
        op, kind = node.op, node.type
        if op in COMPARISONS:
            return self._comparison(node)
        if op == "cast":
            return self._call(_CASTS[kind], *node.args)
        if op == "where":
            return self._call("range_where", *node.args)
        if op == "load":
            return self._load(node)
        if op not in OPERATIONS or kind not in OPERATIONS[op].bounded:
            return f"{_TYPES[kind]}::any()"
        if kind == INT:
            total = self._sum(node)
            if node not in total.terms and total.fits:
                low, high = self._ends(total)
                return f"range_of({low}, {high})"
        name = _BITS.get(op, op) if kind in (INT, UINT64) else op
        return self._call(f"range_{name}", *node.args)

    def _load(self, node: Node) -> str:
        """Return C++ of the range of an element, known if each index has one possible value."""
        array, *indices = node.args
        ranges = [self._text(index) for index in indices]
        conditions = " && ".join(f"is_single_value({x})" for x in ranges)
        element = f"a.{array.value}.at({', '.join(f'int({x}.low)' for x in ranges)})"
        if node.type == REAL:
            element = RowPrinter(Members(), self._analysis, self._captures, self._real).as_real(
                node, element
            )
        return f"{conditions} ? range_at({element}) : {_TYPES[node.type]}::any()"

    def _call(self, name: str, *args: Node) -> str:
        return f"{name}({', '.join(map(self._text, args))})"

    def _comparison(self, node: Node) -> str:
        left, right = node.args
        if left is right:
            # Only NaN differs from itself.
            is_nan = self._call("range_is_nan", left)
            texts = {"lt": "range_at(false)", "ne": is_nan}
            return texts.get(node.op, f"range_not({is_nan})")
        if left.type == INT:
            x, y = self._sum(left), self._sum(right)
            difference = x.plus(y, -1)
            if not x.terms.keys().isdisjoint(y.terms) and difference.fits:
                ends = ", ".join(self._ends(difference))
                # Terms may cancel only if neither side wraps.
                fits = " && ".join(f"are_ints({', '.join(self._ends(side))})" for side in (x, y))
                whole = self._call(f"range_{node.op}", left, right)
                return f"{fits} ? range_{node.op}(Ints{{{ends}}}, range_at(0)) : {whole}"
        return self._call(f"range_{node.op}", left, right)

    def _sum(self, node: Node) -> _Sum:
        known = self._sums.get(node)
        if known is None:
            known = self._sums[node] = self._find_sum(node)
        return known

    def _find_sum(self, node: Node) -> _Sum:
        if node.is_constant:
            return _Sum({}, node.value)
        info = self._node_info[node]
        # A value whose range is looked up, not computed from its arguments, counts as one term.
        is_looked_up = info.is_plain and (info.reads or not info.positions)
        if not is_looked_up or info.positions == {"i", "j"}:
            result = self._split_offset(node)
            if result is not None and len(result.terms) <= _MOST_TERMS:
                return result
        return _Sum({node: 1}, 0)

    def _split_offset(self, node: Node) -> _Sum | None:
        nothing = _Sum({}, 0)
        if node.op in ("add", "sub"):
            left, right = map(self._sum, node.args)
            return left.plus(right, 1 if node.op == "add" else -1)
        if node.op == "neg":
            return nothing.plus(self._sum(node.args[0]), -1)
        if node.op == "mul" and node.args[1].is_constant:
            return nothing.plus(self._sum(node.args[0]), node.args[1].value)
        return None

    def _ends(self, total: _Sum) -> tuple[str, str]:
        """Return C++ of the least and the largest value of a sum."""
        # Positive terms come first.
        terms = sorted(total.terms.items(), key=lambda term: term[1] < 0)
        ends = []
        for ends_of_signs in (("high", "low"), ("low", "high")):
            text = ""
            for node, factor in terms:
                size = "" if abs(factor) == 1 else f"{abs(factor)} * "
                sign = ("-" if factor < 0 else "") if not text else f" {'+-'[factor < 0]} "
                text += f"{sign}{size}{self._end(node, ends_of_signs[factor > 0])}"
            if total.offset and text:
                text += f" {'+-'[total.offset < 0]} {abs(total.offset)}"
            ends.append(text or str(total.offset))
        return ends[0], ends[1]

    def _end(self, node: Node, end: str) -> str:
        return f"{self._text(node)}.{end}"

    def _printed(self, result: dict[Node, str], begin: Callable[[Node, str], str]) -> list[str]:
        printer = RowPrinter(Members(), self._analysis, self._captures, self._real)

        def lines() -> Iterator[str]:
            for node, name in result.items():
                text = unwrapped(printer.text(node))
                # In C++ the type of p & q is int.
                value = f"bool({text})" if node.type == BOOL else text
                yield f"{begin(node, name)}range_at({value});"

        return printer.body(lines)

    def _of_positions(
        self, struct: str, function: str, position: str, result: dict[Node, str]
    ) -> Iterator[str]:
        """Yield a struct of ranges, and functions that fill it in, join it and iterate over it."""
        yield f"struct {struct} {{"
        yield from (f"  {_TYPES[node.type]} {name};" for node, name in result.items())
        yield "};"
        given = _POSITIONS.format(position)
        lines = self._printed(result, lambda node, name: f"r.{name} = ")
        declaration = f"{struct} {function}_at({given})"
        yield from function_lines(declaration, [f"{struct} r;", *lines, "return r;"])
        joined = [f"x.{name} = range_union(x.{name}, y.{name});" for name in result.values()]
        yield from function_lines(f"void join({struct}& x, const {struct}& y)", joined)
        yield "template <class Function>"
        calls = [f"function(x.{name});" for name in result.values()]
        yield from function_lines(f"void each({struct}& x, Function function)", calls)
