"""What a case does to its scores and hides of its keys, and how options and records spell that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cupy_flash.mods.keywords import Window, checked_softcap, window_of

from .built_in import BUILT_IN

# Which axes an array over all pairs has besides rows and keys: of heads, none, of sequences too.
SPANS = ("heads", "shared", "batch")
_NO_WINDOW = Window()


@dataclass(frozen=True)
class Mods:
    """Modifications of a call as plain values; nothing by default.

    Attributes
    ----------
    window
        Bounds of the distance from a query to the keys that it sees.
    softcap
        As in `cupy_flash.Modifications`.
    alibi
        Whether there are slopes: 2 ** (-8 (h + 1) / heads).
    sinks
        Whether each head has one.
    bias, mask
        One of `SPANS`: the shape of the array of that name.
    mod
        One of `BUILT_IN`: a function as a user writes it.
    """

    window: Window = _NO_WINDOW
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    bias: str | None = None
    mask: str | None = None
    mod: str | None = None

    def __bool__(self) -> bool:
        return self != Mods()

    def __str__(self) -> str:
        """As `parse` reads it; empty for nothing."""
        found = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is True:
                found.append(field.name)
            elif value != field.default:
                found.append(f"{field.name} {_TEXTS.get(field.name, str)(value)}")
        return ", ".join(found)

    @classmethod
    def parse(cls, text: str) -> Mods:
        """The inverse of `str`.

        Raises
        ------
        ValueError
            For another text.
        """
        found = {}
        for part in filter(None, text.split(", ")):
            name, _, value = part.partition(" ")
            if name not in PARSERS:
                raise ValueError(f"{name!r} is none of {', '.join(PARSERS)}")
            found[name] = PARSERS[name](value or "yes")
        return cls(**found)


PLAIN = Mods()


def _window_text(window: Window) -> str:
    return ":".join("" if bound is None else str(bound) for bound in window)


def _softcap_text(softcap: float) -> str:
    return repr(softcap).removesuffix(".0")


_TEXTS: dict[str, Callable[[Any], str]] = {"window": _window_text, "softcap": _softcap_text}


def _window(text: str) -> Window:
    """LEFT:RIGHT, of which one may be left out; or -1, which has no bounds."""
    if text.strip() == "-1":
        return window_of(-1)
    left, right = (int(bound) if bound.strip() else None for bound in text.split(":"))
    return window_of((left, right))


def _softcap(text: str) -> float | None:
    """A number, or 0, which is no cap."""
    return checked_softcap(float(text))


def _yes(text: str) -> bool:
    if text != "yes":
        raise ValueError(text)
    return True


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is none of {', '.join(choices)}")
        return text

    return parse


# From a field's text to its value.
PARSERS: dict[str, Callable[[str], Any]] = {
    "window": _window,
    "softcap": _softcap,
    "alibi": _yes,
    "sinks": _yes,
    "bias": _one_of(*SPANS),
    "mask": _one_of(*SPANS),
    "mod": _one_of(*BUILT_IN),
}
