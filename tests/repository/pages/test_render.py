"""The pages of benchmarks and their figures, from templates and records."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from support.cli.bench_records import row, write
from support.cli.benchmark_scripts import IN_CHECKOUT, script

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

render = script("render")
chart = script("chart")

GRID = [row("cupy_flash", 512, 1.0), row("torch-flash", 512, 0.5)]
GRID += [row("cupy_flash", 1024, 1.0), row("torch-flash", 1024, 8.0)]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write(tmp_path / "results" / "grid.json", GRID)
    return tmp_path / "results"


@pytest.fixture
def places(results: Path, tmp_path: Path) -> list[str]:
    """Options of the script with places in `tmp_path`, for a page and a page in a folder."""
    templates, docs = tmp_path / "pages", tmp_path / "docs"
    (templates / "more").mkdir(parents=True)
    (templates / "page.md").write_text(FIGURE, encoding="utf-8")
    (templates / "more" / "records.md").write_text("{{records}}", encoding="utf-8")
    (docs / "figures").mkdir(parents=True)
    (docs / "other.md").write_text("Not rendered.\n", encoding="utf-8")
    return ["--results", str(results), "--templates", str(templates), "--docs", str(docs)]


def page(template: str, results: Path) -> str:
    text: str = render.Page(template, results).text
    return text


def table(text: str) -> list[list[str]]:
    """Return the cells of a Markdown table, without its rule."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [lines[0], *lines[2:]]


def test_a_number_has_as_many_decimals_as_the_template_asks_for(results: Path) -> None:
    text = (
        "{{0.00: geomean cupy_flash / torch-flash in grid}} times, at least {{0.0: min\n"
        "cupy_flash / torch-flash in grid}}, {{0 us: max cupy_flash median_ms in grid}}\n"
    )
    assert page(text, results) == "2.00 times, at least 0.5, 1000 us\n"


def test_a_table_of_cases_has_rates_and_ratios(results: Path) -> None:
    assert table(page("{{by case: cupy_flash / torch-flash in grid}}", results)) == [
        ["batch", "length", "cupy_flash, TFLOP/s", "torch-flash, TFLOP/s", "ratio"],
        ["32", "512", "100", "200", "0.50"],
        ["16", "1024", "100", "12.5", "8.00"],
    ]


def test_a_table_of_groups_has_ranges_the_mean_and_the_least_with_its_case(results: Path) -> None:
    rows = [{**r, "causal": True} for r in GRID[:2]]
    write(results / "grid.json", [*GRID, *rows])

    assert table(page("{{by causal: cupy_flash / torch-flash in grid}}", results))[1:] == [
        ["full", "100", "12.5 to 200", "2.00", "0.50 (length 512)"],
        ["causal", "100", "200", "0.50", "0.50"],
    ]


def test_the_baseline_is_the_best_of_several_at_each_case(results: Path) -> None:
    rows = [row("cupy_flash", 512, 2.0), row("torch-math", 512, 3.0)]
    rows += [row("torch-efficient", 512, 5.0), row("cupy_flash", 1024, 2.0)]
    rows += [row("torch-math", 1024, None, reason="too large"), row("torch-efficient", 1024, 6.0)]
    write(results / "grid.json", rows)
    text = page("{{by case: cupy_flash / torch-efficient | torch-math in grid}}", results)

    assert [cells[-2:] for cells in table(text)] == [
        ["best peer, TFLOP/s", "ratio"],
        ["33.3 (torch-math)", "1.50"],
        ["16.7 (torch-efficient)", "3.00"],
    ]
    assert "- torch-math: too large." in text


def test_a_wrong_result_of_ours_is_told_and_counts_in_no_ratio(results: Path) -> None:
    write(results / "grid.json", [{**GRID[0], "check": "failed"}, *GRID[1:]])
    text = page("{{by case: cupy_flash / torch-flash in grid}}", results)

    assert [cells[-1] for cells in table(text)[1:]] == ["8.00"]
    assert "- cupy_flash: over the error bound at length 512." in text


def test_notes_that_are_alike_share_a_line(results: Path) -> None:
    rows = [
        row("cupy_flash", 512, 1.0, mods="sinks"),
        row("torch-flash", 512, None, mods="sinks", reason="it has no sinks"),
        row("cupy_flash", 512, 1.0, mods="alibi", note="keeps 50.8% of the blocks"),
        row("torch-flash", 512, None, mods="alibi", reason="it has no alibi"),
        row("cupy_flash", 1024, 1.0, note="keeps 8.9% of the blocks"),
        row("torch-flash", 1024, 1.0, note="its own"),
        row("cupy_flash", 2048, 1.0, check="failed"),
        row("cupy_flash", 4096, 1.0, check="failed"),
    ]
    write(results / "mods.json", [{"mods": None} | each for each in rows])
    text = page("{{by case: cupy_flash / torch-flash in mods}}", results)

    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        "- torch-flash: it has no sinks, alibi.",
        "- cupy_flash: keeps 8.9 to 50.8% of the blocks.",
        "- torch-flash: its own.",
        "- cupy_flash: over the error bound at none, length 2048.",
        "- cupy_flash: over the error bound at none, length 4096.",
    ]


def test_what_reads_caches_has_bytes_per_second_and_their_share_of_a_copys(results: Path) -> None:
    def decoding(provider: str, ms: float, seqlen_k: int) -> dict[str, Any]:
        cached = {"batch": 8, "seqlen_q": 1, "heads_kv": 8, "kind": "cache", "seqlen_k": seqlen_k}
        return row(provider, 8192, ms) | cached | {"kv_tb_per_s": 0.25 / ms, "copy_share": 0.1 / ms}

    rows = [decoding("cupy_flash", 0.1, n) for n in (1024, 8192)]
    write(results / "grid.json", [*rows, *(decoding("torch-flash", 0.2, n) for n in (1024, 8192))])

    assert table(page("{{by case: cupy_flash / torch-flash in grid}}", results)) == [
        ["keys", "cupy_flash, TB/s", "of a copy's rate", "torch-flash, TB/s", "ratio"],
        ["1024", "2.50", "100%", "1.25", "2.00"],
        ["8192", "2.50", "100%", "1.25", "2.00"],
    ]


def test_the_overview_has_a_line_for_each_comparison(results: Path) -> None:
    rows = [{"case": "b1 s8", "speedup": 0.5}, {"case": "b1 s32", "speedup": 2.0}]
    write(results / "cpu.json", rows)
    template = (
        "{{overview: GPU | FlashAttention = cupy_flash / torch-flash in grid;\n"
        "not there | a peer = cupy_flash / torch-flash in nowhere;\n"
        "CPU | the formula = speedup in cpu}}"
    )

    assert table(page(template, results))[1:] == [
        ["GPU", "FlashAttention", "2", "2.00", "0.50 (length 512)", "1"],
        ["CPU", "the formula", "2", "1.00", "0.50 (b1 s8)", "1"],
    ]


def test_where_we_lose_the_worst_cases_are_named_first(results: Path) -> None:
    rows = [row("cupy_flash", n, 1.0) for n in (128, 256, 512, 1024, 2048, 4096)]
    times = (0.996, 0.99, 0.5, 0.8, 0.7, 0.9)
    rows += [row("torch-flash", r["seqlen_q"], ms) for r, ms in zip(rows, times, strict=True)]
    write(results / "grid.json", rows)
    template = (
        "{{losses: ours | the peer = cupy_flash / torch-flash in grid;\n"
        "the peer | ours = torch-flash / cupy_flash in grid}}"
    )
    worst = "0.50 (length 512); 0.70 (length 2048); 0.80 (length 1024); 0.90 (length 4096)"

    assert table(page(template, results))[1:] == [["ours", "the peer", "5 of 6", worst]]


def test_fields_of_rows_are_a_table(results: Path) -> None:
    rows = [{"layer": "one", "ms": 1.23456, "peer ms": 23.456}, {"layer": "two", "ms": 123.4}]
    write(results / "layers.json", rows)
    assert table(page("{{rows layers: layer | ms | peer ms}}", results)) == [
        ["layer", "ms", "peer ms"],
        ["one", "1.23", "23.5"],
        ["two", "123", "-"],
    ]


def test_the_index_names_every_record_and_kernels_that_changed_since(results: Path) -> None:
    write(results / "limits.json", [{"share": 0.9}], hopper_digest="0" * 16, device="another")
    link = "../benchmarks/results"

    assert table(page("{{records}}", results))[1:] == [
        [f"[grid]({link}/grid.json)", "a GPU", "2026-01-02", "torch 2.11", "mma"],
        [f"[limits]({link}/limits.json)", "another", "2026-01-02", "torch 2.11", "hopper"],
    ]


def test_prose_is_wrapped_and_tables_and_code_are_not(results: Path) -> None:
    item = "- " + "a word " * 30
    others = f"| {'cell ' * 40}|\n\n<!-- needs: gpu -->\n```sh\nbench one\nbench two\n```\n"
    first, second, *rest = page(f"{item}\n- short\n\n{others}", results).splitlines()

    assert len(first) <= 120
    assert second.startswith("  a word" if second[2] == "a" else "  word")
    assert rest == ["- short", "", *others.splitlines()]


def test_what_is_of_a_record_that_is_not_there_yet_is_left_out(results: Path) -> None:
    line = "{{0.0: min cupy_flash median_ms in grid}} ms."
    template = f"Before.\n\n{{{{if grid}}}}\n\n{line}\n\n{{{{end}}}}\n\nBehind.\n"

    assert page(template, results) == "Before.\n\n1.0 ms.\n\nBehind.\n"
    (results / "grid.json").unlink()
    assert page(template, results) == "Before.\n\nBehind.\n"


FIGURE = (
    "{{figure rate | Rates | tflops of cupy_flash torch-flash by seqlen_q for causal in grid}}\n"
)


def test_a_figure_has_a_line_for_each_provider_and_a_point_for_each_length(results: Path) -> None:
    made = render.Page(FIGURE, results)
    root = ET.fromstring(made.figures["rate.svg"])
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    lines = [e.get("points") for e in root.iter("{http://www.w3.org/2000/svg}polyline")]

    assert made.text == "![Rates](figures/rate.svg)\n"
    assert {"cupy_flash", "torch, FlashAttention-2", "full", "512", "1k", "TFLOP/s"} <= set(texts)
    assert [len(points.split()) for points in lines if points] == [2, 2]


def test_points_stand_at_their_values() -> None:
    text = chart.svg("t", [chart.Panel("p", {"ours": {512: 5.0, 1024: 10.0}})], "u", "x", 1)
    (points,) = re.findall(r'points="([^"]*)"', text)
    heights = [float(point.split(",")[1]) for point in points.split()]

    assert heights == [85.0, 0.0]  # of 170 units, counted from above


def test_pages_and_figures_can_be_checked(
    results: Path, places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    assert render.main([*places, "--check"]) == 1
    assert render.main(places) == 0
    assert render.main([*places, "--check"]) == 0
    assert "](../../benchmarks/results/grid.json)" in (docs / "more" / "records.md").read_text()
    capsys.readouterr()

    (docs / "figures" / "old.svg").write_text("<svg/>", encoding="utf-8")
    (docs / "more" / "old.md").write_text("A page without a template.\n", encoding="utf-8")
    data = json.loads((results / "grid.json").read_text(encoding="utf-8"))
    data["rows"][0]["tflops"] += 10
    (results / "grid.json").write_text(json.dumps(data), encoding="utf-8")
    assert render.main([*places, "--check"]) == 1
    errors = capsys.readouterr().err
    assert "rate.svg is not what the records give" in errors
    assert "old.svg belongs to no template" in errors
    assert "old.md belongs to no template" in errors
    assert "page.md" not in errors
    assert "other.md" not in errors


def test_a_figure_is_on_one_page_only(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pages" / "more" / "again.md").write_text(FIGURE, encoding="utf-8")

    assert render.main(places) == 2
    assert "figures/rate.svg is on two pages" in capsys.readouterr().err


def test_a_page_in_a_folder_has_links_from_there(results: Path) -> None:
    text = render.Page(FIGURE, results, "../").text
    assert text == "![Rates](../figures/rate.svg)\n"


@pytest.mark.parametrize(
    ("directive", "why"),
    [
        ("{{by case: cupy_flash / torch-flash in nowhere}}", "there is no record nowhere"),
        ("{{losses: a | b = cupy_flash / torch-cudnn in grid}}", "no such rows"),
        ("{{best cupy_flash}}", "is no directive"),
        ("{{overview: grid}}", "is not WHAT in RECORDS"),
        ("{{figure a | b | tflops}}", "is not FIELD of PROVIDERS"),
    ],
)
def test_a_directive_that_leads_nowhere_is_told_in_one_line(
    directive: str, why: str, places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pages" / "page.md").write_text(directive, encoding="utf-8")

    assert render.main(places) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
    assert not (tmp_path / "docs" / "page.md").exists()


def test_a_record_of_another_version_is_refused(
    results: Path, places: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(results / "grid.json", GRID, record_version=2)

    assert render.main(places) == 2
    assert "grid.json is a record of version 2" in capsys.readouterr().err
