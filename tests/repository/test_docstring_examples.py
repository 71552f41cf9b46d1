"""Examples in docstrings, each of which runs alone and prints what it shows."""

from __future__ import annotations

import ast
import doctest
import io
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import cupy_flash

PACKAGE = Path(cupy_flash.__file__).parent
# Libraries of the extras that an example may use, with the text that shows that it does.
LIBRARIES = {"torch": "import torch", "jax": "import jax", "mpi4py": "from mpi4py"}
LIBRARIES |= {"matplotlib": "plot_"}


def examples() -> Iterator[Any]:
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                text = ast.get_docstring(node) or ""
                if ">>> " in text:
                    name = getattr(node, "name", "")
                    yield pytest.param(text, id=f"{module}.{name}")


EXAMPLES = list(examples())


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_prints_what_it_shows(text: str, request: pytest.FixtureRequest) -> None:
    for library, sign in LIBRARIES.items():
        if sign in text and find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    name = request.node.callspec.id
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    report = io.StringIO()
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=report.write)
    assert report.getvalue() == ""


def test_the_most_used_functions_have_an_example() -> None:
    names = {x.id.rpartition(".")[2] for x in EXAMPLES}
    without = [
        name for name in cupy_flash.__all__ if name.startswith("flash_") and name not in names
    ]
    assert without == []
