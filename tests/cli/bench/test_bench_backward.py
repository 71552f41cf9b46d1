"""`cupy-flash bench --backward`, and presets for gradients, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli import commands
from support.gpu import fake_cupy

from cupy_flash.cli.bench.table import timing_text
from cupy_flash.cli.cases import inputs as inputs_module
from cupy_flash.cli.cases import presets
from cupy_flash.cli.cases.cases import Case, describe
from cupy_flash.cli.measure.runner import Settings
from cupy_flash.cli.providers.providers import provider
from cupy_flash.cli.records import environment, records
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch

RAGGED = (
    *("--backward", "--seqlen-q", "113", "--seqlen-k", "203", "--batch", "2", "--heads", "4"),
    *("--kv-heads", "2", "--head-dim", "24", "--head-dim-v", "40"),
)
ON_CPU = ("--provider", "cupy_flash-cpu,numpy-naive", "--repeats", "3")
OF_PRESETS = {name: name.removesuffix("-backward") for name in presets.NAMES if "backward" in name}
# The forward cases of this preset are in the preset "mods".
OF_PRESETS.pop("documents-backward")


def recorded(tmp_path: Path, *arguments: str) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "rows.json"
    return path, commands.record_of(path, "bench", *arguments)


@pytest.mark.slow
def test_rows_say_that_they_are_of_gradients_and_count_five_products(tmp_path: Path) -> None:
    _, data = recorded(tmp_path, *RAGGED, *ON_CPU)
    flops = 2 * 2 * 4 * 113 * 203 * (3 * 24 + 2 * 40)

    assert [row["provider"] for row in data["rows"]] == ["cupy_flash-cpu", "numpy-naive"]
    for row in data["rows"]:
        assert row["direction"] == "backward"
        assert row["tflops"] == pytest.approx(flops / row["median_ms"] / 1e9)
        assert row["check"] == "passed"
        assert 0 <= row["max_error"] <= row["error_bound"] == 1
        assert row["checked_rows"] == 2 * 4 * 113
    assert data["rows"][0]["kernel_digest"] == environment.digest_of("cpu", "backward")
    assert "(3 * head_dim + 2 * head_dim_v)" in data["metadata"]["flop_convention"]
    assert "the output and its log-sum-exp are computed beforehand" in data["metadata"]["timing"]


@pytest.mark.parametrize(
    "options",
    [
        ("--causal", "--layout", "bshd,bhsd"),
        ("--causal", "--q-offset", "-40,17"),
        ("--dtype", "fp16,bf16,fp64", "--softmax-scale", "0.3"),
        ("--window", "40:0,3:90"),
        ("--softcap", "2.5", "--sinks"),
        ("--alibi", "--causal"),
        ("--bias", "heads,shared,batch"),
        ("--mask", "heads,shared"),
        ("--mod", "documents,t5,dilated,prefix,softcap"),
    ],
    ids=" ".join,
)
def test_every_option_of_a_case_is_checked(tmp_path: Path, options: tuple[str, ...]) -> None:
    alone = ("--provider", "cupy_flash-cpu", "--repeats", "1")
    _, data = recorded(tmp_path, *RAGGED, *alone, *options)

    assert {row["check"] for row in data["rows"]} == {"passed"}
    assert {row["checked_rows"] for row in data["rows"]} == {2 * 4 * 113}


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--causal", "--sinks"), ("--bias", "heads")], ids=" ".join)
def test_packed_sequences_stand_beside_equal_ones(tmp_path: Path, more: tuple[str, ...]) -> None:
    _, data = recorded(
        *(tmp_path, "--backward", "--lengths", "113,7,0,203", "--heads", "2", "--head-dim", "24"),
        *("--provider", "cupy_flash-cpu,cupy_flash-uniform,numpy-naive", "--repeats", "3", *more),
    )
    ours, uniform, naive = data["rows"]

    assert {row["check"] for row in data["rows"]} == {"passed"}
    assert ours["checked_rows"] == naive["checked_rows"] == 2 * (113 + 7 + 203)
    assert "flash_attention of" in uniform["note"]


@pytest.mark.slow
def test_the_table_says_what_is_timed_and_what_an_error_is() -> None:
    out = " ".join(commands.run("bench", *RAGGED, *ON_CPU).stdout.split())

    assert "fp32 backward b2" in out
    assert "FLOPs of gradients = 2 * batch" in out
    assert "The output and its log-sum-exp are computed beforehand, untimed." in out
    assert "of dq, dk or dv, relative to the largest allowed one, over all query rows" in out
    assert "torch" not in out


def test_of_a_gpu_it_is_said_how_torch_is_timed() -> None:
    settings = Settings(3, 20, 20.0, 0, check=True, host_time=False)

    assert "autograd.grad" in timing_text(settings, on_gpu=True, backward=True)
    assert "autograd.grad" not in timing_text(settings, on_gpu=True)


def test_forward_is_computed_once_whatever_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = inputs_module.flash_attention

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return original(*arguments, **options)

    monkeypatch.setattr(inputs_module, "flash_attention", counted)
    recorded(tmp_path, *RAGGED, *ON_CPU)

    assert [options["return_lse"] for options in calls] == [True]


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_each_gradient_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original: Callable[..., Any] = inputs_module.flash_attention_backward

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = dict(zip("qkv", original(*arguments, **options), strict=True))
        found[name][1, 112, 1, 23] += 0.01
        return tuple(found.values())

    monkeypatch.setattr(inputs_module, "flash_attention_backward", wrong)
    alone = ("--provider", "cupy_flash-cpu", "--repeats", "3")
    result = commands.run("bench", *RAGGED, *alone, code=1)

    assert "!: over the bound" in result.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--cache",), "--cache is for forward calls; leave out --backward"),
        (("--lengths", "7,3", "--num-splits", "2"), "--num-splits is for forward calls"),
        (("--preset", "fa3-grid"), "--backward cannot be combined with --preset fa3-grid"),
    ],
)
def test_what_has_no_gradients_is_refused_in_one_line(options: tuple[str, ...], says: str) -> None:
    assert says in commands.refusal("bench", "--backward", *options)


def test_a_family_without_gradients_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)
    case = Case("bfloat16", 1, 64, 64, 2, 2, 64, 64, direction="backward")

    assert "unknown family 'decode'" in str(provider("cupy_flash-decode").why_not(case))
    assert provider("cupy_flash-simt").why_not(case) is None


def test_real_inputs_have_gradients_too(tmp_path: Path) -> None:
    options = commands.input_options(tmp_path, **commands.float16_inputs())
    _, data = recorded(tmp_path, "--backward", *options, *ON_CPU, "--causal")

    assert {row["check"] for row in data["rows"]} == {"passed"}


def test_the_memory_of_a_call_is_that_of_its_gradients() -> None:
    forward = Case("float32", 2, 113, 203, 4, 2, 24, 40)
    backward = Case("float32", 2, 113, 203, 4, 2, 24, 40, direction="backward")
    of_q, of_kv, of_out = 2 * 113 * 4 * 24 * 4, 2 * 203 * 2 * (24 + 40) * 4, 2 * 113 * 4 * 40 * 4

    assert (forward.result_bytes, backward.result_bytes) == (of_out, of_q + of_kv)
    assert forward.array_bytes == of_q + of_kv + of_out
    assert backward.array_bytes == 2 * forward.array_bytes + 2 * 113 * 4 * 4


# ---- Records


@pytest.mark.slow
def test_a_record_is_read_and_its_cases_are_not_those_of_the_output(tmp_path: Path) -> None:
    path, data = recorded(tmp_path, *RAGGED, *ON_CPU)
    cases = [records.case_of(row) for row in records.read_bench(path).rows]
    plain = records.case_of({**data["rows"][0], "direction": None})

    assert {case.direction for case in cases} == {"backward"}
    assert plain.direction == "forward"
    assert describe([plain, cases[0]])[1] == ["forward", "backward"]
    assert records.kernels(records.read(path)) == {
        ("cpu", "backward", environment.digest_of("cpu", "backward"))
    }
    assert records.changed_kernels(records.read(path)) == []


def test_a_record_from_before_there_were_gradients_is_of_the_output(tmp_path: Path) -> None:
    path, data = recorded(tmp_path, *RAGGED[1:], *ON_CPU)
    for row in data["rows"]:
        assert row.pop("direction") is None
    path.write_text(json.dumps(data), encoding="utf-8")
    rows = records.read_bench(path).rows

    assert {records.case_of(row).direction for row in rows} == {"forward"}
    assert ("cpu", "forward", environment.digest_of("cpu")) in records.kernels(records.read(path))


@pytest.mark.slow
def test_a_direction_that_is_none_is_a_fault_of_a_record(tmp_path: Path) -> None:
    _, data = recorded(tmp_path, *RAGGED, *ON_CPU)
    data["rows"][0]["direction"] = "sideways"

    assert "direction 'sideways'" in str(records.bench_fault(data["rows"]))


def test_other_kernel_sources_are_told_by_direction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = recorded(tmp_path, *RAGGED, *ON_CPU)
    monkeypatch.setattr(environment, "digest_of", lambda family, direction: "0" * 16)

    assert records.changed_kernels(records.read(path)) == ["cpu backward"]


# ---- Presets


@pytest.mark.parametrize(("name", "forward"), OF_PRESETS.items())
def test_a_preset_of_gradients_has_the_cases_of_the_outputs(name: str, forward: str) -> None:
    cases = presets.preset(name).cases
    device = device_for_arch("sm_90")

    assert {case.direction for case in cases} == {"backward"}
    assert len(cases) == sum(not case.is_cached for case in presets.preset(forward).cases)
    assert {make_plan(case.problem(), device).problem.direction for case in cases} == {"backward"}


def test_the_grid_of_gradients_is_that_of_the_paper() -> None:
    grid = presets.preset("fa3-grid-backward")

    assert len(grid.cases) == 36
    assert {case.batch * case.seqlen_q for case in grid.cases} == {16384}
    assert {case.heads_q * case.head_dim for case in grid.cases} == {2048}
    assert set(grid.providers) == {"cupy_flash", "torch-cudnn", "torch-flash"}


def test_gradients_of_equal_head_dims_count_two_and_a_half_times_the_output() -> None:
    cases = (presets.preset(name).cases for name in ("fa3-grid-backward", "fa3-grid"))
    for mine, forward in zip(*cases, strict=True):
        assert mine.flops() == 2.5 * forward.flops()


# ---- On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        ("--causal", "no,yes", "--kv-heads", "1,2"),
        ("--window", "40:0", "--sinks", "--dtype", "fp16,fp32"),
        ("--lengths", "113,7,203"),
    ],
    ids=" ".join,
)
def test_gradients_are_timed_in_graphs_and_checked(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    shape = () if "--lengths" in options else ("--batch", "2", "--seqlen-q", "203")
    _, data = recorded(
        *(tmp_path, "--backward", *shape, "--heads", "2", "--head-dim", "64", "--repeats", "3"),
        *("--provider", "cupy_flash,cupy_flash-simt,torch-flash,torch-cudnn", *options),
    )
    ours = [row for row in data["rows"] if row["provider"].startswith("cupy_flash")]
    torchs = [row for row in data["rows"] if not row["provider"].startswith("cupy_flash")]

    assert {row["check"] for row in ours} == {"passed"}
    assert {row["timed_by"] for row in ours} == {"graph"}
    assert all(row["timed_by"] == "graph" for row in torchs if row["reason"] is None)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", [(), ("--backward",)], ids=["forward", "backward"])
def test_calls_of_tensors_are_timed_beside_torchs_own(
    tmp_path: Path, direction: tuple[str, ...]
) -> None:
    pytest.importorskip("torch")
    _, data = recorded(
        *(tmp_path, *direction, "--batch", "1", "--seqlen-q", "113", "--heads", "2"),
        *("--head-dim", "64", "--repeats", "3", "--causal", "no,yes", "--host-time"),
        *("--provider", "cupy_flash-torch,torch-flash"),
    )
    ours, torchs = (data["rows"][start::2] for start in range(2))

    assert [row["check"] for row in ours] == ["passed"] * 2
    assert all(row["host_us"] > 0 for row in (*ours, *torchs))
