"""Sweeps of one `tune` command, one after another; an interrupted job can be resumed."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from cupy_flash.problem.device import Device

from ..build.build import Builder
from ..cases.workload import Group
from ..measure.gpu_state import CpuWatch, bus_id, busy_before
from ..records import environment
from .candidates import Candidate, Limits
from .findings import class_text, finding_of, outcome_text, ranking_row
from .journal import Finding, Journal
from .live import Live
from .race import ranking
from .saver import Saver, why_not_saved
from .sweep import Compilation, Settings, Sweep, measure, other_16bit_class, prebuilt_from, shorten

# Version of the journal's fields; journals of other versions are not resumed.
_JOURNAL_VERSION = 2


@dataclasses.dataclass
class TuneJob:
    """All sweeps of one command, one after another.

    Attributes
    ----------
    last
        Sweep that runs, or ran last; None if none did.
    gpu_busy
        Reason why times on the GPU are not reliable; None if they are reliable, and on the CPU.
    """

    sweeps: list[Sweep]
    device: Device | None
    name: str
    limits: Limits
    settings: Settings
    min_gain: float
    saver: Saver | None
    journal: Journal = dataclasses.field(init=False)
    last: Sweep | None = None
    gpu_busy: str | None = None

    def __post_init__(self) -> None:
        self.journal = Journal(self._identity())

    @property
    def goes_on(self) -> bool:
        """Whether an interrupted job left results to resume from."""
        return bool(self.journal.found or self.journal.begun)

    @property
    def only(self) -> Sweep | None:
        """The only sweep, whose tiles can then be shown; None if there are several."""
        return self.last if len(self.sweeps) == 1 else None

    @property
    def found(self) -> list[Finding]:
        """Findings so far."""
        found = self.journal.found
        return [found[c] for s in self.sweeps if (c := s.group.problem_class) in found]

    def rows(self) -> list[dict[str, Any]]:
        """Return rows of a record: the tiles of a single sweep, or the findings of several."""
        if self.only is None:
            return [{k: v for k, v in f.items() if k != "finalists"} for f in self.found]
        ranked = ranking(self.only.candidates)
        if not self.found and not any(candidate.rounds for candidate in ranked):
            return []
        return [ranking_row(candidate, rank) for rank, candidate in enumerate(ranked, 1)]

    def run(
        self, workers: int | None, rows: list[dict[str, Any]], save: Callable[[], None]
    ) -> None:
        """Run the remaining sweeps; update `rows` with the results so far, and call `save`."""
        journal = self.journal
        if self.goes_on:
            tiles = sum(map(len, journal.begun.values()))
            begun = f", and {tiles} tiles of the next are checked" if tiles else ""
            done = f"{len(journal.found)} of {len(self.sweeps)} are done"
            click.echo(f"Resuming: {done}{begun}.", err=True)
        for finding in self.found:
            # Whether to save is decided again: the earlier command may have been a dry run.
            if (now := self._settled(finding)) != finding:
                journal.add(now)
        if self.device is not None:
            # The load is measured before this process uses the GPU itself.
            self.gpu_busy = busy_before(bus_id())

        def note() -> None:
            rows[:] = self.rows()
            save()

        try:
            note()
            with (
                Live(len(self.sweeps), len(journal.found), note) as live,
                tempfile.TemporaryDirectory(prefix="cupy_flash_tune_") as folder,
                prebuilt_from(Path(folder)),
            ):
                if self.device is None:
                    self._run_all(live, None)
                else:
                    with Builder(workers) as builder:
                        compilation = Compilation(builder, Path(folder), self.limits.max_spills)
                        self._run_all(live, compilation)
        except (Exception, KeyboardInterrupt):
            going_on = "; the same command resumes there" if journal.is_kept else ""
            done = f"{len(journal.found)} of {len(self.sweeps)} are done"
            click.echo(f"{done}{going_on}.", err=True)
            raise
        journal.finish()

    def _identity(self) -> dict[str, Any]:
        kernels = sorted({(sweep.family, sweep.direction) for sweep in self.sweeps})
        return {
            "journal_version": _JOURNAL_VERSION,
            "device": self.name,
            "digests": [[*each, environment.digest_of(*each)] for each in kernels],
            "versions": environment.versions(),
            "groups": [_group_identity(sweep.group) for sweep in self.sweeps],
            "tiles": [[str(c.tile) for c in sweep.candidates] for sweep in self.sweeps],
            "settings": dataclasses.asdict(self.settings) | {"min_gain": self.min_gain},
        }

    def _run_all(self, live: Live, compilation: Compilation | None) -> None:
        journal = self.journal
        left = [s for s in self.sweeps if s.group.problem_class not in journal.found]
        if compilation:
            # All kernels are compiled ahead, except those of sweeps that will be shortened.
            classes = {sweep.group.problem_class for sweep in self.sweeps}
            for sweep in left:
                if not self._follows_other_16bit_class(sweep, classes):
                    compilation.start(sweep.candidates)
        for sweep in left:
            self.last = sweep
            live.begin(label(sweep))
            shorten(sweep, _finalists(self.sweeps, journal))
            if compilation:
                compilation.finish(sweep.candidates, live)
            unreliable = self._measure(sweep, live)
            ranked = ranking(sweep.candidates)
            finding = finding_of(sweep, ranked, self.name, self.min_gain, unreliable)
            finding = self._settled(finding)
            journal.add(finding)
            if self.saver:
                self.saver.save([finding])
            live.end(outcome_text(finding))

    def _measure(self, sweep: Sweep, live: Live) -> str | None:
        """Measure what is left of a sweep; return why its times are not reliable, or None."""
        name = sweep.group.problem_class
        begun = self.journal.begun.get(name, {})
        for candidate in sweep.candidates:
            if result := begun.get(str(candidate.tile)):
                candidate.take(result)
        before = next(filter(None, (line["unreliable"] for line in begun.values())), None)
        watch = CpuWatch()

        def unreliable() -> str | None:
            return before or (watch.state.unreliable if self.device is None else self.gpu_busy)

        def note(lot: Sequence[Candidate]) -> None:
            for candidate in lot:
                tile = str(candidate.tile)
                self.journal.add_tile(name, tile, candidate.result, unreliable())

        measure(sweep, self.settings, live, note)
        return unreliable()

    def _settled(self, finding: Finding) -> Finding:
        """Return the finding with whether its tile is or will be saved and, if not, why."""
        if finding["stored"] or not finding["won"]:
            return finding
        why = why_not_saved(finding, self.saver)
        return finding | {"stored": why is None, "not_stored": why}

    def _follows_other_16bit_class(self, sweep: Sweep, classes: set[str]) -> bool:
        other_class = other_16bit_class(sweep.group.problem_class)
        order = [each.group.problem_class for each in self.sweeps]
        return other_class in classes and order.index(other_class) < order.index(
            sweep.group.problem_class
        )


def _finalists(sweeps: Sequence[Sweep], journal: Journal) -> dict[str, list[Any]]:
    """Return the tiles that went past the first round, for each class that is done."""
    found = {}
    for sweep in sweeps:
        finding = journal.found.get(sweep.group.problem_class)
        if finding:
            tile_type = type(sweep.candidates[0].tile)
            found[sweep.group.problem_class] = [tile_type(**t) for t in finding["finalists"]]
    return found


def _group_identity(group: Group) -> list[Any]:
    return [group.problem_class, [[str(each.case), each.weight] for each in group.cases]]


def label(sweep: Sweep) -> str:
    """Return a short text that identifies a sweep."""
    return f"{sweep.family} {class_text(sweep.group.problem_class)}"
