"""What a traced function computes: nodes of a graph, in which equal subexpressions are one node."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

# Types of values. A real is a float, in the kernels of float64 a double.
BOOL, INT, UINT64, REAL = "bool", "int32", "uint64", "real"
# What an array capture is, which has to be indexed.
ARRAY = "array"

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
_UINT64_MAX = 2**64 - 1

COMPARISONS = frozenset({"lt", "le", "eq", "ne"})
# Of two arguments whose order does not matter: a constant stands second.
_COMMUTATIVE = frozenset({"add", "mul", "and", "or", "xor", "min", "max", "eq", "ne"})


class Node:
    """A value of an expression: immutable, and the same object for the same value.

    Attributes
    ----------
    op
        ``const``, ``symbol``, ``scalar`` (a captured number) and ``array`` (a captured array) are
        leaves. ``load`` reads an array, its first argument, at indices; ``cuda`` calls a text.
        The others are named after NumPy's functions; ``div`` is of reals, ``min`` and ``max`` give
        NaN for NaN, ``and``, ``or``, ``xor`` and ``not`` work on bools, or on the bits of integers.
    type
        ``"bool"``, ``"int32"``, ``"uint64"`` or ``"real"``; ``"array"`` of an array.
    args
        What it is computed from.
    value
        Of a constant, its bool, int or float; of the other leaves, the name; of ``cuda``, the
        text and the names of its parameters.
    """

    __slots__ = ("__weakref__", "args", "op", "type", "value")

    op: str
    type: str
    args: tuple[Node, ...]
    value: Any

    def __new__(cls, op: str, type: str, args: tuple[Node, ...] = (), value: Any = None) -> Node:
        """The node of these parts, a new one only where there is none."""
        # 0.0 equals -0.0, and NaN not itself.
        key = op, type, args, value.hex() if isinstance(value, float) else value
        with _lock:
            node = _nodes.get(key)
            if node is None:
                node = object.__new__(cls)
                for name, part in (("op", op), ("type", type), ("args", args), ("value", value)):
                    object.__setattr__(node, name, part)
                _nodes[key] = node
        return node

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a node is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return Node, (self.op, self.type, self.args, self.value)

    def __repr__(self) -> str:
        what = self.op if self.value is None else f"{self.op} {self.value!r}"
        return f"<{self.type} {what} of {len(self.args)}>" if self.args else f"<{self.type} {what}>"

    @property
    def is_constant(self) -> bool:
        """Whether it is a literal."""
        return self.op == "const"


# Nodes hold their arguments; none holds those that are made of it.
_nodes: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()
_lock = threading.Lock()

T = TypeVar("T")


def postorder(*roots: Node) -> Iterator[Node]:
    """Every node once, behind its arguments."""
    done: set[Node] = set()
    stack = [(node, False) for node in reversed(roots)]
    while stack:
        node, is_ready = stack.pop()
        if node in done:
            continue
        if is_ready:
            done.add(node)
            yield node
        else:
            stack.append((node, True))
            stack += [(argument, False) for argument in reversed(node.args)]


def fold(root: Node, visit: Callable[[Node, tuple[T, ...]], T]) -> T:
    """What `visit` makes of a node and of its arguments' results, each node once."""
    results: dict[Node, T] = {}
    for node in postorder(root):
        results[node] = visit(node, tuple(results[argument] for argument in node.args))
    return results[root]


def rebuilt(node: Node, args: tuple[Node, ...]) -> Node:
    """The node with other arguments, simplified again."""
    if args == node.args:
        return node
    if node.op in ("load", "cuda"):
        return Node(node.op, node.type, args, node.value)
    return cast(args[0], node.type) if node.op == "cast" else operation(node.op, *args)


def substitute(root: Node, replacements: Mapping[Node, Node]) -> Node:
    """The expression with some nodes replaced: symbols by expressions, captures by others."""
    return fold(root, lambda node, args: replacements.get(node) or rebuilt(node, args))


def symbol(name: str, type: str = INT) -> Node:
    """What a kernel gives for each pair: a position, or the score."""
    return Node("symbol", type, (), name)


SCORE = symbol("score", REAL)
B, H, I, J = (symbol(name) for name in "bhij")  # noqa: E741
# The query's row in its sequence, not offset: for what the library itself makes of its options.
ROW = symbol("row")
Q_START, K_START = symbol("q_start"), symbol("k_start")
# What exponents of a row are relative to.
BASE = symbol("base", REAL)


def constant(value: bool | int | float, type: str) -> Node:
    """A literal of a type.

    Raises
    ------
    OverflowError
        For an integer that the type does not hold.
    """
    if type == BOOL:
        return Node("const", BOOL, (), bool(value))
    if type == REAL:
        return Node("const", REAL, (), float(value))
    low, high = (_INT_MIN, _INT_MAX) if type == INT else (0, _UINT64_MAX)
    if not low <= value <= high:
        raise OverflowError(f"{value} does not fit {type}")
    return Node("const", type, (), int(value))


TRUE, FALSE = constant(True, BOOL), constant(False, BOOL)


def operation(op: str, *args: Node) -> Node:
    """A value computed from others of the right types, simplified where that changes no result."""
    if op in _COMMUTATIVE and args[0].is_constant:
        args = args[::-1]
    kind = args[1].type if op == "where" else args[0].type
    result = BOOL if op in COMPARISONS else kind
    if all(argument.is_constant for argument in args) and op in _FOLDED:
        folded = _folded(op, result, *(argument.value for argument in args))
        if folded is not None:
            return folded
    return _simplified(op, args) or Node(op, result, args)


def cast(x: Node, type: str) -> Node:
    """A value converted; a real to an integer by leaving out what is behind the point."""
    if x.type == type:
        return x
    if type == BOOL:
        return operation("ne", x, constant(0, x.type))
    if x.is_constant:
        try:
            return constant(int(x.value) if type != REAL else x.value, type)
        except (OverflowError, ValueError):
            pass
    return Node("cast", type, (x,))


def logical_not(x: Node) -> Node:
    """The opposite of a bool."""
    return operation("not", x)


_FOLDED: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x: -x,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
}


def _folded(op: str, type: str, *values: Any) -> Node | None:
    """The constant, or None where only the device's arithmetic says what it is."""
    try:
        return constant(_FOLDED[op](*values), type)
    except (ZeroDivisionError, OverflowError):
        return None


def _simplified(op: str, args: tuple[Node, ...]) -> Node | None:
    """An operation that is one of its arguments, or a constant; else None."""
    x, y = args[0], args[-1]
    value = y.value if y.is_constant else None
    if op == "where":
        if x.is_constant:
            return args[1] if x.value else y
        return y if args[1] is y else None
    if op in ("not", "neg") and x.op == op:
        return x.args[0]
    if op == "not" and x.type == BOOL and x.is_constant:
        return FALSE if x.value else TRUE
    if x is y and op in COMPARISONS and x.type != REAL:
        return TRUE if op in ("le", "eq") else FALSE
    if value is None:
        return None
    if y.type == BOOL:
        if op == "and":
            return x if value else FALSE
        if op == "or":
            return TRUE if value else x
        return None
    if (op in ("add", "sub") and value == 0) or (op in ("mul", "div") and value == 1):
        return x
    return y if op == "mul" and value == 0 and y.type != REAL else None
