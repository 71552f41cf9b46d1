"""Progress display of a running sweep."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from rich.console import Console

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.tune import live as live_module
from cupy_flash.cli.tune.candidates import Candidate
from cupy_flash.cli.tune.live import Live
from cupy_flash.cpu.plan import make_cpu_plan
from cupy_flash.problem.tile import Tile

CASE = Case("float32", 1, 113, 203, 2, 2, 24, 24)


def candidate(Br: int, ms: float, rounds: int = 1) -> Candidate:
    plan = make_cpu_plan(CASE.problem(), Tile(Br, 64), "no GPU")
    return Candidate((plan,), (1.0,), (plan.problem.flops(),), medians_ms=[ms], rounds=rounds)


class Terminal(io.StringIO):
    """Fake terminal that keeps its output."""

    def isatty(self) -> bool:
        return True


def begun(sweeps: int = 1, resumed: int = 0) -> Live:
    """Return the display of `sweeps` sweeps, the first of which has begun."""
    live = Live(sweeps, resumed=resumed)
    live.begin("mma one")
    return live


def page(live: Live) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(live._page())
    return out.getvalue()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Elapsed seconds, in a list, so that a test can change them."""
    now = [0.0]
    monkeypatch.setattr(live_module.time, "monotonic", lambda: now[0])
    return now


def test_into_a_file_a_line_is_written_for_each_group(capsys: pytest.CaptureFixture[str]) -> None:
    with Live(2) as live:
        for label in ("mma one", "mma two"):
            live.begin(label)
            live.compiled(1, 1)
            live.timed([candidate(32, 1.0)])
            live.end("the default")
    lines = capsys.readouterr().err.splitlines()

    assert [line.split(":")[0] for line in lines] == ["[1/2] mma one", "[2/2] mma two"]
    assert lines[0].endswith(": 32x64  4.404 GFLOP/s, the default")


def test_where_no_tile_was_timed_the_line_holds_the_outcome_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    live = begun()
    live.end("no tile ran and passed its check")

    assert capsys.readouterr().err == "[1/1] mma one: no tile ran and passed its check\n"


def test_the_best_so_far_is_kept_when_a_later_lot_is_slower() -> None:
    live = begun()
    live.timed([candidate(32, 1.0), candidate(64, 2.0)])
    live.timed([candidate(96, 3.0)])

    assert "32x64" in page(live)
    assert "96x64" not in page(live)


def test_a_tile_of_a_later_round_is_better_than_one_that_was_fast_in_the_first() -> None:
    live = begun()
    live.timed([candidate(32, 1.0)])
    live.timed([candidate(64, 1.5, rounds=2)])

    assert "64x64" in page(live)
    assert "time, round 2" in page(live)


def test_the_next_group_begins_without_the_last_ones_best() -> None:
    live = begun(2)
    live.timed([candidate(32, 1.0)])
    live.begin("mma two")

    assert "32x64" not in page(live)


@pytest.mark.parametrize(
    ("step", "text"), [("compiled", "compile 3/12"), ("checked", "check 3/12")]
)
def test_steps_are_counted(step: str, text: str) -> None:
    live = begun()
    getattr(live, step)(3, 12)

    assert text in page(live)


def test_done_and_left_are_counted_with_what_an_earlier_run_did() -> None:
    assert "2 done, 3 left" in page(Live(5, resumed=2))


def test_the_time_left_goes_by_what_this_run_did_and_not_by_what_it_found_done(
    clock: list[float],
) -> None:
    live = begun(6, resumed=2)
    live.end("the default")
    clock[0] = 90.0

    # One of the four sweeps that were left took 1:30, so three more take 4:30.
    assert "1:30 passed, about 4:30 left" in page(live)


def test_before_anything_is_known_no_time_left_is_claimed(clock: list[float]) -> None:
    live = Live(6)
    clock[0] = 5.0

    assert "0:05 passed" in page(live)
    assert "about" not in page(live)


def test_on_a_terminal_the_table_is_drawn_and_taken_away_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Live(1) as live:
        live.begin("mma one")
        live.timed([candidate(32, 1.0)])
        live._live.refresh()
        live.end("the default")
    written: Any = terminal.getvalue()

    assert "mma one" in written
    assert "[1/1]" not in written
    assert written.rstrip().endswith("\x1b[2K")
