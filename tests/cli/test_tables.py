"""`cupy-flash tables`: tuned tables that are listed, exported and imported."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.cli import commands

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cpu import sources
from cupy_flash.families import FORWARD
from cupy_flash.planning import tuning
from cupy_flash.planning.tuning import Entry, problem_class, read_table, write_table

CLASS = problem_class(Case("bfloat16", 4, 4096, 4096, 16, 16, 128, 128).problem())
GPU = "NVIDIA GPU of the tests"
TILE = {"Br": 128, "Bc": 64, "warps": 8, "stages": 2, "q_in_registers": 0, "min_blocks": 1}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def tables(*arguments: str | Path, code: int = 0) -> Result:
    return commands.run("tables", *arguments, code=code)


def refused(*arguments: str | Path) -> str:
    return commands.refusal("tables", *arguments)


def test_without_a_command_its_help_is_shown_and_a_wrong_one_is_told_the_right_ones() -> None:
    result = tables()

    assert result.stderr == ""
    assert "List, export, merge, import and clear tables" in result.stdout
    said = "no command 'nope'; expected one of clear, export, import, list, merge"
    assert said in refused("nope")


def entry(**changes: Any) -> Entry:
    ours = {"gpu": GPU, "arch": 90, "sm_count": 132, "family": "mma", "problem_class": CLASS}
    fields = {"digest": FORWARD["mma"].digest(), "tile": TILE, "tflops": 500.0}
    return Entry(**(ours | fields | changes))


NO_GPU = {"gpu": "cpu", "arch": 0, "sm_count": 0, "family": "cpu", "digest": sources.digest()}
ON_CPU = entry(**NO_GPU, tile={"Br": 128, "Bc": 64}, tflops=0.05)
STALE = entry(digest="0" * 16)


def table(path: Path, *entries: Entry) -> Path:
    write_table(path, entries)
    return path


def test_the_users_own_table_is_listed_with_what_is_stale_marked(home: Path) -> None:
    table(home / "tuned.json", entry(), STALE)
    result = tables("list")

    assert f"2 saved in {home / 'tuned.json'}" in result.stdout
    # Classes have the names that `tune` prints.
    assert "mma bf16 d128 full s4096" in result.stdout
    assert "class: sizes rounded to powers of four, so that a case of s96" in result.stdout
    assert "Br=128 Bc=64" in result.stdout
    listed = [line for line in result.stdout.splitlines() if GPU in line]
    assert sum(line.endswith(" stale ") for line in listed) == 1
    assert "stale: tuned on other kernel sources" in result.stdout


def test_without_stale_entries_nothing_is_said_of_them(home: Path) -> None:
    table(home / "tuned.json", entry())

    assert "stale" not in tables("list").stdout


def test_rates_of_a_cpu_are_listed_in_gflops(home: Path) -> None:
    table(home / "tuned.json", ON_CPU)
    result = tables("list")

    assert "GFLOP/s" in result.stdout
    assert " 50 " in result.stdout


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_list_fits_the_terminal_and_has_no_colour_in_a_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    table(home / "tuned.json", entry(gpu="NVIDIA H100 80GB HBM3"), ON_CPU)
    monkeypatch.setenv("COLUMNS", columns)
    _, *lines = tables("list").stdout.splitlines()

    assert max(map(len, lines)) <= int(columns)
    assert not any("\x1b" in line or "…" in line for line in lines)


def test_an_empty_table_says_so(home: Path) -> None:
    assert tables("list").stdout == f"No tiles are saved in {home / 'tuned.json'}\n"


def test_any_files_can_be_listed(tmp_path: Path) -> None:
    paths = [table(tmp_path / name, entry()) for name in ("a.json", "b.json")]
    result = tables("list", *paths)

    assert all(f"1 saved in {path}" in result.stdout for path in paths)


def test_the_shipped_tables_can_be_listed() -> None:
    table(tuning.SHIPPED_DIR / "gpu.json", entry())

    assert "1 saved in" in tables("list", "--shipped").stdout
    assert "leave out FILES" in refused("list", "--shipped", __file__)


def test_where_none_is_shipped_the_users_table_is_not_shown_instead(home: Path) -> None:
    table(home / "tuned.json", entry())

    assert tables("list", "--shipped").stdout == "No tables are part of the library\n"


NO_TABLES = {
    "no JSON": ("{", "cannot be read as a tuned table"),
    "another version": ('{"version": 2, "entries": []}', "has version 2; expected 3"),
    "another record": ('{"metadata": {}, "rows": []}', "is not a tuned table"),
}


@pytest.mark.parametrize(("text", "said"), NO_TABLES.values(), ids=NO_TABLES)
def test_a_file_that_is_no_table_is_refused_in_one_line(
    tmp_path: Path, home: Path, text: str, said: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    good, output = table(tmp_path / "good.json", entry()), tmp_path / "merged.json"

    assert said in refused("list", path)
    assert said in refused("import", path)
    assert said in refused("merge", good, path, "--output", output)
    assert not output.exists()
    assert not (home / "tuned.json").exists()


def test_what_is_exported_is_what_is_in_effect_without_the_stale(tmp_path: Path) -> None:
    table(tuning.SHIPPED_DIR / "gpu.json", entry(tflops=1.0), ON_CPU)
    table(tuning.user_table_path(), entry(tflops=2.0), STALE)
    output = tmp_path / "mine.json"
    result = tables("export", output)
    data = commands.written(output)

    assert result.stdout == f"2 entries written to {output}\n"
    assert read_table(output) == [entry(tflops=2.0), ON_CPU]
    assert data["made_by"]["command"] == "cupy-flash tables export"
    assert {"date", "versions"} <= set(data["made_by"])


@pytest.mark.parametrize("name", ["mine.csv", "file/mine.json"])
def test_an_output_that_cannot_be_one_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    refused("export", tmp_path / name)
    refused("merge", table(tmp_path / "a.json"), "--output", tmp_path / name)


def test_of_merged_tables_the_faster_entry_of_each_key_stays(tmp_path: Path) -> None:
    other = entry(gpu="another")
    first = table(tmp_path / "a.json", entry(tflops=600.0), other)
    second = table(tmp_path / "b.json", entry(tflops=550.0), ON_CPU)
    output = tmp_path / "both.json"
    result = tables("merge", first, second, "--output", output)

    assert result.stdout == f"3 entries written to {output}\n"
    rates = {e.gpu: e.tflops for e in read_table(output)}
    assert rates == {GPU: 600.0, "another": 500, "cpu": 0.05}


def test_entries_of_every_gpu_are_taken_in_each_for_its_own(tmp_path: Path, home: Path) -> None:
    foreign = entry(gpu="another", arch=80, sm_count=108)
    result = tables("import", table(tmp_path / "t.json", entry(), foreign, ON_CPU))

    path = home / "tuned.json"

    assert result.stdout == f"3 entries imported into {path}: 1 of {GPU}, 1 of another, 1 of cpu\n"
    assert read_table(path) == [entry(), foreign, ON_CPU]


def test_what_is_exported_is_taken_in_on_the_same_machine(tmp_path: Path, home: Path) -> None:
    table(tuning.SHIPPED_DIR / "gpu.json", entry())
    table(home / "tuned.json", ON_CPU)
    tuning.reload()
    tables("export", tmp_path / "mine.json")
    before = tuning.entries()
    result = tables("import", tmp_path / "mine.json")

    assert "2 entries imported" in result.stdout
    assert sorted(tuning.entries(), key=str) == sorted(before, key=str)


def test_imported_entries_go_over_those_that_are_there(tmp_path: Path, home: Path) -> None:
    table(home / "tuned.json", entry(tflops=900.0), ON_CPU)
    tables("import", table(tmp_path / "t.json", entry(tflops=1.0)))

    assert read_table(home / "tuned.json") == [entry(tflops=1.0), ON_CPU]


def test_stale_entries_are_not_imported_and_are_counted(tmp_path: Path, home: Path) -> None:
    unknown = entry(family="of the future")
    result = tables("import", table(tmp_path / "t.json", STALE, ON_CPU, unknown))

    assert "1 entry imported" in result.stdout
    assert "2 left out: tuned on other kernel sources" in result.stdout
    assert read_table(home / "tuned.json") == [ON_CPU]


FINITE = "expected a finite number of at least 0"
WRONG_ENTRIES = {
    "below zero": (entry(tile=TILE | {"Br": -5}), "Br is -5; expected a positive number"),
    "not legal": (entry(tile=TILE | {"Bc": 40}), "Bc is 40; expected a multiple of 16"),
    "too large": (entry(tile=TILE | {"Bc": 1024}), "shared memory"),
    "a field short": (entry(tile={"Br": 128, "Bc": 64}), "its tile has Br, Bc; expected Br, Bc,"),
    "a field more": (entry(tile=TILE | {"colour": 3}), "colour; expected Br, Bc, warps"),
    "no tile at all": (entry(tile={}), "its tile has no fields"),
    "no speed": (entry(tflops=float("nan")), f"tflops is nan; {FINITE}"),
    "endless speed": (entry(tflops=float("inf")), f"tflops is inf; {FINITE}"),
    "no architecture": (entry(arch=47), "unknown architecture 47; expected one of sm_75"),
    "no SMs": (entry(sm_count=0), "sm_count is 0; expected at least 1"),
    "too old a GPU": (entry(arch=75), "sm_75"),
    "a kernel on the CPU": (entry(gpu="cpu"), "family 'mma' does not run on that processor"),
    "the CPU's on a GPU": (dataclasses.replace(ON_CPU, gpu=GPU), "'cpu' does not run on that"),
    "too large for a CPU": (
        dataclasses.replace(ON_CPU, tile={"Br": 2**20, "Bc": 2**20}),
        "tile 1048576x1048576 needs too much memory",
    ),
}


@pytest.mark.parametrize(("wrong", "said"), WRONG_ENTRIES.values(), ids=WRONG_ENTRIES)
def test_a_table_with_a_wrong_value_is_refused_whole(
    tmp_path: Path, home: Path, wrong: Entry, said: str
) -> None:
    path = table(tmp_path / "t.json", entry(gpu="another"), wrong)
    message = refused("import", path)

    assert str(path) in message
    assert said in message
    assert not (home / "tuned.json").exists()


def test_clearing_removes_the_users_table_and_counts(home: Path) -> None:
    table(home / "tuned.json", entry(), ON_CPU)

    assert tables("clear").stdout == "2 entries removed\n"
    assert not (home / "tuned.json").exists()
    assert tables("clear").stdout == "0 entries removed\n"


def test_a_table_that_cannot_be_read_says_how_to_mend_it_and_clearing_keeps_it(home: Path) -> None:
    (home / "tuned.json").write_text("precious", encoding="utf-8")

    told = commands.refusal("tables", "list", code=1)
    assert told.endswith("; 'cupy-flash tables clear' sets it aside\n")
    kept = home / "tuned.corrupt.json"
    assert tables("clear").stdout == f"{home / 'tuned.json'} cannot be read; kept as {kept}\n"
    assert kept.read_text(encoding="utf-8") == "precious"
    assert "No tiles are saved" in tables("list").stdout


def test_of_a_file_that_is_not_the_users_table_no_remedy_is_known(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{", encoding="utf-8")

    assert "tables clear" not in refused("list", path)


def test_a_home_that_cannot_be_written_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv(tuning.HOME_VARIABLE, str(tmp_path / "file"))

    commands.refusal("tables", "import", table(tmp_path / "t.json", ON_CPU), code=1)
