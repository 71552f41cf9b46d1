"""Checks of device arrays under `CUPY_FLASH_CHECK`, run on NumPy arrays instead."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.gpu import fake_gpu
from support.gpu.fake_gpu import FakeArray, FakeGpu

import cupy_flash
from cupy_flash.calls import rotary
from cupy_flash.calls.check import device_lengths
from cupy_flash.calls.gpu.backward import GRADIENTS
from cupy_flash.calls.gpu.forward import ATTENTION
from cupy_flash.calls.host import backward as host_backward
from cupy_flash.calls.host import forward as host_forward

ROWS, KEYS, HEADS, DIM = 9, 12, 2, 8


@pytest.fixture(params=[False, True], ids=["usual", "captured"])
def is_captured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a fake stream is captured. The CPU backend runs the checks for device arrays."""
    stream = SimpleNamespace(is_capturing=lambda: request.param)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    monkeypatch.setattr(device_lengths, "cupy_module", lambda: cupy)

    def check_contents(arguments: Any, options: Any, problem: Any, keys: int) -> Any:
        device_lengths.check(arguments, options, keys, ATTENTION.check)
        # The computation itself needs valid lengths and indices, so it is skipped.
        raise Passed

    def known(calls: Any, check: Any, arguments: Any, options: Any, backend: str) -> Any:
        device_lengths.check(arguments, options, 0, GRADIENTS.check)
        raise Passed

    monkeypatch.setattr(host_forward, "check_contents", check_contents)
    monkeypatch.setattr(host_backward, "find_call", known)
    return bool(request.param)


class Passed(Exception):
    """Raised when no check has failed."""


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def _dense() -> dict[str, Any]:
    q, k = _zeros(2, ROWS, HEADS, DIM), _zeros(2, KEYS, HEADS, DIM)
    return {"q": q, "k": k, "v": k}


def _packed() -> dict[str, Any]:
    q, k = _zeros(ROWS, HEADS, DIM), _zeros(KEYS, HEADS, DIM)
    starts_q, starts_k = (np.array([0, 4, end], np.int32) for end in (ROWS, KEYS))
    lengths = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    return {"q": q, "k": k, "v": k, **lengths, "max_seqlen_q": 5, "max_seqlen_k": 8}


def _cached() -> dict[str, Any]:
    q, cache = _zeros(2, 1, HEADS, DIM), _zeros(6, 4, HEADS, DIM)
    lengths, table = np.array([3, 7], np.int32), np.array([[5, 0], [1, 2]], np.int32)
    caches = {"k_cache": cache, "v_cache": cache, "block_table": table}
    return {"q": q, **caches, "cache_seqlens": lengths}


def _with_gradients(values: dict[str, Any]) -> dict[str, Any]:
    q = values["q"]
    lse = q.shape[:-1][::-1] if q.ndim == 3 else (q.shape[0], HEADS, ROWS)
    return values | {"dout": q, "out": q, "lse": _zeros(*lse)}


CALLS = {
    "dense": (cupy_flash.flash_attention, _dense),
    "varlen": (cupy_flash.flash_attention_varlen, _packed),
    "kvcache": (cupy_flash.flash_attention_with_kvcache, _cached),
    "dense backward": (cupy_flash.flash_attention_backward, lambda: _with_gradients(_dense())),
    "packed backward": (
        cupy_flash.flash_attention_varlen_backward,
        lambda: _with_gradients(_packed()),
    ),
}
APPENDED: dict[str, Any] = dict.fromkeys(("k", "v"), _zeros(5, HEADS, DIM))
APPENDED |= {"v_cache": _zeros(6, 4, HEADS, DIM), "cu_seqlens_k_new": [0, 2, 9]}
WRONG = [
    ("dense", {"seqlens_k": [3, KEYS + 1]}, r"seqlens_k\[1\] is 13; expected at most 12"),
    ("dense", {"prefix_lens": [-1, 3], "causal": True}, r"prefix_lens\[0\] is -1"),
    ("dense", {"q_offset": [2, 2**30], "causal": True}, r"q_offset\[1\] is 1073741824; expected"),
    ("varlen", {"q_offset": [-(2**30), 0], "causal": True}, r"q_offset\[0\] is -1073741824; exp"),
    ("packed backward", {"seqused_q": [0, 99]}, r"seqused_q\[1\] is 99; expected at most"),
    ("kvcache", {"cache_leftpad": [0, 9]}, r"cache_leftpad\[1\] is 9; expected at most"),
    ("dense backward", {"seqlens_k": [-2, 3]}, r"seqlens_k\[0\] is -2; expected at least 0"),
    ("varlen", {"cu_seqlens_q": [0, 5, 4]}, "cu_seqlens_q decreases from 5 to 4 at index 2"),
    ("varlen", {"cu_seqlens_k": [0, 9, KEYS]}, "cu_seqlens_k gives sequence 0 a length of 9"),
    ("varlen", {"seqused_k": [4, -1]}, r"seqused_k\[1\] is -1; expected at least 0"),
    ("packed backward", {"cu_seqlens_k": [0, 4, 13]}, r"cu_seqlens_k\[2\] is 13; expected at"),
    ("kvcache", APPENDED, r"cu_seqlens_k_new\[2\] is 9; expected at most 5, the rows of k and v"),
    ("kvcache", {"cache_seqlens": [3, 9]}, r"cache_seqlens\[1\] is 9; expected at most 8"),
    ("kvcache", {"block_table": [[5, 0], [1, 6]]}, r"block_table\[1, 1\] is 6; expected 0 to 5"),
]


def arrays_of(change: dict[str, Any]) -> dict[str, Any]:
    return {n: np.array(x, np.int32) if isinstance(x, list) else x for n, x in change.items()}


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_an_entry_out_of_range_is_named(
    name: str, change: dict[str, Any], message: str, is_captured: bool
) -> None:
    function, arguments = CALLS[name]
    values = arguments() | arrays_of(change)
    # Arrays of a captured call have no contents yet, so nothing is checked.
    error = pytest.raises(Passed) if is_captured else pytest.raises(ValueError, match=message)
    with error:
        function(**values, backend="cpu")


@pytest.mark.usefixtures("is_captured")
@pytest.mark.parametrize("name", CALLS)
def test_right_entries_pass(name: str) -> None:
    function, arguments = CALLS[name]
    with pytest.raises(Passed):
        function(**arguments(), backend="cpu")


@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize("is_enabled", [False, True])
@pytest.mark.parametrize("wrong", [-1, 6])
def test_positions_on_a_gpu_are_checked(
    monkeypatch: pytest.MonkeyPatch, wrong: int, is_enabled: bool, is_capturing: bool
) -> None:
    gpu = fake_gpu.install(monkeypatch)
    monkeypatch.setattr(device_lengths, "is_enabled", is_enabled)
    monkeypatch.setattr(device_lengths, "_is_capturing", lambda: is_capturing)
    computed: list[Any] = []
    monkeypatch.setattr(rotary, "_rotated", lambda x, *others, **_: computed.append(x) or x)
    x, table = gpu.array(2, 3, HEADS, DIM), gpu.array(6, DIM // 2)
    positions = gpu.lengths(2, 3)
    values = np.array([[0, 1, 2], [3, 4, 5]])
    positions.get = lambda: values
    _, pull_back = cupy_flash.apply_rotary_vjp(x, table, table, positions)
    pull_back(x)
    assert len(computed) == 2
    values[1, 2] = wrong
    is_refused = is_enabled and not is_capturing
    error = pytest.raises(ValueError, match=rf"positions\[1, 2\] is {wrong}; expected 0 to 5")
    for call in (lambda: cupy_flash.apply_rotary(x, table, table, positions), lambda: pull_back(x)):
        with error if is_refused else contextlib.nullcontext():
            call()
    assert len(computed) == (2 if is_refused else 4)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_the_variable_asks_for_checks(value: str, expected: bool) -> None:
    program = (
        "from cupy_flash.calls.check import device_lengths as lengths; print(lengths.is_enabled)"
    )
    environment = {**os.environ, device_lengths.VARIABLE: value}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(expected)


@pytest.fixture(params=[None, "0", "1"])
def is_enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the environment variable, read at import, enables the checks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(device_lengths.VARIABLE, raising=False)
        if request.param is not None:
            patch.setenv(device_lengths.VARIABLE, request.param)
        importlib.reload(device_lengths)
        yield request.param == "1"
    importlib.reload(device_lengths)


@pytest.fixture
def contents(is_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> dict[int, np.ndarray]:
    """Contents of the arrays on the fake GPU, by address."""
    found: dict[int, np.ndarray] = {}
    stream = SimpleNamespace(is_capturing=lambda: False)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    monkeypatch.setattr(device_lengths, "cupy_module", lambda: cupy)
    monkeypatch.setattr(device_lengths, "convert_to", lambda _, array: found[array.data.ptr])
    return found


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_the_variable_switches_the_checks_of_calls_on_a_gpu_on(
    name: str,
    change: dict[str, Any],
    message: str,
    is_enabled: bool,
    contents: dict[int, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = fake_gpu.install(monkeypatch)
    function, arguments = CALLS[name]

    def call(values: dict[str, Any]) -> int:
        """Return the number of launches of a call with these values on the fake GPU."""
        before = len(gpu.launches)
        function(**{n: on_gpu(gpu, x, contents) for n, x in values.items()})
        return len(gpu.launches) - before

    wrong = arguments() | arrays_of(change)
    # The second iteration repeats a call that is already prepared.
    for _ in range(2):
        assert call(arguments()) > 0
        if not is_enabled:
            assert call(wrong) > 0
            continue
        launched = len(gpu.launches)
        with pytest.raises(ValueError, match=message):
            call(wrong)
        assert len(gpu.launches) == launched


def on_gpu(gpu: FakeGpu, value: Any, contents: dict[int, np.ndarray]) -> FakeArray | Any:
    """Return an array on the fake GPU with these contents."""
    if not isinstance(value, np.ndarray):
        return value
    array = gpu.array(*value.shape, dtype=value.dtype)
    contents[array.data.ptr] = value
    return array
