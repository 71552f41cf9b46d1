"""Rows to tables and files."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cupy_flash.tile import Tile

Row = Mapping[str, Any]

# Characters in a line.
_UNLIMITED = 100_000


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and a row's text in it."""

    heading: str
    text: Callable[[Row], str]
    numeric: bool = True


def console() -> Console:
    """Where results go: plain text where it is not a terminal.

    Into a pipe or a file lines are as long as they are, unless COLUMNS says how wide.
    """
    out = Console(highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _UNLIMITED
    return out


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
    """Print rows under headings, with a rule between groups.

    Columns of text are broken between words where the terminal is narrow. Numbers and words stay
    whole, so the table may be wider than the terminal.
    """
    out.print(title, markup=False, soft_wrap=True)
    texts = [[[column.text(row) for column in columns] for row in group] for group in groups]
    table = Table(pad_edge=False, box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        cells = [column.heading, *(row[index] for group in texts for row in group)]
        whole = cells if column.numeric else [word for cell in cells for word in cell.split()]
        table.add_column(
            column.heading,
            justify="right" if column.numeric else "left",
            no_wrap=max(map(cell_len, whole), default=0) == max(map(cell_len, cells)),
            min_width=max(map(cell_len, whole), default=0),
        )
    for group in texts:
        for row in group:
            table.add_row(*row)
        table.add_section()
    width = out.width
    out.width = max(width, _least_width(out, table))
    out.print(table, crop=False)
    out.width = width


def _least_width(out: Console, table: Table) -> int:
    unlimited = out.options.update(width=_UNLIMITED)
    return Measurement.get(out, unlimited, table).minimum


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
    """Write a record in the format that the path's suffix names.

    Raises
    ------
    click.ClickException
        If the file cannot be written.
    """
    text = WRITERS[path.suffix.lower()](record)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error


def finite(value: float) -> float | str:
    """A number for a record; JSON knows no infinity, so that becomes text."""
    return value if abs(value) != float("inf") and value == value else str(value)
