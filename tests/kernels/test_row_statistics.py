"""Tests of `score/statistics.cuh` in `score/softmax.cuh`, run on the host, against the formula."""

from __future__ import annotations

import numpy as np
import pytest
from support.host_programs import HostProgram, needs_host_compiler

pytestmark = needs_host_compiler


def test_statistics_of_tiles_and_splits_are_those_of_the_formula(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rng = np.random.default_rng(5)
    lines, expected = [], []
    for row in range(300):
        count = int(rng.integers(1, 60))
        # Rising scores change the base in each tile. Other rows are masked, equal or very low.
        scores = rng.standard_normal(count) * rng.choice([0, 1, 30]) + np.arange(count) * (row % 3)
        scores += float(rng.choice([0, -1e9, 1e4]))
        scores[rng.random(count) < rng.choice([0, 0.3, 1])] = -np.inf
        sink = float(rng.standard_normal() * 3 + np.where(row % 2, scores.max(initial=-5), 0))
        sink, has_sink = (sink, bool(rng.integers(2))) if np.isfinite(sink) else (0.5, True)
        sizes = int(rng.integers(1, 17)), int(rng.integers(1, 5)), int(has_sink)
        numbers = " ".join(f"{x:.17g}" for x in (sink, *scores))
        lines.append(f"{count} {' '.join(map(str, sizes))} {numbers}")
        largest = max(scores.max(), sink if has_sink else -np.inf)
        base = largest if np.isfinite(largest) else 0
        total = np.exp(scores - base).sum() + (np.exp(sink - base) if has_sink else 0)
        weights = np.exp(scores - base) / total if total else np.zeros(count)
        logs = np.where(weights > 0, np.log(np.where(weights > 0, weights, 1)), 0)
        expected.append((scores.max(), -(weights * logs).sum()))
    program = HostProgram("softmax/row_statistics", tmp_path_factory)
    found = [tuple(map(float, line.split())) for line in program.output(lines).splitlines()]
    # exp of 1e9 / log(2) has no more digits in double.
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert any(entropy > 1 for _, entropy in expected)
    assert any(entropy == 0 for _, entropy in expected)
