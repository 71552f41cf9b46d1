"""Progress of a sweep: a live table on a terminal, otherwise a line for each group."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Group
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table

from ..records import report
from .candidates import Candidate

# Number of finished groups that remain visible.
_SHOWN = 8


class Live:
    """Display of a sweep's progress on stderr; a context manager."""

    def __init__(
        self, groups: int, resumed: int = 0, save: Callable[[], None] = lambda: None
    ) -> None:
        """Create the display without showing it.

        Parameters
        ----------
        groups, resumed
            Number of groups, and of groups that were finished before.
        save
            Function that is called whenever there are new times.
        """
        self._groups, self._resumed, self._done = groups, resumed, resumed
        self._save = save
        self._start = time.monotonic()
        self._finished: list[tuple[str, str, str]] = []
        self._label = self._step = ""
        self._best: Candidate | None = None
        self._share = 0.0
        self._on_terminal = sys.stderr.isatty()
        self._live = RichLive(
            get_renderable=self._page,
            console=report.console(stderr=True),
            transient=True,
            refresh_per_second=4,
            auto_refresh=self._on_terminal,
        )

    def __enter__(self) -> Live:
        if self._on_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal:
            self._live.stop()

    def begin(self, label: str) -> None:
        """Show that a group begins."""
        self._label, self._step, self._best, self._share = label, "", None, 0.0

    def compiled(self, done: int, total: int) -> None:
        """Show how many of the group's kernels are compiled."""
        self._step, self._share = f"compile {done}/{total}", 0.3 * done / total

    def checked(self, done: int, total: int) -> None:
        """Show how many of the group's tiles are checked."""
        self._step, self._share = f"check {done}/{total}", 0.3 + 0.4 * done / total

    def timed(self, candidates: Sequence[Candidate]) -> None:
        """Show that these candidates were timed."""
        # A round is timed in lots, so the best candidate so far may be from an earlier lot.
        so_far = [*candidates, self._best] if self._best else candidates
        self._best = best = min(so_far, key=lambda c: (-c.rounds, c.cost_ms or 0.0))
        self._step = f"time, round {best.rounds}"
        self._share = max(self._share, 0.6 + 0.1 * best.rounds)
        self._save()

    def end(self, outcome: str) -> None:
        """Show that the group is done."""
        self._save()
        self._done += 1
        best, self._share = _text(self._best), 0.0
        self._finished.append((self._label, best, outcome))
        if not self._on_terminal:
            result = ", ".join(filter(None, (best, outcome)))
            line = f"[{self._done}/{self._groups}] {self._label}: {result}"
            print(line, file=sys.stderr, flush=True)
        self._label = ""

    def _page(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for row in self._finished[-_SHOWN:]:
            table.add_row(*row, style="dim")
        if self._label:
            table.add_row(self._label, _text(self._best), self._step)
        bar = ProgressBar(self._groups, self._done + self._share, width=30)
        head = Table.grid(padding=(0, 2))
        head.add_row(f"{self._done} done, {self._groups - self._done} left", bar, self._time_left())
        return Group(head, table)

    def _time_left(self) -> str:
        passed = time.monotonic() - self._start
        progress = self._done - self._resumed + self._share
        if progress < 0.2:
            return f"{_clock(passed)} passed"
        left = passed / progress * (self._groups - self._resumed - progress)
        return f"{_clock(passed)} passed, about {_clock(left)} left"


def _text(candidate: Candidate | None) -> str:
    if candidate is None:
        return ""
    row = {"tflops": candidate.tflops}
    rate = report.rate_column([row])
    return f"{report.tile_text(candidate.tile)}  {rate.text(row)} {rate.heading}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
