"""Rows to tables and files, and records to the page of benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.bench_records import row, write
from support.benchmark_scripts import render

from cupy_flash.cli.records import report

__all__ = ["render"]  # fixture


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.012345, "0.0123"), (1.23456, "1.235"), (123.456, "123.5"), (12345.6, "12346")],
)
def test_milliseconds_have_no_exponent(value: float | None, text: str) -> None:
    assert report.milliseconds(value) == text


def test_json_holds_an_infinite_error_as_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    report.write(path, report.Record({}, [{"max_error": report.finite(math.inf)}]))

    assert json.loads(path.read_text(encoding="utf-8"))["rows"] == [{"max_error": "inf"}]


def test_markdown_states_once_what_all_rows_share(tmp_path: Path) -> None:
    path = tmp_path / "rows.md"
    rows = [{"device": "a GPU", "ms": 1}, {"device": "a GPU", "ms": 2}]
    report.write(path, report.Record({"date": "today"}, rows))

    assert path.read_text(encoding="utf-8").splitlines() == [
        "- date: today",
        "- device: a GPU",
        "",
        "| ms |",
        "| --- |",
        "| 1 |",
        "| 2 |",
    ]


def test_markdown_has_the_digits_that_a_reader_wants(tmp_path: Path) -> None:
    path = tmp_path / "rows.md"
    row = {"ms": 0.123456789, "rate": 12345.6789, "error": 3.14159e-7, "each": [1 / 3, 2]}
    report.write(path, report.Record({"scale": 1 / 7}, [row, row | {"ms": 1.0}]))
    lines = path.read_text(encoding="utf-8").splitlines()

    assert lines[:4] == [
        "- scale: 0.1429",
        "- rate: 12346",
        "- error: 3.142e-07",
        "- each: [0.3333, 2]",
    ]
    assert lines[-2:] == ["| 0.1235 |", "| 1 |"]


def test_csv_has_all_digits(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    report.write(path, report.Record({}, [{"ms": 0.123456789}]))

    assert path.read_text(encoding="utf-8") == "ms\n0.123456789\n"


def test_a_note_said_twice_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_notes(report.console(), ["torch-flash: no [reason]", "torch-flash: no [reason]"])

    assert capsys.readouterr().out == "torch-flash: no [reason] (2 times)\n"


def print_rows(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [
        report.Column("case", lambda row: row["case"], numeric=False),
        report.Column("provider", lambda row: row["provider"], numeric=False),
        report.Column("error", lambda row: row["error"]),
    ]
    rows = [{"case": "h8/4 s1024/203 causal", "provider": "cupy_flash-hopper", "error": "5.7e-07"}]
    if width is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(width))
    out = report.console()
    report.print_table(out, "a title", columns, [rows])
    report.print_notes(out, ["a note of several words " * 10])


@pytest.mark.parametrize("width", [10, 25, 40, 50, 60, 80])
def test_no_number_and_no_word_of_a_table_is_broken_on_any_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_rows(width, monkeypatch)
    words = capsys.readouterr().out.split()

    assert {"5.7e-07", "cupy_flash-hopper", "h8/4", "s1024/203", "causal", "error"} <= set(words)


def test_a_table_is_no_wider_than_its_words_ask_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_rows(45, monkeypatch)

    assert max(map(len, capsys.readouterr().out.splitlines())) <= 45


def test_into_a_pipe_no_line_is_wrapped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_rows(None, monkeypatch)
    lines = capsys.readouterr().out.splitlines()

    assert any("h8/4 s1024/203 causal   cupy_flash-hopper   5.7e-07" in line for line in lines)
    assert "a note of several words " * 10 in lines[-1] + " "


def write_record(folder: Path, rows: list[dict[str, Any]], baseline: list[str]) -> None:
    write(folder / "grid.json", rows, baseline=baseline)


def test_the_page_has_the_ratios_their_geometric_mean_and_minimum(
    render: ModuleType, tmp_path: Path
) -> None:
    write_record(
        tmp_path,
        [
            row("cupy_flash", 512, 1.0),
            row("torch-flash", 512, 0.5),
            row("cupy_flash", 1024, 1.0),
            row("torch-flash", 1024, 8.0),
        ],
        ["torch-flash"],
    )
    page = render.render(tmp_path)

    assert "geometric mean **2.00**, minimum **0.50**, 2 rows" in page
    assert "| 32 | 512 | 100 (1 ms) | 200 (0.5 ms) | 0.50 |" in page
    assert "kernel sources: mma `abc`" in page
    assert "2026-01-02T03:04:05+00:00" in page


def test_the_baseline_is_the_best_of_several_at_each_row(
    render: ModuleType, tmp_path: Path
) -> None:
    rows = [row("cupy_flash", 512, 2.0), row("torch-math", 512, 3.0)]
    rows += [row("torch-efficient", 512, 5.0), row("cupy_flash", 1024, 2.0)]
    rows += [row("torch-math", 1024, None, reason="too large"), row("torch-efficient", 1024, 6.0)]
    write_record(tmp_path, rows, ["torch-efficient", "torch-math"])
    page = render.render(tmp_path)

    expected = math.sqrt(1.5 * 3.0)
    assert f"geometric mean **{expected:.2f}**, minimum **1.50**, 2 rows" in page
    assert "- torch-math: too large" in page


def test_a_wrong_result_of_ours_counts_in_no_ratio(render: ModuleType, tmp_path: Path) -> None:
    rows = [row("cupy_flash", 512, 1.0, check="failed"), row("torch-flash", 512, 0.5)]
    rows += [row("cupy_flash", 1024, 1.0), row("torch-flash", 1024, 3.0)]
    write_record(tmp_path, rows, ["torch-flash"])
    page = render.render(tmp_path)

    assert "geometric mean **3.00**, minimum **3.00**, 1 rows" in page
    assert "(over the error bound)" in page


def test_a_record_without_providers_is_a_plain_table(render: ModuleType, tmp_path: Path) -> None:
    write_record(tmp_path, [{"rank": 1, "tile": {"Br": 64, "Bc": 32}, "versions": {}}], [])

    assert "| 1 | Br=64 Bc=32 |" in render.render(tmp_path)


def test_each_gpus_records_have_sections_that_name_it(render: ModuleType, tmp_path: Path) -> None:
    for name in ("h100", "h200"):
        rows = [row("cupy_flash", 512, 1.0)]
        write(tmp_path / f"{name}_grid.json", rows, device=f"NVIDIA {name}")
    first, second = render.render(tmp_path).split("\n## ")[1:]

    assert first.startswith("h100_grid\n")
    assert "- device: NVIDIA h100\n" in first
    assert second.startswith("h200_grid\n")
    assert "- device: NVIDIA h200\n" in second


def test_kernels_that_only_the_head_names_are_named_too(render: ModuleType, tmp_path: Path) -> None:
    write(tmp_path / "limits.json", [{"share": 0.9}], hopper_digest="0" * 16)

    assert "kernel sources: hopper `0000000000000000`, which has" in render.render(tmp_path)


def test_an_empty_folder_gives_a_page_that_says_so(render: ModuleType, tmp_path: Path) -> None:
    assert "No results are recorded yet" in render.render(tmp_path)


def test_the_page_can_be_checked_against_the_records(render: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    places = ["--results", str(tmp_path / "results"), "--page", str(page)]
    write_record(tmp_path / "results", [row("cupy_flash", 512, 1.0)], [])

    assert render.main([*places, "--check"]) == 1
    assert render.main(places) == 0
    assert render.main([*places, "--check"]) == 0
    page.write_text("edited", encoding="utf-8")
    assert render.main([*places, "--check"]) == 1
