"""Shared fixture of the tests of public functions: a fake GPU."""

from __future__ import annotations

import pytest
from support.gpu import fake_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_gpu.FakeGpu:
    """Fake GPU, whose arrays have no memory and whose kernels do not run."""
    return fake_gpu.install(monkeypatch)
