"""The kernel families, in the order in which the planner prefers them."""

from __future__ import annotations

from cupy_flash.families.contract import Family, Launch, TranslationUnit
from cupy_flash.families.decode import DecodeFamily
from cupy_flash.families.hopper import HopperFamily
from cupy_flash.families.mma import MmaFamily
from cupy_flash.families.naive import NaiveFamily
from cupy_flash.families.simt import SimtFamily

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (DecodeFamily(), HopperFamily(), MmaFamily(), SimtFamily(), NaiveFamily())
}

__all__ = ["FAMILIES", "Family", "Launch", "TranslationUnit"]
