"""Pages of the documentation site in headless Chromium, read from the disk, wide and narrow."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
LOCAL = ("file:", "data:")
# Images that failed, and the width of what does not fit into the window.
INSPECT = """() => [
    [...document.images].filter(x => !x.complete || !x.naturalWidth).map(x => x.src),
    document.documentElement.scrollWidth - window.innerWidth,
]"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM)
        yield started
        started.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_have_no_broken_image_no_overflow_and_no_error(
    browser: Any, site: Path, width: int
) -> None:
    faults: list[str] = []
    window = browser.new_page(viewport={"width": width, "height": 900})
    window.on("console", lambda x: faults.append(x.text) if x.type == "error" else None)
    window.on("pageerror", lambda x: faults.append(str(x)))
    window.on("request", lambda x: None if x.url.startswith(LOCAL) else faults.append(x.url))
    pages = sorted(site.rglob("*.html"))
    for path in pages:
        # The page of an error has absolute links, for a server.
        if path.name == "404.html":
            continue
        before = len(faults)
        window.goto(path.as_uri())
        images, overflow = window.evaluate(INSPECT)
        faults += [f"broken image {image}" for image in images]
        faults += [f"{overflow} pixels wider than the window"] if overflow > 0 else []
        faults[before:] = [f"{path.relative_to(site)}: {fault}" for fault in faults[before:]]
    window.close()
    assert faults == []
    assert len(pages) > 60


def test_the_search_works_without_a_server(browser: Any, site: Path) -> None:
    window = browser.new_page()
    window.goto((site / "index.html").as_uri())
    window.fill("input[name=query]", "apply_rotary_vjp")
    first = window.wait_for_selector(".md-search-result__link")
    assert "reference/api/caches.html" in first.get_attribute("href")
    window.close()
