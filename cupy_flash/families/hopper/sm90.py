"""Constants of sm_90a for forward and backward kernels, and a check of the device."""

from __future__ import annotations

from cupy_flash.problem.device import Device

# Number of threads of a warpgroup, and number of rows of its products (wgmma).
WARPGROUP = 128
WARPGROUP_ROWS = 64
BARRIER_BYTES = 8


def why_not_device(device: Device) -> str | None:
    """Return why kernels cannot be compiled for sm_90a on a device, or None if they can."""
    if device.arch != 90:
        return f"needs sm_90 for wgmma, not {device.sm}"
    if not device.arch_specific:
        return "needs NVRTC 12.9 or newer: through CuPy, older ones cannot compile for sm_90a"
    return None
