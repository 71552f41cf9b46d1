"""The notebooks of the examples run, give the stored texts, and are lessons in small steps."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.examples import EXAMPLES, load

FOLDER = EXAMPLES / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
# Number of lines that a cell has at most.
LONGEST_CELL = 40


def read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def of_kind(notebook: Any, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def runner() -> Any:
    """Return the script that executes notebooks; skip the test if its packages are missing."""
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package, reason="the extra `notebooks` is not installed")
    return load("run_notebooks", FOLDER)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_gives_the_stored_texts(name: str) -> None:
    script = runner()
    stored = script.nbformat.read(FOLDER / name, as_version=4)

    assert script.differences(stored, script.executed(FOLDER / name)) == []


def test_a_text_that_differs_is_a_difference_and_a_picture_is_not() -> None:
    script = runner()
    stored = script.nbformat.read(FOLDER / NOTEBOOKS[1], as_version=4)
    found = copy.deepcopy(stored)
    outputs = [output for cell in found.cells for output in cell.get("outputs", ())]
    (picture, *_) = (output for output in outputs if "data" in output)
    (text, *_) = (output for output in outputs if "text" in output)

    picture.data["image/png"] = "another"
    assert script.differences(stored, found) == []
    text.text += "more"
    assert len(script.differences(stored, found)) == 1


def test_a_wrong_result_stops_a_notebook(tmp_path: Path) -> None:
    script = runner()
    notebook = script.nbformat.v4.new_notebook()
    notebook.cells = [script.nbformat.v4.new_code_cell("assert 1 + 1 == 3")]
    script.nbformat.write(notebook, tmp_path / "wrong.ipynb")

    with pytest.raises(script.nbclient.exceptions.CellExecutionError, match="AssertionError"):
        script.executed(tmp_path / "wrong.ipynb")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_a_lesson_in_small_steps(name: str) -> None:
    """A text comes before each code cell, and results are checked."""
    notebook = read(name)
    first, *_, last = of_kind(notebook, "markdown")
    kinds = [cell["cell_type"] for cell in notebook["cells"]]

    assert re.match(r"# .+\n\n\*\*Goal\.\*\* ", source(first))
    assert "## What you have learned\n" in source(last)
    assert "**Try it.**" in source(last)
    assert "code code" not in " ".join(kinds)
    codes = [source(cell) for cell in of_kind(notebook, "code")]
    assert max(code.count("\n") + 1 for code in codes) <= LONGEST_CELL
    assert sum("assert " in code for code in codes) >= 2


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_outputs_are_there_small_and_the_same_on_every_machine(name: str) -> None:
    notebook = read(name)
    outputs = [output for cell in of_kind(notebook, "code") for output in cell["outputs"]]
    texts = ["".join(output.get("text", "")) for output in outputs]

    assert (FOLDER / name).stat().st_size < 200_000
    assert sum(map(bool, texts)) >= 2
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    # Neither paths nor times, versions or the names of machines.
    pattern = r"/\w+/|\b\d+(\.\d+)? ?(ms|us|s)\b|\d+\.\d+\.\d+|CPU|EPYC|Xeon"
    assert [text for text in texts if re.search(pattern, text)] == []
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_of_a_notebook_lead_somewhere(name: str) -> None:
    texts = " ".join(source(cell) for cell in of_kind(read(name), "markdown"))
    links = re.findall(r"\]\(([^)#\s]+)", texts)

    assert [link for link in links if not (FOLDER / link).exists()] == []
    later = NOTEBOOKS[NOTEBOOKS.index(name) + 1 :]
    assert not later or later[0] in links
