"""`cupy-flash compare`, and errors for records that cannot be read."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from support.cli.bench_records import invoke, refused, row, write
from support.cli.commands import written

from cupy_flash.cli.bench.compare import compare

# The rows of a record that has only one.
ONE = [row("cupy_flash", 799, 1.0)]


def paths(tmp_path: Path, a: list[Any], b: list[Any], **head: Any) -> tuple[Path, Path]:
    """Write records of two lists of rows; `head` changes the second's metadata."""
    return write(tmp_path / "a.json", a), write(tmp_path / "b.json", b, **head)


def compared(
    tmp_path: Path, a: list[Any], b: list[Any], *arguments: str, code: int = 0, **head: Any
) -> str:
    """Return what `compare` prints of two lists of rows; fail unless its exit code is `code`."""
    result = invoke(compare, *paths(tmp_path, a, b, **head), *arguments)
    assert result.exit_code == code, result.output
    return result.output


def verdicts(tmp_path: Path, a: list[Any], b: list[Any], *arguments: str) -> dict[int, str]:
    """Return the verdict for each sequence length."""
    output = tmp_path / "out.json"
    compared(tmp_path, a, b, *arguments, "--output", str(output), "--force")
    return {row["seqlen_q"]: row["verdict"] for row in written(output)["rows"]}


def test_a_change_beyond_threshold_and_quartiles_is_faster_or_slower(tmp_path: Path) -> None:
    a = [row("cupy_flash", seqlen, 1.0) for seqlen in (113, 512, 799)]
    b = [row("cupy_flash", 113, 0.8), row("cupy_flash", 512, 1.01), row("cupy_flash", 799, 1.3)]

    assert verdicts(tmp_path, a, b) == {113: "faster", 512: "same", 799: "slower"}


def test_a_change_within_the_quartiles_is_noise_however_large(tmp_path: Path) -> None:
    a = [row("cupy_flash", 799, 1.0, high_quartile_ms=1.6)]
    b = [row("cupy_flash", 799, 1.5)]

    assert verdicts(tmp_path, a, b) == {799: "same"}


def test_a_change_below_the_threshold_is_noise_however_narrow_the_quartiles(tmp_path: Path) -> None:
    exact = {"low_quartile_ms": 1.0, "high_quartile_ms": 1.0}
    a = [row("cupy_flash", 799, 1.0, **exact)]
    b = [row("cupy_flash", 799, 1.04, low_quartile_ms=1.04, high_quartile_ms=1.04)]

    assert verdicts(tmp_path, a, b, "--threshold", "5") == {799: "same"}
    assert verdicts(tmp_path, a, b, "--threshold", "3") == {799: "slower"}


def test_what_became_slower_stands_first_and_what_became_faster_last(tmp_path: Path) -> None:
    a = [row("cupy_flash", seqlen, 1.0) for seqlen in (113, 203, 512, 799)]
    times = {113: 0.5, 203: 1.0, 512: 2.0, 799: 1.5}
    b = [row("cupy_flash", seqlen, ms) for seqlen, ms in times.items()]
    words = [line.split() for line in compared(tmp_path, a, b).splitlines()]
    changes = [w[-2] for w in words if "cupy_flash" in w and w[-1] in ("slower", "faster")]

    assert changes == ["-50.0", "-33.3", "+100.0"]


def test_each_provider_gets_the_geometric_mean_of_its_changes(tmp_path: Path) -> None:
    a = [row(p, s, 1.0) for p in ("cupy_flash", "torch-flash") for s in (113, 799)]
    b = [row("cupy_flash", 113, 0.5), row("cupy_flash", 799, 0.8)]
    b += [row("torch-flash", 113, 1.0), row("torch-flash", 799, 1.0)]
    output = compared(tmp_path, a, b)

    mean = statistics.geometric_mean([2.0, 1.25])
    assert f"cupy_flash: B is {mean:.3f} times as fast (geometric mean); 2 faster" in output
    assert "torch-flash: B is 1.000 times as fast (geometric mean); 2 same" in output


def test_a_record_of_a_busy_machine_is_named_below_the_table(tmp_path: Path) -> None:
    a, b = [row("cupy_flash", 113, 1.0)], [row("cupy_flash", 113, 0.5)]
    output = compared(tmp_path, a, b, unreliable="others used 97% of the CPU")

    assert "! B: others used 97% of the CPU; ratios are not reliable" in output
    assert "not reliable" not in compared(tmp_path, a, b)


def test_rows_match_by_all_that_makes_a_case(tmp_path: Path) -> None:
    a = [row("cupy_flash", 799, 1.0), row("cupy_flash", 799, 3.0, causal=True, q_offset=5)]
    b = [row("cupy_flash", 799, 9.0, causal=True), row("cupy_flash", 799, 1.0)]
    output = compared(tmp_path, a, b)

    assert "cupy_flash: B is 1.000 times as fast" in output
    assert "Only in A: cupy_flash, 1 row: bf16 b20 h16 s799 d128 causal@5." in output
    assert "Only in B: cupy_flash, 1 row: bf16 b20 h16 s799 d128 causal." in output


def test_providers_of_one_record_alone_are_counted_in_a_note(tmp_path: Path) -> None:
    b = [*ONE, row("torch-cudnn", 799, 1.0), row("torch-cudnn", 113, 1.0)]

    assert "Only in B: torch-cudnn, 2 rows." in compared(tmp_path, ONE, b)


def test_of_many_unmatched_cases_the_first_are_named(tmp_path: Path) -> None:
    lengths = (113, 203, 239, 799, 1024)
    a = [row("cupy_flash", seqlen, 1.0, batch=1) for seqlen in lengths]
    text = " ".join(compared(tmp_path, a, a[-1:]).split())

    assert "cupy_flash, 4 rows: bf16 b1 h16 s113 d128 full, " in text
    assert "bf16 b1 h16 s239 d128 full and 1 more." in text


def test_other_devices_versions_and_kernels_are_named(tmp_path: Path) -> None:
    b = [row("cupy_flash", 799, 1.0, family="hopper", kernel_digest="def")]
    versions = {"cupy_flash": "0.1.0", "cudnn": "9.19"}
    output = compared(tmp_path, ONE, b, device="another GPU", versions=versions)
    text = " ".join(output.split())

    assert "Different device: a GPU in A, another GPU in B." in text
    assert "Different torch: 2.11 in A, none in B." in text
    assert "Different cudnn: none in A, 9.19 in B." in text
    assert "Other cupy_flash" not in text
    assert "Different kernels of cupy_flash: mma abc in A, hopper def in B." in text


def test_a_library_that_moved_on_the_same_machine_tells_how_large_noise_is(tmp_path: Path) -> None:
    a = [row("cupy_flash", 799, 1.0), row("torch-flash", 799, 1.0)]
    b = [row("cupy_flash", 799, 1.1), row("torch-flash", 799, 1.1)]

    assert "torch-flash changed although" in compared(tmp_path, a, b)
    assert "changed although" not in compared(tmp_path, a, b, device="another GPU")


def test_a_lost_time_is_told_with_its_reason(tmp_path: Path) -> None:
    output = compared(tmp_path, ONE, [row("cupy_flash", 799, None, reason="out of memory")])

    assert "cupy_flash: lost, out of memory" in output
    assert "cupy_flash: nothing to compare; 1 lost" in output


def test_a_result_of_ours_that_became_wrong_is_lost_however_fast(tmp_path: Path) -> None:
    wrong = [row("cupy_flash", 799, 0.1, check="failed")]

    assert verdicts(tmp_path, ONE, wrong) == {799: "lost"}


def test_a_time_that_is_new_has_nothing_to_compare_with(tmp_path: Path) -> None:
    a = [row("cupy_flash", 799, None, reason="out of memory"), row("cupy_flash", 113, 1.0)]
    b = [row("cupy_flash", 799, 1.0), row("cupy_flash", 113, 1.0)]

    assert verdicts(tmp_path, a, b) == {799: "-", 113: "same"}


@pytest.mark.parametrize(
    ("after", "code"),
    [
        ({"ms": 0.5}, 0),
        ({"ms": 1.005}, 0),
        ({"ms": 1.5}, 1),
        ({"ms": None}, 1),
        ({"ms": 1.0, "check": "failed"}, 1),
    ],
)
def test_fail_on_slower_is_an_exit_code_for_scripts(
    tmp_path: Path, after: dict[str, Any], code: int
) -> None:
    b = [row("cupy_flash", 799, **after)]

    compared(tmp_path, ONE, b, "--fail-on-slower", code=code)
    compared(tmp_path, ONE, b, code=0)


def test_the_output_says_what_was_compared(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    compared(tmp_path, ONE, [row("cupy_flash", 799, 0.5)], "--output", str(output))
    found = written(output)

    assert found["metadata"]["record_version"] == 1
    assert found["metadata"]["a"]["file"] == "a.json"
    assert found["metadata"]["b"]["device"] == "a GPU"
    (only,) = found["rows"]
    assert (only["a_ms"], only["b_ms"], only["ratio"]) == (1.0, 0.5, 2.0)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_tables_fit_the_terminal_and_have_no_colour_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    a = [
        row(p, s, 1.0, heads_kv=4, causal=c, q_offset=0)
        for p in ("cupy_flash", "torch-efficient")
        for s in (512, 16384)
        for c in (False, True)
    ]
    output = compared(tmp_path, a, a)

    assert max(map(len, output.splitlines())) <= columns
    assert "\x1b" not in output


def test_nothing_in_common_is_one_line(tmp_path: Path) -> None:
    other_provider = compared(tmp_path, ONE, [row("torch-flash", 799, 1.0)], code=2)
    other_case = refused(compare, *paths(tmp_path, ONE, [row("cupy_flash", 113, 1.0)]))

    assert "the one timed cupy_flash, the other torch-flash" in other_provider
    assert "they timed the same providers on other cases" in other_case


@pytest.mark.parametrize("version", [2, "1", "1.0", None, [1]])
def test_a_record_of_another_version_is_refused_by_its_version(
    tmp_path: Path, version: Any
) -> None:
    output = refused(compare, *paths(tmp_path, ONE, ONE, record_version=version))

    text = " (text)" if isinstance(version, str) else ""
    assert f"b.json is a record of version {version!r}{text}; this" in output
    assert "reads version 1" in output


def test_a_record_that_names_its_version_is_read_as_one_from_before_versions(
    tmp_path: Path,
) -> None:
    compared(tmp_path, ONE, ONE, record_version=1)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"provider,ms\n", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1, 2]", "no 'metadata' and 'rows'"),
        (b'{"metadata": {}}', "no 'metadata' and 'rows'"),
        (b'{"metadata": {}, "rows": [3]}', "row 0 is 3"),
        (b'{"metadata": {}, "rows": []}', "it has no rows"),
        (b'{"metadata": {}, "rows": [{"tile": 1}]}', "row 0 has no 'provider'"),
        (b'{"metadata": {"versions": 7}, "rows": []}', "its metadata has versions 7"),
        (b'{"metadata": {"versions": [1]}, "rows": []}', "its metadata has versions [1]"),
        (b'{"metadata": {"device": {}}, "rows": []}', "its metadata has device {}"),
        (b'{"metadata": {"date": NaN}, "rows": []}', "its metadata has date nan"),
        (b"[" * 100_000, "is not JSON"),
        (
            b'{"metadata": {}, "rows": [' + b"[" * 50 + b"]" * 50 + b"]}",
            "row 0 is [[[[[[[...]]]]]]]",
        ),
    ],
)
def test_a_file_that_is_no_record_of_bench_is_one_line(
    tmp_path: Path, content: bytes, why: str
) -> None:
    bad = tmp_path / "b.json"
    bad.write_bytes(content)
    output = refused(compare, write(tmp_path / "a.json", ONE), bad)

    assert why in output
    assert "b.json" in output


@pytest.mark.parametrize(
    "wrong",
    [
        *({"median_ms": value} for value in ("fast", -1.0, 0, 10**400)),
        *({"low_quartile_ms": 0.0}, {"median_ms": float("nan")}, {"dtype": "float8"}),
        *({"causal": "no"}, {"seqlen_q": 1.5}, {"q_offset": None}, {"low_quartile_ms": None}),
    ],
)
def test_a_field_that_bench_does_not_write_is_one_line(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    rows = [row("cupy_flash", 113, 1.0), *ONE]
    rows[1] = rows[1] | wrong

    assert "row 1 has" in refused(compare, *paths(tmp_path, rows, rows))


def test_a_row_that_repeats_another_is_one_line(tmp_path: Path) -> None:
    rows = [row("cupy_flash", 113, 1.0), *ONE, row("cupy_flash", 113, 2.0)]
    output = refused(compare, *paths(tmp_path, rows[:2], rows))

    assert "b.json" in output
    assert "rows 0 and 2 are both cupy_flash on bf16 b144 h16 s113 d128 full" in output


@pytest.mark.parametrize("threshold", ["nan", "inf", "-1", "much"])
def test_a_threshold_that_is_no_percentage_is_one_line(tmp_path: Path, threshold: str) -> None:
    files = paths(tmp_path, ONE, ONE)

    assert "--threshold" in refused(compare, *files, "--threshold", threshold)


def test_long_names_of_files_and_devices_wrap_in_a_terminal_and_never_in_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "NVIDIA H100 80GB HBM3"
    path = write(tmp_path / "h100_preset_replit-generation.json", ONE, device=device)
    whole = f"A: {path.name}, NVIDIA H100 80GB HBM3, 2026-01-02T03:04:05+00:00"

    monkeypatch.delenv("COLUMNS", raising=False)
    assert whole in invoke(compare, path, path).output.splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    narrow = invoke(compare, path, path).output
    assert max(map(len, narrow.splitlines())) <= 80 < len(whole)
    assert whole in " ".join(narrow.split())


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert "a.json" in refused(compare, tmp_path / "a.json", tmp_path / "b.json")


def test_a_file_that_is_read_is_not_written_to(tmp_path: Path) -> None:
    record = write(tmp_path / "a.json", [row("cupy_flash", 128, 1.0)])
    text = record.read_text(encoding="utf-8")
    link = tmp_path / "link.json"
    link.symlink_to(record)

    for output in (record, link):
        result = invoke(compare, str(record), str(record), "--output", str(output))
        assert result.exit_code == 2
        assert "would overwrite" in result.output
    assert record.read_text(encoding="utf-8") == text
