"""What ``Row`` and ``Keys`` hold, and the functions beside them, found as they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from cupy_flash.mods.analysis import Linear
from cupy_flash.mods.expression import Node

# Indices that a row has of an array's element, by their axes.
Indices = tuple[tuple[int, Node], ...]


@dataclass
class Members:
    """Members of both structs, in the order in which they were first asked for.

    Attributes
    ----------
    values
        Of ``Row``: what does not change along a row.
    places
        Of ``Row``: how far the row's indices lead into an array, the others being 0.
    positions
        Of ``Keys``: integers that are linear in the key, at the first one, without offset.
    reals
        Of ``Keys``: reals that grow evenly from key to key, at the first one.
    functions
        Texts that are given as CUDA, with the types of what they are called with, by a node that
        calls them.
    bounds
        No members, but conditions: where all hold, indices of the pairs from step 0 to ``last`` are
        inside of their arrays.
    """

    values: dict[Node, str] = field(default_factory=dict)
    places: dict[tuple[str, Indices], str] = field(default_factory=dict)
    positions: dict[tuple[int, frozenset[tuple[Node, int]]], tuple[str, Linear]] = field(
        default_factory=dict
    )
    reals: dict[Node, str] = field(default_factory=dict)
    functions: dict[tuple[object, tuple[str, ...]], tuple[str, Node]] = field(default_factory=dict)
    bounds: dict[str, None] = field(default_factory=dict)

    def value(self, node: Node) -> str:
        """What a row has of a value."""
        is_symbol = node.op == "symbol"
        fresh = str(node.value) if is_symbol else f"v{len(self.values)}"
        return "r." + self.values.setdefault(node, fresh)

    def place(self, array: str, indices: Indices) -> str:
        """Where in an array a row reads."""
        return "r." + self.places.setdefault((array, indices), f"p{len(self.places)}")

    def position(self, linear: Linear) -> str:
        """A position at the first key."""
        # However its terms were added up.
        key = linear.key, frozenset(linear.terms)
        fresh = "first" if key == (1, frozenset()) else f"m{len(self.positions)}"
        return "k." + self.positions.setdefault(key, (fresh, linear))[0]

    def real(self, node: Node) -> str:
        """A real at the first key."""
        return "k." + self.reals.setdefault(node, f"f{len(self.reals)}")

    def function(self, node: Node) -> str:
        """What the function of a ``cuda`` node is called."""
        key = node.value, (node.type, *(argument.type for argument in node.args))
        return self.functions.setdefault(key, (f"cuda{len(self.functions)}", node))[0]
