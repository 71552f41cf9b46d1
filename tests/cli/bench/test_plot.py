"""`cupy-flash plot`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli.bench_records import METADATA, invoke, refused, row, write

from cupy_flash.cli.bench.plot import Picture, length_text, picture, plot
from cupy_flash.cli.records.report import Record


def shown(rows: list[dict[str, Any]]) -> Picture:
    return picture(Record(METADATA, rows))


def texts(path: Path) -> list[str]:
    """Return the texts of an SVG file."""
    found = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))
    return [text.strip() for text in found]


def drawn(tmp_path: Path, rows: list[dict[str, Any]], **metadata: Any) -> list[str]:
    """Return the texts in the picture of a record with these rows."""
    pytest.importorskip("matplotlib")
    output = tmp_path / "picture.svg"
    result = invoke(plot, write(tmp_path / "r.json", rows, **metadata), "--output", output)
    assert result.exit_code == 0, result.output
    return texts(output)


GRID = [
    row(provider, seqlen, ms, causal=causal, heads_q=heads, heads_kv=heads, head_dim=head_dim)
    | {"head_dim_v": head_dim, "softmax_scale": head_dim**-0.5}
    for provider, ms in (("cupy_flash", 0.25), ("torch-flash", 0.5))
    for head_dim, heads in ((64, 32), (128, 16))
    for causal in (False, True)
    for seqlen in (512, 1024, 16384)
]


@pytest.mark.parametrize(
    ("length", "text"), [(0, "0"), (113, "113"), (512, "512"), (1024, "1k"), (131072, "128k")]
)
def test_lengths_are_labelled_as_in_the_papers(length: int, text: str) -> None:
    assert length_text(length) == text


def test_a_panel_for_each_head_dim_and_mask_says_what_it_shows(tmp_path: Path) -> None:
    found = drawn(tmp_path, GRID)

    assert "a GPU" in found
    assert "bfloat16, batch × sequence length = 16k" in found
    assert [text for text in found if text.startswith("head_dim")] == [
        "head_dim 64, full, 32 heads",
        "head_dim 64, causal, 32 heads",
        "head_dim 128, full, 16 heads",
        "head_dim 128, causal, 16 heads",
    ]
    assert found.count("16k") == 4
    assert {"TFLOP/s", "sequence length", "cupy_flash", "torch-flash"} <= set(found)


def test_every_bar_has_its_value(tmp_path: Path) -> None:
    found = drawn(tmp_path, [row("cupy_flash", 512, 0.31), row("torch-flash", 512, 40.0)])

    assert {"323", "2.50"} <= set(found)


def test_rates_far_below_a_tflop_are_in_gflops(tmp_path: Path) -> None:
    found = drawn(tmp_path, [row("cupy_flash-cpu", 512, 1000.0), row("numpy-naive", 512, 4000.0)])

    assert "GFLOP/s" in found
    assert {"100", "25"} <= set(found)


def test_a_missing_time_and_a_wrong_result_are_marked(tmp_path: Path) -> None:
    failed = row("cupy_flash", 512, 0.25, check="failed")
    found = drawn(tmp_path, [failed, row("torch-flash", 512, None)])

    assert {"400!", "n/a"} <= set(found)
    assert any("!: over the error bound" in text for text in found)


def test_the_batch_size_stands_below_each_length_where_it_follows_no_rule(tmp_path: Path) -> None:
    rows = [row("cupy_flash", 512, 1.0, batch=4), row("cupy_flash", 2048, 1.0, batch=3)]

    assert {"batch 4", "batch 3"} <= set(drawn(tmp_path, rows))


def test_batch_sizes_at_the_same_length_get_panels_of_their_own() -> None:
    rows = [row("cupy_flash", s, 1.0, batch=b) for s in (113, 799) for b in (1, 4)]
    panels = shown(rows).panels

    assert [panel.parts["batch"] for panel in panels] == ["batch 1", "batch 4"]
    assert all(panel.xs == [113, 799] for panel in panels)


def test_many_points_become_lines_over_a_logarithmic_axis(tmp_path: Path) -> None:
    lengths = [2**power for power in range(4, 15)]
    rows = [row(p, s, 1.0, batch=1) for p in ("a", "b", "c") for s in lengths]
    found = drawn(tmp_path, rows)

    assert [text for text in found if re.fullmatch(r"\d+k?", text)][: len(lengths)] == [
        length_text(length) for length in lengths
    ]
    assert found.count("100") <= 1  # at most one tick label, no value labels


def test_lines_over_few_lengths_that_are_near_have_ticks_at_these(tmp_path: Path) -> None:
    providers = [f"provider-{number}" for number in range(8)]
    rows = [row(p, s, 1.0, batch=1) for p in providers for s in (96, 100, 111, 120)]
    found = drawn(tmp_path, rows)

    assert [text for text in found if re.fullmatch(r"\d+", text)][:4] == ["96", "100", "111", "120"]


def test_a_sweep_over_keys_counts_keys_and_stands_apart_from_square_cases() -> None:
    rows = [row("cupy_flash", s, 1.0, batch=1) for s in (512, 1024)]
    rows += [row("cupy_flash", 1, 1.0, seqlen_k=s, batch=1) for s in (203, 799, 4096)]
    found = shown(rows)

    assert found.axis.label == "keys (seqlen_k)"
    assert [(panel.parts["length"], panel.xs) for panel in found.panels] == [
        ("seqlen_q = seqlen_k", [512, 1024]),
        ("seqlen_q 1", [203, 799, 4096]),
    ]


def test_a_sweep_over_queries_alone_counts_queries() -> None:
    found = shown([row("cupy_flash", s, 1.0, seqlen_k=77, batch=1) for s in (113, 799)])

    assert found.axis.label == "queries (seqlen_q)"
    assert [panel.xs for panel in found.panels] == [[113, 799]]


def test_masks_with_their_own_q_offset_say_so() -> None:
    rows = [row("cupy_flash", 1, 1.0, seqlen_k=s, causal=True, q_offset=0) for s in (113, 799)]

    assert {panel.parts["mask"] for panel in shown(rows).panels} == {"causal, q_offset 0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "begins"), [(".svg", b"<?xml"), (".SVG", b"<?xml"), (".pdf", b"%PDF")]
)
def test_the_same_record_gives_the_same_file(tmp_path: Path, suffix: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    record = write(tmp_path / "r.json", GRID)
    contents = []
    for name in (f"a{suffix}", f"b{suffix}"):
        invoke(plot, record, "--output", tmp_path / name)
        contents.append((tmp_path / name).read_bytes())

    assert contents[0] == contents[1]
    assert contents[0].startswith(begins)


def test_a_png_is_written_for_that_suffix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    invoke(plot, write(tmp_path / "r.json", GRID), "--output", tmp_path / "a.png")

    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_another_suffix_is_one_line_that_names_what_is_right(tmp_path: Path) -> None:
    output = refused(plot, write(tmp_path / "r.json", GRID), "--output", tmp_path / "a.gif")

    assert "expected one of .png, .svg, .pdf" in output


@pytest.mark.parametrize(
    ("rows", "metadata", "why"),
    [
        ([{"tile": 1}], {}, "is not a record of 'cupy-flash bench': row 0 has no 'provider'"),
        ([row("cupy_flash", 512, None)], {}, "no rate to draw"),
        (GRID, {"record_version": 7}, "is a record of version 7"),
        ([row("cupy_flash", 512, 1.0)] * 2, {}, "rows 0 and 1 are both cupy_flash on bf16"),
    ],
)
def test_a_record_that_cannot_be_drawn_is_one_line(
    tmp_path: Path, rows: list[Any], metadata: dict[str, Any], why: str
) -> None:
    pytest.importorskip("matplotlib")
    record = write(tmp_path / "r.json", rows, **metadata)

    assert why in refused(plot, record, "--output", tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()


def test_a_file_nested_too_deep_to_be_a_record_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    deep = tmp_path / "r.json"
    deep.write_text("[" * 100_000, encoding="utf-8")

    assert "r.json is not JSON" in refused(plot, deep, "--output", tmp_path / "a.svg")


def test_without_matplotlib_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    output = refused(plot, write(tmp_path / "r.json", GRID), "--output", tmp_path / "a.svg")

    assert "cupy_flash[plot]" in output


def decoding(provider: str, ms: float, **more: Any) -> dict[str, Any]:
    """Return a row for one query over a KV cache."""
    cached = {"batch": 8, "seqlen_q": 1, "heads_kv": 8, "kind": "cache", "kv_tb_per_s": 0.25 / ms}
    return row(provider, 8192, ms) | cached | {"copy_share": 0.1 / ms} | more


def test_pages_of_a_cache_have_panels_of_their_own() -> None:
    rows = [decoding("cupy_flash", 0.1), decoding("cupy_flash", 0.2, page_size=16)]

    assert [panel.parts["layout"] for panel in shown(rows).panels] == ["cache", "pages of 16"]
