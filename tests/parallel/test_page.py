"""The snippets of docs/guide/parallel.md, and the example, run on several ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.parallel.ranks import launcher

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/long_context.py"
SNIPPET = re.compile(r"^<!-- needs: ranks -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


def run_on(ranks: int, *program: str) -> subprocess.CompletedProcess[str]:
    return run(launcher(), "-n", str(ranks), sys.executable, *program)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
    return subprocess.run(command, env=environment, check=False, **options)


def test_the_snippets_of_the_page_print_what_they_say_on_every_rank(tmp_path: Path) -> None:
    snippets = SNIPPET.findall((ROOT / "docs/guide/parallel.md").read_text(encoding="utf-8"))
    assert len(snippets) >= 2
    # Each rank prints to its own file, because simultaneous output would mix lines.
    redirected = (
        "import sys\nfrom mpi4py import MPI\n"
        f"sys.stdout = open(rf'{tmp_path}/{{MPI.COMM_WORLD.Get_rank()}}.txt', 'w')\n"
    )
    program = tmp_path / "page.py"
    program.write_text(redirected + "\n".join(snippets), encoding="utf-8")
    done = run_on(3, str(program))
    assert done.returncode == 0, done.stderr
    said = [text for snippet in snippets for text in PRINTED.findall(snippet)]
    for rank in range(3):
        assert (tmp_path / f"{rank}.txt").read_text(encoding="utf-8").splitlines() == said


def test_the_example_finds_its_rows_as_the_formula_has_them() -> None:
    done = run_on(3, str(EXAMPLE), "--tokens", "1001", "--heads", "4")
    assert done.returncode == 0, done.stderr
    assert "1001 tokens, 4 heads of 128, 3 processes" in done.stdout
    assert re.search(r"off by \d.*, allowed \d", done.stdout)


REFUSED = [
    ("--heads 3 --kv-heads 2", "--heads is no multiple of --kv-heads"),
    ("--tokens 0", "--tokens"),
    ("--tokens 5", "fewer than 2 for each of the 4 processes"),
    ("--minutes nan", "--minutes is nan"),
    ("--minutes inf", "--minutes"),
    ("--head-ranks 3", "--head-ranks is 3; expected a divisor of the 4 processes"),
    ("--head-ranks 4 --heads 8", "of the 2 query heads"),
    ("--gpus 4", "--gpus does not go with MPI"),
]


SLOW = [pytest.param(*row, marks=pytest.mark.slow) for row in REFUSED[2:]]


@pytest.mark.parametrize(("arguments", "text"), REFUSED[:2] + SLOW)
def test_the_example_refuses_what_it_cannot_run_in_one_line(arguments: str, text: str) -> None:
    done = run_on(4, str(EXAMPLE), *arguments.split())
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    assert text in line


def test_the_example_says_that_memory_is_short_and_ends_all_processes() -> None:
    done = run_on(2, str(EXAMPLE), "--tokens", str(10**11))
    assert done.returncode != 0
    assert done.stderr.count("Error: out of memory") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_example_ends_all_processes_where_one_fails(tmp_path: Path) -> None:
    """The last rank fails; without an abort, the others would wait for ten minutes."""
    program = tmp_path / "failing.py"
    program.write_text(
        "import runpy, sys\n"
        "from mpi4py import MPI\n"
        "from cupy_flash import parallel\n"
        "def fail(*_, **__):\n"
        "    raise MemoryError('of the last')\n"
        "if MPI.COMM_WORLD.Get_rank() == 2:\n"
        "    parallel.flash_attention = fail\n"
        "sys.argv = ['long_context.py', '--tokens', '100']\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n",
        encoding="utf-8",
    )
    done = run_on(3, str(program))
    assert done.returncode != 0
    assert done.stderr.count("Error: ") == 1
    assert "of the last" in done.stderr


def test_the_example_says_its_options_once() -> None:
    done = run_on(2, str(EXAMPLE), "-h")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == 1


@pytest.mark.slow
def test_the_example_wants_no_more_gpus_than_there_are() -> None:
    done = run(sys.executable, str(EXAMPLE), "--gpus", "1000")
    assert done.returncode == 2
    assert re.fullmatch(r"Error: --gpus is 1000, but there are \d+ GPUs here\n", done.stderr)


def test_the_example_takes_as_few_tokens_as_give_each_process_some() -> None:
    done = run_on(4, str(EXAMPLE), "--tokens", "8", "--heads", "4")
    assert done.returncode == 0, done.stderr
