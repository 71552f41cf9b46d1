"""Verdicts of `bench --preset crossover`: up to which length `cupy-library` is faster."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..cases.cases import describe
from ..measure.runner import Cell
from ..measure.timing import Spread
from ..records import report
from .table import reason_notes, timing_notes

# Kinds of time that a verdict is based on, and the field of `Cell` that holds each.
_CLOCKS = {"GPU time": "time", "call time": "call"}


def verdicts(table: Sequence[Sequence[Cell]]) -> list[dict[str, Any]]:
    """Return a row per head_dim, dtype and mask: the longest sequence at which `cupy-library` wins.

    `longest` holds that length for each kind of time, None if it never wins. `losers` holds the
    lengths at which a kernel of cupy_flash lost by GPU time, keyed by the kernel.
    """
    groups: dict[tuple[int, str, bool], list[Sequence[Cell]]] = {}
    for cells in sorted(table, key=lambda cells: cells[0].case.seqlen_q):
        case = cells[0].case
        groups.setdefault((case.head_dim, case.dtype, case.causal), []).append(cells)
    rows = []
    for (head_dim, dtype, causal), group in sorted(groups.items(), key=lambda item: item[0][0]):
        row: dict[str, Any] = {
            "head_dim": head_dim,
            "case": f"{dtype} {'causal' if causal else 'full'}",
            "longest": {},
            "losers": {},
        }
        for clock, field in _CLOCKS.items():
            won = [cells for cells in group if _library_wins(cells, field)]
            longest = max((cells[0].case.seqlen_q for cells in won), default=None)
            row["longest"][clock] = longest
            row[clock] = _text(group, field, longest)
            for cells in won if field == "time" else ():
                row["losers"].setdefault(_kernel(cells), []).append(cells[0].case.seqlen_q)
        rows.append(row)
    return rows


def _times(cells: Sequence[Cell], field: str) -> tuple[Spread, Spread] | None:
    """Return the times of cupy_flash and of `cupy-library`, or None if either was not timed."""
    by_side: dict[bool, Spread | None] = {c.provider.ours: getattr(c, field) for c in cells}
    ours, theirs = by_side.get(True), by_side.get(False)
    return (ours, theirs) if ours and theirs else None


def _library_wins(cells: Sequence[Cell], field: str) -> bool:
    """Return whether `cupy-library` is faster, with interquartile ranges that do not overlap."""
    times = _times(cells, field)
    return times is not None and times[1].high < times[0].low


def _text(group: Sequence[Sequence[Cell]], field: str, longest: int | None) -> str:
    timed = [cells[0].case.seqlen_q for cells in group if _times(cells, field)]
    if not timed:
        return "not timed"
    if longest is None:
        return f"never from {min(timed)} on"
    return f"up to {longest}" + (" or beyond" if longest == max(timed) else "")


def _kernel(cells: Sequence[Cell]) -> str:
    plan = next((c.prepared.plan for c in cells if c.provider.ours and c.prepared), None)
    return f"{plan.family} tile {report.tile_text(plan.tile)}" if plan else "ours"


def print_crossover(table: Sequence[Sequence[Cell]], title: str, notes: Sequence[str]) -> None:
    """Print the verdicts, the kernels that lost, and why cases were not timed."""
    rows = verdicts(table)

    def column(name: str, heading: str, *, numeric: bool = False) -> report.Column:
        return report.Column(heading, lambda row: str(row[name]), numeric=numeric)

    columns = [
        column("head_dim", "head_dim", numeric=True),
        column("case", "case"),
        *(column(clock, f"by {clock}") for clock in _CLOCKS),
    ]
    groups = [list(group) for _, group in itertools.groupby(rows, lambda row: row["head_dim"])]
    out = report.console()
    report.print_table(out, title, columns, groups)
    labels = describe([cells[0].case for cells in table])[1]
    losses = [
        f"head_dim {row['head_dim']} {row['case']}: {kernel} loses by GPU time at seqlen "
        f"{', '.join(map(str, seqlens))}"
        for row in rows
        for kernel, seqlens in row["losers"].items()
    ]
    wrong = [
        f"!: {cell.provider.name} on {label}: over the error bound"
        for cells, label in zip(table, labels, strict=True)
        for cell in cells
        if cell.passed is False
    ]
    report.print_notes(
        out,
        [
            *notes,
            *timing_notes([cell for cells in table for cell in cells]),
            "Call time: from an idle GPU to the call's end, what Python does included. Where the "
            "quartiles overlap, neither wins.",
            *losses,
            *wrong,
            *reason_notes(table, labels),
        ],
    )


def as_record(table: Sequence[Sequence[Cell]]) -> Mapping[str, int | None]:
    """Return the verdicts for the metadata of a record."""
    return {
        f"head_dim {row['head_dim']} {row['case']}, {clock}": length
        for row in verdicts(table)
        for clock, length in row["longest"].items()
    }
