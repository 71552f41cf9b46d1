"""Metadata hook of hatchling: the README as the description of a release, and the project's links.

A package index shows the README outside the repository, where a relative link leads nowhere. The
links become absolute by the `base-url` in `pyproject.toml`. Without one, the text of a link stays,
and an image is left out with its caption.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")
# An image, and the paragraph in italics that follows it.
_FIGURE = re.compile(r"!\[[^\]]*\]\((?!https?://)[^)\s]+\)\n+(\*[^*\n][^*]*\*\n+)?")


def description(readme: str, base_url: str) -> str:
    """Return the text of a README with absolute links, or without links if `base_url` is empty."""

    def absolute(link: re.Match[str]) -> str:
        image, text, path = link.groups()
        if not base_url:
            return text
        return f"{image}[{text}]({base_url}/{'raw' if image else 'blob'}/HEAD/{path})"

    return _RELATIVE.sub(absolute, readme if base_url else _FIGURE.sub("", readme))


def urls(base_url: str) -> dict[str, str]:
    """Return the project's links by label."""
    if not base_url:
        return {}
    return {
        "Repository": base_url,
        "Issues": f"{base_url}/issues",
        "Changelog": f"{base_url}/blob/HEAD/CHANGELOG.md",
    }


class CustomMetadataHook(MetadataHookInterface):
    """Hook that sets the fields `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the fields to the project's metadata."""
        root = Path(self.root)
        settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        base_url = settings["tool"]["cupy_flash"]["base-url"].rstrip("/")
        readme = (root / "README.md").read_text(encoding="utf-8")
        text = description(readme, base_url)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(base_url)
