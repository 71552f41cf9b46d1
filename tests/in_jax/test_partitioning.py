"""Attention over several devices: batch and heads are divided, and nothing is gathered."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.in_jax import run_program

pytest.importorskip("jax")


@pytest.mark.parametrize("axes", [(2, 2), (2, 1), (1, 2)])
def test_calls_are_divided_over_devices(rng: np.random.Generator, axes: tuple[int, int]) -> None:
    # JAX divides a CPU into devices only before it starts, so the calls are in another process.
    flags = f"--xla_force_host_platform_device_count={math.prod(axes)}"
    seed = int(rng.integers(2**31))
    output = run_program("divided_calls", seed, *axes, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert output == "all right\n"
