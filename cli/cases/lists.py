"""Option types for comma-separated lists, which hold the values that a command sweeps over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import click
from click.shell_completion import CompletionItem

from cupy_flash.problem.arrays import DTYPES
from cupy_flash.problem.problem import MAX_HEAD_DIM, MAX_SEQLEN

from .cases import SHORT_DTYPE, dtype_name

T = TypeVar("T")


class CommaList(click.ParamType, Generic[T]):
    """Option type for values separated by commas."""

    name = "list"

    def __init__(
        self, item: Callable[[str], T], what: str, example: str, choices: Sequence[str] = ()
    ) -> None:
        """Initialize the type from a description of its values.

        Parameters
        ----------
        item
            Parser of one value; raises ValueError if the text is not one.
        what, example
            Description of a value, and an example of a list.
        choices
            Texts that the shell can complete.
        """
        self.item, self.what, self.example, self.choices = item, what, example, choices

    @property
    def wanted(self) -> str:
        """Description of a value, with an example of a list."""
        return f"{self.what}; for example {self.example}"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[T, ...]:
        if not isinstance(value, str):
            return tuple(value)
        items = []
        for text in value.split(","):
            try:
                items.append(self.item(text.strip()))
            except ValueError:
                self.fail(f"{text!r} is not {self.wanted}", param, ctx)
        return tuple(items)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return completed(self.choices, incomplete)


def option_name(name: str) -> str:
    """Return the option that sets a parameter of a command, such as --head-dim for head_dim."""
    return f"--{name.replace('_', '-')}"


def completed(choices: Sequence[str], incomplete: str) -> list[CompletionItem]:
    """Return the lists that an incomplete list may become, each with a choice as its last item."""
    before, comma, last = incomplete.rpartition(",")
    given = before.split(",")
    return [
        CompletionItem(before + comma + choice)
        for choice in choices
        if choice.startswith(last) and choice not in given
    ]


def _bounded(low: int, high: int | None = None) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = int(text)
        if number < low or (high is not None and number > high):
            raise ValueError(text)
        return number

    return convert


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


def _one_of(*choices: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return convert


def names_list(choices: Sequence[str], what: str) -> CommaList[str]:
    """Return the option type for a list of names out of `choices`."""
    return CommaList(_one_of(*choices), f"{what} ({', '.join(choices)})", choices[0], choices)


COUNTS = CommaList(_bounded(0), "a whole number from 0", "1,2,4")
HEADS = CommaList(_bounded(1), "a whole number from 1", "8,16")
HEAD_DIMS = CommaList(
    _bounded(1, MAX_HEAD_DIM), f"a whole number from 1 to {MAX_HEAD_DIM}", "64,128"
)
LENGTHS = CommaList(_bounded(0, MAX_SEQLEN), f"a whole number from 0 to {MAX_SEQLEN}", "1024,4096")
INTEGERS = CommaList(int, "a whole number", "0,128")
FLOATS = CommaList(_finite, "a finite number", "0.125,1")
DTYPE_LIST = CommaList(
    lambda text: _one_of(*DTYPES)(dtype_name(text)),
    f"a dtype ({', '.join(DTYPES)})",
    DTYPES[0],
    (*DTYPES, *SHORT_DTYPE.values()),
)
FLAGS = CommaList(
    lambda text: _one_of("yes", "no")(text) == "yes", "yes or no", "no,yes", ("yes", "no")
)
