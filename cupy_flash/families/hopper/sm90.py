"""What sm_90a gives the kernels of both directions, and which devices have it."""

from __future__ import annotations

from cupy_flash.problem.device import Device

# Threads of a warpgroup, and rows of its products.
WARPGROUP = 128
WARPGROUP_ROWS = 64
BARRIER_BYTES = 8


def why_not_device(device: Device) -> str | None:
    """Why kernels for sm_90a cannot be made for a device, or None if they can."""
    if device.arch != 90:
        return f"needs sm_90 for wgmma, not {device.sm}"
    if not device.arch_specific:
        return "needs NVRTC 12.9 or newer: older ones compile for sm_90 alone when CuPy asks"
    return None
