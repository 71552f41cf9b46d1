"""Changes of a table of tuned tiles by the findings of `tune`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from cupy_flash.planning import tuning
from cupy_flash.problem.device import Device

from ..records import environment
from .findings import entry_of
from .journal import Finding


def require_writable(table: Path | None) -> None:
    """Raise a usage error if `table` is None and the user's table cannot be written."""
    if table:
        return
    path = tuning.user_table_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The check uses another file, because a process may be reading or replacing the table.
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise click.UsageError(
            f"{path} cannot be written: {error.strerror}; --dry-run saves nothing"
        ) from error


@dataclasses.dataclass
class Saver:
    """Writer of the tiles that beat the default to a table.

    Attributes
    ----------
    table
        Path of the table; None for the user's table.
    device
        Device that the tiles are for; None for the CPU backend.
    removes
        Whether to remove the entry of a class whose default is now the best tile. A sweep of only
        some tiles cannot decide that.
    command
        Command line, for people who read the file.
    force
        Whether to save results of a busy machine, too.
    removed
        Number of entries removed so far.
    """

    table: Path | None
    device: Device | None
    removes: bool
    command: str
    force: bool = False
    removed: int = 0

    def save(self, result: Sequence[Finding]) -> str:
        """Save the findings of calls without modifications; return a text about what was done."""
        path = self.table or tuning.user_table_path()
        usable = [f for f in result if f["best_tile"] is not None and not why_not_saved(f, self)]
        won = [entry_of(finding, self.device) for finding in usable if finding["stored"]]
        lost = [f for f in usable if self.removes and not f["stored"]]
        kept = [entry_of(f, self.device, "default") for f in lost if self._is_overruled(f)]
        losers = {entry_of(f, self.device).key for f in lost} - {entry.key for entry in kept}

        def changed(old: list[tuning.Entry]) -> list[tuning.Entry]:
            staying = [entry for entry in old if entry.key not in losers]
            self.removed += len(old) - len(staying)
            return tuning.merged(staying, won + kept)

        name = self.device.name if self.device else tuning.CPU
        made_by = environment.metadata(name) | {"command": self.command} if self.table else None
        tuning.change(path, changed, made_by=made_by)
        texts = [f"{len(won)} saved in {path}"] if won else []
        if kept:
            defaults = "1 default" if len(kept) == 1 else f"{len(kept)} defaults"
            texts.append(f"{defaults} saved over another table's tile.")
        texts = texts or ["Nothing saved."]
        if self.removed:
            texts.append(f"{self.removed} removed, where the default is the best now.")
        return "\n".join(texts)

    def _is_overruled(self, finding: Finding) -> bool:
        """Return whether a class without a user's entry would get another tile than the default."""
        if self.table:
            return False
        key = (finding["family"], finding["kernel_digest"], finding["problem_class"])
        other = tuning.lookup_class(self.device, *key, except_user=True)
        return other is not None and other.tile != finding["default_tile"]


def why_not_saved(finding: Finding, saver: Saver | None) -> str | None:
    """Return why a finding neither saves a tile nor removes one, or None if it may.

    `saver` is None if nothing is to be saved.
    """
    if finding.get("modified"):
        return "with modifications"
    if saver is None:
        return "--dry-run"
    return None if saver.force else finding.get("unreliable")
