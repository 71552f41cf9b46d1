"""Options of several commands: lists of values, presets, and one-line errors."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import numpy as np
import pytest
from click.shell_completion import ShellComplete
from support.cli.commands import input_options, only_line, refusal, run

from cupy_flash.cli.cases import presets
from cupy_flash.cli.cases.cases import Case, describe, sweep
from cupy_flash.cli.cases.lists import CommaList
from cupy_flash.cli.cases.mod_options import modified
from cupy_flash.cli.cases.mods import CaseMods
from cupy_flash.cli.cases.options import tile_request
from cupy_flash.cli.main import main
from cupy_flash.mods.keywords import Window

SMALL = ("--seqlen-q", "8", "--heads", "1", "--provider", "cupy_flash-cpu", "--repeats", "3")


def swept(**given: object) -> list[Case]:
    options: dict[str, object] = {"dtype": ["float32"], "batch": [1], "seqlen_q": [8], "heads": [4]}
    options |= {"head_dim": [16], "causal": [False], "layout": ["bshd"]}
    left_out = ("seqlen_k", "kv_heads", "head_dim_v", "q_offset", "softmax_scale")
    return sweep(options | dict.fromkeys(left_out) | given)


def test_keys_heads_and_values_follow_the_queries_where_not_given() -> None:
    (case,) = swept()

    assert (case.seqlen_k, case.heads_kv, case.head_dim_v) == (8, 4, 16)


def test_lists_sweep_over_every_combination() -> None:
    cases = swept(batch=[1, 2], seqlen_q=[8, 113], causal=[False, True])

    assert len(cases) == len(set(cases)) == 8


def test_a_q_offset_applies_to_the_cases_of_a_sweep_that_are_causal_or_modified() -> None:
    cases = swept(causal=[False, True], q_offset=[-3, 5])
    causal = [(False, "", None), (True, "", -3), (True, "", 5)]
    windows = {"window": (CaseMods.window, Window(9, 0))}
    windowed = [(mask, "window 9:0", offset) for mask in (False, True) for offset in (-3, 5)]

    for mods, expected in (({}, causal), (windows, causal + windowed)):
        found = [(case.causal, str(case.mods), case.q_offset) for case in modified(cases, mods)]
        assert len(found) == len(expected)
        assert set(found) == set(expected)


def test_a_case_in_bhsd_has_the_strides_of_a_bhsd_array() -> None:
    (case,) = swept(layout=["bhsd"], seqlen_q=[7], seqlen_k=[5])
    q = np.empty((1, 4, 7, 16), np.float32).swapaxes(1, 2)

    strides = tuple(stride // 4 for stride in q.strides[:3])
    assert case.problem().tensors["q"].strides == strides


def test_a_description_names_only_what_differs() -> None:
    shared, own = describe(swept(seqlen_q=[8, 113], seqlen_k=[203]))

    assert shared == "fp32 b1 h4 d16 full"
    assert own == ["s8/203", "s113/203"]


def completions(*words: str) -> list[str]:
    """Return the completions that a shell offers for the last word."""
    complete = ShellComplete(main, {}, "cupy-flash", "_CUPY_FLASH_COMPLETE")
    return [item.value for item in complete.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("bench", "--dtype", "f"), ["float16", "float32", "float64", "fp16", "fp32", "fp64"]),
        (("bench", "--dtype", "float16,bf"), ["float16,bfloat16", "float16,bf16"]),
        (("roofline", "--dtype", "float16,float"), ["float16,float32", "float16,float64"]),
        (("bench", "--causal", "no,"), ["no,yes"]),
        (("bench", "--layout", "bh"), ["bhsd"]),
        (("bench", "--provider", "numpy"), ["numpy-naive"]),
        (("bench", "--baseline", "numpy-naive,torch-fla"), ["numpy-naive,torch-flash"]),
        (("compile", "--arch", "sm_7"), ["sm_75"]),
        (("compile", "--arch", "sm_90,sm_7"), ["sm_90,sm_75"]),
        (("tune", "--arch", "sm_9"), ["sm_90"]),
        (("roofline", "--gpu", "H"), ["H100", "H100-PCIe", "H100-NVL", "H200"]),
        (("roofline", "--gpu", "A10,L4"), ["A10,L4", "A10,L40S"]),
        (("bench", "--batch", "1"), []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_shell_completes_the_names_that_options_take(
    words: tuple[str, ...], offered: list[str]
) -> None:
    assert completions(*words) == offered


def test_a_comma_list_says_which_item_is_wrong() -> None:
    with pytest.raises(click.BadParameter, match=r"'x' is not a whole number; for example 1,2"):
        CommaList(int, "a whole number", "1,2").convert("1, 2,x", None, None)


def test_forced_tile_fields_come_from_options_and_from_name_value_texts() -> None:
    assert tile_request({"Br": 64, "Bc": None}, ["threads=128"]) == {"Br": 64, "threads": 128}
    assert tile_request({"Br": None}, []) is None


def test_a_tile_field_may_be_repeated_if_it_says_the_same() -> None:
    assert tile_request({"Br": 8}, ["Br=8"]) == {"Br": 8}


def test_the_fa3_grid_keeps_tokens_and_hidden_size_constant() -> None:
    cases = presets.preset("fa3-grid").cases

    assert len(cases) == len(set(cases)) == 36
    assert {case.batch * case.seqlen_q for case in cases} == {16384}
    assert {case.heads_q * case.head_dim for case in cases} == {2048}
    assert {case.seqlen_q for case in cases} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {case.dtype for case in cases} == {"bfloat16"}


def test_the_fa3_grid_can_be_asked_for_in_several_dtypes() -> None:
    cases = presets.preset("fa3-grid", ["float16", "bfloat16"]).cases

    assert len(cases) == 72
    assert {case.dtype for case in cases} == {"float16", "bfloat16"}


def test_the_float32_preset_compares_with_the_best_of_two_torch_backends() -> None:
    preset = presets.preset("float32")

    assert {case.dtype for case in preset.cases} == {"float32"}
    assert preset.baseline == ("torch-efficient", "torch-math")
    assert any((case.heads_q, case.seqlen_q) == (1, 4096) for case in preset.cases)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("bench --batch 1,x", "'x' is not a whole number from 0; for example 1,2,4"),
        ("bench --dtype float8", "'float8' is not a dtype (float16, bfloat16, float32,"),
        ("bench --causal maybe", "'maybe' is not yes or no"),
        ("bench --heads 6 --kv-heads 4", "--heads 6 is not a multiple of --kv-heads 4"),
        ("tune --arch 90 --heads 6 --kv-heads 4 --cache", "--kv-heads 4"),
        (
            "bench --head-dim 600",
            "Invalid value for '--head-dim': '600' is not a whole number from 1 to 576; for",
        ),
        ("bench --head-dim-v 577", "'--head-dim-v': '577' is not a whole number from 1 to"),
        ("bench --seqlen-k 1073740801", "'--seqlen-k': '1073740801' is not a whole number"),
        ("bench --softmax-scale nan", "'--softmax-scale': 'nan' is not a finite number"),
        (
            "bench --cache --append --rotary --head-dim 33",
            "--rotary needs an even --head-dim, not 33",
        ),
        ("bench --q-offset 3", "--q-offset affects only a causal mask, a window or"),
        ("bench --causal no --q-offset 3", "add --causal or --window, or leave it"),
        ("bench --window", "bench: Option '--window' requires an argument. Expected LEFT"),
        ("roofline --heads", "'--heads' requires an argument. Expected a whole number from 1"),
        ("bench --tile", "bench: Option '--tile' requires an argument."),
        ("bench --seed -1", "-1 is not in the range x>=0"),
        ("bench --cell-seconds nan", "'nan' is not a time; expected seconds above 0, or"),
        ("bench --cell-seconds 0", "0.0 is not in the range x>0"),
        ("bench --provider torch", "'torch' is unknown; expected some of cupy_flash,"),
        (
            "bench --provider numpy-naive --baseline torch-flash",
            "--baseline torch-flash is not among the providers; expected some of numpy-naive",
        ),
        ("bench --preset fa3-grid --batch 3", "--batch cannot be combined with --preset"),
        (
            "bench --preset fa3-grid --input {file}",
            "--input cannot be combined with --preset: both define the cases",
        ),
        ("bench --preset fa4", "'fa4' is not one of 'fa3-grid', 'float32'"),
        ("bench --tile threads", "'threads' is not NAME=NUMBER"),
        (
            "bench --provider cupy_flash-cpu --stages 3",
            "unknown tile field 'stages'; expected one of Br, Bc",
        ),
        ("bench --br 4 --tile Br=8", "the tile's Br is given as 4 and as 8"),
        ("bench --tile Br=8 --tile Br=16", "the tile's Br is given as 8 and as 16"),
        ("bench --output rows.txt", "ends in '.txt'; expected one of .json, .csv, .md"),
        ("bench --output rows", "'rows' has no suffix; expected one of .json, .csv, .md"),
        ("bench --output ''", "an empty name has no suffix; expected one of .json, .csv"),
        ("tune --arch sm_20", "unknown architecture 'sm_20'; expected one of sm_75,"),
        ("tune --backend cpu --family simt", "--backend cpu has no --arch and no"),
        (
            "tune --backend cpu --preset decode",
            "--preset decode is for GPUs; leave --backend cpu out",
        ),
        (
            "tune --backend cpu --preset decode --workload {file}",
            "--preset cannot be combined with --workload: both define the cases",
        ),
        ("compile --arch hopper", "unknown architecture 'hopper'; expected one of sm_75,"),
        ("compile --list --output cubins", "--list builds nothing to write; leave out"),
        ("benchmark", "no command 'benchmark'; expected one of bench, "),
    ],
)
def test_a_wrong_option_gets_one_line_that_says_what_would_be_right(line: str, says: str) -> None:
    result = run(*shlex.split(line.format(file=__file__)), code=2)

    assert says in only_line(result)
    assert result.stdout == ""


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_timed(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    result = run("bench", "--output", tmp_path / "file" / "rows.json", code=2)

    assert "cannot be written" in result.stderr
    assert result.stdout == ""


def test_the_suffix_of_an_output_may_be_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "ROWS.JSON"
    run("bench", *SMALL, "--output", path)

    assert path.read_text(encoding="utf-8").startswith("{")


def test_an_output_is_not_created_when_the_command_fails(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    run("bench", "--output", path, "--head-dim", "600", code=2)

    assert not path.exists()


def test_the_bare_command_shows_its_help() -> None:
    text = run().stdout

    assert all(name in text for name in ("bench", "compile", "info", "tune"))


def test_the_version_is_the_packages() -> None:
    import cupy_flash

    assert run("--version").stdout.split()[-1] == cupy_flash.__version__


@pytest.mark.parametrize("command", ["", "bench", "tune", "tables", "tables list", "info", "plot"])
def test_help_has_a_short_option_too(command: str) -> None:
    assert run(*command.split(), "-h").stdout == run(*command.split(), "--help").stdout != ""


def test_dtypes_may_be_named_as_tables_print_them() -> None:
    result = run("bench", *SMALL, "--dtype", "fp16,bf16,fp32,fp64")
    named = [line.split()[0] for line in result.stdout.splitlines() if "cupy_flash-cpu  " in line]

    assert named == ["fp16", "bf16", "fp32", "fp64"]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("bench", "Number of query rows. [default: 1024,4096; on the CPU 1024,2048]"),
        ("tune", "Number of query heads. [default: 16; on the CPU 8]"),
        ("profile", "Batch size. [default: 1]"),
        ("roofline", "fp32, fp64. [default: float16]"),
        ("bench", "[default: batch 8, seqlen_q 1, seqlen_k 8192, heads 32, kv_heads 8, head_dim"),
    ],
)
def test_help_tells_what_shape_is_taken_where_none_is_given(command: str, told: str) -> None:
    assert told in " ".join(run(command, "--help").stdout.split())


def test_the_folder_of_an_output_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "rows.md"
    run("bench", *SMALL, "--output", path)

    assert path.exists()


def test_an_output_of_a_name_that_is_too_long_is_a_wrong_option() -> None:
    said = refusal("bench", "--output", "a" * 300 + ".json")

    assert "cannot be written: File name too long" in said


def test_a_command_that_takes_one_architecture_refuses_a_list() -> None:
    result = run("tune", "--arch", "sm_80,sm_90", code=2)

    assert "'sm_80,sm_90' is a list; expected one architecture" in result.stderr


def test_arrays_of_several_dtypes_are_refused(tmp_path: Path) -> None:
    ones = np.ones((1, 3, 1, 8), np.float32)
    options = input_options(tmp_path, q=ones, k=ones, v=ones.astype(np.float16))
    result = run("bench", *options, code=2)

    assert "q, k and v in" in result.stderr
    assert "are float32, float32, float16; expected one dtype" in result.stderr
