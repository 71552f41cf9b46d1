"""The `hopper` families of each direction, with wgmma and TMA (sm_90a)."""

from __future__ import annotations

from cupy_flash.families.hopper.backward import HopperBackwardFamily, HopperBackwardTile
from cupy_flash.families.hopper.forward import HopperFamily
from cupy_flash.families.hopper.received import HopperLseFamily, HopperReceivedFamily
from cupy_flash.families.hopper.tangents import HopperTangentFamily
from cupy_flash.families.hopper.tiles import HopperTile

__all__ = [
    "HopperBackwardFamily",
    "HopperBackwardTile",
    "HopperFamily",
    "HopperLseFamily",
    "HopperReceivedFamily",
    "HopperTangentFamily",
    "HopperTile",
]
