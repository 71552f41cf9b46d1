"""`cupy-flash roofline` without a GPU, and with a fake GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.cli import commands

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import random_inputs
from cupy_flash.cli.model import gpus
from cupy_flash.cli.model import roofline as roofline_module
from cupy_flash.cli.model.roofline import Measured, roofline
from cupy_flash.cli.providers import providers
from cupy_flash.gpu.environment import gpu_unavailable

RAGGED = ("--seqlen-q", "113", "--seqlen-k", "203", "--heads", "6", "--kv-heads", "2")


def run(*arguments: str, code: int = 0) -> str:
    """Return what `roofline` prints; fail unless its exit code is `code`."""
    result = CliRunner().invoke(roofline, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def rows_of(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    path = tmp_path / "rows.json"
    run(*arguments, "--output", str(path), "--force")
    return commands.written(path)["rows"]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline_module, "gpu_unavailable", lambda: "none is plugged in")


@pytest.fixture
def an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an H100 the current GPU, on which every call reaches 600 TFLOP/s."""
    monkeypatch.setattr(roofline_module, "gpu_unavailable", lambda: None)
    for module in (providers, roofline_module):
        monkeypatch.setattr(module, "current_device", gpus.find("H100").device)
    monkeypatch.setattr(roofline_module, "measure_rate", lambda case: Measured(600e12))


def test_the_articles_shape_on_an_h100_is_the_default(no_gpu: None, tmp_path: Path) -> None:
    standard, fused, uncached = rows_of(tmp_path, "--gpu", "H100")
    array, matrix = 4096 * 128 * 32 * 2, 4096 * 4096 * 32 * 2
    names = [row["algorithm"] for row in (standard, fused, uncached)]

    assert names == ["standard", "fused", "fused, no L2"]
    assert standard["bytes_read"] + standard["bytes_written"] == 4 * array + 4 * matrix
    assert (fused["bytes_read"], fused["bytes_written"]) == (3 * array, array)
    assert fused["intensity"] == pytest.approx(2048)
    assert uncached["key_value_reads"] == -(-4096 // uncached["Br"])


def test_rows_follow_from_their_own_figures(no_gpu: None, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--gpu", "A10G,B200", "--causal", "no,yes", *RAGGED)

    assert len(rows) == 2 * 2 * 3
    for row in rows:
        moved = row["bytes_read"] + row["bytes_written"]
        by_memory = row["bandwidth_gb_per_s"] / 1e3 * row["intensity"]
        assert row["intensity"] == pytest.approx(row["flops"] / moved)
        assert row["ridge"] == pytest.approx(row["peak_tflops"] / row["bandwidth_gb_per_s"] * 1e3)
        assert row["attainable_tflops"] == pytest.approx(min(row["peak_tflops"], by_memory))
        assert row["bound"] == ("memory" if row["intensity"] < row["ridge"] else "compute")


def test_the_table_names_peak_bandwidth_ridge_point_and_source(no_gpu: None) -> None:
    text = run("--gpu", "a100")

    assert "A100: 312 TFLOP/s dense (tensor cores), 2039 GB/s" in text
    assert "ridge point 153.0 FLOP/byte. NVIDIA A100 Tensor Core GPU datasheet" in text
    assert re.search(r"^ standard +2248 +2181 +1 +62.06 +memory +126.5", text, re.MULTILINE)
    assert re.search(r"^ fused +100.7 +33.55 +1 +2048 +compute +312", text, re.MULTILINE)


def test_without_kernels_for_a_gpu_the_usual_tile_is_modelled_and_that_is_said(
    no_gpu: None,
) -> None:
    said = "fused on V100: no kernels of cupy_flash; modelled with tiles of 64x64."
    assert said in run("--gpu", "V100")


def test_a_kernel_on_cuda_cores_is_said_not_to_reach_the_tensor_cores_peak(no_gpu: None) -> None:
    text = " ".join(run("--gpu", "T4").split())

    assert "family simt" in text
    assert "on CUDA cores, which do not reach that peak" in text
    assert "on CUDA cores, which" not in run("--gpu", "T4", "--dtype", "float32")


@pytest.mark.parametrize("width", [80, 120])
def test_every_row_stays_on_one_line(an_h100: None, width: int, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(roofline_module, "measure_rate", lambda case: Measured(123.4e12))
    sizes = ("--seqlen-q", "113,65536", "--seqlen-k", "131072", "--causal", "no,yes")
    text = run(*sizes, "--batch", "7", "--dtype", "float16,float32")
    rows = re.findall(r"^ (?:standard|fused|no L2) .*$", text, re.MULTILINE)

    assert len(rows) == 8 * 3
    assert all(len(row.removeprefix(" no L2").split()) >= 7 for row in rows)
    assert max(map(len, text.splitlines())) <= width
    assert "e+" not in text


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_said_of_a_gpu_fits_80_columns_and_stays_whole_in_a_pipe(
    no_gpu: None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--gpu", ",".join(gpus.names()), "--dtype", dtype)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = run(*arguments)
    monkeypatch.delenv("COLUMNS")
    wide = run(*arguments).splitlines()
    heads = [line for line in wide if "TFLOP/s dense" in line or line.startswith("ridge point")]

    assert max(map(len, narrow.splitlines())) <= 80
    assert len(heads) == 2 * len(gpus.names())
    assert all(line in " ".join(narrow.split()) for line in heads)


def test_figures_below_one_have_four_digits_too(no_gpu: None) -> None:
    text = run("--gpu", "H100", "--dtype", "float64")

    assert re.search(r"^ standard +8.993 +8.724 ", text, re.MULTILINE)
    assert re.search(r"^ fused +0.4027 +0.1342 ", text, re.MULTILINE)
    few = run("--gpu", "H100", "--seqlen-q", "1", "--seqlen-k", "13", "--heads", "1")
    assert re.search(r"^ fused +0.006912 +0.000256 ", few, re.MULTILINE)


def test_empty_problems_have_rows_and_no_bound(no_gpu: None, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--gpu", "H100", "--seqlen-q", "0", "--seqlen-k", "9")

    assert {row["bound"] for row in rows} == {None}
    assert {row["attainable_tflops"] for row in rows} == {0.0}


def test_the_present_gpu_is_the_default_and_is_measured(an_h100: None, tmp_path: Path) -> None:
    standard, fused, _ = rows_of(tmp_path)

    assert fused["gpu"] == "H100"
    assert fused["measured_tflops"] == 600
    assert fused["share"] == pytest.approx(600 / 989.5)
    assert standard["measured_tflops"] is None
    assert "600 (61%)" in run()


def test_only_the_present_gpu_is_measured(an_h100: None, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--gpu", "H200,H100")
    measured = {row["gpu"] for row in rows if row["measured_tflops"] is not None}

    assert measured == {"H100"}
    assert all(row["measured_tflops"] is None for row in rows_of(tmp_path, "--no-measure"))


def test_a_call_that_cannot_be_measured_says_why(an_h100: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(roofline_module, "measure_rate", lambda case: Measured(reason="it is busy"))

    assert "not measured: it is busy" in run()


def test_the_rate_is_the_problems_flops_over_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeTimer:
        def interleaved(self, calls: Any, warmup: int, repeats: list[int]) -> list[list[float]]:
            return [[9.0, 2.0, 1.0]]

    case = Case("float32", 1, 113, 203, 2, 2, 24, 24)
    # Without a GPU the dispatcher chooses the CPU backend; the fake timer runs no call.
    monkeypatch.setattr(providers, "gpu_unavailable", lambda: "none is plugged in")
    monkeypatch.setattr(roofline_module, "GpuTimer", FakeTimer)
    monkeypatch.setattr(roofline_module, "too_large", lambda needed, *, on_gpu: None)
    inputs = random_inputs(case, 0, on_gpu=False)
    monkeypatch.setattr(roofline_module, "random_inputs", lambda case, seed, *, on_gpu: inputs)

    assert roofline_module.measure_rate(case).flops == pytest.approx(case.problem().flops() / 2e-3)


def test_too_little_memory_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "gpu_unavailable", lambda: "none is plugged in")
    monkeypatch.setattr(providers, "free_bytes", lambda *, on_gpu: 1 << 30)
    huge = Case("float16", 64, 65536, 65536, 32, 32, 128, 128)

    assert "GiB are free" in str(roofline_module.measure_rate(huge).reason)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "K80"), r"no datasheet of a GPU 'K80' here; expected one of T4, .*B200"),
        ((), r"no GPU here \(none is plugged in\); name one with --gpu: T4, .*B200"),
        (("--gpu", "H100", "--measure"), "--measure times the present GPU"),
        (("--gpu", "L4", "--dtype", "float64"), "states no float64 rate for L4"),
        (("--gpu", "L4", "--head-dim", "999"), "'999' is not a whole number from 1 to 576"),
        (("--gpu", "H100", "--output", "x.txt"), "expected one of .json, .csv, .md"),
        (("--gpu", "H100", "--plot", "x.gif"), "expected one of .png, .svg, .pdf"),
    ],
)
def test_wrong_options_exit_with_2_and_say_what_is_right(
    no_gpu: None, arguments: tuple[str, ...], message: str
) -> None:
    assert re.search(message, " ".join(run(*arguments, code=2).split()))


def test_a_present_gpu_without_a_datasheet_is_named(
    an_h100: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = gpus.find("T4").device()
    assert device
    other = type(device)(**{**vars(device), "name": "NVIDIA Test 1"})
    for module in (providers, roofline_module):
        monkeypatch.setattr(module, "current_device", lambda: other)
    said = run(code=2)

    assert "no datasheet of a GPU 'NVIDIA Test 1'" in " ".join(said.split())
    run("--gpu", "H100")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_written(an_h100: None, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"roofline{suffix}"
    run("--gpu", "H100,A100", "--causal", "no,yes", "--plot", str(path))
    start = path.read_bytes()[:200]

    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in start


def test_the_picture_names_roofs_algorithms_and_measured_rates(
    an_h100: None, tmp_path: Path
) -> None:
    path = tmp_path / "roofline.svg"
    run("--gpu", "H100,A100", "--causal", "no,yes", "--plot", str(path))
    text = path.read_text(encoding="utf-8")

    roofs = ("H100 float16, ridge 295", "A100 float16, ridge 153")
    for words in (*roofs, "standard", "fused, no L2", "fused, measured", "causal: 600"):
        assert f">{words}<" in text


def test_a_picture_of_nothing_but_empty_problems_is_drawn(no_gpu: None, tmp_path: Path) -> None:
    path = tmp_path / "roofline.svg"
    run("--gpu", "H100", "--batch", "0", "--plot", str(path))

    assert path.exists()


@pytest.mark.gpu
def test_the_present_gpus_rate_stays_below_what_is_attainable(tmp_path: Path) -> None:
    assert gpu_unavailable() is None
    name = providers.current_device().name
    try:
        gpus.find(name)
    except ValueError:
        pytest.skip(f"no datasheet of {name}")
    _, fused, _ = rows_of(tmp_path, "--seqlen-q", "4096", "--causal", "no")

    assert fused["reason"] is None
    assert 0 < fused["share"] < 1.0


def test_an_interrupt_leaves_what_was_measured(
    an_h100: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(case: Case) -> Measured:
        if case.seqlen_q == 2048:
            raise KeyboardInterrupt
        return Measured(600e12)

    monkeypatch.setattr(roofline_module, "measure_rate", interrupted)
    path = tmp_path / "rows.json"
    with pytest.raises(click.Abort):
        roofline.main(["--seqlen-q", "1024,2048", "--output", str(path)], standalone_mode=False)
    rows = commands.written(path)["rows"]

    assert {row["seqlen_q"] for row in rows} == {1024}


def test_only_what_is_seen_is_counted_and_biases_are_read(no_gpu: None, tmp_path: Path) -> None:
    shape = ("--gpu", "H100", "--seqlen-q", "4096", "--causal")
    options = ("--window", "255:0,none", "--bias", "shared,none", "--mod", "documents,none")
    rows = rows_of(tmp_path, *shape, *options)
    flops = {row["mods"]: row["flops"] for row in rows}
    reads = {row["mods"]: row["bytes_read"] for row in rows if row["algorithm"] == "fused"}

    assert len(flops) == 8
    pairs = 4096 * 256 - 256 * 255 // 2
    assert flops["window 255:0"] == flops["window 255:0, bias shared"] == 4 * 32 * pairs * 128
    assert flops["window 255:0, mod documents"] < flops["mod documents"] < flops[None] / 3
    matrix = 2 * 4096 * 4096
    assert reads["bias shared"] - reads[None] > matrix / 2
    assert reads["window 255:0, bias shared"] - reads["window 255:0"] > 2 * pairs


def test_a_modified_case_is_named_and_its_flops_explained(no_gpu: None) -> None:
    output = run("--gpu", "H100", "--sinks", "no,yes", "--mod", "documents")

    assert "sinks, mod documents" in output
    assert "FLOPs of windows, documents, prefixes" in output
