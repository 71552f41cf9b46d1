"""Map of rates by tile size, on the terminal and as a picture."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.workload import Weighted
from cupy_flash.cli.tune.candidates import Candidate, Limits, gpu_candidates, illegal_sizes
from cupy_flash.cli.tune.heatmap import HeatMap, print_heat_map
from cupy_flash.cpu.plan import make_cpu_plan
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.tile import Tile

CASE = Case("bfloat16", 4, 4096, 4096, 16, 16, 128, 128)
RATES = {(64, 64): 401.6, (128, 64): 702.4, (128, 128): 655.0}
REASONS = {
    (256, 64): "needs about 300 registers per thread; 255 are available",
    (256, 128): "needs about 320 registers per thread; 255 are available",
    (64, 256): "does not compile",
}
GPU_MAP = HeatMap("mma, on a GPU", RATES, REASONS)


def candidate(Br: int, Bc: int, **fields: Any) -> Candidate:
    plan = make_cpu_plan(Case("float32", 1, 113, 203, 2, 2, 24, 24).problem(), Tile(Br, Bc), "")
    return Candidate((plan,), (1.0,), (plan.problem.flops(),), **fields)


def printed(heat: HeatMap, width: int = 80, **options: Any) -> str:
    out = io.StringIO()
    print_heat_map(Console(file=out, width=width, **options), heat)
    return out.getvalue()


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_lines_are_br_columns_are_bc_and_a_star_marks_the_best() -> None:
    head, *lines = cells(printed(GPU_MAP))[1:]

    assert head == ["Br\\Bc", "64", "128", "256"]
    assert lines[:3] == [["64", "402", "b"], ["128", "*702", "655"], ["256", "a", "a"]]


def test_reasons_that_differ_in_their_numbers_share_a_letter_that_is_explained_below() -> None:
    text = printed(GPU_MAP)
    registers = "needs about N registers per thread; N are available"

    assert GPU_MAP.legend() == {registers: "a", "does not compile": "b"}
    assert text.endswith(f"a: {registers}\nb: does not compile\n")


def test_a_size_that_is_not_in_the_sweep_is_left_blank() -> None:
    heat = HeatMap("", {(64, 64): 100.0, (128, 128): 200.0}, {})

    assert cells(printed(heat))[2:] == [["64", "100"], ["128", "*200"]]


def test_rates_of_a_cpu_are_shown_in_gflops() -> None:
    text = printed(HeatMap("a CPU", {(64, 64): 0.0194, (64, 128): 0.0021}, {}))

    assert "GFLOP/s" in text
    assert cells(text)[2] == ["64", "*19.4", "2.1"]


def test_a_single_size_is_a_map_too() -> None:
    assert cells(printed(HeatMap("", {(64, 64): 3.21}, {})))[2] == ["64", "*3.21"]


def test_without_any_rate_nothing_is_printed() -> None:
    assert printed(HeatMap("", {}, REASONS)) == ""


def test_a_map_that_is_wider_than_the_terminal_is_left_whole() -> None:
    rates = {(64, Bc): 1000.0 + Bc for Bc in range(16, 257, 16)}
    lines = printed(HeatMap("", rates, {}), width=40).splitlines()

    assert lines[-1].split() == ["64", *(str(1000 + Bc) for Bc in range(16, 256, 16)), "*1256"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_the_map_of_a_gpus_whole_search_space_fits_the_terminal(width: int) -> None:
    device, limits = device_for_arch("sm_90"), Limits()
    for family in ("simt", "mma", "hopper"):
        found = gpu_candidates([Weighted(CASE)], device, family, limits)
        for number, each in enumerate(found):
            each.medians_ms = [0.8 + number / 1000]
        illegal = illegal_sizes(CASE.problem(), device, family, limits)
        text = printed(HeatMap.of("a title", found, illegal), width)

        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text


def test_a_terminal_shows_colours_and_a_file_none() -> None:
    assert "\x1b[" in printed(GPU_MAP, force_terminal=True, color_system="truecolor")
    assert "\x1b" not in printed(GPU_MAP)


def test_the_map_of_a_sweep_shows_the_best_tile_of_each_size_and_why_others_have_none() -> None:
    timed = [candidate(64, 64, medians_ms=[ms], rounds=1) for ms in (2.0, 1.0)]
    broken = [candidate(64, 128, dropped="does not compile"), candidate(128, 64, failed=True)]
    illegal = {(256, 64): "too large", (64, 64): "for another tile of this size"}
    heat = HeatMap.of("", [*timed, *broken, candidate(128, 128)], illegal)

    assert heat.rates == {(64, 64): candidate(64, 64, medians_ms=[1.0]).tflops}
    assert heat.reasons == {
        (64, 128): "does not compile",
        (128, 64): "wrong result",
        (128, 128): "not timed",
        (256, 64): "too large",
        (256, 128): "not tried",
    }


def test_sizes_that_the_users_limits_rule_out_have_that_for_a_reason() -> None:
    device, limits = device_for_arch("sm_90"), Limits(Br=(64,), max_smem=40)
    reasons: Mapping[Any, str] = illegal_sizes(CASE.problem(), device, "mma", limits)

    assert {Br for (Br, _), why in reasons.items() if why == "not in --br"} >= {128, 256}
    assert not any(why == "not in --br" for (Br, _), why in reasons.items() if Br == 64)
    assert any(re.fullmatch(r"\d+ KiB are over --max-smem", why) for why in reasons.values())


def test_the_star_is_the_winners_though_one_that_left_early_was_faster_in_fewer_repeats() -> None:
    winner = candidate(64, 64, medians_ms=[1.0], rounds=3)
    early = candidate(64, 128, medians_ms=[0.9], rounds=1)
    heat = HeatMap.of("", [early, winner], {})
    text = printed(heat)

    assert heat.best == (64, 64)
    assert [cell[0] for cell in cells(text)[2][1:]] == ["*", "~"]
    assert "~: left the race early, so timed with fewer repeats" in text


def test_the_rate_of_a_size_is_that_of_its_tile_that_lasted_longest() -> None:
    lasting = candidate(64, 64, medians_ms=[1.0], rounds=3)
    early = candidate(64, 64, medians_ms=[0.5], rounds=1)
    heat = HeatMap.of("", [early, lasting], {})

    assert heat.rates == {(64, 64): lasting.tflops}
    assert "~" not in printed(heat)
