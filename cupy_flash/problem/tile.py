"""Compile-time choices of a kernel that a tuner sweeps, and the form in which callers pass them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass

from cupy_flash.problem.values import integer


@dataclass(frozen=True)
class Tile:
    """Compile-time choices of a kernel. Each family adds integer fields in a subclass.

    Attributes
    ----------
    Br, Bc
        Number of query rows and number of keys of a tile.

    Examples
    --------
    >>> from cupy_flash import Tile
    >>> str(Tile(Br=64, Bc=32))
    '64x32'
    """

    Br: int
    Bc: int

    def __post_init__(self) -> None:
        # asdict() would make deep copies, which takes 20 us.
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
    """Return the checked (rows, keys) of the blocks that a caller divides a score matrix into.

    Raises
    ------
    TypeError
        If the block is not a tuple of integers.
    ValueError
        If the tuple does not have two elements, or a size is below 1.
    """
    expected = f"block is {block!r}; expected (rows, keys), integers of at least 1"
    try:
        rows, keys = (integer("block", size) for size in block)
    except (TypeError, ValueError) as error:
        raise type(error)(expected) from None
    if min(rows, keys) < 1:
        raise ValueError(expected)
    return rows, keys


# Values that a caller may pass as `tile`, and their hashable form, which can be part of a key.
TileRequest = Tile | Mapping[str, int] | tuple[int, int] | None
FrozenTile = Tile | tuple[tuple[str, int], ...] | None


def freeze_tile(request: TileRequest) -> FrozenTile:
    """Return a caller's tile request in hashable form.

    Raises
    ------
    TypeError
        If the request is neither a Tile nor a mapping nor a pair, or a value is not an integer.
    ValueError
        If the request is a sequence of another length than two.
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
            raise TypeError("a bool is not a size")
        return tuple((str(name), operator.index(value)) for name, value in fields.items())
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"tile is {request!r}; expected a Tile, a mapping of its fields to integers, or "
            "(Br, Bc)"
        ) from None
