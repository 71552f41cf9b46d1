"""Attention and its gradients on Hopper: `kernels_cu/forward/hopper.cu`, `backward/hopper.cu`."""

from __future__ import annotations

from cupy_flash.families.hopper.backward import HopperBackwardFamily, HopperBackwardTile
from cupy_flash.families.hopper.forward import HopperFamily
from cupy_flash.families.hopper.tiles import HopperTile

__all__ = ["HopperBackwardFamily", "HopperBackwardTile", "HopperFamily", "HopperTile"]
