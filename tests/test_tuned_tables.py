"""The tables of tuned tiles that are shipped: whose they are, and that their tiles can run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cupy_flash import tuning
from cupy_flash.cli.kernel_sets import problem_of_class
from cupy_flash.device import device_for_arch
from cupy_flash.families import FAMILIES

TABLES = sorted(tuning.SHIPPED_DIR.glob("*.json"))
# Architecture of each GPU that a table is shipped for.
ARCHITECTURES = {"NVIDIA H100 80GB HBM3": "sm_90"}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_says_who_made_it_when_and_with_what(path: Path) -> None:
    made_by = json.loads(path.read_text(encoding="utf-8"))["made_by"]
    gpus = {entry.gpu for entry in tuning.read_table(path)}

    assert gpus == {made_by["device"]}
    assert made_by["command"].startswith("cupy-flash tune --preset common")
    assert {"cupy", "nvrtc", "driver"} <= set(made_by["versions"])
    assert made_by["date"].startswith("20")


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_tile_is_legal_for_its_class(path: Path) -> None:
    for entry in tuning.read_table(path):
        family = FAMILIES[entry.family]
        device = device_for_arch(ARCHITECTURES[entry.gpu])
        problem = problem_of_class(entry.problem_class)
        assert problem is not None, entry.problem_class
        assert tuning.problem_class(problem) == entry.problem_class
        tile = family.tile_type(**entry.tile)
        assert family.why_not_tile(problem, device, tile) is None
