"""Results of `bench`, as rows of a record and as a table."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

from cupy_flash.planning.planner import Plan

from ..cases.cases import describe
from ..cases.presets import Preset
from ..cases.sequences import repeatable
from ..measure.check import Coverage
from ..measure.runner import Cell, Settings
from ..providers.torch_providers import TorchProvider
from ..records import environment, report
from ..records.records import CASE_FIELDS, optional_fields


def record_row(
    cell: Cell,
    check: Coverage | None,
    device: str,
    versions: dict[str, str],
    copy_rate: float | None = None,
) -> dict[str, Any]:
    """Return a cell as a row of a record.

    For a cache, the rate of reading keys and values is compared with `copy_rate`, in TB/s.
    """
    check = cell.coverage or check
    case, prepared, time = cell.case, cell.prepared, cell.time
    problem = case.problem()
    plan = prepared.plan if prepared else None
    tflops = case.flops() / time.median / 1e9 if time and time.median else None
    read = prepared.inputs.case if prepared and prepared.inputs else case
    kv_rate = read.kv_bytes / time.median / 1e9 if case.is_cached and tflops and time else None
    outcome = {None: "skipped", True: "passed", False: "failed"}[cell.passed]
    return {
        "provider": cell.provider.name,
        "family": plan.family if plan else None,
        "kernel_digest": prepared.kernel_digest if prepared else None,
        "device": device,
        **{name: getattr(case, name) for name in CASE_FIELDS},
        "q_offset": problem.q_offset if case.is_dense else case.causal * case.first_query,
        "softmax_scale": problem.softmax_scale,
        **optional_fields(case),
        "tile": prepared.tile if prepared else None,
        "num_splits": plan.num_splits if plan else None,
        "median_ms": time.median if time else None,
        "low_quartile_ms": time.low if time else None,
        "high_quartile_ms": time.high if time else None,
        "repeats": time.repeats if time else None,
        "timed_by": cell.timed_by if time else None,
        "call_ms": cell.call.median if cell.call else None,
        "tflops": tflops,
        "kv_tb_per_s": kv_rate,
        "copy_share": kv_rate / copy_rate if kv_rate and copy_rate else None,
        "speedup": cell.speedup,
        "host_us": cell.host.median if cell.host else None,
        "workspace_bytes": plan.workspace if plan else None,
        "peak_bytes": cell.peak_bytes,
        "max_error": None if cell.max_error is None else report.finite(cell.max_error),
        "error_bound": check.bound if check else None,
        "check": outcome,
        "checked_rows": check.rows if check else 0,
        "reason": cell.reason,
        "note": prepared.note if prepared else None,
        "versions": versions,
    }


def timing_text(settings: Settings, *, on_gpu: bool, backward: bool = False) -> str:
    """Return a sentence about how the times were measured."""
    taken = f"after {settings.warmup} untimed calls, medians and quartiles of up to"
    given = f"; {_UNTIMED}" if backward else ""
    if not on_gpu:
        return (
            f"wall time of calls on cores at rest, {taken} {settings.repeats}, providers "
            f"alternating, each on at most {environment.available_cpus()} threads{given}"
        )
    given += f"; {_BY_AUTOGRAD}" if backward else ""
    return (
        "GPU time by events around CUDA graph replays, or around calls where timed_by is events, "
        f"{taken} {settings.repeats}, providers alternating, the L2 overwritten before each; "
        f"call_ms is the median wall time of a call from an idle GPU to its end, L2 warm{given}"
    )


# Notes on calls for gradients: what is computed before the timed call.
_UNTIMED = "the output and its log-sum-exp are computed beforehand, untimed"
_BY_AUTOGRAD = "calls with torch's tensors are autograd.grad on a graph that is built beforehand"
# Prefix of the names of providers that put a cache into pages.
_PAGED = "cupy_flash-page"
# Providers that hold the whole score matrix in memory, as the standard algorithm does.
STANDARD_PROVIDERS = frozenset(
    {"cupy-library", "cupy_flash-naive", "numpy-naive", "torch-eager", "torch-math"}
)


def _mebibytes(count: int | None) -> str:
    if count is None:
        return "-"
    size = count / 2**20
    return f"{size:,.0f}" if size >= 1000 else f"{size:.1f}" if size >= 10 else f"{size:.2f}"


def _spread_column() -> report.Column:
    return report.Column("+-%", lambda row: report.number(row["spread"], ".1f"))


def _work_columns(rows: Sequence[report.Row]) -> list[report.Column]:
    return [
        report.Column("ms", lambda row: report.milliseconds(row["median_ms"])),
        _spread_column(),
        report.rate_column(rows),
    ]


def _reads_caches(rows: Sequence[report.Row]) -> bool:
    """Return whether all cases are caches, whose time depends on the bytes that are read."""
    return all(row["kind"] == "cache" for row in rows)


def _memory_columns(rows: Sequence[report.Row]) -> list[report.Column]:
    most = max((row["kv_tb_per_s"] or 0 for row in rows), default=0)
    heading, scale = ("TB/s", 1.0) if most >= 0.1 else ("GB/s", 1e3)

    def rate(row: report.Row) -> str:
        return "-" if row["kv_tb_per_s"] is None else f"{scale * row['kv_tb_per_s']:.3f}"

    columns = [
        report.Column("us", lambda row: _microseconds(row["median_ms"])),
        _spread_column(),
        report.Column(heading, rate),
    ]
    if any(row["copy_share"] for row in rows):
        columns.append(report.Column("% copy", lambda row: _percent(row["copy_share"])))
    return columns


def _microseconds(ms: float | None) -> str:
    return "-" if ms is None else f"{1e3 * ms:.1f}" if ms < 1 else f"{1e3 * ms:,.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


# Least width of a terminal, in characters, that has space for call times and the longest names.
_WIDE = 90


def _columns(
    rows: Sequence[report.Row], settings: Settings, *, call_time: bool
) -> list[report.Column]:
    columns = [
        report.Column("case", lambda row: row["label"], numeric=False),
        report.Column("provider", lambda row: row["provider"], numeric=False),
        *(_memory_columns(rows) if _reads_caches(rows) else _work_columns(rows)),
        report.Column("speedup", lambda row: report.number(row["speedup"], ".2f")),
        report.Column("error", report.error_text),
    ]
    if call_time:
        columns.insert(4, report.Column("call", lambda row: report.milliseconds(row["call_ms"])))
    if settings.memory:
        columns.append(report.Column("MiB", lambda row: _mebibytes(row["peak_bytes"])))
    if settings.host_time:
        columns.append(report.Column("host us", lambda row: report.number(row["host_us"], ".1f")))
    return columns


def print_cells(
    table: Sequence[Sequence[Cell]],
    rows: Sequence[Sequence[dict[str, Any]]],
    checks: Sequence[Coverage],
    device: str,
    baseline: Sequence[str],
    settings: Settings,
    named: Preset | None = None,
    gpu_notes: Sequence[str] = (),
    copy_rate: float | None = None,
    unreliable: str | None = None,
) -> None:
    """Print the cells of every case, notes on them, and each provider's mean speedup.

    `gpu_notes` describe the state of the GPU or the CPU, and `unreliable` says why ratios are not
    reliable. `copy_rate` is the rate of copies on the GPU, in TB/s.
    """
    out = report.console()
    shared, labels = describe([cells[0].case for cells in table])
    groups = []
    for cells, case_rows, label in zip(table, rows, labels, strict=True):
        shown = []
        for index, (cell, row) in enumerate(zip(cells, case_rows, strict=True)):
            share = 100 * cell.time.relative if cell.time else None
            shown.append(row | {"label": label if index == 0 else "", "spread": share})
        groups.append(shown)
    flat = [cell for cells in table for cell in cells]
    has_call_time = any(cell.call is not None for cell in flat)
    call_time = has_call_time and (settings.host_time or out.width >= _WIDE)
    columns = _columns([r for group in groups for r in group], settings, call_time=call_time)
    if len(table) == 1:
        columns = columns[1:]
    title = f"{named.title}\n" if named else ""
    report.print_table(out, f"{title}{device}\n{shared}", columns, groups)
    report.print_notes(out, sorted(gpu_notes, key=lambda note: not note.startswith("!")))
    report.print_notes(out, reason_notes(table, labels))
    report.print_notes(out, _plan_notes(table, labels))
    report.print_notes(out, _notes(flat, checks, baseline, settings, call_time=call_time))
    report.print_notes(out, _sequence_notes(flat, copy_rate))
    if named:
        report.print_notes(out, [f"{note}." for note in named.notes])
    doubt = f" ({unreliable}; ratios are not reliable)" if unreliable else ""
    for provider in dict.fromkeys(cell.provider.name for cell in flat):
        ratios = [c.speedup for c in flat if c.provider.name == provider and c.speedup]
        if len(ratios) > 1 and [provider] != list(baseline):
            out.print(
                f"{provider}: {statistics.geometric_mean(ratios):.3f} times as fast as "
                f"{_best_of(baseline)} (geometric mean of {len(ratios)}), at least "
                f"{min(ratios):.3f}{doubt}",
                markup=False,
            )
    for line in _page_lines(table):
        out.print(line, markup=False)


def _page_lines(table: Sequence[Sequence[Cell]]) -> list[str]:
    """Return lines that compare times on a paged cache with those on the contiguous cache."""
    result: dict[str, list[float]] = {}
    for cells in table:
        times = {cell.provider.name: cell.time.median for cell in cells if cell.time}
        for name, time in times.items():
            if name.startswith(_PAGED) and times.get("cupy_flash"):
                result.setdefault(name, []).append(time / times["cupy_flash"])
    return [
        f"{name}: {statistics.geometric_mean(ratios):.3f} times the time of cupy_flash "
        f"(geometric mean of {len(ratios)}), at most {max(ratios):.3f}"
        for name, ratios in result.items()
    ]


def outcome_text(cells: Sequence[Cell]) -> str:
    """Return the result of a case in a few words: the fastest provider and its time."""
    timed = [(cell.time.median, cell.provider.name) for cell in cells if cell.time]
    if not timed:
        return "not timed"
    ms, name = min(timed)
    return f"{name} {report.milliseconds(ms)} ms"


# Matches a number that is not part of a name, a version or a size such as 64x128.
_NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?!\.?\w)")
# Maximum number of cases that a note names; it only counts the others.
_MOST_NAMED = 3


def reason_notes(table: Sequence[Sequence[Cell]], labels: Sequence[str]) -> list[str]:
    """Return the reasons why cells were not timed, each with the cases that it is for.

    Reasons of a provider that differ only in their numbers are joined into one note.
    """
    result: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for cells, label in zip(table, labels, strict=True):
        for cell in cells:
            if cell.reason:
                key = (cell.provider.name, without_numbers(cell.reason))
                result.setdefault(key, []).append((cell.reason, label))
    notes = []
    for (name, _), members in result.items():
        reason = joined([reason for reason, _ in members])
        notes.append(f"{name}{_cases_text([c for _, c in members], len(table))}: {reason}")
    return notes


def _plan_notes(table: Sequence[Sequence[Cell]], labels: Sequence[str]) -> list[str]:
    """Return the notes of providers and the tiles that ran, each with the cases it is for."""
    result: dict[tuple[str, str], list[str]] = {}
    for cells, label in zip(table, labels, strict=True):
        for cell in cells:
            for text in _plan_texts(cell):
                result.setdefault((cell.provider.name, text), []).append(label)
    return [
        f"{name}{_cases_text(cases, len(table))}: {text}" for (name, text), cases in result.items()
    ]


def _plan_texts(cell: Cell) -> list[str]:
    if cell.prepared is None:
        return []
    texts = [cell.prepared.note] if cell.prepared.note else []
    if plan := cell.prepared.plan:
        texts.append(f"{plan.family} {plan.tile}{_splits_text(plan)}")
    return texts


def _cases_text(labels: Sequence[str], cases: int) -> str:
    if cases == 1:
        return ""
    if len(labels) == cases:
        return f", all {cases} cases"
    more = len(labels) - _MOST_NAMED
    rest = [f"and {more} more"] if more > 0 else []
    return " on " + ", ".join([*labels[:_MOST_NAMED], *rest])


def without_numbers(text: str) -> str:
    """Return a text with its numbers replaced; it is equal for texts that `joined` can join."""
    return _NUMBER.sub("0", text)


def joined(texts: Sequence[str]) -> str:
    """Return texts that differ only in their numbers as one text, with the range of each number."""
    places = iter(zip(*(_NUMBER.findall(text) for text in texts), strict=True))

    def span(_: re.Match[str]) -> str:
        place = next(places)
        low, high = min(place, key=float), max(place, key=float)
        return low if float(low) == float(high) else f"{low} to {high}"

    return _NUMBER.sub(span, texts[0])


def print_memory(table: Sequence[Sequence[Cell]]) -> None:
    """Print the memory that a call of each provider takes, with one line per case."""
    out = report.console()
    labels = describe([cells[0].case for cells in table])[1]
    names = [cell.provider.name for cell in table[0]]

    def column(place: int) -> report.Column:
        return report.Column(names[place], lambda row: _memory_text(row["cells"][place]))

    columns = [
        report.Column("case", lambda row: row["label"], numeric=False),
        report.Column("inputs", lambda row: _mebibytes(row["inputs"])),
        *map(column, range(len(names))),
    ]
    rows = [
        {
            "label": label,
            "cells": cells,
            "inputs": cells[0].case.array_bytes - cells[0].case.result_bytes,
        }
        for cells, label in zip(table, labels, strict=True)
    ]
    title = "Peak memory of a call in MiB, in addition to its inputs"
    out.print()
    report.print_table(out, title, columns, [rows])
    standard = [name for name in names if name in STANDARD_PROVIDERS]
    fused = [name for name in names if name not in STANDARD_PROVIDERS]
    kinds = {"standard algorithm, whole score matrix": standard, "fused": fused}
    notes = [f"{kind}: {', '.join(result)}." for kind, result in kinds.items() if result]
    if any(cell.needs_bytes is not None for cells in table for cell in cells):
        notes.append("( ): estimated and not run, because it exceeds the free memory.")
    report.print_notes(out, notes)


def _memory_text(cell: Cell) -> str:
    if cell.peak_bytes is None and cell.needs_bytes is not None:
        return f"({_mebibytes(cell.needs_bytes)})"
    return _mebibytes(cell.peak_bytes)


def _best_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"the best of {', '.join(names)}"


def _notes(
    cells: Sequence[Cell],
    checks: Sequence[Coverage],
    baseline: Sequence[str],
    settings: Settings,
    *,
    call_time: bool,
) -> list[str]:
    notes = timing_notes(cells)
    if call_time:
        notes.append("call: wall time in ms of a call from an idle GPU to its end, L2 warm.")
    if settings.host_time:
        notes.append("host us: host time of a call in us, until the call returns to Python.")
    if settings.memory:
        notes.append("MiB: peak memory of a call, in addition to its inputs.")
    notes.append(f"speedup: over {_best_of(baseline)}. +-%: half the interquartile range.")
    cases = [cell.case for cell in cells]
    notes += [f"{text}." for text in environment.flop_conventions(cases)]
    is_backward = any(case.is_backward for case in cases)
    if is_backward:
        of_torch = any(isinstance(cell.provider, TorchProvider) for cell in cells)
        untimed = f"{_UNTIMED}; {_BY_AUTOGRAD}" if of_torch else _UNTIMED
        notes.append(f"{untimed[0].upper()}{untimed[1:]}.")
    if any(c.rows or not c.not_finite for c in checks):
        rows, all_rows = sum(c.rows for c in checks), sum(c.all_rows for c in checks)
        share = "all" if rows == all_rows else f"{rows:,} of {all_rows:,}"
        what = "largest difference from the float64 reference"
        if is_backward:
            what += ", of dq, dk or dv, relative to the largest allowed one,"
        notes.append(f"error: {what} over {share} query rows.")
    if not_finite := sum(c.not_finite for c in checks):
        notes.append(
            f"not compared: {not_finite:,} query rows, on which the naive formula or the reference "
            "gives inf or NaN too."
        )
    if any(cell.passed is False and cell.max_error is not None for cell in cells):
        notes.append(
            "!: over the bound, twice the error of the naive formula in the same precision"
            + (" and a few ulps." if is_backward else ".")
        )
    if not all(cell.provider.on_gpu for cell in cells):
        notes.append(f"Each provider on the CPU: at most {environment.available_cpus()} threads.")
    if not settings.check:
        notes.append("Results were not checked (--skip-check).")
    return notes


def _splits_text(plan: Plan) -> str:
    if plan.num_splits == 1:
        return ""
    if plan.num_splits:
        return f", keys split {plan.num_splits} ways"
    blocks = math.prod(plan.main.grid) if plan.main else 0
    return f", all keys split evenly over {blocks} blocks"


def _sequence_notes(cells: Sequence[Cell], copy_rate: float | None) -> list[str]:
    """Return notes on caches and packed sequences, with the option that repeats their lengths."""
    notes = []
    cached = [cell.case for cell in cells if cell.case.is_cached]
    if cached:
        seen = ", of the keys that masks leave visible" if any(c.mods for c in cached) else ""
        notes.append(
            "TB/s, GB/s: bytes of the keys and values, batch * heads_kv * seqlen_k * (head_dim + "
            f"head_dim_v) of them, over time{seen}."
        )
    if copy_rate:
        notes.append(
            f"% copy: percentage of {copy_rate:.3f} TB/s, the bytes read and written by a copy of "
            "1 GiB on the device, over its time."
        )
    for lengths in dict.fromkeys(cell.case.lengths for cell in cells):
        if lengths:
            notes.append(f"To repeat these lengths: --lengths {repeatable(lengths)}")
    return notes


def timing_notes(cells: Sequence[Cell]) -> list[str]:
    """Return a note on how the GPU times were measured."""
    timed = [cell for cell in cells if cell.time and cell.timed_by != "clock"]
    if not timed:
        return []
    others = sorted({cell.provider.name for cell in timed if cell.timed_by == "events"})
    what = "CUDA graph replays" if len(others) < len({c.provider.name for c in timed}) else "calls"
    but = f" (of calls for {', '.join(others)})" if others and what != "calls" else ""
    unit = "us" if all(cell.case.is_cached for cell in cells) else "ms"
    return [f"{unit}: GPU time of {what}{but}, the L2 overwritten before each."]
