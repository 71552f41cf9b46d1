"""Members of the generated structs ``Row`` and ``Keys``, and helpers, collected as needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from cupy_flash.mods.ir.analysis import Linear
from cupy_flash.mods.ir.expression import Node

# Indices of an array's element that depend on the row alone, each with its axis.
Indices = tuple[tuple[int, Node], ...]


@dataclass
class Members:
    """Members of both structs, in the order in which they were first requested.

    Attributes
    ----------
    values
        Members of ``Row``: values that are constant along a row.
    row_offsets
        Members of ``Row``: the part of an element's offset that indices of the row alone determine.
    positions
        Members of ``Keys``: integers that are linear in the key, at the first key, without offset.
    reals
        Members of ``Keys``: reals that are linear in the key, at the first key.
    functions
        Helper functions by the user's CUDA source and types: the name of each, and a node that
        calls it.
    bounds
        Conditions, not members. If all hold, indices of the pairs from step 0 to ``last`` are in
        the bounds of their arrays.
    """

    values: dict[Node, str] = field(default_factory=dict)
    row_offsets: dict[tuple[str, Indices], str] = field(default_factory=dict)
    positions: dict[tuple[int, frozenset[tuple[Node, int]]], tuple[str, Linear]] = field(
        default_factory=dict
    )
    reals: dict[Node, str] = field(default_factory=dict)
    functions: dict[tuple[object, tuple[str, ...]], tuple[str, Node]] = field(default_factory=dict)
    bounds: dict[str, None] = field(default_factory=dict)

    def value(self, node: Node) -> str:
        """Return the member of ``Row`` that holds a value."""
        is_symbol = node.op == "symbol"
        fresh = str(node.value) if is_symbol else f"v{len(self.values)}"
        return "r." + self.values.setdefault(node, fresh)

    def row_offset(self, array: str, indices: Indices) -> str:
        """Return the member of ``Row`` with the offset that the row's indices add in an array."""
        return "r." + self.row_offsets.setdefault((array, indices), f"p{len(self.row_offsets)}")

    def position(self, linear: Linear) -> str:
        """Return the member of ``Keys`` that holds a linear integer at the first key."""
        # The order in which terms were added does not matter.
        key = linear.key, frozenset(linear.terms)
        fresh = "first" if key == (1, frozenset()) else f"m{len(self.positions)}"
        return "k." + self.positions.setdefault(key, (fresh, linear))[0]

    def real(self, node: Node) -> str:
        """Return the member of ``Keys`` that holds a real at the first key."""
        return "k." + self.reals.setdefault(node, f"f{len(self.reals)}")

    def function(self, node: Node) -> str:
        """Return the name of the helper function that a ``cuda`` node calls."""
        key = node.value, (node.type, *(argument.type for argument in node.args))
        return self.functions.setdefault(key, (f"cuda{len(self.functions)}", node))[0]
