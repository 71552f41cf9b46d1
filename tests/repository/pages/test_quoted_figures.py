"""Figures that the README quotes equal those of the records, and the page is up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.cli.bench_records import row, write
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT, script

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

quotes = script("quotes")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    grid = [
        row("cupy_flash", 512, 1.0),
        row("torch-flash", 512, 2.0),
        row("torch-math", 512, 3.0),
        row("cupy_flash", 799, 1.0, causal=True, host_us=17.04),
        row("torch-flash", 799, 4.5, causal=True),
        row("torch-math", 799, 4.0, causal=True),
    ]
    write(folder / "grid_a.json", grid)
    write(folder / "grid_b.json", [row("cupy_flash", 113, 1.0), row("torch-flash", 113, 1.1)])
    shares = [{"seqlen": 512, "share": 0.885}, {"seqlen": 799, "share": 0.897}]
    write(folder / "limits.json", [s | {"first_call_s": 0.0391} for s in shares])
    write(folder / "calls.json", [{"jitted call, us": 3.48}])
    return folder


def faults(results: Path, prose: str, *sources: str) -> list[str]:
    """Return the errors in prose and its sources."""
    block = "\n".join(["  <!-- figures", *(f"  {line}" for line in sources), "  -->"])
    return quotes.faults(f"# Title\n\n- {prose}\n{block if sources else ''}\n", results)


@pytest.mark.parametrize(
    ("prose", "source"),
    [
        ("3.00 times as fast", "3.00: geomean cupy_flash / torch-flash in grid_a"),
        ("2.83 times", "2.83: geomean cupy_flash / torch-flash | torch-math in grid_a"),
        ("at least 1.10", "1.10: min cupy_flash / torch-flash in grid_*"),
        ("at least 1.10", "1.10: min cupy_flash / torch-flash in grid_a, grid_b"),
        ("4.5x", "4.5: only cupy_flash / torch-flash where causal=yes in grid_a"),
        ("0.5 times", "0.5: only torch-flash / cupy_flash where causal=no in grid_a"),
        ("a 3-row grid", "3: count cupy_flash tflops in grid_*"),
        ("100 TFLOP/s", "100: max cupy_flash tflops in grid_a"),
        ("100,000 GFLOP/s", "100,000 GFLOP/s: max cupy_flash tflops in grid_a"),
        ("17.0 µs", "17.0 µs: only cupy_flash host_us where seqlen_q=799 in grid_a"),
        ("1 ms", "1: max cupy_flash median_ms in grid_a"),
        ("1000 us", "1000 us: max cupy_flash median_ms in grid_a"),
        ("39 ms", "39 ms: mean first_call_s in limits"),
        ("89% of a product's rate", "89%: median share in limits"),
        ("90%", "90%: max share where seqlen=799 in limits"),
        ("3.5 us", '3.5 us: only "jitted call, us" in calls'),
    ],
)
def test_a_figure_that_the_records_hold_passes(results: Path, prose: str, source: str) -> None:
    assert faults(results, prose, source) == []


@pytest.mark.parametrize(
    ("prose", "source", "held"),
    [
        ("3.01 times", "3.01: geomean cupy_flash / torch-flash in grid_a", "3"),
        ("3.1 times", "3.1: geomean cupy_flash / torch-flash in grid_a", "3"),
        ("90%", "90%: min share in limits", "88.5"),
        ("18 us", "18 us: only cupy_flash host_us in grid_a", "17.04"),
    ],
)
def test_a_figure_that_the_records_do_not_hold_fails_with_theirs(
    results: Path, prose: str, source: str, held: str
) -> None:
    (fault,) = faults(results, prose, source)

    assert fault.startswith("line 4:")
    assert fault.endswith(f"but the records hold {held}")


@pytest.mark.parametrize(
    "figure",
    [
        *("1.5 times", "1.5\n  times", "2x", "2.5×", "89%", "89 %", "700 TFLOP/s", "3 TB/s"),
        *("17 us", "17 µs", "0.5 ms", "2 s", "2 seconds", "at least 0.99"),
    ],
)
def test_a_figure_without_a_source_fails(results: Path, figure: str) -> None:
    (fault,) = faults(results, f"as we measured, {figure}, and so on")

    assert "names no source" in fault
    assert fault.startswith("line 3:")


def test_a_bound_is_read_to_its_last_digit(results: Path) -> None:
    (fault,) = faults(results, "faster, at least 0.995 times")

    assert "'0.995 times' names no source" in fault


@pytest.mark.parametrize(
    "text",
    [
        "113 x 203 and 64x32 and 8 × 8",
        "head_dim 128, sm_90, float16, version 3.10 of Python, 2³¹ elements",
        "an H100 with 2 GB and three times two, at least 3 of them",
    ],
)
def test_sizes_versions_and_counts_need_no_source(results: Path, text: str) -> None:
    assert faults(results, text) == []


def test_code_blocks_are_not_looked_at(results: Path) -> None:
    assert quotes.faults("text\n\n```\n$ bench\n0.12 ms, 3.1 times\n```\n", results) == []


def test_a_source_covers_its_own_paragraph_or_item_only(results: Path) -> None:
    text = (
        "1.1 times, before.\n\n- 3.00 times.\n  <!-- figures\n"
        "  3.00: geomean cupy_flash / torch-flash in grid_a\n  -->\n- 3.00 times, after.\n"
    )

    lines = ("line 1: '1.1 times'", "line 7: '3.00 times'")
    assert quotes.faults(text, results) == [f"{line} names no source" for line in lines]


def test_a_figure_quoted_twice_needs_two_sources(results: Path) -> None:
    source = "3.00: geomean cupy_flash / torch-flash in grid_a"

    assert len(faults(results, "3.00 times and 3.00 times", source)) == 1
    assert faults(results, "3.00 times and 3.00 times", source, source) == []


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("3.00: geomean cupy_flash / torch-flash in nowhere", "there is no record nowhere"),
        ("3.00: geomean cupy_flash / torch-flash", "is not NUMBER: STATISTIC WHAT in RECORD"),
        ("3.00: best cupy_flash / torch-flash in grid_a", "'best' is none of"),
        ("3.00: max cupy_flash speed in grid_a", "no such rows"),
        ("3.00: max cupy_flash / torch-flash where seqlen_q=3 in grid_*", "no such rows"),
        ("3.00: max cupy_flash / torch-cudnn in grid_a", "no such rows"),
        ("3.00: max cupy_flash / torch-flash in limits", "limits is no record of bench"),
        ("3.00: only cupy_flash / torch-flash in grid_a", "'only' of 2 values"),
    ],
)
def test_a_source_that_leads_nowhere_fails(results: Path, source: str, why: str) -> None:
    assert why in faults(results, "3.00 times", source)[-1]


def test_records_of_two_gpus_are_no_source_of_one_figure(results: Path) -> None:
    write(results / "grid_c.json", [row("cupy_flash", 113, 1.0)], device="another GPU")
    (fault,) = faults(results, "100 TFLOP/s", "100: max cupy_flash tflops in grid_*")

    assert "records of 2 devices: a GPU, another GPU" in fault
    assert faults(results, "100 TFLOP/s", "100: max cupy_flash tflops in grid_c") == []


def test_a_source_of_a_figure_that_the_text_lacks_fails(results: Path) -> None:
    found = faults(results, "Nothing here.", "3.00: geomean cupy_flash / torch-flash in grid_a")

    assert found == ["line 4: 3.00 does not stand in the text above"]


def test_the_readme_quotes_only_figures_that_the_records_hold() -> None:
    assert quotes.faults((CHECKOUT / "README.md").read_text(encoding="utf-8")) == []


def test_the_pages_of_benchmarks_and_their_figures_are_what_the_records_give(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script("render").main(["--check"]) == 0, capsys.readouterr().err


def test_the_pages_of_benchmarks_are_short_and_show_every_record() -> None:
    pages = [CHECKOUT / "docs" / "benchmarks.md", *(CHECKOUT / "docs/benchmarks").glob("*.md")]
    lines = {page.name: page.read_text(encoding="utf-8").count("\n") for page in pages}
    assert {name: count for name, count in lines.items() if count > 300} == {}

    # A page shows the results of each record, in addition to the index of all records.
    templates = (CHECKOUT / "benchmarks" / "pages").rglob("*.md")
    shown = " ".join(template.read_text(encoding="utf-8") for template in templates)
    records = [path.stem for path in (CHECKOUT / "benchmarks" / "results").glob("*.json")]
    assert [name for name in records if not re.search(rf"\b{name}\b", shown)] == []
