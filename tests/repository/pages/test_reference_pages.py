"""The pages of environment variables and of versions name what the code and the project name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT
from support.pages.project import project_settings

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

REFERENCE = CHECKOUT / "docs" / "reference"
CODE = [
    *(CHECKOUT / "cupy_flash").rglob("*.py"),
    *(CHECKOUT / "cli").rglob("*.py"),
    CHECKOUT / "tests" / "conftest.py",
]
PROJECT = project_settings()["project"]


def strings(path: Path) -> set[str]:
    """Return the string constants of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {node.value for node in nodes if isinstance(node.value, str)}


def rows(page: str, heading: str) -> dict[str, str]:
    """Return the rows of the first table after a heading, by the text of the first cell."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    table = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", text[text.index(heading) :], re.MULTILINE)
    assert table is not None
    cells = [line.strip("|").partition("|") for line in table[1].splitlines()]
    return {first.strip(" `"): rest for first, _, rest in cells}


def lower_bound(name: str, requirements: list[str]) -> str:
    """Return the oldest version that one of the requirements allows."""
    (version,) = {
        found[1]
        for line in requirements
        if (found := re.match(rf"{name}(?:-[\w-]+)?[>=]=([\d.]+\d)", line))
    }
    return version


def test_the_page_lists_the_variables_of_the_code_and_no_others() -> None:
    read = {text for path in CODE for text in strings(path) if re.match(r"CUPY_[A-Z_]+$", text)}
    listed = {name for name in rows("environment.md", "# Environment") if name.startswith("CUPY_")}

    assert {"CUPY_FLASH_HOME", "CUPY_CACHE_DIR"} <= read
    assert listed == read


def test_the_table_of_versions_has_the_bounds_of_the_project() -> None:
    supported = rows("compatibility.md", "## Versions")
    extras = PROJECT["optional-dependencies"]

    assert supported["Python"].startswith(f" {PROJECT['requires-python'].removeprefix('>=')} to ")
    for library, name, requirements in (
        ("NumPy", "numpy", PROJECT["dependencies"]),
        ("CuPy", "cupy", [*extras["cuda12"], *extras["cuda13"]]),
        ("CUDA", "nvidia-cuda-nvrtc", extras["cuda12"]),
        ("PyTorch", "torch", extras["frameworks"]),
        ("JAX", "jax", extras["frameworks"]),
        ("transformers", "transformers", extras["frameworks"]),
    ):
        bound = lower_bound(name, requirements)
        assert re.search(rf"\b{re.escape(bound)} or newer", supported[library]), library


def test_the_table_of_tests_has_every_version_of_python() -> None:
    prefix = "Programming Language :: Python :: 3."
    versions = [x.rpartition(" ")[2] for x in PROJECT["classifiers"] if x.startswith(prefix)]

    assert list(rows("compatibility.md", "## What is tested")) == [*versions, "3.14t"]
