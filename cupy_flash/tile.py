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

    def __str__(self) -> str:
        rest = (f"{k}={v}" for k, v in dataclasses.asdict(self).items() if k not in ("Br", "Bc"))
        return " ".join([f"{self.Br}x{self.Bc}", *rest])
