"""The kernels of examples/kernels: they compile without a GPU, and are right on one."""

from __future__ import annotations

import difflib
import re
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.compilers import needs_compiler
from support.examples import EXAMPLES, call, load

from cupy_flash.gpu.compiler import known_architectures

FOLDER = EXAMPLES / "kernels"
ladder = load("ladder", FOLDER)
RUNGS = pytest.mark.parametrize("rung", ladder.RUNGS, ids=lambda rung: rung.file)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def code(file: str) -> list[str]:
    """Return the lines of a kernel from its first line of code on."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    return text[text.index("#ifndef CAUSAL") :].splitlines()


def test_every_kernel_of_the_folder_is_a_rung_of_which_the_page_tells() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    files = sorted(path.name for path in FOLDER.glob("*.cu"))
    assert files == [rung.file for rung in ladder.RUNGS]
    lines = [len((FOLDER / file).read_text(encoding="utf-8").splitlines()) for file in files]
    rows = re.findall(r"^\| \[(\w+\.cu)\]\(\1\) \| (\d+) \|", page, re.MULTILINE)
    assert rows == [(file, str(count)) for file, count in zip(files, lines, strict=True)]


@RUNGS
def test_a_rung_includes_no_other_file(rung: Any) -> None:
    assert not any(line.lstrip().startswith("#include") for line in code(rung.file))


@needs_compiler
@CAUSAL
@pytest.mark.parametrize(
    ("rung", "arch"),
    [
        pytest.param(rung, arch, id=f"{rung.file}-sm_{arch}")
        for rung, arch in product(ladder.RUNGS, (75, 80, 90, 120))
        if rung.why_not(arch) is None
    ],
)
def test_a_rung_compiles_without_spills_or_warnings(rung: Any, arch: int, causal: bool) -> None:
    if arch not in known_architectures():
        pytest.skip(f"this NVRTC does not know sm_{arch}")
    log = ladder.compiler_log(rung, arch, causal)
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", log) == [("0", "0")]
    # The compiler also warns if it serializes wgmma or ignores setmaxnreg.
    assert "warning" not in log
    assert not re.search(r"\bC7\d\d\d\b", log)


def test_a_rung_says_which_architectures_it_is_for() -> None:
    def served(arch: int) -> list[str]:
        return [rung.file[0] for rung in ladder.RUNGS if rung.why_not(arch) is None]

    found = {arch: "".join(served(arch)) for arch in (70, 75, 80, 89, 90, 100, 120)}
    assert found == {70: "", 75: "12", 80: "123", 89: "123", 90: "12345", 100: "123", 120: "123"}


def test_dynamic_shared_memory_is_what_the_kernels_declare() -> None:
    declared = f"static_assert(sizeof(SharedMemory) == {ladder.SHARED_BYTES}"
    hopper = [rung.file for rung in ladder.RUNGS if rung.hopper]
    assert len(hopper) == 2
    assert all(any(line.startswith(declared) for line in code(file)) for file in hopper)


def test_the_last_rung_only_adds_ping_pong_to_the_one_before() -> None:
    before, after = (code(rung.file) for rung in ladder.RUNGS[-2:])
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert all(line.startswith("+") for line in changes)
    assert len(changes) < 20


@needs_compiler
@pytest.mark.parametrize("options", [["--compile-only"], []], ids=["on request", "no GPU"])
def test_without_a_gpu_every_rung_is_compiled_or_has_a_reason(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupy.is_available", lambda: False)
    status, output, errors = call(ladder, capsys, *options, "--arch", "sm_80")
    lines = output.splitlines()[0 if options else 1 :]
    assert (status, errors) == (0, "")
    assert options or output.startswith("No GPU here")
    assert [line.split()[0] for line in lines] == [rung.file for rung in ladder.RUNGS]
    assert all(re.search(r"compiles, \d+ registers$", line) for line in lines[:3])
    assert all("needs sm_90 (Hopper), not sm_80" in line for line in lines[3:])


@needs_compiler
def test_a_wrong_architecture_gets_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    status, output, errors = call(ladder, capsys, "--compile-only", "--arch", "hopper")
    assert (status, output) == (2, "")
    assert "--arch is 'hopper'; expected a name such as sm_90" in errors


SHAPES = [
    *product([1], [1, 2, 15, 31, 32, 33, 63, 64, 65, 127, 128, 129], [1]),
    *((2, 5, 3), (2, 200, 3), (3, 256, 2), (1, 257, 5), (2, 385, 2), (1, 640, 2), (1, 1999, 3)),
]


@pytest.mark.gpu
@CAUSAL
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@RUNGS
def test_outputs_are_those_of_the_formula(
    rung: Any, shape: tuple[int, int, int], causal: bool, rng: np.random.Generator
) -> None:
    import cupy

    arch = int(cupy.cuda.Device().compute_capability)
    if reason := rung.why_not(arch):
        pytest.skip(f"{rung.file} {reason}")
    batch, seqlen, heads = shape
    qkv = rng.standard_normal((3, batch, seqlen, heads, ladder.HEAD_DIM), np.float32)
    assert ladder.error_ratio(rung, qkv.astype(np.float16), causal) <= 1


@pytest.mark.gpu
def test_scores_that_rise_along_the_keys_rescale_earlier_results(rng: np.random.Generator) -> None:
    import cupy

    arch = int(cupy.cuda.Device().compute_capability)
    qkv = rng.standard_normal((3, 1, 700, 2, ladder.HEAD_DIM), np.float32)
    for order in (1, -1):
        # Every score is above those of all keys before it, or below them: the maxima change in
        # each tile, in whichever order a kernel processes the tiles.
        qkv[0] = np.abs(qkv[0])
        qkv[1] = np.linspace(-1, 1, 700)[::order, None, None]
        for rung, causal in product(ladder.RUNGS, (False, True)):
            if rung.why_not(arch) is None:
                assert ladder.error_ratio(rung, qkv.astype(np.float16), causal) <= 1, rung.file


@pytest.mark.gpu
@CAUSAL
def test_the_table_has_a_rate_or_a_reason_for_every_rung(
    causal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--batch", "1", "--seqlen", "500", "--heads", "2", *["--causal"] * causal]
    status, output, errors = call(ladder, capsys, *options)
    assert (status, errors) == (0, "")
    title, _, *rows, library = output.splitlines()
    assert title.endswith(f"batch 1, seqlen 500, 2 heads of 128, {'causal' if causal else 'full'}")
    assert [row.split()[0] for row in rows] == [rung.file for rung in ladder.RUNGS]
    assert all(re.search(r" [\d.]+ +[\d.]+%$|needs sm_", row) for row in rows)
    assert float(library.split()[-1]) > 0
