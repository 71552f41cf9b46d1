"""The benchmark of small calls on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli.benchmark_scripts import IN_CHECKOUT, script

from cupy_flash import flash_attention, flash_attention_backward

pytestmark = pytest.mark.skipif(not IN_CHECKOUT, reason="the tests stand outside a checkout")


@pytest.mark.parametrize(
    ("kind", "ours", "formula", "is_met"),
    [
        ("forward", 0.065, 0.051, True),
        ("forward", 0.067, 0.051, False),
        ("backward", 0.090, 0.051, True),
        ("backward", 0.092, 0.051, False),
        ("forward", 1.1, 1.0, True),
        ("backward", 1.2, 1.0, False),
    ],
)
def test_short_calls_may_take_some_time_and_others_a_share(
    kind: str, ours: float, formula: float, is_met: bool
) -> None:
    small = script("cpu/small_calls")
    case = small.Case(f"{kind} b1 q1 k1 d32 full", lambda: None, lambda: None)
    assert small.row_of(case, ours, formula)["is_met"] is is_met


@pytest.mark.parametrize("causal", [False, True])
def test_the_formulas_give_what_the_library_does(causal: bool, rng: Any) -> None:
    q, dout = rng.standard_normal((2, 2, 5, 3, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 9, 3, 16)).astype(np.float32)
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True, backend="cpu")
    arrays = dout, q, k, v, out, lse
    found = flash_attention_backward(*arrays, causal=causal, backend="cpu")
    np.testing.assert_allclose(script("cpu/grid").naive(q, k, v, causal), out, atol=1e-5)
    naive = script("cpu/gradients").naive(*arrays, causal)
    for gradient, expected in zip(found, naive, strict=True):
        np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_some_cases_are_timed_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small, record = script("cpu/small_calls"), tmp_path / "record.json"
    argv = ["small_calls.py", "--only", "b1 q8 k1 d32", "--output", str(record)]
    monkeypatch.setattr("sys.argv", argv)
    small.main()
    rows = json.loads(record.read_text())["rows"]
    assert [row["case"] for row in rows] == [
        f"{kind} b1 q8 k1 d32 {mask}"
        for mask in ("full", "causal")
        for kind in ("forward", "backward")
    ]
    assert "forward: 2 cases" in capsys.readouterr().out
