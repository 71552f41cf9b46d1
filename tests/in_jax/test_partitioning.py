"""Attention over several devices: batch and heads are divided, and nothing is gathered."""

from __future__ import annotations

import numpy as np
import pytest
from support.in_jax import run_program

pytest.importorskip("jax")


def test_calls_are_divided_over_four_devices(rng: np.random.Generator) -> None:
    # JAX divides a CPU into devices only before it starts, so the calls are in another process.
    flags = "--xla_force_host_platform_device_count=4"
    seed = int(rng.integers(2**31))
    output = run_program("divided_calls", seed, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert output == "all right\n"
