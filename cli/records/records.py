"""Reading back what `bench --output x.json` and the scripts under benchmarks/ wrote."""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from cupy_flash.families import FORWARD
from cupy_flash.problem.arrays import DTYPES

from ..cases.cases import DIRECTIONS, KINDS, Case, describe
from ..cases.mods import Mods
from . import environment
from .report import Record, Row

# What a record's `record_version` may be; records from before there was one are of version 1.
VERSION = 1

# What tells one case from another, in the order in which tables show it.
CASE_FIELDS = (
    "dtype",
    "head_dim",
    "head_dim_v",
    "causal",
    "q_offset",
    "softmax_scale",
    "layout",
    "batch",
    "heads_q",
    "heads_kv",
    "seqlen_q",
    "seqlen_k",
)
# What caches, packed sequences, modified calls and gradients have besides: null in rows of other
# cases, or not there at all.
OPTIONAL_FIELDS = (
    *("kind", "page_size", "append", "rotary", "asked_splits", "lengths", "mods"),
    "direction",
    "values_in_keys",
)

# What a head's parts are, where a record has them.
_HEAD: dict[str, type] = {"date": str, "device": str, "versions": dict}


def read(path: Path) -> Record:
    """A record from a file.

    Raises
    ------
    click.UsageError
        If the file cannot be read, is no record, is one of another version, or has a head that
        no command writes.
    """
    expected = "expected a file that 'cupy-flash bench --output x.json' wrote"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror}") from error
    # Lists nested thousands deep are JSON, but no record.
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{path} is not JSON; {expected}") from error
    head, rows = (data.get("metadata"), data.get("rows")) if isinstance(data, dict) else (None,) * 2
    if not isinstance(head, dict) or not isinstance(rows, list):
        raise click.UsageError(f"{path} has no 'metadata' and 'rows'; {expected}")
    if (version := head.get("record_version", VERSION)) != VERSION:
        kind = " (text)" if isinstance(version, str) else ""
        raise click.UsageError(
            f"{path} is a record of version {reprlib.repr(version)}{kind}; "
            f"this cupy-flash reads version {VERSION}"
        )
    for name, kind_of_part in _HEAD.items():
        if (part := head.get(name)) is not None and not isinstance(part, kind_of_part):
            raise click.UsageError(
                f"{path}: its metadata has {name} {reprlib.repr(part)}; {expected}"
            )
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise click.UsageError(f"{path}: row {index} is {reprlib.repr(row)}; {expected}")
    return Record(head, rows)


def kernels(record: Record) -> set[tuple[str, str, str]]:
    """Kernel families whose times a record holds: name, direction, digest of the sources then."""
    head = record.metadata
    named = {
        (part.get("family"), part.get("direction") or "forward", part.get("kernel_digest"))
        for part in (head, *record.rows)
    }
    # As the scripts under benchmarks/ name them.
    named |= {(name, "forward", head.get(f"{name}_digest")) for name in FORWARD}
    return {(name, direction, digest) for name, direction, digest in named if name and digest}


def changed_kernels(record: Record) -> list[str]:
    """Of these families, those whose sources are others now, as text."""
    changed = {
        environment.kernel_name(name, direction)
        for name, direction, digest in kernels(record)
        if digest != environment.digest_of(name, direction)
    }
    return sorted(changed)


def read_bench(path: Path) -> Record:
    """A record of providers' times from a file.

    Raises
    ------
    click.UsageError
        As `read` does, and if its rows are not those of `bench` or one repeats another.
    """
    record = read(path)
    if fault := bench_fault(record.rows) or _repetition(record.rows):
        raise click.UsageError(f"{path} is no record of 'cupy-flash bench': {fault}")
    return record


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # JSON's integers have no bound; false for NaN too.
    return is_number and abs(value) <= sys.float_info.max


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_optional_number(value: Any) -> bool:
    return value is None or (_is_number(value) and value >= 0)


def _is_optional_time(value: Any) -> bool:
    return value is None or (_is_number(value) and value > 0)


_COUNTS = ("head_dim", "head_dim_v", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k")
_TIMES = ("median_ms", "low_quartile_ms", "high_quartile_ms")


def _is_list_of_counts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_count, value))


def _is_modifications(value: Any) -> bool:
    try:
        return bool(Mods.parse(value))
    except (AttributeError, TypeError, ValueError):
        return False


_FITS_OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "kind": lambda value: value in KINDS,
    "page_size": _is_count,
    "append": lambda value: isinstance(value, bool),
    "rotary": lambda value: isinstance(value, bool),
    "asked_splits": _is_count,
    "lengths": _is_list_of_counts,
    "mods": _is_modifications,
    "direction": lambda value: value in DIRECTIONS,
    "values_in_keys": lambda value: isinstance(value, bool),
}
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "provider": _is_text,
    "dtype": lambda value: value in DTYPES,
    "layout": _is_text,
    "causal": lambda value: isinstance(value, bool),
    "q_offset": lambda value: isinstance(value, int),
    "softmax_scale": _is_number,
    **dict.fromkeys(_COUNTS, _is_count),
    **dict.fromkeys(_TIMES, _is_optional_time),
    "tflops": _is_optional_number,
}


def bench_fault(rows: Sequence[Row]) -> str | None:
    """Why these are not the rows of `bench`; None if they are."""
    if not rows:
        return "it has no rows"
    for index, row in enumerate(rows):
        for name, fits in _FIELDS.items():
            if name not in row:
                return f"row {index} has no {name!r}"
            if not fits(row[name]):
                return f"row {index} has {name} {reprlib.repr(row[name])}"
        for name, fits in _FITS_OPTIONAL.items():
            if row.get(name) is not None and not fits(row[name]):
                return f"row {index} has {name} {reprlib.repr(row[name])}"
        if row["median_ms"] is not None and None in (row[name] for name in _TIMES):
            return f"row {index} has a median without quartiles"
    return None


def _repetition(rows: Sequence[Row]) -> str | None:
    """Which row has the provider and the case of one before; None if none has."""
    first: dict[tuple[str, Case], int] = {}
    for index, row in enumerate(rows):
        provider, case = row["provider"], case_of(row)
        if (before := first.setdefault((provider, case), index)) != index:
            return f"rows {before} and {index} are both {provider} on {describe([case])[0]}"
    return None


def case_of(row: Row) -> Case:
    """The case of a row of `bench`; None for a q_offset and a softmax_scale that are as usual."""
    # Of cases without masks and modifications, and of sequences that are not causal, it is 0.
    is_placed = row["causal"] or (row.get("mods") and row.get("kind") in (None, "dense"))
    usual_offset = not is_placed or row["q_offset"] == row["seqlen_k"] - row["seqlen_q"]
    usual_scale = math.isclose(row["softmax_scale"], max(row["head_dim"], 1) ** -0.5)
    return Case(
        **{name: row[name] for name in (*_COUNTS, "dtype", "causal", "layout")},
        q_offset=None if usual_offset else row["q_offset"],
        softmax_scale=None if usual_scale else row["softmax_scale"],
        kind=row.get("kind") or "dense",
        page_size=row.get("page_size") or 0,
        append=bool(row.get("append")),
        rotary=bool(row.get("rotary")),
        asked_splits=row.get("asked_splits") or 0,
        lengths=tuple(row["lengths"]) if row.get("lengths") else None,
        mods=Mods.parse(row.get("mods") or ""),
        direction=row.get("direction") or "forward",
        values_in_keys=bool(row.get("values_in_keys")),
    )


def optional_fields(case: Case) -> dict[str, Any]:
    """What tells a case of one of these kinds apart; None for others."""
    return {
        "kind": None if case.is_dense else case.kind,
        "page_size": case.page_size or None,
        "append": case.append or None,
        "rotary": case.rotary or None,
        "asked_splits": case.asked_splits or None,
        "lengths": list(case.lengths) if case.lengths else None,
        "mods": str(case.mods) or None,
        "direction": case.direction if case.is_backward else None,
        "values_in_keys": case.values_in_keys or None,
    }


def is_wrong(row: Row) -> bool:
    """Whether a result of ours failed its check; other libraries are timed as they are."""
    return row.get("check") == "failed" and row["provider"].startswith("cupy_flash")


def by_case(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """The rows of each case by provider, in the order of the rows; of equal ones the first."""
    found: dict[Case, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(case_of(row), {}).setdefault(row["provider"], row)
    return list(found.values())


def ratio(found: Mapping[str, Row], provider: str, baseline: Sequence[str]) -> float | None:
    """Best baseline time over a provider's time on one case.

    None if one is missing or the provider's result was wrong.
    """
    times = [found[b]["median_ms"] for b in baseline if b in found and found[b]["median_ms"]]
    row = found.get(provider)
    if not times or row is None or not row["median_ms"] or is_wrong(row):
        return None
    return float(min(times) / row["median_ms"])
