"""The command `cupy-flash tables`: list, export, merge, import and clear tuned tables."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from cupy_flash.cpu import forward as cpu_forward
from cupy_flash.families import FAMILIES
from cupy_flash.planning import tuning
from cupy_flash.planning.tuning import Entry
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.tile import Tile

from .build.kernel_sets import problem_of_class
from .cases.options import EXISTING_FILE, NEW_FILE, force_option, writable_path
from .errors import NamedCommands
from .records import environment, report
from .tune.findings import CLASS_NOTE, class_text, is_stale


@click.group(cls=NamedCommands, invoke_without_command=True)
@click.pass_context
def tables(ctx: click.Context) -> None:
    """List, export, merge, import and clear tables of tuned tiles."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@tables.command("list")
@click.argument("files", nargs=-1, type=EXISTING_FILE)
@click.option("--shipped", is_flag=True, help="List the tables that are part of the library.")
def list_entries(files: tuple[Path, ...], shipped: bool) -> None:
    """List the entries of table files; without FILES, those of the user's table."""
    if shipped and files:
        raise click.UsageError("--shipped lists its own files; leave out FILES")
    if shipped:
        paths = sorted(tuning.SHIPPED_DIR.glob("*.json"))
        if not paths:
            click.echo("No tables are part of the library")
    else:
        paths = list(files) or [tuning.user_table_path()]
    for path in paths:
        _show(path, _read(path) if files else tuning.read_table(path))


@tables.command()
@click.argument("file", type=NEW_FILE)
@force_option("FILE")
def export(file: Path) -> None:
    """Write the entries in effect to FILE: the user's, and shipped ones that they do not replace.

    Entries that were tuned on other kernel sources are left out.
    """
    entries = [entry for entry in tuning.entries() if not is_stale(entry)]
    _write(file, entries, "cupy-flash tables export")


@tables.command()
@click.argument("files", nargs=-1, required=True, type=EXISTING_FILE)
@click.option("--output", required=True, type=NEW_FILE, help="Path of the file to write.")
@force_option("--output")
def merge(files: tuple[Path, ...], output: Path) -> None:
    """Merge table files into one; of entries with the same key, the faster one is kept."""
    entries: list[Entry] = []
    for path in files:
        entries = _faster_of(entries, _read(path))
    _write(output, entries, "cupy-flash tables merge")


@tables.command("import")
@click.argument("file", type=EXISTING_FILE)
def import_entries(file: Path) -> None:
    """Import the entries of FILE into the user's table; they replace entries with the same key.

    Entries of all GPUs are imported. An entry serves its own GPU, and similar ones without a table.
    """
    entries = _read(file)
    fresh = [entry for entry in entries if not is_stale(entry)]
    for entry in fresh:
        if fault := why_not(entry):
            where = f"{entry.gpu}, {entry.family} {entry.problem_class}"
            raise click.UsageError(f"{file}, entry of {where}: {fault}; nothing was imported")
    tuning.change(tuning.user_table_path(), lambda old: tuning.merged(old, fresh))
    counts = Counter(entry.gpu for entry in fresh)
    whose = ": " + ", ".join(f"{n} of {gpu}" for gpu, n in counts.items()) if counts else ""
    click.echo(f"{_entries(len(fresh))} imported into {tuning.user_table_path()}{whose}")
    if len(fresh) < len(entries):
        click.echo(f"{len(entries) - len(fresh)} left out: tuned on other kernel sources")


@tables.command()
def clear() -> None:
    """Delete the user's table; a table that cannot be read is renamed instead."""
    try:
        click.echo(f"{_entries(tuning.clear())} removed")
    except tuning.TableError:
        path = tuning.user_table_path()
        with tuning.locked(path):
            click.echo(f"{path} cannot be read; kept as {tuning.set_aside(path)}")


def why_not(entry: Entry) -> str | None:
    """Return why an entry's tile cannot serve its problem class on its GPU, or None if it can."""
    if (entry.family == "cpu") != (entry.gpu == tuning.CPU):
        return f"family {entry.family!r} does not run on that processor"
    families = FAMILIES[entry.direction]
    tile_type = Tile if entry.family == "cpu" else families[entry.family].tile_type
    names = [field.name for field in dataclasses.fields(tile_type)]
    if set(names) != set(entry.tile):
        return f"its tile has {', '.join(entry.tile) or 'no fields'}; expected {', '.join(names)}"
    problem = problem_of_class(entry.problem_class)
    try:
        tile = tile_type(**entry.tile)
        if entry.family == "cpu":
            if problem and cpu_forward.scratch_bytes(problem, tile) > cpu_forward.SCRATCH_LIMIT:
                return f"tile {tile} needs too much memory"
            return None
        usual = device_for_arch(entry.arch)
    except (TypeError, ValueError) as error:
        return str(error)
    if entry.sm_count < 1:
        return f"sm_count is {entry.sm_count}; expected at least 1"
    if problem is None:
        return None
    device = dataclasses.replace(usual, name=entry.gpu, sm_count=entry.sm_count)
    family = families[entry.family]
    return family.why_not(problem, device) or family.why_not_tile(problem, device, tile)


def _read(path: Path) -> list[Entry]:
    try:
        return tuning.read_table(path)
    except tuning.TableError as error:
        raise click.UsageError(str(error)) from error


def _entries(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"


def _faster_of(first: Sequence[Entry], second: Sequence[Entry]) -> list[Entry]:
    return tuning.merged((), sorted((*first, *second), key=lambda entry: entry.tflops))


def _write(path: Path, entries: Sequence[Entry], command: str) -> None:
    writable_path(path, (".json",))
    made_by = environment.metadata(environment.cpu_name()) | {"command": command}
    tuning.write_table(path, entries, made_by)
    click.echo(f"{_entries(len(entries))} written to {path}")


def _show(path: Path, entries: Sequence[Entry]) -> None:
    if not entries:
        click.echo(f"No tiles are saved in {path}")
        return
    rows = [
        {
            "gpu": entry.gpu,
            "class": f"{entry.family} {class_text(entry.problem_class)}",
            "tile": " ".join(f"{name}={value}" for name, value in entry.tile.items()),
            "tflops": entry.tflops,
            "stale": "stale" if is_stale(entry) else "",
        }
        for entry in sorted(entries, key=lambda entry: entry.key)
    ]
    columns = [
        report.Column("GPU", lambda row: row["gpu"], numeric=False),
        report.Column("class", lambda row: row["class"], numeric=False),
        report.Column("tile", lambda row: row["tile"], numeric=False),
        report.rate_column(rows),
        report.Column("", lambda row: row["stale"], numeric=False),
    ]
    out = report.console()
    report.print_table(out, f"{len(entries)} saved in {path}", columns, [rows])
    report.print_notes(out, [CLASS_NOTE])
    if any(row["stale"] for row in rows):
        report.print_notes(out, ["stale: tuned on other kernel sources, no longer used"])
