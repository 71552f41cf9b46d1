"""Shared fixture of the command tests: timing on the host without a pause before each call."""

from __future__ import annotations

import pytest

from cupy_flash.cli.measure.timing import HostTimer


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    # A pause of 0.1 s before each of some 700 calls would take most of these tests' time.
    monkeypatch.setattr(HostTimer, "pause", 0.0)
