"""Hooks of MkDocs: pages of files outside of docs/, and links to files that are no pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File
from notebook_pages import page_of_notebook

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

CHECKOUT = Path(__file__).resolve().parents[2]
NOTEBOOKS = "examples/notebooks"
# Files of the checkout outside of docs/ that are pages of the site, with the paths of these pages.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    f"{NOTEBOOKS}/README.md": "notebooks/index.md",
    **{
        f"{NOTEBOOKS}/{path.name}": f"notebooks/{path.stem}.md"
        for path in (CHECKOUT / NOTEBOOKS).glob("*.ipynb")
    },
}
SOURCES = {page: source for source, page in PAGES.items()}

FENCE = re.compile(r"^(?: *)```.*?^ *```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
# Name of a page in the text of a docstring, where no link would be readable in a terminal.
MENTION = re.compile(r"(?<![\w/\">])docs/([\w/]+\.md)(?!\w|</a>)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose files are outside of docs/, and the pictures of notebooks."""
    for source, page in PAGES.items():
        if not source.endswith(".ipynb"):
            files.append(File.generated(config, page, abs_src_path=str(CHECKOUT / source)))
            continue
        text, pictures = page_of_notebook(CHECKOUT / source)
        files.append(File.generated(config, page, content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page whose links lead to pages of the site, or to the URL of the sources."""
    here = page.file.src_uri
    base: str = config.extra["source_url"]

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(here)), target))
        if site_page := page_of(path):
            if path.endswith(text):
                # Where the sources name the file, the site names the page.
                text = title_of(path) or text
            return f"[{text}]({posixpath.relpath(site_page, posixpath.dirname(here))}{anchor})"
        if path.startswith("docs/") or not (CHECKOUT / path).exists():
            # MkDocs checks this link.
            return match[0]
        if base:
            return f"[{text}]({base.rstrip('/')}/{path}{anchor})"
        is_name = path.endswith(text.strip("`"))
        return f"`{path}`" if is_name else f"{text} (`{path}`)"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(link, markdown[end:])])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with what the generators of the reference leave to be mended.

    On pages of the API, docstrings link to the pages that they name. The table of options has no
    default for an option without one, where mkdocs-click shows click's mark of a missing value.
    """
    if page.file.src_uri == "reference/commands.md":
        return re.sub(r"<code>Sentinel\.UNSET</code>", "", html)
    if not page.file.src_uri.startswith("reference/api/"):
        return html

    def link(match: re.Match[str]) -> str:
        target = files.get_file_from_path(match[1])
        if target is None:
            raise FileNotFoundError(f"a docstring on {page.file.src_uri} names {match[0]}")
        title = title_of(match[0]) or match[0]
        return f'<a href="{target.url_relative_to(page.file)}">{title}</a>'

    return MENTION.sub(link, html)


def source_of(page: str) -> str:
    """Return the path of a page's file in the checkout."""
    return SOURCES.get(page, f"docs/{page}")


def title_of(path: str) -> str | None:
    """Return the first heading of a page in the checkout, or None if there is none."""
    file = CHECKOUT / path
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    heading = re.match(r"(?:<!--.*?-->\s*)?# (.*)", text, re.DOTALL)
    return heading[1].split("\n")[0] if heading else None


def page_of(path: str) -> str | None:
    """Return the path of the page that shows a file of the checkout, or None if there is none."""
    if path in PAGES:
        return PAGES[path]
    is_page = path.startswith("docs/") and path.endswith(".md")
    return path.removeprefix("docs/") if is_page else None
