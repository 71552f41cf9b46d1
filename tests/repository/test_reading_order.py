"""The reading order in CONTRIBUTING.md names parts that exist, and is as short as it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.cli.benchmark_scripts import CHECKOUT

PAGE = CHECKOUT / "CONTRIBUTING.md"
ROW = re.compile(r"\| [^|]+ \| `([^`]+)` \| ([^|]+) \| (\d+) \|")

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="not in a checkout")


def span(lines: list[str], name: str, is_python: bool) -> tuple[int, int]:
    """Return the range of lines of a function or class: from its head to its end."""
    if is_python:
        tree = ast.walk(ast.parse("\n".join(lines)))
        node = next(node for node in tree if getattr(node, "name", None) == name)
        return node.lineno - 1, node.end_lineno
    head = next(i for i, line in enumerate(lines) if re.match(rf" .*\b{name}\(.*[{{,]$", line))
    indent = re.match(" *", lines[head]).group()
    end = next(i for i in range(head, len(lines)) if lines[i] == indent + "}")
    return head, end + 1


def lines_of_part(path: Path, part: str) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    names = re.findall("`([^`]+)`", part)
    if part.strip() == "whole file":
        return len(lines)
    spans = [span(lines, name, path.suffix == ".py") for name in names]
    if part.startswith("to the end of"):
        return spans[0][1]
    return sum(end - begin for begin, end in spans)


def test_the_parts_have_the_stated_lengths_and_at_most_1500_lines_in_all() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) == 12
    lengths = [lines_of_part(CHECKOUT / path, part) for path, part, _ in rows]
    stated = [int(count) for *_, count in rows]
    assert [abs(a - b) <= 10 for a, b in zip(lengths, stated, strict=True)] == [True] * 12, lengths
    assert sum(lengths) <= 1500
