"""Fixture of PyTorch's devices."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Name of a device of PyTorch."""
    return str(request.param)
