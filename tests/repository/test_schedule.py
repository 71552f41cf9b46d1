"""The figure of the Hopper kernel's schedule, which benchmarks/schedule.py draws from a model."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT, script

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

schedule = script("schedule")
PAGE = CHECKOUT / "docs" / "engineering" / "hopper.md"


def boxes(row: str, *, pingpong: bool) -> list[Any]:
    """Return the boxes of a row of the figure, in the order in which they begin."""
    found = schedule.Schedule(pingpong=pingpong).boxes
    return sorted((box for box in found if box.row == row), key=lambda box: box.begin)


def test_the_committed_figure_is_what_the_script_draws(tmp_path: Path) -> None:
    schedule.main([str(tmp_path / "figure.svg")])

    drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert schedule.TARGET.read_text(encoding="utf-8") == drawn
    assert ET.fromstring(drawn).tag.endswith("svg")


def test_the_page_shows_the_figure_and_quotes_its_numbers() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())

    assert f"]({Path(os.path.relpath(schedule.TARGET, PAGE.parent)).as_posix()})" in text
    assert f"{schedule.GEMM} cycles" in text
    alone, together = schedule.SOFTMAX[1], schedule.SOFTMAX[2]
    assert f"{alone} cycles, or {together} cycles" in text
    for pingpong in (False, True):
        found = schedule.Schedule(pingpong=pingpong)
        assert f"{found.cycles_per_kv_tile:.0f} cycles per KV tile" in text
        assert f"{found.busy:.0%}" in text


def test_ping_pong_orders_the_gemms_of_the_consumers() -> None:
    first, *rest = boxes("GEMM", pingpong=True)[schedule.CONSUMERS - 1 :]
    assert first.lanes == schedule.CONSUMERS  # the first scores are issued without an order
    assert [box.name for box in rest[:4]] == ["S1", "O0", "S1", "O0"]
    assert all(box.lanes == 1 for box in rest)
    assert all(before.end == after.begin for before, after in pairwise(rest))


def test_without_ping_pong_the_consumers_stay_in_step() -> None:
    for row in ("GEMM", "softmax"):
        found = boxes(row, pingpong=False)
        for one, other in zip(found[::2], found[1::2], strict=True):
            assert (one.name, one.begin, one.end) == (other.name, other.begin, other.end)


@pytest.mark.parametrize("pingpong", [False, True])
def test_every_load_ends_before_its_tile_is_read(pingpong: bool) -> None:
    reads = boxes("GEMM", pingpong=pingpong)
    for load in boxes("TMA", pingpong=pingpong):
        name = load.name.replace("K", "S").replace("V", "O")
        assert load.end <= min(box.begin for box in reads if box.name == name)
