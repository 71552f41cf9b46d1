"""Records and shipped tiles of kernels that no longer exist are found, and removed on request."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli.bench_records import row, write
from support.cli.benchmark_scripts import IN_CHECKOUT, script

from cupy_flash.cpu import sources
from cupy_flash.families import FORWARD
from cupy_flash.planning import tuning
from cupy_flash.planning.tuning import Entry, read_table, write_table

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

prune = script("prune")

MMA, SIMT = FORWARD["mma"].digest(), FORWARD["simt"].digest()
FORMER = "0" * 16
TORCH = row("torch-flash", 512, 1.0)


def ours(digest: str, family: str = "mma") -> dict[str, object]:
    return row("cupy_flash", 512, 1.0, family=family, kernel_digest=digest)


def entry(digest: str, family: str = "mma") -> Entry:
    return Entry("a GPU", 90, 132, family, digest, "a class", {"Br": 64, "Bc": 64}, 1.0)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    write(folder / "h100_present.json", [ours(MMA), ours(sources.digest(), "cpu"), TORCH])
    write(folder / "h100_former.json", [TORCH, ours(SIMT, "simt"), ours(FORMER)])
    write(folder / "h100_gone.json", [ours(MMA, "of the past")])
    write(folder / "h200_limits.json", [{"share": 0.9}], mma_digest=FORMER)
    write(folder / "h200_profile.json", [{"unit": "B"}], family="mma", kernel_digest=MMA)
    write(folder / "h200_model.json", [{"family": "mma", "flops": 1}])
    return folder


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    folder = tmp_path / "tuned"
    write_table(folder / "h100.json", [entry(FORMER), entry(SIMT, "simt")], {"device": "a GPU"})
    write_table(folder / "h200.json", [entry(FORMER)])
    write_table(folder / "present.json", [entry(MMA)])
    return folder


def run(results: Path, tables: Path, *options: str) -> int:
    code: int = prune.main(["--results", str(results), "--tables", str(tables), *options])
    return code


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.json"))


def test_what_is_of_former_kernels_is_listed_and_stays(
    results: Path, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names(results), names(tables)

    assert run(results, tables) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{results / 'h100_former.json'}: mma changed since",
        f"{results / 'h100_gone.json'}: of the past changed since",
        f"{results / 'h200_limits.json'}: mma changed since",
        f"{results / 'h200_model.json'}: names no kernel sources; it stays",
        f"{tables / 'h100.json'}: 1 of 2 entries, mma changed since",
        f"{tables / 'h200.json'}: 1 of 1 entries, mma changed since",
    ]
    assert (names(results), names(tables)) == before
    assert len(read_table(tables / "h100.json")) == 2


def test_on_request_it_is_deleted_and_nothing_is_left_to_find(results: Path, tables: Path) -> None:
    assert run(results, tables, "--delete") == 0
    assert names(results) == ["h100_present", "h200_model", "h200_profile"]
    assert names(tables) == ["h100", "present"]
    assert read_table(tables / "h100.json") == [entry(SIMT, "simt")]
    assert tuning._read(tables / "h100.json")[1] == {"device": "a GPU"}
    assert run(results, tables) == 0


def test_a_file_that_is_no_record_is_named_and_nothing_is_deleted(
    results: Path, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "z.json").write_text("[", encoding="utf-8")

    assert run(results, tables, "--delete") == 2
    assert "z.json is not JSON" in capsys.readouterr().err
    assert "h100_former" in names(results)
