"""`cupy-flash bench` on the CPU."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import Result
from support.cli import commands
from support.gpu import fake_cupy
from threadpoolctl import threadpool_info, threadpool_limits

from cupy_flash.cli.bench import bench as bench_module
from cupy_flash.cli.bench.table import print_cells, record_row, timing_text
from cupy_flash.cli.cases import presets
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import random_inputs
from cupy_flash.cli.measure.gpu_state import CpuState, CpuWatch, GpuState, GpuWatch
from cupy_flash.cli.measure.runner import Cell, Settings, set_speedups
from cupy_flash.cli.measure.timing import HostTimer, Spread
from cupy_flash.cli.providers import torch_providers
from cupy_flash.cli.providers.providers import provider
from cupy_flash.cli.records import environment
from cupy_flash.errors import CompileError
from cupy_flash.planning.planner import make_plan

# Fields that every row of a benchmark record has.
FIELDS = {
    *("provider", "kernel_digest", "device", "dtype", "batch", "seqlen_q", "seqlen_k", "heads_q"),
    *("heads_kv", "head_dim", "head_dim_v", "causal", "q_offset", "tile", "median_ms", "tflops"),
    *("max_error", "versions"),
}
RAGGED = (
    *("--seqlen-q", "113", "--seqlen-k", "203", "--batch", "1", "--heads", "2"),
    *("--head-dim", "24", "--dtype", "float32"),
)
ON_CPU = ("--provider", "cupy_flash-cpu,numpy-naive", "--repeats", "3")
# Options that make two, or three, small cases.
TWO = ("--seqlen-q", "113,203", "--heads", "2", "--head-dim", "24")
THREE = ("--seqlen-q", "113,239,307", "--batch", "1", "--heads", "2", "--head-dim", "24")


def bench(*arguments: str, code: int = 0) -> Result:
    return commands.run("bench", *arguments, code=code)


def record(tmp_path: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    return commands.record_of(tmp_path / "rows.json", "bench", *arguments, code=code)


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
        bench(*RAGGED, *ON_CPU, "--output", str(path))
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()))
    lines = (tmp_path / "rows.md").read_text(encoding="utf-8").splitlines()

    assert [row["provider"] for row in rows] == ["cupy_flash-cpu", "numpy-naive"]
    assert rows[0]["tile"].startswith("Br=")
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(rows)


@pytest.mark.slow
def test_the_table_fits_80_columns_and_states_the_flop_convention(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = bench(*RAGGED, *ON_CPU, "--causal", "no,yes", "--layout", "bshd,bhsd")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "FLOPs = " in result.stdout
    assert "\x1b" not in result.stdout


def zeros(q: np.ndarray, *_: object, **__: object) -> np.ndarray:
    return np.zeros_like(q)


def test_a_wrong_result_of_ours_is_marked_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_flash.cli.cases.inputs.flash_attention", zeros)

    assert "!: over the bound" in bench(*RAGGED, *ON_CPU, code=1).stdout


def test_a_less_exact_peer_is_marked_but_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_flash.cli.providers.providers.attention_naive", zeros)

    assert "!: over the bound" in bench(*RAGGED, *ON_CPU).stdout


def test_a_skipped_check_is_said(tmp_path: Path) -> None:
    data = record(tmp_path, *RAGGED, *ON_CPU, "--skip-check")

    assert {row["check"] for row in data["rows"]} == {"skipped"}
    assert {row["max_error"] for row in data["rows"]} == {None}


def test_a_cell_that_would_take_too_long_gets_a_reason(tmp_path: Path) -> None:
    data = record(tmp_path, *RAGGED, *ON_CPU, "--cell-seconds", "0.000001", code=1)

    assert all("too long for --cell-seconds" in row["reason"] for row in data["rows"])
    assert {row["median_ms"] for row in data["rows"]} == {None}


def test_the_rest_between_calls_counts_towards_the_seconds_of_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostTimer, "pause", 0.05)
    limit = ("--repeats", "1000000", "--warmup", "0", "--cell-seconds", "0.75")
    (row,) = record(tmp_path, *RAGGED, "--provider", "cupy_flash-cpu", *limit)["rows"]

    assert 3 <= row["repeats"] <= 15


def test_no_limit_on_the_seconds_of_a_cell_makes_all_repeats(tmp_path: Path) -> None:
    rows = record(tmp_path, *RAGGED, *ON_CPU, "--cell-seconds", "inf")["rows"]

    assert {row["repeats"] for row in rows} == {3}


def test_where_nothing_could_be_timed_the_exit_code_says_so() -> None:
    result = without_gpu("bench", "--provider", "cupy_flash-mma", "--seqlen-q", "64")

    assert result.returncode == 1
    assert "cupy_flash-mma: " in result.stdout
    assert result.stderr == ""


def test_a_forced_tile_is_clipped_to_the_sequences(tmp_path: Path) -> None:
    huge = ("--br", "100000", "--bc", "100000", "--kv-heads", "1")
    (ours,) = record(tmp_path, *RAGGED, "--provider", "cupy_flash-cpu", *huge)["rows"]

    assert ours["tile"] == {"Br": 2 * 113, "Bc": 203}
    assert ours["check"] == "passed"


def test_a_forced_tile_that_no_worker_has_room_for_is_refused() -> None:
    case = ("--provider", "cupy_flash-cpu", "--seqlen-q", "8192", "--heads", "1")
    result = bench(*case, "--br", "8192", "--bc", "8192", code=2)

    assert "MiB of scratch per worker, more than 60.0 MiB; choose a smaller" in result.stderr


@pytest.fixture
def overflowing() -> dict[str, np.ndarray]:
    """Finite float32 inputs; the scores of the first of two heads overflow."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 37, 2, 8)).astype(np.float32) for _ in "qkv")
    q[:, :, 0] *= np.float32(1e30)
    k[:, :, 0] *= np.float32(1e30)
    return {"q": q, "k": k, "v": v}


def test_rows_on_which_the_naive_formula_overflows_are_not_compared(
    overflowing: dict[str, np.ndarray], tmp_path: Path
) -> None:
    rows = record(tmp_path, *commands.input_options(tmp_path, **overflowing), *ON_CPU)["rows"]

    assert {row["check"] for row in rows} == {"passed"}
    assert {row["checked_rows"] for row in rows} == {37}


def test_where_the_naive_formula_overflows_throughout_that_is_said_instead_of_an_error(
    overflowing: dict[str, np.ndarray], tmp_path: Path
) -> None:
    first = {name: array[:, :, :1] for name, array in overflowing.items()}
    result = bench(*commands.input_options(tmp_path, **first), *ON_CPU)

    assert "not compared: 37 query rows, on which the naive formula" in result.stdout
    assert "error: " not in result.stdout
    assert not re.search(r"\d!", result.stdout)


def test_a_q_offset_applies_to_the_causal_half_of_a_sweep_over_a_file(
    overflowing: dict[str, np.ndarray], tmp_path: Path
) -> None:
    both = ("--causal", "no,yes", "--q-offset", "3", "--provider", "cupy_flash-cpu")
    options = commands.input_options(tmp_path, **overflowing)
    rows = record(tmp_path, *options, *both, "--repeats", "3")["rows"]

    assert [(row["causal"], row["q_offset"]) for row in rows] == [(False, 0), (True, 3)]


def test_real_inputs_are_read_from_an_npz_file(tmp_path: Path) -> None:
    options = commands.input_options(tmp_path, **commands.float16_inputs())
    ours, _ = record(tmp_path, *options, *ON_CPU, "--causal")["rows"]

    assert (ours["dtype"], ours["seqlen_q"], ours["seqlen_k"]) == ("float16", 37, 53)
    assert (ours["heads_q"], ours["heads_kv"]) == (6, 3)
    assert ours["check"] == "passed"


def test_bfloat16_survives_an_npz_file(tmp_path: Path) -> None:
    array = np.ones((1, 5, 1, 8), ml_dtypes.bfloat16)
    options = commands.input_options(tmp_path, q=array, k=array, v=array)
    ours, _ = record(tmp_path, *options, *ON_CPU)["rows"]

    assert ours["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"q": np.ones((1, 5, 1, 8))}, "holds q; expected arrays q, k and v"),
        (dict.fromkeys("qkv", np.ones((5, 8))), "expected a float array of shape (batch, seqlen"),
        (dict.fromkeys("qkv", np.ones((1, 5, 1, 8), int)), "is int64 of shape"),
        (
            {**dict.fromkeys("qk", np.ones((1, 5, 1, 8))), "v": np.ones((1, 6, 1, 8))},
            "(1, 5, 1, 8) and (1, 6, 1, 8); expected one batch, q and k of one head_dim, k and v",
        ),
    ],
)
def test_an_npz_file_without_usable_arrays_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], says: str
) -> None:
    assert says in commands.refusal("bench", *commands.input_options(tmp_path, **arrays))


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
    wrong_size = "Expected query, key and value to have head_dim <= 256."
    warned = [
        "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:1.)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at x)",
        "Flash attention kernel not used because: (Triggered internally at x)",
        f"{wrong_size} (Triggered internally at x)",
    ]

    assert torch_providers.refusal(warned, "No available kernel.") == wrong_size
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


@pytest.mark.slow
def test_with_no_gpu_the_cpu_backend_is_timed_against_numpy_and_that_is_said() -> None:
    result = without_gpu("bench", "--seqlen-q", "64")

    assert result.returncode == 0, result.stderr
    assert "No GPU to use" in result.stdout
    assert "cupy_flash-cpu" in result.stdout
    assert "numpy-naive" in result.stdout


def test_a_kernel_of_ours_that_fails_costs_its_cell_alone_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise CompileError("it does not compile\nCompiler log:\nline 1")

    monkeypatch.setattr("cupy_flash.cli.cases.inputs.flash_attention", broken)
    path = tmp_path / "rows.json"
    result = bench(*RAGGED, *ON_CPU, "--output", str(path), code=1)
    ours, naive = commands.written(path)["rows"]

    assert "Compiler log" in result.stderr
    assert ours["reason"] == "it does not compile"
    assert naive["median_ms"] > 0


def test_a_record_says_its_version_and_how_its_times_were_taken(tmp_path: Path) -> None:
    data = record(tmp_path, *RAGGED, *ON_CPU, "--warmup", "2")
    head = data["metadata"]

    assert head["record_version"] == 1
    assert head["timing"] == (
        "wall time of calls on cores at rest, after 2 untimed calls, medians and quartiles of up "
        f"to 3, providers alternating, each on at most {environment.available_cpus()} threads"
    )
    assert head["gpu_state"] is None
    assert {row["timed_by"] for row in data["rows"]} == {"clock"}
    assert {row["call_ms"] for row in data["rows"]} == {None}


def test_what_was_not_timed_was_timed_by_nothing(tmp_path: Path) -> None:
    (row,) = record(tmp_path, *RAGGED, "--provider", "torch-flash", code=1)["rows"]

    assert row["reason"]
    assert row["timed_by"] is row["call_ms"] is row["peak_bytes"] is None


def test_how_a_gpu_is_timed_names_warm_up_l2_and_what_the_middle_is() -> None:
    settings = Settings(3, 20, 20.0, 0, check=True, host_time=False)
    text = timing_text(settings, on_gpu=True)

    assert "CUDA graph" in text
    assert "after 3 untimed calls, medians and quartiles of up to 20" in text
    assert "the L2 overwritten before each" in text
    assert "call_ms is the median wall time of a call from an idle GPU to its end" in text


def test_a_throttled_and_busy_gpu_is_flagged_below_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextlib.contextmanager
    def watched(bus_id: str | None) -> Iterator[GpuWatch]:
        watch = GpuWatch()
        yield watch
        # The real watch also sets its state only at the end.
        clock = {"sm_clock_mhz": (1410, 1200, 1980), "max_sm_clock_mhz": 1980}
        slow = {"thermal slowdown": 0.5}
        watch.state = GpuState(samples=10, **clock, held_down=slow, busy_before=88)

    monkeypatch.setattr("cupy_flash.cli.bench.bench.watched", watched)
    lines = bench(*RAGGED, *ON_CPU).stdout.splitlines()
    warnings = [line for line in lines if line.startswith("! ")]

    assert warnings == [
        "! thermal slowdown in 50% of the run: times are of a throttled GPU",
        "! the GPU was in use: 88% busy before the run, 0 other processes",
    ]
    assert "SM clock 1410 MHz (1200 to 1980) of at most 1980" in lines


def test_ratios_taken_on_a_busy_cpu_are_qualified_where_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuWatch, "state", CpuState(97.0))
    path = tmp_path / "rows.json"
    monkeypatch.setenv("COLUMNS", "200")
    lines = bench(*TWO, *ON_CPU, "--output", str(path)).stdout.splitlines()
    head = commands.written(path)["metadata"]
    (summary,) = [line for line in lines if " times as fast as " in line]

    assert summary.endswith(" (others used 97% of the CPU; ratios are not reliable)")
    assert "! others used 97% of the CPU during the run; ratios are not reliable" in lines
    assert head["cpu_state"] == {"others": 97.0}
    assert head["unreliable"] == "others used 97% of the CPU"


def test_ratios_taken_on_a_cpu_at_rest_are_not_qualified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuWatch, "state", CpuState(3.0))
    path = tmp_path / "rows.json"
    result = bench(*TWO, *ON_CPU, "--output", str(path))

    assert "not reliable" not in result.output
    assert commands.written(path)["metadata"]["unreliable"] is None


@pytest.mark.parametrize(
    ("seqlens", "tiles"),
    [("113,203", {"on s113: cpu 113x113", "on s203: cpu 203x203"}), ("113", {": cpu 113x113"})],
)
def test_a_line_on_a_tile_says_for_which_case_it_is(seqlens: str, tiles: set[str]) -> None:
    shape = ("--seqlen-q", seqlens, "--heads", "1", "--head-dim", "24")
    lines = bench(*shape, *ON_CPU).stdout.splitlines()
    found = [re.match("cupy_flash-cpu(.*: cpu .*)", line) for line in lines]

    assert {line[1].strip() for line in found if line} == tiles


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_the_formula_is_timed_with_as_many_threads_as_the_cpu_backend(
    kind: str, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "available_cpus", lambda: 2)
    lengths = (8, 24) if kind == "varlen" else None
    direction = "backward" if backward else "forward"
    case = Case("float32", 2, 24, 24, 1, 1, 8, 8, kind=kind, lengths=lengths, direction=direction)

    def threads() -> set[int]:
        return {x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"}

    with threadpool_limits(1, user_api="blas"):
        prepared = provider("numpy-naive").prepare(random_inputs(case, 0, on_gpu=False))
        with prepared.timed.scope():
            assert threads() == {2}
        assert threads() == {1}


def test_a_case_without_inputs_is_skipped_with_the_reason_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(case: Case, seed: int, *, on_gpu: bool) -> object:
        if case.seqlen_q > 200:
            raise MemoryError("Unable to allocate 3 GiB")
        return random_inputs(case, seed, on_gpu=on_gpu)

    monkeypatch.setattr("cupy_flash.cli.bench.bench.random_inputs", some)
    shape = ("--seqlen-q", "239,113", "--batch", "1", "--heads", "2", "--head-dim", "24")
    rows = record(tmp_path, *shape, *ON_CPU, "--dtype", "float32")["rows"]

    reason = "no inputs: Unable to allocate 3 GiB"
    assert [row["reason"] for row in rows] == [reason, reason, None, None]


def test_a_gpu_that_is_of_no_use_any_more_costs_the_rows_that_follow_and_not_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = "cudaErrorIllegalAddress: an illegal memory access"
    useless = False

    def free_bytes(*, on_gpu: bool) -> int:
        if useless:
            raise RuntimeError(lost)
        return 1 << 40

    def release_memory() -> None:
        nonlocal useless
        useless = True
        raise RuntimeError(lost)

    monkeypatch.setattr("cupy_flash.cli.providers.providers.free_bytes", free_bytes)
    monkeypatch.setattr("cupy_flash.cli.providers.providers.release_memory", release_memory)
    shape = ("--seqlen-q", "113,239", "--batch", "1", "--heads", "2", "--head-dim", "24")
    rows = record(tmp_path, *shape, *ON_CPU, "--dtype", "float32")["rows"]

    assert [row["reason"] for row in rows] == [None] * 2 + [f"no inputs: {lost}"] * 2


def test_a_torch_that_cannot_be_imported_is_left_out_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "libcublas.so.13: cannot open shared object file"

    def broken() -> None:
        raise OSError(reason)

    monkeypatch.setattr(torch_providers, "gpu_unavailable", lambda: None)
    monkeypatch.setattr(torch_providers, "torch_module", broken)

    assert torch_providers.why_no_torch.__wrapped__() == f"torch cannot be imported: {reason}"


def test_into_a_file_each_case_has_a_line_of_progress_with_the_fastest() -> None:
    result = bench(*THREE, "--provider", "cupy_flash-cpu", "--repeats", "3")
    lines = [re.sub(r"[\d.]+ ms$", "# ms", line) for line in result.stderr.splitlines()]

    assert lines == [
        "[1/3] s113: cupy_flash-cpu # ms",
        "[2/3] s239: cupy_flash-cpu # ms",
        "[3/3] s307: cupy_flash-cpu # ms",
    ]


def test_the_progress_of_a_case_that_was_not_timed_says_so() -> None:
    result = bench(*THREE, "--provider", "cupy_flash-cpu", "--cell-seconds", "1e-9", code=1)

    assert result.stderr.splitlines()[-1] == "[3/3] s307: not timed"


def test_that_there_is_no_gpu_is_said_in_lines_that_fit_the_terminal() -> None:
    lines = without_gpu("bench", "--seqlen-q", "64").stdout.splitlines()
    said = lines[: lines.index("Timing the CPU backend.")]

    assert said[0].startswith("No GPU to use: ")
    assert max(map(len, said)) <= 80


def reason_lines(reasons: Sequence[str | None], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines printed below a table of cases that numpy-naive refused for `reasons`."""
    seqlens = (113, 239, 307, 512, 799)[: len(reasons)]
    cases = [Case("float32", 1, seqlen, seqlen, 2, 2, 24, 24) for seqlen in seqlens]
    table = [
        [Cell(provider("numpy-naive"), case, reason=reason)]
        for case, reason in zip(cases, reasons, strict=True)
    ]
    rows = [[record_row(cell, None, "a CPU", {}) for cell in cells] for cells in table]
    settings = Settings(1, 7, 20.0, 0, check=True, host_time=False)
    print_cells(table, rows, [], "a CPU", ["numpy-naive"], settings)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if re.match("numpy-naive(:|,| on )", line)]


@pytest.mark.parametrize(
    ("reasons", "lines"),
    [
        (["takes 2 s"], ["numpy-naive: takes 2 s"]),
        ([None, "takes 2 s"], ["numpy-naive on s239: takes 2 s"]),
        (["takes 12 s", None, "takes 9.5 s"], ["numpy-naive on s113, s307: takes 9.5 to 12 s"]),
        (
            [None, "takes 2 s", "takes 3 s", "takes 4 s", "takes 5 s"],
            ["numpy-naive on s239, s307, s512, and 1 more: takes 2 to 5 s"],
        ),
        (
            ["takes 2 s", "is missing", "takes 2 s"],
            ["numpy-naive on s113, s307: takes 2 s", "numpy-naive on s239: is missing"],
        ),
        (["is missing"] * 3, ["numpy-naive, all 3 cases: is missing"]),
        (
            ["q_offset is -3, not 0", "q_offset is -12, not 0"],
            ["numpy-naive, all 2 cases: q_offset is -12 to -3, not 0"],
        ),
        (
            ["tile 64x128 on sm_90 of CUDA 13.0.1", "tile 64x256 on sm_90 of CUDA 13.0.1"],
            [
                "numpy-naive on s113: tile 64x128 on sm_90 of CUDA 13.0.1",
                "numpy-naive on s239: tile 64x256 on sm_90 of CUDA 13.0.1",
            ],
        ),
    ],
)
def test_a_reason_names_its_cases_and_joins_what_differs_in_numbers(
    reasons: list[str | None], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason_lines(reasons, capsys) == lines


LONG_NAMES = ("cupy_flash-hopper", "cupy_flash-mma", "torch-efficient", "cupy-library")


GpuTable = Callable[..., list[str]]


@pytest.fixture
def gpu_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> GpuTable:
    """Function that returns the lines of a table of GPU times, all below a millisecond."""

    def table_of(width: int, *, timed_by: str = "graph", **shown: bool) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        settings = Settings(3, 20, 20.0, 0, check=True, **{"host_time": False, **shown})
        table = []
        for seqlen, causal in ((1024, False), (16384, True)):
            case = Case("bfloat16", 4, seqlen, seqlen, 16, 16, 128, 128, causal)
            cells = []
            for index, name in enumerate(LONG_NAMES):
                ms = 0.0625 * 2**index
                cell = Cell(provider(name), case, max_error=1e-3, passed=True)
                cell.time = Spread(ms, 0.98 * ms, 1.02 * ms, 20)
                cell.timed_by = "events" if index == 3 else timed_by
                cell.call = Spread(ms + 0.0125, ms, ms + 0.02, 20)
                cells.append(cell)
            set_speedups(cells, ["cupy-library"])
            table.append(cells)
        rows = [[record_row(cell, None, "a GPU", {}) for cell in cells] for cells in table]
        print_cells(table, rows, [], "a GPU", ["cupy-library"], settings)
        return capsys.readouterr().out.splitlines()

    return table_of


def test_in_80_columns_the_longest_names_leave_room_for_gpu_times_alone(
    gpu_table: GpuTable,
) -> None:
    lines = gpu_table(80)

    assert max(map(len, lines)) <= 80
    assert not any("call" in line.split() for line in lines)


def test_a_wide_table_has_call_times_beside_gpu_times(gpu_table: GpuTable) -> None:
    lines = gpu_table(120, memory=True, host_time=True)
    heading = next(line for line in lines if "provider" in line)
    first = next(line for line in lines if "cupy_flash-hopper" in line)

    assert max(map(len, lines)) <= 120
    assert heading.split()[2:5] == ["ms", "+-%", "call"]
    assert "0.0625" in first
    assert "0.0750" in first
    assert "call: wall time in ms of a call from an idle GPU to its end, L2 warm." in lines
    assert "host us: host time of a call in us, until the call returns to Python." in lines


def test_host_times_bring_call_times_into_a_narrow_table_too(gpu_table: GpuTable) -> None:
    assert any("call" in line.split() for line in gpu_table(80, host_time=True))


@pytest.mark.parametrize(
    ("timed_by", "says"),
    [
        ("graph", "ms: GPU time of CUDA graph replays (of calls for cupy-library), the L2"),
        ("events", "ms: GPU time of calls, the L2 overwritten before each."),
    ],
)
def test_whose_calls_were_timed_instead_of_a_graph_is_said(
    gpu_table: GpuTable, timed_by: str, says: str
) -> None:
    assert says in " ".join(gpu_table(120, timed_by=timed_by))


# ---- On a fake GPU


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """PCI bus ids of the GPUs that were watched."""
    found: list[str | None] = []

    @contextlib.contextmanager
    def watch(bus_id: str | None) -> Iterator[GpuWatch]:
        found.append(bus_id)
        yield GpuWatch()

    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(bench_module, "watched", watch)
    monkeypatch.setattr(bench_module, "copy_rate", lambda: 3.0)
    return found


@pytest.mark.parametrize(
    ("arguments", "providers"),
    [
        (RAGGED, ["cupy_flash", "cupy-library"]),
        (("--cache", *RAGGED, "--page-size", "0,16"), ["cupy_flash"]),
        (("--lengths", "113,7", *RAGGED[6:]), ["cupy_flash", "cupy_flash-uniform"]),
    ],
)
def test_on_a_gpu_the_library_is_timed_beside_who_serves_such_cases_there(
    arguments: tuple[str, ...], providers: list[str], tmp_path: Path, watched: list[str | None]
) -> None:
    data = record(tmp_path, *arguments, "--repeats", "3", "--host-time")
    head, rows = data["metadata"], data["rows"]

    assert [row["provider"] for row in rows][: len(providers)] == providers
    assert {row["provider"] for row in rows} == set(providers)
    assert {(row["check"], row["timed_by"]) for row in rows} == {("passed", "events")}
    assert all(row["call_ms"] > 0 and row["host_us"] > 0 for row in rows)
    assert head["device"] == fake_cupy.device().name
    assert len(watched) == 1
    assert watched[0] == sys.modules["cupy"].cuda.Device().pci_bus_id
    assert (head["gpu_state"] is None, head["cpu_state"]) == (False, None)
    # The rate at which a cache is read is compared with this copy rate.
    assert head.get("copy_tb_per_s") == (3.0 if "--cache" in arguments else None)


def test_on_a_gpu_a_row_has_the_plan_of_that_gpu_and_the_time_of_its_events(
    tmp_path: Path, watched: list[str | None]
) -> None:
    ours, library = record(tmp_path, *RAGGED, "--repeats", "3")["rows"]
    case = Case("float32", 1, 113, 203, 2, 2, 24, 24)
    plan = make_plan(case.problem(), fake_cupy.device())

    assert (ours["family"], ours["tile"]) == (plan.family, vars(plan.tile))
    assert library["tile"] is None
    assert {row["median_ms"] for row in (ours, library)} == {fake_cupy.MILLISECONDS}


@pytest.mark.parametrize(
    ("dtypes", "beside"),
    [
        ("float16,bfloat16", ["torch-flash", "torch-cudnn"]),
        ("float64", ["torch-efficient", "torch-math"]),
        ("float16,float32", ["torch-flash", "torch-cudnn", "torch-efficient", "torch-math"]),
    ],
)
def test_torch_stands_beside_the_library_by_what_it_has_for_the_dtypes(
    dtypes: str,
    beside: list[str],
    tmp_path: Path,
    watched: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_providers, "why_no_torch", lambda: None)
    shape = ("--seqlen-q", "5", "--heads", "1", "--head-dim", "16", "--repeats", "3")
    rows = record(tmp_path, *shape, "--dtype", dtypes, "--skip-check")["rows"]

    names = ["cupy_flash", *beside, "cupy-library"]
    assert [row["provider"] for row in rows] == names * len(dtypes.split(","))


@pytest.mark.parametrize("given", [None, "torch-math", "torch-math,torch-cudnn"])
def test_speedups_of_a_preset_refer_to_its_own_baseline_or_to_the_one_that_is_given(
    given: str | None, tmp_path: Path, watched: list[str | None]
) -> None:
    asked = "torch-math,torch-cudnn"
    more = ("--baseline", given) if given else ()
    data = record(tmp_path, "--preset", "decode", "--provider", asked, *more, code=1)
    own = [name for name in asked.split(",") if name in presets.preset("decode").baseline]

    assert data["metadata"]["baseline"] == (given.split(",") if given else own)
    assert {row["reason"] for row in data["rows"]} == {"torch is not installed"}
