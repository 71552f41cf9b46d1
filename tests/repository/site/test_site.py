"""Links, assets and names in the HTML of the documentation site."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support.cli.public_names import command_names, public_names

# Elements that load what their attribute names.
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@dataclass
class Parsed(HTMLParser):
    """Anchors, links, loaded assets and text of a page."""

    ids: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    assets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.ids += [given[name] for name in ("id", "name") if name in given]
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADING and LOADING[tag] in given and given.get("rel") != "canonical":
            self.assets.append(given[LOADING[tag]])
        self.assets += re.findall(r"url\(['\"]?([^)'\"]+)", given.get("style", ""))


def parse(path: Path) -> Parsed:
    parsed = Parsed()
    parsed.feed(path.read_text(encoding="utf-8"))
    return parsed


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Parsed]:
    """All pages of the site, except the page of an error, which no folder contains."""
    return {path: parse(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_link_and_asset_of_the_site_leads_to_a_file_and_an_anchor(
    pages: dict[Path, Parsed],
) -> None:
    broken = []
    for page, parsed in pages.items():
        for link in (*parsed.links, *parsed.assets):
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.is_file():
                broken.append(f"{page}: {link}")
            elif parts.fragment and target.suffix == ".html":
                # Material's own anchor, which a script handles.
                known = {*pages[target].ids, "__tabbed"}
                if unquote(parts.fragment) not in known:
                    broken.append(f"{page}: {link}")
    assert broken == []
    assert len(pages) > 60


def test_no_page_and_no_style_sheet_loads_from_another_host(
    site: Path, pages: dict[Path, Parsed]
) -> None:
    loaded = {asset for parsed in pages.values() for asset in parsed.assets}
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        loaded |= set(re.findall(r"(?:url\(|@import )['\"]?([^)'\";]+)", text))
    assert [x for x in sorted(loaded) if re.match(r"(\w+:)?//", x)] == []


def test_every_public_name_is_on_one_page_of_the_reference(
    site: Path, pages: dict[Path, Parsed]
) -> None:
    counts = Counter(
        name
        for page, parsed in pages.items()
        if page.parent == site / "reference" / "api"
        for name in parsed.ids
    )
    assert {name: counts[name] for name in public_names()} == dict.fromkeys(public_names(), 1)


def test_the_reference_of_commands_has_every_command_and_option(site: Path) -> None:
    text = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    names = command_names()
    assert len(names) > 80
    assert [name for name in names if not re.search(rf"[>\s]{name}[<\s]", text)] == []
    assert "Sentinel" not in text
