"""Report of `bench --preset crossover` for given times."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cli import commands

from cupy_flash.cli.bench.crossover import as_record, print_crossover, verdicts
from cupy_flash.cli.cases import presets
from cupy_flash.cli.cases.presets import square
from cupy_flash.cli.measure.runner import Cell
from cupy_flash.cli.measure.timing import Spread
from cupy_flash.cli.providers import contract, providers
from cupy_flash.cli.providers.contract import Prepared
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch

LENGTHS = (16, 32, 64, 128)


def steady(milliseconds: float, noise: float = 0.0) -> Spread:
    return Spread(milliseconds, milliseconds - noise, milliseconds + noise, 20)


def cells(
    seqlen: int,
    ours: Spread | None,
    theirs: Spread | None,
    *,
    calls: tuple[Spread, Spread] | None = None,
    dtype: str = "float32",
    head_dim: int = 64,
) -> list[Cell]:
    """Return two cells with these times; `calls` are their call times if those differ."""
    case = square(dtype, 1, 16, seqlen, head_dim)
    plan = make_plan(case.problem(), device_for_arch("sm_90"))
    made = []
    names, times = ("cupy_flash", "cupy-library"), (ours, theirs)
    for name, time, call in zip(names, times, calls or times, strict=True):
        prepared = Prepared(lambda: None, plan=plan if name == "cupy_flash" else None)
        reason = None if time else "no memory"
        provider = providers.provider(name)
        made.append(Cell(provider, case, reason, prepared, time=time, call=call))
    return made


def series(*winners: bool | None) -> list[list[Cell]]:
    """Return cells by length; `winners` says if the library is faster, None if it was not timed."""
    return [
        cells(n, None, steady(1.0))
        if wins is None
        else cells(n, steady(2.0 if wins else 0.5), steady(1.0))
        for n, wins in zip(LENGTHS, winners, strict=True)
    ]


@pytest.mark.parametrize(
    ("winners", "longest", "text"),
    [
        ((False, False, False, False), None, "never from 16 on"),
        ((True, True, False, False), 32, "up to 32"),
        ((True, False, True, False), 64, "up to 64"),
        ((True, True, True, True), 128, "up to 128 or beyond"),
        ((True, True, True, None), 64, "up to 64 or beyond"),
        ((None, False, False, False), None, "never from 32 on"),
        ((None, None, None, None), None, "not timed"),
    ],
)
def test_the_crossover_is_the_longest_sequence_at_which_the_library_wins(
    winners: tuple[bool | None, ...], longest: int | None, text: str
) -> None:
    (row,) = verdicts(series(*winners))

    assert row["longest"] == {"GPU time": longest, "call time": longest}
    assert row["GPU time"] == row["call time"] == text


@pytest.mark.parametrize(("noise", "wins"), [(0.2, True), (0.3, False)])
def test_the_library_wins_only_where_the_quartiles_do_not_overlap(noise: float, wins: bool) -> None:
    (row,) = verdicts([cells(16, steady(1.5, noise), steady(1.0, noise))])

    assert (row["longest"]["GPU time"] == 16) is wins


def test_the_host_may_move_the_crossover_of_calls_alone() -> None:
    slow = (steady(1002.0, 9.0), steady(1001.0, 9.0))
    (row,) = verdicts([cells(16, steady(2.0), steady(1.0), calls=slow)])

    assert (row["GPU time"], row["call time"]) == ("up to 16 or beyond", "never from 16 on")


def test_verdicts_are_by_head_dim_dtype_and_mask() -> None:
    table = [
        cells(n, steady(2.0), steady(1.0), dtype=dtype, head_dim=dim)
        for dtype in ("float32", "bfloat16")
        for dim in (128, 32)
        for n in (64, 16)
    ]

    rows = [(row["head_dim"], row["case"]) for row in verdicts(table)]
    cases = ("float32 full", "bfloat16 full")
    assert rows == [(dim, case) for dim in (32, 128) for case in cases]
    assert as_record(table)["head_dim 32 float32 full, GPU time"] == 64


@pytest.mark.parametrize("columns", [80, 120])
def test_the_report_tells_who_lost_where_and_what_was_not_timed(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = series(True, True, False, None)
    table[1][0].passed = False
    for cell in itertools.chain.from_iterable(table):
        cell.timed_by = "events" if cell.provider.name == "cupy-library" else "graph"
    print_crossover(table, "a GPU\nThe title", ["! a busy GPU"])
    text = capsys.readouterr().out
    joined = " ".join(text.split())

    assert max(map(len, text.splitlines())) <= columns
    assert re.search("^ *64 +float32 +full +up to 32 +up to 32 *$", text, re.MULTILINE)
    assert "loses by GPU time at seqlen 16, 32" in joined
    assert "cupy_flash on s128: no memory" in joined
    assert "! a busy GPU" in text
    assert "!: cupy_flash on s32: over the error bound" in text
    assert "ms: GPU time of CUDA graph replays (of calls for cupy-library)" in joined


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "gpu_unavailable", lambda: "no GPU here")
    result = commands.run("bench", "--preset", "crossover", code=1)

    assert result.stderr == (
        "Up to which sequence length library products beat the fused kernel: no GPU here\n"
    )


def test_the_command_prints_the_verdicts_and_keeps_rows_and_crossovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = presets.preset("crossover")
    short: Sequence[Any] = [c for c in named.cases if c.seqlen_q <= 32 and c.head_dim == 32]
    smaller = dataclasses.replace(named, cases=tuple(short))
    monkeypatch.setitem(presets._PRESETS, "crossover", smaller)
    path = tmp_path / "rows.json"
    asked = ("--provider", "cupy_flash-cpu,numpy-naive", "--dtype", "fp32", "--repeats", "3")
    result = commands.run("bench", "--preset", "crossover", *asked, "--output", path)
    data = commands.written(path)
    kept = {"head_dim 32 float32 full, GPU time", "head_dim 32 float32 causal, GPU time"}

    assert "by GPU time" in result.stdout
    assert len(data["rows"]) == 2 * 2 * 2
    assert kept <= set(data["metadata"]["crossover"])
