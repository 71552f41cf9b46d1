"""The support matrix is up to date, and its cells say what the planner and the test runs say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.cli.benchmark_scripts import IN_CHECKOUT, script

from cupy_flash.cli.records.environment import kernel_name

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

page = script("support_matrix/support_page")
cells = script("support_matrix/support_cells")
calls = script("support_matrix/support_calls")
dims = script("support_matrix/support_dims")
features = script("support_matrix/support_features")
runs = script("support_matrix/support_runs")

RUN = {
    **{"commit": "0123456789abcdef", "dirty": False, "gpu": "NVIDIA H200", "sm": "sm_90"},
    **{"date": "2026-12-01T08:00:00+00:00", "tests": 7},
    "versions": {"cupy": "14.1.0", "nvrtc": "13.5", "driver": "580.1"},
}
BASE = [90, "hopper", "bfloat16", 128]


def feature(title: str) -> Any:
    return next(each for each in page.FEATURES if each.title == title)


def ran(*rows: list[Any]) -> Any:
    return runs.Ran(runs.digests(), [RUN], runs.from_lists(rows))


def cell(ran: Any, title: str, direction: str = "forward", arch: int = 90) -> str:
    """Return the text of a cell of the 16-bit dtypes."""
    text: str = page.Page("", ran)._cell(feature(title), direction, page.SIXTEEN_BIT, (arch,))
    return text


def test_the_page_is_up_to_date() -> None:
    text = page.rendered()
    assert page.PAGE.read_text(encoding="utf-8") == text
    assert len(text.splitlines()) <= 300


def test_the_recorded_kernels_are_the_present_ones() -> None:
    found = runs.read(runs.FILE)
    assert found is None or runs.changed(found) == []


def test_a_changed_kernel_or_page_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "FILE", tmp_path / "ran.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(page, "rendered", lambda: "text")
    page.PAGE.write_text("other text")
    assert page.main(["--check"]) == 1
    assert "not up to date" in capsys.readouterr().err
    assert page.main([]) == page.main(["--check"]) == 0
    text = runs.write(page.FILE, RUN, runs.from_lists([[*BASE, []]])) and page.FILE.read_text()
    page.FILE.write_text(text.replace(runs.digests()["decode"], "0" * 16))
    assert page.main(["--check"]) == 1
    assert "decode, decode lse changed since" in capsys.readouterr().err


def test_every_feature_is_computed_by_a_family_that_tests_compile() -> None:
    compiled = {(arch, kernel_name(family, way)) for arch, way, family in dims.served()}
    planned = {
        (arch, kernel_name(plan.family, direction))
        for each in page.FEATURES
        for direction in page.HEADINGS
        if direction in each.directions
        for dtype in features.DTYPES
        if dtype in page.DTYPES
        for arch in cells.ARCHS
        if not isinstance(plan := calls.plan_of(each, direction, dtype, arch), str)
    }
    assert planned == compiled


def test_a_kernel_works_if_it_ran_for_all_features_of_the_call() -> None:
    assert cell(None, "`causal`") == "compiles, `hopper`"
    assert cell(ran([*BASE, ["window"]]), "`causal`") == "compiles, `hopper`"
    found = ran([*BASE, ["causal"]], [*BASE[:3], 64, ["prefix_lens"]])
    assert cell(found, "`causal`") == "works, `hopper`"
    assert cell(found, "`prefix_lens`") == "works, `hopper`"
    assert cell(found, "`causal`", arch=80) == "compiles, `mma`"
    assert cell(found, "`causal`", "backward") == "compiles, `hopper`"
    assert cell(found, "captured in a CUDA graph") == "compiles, `hopper`"


def test_gradients_of_modifications_have_to_have_run() -> None:
    backward = [90, "hopper backward", "float16", 128]
    rows = [f"gradient of {name}" for name in "qkv"] + ["sinks"]
    assert cell(ran([*backward, rows]), "`sinks`", "backward") == "compiles, `hopper`"
    found = ran([*backward, [*rows, "gradient of sinks"]])
    assert cell(found, "`sinks`", "backward") == "works, `hopper`"


def test_an_append_works_if_both_kernels_ran() -> None:
    decode = [90, "decode", "float16", 128, ["grouped", "kvcache"]]
    append = [90, "append", "float16", 64]
    assert cell(ran(decode), "append") == "compiles, `decode`"
    found = ran(decode, [*append, []])
    assert cell(found, "append") == "works, `decode`"
    assert cell(found, "append with rotary embedding") == "compiles, `decode`"
    found = ran(decode, [*append, ["rotary"]])
    assert cell(found, "append with rotary embedding") == "works, `decode`"


@pytest.mark.parametrize(
    ("title", "direction", "expected"),
    [
        ("`seqlens_k` (padding)", "tangent", "compiles, falls back to `mma`"),
        ("cache with `batch_invariant`", "forward", "compiles, falls back to `mma`"),
        ("dropout", "received", "array operations"),
        ("append", "backward", "–"),
    ],
)
def test_other_cells(title: str, direction: str, expected: str) -> None:
    assert cell(None, title, direction) == expected


def test_a_refusal_refers_to_its_reason() -> None:
    text = page.Page("{{float8}}\n{{reasons}}", None).text
    assert "refused [1](#reasons); sm_90: compiles, `hopper`" in " ".join(text.split())
    assert re.search(r"^1\. decode: does not support q, k and v of float8_e4m3fn;", text, re.M)
    assert "\n2. " not in text


def test_runs_and_head_dims_are_named() -> None:
    found = ran([*BASE[:3], 64, []], [*BASE, [runs.SAME_BITS]], [*BASE[:3], 512, []])
    text = page.Page("{{runs}}\n\n{{dims}}", found).text
    assert text.startswith("These test runs are recorded:\n\n- NVIDIA H200 (sm_90): 7 tests passed")
    row = next(line for line in text.splitlines() if line.startswith("| `hopper`, forward"))
    assert row.endswith("| no | yes, compared | sm_90: 1 to 128, 257 to 512 |")
    assert "| `mma`, forward | float32 | sm_80 to sm_120: 1 to 128 | any | yes |" in text
    assert "sm_75: 129 to 576; sm_80 to sm_120: 1 to 576" in text
