"""The tuned-tile table: classes, files, and that a bad file harms nothing."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash import tuning
from cupy_flash.problem import ArraySpec, make_contiguous_problem, make_problem
from cupy_flash.tuning import Entry, TableError, problem_class, read_table, write_table

PROBLEM = make_contiguous_problem(
    dtype="float16",
    batch=2,
    seqlen_q=4096,
    seqlen_k=4096,
    heads_q=16,
    heads_kv=16,
    head_dim=64,
    head_dim_v=64,
)

names = st.text(max_size=20)
entries = st.builds(
    Entry,
    gpu=names,
    family=names,
    digest=names,
    problem_class=names,
    tile=st.dictionaries(names, st.integers(-(2**31), 2**31), max_size=5),
    tflops=st.floats(0, 1e6),
)


def entry(**changes):
    fields = {
        "gpu": "sm_90",
        "family": "mma",
        "digest": "0123456789abcdef",
        "problem_class": problem_class(PROBLEM),
        "tile": {"Br": 128, "Bc": 64},
        "tflops": 500.0,
    }
    return Entry(**(fields | changes))


def resized(**changes):
    return dataclasses.replace(PROBLEM, **changes)


def look_up(gpu="sm_90", family="mma", digest="0123456789abcdef", problem=PROBLEM):
    return tuning.lookup(gpu, family, digest, problem)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"head_dim": 72},
        {"head_dim_v": 72},
        {"causal": True},
        {"seqlen_q": 8192},
        {"seqlen_k": 8192},
        {"heads_q": 32},
        {"batch": 4},
        {"alignment": 8},
        {"seqlen_k": 0},
    ],
)
def test_what_a_tile_depends_on_makes_another_class(changes):
    assert problem_class(resized(**changes)) != problem_class(PROBLEM)


@pytest.mark.parametrize(
    "changes",
    [
        {"softmax_scale": 0.5},
        {"seqlen_q": 5000},
        {"seqlen_k": 3000},
        {"batch": 1, "heads_q": 32},
        {"q_strides": (1, 2, 3)},
        {"heads_kv": 4},
    ],
)
def test_what_a_tile_hardly_depends_on_keeps_the_class(changes):
    assert problem_class(resized(**changes)) == problem_class(PROBLEM)


@given(st.integers(1, 2**30))
def test_sequence_lengths_go_by_the_power_of_two_that_is_nearest_by_ratio(seqlen):
    (bucket,) = (
        int(part[1:])
        for part in problem_class(resized(seqlen_q=seqlen)).split()
        if part.startswith("q")
    )
    assert bucket & (bucket - 1) == 0
    # Within a factor of sqrt(2), in integers.
    assert seqlen**2 <= 2 * bucket**2
    assert bucket**2 <= 2 * seqlen**2


def test_misaligned_rows_are_a_class_of_their_own():
    odd = ArraySpec((2, 64, 4, 64), (64 * 4 * 65, 4 * 65, 65), "float16")
    assert problem_class(make_problem(odd, odd, odd)).endswith("align2")


@given(table=st.lists(entries, max_size=6))
def test_a_table_reads_back_as_it_was_written(tmp_path_factory, table):
    path = tmp_path_factory.getbasetemp() / "round-trip" / "tuned.json"
    write_table(path, table)
    assert read_table(path) == table
    assert list(path.parent.iterdir()) == [path]


def test_a_table_that_is_not_there_is_empty(tmp_path):
    assert read_table(tmp_path / "none.json") == []


def test_without_the_variable_the_users_table_lies_in_their_home(monkeypatch, tmp_path):
    monkeypatch.delenv(tuning.HOME_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert tuning.user_table_path() == tmp_path / ".cupy_flash" / "tuned.json"


def test_a_saved_entry_is_found_at_once_and_after_reading_the_file_again(home):
    assert look_up() is None
    assert tuning.save(entry()) == home / "tuned.json"
    assert look_up() == entry()
    tuning.reload()
    assert look_up() == entry()


def test_saving_again_replaces_the_entry_with_the_same_key_only():
    other = entry(gpu="sm_80")
    for item in (entry(), other, entry(tflops=600.0)):
        tuning.save(item)
    assert look_up().tflops == 600.0
    assert read_table(tuning.user_table_path()) == [other, entry(tflops=600.0)]


@pytest.mark.parametrize(
    "key",
    [{"gpu": "sm_80"}, {"family": "simt"}, {"digest": "f" * 16}, {"problem": resized(batch=9)}],
)
def test_an_entry_of_another_gpu_family_digest_or_class_is_not_used(key):
    tuning.save(entry())
    assert look_up(**key) is None


def test_the_users_entry_goes_before_the_shipped_one(monkeypatch, tmp_path):
    write_table(tmp_path / "gpu.json", [entry(tflops=1.0), entry(gpu="sm_80")])
    monkeypatch.setattr(tuning, "SHIPPED_DIR", tmp_path)
    tuning.save(entry(tflops=2.0))
    assert look_up().tflops == 2.0
    assert look_up(gpu="sm_80") is not None
    tuning.clear()
    assert look_up().tflops == 1.0


def test_clearing_removes_the_users_table_and_says_how_many_entries_it_held():
    tuning.save(entry())
    tuning.save(entry(gpu="sm_80"))
    assert tuning.clear() == 2
    assert look_up() is None
    assert not tuning.user_table_path().exists()
    assert tuning.clear() == 0


def test_whatever_may_change_a_plan_changes_the_generation():
    before = tuning.generation()
    tuning.save(entry())
    saved = tuning.generation()
    tuning.clear()
    assert len({before, saved, tuning.generation()}) == 3


def changed(**fields):
    item = dataclasses.asdict(entry()) | fields
    return json.dumps({"version": 1, "entries": [item]})


CORRUPT = {
    "empty": "",
    "cut off": '{"version": 1, "entr',
    "no JSON": "tuned",
    "a list": "[]",
    "null": "null",
    "without version": '{"entries": []}',
    "of another version": '{"version": 2, "entries": []}',
    "without entries": '{"version": 1}',
    "entries null": '{"version": 1, "entries": null}',
    "an entry that is text": '{"version": 1, "entries": ["mma"]}',
    "an entry without a tile": '{"version": 1, "entries": [{"gpu": "sm_90"}]}',
    "a tile that is a list": changed(tile=[128, 64]),
    "a tile of text": changed(tile={"Br": "wide", "Bc": 64}),
    "a tile of fractions": changed(tile={"Br": 64.5, "Bc": 64}),
    "a tile of infinities": changed(tile={"Br": float("inf"), "Bc": 64}),
    "speed as text": changed(tflops="fast"),
    "speed null": changed(tflops=None),
    "deeper than any parser goes": "[" * 200_000,
}


@pytest.mark.parametrize("text", CORRUPT.values(), ids=CORRUPT.keys())
def test_a_corrupt_table_is_ignored_with_one_warning_that_names_it(home, text, caplog):
    path = home / "tuned.json"
    path.write_text(text)
    with pytest.raises(TableError, match=r"tuned\.json"):
        read_table(path)
    with caplog.at_level(logging.WARNING, "cupy_flash"):
        assert look_up() is None
        assert look_up() is None
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert record.getMessage().endswith("it is ignored")
    assert path.read_text() == text


def test_bytes_that_are_no_text_are_a_corrupt_table(home):
    (home / "tuned.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(TableError):
        read_table(home / "tuned.json")
    assert look_up() is None


def test_a_folder_in_the_tables_place_is_a_corrupt_table(home):
    (home / "tuned.json").mkdir()
    with pytest.raises(TableError):
        read_table(home / "tuned.json")
    assert look_up() is None


def test_saving_keeps_a_corrupt_table_aside(home, caplog):
    (home / "tuned.json").write_text("precious")
    with caplog.at_level(logging.WARNING, "cupy_flash"):
        tuning.save(entry())
    assert (home / "tuned.corrupt.json").read_text() == "precious"
    assert "kept as" in caplog.text
    assert look_up() == entry()


def test_a_write_that_fails_leaves_the_old_table_whole(home, monkeypatch):
    tuning.save(entry())
    before = (home / "tuned.json").read_text()

    def full_disk(*args, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full_disk)
    with pytest.raises(OSError, match="No space left"):
        tuning.save(entry(tflops=600.0))
    assert (home / "tuned.json").read_text() == before


@pytest.mark.parametrize("path", sorted(tuning.SHIPPED_DIR.glob("*.json")), ids=str)
def test_a_table_that_is_shipped_can_be_read(path):
    assert read_table(path)
