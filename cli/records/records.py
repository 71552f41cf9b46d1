"""Reading of the record files that `bench --output` and the scripts in benchmarks/ write."""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from cupy_flash.families import FAMILIES, FORWARD
from cupy_flash.problem.arrays import DTYPES

from ..cases.cases import DIRECTIONS, KINDS, Case, describe
from ..cases.mods import CaseMods
from . import environment
from .report import Record, Row

# The only `record_version` that is read. Records without that key have version 1.
VERSION = 1

# Fields that distinguish cases, in the order in which tables show them.
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
# Additional fields of caches, packed sequences, modified calls and gradients. In rows of other
# cases they are null or missing.
OPTIONAL_FIELDS = (
    *("kind", "page_size", "append", "rotary", "asked_splits", "lengths", "mods"),
    "direction",
    "values_in_keys",
)

# Types of the entries in a record's metadata, which may lack some of them.
_HEAD: dict[str, type] = {"date": str, "device": str, "versions": dict}


def read(path: Path) -> Record:
    """Read a record from a file.

    Raise a usage error if the file cannot be read, holds no record or one of another version, or
    has metadata that no command writes.
    """
    expected = "expected a file that 'cupy-flash bench --output x.json' wrote"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror}") from error
    # Lists nested thousands of levels deep raise RecursionError.
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
    """Return (family, direction, digest of its sources at that time) of the kernels in a record."""
    head = record.metadata
    named = {
        (part.get("family"), part.get("direction") or "forward", part.get("kernel_digest"))
        for part in (head, *record.rows)
    }
    # The scripts in benchmarks/ store digests under these keys.
    named |= {(name, "forward", head.get(f"{name}_digest")) for name in FORWARD}
    for direction in ("backward", "tangent", "received", "lse"):
        families = FAMILIES[direction]
        named |= {(name, direction, head.get(f"{name}_{direction}_digest")) for name in families}
    return {(name, direction, digest) for name, direction, digest in named if name and digest}


def changed_kernels(record: Record) -> list[str]:
    """Return the names of the families in a record whose sources have changed since."""
    changed = {
        environment.kernel_name(name, direction)
        for name, direction, digest in kernels(record)
        if digest != environment.digest_of(name, direction)
    }
    return sorted(changed)


def read_bench(path: Path) -> Record:
    """Read a record of `bench` from a file.

    Raise a usage error if `read` does, if a row is not a row of `bench`, or if two rows have the
    same provider and case.
    """
    record = read(path)
    if fault := bench_fault(record.rows) or _repetition(record.rows):
        raise click.UsageError(f"{path} is not a record of 'cupy-flash bench': {fault}")
    return record


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # The bound excludes integers that no float can hold. The comparison is false for NaN.
    return is_number and abs(value) <= sys.float_info.max


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
        return bool(CaseMods.parse(value))
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
    "provider": lambda value: isinstance(value, str),
    "dtype": lambda value: value in DTYPES,
    "layout": lambda value: isinstance(value, str),
    "causal": lambda value: isinstance(value, bool),
    "q_offset": lambda value: isinstance(value, int),
    "softmax_scale": _is_number,
    **dict.fromkeys(_COUNTS, _is_count),
    **dict.fromkeys(_TIMES, _is_optional_time),
    "tflops": _is_optional_number,
}


def bench_fault(rows: Sequence[Row]) -> str | None:
    """Return why these are not the rows of `bench`, or None if they are."""
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
    """Return which two rows have the same provider and case, or None if all differ."""
    first: dict[tuple[str, Case], int] = {}
    for index, row in enumerate(rows):
        provider, case = row["provider"], case_of(row)
        if (before := first.setdefault((provider, case), index)) != index:
            return f"rows {before} and {index} are both {provider} on {describe([case])[0]}"
    return None


def case_of(row: Row) -> Case:
    """Return the case of a row of `bench`, with None for a default q_offset or softmax_scale."""
    # Rows of cases that q_offset does not affect hold 0, whatever their lengths.
    is_placed = row["causal"] or (row.get("mods") and row.get("kind") in (None, "dense"))
    usual_offset = not is_placed or row["q_offset"] == row["seqlen_k"] - row["seqlen_q"]
    optional = {name: row[name] for name in OPTIONAL_FIELDS if row.get(name)}
    if "lengths" in optional:
        optional["lengths"] = tuple(optional["lengths"])
    if "mods" in optional:
        optional["mods"] = CaseMods.parse(optional["mods"])
    usual_scale = math.isclose(row["softmax_scale"], max(row["head_dim"], 1) ** -0.5)
    return Case(
        **{name: row[name] for name in (*_COUNTS, "dtype", "causal", "layout")},
        q_offset=None if usual_offset else row["q_offset"],
        softmax_scale=None if usual_scale else row["softmax_scale"],
        **optional,
    )


def optional_fields(case: Case) -> dict[str, Any]:
    """Return a case's `OPTIONAL_FIELDS`, with None for those at their defaults."""
    values = case.as_record() | {"lengths": list(case.lengths) if case.lengths else None}
    usual = {field.name: field.default for field in dataclasses.fields(Case)}
    return {n: None if values[n] == usual[n] else values[n] for n in OPTIONAL_FIELDS}


def is_wrong(row: Row) -> bool:
    """Return whether the library's own result failed its check; other providers may fail it."""
    return row.get("check") == "failed" and row["provider"].startswith("cupy_flash")


def by_case(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """Return a dict of rows by provider for each case; among equal rows the first is kept."""
    result: dict[Case, dict[str, Row]] = {}
    for row in rows:
        result.setdefault(case_of(row), {}).setdefault(row["provider"], row)
    return list(result.values())


def ratio(result: Mapping[str, Row], provider: str, baseline: Sequence[str]) -> float | None:
    """Return the fastest baseline time of a case, divided by a provider's time.

    None if a time is missing or the provider's result was wrong.
    """
    times = [result[b]["median_ms"] for b in baseline if b in result and result[b]["median_ms"]]
    row = result.get(provider)
    if not times or row is None or not row["median_ms"] or is_wrong(row):
        return None
    return float(min(times) / row["median_ms"])
