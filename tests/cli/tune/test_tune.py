"""`cupy-flash tune` on the CPU with a fake clock, and compiled for a GPU that is not present."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import Result
from support.cli import commands
from support.cli.sweeps import FakeBuilder, FakeTimer, install_gpu, text_of
from support.compilers import needs_compiler
from support.gpu import fake_cupy

import cupy_flash
from cupy_flash.cli.build.build import Job
from cupy_flash.cli.cases import inputs as inputs_module
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.workload import PRESETS, Group, Weighted, groups_of
from cupy_flash.cli.measure.gpu_state import CpuState, CpuWatch
from cupy_flash.cli.providers import providers
from cupy_flash.cli.records import environment
from cupy_flash.cli.tune import job as job_module
from cupy_flash.cli.tune import saver as saver_module
from cupy_flash.cli.tune import sweep as sweep_module
from cupy_flash.cli.tune import tune as tune_module
from cupy_flash.cli.tune.candidates import Candidate, Limits, cpu_candidates, evenly, gpu_candidates
from cupy_flash.cli.tune.findings import entry_of, finding_of, print_ranking
from cupy_flash.cli.tune.live import Live
from cupy_flash.cli.tune.sweep import (
    Compilation,
    Sweep,
    other_16bit_class,
    plan_sweeps,
    shorten,
    time_all,
)
from cupy_flash.cpu import sources
from cupy_flash.families.schedule import Launch
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.tile import Tile
from cupy_flash.reference.dense import attention_naive

SHAPE = ("--seqlen-q", "113", "--seqlen-k", "203", "--heads", "2", "--head-dim", "24")
CASE = Case("float32", 1, 113, 203, 2, 2, 24, 24)
DEFAULT = {"Br": 113, "Bc": 203}
BF16_CASES = [Weighted(Case("bfloat16", 4, 4096, 4096, 16, 16, 64, 64))]
SM_90 = device_for_arch("sm_90")
# Options that name cases of two problem classes.
TWO = ("--seqlen-q", "113,799", "--heads", "1", "--head-dim", "8")
SIMT = ("--batch", "1", "--seqlen-q", "64", "--heads", "1", "--head-dim", "16", "--family", "simt")


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Function that sets the CPU use of other processes, in percent; at first it is 0."""

    def used(percent: float) -> None:
        monkeypatch.setattr(CpuWatch, "state", CpuState(percent))

    used(0.0)
    return used


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTimer:
    """Fake timer of every sweep; at first tile 64 x 128 takes 1 ms and all others 2 ms."""
    timer = FakeTimer(lambda tile, rows: 1.0 if tile == {"Br": 64, "Bc": 128} else 2.0)
    monkeypatch.setattr(sweep_module, "HostTimer", lambda: timer)
    return timer


def tune(*arguments: str | Path, code: int = 0) -> Result:
    return commands.run("tune", *arguments, code=code)


def on_cpu(*arguments: str | Path, code: int = 0) -> Result:
    return tune("--backend", "cpu", *arguments, code=code)


def rows_on_cpu(path: Path, *arguments: str, code: int = 0) -> tuple[Result, list[dict[str, Any]]]:
    """Return the result of a sweep on the CPU, and the rows of its record."""
    result = on_cpu(*arguments, "--output", path, code=code)
    return result, commands.written(path)["rows"]


def area(tile: dict[str, int], rows: int) -> float:
    """Return a time that grows with the tile."""
    return float(tile["Br"] + tile["Bc"])


def saved(home: Path) -> list[tuning.Entry]:
    return tuning.read_table(home / "tuned.json")


def saved_queries(home: Path) -> list[str]:
    """Return the numbers of queries, such as "q64", of the classes with saved tiles."""
    return [entry.problem_class.split()[4] for entry in saved(home)]


def refused(*arguments: str | Path) -> str:
    """Return the error line of a sweep on the CPU that is refused."""
    return commands.refusal("tune", "--backend", "cpu", *arguments)


REPORT_NOT = (("--preset", "common"), ("--heads", "2"))

# ---- Saved tiles


def test_a_tile_that_beats_the_default_is_saved_and_then_used(home: Path, clock: FakeTimer) -> None:
    result = on_cpu(*SHAPE)
    q, k = (np.zeros((1, n, 2, 24), np.float32) for n in (113, 203))
    (entry,) = saved(home)
    plan = cupy_flash.plan(cupy_flash.flash_attention, q, k, k, backend="cpu")

    assert "The best tile: +100.0% over the default, saved." in result.stdout
    assert (entry.gpu, entry.family, entry.digest) == ("cpu", "cpu", sources.digest())
    assert entry.tile == {"Br": 64, "Bc": 128} == dataclasses.asdict(plan.tile)
    assert entry.tflops == pytest.approx(CASE.problem().flops() / 1e-3 / 1e12)


@pytest.mark.parametrize(("least", "count"), [("4.9", 1), ("5.1", 0)])
def test_what_gains_less_than_min_gain_is_not_saved(
    home: Path, clock: FakeTimer, least: str, count: int
) -> None:
    clock.time_of = lambda tile, rows: 1.0 if tile["Br"] == 32 else 1.05
    result = on_cpu(*SHAPE, "--min-gain", least)

    assert len(saved(home)) == count
    assert ("Nothing saved." in result.stdout) == (count == 0)


def test_the_default_is_never_saved(home: Path, clock: FakeTimer) -> None:
    clock.time_of = lambda tile, rows: 1.0
    result = on_cpu(*SHAPE, "--min-gain", "0")

    assert "The best tile: the default." in result.stdout
    assert saved(home) == []


def test_an_entry_that_no_longer_wins_is_removed_and_others_stay(
    home: Path, clock: FakeTimer
) -> None:
    other = tuning.Entry("a GPU", 90, 132, "mma", "0" * 16, "a class", {"Br": 64, "Bc": 64}, 1.0)
    tuning.save(other)
    on_cpu(*SHAPE)
    assert len(saved(home)) == 2
    clock.time_of = lambda tile, rows: 1.0
    on_cpu(*SHAPE)

    assert saved(home) == [other]


def test_a_default_that_wins_is_saved_where_a_shipped_table_has_another_tile(
    home: Path, clock: FakeTimer
) -> None:
    on_cpu(*SHAPE)
    (won,) = saved(home)
    tuning.write_table(tuning.SHIPPED_DIR / "cpu.json", [won])
    tuning.clear()
    clock.time_of = lambda tile, rows: 1.0
    results = [on_cpu(*SHAPE), on_cpu(*SHAPE)]

    assert [entry.tile for entry in saved(home)] == [DEFAULT]
    for result in results:
        assert "1 default saved over another table's tile." in result.stdout
        assert "removed" not in result.stdout


def test_a_table_for_a_gpu_begins_with_what_the_gpu_is(tmp_path: Path) -> None:
    h200 = dataclasses.replace(device_for_arch("sm_90"), name="NVIDIA H200")
    finding = {"family": "hopper", "kernel_digest": "0" * 16, "problem_class": "a class"}
    finding |= {"best_tile": {"Br": 128, "Bc": 64}, "best_tflops": 700.0, "stored": True}
    path = tmp_path / "nvidia_h200.json"
    saver = saver_module.Saver(path, h200, True, "cupy-flash tune --preset common")
    saver.save([finding])
    saver.save([finding | {"problem_class": "another"}])
    first, second = tuning.read_table(path)
    made_by = commands.written(path)["made_by"]

    assert (first.gpu, first.arch, first.sm_count) == ("NVIDIA H200", 90, 132)
    assert second == dataclasses.replace(first, problem_class="another")
    assert made_by["device"] == "NVIDIA H200"
    assert made_by["command"] == "cupy-flash tune --preset common"


def test_a_dry_run_saves_nothing(home: Path, clock: FakeTimer) -> None:
    result = on_cpu(*SHAPE, "--dry-run")

    assert "The best tile: +100.0% over the default, not saved: --dry-run." in result.stdout
    assert "Nothing saved (--dry-run)." in result.stdout
    assert not (home / "tuned.json").exists()


def test_tiles_of_modified_calls_are_shown_and_not_saved(home: Path, clock: FakeTimer) -> None:
    result = on_cpu(*SHAPE, "--sinks", "--window", "40:0")

    assert "window 40:0, sinks" in result.stdout
    assert "The best tile: +100.0% over the default, not saved: with modifications." in (
        result.stdout
    )
    assert "Not saved with modifications: tables of tuned tiles hold only calls" in result.stdout
    assert not (home / "tuned.json").exists()


def test_beside_modified_calls_the_tiles_of_others_are_saved(
    home: Path, clock: FakeTimer, tmp_path: Path
) -> None:
    result, (plain, modified) = rows_on_cpu(tmp_path / "rows.json", *SHAPE, "--sinks", "no,yes")

    assert (plain["stored"], modified["stored"]) == (True, False)
    assert modified["problem_class"] == plain["problem_class"] + "; sinks"
    assert [entry.problem_class for entry in saved(home)] == [plain["problem_class"]]
    assert "1 of 1 classes keep a tile of their own." in result.stdout


def test_a_table_for_modified_calls_alone_is_refused(tmp_path: Path) -> None:
    said = refused(*SHAPE, "--sinks", "--table", tmp_path / "cpu.json")

    assert "would receive no tile: tables of tuned tiles hold only calls" in said


def test_another_table_can_be_named_and_says_how_it_was_made(
    home: Path, tmp_path: Path, clock: FakeTimer
) -> None:
    path = tmp_path / "cpu.json"
    on_cpu(*SHAPE, "--table", path, "--min-gain", "1")
    made_by = commands.written(path)["made_by"]

    assert len(tuning.read_table(path)) == 1
    assert made_by["command"] == "cupy-flash tune --min-gain 1.0"
    assert {"date", "versions"} <= set(made_by)
    assert not (home / "tuned.json").exists()


def test_a_real_sweep_on_the_cpu_checks_and_times_every_tile(tmp_path: Path) -> None:
    options = ("--warmup", "0", "--repeats", "1", "--max-tiles", "3")
    _, rows = rows_on_cpu(tmp_path / "ranking.json", *SHAPE, *options)

    assert [row["rank"] for row in rows] == [1, 2, 3]
    assert all(row["check"] == "passed" and row["median_ms"] > 0 for row in rows)


# ---- A busy machine


def test_on_a_busy_cpu_nothing_is_saved_and_nothing_removed(
    home: Path, clock: FakeTimer, cpu: Callable[[float], None], tmp_path: Path
) -> None:
    on_cpu(*SHAPE)
    before = saved(home)
    cpu(97.0)
    clock.time_of = lambda tile, rows: 1.0
    on_cpu(*SHAPE)
    clock.time_of = lambda tile, rows: 1.0 if tile["Br"] == 32 else 2.0
    refusal, rows = rows_on_cpu(tmp_path / "rows.json", *TWO, code=1)

    assert saved(home) == before != []
    assert "the best tile of 2 of 2 classes, as the machine was busy" in refusal.stderr
    assert {row["stored"] for row in rows} == {False}
    assert {row["not_stored"] for row in rows} == {"others used 97% of the CPU"}


def test_on_a_busy_cpu_a_tile_is_saved_by_force(
    home: Path, clock: FakeTimer, cpu: Callable[[float], None], tmp_path: Path
) -> None:
    cpu(97.0)
    path = tmp_path / "rows.json"
    refusal = on_cpu(*SHAPE, "--output", path, code=1)
    result = on_cpu(*SHAPE, "--force")
    head = commands.written(path)["metadata"]

    assert "+100.0% over the default, not saved: others used 97% of the CPU." in refusal.stdout
    assert head["unreliable"] == "others used 97% of the CPU"
    assert "The best tile: +100.0% over the default, saved." in result.stdout
    assert len(saved(home)) == 1


def test_on_a_busy_gpu_nothing_is_saved(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "busy_before", lambda gpu: f"{gpu} was busy")
    install_gpu(monkeypatch, area)
    monkeypatch.setattr(
        inputs_module, "flash_attention", lambda q, k, v, **_: attention_naive(q, k, v)
    )
    result = tune(*SIMT, "--dtype", "float32", "--max-tiles", "5", code=1)

    assert "not saved: 0000:1B:00.0 was busy." in result.stdout
    assert not saved(home)


def test_a_busy_cpu_counts_for_the_class_that_was_timed_meanwhile(
    home: Path, clock: FakeTimer, cpu: Callable[[float], None]
) -> None:
    def time_of(tile: dict[str, int], rows: int) -> float:
        cpu(97.0 if rows == 799 else 0.0)
        return 1.0 if tile == {"Br": 64, "Bc": 128} else 2.0

    clock.time_of = time_of
    on_cpu(*TWO, code=None)
    report = " ".join(tune("--report").stdout.split())

    assert saved_queries(home) == ["q64"]
    assert "1 of 2 classes keep a tile of their own." in report
    assert "1 of 2 not saved, though better than the default: others used 97% of" in report


# ---- Candidates


def test_several_shapes_of_one_class_are_one_sweep(tmp_path: Path, clock: FakeTimer) -> None:
    result, rows = rows_on_cpu(tmp_path / "rows.json", *SHAPE, "--seqlen-q", "100,113")

    assert "[1/1] cpu fp32 d24 full s64/256 rows256" in result.stderr
    assert {len(row["medians_ms"]) for row in rows} == {2}
    assert {rows for _, rows in clock.timed} == {100, 113}


def test_shapes_of_two_classes_are_two_sweeps_with_a_row_each(
    tmp_path: Path, home: Path, clock: FakeTimer
) -> None:
    result, rows = rows_on_cpu(tmp_path / "rows.json", *TWO)

    assert [line[:5] for line in result.stderr.splitlines()[:2]] == ["[1/2]", "[2/2]"]
    assert [row["problem_class"].split()[4] for row in rows] == ["q64", "q1024"]
    assert all(row["best_tile"] == {"Br": 64, "Bc": 128} for row in rows)
    assert all(row["gain_percent"] == 100 and row["stored"] for row in rows)
    assert len(saved(home)) == 2


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        (("--br", "64"), lambda Br, Bc: Br == 64),
        (("--bc", "64,128"), lambda Br, Bc: Bc in (64, 128)),
        (("--br", "32,64", "--bc", "256"), lambda Br, Bc: Br in (32, 64) and Bc == 256),
    ],
    ids=["br", "bc", "both"],
)
def test_only_the_wanted_sizes_are_tried_and_the_default(
    clock: FakeTimer, option: tuple[str, ...], allowed: Callable[[int, int], bool]
) -> None:
    on_cpu(*SHAPE, *option)
    others = clock.sizes() - {(113, 203)}

    assert len(others) < len(clock.sizes())
    assert others
    assert all(allowed(*size) for size in others)


def test_so_many_tiles_are_tried_as_max_tiles_says(clock: FakeTimer) -> None:
    on_cpu(*SHAPE, "--max-tiles", "4")

    assert len(clock.sizes()) == 4
    assert (113, 203) in clock.sizes()


def test_a_limited_choice_holds_the_default_and_spreads_over_the_rest() -> None:
    tiles = [Tile(size, 64) for size in range(1, 101)]
    chosen = evenly(tiles, tiles[41], 5)

    assert len(set(chosen)) == 5
    assert chosen[0] == tiles[41]
    assert max(tile.Br for tile in chosen) > 60
    assert set(evenly(tiles, tiles[41], None)) == set(tiles)
    assert evenly(tiles, tiles[41], 1) == [tiles[41]]


def test_tiles_over_the_limit_of_shared_memory_are_not_tried() -> None:
    limits = (Limits(max_smem=32), Limits())
    found, every = (gpu_candidates(BF16_CASES, SM_90, "mma", each) for each in limits)

    assert 1 < len(found) < len(every)
    assert all(c.plan.shared_memory <= 32 * 1024 or c.is_default for c in found)


WORKLOAD = "seqlen_q,heads_q,head_dim,dtype,weight\n100,1,8,float32,{}\n113,1,8,float32,{}\n"


@pytest.mark.parametrize(("weights", "best"), [((9, 1), 32), ((1, 9), 64)])
def test_of_a_workload_the_tile_that_makes_the_weighted_sum_least_wins(
    tmp_path: Path, home: Path, clock: FakeTimer, weights: tuple[int, int], best: int
) -> None:
    path = tmp_path / "workload.csv"
    path.write_text(WORKLOAD.format(*weights), encoding="utf-8")
    # Tiles of 32 rows are fast at length 100, tiles of 64 rows at length 113.
    good_for = {32: 100, 64: 113}
    clock.time_of = lambda tile, rows: (
        20.0 if tile["Br"] not in good_for else 1.0 if good_for[tile["Br"]] == rows else 10.0
    )
    on_cpu("--workload", path)
    (entry,) = saved(home)

    assert entry.tile["Br"] == best


def test_a_workload_in_json_may_have_several_classes(
    tmp_path: Path, home: Path, clock: FakeTimer
) -> None:
    path = tmp_path / "workload.json"
    sizes = {"heads_q": 1, "head_dim": 8, "dtype": "float32"}
    rows = [{"seqlen_q": n, **sizes} for n in (113, 799, 800)]
    path.write_text(json.dumps(rows), encoding="utf-8")
    on_cpu("--workload", path)

    assert len(saved(home)) == 2


def test_a_bad_workload_is_refused_in_one_line_that_names_the_row(tmp_path: Path) -> None:
    path = tmp_path / "workload.csv"
    path.write_text(WORKLOAD.format(1, -3), encoding="utf-8")

    assert f"row 2 of {path} has weight '-3'" in refused("--workload", path)


# ---- Errors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seed", "-1"), "-1 is not in the range"),
        (("--seqlen-q", "0"), "nothing to compute"),
        (("--batch", "0"), "nothing to compute"),
        (("--causal", "--q-offset", "-5000"), "nothing to compute"),
        (("--br", "0"), "'0' is not a whole number from 1"),
        (("--preset", "nosuch"), "'nosuch' is not one of 'common', 'decode', 'decode-quantized'"),
        (("--preset", "common"), "--preset common is for GPUs"),
        (("--family", "mma"), "--backend cpu has no --arch and no --family"),
        (("--workload", "nosuch.json"), "does not exist"),
        (("--max-smem", "1"), "--max-smem cannot be combined with --backend cpu"),
        (("--workers", "2"), "--workers cannot be combined with --backend cpu"),
        (("--min-gain", "nan"), "'nan' is not a number from 0"),
        (("--br", "7"), "no tile of cpu is that size; --br 7: expected some of 32, 64,"),
        (("--table", "t.txt"), "expected one of .json"),
        (("--head-dim", "577"), "'577' is not a whole number from 1 to 576"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_option_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)

    assert said in refused(*options)


def test_without_a_gpu_it_says_what_works_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "gpu_unavailable", lambda: "no driver")

    assert "(no driver); --backend cpu" in commands.refusal("tune")


def test_what_is_wrong_with_the_cases_is_told_before_a_missing_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module, "gpu_unavailable", lambda: "no driver")
    path = tmp_path / "workload.csv"
    path.write_text("seqlen_q,heads_q\n128,4\n", encoding="utf-8")

    line = ("tune", "--workload", path)

    assert "has no head_dim" in commands.refusal(*line)
    assert "--window cannot be combined with --wor" in commands.refusal(*line, "--window", "9:0")


def test_a_shape_that_does_not_fit_the_memory_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(providers, "free_bytes", lambda on_gpu: 2**34)

    assert "GiB of memory, and 16.0 GiB are free" in refused("--seqlen-q", "100000000")


def test_a_shape_that_does_not_fit_the_memory_is_left_out_of_several(
    home: Path, monkeypatch: pytest.MonkeyPatch, clock: FakeTimer
) -> None:
    monkeypatch.setattr(providers, "free_bytes", lambda on_gpu: 2**30)
    result = on_cpu("--seqlen-q", "113,100000000", "--heads", "1", "--head-dim", "8")

    assert "Left out: cpu fp32 d8 full s16384" in result.stderr
    assert len(saved(home)) == 1


def test_memory_that_runs_out_on_the_way_is_reported_without_a_traceback(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError("no room for 3 GiB")

    monkeypatch.setattr(sweep_module, "random_inputs", exhausted)
    result = on_cpu(*SHAPE, code=1)

    assert "no room for 3 GiB" in result.stderr
    assert "no tile ran" in result.stdout
    assert not (home / "tuned.json").exists()


@pytest.fixture(params=["/proc/foo", "a regular file"])
def unwritable(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Set `CUPY_FLASH_HOME` to a folder that cannot be created."""
    folder = Path(request.param)
    if request.param == "a regular file":
        folder = tmp_path / "file"
        folder.write_text("", encoding="utf-8")
    elif not Path("/proc").is_dir():
        pytest.skip("no /proc")
    monkeypatch.setenv(tuning.HOME_VARIABLE, str(folder))
    return folder


def test_a_table_that_cannot_be_written_is_refused_before_the_sweep(
    unwritable: Path, clock: FakeTimer
) -> None:
    said = refused(*SHAPE)

    assert f"{unwritable / 'tuned.json'} cannot be written" in said
    assert clock.timed == []


def test_asking_whether_a_table_can_be_written_leaves_alone_what_others_write(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tuning.Entry("a GPU", 90, 132, "mma", "0" * 16, "a class", {"Br": 64, "Bc": 64}, 1.0)

    def while_another_saves(open_file: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*args: Any, **options: Any) -> Any:
            monkeypatch.undo()
            file = open_file(*args, **options)
            tuning.save(other)
            return file

        return opened

    monkeypatch.setattr(Path, "open", while_another_saves(Path.open))
    monkeypatch.setattr(
        saver_module.tempfile, "TemporaryFile", while_another_saves(tempfile.TemporaryFile)
    )
    saver_module.require_writable(None)

    assert saved(home) == [other]


def test_a_dry_run_needs_no_place_to_write(unwritable: Path, clock: FakeTimer) -> None:
    result = on_cpu(*SHAPE, "--dry-run")

    assert "this sweep cannot be resumed" in result.stderr
    assert "+100.0% over the default" in result.stdout


# ---- Checks


def wrong_for(Br: int | None) -> Callable[..., np.ndarray]:
    """Return an attention function that is wrong for tiles of `Br` rows, or for all if None."""

    def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
        out = cupy_flash.flash_attention(q, k, v, **options)
        return out * 2 if Br in (None, options["tile"]["Br"]) else out

    return attention


def test_where_every_check_fails_it_exits_with_1_and_saves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, clock: FakeTimer
) -> None:
    monkeypatch.setattr(inputs_module, "flash_attention", wrong_for(None))
    result = on_cpu(*SHAPE, code=1)

    assert "differs from the reference" in result.stderr
    assert clock.timed == []
    assert not (home / "tuned.json").exists()


def test_a_wrong_tile_is_not_saved_though_it_would_be_the_fastest(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: FakeTimer
) -> None:
    monkeypatch.setattr(inputs_module, "flash_attention", wrong_for(64))
    clock.time_of = lambda tile, rows: {64: 1.0, 32: 1.5}.get(tile["Br"], 2.0)
    _, rows = rows_on_cpu(tmp_path / "rows.json", *SHAPE, code=1)

    assert [entry.tile["Br"] for entry in saved(home)] == [32]
    assert {row["check"] for row in rows if row["tile"]["Br"] == 64} == {"failed"}
    assert rows[-1]["tile"]["Br"] == 64


class PassedCheck:
    """Check that compares nothing and always passes."""

    class coverage:
        bound = 1.0

    def error(self, out: Any) -> float:
        return 0.0


def timed(candidates: list[Candidate], call_of: Callable[..., Any], timer: FakeTimer) -> None:
    """Time candidates with checks that pass, and without untimed calls."""
    checks: Any = [PassedCheck()]
    settings = sweep_module.Settings(0, 0, 1)
    time_all(candidates, call_of, checks, timer, settings, Live(1), lambda lot: None)


def test_a_tile_that_does_not_run_is_dropped_with_the_reason(clock: FakeTimer) -> None:
    candidates = cpu_candidates([Weighted(CASE)], Limits(max_tiles=2))

    def call_of(candidate: Candidate, case: int) -> Callable[[], None]:
        def fail() -> None:
            raise RuntimeError("launch failed\nand more")

        return fail

    timed(candidates, call_of, clock)

    assert {c.dropped for c in candidates} == {"launch failed"}


@pytest.mark.parametrize(
    "given",
    [("--backend", "cpu"), ("--arch", "sm_90"), ("--table", "t.json"), ("--dry-run",), *REPORT_NOT],
    ids=lambda given: given[0],
)
def test_the_report_takes_no_option_of_a_sweep(given: tuple[str, ...]) -> None:
    refusal = commands.refusal("tune", "--report", *given)
    assert f"{given[0]} cannot be combined with --report" in refusal


def test_a_sweep_of_some_tiles_removes_no_entry(home: Path, clock: FakeTimer) -> None:
    on_cpu(*SHAPE)
    before = saved(home)
    clock.time_of = lambda tile, rows: 1.0
    on_cpu(*SHAPE, "--max-tiles", "2")
    kept = saved(home)
    all_tiles = on_cpu(*SHAPE)

    assert kept == before != []
    assert "1 removed, where the default is the best now." in all_tiles.stdout
    assert saved(home) == []


def test_a_file_that_is_no_table_is_not_written_over(tmp_path: Path, clock: FakeTimer) -> None:
    path = tmp_path / "precious.json"
    path.write_text("[", encoding="utf-8")

    assert "cannot be read as a tuned table" in refused(*SHAPE, "--table", path)
    assert path.read_text(encoding="utf-8") == "["
    assert clock.timed == []


def test_the_size_of_the_default_tile_may_be_asked_for(clock: FakeTimer) -> None:
    on_cpu(*SHAPE, "--br", "113", "--bc", "203", "--dry-run")

    assert clock.sizes() == {(113, 203)}


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (("--br", "64", "--bc", "7"), "no tile of cpu is that size; --bc 7: expected some of 64,"),
        (("--br", "7", "--bc", "64"), "no tile of cpu is that size; --br 7: expected some of 32,"),
    ],
)
def test_of_a_size_that_is_not_there_the_part_that_is_wrong_is_named(
    sizes: tuple[str, ...], says: str
) -> None:
    text = refused(*SHAPE, *sizes)

    assert says in text
    assert text.count("expected some of") == 1


def test_of_a_pair_of_sizes_that_do_not_go_together_those_that_do_are_named() -> None:
    text = commands.refusal("tune", "--arch", "sm_90", "--br", "192", "--bc", "256")

    assert "--bc 256: expected some of 32, 48, 64, 80, 96 with --br 192" in text


# ---- Interrupted and resumed sweeps


def interrupt(clock: FakeTimer, is_now: Callable[[int, int], bool], *arguments: str) -> Result:
    """Return the result of an interrupted sweep.

    `is_now` states whether a timed call is interrupted, from its number and its query rows.
    """
    time_of, number = clock.time_of, itertools.count()

    def time_or_interrupt(tile: dict[str, int], rows: int) -> float:
        if is_now(next(number), rows):
            raise KeyboardInterrupt
        return time_of(tile, rows)

    clock.time_of = time_or_interrupt
    result = on_cpu(*arguments, code=130)
    clock.time_of = time_of
    return result


def in_second_class(number: int, rows: int) -> bool:
    return rows == 799


def in_second_lot(number: int, rows: int) -> bool:
    return number == 17


def test_an_interrupted_sweep_goes_on_with_what_is_left(home: Path, clock: FakeTimer) -> None:
    first = interrupt(clock, in_second_class, *TWO)
    after_first = saved_queries(home)
    clock.timed.clear()
    second = on_cpu(*TWO)

    assert after_first == ["q64"], "what was found is not saved at once"
    assert "1 of 2 are done; the same command resumes there." in first.stderr
    assert "Resuming: 1 of 2 are done, and " in second.stderr
    assert {rows for _, rows in clock.timed} == {799}
    assert saved_queries(home) == ["q64", "q1024"]


@pytest.mark.parametrize("step", [0, 1, 15, 16, 20])
def test_an_interrupted_sweep_of_one_class_goes_on_where_it_was(
    home: Path, clock: FakeTimer, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    checked: list[dict[str, int]] = []
    compute = inputs_module.flash_attention

    def counted(*arrays: np.ndarray, **options: Any) -> np.ndarray:
        checked.append(options["tile"])
        return compute(*arrays, **options)

    monkeypatch.setattr(inputs_module, "flash_attention", counted)
    # An uninterrupted sweep gives the expected counts.
    on_cpu(*SHAPE)
    whole, tiles = len(clock.timed), len(checked)
    tuning.clear()
    clock.timed.clear()
    checked.clear()
    first = interrupt(clock, lambda number, rows: number == step, *SHAPE)
    second = on_cpu(*SHAPE)

    assert "0 of 1 are done; the same command resumes there." in first.stderr
    assert f"Resuming: 0 of 1 are done, and {tiles} tiles of the next are checked." in second.stderr
    assert len(checked) == tiles
    # The interrupted lot of up to 16 tiles is timed again.
    assert whole <= len(clock.timed) <= whole + 16
    assert "The best tile: +100.0% over the default, saved." in second.stdout
    assert [entry.tile for entry in saved(home)] == [{"Br": 64, "Bc": 128}]


def test_the_record_of_an_interrupted_sweep_is_gone_on_with(
    clock: FakeTimer, tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    interrupt(clock, in_second_lot, *SHAPE, "--output", str(path))
    _, rows = rows_on_cpu(path, *SHAPE)

    assert all(row["rounds"] for row in rows)
    # A refused command keeps the saved results.
    assert "exists; --force overwrites it" in refused(*SHAPE, "--output", path)
    assert "1 of 1 classes keep a tile of their own." in tune("--report").stdout


def test_the_table_of_an_interrupted_sweep_says_that_nothing_is_saved(
    home: Path, clock: FakeTimer
) -> None:
    first = interrupt(clock, in_second_lot, *SHAPE)
    second = on_cpu(*SHAPE)

    assert "The sweep is not complete, so nothing is saved." in first.stdout
    assert "(saved)" not in first.stdout
    assert "64x128 (saved)" in second.stdout


def test_a_busy_cpu_before_the_interruption_counts_after_it(
    home: Path, clock: FakeTimer, cpu: Callable[[float], None]
) -> None:
    cpu(97.0)
    interrupt(clock, in_second_lot, *SHAPE)
    cpu(0.0)

    assert "not saved: others used 97% of the CPU." in on_cpu(*SHAPE, code=None).stdout
    assert not (home / "tuned.json").exists() or saved(home) == []


def test_what_an_interrupted_dry_run_found_is_saved_by_the_command_that_goes_on(
    home: Path, clock: FakeTimer
) -> None:
    interrupt(clock, in_second_class, *TWO, "--dry-run")
    on_cpu(*TWO)

    assert set(saved_queries(home)) == {"q64", "q1024"}
    assert "2 of 2 classes keep a tile of their own." in tune("--report").stdout


def test_a_complete_sweep_starts_anew(clock: FakeTimer) -> None:
    on_cpu(*TWO)
    once = len(clock.timed)
    again = on_cpu(*TWO)

    assert len(clock.timed) == 2 * once
    assert "Resuming" not in again.stderr


@pytest.mark.parametrize("change", [("--repeats", "7"), ("--seed", "1"), ("--max-tiles", "3")])
def test_with_other_settings_an_interrupted_sweep_is_not_gone_on_with(
    clock: FakeTimer, change: tuple[str, str]
) -> None:
    interrupt(clock, in_second_class, *TWO)

    assert "Resuming" not in on_cpu(*TWO, *change).stderr
    assert "Resuming" in on_cpu(*TWO).stderr


def test_with_other_kernel_sources_an_interrupted_sweep_is_not_gone_on_with(
    clock: FakeTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.time_of = lambda tile, rows: 1.0
    interrupt(clock, in_second_class, *TWO)
    monkeypatch.setattr(environment, "digest_of", lambda *_: "f" * 16)

    assert "Resuming" not in on_cpu(*TWO).stderr


# ---- Report


def test_the_report_shows_what_was_found_and_times_nothing(
    tmp_path: Path, clock: FakeTimer
) -> None:
    on_cpu(*TWO, "--dry-run")
    clock.timed.clear()
    path = tmp_path / "report.json"
    result = tune("--report", "--output", path)

    assert clock.timed == []
    assert "cpu fp32 d8 full s64" in result.stdout
    assert "cpu tiles: BrxBc." in result.stdout
    assert "reach 50.0% of the best tile's rate (geometric mean of 2)" in result.stdout
    assert "0 of 2 classes keep a tile of their own." in result.stdout
    assert "2 of 2 not saved, though better than the default: --dry-run." in result.stdout
    table = [line for line in result.stdout.splitlines() if "64x128" in line]
    assert [line.split()[-1] for line in table] == ["no", "no"]
    assert [row["gain_percent"] for row in commands.written(path)["rows"]] == [100, 100]


def test_the_report_shows_the_newest_finding_of_a_class(clock: FakeTimer) -> None:
    on_cpu(*SHAPE, "--dry-run")
    clock.time_of = lambda tile, rows: 1.0
    on_cpu(*SHAPE, "--dry-run")

    assert "100.0%" in tune("--report").stdout
    assert "0 of 1 classes" in tune("--report").stdout


def test_the_report_leaves_out_what_was_found_with_other_kernel_sources(
    clock: FakeTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(*SHAPE)
    monkeypatch.setattr(environment, "digest_of", lambda *_: "f" * 16)

    assert tune("--report").stdout.startswith("No sweep of these kernels has been run")


def test_before_the_first_sweep_the_report_says_so() -> None:
    assert "'cupy-flash tune' runs one" in tune("--report").stdout


@pytest.mark.parametrize("columns", ["80", "120"])
def test_what_is_shown_fits_the_terminal_and_has_no_colour_in_a_file(
    clock: FakeTimer, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    outputs = [on_cpu(*TWO, "--dry-run"), tune("--report"), on_cpu(*SHAPE, "--dry-run")]
    lines = [line for each in outputs for line in each.stdout.splitlines()]

    # A title stays on one line, however long it is.
    assert max(len(line) for line in lines if "d24 full" not in line) <= int(columns)
    assert not any("\x1b" in line or "…" in line for line in lines)
    assert "GFLOP/s" in outputs[1].stdout


# ---- Equal machine code, and the other 16-bit type


def gpu_field(count: int = 3) -> list[Candidate]:
    """Return candidate tiles whose launches are equal."""
    found = gpu_candidates(BF16_CASES, SM_90, "mma", Limits(max_tiles=count))
    for each in found:
        each.plans = tuple(launched_by(p, found[0].plan.launches) for p in each.plans)
    return found


def launched_by(plan: Plan, launches: tuple[Launch, ...]) -> Plan:
    schedule = dataclasses.replace(plan.schedule, launches=launches)
    return dataclasses.replace(plan, schedule=schedule)


def compiled(candidates: list[Candidate], builder: FakeBuilder, max_spills: int = 32) -> None:
    Compilation(builder, None, max_spills).finish(candidates, Live(1))


def test_tiles_with_the_same_machine_code_and_launch_are_timed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    candidates = gpu_field()
    default, second, third = candidates
    compiled(candidates, FakeBuilder(lambda job: b"same"))
    called: list[Candidate] = []

    def call_of(candidate: Candidate, case: int) -> Callable[[], None]:
        called.append(candidate)
        tile = dataclasses.asdict(candidate.tile)
        return functools.partial(lambda *_, **__: None, np.empty((1, 113)), tile=tile)

    timed(candidates, call_of, FakeTimer(lambda tile, rows: 1.5))
    print_ranking(candidates, "a title", 20)

    assert default.is_default
    assert (default.same_binary, second.same_binary, third.same_binary) == (None, default, default)
    assert {id(each) for each in called} == {id(default)}
    assert [c.medians_ms for c in candidates] == [[1.5]] * 3
    assert [c.rounds for c in candidates] == [3] * 3
    assert "2 tiles compile to the same code" in capsys.readouterr().out


def test_the_same_machine_code_launched_in_another_way_is_timed_itself() -> None:
    candidates = gpu_field(2)
    other = candidates[1].plan
    launches = tuple(dataclasses.replace(x, grid=(7, 1, 1)) for x in other.launches)
    candidates[1].plans = (launched_by(other, launches),)
    compiled(candidates, FakeBuilder(lambda job: b"same"))

    assert candidates[1].same_binary is None


def test_each_unit_is_compiled_once_for_all_groups() -> None:
    builder = FakeBuilder()
    compilation = Compilation(builder, None, 32)
    compilation.start(gpu_field())
    compilation.finish(gpu_field(), Live(1))

    assert builder.submitted == 3


def test_what_does_not_compile_or_spills_is_dropped_but_for_the_default() -> None:
    broken, spilling = gpu_field(), gpu_field()
    compiled(broken, FakeBuilder(lambda job: b""))
    compiled(spilling, FakeBuilder(spills=40))

    assert {c.dropped for c in broken} == {"does not compile"}
    assert [c.dropped for c in spilling] == [None] + ["spills 40 bytes per thread"] * 2


SIZES = "q4096 k4096 rows65536 align16"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"float16 d64 dv64 full {SIZES}", f"bfloat16 d64 dv64 full {SIZES}"),
        (f"bfloat16 d64 dv64 causal {SIZES}", f"float16 d64 dv64 causal {SIZES}"),
        (f"float32 d64 dv64 full {SIZES}", None),
    ],
)
def test_the_other_16_bit_class_differs_in_dtype_alone(one: str, other: str | None) -> None:
    assert other_16bit_class(one) == other


def field_of(problem_class: str) -> Sweep:
    case = Weighted(dataclasses.replace(CASE, dtype=problem_class.split()[0]))
    return Sweep(Group(problem_class, (case,)), cpu_candidates([case], Limits()))


def test_after_the_other_16_bit_class_a_sweep_tries_what_did_well_there_and_the_default() -> None:
    sweep = field_of(f"float16 d64 dv64 full {SIZES}")
    default, second, *_, last = [c.tile for c in sweep.candidates]
    shorten(sweep, {f"bfloat16 d64 dv64 full {SIZES}": [last, second]})

    assert [c.tile for c in sweep.candidates] == [default, second, last]


@pytest.mark.parametrize(
    "done", [f"bfloat16 d64 dv64 causal {SIZES}", f"float32 d64 dv64 full {SIZES}"]
)
def test_what_did_well_in_other_classes_shortens_nothing(done: str) -> None:
    sweep = field_of(f"float16 d64 dv64 full {SIZES}")
    before = list(sweep.candidates)
    shorten(sweep, {done: [before[3].tile]})

    assert sweep.candidates == before


def test_of_both_16_bit_types_the_second_has_the_firsts_finalists_to_try(clock: FakeTimer) -> None:
    shape = ("--seqlen-q", "799", "--heads", "1", "--head-dim", "8")
    on_cpu(*shape, "--dtype", "bfloat16")
    alone = len(clock.timed)
    clock.timed.clear()
    on_cpu(*shape, "--dtype", "float16,bfloat16")
    second = len(clock.timed) - alone

    # The first type leaves 12 tiles and the default: rounds 1 and 2 time these, and round 3 five.
    assert second <= 13 + 13 + 5 < alone


@pytest.mark.parametrize(
    ("dtypes", "waits"),
    [
        (("float16", "bfloat16"), True),
        (("bfloat16", "float16"), True),
        (("float16", "float32"), False),
    ],
)
def test_on_a_gpu_all_is_compiled_ahead_but_what_the_other_16_bit_type_may_cut(
    dtypes: tuple[str, str], waits: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []

    def image_of(job: Job) -> bytes:
        events.append(("compiled", next(name for name in dtypes if name in job.unit.title.split())))
        return text_of(job)

    def computed(q: np.ndarray, k: np.ndarray, v: np.ndarray, **_: object) -> np.ndarray:
        events.append(("checked", q.dtype.name))
        return attention_naive(q, k, v)

    install_gpu(monkeypatch, area, image_of)
    monkeypatch.setattr(inputs_module, "flash_attention", computed)
    tune(*SIMT, "--dtype", ",".join(dtypes), "--max-tiles", "30")
    first, second = dtypes
    counts = {event: events.count(event) for event in events}

    assert {entry.gpu for entry in saved(home)} == {fake_cupy.device().name}
    # If the second type waits, it compiles only the tiles that the race of the first type left.
    assert (counts["compiled", second] < counts["compiled", first]) is waits
    assert counts["checked", second] == counts["compiled", second]
    last_check = len(events) - events[::-1].index(("checked", first))
    assert (events.index(("compiled", second)) >= last_check) is waits


# ---- Compilation for a GPU that is not present


@needs_compiler
def test_with_an_architecture_the_sweep_is_compiled_and_ranked_by_resources(
    home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ranking.json"
    options = ("--arch", "sm_90", "--family", "simt", "--dtype", "float32", "--head-dim", "16")
    limits = ("--max-tiles", "2", "--workers", "2", "--max-spills", "100000")
    result = tune(*options, *limits, "--output", path)
    rows = commands.written(path)["rows"]

    assert "Nothing was timed" in result.stdout
    assert all(row["registers"] > 0 and row["blocks_per_sm"] >= 1 for row in rows)
    assert {row["median_ms"] for row in rows} == {None}
    assert not (home / "tuned.json").exists()


# ---- KV caches and packed sequences


@pytest.mark.parametrize("options", [("--cache", "--page-size", "16"), ("--lengths", "113,7")])
def test_the_cpu_backend_has_no_tiles_to_tune_for_sequences(options: tuple[str, ...]) -> None:
    assert "no tuned tiles for" in refused(*options)


def test_the_rate_of_packed_sequences_counts_each_ones_own_pairs() -> None:
    lengths = (113, 7)
    case = Case("float32", 2, 113, 113, 2, 2, 24, 24, kind="varlen", lengths=lengths)
    candidate = cpu_candidates([Weighted(case)], Limits(max_tiles=1))[0]
    candidate.medians_ms = [1.0]

    assert candidate.tflops == pytest.approx(4 * 2 * (113**2 + 7**2) * 24 / 1e-3 / 1e12)


@pytest.mark.parametrize("kind", ["--preset decode", "--preset varlen", "--workload {file}"])
def test_what_names_its_cases_takes_no_options_on_sequences(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    file.write_text("[]", encoding="utf-8")
    options = kind.format(file=file).split()

    said = commands.refusal("tune", "--arch", "sm_90", *options, "--cache")
    assert "--cache cannot be combined with --" in said


@pytest.mark.parametrize(
    ("preset", "families"),
    [
        ("decode", {"decode"}),
        ("decode-quantized", {"decode"}),
        # MLA with many query heads is served by two families on Hopper.
        ("mla", {"decode", "hopper"}),
    ],
)
def test_presets_of_decoding_tune_the_families_that_serve_caches(
    preset: str, families: set[str]
) -> None:
    assert_tunes(preset, 90, families)


def test_the_varlen_preset_tunes_the_family_that_serves_packed_sequences() -> None:
    assert_tunes("varlen", 90, {"hopper"})
    assert_tunes("varlen", 80, {"mma"})


def assert_tunes(preset: str, arch: int, families: set[str]) -> None:
    """Assert that a preset's sweeps are of these families, and that each has several tiles."""
    groups = groups_of(PRESETS[preset]())
    sweeps = plan_sweeps(groups, device_for_arch(arch), None, Limits(max_tiles=3))
    assert {sweep.family for sweep in sweeps} == families
    assert all(len(sweep.candidates) > 1 for sweep in sweeps)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("cache_dtype", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("is_latent", [False, True])
def test_what_is_tuned_of_caches_is_found_again_by_calls_like_them_alone(
    is_latent: bool, cache_dtype: str | None, page_size: int
) -> None:
    sizes = (1, 576, 512) if is_latent else (4, 128, 128)
    fields = {"page_size": page_size, "cache_dtype": cache_dtype, "values_in_keys": is_latent}
    case = Case(*("bfloat16", 2, 1, 4096, 16, *sizes), kind="cache", **fields)
    device = device_for_arch(90)
    (sweep,) = plan_sweeps(groups_of([Weighted(case)]), device, None, Limits())
    best = next(c for c in sweep.candidates if not c.is_default)
    default = next(c for c in sweep.candidates if c.is_default)
    best.medians_ms, default.medians_ms = [1.0], [2.0]
    tuning.save(entry_of(finding_of(sweep, [best, default], device.name, 2.0), device))

    def planned(cache_dtype: str | None, head_dim_v: int | None) -> Plan:
        q, k, v = (np.empty(shape, ml_dtypes.bfloat16) for shape in case.bshd_shapes)
        if cache_dtype:
            k, v = (np.empty(x.shape, cache_dtype) for x in (k, v))
        options = {"cache_seqlens": 4000, "head_dim_v": head_dim_v, "arch": "sm_90"}
        if page_size:
            options["block_table"] = np.zeros((2, 256), np.int32)
        function = cupy_flash.flash_attention_with_kvcache
        return cupy_flash.plan(function, q, k, v if head_dim_v is None else None, **options)

    found = planned(cache_dtype, 512 if is_latent else None)
    assert found.tile == best.tile
    assert "from the tuned table" in found.reason
    for other in (
        planned("int8" if cache_dtype is None else None, 512 if is_latent else None),
        planned(cache_dtype, None if is_latent else 128),
        planned(cache_dtype, 256 if is_latent else 64),
    ):
        assert "default tile" in other.reason
