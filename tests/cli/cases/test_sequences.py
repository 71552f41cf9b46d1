"""KV caches and packed sequences in `bench`: cases, inputs, checks, providers and tables."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from support.cli import commands
from support.gpu import fake_cupy

from cupy_flash.api.kvcache import flash_attention_with_kvcache
from cupy_flash.api.varlen import flash_attention_varlen
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.check.problems import problem_of
from cupy_flash.calls.options import Options
from cupy_flash.cli.bench import bench as bench_module
from cupy_flash.cli.bench.table import print_cells, record_row
from cupy_flash.cli.cases import presets, sequences
from cupy_flash.cli.cases.cases import Case, describe
from cupy_flash.cli.cases.inputs import Inputs, can_share_pages, random_inputs
from cupy_flash.cli.measure.check import Check, choose_blocks
from cupy_flash.cli.measure.runner import Cell, Runner, Settings, set_speedups, too_large
from cupy_flash.cli.measure.timing import Spread, Timed
from cupy_flash.cli.providers import providers, torch_providers
from cupy_flash.cli.providers.contract import Prepared, Provider
from cupy_flash.cli.providers.providers import provider
from cupy_flash.cli.records import records
from cupy_flash.families import FORWARD
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch
from cupy_flash.reference.packed import attention_varlen_reference, attention_with_kvcache_reference

ALL = 10**15
LENGTHS = (113, 1, 59, 203)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPU from every module, so that all providers compute on the host."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "cupy_flash" and hasattr(module, "gpu_unavailable"):
            monkeypatch.setattr(module, "gpu_unavailable", lambda: "the tests have none")


def cache(seqlen_q: int = 3, **more: Any) -> Case:
    return Case("float32", 2, seqlen_q, 203, 6, 2, 24, 40, kind="cache", **more)


def varlen(lengths: tuple[int, ...] = LENGTHS, dtype: str = "float32", **more: Any) -> Case:
    longest = max(lengths)
    return Case(
        dtype, len(lengths), longest, longest, 4, 2, 24, 40, kind="varlen", lengths=lengths, **more
    )


CASES = [
    cache(),
    cache(causal=True),
    cache(page_size=1),
    cache(page_size=16, causal=True),
    cache(append=True, rotary=True, causal=True),
    cache(append=True, rotary=True, page_size=16),
    cache(append=True, lengths=(203, 7)),
    dataclasses.replace(cache(append=True, rotary=True), dtype="bfloat16"),
    varlen(),
    varlen(causal=True, dtype="float16"),
]


def reference(inputs: Inputs) -> np.ndarray:
    """Return the reference result of all rows, in float64."""
    case = inputs.case
    q, k, v = inputs.host
    options: dict[str, Any] = {"causal": case.causal, "softmax_scale": case.softmax_scale}
    if case.kind == "varlen":
        ends = inputs.more["cu_seqlens_q"]
        longest = case.seqlen_k
        return attention_varlen_reference(
            q[0], k[0], v[0], ends, ends, longest, longest, **options
        )[0]
    return attention_with_kvcache_reference(q, k, v, **inputs.more, **options).out


# ---- Cases


def test_a_caches_flops_and_bytes_are_those_of_the_keys_that_are_attended_to() -> None:
    full, ragged = cache(), cache(lengths=(203, 7))

    assert full.flops() == 2 * 2 * 6 * 3 * 203 * (24 + 40)
    assert ragged.flops() == 2 * 6 * 3 * (203 + 7) * (24 + 40)
    assert full.kv_bytes == 4 * 2 * 2 * 203 * (24 + 40)
    assert ragged.kv_bytes == 4 * 2 * (203 + 7) * (24 + 40)
    assert cache(page_size=16).kv_bytes == full.kv_bytes


def test_a_varlen_batch_counts_each_sequences_own_pairs() -> None:
    assert varlen().flops() == 2 * 4 * sum(n * n for n in LENGTHS) * (24 + 40)
    assert varlen(causal=True).flops() == varlen().flops() / 2
    assert varlen().scores == 4 * sum(n * n for n in LENGTHS)


def test_a_paged_cache_has_whole_pages_and_its_problem_the_pages_strides() -> None:
    case = cache(page_size=16)
    problem = case.problem()

    assert case.bshd_shapes[1:] == ((26, 16, 2, 24), (26, 16, 2, 40))
    assert (problem.layout.pages, problem.layout.max_pages) == (26, 13)
    assert problem.seqlen_k == 13 * 16
    assert problem.tensors["k"].strides == (16 * 2 * 24, 2 * 24, 24)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (
            cache(append=True, lengths=(203, 2)),
            "3 rows are appended, but a sequence has only 2 keys",
        ),
        (cache(rotary=True), "rotary needs append"),
        (varlen(append=True), "need kind cache"),
        (dataclasses.replace(cache(), layout="bhsd"), "are 'bshd'"),
        (dataclasses.replace(cache(causal=True), q_offset=3), "take no q_offset"),
        (
            dataclasses.replace(varlen(), batch=3),
            "4 lengths up to 203 cannot be combined with batch 3",
        ),
        (dataclasses.replace(varlen(), seqlen_q=7), "attend to themselves"),
        (dataclasses.replace(cache(), batch=0), "batch is 0"),
        (dataclasses.replace(cache(), kind="caches"), "expected one of dense, cache, varlen"),
    ],
)
def test_what_no_call_computes_is_refused(case: Case, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        case.problem()


@pytest.mark.parametrize("case", CASES, ids=lambda case: describe([case])[0])
def test_a_cases_problem_is_that_of_the_call(case: Case) -> None:
    inputs = random_inputs(case, 0, on_gpu=False)
    q, k, v = inputs.host
    if case.kind == "varlen":
        arguments = Arguments(q[0], k[0], v[0], **inputs.more)
        most = {"max_seqlen_q": case.seqlen_k, "max_seqlen_k": case.seqlen_k}
        found = problem_of(arguments, Options("varlen", case.causal, **most))
    else:
        arguments = Arguments(q, k_cache=k, v_cache=v, **inputs.more)
        found = problem_of(arguments, Options("kvcache", case.causal))

    # NumPy arrays may be aligned less than GPU memory, so compare at 16 bytes.
    assert case.problem() == found.aligned(16)


def test_labels_name_pages_steps_and_the_range_of_lengths() -> None:
    shared, own = describe([cache(), cache(page_size=16), cache(append=True, rotary=True)])

    assert shared == "fp32 b2 h6/2 s3/203 d24/40 full"
    assert own == ["cache", "pages of 16", "cache append rotary"]
    assert describe([varlen()])[0] == "fp32 varlen b4 h4/2 s1..203 376 keys d24/40 full"


# ---- Inputs


def test_a_long_tailed_draw_spans_the_range_and_is_the_same_again() -> None:
    lengths = sequences.long_tail(64, 16384, seed=3)

    assert (min(lengths), max(lengths)) == (16, 16384)
    # The logarithms are spread evenly, so the median is near the geometric mean of 16 and 16384.
    assert np.median(lengths) < 1024
    assert (
        lengths == sequences.long_tail(64, 16384, seed=3) != sequences.long_tail(64, 16384, seed=4)
    )


@pytest.mark.parametrize("longest", [1, 7, 16])
def test_a_short_range_has_no_tail(longest: int) -> None:
    assert set(sequences.long_tail(5, longest, seed=0)) == {longest}


def test_shuffled_pages_are_each_of_one_sequence() -> None:
    table = sequences.arrays_of(cache(page_size=16), 0)["block_table"]

    assert table.shape == (2, 13)
    assert sorted(table.reshape(-1)) == list(range(26))
    assert not (np.diff(table) == 1).all()


def test_a_cache_of_whole_pages_shares_its_memory_with_them() -> None:
    inputs = random_inputs(Case("float16", 2, 1, 64, 4, 2, 8, 8, kind="cache"), 0, on_gpu=False)
    paged = inputs.with_pages_of(16)

    assert np.shares_memory(paged.host[1], inputs.host[1])
    assert paged.host[1].shape == (8, 16, 2, 8)
    assert paged.case == dataclasses.replace(inputs.case, page_size=16)


def test_pages_that_are_appended_to_have_memory_of_their_own() -> None:
    inputs = random_inputs(cache(append=True, lengths=(203, 7)), 0, on_gpu=False)
    paged = inputs.with_pages_of(1)

    assert not can_share_pages(inputs.case, 1)
    assert not np.shares_memory(paged.host[1], inputs.host[1])


@pytest.mark.parametrize("on_gpu", [False, True])
def test_arrays_are_copied_once_to_where_they_are_asked_for(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = fake_cupy.install(monkeypatch)
    inputs = random_inputs(cache(page_size=16), 3, on_gpu=on_gpu)
    there, back = inputs.gpu, inputs.host
    more = inputs.more_gpu

    assert inputs.gpu is there
    assert inputs.host is back
    assert inputs.more_gpu is more
    assert (cupy.uploads, cupy.downloads) == (
        (len(more), len(back)) if on_gpu else (len(there) + len(more), 0)
    )
    assert all(np.array_equal(a, b) for a, b in zip(there, back, strict=True))
    assert {name: array.tolist() for name, array in more.items()} == {
        name: array.tolist() for name, array in inputs.more.items()
    }


def test_a_large_array_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_flash.cli.cases.inputs._DRAWN_AT_ONCE", 1000)
    q, k, _ = random_inputs(cache(), 0, on_gpu=False).host

    assert np.isfinite(k).all()
    assert k.std() == pytest.approx(1, rel=0.05)
    assert len(np.unique(k)) > 0.99 * k.size
    assert q.shape == (2, 3, 6, 24)


# ---- Calls and checks


@pytest.mark.parametrize("case", CASES, ids=lambda case: describe([case])[0])
def test_the_call_is_right_by_the_check_and_by_the_reference_of_all_rows(case: Case) -> None:
    inputs = random_inputs(case, 5, on_gpu=False)
    truth = reference(inputs)
    check = Check(inputs, 5, on_gpu=False)
    out = inputs.call(on_gpu=False, backend="cpu")()

    assert check.coverage.rows == check.coverage.all_rows == case.query_rows
    assert check.error(out) <= check.coverage.bound
    assert check.error(out) == pytest.approx(np.abs(out.astype(np.float64) - truth).max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: describe([case])[0])
def test_a_row_that_is_off_fails_the_check(case: Case) -> None:
    inputs = random_inputs(case, 5, on_gpu=False)
    check = Check(inputs, 5, on_gpu=False)
    out = inputs.call(on_gpu=False, backend="cpu")()
    sequences.rows_of(case, out, inputs.more, case.batch - 1, 1)[:, -1] += 0.1

    assert check.error(out) > check.coverage.bound


def test_a_sample_of_a_varlen_batch_has_last_rows_of_the_longest_sequence() -> None:
    case = varlen((16, 5003, 300, 17))
    blocks = choose_blocks(case, 0, 10**7)
    longest = [block for block in blocks if block.batch == 1]

    assert {block.batch for block in blocks} == {0, 1, 2, 3}
    assert {block.head for block in longest if block.stop == 5003} == {0, 1, 2, 3}
    assert sum(block.stop - block.start for block in longest) < 4 * 5003
    assert all(block.stop <= case.key_lengths[block.batch] for block in blocks)


def test_small_varlen_batches_are_compared_row_by_row() -> None:
    blocks = choose_blocks(varlen(), 0, ALL)

    assert sum(block.stop - block.start for block in blocks) == varlen().query_rows


def test_a_host_call_passes_the_arrays_by_the_functions_own_names() -> None:
    cached = random_inputs(CASES[4], 0, on_gpu=False).call(on_gpu=False)
    packed = random_inputs(varlen(), 0, on_gpu=False).call(on_gpu=False)

    assert cached.func is flash_attention_with_kvcache
    assert {"cache_seqlens", "k", "v", "rotary_cos", "rotary_sin"} <= set(cached.keywords)
    assert list(cached.keywords["cache_seqlens"]) == [200, 200]
    assert packed.func is flash_attention_varlen
    assert packed.args[0].shape == (sum(LENGTHS), 4, 24)


# ---- Providers


@pytest.mark.parametrize(
    ("name", "case", "says"),
    [
        ("cupy_flash-page16", varlen(), "needs a contiguous cache"),
        ("cupy_flash-page16", cache(page_size=4), "needs a contiguous cache"),
        ("cupy_flash-uniform", cache(), "compared with varlen batches only"),
        ("numpy-naive", cache(append=True), "does not append"),
    ],
)
def test_a_provider_says_what_it_is_not_for(name: str, case: Case, says: str) -> None:
    assert says in (provider(name).why_not(case) or "")


@pytest.mark.parametrize(
    ("name", "case"), [("cupy_flash-page16", varlen()), ("cupy_flash-uniform", cache())]
)
def test_what_a_provider_is_not_for_has_no_scratch_either(name: str, case: Case) -> None:
    with pytest.raises(ValueError, match="it ") as refused:
        provider(name).scratch_bytes(case)

    assert str(refused.value) == provider(name).why_not(case)


def test_the_library_says_of_a_family_why_it_serves_a_case_not_on_this_gpu_or_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("float64", 1, 113, 113, 2, 2, 64, 64)
    fake_cupy.install(monkeypatch)
    refused = FORWARD["hopper"].why_not(case.problem(), fake_cupy.device())
    assert refused

    assert provider("cupy_flash").why_not(case) is None
    assert refused in (provider("cupy_flash-hopper").why_not(case) or "")
    monkeypatch.setattr("cupy_flash.cli.providers.contract.gpu_unavailable", lambda: "no GPU")
    assert provider("cupy_flash-hopper").why_not(case) == "no GPU"


def test_memory_that_cupy_and_torch_hold_for_nobody_is_free_and_can_be_handed_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = fake_cupy.install(monkeypatch)
    held = {"reserved": 5 << 30, "allocated": 1 << 30}

    def empty_cache() -> None:
        cupy.free += held["reserved"] - held["allocated"]
        held["reserved"] = held["allocated"]

    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        memory_reserved=lambda: held["reserved"],
        memory_allocated=lambda: held["allocated"],
        empty_cache=empty_cache,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    free = cupy.free + cupy.idle + held["reserved"] - held["allocated"]

    assert providers.free_bytes(on_gpu=True) == free
    providers.release_memory()
    assert cupy.free == providers.free_bytes(on_gpu=True) == free


def test_where_the_system_does_not_tell_its_free_memory_no_case_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert too_large(1 << 60, on_gpu=False) is not None
    monkeypatch.setattr(providers, "Path", lambda _: tmp_path / "meminfo")

    assert too_large(1 << 60, on_gpu=False) is None


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (varlen(), "no packed sequences"),
        (cache(page_size=16), "no pages"),
        (cache(append=True), "no rows to append"),
        (cache(lengths=(203, 7)), "no caches of different lengths"),
        (cache(causal=True), "top-left"),
        (cache(1, causal=True), None),
        (cache(), None),
    ],
)
def test_torch_takes_caches_of_one_length_in_no_pages(
    case: Case, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_providers, "why_no_torch", lambda: None)
    reason = provider("torch-flash").why_not(case)

    assert reason is None if says is None else says in (reason or "")


def test_the_equal_length_case_has_about_the_rows_and_flops_of_the_batch() -> None:
    case = presets.preset("varlen").cases[0]
    uniform = sequences.equal_length_case(case)

    assert uniform.seqlen_q == uniform.seqlen_k
    assert uniform.seqlen_q % 128 == 0
    assert uniform.flops() == pytest.approx(case.flops(), rel=0.15)
    assert uniform.query_rows == pytest.approx(case.query_rows, rel=0.15)


class TwoMilliseconds:
    """Fake timer by which every call takes two milliseconds."""

    pause = 0.0

    def once(self, timed: Timed) -> float:
        timed.call()
        return 2e-3

    def interleaved(self, calls: list[Timed], warmup: int, repeats: list[int]) -> list[list[float]]:
        return [[2.0] * count for count in repeats]


SETTINGS = Settings(0, 3, 20.0, seed=0, check=True, host_time=False)


def timed(case: Case, *names: str) -> list[Cell]:
    chosen = [provider(name) for name in names]
    runner = Runner(SETTINGS, {False: TwoMilliseconds()})
    return runner.run(case, chosen, lambda: random_inputs(case, 0, on_gpu=False))[0]


@pytest.mark.usefixtures("without_gpu")
def test_times_of_the_equal_length_case_are_scaled_to_the_flops_of_the_batch() -> None:
    case = varlen()
    ours, uniform = timed(case, "cupy_flash-cpu", "cupy_flash-uniform")
    scale = case.flops() / sequences.equal_length_case(case).flops()
    set_speedups([ours, uniform], ["cupy_flash-uniform"])
    rows = [record_row(cell, None, "a CPU", {}) for cell in (ours, uniform)]

    assert uniform.passed
    assert uniform.time == Spread(*(pytest.approx(2 * scale),) * 3, 3)
    assert rows[0]["speedup"] == pytest.approx(scale)
    assert rows[0]["speedup"] == pytest.approx(rows[0]["tflops"] / rows[1]["tflops"])
    assert "flash_attention of " in rows[1]["note"]


@pytest.mark.usefixtures("without_gpu")
def test_pages_are_checked_by_their_own_order_of_the_rows() -> None:
    pages = ("cupy_flash-cpu", "cupy_flash-page1", "cupy_flash-page16", "cupy_flash-page64")
    cells = timed(Case("float32", 2, 1, 192, 4, 2, 16, 16, kind="cache"), *pages)

    assert [cell.passed for cell in cells] == [True] * 4
    assert len({cell.max_error for cell in cells}) > 1
    assert all(cell.coverage is not None for cell in cells[1:])


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("case", [cache(causal=True), cache(page_size=16, lengths=(203, 7))])
def test_the_formula_goes_through_a_cache_sequence_by_sequence(case: Case) -> None:
    (cell,) = timed(case, "numpy-naive")

    assert cell.passed
    assert cell.coverage is None
    assert cell.prepared is not None
    assert cell.prepared.call().shape == (case.batch, case.seqlen_q, case.heads_q, case.head_dim_v)


@pytest.mark.usefixtures("without_gpu")
def test_a_step_that_appends_to_pages_leaves_the_other_providers_cache_alone() -> None:
    case = cache(append=True, rotary=True, causal=True)
    cells = timed(case, "cupy_flash-page16", "cupy_flash-cpu", "cupy_flash-page1")

    assert [cell.passed for cell in cells] == [True] * 3


# ---- The command


SMALL = ("--batch", "2", "--seqlen-k", "203", "--heads", "4", "--kv-heads", "2")
FAST = (*SMALL, "--head-dim", "24", "--provider", "cupy_flash-cpu", "--repeats", "3")
SMALL_HEADS = ("--heads", "2", "--head-dim", "8")
ON_CPU = ("--provider", "cupy_flash-cpu", "--repeats", "3")


@pytest.mark.parametrize(
    ("lengths", "option"),
    [
        (("--seqlen-k", "5"), "--seqlen-k has 5 keys"),
        (("--lengths", "30,4"), "--lengths has 4 keys"),
        (("--lengths", "long-tail", "--seqlen-k", "5"), "--lengths has "),
    ],
)
def test_too_few_keys_for_what_is_appended_are_those_of_an_option(
    lengths: tuple[str, ...], option: str
) -> None:
    refused = bench("--cache", "--append", "--seqlen-q", "10", *lengths, code=2).stderr

    assert f"--append writes --seqlen-q 10 rows among the keys of each sequence, but {option}" in (
        refused
    )


def bench(*arguments: str, code: int = 0) -> Result:
    return commands.run("bench", *arguments, code=code)


def record(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    return commands.record_of(tmp_path / "rows.json", "bench", *arguments)


def test_options_make_every_combination_of_pages_and_splits(tmp_path: Path) -> None:
    rows = record(tmp_path, "--cache", *FAST, "--page-size", "0,16", "--num-splits", "0,2")["rows"]

    found = [(row["page_size"], row["asked_splits"]) for row in rows]
    assert found == [(None, None), (None, 2), (16, None), (16, 2)]
    assert {row["kind"] for row in rows} == {"cache"}
    assert {row["check"] for row in rows} == {"passed"}
    kv_bytes = 2 * 203 * 2 * (24 + 24) * 4
    for row in rows:
        assert row["kv_tb_per_s"] == pytest.approx(kv_bytes / (row["median_ms"] * 1e-3) / 1e12)


def test_a_record_reads_back_as_its_cases(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    heads = ("--heads", "4", "--kv-heads", "2", "--head-dim", "24", "--seqlen-q", "3", "--causal")
    step = ("--cache", "--page-size", "16", "--append", "--rotary", "--lengths", "203,59")
    bench(*step, *heads, *ON_CPU, "--output", str(path))
    (row,) = records.read_bench(path).rows

    assert records.case_of(row) == Case(
        "float32", 2, 3, 203, 4, 2, 24, 24, causal=True, kind="cache", page_size=16,
        append=True, rotary=True, lengths=(203, 59),
    )  # fmt: skip
    assert row["q_offset"] == 200


def test_rows_of_other_cases_say_nothing_of_sequences(tmp_path: Path) -> None:
    (row,) = record(tmp_path, *FAST, "--seqlen-q", "5")["rows"]

    assert [row[name] for name in records.OPTIONAL_FIELDS] == [None] * 9
    assert row["kv_tb_per_s"] is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", "paged"), ("page_size", -1), ("append", 1), ("lengths", []), ("lengths", [1, "2"])],
)
def test_a_record_with_a_wrong_field_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    data = record(tmp_path, "--cache", *FAST)
    data["rows"][0][name] = value

    assert f"row 0 has {name}" in (records.bench_fault(data["rows"]) or "")


def test_long_tailed_lengths_are_printed_so_that_they_can_be_had_again(tmp_path: Path) -> None:
    shape = (*SMALL_HEADS, *ON_CPU)
    drawn = bench("--lengths", "long-tail", "--batch", "5", "--seqlen-q", "113", *shape).stdout
    (again,) = re.findall(r"--lengths ([\d,]+)", drawn)
    (row,) = record(tmp_path, "--lengths", again, *shape)["rows"]

    assert sequences.repeatable(sequences.long_tail(5, 113, 0)) == again
    assert row["lengths"] == list(sequences.long_tail(5, 113, 0))
    assert (row["kind"], row["batch"], row["seqlen_q"]) == ("varlen", 5, 113)


def test_lengths_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("17, 5\n113\n", encoding="utf-8")
    rows = record(tmp_path, "--lengths", str(path), *SMALL_HEADS, *ON_CPU)["rows"]

    assert [row["lengths"] for row in rows] == [[17, 5, 113]]


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "has no numbers in it"), (b"3 x", "has 'x' in it"), (b"\xff\xfe", "cannot be read")],
)
def test_a_file_without_lengths_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_bytes(content)
    said = commands.refusal("bench", "--lengths", path)

    assert str(path) in said
    assert says in said


@pytest.mark.parametrize("kind", [(), ("--cache",)])
def test_some_lengths_may_be_zero_and_many_are_no_name_of_a_file(
    tmp_path: Path, kind: tuple[str, ...]
) -> None:
    lengths = ",".join(["16", "0"] * 300)
    (row,) = record(tmp_path, "--lengths", lengths, *kind, *SMALL_HEADS, *ON_CPU)["rows"]

    assert row["check"] == "passed"
    assert row["lengths"] == [16, 0] * 300


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_packed_sequences_stand_beside_equal_ones(tmp_path: Path) -> None:
    shape = ("--batch", "3", "--seqlen-q", "59", "--heads", "2", "--head-dim", "8")
    rows = record(tmp_path, "--lengths", "uniform", *shape, "--repeats", "3")["rows"]
    names = ["cupy_flash-cpu", "cupy_flash-uniform", "numpy-naive"]

    assert [row["provider"] for row in rows] == names
    assert [row["check"] for row in rows] == ["passed"] * 3
    assert rows[0]["lengths"] == [59, 59, 59]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--page-size 4", "--page-size needs a cache; add --cache"),
        ("--append", "--append needs a cache; add --cache"),
        ("--cache --rotary", "add --append"),
        ("--num-splits 2", "add --cache or --lengths"),
        ("--lengths 3,x", "'3,x' is not uniform, long-tail or whole numbers"),
        ("--lengths 3,-1", "'3,-1' has '-1' in it; expected whole numbers from 0"),
        ("--lengths 3,9999999999999", "has '9999999999999' in it; expected whole numbers from 0"),
        ("--lengths 0,0", "'0,0' has no length above 0"),
        ("--lengths ,", "',' has no numbers in it"),
        ("--lengths nosuch.txt", "'nosuch.txt' is not uniform, long-tail or whole numbers"),
        ("--lengths nosuch.txt", "and as a file it cannot be read: No such file"),
        ("--lengths uniform --batch 10000000000", "--batch 10000000000 is too many for --lengths"),
        ("--lengths long-tail --batch 1000000000", "expected at most 65536 sequences"),
        (f"--cache --batch {10**20}", f"batch is {10**20}; expected at most 2147483647"),
        ("--lengths 3,4 --batch 2", "--batch cannot be combined with --lengths"),
        ("--lengths uniform --seqlen-k 3", "--seqlen-k cannot be combined with --lengths"),
        ("--lengths uniform --append", "--append needs a cache"),
        ("--cache --q-offset 3", "--q-offset cannot be combined with --cache"),
        ("--cache --layout bhsd", "--layout bhsd cannot be combined with --cache"),
        ("--preset decode --cache", "--cache cannot be combined with --preset decode"),
        ("--cache --append --seqlen-q 5 --lengths 3,9", "expected at least 5"),
        ("--cache --page-size x", "'x' is not a whole number from 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_one_line(arguments: str, says: str) -> None:
    assert says in commands.refusal("bench", *arguments.split())


def test_real_inputs_are_no_caches(tmp_path: Path) -> None:
    arrays = {name: np.ones((1, 5, 2, 8), np.float32) for name in "qkv"}
    result = bench(*commands.input_options(tmp_path, **arrays), "--cache", code=2)

    assert "--cache cannot be combined with --input" in result.stderr


# ---- Output and records of GPU runs


class FakeGpuProvider(Provider):
    """Provider whose times come from a fake GPU."""

    on_gpu = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.ours = name.startswith("cupy_flash")

    def why_not(self, case: Case) -> str | None:
        return None

    def scratch_bytes(self, case: Case) -> int:
        return 0

    def prepare(self, inputs: Any) -> Prepared:
        raise AssertionError("it has been timed")


def decode_cells(case: Case, ms: dict[str, float]) -> list[Cell]:
    plan = make_plan(case.problem(), device_for_arch(90))
    cells = []
    for name, time in ms.items():
        prepared = Prepared(lambda: None, plan=plan if name.startswith("cupy") else None)
        cell = Cell(FakeGpuProvider(name), case, prepared=prepared, timed_by="graph")
        cell.time = Spread(time, time, time, 20)
        cells.append(cell)
    set_speedups(cells, ["torch-flash", "torch-cudnn"])
    return cells


def test_the_decode_table_has_microseconds_bandwidth_and_the_share_of_a_copy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    preset = presets.preset("decode")
    case = next(c for c in preset.cases if (c.batch, c.seqlen_k) == (8, 8192))
    ms = {"cupy_flash": 0.1, "cupy_flash-page16": 0.104, "torch-flash": 0.11, "torch-cudnn": 0.12}
    cells = decode_cells(case, ms)
    rows = [record_row(cell, None, "a GPU", {}, copy_rate=3.0) for cell in cells]
    names = list(preset.baseline)
    print_cells([cells], [rows], [], "a GPU", names, SETTINGS, preset, copy_rate=3.0)
    text = capsys.readouterr().out

    assert rows[0]["kv_tb_per_s"] == pytest.approx(8 * 8192 * 8 * 256 * 2 / 0.1e-3 / 1e12)
    assert rows[0]["copy_share"] == pytest.approx(rows[0]["kv_tb_per_s"] / 3)
    assert rows[0]["speedup"] == pytest.approx(1.1)
    assert re.search(r"^ cupy_flash +100.0 +0.0 +2.684 +89.5 +1.10 ", text, re.MULTILINE)
    assert "% copy: percentage of 3.000 TB/s" in text
    assert "cupy_flash-page16: 1.040 times the time of cupy_flash" in text
    assert max(map(len, text.splitlines())) <= 80
    notes = " ".join(text.split())
    assert re.search(r"cupy_flash: decode \d+x\d+ [^:]*, all keys split evenly over \d+", notes)
    assert "us: GPU time of CUDA graph replays" in notes


def test_the_decode_preset_is_the_fields_table() -> None:
    preset = presets.preset("decode")

    sizes = [(batch, seqlen) for batch in (1, 8, 64) for seqlen in (1024, 8192, 65536)]
    assert [(c.batch, c.seqlen_k) for c in preset.cases] == sizes
    for case in preset.cases:
        assert (case.dtype, case.seqlen_q, case.head_dim) == ("bfloat16", 1, 128)
        assert (case.heads_q, case.heads_kv) == (32, 8)
        assert all(can_share_pages(case, size) for size in providers.PAGE_SIZES)


def test_the_varlen_preset_is_long_tailed_and_both_full_and_causal() -> None:
    full, causal = presets.preset("varlen").cases

    assert (min(full.key_lengths), max(full.key_lengths)) == (16, 16384)
    assert dataclasses.replace(full, causal=True) == causal
    assert (full.heads_q, full.head_dim, full.dtype) == (16, 128, "bfloat16")


def test_a_copy_rate_that_cannot_be_measured_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> float:
        raise MemoryError("no room")

    monkeypatch.setattr(bench_module, "copy_rate", fail)

    assert bench_module._copy_rate() is None
    assert "no room" in capsys.readouterr().err


# ---- On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments",
    [
        "--cache --causal no,yes --seqlen-q 1,3 --provider cupy_flash,cupy_flash-page1,"
        "cupy_flash-page16",
        "--cache --append --rotary --causal no,yes --page-size 0,1,16 --provider cupy_flash",
        "--cache --lengths 203,7,1 --num-splits 0,1,3 --provider cupy_flash,cupy_flash-page16",
    ],
)
def test_steps_on_a_gpu_pass_their_checks_and_are_replayed_from_graphs(
    arguments: str, tmp_path: Path
) -> None:
    sizes = ["--batch", "3", "--seqlen-k", "203"] if "--lengths" not in arguments else []
    heads = ["--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--repeats", "3"]
    data = record(tmp_path, *arguments.split(), *sizes, *heads, "--host-time")

    assert data["metadata"]["copy_tb_per_s"] > 0
    for row in data["rows"]:
        assert row["reason"] is None
        assert (row["check"], row["timed_by"]) == ("passed", "graph")
        assert row["copy_share"] > 0
        assert row["host_us"] > 0


@pytest.mark.gpu
def test_packed_sequences_on_a_gpu_stand_beside_equal_ones(tmp_path: Path) -> None:
    shape = ("--batch", "9", "--seqlen-q", "1024", "--heads", "4", "--head-dim", "64")
    rows = record(tmp_path, "--lengths", "long-tail", "--causal", "no,yes", *shape)["rows"]

    assert [row["provider"] for row in rows] == ["cupy_flash", "cupy_flash-uniform"] * 2
    assert {(row["check"], row["timed_by"]) for row in rows} == {("passed", "graph")}
    assert [row["speedup"] for row in rows if row["provider"] == "cupy_flash-uniform"] == [1, 1]
