"""Description of the machine in a record: installed versions, GPUs, and the processor."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.gpu import fake_cupy
from support.gpu.fake_cupy import FakeCupy

from cupy_flash.cli.records import environment

OF_CUPY = {"cupy", "nvrtc", "cuda_runtime", "driver"}


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    return fake_cupy.install(monkeypatch)


def reads(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str | None) -> None:
    """Make system files read as `text`, or as missing files if it is None."""
    path = folder / "told"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(environment, "Path", lambda _: path)


def test_versions_on_a_gpu_are_those_of_cupy_its_libraries_and_the_driver(cupy: FakeCupy) -> None:
    found = environment.versions()

    assert found.keys() >= OF_CUPY
    assert found["cupy"] == cupy.__version__
    assert (found["nvrtc"], found["cuda_runtime"]) == ("13.1", "13.1")
    assert found["driver"] == environment.driver_version()


def test_a_compiler_that_does_not_load_has_no_version(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", missing)

    assert OF_CUPY - environment.versions().keys() == {"nvrtc"}


def test_without_a_gpu_the_driver_is_not_asked(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "gpu_unavailable", lambda: "no GPU")

    assert OF_CUPY & environment.versions().keys() == {"cupy", "nvrtc"}
    assert environment.gpus() == []


def test_a_cupy_that_cannot_be_imported_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = environment.versions()

    assert not OF_CUPY & found.keys()
    assert found["python"] == platform.python_version()


@pytest.mark.parametrize(
    ("has_gpu", "cudnn", "says"), [(True, 91002, "91002"), (True, None, None), (False, 91002, None)]
)
def test_torch_is_named_where_it_is_used_and_cudnn_where_torch_can_use_it(
    has_gpu: bool, cudnn: int | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch: Any = SimpleNamespace(
        __version__="2.11.0+cu130",
        cuda=SimpleNamespace(is_available=lambda: has_gpu),
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: cudnn)),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = environment.versions()

    assert found["torch"] == torch.__version__
    assert found.get("cudnn") == says


@pytest.mark.parametrize(("available", "says"), [(True, "2.28.9"), (False, None)])
def test_nccl_is_named_where_it_is_used(
    available: bool, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = SimpleNamespace(available=available, get_version=lambda: 22809)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)

    assert environment.versions().get("nccl") == says


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\n",
            "570.86.15 (CUDA 12.8)",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release Build\n",
            "580.65 (CUDA 12.8)",
        ),
        ("NVRM version: unknown\n", "CUDA 12.8"),
        (None, "CUDA 12.8"),
    ],
)
def test_the_driver_is_named_by_its_own_version_where_the_system_tells_it(
    text: str | None, says: str, cupy: FakeCupy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads(monkeypatch, tmp_path, text)

    assert environment.driver_version() == says


def test_every_gpu_is_listed(cupy: FakeCupy) -> None:
    count = cupy.cuda.runtime.getDeviceCount()

    assert environment.gpus() == [fake_cupy.device()] * count


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel\t: 7\n", "Some CPU @ 2 GHz"),
        ("processor\t: 0\nmodel\t: 7\n", "an architecture"),
        (None, "an architecture"),
    ],
)
def test_the_processor_is_named_as_the_system_does_with_the_cpus_of_this_process(
    text: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads(monkeypatch, tmp_path, text)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "an architecture")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)

    assert environment.cpu_name() == f"{name} (3 CPUs)"
