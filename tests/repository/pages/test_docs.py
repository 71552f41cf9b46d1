"""Links and file names in the pages and comments of the checkout lead to existing files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT

import cupy_flash

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

SOURCES = [
    path.relative_to(CHECKOUT).as_posix()
    for folder in ("benchmarks", "cli", "cupy_flash", "examples", "kernels_cu", "tests")
    for path in (CHECKOUT / folder).rglob("*.*")
] + [path.name for path in CHECKOUT.glob("*.py")]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/*/*.md")
    for path in CHECKOUT.glob(pattern)
    if path.name != "CHANGELOG.md"  # describes earlier versions
)
TEMPLATES = CHECKOUT / "benchmarks" / "pages"
MODULES = sorted(
    path
    for folder in ("benchmarks", "cli", "cupy_flash")
    for path in CHECKOUT.glob(f"{folder}/**/*.py")
)


def page_id(page: Path) -> str:
    """Return the path of a page; several folders may have pages of the same name."""
    return page.relative_to(CHECKOUT).as_posix()


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def missing(text: str, pattern: str) -> list[str]:
    """Return names of files in a text that are neither the path of a file nor the end of one."""
    named = set(re.findall(pattern, text))
    return sorted(n for n in named if not any(f"/{path}".endswith(f"/{n}") for path in SOURCES))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    text, folder = page.read_text(encoding="utf-8"), page.parent
    if page.is_relative_to(TEMPLATES):
        # The rendered page has only those optional parts whose records exist.
        text = re.sub(r"\{\{if .*?\{\{end\}\}", "", text, flags=re.DOTALL)
        # A template has the links of the page in docs/ that is rendered from it.
        folder = CHECKOUT / "docs" / folder.relative_to(TEMPLATES)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = folder / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert missing(text, r"(?<![\w<>/.*-])[\w/-]+\.(?:py|cuh?)\b") == []


def test_kernel_sources_that_comments_name_exist() -> None:
    found = {
        module.relative_to(CHECKOUT).as_posix(): names
        for module in MODULES
        if (names := missing(module.read_text("utf-8"), r"(?<![\w<>/.*}\"-])[\w/]+\.cuh?\b"))
    }

    assert found == {}


def test_no_page_of_the_guide_is_longer_than_300_lines() -> None:
    lengths = {
        page_id(page): len(page.read_text(encoding="utf-8").splitlines())
        for page in PAGES
        if page_id(page).startswith("docs/guide/")
    }
    assert {name: length for name, length in lengths.items() if length > 300} == {}


# Arrays in PyTorch's axis order are a common mistake, so introductions must state the order.
AXES, REMEDY = "(batch, seqlen, heads, head_dim)", 'layout="bhsd"'
OF_TORCH = "(batch, heads, seqlen, head_dim)"
QKV_AXES, SDPA_AXES = "(batch, seqlen, 3, heads, head_dim)", "(..., heads, seqlen, head_dim)"


@pytest.mark.parametrize(
    ("page", "begin", "end"),
    [
        ("README.md", "## Quick start", "\n`scaled_dot_product"),
        ("docs/guide/usage.md", "# Using", "\n## "),
        ("docs/guide/quickstart.md", "# Quick start", "\nPass CuPy"),
    ],
)
def test_a_page_begins_with_the_order_of_axes(page: str, begin: str, end: str) -> None:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    first = text[text.index(begin) : text.index(end, text.index(begin))]
    assert all(said in first for said in (AXES, OF_TORCH, REMEDY))


def functions_of_axes() -> dict[str, tuple[str, set[str]]]:
    """Return docstrings and parameters of public functions of dense arrays, by module and name."""
    found = {}
    for path in MODULES:
        if path.is_relative_to(CHECKOUT / "cupy_flash"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and node.name in cupy_flash.__all__:
                    names = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
                    if names & {"layout", "qkv", "query"}:
                        text = ast.get_docstring(node) or ""
                        found[f"{path.parent.name}.{path.stem}.{node.name}"] = text, names
    return found


FUNCTIONS = functions_of_axes()


def test_functions_of_dense_arrays_are_found() -> None:
    """There are functions for arrays of any library, for PyTorch and for JAX."""
    names = [name.rpartition(".")[2] for name in FUNCTIONS]
    expected = {
        "attention_backward_reference": 1,
        "attention_hvp_reference": 1,
        "attention_jvp_reference": 1,
        "attention_received": 1,
        "attention_reference": 1,
        "attention_weights": 1,
        "flash_attention": 3,
        "flash_attention_backward": 1,
        "flash_attention_hvp": 1,
        "flash_attention_jvp": 1,
        "flash_attention_qkvpacked": 3,
        "flash_attention_qkvpacked_backward": 1,
        "flash_attention_qkvpacked_vjp": 1,
        "flash_attention_vjp": 1,
        "scaled_dot_product_attention": 2,
    }
    assert {name: names.count(name) for name in sorted(set(names))} == expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_begins_with_the_order_of_axes(name: str) -> None:
    text, parameters = FUNCTIONS[name]
    before, _, after = text.partition("Parameters\n----------\n")
    if "qkv" in parameters:
        assert QKV_AXES in after[after.index("qkv : ") :].splitlines()[0]
    elif "query" in parameters:
        assert SDPA_AXES in before
    else:
        assert AXES in before
        assert OF_TORCH in before
        assert REMEDY in before
