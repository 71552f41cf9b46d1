"""Weighted cases: the workload that a sweep optimizes."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cupy_flash.arrays.strided import LAYOUTS
from cupy_flash.planning import tuning
from cupy_flash.problem.arrays import DTYPES, FLOAT8, LARGEST_QUANTIZED

from ..providers.providers import PAGE_SIZES
from . import presets
from .cases import DIRECTIONS, KINDS, Case, dtype_name
from .mods import CaseMods


@dataclass(frozen=True)
class Weighted:
    """A case and the weight of its time, for example how often it is called."""

    case: Case
    weight: float = 1.0


@dataclass(frozen=True)
class Group:
    """Cases that use the same tuned tile.

    Attributes
    ----------
    problem_class
        Class as in `cupy_flash.planning.tuning.problem_class`. If the cases have modifications, the
        class ends with them; tables of tuned tiles have no such class.
    cases
        Cases of the class, at least one.
    """

    problem_class: str
    cases: tuple[Weighted, ...]

    @property
    def is_modified(self) -> bool:
        """Whether the cases have modifications, which are then the same in all of them."""
        return bool(self.cases[0].case.mods)


def groups_of(cases: Iterable[Weighted]) -> list[Group]:
    """Return the cases grouped by problem class, in the order in which classes first appear."""
    result: dict[str, list[Weighted]] = {}
    for weighted in cases:
        name = tuning.problem_class(weighted.case.problem())
        if mods := weighted.case.mods:
            name = f"{name}; {mods}"
        result.setdefault(name, []).append(weighted)
    return [Group(name, tuple(members)) for name, members in result.items()]


# ---- Presets of `tune`

# (head_dim, head_dim_v) of published models, among them ViT and GPT-2 (64), LLaMA (128), DeepSeek's
# MLA (192 and 128) and Gemma (256).
_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
# Pairs of lengths that belong to one class (see `tuning.problem_class`). The numbers of tokens, by
# bytes per element, and the hidden size are large enough to fill any GPU.
_LENGTHS = ((512, 1024), (2048, 4096), (8192, 16384))
_HIDDEN = 2048
_TOKENS = {2: 16384, 4: 4096}
# Rows per page of the latent caches, as in `bench --preset mla`; 0 for a contiguous cache.
_LATENT_PAGES = (0, 16, 64)


def common() -> list[Weighted]:
    """Return cases of 16-bit types and float32, full and causal, of all `_DIMS` and `_LENGTHS`.

    Both lengths of a class count equally; see `_by_flops`.
    """
    cases = []
    for dtype, (dim, dim_v), causal, lengths in itertools.product(
        ("bfloat16", "float16", "float32"), _DIMS, (False, True), _LENGTHS
    ):
        tokens = _TOKENS[4 if dtype == "float32" else 2]
        heads = _HIDDEN // dim
        cases += [
            Case(dtype, tokens // seqlen, seqlen, seqlen, heads, heads, dim, dim_v, causal)
            for seqlen in lengths
            if seqlen <= tokens
        ]
    return _by_flops(cases)


def decode_quantized() -> list[Weighted]:
    """Return the cases of the preset `decode` on caches of 8 bits."""
    return _by_bytes(
        dataclasses.replace(each.case, cache_dtype=dtype)
        for each in PRESETS["decode"]()
        for dtype in LARGEST_QUANTIZED
    )


def fp8() -> list[Weighted]:
    """Return the float8 cases of `bench --preset fp8`, with both 16-bit outputs."""
    return _by_flops(_of_bench("fp8", cache_dtype=(FLOAT8,)))


def wide() -> list[Weighted]:
    """Return the cases of `bench --preset wide` that `common` lacks: heads of 512 columns."""
    return _by_flops(case for case in _of_bench("wide") if case.head_dim == 512)


def _of_bench(name: str, **changes: Sequence[Any]) -> Iterator[Case]:
    """Yield the cases of a preset of `bench` in both 16-bit types.

    Each case is repeated for every combination of the values in `changes`, which has sequences of
    values by field of `Case`.
    """
    for dtype, *values in itertools.product(("bfloat16", "float16"), *changes.values()):
        changed = dict(zip(changes, values, strict=True))
        for case in presets.preset(name, (dtype,)).cases:
            yield dataclasses.replace(case, **changed)


def _by_flops(cases: Iterable[Case]) -> list[Weighted]:
    """Return cases with weights of 1 / FLOPs: if all have one rate, they count equally."""
    return [Weighted(case, 1e12 / case.flops()) for case in cases]


def _by_bytes(cases: Iterable[Case]) -> list[Weighted]:
    """Return decoding cases with weights of 1 / bytes: all read K and V at about one rate."""
    return [Weighted(case, 1e9 / case.kv_bytes) for case in cases]


def _backward(cases: Iterable[Weighted]) -> list[Weighted]:
    """Return the cases with direction backward, with the same weights."""
    return [
        dataclasses.replace(each, case=dataclasses.replace(each.case, direction="backward"))
        for each in cases
    ]


PRESETS: dict[str, Callable[[], list[Weighted]]] = {
    "common": common,
    "decode": lambda: _by_bytes(_of_bench("decode", page_size=(0, *PAGE_SIZES))),
    "decode-quantized": decode_quantized,
    "mla": lambda: _by_bytes(
        _of_bench("mla", page_size=_LATENT_PAGES, cache_dtype=(None, *LARGEST_QUANTIZED))
    ),
    "fp8": fp8,
    "varlen": lambda: _by_flops(_of_bench("varlen")),
    "wide": wide,
    "common-backward": lambda: _backward(common()),
    "varlen-backward": lambda: _backward(_by_flops(_of_bench("varlen"))),
}


# ---- Workloads in files

_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no", "")
_CHOICES = {
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "kind": KINDS,
    "direction": DIRECTIONS,
    "cache_dtype": tuple(LARGEST_QUANTIZED),
}
_REQUIRED = ("seqlen_q", "heads_q", "head_dim")
# Values of the field `kind` with which a case may have each of these fields.
_KINDS_OF = {
    "page_size": ("cache",),
    "cache_dtype": ("cache", "dense"),
    "values_in_keys": ("cache",),
    "append": ("cache",),
    "rotary": ("cache",),
    "lengths": ("cache", "varlen"),
    "asked_splits": ("cache", "varlen"),
}
_FROM_ONE = ("heads_q", "heads_kv", "head_dim", "head_dim_v")


def read_workload(path: Path) -> list[Weighted]:
    """Return the weighted cases in a JSON or CSV file.

    The file is a JSON list of objects or a CSV table, with fields of `Case` and `weight`. seqlen_q,
    heads_q and head_dim are required; seqlen_k, heads_kv and head_dim_v default to them. dtype
    defaults to bfloat16; batch and weight default to 1. If the file has another form, raise a usage
    error that names the row and the field.
    """
    try:
        # Spreadsheets put a byte order mark before their CSV.
        text = path.read_text(encoding="utf-8-sig")
        rows: Any = (
            list(csv.DictReader(text.splitlines(), skipinitialspace=True))
            if path.suffix.lower() == ".csv"
            else json.loads(text)
        )
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise click.UsageError(f"{path} cannot be read as a workload: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise click.UsageError(f"{path} is not a workload; expected a list of objects")
    if not rows:
        raise click.UsageError(f"{path} has no rows")
    return [_weighted(row, f"row {number} of {path}") for number, row in enumerate(rows, 1)]


def _weighted(row: Mapping[str, Any], where: str) -> Weighted:
    if None in row:
        raise click.UsageError(f"{where} has more values than the header has columns")
    fields = {name: value for name, value in row.items() if value not in (None, "")}
    known = {field.name for field in dataclasses.fields(Case)} | {"weight"}
    if unknown := [name for name in fields if name not in known]:
        raise click.UsageError(
            f"{where} has {unknown[0]!r}; expected some of {', '.join(sorted(known))}"
        )
    if missing := [name for name in _REQUIRED if name not in fields]:
        raise click.UsageError(f"{where} has no {missing[0]}")
    defaults = {
        "dtype": "bfloat16",
        "batch": 1,
        "seqlen_k": fields["seqlen_q"],
        "heads_kv": fields["heads_q"],
        "head_dim_v": fields["head_dim"],
    }
    defaults = {name: value for name, value in defaults.items() if name not in fields}
    # The row's own fields are parsed first, so that messages name a field that the file contains.
    values = {name: _value(name, value, where) for name, value in (fields | defaults).items()}
    kind = values.get("kind", "dense")
    for name, kinds in _KINDS_OF.items():
        if values.get(name) and kind not in kinds:
            raise click.UsageError(
                f"{where} has {name}, which needs kind {' or '.join(kinds)}; its kind is {kind}"
            )
    weight = values.pop("weight", 1.0)
    case = Case(**values)
    try:
        case.problem()
    except (TypeError, ValueError) as error:
        raise click.UsageError(f"{where}: {error}") from error
    return Weighted(case, weight)


def _value(name: str, value: Any, where: str) -> Any:
    text = str(value).strip()
    try:
        if name == "dtype":
            text = dtype_name(text)
        if name in _CHOICES:
            return _one_of(text, _CHOICES[name])
        if name == "mods":
            return CaseMods.parse(text)
        if name == "lengths":
            numbers = value if isinstance(value, list) else text.split()
            return tuple(_whole_number(str(number), least=1) for number in numbers)
        if name in ("causal", "append", "rotary", "values_in_keys"):
            return _one_of(text.lower(), (*_TRUE, *_FALSE)) in _TRUE
        if name in ("softmax_scale", "weight"):
            number = float(text)
            if not math.isfinite(number) or (name == "weight" and number <= 0):
                raise ValueError("expected a number" + " above 0" * (name == "weight"))
            return number
        return _whole_number(text, least=None if name == "q_offset" else int(name in _FROM_ONE))
    except ValueError as error:
        raise click.UsageError(f"{where} has {name} {value!r}: {error}") from error


def _whole_number(text: str, least: int | None) -> int:
    expected = "expected a whole number" + ("" if least is None else f" from {least}")
    try:
        number = int(text)
    except ValueError as error:
        raise ValueError(expected) from error
    if least is not None and number < least:
        raise ValueError(expected)
    return number


def _one_of(text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        raise ValueError(f"expected one of {', '.join(c for c in choices if c)}")
    return text
