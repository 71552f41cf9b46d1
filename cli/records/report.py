"""Output of rows as tables and as record files."""

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

# Width of a console, in characters, at which no line is wrapped.
_UNLIMITED = 100_000


@dataclass(frozen=True)
class Column:
    """Column of a table: its heading, and the function that formats its cell in a row."""

    heading: str
    text: Callable[[Row], str]
    numeric: bool = True


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # Rich would exit with code 1; `OneLineErrors` has another exit code for closed pipes.
        raise


def console(*, stderr: bool = False) -> Console:
    """Return a console for results; it writes plain text unless its stream is a terminal.

    In a pipe or file, lines have any length unless the environment variable COLUMNS limits it.
    """
    out = _Console(highlight=False, stderr=stderr)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _UNLIMITED
    return out


def number(value: float | None, digits: str = ".3g") -> str:
    """Return a number as text, or a dash for None."""
    return "-" if value is None else format(value, digits)


def milliseconds(value: float | None) -> str:
    """Return milliseconds with four significant digits and without an exponent."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 1 else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def rate_unit(rows: Iterable[Row]) -> tuple[str, float]:
    """Return the unit of rates and its factor: GFLOP/s if all are below 1 TFLOP/s (CPUs)."""
    most = max((row["tflops"] or 0 for row in rows), default=0)
    return ("TFLOP/s", 1.0) if most >= 1 else ("GFLOP/s", 1e3)


def rate_column(rows: Iterable[Row]) -> Column:
    """Return the column of rates, in the unit that `rate_unit` chooses."""
    heading, scale = rate_unit(rows)

    def text(row: Row) -> str:
        return "-" if row["tflops"] is None else f"{row['tflops'] * scale:.4g}"

    return Column(heading, text)


def error_text(row: Row) -> str:
    """Return the largest error as text, with "!" if it exceeds the bound."""
    if row["max_error"] is None:
        return "-"
    text = row["max_error"] if isinstance(row["max_error"], str) else f"{row['max_error']:.1e}"
    return text + ("!" if row["check"] == "failed" else "")


def tile_text(tile: Tile | Mapping[str, int] | None) -> str:
    """Return a short text of a tile or its fields; `tile_legend` names the numbers."""
    if tile is None:
        return "-"
    fields = _tile_fields(tile)
    rest = [str(value) for name, value in fields.items() if name not in ("Br", "Bc")]
    return " ".join([f"{fields['Br']}x{fields['Bc']}", *rest])


def tile_legend(family: str, tile: Tile | Mapping[str, int]) -> str:
    """Return the names of the numbers in a family's `tile_text`."""
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

    In a narrow terminal, columns of text wrap between words. Numbers and words are never broken,
    so the table may be wider than the terminal.
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
    """Print lines below a table, each once, with the number of its occurrences."""
    counts: dict[str, int] = {}
    for note in notes:
        counts[note] = counts.get(note, 0) + 1
    for note, count in counts.items():
        out.print(note + (f" ({count} times)" if count > 1 else ""), markup=False)


Advance = Callable[[str], None]
# Interval in seconds between printed lines of progress.
_LINE_SECONDS = 10


@contextmanager
def progress(what: str, total: int, *, lines: bool = True) -> Iterator[Advance]:
    """Show progress on stderr; call the function that it yields before each step.

    A terminal shows a bar. Otherwise, if `lines`, a line is printed about every 10 seconds.
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
        done, reported = -1, time.monotonic()

        def advance(step: str) -> None:
            nonlocal done, reported
            bar.update(task, description=f"{what}: {step}", advance=int(done >= 0))
            done += 1
            if lines and time.monotonic() - reported >= _LINE_SECONDS:
                reported = time.monotonic()
                click.echo(f"[{done}/{total}] {what}: {step}", err=True)

        yield advance


@dataclass(frozen=True)
class Record:
    """Result of a command: metadata, which describes the conditions, and rows of measurements."""

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
    """Return four significant digits, or all digits of the integer part if it has more."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cell_text(value: Any) -> str:
    return _flat(value, four_digits).replace("|", "\\|")


def _markdown_text(record: Record) -> str:
    # Values that are equal in all rows are printed once, above the table.
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
    """Return one line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


WRITERS: dict[str, Callable[[Record], str]] = {
    ".json": _json_text,
    ".csv": _csv_text,
    ".md": _markdown_text,
}


def write(path: Path, record: Record) -> None:
    """Write a record in the format that the path's suffix names.

    Raise click.ClickException if the file cannot be written.
    """
    text = WRITERS[path.suffix.lower()](record)
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file atomically: an interruption leaves either the old or the new contents."""
    path = path.resolve()
    draft = path.with_name(f".{os.getpid()}.part")
    if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK)):
        # The path is a device, or in a folder where no draft can be created.
        path.write_bytes(data)
        return
    try:
        draft.write_bytes(data)
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


# Pause between two writes of a growing record, as a multiple of the time that a write takes.
_WRITE_SHARE = 20


@contextmanager
def kept(
    path: Path | None,
    rows: Sequence[Row],
    head: Callable[[], Mapping[str, Any]],
    show: Callable[[], None],
) -> Iterator[Callable[[], None]]:
    """Save what a command has measured, in the file and as a table, even if it is interrupted.

    Parameters
    ----------
    path
        Path of the file, or None for no file.
    rows
        Measurements so far; the list grows while the block runs.
    head
        Function that returns the metadata of the record.
    show
        Function that prints the rows; it is not called if there are none.

    Yields
    ------
    save
        Function to call after rows were added; it writes the file from time to time.
    """
    due = 0.0

    def save() -> None:
        nonlocal due
        start = time.monotonic()
        if path is None or not rows or start < due:
            return
        # Measuring continues if the disk is full; the write at the end reports the error.
        with contextlib.suppress(click.ClickException):
            write(path, Record(head(), rows))
        due = time.monotonic() + _WRITE_SHARE * (time.monotonic() - start)

    try:
        yield save
    finally:
        if rows:
            keep(path, Record(head(), rows), show)


def keep(path: Path | None, record: Record, show: Callable[[], None]) -> None:
    """Write a record if there is a path for it, and print its table."""
    try:
        # The file is written first, because printing fails if the reader of a pipe is gone.
        if path is not None:
            write(path, record)
    finally:
        show()
    if path is not None:
        click.echo(f"Written to {path}.", err=True)


def finite(value: float) -> float | str:
    """Return a number for a record; inf and NaN become text, because JSON cannot hold them."""
    return value if abs(value) != float("inf") and value == value else str(value)
