"""`cupy-flash info`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli import commands
from support.gpu import fake_cupy

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.providers.providers import names
from cupy_flash.cli.records.environment import kernel_name
from cupy_flash.families import FAMILIES, FORWARD
from cupy_flash.gpu.compiler import CUBINS_VARIABLE
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.planning import tuning
from cupy_flash.problem.arrays import DTYPES


def info() -> str:
    return commands.run("info").stdout


def info_json() -> dict[str, Any]:
    return json.loads(commands.run("info", "--json").stdout)


def test_json_tells_versions_places_families_and_providers() -> None:
    found = info_json()

    assert {"cupy_flash", "numpy", "python"} <= set(found["versions"])
    assert {"kernel_cache", "tuned_table", "prebuilt_kernels"} <= set(found["places"])
    families = {kernel_name(name, way) for way, of_way in FAMILIES.items() for name in of_way}
    assert set(found["families"]) == families
    assert set(found["providers"]) == set(names())
    assert found["gpu_unavailable"] == gpu_unavailable()
    assert bool(found["gpus"]) == (gpu_unavailable() is None)


def test_every_family_says_what_it_serves_here_or_why_not() -> None:
    for family in info_json()["families"].values():
        assert family["dtypes"] or family["why_not"]


def test_the_cpu_backend_can_be_used_anywhere() -> None:
    found = info_json()

    assert found["providers"]["cupy_flash-cpu"] is None
    assert found["providers"]["numpy-naive"] is None


def test_the_places_follow_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.sm_90.cubin").write_bytes(b"")
    monkeypatch.setenv(CUBINS_VARIABLE, str(tmp_path))
    monkeypatch.setenv(tuning.HOME_VARIABLE, str(tmp_path / "home"))
    places = info_json()["places"]

    assert (places["prebuilt_kernels"], places["prebuilt_count"]) == (str(tmp_path), 1)
    assert places["tuned_table"] == str(tmp_path / "home" / "tuned.json")


def test_a_corrupt_table_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.HOME_VARIABLE, str(tmp_path))
    (tmp_path / "tuned.json").write_text("{", encoding="utf-8")
    text = info()

    assert "cannot be read as a tuned table" in text
    assert text.count("tuned.json") == 1


def test_the_text_names_every_family() -> None:
    text = info()

    assert all(f"family {name}" in text for name in FORWARD)


def test_on_a_gpu_each_family_names_the_dtypes_that_it_serves_there_and_why_not_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_cupy.install(monkeypatch)
    families = info_json()["families"]

    for name, family in FORWARD.items():
        for dtype in DTYPES:
            problem = Case(dtype, 1, 1000, 1000, 1, 1, 64, 64).problem()
            reason = family.why_not(problem, fake_cupy.device())
            assert (dtype in families[name]["dtypes"]) is (reason is None)
            assert families[name]["why_not"].get(dtype) == reason


def test_the_text_has_a_line_for_each_gpu_and_leaves_out_what_a_family_does_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = fake_cupy.install(monkeypatch)
    lines = [line.partition("  ") for line in info().splitlines()]
    gpus = [text.strip() for name, _, text in lines if name == "GPU"]
    hopper = next(text for name, _, text in lines if name == "family hopper")
    device = fake_cupy.device()

    assert len(gpus) == cupy.cuda.runtime.getDeviceCount()
    begin = f"{device.name} ({device.sm}, {device.sm_count} SMs"
    assert all(text.startswith(begin) for text in gpus)
    assert "bfloat16" in hopper.partition("(")[0]
    assert "float64" not in hopper.partition("(")[0]
