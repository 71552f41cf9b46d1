"""Command-line options that set the mask and score modifications of a command's cases."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from .built_in import BUILT_IN
from .cases import Case
from .lists import FLAGS, CommaList
from .mods import PARSERS, PLAIN, SPANS, CaseMods
from .options import Command, checked_cases, placed

_NONE = "none"


def _or_none(name: str) -> Callable[[str], Any]:
    """Return a parser for a field of `CaseMods` that also accepts "none", for no modification."""
    absent = getattr(PLAIN, name)
    return lambda text: absent if text == _NONE else PARSERS[name](text)


_MOD_OPTIONS: dict[str, tuple[click.ParamType, str]] = {
    "window": (
        CommaList(_or_none("window"), "LEFT:RIGHT or none", "1023:0"),
        "Number of keys before and after its own position that a query attends to, LEFT:RIGHT; a "
        "side left out has no bound. -1 or none for no window.",
    ),
    "softcap": (
        CommaList(_or_none("softcap"), "a number from 1e-30 to 1e+30, 0 or none", "50"),
        "Softcap of the scores, a number; 0 or none for no softcap.",
    ),
    "alibi": (FLAGS, "ALiBi with the slopes of the paper: yes or no; 'no,yes' for both."),
    "sinks": (FLAGS, "Attention sink for each query head: yes or no."),
    **{
        name: (
            CommaList(_or_none(name), f"one of {', '.join(SPANS)}, none", SPANS[0]),
            f"{what}: for each head (heads), for all heads together (shared), for each head of "
            "each sequence (batch), or none.",
        )
        for name, what in (("bias", "Bias in the dtype of q"), ("mask", "Boolean mask"))
    },
    "mod": (
        CommaList(_or_none("mod"), f"one of {', '.join(BUILT_IN)}, none", "documents"),
        "Mask or score function: "
        + "; ".join(f"{n}, {built_in.about}" for n, built_in in BUILT_IN.items()),
    ),
}


def mod_options(command: Command) -> Command:
    """Add the options for mask and score modifications to a command."""
    for name, (kind, text) in reversed(_MOD_OPTIONS.items()):
        flag: dict[str, Any] = {"is_flag": False, "flag_value": "yes"} if kind is FLAGS else {}
        command = click.option(f"--{name}", type=kind, help=text, **flag)(command)
    return command


def split_mods(options: dict[str, Any]) -> dict[str, Any]:
    """Pop the modification options from a command's options; those not given are None."""
    return {name: options.pop(name) for name in _MOD_OPTIONS}


def modified(cases: Sequence[Case], given: Mapping[str, Any]) -> list[Case]:
    """Return each case with every combination of modifications, after `placed` and all checks.

    Raises
    ------
    click.UsageError
        If no kernel computes one of the cases; with the library's message.
    """
    lists = {name: values for name, values in given.items() if values}
    result = [
        CaseMods(**dict(zip(lists, each, strict=True)))
        for each in itertools.product(*lists.values())
    ]
    everything = [dataclasses.replace(case, mods=mods) for case in cases for mods in result]
    return checked_cases(placed(everything))
