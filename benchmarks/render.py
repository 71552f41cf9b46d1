"""Write docs/benchmarks.md and its figures from benchmarks/page.md and the records.

    python benchmarks/render.py            write them
    python benchmarks/render.py --check    exit with 1 if they are not what would be written

The prose of the page is in page.md. Directives there, in double braces, are replaced by values from
the records under benchmarks/results/. WHAT has the syntax that quotes.py describes.

    {{0.00: geomean WHAT in RECORDS}}            number with this many decimals
    {{by FIELDS: WHAT in RECORDS}}               table, a row per value of FIELDS, or per `case`
    {{slower: WHAT in RECORDS}}                  cases in which a peer is faster, worst first
    {{overview: TITLE = WHAT in RECORDS; ...}}   table with a row for each comparison
    {{figure NAME | ALT | FIELD of PROVIDERS by FIELD for FIELDS [where ...] in RECORDS}}
    {{rows RECORD: FIELD | FIELD | ...}}         table of these fields, a row per row of the record
    {{cpu RECORD}} {{records}}
    {{if RECORD}} ... {{end}}                    text that is left out if there is no such record
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chart
import click
import quotes

from cupy_flash.cli.bench.table import joined, without_numbers
from cupy_flash.cli.records import records
from cupy_flash.cli.records.report import Row, markdown_row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TEMPLATE = ROOT / "benchmarks" / "page.md"
PAGE = ROOT / "docs" / "benchmarks.md"
LINK = "../benchmarks/results"
# Folder of the figures, next to the page.
FIGURES = "figures"
# Figures in this folder that another script draws (schedule.py), for other pages.
OTHER_FIGURES = ("hopper_schedule.svg",)

_OPTIONAL = re.compile(r"\{\{if (\w+)\}\}\n+(.*?)\{\{end\}\}\n+", re.DOTALL)
_DIRECTIVE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_FIGURE = re.compile(r"(\w+) of ([\w -]+) by (\w+) for (.+?)(?: where (.+?))? in (.+)")

# Fields that distinguish cases: heading in a table, and format of the value in a sentence.
_FIELDS: dict[str, tuple[str, str]] = {
    "mods": ("modification", "{}"),
    "dtype": ("dtype", "{}"),
    "head_dim": ("head_dim", "head_dim {}"),
    "causal": ("mask", "{}"),
    "batch": ("batch", "batch {}"),
    "heads_q": ("heads", "{} heads"),
    "heads_kv": ("key/value heads", "heads_kv {}"),
    "seqlen_q": ("length", "length {}"),
    "seqlen_k": ("keys", "{} keys"),
}
# Fields that the name of a case omits if the name remains unique.
_DISPENSABLE = ("heads_q", "batch", "heads_kv", "seqlen_k", "dtype")
# Fields that are not named if they equal another field in all cases.
_FOLLOWS = {"heads_kv": "heads_q", "seqlen_k": "seqlen_q"}
# Maximum number of worst cases that a sentence names.
_NAMED = 4

_WRAP = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)

Found = Mapping[str, Row]
Pair = tuple[Found, float]


class Page:
    """Rendered page and its figures, from a template and a folder of records."""

    def __init__(self, template: str, results: Path) -> None:
        self.results = results
        self.figures: dict[str, str] = {}
        self.text = wrapped(_DIRECTIVE.sub(self._filled, _OPTIONAL.sub(self._kept, template)))

    def _kept(self, match: re.Match[str]) -> str:
        """Return the text of an `if` directive, or an empty text if there is no such record."""
        return match[2] if (self.results / f"{match[1]}.json").is_file() else ""

    def _filled(self, match: re.Match[str]) -> str:
        """Return the text that replaces a directive; raise ValueError if it is not one."""
        directive = " ".join(match[1].split())
        name, _, rest = directive.partition(" ")
        rest = rest.strip()
        if name == "by":
            fields, _, what = rest.partition(":")
            return self._comparison(fields.split(), self._source(what))
        if name == "slower:":
            return slower(self._source(rest).pairs(self.results))
        if name == "overview:":
            return self._overview(rest)
        if name == "figure":
            return self._figure(*(part.strip() for part in rest.split("|")))
        if name == "cpu":
            return cpu(records.read(self.results / f"{rest}.json").rows)
        if name == "rows":
            record, _, fields = rest.partition(":")
            return fields_table(records.read(self.results / f"{record}.json").rows, fields)
        if name == "records":
            return index(self.results)
        source = quotes.source(directive)
        if source is None:
            raise ValueError(f"{match[0]} is no directive")
        unit = source.unit if source.unit in ("", "%") else f" {source.unit}"
        return source.rounded(source.value(self.results)) + unit

    @staticmethod
    def _source(text: str) -> quotes.Source:
        source = quotes.source(f"0.00: geomean {text.strip()}")
        if source is None:
            raise ValueError(f"{text!r} is not WHAT in RECORDS")
        return source

    def _comparison(self, fields: Sequence[str], source: quotes.Source) -> str:
        """Return a table of our rate, the best peer's rate and their ratio, by group of cases."""
        pairs = source.pairs(self.results)
        firsts = [first_row(found) for found, _ in pairs]
        fields = varying(firsts) if fields == ["case"] else fields
        groups: dict[tuple[Any, ...], list[Pair]] = {}
        for row, pair in zip(firsts, pairs, strict=True):
            groups.setdefault(tuple(row[field] for field in fields), []).append(pair)
        ours, *peers = source.providers
        of_copies = firsts[0].get("copy_share") is not None
        field, unit = ("kv_tb_per_s", "TB/s") if of_copies else ("tflops", "TFLOP/s")
        headings = [_FIELDS[name][0] for name in fields] + [f"{ours}, {unit}"]
        headings += ["of a copy's rate"] if of_copies else []
        headings += [f"{peers[0] if len(peers) == 1 else 'best peer'}, {unit}", "ratio"]
        least = any(len(group) > 1 for group in groups.values())
        body = []
        for values, group in groups.items():
            cells = [value_text(value) for value in values]
            cells.append(span(found[ours][field] for found, _ in group))
            if of_copies:
                cells.append(span((found[ours]["copy_share"] for found, _ in group), "{:.0%}"))
            best = [best_of(found, peers) for found, _ in group]
            cells.append(span(row[field] for row in best))
            if len(peers) > 1 and len(group) == 1:
                cells[-1] += f" ({best[0]['provider']})"
            cells.append(f"{statistics.geometric_mean(ratio for _, ratio in group):.2f}")
            if least:
                found, ratio = min(group, key=lambda pair: pair[1])
                name = case_name(first_row(found), [first_row(found) for found, _ in group])
                cells.append(f"{ratio:.2f}" + (f" ({name})" if name else ""))
            body.append(cells)
        text = table([*headings, *(["least"] if least else [])], body)
        return "\n".join([text, *self._notes(source)])

    def _notes(self, source: quotes.Source) -> list[str]:
        """Return notes on single rows of a comparison, without duplicates.

        Reasons that differ only in numbers, or in a modification at their end, become one line.
        """
        # Reasons without the modification, and the modifications, by the text common to a line.
        starts: dict[str, list[str]] = {}
        ends: dict[str, dict[str, None]] = {}
        failed = []
        for path in source.paths(self.results):
            rows = [row for row in source.rows(path) if row["provider"] in source.providers]
            for row in rows:
                for reason in (row[key] for key in ("reason", "note") if row[key]):
                    text = f"- {row['provider']}: {reason}"
                    start = text.removesuffix(row.get("mods") or "")
                    line = without_numbers(start)
                    starts.setdefault(line, []).append(start)
                    ends.setdefault(line, {})[text[len(start) :]] = None
                if row["check"] == "failed":
                    case = case_name(row, rows)
                    failed.append(f"- {row['provider']}: over the error bound at {case}.")
        reasons = [f"{joined(found)}{', '.join(ends[line])}." for line, found in starts.items()]
        notes = [*reasons, *dict.fromkeys(failed)]
        return ["", *notes] if notes else []

    def _overview(self, text: str) -> str:
        body = []
        for line in text.split(";"):
            title, _, what = line.partition("=")
            source = self._source(what)
            pairs = source.pairs(self.results)
            ratios = [ratio for _, ratio in pairs]
            worst, ratio = min(pairs, key=lambda pair: pair[1])
            name = case_name(first_row(worst), [first_row(found) for found, _ in pairs])
            body.append(
                [
                    title.strip(),
                    " or ".join(source.providers[1:]) or "the formula in NumPy",
                    str(len(pairs)),
                    f"{statistics.geometric_mean(ratios):.2f}",
                    f"{ratio:.2f}" + (f" ({name})" if name else ""),
                    str(len(losses(pairs))),
                ]
            )
        return table(["", "against", "cases", "ratio", "least", "slower in"], body, texts=2)

    def _figure(self, name: str, alt: str, spec: str) -> str:
        match = _FIGURE.fullmatch(spec)
        if match is None:
            raise ValueError(f"figure {name}: {spec!r} is not FIELD of PROVIDERS by FIELD for ...")
        field, names, x, fields, where, named = match.groups()
        source = quotes.Source("0", "", "only", field, where, named)
        panels: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
        parts = fields.split()
        for path in source.paths(self.results):
            for row in source.rows(path):
                if row["provider"] in names.split() and row[field]:
                    lines = panels.setdefault(tuple(row[part] for part in parts), {})
                    lines.setdefault(row["provider"], {})[row[x]] = row[field]
        titles = {
            values: ", ".join(
                _FIELDS[part][1].format(value_text(value))
                for part, value in zip(parts, values, strict=True)
            )
            for values in sorted(panels)
        }
        self.figures[f"{name}.svg"] = chart.svg(
            alt,
            [chart.Panel(title, panels[values]) for values, title in titles.items()],
            unit="TB/s" if field == "kv_tb_per_s" else "TFLOP/s",
            x_label="keys" if x == "seqlen_k" else "sequence length",
            columns=3 if len(panels) > 2 else len(panels),
        )
        return f"![{alt}]({FIGURES}/{name}.svg)"


def wrapped(text: str) -> str:
    """Return text with prose wrapped at 120 columns; tables, headings and figures do not change."""
    blocks = []
    for block in text.strip().split("\n\n"):
        if not block.startswith(("|", "#", "!")):
            items = re.split(r"\n(?=- )", block)
            indent = "  " if block.startswith("- ") else ""
            block = "\n".join(_WRAP(" ".join(i.split()), subsequent_indent=indent) for i in items)
        blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def first_row(found: Found) -> Row:
    """Return any of the rows; all of them describe the same case."""
    return next(iter(found.values()))


def best_of(found: Found, peers: Sequence[str]) -> Row:
    """Return the row of the fastest peer."""
    timed = [found[name] for name in peers if name in found and found[name]["median_ms"]]
    return min(timed, key=lambda row: row["median_ms"])


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the fields in which the cases of the rows differ."""
    fields = [field for field in _FIELDS if len({row.get(field) for row in rows}) > 1]
    return [
        field
        for field in fields
        if field not in _FOLLOWS or any(row[field] != row[_FOLLOWS[field]] for row in rows)
    ]


def case_name(row: Row, rows: Sequence[Row]) -> str:
    """Return the name in the record, or the fewest fields that distinguish a case from others."""
    if "case" in row:
        return str(row["case"])
    fields = varying(rows)

    def told_apart(by: Sequence[str]) -> int:
        return len({tuple(row[field] for field in by) for row in rows})

    for field in _DISPENSABLE:
        rest = [other for other in fields if other != field]
        if told_apart(rest) == told_apart(fields):
            fields = rest
    return ", ".join(_FIELDS[field][1].format(value_text(row[field])) for field in fields)


def value_text(value: Any) -> str:
    """Return the value of a field as text; a bool is always the field `causal`."""
    if value is None:
        return "none"
    return {True: "causal", False: "full"}[value] if isinstance(value, bool) else str(value)


def losses(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs whose ratio rounds to less than 1.00, worst first."""
    return sorted((pair for pair in pairs if pair[1] < 0.995), key=lambda pair: pair[1])


def slower(pairs: Sequence[Pair]) -> str:
    """Return text: the number of cases in which a peer is faster, and the worst of them."""
    found = losses(pairs)
    rows = [first_row(rows) for rows, _ in pairs]
    named = [f"{ratio:.2f} at {case_name(first_row(rows_), rows)}" for rows_, ratio in found]
    if not found:
        return f"none of {len(pairs)} cases"
    worst = "at worst " if len(named) > _NAMED else ""
    return f"{len(found)} of {len(pairs)} cases ({worst}{'; '.join(named[:_NAMED])})"


def span(values: Iterable[float], form: str | None = None) -> str:
    """Return the range from the least to the largest value as one table cell."""
    found = sorted(values)
    texts = [number(value) if form is None else form.format(value) for value in found]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def number(value: float) -> str:
    """Return a number as text with three digits."""
    return (
        f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def table(headings: Sequence[str], body: Iterable[Sequence[str]], texts: int = 0) -> str:
    """Return a Markdown table; all columns but the first `texts` are right-aligned."""
    rules = ["---" if index < texts else "---:" for index in range(len(headings))]
    return "\n".join(map(markdown_row, [headings, rules, *body]))


def fields_table(rows: Sequence[Row], fields: str) -> str:
    """Return a table of fields, separated by bars; a field that a row lacks is a dash."""
    names = [name.strip() for name in fields.split("|")]
    cells = [[row.get(name, "-") for name in names] for row in rows]
    body = [[number(x) if isinstance(x, float) else value_text(x) for x in row] for row in cells]
    return table(names, body, texts=1)


def geomean_cell(values: Sequence[float]) -> str:
    """Return a geometric mean as a table cell, or a dash if there are no values."""
    return f"{statistics.geometric_mean(values):.2f}" if values else "-"


def cpu(rows: Sequence[Row]) -> str:
    """Return a table of the CPU grid, with a row for each kind of call and each length."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        first, second, *rest = row["case"].split()
        if first == "cached":
            title = f"one query over a cache, {second[1:]} sequence{'s'[: second != 'b1']}"
        elif first == "packed":
            title = f"packed, lengths {rest[1]}"
        else:
            title = f"equal lengths, {second[1:]}"
        groups.setdefault(title, []).append(row)
    body = []
    for title, group in groups.items():
        full, causal = (
            [row["speedup"] for row in group if row["case"].endswith("causal") == is_causal]
            for is_causal in (False, True)
        )
        worst = min(group, key=lambda row: row["speedup"])
        name = f"{worst['speedup']:.2f} ({worst['case']})"
        body.append([title, str(len(group)), geomean_cell(full), geomean_cell(causal), name])
    return table(["calls", "cases", "full", "causal", "least"], body, texts=1)


def index(results: Path) -> str:
    """Return a table of all records and of the kernels that have changed since each record."""
    body = []
    for path in sorted(results.glob("*.json")):
        record = records.read(path)
        head = record.metadata
        versions = [
            f"{name} {version}"
            for name, version in head["versions"].items()
            if name in ("numpy", "nvrtc", "driver", "torch", "cudnn")
        ]
        body.append(
            [
                f"[{path.stem}]({LINK}/{path.name})",
                head["device"],
                head["date"][:10],
                ", ".join(versions),
                ", ".join(records.changed_kernels(record)),
            ]
        )
    return table(["record", "device", "date", "versions", "changed since"], body, texts=5)


def faults(page: Page, path: Path) -> list[str]:
    """Return the differences of a page and its figures in the folder from the rendered ones."""
    folder = path.parent / FIGURES
    wanted = {path: page.text} | {folder / name: text for name, text in page.figures.items()}
    found = [
        f"{place} is not what the records give"
        for place, text in wanted.items()
        if not place.is_file() or place.read_text(encoding="utf-8") != text
    ]
    of_others = {folder / name for name in OTHER_FIGURES}
    left = sorted(set(folder.glob("*.svg")) - set(wanted) - of_others)
    return found + [f"{place} is on no page" for place in left]


def write(page: Page, path: Path) -> None:
    """Write a page, and its figures next to it."""
    folder = path.parent / FIGURES
    folder.mkdir(parents=True, exist_ok=True)
    for place, text in [(path, page.text), *((folder / n, t) for n, t in page.figures.items())]:
        place.write_text(text, encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page and its figures; return the exit code."""
    parser = argparse.ArgumentParser(description="Render docs/benchmarks.md and its figures.")
    parser.add_argument(
        "--check", action="store_true", help="only compare; exit with 1 if a file differs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--template", type=Path, default=TEMPLATE, help="text with directives")
    parser.add_argument(
        "--page",
        type=Path,
        default=PAGE,
        help="page to write; its figures go to figures/ next to it",
    )
    options = parser.parse_args(arguments)
    try:
        page = Page(options.template.read_text(encoding="utf-8"), options.results)
    except (ValueError, click.UsageError) as error:
        message = error.format_message() if isinstance(error, click.UsageError) else error
        print(message, file=sys.stderr)
        return 2
    if not options.check:
        write(page, options.page)
    found = faults(page, options.page)
    for fault in found:
        print(f"{fault}: run python benchmarks/render.py", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
