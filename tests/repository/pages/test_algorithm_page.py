"""The worked example of docs/engineering/algorithm.md: its code gives the page's numbers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT

from cupy_flash import attention_reference, combine

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

PAGE = (CHECKOUT / "docs" / "engineering" / "algorithm.md").read_text(encoding="utf-8")
QUERY, KEYS, VALUES = np.ones(1), np.array([1.0, 2, 4, 3])[:, None], np.array([10.0, 20, 30, 40])


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Names that the page's code defines."""
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, found)
    return found


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the page's table whose first line starts with `heading`."""
    lines = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in lines]


def digits(*values: float) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def test_the_table_of_steps_is_what_the_code_gives(names: dict[str, Any]) -> None:
    out, lse, steps = names["online_attention"](QUERY, KEYS, VALUES, 2)
    expected = [
        [
            ", ".join(f"{x:g}" for x in scores),
            f"{m:g}",
            digits(alpha),
            digits(*p),
            *map(digits, sums),
        ]
        for scores, m, alpha, p, *sums in steps
    ]

    assert [cells[1:] for cells in rows("| tile |")] == expected
    assert f"out = acc / l = {digits(out)} and lse = m + log(l) = {digits(lse)}" in PAGE


def test_the_example_agrees_with_the_formula_and_the_library(names: dict[str, Any]) -> None:
    out, lse, _ = names["online_attention"](QUERY, KEYS, VALUES, 2)
    q, k, v = (x.reshape(1, -1, 1, 1) for x in (QUERY, KEYS, VALUES))
    reference, reference_lse = attention_reference(q, k, v, return_lse=True)
    weights = np.exp(KEYS[:, 0]) / np.exp(KEYS).sum()

    np.testing.assert_allclose([out, lse], [reference.item(), reference_lse.item()], rtol=1e-14)
    np.testing.assert_allclose([names["out"].item(), names["lse"].item()], [out, lse], rtol=1e-6)
    assert f"= ({digits(*weights)})" in PAGE
    assert " + ".join(f"{w:.4f} × {x:g}" for w, x in zip(weights, VALUES, strict=True)) in PAGE


def test_the_table_of_parts_is_what_the_code_gives_and_what_combine_merges(
    names: dict[str, Any],
) -> None:
    halves = [slice(0, 2), slice(2, 4)]
    parts = [names["online_attention"](QUERY, KEYS[h], VALUES[h], 2)[:2] for h in halves]
    largest = max(lse for _, lse in parts)
    weights = [np.exp(lse - largest) for _, lse in parts]
    merged = sum(w * out for w, (out, _) in zip(weights, parts, strict=True)) / sum(weights)

    assert [cells[1:] for cells in rows("| part |")] == [
        [digits(out), digits(lse), digits(weight)]
        for (out, lse), weight in zip(parts, weights, strict=True)
    ]
    lse = largest + np.log(sum(weights))
    sums = f"lse = {digits(largest)} + log({digits(sum(weights))}) = {digits(lse)}"
    assert f"({digits(weights[0])} + {digits(weights[1])}) = {digits(merged)}, and {sums}" in PAGE

    outs, lses = (np.array(x).reshape(2, 1, 1, 1) for x in zip(*parts, strict=True))
    library, library_lse = combine(outs[..., None], lses)
    np.testing.assert_allclose([library.item(), library_lse.item()], [merged, lse], rtol=1e-14)


def test_any_tile_gives_the_same(names: dict[str, Any]) -> None:
    q, k, v = (np.random.default_rng(0).standard_normal(shape) for shape in (8, (37, 8), (37, 5)))
    reference = attention_reference(
        *(x.reshape(1, -1, 1, x.shape[-1]) for x in (q[None], k, v)), softmax_scale=1.0
    )

    for tile in (1, 2, 7, 37, 64):
        out, _, _ = names["online_attention"](q, k, v, tile)
        np.testing.assert_allclose(out, reference[0, 0, 0], rtol=1e-12)
