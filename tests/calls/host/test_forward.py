"""Choice between GPU and CPU backend for packed sequences in host memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.comparisons import assert_all_equal

from cupy_flash import combine, flash_attention, flash_attention_backward
from cupy_flash.calls import backends
from cupy_flash.calls.host import forward as host_forward
from cupy_flash.calls.options import Options
from cupy_flash.errors import UnsupportedError
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.problem.arrays import ArraySpec
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.problem import Problem, make_problem

OPTIONS = Options("varlen", max_seqlen_q=59, max_seqlen_k=59)


def problem(dtype: str = "float16") -> Problem:
    q, k = (ArraySpec.contiguous((1, 113, heads, 64), dtype) for heads in (4, 2))
    return make_problem(q, k, k, kind="varlen", batch=3, max_seqlen_q=59, max_seqlen_k=59)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake GPU that supports 16-bit dtypes only."""

    def is_served(problem: Problem, device: object) -> bool:
        assert device == device_for_arch("sm_90")
        return problem.itemsize == 2

    runtime = SimpleNamespace(getDevice=lambda: 0)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(backends, "gpu_unavailable", lambda: None)
    monkeypatch.setattr(host_forward, "cupy_module", lambda: sys.modules["cupy"])
    monkeypatch.setattr(host_forward, "current_device", lambda: device_for_arch("sm_90"))
    monkeypatch.setattr(host_forward, "is_served", is_served)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("dtype", "expected"), [("float16", True), ("float32", False)])
def test_a_gpu_computes_what_one_of_its_families_serves(dtype: str, expected: bool) -> None:
    assert host_forward.runs_on_gpu(problem(dtype), OPTIONS, "auto") is expected


@pytest.mark.usefixtures("gpu")
def test_asking_for_the_gpu_or_one_of_its_families_leaves_nothing_open() -> None:
    named = OPTIONS._replace(family="mma")
    assert host_forward.runs_on_gpu(problem("float32"), OPTIONS, "gpu")
    assert host_forward.runs_on_gpu(problem("float32"), named, "auto")
    assert not host_forward.runs_on_gpu(problem(), OPTIONS, "cpu")


def test_without_a_gpu_the_cpu_computes_and_asking_for_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "gpu_unavailable", lambda: "it was sold")
    assert not host_forward.runs_on_gpu(problem(), OPTIONS, "auto")
    with pytest.raises(UnsupportedError, match="backend is 'gpu', but it was sold"):
        host_forward.runs_on_gpu(problem(), OPTIONS, "gpu")


def gradients(x: np.ndarray) -> Any:
    out, lse = flash_attention(x, x, x, return_lse=True)
    return flash_attention_backward(x, x, x, x, out, lse)


@pytest.mark.parametrize(
    "call",
    [lambda x: flash_attention(x, x, x), gradients, lambda x: combine(x[None], x[None, ..., 0])],
)
def test_another_thread_may_be_importing_cupy(
    call: Callable[[np.ndarray], Any], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_unavailable()  # imports the real CuPy, and caches the result
    monkeypatch.setattr(backends, "gpu_unavailable", lambda: "it is not there yet")
    x = rng.standard_normal((1, 5, 5, 8)).astype(np.float32)
    expected = call(x)
    # While another thread imports CuPy, the module is in sys.modules but still empty.
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    assert_all_equal(call(x), expected)
