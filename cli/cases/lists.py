"""The comma-separated lists that options take: what a command sweeps over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import click

from cupy_flash.problem.arrays import DTYPES

from .cases import dtype_name

T = TypeVar("T")


class CommaList(click.ParamType, Generic[T]):
    """Values separated by commas."""

    name = "list"

    def __init__(self, item: Callable[[str], T], what: str, example: str) -> None:
        self.item, self.what, self.example = item, what, example

    @property
    def wanted(self) -> str:
        """A value of the list, and an example of one."""
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


def _bounded(low: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if (number := int(text)) < low:
            raise ValueError(text)
        return number

    return convert


def _one_of(*choices: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return convert


_YES_NO = {"yes": True, "no": False}


def _yes_no(text: str) -> bool:
    if text not in _YES_NO:
        raise ValueError(text)
    return _YES_NO[text]


def names_list(choices: Sequence[str], what: str) -> CommaList[str]:
    """A list of names out of `choices`."""
    return CommaList(_one_of(*choices), f"{what} ({', '.join(choices)})", choices[0])


COUNTS = CommaList(_bounded(0), "a whole number from 0", "1,2,4")
HEADS = CommaList(_bounded(1), "a whole number from 1", "8,16")
INTEGERS = CommaList(int, "a whole number", "0,128")
FLOATS = CommaList(float, "a number", "0.125,1")
DTYPE_LIST = CommaList(
    lambda text: _one_of(*DTYPES)(dtype_name(text)), f"a dtype ({', '.join(DTYPES)})", DTYPES[0]
)
FLAGS = CommaList(_yes_no, "yes or no", "no,yes")
