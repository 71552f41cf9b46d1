"""The forward and backward `hopper` families: `forward/hopper.cu` and `backward/hopper.cu`."""

from __future__ import annotations

from cupy_flash.families.hopper.backward import HopperBackwardFamily, HopperBackwardTile
from cupy_flash.families.hopper.forward import HopperFamily
from cupy_flash.families.hopper.tiles import HopperTile

__all__ = ["HopperBackwardFamily", "HopperBackwardTile", "HopperFamily", "HopperTile"]
