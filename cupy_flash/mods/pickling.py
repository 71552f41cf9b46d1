"""Pickled form of modifications: expressions as flat lists, and functions as names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NoReturn

from cupy_flash.mods.ir.expression import Node, postorder

# Op, type and value of a node, and the indices of its arguments in the list of nodes.
FlatNode = tuple[str, str, Any, tuple[int, ...]]


def flattened(root: Node) -> tuple[FlatNode, ...]:
    """Return the nodes of a graph, each after its arguments, the root last.

    Pickling the root itself would recurse to the depth of the graph.
    """
    indices: dict[Node, int] = {}
    for node in postorder(root):
        indices[node] = len(indices)
    return tuple(
        (node.op, node.type, node.value, tuple(indices[argument] for argument in node.args))
        for node in indices
    )


def restored(flat: tuple[FlatNode, ...]) -> Node:
    """Return the root of the graph that `flattened` has listed."""
    nodes: list[Node] = []
    for op, type, value, arguments in flat:
        nodes.append(Node(op, type, tuple(nodes[place] for place in arguments), value))
    return nodes[-1]


class AbsentFunction:
    """Stand-in for a function of which only the traced form is known, as after unpickling.

    Parameters
    ----------
    name
        Name of the function in its module.
    """

    def __init__(self, name: str) -> None:
        self.__qualname__ = name
        self.__name__ = name.rpartition(".")[2]

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        """Raise TypeError."""
        raise TypeError(
            f"{self.__name__} is not available, as only its traced form was pickled; use "
            "evaluate() of the modification"
        )

    def __repr__(self) -> str:
        return f"<absent function {self.__name__}>"


def reference_to(function: Callable[..., Any]) -> tuple[str | None, str]:
    """Return a function's module and name; the module is None if it does not have the function."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if module and name and _found(module, name) is function:
        return module, name
    return None, name or repr(function)


def resolve_reference(module: str | None, name: str) -> Callable[..., Any]:
    """Return the function that a reference names, or a stand-in with that name."""
    result = None if module is None else _found(module, name)
    return result if callable(result) else AbsentFunction(name)


def _found(module: str, name: str) -> Any:
    """Return the object of a dotted name in a module, or None."""
    try:
        result: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        result = getattr(result, part, None)
    return result
