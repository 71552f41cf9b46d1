"""Registry of the kernel families of each direction, in the planner's order of preference."""

from __future__ import annotations

from typing import Any

from cupy_flash.families.contract import Family, TranslationUnit
from cupy_flash.families.decode import DecodeFamily
from cupy_flash.families.hopper import HopperBackwardFamily, HopperFamily
from cupy_flash.families.mma.backward import MmaBackwardFamily
from cupy_flash.families.mma.forward import MmaFamily
from cupy_flash.families.mma.received import MmaReceivedFamily
from cupy_flash.families.mma.tangents import MmaTangentFamily
from cupy_flash.families.naive import NaiveFamily
from cupy_flash.families.simt.backward import SimtBackwardFamily
from cupy_flash.families.simt.forward import SimtFamily
from cupy_flash.families.simt.received import SimtReceivedFamily
from cupy_flash.families.simt.tangents import SimtTangentFamily

FAMILIES: dict[str, dict[str, Family[Any]]] = {
    "forward": {
        family.name: family
        for family in (DecodeFamily(), HopperFamily(), MmaFamily(), SimtFamily(), NaiveFamily())
    },
    "backward": {
        family.name: family
        for family in (HopperBackwardFamily(), MmaBackwardFamily(), SimtBackwardFamily())
    },
    "tangent": {family.name: family for family in (MmaTangentFamily(), SimtTangentFamily())},
    "received": {family.name: family for family in (MmaReceivedFamily(), SimtReceivedFamily())},
}
FORWARD = FAMILIES["forward"]

__all__ = ["FAMILIES", "FORWARD", "Family", "TranslationUnit"]
