"""Expression graphs of traced functions. Equal subexpressions are one node."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

# Types of values. A real is a float, or a double in float64 problems.
BOOL, INT, UINT64, REAL = "bool", "int32", "uint64", "real"
# Type of a captured array, which has to be indexed.
ARRAY = "array"

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
_UINT64_MAX = 2**64 - 1


class Node:
    """Immutable value of an expression. Nodes with equal parts are the same object.

    Attributes
    ----------
    op
        Name of a row of `cupy_flash.mods.ir.operations.OPERATIONS`, or one of the following names.
        ``const``, ``symbol``, ``scalar`` (a captured number) and ``array`` are leaves. ``load``
        reads an array at indices. ``cuda`` calls the user's CUDA source. ``cast`` converts.
    type
        Type of the value: ``"bool"``, ``"int32"``, ``"uint64"``, ``"real"``, or ``"array"``.
    args
        Nodes from which the value is computed.
    value
        Value of a constant; name of another leaf; source and parameters of ``cuda``. In lowered
        expressions ``"ordered"`` or ``"exact"`` marks an operation on reals, see `lower`.
    """

    __slots__ = ("__weakref__", "args", "op", "type", "value")

    op: str
    type: str
    args: tuple[Node, ...]
    value: Any

    def __new__(cls, op: str, type: str, args: tuple[Node, ...] = (), value: Any = None) -> Node:
        """Return the existing node with these parts, or a new node."""
        # Reals are compared by their bits: 0.0 equals -0.0, and NaN does not equal itself.
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
        """Whether the node is a literal."""
        return self.op == "const"


# The references are weak, so that unused nodes are freed. A node keeps its arguments alive, but not
# the nodes that use it.
_nodes: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()
_lock = threading.Lock()

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def postorder(*roots: Node) -> Iterator[Node]:
    """Yield every node once, after its arguments."""
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


def fold(root: Node, compute: Callable[[Node, tuple[T, ...]], T]) -> T:
    """Return ``compute(root, results of its arguments)``, with one call for each node."""
    results: dict[Node, T] = {}
    for node in postorder(root):
        results[node] = compute(node, tuple(results[argument] for argument in node.args))
    return results[root]


def memoized(
    root: K, known: dict[K, T], arguments: Callable[[K], Iterable[K]], compute: Callable[[K], T]
) -> T:
    """Return ``known[root]``, after computing it and the values that it needs.

    This is a loop, because a chain of operations may exceed Python's recursion limit.

    Parameters
    ----------
    root
        Key of the requested value: a node, or a node and how it is computed.
    known
        Values that are already computed; further values are added.
    arguments
        Function that returns the keys of the values from which a value is computed.
    compute
        Function that computes the value of a key, called after `known` has those of its arguments.
    """
    stack = [root]
    while root not in known:
        key = stack[-1]
        missing = [] if key in known else [x for x in arguments(key) if x not in known]
        if missing:
            stack += reversed(missing)
            continue
        if key not in known:
            known[key] = compute(key)
        stack.pop()
    return known[root]


def symbol(name: str, type: str = INT) -> Node:
    """Return the node of a value that a kernel has for each pair: a position, or the score."""
    return Node("symbol", type, (), name)


SCORE = symbol("score", REAL)
B, H, I, J = (symbol(name) for name in "bhij")  # noqa: E741
# Row of the query in its sequence, without q_offset. Users' functions cannot name it.
ROW = symbol("row")
Q_START, K_START = symbol("q_start"), symbol("k_start")
# Base that is subtracted from the exponents of a row.
BASE = symbol("base", REAL)


def constant(value: bool | int | float, type: str) -> Node:
    """Return a literal of a type.

    Raises
    ------
    OverflowError
        For an integer that the type cannot hold.
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
