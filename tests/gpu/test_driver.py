"""Functions of the CUDA driver: the capture mode of a thread."""

from __future__ import annotations

from typing import Any

import pytest

from cupy_flash.errors import DriverError
from cupy_flash.gpu import driver

THREAD_LOCAL, RELAXED = 1, 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_is_relaxed_until_the_context_ends(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    modes = [THREAD_LOCAL]

    def exchange(mode: Any) -> int:
        modes.append(mode._obj.value)
        mode._obj.value = modes[-2]
        return 0

    monkeypatch.setattr(driver, "driver_function", lambda name: exchange)
    try:
        with driver.relaxed_capture():
            assert modes[-1] == RELAXED
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert modes == [THREAD_LOCAL, RELAXED, THREAD_LOCAL]


def test_an_error_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "driver_function", lambda name: lambda mode: 1)
    with pytest.raises(DriverError, match="StreamCaptureMode failed with CUresult 1"):
        driver.relaxed_capture().__enter__()
