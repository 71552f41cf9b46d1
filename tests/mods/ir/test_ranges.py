"""Ranges of scores that do not depend on queries and keys: never too narrow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupy_flash import ScoreMod
from cupy_flash.mods.ir.analysis import value_range

RANGES = {
    "tanh": (lambda score: 30 * np.tanh(score / 30), (-30, 30)),
    "a captured cap": (lambda score, cap: cap * np.tanh(score / cap), (-7, 7)),
    "clip": (lambda score: np.clip(score, -20, 5), (-20, 5)),
    "one side": (lambda score: np.minimum(score, 4.0), (-math.inf, 4)),
    "either": (lambda score, i, j: np.where(i > j, np.sin(score), 3.0) - 1, (-2, 2)),
    "negative factor": (lambda score: -2 * np.tanh(score) + 0.5, (-1.5, 2.5)),
    "product": (lambda score, j: np.tanh(score) * np.clip(j * 1.0, -3, 2), (-2, 2)),
    "unknown": (lambda score: score * 2, (-math.inf, math.inf)),
    "zero times": (lambda score: 0 * np.exp(score), (-math.inf, math.inf)),
    "an array": (lambda score, h, table: np.tanh(score) + table[h], (-math.inf, math.inf)),
}
CAPTURES: dict[str, dict[str, Any]] = {
    "a captured cap": {"cap": 7.0},
    "an array": {"table": np.ones(3, np.float32)},
}


@pytest.mark.parametrize("name", RANGES)
def test_a_score_does_not_leave_its_range(name: str, rng: np.random.Generator) -> None:
    function, expected = RANGES[name]
    captures = CAPTURES.get(name, {})
    traced = ScoreMod(function, **captures).traced
    low, high = value_range(traced.expression, captures)
    assert (low, high) == expected
    score = rng.standard_normal(500) * rng.choice([1, 100, 1e300], 500)
    named = dict(zip("hij", rng.integers(0, 3, (3, 500)), strict=True), score=score)
    taken = function.__code__.co_varnames[: function.__code__.co_argcount]
    with np.errstate(over="ignore", invalid="ignore"):
        found = function(**{n: x for n, x in (named | captures).items() if n in taken})
    found = found[~np.isnan(found)]
    assert np.all((low <= found) & (found <= high))
