"""Kernels of all selected tests of a module, compiled at once, on all CPUs.

A module that imports the fixtures uses them; one whose tests call for more than `Case`s tell has a
`cubins` of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cupy_flash.cli.build.build import Job, build, write_cubin
from cupy_flash.gpu.compiler import CUBINS_VARIABLE
from support.gpu_support import Case


@pytest.fixture(scope="module")
def cubins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels of the selected cases, compiled on all CPUs instead of one by one at each call."""
    folder: Path = tmp_path_factory.mktemp("cubins")
    calls = selected_calls(request)
    cases = [call["case"] for call in calls if "case" in call]
    cases += [case for call in calls for case in call.get("cases", ())]
    write_cubins(folder, jobs_of_cases(cases))
    return folder


@pytest.fixture(autouse=True)
def use_cubins(home: Path, cubins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # After `home`, which hides the user's own prebuilt kernels.
    monkeypatch.setenv(CUBINS_VARIABLE, str(cubins))


def selected_calls(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Parameters of the selected tests of the module that asks."""
    mine = (item for item in request.session.items if item.path == request.path)
    return [spec.params for item in mine if (spec := getattr(item, "callspec", None))]


def jobs_of_cases(cases: Iterable[Case]) -> list[Job]:
    """What has to be compiled to run them."""
    plans = [case.plan() for case in dict.fromkeys(cases)]
    return [Job.of(plan) for plan in plans if not plan.problem.is_empty]


def write_cubins(folder: Path, jobs: Iterable[Job]) -> None:
    """Compile in parallel, for `CUPY_FLASH_CUBINS` to name the folder.

    A kernel that does not compile is left to the test that calls it. Where xdist runs the tests,
    its workers take up the CPUs, and each compiles what its own tests call for.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    unlike = list({job.unit: job for job in jobs}.values())
    for index, built in build(unlike) if len(unlike) > 1 else ():
        if built.cubin is not None:
            write_cubin(folder, unlike[index], built.cubin)
