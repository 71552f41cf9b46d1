"""Shipped tables of tuned tiles: how they were made, and whether their tiles can run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tuned_calls import calls_of

from cupy_flash.cli.build.kernel_sets import problem_of_class
from cupy_flash.cli.cases.cases import DIRECTIONS
from cupy_flash.cli.cases.workload import PRESETS, groups_of
from cupy_flash.cli.model import gpus
from cupy_flash.cli.tables import why_not
from cupy_flash.cli.tune.findings import is_stale
from cupy_flash.families import FAMILIES
from cupy_flash.planning import tuning
from cupy_flash.planning.problem_class import ProblemClass
from cupy_flash.planning.tuning import Entry
from cupy_flash.problem.device import device_for_arch

# Listed at import, because a fixture hides the shipped tables from tests.
TABLES = sorted(tuning.SHIPPED_DIR.glob("*.json"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_says_who_made_it_when_and_with_what(path: Path) -> None:
    made_by = json.loads(path.read_text(encoding="utf-8"))["made_by"]
    gpus = {entry.gpu for entry in tuning.read_table(path)}

    assert gpus == {made_by["device"]}
    assert made_by["command"].startswith("cupy-flash tune --preset common")
    assert {"cupy", "nvrtc", "driver"} <= set(made_by["versions"])
    assert made_by["date"].startswith("20")


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_tile_of_the_present_kernels_is_legal_for_its_class(path: Path) -> None:
    for entry in tuning.read_table(path):
        if is_stale(entry):
            continue
        problem = problem_of_class(entry.problem_class)
        assert problem is not None, entry.problem_class
        assert tuning.problem_class(problem) == entry.problem_class
        assert why_not(entry) is None


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_knows_its_gpu(path: Path) -> None:
    for entry in tuning.read_table(path):
        gpu = gpus.find(entry.gpu)
        assert (entry.arch, entry.sm_count) == (gpu.arch, gpu.sm_count)


def legal_tiles() -> Iterator[Entry]:
    """Yield entries as `tune` may save them: some legal tiles of every fifth class of presets."""
    device = device_for_arch("sm_90")
    for preset in PRESETS.values():
        for group in groups_of(preset())[::5]:
            problem = group.cases[0].case.problem()
            for family in FAMILIES[problem.direction].values():
                if family.why_not(problem, device):
                    continue
                tiles = list(family.tiles(problem, device))
                for tile in dict.fromkeys((tiles[0], tiles[len(tiles) // 2], tiles[-1])):
                    made_for = ("a GPU", device.arch, device.sm_count, family.name)
                    found = (family.digest(), group.problem_class, dataclasses.asdict(tile), 1.0)
                    yield Entry(*made_for, *found)


@pytest.mark.slow
def test_every_tile_that_tune_may_save_can_be_imported() -> None:
    entries = list(legal_tiles())

    families = {(direction, name) for direction in DIRECTIONS for name in FAMILIES[direction]}
    assert {(entry.direction, entry.family) for entry in entries} == families
    assert [(entry, why) for entry in entries if (why := why_not(entry))] == []


def kind_of(problem_class: ProblemClass) -> ProblemClass:
    """Return a problem class without the lengths and the number of sequences."""
    return dataclasses.replace(problem_class, seqlen_q=0, seqlen_k=0, rows=0)


@pytest.mark.slow
def test_every_tile_that_tune_may_save_has_calls_of_its_kind_to_be_tested_by() -> None:
    device = device_for_arch("sm_90")
    for entry in legal_tiles():
        found = ProblemClass.parse(entry.problem_class)
        assert found is not None
        calls = calls_of(entry, device)
        assert calls, entry
        for call in calls:
            plan = call.plan()
            assert kind_of(ProblemClass.of(plan.problem)) == kind_of(found), call
            assert (plan.family, dataclasses.asdict(plan.tile)) == (entry.family, entry.tile)
