"""Modifications of a case: as text, as arguments of the library, and in FLOPs and bytes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from support.cli import commands
from support.gpu import fake_cupy

import cupy_flash
from cupy_flash.cli.bench.bench import _choose_providers
from cupy_flash.cli.cases import inputs as inputs_module
from cupy_flash.cli.cases.built_in import BUILT_IN
from cupy_flash.cli.cases.cases import Case, describe
from cupy_flash.cli.cases.inputs import Inputs, random_inputs
from cupy_flash.cli.cases.mod_arguments import array_bytes
from cupy_flash.cli.cases.mod_options import modified
from cupy_flash.cli.cases.mods import PLAIN, SPANS, CaseMods
from cupy_flash.cli.cases.visible import VisibleKeys
from cupy_flash.cli.cases.workload import groups_of, read_workload
from cupy_flash.cli.measure import check as check_module
from cupy_flash.cli.measure.check import Check
from cupy_flash.cli.providers import torch_providers
from cupy_flash.cli.providers.providers import provider
from cupy_flash.cli.records import records
from cupy_flash.mods.on_arrays.scores import Pairs
from cupy_flash.problem.mask import Mask
from cupy_flash.reference.modifications import read_modifications

ALL = (
    "window 40:0",
    "window :7",
    "softcap 2.5",
    "alibi",
    "sinks",
    *(f"{name} {span}" for name in ("bias", "mask") for span in SPANS),
    *(f"mod {name}" for name in BUILT_IN),
    "window 30:5, softcap 50, alibi, sinks, bias heads, mask batch, mod documents",
)
LENGTHS = (50, 203, 113)


def dense(mods: str = "", **more: Any) -> Case:
    return Case("float32", 2, 113, 203, 4, 2, 16, 24, mods=CaseMods.parse(mods), **more)


def cache(mods: str, **more: Any) -> Case:
    return dense(mods, kind="cache", **more)


def varlen(mods: str, **more: Any) -> Case:
    longest = max(LENGTHS)
    sizes = {"batch": len(LENGTHS), "seqlen_q": longest, "lengths": LENGTHS}
    return dataclasses.replace(dense(mods, kind="varlen", **more), **sizes)


KINDS = {
    "dense": dense,
    "causal": lambda mods: dense(mods, causal=True, layout="bhsd"),
    "cache": lambda mods: cache(mods, lengths=(203, 130), causal=True),
    "pages": lambda mods: cache(mods, page_size=16, append=True, rotary=True),
    "varlen": varlen,
}


def cases() -> list[Any]:
    return [
        pytest.param(make(mods), id=f"{kind} {mods}")
        for (kind, make), mods in itertools.product(KINDS.items(), ALL)
        if not (kind == "varlen" and "batch" in mods)
    ]


def bench(*arguments: str, code: int = 0) -> Result:
    # The terminal is wide enough for any table; times need more columns on a busy machine.
    return commands.run("bench", *arguments, code=code, env={"COLUMNS": "240"})


@pytest.mark.parametrize("text", ["", *ALL])
def test_a_text_is_what_it_says(text: str) -> None:
    mods = CaseMods.parse(text)

    assert str(mods) == text
    assert bool(mods) == bool(text)
    assert (mods == PLAIN) == (not text)


def test_dropout_is_a_number_in_text_and_an_argument_of_the_call() -> None:
    mods = CaseMods.parse("dropout 0.25")
    assert mods == CaseMods(dropout=0.25)
    assert str(mods) == "dropout 0.25"
    inputs = random_inputs(dense("dropout 0.25"), 3, on_gpu=False)
    given = inputs.modifications(on_gpu=False)
    assert given["dropout_p"] == 0.25
    assert given["dropout_seed"].shape == (2,)


@pytest.mark.parametrize(
    "text", ["windows 3:0", "window 3", "softcap inf", "alibi no", "bias all", "mod x", "dropout 1"]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        CaseMods.parse(text)


@pytest.mark.parametrize(
    "text", ["softcap 0", "softcap 0.0", "window -1", "window -1:-1", "dropout 0"]
)
def test_what_the_functions_take_for_nothing_is_nothing(text: str) -> None:
    assert CaseMods.parse(text) == PLAIN
    name, _, value = text.partition(" ")
    small = ("--seqlen-q", "8", "--repeats", "1", "--provider", "numpy-naive")
    bench(f"--{name}={value}", *small)


def plan_of(inputs: Inputs) -> Any:
    """Return the plan that the public function makes for a case's arrays."""
    call = inputs.call(on_gpu=False)
    q, k, v = call.args
    case, options = inputs.case, dict(call.keywords)
    functions = {"dense": cupy_flash.flash_attention, "varlen": cupy_flash.flash_attention_varlen}
    functions["cache"] = cupy_flash.flash_attention_with_kvcache
    if case.kind == "cache":
        options["num_splits"] = case.asked_splits
    return cupy_flash.plan(functions[case.kind], q, k, v, arch="sm_90", **options)


@pytest.mark.parametrize("case", cases())
def test_a_case_poses_the_problem_that_its_arrays_pose(case: Case) -> None:
    case = dataclasses.replace(case, dtype="float16")
    planned = plan_of(random_inputs(case, 0, on_gpu=False)).problem

    assert case.problem().score == planned.score
    assert planned.score is not None
    if case.kind != "varlen":
        assert case.problem() == planned


@pytest.mark.parametrize("mods", ALL)
def test_a_case_of_gradients_poses_the_problem_that_its_arrays_pose(mods: str) -> None:
    case = dataclasses.replace(dense(mods, causal=True), dtype="float16")
    call = random_inputs(case, 0, on_gpu=False).call(on_gpu=False)
    q, k, v = call.args
    planned = cupy_flash.plan(
        cupy_flash.flash_attention_backward, q=q, k=k, v=v, arch="sm_90", **call.keywords
    ).problem

    assert dataclasses.replace(case, direction="backward").problem() == planned


@pytest.mark.parametrize("case", cases())
def test_the_librarys_result_passes_its_check(case: Case) -> None:
    inputs = random_inputs(case, 3, on_gpu=False)
    check = Check(inputs, 0, on_gpu=False)

    assert check.error(inputs.call(on_gpu=False)()) <= check.coverage.bound
    assert check.coverage.rows == case.query_rows


@pytest.mark.parametrize("text", ALL)
def test_the_result_of_other_modifications_does_not_pass(text: str) -> None:
    inputs = random_inputs(dense(text), 3, on_gpu=False)
    check = Check(inputs, 0, on_gpu=False)
    plain = Inputs(dense(), _host=inputs.host)

    assert check.error(plain.call(on_gpu=False)()) > 2 * check.coverage.bound


@pytest.mark.parametrize("case", cases())
def test_the_naive_formula_serves_all_that_it_serves_plain(case: Case) -> None:
    naive, inputs = provider("numpy-naive"), random_inputs(case, 3, on_gpu=False)
    if case.append:
        assert naive.why_not(case) == "the plain formula does not append"
        return
    check = Check(inputs, 0, on_gpu=False)

    assert check.error(naive.prepare(inputs).call()) <= check.coverage.bound


@pytest.mark.parametrize("case", cases())
def test_bytes_are_those_of_the_arrays(case: Case) -> None:
    inputs = random_inputs(case, 0, on_gpu=False)
    given = inputs.modifications(on_gpu=False)
    arrays = [array for array in given.values() if isinstance(array, np.ndarray)]

    assert array_bytes(case.mods, case.sizes) == sum(array.nbytes for array in arrays)
    plain = dataclasses.replace(case, mods=PLAIN)
    assert case.array_bytes - plain.array_bytes == sum(array.nbytes for array in arrays)


def seen_by_the_formula(case: Case, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """Return which pairs of a head the reference attends to, shape (seqlen_q, seqlen_k)."""
    given = random_inputs(case, 0, on_gpu=False).modifications(on_gpu=False)
    scores = read_modifications(given).scores
    rows, keys = np.arange(seqlen_q), np.arange(seqlen_k)
    mask = case.mask(seqlen_q, seqlen_k)
    at = Pairs(0, 0, rows[:, None].astype(np.int32), keys.astype(np.int32), mask.q_offset)
    found = np.isfinite(scores.apply(np.zeros((seqlen_q, seqlen_k), np.float32), at))
    return found & ~mask.masked(0, seqlen_q, 0, seqlen_k)


HIDING = (
    *("window 40:0", "window 3:90", "mod documents", "window 50:, mod documents"),
    *("mod dilated", "window 9:70, mod dilated", "mod prefix"),
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", HIDING)
@pytest.mark.parametrize("shape", [(113, 203), (203, 203), (1, 239), (250, 113)])
def test_what_counts_as_work_is_what_the_formula_leaves(
    shape: tuple[int, int], text: str, causal: bool
) -> None:
    seqlen_q, seqlen_k = shape
    case = dataclasses.replace(dense(text, causal=causal), seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    seen, matrix = case.visible_keys(*shape), seen_by_the_formula(case, *shape)

    assert case.flops() == 2 * 2 * 4 * matrix.sum() * (16 + 24)
    used = np.flatnonzero(matrix.any(0))
    span = used[-1] - used[0] + 1
    # `seen` counts a range of keys; a dilated mask may mask keys at both ends of the range.
    assert span <= seen.keys() <= span + seen.step - 1
    for Br in (1, 16, 300):
        begins, ends = seen.tiles(Br)
        for tile, start in enumerate(range(0, seqlen_q, Br)):
            of_tile = np.flatnonzero(matrix[start : start + Br].any(0))
            inside = (begins[tile] <= of_tile) & (of_tile < ends[tile])
            assert inside.all()


def test_a_causal_mask_keeps_the_convention_of_half() -> None:
    case = dataclasses.replace(dense("sinks, bias heads", causal=True), seqlen_q=203)

    assert case.flops() == 2 * 2 * 4 * 203 * 203 / 2 * (16 + 24)


def test_sequences_count_their_own_documents() -> None:
    case = varlen("mod documents")
    matrices = [seen_by_the_formula(case, length, length) for length in LENGTHS]

    assert case.flops() == 2 * 4 * sum(matrix.sum() for matrix in matrices) * (16 + 24)


def test_no_query_and_no_key_is_no_work() -> None:
    for sizes in ((0, 113), (113, 0), (0, 0)):
        case = dataclasses.replace(dense("mod documents"), seqlen_q=sizes[0], seqlen_k=sizes[1])
        assert case.flops() == 0
        assert VisibleKeys.of(Mask(*sizes)).keys() == (0 if 0 in sizes else sizes[1])


def test_a_window_over_a_cache_reads_its_own_keys() -> None:
    windowed = dataclasses.replace(cache("window 1023:0"), seqlen_q=1, seqlen_k=65536)
    short = dataclasses.replace(cache(""), seqlen_q=1, seqlen_k=1024)

    assert windowed.kv_bytes == short.kv_bytes
    assert windowed.flops() == short.flops()


def test_documents_are_twelve_and_the_same_in_every_process() -> None:
    document = BUILT_IN["documents"].captures(4, 8192)["document"]

    assert sorted(set(document.tolist())) == list(range(12))
    assert (np.diff(document) >= 0).all()
    assert (document == BUILT_IN["documents"].captures(8, 8192)["document"]).all()


def test_arrays_are_drawn_once_and_brought_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = fake_cupy.install(monkeypatch)
    inputs = random_inputs(dense("bias heads, mask shared, sinks, mod t5"), 0, on_gpu=False)
    here = inputs.modifications(on_gpu=False)
    there = inputs.modifications(on_gpu=True)

    assert cupy.uploads == 4
    assert here is inputs.modifications(on_gpu=False)
    for name in ("bias", "mask", "sinks"):
        assert (here[name] == there[name]).all()
    assert (here["score_mod"].captures["table"] == there["score_mod"].captures["table"]).all()


def test_large_arrays_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs_module, "_DRAWN_AT_ONCE", 1000)
    inputs = random_inputs(dense("bias heads, mask batch"), 0, on_gpu=False)
    given = inputs.modifications(on_gpu=False)

    assert given["bias"].shape == (1, 4, 113, 203)
    assert given["mask"].dtype == bool
    assert given["bias"].std() == pytest.approx(1, abs=0.05)
    assert given["mask"].mean() == pytest.approx(0.5, abs=0.05)


def test_pages_of_a_cache_have_its_bias() -> None:
    inputs = random_inputs(dataclasses.replace(cache("bias heads"), seqlen_k=208), 0, on_gpu=False)
    inputs.modifications(on_gpu=False)
    paged = inputs.with_pages_of(16)
    check = Check(paged, 0, on_gpu=False)

    assert paged.modifications(on_gpu=False)["bias"] is inputs.modifications(on_gpu=False)["bias"]
    assert check.error(paged.call(on_gpu=False)()) <= check.coverage.bound


def test_packed_sequences_have_no_axis_for_an_array_of_each() -> None:
    with pytest.raises(ValueError, match=r"bias batch has an axis of sequences.*expected heads"):
        varlen("bias batch").problem()


def test_options_sweep_over_their_values() -> None:
    windows = (CaseMods.parse("window 40:0").window, PLAIN.window)
    given = {"window": windows, "alibi": (False, True), "bias": None}
    found = modified([dense(), dense(causal=True)], given)

    texts = ["window 40:0", "window 40:0, alibi", "", "alibi"]
    assert [str(case.mods) for case in found] == 2 * texts
    assert modified([dense()], dict.fromkeys(given)) == [dense()]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--window=1023", "'1023' is not LEFT:RIGHT or none; for example 1023:0"),
        ("--window=-2:0", "'-2:0' is not LEFT:RIGHT or none"),
        ("--softcap=-1", "'-1' is not a number from 1e-30 to 1e+30, 0 or none; for example 50"),
        ("--dropout=1", "'1' is not a number from 0 to below 1, or none; for example 0.1"),
        ("--softcap=inf", "'inf' is not a number from 1e-30 to 1e+30, 0 or none"),
        ("--bias=all", "'all' is not one of heads, shared, batch, none; for example heads"),
        ("--mod=blocks", "'blocks' is not one of documents, t5, dilated, prefix, softcap, none"),
    ],
)
def test_a_wrong_option_says_what_is_right(option: str, says: str) -> None:
    assert says in bench(option, code=2).stderr


@pytest.mark.parametrize("names", [("--preset", "gqa"), ("--preset", "mods")])
def test_what_names_its_cases_takes_no_modifications(names: tuple[str, str]) -> None:
    assert "--sinks cannot be combined with --preset" in bench(*names, "--sinks", code=2).stderr


def test_a_record_holds_what_modified_a_case_and_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    shape = ("--seqlen-q", "50", "--heads", "2", "--head-dim", "8", "--causal")
    mods = ("--window", "9:,none", "--sinks", "no,yes", "--mod", "prefix")
    result = bench(*shape, *mods, "--repeats", "1", "--output", str(path))
    record = records.read_bench(path)

    texts = ["window 9:, mod prefix", "window 9:, sinks, mod prefix", "mod prefix"]
    assert list(dict.fromkeys(row["mods"] for row in record.rows))[:3] == texts
    assert {row["check"] for row in record.rows} == {"passed"}
    assert str(records.case_of(record.rows[0]).mods) == texts[0]
    assert len(records.by_case(record.rows)) == 4
    assert "window 9:, sinks, mod prefix" in result.stdout
    assert "FLOPs of windows, documents" in result.stdout


def test_a_q_offset_places_a_window_that_is_not_causal(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    shape = ("--seqlen-q", "20", "--seqlen-k", "50", "--heads", "2", "--head-dim", "8")
    masks = ("--q-offset", "-3,9", "--window", "4:2,none")
    alone = ("--provider", "cupy_flash-cpu", "--repeats", "1")
    bench(*shape, *masks, *alone, "--output", str(path))
    rows = records.read_bench(path).rows
    found = {(case.q_offset, str(case.mods)) for case in map(records.case_of, rows)}

    assert found == {(-3, "window 4:2"), (9, "window 4:2"), (None, "")}
    assert len(rows) == 3
    assert {row["check"] for row in rows} == {"passed"}


def test_a_row_from_before_there_were_modifications_has_none() -> None:
    row = {name: getattr(dense(), name) for name in records.CASE_FIELDS}
    row |= {"q_offset": 90, "softmax_scale": 0.25}

    assert records.case_of(row) == dense()
    assert records.case_of(row | {"mods": None}) == dense()


@pytest.mark.parametrize("wrong", ["windows 3:0", 7, {"window": [1, 0]}, ""])
def test_a_row_with_other_modifications_is_no_row_of_bench(wrong: object) -> None:
    sizes = {name: getattr(dense(), name) for name in records.CASE_FIELDS}
    times = dict.fromkeys(("median_ms", "low_quartile_ms", "high_quartile_ms", "tflops"))
    row = sizes | times | {"provider": "x", "q_offset": 90, "softmax_scale": 0.25, "mods": wrong}

    assert str(records.bench_fault([row])).startswith("row 0 has mods")
    assert records.bench_fault([row | {"mods": "sinks"}]) is None


def test_a_case_goes_through_json() -> None:
    for case in (dense(ALL[-1], causal=True), varlen("alibi")):
        assert Case.of_record(json.loads(json.dumps(case.as_record()))) == case


def test_a_description_tells_modifications_apart() -> None:
    shared, own = describe([dense("sinks"), dense()])

    assert "sinks" not in shared
    assert own == ["sinks", "plain"]
    assert "plain" not in describe([dense()])[0]
    assert describe([dense("mod t5")])[0].endswith("full mod t5")


def test_a_workload_may_modify_its_cases(tmp_path: Path) -> None:
    path = tmp_path / "workload.csv"
    head = "seqlen_q,heads_q,head_dim,mods\n"
    path.write_text(head + '128,4,64,"window 9:0, sinks"\n128,4,64,\n', encoding="utf-8")
    found = read_workload(path)

    assert [str(weighted.case.mods) for weighted in found] == ["window 9:0, sinks", ""]
    assert [group.is_modified for group in groups_of(found)] == [True, False]
    path.write_text(head + "128,4,64,window 9\n", encoding="utf-8")
    with pytest.raises(Exception, match=r"row 1 of .* has mods 'window 9'"):
        read_workload(path)


def test_on_a_gpu_flex_attention_stands_beside_modified_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(torch_providers, "why_no_torch", lambda: None)
    monkeypatch.setattr(check_module, "why_no_matmul", lambda: None)
    dense_ones, modifications = {"cache": False, "lengths": None}, {"sinks": (True,)}
    chosen = _choose_providers(None, None, ["bfloat16"], None, dense_ones, modifications)

    names = ["cupy_flash", "torch-flex", "torch-flash", "torch-cudnn", "cupy-library"]
    assert [found.name for found in chosen] == names
