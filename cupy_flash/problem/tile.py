"""The compile-time choices that a tuner sweeps, and how a caller asks for them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass

from cupy_flash.problem.values import integer


@dataclass(frozen=True)
class Tile:
    """Compile-time choices of a kernel; each family adds its own fields, all of them integers.

    Attributes
    ----------
    Br, Bc
        Query rows and key/value rows of a tile.
    """

    Br: int
    Bc: int

    def __post_init__(self) -> None:
        # Not asdict, which copies deeply: 20 us.
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, not {type(value).__name__}")
            if value < (1 if name in ("Br", "Bc") else 0):
                raise ValueError(f"{name} is {value}; expected a positive number")

    def __str__(self) -> str:
        rest = (f"{k}={v}" for k, v in dataclasses.asdict(self).items() if k not in ("Br", "Bc"))
        return " ".join([f"{self.Br}x{self.Bc}", *rest])


def block_sizes(block: tuple[int, int]) -> tuple[int, int]:
    """Rows and keys of the blocks that a caller cuts a score matrix into.

    Raises
    ------
    TypeError
        For what is no pair of integers.
    ValueError
        For another number of integers, and for sizes below 1.
    """
    expected = f"block is {block!r}; expected (rows, keys), integers of at least 1"
    try:
        rows, keys = (integer("block", size) for size in block)
    except (TypeError, ValueError) as error:
        raise type(error)(expected) from None
    if min(rows, keys) < 1:
        raise ValueError(expected)
    return rows, keys


# What a caller may pass as `tile`, and the same in a form that can be part of a key.
TileRequest = Tile | Mapping[str, int] | tuple[int, int] | None
FrozenTile = Tile | tuple[tuple[str, int], ...] | None


def freeze_tile(request: TileRequest) -> FrozenTile:
    """A caller's tile request in hashable form.

    Raises
    ------
    TypeError
        If it is neither a Tile, nor a mapping, nor a pair, or its values are no integers.
    ValueError
        If it is a sequence of another length.
    """
    if request is None or isinstance(request, Tile):
        return request
    try:
        if isinstance(request, Mapping):
            fields = dict(request)
        else:
            Br, Bc = request
            fields = {"Br": Br, "Bc": Bc}
        if bool in map(type, fields.values()):
            raise TypeError("a bool is no size")
        return tuple((str(name), operator.index(value)) for name, value in fields.items())
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"tile is {request!r}; expected a Tile, a mapping of its fields to integers, or "
            "(Br, Bc)"
        ) from None
