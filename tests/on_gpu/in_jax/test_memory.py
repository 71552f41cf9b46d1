"""Calls outside of compiled functions: memory of the copies of NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest
from support.gpu import cupy

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")

pytestmark = pytest.mark.gpu

# A kernel that keeps a stream busy for a number of clock cycles.
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


def test_copies_are_read_before_jax_overwrites_them(rng: np.random.Generator) -> None:
    try:
        (device, *_) = jax.devices("gpu")
    except RuntimeError:
        pytest.skip("JAX has no gpu")
    spin = cupy.RawKernel(SPIN, "spin")
    # All arrays have one size, so that a new one may get the memory of any that was dropped.
    arrays = [rng.standard_normal((2, 19, 4, 8)).astype(np.float32) for _ in range(3)]
    other = np.full_like(arrays[0], 7)
    with jax.default_device(device):
        expected = np.asarray(cj.flash_attention(*arrays))
        for _ in range(5):
            spin((1,), (1,), (np.int64(50_000_000),))
            # The call copies the arrays to the GPU, and drops the copies when it returns.
            out = cj.flash_attention(*arrays)
            others = [jax.device_put(other, device) for _ in range(50)]
            np.testing.assert_array_equal(np.asarray(out), expected)
            del others
