"""Conversion of rows to tables and files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cupy_flash.cli.records import report


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

    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines == ["- date: today", "- device: a GPU", "", "| ms |", "| --- |", "| 1 |", "| 2 |"]


def test_markdown_has_the_digits_that_a_reader_wants(tmp_path: Path) -> None:
    path = tmp_path / "rows.md"
    row = {"ms": 0.123456789, "rate": 12345.6789, "error": 3.14159e-7, "each": [1 / 3, 2]}
    report.write(path, report.Record({"scale": 1 / 7}, [row, row | {"ms": 1.0}]))
    lines = path.read_text(encoding="utf-8").splitlines()

    shared = ["- scale: 0.1429", "- rate: 12346", "- error: 3.142e-07", "- each: [0.3333, 2]"]
    assert lines[:4] == shared
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
