"""Presets: the benchmarks of others, with the figures they published beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from cupy_flash.cli.bench.table import print_cells, record_row
from cupy_flash.cli.cases import presets, published_figures
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.published_figures import Published, Source, square
from cupy_flash.cli.main import main
from cupy_flash.cli.measure.runner import Cell, Settings, set_speedups
from cupy_flash.cli.measure.timing import Spread
from cupy_flash.cli.providers import providers
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.tile import freeze_tile

SOURCES = (
    published_figures.COBRAML_PYTHON,
    published_figures.COBRAML_CPP,
    published_figures.THREE_KERNEL,
    published_figures.ROOFLINE_ARTICLE,
)
FIGURES = [figure for source in SOURCES for figure in source.figures]
BAD_ROW = (0.034, 3973)
BAD_CASE = square("float32", 4, 16, 512, 64, causal=True)


def figure(source: Source, label: str, case: Case) -> Published:
    (found,) = (figure for figure in source.of(case) if figure.label == label)
    return found


@pytest.mark.parametrize(
    ("batch", "seqlen", "causal", "cobraml", "pytorch", "speedup"),
    [
        (4, 512, False, 0.527, 1.198, 2.27),
        (4, 512, True, 0.660, 1.771, 2.68),
        (8, 59, False, 0.044, 0.170, 3.90),
        (8, 59, True, 0.047, 0.266, 5.65),
        (1, 2048, False, 1.670, 4.009, 2.40),
        (1, 2048, True, 1.663, 3.868, 2.33),
    ],
)
def test_cobramls_python_table_is_16_heads_of_64_against_eager_pytorch(
    batch: int, seqlen: int, causal: bool, cobraml: float, pytorch: float, speedup: float
) -> None:
    source = published_figures.COBRAML_PYTHON
    case = square("float32", batch, 16, seqlen, 64, causal)
    fused, eager = (figure(source, label, case) for label in ("CobraML", "PyTorch"))

    assert case in presets.preset("cobraml-python").cases
    assert (fused.ms, eager.ms) == (cobraml, pytorch)
    # Its times have three digits, of which the shortest leave two.
    assert source.speedup(fused) == pytest.approx(speedup, rel=0.015)


@pytest.mark.parametrize(
    ("head_dim", "batch", "seqlen", "causal", "ms", "gflops"),
    [
        (64, 4, 512, False, 0.393, 10925),
        (64, 4, 512, True, 0.034, 3973),
        (64, 8, 59, False, 0.032, 3537),
        (64, 8, 59, True, 0.032, 3514),
        (128, 4, 512, False, 0.918, 9354),
        (128, 4, 512, True, 0.857, 10018),
    ],
)
def test_cobramls_cpp_table_is_16_heads(
    head_dim: int, batch: int, seqlen: int, causal: bool, ms: float, gflops: float
) -> None:
    case = square("float32", batch, 16, seqlen, head_dim, causal)
    published = figure(published_figures.COBRAML_CPP, "CobraML", case)

    assert case in presets.preset("cobraml-cpp").cases
    assert (published.ms, published.gflops) == (ms, gflops)


@pytest.mark.parametrize("name", ["cobraml-python", "cobraml-cpp"])
def test_cobramls_tables_have_six_rows_each_and_were_measured_on_an_a10g(name: str) -> None:
    preset = presets.preset(name)

    assert len(preset.cases) == 6
    assert preset.source is not None
    assert preset.source.gpu == "NVIDIA A10G"
    assert preset.baseline == ("torch-eager",)
    assert "cupy_flash-simt" in preset.providers


def test_the_three_kernel_benchmark_is_one_head_of_4096_by_64() -> None:
    preset = presets.preset("three-kernel")
    (case,) = preset.cases
    source = preset.source
    assert source is not None
    baseline, fused = source.of(case)

    assert case == square("float32", 1, 1, 4096, 64)
    assert (baseline.ms, fused.ms) == (21.8565, 7.1659)
    assert source.speedup(fused) == pytest.approx(3.05, abs=0.005)
    assert source.gpu is None
    assert preset.baseline == ("cupy_flash-naive",)


def test_replit_3b_reads_1000_tokens_with_24_heads_on_8() -> None:
    for case in presets.preset("replit-context").cases:
        assert case.bshd_shapes[0][1:] == (1000, 24, 128)
        assert case.bshd_shapes[1][1:] == case.bshd_shapes[2][1:] == (1000, 8, 128)


def test_replit_3b_writes_one_token_that_sees_all_1000_plus_i_keys() -> None:
    cases = presets.preset("replit-generation").cases

    assert {case.seqlen_k - 1000 for case in cases} == {1, 100, 1000}
    for case in cases:
        assert case.bshd_shapes[0][1:] == (1, 24, 128)
        assert case.bshd_shapes[1][2:] == (8, 128)
        assert case.problem().flops() == 4 * case.scores * 128


def test_the_cute_example_is_its_command_line_with_a_top_left_mask() -> None:
    full, causal = presets.preset("cute-example").cases

    assert full == Case("float16", 1, 1280, 1536, 16, 16, 128, 128, softmax_scale=1.0)
    assert causal.causal
    assert causal.q_offset == 0
    assert causal.problem().q_offset == 0
    assert (causal.seqlen_q, causal.seqlen_k, causal.softmax_scale) == (1280, 1536, 1.0)


@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_the_cute_examples_tile_is_refused_as_its_note_says(arch: int) -> None:
    for case in presets.preset("cute-example").cases:
        with pytest.raises(ValueError, match="registers"):
            make_plan(
                case.problem(),
                device_for_arch(arch),
                family="mma",
                tile=freeze_tile({"Br": 128, "Bc": 128, "warps": 4}),
            )


def test_the_roofline_article_is_32_heads_of_4096_by_128_on_an_a100() -> None:
    preset = presets.preset("roofline-article")
    (case,) = preset.cases
    source = preset.source
    assert source is not None

    assert case == square("float16", 1, 32, 4096, 128)
    assert {f.label: f.tflops for f in source.of(case)} == {
        "standard": 1.2,
        "FA-1": 124.0,
        "FA-2": 156.0,
    }
    assert {f.ms for f in source.of(case)} == {None}
    assert source.gpu == "NVIDIA A100"


def test_grouped_heads_stand_beside_plain_ones_of_the_same_flops() -> None:
    preset = presets.preset("gqa")
    sizes = {
        (c.batch, c.seqlen_q, c.heads_q, c.heads_kv): c.problem().flops() for c in preset.cases
    }

    assert preset.providers == ("cupy_flash", "torch-cudnn", "torch-flash")
    assert {(c.dtype, c.head_dim, c.causal) for c in preset.cases} == {("bfloat16", 128, False)}
    assert len(sizes) == 8
    for batch, seqlen in ((2, 8192), (1, 16384)):
        for heads in (32, 64):
            assert sizes[batch, seqlen, heads, 8] == sizes[batch, seqlen, heads, heads]


def test_the_memory_preset_doubles_the_sequence_from_1k_to_32k() -> None:
    preset = presets.preset("memory")

    assert [case.seqlen_q for case in preset.cases] == [1024, 2048, 4096, 8192, 16384, 32768]
    assert preset.cases[0] == square("float16", 1, 16, 1024, 64)
    assert preset.providers == ("cupy_flash", "cupy-library", "torch-math")


@pytest.mark.parametrize("name", presets.NAMES)
def test_every_case_is_one_that_the_library_computes_and_every_provider_exists(name: str) -> None:
    preset = presets.preset(name)

    assert len(set(preset.cases)) == len(preset.cases)
    assert all(case.problem().flops() > 0 for case in preset.cases)
    assert set(preset.providers) <= set(providers.names())
    assert set(preset.baseline) <= set(preset.providers)


def test_figures_do_not_carry_over_to_another_dtype() -> None:
    preset = presets.preset("three-kernel", ["float16"])
    source = preset.source
    assert source is not None

    assert [case.dtype for case in preset.cases] == ["float16"]
    assert source.of(preset.cases[0]) == ()
    assert source.answering(preset.cases[0], "cupy_flash") is None


@pytest.mark.parametrize(
    "published",
    [f for f in FIGURES if f.ms and f.gflops and (f.ms, f.gflops) != BAD_ROW],
    ids=lambda f: f"{f.ms}ms-{f.gflops}GFLOPs",
)
def test_every_other_published_rate_is_the_flops_over_the_published_time(
    published: Published,
) -> None:
    flops = published.case.problem().flops()

    # The shortest times are published in two digits: 0.032 ms is anything up to 1.6% off.
    assert published.adds_up
    assert published.ms is not None
    assert published.tflops == pytest.approx(flops / published.ms / 1e9, rel=0.016)


def test_the_row_of_0034_ms_at_3973_gflops_alone_is_marked() -> None:
    (marked,) = (figure for figure in FIGURES if not figure.adds_up)

    assert marked.case == BAD_CASE
    assert (marked.ms, marked.gflops) == BAD_ROW
    assert marked.remark == (
        "does not add up: 0.034 ms at 3,973 GFLOP/s make 0.135 GFLOP; "
        "the shape has 4.29, or 2.15 without hidden pairs"
    )


def test_cobramls_causal_rates_are_halved_for_it_counts_hidden_pairs() -> None:
    for published in published_figures.COBRAML_CPP.figures:
        assert published.gflops is not None
        share = 0.5 if published.case.causal else 1.0
        assert published.tflops == pytest.approx(share * published.gflops / 1e3)


@pytest.mark.parametrize(
    ("counts_masked", "gflops"), [(True, 1000.0), (False, 500.0)], ids=["all pairs", "seen pairs"]
)
def test_either_count_of_a_causal_shape_adds_up(counts_masked: bool, gflops: float) -> None:
    case = square("float32", 3, 5, 113, 24, causal=True)
    ms = 4 * case.scores * 24 / 1e9

    def off_by(factor: float) -> Published:
        return Published(case, "x", True, ms * factor, gflops, counts_masked=counts_masked)

    assert off_by(1.04).adds_up
    assert off_by(0.96).adds_up
    assert not off_by(1.06).adds_up
    assert not off_by(0.94).adds_up
    assert off_by(1.0).tflops == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("provider", "label"),
    [
        ("cupy_flash", "FA-2"),
        ("torch-flash", "FA-2"),
        ("torch-eager", "standard"),
        ("cupy_flash-naive", "standard"),
        ("cupy-library", "standard"),
    ],
)
def test_a_provider_is_compared_with_the_best_figure_of_its_own_algorithm(
    provider: str, label: str
) -> None:
    source = published_figures.ROOFLINE_ARTICLE
    answer = source.answering(source.cases[0], provider)

    assert answer is not None
    assert answer.label == label


def test_every_standard_provider_exists() -> None:
    assert set(providers.names()) >= published_figures.STANDARD_PROVIDERS


def _cells(preset: presets.Preset) -> list[list[Cell]]:
    """Each case's cells as if they had run: the first provider twice as fast as the next."""
    table = []
    for case in preset.cases:
        cells = []
        for index, name in enumerate(preset.providers):
            ms = 0.125 * 2**index
            time = Spread(ms, 0.99 * ms, 1.01 * ms, 20)
            cells.append(Cell(providers.provider(name), case, time=time, max_error=1e-7))
        set_speedups(cells, preset.baseline)
        table.append(cells)
    return table


Show = Callable[[str, int], list[str]]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """Lines that `bench` prints for a preset in a terminal of some width."""

    def lines(name: str, width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        preset = presets.preset(name)
        table = _cells(preset)
        rows = [[record_row(c, None, "a GPU", {}, preset.source) for c in cells] for cells in table]
        settings = Settings(3, 20, 20.0, 0, check=True, host_time=False)
        print_cells(table, rows, [], "a GPU", preset.baseline, settings, preset)
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", presets.NAMES)
def test_a_presets_table_keeps_to_the_terminals_width(show: Show, name: str, width: int) -> None:
    lines = show(name, width)

    assert max(map(len, lines[3:])) <= width
    assert lines[0] == presets.preset(name).title


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["cobraml-python", "cobraml-cpp", "three-kernel"])
def test_published_times_and_rates_stand_in_the_columns_of_ours(
    show: Show, name: str, width: int
) -> None:
    preset = presets.preset(name)
    source = preset.source
    assert source is not None
    lines = show(name, width)
    (heading,) = (line for line in lines if "provider" in line)
    theirs = [line for line in lines if line.startswith(" ") and "theirs: " in line]

    assert len(theirs) == len(source.figures)
    for line, published in zip(theirs, source.figures, strict=True):
        mark = "" if published.adds_up else "?"
        ends = {word: heading.index(word) + len(word) for word in ("ms", "TFLOP/s")}
        assert line[: ends["ms"]].endswith(f" {published.ms:g}{mark}")
        assert line[: ends["TFLOP/s"]].endswith(f" {published.tflops:.4g}{mark}")


@pytest.mark.parametrize("width", [80, 120])
def test_the_row_that_does_not_add_up_is_marked_and_explained_below(show: Show, width: int) -> None:
    lines = show("cobraml-cpp", width)
    text = " ".join(" ".join(lines).split())

    assert [line.split()[2:] for line in lines if "?" in line and "theirs:" in line] == [
        ["0.034?", "-", "1.986?", "-", "-"]
    ]
    assert text.count("?: ") == 1
    assert (
        "?: CobraML b4 s512 d64 causal does not add up: 0.034 ms at 3,973 GFLOP/s make 0.135 GFLOP"
    ) in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cobraml-python", "measured on an NVIDIA A10G, not here"),
        ("cobraml-cpp", "They count the FLOPs of hidden pairs, too"),
        ("three-kernel", "measured on a GPU that it does not name, not here"),
        ("roofline-article", "measured on an NVIDIA A100, not here"),
        ("replit-context", "Replit-3B; it gives no times"),
        ("cute-example", "it gives no times"),
    ],
)
def test_the_notes_say_where_published_figures_were_measured(
    show: Show, name: str, says: str
) -> None:
    assert says in " ".join(" ".join(show(name, 80)).split())


def test_published_speedups_are_over_the_publishers_own_standard_algorithm(show: Show) -> None:
    fused = next(line for line in show("three-kernel", 80) if line.startswith(" theirs: fused"))

    assert fused.split() == ["theirs:", "fused", "7.1659", "-", "0.5994", "3.05", "-"]


def test_rows_of_a_record_carry_the_published_figure_on_our_flop_convention() -> None:
    preset = presets.preset("cobraml-cpp")
    cells = next(cells for cells in _cells(preset) if cells[0].case == BAD_CASE)
    ours, _, eager = (record_row(c, None, "a GPU", {}, preset.source) for c in cells)

    assert ours["published_ms"] == 0.034
    assert ours["published_tflops"] == pytest.approx(3.973 / 2)
    assert ours["published_remark"].startswith("does not add up")
    assert eager["published_ms"] is None
    assert eager["published_tflops"] is None


def test_a_preset_runs_and_its_record_names_the_source(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(
        main,
        [
            *("bench", "--preset", "three-kernel", "--provider", "cupy_flash-cpu,numpy-naive"),
            *("--skip-check", "--cell-seconds", "0.000001", "--output", str(path)),
        ],
        catch_exceptions=False,
    )
    data = json.loads(path.read_text(encoding="utf-8"))

    # Every cell is over the limit of time.
    assert result.exit_code == 1
    assert "theirs: 3 kernels" in result.stdout
    assert data["metadata"]["preset"] == "three-kernel"
    assert data["metadata"]["published_by"].endswith("(GPU not named)")
    assert [row["published_ms"] for row in data["rows"]] == [7.1659, 21.8565]


def test_rows_without_a_preset_have_no_published_figure() -> None:
    cell = Cell(providers.provider("cupy_flash-cpu"), BAD_CASE)
    row = record_row(cell, None, "a CPU", {})

    assert row["published_ms"] is row["published_tflops"] is row["published_remark"] is None


def test_an_unknown_preset_is_refused_in_one_line_that_names_those_there_are() -> None:
    result = CliRunner().invoke(main, ["bench", "--preset", "nosuch"])

    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "'nosuch' is not one of" in result.stderr
    assert all(name in result.stderr for name in presets.NAMES)
