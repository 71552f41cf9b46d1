"""Registry of the kernel families of each direction, in the planner's order of preference."""

from __future__ import annotations

from typing import Any

from cupy_flash.families.contract import Family, TranslationUnit
from cupy_flash.families.decode import DecodeFamily
from cupy_flash.families.hopper import (
    HopperBackwardFamily,
    HopperFamily,
    HopperLseFamily,
    HopperReceivedFamily,
    HopperTangentFamily,
)
from cupy_flash.families.mma.backward import MmaBackwardFamily
from cupy_flash.families.mma.forward import MmaFamily
from cupy_flash.families.mma.received import MmaReceivedFamily
from cupy_flash.families.mma.tangents import MmaTangentFamily
from cupy_flash.families.naive import NaiveFamily
from cupy_flash.families.simt.backward import SimtBackwardFamily
from cupy_flash.families.simt.forward import SimtFamily
from cupy_flash.families.simt.received import SimtReceivedFamily
from cupy_flash.families.simt.tangents import SimtTangentFamily

FORWARD: dict[str, Family[Any]] = {
    family.name: family
    for family in (DecodeFamily(), HopperFamily(), MmaFamily(), SimtFamily(), NaiveFamily())
}
FAMILIES: dict[str, dict[str, Family[Any]]] = {
    "forward": FORWARD,
    # Forward calls whose output is not needed.
    "lse": {family.name: family for family in (HopperLseFamily(), *FORWARD.values())},
    "backward": {
        family.name: family
        for family in (HopperBackwardFamily(), MmaBackwardFamily(), SimtBackwardFamily())
    },
    "tangent": {
        family.name: family
        for family in (HopperTangentFamily(), MmaTangentFamily(), SimtTangentFamily())
    },
    "received": {
        family.name: family
        for family in (HopperReceivedFamily(), MmaReceivedFamily(), SimtReceivedFamily())
    },
}

__all__ = ["FAMILIES", "FORWARD", "Family", "TranslationUnit"]
