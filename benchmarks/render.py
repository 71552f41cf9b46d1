"""Write the pages of benchmarks and their figures from benchmarks/pages/ and the records.

    python benchmarks/render.py            write them
    python benchmarks/render.py --check    exit with 1 if they are not what would be written

The prose of a page in docs/ is in the file of the same path in benchmarks/pages/. Directives there,
in double braces, are replaced by values from the records under benchmarks/results/. WHAT has the
syntax that quotes.py describes.

    {{0.00: geomean WHAT in RECORDS}}            number with this many decimals
    {{by FIELDS: WHAT in RECORDS}}               table, a row per value of FIELDS, or per `case`
    {{overview: TITLE | PEER = WHAT in RECORDS; ...}}
                                                 table with a row for each comparison
    {{losses: TITLE | PEER = WHAT in RECORDS; ...}}
                                                 table of the comparisons with cases in which the
                                                 peer is faster, and of the worst of these cases
    {{figure NAME | ALT | FIELD of PROVIDERS by FIELD for FIELDS [where ...] in RECORDS}}
    {{rows RECORD: FIELD | FIELD | ...}}         table of these fields, a row per row of the record
    {{cpu RECORD}} {{records}}
    {{if RECORD}} ... {{end}}                    text that is left out if there is no such record

A comparison of `overview` and `losses` is left out if one of its records does not exist.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import chart
import click
import page_tables
import quotes
from page_tables import FIELDS, Pair, best_of, case_name, first_row, slower, span, value_text

from cupy_flash.cli.bench.table import joined, without_numbers
from cupy_flash.cli.records import records

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TEMPLATES = ROOT / "benchmarks" / "pages"
DOCS = ROOT / "docs"
# Folder of the figures in the folder of the pages.
FIGURES = "figures"
# Figures in this folder that another script draws (schedule.py), for other pages.
OTHER_FIGURES = ("hopper_schedule.svg",)

_OPTIONAL = re.compile(r"\{\{if (\w+)\}\}\n+(.*?)\{\{end\}\}\n+", re.DOTALL)
_DIRECTIVE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_FIGURE = re.compile(r"(\w+) of ([\w -]+) by (\w+) for (.+?)(?: where (.+?))? in (.+)")

_WRAP = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
# Beginnings of blocks that are not prose: tables, headings, figures, code and comments.
_NOT_PROSE = ("|", "#", "!", "```", "<!--")


class Page:
    """Rendered page and its figures, from a template and a folder of records.

    Parameters
    ----------
    template
        Text with directives.
    results
        Folder of the records.
    docs
        Path from the page to the folder docs/, which is empty or ends with a slash.
    """

    def __init__(self, template: str, results: Path, docs: str = "") -> None:
        self.results = results
        self.docs = docs
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
        if name == "overview:":
            return self._overview(rest)
        if name == "losses:":
            return self._losses(rest)
        if name == "figure":
            return self._figure(*(part.strip() for part in rest.split("|")))
        if name == "cpu":
            return page_tables.cpu(records.read(self.results / f"{rest}.json").rows)
        if name == "rows":
            record, _, fields = rest.partition(":")
            rows = records.read(self.results / f"{record}.json").rows
            return page_tables.fields_table(rows, fields)
        if name == "records":
            return page_tables.index(self.results, f"{self.docs}../benchmarks/results")
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
        fields = page_tables.varying(firsts) if fields == ["case"] else fields
        groups: dict[tuple[Any, ...], list[Pair]] = {}
        for row, pair in zip(firsts, pairs, strict=True):
            groups.setdefault(tuple(row[field] for field in fields), []).append(pair)
        ours, *peers = source.providers
        of_copies = firsts[0].get("copy_share") is not None
        field, unit = ("kv_tb_per_s", "TB/s") if of_copies else ("tflops", "TFLOP/s")
        headings = [FIELDS[name][0] for name in fields] + [f"{ours}, {unit}"]
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
        text = page_tables.table([*headings, *(["least"] if least else [])], body)
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

    def _comparisons(self, text: str) -> list[tuple[str, str, list[Pair]]]:
        """Return the title, the peer and the pairs of each comparison whose records exist."""
        found = []
        for line in text.split(";"):
            names, _, what = line.partition("=")
            title, _, peer = names.partition("|")
            source = self._source(what)
            if all(any(self.results.glob(f"{name}.json")) for name in source.names):
                found.append((title.strip(), peer.strip(), source.pairs(self.results)))
        return found

    def _overview(self, text: str) -> str:
        body = []
        for title, peer, pairs in self._comparisons(text):
            ratios = [ratio for _, ratio in pairs]
            worst, ratio = min(pairs, key=lambda pair: pair[1])
            name = case_name(first_row(worst), [first_row(found) for found, _ in pairs])
            least = f"{ratio:.2f}" + (f" ({name})" if name else "")
            mean = f"{statistics.geometric_mean(ratios):.2f}"
            lost = str(len(page_tables.losses(pairs)))
            body.append([title, peer, str(len(pairs)), mean, least, lost])
        headings = ["", "compared with", "cases", "ratio", "least", "slower in"]
        return page_tables.table(headings, body, texts=2)

    def _losses(self, text: str) -> str:
        compared = self._comparisons(text)
        lost = [each for each in compared if page_tables.losses(each[2])]
        body = [[title, peer, *slower(pairs)] for title, peer, pairs in lost]
        return page_tables.table(["", "compared with", "slower in", "worst cases"], body, texts=4)

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
                FIELDS[part][1].format(value_text(value))
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
        return f"![{alt}]({self.docs}{FIGURES}/{name}.svg)"


def wrapped(text: str) -> str:
    """Return text with prose wrapped at 120 columns; other blocks do not change."""
    blocks = []
    for block in text.strip().split("\n\n"):
        if not block.startswith(_NOT_PROSE):
            items = re.split(r"\n(?=- )", block)
            indent = "  " if block.startswith("- ") else ""
            block = "\n".join(_WRAP(" ".join(i.split()), subsequent_indent=indent) for i in items)
        blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def rendered(templates: Path, results: Path) -> dict[str, str]:
    """Return the texts of all pages and figures, by their paths in the folder of the pages."""
    texts: dict[str, str] = {}
    for template in sorted(templates.rglob("*.md")):
        path = PurePosixPath(template.relative_to(templates).as_posix())
        page = Page(template.read_text(encoding="utf-8"), results, "../" * (len(path.parts) - 1))
        made = {f"{FIGURES}/{name}": text for name, text in page.figures.items()}
        if twice := sorted(made.keys() & texts):
            raise ValueError(f"{twice[0]} is on two pages")
        texts |= {str(path): page.text} | made
    return texts


def faults(texts: Mapping[str, str], docs: Path) -> list[str]:
    """Return the differences of the files in a folder from the rendered pages and figures."""
    found = [
        f"{docs / name} is not what the records give"
        for name, text in texts.items()
        if not (docs / name).is_file() or (docs / name).read_text(encoding="utf-8") != text
    ]
    of_others = {docs / FIGURES / name for name in OTHER_FIGURES}
    figures = set((docs / FIGURES).glob("*.svg")) - of_others
    # Folders of pages hold rendered pages only; docs/ itself holds others, too.
    folders = {(docs / name).parent for name in texts if name.endswith(".md")} - {docs}
    pages = {path for folder in folders for path in folder.glob("*.md")}
    left = sorted((figures | pages) - {docs / name for name in texts})
    return found + [f"{place} belongs to no template" for place in left]


def write(texts: Mapping[str, str], docs: Path) -> None:
    """Write pages and figures into a folder."""
    for name, text in texts.items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(text, encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages and their figures; return the exit code."""
    parser = argparse.ArgumentParser(description="Render the pages of benchmarks with figures.")
    parser.add_argument(
        "--check", action="store_true", help="only compare; exit with 1 if a file differs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument(
        "--templates", type=Path, default=TEMPLATES, help="folder of texts with directives"
    )
    parser.add_argument(
        "--docs", type=Path, default=DOCS, help="folder of the pages; their figures go to figures/"
    )
    options = parser.parse_args(arguments)
    try:
        texts = rendered(options.templates, options.results)
    except (ValueError, click.UsageError) as error:
        message = error.format_message() if isinstance(error, click.UsageError) else error
        print(message, file=sys.stderr)
        return 2
    if not options.check:
        write(texts, options.docs)
    found = faults(texts, options.docs)
    for fault in found:
        print(f"{fault}: run python benchmarks/render.py", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
