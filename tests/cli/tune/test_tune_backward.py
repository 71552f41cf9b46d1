"""Tuned tiles of gradients: what `cupy-flash tune --backward` tries, saves and reads back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.cli import commands
from support.cli.sweeps import install_gpu
from support.gpu import fake_cupy

from cupy_flash.cli.cases import inputs as inputs_module
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.workload import PRESETS, Weighted, groups_of
from cupy_flash.cli.tables import why_not
from cupy_flash.cli.tune.candidates import Limits, gpu_candidates
from cupy_flash.cli.tune.findings import class_text, is_stale
from cupy_flash.cli.tune.sweep import other_16bit_class, plan_sweeps
from cupy_flash.families import FAMILIES
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import make_plan
from cupy_flash.planning.problem_class import ProblemClass
from cupy_flash.problem.device import device_for_arch

CASE = Case("bfloat16", 4, 4096, 4096, 16, 16, 64, 64)
BACKWARD = dataclasses.replace(CASE, direction="backward")
H200 = dataclasses.replace(device_for_arch("sm_90"), name="NVIDIA H200")
SHAPE = ("--batch", "1", "--seqlen-q", "64", "--heads", "2", "--head-dim", "16", "--dtype", "fp32")


def tune(*arguments: str | Path, code: int = 0) -> Result:
    return commands.run("tune", *arguments, code=code)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fake GPU that computes on the host; lists the function, family and tile of its calls."""
    asked: list[Any] = []

    def on_host(name: str) -> Any:
        compute = getattr(inputs_module, name)

        def call(*arrays: Any, family: Any = None, tile: Any = None, **options: Any) -> Any:
            if family:
                asked.append((name, family, tuple(tile)))
            return compute(*arrays, **options | {"backend": "cpu"})

        return call

    # By this timer, a tile takes `Br` ms.
    install_gpu(monkeypatch, lambda tile, rows: float(tile["Br"]))
    for name in ("flash_attention", "flash_attention_backward"):
        monkeypatch.setattr(inputs_module, name, on_host(name))
    return asked


def entry_of(case: Case, family: str = "mma") -> tuning.Entry:
    """Return an entry for a tile that is not the default."""
    problem, kernels = case.problem(), FAMILIES[case.direction][family]
    default = kernels.default_tile(problem, H200)
    tile = next(tile for tile in kernels.tiles(problem, H200) if tile != default)
    gpu = (H200.name, H200.arch, H200.sm_count)
    found = {"problem_class": tuning.problem_class(problem), "tile": dataclasses.asdict(tile)}
    return tuning.Entry(*gpu, family, kernels.digest(), **found, tflops=1.0)


# ---- Classes and tables


def test_gradients_are_classes_of_their_own() -> None:
    forward, backward = (tuning.problem_class(case.problem()) for case in (CASE, BACKWARD))
    packed = dataclasses.replace(BACKWARD, kind="varlen")

    assert backward == f"{forward} backward"
    assert tuning.problem_class(packed.problem()) == f"{forward} packed backward"
    assert ProblemClass.parse(f"{forward} packed backward").direction == "backward"
    assert ProblemClass.parse(forward).direction == "forward"
    assert class_text(backward) == "bf16 d64 full s4096 backward"
    assert other_16bit_class(backward) == backward.replace("bfloat16", "float16")


@pytest.mark.parametrize("case", [CASE, BACKWARD], ids=lambda case: case.direction)
def test_an_entry_serves_problems_of_its_direction(home: Path, case: Case) -> None:
    entry = entry_of(case)
    tuning.save(entry)
    tuned = make_plan(case.problem(), H200, family="mma")
    other = BACKWARD if case is CASE else CASE
    untuned = make_plan(other.problem(), H200, family="mma")

    assert dataclasses.asdict(tuned.tile) == entry.tile
    assert "tile from the tuned table" in tuned.reason
    assert "default tile" in untuned.reason
    assert entry.direction == case.direction
    assert not is_stale(entry)
    assert why_not(entry) is None


def test_gradients_of_some_inputs_have_the_tile_of_all(home: Path) -> None:
    entry = entry_of(BACKWARD)
    tuning.save(entry)
    problem = BACKWARD.problem()
    some = dataclasses.replace(problem.gradient, wrt=("q",), dlse=True)
    plan = make_plan(dataclasses.replace(problem, gradient=some), H200, family="mma")

    assert dataclasses.asdict(plan.tile) == entry.tile


def test_a_tile_of_the_other_direction_cannot_be_taken_in() -> None:
    forward, backward = entry_of(CASE), entry_of(BACKWARD)
    mixed = dataclasses.replace(backward, tile=forward.tile)

    assert "expected Br, Bc, warps, key_warps" in str(why_not(mixed))
    assert is_stale(dataclasses.replace(backward, digest=forward.digest))


# ---- Sweeps


def test_the_candidates_are_those_of_the_family_of_gradients() -> None:
    found = gpu_candidates([Weighted(BACKWARD)], H200, None, Limits(max_tiles=5))
    family = make_plan(BACKWARD.problem(), H200).family
    tile_type = FAMILIES["backward"][family].tile_type

    assert {candidate.plan.family for candidate in found} == {family}
    assert all(isinstance(candidate.tile, tile_type) for candidate in found)
    assert found[0].flops == (2.5 * CASE.flops(),)


@pytest.mark.parametrize("name", ["common-backward", "varlen-backward"])
def test_presets_of_gradients_have_the_classes_of_the_outputs(name: str) -> None:
    forward, backward = (groups_of(PRESETS[n]()) for n in (name.removesuffix("-backward"), name))
    sweeps = plan_sweeps(backward[:2], H200, None, Limits(max_tiles=2))

    assert [g.problem_class for g in backward] == [f"{g.problem_class} backward" for g in forward]
    assert {sweep.direction for sweep in sweeps} == {"backward"}


def test_a_sweep_saves_what_wins_and_plans_use_it(
    home: Path, gpu: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    result = tune("--backward", *SHAPE, "--family", "simt", "--output", path)
    rows = commands.written(path)["rows"]
    (entry,) = tuning.read_table(home / "tuned.json")
    case = Case("float32", 1, 64, 64, 2, 2, 16, 16, direction="backward")

    assert "simt fp32 d16 full s64 rows256 backward" in result.stderr
    assert {call[:2] for call in gpu} == {("flash_attention_backward", "simt")}
    assert {row["direction"] for row in rows} == {"backward"}
    assert {row["check"] for row in rows} == {"passed"}
    assert entry.problem_class == tuning.problem_class(case.problem())
    assert entry.digest == FAMILIES["backward"]["simt"].digest()
    assert entry.tile == {"Br": 16, "Bc": 16}
    plan = make_plan(case.problem(), fake_cupy.device(), family="simt")
    assert dataclasses.asdict(plan.tile) == entry.tile


def test_both_directions_in_a_workload_are_two_sweeps(
    home: Path, gpu: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "workload.csv"
    lines = "64,1,16,float32,backward\n70,1,16,float32,backward\n64,1,16,float32,forward\n"
    path.write_text(f"seqlen_q,heads_q,head_dim,dtype,direction\n{lines}", encoding="utf-8")
    refused = tune("--workload", path, "--backward", code=2)
    result = tune("--workload", path, "--family", "simt", "--max-tiles", "2", "--dry-run")

    assert "--backward cannot be combined with --workload" in refused.stderr
    assert "[1/2] simt fp32 d16 full s64 rows64 backward" in result.stderr
    assert "[2/2] simt fp32 d16 full s64 rows64:" in result.stderr
    fields = {name: set(tile) for name, _, tile in gpu}
    assert fields["flash_attention_backward"] == {"Br", "Bc"} < fields["flash_attention"]


def test_the_report_knows_gradients(
    home: Path, gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    tune("--backward", *SHAPE, "--family", "simt", "--dry-run")

    assert "simt fp32 d16 full s64 rows256 backward" in tune("--report").stdout


def test_a_wrong_gradient_is_not_saved(
    home: Path, gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = inputs_module.flash_attention_backward

    def wrong(*arrays: Any, tile: Any, **options: Any) -> Any:
        dq, dk, dv = right(*arrays, tile=tile, **options)
        return dq, dk * (2 if tile["Br"] == 16 else 1), dv

    monkeypatch.setattr(inputs_module, "flash_attention_backward", wrong)
    result = tune("--backward", *SHAPE, "--family", "simt", code=1)
    tiles = [entry.tile["Br"] for entry in tuning.read_table(home / "tuned.json")]

    assert "differs from the reference" in result.stderr
    assert tiles == [32]


def test_the_cpu_backend_has_no_tiles_of_gradients_to_tune() -> None:
    result = tune("--backend", "cpu", "--backward", "--seqlen-q", "64", code=2)

    assert "no tuned tiles for caches, packed sequences and gradients" in result.stderr
