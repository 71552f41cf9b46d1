"""Selection of the random draws that run with the quick tests."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def few_then_slow(values: Iterable[object], quick: int) -> list[object]:
    """Return parameters of a test, of which all but the first `quick` are marked slow."""
    return [
        value if number < quick else pytest.param(value, marks=pytest.mark.slow)
        for number, value in enumerate(values)
    ]
