"""Write docs/benchmarks.md and its figures from the records under benchmarks/results/.

    python benchmarks/render.py            write them
    python benchmarks/render.py --check    exit with 1 if they are not what would be written

A record is what `cupy-flash bench --output x.json` or `cupy-flash tune --output x.json` writes.
Those of `bench` that sweep sequence lengths get a figure. Drawing needs matplotlib, checking does
not: a figure names the digest of what it shows, because other versions of matplotlib write other
bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from cupy_flash.cli.bench import plot
from cupy_flash.cli.records import figures, records
from cupy_flash.cli.records.records import CASE_FIELDS, SEQUENCE_FIELDS
from cupy_flash.cli.records.report import Record, Row, markdown_row, rate_unit
from cupy_flash.cli.tune.findings import digest_of, findings_notes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
# Beside the page.
FIGURES = "figures"

HEAD = """\
# Benchmarks

Written by `python benchmarks/render.py` from the records in `benchmarks/results/`; do not edit.

Unless a table says otherwise, it is by `cupy-flash bench`: every number was compared with the
float64 reference before it was timed. The providers of a table ran in one process on the same
inputs, taking turns; times are medians by GPU events with the L2 cache flushed before each call (on
a CPU, by the clock). A ratio is baseline time / our time: above 1 we are faster.
"""

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
    record = records.read(path)
    head, rows = record.metadata, record.rows
    lines = [f"## {path.stem}", ""]
    lines += [f"- record: `benchmarks/results/{path.name}`, {head['date']}"]
    lines += [f"- device: {head['device']}"]
    lines += ["- versions: " + ", ".join(f"{k} {v}" for k, v in head["versions"].items())]
    lines += [f"- {head['flop_convention']}"]
    if not rows:
        return "\n".join([*lines, "", "The record has no rows.", ""])
    if records.bench_fault(rows) is None:
        lines += sources(record)
        if head.get("published_by"):
            lines += [f"- published figures, not measured here: {head['published_by']}"]
        if copy_rate := head.get("copy_tb_per_s"):
            lines += [f"- copying 1 GiB on the device: {copy_rate:.3f} TB/s, read and written"]
        if picture_of(record):
            lines += ["", f"![Rates by sequence length, {path.stem}]({FIGURES}/{path.stem}.svg)"]
        lines += ["", *bench_tables(rows, head.get("baseline") or [])]
    elif "default_tflops" in rows[0]:
        lines += [*sources(record), "", *tune_table(rows)]
    else:
        lines += sources(record)
        if timing := head.get("timing"):
            lines += [f"- {timing}"]
        lines += ["", *plain_table(rows)]
    return "\n".join([*lines, ""])


def picture_of(record: Record) -> plot.Picture | None:
    """A figure for a record of `bench` that sweeps sequence lengths; None for others."""
    timed = any(row.get("tflops") for row in record.rows)
    if not timed or records.bench_fault(record.rows) or reads_caches(record.rows):
        return None
    picture = plot.picture(record)
    return picture if picture.sweeps else None


def reads_caches(rows: Sequence[Row]) -> bool:
    """Whether the rates that matter are of the bytes of keys and values."""
    return any(row.get("kv_tb_per_s") is not None for row in rows)


def sources(record: Record) -> list[str]:
    """Which kernels ran, by the digest of their sources, and which of these have changed since."""
    texts = [
        f"{family} `{digest}`"
        + ("" if digest == digest_of(family) else ", which has changed since")
        for family, digest in sorted(records.kernels(record))
    ]
    return [f"- kernel sources: {'; '.join(texts)}"] if texts else []


def bench_tables(rows: Sequence[Row], baseline: Sequence[str]) -> list[str]:
    """A line for each case, with every provider's rate and its ratio to the baseline."""
    fields = varying_fields(rows)
    shared = [f for f in CASE_FIELDS if f not in fields and f not in _FOLLOWS and f not in _DERIVED]
    names = list(dict.fromkeys(row["provider"] for row in rows))
    compared = [name for name in names if [name] != list(baseline)] if baseline else []
    unit, scale = ("TB/s", 1.0) if reads_caches(rows) else rate_unit(rows)
    ratios: dict[str, list[float]] = {name: [] for name in compared}
    with_host_time = any(row.get("host_us") is not None for row in rows)
    cases = records.by_case(rows)
    quoted = published_columns(cases, names, scale)
    body = []
    for index, found in enumerate(cases):
        first = next(iter(found.values()))
        cells = [text_of(first[field]) for field in fields]
        cells += [rate(found.get(name), scale) for name in names]
        for name in compared:
            ratio = records.ratio(found, name, baseline)
            if ratio is not None:
                ratios[name].append(ratio)
            cells.append("" if ratio is None else f"{ratio:.2f}")
        if with_host_time:
            cells += [host_time(found.get(name)) for name in names]
        cells += [texts[index] for texts in quoted.values()]
        body.append(markdown_row(cells))
    headings = [*fields, *(f"{name} {unit}" for name in names)]
    headings += [f"{name} ratio" for name in compared]
    headings += [f"{name} host us" for name in names] if with_host_time else []
    headings += [f"published, as {name} {unit}" for name in quoted]
    common = [f"{f} {text_of(rows[0][f])}" for f in shared] + sequences_text(rows, fields)
    lines = ["All rows: " + ", ".join(common) + ".", ""]
    lines += [*summary(ratios, baseline), "", markdown_row(headings)]
    lines += [markdown_row("---" for _ in headings), *body]
    return lines + footnotes(rows)


def sequences_text(rows: Sequence[Row], varying: Sequence[str]) -> list[str]:
    """What all caches or packed sequences share, where the rows are of such."""
    first = rows[0]
    texts = [
        f"{field} {text_of(first[field])}"
        for field in SEQUENCE_FIELDS
        if field not in ("lengths", *varying) and first.get(field) is not None
    ]
    if lengths := first.get("lengths"):
        texts.append(f"{len(lengths)} lengths from {min(lengths)} to {max(lengths)}")
    return texts


def published_columns(
    cases: Sequence[Mapping[str, Row]], names: Sequence[str], scale: float
) -> dict[str, list[str]]:
    """What a preset's source published for the algorithm of each provider, once for each."""
    columns: dict[str, list[str]] = {}
    for name in names:
        texts = [published(found.get(name), scale) for found in cases]
        if any(texts) and texts not in columns.values():
            columns[name] = texts
    return columns


def published(row: Row | None, scale: float) -> str:
    """A cell of what another project measured: rate and time; empty if it published nothing."""
    if row is None:
        return ""
    tflops, ms = row.get("published_tflops"), row.get("published_ms")
    texts = [f"{tflops * scale:.4g}" if tflops else "", f"({ms:.4g} ms)" if ms else ""]
    return " ".join(filter(None, texts))


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
    # Lengths would fill a line; the case's label names their range.
    named = [field for field in SEQUENCE_FIELDS if field != "lengths"]
    return fields + [field for field in named if len({row.get(field) for row in rows}) > 1]


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


def rate(row: Row | None, scale: float) -> str:
    """A cell: time and rate."""
    if row is None or row["tflops"] is None:
        return "-"
    if (kv_rate := row.get("kv_tb_per_s")) is not None:
        share = row.get("copy_share")
        value = f"{kv_rate:.3f}" + (f", {share:.1%} of copy" if share else "")
        time = f"{1e3 * row['median_ms']:.4g} us"
    else:
        value, time = f"{row['tflops'] * scale:.4g}", f"{row['median_ms']:.4g} ms"
    wrong = " (over the error bound)" if row["check"] == "failed" else ""
    return f"{value} ({time}){wrong}"


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
    notes += [
        f"- published: {row['published_remark']}" for row in rows if row.get("published_remark")
    ]
    if any(row["check"] == "skipped" and row["median_ms"] is not None for row in rows):
        notes.append("- some results were timed without being checked (--skip-check)")
    return ["", *dict.fromkeys(notes)] if notes else []


def tune_table(rows: Sequence[Row]) -> list[str]:
    """A line for each class of problems: the default tile, and the best of the sweep."""
    headings = ("class", "tiles", "default", "TFLOP/s", "best", "TFLOP/s", "gain %", "kept")
    body = [
        markdown_row(
            (
                row["problem_class"],
                text_of(row["tiles"]),
                text_of(row["default_tile"]),
                text_of(row["default_tflops"]),
                text_of(row["best_tile"]),
                text_of(row["best_tflops"]),
                text_of(row["gain_percent"]),
                "yes" if row["stored"] else "",
            )
        )
        for row in rows
    ]
    notes = [f"- {note}" for note in findings_notes(rows)]
    return [*notes, "", markdown_row(headings), markdown_row("---" for _ in headings), *body]


def plain_table(rows: Sequence[Row]) -> list[str]:
    """All fields of all rows."""
    fields = [field for field in rows[0] if field != "versions"]
    lines = [markdown_row(fields), markdown_row("---" for _ in fields)]
    return lines + [markdown_row(text_of(row.get(field)) for field in fields) for row in rows]


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


def pictures(results: Path) -> dict[str, plot.Picture]:
    """What figures there should be, by file name."""
    found = {path.stem: picture_of(records.read(path)) for path in sorted(results.glob("*.json"))}
    return {f"{stem}.svg": picture for stem, picture in found.items() if picture}


def mark(picture: plot.Picture) -> str:
    """The comment by which a figure tells what it shows."""
    return f"<!-- rendered from rows {picture.digest()} -->"


def figure_faults(wanted: Mapping[str, plot.Picture], folder: Path) -> list[str]:
    """Which figures are missing, out of date or left over."""
    faults = []
    for name, picture in wanted.items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{path} is missing")
        elif mark(picture) not in path.read_text(encoding="utf-8"):
            faults.append(f"{path} does not show what its record holds")
    return faults + [f"{path} has no record" for path in left_over(wanted, folder)]


def left_over(wanted: Mapping[str, plot.Picture], folder: Path) -> list[Path]:
    """Figures of ours whose record is gone."""
    return [
        path
        for path in sorted(folder.glob("*.svg"))
        if path.name not in wanted and "<!-- rendered from rows " in path.read_text("utf-8")
    ]


def write_figures(wanted: Mapping[str, plot.Picture], folder: Path) -> None:
    """Draw every figure, and remove those whose record is gone; needs matplotlib."""
    for path in left_over(wanted, folder):
        path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in wanted.items():
        path = folder / name
        plot.draw(picture, path)
        # Matplotlib pads lines of its SVGs with spaces.
        lines = [line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()]
        text = "\n".join([*lines, mark(picture), ""])
        path.write_text(text, encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page and its figures; return the exit code."""
    parser = argparse.ArgumentParser(description="Render docs/benchmarks.md and its figures.")
    parser.add_argument("--check", action="store_true", help="only compare; 1 if they differ")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE, help="figures go beside it")
    options = parser.parse_args(arguments)
    try:
        text = render(options.results)
        wanted = pictures(options.results)
    except click.UsageError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    folder = options.page.parent / FIGURES
    faults = []
    if options.check:
        current = options.page.read_text(encoding="utf-8") if options.page.exists() else None
        if current != text:
            faults.append(f"{options.page} is not what the records give")
    else:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(text, encoding="utf-8", newline="\n")
        if reason := figures.why_no_figures():
            print(f"no figures drawn: {reason}", file=sys.stderr)
        elif wanted or folder.is_dir():
            write_figures(wanted, folder)
    faults += figure_faults(wanted, folder)
    for fault in faults:
        print(f"{fault}: run python benchmarks/render.py", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
