"""The compile-time choices that a tuner sweeps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


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
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, not {type(value).__name__}")
            if value < (1 if name in ("Br", "Bc") else 0):
                raise ValueError(f"{name} is {value}; expected a positive number")

    def __str__(self) -> str:
        rest = (f"{k}={v}" for k, v in dataclasses.asdict(self).items() if k not in ("Br", "Bc"))
        return " ".join([f"{self.Br}x{self.Bc}", *rest])
