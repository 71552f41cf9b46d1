"""Workload files, the preset `common`, and which cases belong to one sweep."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import click
import pytest

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.workload import PRESETS, Weighted, groups_of, read_workload
from cupy_flash.cli.tune.findings import class_text
from cupy_flash.planning import tuning
from cupy_flash.problem.device import device_for_arch

ROW = {"seqlen_q": 113, "heads_q": 4, "head_dim": 24}


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def read_json(folder: Path, *rows: Any) -> list[Weighted]:
    return read_workload(written(folder / "w.json", json.dumps(rows)))


def read_csv(folder: Path, text: str) -> list[Weighted]:
    return read_workload(written(folder / "w.csv", text))


def message(folder: Path, row: Any) -> str:
    """Return the error for a file whose second row is `row`."""
    with pytest.raises(click.UsageError) as caught:
        read_json(folder, ROW, row)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_keys_kv_heads_and_value_dims_follow_the_queries(tmp_path: Path) -> None:
    (weighted,) = read_json(tmp_path, ROW)

    assert weighted == Weighted(Case("bfloat16", 1, 113, 113, 4, 4, 24, 24), 1.0)


FULL = {
    **{"dtype": "float32", "batch": 3, "seqlen_q": 113, "seqlen_k": 203, "heads_q": 4},
    **{"heads_kv": 2, "head_dim": 24, "head_dim_v": 40, "causal": True, "q_offset": -7},
    **{"softmax_scale": 0.5, "layout": "bhsd", "weight": 2.5},
}
EXPECTED = Weighted(Case("float32", 3, 113, 203, 4, 2, 24, 40, True, -7, 0.5, "bhsd"), 2.5)


def test_every_field_of_a_case_can_be_given_in_json(tmp_path: Path) -> None:
    assert read_json(tmp_path, FULL) == [EXPECTED]


def test_every_field_of_a_case_can_be_given_in_csv(tmp_path: Path) -> None:
    text = ",".join(FULL) + "\n" + ",".join(map(str, FULL.values())) + "\n"

    assert read_csv(tmp_path, text) == [EXPECTED]


def test_an_empty_cell_is_a_field_that_was_left_out(tmp_path: Path) -> None:
    text = "seqlen_q,heads_q,head_dim,causal,weight\n113,4,24,,3\n799,4,24,yes,\n"
    found = [(w.case.seqlen_q, w.case.causal, w.weight) for w in read_csv(tmp_path, text)]

    assert found == [(113, False, 3.0), (799, True, 1.0)]


def test_csv_as_spreadsheets_and_people_write_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "w.CSV"
    path.write_bytes(b"\xef\xbb\xbfseqlen_q, heads_q, head_dim\r\n113, 4, 24\r\n")

    assert read_workload(path) == read_json(tmp_path, ROW)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seqlen": 5}, "'seqlen'; expected some of append, asked_splits, batch"),
        ({"head_dim": 600}, "600; expected 1 to 576"),
        ({"head_dim": None}, "no head_dim"),
        ({"heads_q": 3, "heads_kv": 2}, "q has 3 heads; expected a multiple of the 2"),
        ({"heads_q": 0}, "heads_q 0: expected a whole number from 1"),
        ({"seqlen_q": -1}, "seqlen_q -1: expected a whole number from 0"),
        ({"seqlen_q": 4096.5}, "seqlen_q 4096.5: expected a whole number from 0"),
        ({"seqlen_q": 10**30}, "expected at most"),
        ({"batch": "two"}, "batch 'two': expected a whole number from 0"),
        ({"batch": [1]}, "batch [1]: expected a whole number"),
        ({"dtype": "int8"}, "dtype 'int8': expected one of float16"),
        ({"layout": "sbhd"}, "layout 'sbhd': expected one of bshd"),
        ({"causal": "maybe"}, "causal 'maybe': expected one of 1, true, yes"),
        ({"q_offset": 5}, "q_offset is for a causal mask"),
        ({"softmax_scale": "nan"}, "softmax_scale 'nan': expected a number"),
        ({"weight": 0}, "weight 0: expected a number above 0"),
        ({"weight": "inf"}, "weight 'inf': expected a number above 0"),
    ],
    ids=str,
)
def test_a_bad_row_is_refused_in_one_line_that_names_the_row_and_the_field(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    said = message(tmp_path, ROW | change)

    assert "row 2 of" in said
    assert named in said


def test_a_csv_row_with_more_cells_than_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match=r"row 1 of .* has more values than the header"):
        read_csv(tmp_path, "seqlen_q,heads_q,head_dim\n113,4,24,7\n")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("w.json", "", "cannot be read as a workload"),
        ("w.json", "{", "cannot be read as a workload"),
        pytest.param("w.json", "[" * 200_000, "cannot be read as a workload", id="nested"),
        ("w.json", json.dumps(ROW), "expected a list of objects"),
        ("w.json", "[113]", "expected a list of objects"),
        ("w.json", "null", "expected a list of objects"),
        ("w.json", "[]", "has no rows"),
        ("w.csv", "", "has no rows"),
        ("w.csv", "seqlen_q,heads_q,head_dim\n", "has no rows"),
        ("w.csv", "seqlen_q;heads_q\n113;4\n", "'seqlen_q;heads_q'; expected some of"),
        ("w.csv", "seqlen_q,heads_q,head_dim\n113,4\n", "row 1"),
    ],
)
def test_a_file_that_is_no_workload_is_refused_in_one_line(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    path = written(tmp_path / name, text)
    with pytest.raises(click.UsageError) as caught:
        read_workload(path)

    assert said in caught.value.message
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_of_bytes_that_are_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(click.UsageError, match="cannot be read as a workload"):
        read_workload(path)


def test_cases_of_one_class_are_one_group_in_the_order_of_first_appearance() -> None:
    lengths = (4096, 512, 5000, 4096)
    cases = [Weighted(Case("float16", 4, n, n, 8, 8, 64, 64), n) for n in lengths]
    groups = groups_of(cases)

    assert [[w.weight for w in group.cases] for group in groups] == [[4096, 5000, 4096], [512]]
    assert "q4096 k4096" in groups[0].problem_class


def test_the_preset_has_every_dtype_head_dim_mask_and_length_class_once() -> None:
    groups = groups_of(PRESETS["common"]())
    classes = [group.problem_class for group in groups]
    first = [group.cases[0].case for group in groups]

    assert len(set(classes)) == len(classes)
    assert {case.dtype for case in first} == {"bfloat16", "float16", "float32"}
    assert {case.causal for case in first} == {False, True}
    assert {(case.head_dim, case.head_dim_v) for case in first} >= {(64, 64), (128, 128)}
    sixteen_bit = [case for case in first if case.dtype != "float32"]
    # There are 6 pairs of head dims, full and causal masks, 3 classes of lengths and 2 dtypes.
    assert len(sixteen_bit) == 6 * 2 * 3 * 2


def test_the_presets_two_lengths_of_a_class_count_alike() -> None:
    for group in groups_of(PRESETS["common"]()):
        work = [w.weight * w.case.problem().flops() for w in group.cases]

        assert work == pytest.approx([work[0]] * len(work))


# ---- KV caches and packed sequences

STEP = {
    **{"kind": "cache", "seqlen_q": 1, "seqlen_k": 203, "heads_q": 4, "heads_kv": 2},
    **{"batch": 2, "head_dim": 24, "page_size": 16, "append": True, "rotary": True},
}


def test_a_cache_and_its_lengths_can_be_given_in_json_and_in_csv(tmp_path: Path) -> None:
    step = {"kind": "cache", "page_size": 16, "append": True, "rotary": True}
    case = Case("bfloat16", 2, 1, 203, 4, 2, 24, 24, **step, lengths=(203, 7))
    fields = ",".join(STEP) + ",lengths\n" + ",".join(map(str, STEP.values())) + ",203 7\n"

    assert read_json(tmp_path, STEP | {"lengths": [203, 7]}) == [Weighted(case)]
    assert read_csv(tmp_path, fields) == [Weighted(case)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "paged"}, "kind 'paged': expected one of dense, cache, varlen"),
        ({"page_size": -1}, "page_size -1: expected a whole number from 0"),
        ({"lengths": [203, 0]}, "lengths [203, 0]: expected a whole number from 1"),
        ({"lengths": [7, 7]}, "2 lengths up to 7 cannot be combined with batch 2 and seqlen_k 203"),
        ({"append": "maybe"}, "append 'maybe': expected one of"),
    ],
)
def test_a_bad_cache_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    assert named in message(tmp_path, STEP | change)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_what_only_a_cache_has_says_so(tmp_path: Path, kind: str) -> None:
    own = ROW | {"page_size": 16} | ({} if kind == "dense" else {"kind": kind})

    assert f"has page_size, which needs kind cache; its kind is {kind}" in message(tmp_path, own)


def test_more_sequences_than_kernels_count_are_refused(tmp_path: Path) -> None:
    for own in (ROW, STEP):
        assert f"batch is {10**20}; expected at most" in message(tmp_path, own | {"batch": 10**20})


def test_caches_pages_and_packed_sequences_are_classes_apart_from_blocks() -> None:
    block = Case("bfloat16", 4, 1024, 1024, 4, 4, 64, 64)
    caches = [dataclasses.replace(block, kind="cache", page_size=size) for size in (0, 1, 16)]
    cases = [block, *caches, dataclasses.replace(block, kind="varlen")]
    classes = [tuning.problem_class(case.problem()) for case in cases]
    name = "bfloat16 d64 dv64 full q1024 k1024 rows16384 align16"
    text = "bf16 d64 full s1024 rows16384"

    assert classes == [name, *(f"{name} {kind}" for kind in ("cache", "page1", "page16", "packed"))]
    assert [class_text(each) for each in classes[:3]] == [text, f"{text} cache", f"{text} page1"]


def test_a_latent_is_a_class_apart_from_values_of_their_own(tmp_path: Path) -> None:
    row = {"kind": "cache", "seqlen_q": 1, "seqlen_k": 4096, "heads_q": 16, "heads_kv": 1}
    row |= {"head_dim": 576, "head_dim_v": 512}
    values = [{"values_in_keys": value} for value in (True, "no", "yes")]
    values[2]["cache_dtype"] = "int8"
    latent, apart, stored = read_json(tmp_path, *(row | each for each in values))
    name = "bfloat16 d576 dv512 full q1 k4096 rows16 align16"

    assert (latent.case.values_in_keys, apart.case.values_in_keys) == (True, False)
    classes = [group.problem_class for group in groups_of([latent, apart, stored])]
    assert classes == [f"{name} {kind}" for kind in ("latent-cache", "cache", "int8-latent-cache")]
    said = message(tmp_path, ROW | {"values_in_keys": True})
    assert "values_in_keys, which needs kind cache" in said


def test_a_batch_invariant_problem_takes_no_tile_of_a_class(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(tuning.HOME_VARIABLE, str(tmp_path))
    tuning.reload()
    problem = Case("bfloat16", 4, 1, 203, 4, 4, 64, 64, kind="cache").problem()
    layout = dataclasses.replace(problem.layout, batch_invariant=True)
    invariant = dataclasses.replace(problem, layout=layout)
    device, wanted = device_for_arch("sm_90"), tuning.problem_class(problem)
    entry = tuning.Entry(device.name, 90, 132, "decode", "0", wanted, {"Br": 16}, 1.0)
    tuning.save(entry)

    assert tuning.lookup(device, "decode", "0", problem) == entry
    assert tuning.lookup(device, "decode", "0", invariant) is None
    tuning.clear()


@pytest.mark.parametrize(
    ("preset", "cache_dtypes", "page_sizes"),
    [
        ("decode", {None}, {0, 1, 16, 64}),
        ("decode-quantized", {"float8_e4m3fn", "int8"}, {0, 1, 16, 64}),
        ("mla", {None, "float8_e4m3fn", "int8"}, {0, 16, 64}),
    ],
)
def test_presets_of_decoding_have_pages_too_and_their_cases_count_alike(
    preset: str, cache_dtypes: set[str | None], page_sizes: set[int]
) -> None:
    groups = groups_of(PRESETS[preset]())
    cases = [weighted.case for group in groups for weighted in group.cases]

    assert {case.cache_dtype for case in cases} == cache_dtypes
    assert {case.page_size for case in cases} == page_sizes
    assert {case.values_in_keys for case in cases} == {preset == "mla"}
    assert {case.dtype for case in cases} == {"bfloat16", "float16"}
    for group in groups:
        assert len({(c.case.page_size, c.case.cache_dtype) for c in group.cases}) == 1
        moved = [weighted.weight * weighted.case.kv_bytes for weighted in group.cases]
        assert moved == pytest.approx([moved[0]] * len(moved))


def test_the_varlen_preset_has_packed_sequences_whose_cases_count_alike() -> None:
    groups = groups_of(PRESETS["varlen"]())
    cases = [weighted.case for group in groups for weighted in group.cases]

    kinds = {(case.dtype, case.causal) for case in cases}
    assert kinds == set(itertools.product(("bfloat16", "float16"), (False, True)))
    assert len(groups) == len(cases) == 4
    for group in groups:
        assert group.problem_class.endswith(" packed")
        for weighted in group.cases:
            assert weighted.case.kind == "varlen"
            assert min(weighted.case.lengths or ()) == 16
            assert weighted.weight * weighted.case.flops() == pytest.approx(1e12)
