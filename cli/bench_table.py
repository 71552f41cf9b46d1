"""What `bench` measured, as rows of a record and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from . import environment, report
from .cases import describe
from .check import Coverage
from .runner import Cell, Settings


def record_row(
    cell: Cell, check: Coverage | None, device: str, versions: dict[str, str]
) -> dict[str, Any]:
    """A cell as a record's row."""
    case, prepared, time = cell.case, cell.prepared, cell.time
    problem = case.problem()
    plan = prepared.plan if prepared else None
    tflops = problem.flops() / time.median / 1e9 if time and time.median else None
    outcome = {None: "skipped", True: "passed", False: "failed"}[cell.passed]
    return {
        "provider": cell.provider.name,
        "family": plan.family if plan else None,
        "kernel_digest": prepared.kernel_digest if prepared else None,
        "device": device,
        "dtype": case.dtype,
        "batch": case.batch,
        "seqlen_q": case.seqlen_q,
        "seqlen_k": case.seqlen_k,
        "heads_q": case.heads_q,
        "heads_kv": case.heads_kv,
        "head_dim": case.head_dim,
        "head_dim_v": case.head_dim_v,
        "layout": case.layout,
        "causal": case.causal,
        "q_offset": problem.q_offset,
        "softmax_scale": problem.softmax_scale,
        "tile": prepared.tile if prepared else None,
        "num_splits": plan.num_splits if plan else None,
        "median_ms": time.median if time else None,
        "low_quartile_ms": time.low if time else None,
        "high_quartile_ms": time.high if time else None,
        "repeats": time.repeats if time else None,
        "tflops": tflops,
        "speedup": cell.speedup,
        "host_us": cell.host.median if cell.host else None,
        "max_error": None if cell.max_error is None else report.finite(cell.max_error),
        "error_bound": check.bound if check else None,
        "check": outcome,
        "checked_rows": check.rows if check else 0,
        "reason": cell.reason,
        "note": prepared.note if prepared else None,
        "versions": versions,
    }


def _columns(rows: Sequence[report.Row], host_time: bool) -> list[report.Column]:
    columns = [
        report.Column("case", lambda row: row["label"], numeric=False),
        report.Column("provider", lambda row: row["provider"], numeric=False),
        report.Column("ms", lambda row: report.milliseconds(row["median_ms"])),
        report.Column("+-%", lambda row: report.number(row["spread"], ".1f")),
        report.rate_column(rows),
        report.Column("speedup", lambda row: report.number(row["speedup"], ".2f")),
        report.Column("error", report.error_text),
    ]
    if host_time:
        columns.append(report.Column("host us", lambda row: report.number(row["host_us"], ".1f")))
    return columns


def print_cells(
    table: Sequence[Sequence[Cell]],
    rows: Sequence[Sequence[dict[str, Any]]],
    checks: Sequence[Coverage],
    device: str,
    baseline: Sequence[str],
    settings: Settings,
) -> None:
    """Print the cells of every case, what to know about them, and each provider's mean speedup."""
    out = report.console()
    shared, labels = describe([cells[0].case for cells in table])
    groups = []
    for cells, case_rows, label in zip(table, rows, labels, strict=True):
        shown = []
        for index, (cell, row) in enumerate(zip(cells, case_rows, strict=True)):
            share = 100 * cell.time.relative if cell.time else None
            shown.append(row | {"label": label if index == 0 else "", "spread": share})
        groups.append(shown)
    columns = _columns([row for group in groups for row in group], settings.host_time)
    if len(table) == 1:
        columns = columns[1:]
    report.print_table(out, f"{device}\n{shared}", columns, groups)
    flat = [cell for cells in table for cell in cells]
    report.print_notes(out, _notes(flat, checks, baseline, settings))
    for provider in dict.fromkeys(cell.provider.name for cell in flat):
        ratios = [c.speedup for c in flat if c.provider.name == provider and c.speedup]
        if len(ratios) > 1 and [provider] != list(baseline):
            out.print(
                f"{provider}: {statistics.geometric_mean(ratios):.3f} times as fast as "
                f"{_best_of(baseline)} (geometric mean of {len(ratios)}), at least "
                f"{min(ratios):.3f}",
                markup=False,
            )


def _best_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"the best of {', '.join(names)}"


def _notes(
    cells: Sequence[Cell], checks: Sequence[Coverage], baseline: Sequence[str], settings: Settings
) -> list[str]:
    notes = []
    for cell in cells:
        name = cell.provider.name
        if cell.reason:
            notes.append(f"{name}: {cell.reason}")
        if cell.prepared and cell.prepared.note:
            notes.append(f"{name}: {cell.prepared.note}")
        if cell.prepared and cell.prepared.plan:
            plan = cell.prepared.plan
            notes.append(f"{name}: {plan.family} {plan.tile}")
    notes.append(f"speedup: over {_best_of(baseline)}. +-%: half the interquartile range.")
    notes.append(environment.FLOP_CONVENTION + ".")
    if checks:
        rows, all_rows = sum(c.rows for c in checks), sum(c.all_rows for c in checks)
        share = "all" if rows == all_rows else f"{rows:,} of {all_rows:,}"
        notes.append(
            f"error: largest difference from the float64 reference over {share} query rows."
        )
    if any(cell.passed is False and cell.max_error is not None for cell in cells):
        notes.append(
            "!: over the bound, twice the error of the naive formula in the same precision."
        )
    if not settings.check:
        notes.append("Results were not checked (--skip-check).")
    return notes
