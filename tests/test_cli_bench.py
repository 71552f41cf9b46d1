"""`cupy-flash bench` on the CPU."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupy_flash.cli import torch_providers
from cupy_flash.cli.cases import Case
from cupy_flash.cli.main import main
from cupy_flash.cli.providers import provider
from cupy_flash.errors import CompileError

# What the benchmark records promise.
FIELDS = {
    "provider",
    "kernel_digest",
    "device",
    "dtype",
    "batch",
    "seqlen_q",
    "seqlen_k",
    "heads_q",
    "heads_kv",
    "head_dim",
    "head_dim_v",
    "causal",
    "q_offset",
    "tile",
    "median_ms",
    "tflops",
    "max_error",
    "versions",
}
RAGGED = (
    *("--seqlen-q", "113", "--seqlen-k", "203", "--batch", "1", "--heads", "2"),
    *("--head-dim", "24", "--dtype", "float32"),
)
ON_CPU = ("--provider", "cupy_flash-cpu,numpy-naive", "--repeats", "3")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments], catch_exceptions=False)


def record(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "rows.json"
    result = bench(*arguments, "--output", str(path))
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_json_record_has_the_promised_fields_and_its_provenance(tmp_path: Path) -> None:
    data = record(tmp_path, *RAGGED, *ON_CPU, "--causal")

    assert [row["provider"] for row in data["rows"]] == ["cupy_flash-cpu", "numpy-naive"]
    for row in data["rows"]:
        assert set(row) >= FIELDS
        assert (row["seqlen_q"], row["seqlen_k"], row["causal"]) == (113, 203, True)
        assert row["q_offset"] == 203 - 113
        assert row["median_ms"] > 0
        assert row["check"] == "passed"
        assert row["max_error"] <= row["error_bound"]
        assert row["checked_rows"] == 2 * 113
    ours, naive = data["rows"]
    assert ours["kernel_digest"]
    assert naive["kernel_digest"] is None
    assert set(ours["tile"]) == {"Br", "Bc"}
    assert {"date", "device", "versions", "flop_convention"} <= set(data["metadata"])
    assert {"cupy_flash", "numpy"} <= set(data["metadata"]["versions"])


def test_rates_and_speedups_follow_from_the_times(tmp_path: Path) -> None:
    ours, naive = record(tmp_path, *RAGGED, *ON_CPU)["rows"]
    flops = 4 * 2 * 113 * 203 * 24

    assert ours["tflops"] == pytest.approx(flops / ours["median_ms"] / 1e9)
    assert naive["speedup"] == 1.0
    assert ours["speedup"] == pytest.approx(naive["median_ms"] / ours["median_ms"])


def test_csv_and_markdown_hold_a_line_for_each_row(tmp_path: Path) -> None:
    for suffix in ("csv", "md"):
        path = tmp_path / f"rows.{suffix}"
        assert bench(*RAGGED, *ON_CPU, "--output", str(path)).exit_code == 0
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()))
    lines = (tmp_path / "rows.md").read_text(encoding="utf-8").splitlines()

    assert [row["provider"] for row in rows] == ["cupy_flash-cpu", "numpy-naive"]
    assert rows[0]["tile"].startswith("Br=")
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(rows)


def test_the_table_fits_80_columns_and_states_the_flop_convention(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    result = bench(*RAGGED, *ON_CPU, "--causal", "no,yes", "--layout", "bshd,bhsd")

    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "FLOPs = " in result.stdout
    assert "\x1b" not in result.stdout


def test_a_forced_tile_is_used(tmp_path: Path) -> None:
    ours = record(tmp_path, *RAGGED, "--provider", "cupy_flash-cpu", "--br", "32", "--bc", "64")

    assert ours["rows"][0]["tile"] == {"Br": 32, "Bc": 64}


def test_a_wrong_result_of_ours_is_marked_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(q: np.ndarray, *_: object, **__: object) -> np.ndarray:
        return np.zeros_like(q)

    monkeypatch.setattr("cupy_flash.cli.providers.flash_attention", wrong)
    result = bench(*RAGGED, *ON_CPU)

    assert result.exit_code == 1
    assert "!: over the bound" in result.stdout


def test_a_less_exact_peer_is_marked_but_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: np.ndarray, *_: object, **__: object) -> np.ndarray:
        return np.zeros_like(q)

    monkeypatch.setattr("cupy_flash.cli.providers.attention_naive", wrong)
    result = bench(*RAGGED, *ON_CPU)

    assert result.exit_code == 0
    assert "!: over the bound" in result.stdout


def test_a_skipped_check_is_said(tmp_path: Path) -> None:
    data = record(tmp_path, *RAGGED, *ON_CPU, "--skip-check")

    assert {row["check"] for row in data["rows"]} == {"skipped"}
    assert {row["max_error"] for row in data["rows"]} == {None}


def test_a_cell_that_would_take_too_long_gets_a_reason(tmp_path: Path) -> None:
    data = record(tmp_path, *RAGGED, *ON_CPU, "--cell-seconds", "0.000001")

    assert all("too long for --cell-seconds" in row["reason"] for row in data["rows"])
    assert {row["median_ms"] for row in data["rows"]} == {None}


def test_a_long_case_is_refused_after_a_part_of_its_rows(tmp_path: Path) -> None:
    data = record(
        tmp_path,
        *("--provider", "numpy-naive", "--dtype", "float32", "--batch", "1", "--heads", "4"),
        *("--seqlen-q", "4096", "--causal", "--head-dim", "64", "--cell-seconds", "0.01"),
    )

    assert "too long for --cell-seconds" in data["rows"][0]["reason"]


def test_a_case_that_needs_more_memory_than_there_is_gets_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupy_flash.cli.providers.free_bytes", lambda *, on_gpu: 150_000)
    _, naive = record(tmp_path, *RAGGED, *ON_CPU)["rows"]

    assert "GiB of memory" in naive["reason"]
    assert naive["median_ms"] is None


def test_real_inputs_are_read_from_an_npz_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, n, h, 8)) for n, h in ((37, 6), (53, 3), (53, 3)))
    path = tmp_path / "qkv.npz"
    np.savez(path, **{n: a.astype(np.float16) for n, a in zip("qkv", (q, k, v), strict=True)})
    ours, _ = record(tmp_path, "--input", str(path), *ON_CPU, "--causal")["rows"]

    assert (ours["dtype"], ours["seqlen_q"], ours["seqlen_k"]) == ("float16", 37, 53)
    assert (ours["heads_q"], ours["heads_kv"]) == (6, 3)
    assert ours["check"] == "passed"


def test_bfloat16_survives_an_npz_file(tmp_path: Path) -> None:
    array = np.ones((1, 5, 1, 8), ml_dtypes.bfloat16)
    path = tmp_path / "qkv.npz"
    np.savez(path, q=array, k=array, v=array)
    ours, _ = record(tmp_path, "--input", str(path), *ON_CPU)["rows"]

    assert ours["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"q": np.ones((1, 5, 1, 8))}, "holds q; expected arrays q, k and v"),
        (dict.fromkeys("qkv", np.ones((5, 8))), "expected a float array of shape (batch, seqlen"),
        (dict.fromkeys("qkv", np.ones((1, 5, 1, 8), int)), "is int64 of shape"),
    ],
)
def test_an_npz_file_without_usable_arrays_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], says: str
) -> None:
    path = tmp_path / "qkv.npz"
    np.savez(path, **arrays)
    result = bench("--input", str(path))

    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_no_npz_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "qkv.npz"
    path.write_text("not arrays", encoding="utf-8")
    result = bench("--input", str(path))

    assert result.exit_code == 2
    assert "cannot be read as an npz file" in result.stderr


def test_empty_sequences_have_a_row_of_their_own(tmp_path: Path) -> None:
    data = record(tmp_path, *ON_CPU, "--seqlen-q", "0,3", "--seqlen-k", "0", "--dtype", "float32")

    assert {row["check"] for row in data["rows"]} == {"passed"}


def test_torch_is_left_out_where_its_causal_mask_means_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_providers, "why_no_torch", lambda: None)
    decoding = Case("float16", 1, 1, 239, 4, 4, 64, 64, causal=True)
    top_left = Case("float16", 1, 1, 239, 4, 4, 64, 64, causal=True, q_offset=0)

    assert "aligned top-left" in str(provider("torch-flash").why_not(decoding))
    assert provider("torch-flash").why_not(top_left) is None
    assert provider("torch-eager").why_not(decoding) is None


def test_torchs_refusal_is_told_by_what_it_warned_of() -> None:
    warned = [
        "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:1.)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at x)",
        "Flash attention kernel not used because: (Triggered internally at x)",
        "Expected query, key and value to have head_dim <= 256. (Triggered internally at x)",
    ]

    assert torch_providers.refusal(warned, "No available kernel.") == (
        "Expected query, key and value to have head_dim <= 256."
    )
    assert torch_providers.refusal([], "No available kernel.\nmore") == "No available kernel."


def without_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cupy_flash", *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def test_with_no_gpu_the_cpu_backend_is_timed_against_numpy_and_that_is_said() -> None:
    result = without_gpu("bench", "--seqlen-q", "64")

    assert result.returncode == 0, result.stderr
    assert "No GPU to use" in result.stdout
    assert "cupy_flash-cpu" in result.stdout
    assert "numpy-naive" in result.stdout


def test_with_no_gpu_tune_says_what_it_can_do_without_one() -> None:
    result = without_gpu("tune")

    assert result.returncode == 2
    assert "--backend cpu tunes the CPU tiles, --arch sm_90 compiles the sweep" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_kernel_of_ours_that_fails_costs_its_cell_alone_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise CompileError("it does not compile\nCompiler log:\nline 1")

    monkeypatch.setattr("cupy_flash.cli.providers.flash_attention", broken)
    path = tmp_path / "rows.json"
    result = bench(*RAGGED, *ON_CPU, "--output", str(path))
    ours, naive = json.loads(path.read_text(encoding="utf-8"))["rows"]

    assert result.exit_code == 1
    assert "Compiler log" in result.stderr
    assert ours["reason"] == "it does not compile"
    assert naive["median_ms"] > 0
