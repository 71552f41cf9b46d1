"""The snippets of docs/parallel.md, and the example, run on several ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import launcher

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


def run_on(ranks: int, *program: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [launcher(), "-n", str(ranks), sys.executable, *program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_snippets_of_the_page_print_what_they_say_on_every_rank(tmp_path: Path) -> None:
    snippets = SNIPPET.findall((ROOT / "docs/parallel.md").read_text(encoding="utf-8"))
    assert len(snippets) >= 2
    # In files of their own, as ranks that print at once mix their lines.
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
    done = run_on(3, str(ROOT / "examples/long_context.py"), "--tokens", "1001", "--heads", "4")
    assert done.returncode == 0, done.stderr
    assert "1001 tokens, 4 heads of 128, 3 processes" in done.stdout
    assert re.search(r"off by \d.*, allowed \d", done.stdout)


@pytest.mark.parametrize(
    "arguments",
    [("--heads", "3", "--kv-heads", "2"), ("--tokens", "0"), ("--tokens", "5")],
)
def test_the_example_refuses_what_it_cannot_run(arguments: tuple[str, ...]) -> None:
    done = run_on(4, str(ROOT / "examples/long_context.py"), *arguments)
    assert done.returncode == 2
    assert "Error" in done.stderr


def test_the_example_takes_as_few_tokens_as_give_each_process_some() -> None:
    done = run_on(4, str(ROOT / "examples/long_context.py"), "--tokens", "8", "--heads", "4")
    assert done.returncode == 0, done.stderr
