"""List records and shipped tiles that were measured on kernels that no longer exist.

    python benchmarks/prune.py            list them; exit with 1 if there are any
    python benchmarks/prune.py --delete   delete them

A record is deleted as a whole if the digest of any of its kernels has changed. A record without
digests stays, and a line says so. Afterwards, `python benchmarks/render.py` renders the pages and
their figures, and `python benchmarks/quotes.py` lists figures of the README without a record.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from cupy_flash.cli.records import records
from cupy_flash.cli.tune.findings import is_stale
from cupy_flash.planning import tuning

RESULTS = Path(__file__).resolve().parent / "results"


def prune_records(folder: Path, delete: bool) -> int:
    """List, and on request delete, records of other kernel sources; return their number."""
    found = {path: records.read(path) for path in sorted(folder.glob("*.json"))}
    count = 0
    for path, record in found.items():
        if changed := records.changed_kernels(record):
            count += 1
            print(f"{path}: {', '.join(changed)} changed since")
            if delete:
                path.unlink()
        elif not records.kernels(record):
            print(f"{path}: names no kernel sources; it stays")
    return count


def prune_tables(folder: Path, delete: bool) -> int:
    """List, and on request delete, table entries of other kernel sources; return their number."""
    count = 0
    for path in sorted(folder.glob("*.json")):
        entries = tuning.read_table(path)
        stale = [entry for entry in entries if is_stale(entry)]
        if stale:
            count += len(stale)
            families = ", ".join(sorted({entry.family for entry in stale}))
            print(f"{path}: {len(stale)} of {len(entries)} entries, {families} changed since")
        if delete and len(stale) == len(entries):
            path.unlink()
        elif delete and stale:
            tuning.change(path, lambda old: [entry for entry in old if not is_stale(entry)])
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """List or delete; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delete", action="store_true", help="delete the records and tiles found")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument(
        "--tables", type=Path, default=tuning.SHIPPED_DIR, help="folder of the tuned tables"
    )
    options = parser.parse_args(arguments)
    try:
        found = prune_records(options.results, options.delete)
        found += prune_tables(options.tables, options.delete)
    except (click.UsageError, tuning.TableError) as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if found and not options.delete else 0


if __name__ == "__main__":
    sys.exit(main())
