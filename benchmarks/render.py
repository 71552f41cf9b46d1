"""Write docs/benchmarks.md from the records under benchmarks/results/.

    python benchmarks/render.py            write it
    python benchmarks/render.py --check    exit with 1 if it is not what would be written

A record is what `cupy-flash bench --output x.json` or `cupy-flash tune --output x.json` writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"

Row = dict[str, Any]

HEAD = """\
# Benchmarks

Written by `python benchmarks/render.py` from the records in `benchmarks/results/`; do not edit.

Every number was compared with the float64 reference before it was timed. The providers of a table
ran in one process on the same inputs, taking turns; times are medians by GPU events with the L2
cache flushed before each call (on a CPU, by the clock). A ratio is baseline time / our time: above
1 we are faster.
"""

# What tells one case from another, in the order of the columns.
CASE_FIELDS = (
    "dtype",
    "head_dim",
    "head_dim_v",
    "causal",
    "q_offset",
    "softmax_scale",
    "layout",
    "batch",
    "heads_q",
    "heads_kv",
    "seqlen_q",
    "seqlen_k",
)
# Fields that follow from another one in most records: shown only where they do not.
_FOLLOWS = {"head_dim_v": "head_dim", "heads_kv": "heads_q", "seqlen_k": "seqlen_q"}
_DERIVED = ("softmax_scale", "q_offset")


def render(results: Path) -> str:
    """The whole page, from the records in a folder, by file name."""
    paths = sorted(results.glob("*.json"))
    if not paths:
        return HEAD + "\nNo results are recorded yet.\n"
    return "\n".join([HEAD, *(section(path) for path in paths)])


def section(path: Path) -> str:
    """One record: where it comes from, its figures, its table."""
    record = json.loads(path.read_text(encoding="utf-8"))
    head, rows = record["metadata"], record["rows"]
    lines = [f"## {path.stem}", ""]
    lines += [f"- record: `benchmarks/results/{path.name}`, {head['date']}"]
    lines += [f"- device: {head['device']}"]
    lines += ["- versions: " + ", ".join(f"{k} {v}" for k, v in head["versions"].items())]
    lines += [f"- {head['flop_convention']}"]
    if not rows:
        return "\n".join([*lines, "", "The record has no rows.", ""])
    if "provider" in rows[0]:
        lines += [*sources(rows), "", *bench_tables(rows, head.get("baseline") or [])]
    else:
        lines += ["", *plain_table(rows)]
    return "\n".join([*lines, ""])


def sources(rows: Sequence[Row]) -> list[str]:
    """Which kernels ran, by the digest of their sources."""
    found = {(row["family"], row["kernel_digest"]) for row in rows if row.get("kernel_digest")}
    text = ", ".join(f"{family} `{digest}`" for family, digest in sorted(found))
    return [f"- kernel sources: {text}"] if text else []


def bench_tables(rows: Sequence[Row], baseline: Sequence[str]) -> list[str]:
    """A line for each case, with every provider's rate and its ratio to the baseline."""
    fields = varying_fields(rows)
    shared = [f for f in CASE_FIELDS if f not in fields and f not in _FOLLOWS and f not in _DERIVED]
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row[f] for f in CASE_FIELDS), {})[row["provider"]] = row
    names = list(dict.fromkeys(row["provider"] for row in rows))
    compared = [name for name in names if [name] != list(baseline)] if baseline else []
    unit, scale = unit_of(rows)
    ratios: dict[str, list[float]] = {name: [] for name in compared}
    with_host_time = any(row.get("host_us") is not None for row in rows)
    body = []
    for found in cases.values():
        first = next(iter(found.values()))
        cells = [text_of(first[field]) for field in fields]
        cells += [rate(found.get(name), scale) for name in names]
        for name in compared:
            ratio = ratio_of(found, name, baseline)
            if ratio is not None:
                ratios[name].append(ratio)
            cells.append("" if ratio is None else f"{ratio:.2f}")
        if with_host_time:
            cells += [host_time(found.get(name)) for name in names]
        body.append(table_row(cells))
    headings = [*fields, *(f"{name} {unit}" for name in names)]
    headings += [f"{name} ratio" for name in compared]
    headings += [f"{name} host us" for name in names] if with_host_time else []
    lines = ["All rows: " + ", ".join(f"{f} {text_of(rows[0][f])}" for f in shared) + ".", ""]
    lines += [*summary(ratios, baseline), "", table_row(headings)]
    lines += [table_row("---" for _ in headings), *body]
    return lines + footnotes(rows)


def varying_fields(rows: Sequence[Row]) -> list[str]:
    """The case fields that tell the rows apart."""
    fields = []
    for field in CASE_FIELDS:
        follows = _FOLLOWS.get(field)
        if follows and all(row[field] == row[follows] for row in rows):
            continue
        if field == "q_offset" and all(
            not row["causal"] or row["q_offset"] == row["seqlen_k"] - row["seqlen_q"]
            for row in rows
        ):
            continue
        if field == "softmax_scale" and all(
            abs(row["softmax_scale"] * row["head_dim"] ** 0.5 - 1) < 1e-9 for row in rows
        ):
            continue
        if len({row[field] for row in rows}) > 1:
            fields.append(field)
    return fields


def ratio_of(found: dict[str, Row], name: str, baseline: Sequence[str]) -> float | None:
    """Best baseline time over a provider's time; None if one is missing or a result was wrong."""
    times: list[float] = [
        found[b]["median_ms"] for b in baseline if b in found and found[b]["median_ms"]
    ]
    row = found.get(name)
    if not times or row is None or not row["median_ms"] or is_wrong(row):
        return None
    return min(times) / float(row["median_ms"])


def is_wrong(row: Row) -> bool:
    """Whether a result of ours failed its check; other libraries are timed as they are."""
    return row["check"] == "failed" and str(row["provider"]).startswith("cupy_flash")


def summary(ratios: dict[str, list[float]], baseline: Sequence[str]) -> list[str]:
    """Geometric mean and minimum of each provider's ratios."""
    against = " and ".join(baseline)
    against = f"the best of {against}" if len(baseline) > 1 else against
    return [
        f"- {name} against {against}: geometric mean **{statistics.geometric_mean(found):.2f}**, "
        f"minimum **{min(found):.2f}**, {len(found)} rows"
        for name, found in ratios.items()
        if found
    ]


def unit_of(rows: Sequence[Row]) -> tuple[str, float]:
    """TFLOP/s, or GFLOP/s where everything is below one of those; and what TFLOP/s are times."""
    most = max((row["tflops"] or 0 for row in rows), default=0)
    return ("TFLOP/s", 1.0) if most >= 1 else ("GFLOP/s", 1e3)


def rate(row: Row | None, scale: float) -> str:
    """A cell: time and rate."""
    if row is None or row["median_ms"] is None:
        return "-"
    tflops = row["tflops"]
    value = f"{tflops * scale:.4g}"
    wrong = " (over the error bound)" if row["check"] == "failed" else ""
    return f"{value} ({row['median_ms']:.4g} ms){wrong}"


def host_time(row: Row | None) -> str:
    """Microseconds that a call keeps Python."""
    return "-" if row is None or row.get("host_us") is None else f"{row['host_us']:.1f}"


def footnotes(rows: Sequence[Row]) -> list[str]:
    """Why cells have no number, and what to know about the others, each once."""
    notes = [
        f"- {row['provider']}: {row[key]}"
        for row in rows
        for key in ("reason", "note")
        if row.get(key)
    ]
    if any(row["check"] == "skipped" and row["median_ms"] is not None for row in rows):
        notes.append("- some results were timed without being checked (--skip-check)")
    return ["", *dict.fromkeys(notes)] if notes else []


def plain_table(rows: Sequence[Row]) -> list[str]:
    """All fields of all rows."""
    fields = [field for field in rows[0] if field != "versions"]
    lines = [table_row(fields), table_row("---" for _ in fields)]
    return lines + [table_row(text_of(row.get(field)) for field in fields) for row in rows]


def text_of(value: Any) -> str:
    """A field's value as a cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in value.items())
    return str(value).replace("|", "\\|")


def table_row(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; return the exit code."""
    parser = argparse.ArgumentParser(description="Render docs/benchmarks.md.")
    parser.add_argument("--check", action="store_true", help="only compare; 1 if they differ")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    text = render(options.results)
    if options.check:
        current = options.page.read_text(encoding="utf-8") if options.page.exists() else None
        if current == text:
            return 0
        print(f"{options.page} is not up to date: run python benchmarks/render.py", file=sys.stderr)
        return 1
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(text, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
