"""Journal of an interrupted sweep, and which commands may resume the sweep."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cupy_flash.cli.tune.journal import Journal, findings, folder
from cupy_flash.planning import tuning

SETTINGS = {"device": "a GPU", "digests": {"mma": "abc"}, "settings": {"repeats": 20}}


def finding(problem_class: str, tflops: float = 1.0) -> dict[str, object]:
    return {"problem_class": problem_class, "best_tflops": tflops}


def test_an_interrupted_sweep_goes_on_with_what_it_found() -> None:
    Journal(SETTINGS).add(finding("one"))
    again = Journal(SETTINGS)
    again.add(finding("two"))

    assert list(Journal(SETTINGS).found.values()) == [finding("one"), finding("two")]


def test_tiles_of_a_class_that_is_not_done_are_gone_on_with() -> None:
    journal = Journal(SETTINGS)
    journal.add_tile("one", "a tile", {"rounds": 0}, None)
    journal.add_tile("one", "a tile", {"rounds": 1}, "a busy CPU")
    Journal(SETTINGS)
    again = Journal(SETTINGS)
    (line,) = again.begun["one"].values()
    again.add(finding("one"))

    assert (line["rounds"], line["unreliable"]) == (1, "a busy CPU")
    assert Journal(SETTINGS).begun == {}
    assert list(findings()) == [finding("one")]


def test_a_complete_sweep_starts_anew() -> None:
    first = Journal(SETTINGS)
    first.add(finding("one"))
    first.finish()

    assert Journal(SETTINGS).found == {}


@pytest.mark.parametrize(
    "change",
    [{"device": "another"}, {"digests": {"mma": "abd"}}, {"settings": {"repeats": 21}}],
    ids=lambda change: next(iter(change)),
)
def test_with_anything_else_it_is_another_sweep(change: dict[str, object]) -> None:
    Journal(SETTINGS).add(finding("one"))

    assert Journal(SETTINGS | change).found == {}
    assert list(Journal(SETTINGS).found) == ["one"]


@pytest.mark.parametrize("rest", ['{"problem_class": "tw', "\x00\x00", "[]", "null"])
def test_a_line_that_was_cut_short_is_left_out(rest: str) -> None:
    journal = Journal(SETTINGS)
    journal.add(finding("one"))
    with journal.path.open("a", encoding="utf-8") as file:
        file.write(rest)
    again = Journal(SETTINGS)
    again.add(finding("three"))

    assert list(again.found) == ["one", "three"]
    assert list(Journal(SETTINGS).found) == ["one", "three"]


def test_a_journal_of_bytes_that_are_no_text_starts_anew() -> None:
    path = Journal(SETTINGS).path
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe{")

    assert Journal(SETTINGS).found == {}


def test_a_journal_lies_beside_the_users_table(home: Path) -> None:
    assert Journal(SETTINGS).path.parent == folder() == home / "sweeps"


def test_where_nothing_can_be_written_a_line_says_so_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv(tuning.HOME_VARIABLE, str(tmp_path / "file"))
    journal = Journal(SETTINGS)
    journal.add(finding("one"))
    journal.finish()
    said = capsys.readouterr().err

    assert said.count("\n") == 1
    assert "cannot be resumed" in said
    assert not journal.is_kept
    assert list(journal.found) == ["one"]


def test_findings_are_those_of_all_sweeps_the_oldest_first() -> None:
    for age, name in enumerate(("new", "old")):
        journal = Journal(SETTINGS | {"device": name})
        journal.add(finding(name))
        journal.finish()
        os.utime(journal.path, (1e9 - age, 1e9 - age))

    assert [each["problem_class"] for each in findings()] == ["old", "new"]


def test_before_the_first_sweep_there_are_no_findings() -> None:
    assert list(findings()) == []


def test_a_journal_is_one_line_of_json_for_each_finding() -> None:
    journal = Journal(SETTINGS)
    journal.add(finding("one"))
    journal.finish()
    lines = journal.path.read_text(encoding="utf-8").splitlines()

    assert [json.loads(line) for line in lines] == [finding("one"), {"complete": True}]
