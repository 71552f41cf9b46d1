"""What the pages and comments of the checkout point at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.benchmark_scripts import CHECKOUT, IN_CHECKOUT

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

SOURCES = [
    path.relative_to(CHECKOUT).as_posix()
    for folder in ("benchmarks", "cli", "cupy_flash", "examples", "kernels_cu", "tests")
    for path in (CHECKOUT / folder).rglob("*.*")
]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md")
    for path in CHECKOUT.glob(pattern)
    if path.name != "CHANGELOG.md"  # tells of what was
)
MODULES = sorted(
    path
    for folder in ("benchmarks", "cli", "cupy_flash")
    for path in CHECKOUT.glob(f"{folder}/**/*.py")
)


def anchors(page: Path) -> set[str]:
    """What links to headings of a page say."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def missing(text: str, pattern: str) -> list[str]:
    """Files that a text names and that no folder holds, in full or by the end of their path."""
    named = set(re.findall(pattern, text))
    return sorted(n for n in named if not any(f"/{path}".endswith(f"/{n}") for path in SOURCES))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        # The template of a page in docs/ links from there.
        folder = CHECKOUT / "docs" if page.name == "page.md" else page.parent
        target = folder / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
