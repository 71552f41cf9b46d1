"""Options of several commands: shapes, sequences, tiles, outputs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from cupy_flash.arrays.strided import LAYOUTS
from cupy_flash.problem.arrays import DTYPES
from cupy_flash.problem.problem import MAX_SEQLEN

from ..errors import library_errors_as_usage
from ..records import report
from .cases import SHORT_DTYPE, Case, sweep
from .lists import (
    COUNTS,
    DTYPE_LIST,
    FLAGS,
    FLOATS,
    HEAD_DIMS,
    HEADS,
    INTEGERS,
    LENGTHS,
    names_list,
    option_name,
)
from .sequences import long_tail

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]

EXISTING_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
NEW_FILE = click.Path(path_type=Path, dir_okay=False)


class Seconds(click.FloatRange):
    """Option type for a number of seconds above 0; "inf" means no limit."""

    def __init__(self) -> None:
        super().__init__(0, min_open=True)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail("'nan' is not a time; expected seconds above 0, or inf", param, ctx)
        return seconds


class Number(click.ParamType):
    """Option type for a finite number within bounds."""

    name = "number"

    def __init__(self, least: float = 0.0, most: float = math.inf) -> None:
        self.least, self.most = least, most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (self.least <= number <= self.most and number < math.inf):
            to = f" to {self.most:g}" if self.most < math.inf else ""
            self.fail(f"{value!r} is not a number from {self.least:g}{to}", param, ctx)
        return number


FINITE = Number()


# Options whose values an input file or a preset defines instead.
SIZES = ("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v")
_SHAPE_OPTIONS: dict[str, tuple[click.ParamType, str]] = {
    "batch": (COUNTS, "Batch size."),
    "seqlen_q": (LENGTHS, "Number of query rows."),
    "seqlen_k": (LENGTHS, "Number of keys and values; default: --seqlen-q."),
    "heads": (HEADS, "Number of query heads."),
    "kv_heads": (HEADS, "Number of key and value heads; default: --heads."),
    "head_dim": (HEAD_DIMS, "Width of queries and keys, 1 to 576."),
    "head_dim_v": (HEAD_DIMS, "Width of values; default: --head-dim."),
    "dtype": (DTYPE_LIST, f"{', '.join(DTYPES)}; also {', '.join(SHORT_DTYPE.values())}."),
    "layout": (names_list(LAYOUTS, "a layout"), "bshd (default) or bhsd."),
    "causal": (FLAGS, "Causal mask"),
    "q_offset": (
        INTEGERS,
        "Position of the first query among the keys, for causal, windowed or otherwise modified "
        "attention.",
    ),
    "softmax_scale": (FLOATS, "Factor on the scores."),
}
SHAPE_NAMES = tuple(_SHAPE_OPTIONS)

Defaults = Mapping[str, tuple[Any, ...]]


def defaults_of(**values: Any) -> Defaults:
    """Return the default values of shape options, given as one value or a tuple of values."""
    return {name: v if isinstance(v, tuple) else (v,) for name, v in values.items()}


# Defaults for caches: decoding with grouped heads. The outer key is `on_gpu`.
_CACHE_DEFAULTS = {
    True: defaults_of(batch=8, seqlen_q=1, seqlen_k=8192, heads=32, kv_heads=8, head_dim=128),
    False: defaults_of(batch=2, seqlen_q=1, seqlen_k=1024, heads=8, kv_heads=2, head_dim=64),
}
_PACKED_DEFAULTS = {
    True: defaults_of(batch=32, seqlen_q=16384),
    False: defaults_of(batch=8, seqlen_q=512),
}


def _defaults_text(defaults: Mapping[bool, Defaults]) -> str:
    """Return the end of a help text, which states the defaults on a GPU and on the CPU."""
    gpu, cpu = (
        ", ".join(f"{name} {value}" for name, (value,) in defaults[on_gpu].items())
        for on_gpu in (True, False)
    )
    return f"  [default: {gpu}; on the CPU {cpu}]"


def with_options(*options: Decorator) -> Decorator:
    """Return a decorator that adds options to a command; its help lists them in this order."""

    def add(command: Function) -> Function:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def list_option(
    name: str, kind: click.ParamType, text: str, *, default: str = "", single: bool = False
) -> Decorator:
    """Return an option for a list of values; a list of `FLAGS` is "yes" if no value follows it.

    The help is `text`, which for `FLAGS` has no end yet, and then `default`. If `single`, it says
    that the command takes one value.
    """
    flag: dict[str, Any] = {}
    if kind is FLAGS:
        flag = {"is_flag": False, "flag_value": "yes"}
        text += ": yes or no." if single else ": yes or no; 'no,yes' for both."
    metavar = "VALUE" if single else None
    return click.option(option_name(name), type=kind, help=text + default, metavar=metavar, **flag)


# Options that make a command's cases KV caches or packed sequences.
sequence_options = with_options(
    click.option(
        "--cache",
        is_flag=True,
        help="Let --seqlen-q rows attend to a cache of --seqlen-k keys, by "
        "flash_attention_with_kvcache." + _defaults_text(_CACHE_DEFAULTS),
    ),
    click.option(
        "--page-size", type=COUNTS, help="Rows per page of the cache, shuffled pages; 0 for none."
    ),
    click.option("--append", is_flag=True, help="Also append new rows to the cache in each call."),
    click.option("--rotary", is_flag=True, help="Also rotate the queries and the appended keys."),
    click.option(
        "--lengths",
        metavar="WHICH",
        help="Lengths of packed sequences (flash_attention_varlen) or, with --cache, of caches: "
        "uniform, long-tail (from 16 to the longest, drawn with --seed), numbers, or a file of "
        "numbers." + _defaults_text(_PACKED_DEFAULTS),
    ),
    click.option(
        "--num-splits", type=COUNTS, help="KV splits per sequence; 0 (default): library's choice."
    ),
)
SEQUENCE_NAMES = ("cache", "page_size", "append", "rotary", "lengths", "num_splits")

backward_option = click.option(
    "--backward",
    is_flag=True,
    help="Compute the gradients of q, k and v, given the output and its log-sum-exp.",
)


def count_option(name: str, default: int, text: str, *, least: int = 0) -> Decorator:
    """Return an option for a whole number that is at least `least`; its help shows the default."""
    kind = click.IntRange(least)
    return click.option(name, type=kind, default=default, show_default=True, help=text)


def shape_options(
    defaults: Defaults, on_cpu: Defaults | None = None, *, single: bool = False
) -> Decorator:
    """Return a decorator that adds the shape options; their help states the defaults.

    `single` is a parameter of `list_option`.
    """

    def default_text(name: str) -> str:
        if name not in defaults:
            return ""
        default = ",".join(map(str, defaults[name]))
        cpu = f"; on the CPU {','.join(map(str, on_cpu[name]))}" if on_cpu else ""
        return f"  [default: {default}{cpu}]"

    return with_options(
        *(
            list_option(name, kind, text, default=default_text(name), single=single)
            for name, (kind, text) in _SHAPE_OPTIONS.items()
        )
    )


def split(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Remove the named options from a command's options, and return them.

    An option that was not given is None or, if it is a flag, False.
    """
    return {name: options.pop(name) for name in names}


def cases_from(shape: Mapping[str, Any], defaults: Defaults) -> list[Case]:
    """Return every combination of the shape options as a case; `modified` checks them later.

    An option that is None has its value in `defaults`. Raise a usage error if --heads is no
    multiple of --kv-heads: the library's message would name arrays.
    """
    fallbacks: Defaults = {"causal": (False,), "layout": ("bshd",), **defaults}
    cases = sweep({name: fallbacks.get(name) if v is None else v for name, v in shape.items()})
    for case in cases:
        if case.heads_q % case.heads_kv:
            raise click.UsageError(
                f"--heads {case.heads_q} is not a multiple of --kv-heads {case.heads_kv}"
            )
    return cases


def checked_cases(cases: list[Case]) -> list[Case]:
    """Return the cases unchanged, after the library has accepted each of them."""
    with library_errors_as_usage():
        for case in cases:
            case.problem()
    return cases


def sequence_cases(
    sequences: Mapping[str, Any],
    shape: dict[str, Any],
    defaults: Defaults,
    *,
    seed: int,
    on_gpu: bool,
) -> list[Case]:
    """Return every combination of the options as a case; without sequence options, dense cases.

    Raise a usage error if options contradict each other.

    Parameters
    ----------
    sequences, shape
        Values of the options `SEQUENCE_NAMES` and `SHAPE_NAMES`.
    defaults
        Defaults as in `cases_from`; caches and packed sequences override some of them.
    seed
        Seed of drawn lengths.
    on_gpu
        Whether to use the defaults for a GPU; those for the CPU are smaller.
    """
    cache, lengths = sequences["cache"], sequences["lengths"]
    _refuse_stray_sequences(sequences)
    if not cache and lengths is None:
        return cases_from(shape, defaults)
    what = "--cache" if cache else "--lengths"
    refuse(shape, f"{what}: its masks are aligned at the bottom right", ("q_offset",))
    if shape["layout"] not in (None, ("bshd",)):
        raise click.UsageError(
            f"--layout {','.join(shape['layout'])} cannot be combined with {what}"
        )
    if not cache:
        refuse(shape, "--lengths: packed sequences attend to themselves", ("seqlen_k",))
    which: Any = None if lengths is None else _lengths(lengths)
    if isinstance(which, tuple):
        longest = "seqlen_k" if cache else "seqlen_q"
        refuse(shape, "--lengths with numbers, which determine it", ("batch", longest))
        shape = shape | {"batch": (len(which),), longest: (max(which),)}
    defaults = {**defaults, **(_CACHE_DEFAULTS if cache else _PACKED_DEFAULTS)[on_gpu]}
    if cache and shape["heads"] is not None:
        # As in dense cases, KV heads default to --heads if that was given.
        del defaults["kv_heads"]
    result = []
    for case, pages, splits in itertools.product(
        cases_from(shape, defaults), sequences["page_size"] or (0,), sequences["num_splits"] or (0,)
    ):
        if sequences["rotary"] and case.head_dim % 2:
            raise click.UsageError(f"--rotary needs an even --head-dim, not {case.head_dim}")
        drawn = _drawn(which, case, seed)
        if sequences["append"]:
            _require_room(case, drawn)
        result.append(
            dataclasses.replace(
                case,
                kind="cache" if cache else "varlen",
                page_size=pages,
                append=sequences["append"],
                rotary=sequences["rotary"],
                asked_splits=splits,
                lengths=drawn,
            )
        )
    return result


def _require_room(case: Case, lengths: tuple[int, ...] | None) -> None:
    """Raise a usage error if caches hold fewer keys than a call appends."""
    option = "--seqlen-k" if lengths is None else "--lengths"
    least = case.seqlen_k if lengths is None else min(lengths)
    if least < case.seqlen_q:
        raise click.UsageError(
            f"--append writes --seqlen-q {case.seqlen_q} rows among the keys of each sequence, "
            f"but {option} has {least} keys; expected at least {case.seqlen_q}"
        )


def _refuse_stray_sequences(sequences: Mapping[str, Any]) -> None:
    for name in ("page_size", "append", "rotary"):
        if sequences[name] and not sequences["cache"]:
            raise click.UsageError(f"{option_name(name)} needs a cache; add --cache")
    if sequences["rotary"] and not sequences["append"]:
        raise click.UsageError("--rotary rotates the rows that are appended; add --append")
    if sequences["num_splits"] and not sequences["cache"] and sequences["lengths"] is None:
        raise click.UsageError(
            "--num-splits needs caches or packed sequences; add --cache or --lengths"
        )


def _lengths(text: str) -> str | tuple[int, ...]:
    """Return how lengths are drawn, or the lengths that the value of --lengths or its file lists.

    Raise a usage error if the value is not uniform, long-tail, a list of whole numbers, or the path
    of a file with such a list.
    """
    if text in ("uniform", "long-tail"):
        return text
    source, what = text, f"--lengths {text!r}"
    # Path.is_file would raise an error for a list of numbers that is too long for a file name.
    if os.path.isfile(text) or any(map(str.isalpha, text)):
        try:
            source, what = Path(text).read_text(encoding="utf-8"), f"the file --lengths {text}"
        except (OSError, ValueError) as error:
            raise click.UsageError(
                f"{what} is not uniform, long-tail or whole numbers such as 16,100,7, and as a "
                f"file it cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error
    words = source.replace(",", " ").split()
    if not words:
        raise click.UsageError(f"{what} has no numbers in it; expected some, such as 16,100,7")
    if wrong := [word for word in words if not _is_length(word)]:
        raise click.UsageError(
            f"{what} has {wrong[0][:40]!r} in it; expected whole numbers from 0 to {MAX_SEQLEN}, "
            "such as 16,100,7"
        )
    lengths = tuple(map(int, words))
    if not any(lengths):
        raise click.UsageError(f"{what} has no length above 0; expected one")
    return lengths


def _is_length(word: str) -> bool:
    is_short = word.isdecimal() and len(word) <= len(str(MAX_SEQLEN))
    return is_short and int(word) <= MAX_SEQLEN


# Drawn lengths are printed below the table, so that users can pass them again; hence the limit.
_MOST_DRAWN = 2**16


def _drawn(which: str | tuple[int, ...] | None, case: Case, seed: int) -> tuple[int, ...] | None:
    if isinstance(which, tuple):
        return which
    if which is not None and case.batch > _MOST_DRAWN:
        raise click.UsageError(
            f"--batch {case.batch} is too many for --lengths {which}; expected at most "
            f"{_MOST_DRAWN} sequences"
        )
    if which == "long-tail":
        # A cache holds at least the rows that the call appends.
        least = case.seqlen_q if case.seqlen_q < case.seqlen_k else 1
        return long_tail(case.batch, case.seqlen_k, seed, least=least)
    return (case.seqlen_k,) * case.batch if which == "uniform" else None


def placed(cases: Sequence[Case]) -> list[Case]:
    """Return the cases, without a q_offset where it makes no difference.

    Raise a usage error if q_offset was given and makes no difference in any case.
    """
    if all(case.q_offset is None for case in cases):
        return list(cases)
    if not any(case.causal or case.mods for case in cases):
        raise click.UsageError(
            "--q-offset affects only a causal mask, a window or another modification; add --causal "
            "or --window, or leave it out"
        )
    result = (c if c.causal or c.mods else dataclasses.replace(c, q_offset=None) for c in cases)
    return list(dict.fromkeys(result))


def refuse(options: Mapping[str, Any], other: str, names: Iterable[str] | None = None) -> None:
    """Raise a usage error if any of the options, or of the named ones, was given.

    The message says that the option cannot be combined with `other`.
    """
    for name in options if names is None else names:
        if options[name]:
            raise click.UsageError(f"{option_name(name)} cannot be combined with {other}")


def tile_request(fields: dict[str, int | None], texts: Sequence[str]) -> dict[str, int] | None:
    """Return the fields of a forced tile, from options and NAME=VALUE texts; None without any.

    Raise a usage error if a text is not NAME=VALUE, or a field has two different values.
    """
    request = {name: value for name, value in fields.items() if value is not None}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value.isdecimal():
            raise click.UsageError(
                f"--tile {text!r} is not NAME=NUMBER; for example --tile threads=128"
            )
        if request.setdefault(name, int(value)) != int(value):
            raise click.UsageError(
                f"the tile's {name} is given as {request[name]} and as {value}; give it once"
            )
    return request or None


def force_option(*files: str) -> Decorator:
    """Return the option `--force`, without which the command does not overwrite existing files.

    `files` are the options, such as `--output`, and arguments, such as `FILE`, for output files.
    """

    def decorated(command: Function) -> Function:
        @functools.wraps(command)
        def without_overwriting(*arguments: Any, **options: Any) -> Any:
            force = options.pop("force")
            for name in files:
                refuse_existing(options[name.lstrip("-").lower()], force=force, name=name)
            return command(*arguments, **options)

        checked: Any = without_overwriting
        whose = " or ".join(files)
        help_text = f"Overwrite an existing {whose}{' file' if whose.startswith('-') else ''}."
        return click.option("--force", is_flag=True, help=help_text)(checked)

    return decorated


def output_option(command: Function) -> Function:
    """Add `--output` for a new file, and `--force`, which also allows an existing one."""
    return overwritable_output_option(force_option("--output")(command))


def refuse_existing(path: Path | None, *, force: bool, name: str = "--output") -> None:
    """Raise a usage error if a file would be overwritten and `force` is not set."""
    # An empty file, as mktemp creates, and a device have no contents to lose.
    if path is not None and not force and path.is_file() and path.stat().st_size:
        raise click.UsageError(f"{name} {path} exists; --force overwrites it")


def overwritable_output_option(command: Function) -> Function:
    """Add `--output` for a file that can be written and that the command does not read.

    The command calls `refuse_existing` itself.
    """

    @functools.wraps(command)
    def without_reading_output(*arguments: Any, **options: Any) -> Any:
        output = options["output"]
        for name, value in options.items():
            if name != "output" and output is not None and _is_file(value, output):
                raise click.UsageError(f"--output {output} would overwrite what the command reads")
        return command(*arguments, **options)

    checked: Any = without_reading_output
    return click.option(
        "--output",
        type=NEW_FILE,
        callback=_writable,
        help="Write the rows to a file in the format of its suffix: .json, .csv or .md.",
    )(checked)


def _is_file(value: Any, path: Path) -> bool:
    """Return whether an option's value names the existing file at `path`."""
    if not isinstance(value, (str, Path)):
        return False
    try:
        return os.path.samefile(value, path)
    except (OSError, ValueError):
        return False


def _writable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    return None if path is None else writable_path(path, report.WRITERS)


def writable_path(path: Path, suffixes: Iterable[str]) -> Path:
    """Return the path, after a check of its suffix and that the file can be written.

    Raise click.BadParameter if the suffix, in lower case, is not among `suffixes`, or if the file
    cannot be written.
    """
    if path.suffix.lower() not in suffixes:
        name = repr(str(path)) if path.name else "an empty name"
        result = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise click.BadParameter(f"{name} {result}; expected one of {', '.join(suffixes)}")
    make_folder(path.parent)
    try:
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def make_folder(path: Path) -> None:
    """Create a folder for `--output` if it does not exist; raise click.BadParameter on failure."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> click.BadParameter:
    return click.BadParameter(f"{str(path)!r} cannot be written: {error.strerror}")
