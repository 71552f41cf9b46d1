"""The command `cupy-flash compare`: changes of speed between two records."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..cases.cases import Case, describe
from ..cases.options import EXISTING_FILE, FINITE, output_option
from ..records import records, report

Key = tuple[str, Case]

# Maximum number of cases that a note names; it only counts the others.
_NAMED = 3


@dataclass(frozen=True)
class Change:
    """Two rows of one provider and case, from the record before and the record after."""

    provider: str
    case: Case
    before: report.Row
    after: report.Row
    threshold: float

    @property
    def ratio(self) -> float | None:
        """Speed relative to the record before; None unless both have times of correct results."""
        before, after = self.before["median_ms"], self.after["median_ms"]
        if not before or not after or records.is_wrong(self.before) or self.is_lost:
            return None
        return float(before / after)

    @property
    def is_lost(self) -> bool:
        """Whether only the record before has the time of a correct result."""
        had = self.before["median_ms"] is not None and not records.is_wrong(self.before)
        return had and (self.after["median_ms"] is None or records.is_wrong(self.after))

    @property
    def verdict(self) -> str:
        """One of `slower`, `same` and `faster`; `lost`; or `-` if there is nothing to compare.

        A change counts if it exceeds the threshold and the interquartile ranges of the times do not
        overlap.
        """
        if self.is_lost:
            return "lost"
        if self.ratio is None:
            return "-"
        overlap = (
            self.before["low_quartile_ms"] <= self.after["high_quartile_ms"]
            and self.after["low_quartile_ms"] <= self.before["high_quartile_ms"]
        )
        if overlap or abs(self.ratio - 1) <= self.threshold:
            return "same"
        return "faster" if self.ratio > 1 else "slower"


_ORDER = ("lost", "slower", "same", "faster", "-")


@click.command()
@click.argument("before", metavar="A.json", type=EXISTING_FILE)
@click.argument("after", metavar="B.json", type=EXISTING_FILE)
@click.option(
    "--threshold",
    type=FINITE,
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help="Smallest change that counts, in percent.",
)
@click.option(
    "--fail-on-slower",
    is_flag=True,
    help="Exit with code 1 if a row became slower, or lost its time or its correct result.",
)
@output_option
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    before: Path,
    after: Path,
    threshold: float,
    fail_on_slower: bool,
    output: Path | None,
) -> None:
    """Show what became faster or slower between two records of 'bench', beyond noise.

    Rows are matched by provider and case. A change counts if it exceeds the threshold and the
    interquartile ranges do not overlap.
    """
    files = (before, after)
    heads, tables = [], []
    for path in files:
        record = records.read_bench(path)
        heads.append(record.metadata)
        tables.append(_by_key(record.rows))
    common = [key for key in tables[0] if key in tables[1]]
    if not common:
        raise click.UsageError(_nothing_in_common(files, tables))
    changes = [
        Change(provider, case, tables[0][key], tables[1][key], threshold / 100)
        for key in common
        for provider, case in (key,)
    ]
    changes.sort(key=lambda change: change.ratio or 0)

    head = {
        "record_version": records.VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "threshold_percent": threshold,
        "a": {"file": before.name} | _origin(heads[0]),
        "b": {"file": after.name} | _origin(heads[1]),
    }
    result = report.Record(head, [_record_row(change) for change in changes])
    report.keep(output, result, lambda: _print(files, heads, tables, changes, threshold))
    if fail_on_slower and any(change.verdict in ("lost", "slower") for change in changes):
        ctx.exit(1)


def _by_key(rows: Sequence[report.Row]) -> dict[Key, report.Row]:
    return {(row["provider"], records.case_of(row)): row for row in rows}


def _origin(head: Mapping[str, Any]) -> dict[str, Any]:
    return {name: head.get(name) for name in ("date", "device")}


def _nothing_in_common(files: Sequence[Path], tables: Sequence[Mapping[Key, report.Row]]) -> str:
    names = [", ".join(dict.fromkeys(provider for provider, _ in table)) for table in tables]
    providers = [{provider for provider, _ in table} for table in tables]
    why = (
        "they timed the same providers on other cases"
        if providers[0] & providers[1]
        else f"the one timed {names[0]}, the other {names[1]}"
    )
    return f"{files[0]} and {files[1]} have no row in common: {why}"


def _record_row(change: Change) -> dict[str, Any]:
    fields = {name: change.after[name] for name in records.CASE_FIELDS}
    fields |= records.optional_fields(change.case)
    return {"provider": change.provider, **fields} | {
        "a_ms": change.before["median_ms"],
        "b_ms": change.after["median_ms"],
        "ratio": change.ratio,
        "verdict": change.verdict,
    }


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f}"


_COLUMNS = (
    report.Column("case", lambda row: row["label"], numeric=False),
    report.Column("provider", lambda row: row["provider"], numeric=False),
    report.Column("A ms", lambda row: report.milliseconds(row["a_ms"])),
    report.Column("B ms", lambda row: report.milliseconds(row["b_ms"])),
    report.Column("change %", lambda row: _percent(row["ratio"])),
    report.Column("verdict", lambda row: row["verdict"], numeric=False),
)


def _print(
    files: Sequence[Path],
    heads: Sequence[Mapping[str, Any]],
    tables: Sequence[Mapping[Key, report.Row]],
    changes: Sequence[Change],
    threshold: float,
) -> None:
    out = report.console()
    shared, labels = describe([change.case for change in changes])
    groups: dict[str, list[report.Row]] = {verdict: [] for verdict in _ORDER}
    for change, label in zip(changes, labels, strict=True):
        groups[change.verdict].append(_record_row(change) | {"label": label})
    for letter, path, head in zip("AB", files, heads, strict=True):
        origin = filter(None, (head.get("device") or "unknown device", head.get("date")))
        out.print(f"{letter}: {', '.join([path.name, *origin])}", markup=False)
    columns = _COLUMNS if any(labels) else _COLUMNS[1:]
    report.print_table(out, shared, columns, filter(None, groups.values()))
    notes = [
        "change: of speed, above 0 if B is faster. It counts if it exceeds "
        f"{threshold:g}% and the interquartile ranges do not overlap."
    ]
    notes += [
        f"! {letter}: {head['unreliable']}; ratios are not reliable"
        for letter, head in zip("AB", heads, strict=True)
        if head.get("unreliable")
    ]
    notes += _lost(changes) + _differences(heads, changes) + _unmatched(tables)
    report.print_notes(out, notes)
    out.print()
    for provider in dict.fromkeys(change.provider for change in changes):
        out.print(_summary([c for c in changes if c.provider == provider]), markup=False)


def _summary(changes: Sequence[Change]) -> str:
    verdicts = [change.verdict for change in changes]
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in _ORDER[:-1] if v in verdicts)
    ratios = [change.ratio for change in changes if change.ratio]
    mean = (
        f"B is {statistics.geometric_mean(ratios):.3f} times as fast (geometric mean)"
        if ratios
        else "nothing to compare"
    )
    return f"{changes[0].provider}: {mean}" + (f"; {counts}" if counts else "")


def _lost(changes: Sequence[Change]) -> list[str]:
    """Return notes on times that A has and B does not have, with the reasons."""
    return [
        f"{change.provider}: lost, "
        + str(change.after.get("reason") or "its result is over the error bound")
        for change in changes
        if change.is_lost
    ]


def _differences(heads: Sequence[Mapping[str, Any]], changes: Sequence[Change]) -> list[str]:
    """Return notes on other differences between the runs, which may explain a change."""
    notes = []
    devices = [head.get("device") for head in heads]
    if devices[0] != devices[1]:
        notes.append(f"Different device: {devices[0]} in A, {devices[1]} in B.")
    old, new = (head.get("versions") or {} for head in heads)
    for name in dict.fromkeys([*old, *new]):
        in_a, in_b = old.get(name, "none"), new.get(name, "none")
        if in_a != in_b:
            notes.append(f"Different {name}: {in_a} in A, {in_b} in B.")
    if not notes:
        notes += _machine(changes)
    for provider in dict.fromkeys(change.provider for change in changes):
        own = [change for change in changes if change.provider == provider]
        kernels = [_kernels([c.before for c in own]), _kernels([c.after for c in own])]
        if kernels[0] != kernels[1]:
            notes.append(f"Different kernels of {provider}: {kernels[0]} in A, {kernels[1]} in B.")
    return notes


def _machine(changes: Sequence[Change]) -> list[str]:
    """Return notes on providers whose speed changed although their code and the device did not."""
    moved = dict.fromkeys(
        change.provider
        for change in changes
        if change.verdict in ("slower", "faster") and not change.provider.startswith("cupy_flash")
    )
    return [
        f"{provider} changed although device and versions are the same: the machine itself was "
        "faster or slower, so take a change of that size as noise."
        for provider in moved
    ]


def _kernels(rows: Sequence[report.Row]) -> str:
    result = {f"{r.get('family')} {r['kernel_digest']}" for r in rows if r.get("kernel_digest")}
    return ", ".join(sorted(result)) or "none"


def _unmatched(tables: Sequence[Mapping[Key, report.Row]]) -> list[str]:
    notes = []
    for letter, own, other in zip("AB", tables, reversed(tables), strict=True):
        keys = [key for key in own if key not in other]
        known = {provider for provider, _ in other}
        for provider in dict.fromkeys(provider for provider, _ in keys):
            cases = [case for name, case in keys if name == provider]
            text = f"Only in {letter}: {provider}, {len(cases)} row{'s'[: len(cases) > 1]}"
            if provider in known:
                text += ": " + ", ".join(describe([case])[0] for case in cases[:_NAMED])
                text += f" and {len(cases) - _NAMED} more" if len(cases) > _NAMED else ""
            notes.append(text + ".")
    return notes
