"""Findings of `tune`, as rows of a record and as tables."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cupy_flash.planning import tuning
from cupy_flash.planning.problem_class import MOST_ROWS, ProblemClass
from cupy_flash.problem.arrays import MAX_ALIGNMENT
from cupy_flash.problem.device import Device

from ..cases.cases import SHORT_DTYPE, pair_text
from ..records import environment, report
from .candidates import Candidate
from .journal import Finding
from .sweep import Sweep

# Note below tables of classes, whose sizes differ from those of the cases.
CLASS_NOTE = "class: sizes rounded to powers of four, so that a case of s96 is of class s64."


def ranking_row(candidate: Candidate, rank: int) -> dict[str, Any]:
    """Return a candidate as a row of a record."""
    plan, resources = candidate.plan, candidate.resources
    static = resources.static_shared_memory if resources else 0
    error = candidate.max_error
    return {
        "rank": rank,
        "family": plan.family,
        "direction": plan.problem.direction,
        "kernel_digest": environment.digest_of(plan.family, plan.problem.direction),
        "device": plan.device.name if plan.device else environment.cpu_name(),
        "problem_class": tuning.problem_class(plan.problem),
        "tile": dataclasses.asdict(candidate.tile),
        "is_default": candidate.is_default,
        "median_ms": candidate.medians_ms[0] if len(candidate.medians_ms) == 1 else None,
        "medians_ms": list(candidate.medians_ms),
        "tflops": candidate.tflops,
        "rounds": candidate.rounds,
        "max_error": None if error is None else report.finite(error),
        "check": "skipped" if error is None else "failed" if candidate.failed else "passed",
        "registers": resources.registers if resources else None,
        "shared_memory": plan.shared_memory + static if plan.device else None,
        "spills": resources.spill_bytes if resources else None,
        "blocks_per_sm": candidate.blocks_per_sm,
        "same_binary_as": (
            dataclasses.asdict(candidate.same_binary.tile)
            if candidate.same_binary is not None
            else None
        ),
        "dropped": candidate.dropped,
    }


def print_ranking(
    ranked: Sequence[Candidate], title: str, top: int, *, is_saved: bool = False
) -> None:
    """Print the best tiles, and why others were dropped; `is_saved` marks the first as saved."""
    rows = [ranking_row(candidate, rank) for rank, candidate in enumerate(ranked, 1)]
    on_gpu = any(row["registers"] is not None for row in rows)
    timed = any(row["tflops"] is not None for row in rows)
    texts = [
        {
            "text": report.tile_text(c.tile)
            + (" (default)" if c.is_default else "")
            + (" (saved)" if is_saved and rank == 0 else "")
        }
        for rank, c in enumerate(ranked)
    ]
    shown = [
        row | text
        for row, text in zip(rows, texts, strict=True)
        if row["dropped"] is None and row["same_binary_as"] is None
    ][:top]
    columns = [report.Column("tile", lambda row: row["text"], numeric=False)]
    if timed:
        columns.append(report.rate_column(shown))
        if all(row["median_ms"] is not None for row in shown if row["tflops"]):
            columns.append(report.Column("ms", lambda row: report.milliseconds(row["median_ms"])))
        columns.append(report.Column("error", report.error_text))
    if on_gpu:
        columns += [
            report.Column("regs", lambda row: report.number(row["registers"], "d")),
            report.Column("KiB", lambda row: f"{row['shared_memory'] / 1024:.1f}"),
            report.Column("spills", lambda row: report.number(row["spills"], "d")),
            report.Column("blocks", lambda row: report.number(row["blocks_per_sm"], "d")),
        ]
    out = report.console()
    report.print_table(out, title, columns, [shown])
    dropped = [row["dropped"] for row in rows if row["dropped"] is not None]
    same_binaries = sum(row["same_binary_as"] is not None for row in rows)
    notes = []
    if len(shown) + len(dropped) + same_binaries < len(rows):
        notes.append(f"The best {len(shown)} of {len(rows)}; --output writes all.")
    if any(candidate.rounds for candidate in ranked):
        notes.append("Ranked by the rounds of the race that a tile lasted, then by time.")
    if same_binaries:
        notes.append(
            f"{same_binaries} tiles compile to the same code as another and were not timed."
        )
    if on_gpu:
        legend = report.tile_legend(ranked[0].plan.family, ranked[0].tile)
        notes.append(legend + ".")
        notes.append("KiB: shared memory of a block. spills: bytes per thread. blocks: per SM.")
    notes += [f"dropped: {reason}" for reason in dropped]
    report.print_notes(out, notes)


def finding_of(
    sweep: Sweep,
    ranked: Sequence[Candidate],
    device: str,
    least_gain: float,
    unreliable: str | None = None,
) -> Finding:
    """Return the finding of a sweep, for its journal and its report.

    Parameters
    ----------
    sweep, ranked
        Sweep, and its candidates from the best down.
    device
        Name of the device that it ran on.
    least_gain
        Percentage by which a tile must beat the default to be saved.
    unreliable
        Reason why its times are not reliable; None if they are.
    """
    best = ranked[0]
    default = next(c for c in sweep.candidates if c.is_default)
    usable = best.tflops is not None and not best.failed
    gained = gain_percent(best, default)
    won = usable and not best.is_default and (gained is None or gained >= least_gain)
    is_modified = sweep.group.is_modified
    return {
        "problem_class": sweep.group.problem_class,
        "family": sweep.family,
        "direction": sweep.direction,
        "kernel_digest": environment.digest_of(sweep.family, sweep.direction),
        "device": device,
        "cases": [each.case.as_record() | {"weight": each.weight} for each in sweep.group.cases],
        "modified": is_modified,
        "tiles": len(sweep.candidates),
        "default_tile": dataclasses.asdict(default.tile),
        "default_tflops": default.tflops,
        "best_tile": dataclasses.asdict(best.tile) if usable else None,
        "best_tflops": best.tflops if usable else None,
        "gain_percent": gained,
        "won": won,
        "unreliable": unreliable,
        "stored": False,
        "not_stored": None,
        "failed": sum(candidate.failed for candidate in sweep.candidates),
        "finalists": [dataclasses.asdict(tile) for tile in sweep.finalists()],
        "date": environment.metadata(device)["date"],
    }


def gain_percent(best: Candidate, default: Candidate) -> float | None:
    """Return by how many percent the best tile beats the default; None if that did not run."""
    if best.cost_ms is None or default.cost_ms is None or default.failed:
        return None
    return round(100 * (default.cost_ms / best.cost_ms - 1), 2)


def entry_of(finding: Finding, device: Device | None, which: str = "best") -> tuning.Entry:
    """Return the table entry for a finding's best tile or its default tile.

    Parameters
    ----------
    finding
        Finding of a sweep.
    device
        GPU that the sweep ran on; None for the CPU backend.
    which
        Tile of the entry: "best" or "default".
    """
    return tuning.Entry(
        gpu=device.name if device else tuning.CPU,
        arch=device.arch if device else 0,
        sm_count=device.sm_count if device else 0,
        family=finding["family"],
        digest=finding["kernel_digest"],
        problem_class=finding["problem_class"],
        tile=finding[f"{which}_tile"],
        tflops=finding[f"{which}_tflops"],
    )


def is_stale(entry: tuning.Entry) -> bool:
    """Return whether an entry was tuned on other kernel sources than the present ones."""
    return entry.digest != environment.digest_of(entry.family, entry.direction)


def outcome_text(finding: Finding) -> str:
    """Return the outcome of a finding in a few words."""
    if finding["best_tile"] is None:
        return "no tile ran and passed its check"
    if finding["best_tile"] == finding["default_tile"]:
        return "the default"
    gain = finding["gain_percent"]
    by = "the default did not run" if gain is None else f"{gain:+.1f}% over the default"
    if finding["stored"]:
        return f"{by}, saved"
    return by + (f", not saved: {finding['not_stored']}" if finding["not_stored"] else "")


def class_text(problem_class: str) -> str:
    """Return a short text of a problem class, without parts that have their usual value."""
    name, _, mods = problem_class.partition("; ")
    result = ProblemClass.parse(name)
    if result is None:
        return problem_class
    parts = [
        SHORT_DTYPE[result.dtype],
        f"d{pair_text(result.head_dim, result.head_dim_v)}",
        "causal" if result.causal else "full",
        f"s{pair_text(result.seqlen_q, result.seqlen_k)}",
        "" if result.rows == MOST_ROWS else f"rows{result.rows}",
        "" if result.alignment == MAX_ALIGNMENT else f"align{result.alignment}",
        result.kind,
        "" if result.direction == "forward" else result.direction,
        mods,
    ]
    return " ".join(filter(None, parts))


def print_findings(findings: Sequence[Finding], title: str) -> None:
    """Print each class's default and best tile, and how close the defaults are to the best."""
    rows = [
        finding
        | {
            "best": report.tile_text(finding["best_tile"]),
            "default": report.tile_text(finding["default_tile"]),
            "class": f"{finding['family']} {class_text(finding['problem_class'])}",
        }
        for finding in findings
    ]
    rate = report.rate_column({"tflops": f["best_tflops"]} for f in findings)

    def rate_of(which: str) -> report.Column:
        return report.Column(rate.heading, lambda row: rate.text({"tflops": row[which]}))

    columns = [
        report.Column("class", lambda row: row["class"], numeric=False),
        report.Column("default", lambda row: row["default"], numeric=False),
        rate_of("default_tflops"),
        report.Column("best", lambda row: row["best"], numeric=False),
        rate_of("best_tflops"),
        report.Column("gain %", lambda row: report.number(row["gain_percent"], ".1f")),
        report.Column("kept", _kept_text),
    ]
    out = report.console()
    report.print_table(out, title, columns, [rows])
    legends = [report.tile_legend(f["family"], f["default_tile"]) + "." for f in findings]
    notes = [*dict.fromkeys(legends), CLASS_NOTE, *findings_notes(findings)]
    report.print_notes(out, notes)


def _kept_text(row: Mapping[str, Any]) -> str:
    # Journals of earlier versions hold no reason.
    return "yes" if row["stored"] else "no" if row.get("not_stored") else ""


def findings_notes(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on how close the defaults are to the best tiles of their sweeps."""
    shares = [
        f["default_tflops"] / f["best_tflops"]
        for f in findings
        if f["best_tflops"] and f["default_tflops"]
    ]
    if not shares:
        return ["Nothing was timed."]
    # Journals of versions without modifications lack this key.
    plain = [f for f in findings if not f.get("modified")]
    stored = sum(f["stored"] for f in plain)
    notes = [
        f"The defaults reach {statistics.geometric_mean(shares):.1%} of the best tile's rate "
        f"(geometric mean of {len(shares)}), at least {min(shares):.1%}.",
    ]
    if plain:
        near = sum(not f["stored"] and not f.get("not_stored") for f in plain)
        notes.append(
            f"{stored} of {len(plain)} classes keep a tile of their own"
            + (f"; in {near} the default is close enough." if near else ".")
        )
    refused = Counter(f["not_stored"] for f in findings if f.get("not_stored"))
    notes += [
        f"{n} of {len(findings)} not saved, though better than the default: {why}."
        for why, n in refused.items()
    ]
    return notes
