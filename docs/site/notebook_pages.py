"""Pages of the notebooks, with the outputs that are stored in them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def page_of_notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by file name."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else _fenced("python", source))
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(picture)
                parts.append(f"![Picture that the cell draws]({name})")
            else:
                parts.append(_fenced("text", _text_of(output)))
    return "\n\n".join(parts) + "\n", pictures


def _text_of(output: dict[str, Any]) -> str:
    return "".join(output["text"] if "text" in output else output["data"]["text/plain"])


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
