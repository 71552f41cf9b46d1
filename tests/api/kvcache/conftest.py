"""Shared fixture of the tests of KV caches: the libraries whose arrays calls take."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> ModuleType:
    """Module of an array library, NumPy or CuPy."""
    return importlib.import_module(request.param)
