"""The race between tiles: how often each tile is timed, and how tiles are ranked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.workload import Weighted
from cupy_flash.cli.tune.candidates import Candidate, Limits, gpu_candidates
from cupy_flash.cli.tune.race import race, ranking, rounds
from cupy_flash.cpu.plan import make_cpu_plan
from cupy_flash.problem.device import Resources, device_for_arch
from cupy_flash.problem.tile import Tile

CASE = Case("float32", 1, 113, 203, 2, 2, 24, 24)


def candidate(Br: int, **fields: Any) -> Candidate:
    """Return a candidate tile that takes `Br` ms by the fake `Clock` below."""
    plan = make_cpu_plan(CASE.problem(), Tile(Br, 64), "no GPU")
    return Candidate((plan,), (1.0,), (CASE.flops(),), **fields)


class Clock:
    """Fake clock by which a tile takes `Br` ms; it records which tiles are timed."""

    def __init__(self) -> None:
        self.lots: list[tuple[list[int], int]] = []
        self.reported: list[int] = []

    def measure(self, lot: Sequence[Candidate], repeats: int) -> None:
        self.lots.append(([c.tile.Br for c in lot], repeats))
        for each in lot:
            each.medians_ms = [float(each.tile.Br)]

    def advance(self, lot: Sequence[Candidate]) -> None:
        self.reported += [c.tile.Br for c in lot]


def run(candidates: list[Candidate], repeats: int = 20) -> Clock:
    clock = Clock()
    race(candidates, rounds(repeats), clock.measure, clock.advance)
    return clock


def field_of(count: int, default: int) -> list[Candidate]:
    return [candidate(Br, is_default=Br == default) for Br in range(1, count + 1)]


def test_all_are_timed_twice_in_lots_then_the_best_more_often() -> None:
    clock = run(field_of(100, default=1))
    by_repeats = {n: [lot for lot, repeats in clock.lots if repeats == n] for n in (2, 5, 20)}

    assert [len(lot) for lot in by_repeats[2]] == [16] * 6 + [4]
    assert by_repeats[5] == [list(range(1, 16))]
    assert by_repeats[20] == [[1, 2, 3, 4]]
    assert clock.reported == [Br for lot, _ in clock.lots for Br in lot]


def test_of_few_tiles_twelve_and_then_four_go_on() -> None:
    clock = run(field_of(30, default=1))

    assert [len(lot) for lot, repeats in clock.lots if repeats == 5] == [12]
    assert [len(lot) for lot, repeats in clock.lots if repeats == 20] == [4]


def test_the_default_is_timed_to_the_end_though_it_is_the_slowest() -> None:
    field = field_of(100, default=100)
    clock = run(field)
    last, repeats = clock.lots[-1]

    assert repeats == 20
    assert 100 in last
    assert field[99].rounds == 3


def test_each_remembers_how_many_rounds_it_lasted() -> None:
    field = field_of(100, default=1)
    run(field)

    assert [sum(c.rounds == number for c in field) for number in (1, 2, 3)] == [85, 11, 4]


@pytest.mark.parametrize("lots", range(10))
def test_a_race_that_was_interrupted_ends_like_one_that_was_not(lots: int) -> None:
    whole, field = field_of(100, default=100), field_of(100, default=100)
    clock = Clock()

    def measure(lot: Sequence[Candidate], repeats: int) -> None:
        if len(clock.lots) == lots:
            raise KeyboardInterrupt
        clock.measure(lot, repeats)

    once = run(whole)
    try:
        race(field, rounds(20), measure, clock.advance)
    except KeyboardInterrupt:
        race(field, rounds(20), clock.measure, clock.advance)

    assert clock.lots == once.lots
    assert [c.rounds for c in field] == [c.rounds for c in whole]


@pytest.mark.parametrize("repeats", [1, 2, 7, 20, 500])
def test_the_last_round_has_the_repeats_that_were_asked_for(repeats: int) -> None:
    assert rounds(repeats)[-1].repeats == repeats


def test_where_no_tile_passed_its_check_nothing_is_timed() -> None:
    assert run([]).lots == []


def test_who_lasted_more_rounds_is_ranked_before_who_was_faster_in_a_short_round() -> None:
    lucky = candidate(1, rounds=1, medians_ms=[0.1])
    thorough = candidate(2, rounds=3, medians_ms=[0.2])
    slower = candidate(3, rounds=3, medians_ms=[0.3])

    assert ranking([lucky, slower, thorough]) == [thorough, slower, lucky]


def test_a_wrong_result_is_ranked_behind_the_timed_and_the_dropped() -> None:
    wrong = candidate(1, failed=True)
    dropped = candidate(2, dropped="does not compile")
    timed = candidate(3, rounds=1, medians_ms=[9.0])

    assert ranking([wrong, dropped, timed]) == [timed, dropped, wrong]


def test_untimed_tiles_are_ranked_by_spills_then_by_occupancy() -> None:
    limits, h100 = Limits(max_tiles=3), device_for_arch("sm_90")
    spilling, small, large = gpu_candidates([Weighted(CASE)], h100, "simt", limits)
    spilling.resources = Resources(255, 16, 0)
    small.resources = large.resources = Resources(32, 0, 0)
    ranked = ranking([spilling, small, large])
    threads = [(c.blocks_per_sm or 0) * c.plan.threads for c in ranked[:2]]

    assert ranked[-1] is spilling
    assert threads == sorted(threads, reverse=True)


def test_a_tiles_cost_is_the_weighted_sum_of_its_cases_times() -> None:
    plan = make_cpu_plan(CASE.problem(), Tile(32, 64), "no GPU")
    both = Candidate((plan, plan), (3.0, 0.5), (CASE.flops(),) * 2, medians_ms=[2.0, 8.0])

    assert both.cost_ms == 3 * 2 + 0.5 * 8
    # The rate counts the case's FLOPs 3 + 0.5 times.
    assert both.tflops == pytest.approx(3.5 * CASE.problem().flops() / 10e-3 / 1e12)
