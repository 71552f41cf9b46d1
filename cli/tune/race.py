"""Successive halving: time many candidates briefly, and the best of them longer.

Jamieson and Talwalkar, "Non-stochastic best arm identification", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .candidates import Candidate

# Number of candidates that are queued at once, so that progress shows and Ctrl-C works.
_LOT = 16


@dataclass(frozen=True)
class Round:
    """Number of repeats in a round, and of candidates that reach the next round.

    Attributes
    ----------
    repeats
        Number of repeats of each case.
    fraction
        Fraction of the candidates that reach the next round.
    least
        Minimum number of candidates that reach the next round.
    """

    repeats: int
    fraction: float
    least: int


def rounds(repeats: int) -> tuple[Round, ...]:
    """Return the rounds of a race; the last round has `repeats` repeats."""
    return (Round(2, 0.15, 12), Round(max(2, repeats // 4), 0.3, 4), Round(repeats, 0, 0))


Measure = Callable[[Sequence[Candidate], int], None]
Advance = Callable[[Sequence[Candidate]], None]


def race(
    candidates: Sequence[Candidate], plan: Sequence[Round], measure: Measure, advance: Advance
) -> None:
    """Time candidates in rounds; the default one stays to the end.

    Lots that were timed in an interrupted race are not timed again.

    Parameters
    ----------
    candidates
        Candidates that passed their check.
    plan
        Rounds of the race.
    measure
        Function that times candidates alternately, with a number of repeats; stores the medians.
    advance
        Function that is called with the candidates that were just timed.
    """
    running = list(candidates)
    for number, each in enumerate(plan, 1):
        lots = _lots(running) if number == 1 else [running] if running else []
        for lot in lots:
            if all(candidate.rounds >= number for candidate in lot):
                continue
            measure(lot, each.repeats)
            for candidate in lot:
                candidate.rounds = number
            advance(lot)
        # In a resumed race, the times by which this round chose candidates have been replaced by
        # times of later rounds, so that its choice is not made again.
        chosen = [candidate for candidate in running if candidate.rounds > number]
        running = chosen or _best(running, max(each.least, round(each.fraction * len(running))))


def _lots(candidates: list[Candidate]) -> list[list[Candidate]]:
    return [candidates[i : i + _LOT] for i in range(0, len(candidates), _LOT)]


def _best(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    ordered = sorted(candidates, key=lambda candidate: candidate.cost_ms or 0.0)
    return [c for rank, c in enumerate(ordered) if rank < count or c.is_default]


def ranking(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates from the best down: by rounds that they lasted, then by time.

    Candidates that were not timed follow, by resources: no spills, then many resident threads, then
    large tiles, which read keys and values less often. Those that failed their check come last.
    """

    def key(candidate: Candidate) -> tuple[float, ...]:
        if candidate.cost_ms is not None:
            return (0, -candidate.rounds, candidate.cost_ms)
        spills = candidate.resources.spill_bytes if candidate.resources else 0
        threads = (candidate.blocks_per_sm or 0) * candidate.plan.threads
        area = candidate.tile.Br * candidate.tile.Bc
        return (1, candidate.failed, candidate.dropped is not None, spills, -threads, -area)

    return sorted(candidates, key=key)
