"""Tables and names of cases in the pages of benchmarks, from rows of records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupy_flash.cli.records import records
from cupy_flash.cli.records.report import Row, markdown_row

# Fields that distinguish cases: heading in a table, and format of the value in a sentence.
FIELDS: dict[str, tuple[str, str]] = {
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
# Maximum number of worst cases that a table cell names.
_NAMED = 4

Found = Mapping[str, Row]
Pair = tuple[Found, float]


def first_row(found: Found) -> Row:
    """Return any of the rows; all of them describe the same case."""
    return next(iter(found.values()))


def best_of(found: Found, peers: Sequence[str]) -> Row:
    """Return the row of the fastest peer."""
    timed = [found[name] for name in peers if name in found and found[name]["median_ms"]]
    return min(timed, key=lambda row: row["median_ms"])


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the fields in which the cases of the rows differ."""
    fields = [field for field in FIELDS if len({row.get(field) for row in rows}) > 1]
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
    return ", ".join(FIELDS[field][1].format(value_text(row[field])) for field in fields)


def value_text(value: Any) -> str:
    """Return the value of a field as text; a bool is always the field `causal`."""
    if value is None:
        return "none"
    return {True: "causal", False: "full"}[value] if isinstance(value, bool) else str(value)


def losses(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs whose ratio rounds to less than 1.00, worst first."""
    return sorted((pair for pair in pairs if pair[1] < 0.995), key=lambda pair: pair[1])


def slower(pairs: Sequence[Pair]) -> tuple[str, str]:
    """Return two texts: in how many cases a peer is faster, and the ratios of the worst of them."""
    found = losses(pairs)
    rows = [first_row(rows) for rows, _ in pairs]
    named = [f"{ratio:.2f} ({case_name(first_row(rows_), rows)})" for rows_, ratio in found]
    return f"{len(found)} of {len(pairs)}", "; ".join(named[:_NAMED])


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


def index(results: Path, link: str) -> str:
    """Return a table of all records and of the kernels that have changed since each record.

    `link` is the folder of the records, relative to the page.
    """
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
                f"[{path.stem}]({link}/{path.name})",
                head["device"],
                head["date"][:10],
                ", ".join(versions),
                ", ".join(records.changed_kernels(record)),
            ]
        )
    return table(["record", "device", "date", "versions", "changed since"], body, texts=5)
