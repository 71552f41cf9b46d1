"""`cupy-flash tune` on the CPU, and compiled for a GPU that is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import cupy_flash
from cupy_flash import cpu, tuning
from cupy_flash.cli import tune as tune_module
from cupy_flash.cli.cases import Case
from cupy_flash.cli.check import Check
from cupy_flash.cli.inputs import random_inputs
from cupy_flash.cli.main import main
from cupy_flash.cli.timing import HostTimer
from cupy_flash.cli.tune import (
    Candidate,
    cpu_candidates,
    gpu_candidates,
    limited,
    ranking,
    time_all,
)
from cupy_flash.compiler import why_no_compiler
from cupy_flash.device import Resources, device_for_arch
from cupy_flash.tile import Tile

SHAPE = ("--seqlen-q", "113", "--seqlen-k", "203", "--heads", "2", "--head-dim", "24")
QUICK = ("--warmup", "0", "--repeats", "1", "--max-tiles", "3")
needs_compiler = pytest.mark.skipif(
    why_no_compiler() is not None, reason="needs NVRTC, which comes with the cuda extras"
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's table in a folder of the test's own."""
    monkeypatch.setenv(tuning.HOME_VARIABLE, str(tmp_path / "home"))
    tuning.reload()
    yield tmp_path / "home"
    monkeypatch.undo()
    tuning.reload()


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["tune", *arguments], catch_exceptions=False)


def ragged() -> Case:
    return Case("float32", 1, 113, 203, 2, 2, 24, 24)


def test_the_fastest_cpu_tile_is_saved_and_then_used(home: Path) -> None:
    result = tune("--backend", "cpu", *SHAPE, *QUICK)
    q, k = (np.zeros((1, n, 2, 24), np.float32) for n in (113, 203))
    (entry,) = tuning.read_table(home / "tuned.json")
    plan = cupy_flash.plan(q, k, k, backend="cpu")

    assert result.exit_code == 0, result.output
    assert (entry.gpu, entry.family, entry.digest) == ("cpu", "cpu", cpu.digest())
    assert {"Br": plan.tile.Br, "Bc": plan.tile.Bc} == entry.tile


def test_a_dry_run_saves_nothing(home: Path) -> None:
    result = tune("--backend", "cpu", *SHAPE, *QUICK, "--dry-run")

    assert result.exit_code == 0
    assert "nothing saved" in result.stdout
    assert not (home / "tuned.json").exists()


def test_what_is_saved_can_be_listed_and_cleared(home: Path) -> None:
    tune("--backend", "cpu", *SHAPE, *QUICK)
    listed, cleared, after = tune("--list"), tune("--clear"), tune("--list")

    assert "1 saved in" in listed.stdout
    assert "float32 d24 dv24 full" in listed.stdout
    assert "stale" not in listed.stdout
    assert cleared.stdout == "1 entries removed\n"
    assert "No tiles are saved" in after.stdout


def test_an_entry_tuned_on_other_sources_is_listed_as_stale() -> None:
    problem = ragged().problem()
    tuning.save(
        tuning.Entry(
            "cpu", "cpu", "0" * 16, tuning.problem_class(problem), {"Br": 64, "Bc": 64}, 1.0
        )
    )

    assert "stale: other sources" in tune("--list").stdout


def test_a_corrupt_table_is_reported_in_one_line(home: Path) -> None:
    home.mkdir()
    (home / "tuned.json").write_text("{", encoding="utf-8")
    result = tune("--list")

    assert result.exit_code == 1
    assert "cannot be read as a tuned table" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_ranking_is_written_with_every_tile(tmp_path: Path) -> None:
    path = tmp_path / "ranking.json"
    tune("--backend", "cpu", *SHAPE, *QUICK, "--dry-run", "--top", "1", "--output", str(path))
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]

    assert [row["rank"] for row in rows] == [1, 2, 3]
    assert all(row["check"] == "passed" for row in rows)
    assert rows[0]["median_ms"] is not None


def test_a_limited_sweep_holds_the_default_and_spreads_over_the_rest() -> None:
    tiles = [Tile(size, 64) for size in range(1, 101)]
    chosen = limited(tiles, tiles[41], 5)

    assert len(set(chosen)) == 5
    assert tiles[41] in chosen
    assert max(tile.Br for tile in chosen) > 60
    assert limited(tiles, tiles[41], None) == tiles


def test_a_tile_with_a_wrong_result_is_ranked_last_and_marked() -> None:
    case = ragged()
    inputs = random_inputs(case, 0, on_gpu=False)
    good, bad = cpu_candidates(case.problem(), 2)

    def call_of(candidate: Candidate) -> Any:
        exact = cupy_flash.attention_reference(*inputs.host).astype(np.float32)
        return lambda: exact if candidate is good else exact * 2

    time_all(
        [bad, good],
        call_of,
        Check(inputs, 0, on_gpu=False),
        HostTimer(),
        warmup=0,
        repeats=1,
    )

    assert [c.failed for c in ranking([bad, good])] == [False, True]


def test_a_failed_check_exits_with_1_and_is_not_saved(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(q: np.ndarray, *_: object, **__: object) -> np.ndarray:
        return np.zeros_like(q)

    monkeypatch.setattr(tune_module, "flash_attention", wrong)
    result = tune("--backend", "cpu", *SHAPE, *QUICK)

    assert result.exit_code == 1
    assert "not that of the reference" in result.stderr
    assert not (home / "tuned.json").exists()


def test_untimed_tiles_are_ranked_by_spills_then_by_occupancy() -> None:
    candidates = gpu_candidates(ragged().problem(), device_for_arch("sm_90"), "simt", 3)
    spilling, small, large = candidates
    spilling.resources = Resources(255, 16, 0)
    small.resources = large.resources = Resources(32, 0, 0)
    ranked = ranking([spilling, small, large])
    threads = [(c.blocks_per_sm or 0) * c.plan.threads for c in ranked[:2]]

    assert ranked[-1] is spilling
    assert threads == sorted(threads, reverse=True)


@needs_compiler
def test_with_an_architecture_the_sweep_is_compiled_and_ranked_by_resources(
    home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ranking.json"
    result = tune(
        *("--arch", "sm_90", "--family", "simt", "--dtype", "float32", "--head-dim", "16"),
        *("--max-tiles", "2", "--workers", "2", "--max-spills", "100000", "--output", str(path)),
    )
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]

    assert result.exit_code == 0, result.output
    assert "Nothing was timed" in result.stdout
    assert all(row["registers"] > 0 and row["blocks_per_sm"] >= 1 for row in rows)
    assert {row["median_ms"] for row in rows} == {None}
    assert not (home / "tuned.json").exists()
