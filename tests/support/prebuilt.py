"""Fixtures that compile the kernels of all selected tests of a module in parallel, on all CPUs.

A module uses these fixtures if it imports them. If its `Case`s do not determine all kernels, it
defines another `cubins`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cupy_flash.cli.build.build import Job, build, write_cubin
from cupy_flash.gpu.compiler import CUBINS_VARIABLE
from support.gpu.gpu_support import Case


@pytest.fixture(scope="module")
def cubins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the kernels of the selected cases on all CPUs, instead of one by one in each call."""
    folder: Path = tmp_path_factory.mktemp("cubins")
    calls = selected_calls(request)
    cases = [call["case"] for call in calls if "case" in call]
    cases += [case for call in calls for case in call.get("cases", ())]
    write_cubins(folder, jobs_of_cases(cases))
    return folder


@pytest.fixture(autouse=True)
def use_cubins(home: Path, cubins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The fixture `home` must run before, because it hides the user's prebuilt kernels.
    monkeypatch.setenv(CUBINS_VARIABLE, str(cubins))


def selected_calls(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the parameters of the selected tests of the requesting module."""
    mine = (item for item in request.session.items if item.path == request.path)
    return [spec.params for item in mine if (spec := getattr(item, "callspec", None))]


def jobs_of_cases(cases: Iterable[Case]) -> list[Job]:
    """Return the compilations that these cases need."""
    plans = [case.plan() for case in dict.fromkeys(cases)]
    return [Job.of(plan) for plan in plans if not plan.problem.is_empty]


def write_cubins(folder: Path, jobs: Iterable[Job]) -> None:
    """Compile in parallel, and write the kernels to a folder for `CUPY_FLASH_CUBINS`.

    A kernel that does not compile is left to the test that calls it. Under xdist nothing is
    compiled here: its workers use all CPUs, and each compiles what its own tests need.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    unlike = list({job.unit: job for job in jobs}.values())
    for index, built in build(unlike) if len(unlike) > 1 else ():
        if built.cubin is not None:
            write_cubin(folder, unlike[index], built.cubin)
