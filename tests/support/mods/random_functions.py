"""Random score and mask functions: their text, their captures, and pairs to evaluate them for.

A function depends on its number only, so that the number is enough to repeat a failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from support.mods.function_oracle import BOOL, INT, REAL, UINT64, Expr, Helper, Oracle

BATCH, HEADS = 3, 4
DTYPES = ("float32", "float16", "bfloat16", "float64")
_MOST_NODES = 60
# Largest number of times that a mask with the same result for all pairs is drawn again.
_ATTEMPTS = 5
_MAX = float(np.finfo(np.float32).max)
_POSITIONS = ("b", "h", "i", "j", "q_start", "k_start")
# Names of captures that have, or may have, a meaning in C++.
_HOSTILE_NAMES = (
    *("xor", "bitand", "true_", "typeid"),
    *("mods", "params", "step", "last", "x", "k", "r"),
)

# Operators of operations, by NumPy's names.
_SIGNS = {
    "add": "+", "subtract": "-", "multiply": "*", "divide": "/", "floor_divide": "//",
    "remainder": "%", "power": "**", "less": "<", "less_equal": "<=", "greater": ">",
    "greater_equal": ">=", "equal": "==", "not_equal": "!=", "bitwise_and": "&",
    "bitwise_or": "|", "bitwise_xor": "^", "left_shift": "<<", "right_shift": ">>",
}  # fmt: skip
_PREFIXES = {"negative": "-", "positive": "+", "invert": "~"}
_REAL_FUNCTIONS = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sin", "cos", "sqrt",
)  # fmt: skip
_COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")


@dataclass
class Function:
    """Random score or mask function."""

    number: int  # seed that determines the function
    kind: str  # "score" or "mask"
    inputs: str  # dtype of queries and keys
    root: Expr  # expression that the function computes
    text: str  # Python text that defines `function`
    captures: dict[str, Any]  # arrays and numbers by name
    variables: tuple[str, ...] = ()  # global numbers in `text`, which its helper functions read

    @property
    def real(self) -> Any:
        return np.float64 if self.inputs == "float64" else np.float32

    def function(self) -> Callable[..., Any]:
        """Return the Python function."""
        names: dict[str, Any] = {"np": np}
        exec(compile(self.text, f"<function {self.number}>", "exec"), names)
        return names["function"]

    def __str__(self) -> str:
        given = {
            name: f"{x.dtype}{x.shape} strides {x.strides}" if isinstance(x, np.ndarray) else x
            for name, x in self.captures.items()
        }
        return f"{self.kind} {self.number} of {self.inputs}\n{self.text}captures {given}"


def random_function(number: int, kind: str | None = None, inputs: str | None = None) -> Function:
    """Return the function of a number: a score function if it is even, otherwise a mask.

    `kind` and `inputs` replace the kind and the dtype that the number determines.
    """
    rng = np.random.default_rng([45, number])
    kind = kind or ("mask" if number % 2 else "score")
    drawn = str(rng.choice(DTYPES, p=(0.4, 0.2, 0.2, 0.2)))
    inputs = inputs or drawn
    depth = int(rng.integers(1, 13))
    attempts = 0
    while True:
        maker = _Maker(rng, kind)
        root = maker.root(depth)
        text, variables = _text(root, kind, maker)
        made = Function(number, kind, inputs, root, text, maker.captures, variables)
        if _names_element_below(made):
            continue
        attempts += 1
        if attempts == _ATTEMPTS or _varies(made):
            return made


def nodes_of(function: Function) -> Iterator[Expr]:
    """Yield every operation of a function once, with those of its helpers."""
    return _operations(function.root, with_helpers=True)


def _operations(root: Expr, *, with_helpers: bool = False) -> Iterator[Expr]:
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            stack += node.args
            if with_helpers and node.op == "call":
                stack.append(node.value.body)


def _names_element_below(function: Function) -> bool:
    """Return whether an index is a negative constant, which tracing refuses.

    The text may hide a constant, as ``~(x ** 0)`` does. A constant has the same value for all pairs
    and all captures.
    """
    loads = [node for node in nodes_of(function) if node.op == "load"]
    indices = [index for node in loads for index in node.args if _may_be_constant(index, {})]
    if not indices:
        return False
    pairs = random_pairs(function)
    others = replace(
        function, captures={name: _other(value) for name, value in function.captures.items()}
    )
    for index in indices:
        found = [np.asarray(pairs.oracle(x).value(index).v) for x in (function, others)]
        if all((x < 0).all() and (x == found[0].flat[0]).all() for x in found):
            return True
    return False


def _may_be_constant(node: Expr, given: dict[str, bool]) -> bool:
    """Return whether a value may be constant; `given` holds the same for a helper's parameters."""
    if not node.args:
        return node.op == "literal" or (node.op == "parameter" and given[node.value])
    are_constant = [_may_be_constant(x, given) for x in node.args]
    if node.op == "call":
        names = (leaf.value for leaf in node.value.parameters)
        return _may_be_constant(node.value.body, dict(zip(names, are_constant, strict=True)))
    if node.op in ("power", "float_power"):
        return are_constant[0] or node.args[1].value == 0
    if node.op in _COMPARISONS:
        # A value may be compared with itself.
        return True
    if node.op == "where":
        return all(are_constant[1:]) or (are_constant[0] and any(are_constant[1:]))
    # One constant factor, or one constant bool, may determine the result.
    may_decide = node.op == "multiply" or node.type == BOOL
    return any(are_constant) if may_decide else all(are_constant)


def _other(value: Any) -> Any:
    """Return another capture of the same kind, in which every element differs."""
    if isinstance(value, np.ndarray):
        return 1 - value if value.dtype.kind not in "biu" else ~value
    if isinstance(value, (bool, np.bool_)):
        return not value
    return -1 - value if isinstance(value, (int, np.integer)) else 1 - value


def _varies(function: Function) -> bool:
    """Return whether a mask has visible and hidden pairs, and most pairs are decided."""
    if function.kind == "score":
        return True
    pairs = random_pairs(function)
    result = pairs.oracle(function).value(function.root)
    count = len(pairs.scores)
    known = np.broadcast_to(result.e == 0, count)
    seen = np.broadcast_to(result.v, count)[known]
    return bool(known.mean() > 0.5 and 0.02 < seen.mean() < 0.98)


@dataclass
class Pairs:
    """Pairs in runs of consecutive keys, as kernels process them.

    `columns` has int32 arrays with one element for each pair: b, h, i, row, q_start, k_start,
    first_key, step, last (the largest step of the run) and j.
    """

    columns: dict[str, np.ndarray]
    scores: np.ndarray  # scaled scores
    symbols: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.symbols = {name: self.columns[name] for name in _POSITIONS} | {"score": self.scores}

    def oracle(self, function: Function) -> Oracle:
        """Return the evaluator of a function for these pairs."""
        return Oracle(self.symbols, function.captures, function.real, function.inputs)


def random_pairs(function: Function, runs: int = 20, length: int = 16) -> Pairs:
    """Return pairs for a function: close together, apart, and far from the first key."""
    rng = np.random.default_rng([46, function.number])
    columns: dict[str, list[np.ndarray]] = {}
    base, divisors = _position(rng), _divisors_of(function)
    for _ in range(runs):
        last = int(rng.integers(0, length)) if rng.integers(4) else min(63, 4 * length)
        steps = np.unique(rng.integers(0, last + 1, length))
        place = int(rng.choice([0, base, base]))
        row = int(rng.integers(0, 400))
        first_key = place + int(rng.integers(0, 400))
        if rng.integers(2):
            # This run is around the diagonal.
            first_key = max(0, place + row - int(rng.integers(0, length)))
        offset = place - int(rng.integers(0, 40)) if rng.integers(3) == 0 else place
        if divisors and rng.integers(2):
            # Quotients by a number of the function are most likely wrong where they are whole.
            n = int(rng.choice(divisors))
            first_key -= first_key % n
            row -= min(row, (row + offset) % n)
            steps = np.unique([0, *steps, *range(n, last + 1, n)])
        run = {"b": rng.integers(BATCH), "h": rng.integers(HEADS), "i": row + offset, "row": row}
        run |= {"q_start": rng.integers(0, 50), "k_start": rng.integers(0, 50)}
        run |= {"first_key": first_key, "last": last}
        for name, value in run.items():
            columns.setdefault(name, []).append(np.full(len(steps), value, np.int32))
        columns.setdefault("step", []).append(steps.astype(np.int32))
        columns.setdefault("j", []).append((first_key + steps).astype(np.int32))
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    count = len(joined["j"])
    scores = 4 * rng.standard_normal(count)
    strange = rng.choice(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 1e20, 1e-40, 0.5, 2.5, -7.0], count
    )
    scores = np.where(rng.random(count) < 0.1, strange, scores).astype(function.real)
    return Pairs(joined, scores)


def _divisors_of(function: Function) -> list[int]:
    """Return whole numbers of a function that may be divisors."""
    numbers = [x for x in function.captures.values() if not isinstance(x, np.ndarray)]
    numbers += [node.value for node in _operations(function.root) if node.op == "literal"]
    return sorted({int(n) for n in numbers if 2 <= n <= 200 and n == int(n)})


def _position(rng: np.random.Generator) -> int:
    return int(rng.choice([0, 0, 0, 1000, 40_000, 2**24 - 20, 2**24 + 3, 2**30, 8_000_000]))


class _Maker:
    """Generator of random expressions and their captures."""

    def __init__(self, rng: np.random.Generator, kind: str) -> None:
        self.rng, self.kind = rng, kind
        self.captures: dict[str, Any] = {}
        self.helpers: list[Helper] = []
        self._made: dict[str, list[Expr]] = {BOOL: [], INT: [], UINT64: [], REAL: []}
        self._nodes = 0
        self._parameters: dict[str, list[Expr]] | None = None

    def root(self, depth: int) -> Expr:
        if self.kind == "mask":
            made = self.of(BOOL, depth, fresh=True)
            while made.op == "literal":
                made = self.of(BOOL, depth, fresh=True)
            return made
        made = self.of(self._pick({REAL: 9, INT: 1}), depth, fresh=True)
        if self.rng.integers(2):
            made = self.make(self._pick({"add": 3, "multiply": 1}), REAL, self._score(), made)
        return made

    # ---- Choices

    def _pick(self, weights: dict[Any, float]) -> Any:
        keys = list(weights)
        total = sum(weights.values())
        return keys[int(self.rng.choice(len(keys), p=[w / total for w in weights.values()]))]

    def _one(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def of(self, type: str, depth: int, *, fresh: bool = False) -> Expr:
        """Return an expression of at most this depth, or a deeper one that was made before."""
        self._nodes += 1
        pool = self._made[type]
        reuses = self._parameters is None and not fresh and pool
        if reuses and self.rng.random() < (0.15 if depth <= 3 else 0.03):
            return self._one(pool)
        if depth <= 0 or self._nodes > _MOST_NODES:
            return self._leaf(type)
        if self._parameters is None and self.rng.random() < (0.2 if depth <= 3 else 0.04):
            options = [x for x in _IDIOMS[type] if self.kind == "score" or x not in _OF_SCORES]
            if options:
                made = self._one(options)(self)
                self._made[type].append(made)
                return made
        made = self._one(_TABLE[type])(self, depth - 1)
        if self._parameters is None:
            self._made[type].append(made)
        return made

    def args(self, types: Sequence[str], depth: int) -> list[Expr]:
        """Return operands, one of which may have the full depth."""
        deep = int(self.rng.integers(len(types)))
        return [
            self.of(type, depth if n == deep else min(depth, int(self.rng.integers(0, 4))))
            for n, type in enumerate(types)
        ]

    # ---- Leaves

    def _leaf(self, type: str) -> Expr:
        if self._parameters is not None:
            return self._parameter(type)
        if type == INT:
            choice = self._pick({"position": 6, "scalar": 1, "load": 2})
            if choice == "position":
                name = self._pick({"i": 4, "j": 5, "h": 1, "b": 1, "q_start": 0.5, "k_start": 0.5})
                return self.symbol(name)
            return self._scalar(INT) if choice == "scalar" else self._load(INT, 0)
        if type == REAL:
            weights = {"scalar": 1, "load": 2, "cast": 2}
            if self.kind == "score":
                weights["score"] = 4
            choice = self._pick(weights)
            if choice == "score":
                return self._score()
            if choice == "cast":
                return self._astype(self._leaf(INT), REAL)
            return self._scalar(REAL) if choice == "scalar" else self._load(REAL, 0)
        if type == UINT64:
            if self.rng.integers(2):
                return self._load(UINT64, 0)
            return self._astype(self._leaf(INT), UINT64)
        choice = self._pick({"load": 2, "scalar": 1, "compare": 4})
        if choice == "compare":
            return self.make(self._one(_COMPARISONS), BOOL, self.symbol("i"), self.symbol("j"))
        return self._scalar(BOOL) if choice == "scalar" else self._load(BOOL, 0)

    def _parameter(self, type: str) -> Expr:
        """Return a parameter of the helper under construction, which has at least one int32."""
        assert self._parameters is not None
        options, ints = self._parameters[type], self._parameters[INT]
        if options:
            return self._one(options)
        if type == BOOL:
            return self.make("less", BOOL, self._one(ints), self._int())
        return self._astype(self._one(ints), type)

    def symbol(self, name: str) -> Expr:
        # Each use is a new object, so that the text needs no local variable for it.
        if self._parameters is not None:
            return self._parameter(INT)
        return Expr("symbol", INT, (), name, name)

    def _score(self) -> Expr:
        if self._parameters is not None:
            return self._parameter(REAL)
        return Expr("symbol", REAL, (), "score", "score")

    def literal(self, value: Any, type: str) -> Expr:
        """Return a number that is a literal of the text."""
        return Expr("literal", type, (), value, self._literal_text(value, type))

    def _literal_text(self, value: Any, type: str) -> str:
        if type == BOOL:
            return str(value)
        if type == UINT64:
            return str(value) if value < 2**31 and self.rng.integers(2) else f"np.uint64({value})"
        if type == INT:
            form = self._pick({"({})": 6, "np.int32({})": 1, "np.int64({})": 1})
            return str(form.format(value)) if value < 0 or "np" in form else str(value)
        if math.isnan(value):
            return "np.nan"
        if math.isinf(value):
            return "np.inf" if value > 0 else "(-np.inf)"
        text = repr(float(value))
        return f"({text})" if text.startswith("-") else text

    def _int(self) -> Expr:
        rng = self.rng
        weights = {
            int(rng.integers(1, 201)): 6,
            int(rng.integers(-9, 10)): 3,
            -int(rng.integers(1, 201)): 1,
            1 << int(rng.integers(0, 31)): 1,
            self._one(_EXTREME_INTS): 1,
        }
        return self.literal(self._pick(weights), INT)

    def _real(self) -> Expr:
        rng = self.rng
        weights = {
            float(rng.integers(1, 201)): 5,
            round(float(rng.uniform(-2, 2)), int(rng.integers(1, 4))): 4,
            self._one([0.7, 0.3, 0.1, 1 / 3, 1 / 41]): 2,
            float(rng.integers(1, 40)) / 8: 2,
            self._one(_EXTREME_REALS): 2,
        }
        return self.literal(self._pick(weights), REAL)

    def _uint64(self) -> Expr:
        value = self._one([0, 1, 3, 7, 41, 2**31 - 1, 2**32 + 5, 2**63, 2**64 - 1])
        return self.literal(value, UINT64)

    # ---- Captures

    def _name(self) -> str:
        if self.rng.random() < 0.02:
            free = [name for name in _HOSTILE_NAMES if name not in self.captures]
            return str(self._one(free))
        return f"c{len(self.captures)}"

    def _scalar(self, type: str) -> Expr:
        value: Any
        if self._parameters is not None:
            return self._parameter(type)
        if type == BOOL:
            value = bool(self.rng.integers(2))
        elif type == INT:
            value = self._int().value
        else:
            value = self._real().value
        return self._captured_number(value, type)

    def _captured_number(self, value: Any, type: str) -> Expr:
        name = self._name()
        if self.rng.integers(4) == 0:
            numpy_types = {BOOL: np.bool_, INT: np.int32, REAL: np.float64}
            value = numpy_types[type](value)
        self.captures[name] = value
        return Expr("scalar", type, (), name, name)

    def array(self, type: str, rank: int | None = None, kind: str | None = None) -> tuple[str, int]:
        """Add a captured array; return its name and rank."""
        rng = self.rng
        rank = int(self._pick({0: 1, 1: 6, 2: 3, 3: 1, 4: 1})) if rank is None else rank
        shape = tuple(int(n) for n in rng.integers(1, [400, 30, 12, 8][rank - 1] + 1, rank))
        dtype = {
            BOOL: ["bool"],
            INT: ["int32", "int32", "int64", "uint8"],
            UINT64: ["uint64"],
            REAL: ["float32", "float32", "float64", "float16", "bfloat16"],
        }[type]
        name = self._name()
        chosen = str(self._one(dtype)) if kind is None or type != INT else "int32"
        self.captures[name] = self._strided(shape, chosen, kind)
        return name, rank

    def _strided(self, shape: tuple[int, ...], dtype: str, kind: str | None) -> np.ndarray:
        """Return an array in a random memory layout."""
        rng = self.rng
        layout = self._pick({"plain": 4, "step": 1, "reversed": 1, "transposed": 1, "shared": 1})
        if not shape or layout == "plain":
            return self._elements(shape, dtype, kind)
        if layout == "step":
            axis = int(rng.integers(len(shape)))
            longer = tuple(2 * n if m == axis else n for m, n in enumerate(shape))
            index = tuple(slice(None, None, 2 if m == axis else 1) for m in range(len(shape)))
            return self._elements(longer, dtype, kind)[index]
        if layout == "reversed":
            return self._elements(shape, dtype, kind)[..., ::-1]
        if layout == "transposed":
            return self._elements(shape[::-1], dtype, kind).transpose()
        axis = int(rng.integers(len(shape)))
        one = tuple(1 if m == axis else n for m, n in enumerate(shape))
        return np.broadcast_to(self._elements(one, dtype, kind), shape)

    def _elements(self, shape: tuple[int, ...], dtype: str, kind: str | None) -> np.ndarray:
        rng = self.rng
        if dtype == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        if dtype == "uint8":
            return rng.integers(0, 256, shape).astype(np.uint8)
        if dtype == "uint64":
            words = rng.integers(0, 2**64, shape, np.uint64)
            few = rng.integers(0, 90, shape).astype(np.uint64)
            return np.where(rng.integers(0, 2, shape) == 0, words, few)
        if dtype in ("int32", "int64"):
            kind = kind or self._one(["small", "documents", "extreme", "times", "positions"])
            if kind == "times":
                base = int(self._one([1_700_000_000, 8_000_000, 2**24, 2**30]))
                found = base + rng.integers(0, 300, shape)
            elif kind == "documents":
                found = np.sort(rng.integers(0, 6, shape), axis=-1) if shape else rng.integers(6)
            elif kind == "positions":
                found = rng.integers(-40, 400, shape)
            elif kind == "small":
                found = rng.integers(-5, 6, shape)
            else:
                found = rng.choice(_EXTREME_INTS, shape)
            return np.asarray(found).astype(dtype)
        real = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
        plain = rng.standard_normal(shape) * float(self._one([1, 1, 30]))
        wholes = np.rint(plain * 4)
        strange = rng.choice(_EXTREME_REALS, shape)
        share = float(self._one([0, 0.1, 0.6]))
        found = np.where(rng.random(shape) < share, strange, plain if rng.integers(2) else wholes)
        with np.errstate(all="ignore"):
            return np.asarray(found).astype(real)

    def load_of(self, name: str, type: str, indices: Sequence[Expr]) -> Expr:
        """Return an element of a captured array."""
        places = ", ".join(f"{{{n}}}" for n in range(len(indices)))
        form = f"{name}[{places}]" if indices else name
        return Expr("load", type, tuple(indices), name, form)

    def _load(self, type: str, depth: int) -> Expr:
        if self._parameters is not None:
            return self._parameter(type)
        known = [
            (name, value.ndim)
            for name, value in self.captures.items()
            if isinstance(value, np.ndarray) and _ELEMENT_TYPES[value.dtype.name] == type
        ]
        reuses = known and self.rng.integers(2)
        name, rank = self._one(known) if reuses else self.array(type)
        return self.load_of(name, type, [self._index(depth) for _ in range(rank)])

    def _index(self, depth: int) -> Expr:
        if depth <= 0:
            choice = self._pick({"i": 3, "j": 4, "h": 2, "b": 1, "difference": 2, "constant": 1})
            if choice == "difference":
                return self.make("subtract", INT, self.symbol("i"), self.symbol("j"))
            if choice == "constant":
                return self.literal(int(self.rng.integers(0, 9)), INT)
            return self.symbol(choice)
        made = self.of(INT, depth)
        return made if made.op != "literal" else self.symbol("j")

    # ---- Operations

    def make(self, op: str, type: str, *args: Expr) -> Expr:
        """Return an operation, written as an operator or as a NumPy function."""
        places = [f"{{{n}}}" for n in range(len(args))]
        called = f"np.{op}({', '.join(places)})"
        forms = [called]
        if op in _SIGNS:
            forms += [f"({places[0]} {_SIGNS[op]} {places[1]})"] * 4
        elif op in _PREFIXES:
            forms += [f"({_PREFIXES[op]}{places[0]})"] * 3
        elif op == "absolute":
            forms += [f"abs({places[0]})", f"np.abs({places[0]})"]
        if op == "power" and args[0].type != BOOL:
            forms = [f"({places[0]} ** {places[1]})"] * 3 + forms
        return Expr(op, type, tuple(args), None, self._one(forms))

    def _astype(self, x: Expr, type: str) -> Expr:
        names = {
            BOOL: ["bool", "np.bool_"],
            INT: ["np.int32", "np.int32", "int", "np.int64"],
            UINT64: ["np.uint64"],
            REAL: ["np.float32", "np.float32", "float", "np.float64"],
        }[type]
        return Expr("astype", type, (x,), None, f"{{0}}.astype({self._one(names)})")

    def with_literal(self, type: str, depth: int) -> tuple[Expr, Expr]:
        """Return two operands, one of which is often a literal."""
        literal = {INT: self._int, REAL: self._real, UINT64: self._uint64}[type]
        if type == REAL:
            choice = self._pick({"both": 5, "literal": 4, "int": 2, "mixed": 2, "float": 2})
            if choice == "both":
                x, y = self.args((REAL, REAL), depth)
            elif choice == "literal":
                x, y = self.of(REAL, depth), self._real()
            elif choice == "int":
                x, y = self.of(REAL, depth), self._int()
            elif choice == "mixed":
                x, y = self.args((REAL, self._pick({INT: 4, BOOL: 1, UINT64: 1})), depth)
            else:
                x, y = self.of(INT, depth), self._real()
        elif self.rng.integers(2):
            x, y = self.of(type, depth), literal()
        else:
            x, y = self.args((type, type if self.rng.integers(8) else BOOL), depth)
        return (y, x) if self.rng.integers(4) == 0 else (x, y)


_ELEMENT_TYPES = {
    "bool": BOOL, "uint8": INT, "int32": INT, "int64": INT, "uint64": UINT64,
    "float16": REAL, "bfloat16": REAL, "float32": REAL, "float64": REAL,
}  # fmt: skip
_EXTREME_INTS = [
    -(2**31), -(2**31) + 1, 2**31 - 1, 2**30, -(2**30), 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3,
    65536, 65535, 1_000_003, 46341, -46341, 0, 1, -1, 32, 31, 33,
]  # fmt: skip
_EXTREME_REALS = [
    0.0, -0.0, math.inf, -math.inf, math.nan, _MAX, -_MAX, 2.0**126, -(2.0**127), 1.5 * 2.0**127,
    2.0**-126, 1e-40, -1e-45, 2.0**24, 2.0**24 + 2, 2.0**31, -(2.0**31), 2.0**63, 2.0**64, 8e6,
    0.5, 2.5, -0.5, 1.0, -1.0, 1e9, -3e9, 6e4,
]  # fmt: skip

Rule = Callable[["_Maker", int], Expr]


def _two(op: str, type: str) -> Rule:
    """Return a rule for an operation on two values of a type."""
    return lambda m, depth: m.make(op, type, *m.with_literal(type, depth))


def _any_type(m: _Maker) -> str:
    return str(m._pick({REAL: 5, INT: 4, UINT64: 2, BOOL: 1}))


def _one_of(op: str, type: str, *sources: str) -> Rule:
    """Return a rule for an operation on one value."""

    def rule(m: _Maker, depth: int) -> Expr:
        source = m._one(sources) if sources else type
        return m.make(op, type, m.of(source, depth))

    return rule


def _compare(op: str) -> Rule:
    def rule(m: _Maker, depth: int) -> Expr:
        type = m._pick({REAL: 5, INT: 5, UINT64: 2, BOOL: 0.5})
        pair = m.args((BOOL, BOOL), depth) if type == BOOL else m.with_literal(type, depth)
        return m.make(op, BOOL, *pair)

    return rule


def _bools(op: str) -> Rule:
    return lambda m, depth: m.make(op, BOOL, *m.args((BOOL, BOOL), depth))


def _logical(op: str) -> Rule:
    def rule(m: _Maker, depth: int) -> Expr:
        types = [BOOL if m.rng.integers(3) else _any_type(m) for _ in range(2)]
        return m.make(op, BOOL, *m.args(types, depth))

    return rule


def _where_of(type: str) -> Rule:
    def rule(m: _Maker, depth: int) -> Expr:
        condition, x, y = m.args((BOOL, type, type), depth)
        if type in (INT, REAL) and m.rng.integers(3) == 0:
            y = m._int() if type == INT else m._real()
            if m.rng.integers(3) == 0:
                x = m._int() if type == INT else m._real()
        if m.rng.integers(3) == 0:
            x, y = y, x
        return m.make("where", type, condition, x, y)

    return rule


def _clip_of(type: str) -> Rule:
    def rule(m: _Maker, depth: int) -> Expr:
        x = m.of(type, depth)
        literal = {INT: m._int, REAL: m._real, UINT64: m._uint64}[type]
        low, high = (literal() if m.rng.integers(3) else m.of(type, min(depth, 1)) for _ in "lh")
        form = m._pick({"np.clip({0}, {1}, {2})": 3, "{0}.clip({1}, {2})": 1})
        if m.rng.integers(4) == 0:
            # With one bound, np.clip is np.minimum or np.maximum.
            op, keyword = m._one([("minimum", "None, {1}"), ("maximum", "{1}, None")])
            return Expr(op, type, (x, low), None, f"np.clip({{0}}, {keyword})")
        return Expr("clip", type, (x, low, high), None, form)

    return rule


def _shift_of(op: str, type: str) -> Rule:
    def rule(m: _Maker, depth: int) -> Expr:
        x = m.of(type, depth)
        if m.rng.integers(3):
            most = 70 if type == UINT64 else 36
            low = 0 if type == UINT64 else -3
            count = m.literal(int(m.rng.integers(low, most)), type)
        else:
            count = m.of(type, min(depth, 1))
        return m.make(op, type, x, count)

    return rule


def _cast_to(type: str, *sources: str) -> Rule:
    return lambda m, depth: m._astype(m.of(m._one(sources), depth), type)


def _power_of(type: str) -> Rule:
    def rule(m: _Maker, depth: int) -> Expr:
        x = m.of(type, depth)
        if type == REAL:
            n: Any = m._one([0, 1, 2, 3, 4, 7, -1, -2, -3, 64, 0.5, 1.5, -0.5, 2.0, 0.3, 1 / 3])
            if m.rng.integers(3) == 0:
                source = m.of(m._pick({REAL: 1, INT: 1}), depth)
                exponent = m.literal(float(n), REAL)
                return m.make("float_power", REAL, source, exponent)
            return m.make("power", REAL, x, m.literal(n, INT if isinstance(n, int) else REAL))
        return m.make("power", type, x, m.literal(m._one([0, 1, 2, 3, 5, 8, 31]), INT))

    return rule


def _helper_of(type: str) -> Rule:
    """Return a rule for a call of a helper function."""

    def rule(m: _Maker, depth: int) -> Expr:
        if m._parameters is not None or len(m.helpers) >= 3:
            return m.of(type, depth)
        known = [helper for helper in m.helpers if helper.body.type == type]
        if known and m.rng.integers(2):
            helper = m._one(known)
        else:
            types = [INT, *([REAL] if type == REAL else [])]
            types += [m._pick({INT: 3, REAL: 3, BOOL: 1}) for _ in range(int(m.rng.integers(3)))]
            leaves = tuple(Expr("parameter", t, (), f"p{n}", f"p{n}") for n, t in enumerate(types))
            m._parameters = {
                t: [x for x in leaves if x.type == t] for t in (BOOL, INT, UINT64, REAL)
            }
            body = m.of(type, min(depth, 3))
            m._parameters = None
            if body.op in ("literal", "parameter"):
                return m.of(type, depth)
            helper = Helper(f"helper{len(m.helpers)}", leaves, body)
            m.helpers.append(helper)
        args = m.args([x.type for x in helper.parameters], depth)
        places = ", ".join(f"{{{n}}}" for n in range(len(args)))
        return Expr("call", type, tuple(args), helper, f"{helper.name}({places})")

    return rule


def _real_function(op: str) -> Rule:
    return lambda m, depth: m.make(op, REAL, m.of(m._pick({REAL: 4, INT: 1, BOOL: 0.2}), depth))


def _quotient(op: str) -> Rule:
    def rule(m: _Maker, depth: int) -> Expr:
        if m.rng.integers(3):
            return m.make(op, REAL, *m.with_literal(REAL, depth))
        return m.make(op, REAL, *m.with_literal(m._pick({INT: 4, UINT64: 1}), depth))

    return rule


def _numbers_table(type: str) -> list[Rule]:
    """Return the rules that apply to both integers and floats."""
    return [
        *(_two(op, type) for op in ("add", "subtract", "multiply", "floor_divide", "remainder",
                                    "minimum", "maximum")),
        *(_one_of(op, type) for op in ("negative", "positive", "absolute", "square")),
        _one_of("sign", type),
        _power_of(type),
        _where_of(type),
        _clip_of(type),
        _helper_of(type),
        lambda m, depth: m._load(type, depth),
    ]  # fmt: skip


def _integers_table(type: str) -> list[Rule]:
    bits = [_two(op, type) for op in ("bitwise_and", "bitwise_or", "bitwise_xor")]
    shifts = [_shift_of(op, type) for op in ("left_shift", "right_shift")]
    return [*_numbers_table(type), *bits, *shifts, _one_of("invert", type)]


_TABLE: dict[str, list[Rule]] = {
    BOOL: [
        *map(_compare, _COMPARISONS),
        *map(_compare, _COMPARISONS),
        *map(_bools, ("bitwise_and", "bitwise_or", "bitwise_xor")),
        *map(_bools, ("add", "multiply", "minimum", "maximum", "equal", "not_equal")),
        *map(_logical, ("logical_and", "logical_or", "logical_xor")),
        _one_of("invert", BOOL),
        lambda m, depth: m.make("logical_not", BOOL, m.of(_any_type(m), depth)),
        *(_one_of(op, BOOL, REAL, REAL, REAL, INT) for op in ("isnan", "isinf", "isfinite")),
        _where_of(BOOL),
        _cast_to(BOOL, INT, REAL, UINT64),
        _helper_of(BOOL),
        lambda m, depth: m._load(BOOL, depth),
    ],
    INT: [
        *_integers_table(INT),
        *(_one_of(op, INT) for op in ("floor", "ceil", "trunc", "rint")),
        *[_cast_to(INT, REAL, REAL, UINT64, BOOL)] * 3,
    ],
    UINT64: [*_integers_table(UINT64), *[_cast_to(UINT64, INT, INT, REAL, BOOL)] * 2],
    REAL: [
        *_numbers_table(REAL),
        *map(_quotient, ("divide", "divide", "true_divide")),
        *(_one_of(op, REAL) for op in ("floor", "ceil", "trunc", "rint", "reciprocal")),
        _one_of("fabs", REAL, REAL, INT, BOOL),
        *map(_real_function, _REAL_FUNCTIONS),
        _cast_to(REAL, INT, UINT64, BOOL),
        _cast_to(REAL, INT, UINT64),
    ],
}


# ---- Patterns of former faults


def _divisor(m: _Maker) -> Expr:
    """Return a number from 1 to 200 as a literal, a captured number, or an element of an array."""
    n = int(m.rng.integers(1, 201))
    choice = m._pick({"int": 3, "real": 3, "captured": 2, "captured real": 2})
    if choice == "int":
        return m.literal(n, INT)
    if choice == "real":
        return m.literal(float(n), REAL)
    if choice == "captured":
        return m._captured_number(n, INT)
    return m._captured_number(float(n), REAL)


def _same_group(m: _Maker) -> Expr:
    c, op = _divisor(m), m._one(["floor", "floor", "trunc", "rint", "ceil"])
    sides = [m.make(op, REAL, m.make("divide", REAL, m.symbol(x), c)) for x in "ij"]
    return m.make(m._one(["equal", "equal", "less_equal"]), BOOL, *sides)


def _same_product(m: _Maker) -> Expr:
    c = m.literal(m._one([0.3, 0.7, 0.1, 1 / 41, 1 / 3, 0.01]), REAL)
    if m.rng.integers(3) == 0:
        c = m._captured_number(c.value, REAL)
    sides = [m.make("multiply", REAL, m.symbol(x), c) for x in "ij"]
    if m.rng.integers(2):
        sides = [m.make("floor", REAL, x) for x in sides]
    return m.make(m._one(["equal", "less_equal", "less"]), BOOL, *sides)


def _near_in_time(m: _Maker) -> Expr:
    name, _ = m.array(INT, 1, "times")
    t = [m.load_of(name, INT, [m.symbol(x)]) for x in "ij"]
    distance = m.make("absolute", INT, m.make("subtract", INT, *t))
    n = int(m.rng.integers(1, 200))
    limit = m._one([m.literal(n, INT), m.literal(n + 0.5, REAL), m.literal(float(n), REAL)])
    return m.make(m._one(["less", "less_equal"]), BOOL, distance, limit)


def _odd_remainder(m: _Maker) -> Expr:
    k = m.literal(m._one([1_000_003, 65536, 46341, 2**30]), INT)
    product = m.make("multiply", INT, m.symbol("j"), k)
    n = m.literal(int(m.rng.integers(2, 12)), INT)
    rest = m.make(m._one(["remainder", "floor_divide"]), INT, product, n)
    return m.make("less", BOOL, rest, m.literal(int(m.rng.integers(0, 4)), INT))


def _sign_of_zero(m: _Maker) -> Expr:
    zero = m._captured_number(m._one([0.0, -0.0]), REAL)
    inverse = m.make("reciprocal", REAL, zero)
    return m.make("less", BOOL, inverse, m._astype(m.symbol("j"), REAL))


def _power_of_infinity(m: _Maker) -> Expr:
    x = m._captured_number(m._one([-math.inf, -math.inf, -8.0, math.inf, -0.0]), REAL)
    n = m.literal(m._one([1.5, 0.5, -0.5, 3, -3, 1 / 3]), REAL)
    return m.make("less", BOOL, m.symbol("j"), m.make("power", REAL, x, n))


def _scaled_compare(m: _Maker) -> Expr:
    """Return a comparison of a scaled distance, near the limits of float32 precision."""
    c = m.literal(m._one([0.5, 1.5, 0.25, 3.0, 0.1]), REAL)
    left = m.make("multiply", REAL, m.make("subtract", INT, m.symbol("i"), m.symbol("j")), c)
    right = m.make("subtract", REAL, m.make("multiply", REAL, m.symbol("i"), c), m._real())
    return m.make(m._one(["less", "less_equal", "greater"]), BOOL, left, right)


def _wrapped_index(m: _Maker) -> Expr:
    return m.load_of(m.array(INT, 1)[0], INT, [_wrapping(m)])


def _wrapping(m: _Maker) -> Expr:
    j = m.symbol(m._one(["j", "j", "i"]))
    choice = m._one(["square", "shifted", "product", "sum", "remainder"])
    if choice == "square":
        n = m.literal(int(m.rng.integers(0, 24)), INT)
        return m.make("right_shift", INT, m.make("multiply", INT, j, j), n)
    if choice == "shifted":
        return m.make("multiply", INT, j, m.literal(m._one([65536, 2**20, 8_000_000]), INT))
    if choice == "product":
        n = m.make("multiply", INT, j, m.literal(1_000_003, INT))
        return m.make("remainder", INT, n, m.literal(int(m.rng.integers(2, 99)), INT))
    if choice == "sum":
        return m.make("add", INT, j, m.literal(2**31 - 1 - int(m.rng.integers(0, 99)), INT))
    n = m.make("multiply", INT, j, m.symbol("j"))
    return m.make("remainder", INT, n, m.literal(int(m.rng.integers(2, 99)), INT))


def _steps(m: _Maker) -> Expr:
    c = m.literal(m._one([0.7, 0.3, 1 / 41, 0.1, 1.1]), REAL)
    product = m.make("multiply", REAL, m.symbol(m._one("ij")), c)
    if m.rng.integers(3) == 0:
        product = m.make("divide", REAL, m.symbol(m._one("ij")), _divisor(m))
    return m._astype(product, INT)


def _wide_bits(m: _Maker) -> Expr:
    """Return a bit of a 64-bit word, as tree masks read it."""
    words = m.load_of(m.array(UINT64, 1)[0], UINT64, [m.symbol("i")])
    bit = m._astype(m.make("remainder", INT, m.symbol("j"), m.literal(64, INT)), UINT64)
    return m.make("bitwise_and", UINT64, m.make("right_shift", UINT64, words, bit),
                  m.literal(1, UINT64))  # fmt: skip


def _reassociated(m: _Maker) -> Expr:
    """Return the score plus a small difference of large numbers."""
    if m.rng.integers(2):
        name, _ = m.array(INT, 1, "times")
        t = [m.load_of(name, INT, [m.symbol(x)]) for x in "ji"]
    else:
        name = m._name()
        at = int(m._one([8_000_000, 16_000_000, 1_000_000]))
        m.captures[name] = (at + m.rng.integers(0, 900, 400) / 8).astype(np.float32)
        t = [m.load_of(name, REAL, [m.symbol(x)]) for x in "ji"]
    return m.make("add", REAL, m._score(), m.make("subtract", t[0].type, *t))


def _least_bias(m: _Maker) -> Expr:
    least = m.literal(m._one([-_MAX, -_MAX, _MAX, -3e38, -1e38]), REAL)
    if m.rng.integers(2):
        least = m._captured_number(least.value, REAL)
    if m.rng.integers(3) == 0:
        # The bias is computed from a mask of zeros and ones, as in some models.
        ones = m._astype(m.of(BOOL, 1), REAL)
        difference = m.make("subtract", REAL, m.literal(1.0, REAL), ones)
        return m.make("add", REAL, m._score(), m.make("multiply", REAL, difference, least))
    hidden = m.make("where", REAL, m.of(BOOL, 1), m.literal(0.0, REAL), least)
    return m.make("add", REAL, m._score(), hidden)


def _by_infinity(m: _Maker) -> Expr:
    x = m._one([m._astype(m.symbol("j"), REAL), m._leaf(REAL)])
    y = m._one([math.inf, -math.inf, 2.0**127, -(2.0**126) * 1.5, _MAX])
    divisor = m._one([m.literal, m._captured_number])(y, REAL)
    return m.make(m._one(["floor_divide", "remainder", "divide"]), REAL, x, divisor)


def _of_large(m: _Maker) -> Expr:
    """Return a quotient whose divisor has a subnormal inverse."""
    x = m.make("multiply", REAL, m._astype(m.symbol("j"), REAL), m.literal(2.0**122, REAL))
    y = m._one([2.0**127, 1.5 * 2.0**126, _MAX])
    return m.make("divide", REAL, x, m._one([m.literal, m._captured_number])(y, REAL))


def _wrapped_table(m: _Maker) -> Expr:
    return m.load_of(m.array(REAL, 1)[0], REAL, [_wrapping(m)])


def _chain(m: _Maker) -> Expr:
    """Return a sum whose operands are the same object, several levels deep."""
    x = m._leaf(REAL)
    for _ in range(int(m.rng.integers(2, 7))):
        x = m.make("add", REAL, x, x)
    return x


_IDIOMS: dict[str, list[Callable[[_Maker], Expr]]] = {
    BOOL: [
        _same_group, _same_group, _same_product, _near_in_time, _odd_remainder, _sign_of_zero,
        _power_of_infinity, _scaled_compare,
    ],
    INT: [_wrapped_index, _wrapping, _steps],
    UINT64: [_wide_bits],
    REAL: [
        _reassociated, _reassociated, _least_bias, _least_bias, _by_infinity, _of_large,
        _wrapped_table, _chain,
    ],
}  # fmt: skip
_OF_SCORES = (_reassociated, _least_bias)


# ---- Text


def _text(root: Expr, kind: str, maker: _Maker) -> tuple[str, tuple[str, ...]]:
    """Return Python text, with variables for shared values, and the names of global numbers."""
    first = ("score",) if kind == "score" else ()
    names = [*first, *_POSITIONS, *maker.captures]
    variables: dict[str, str] = {}
    parts = [
        f"def {helper.name}({', '.join(x.value for x in helper.parameters)}):\n"
        + _body(helper.body, variables)
        for helper in maker.helpers
    ]
    numbers = [f"{name} = {text}\n" for name, text in variables.items()]
    text = "".join([*numbers, *parts, f"def function({', '.join(names)}):\n", _body(root)])
    return text, tuple(variables)


def _body(root: Expr, variables: dict[str, str] | None = None) -> str:
    """Return the lines of a function; every second literal becomes a global in `variables`."""
    uses: dict[int, int] = {}
    order: list[Expr] = []
    stack = [(root, False)]
    done: set[int] = set()
    while stack:
        node, is_ready = stack.pop()
        if is_ready:
            order.append(node)
            continue
        uses[id(node)] = uses.get(id(node), 0) + 1
        if id(node) in done:
            continue
        done.add(id(node))
        stack.append((node, True))
        stack += [(x, False) for x in node.args]
    texts: dict[int, str] = {}
    lines, numbers = [], 0
    for node in order:
        text = node.form.format(*(texts[id(x)] for x in node.args)) if node.args else node.form
        if node.args and node is not root and (uses[id(node)] > 1 or len(text) > 400):
            lines.append(f"    t{len(lines)} = {text}\n")
            text = f"t{len(lines) - 1}"
        if node.op == "literal" and variables is not None:
            numbers += 1
            if numbers % 2:
                name = f"g{len(variables)}"
                variables[name], text = text, name
        texts[id(node)] = text
    return "".join([*lines, f"    return {texts[id(root)]}\n"])
