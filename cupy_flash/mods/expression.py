"""What a traced function computes: nodes of a graph, in which equal subexpressions are one node."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

# Types of values. A real is a float, in the kernels of float64 a double.
BOOL, INT, UINT64, REAL = "bool", "int32", "uint64", "real"
# What an array capture is, which has to be indexed.
ARRAY = "array"

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
_UINT64_MAX = 2**64 - 1


class Node:
    """A value of an expression: immutable, and the same object for the same value.

    Attributes
    ----------
    op
        ``const``, ``symbol``, ``scalar`` (a captured number) and ``array`` (a captured array) are
        leaves. ``load`` reads an array, its first argument, at indices; ``cuda`` calls a text.
        ``cast`` converts. The others are rows of `cupy_flash.mods.operations.OPERATIONS`.
    type
        ``"bool"``, ``"int32"``, ``"uint64"`` or ``"real"``; ``"array"`` of an array.
    args
        What it is computed from.
    value
        Value of a constant; name of another leaf; text and parameter names of ``cuda``. In lowered
        expressions ``"ordered"`` or ``"exact"`` marks an operation on reals, see `lower`.
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
