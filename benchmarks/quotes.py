"""Check the figures that a Markdown file quotes against the records under benchmarks/results/.

    python benchmarks/quotes.py README.md

Every number with a unit of performance (times, %, TFLOP/s, ms, ...) needs a source. An HTML comment
below the paragraph or list item that contains the number names its sources, one per line:

    - The kernel is 1.11 times as fast as cuDNN (at least 0.99), at 89% of a matrix product's rate.
      <!-- figures
      1.11: geomean cupy_flash / torch-cudnn in h100_hopper_*
      0.99: min cupy_flash / torch-cudnn in h100_hopper_*
      89%: median share_of_matmul where causal=no in h100_limits
      -->

A line is `NUMBER UNIT: STATISTIC WHAT [where FIELD=VALUE, ...] in RECORD, ...`. WHAT is a field of
the rows, or a provider and a field (`cupy_flash host_us`), or a speedup. A field whose name has
spaces is in double quotes. `A / B` is the speedup of
provider A over B, and `A / B | C` that over the faster of B and C, on each case that they have in
common. All records of a line must be of one device. The value must round to the number. Only prose
is checked, not code blocks.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cupy_flash.cli.records import records
from cupy_flash.cli.records.report import Row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

_NUMBER = r"(?<![\w.,])\d[\d,]*(?:\.\d+)?"
_UNIT = r"TFLOP/s|GFLOP/s|TB/s|GB/s|%|(?:times|ms|us|µs|s|seconds?)\b|(?:x\b|×)(?!\s*\d)"
_FIGURE = re.compile(rf"({_NUMBER})\s*(?:{_UNIT})|at (?:least|most)\s+({_NUMBER}(?<=\.\d\d))(?!\d)")
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--\s*(figures\s)?(.*?)-->", re.DOTALL)
_SOURCE = re.compile(
    r"(?P<number>\d[\d,]*(?:\.\d+)?)\s*(?P<unit>[^\s:\d]*):\s*(?P<statistic>\w+)\s+(?P<what>.+?)"
    r"(?:\s+where\s+(?P<where>.+?))?\s+in\s+(?P<records>.+)"
)
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def _only(values: Sequence[float]) -> float:
    if len(values) > 1:
        raise ValueError(f"'only' of {len(values)} values")
    return values[0]


_STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "geomean": statistics.geometric_mean,
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "only": _only,
    "count": len,
}


@dataclass(frozen=True)
class Source:
    """Line of a `figures` comment."""

    number: str
    unit: str
    statistic: str
    what: str
    where: str | None
    records: str

    def value(self, results: Path) -> float:
        """Return the value of the records in the quoted unit; raise ValueError if there is none."""
        if self.statistic not in _STATISTICS:
            raise ValueError(f"{self.statistic!r} is none of {', '.join(_STATISTICS)}")
        values = [value for _, value in self.pairs(results)]
        return _STATISTICS[self.statistic](values) * self._scale()

    def rounded(self, value: float) -> str:
        """Return a value as text, with as many decimals as the quoted number has."""
        decimals = len(self.number.partition(".")[2])
        return f"{value:.{decimals}f}"

    def agrees(self, value: float) -> bool:
        """Return whether a value rounds to the quoted number."""
        return self.rounded(value) == self.number.replace(",", "")

    def pairs(self, results: Path) -> list[tuple[Mapping[str, Row], float]]:
        """Return the values, each with its rows by provider; raise ValueError if there are none."""
        paths = self.paths(results)
        if len(devices := {str(records.read(path).metadata.get("device")) for path in paths}) > 1:
            raise ValueError(f"records of {len(devices)} devices: {', '.join(sorted(devices))}")
        pairs = [pair for path in paths for pair in self._pairs(path)]
        if not pairs:
            raise ValueError("no such rows")
        return pairs

    def paths(self, results: Path) -> list[Path]:
        """Return the paths of the records."""
        paths = []
        for name in self.names:
            found = sorted(results.glob(f"{name}.json"))
            if not found:
                raise ValueError(f"there is no record {name}")
            paths += found
        return paths

    @property
    def names(self) -> list[str]:
        """Names of the records, which may be patterns."""
        return [name.strip() for name in self.records.split(",")]

    @property
    def providers(self) -> list[str]:
        """Providers of a speedup: the measured one, then its peers; empty for other values."""
        ours, _, peers = self.what.partition("/")
        return [name.strip() for name in (ours, *peers.split("|"))] if peers else []

    def rows(self, path: Path) -> list[Row]:
        """Return the rows of one record that meet the conditions."""
        return [row for row in records.read(path).rows if self._holds(row)]

    def _pairs(self, path: Path) -> list[tuple[Mapping[str, Row], float]]:
        rows = self.rows(path)
        if self.providers:
            if rows and (fault := records.bench_fault(rows)):
                raise ValueError(f"{path.stem} is no record of bench: {fault}")
            ours, *peers = self.providers
            ratios = [(found, records.ratio(found, ours, peers)) for found in records.by_case(rows)]
            return [(found, ratio) for found, ratio in ratios if ratio is not None]
        *provider, field = shlex.split(self.what)
        named = [row for row in rows if not provider or [row.get("provider")] == provider]
        values = [({str(row.get("provider")): row}, row.get(field)) for row in named]
        return [(found, value) for found, value in values if isinstance(value, (int, float))]

    def _holds(self, row: Any) -> bool:
        for condition in (self.where or "").split(","):
            name, _, wanted = (part.strip() for part in condition.partition("="))
            held = row.get(name)
            text = {True: "yes", False: "no"}[held] if isinstance(held, bool) else str(held)
            if name and text != wanted:
                return False
        return True

    def _scale(self) -> float:
        if self.unit == "%":
            return 100.0
        field = shlex.split(self.what)[-1]
        if self.unit == "GFLOP/s" and field.endswith("tflops"):
            return 1000.0
        of_field = _SECONDS.get(field.rpartition("_")[2])
        if self.unit in _SECONDS and of_field:
            return of_field / _SECONDS[self.unit]
        return 1.0


def source(text: str) -> Source | None:
    """Parse a line of a `figures` comment; return None if it is not one."""
    match = _SOURCE.fullmatch(text)
    return Source(**match.groupdict()) if match else None


def _blanked(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _figures(prose: str) -> Iterator[tuple[int, str, str]]:
    """Yield the position, the number and the text of each figure."""
    for match in _FIGURE.finditer(prose):
        number = match[1] or match[2]
        yield match.start(), number, " ".join(match[0].split())


def faults(text: str, results: Path = RESULTS) -> list[str]:
    """Return the figures of a Markdown text that no record supports, with their line numbers."""
    text = _FENCE.sub(_blanked, text)
    prose = _COMMENT.sub(_blanked, text)
    found = []
    end = 0
    for block in _COMMENT.finditer(text):
        if block[1] is None:
            continue
        before = prose[end : block.start()].rstrip()
        start = end + max((m.end() for m in re.finditer(r"\n\s*\n", before)), default=0)
        found += _without_source(prose, end, start)
        found += _block_faults(prose, start, block, results)
        end = block.end()
    return found + _without_source(prose, end, len(prose))


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _without_source(prose: str, start: int, end: int, sourced: Sequence[str] = ()) -> list[str]:
    left = Counter(sourced)
    found = []
    for position, number, figure in _figures(prose[start:end]):
        if left[number]:
            left[number] -= 1
        else:
            found.append(f"line {_line(prose, start + position)}: {figure!r} names no source")
    return found


def _block_faults(prose: str, start: int, block: re.Match[str], results: Path) -> list[str]:
    lines = [line.strip() for line in block[2].splitlines() if line.strip()]
    sources = [source(line) for line in lines]
    numbers = [found.number for found in sources if found]
    found = _without_source(prose, start, block.start(), numbers)
    at = f"line {_line(prose, block.start())}"
    for line, named in zip(lines, sources, strict=True):
        if named is None:
            found.append(f"{at}: {line!r} is not NUMBER: STATISTIC WHAT in RECORD")
            continue
        covered = prose[start : block.start()]
        if not re.search(rf"(?<![\w.,]){re.escape(named.number)}(?![.,]?\d)", covered):
            found.append(f"{at}: {named.number} does not stand in the text above")
        try:
            value = named.value(results)
        except (ValueError, click.UsageError) as error:
            found.append(f"{at}: {line!r}: {error}")
            continue
        if not named.agrees(value):
            found.append(f"{at}: {line!r}, but the records hold {value:.6g}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors in the files; return the exit code."""
    parser = argparse.ArgumentParser(description="Check quoted figures against the records.")
    parser.add_argument(
        "files",
        type=Path,
        nargs="*",
        default=[ROOT / "README.md"],
        help="Markdown files to check; default: README.md",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    options = parser.parse_args(arguments)
    found = [
        f"{path}, {fault}"
        for path in options.files
        for fault in faults(path.read_text(encoding="utf-8"), options.results)
    ]
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
