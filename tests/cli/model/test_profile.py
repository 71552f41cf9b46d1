"""`cupy-flash profile` with counters that a fake Nsight Compute prints."""

from __future__ import annotations

import stat
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from support.cli.commands import written

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.mods import CaseMods
from cupy_flash.cli.cases.visible import VisibleKeys
from cupy_flash.cli.model import profile as profile_module
from cupy_flash.cli.model import profiler
from cupy_flash.cli.model.profile import METRICS, amount, compare, model_of, profile
from cupy_flash.cli.model.profiler import Call, Kernel, find_ncu, parse_raw_page
from cupy_flash.cli.providers import providers
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.device import device_for_arch

H100 = device_for_arch("sm_90")
BYTES = 4096 * 32 * 128 * 2
FLOPS = 4 * 32 * 4096 * 4096 * 128
PIPE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
COUNTERS = {
    "dram__bytes_read.sum": 3.02 * BYTES,
    "dram__bytes_write.sum": 0.25 * BYTES,
    "gpu__time_duration.sum": 500_000,
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": 3000,
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": 1000,
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": 1_000_000,
    "launch__occupancy_limit_blocks": 32,
    "launch__occupancy_limit_registers": 1,
    "launch__occupancy_limit_shared_mem": 2,
    "launch__occupancy_limit_warps": 5,
    "launch__registers_per_thread": 168,
    "lts__t_sectors_srcunit_tex_op_read.sum": 34_000_000,
    "sm__ops_path_tensor_src_bf16_dst_fp32.sum": FLOPS,
    PIPE: 71.25,
    "sm__warps_active.avg.pct_of_peak_sustained_active": 18.5,
    "smsp__inst_executed_pipe_xu.sum": 18_000_000,
    "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum": 600_000_000,
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": 600_000_000,
    "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum": 600_000_000,
}
LISTED = {metric.partition(".")[0] for metric in METRICS}
LAUNCH = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream")
DENIED = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
    "Performance Counters on the target device 0."
)


def csv_line(fields: Sequence[str]) -> str:
    return ",".join(f'"{field}"' for field in fields)


def raw_page(kernels: Sequence[tuple[str, Mapping[str, float | str]]]) -> str:
    """Return what ncu prints: its own lines, column headings, units, and a line per kernel."""
    names = list(kernels[0][1])
    lines = [
        "==PROF== Connected to process 4242 (python3)",
        '==PROF== Profiling "attention" - 0: 0%....50%....100% - 12 passes',
        "==PROF== Disconnected from process 4242",
        csv_line([*LAUNCH, *names]),
        csv_line(["", "", "", "", "", "", "", *("" for _ in names)]),
    ]
    for index, (kernel, counters) in enumerate(kernels):
        values = [v if isinstance(v, str) else f"{v:,}" for v in counters.values()]
        own = (str(index), "4242", "python3", "127.0.0.1", kernel, "1", "7")
        lines.append(csv_line([*own, *values]))
    return "\n".join(lines) + "\n"


def install_ncu(
    folder: Path, output: str, *, listed: Collection[str] = LISTED, errors: str = "", code: int = 0
) -> Path:
    """Install a fake `ncu` that lists metrics, prints `output`, and saves its arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    listing = "".join(f"{name:<80} Counter  inst  what it counts\n" for name in sorted(listed))
    script = folder / "ncu"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib, sys\n"
        "if '--query-metrics' in sys.argv:\n"
        f"    sys.stdout.write({listing!r})\n"
        "    sys.exit(0)\n"
        f"pathlib.Path({str(folder / 'arguments.json')!r}).write_text(json.dumps(sys.argv[1:]))\n"
        f"sys.stdout.write({output!r})\n"
        f"sys.stderr.write({errors!r})\n"
        f"sys.exit({code})\n",
        encoding="utf-8",
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folder that is the only entry of PATH; profilers elsewhere are hidden."""
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(profiler, "PLACES", ())
    return folder


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, nothing_installed: Path) -> Path:
    """Make an H100 the current GPU, and return the folder that is the only entry of PATH."""
    monkeypatch.setattr(profile_module, "gpu_unavailable", lambda: None)
    for module in (providers, profile_module):
        monkeypatch.setattr(module, "current_device", lambda: H100)
    return nothing_installed


@pytest.fixture
def ncu(gpu: Path) -> Path:
    """Folder with a fake `ncu` that prints `COUNTERS` of one kernel."""
    return install_ncu(gpu, raw_page([("attention", COUNTERS)])).parent


def run(*arguments: str, code: int = 0) -> str:
    """Return what `profile` prints; fail unless its exit code is `code`."""
    result = CliRunner().invoke(profile, arguments, env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result.output


def case(**changes: Any) -> Case:
    sizes = {"seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 32, "heads_kv": 32}
    fields = {"dtype": "bfloat16", "batch": 1, **sizes, "head_dim": 128, "head_dim_v": 128}
    return Case(**fields | changes)


def plan_of(family: str | None = None, **changes: Any) -> Plan:
    return make_plan(case(**changes).problem(), H100, family=family)


def rows_of(kernels: Sequence[Kernel], plan: Plan) -> dict[str, dict[str, Any]]:
    return {row["quantity"]: row for row in compare(kernels, plan, H100)}


@pytest.mark.usefixtures("ncu")
def test_measured_figures_stand_beside_the_models() -> None:
    output = run()

    lines = {line.split("  ")[0].strip(): line.split() for line in output.splitlines()}
    assert lines["HBM read"][2:] == ["101.3", "MB", "100.7", "MB", "1.007"]
    assert lines["HBM written"][2:] == ["8.389", "MB", "33.55", "MB", "0.250"]
    assert lines["tensor-core FLOPs"][2:] == ["274.9", "G", "274.9", "G", "1.000"]
    assert lines["tensor pipe active"][3:5] == ["71.25", "%"]
    assert lines["shared-memory conflicts"][2:4] == ["0.40", "%"]
    assert lines["registers per thread"][3] == "168"
    assert "at most 1 on an SM by registers" in output
    assert "Caches were flushed before each kernel" in output


@pytest.mark.usefixtures("ncu")
def test_no_line_of_the_table_is_wider_than_80_columns() -> None:
    output = run("--dtype", "float32", "--causal")

    assert max(map(len, output.splitlines())) <= 80
    assert "\x1b" not in output


def test_the_child_is_told_the_whole_call_and_only_what_follows_start_is_profiled(
    ncu: Path,
) -> None:
    run(
        *("--seqlen-q", "113", "--seqlen-k", "203", "--heads", "6", "--kv-heads", "2"),
        *("--causal", "--q-offset", "7", "--family", "mma", "--tile", "Br=64", "--seed", "5"),
    )
    arguments = written(ncu / "arguments.json")
    start = arguments.index("--profile-from-start")
    interpreter, *child, call = arguments[-4:]
    told = case(seqlen_q=113, seqlen_k=203, heads_q=6, heads_kv=2, causal=True, q_offset=7)

    assert arguments[start + 1] == "off"
    assert (interpreter, child) == (sys.executable, ["-m", "cupy_flash.cli.model.profiler"])
    assert Call.from_json(call) == Call(told, family="mma", tile={"Br": 64}, seed=5)


def test_metrics_that_the_gpu_does_not_have_are_not_asked_for(gpu: Path) -> None:
    listed = ["dram__bytes_read", "gpu__time_duration"]
    install_ncu(gpu, raw_page([("attention", COUNTERS)]), listed=listed)
    run()
    arguments = written(gpu / "arguments.json")
    asked = arguments[arguments.index("--metrics") + 1].split(",")

    assert {m for m in asked if not m.startswith("launch__")} == {f"{name}.sum" for name in listed}
    # Launch metrics need no counters, so `ncu --query-metrics` does not list them.
    assert "launch__registers_per_thread" in asked


@pytest.mark.usefixtures("ncu")
def test_a_record_holds_the_rows_the_case_and_every_kernels_counters(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    run("--output", str(path))
    data = written(path)
    rows = {row["quantity"]: row for row in data["rows"]}
    assert rows["HBM read"]["model"] == 3 * BYTES
    assert rows["HBM read"]["ratio"] == pytest.approx(3.02 / 3)
    assert data["metadata"]["case"]["seqlen_q"] == 4096
    assert data["metadata"]["kernel_digest"]
    assert data["metadata"]["kernels"] == "attention"
    assert rows[PIPE] == {"quantity": PIPE, "kernel": "attention", "measured": 71.25}


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "gpu_unavailable", lambda: "the driver reports no GPU")

    said = "Error: there is no GPU to profile on: the driver reports no GPU\n"
    assert run(code=1) == said


@pytest.mark.usefixtures("gpu")
def test_without_ncu_one_line_says_what_to_install() -> None:
    output = run(code=1)

    assert len(output.splitlines()) == 1
    assert "install the package nsight-compute" in output


@pytest.mark.parametrize("stream", ["output", "errors"])
def test_without_permission_one_line_names_the_setting(gpu: Path, stream: str) -> None:
    texts = {"output": "", "errors": ""} | {stream: DENIED + "\n"}
    install_ncu(gpu, **texts, code=1)
    output = run(code=1)

    assert len(output.splitlines()) == 1
    assert "NVreg_RestrictProfilingToAdminUsers=0" in output


def test_an_error_of_the_profiler_is_its_first_line(gpu: Path) -> None:
    output = "==ERROR== Failed to find metric foo\n==ERROR== Failed to profile\n"
    install_ncu(gpu, output, code=1)
    first, *_ = run(code=1).splitlines()

    assert first.endswith("measured nothing: Failed to find metric foo")


def test_a_child_that_failed_is_quoted_without_its_traceback(gpu: Path) -> None:
    traceback = "Traceback (most recent call last):\n  File x\nMemoryError: out of memory\n"
    output = "==ERROR== The application returned an error code (1).\n"
    install_ncu(gpu, output, errors=f"{traceback}==PROF== x\n", code=1)

    said = f"Error: {gpu / 'ncu'} measured nothing: MemoryError: out of memory"
    assert run(code=1).splitlines() == [said]


def test_a_run_that_profiled_no_kernel_is_an_error(gpu: Path) -> None:
    install_ncu(gpu, "==PROF== Connected to process 1\n")

    assert "it saw no kernel" in run(code=1)


def test_an_ncu_that_cannot_be_executed_is_named(gpu: Path) -> None:
    script = install_ncu(gpu, "")
    script.write_text("#!/no/such/interpreter\n", encoding="utf-8")

    assert run(code=1).startswith(f"Error: {script} does not run: ")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--seqlen-q", "128,256"), "the options make 2 shapes; profile takes one"),
        (("--head-dim", "600"), "'600' is not a whole number from 1 to 576"),
        (("--tile", "Br:64"), "is not NAME=NUMBER"),
        (("--batch", "0"), "the output has no elements"),
        (("--seed", "-1"), "-1 is not in the range x>=0"),
        (("--output", "x.txt"), "expected one of .json, .csv, .md"),
    ],
)
@pytest.mark.parametrize("no_gpu", [None, "the driver reports no GPU"])
def test_wrong_options_are_usage_errors_with_a_gpu_and_without(
    arguments: tuple[str, ...], says: str, no_gpu: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_module, "gpu_unavailable", lambda: no_gpu)

    assert says in " ".join(run(*arguments, code=2).split())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--family", "naive", "--tile", "warps=4"), "unknown tile field 'warps'; expected one of"),
        (("--tile", "Br=0"), "Br is 0; expected a positive number"),
    ],
)
def test_a_tile_that_the_gpu_does_not_take_is_a_usage_error(
    arguments: tuple[str, ...], says: str
) -> None:
    assert says in " ".join(run(*arguments, code=2).split())


def test_the_ncu_on_the_path_comes_first_then_the_newest_of_the_first_place(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toolkits = [install_ncu(tmp_path / f"cuda-12.{n}" / "bin", "") for n in (8, 10, 9)]
    other = install_ncu(tmp_path / "nsight-compute" / "2025.1.0", "")
    places = [str(tmp_path / "cuda*/bin/ncu"), str(other.parent.parent / "*/ncu")]

    monkeypatch.setattr(profiler, "PLACES", places[1:])
    assert find_ncu() == str(other)
    monkeypatch.setattr(profiler, "PLACES", places)
    assert find_ncu() == str(toolkits[1])
    on_path = install_ncu(nothing_installed, "")
    assert find_ncu() == str(on_path)


def test_a_raw_page_is_read_from_between_other_lines() -> None:
    counters: dict[str, float | str] = {"a.sum": 1234567.5, "b.avg": "n/a", "c.sum": ""}
    counters |= {"d.avg": "nan", "e.sum": 7}
    text = "child says hello\n" + raw_page([("attention", counters), ("combine", counters)])
    kernels = parse_raw_page(text, ["a.sum", "b.avg", "c.sum", "d.avg", "absent.sum"])

    assert kernels == [Kernel(name, {"a.sum": 1234567.5}) for name in ("attention", "combine")]


@pytest.mark.parametrize(
    "text", ["", "==PROF== nothing\n", '"ID","Kernel Name"\n"",""\n', '"x"\n' * 3]
)
def test_what_is_no_raw_page_has_no_kernels(text: str) -> None:
    assert parse_raw_page(text, METRICS) == []


def test_amounts_add_up_over_kernels_and_shares_are_the_longest_kernels() -> None:
    second = COUNTERS | {"gpu__time_duration.sum": 1000, PIPE: 0.0}
    kernels = [Kernel("attention", COUNTERS), Kernel("combine", second)]
    rows = rows_of(kernels, plan_of())

    assert rows["HBM read"]["measured"] == pytest.approx(2 * 3.02 * BYTES)
    assert rows["time"]["measured"] == pytest.approx(501e-6)
    assert rows["tensor pipe active"]["measured"] == 71.25
    # Each of two kernels adds, multiplies, and makes fused multiply-adds, which count twice.
    assert rows["other FLOPs"]["measured"] == 2 * 4 * 600_000_000


def test_of_metrics_that_count_the_same_the_largest_counts() -> None:
    metric = "sm__ops_path_tensor_src_"
    counters = {"bf16_dst_fp32.sum": 0.0, "fp16.sum": 90.0, "fp16_dst_fp32.sum": 90.0}
    kernel = Kernel("attention", {metric + name: value for name, value in counters.items()})

    assert rows_of([kernel], plan_of(dtype="float16"))["tensor-core FLOPs"]["measured"] == 90.0


def test_what_was_not_measured_is_shown_as_such() -> None:
    rows = rows_of([Kernel("attention", {})], plan_of())

    assert {row["measured"] for row in rows.values()} == {None}
    assert {row["ratio"] for row in rows.values()} == {None}
    assert rows["HBM read"]["model"] == 3 * BYTES


def test_without_tensor_cores_the_products_are_among_the_other_operations() -> None:
    plan = plan_of("simt", dtype="float32", head_dim=64, head_dim_v=64)
    counters = COUNTERS | {"sm__ops_path_tensor_src_bf16_dst_fp32.sum": 0.0}
    rows = rows_of([Kernel("attention", counters)], plan)

    assert rows["tensor-core FLOPs"]["model"] == 0
    assert rows["other FLOPs"]["model"] > plan.problem.flops()


def test_the_model_reads_every_input_once_and_writes_the_output_once() -> None:
    plan = plan_of(seqlen_q=799, seqlen_k=203, heads_q=30, heads_kv=6, head_dim=96, head_dim_v=64)
    model = model_of(plan)

    assert plan.num_splits == 1
    assert model.hbm.read == 2 * (799 * 30 * 96 + 203 * 6 * (96 + 64))
    assert model.hbm.written == 2 * 799 * 30 * 64
    assert model.exponentials == 30 * 799 * 203


def test_partial_results_of_split_keys_cross_the_memory_bus_both_ways() -> None:
    plan = plan_of("mma", seqlen_q=1, heads_q=4, heads_kv=4)
    arrays = 2 * 4 * 128 * (1 + 2 * 4096)
    model = model_of(plan)

    assert plan.num_splits > 1
    assert model.hbm.read == arrays + plan.workspace
    assert model.hbm.written == 2 * 4 * 128 + plan.workspace


def test_the_naive_familys_scores_cross_the_memory_bus_twice_each_way() -> None:
    plan = plan_of("naive", seqlen_q=113, seqlen_k=203, heads_q=2, heads_kv=2)
    scores = 2 * 113 * 203 * 4
    model = model_of(plan)

    assert model.hbm.read == 2 * 2 * 128 * (113 + 2 * 203) + 2 * scores
    assert model.hbm.written == 2 * 113 * 2 * 128 + 2 * scores
    assert model.other_flops == 3 * 2 * 113 * 203


def test_a_causal_model_counts_the_pairs_that_are_seen() -> None:
    assert model_of(plan_of(causal=True)).exponentials == model_of(plan_of()).exponentials / 2


def test_the_models_occupancy_is_of_the_resident_blocks() -> None:
    plan = plan_of("mma")
    main = Kernel(plan.launches[0].entry, COUNTERS | {"launch__registers_per_thread": 255})
    row = rows_of([main], plan)["occupancy"]

    assert row["measured"] == 18.5
    blocks = H100.blocks_per_sm(plan.threads, plan.shared_memory, 255)
    assert row["model"] == 100 * blocks * plan.threads / 2048


def test_a_modified_model_counts_the_pairs_that_are_left_and_reads_the_bias() -> None:
    mods = CaseMods.parse("mod documents, bias shared")
    plan = plan_of(mods=mods)
    seen = VisibleKeys.of(plan.problem.mask, "documents", 4096)
    model = model_of(plan, mods)

    assert model.exponentials == 32 * seen.pairs() < model_of(plan_of()).exponentials / 3
    assert model.hbm.read > model_of(plan_of()).hbm.read + 2 * seen.pairs()


def test_the_models_occupancy_is_lower_where_there_are_fewer_blocks_than_sms_hold() -> None:
    sizes = {"seqlen_q": 239, "seqlen_k": 113, "heads_q": 1, "heads_kv": 1}
    plan = plan_of("mma", **sizes, head_dim=32, head_dim_v=32)
    main = Kernel(plan.launches[0].entry, {"launch__registers_per_thread": 32})

    assert H100.blocks_per_sm(plan.threads, plan.shared_memory, 32) > 1
    assert rows_of([main], plan)["occupancy"]["model"] == 100 * plan.threads / 2048


def test_sectors_are_shown_as_bytes_and_warps_as_threads() -> None:
    rows = rows_of([Kernel("attention", COUNTERS)], plan_of())

    assert rows["read from L2"]["measured"] == 32 * 34_000_000
    assert rows["special functions"]["measured"] == 32 * 18_000_000


def test_the_model_of_a_fused_softmax_rescales_the_output_at_every_tile_of_keys() -> None:
    plan = plan_of()
    scores = 32 * 4096 * 4096
    tiles = 4096 / plan.tile.Bc

    assert model_of(plan).other_flops == 3 * scores + 32 * 4096 * tiles * 128


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (100_663_296, "B", "100.7 MB"),
        (2.749e11, "", "274.9 G"),
        (12.5, "%", "12.50 %"),
        (0.0005, "s", "500 us"),
        (0.0, "B", "0 B"),
        (None, "B", "-"),
    ],
)
def test_amounts_have_four_digits_and_a_prefix(value: float | None, unit: str, text: str) -> None:
    assert amount(value, unit) == text


def test_the_child_warms_up_before_the_one_call_that_is_profiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    says = {name: partial(log.append, name) for name in ("start", "stop", "synchronize", "call")}
    fake_profiler = SimpleNamespace(start=says["start"], stop=says["stop"])
    device = SimpleNamespace(synchronize=says["synchronize"])
    cuda = SimpleNamespace(profiler=fake_profiler, Device=lambda: device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr("cupy_flash.cli.cases.inputs.random_inputs", lambda *_, **__: None)
    dispatcher = SimpleNamespace(prepare=lambda _: SimpleNamespace(call=says["call"]))
    monkeypatch.setattr(providers, "Dispatcher", lambda *_: dispatcher)
    profiler._child(Call(case()).to_json())

    assert log[:2] == ["call", "call"]
    assert log[-5:] == ["synchronize", "start", "call", "synchronize", "stop"]
