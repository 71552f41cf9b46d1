"""The table of tuned tiles: classes, files, and that a bad file does no harm."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import dense_problem

from cupy_flash.planning import tuning
from cupy_flash.planning.tuning import Entry, TableError, problem_class, read_table, write_table
from cupy_flash.problem.arrays import ArraySpec, Tensor, Tensors
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.problem import make_problem

CHECKOUT = Path(tuning.__file__).resolve().parents[2]

PROBLEM = dense_problem("float16", 2, 4096, 4096, 16, 16, 64, 64)
DIGEST = "0123456789abcdef"

names = st.text(max_size=20)
entries = st.builds(
    Entry,
    gpu=names,
    arch=st.integers(0, 200),
    sm_count=st.integers(0, 200),
    family=names,
    digest=names,
    problem_class=names,
    tile=st.dictionaries(names, st.integers(-(2**31), 2**31), max_size=5),
    tflops=st.floats(0, 1e6),
)


def entry(**changes):
    gpu = {"gpu": "a GPU", "arch": 90, "sm_count": 132}
    key = {"family": "mma", "digest": DIGEST, "problem_class": problem_class(PROBLEM)}
    return Entry(**(gpu | key | {"tile": {"Br": 128, "Bc": 64}, "tflops": 500.0} | changes))


def resized(**changes):
    return dataclasses.replace(PROBLEM, **changes)


def gpu(name="a GPU", arch="sm_90", sm_count=132):
    return dataclasses.replace(device_for_arch(arch), name=name, sm_count=sm_count)


GPU = gpu()


def look_up(device=GPU, family="mma", digest=DIGEST, problem=PROBLEM):
    return tuning.lookup(device, family, digest, problem)


# A GPU of another compute capability.
OTHER = {"gpu": "an older GPU", "arch": 80, "sm_count": 108}
OTHER_GPU = gpu("an older GPU", "sm_80", 108)


@pytest.mark.parametrize(
    "changes",
    [
        *({"dtype": "bfloat16"}, {"head_dim": 72}, {"head_dim_v": 72}, {"causal": True}),
        *({"seqlen_q": 8192}, {"seqlen_k": 8192}, {"seqlen_q": 2047}, {"batch": 1, "heads_q": 1}),
        *({"tensors": PROBLEM.aligned(8).tensors}, {"seqlen_k": 0}),
    ],
)
def test_what_a_tile_depends_on_makes_another_class(changes):
    assert problem_class(resized(**changes)) != problem_class(PROBLEM)


@pytest.mark.parametrize(
    "changes",
    [
        *({"softmax_scale": 0.5}, {"seqlen_q": 5000}, {"seqlen_k": 3000}, {"seqlen_k": 8191}),
        *({"batch": 1, "heads_q": 32}, {"heads_q": 32}, {"batch": 64}),
        {"tensors": Tensors(**{**PROBLEM.tensors, "q": Tensor("float16", (1, 2, 3), 16)})},
        {"heads_kv": 4},
    ],
)
def test_what_a_tile_hardly_depends_on_keeps_the_class(changes):
    assert problem_class(resized(**changes)) == problem_class(PROBLEM)


def parts(**changes):
    """Return the rounded numbers of a class, those of q, k and rows."""
    found = re.search(r"q(\d+) k(\d+) rows(\d+)", problem_class(resized(**changes)))
    return tuple(map(int, found.groups()))


@given(st.integers(1, 2**15 - 1))
def test_sequence_lengths_go_by_the_power_of_four_that_is_nearest_by_ratio(seqlen):
    bucket = parts(seqlen_q=seqlen, seqlen_k=3)[0]
    assert parts(seqlen_q=3, seqlen_k=seqlen)[1] == bucket
    assert bucket in [4**n for n in range(8)]
    # The bucket is within a factor of 2 of the length.
    assert bucket <= 2 * seqlen
    assert seqlen < 2 * bucket


@given(st.integers(8192, 2**30))
def test_long_sequences_are_one_class(seqlen):
    assert parts(seqlen_q=seqlen, seqlen_k=seqlen)[:2] == (16384, 16384)


@pytest.mark.parametrize(
    ("batch", "heads_q", "seqlen_q", "rows"),
    [(1, 1, 1, 1), (2, 3, 113, 1024), (1, 8, 1, 16), (1, 1, 799, 1024), (3, 7, 799, 16384)],
)
def test_rows_are_those_of_the_batch_and_all_heads(batch, heads_q, seqlen_q, rows):
    assert parts(batch=batch, heads_q=heads_q, seqlen_q=seqlen_q)[2] == rows


@given(st.integers(32768, 2**30))
def test_from_half_of_65536_rows_on_the_number_no_longer_matters(rows):
    assert parts(batch=1, heads_q=1, seqlen_q=rows)[2] == 65536


def test_no_rows_are_a_class_of_their_own():
    assert parts(seqlen_q=0, seqlen_k=0) == (0, 0, 0)


def test_the_classes_text_holds_all_that_it_goes_by():
    assert problem_class(PROBLEM) == "float16 d64 dv64 full q4096 k4096 rows65536 align16"


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
    other = entry(**OTHER)
    for item in (entry(), other, entry(tflops=600.0)):
        tuning.save(item)
    assert look_up().tflops == 600.0
    assert read_table(tuning.user_table_path()) == [entry(tflops=600.0), other]


@pytest.mark.parametrize(
    "key",
    [
        *({"device": OTHER_GPU}, {"device": None}, {"family": "simt"}, {"digest": "f" * 16}),
        {"problem": resized(seqlen_q=512)},
    ],
)
def test_an_entry_of_another_gpu_family_digest_or_class_is_not_used(key):
    tuning.save(entry())
    assert look_up(**key) is None


@pytest.fixture
def shipped():
    """Function that makes the given entries the only shipped ones."""

    def ship(*entries):
        write_table(tuning.SHIPPED_DIR / "gpu.json", entries)
        tuning.reload()

    return ship


def test_the_users_entry_goes_before_the_shipped_one(shipped):
    shipped(entry(tflops=1.0), entry(**OTHER))
    tuning.save(entry(tflops=2.0))
    assert look_up().tflops == 2.0
    assert look_up(OTHER_GPU) is not None
    tuning.clear()
    assert look_up().tflops == 1.0


# ---- GPUs without their own table


def of_gpu(name, sm_count=132, **changes):
    return entry(gpu=name, sm_count=sm_count, **changes)


def used_by(device):
    found = look_up(device)
    return found and found.gpu


def test_a_gpu_without_a_table_uses_that_of_the_nearest_number_of_sms(shipped):
    shipped(of_gpu("small", 60), of_gpu("middle", 100), of_gpu("large", 140))
    assert used_by(gpu("new", sm_count=110)) == "middle"
    assert used_by(gpu("new", sm_count=40)) == "small"
    assert used_by(gpu("new", sm_count=200)) == "large"


def test_a_gpu_of_another_compute_capability_is_no_nearest_one(shipped):
    shipped(entry(**OTHER))
    assert look_up(gpu(sm_count=108)) is None


def test_the_cpu_is_near_to_no_gpu(shipped):
    shipped(of_gpu("a GPU", 0, arch=0))
    assert look_up(None) is None
    shipped(of_gpu(tuning.CPU, 0, arch=0))
    assert look_up(None).gpu == tuning.CPU
    assert look_up(gpu("new")) is None


def test_a_gpus_own_table_goes_before_a_nearer_number_of_sms(shipped):
    shipped(of_gpu("own", 100), of_gpu("another", 132))
    assert used_by(gpu("own", sm_count=132)) == "own"


def test_what_a_gpus_shipped_table_lacks_is_not_taken_from_another(shipped):
    other = problem_class(resized(causal=True))
    shipped(of_gpu("own", problem_class=other), of_gpu("another"))
    assert used_by(gpu("own")) is None
    assert used_by(gpu("another")) == "another"


def test_what_the_users_own_table_lacks_is_taken_from_the_nearest(shipped):
    other = problem_class(resized(causal=True))
    shipped(of_gpu("another"))
    tuning.save(of_gpu("own", problem_class=other))
    assert used_by(gpu("own")) == "another"


def test_a_shipped_table_of_other_sources_is_none(shipped):
    shipped(of_gpu("own", digest="f" * 16), of_gpu("another"))
    assert used_by(gpu("own")) == "another"


def test_the_users_tables_of_other_gpus_serve_too_and_go_before_the_shipped_ones(shipped):
    shipped(of_gpu("a", 100), of_gpu("b", 90))
    tuning.save(of_gpu("a", 100, tflops=1.0))
    tuning.save(of_gpu("c", 110))
    assert look_up(gpu("own", sm_count=104)).tflops == 1.0
    assert used_by(gpu("own", sm_count=114)) == "c"
    assert used_by(gpu("own", sm_count=91)) == "b"


def test_of_gpus_with_as_many_sms_the_name_that_begins_most_alike_is_the_nearest(shipped):
    shipped(of_gpu("NVIDIA H100 80GB HBM3"), of_gpu("NVIDIA H200"))
    assert used_by(gpu("NVIDIA H200 NVL")) == "NVIDIA H200"
    assert used_by(gpu("NVIDIA H100 NVL")) == "NVIDIA H100 80GB HBM3"
    assert used_by(gpu("NVIDIA H200 NVL", sm_count=131)) == "NVIDIA H200"


def test_what_would_serve_but_for_the_users_own_entry_can_be_asked(shipped):
    shipped(of_gpu("another"))
    tuning.save(of_gpu("own"))
    key = ("mma", DIGEST, problem_class(PROBLEM))
    assert tuning.lookup_class(gpu("own"), *key).gpu == "own"
    assert tuning.lookup_class(gpu("own"), *key, except_user=True).gpu == "another"


# ---- Two processes


SAVE_SIXTY = """
import dataclasses, sys
from cupy_flash.planning import tuning

for index in range(60):
    name = f"{sys.argv[1]} {index}"
    tuning.save(tuning.Entry("a GPU", 90, 132, "mma", "0", name, {"Br": 64}, 1.0))
"""


def test_two_processes_that_save_at_once_keep_what_both_saved(home):
    writers = [
        subprocess.Popen([sys.executable, "-c", SAVE_SIXTY, name], cwd=CHECKOUT)
        for name in ("first", "second")
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(read_table(home / "tuned.json")) == 120


def test_threads_that_save_at_once_keep_what_all_saved(home):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(tuning.save, [entry(problem_class=str(index)) for index in range(40)]))
    assert len(read_table(home / "tuned.json")) == 40


def test_a_lock_that_another_keeps_ends_in_an_error_that_names_it(home, monkeypatch):
    monkeypatch.setattr(tuning, "LOCK_SECONDS", 0.05)
    tuning.save(entry())
    with tuning.locked(home / "tuned.json"), pytest.raises(TimeoutError, match=r"tuned\.json"):
        tuning.save(entry(tflops=1.0))
    assert look_up() == entry()


def test_a_table_that_is_only_read_needs_no_lock(home):
    tuning.save(entry())
    with tuning.locked(home / "tuned.json"):
        tuning.reload()
        assert look_up() == entry()


def test_a_change_keeps_what_the_file_says_of_where_it_comes_from(tmp_path):
    path = tmp_path / "gpu.json"
    write_table(path, [entry()], made_by={"command": "cupy-flash tune"})
    tuning.change(path, lambda old: [])
    assert json.loads(path.read_text())["made_by"] == {"command": "cupy-flash tune"}


def test_clearing_removes_the_users_table_and_says_how_many_entries_it_held():
    tuning.save(entry())
    tuning.save(entry(**OTHER))
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


def test_merging_keeps_the_new_of_entries_with_the_same_key():
    other, third = entry(**OTHER), entry(family="simt")
    merged = tuning.merged([entry(), other], [entry(tflops=1.0), third])
    assert merged == [entry(tflops=1.0), other, third]


def test_a_change_is_given_the_old_entries_and_is_in_effect_at_once(home):
    tuning.save(entry())
    generation = tuning.generation()
    tuning.change(home / "tuned.json", lambda old: [*old, entry(**OTHER)])
    assert read_table(home / "tuned.json") == [entry(), entry(**OTHER)]
    assert look_up(OTHER_GPU) is not None
    assert tuning.generation() != generation


def test_a_thread_that_reads_a_table_during_a_change_does_not_undo_it(home, monkeypatch):
    tuning.save(entry())

    def read_before_a_change(path):
        before = read_table(path)
        monkeypatch.setattr(tuning, "read_table", read_table)
        tuning.save(entry(**OTHER))  # as by another thread
        return before

    monkeypatch.setattr(tuning, "read_table", read_before_a_change)
    tuning.entries()

    assert look_up(OTHER_GPU) is not None


def test_a_change_that_changes_nothing_writes_nothing(home):
    tuning.change(home / "tuned.json", lambda old: old)
    assert not (home / "tuned.json").exists()
    tuning.save(entry())
    before = (home / "tuned.json").stat().st_mtime_ns, tuning.generation()
    tuning.save(entry())
    assert ((home / "tuned.json").stat().st_mtime_ns, tuning.generation()) == before


def test_a_table_says_which_version_it_is_and_how_it_was_made(tmp_path):
    path = tmp_path / "gpu.json"
    tuning.change(path, lambda old: [entry()], made_by={"command": "cupy-flash tune"})
    data = json.loads(path.read_text())
    assert data["version"] == tuning.TABLE_VERSION == 3
    assert data["made_by"] == {"command": "cupy-flash tune"}
    assert read_table(path) == [entry()]


def test_setting_aside_renames_over_what_was_set_aside_before(home):
    for text in ("first", "second"):
        (home / "tuned.json").write_text(text)
        assert tuning.set_aside(home / "tuned.json") == home / "tuned.corrupt.json"
    assert (home / "tuned.corrupt.json").read_text() == "second"
    assert not (home / "tuned.json").exists()


def test_a_table_that_cannot_be_read_is_not_cleared(home):
    (home / "tuned.json").write_text("precious")
    with pytest.raises(TableError, match="cannot be read"):
        tuning.clear()
    assert (home / "tuned.json").read_text() == "precious"


def changed(**fields):
    item = dataclasses.asdict(entry()) | fields
    return json.dumps({"version": 3, "entries": [item]})


CORRUPT = {
    "empty": "",
    "cut off": '{"version": 3, "entr',
    "no JSON": "tuned",
    "a list": "[]",
    "null": "null",
    "without version": '{"entries": []}',
    "of the version before": '{"version": 2, "entries": []}',
    "of a version to come": '{"version": 4, "entries": []}',
    "without entries": '{"version": 3}',
    "entries null": '{"version": 3, "entries": null}',
    "an entry that is text": '{"version": 3, "entries": ["mma"]}',
    "an entry without a tile": '{"version": 3, "entries": [{"gpu": "sm_90"}]}',
    "a tile that is a list": changed(tile=[128, 64]),
    "a tile of text": changed(tile={"Br": "wide", "Bc": 64}),
    "a tile of fractions": changed(tile={"Br": 64.5, "Bc": 64}),
    "a tile of infinities": changed(tile={"Br": float("inf"), "Bc": 64}),
    "speed as text": changed(tflops="fast"),
    "speed null": changed(tflops=None),
    "speed that is no number": changed(tflops=float("nan")),
    "speed without end": changed(tflops=float("inf")),
    "speed below zero": changed(tflops=-1.0),
    "fewer SMs than none": changed(sm_count=-132),
    "an architecture by name": changed(arch="sm_90"),
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
    assert record.getMessage().endswith("the table is ignored")
    assert path.read_text() == text


@pytest.mark.parametrize(
    "make", [lambda path: path.write_bytes(b"\xff\xfe\x00{"), Path.mkdir], ids=["bytes", "folder"]
)
def test_what_is_no_text_file_is_a_corrupt_table(home, make):
    make(home / "tuned.json")
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
