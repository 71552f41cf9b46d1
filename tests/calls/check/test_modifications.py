"""The arrays of the modifications of a call are checked and broadcast once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gpu import fake_gpu

from cupy_flash import flash_attention, flash_attention_backward, flash_attention_varlen
from cupy_flash.calls.check import problems
from cupy_flash.calls.host import forward as host_forward


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of each call of `canonical`."""
    calls: list[tuple[Any, ...]] = []
    for module in (problems, host_forward):
        canonical = module.canonical
        monkeypatch.setattr(
            module, "canonical", lambda *given, f=canonical: calls.append(given) or f(*given)
        )
    return calls


def attend(array: Callable[..., Any], rows: int) -> None:
    q, sinks = array(1, rows, 2, 16), array(2)
    flash_attention(q, q, q, sinks=sinks)


def attend_packed(array: Callable[..., Any], rows: int) -> None:
    q, starts = array(rows, 2, 16), array(2, dtype=np.int32)
    flash_attention_varlen(q, q, q, starts, starts, rows, rows, sinks=array(2))


def differentiate(array: Callable[..., Any], rows: int) -> None:
    q, lse, sinks = array(1, rows, 2, 16), array(1, 2, rows), array(2)
    flash_attention_backward(q, q, q, q, q, lse, sinks=sinks, wrt=("q", "sinks"))


CALLS = pytest.mark.parametrize("call", [attend, attend_packed, differentiate])


@CALLS
def test_host_arrays_are_checked_once_in_each_call(
    call: Callable[..., None], checks: list[tuple[Any, ...]]
) -> None:
    def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
        return np.zeros(shape, dtype)

    for count in (1, 2, 3):
        call(array, 37)
        assert len(checks) == count


@CALLS
def test_device_arrays_are_checked_once_for_all_equal_calls(
    call: Callable[..., None], checks: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = fake_gpu.install(monkeypatch)

    def array(*shape: int, dtype: Any = np.float32) -> Any:
        return gpu.array(*shape, dtype=dtype)

    for _ in range(3):
        call(array, 37)
        assert len(checks) == 1
