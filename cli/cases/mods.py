"""Mask and score modifications of a case, and their spelling in options and records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cupy_flash.mods.keywords import Window, checked_dropout, checked_softcap, window_of

from .built_in import BUILT_IN

# Shapes of a bias or mask array, by what has a matrix of its own: each head; no head, so that all
# use one matrix; each head of each sequence.
SPANS = ("heads", "shared", "batch")
_NO_WINDOW = Window()


@dataclass(frozen=True)
class CaseMods:
    """Modifications of a call as plain values; none by default.

    Attributes
    ----------
    window
        Bounds of the distance from a query to the keys that it attends to.
    softcap
        Cap of the scores, as in `cupy_flash.Modifications`.
    alibi
        Whether there are ALiBi slopes: 2 ** (-8 (h + 1) / heads) for head h.
    sinks
        Whether each query head has a sink.
    bias, mask
        Shape of the bias or of the mask array, one of `SPANS`; None for no array.
    dropout
        Probability of dropout; None for no dropout. The random numbers are the same in every call.
    mod
        Name of a function in `BUILT_IN`, written as users write theirs; None for no function.
    """

    window: Window = _NO_WINDOW
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    bias: str | None = None
    mask: str | None = None
    dropout: float | None = None
    mod: str | None = None

    def __bool__(self) -> bool:
        return self != CaseMods()

    def __str__(self) -> str:
        """Return the text that `parse` reads; empty if there are no modifications."""
        result = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is True:
                result.append(field.name)
            elif value != field.default:
                result.append(f"{field.name} {_TEXTS.get(field.name, str)(value)}")
        return ", ".join(result)

    @classmethod
    def parse(cls, text: str) -> CaseMods:
        """Return the modifications of a text that `str` wrote; raise ValueError for any other."""
        result = {}
        for part in filter(None, text.split(", ")):
            name, _, value = part.partition(" ")
            if name not in PARSERS:
                raise ValueError(f"{name!r} is unknown; expected one of {', '.join(PARSERS)}")
            result[name] = PARSERS[name](value or "yes")
        return cls(**result)


PLAIN = CaseMods()


def _window_text(window: Window) -> str:
    return ":".join("" if bound is None else str(bound) for bound in window)


def _number_text(number: float) -> str:
    return repr(number).removesuffix(".0")


_TEXTS: dict[str, Callable[[Any], str]] = {
    "window": _window_text,
    "softcap": _number_text,
    "dropout": _number_text,
}


def _window(text: str) -> Window:
    """Parse LEFT:RIGHT, where either may be left out, or -1 for no window."""
    if text.strip() == "-1":
        return window_of(-1)
    left, right = (int(bound) if bound.strip() else None for bound in text.split(":"))
    return window_of((left, right))


def _softcap(text: str) -> float | None:
    """Parse a number; 0 means no softcap."""
    return checked_softcap(float(text))


def _dropout(text: str) -> float | None:
    """Parse a probability; 0 means no dropout."""
    probability = float(text)
    return None if checked_dropout(probability) is None else probability


def _yes(text: str) -> bool:
    if text != "yes":
        raise ValueError(text)
    return True


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is unknown; expected one of {', '.join(choices)}")
        return text

    return parse


# Parsers of the fields of `CaseMods`, keyed by field name.
PARSERS: dict[str, Callable[[str], Any]] = {
    "window": _window,
    "softcap": _softcap,
    "alibi": _yes,
    "sinks": _yes,
    "bias": _one_of(*SPANS),
    "mask": _one_of(*SPANS),
    "dropout": _dropout,
    "mod": _one_of(*BUILT_IN),
}
