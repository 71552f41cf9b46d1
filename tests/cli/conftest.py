"""What the tests of the commands share: calls on the host are timed without a rest before each."""

from __future__ import annotations

import pytest

from cupy_flash.cli.measure.timing import HostTimer


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    # A tenth of a second before each of some 700 calls is most of these tests' time.
    monkeypatch.setattr(HostTimer, "pause", 0.0)
