"""Presets: named sets of cases, and the output for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli import commands

from cupy_flash.cli.bench.table import STANDARD_PROVIDERS, print_cells, record_row
from cupy_flash.cli.cases import presets
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.presets import square
from cupy_flash.cli.measure.runner import Cell, Settings, set_speedups
from cupy_flash.cli.measure.timing import Spread
from cupy_flash.cli.providers import providers
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.tile import freeze_tile


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("cobraml-python", [(4, 512, 64), (8, 59, 64), (1, 2048, 64)]),
        ("cobraml-cpp", [(4, 512, 64), (8, 59, 64), (4, 512, 128)]),
    ],
)
def test_cobramls_tables_are_16_heads_full_and_causal_against_eager_pytorch(
    name: str, sizes: list[tuple[int, int, int]]
) -> None:
    preset = presets.preset(name)

    assert preset.cases == tuple(
        square("float32", batch, 16, seqlen, head_dim, causal)
        for batch, seqlen, head_dim in sizes
        for causal in (False, True)
    )
    assert preset.baseline == ("torch-eager",)
    assert "cupy_flash-simt" in preset.providers


def test_the_row_that_does_not_add_up_is_told_with_the_time_of_its_rate() -> None:
    case = presets.preset("cobraml-cpp").cases[1]
    # The published rate of this project counts masked pairs, too.
    ms = 2 * case.problem().flops() / 3973e6

    assert f"by which it took {ms:.3f}" in presets.preset("cobraml-cpp").notes[1]


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
    tile = freeze_tile({"Br": 128, "Bc": 128, "warps": 4})
    for case in presets.preset("cute-example").cases:
        with pytest.raises(ValueError, match="registers"):
            make_plan(case.problem(), device_for_arch(arch), family="mma", tile=tile)


def test_grouped_heads_stand_beside_plain_ones_of_the_same_flops() -> None:
    preset = presets.preset("gqa")
    flops = {(c.batch, c.seqlen_q, c.heads_q, c.heads_kv): c.flops() for c in preset.cases}

    assert preset.providers == ("cupy_flash", "torch-cudnn", "torch-flash")
    assert {(c.dtype, c.head_dim, c.causal) for c in preset.cases} == {("bfloat16", 128, False)}
    assert len(flops) == 8
    for batch, seqlen in ((2, 8192), (1, 16384)):
        for heads in (32, 64):
            assert flops[batch, seqlen, heads, 8] == flops[batch, seqlen, heads, heads]


def test_wide_heads_stand_beside_heads_of_256_columns_of_the_same_flops() -> None:
    preset = presets.preset("wide")
    flops = {(c.head_dim, c.causal, c.seqlen_q): c.problem().flops() for c in preset.cases}

    assert len(flops) == len(preset.cases) == 8
    assert {c.batch * c.seqlen_q for c in preset.cases} == {16384}
    assert {c.heads_q * c.head_dim for c in preset.cases} == {2048}
    for causal in (False, True):
        for seqlen in (4096, 16384):
            assert flops[512, causal, seqlen] == flops[256, causal, seqlen]


def test_the_memory_preset_doubles_the_sequence_from_1k_to_32k() -> None:
    preset = presets.preset("memory")

    assert [case.seqlen_q for case in preset.cases] == [1024, 2048, 4096, 8192, 16384, 32768]
    assert preset.cases[0] == square("float16", 1, 16, 1024, 64)
    assert preset.providers == ("cupy_flash", "cupy-library", "torch-math")


def test_the_mods_preset_has_long_documents_and_decodes_with_a_window_and_without() -> None:
    preset = presets.preset("mods")
    *square_ones, narrow, wide, windowed, short = preset.cases
    texts = [f"{'causal ' if c.causal else ''}{c.mods}".strip() for c in square_ones]

    sizes = {(c.batch, c.seqlen_q, c.seqlen_k, c.heads_q * c.head_dim) for c in square_ones}
    assert sizes == {(2, 8192, 8192, 2048)}
    assert texts[:11] == texts[11:]
    assert texts[:11] == [
        *("", "causal", "causal window 1023:0", "causal alibi", "causal sinks", "softcap 50"),
        *("bias heads", "bias shared", "mod documents", "causal mod documents", "mod t5"),
    ]
    assert [c.head_dim for c in square_ones] == [64] * 11 + [128] * 11
    for long, head_dim in ((narrow, 64), (wide, 128)):
        assert (long.batch, long.seqlen_q, long.head_dim) == (1, 32768, head_dim)
        assert (long.causal, str(long.mods)) == (True, "mod documents")
    assert (windowed.seqlen_k, str(windowed.mods)) == (65536, "window 1023:0")
    assert (short.seqlen_k, bool(short.mods)) == (1024, False)
    assert windowed.kv_bytes == short.kv_bytes


@pytest.mark.parametrize("name", presets.NAMES)
def test_every_case_is_one_that_the_library_computes_and_every_provider_exists(name: str) -> None:
    preset = presets.preset(name)

    assert len(set(preset.cases)) == len(preset.cases)
    assert all(case.problem().flops() > 0 for case in preset.cases)
    assert set(preset.providers) <= set(providers.names())
    assert set(preset.baseline) <= set(preset.providers)


def test_a_preset_in_another_dtype_has_each_case_once() -> None:
    cases = presets.preset("crossover", ["float16"]).cases

    assert {case.dtype for case in cases} == {"float16"}
    assert len(cases) == len(set(cases)) == 4 * 2 * 9


def test_every_standard_provider_exists() -> None:
    assert set(providers.names()) >= STANDARD_PROVIDERS


def _cells(preset: presets.Preset) -> list[list[Cell]]:
    """Return cells as after a run in which each provider takes twice the time of the previous."""
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
    """Function that returns the lines `bench` prints for a preset, given the terminal's width."""

    def lines(name: str, width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        preset = presets.preset(name)
        table = _cells(preset)
        rows = [[record_row(c, None, "a GPU", {}) for c in cells] for cells in table]
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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cobraml-python", "on an NVIDIA A10G, in this order, ms: CobraML 0.527"),
        ("cobraml-cpp", "CUDA cores, as cupy_flash-simt does"),
        ("three-kernel", "on a GPU that it does not name: three kernels 21.8565 ms, one 7.1659"),
        ("roofline-article", "for an NVIDIA A100, TFLOP/s: standard 1.2"),
        ("replit-context", "batch, dtype and mask are ours"),
    ],
)
def test_the_notes_have_what_was_published_and_where_it_was_measured(
    show: Show, name: str, says: str
) -> None:
    assert says in " ".join(" ".join(show(name, 80)).split())


def test_a_preset_runs_and_its_record_names_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    named = ("bench", "--preset", "three-kernel", "--provider", "cupy_flash-cpu,numpy-naive")
    options = ("--skip-check", "--cell-seconds", "0.000001", "--output", path)
    # Every cell exceeds the time limit.
    result = commands.run(*named, *options, code=1)
    data = commands.written(path)

    assert "three kernels 21.8565 ms" in " ".join(result.stdout.split())
    assert data["metadata"]["preset"] == "three-kernel"


def test_an_unknown_preset_is_refused_in_one_line_that_names_those_there_are() -> None:
    said = commands.refusal("bench", "--preset", "nosuch")

    assert "'nosuch' is not one of" in said
    assert all(name in said for name in presets.NAMES)
