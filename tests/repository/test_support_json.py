"""The option --support-json: which kernels count as run, and the file that names them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT, script
from support.gpu import fake_gpu

from cupy_flash import flash_attention
from cupy_flash.calls.key_lists import forward

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

from support.gpu.launched_kernels import Recorder

runs = script("support_matrix/support_runs")
pytest_plugins = ["pytester"]

# The option of the tests of this repository, on a fake GPU.
CONFTEST = """
from pathlib import Path
import pytest
from support.gpu import fake_gpu
from support.gpu.launched_kernels import Recorder

def pytest_addoption(parser):
    parser.addoption("--support-json", type=Path)

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU")
    run = {"commit": "abc", "dirty": False, "gpu": "a GPU", "sm": "sm_90", "versions": {}}
    config.pluginmanager.register(Recorder(config, config.option.support_json, lambda: dict(run)))

@pytest.fixture
def gpu(monkeypatch):
    return fake_gpu.install(monkeypatch)

@pytest.fixture
def broken():
    yield
    raise RuntimeError("at the end")
"""
ONE = """
import pytest
from cupy_flash import flash_attention, flash_attention_with_kvcache

pytestmark = pytest.mark.gpu

def call(gpu, dim, **options):
    q, k = gpu.array(2, 512, 8, dim), gpu.array(2, 512, 4, dim)
    flash_attention(q, k, k, **options)

@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (9, 0), "softcap": 9.0}])
def test_it_passes(gpu, options):
    call(gpu, 64, **options)

def test_calls_give_the_same_bits(gpu):
    call(gpu, 64)

def test_it_captures(gpu):
    gpu.captures, gpu.stream = True, 87
    call(gpu, 256)

def test_it_fails(gpu):
    call(gpu, 128)
    assert False

@pytest.mark.xfail
def test_it_is_expected_to_fail(gpu):
    call(gpu, 128)
    assert False

def test_it_fails_at_its_end(broken, gpu):
    call(gpu, 128)
"""
OTHER = """
import pytest
from cupy_flash import flash_attention, flash_attention_with_kvcache

def test_it_is_not_marked(gpu):
    q = gpu.array(2, 512, 8, 128)
    flash_attention(q, q, q)

@pytest.mark.gpu
def test_it_appends(gpu):
    cache, new = gpu.array(3, 64, 2, 40), gpu.array(3, 1, 2, 40)
    table, other = gpu.array(64, 8), gpu.array(3, 64, 2, 40)
    flash_attention_with_kvcache(
        gpu.array(3, 1, 4, 40), cache, other, new, gpu.array(3, 1, 2, 40),
        cache_seqlens=gpu.lengths(3), rotary_cos=table, rotary_sin=table,
    )
"""
OPTIONS = ("-p", "no:cacheprovider", "--support-json", "ran.json")
# One process, and the controlling process of two.
ALONE, TWO = ("-n", "0"), ("-n", "2")
HOPPER = [90, "hopper", "float16"]
ROWS = [
    [90, "append", "float16", 64, ["rotary"]],
    [*HOPPER, 64, ["causal", "grouped", "same bits", "softcap", "window"]],
    [*HOPPER, 256, ["CUDA graph", "grouped"]],
    [90, "mma", "float16", 64, ["grouped", "kvcache"]],
]


def run_tests(pytester: pytest.Pytester, *options: str) -> None:
    """Run the tests above, of which three do not pass."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_one=ONE, test_other=OTHER)
    run = pytester.runpytest_inprocess if options == ALONE else pytester.runpytest_subprocess
    outcomes = run(*OPTIONS, *options).parseoutcomes()
    assert outcomes == {"passed": 7, "failed": 1, "xfailed": 1, "errors": 1}


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "tests"))))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.mark.parametrize(
    "options",
    [pytest.param(ALONE, id="alone"), pytest.param(TWO, id="two", marks=pytest.mark.slow)],
)
def test_kernels_of_passing_tests_are_recorded(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    run_tests(pytester, *options)
    data = json.loads((pytester.path / "ran.json").read_text())
    assert data["kernels"] == ROWS
    (run,) = data["runs"]
    assert (run["tests"], run["gpu"], run["commit"]) == (5, "a GPU", "abc")
    assert data["digests"] == runs.digests()


def test_launches_within_a_composed_call_have_its_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = fake_gpu.install(monkeypatch)
    q = gpu.array(2, 512, 8, 64)
    monkeypatch.setattr(forward._Inner, "compute", lambda x: flash_attention(x, x, x))
    recorder = Recorder(SimpleNamespace(), tmp_path / "ran.json")
    try:
        recorder._launched = {}
        forward._Inner.compute(q)
        (features,) = recorder._launched.values()
        assert features == {"key_indices"}
        recorder._launched = {}
        flash_attention(q, q, q)
        assert list(recorder._launched.values()) == [set()]
    finally:
        recorder.pytest_unconfigure()


def rows(*lists: list[Any]) -> Any:
    return runs.from_lists(lists)


RUN = {"commit": "abc", "gpu": "a GPU", "date": "2026-01-01", "tests": 2}


def test_runs_on_the_same_kernels_are_merged(tmp_path: Path) -> None:
    file = tmp_path / "ran.json"
    runs.write(file, RUN, rows([*HOPPER, 64, ["causal"]]))
    runs.write(file, RUN | {"date": "2026-01-02", "tests": 3}, rows([*HOPPER, 64, ["window"]]))
    runs.write(file, RUN | {"commit": "def"}, rows([*HOPPER, 128, []]))
    ran = runs.read(file)
    assert runs.as_lists(ran.rows) == [[*HOPPER, 64, ["causal", "window"]], [*HOPPER, 128, []]]
    assert [(run["commit"], run["date"], run["tests"]) for run in ran.runs] == [
        ("abc", "2026-01-02", 5),
        ("def", "2026-01-01", 2),
    ]
    assert runs.changed(ran) == []


def test_a_file_of_other_kernels_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "ran.json"
    runs.write(file, RUN, rows([*HOPPER, 64, ["causal"]]))
    text = file.read_text()
    file.write_text(text.replace(runs.digests()["mma backward"], "0" * 16))
    assert runs.changed(runs.read(file)) == ["mma backward"]
    runs.write(file, RUN, rows([*HOPPER, 64, ["window"]]))
    assert runs.as_lists(runs.read(file).rows) == [[*HOPPER, 64, ["window"]]]


def test_the_option_needs_a_gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = request.config.pluginmanager.get_plugins()
    path = str(CHECKOUT / "tests" / "conftest.py")
    conftest: Any = next(p for p in plugins if getattr(p, "__file__", None) == path)
    monkeypatch.setattr(conftest, "gpu_unavailable", lambda: "there is none")
    config: Any = SimpleNamespace(option=None, getoption=lambda name: "ran.json")
    with pytest.raises(pytest.UsageError, match="--support-json needs a GPU: there is none"):
        conftest.pytest_configure(config)
