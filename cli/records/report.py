"""Rows to tables and files."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import os
import shutil
import sys
import time
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

from cupy_flash.problem.tile import Tile

Row = Mapping[str, Any]

# Characters in a line.
_UNLIMITED = 100_000


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and a row's text in it."""

    heading: str
    text: Callable[[Row], str]
    numeric: bool = True


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the process with 1; `errors` knows what a reader that went away is worth.
        raise


def console(*, stderr: bool = False) -> Console:
    """Where results go: plain text where it is not a terminal.

    Into a pipe or a file lines are as long as they are, unless COLUMNS says how wide.
    """
    out = _Console(highlight=False, stderr=stderr)
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


def rate_unit(rows: Iterable[Row]) -> tuple[str, float]:
    """TFLOP/s, or GFLOP/s where, as on CPUs, all are below one; and what TFLOP/s are times."""
    most = max((row["tflops"] or 0 for row in rows), default=0)
    return ("TFLOP/s", 1.0) if most >= 1 else ("GFLOP/s", 1e3)


def rate_column(rows: Iterable[Row]) -> Column:
    """The rates in the unit that fits them."""
    heading, scale = rate_unit(rows)

    def text(row: Row) -> str:
        return "-" if row["tflops"] is None else f"{row['tflops'] * scale:.4g}"

    return Column(heading, text)


def error_text(row: Row) -> str:
    """The largest error, marked where it is over the bound."""
    if row["max_error"] is None:
        return "-"
    text = row["max_error"] if isinstance(row["max_error"], str) else f"{row['max_error']:.1e}"
    return text + ("!" if row["check"] == "failed" else "")


def tile_text(tile: Tile | Mapping[str, int] | None) -> str:
    """A tile, or its fields, in few characters; `tile_legend` names them."""
    if tile is None:
        return "-"
    fields = _tile_fields(tile)
    rest = [str(value) for name, value in fields.items() if name not in ("Br", "Bc")]
    return " ".join([f"{fields['Br']}x{fields['Bc']}", *rest])


def tile_legend(family: str, tile: Tile | Mapping[str, int]) -> str:
    """What the numbers of a family's `tile_text` are."""
    rest = [name for name in _tile_fields(tile) if name not in ("Br", "Bc")]
    return f"{family} tiles: {', '.join(['BrxBc', *rest])}"


def _tile_fields(tile: Tile | Mapping[str, int]) -> Mapping[str, int]:
    return dataclasses.asdict(tile) if isinstance(tile, Tile) else tile


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
# Seconds between lines of progress.
_LINE_SECONDS = 10


@contextmanager
def progress(what: str, total: int, *, lines: bool = True) -> Iterator[Advance]:
    """A progress bar on stderr, where that is a terminal; call what it gives before each step.

    Elsewhere there is a line each 10 seconds, unless the command writes `lines` of its own.
    """
    lines = lines and not sys.stderr.isatty()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=total)
        done, said = -1, time.monotonic()

        def advance(step: str) -> None:
            nonlocal done, said
            bar.update(task, description=f"{what}: {step}", advance=int(done >= 0))
            done += 1
            if lines and time.monotonic() - said >= _LINE_SECONDS:
                said = time.monotonic()
                click.echo(f"[{done}/{total}] {what}: {step}", err=True)

        yield advance


@dataclass(frozen=True)
class Record:
    """What a command measured: a head that says under which conditions, and rows."""

    metadata: Mapping[str, Any]
    rows: Sequence[Row]


def _json_text(record: Record) -> str:
    data = {"metadata": dict(record.metadata), "rows": [dict(row) for row in record.rows]}
    return json.dumps(data, indent=1, allow_nan=False, default=str) + "\n"


def _flat(value: Any, number: Callable[[float], str] = str) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_flat(item, number)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_flat(item, number) for item in value)}]"
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


def four_digits(value: float) -> str:
    """Four significant digits, or all of those before the point; an exponent below 0.0001."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cell_text(value: Any) -> str:
    return _flat(value, four_digits).replace("|", "\\|")


def _markdown_text(record: Record) -> str:
    # What all rows share stands once, above the table.
    columns = _columns(record)
    texts = [[_cell_text(row.get(name)) for name in columns] for row in record.rows]
    shared = {
        name: values[0]
        for name, values in zip(columns, zip(*texts, strict=True), strict=False)
        if len(set(values)) == 1 and len(texts) > 1
    }
    lines = [f"- {name}: {_flat(value, four_digits)}" for name, value in record.metadata.items()]
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
        write_whole(path, text.encode())
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole or as it was before, whatever interrupts."""
    path = path.resolve()
    draft = path.with_name(f".{os.getpid()}.part")
    if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK)):
        # A device, or a file in a folder that takes no other.
        path.write_bytes(data)
        return
    try:
        draft.write_bytes(data)
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


# Of the time between two writes of a record that grows, a write may take one part in so many.
_WRITE_SHARE = 20


@contextmanager
def kept(
    path: Path | None,
    rows: Sequence[Row],
    head: Callable[[], Mapping[str, Any]],
    show: Callable[[], None],
) -> Iterator[Callable[[], None]]:
    """Keep what a command measures, whatever ends it: the file and the table have what was done.

    Parameters
    ----------
    path
        The file; None for none.
    rows
        What was measured so far: grows while the block runs.
    head
        Metadata of the record.
    show
        Prints the rows; not called where there are none.

    Yields
    ------
    save
        To be called when rows have been added: they are in the file from then on.
    """
    due = 0.0

    def save() -> None:
        nonlocal due
        start = time.monotonic()
        if path is None or not rows or start < due:
            return
        # A full disk is no reason to stop measuring; at the end it is told.
        with contextlib.suppress(click.ClickException):
            write(path, Record(head(), rows))
        due = time.monotonic() + _WRITE_SHARE * (time.monotonic() - start)

    try:
        yield save
    finally:
        if rows:
            keep(path, Record(head(), rows), show)


def keep(path: Path | None, record: Record, show: Callable[[], None]) -> None:
    """Write a record, where there is a path for it, and show it."""
    try:
        # First: whoever reads the table may go away.
        if path is not None:
            write(path, record)
    finally:
        show()
    if path is not None:
        click.echo(f"Written to {path}.", err=True)


def finite(value: float) -> float | str:
    """A number for a record; JSON knows no infinity, so that becomes text."""
    return value if abs(value) != float("inf") and value == value else str(value)
