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
from .options import (
    SEQUENCE_NAMES,
    SHAPE_NAMES,
    Defaults,
    cases_from,
    checked_cases,
    list_option,
    placed,
    refuse,
    split,
    with_options,
)

Options = dict[str, Any]
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
    "alibi": (FLAGS, "ALiBi with the slopes of the paper"),
    "sinks": (FLAGS, "Attention sink for each query head"),
    **{
        name: (
            CommaList(_or_none(name), f"one of {', '.join(SPANS)}, none", SPANS[0]),
            f"{what}: for each head (heads), for all heads together (shared), for each head of "
            "each sequence (batch), or none.",
        )
        for name, what in (("bias", "Bias in the dtype of q"), ("mask", "Boolean mask"))
    },
    "dropout": (
        CommaList(_or_none("dropout"), "a number from 0 to below 1, or none", "0.1"),
        "Probability of dropout; 0 or none for no dropout. Results are then not checked.",
    ),
    "mod": (
        CommaList(_or_none("mod"), f"one of {', '.join(BUILT_IN)}, none", "documents"),
        "Mask or score function: "
        + "; ".join(f"{n}, {built_in.about}" for n, built_in in BUILT_IN.items()),
    ),
}


mod_options, single_mod_options = (
    with_options(*(list_option(name, *each, single=single) for name, each in _MOD_OPTIONS.items()))
    for single in (False, True)
)


def split_cases(options: Options) -> tuple[Options, Options, Options]:
    """Remove the options for shapes, sequences and modifications from a command's options.

    Return these three groups; see `options.split`.
    """
    shape, sequences = split(options, SHAPE_NAMES), split(options, SEQUENCE_NAMES)
    return shape, sequences, split(options, _MOD_OPTIONS)


def refuse_cases(*groups: Mapping[str, Any], backward: bool, other: str) -> None:
    """Raise a usage error if --backward, or an option of the groups, was given.

    The message says that the option cannot be combined with `other`.
    """
    refuse({"backward": backward}, other)
    for options in groups:
        refuse(options, other)


def modified(
    cases: Sequence[Case], mods: Mapping[str, Any], *, backward: bool = False
) -> list[Case]:
    """Return each case with every combination of modifications, after `placed` and all checks.

    `mods` has the values of the options for modifications. If `backward`, the cases are calls for
    gradients. Raise a usage error, with the library's message, if the library rejects a case.
    """
    lists = {name: values for name, values in mods.items() if values}
    combinations = [
        CaseMods(**dict(zip(lists, each, strict=True)))
        for each in itertools.product(*lists.values())
    ]
    everything = [dataclasses.replace(case, mods=each) for case in cases for each in combinations]
    forward = checked_cases(placed(everything))
    if not backward:
        return forward
    return checked_cases([dataclasses.replace(case, direction="backward") for case in forward])


def dense_cases(options: Options, defaults: Defaults, *, backward: bool) -> list[Case]:
    """Remove the options for shapes and modifications; return their cases as `modified` does."""
    shape, mods = split(options, SHAPE_NAMES), split(options, _MOD_OPTIONS)
    return modified(cases_from(shape, defaults), mods, backward=backward)
