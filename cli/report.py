"""Rows to tables and files."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cupy_flash.tile import Tile

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and a row's text in it."""

    heading: str
    text: Callable[[Row], str]
    numeric: bool = True


def console() -> Console:
    """Where results go: plain text where it is not a terminal."""
    return Console(highlight=False)


def number(value: float | None, digits: str = ".3g") -> str:
    """A number as text; a dash where there is none."""
    return "-" if value is None else format(value, digits)


def milliseconds(value: float | None) -> str:
    """Four significant digits, without an exponent."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 1 else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def rate_column(rows: Iterable[Row]) -> Column:
    """TFLOP/s, or GFLOP/s where, as on CPUs, everything is below one of those."""
    most = max((row["tflops"] or 0 for row in rows), default=0)
    heading, scale = ("TFLOP/s", 1.0) if most >= 1 else ("GFLOP/s", 1e3)

    def text(row: Row) -> str:
        return "-" if row["tflops"] is None else f"{row['tflops'] * scale:.4g}"

    return Column(heading, text)


def error_text(row: Row) -> str:
    """The largest error, marked where it is over the bound."""
    if row["max_error"] is None:
        return "-"
    text = row["max_error"] if isinstance(row["max_error"], str) else f"{row['max_error']:.1e}"
    return text + ("!" if row["check"] == "failed" else "")


def tile_text(tile: Tile) -> str:
    """A tile in few characters; `tile_legend` names them."""
    fields = dataclasses.asdict(tile).items()
    rest = [str(value) for name, value in fields if name not in ("Br", "Bc")]
    return " ".join([f"{tile.Br}x{tile.Bc}", *rest])


def tile_legend(family: str, tile: Tile) -> str:
    """What the numbers of a family's `tile_text` are."""
    rest = [name for name in dataclasses.asdict(tile) if name not in ("Br", "Bc")]
    return f"{family} tiles: BrxBc" + "".join(f", {name}" for name in rest)


def print_table(
    out: Console,
    title: str,
    columns: Sequence[Column],
    groups: Iterable[Sequence[Row]],
) -> None:
    """Print rows under headings, with a rule between groups."""
    out.print(title, markup=False, soft_wrap=True)
    table = Table(pad_edge=False, box=box.SIMPLE_HEAD)
    for column in columns:
        justify: Any = "right" if column.numeric else "left"
        table.add_column(column.heading, justify=justify, no_wrap=column.numeric, overflow="fold")
    for group in groups:
        for row in group:
            table.add_row(*(column.text(row) for column in columns))
        table.add_section()
    out.print(table)


def print_notes(out: Console, notes: Iterable[str]) -> None:
    """Print lines below a table, each once, with how often it was said."""
    counts: dict[str, int] = {}
    for note in notes:
        counts[note] = counts.get(note, 0) + 1
    for note, count in counts.items():
        out.print(note + (f" ({count} times)" if count > 1 else ""), markup=False)


Advance = Callable[[str], None]


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """A progress bar on stderr, where that is a terminal; call what it gives before each step."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=total)
        started = False

        def advance(step: str) -> None:
            nonlocal started
            bar.update(task, description=f"{what}: {step}", advance=int(started))
            started = True

        yield advance


@dataclass(frozen=True)
class Record:
    """What a command measured: a head that says under which conditions, and rows."""

    metadata: Mapping[str, Any]
    rows: Sequence[Row]


def _json_text(record: Record) -> str:
    data = {"metadata": dict(record.metadata), "rows": [dict(row) for row in record.rows]}
    return json.dumps(data, indent=1, allow_nan=False, default=str) + "\n"


def _flat(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return " ".join(f"{name}={item}" for name, item in value.items())
    return str(value)


def _columns(record: Record) -> list[str]:
    return list(dict.fromkeys(name for row in record.rows for name in row))


def _csv_text(record: Record) -> str:
    text = io.StringIO()
    columns = _columns(record)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_flat(row.get(name)) for name in columns] for row in record.rows)
    return text.getvalue()


def _markdown_text(record: Record) -> str:
    # What all rows share stands once, above the table.
    columns = _columns(record)
    texts = [[_flat(row.get(name)).replace("|", "\\|") for name in columns] for row in record.rows]
    shared = {
        name: values[0]
        for name, values in zip(columns, zip(*texts, strict=True), strict=False)
        if len(set(values)) == 1 and len(texts) > 1
    }
    lines = [f"- {name}: {_flat(value)}" for name, value in record.metadata.items()]
    lines += [f"- {name}: {value}" for name, value in shared.items() if value]
    kept = [index for index, name in enumerate(columns) if name not in shared]
    lines += ["", markdown_row(columns[i] for i in kept), markdown_row("---" for _ in kept)]
    lines += [markdown_row(row[i] for i in kept) for row in texts]
    return "\n".join(lines) + "\n"


def markdown_row(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


WRITERS: dict[str, Callable[[Record], str]] = {
    ".json": _json_text,
    ".csv": _csv_text,
    ".md": _markdown_text,
}


def write(path: Path, record: Record) -> None:
    """Write a record in the format that the path's suffix names."""
    path.write_text(WRITERS[path.suffix](record), encoding="utf-8")


def finite(value: float) -> float | str:
    """A number for a record; JSON knows no infinity, so that becomes text."""
    return value if abs(value) != float("inf") and value == value else str(value)
