"""`cupy-flash tables`: look at tuned tables, share them as files, take others' in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from cupy_flash import tuning
from cupy_flash.device import gpu_unavailable
from cupy_flash.tuning import Entry

from . import environment, report
from .errors import NamedCommands
from .options import writable_path
from .providers import current_device
from .tune_table import digest_of

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(cls=NamedCommands, invoke_without_command=True)
@click.pass_context
def tables(ctx: click.Context) -> None:
    """Look at tuned tables, share them as files, and take in others'."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@tables.command("list")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--shipped", is_flag=True, help="Those that came with the library.")
def list_entries(files: tuple[Path, ...], shipped: bool) -> None:
    """Show the entries of table files, by default of the user's own table."""
    if shipped and files:
        raise click.UsageError("--shipped names files of its own; leave the others out")
    paths = sorted(tuning.SHIPPED_DIR.glob("*.json")) if shipped else list(files)
    for path in paths or [tuning.user_table_path()]:
        _show(path, _read(path) if files else tuning.read_table(path))


@tables.command()
@click.argument("file", type=_FILE)
def export(file: Path) -> None:
    """Write the entries in effect, the user's over the shipped ones, into a file.

    Entries for other kernel sources than this version's are left out.
    """
    entries = [entry for entry in tuning.entries() if not _is_stale(entry)]
    _write(file, entries, "cupy-flash tables export")


@tables.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option("--output", required=True, type=_FILE, help="The file to write.")
def merge(files: tuple[Path, ...], output: Path) -> None:
    """Put several table files into one; where keys are the same, the faster entry stays."""
    entries: list[Entry] = []
    for path in files:
        entries = _faster_of(entries, _read(path))
    _write(output, entries, "cupy-flash tables merge")


@tables.command("import")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--gpu", help="Name of the GPU to import for, where it is not in this machine.")
def import_entries(file: Path, gpu: str | None) -> None:
    """Take a table file's entries into the user's table, over what is there."""
    entries = _read(file)
    name = gpu or _present_gpu()
    if foreign := [entry for entry in entries if entry.gpu not in (name, "cpu")]:
        made_for = ", ".join(sorted({entry.gpu for entry in foreign}))
        raise click.UsageError(
            f"{file} was made for {made_for}, and tiles of one GPU are not another's; this is "
            f"{name or 'a machine without one'} (--gpu NAME imports for another machine)"
        )
    fresh = [entry for entry in entries if not _is_stale(entry)]
    tuning.change(tuning.user_table_path(), lambda old: tuning.merged(old, fresh))
    click.echo(f"{len(fresh)} entries imported into {tuning.user_table_path()}")
    if len(fresh) < len(entries):
        click.echo(f"{len(entries) - len(fresh)} left out: tuned on other kernel sources")


@tables.command()
def clear() -> None:
    """Remove the user's own table."""
    count = tuning.clear()
    click.echo(f"{count} {'entry' if count == 1 else 'entries'} removed")


def _present_gpu() -> str | None:
    return None if gpu_unavailable() else current_device().name


def _read(path: Path) -> list[Entry]:
    try:
        return tuning.read_table(path)
    except tuning.TableError as error:
        raise click.UsageError(str(error)) from error


def _is_stale(entry: Entry) -> bool:
    return entry.digest != digest_of(entry.family)


def _faster_of(first: Sequence[Entry], second: Sequence[Entry]) -> list[Entry]:
    return tuning.merged((), sorted((*first, *second), key=lambda entry: entry.tflops))


def _write(path: Path, entries: Sequence[Entry], command: str) -> None:
    writable_path(path, (".json",))
    made_by = environment.metadata(environment.cpu_name()) | {"command": command}
    tuning.write_table(path, entries, made_by)
    click.echo(f"{len(entries)} entries written to {path}")


def _show(path: Path, entries: Sequence[Entry]) -> None:
    if not entries:
        click.echo(f"No tiles are saved in {path}")
        return
    rows = [
        {
            "gpu": entry.gpu,
            "family": entry.family,
            "class": entry.problem_class,
            "tile": " ".join(f"{name}={value}" for name, value in entry.tile.items()),
            "tflops": entry.tflops,
            "stale": "stale" if _is_stale(entry) else "",
        }
        for entry in sorted(entries, key=lambda entry: entry.key)
    ]
    columns = [
        report.Column("GPU", lambda row: row["gpu"], numeric=False),
        report.Column("class", lambda row: f"{row['family']} {row['class']}", numeric=False),
        report.Column("tile", lambda row: row["tile"], numeric=False),
        report.rate_column(rows),
        report.Column("", lambda row: row["stale"], numeric=False),
    ]
    out = report.console()
    report.print_table(out, f"{len(entries)} saved in {path}", columns, [rows])
    if any(row["stale"] for row in rows):
        report.print_notes(out, ["stale: tuned on other kernel sources, no longer used"])
