"""Journal of a sweep: a file with its results so far, so that it can be resumed."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from cupy_flash.planning import tuning

from ..records.report import write_whole

Finding = dict[str, Any]


def folder() -> Path:
    """Return the folder of the journals, next to the user's table."""
    return tuning.user_table_path().parent / "sweeps"


class Journal:
    """Findings of one sweep, by problem class.

    A sweep is identified by its settings, which include the digests of the kernel sources.

    Attributes
    ----------
    found
        Findings of the classes that are done.
    begun
        Results of the tiles of classes that are not done, by class and by the tile's text.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Read the results of an interrupted sweep with these settings; the file is not changed."""
        text = json.dumps(settings, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.path = folder() / f"{name}.jsonl"
        lines = _lines(self.path)
        complete = bool(lines) and lines[-1].get("complete", False)
        self.found: dict[str, Finding] = {}
        self.begun: dict[str, dict[str, Finding]] = {}
        if not complete:
            self.found = {line["problem_class"]: line for line in lines if "problem_class" in line}
            for line in lines:
                if "class_begun" in line and line["class_begun"] not in self.found:
                    self.begun.setdefault(line["class_begun"], {})[line["tile"]] = line
        self.is_kept = True
        self._is_begun = False

    def _begin(self) -> None:
        """Replace the file's contents by the results of the interrupted sweep.

        If the file cannot be written, a line on stderr says so, and nothing is recorded.
        """
        self._is_begun = True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            tiles = itertools.chain.from_iterable(each.values() for each in self.begun.values())
            kept = (json.dumps(line) + "\n" for line in (*self.found.values(), *tiles))
            write_whole(self.path, "".join(kept).encode())
        except OSError as error:
            self.is_kept = False
            click.echo(
                f"{self.path} cannot be written: {error.strerror}; this sweep cannot be resumed",
                err=True,
            )

    def add(self, finding: Finding) -> None:
        """Record the finding of a class."""
        self._append(finding)
        self.found[finding["problem_class"]] = finding

    def add_tile(
        self, problem_class: str, tile: str, result: Mapping[str, Any], unreliable: str | None
    ) -> None:
        """Record the result of a tile, for a class that is not done."""
        line = {"class_begun": problem_class, "tile": tile, "unreliable": unreliable, **result}
        self._append(line)

    def finish(self) -> None:
        """Record that the sweep is complete: the next sweep with these settings starts over."""
        self._append({"complete": True})

    def _append(self, line: Mapping[str, Any]) -> None:
        if not self._is_begun:
            self._begin()
        if not self.is_kept:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _lines(path: Path) -> list[Finding]:
    """Return the complete lines of a journal, without a line that an interruption cut short."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict)]


def findings() -> Iterator[Finding]:
    """Yield the findings of all sweeps, the oldest first."""
    for path in sorted(folder().glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        yield from (line for line in _lines(path) if "problem_class" in line)
