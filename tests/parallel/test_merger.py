"""Merging of partial results over parts of the keys, a few at a time."""

from __future__ import annotations

import numpy as np
import pytest
from support.calls.combine_support import assert_merged, random_parts

import cupy_flash
from cupy_flash.parallel.merger import Merger

# Sums of at most 80 weighted parts cancel. Each of their roundings is at most 2^-53 times 4.
ATOL = 80 * 4 * 2.0**-53


def merged(parts: np.ndarray, lses: np.ndarray) -> Merger:
    """Return a merger that has all parts."""
    merger = Merger(parts.shape[1:], parts.dtype, len(parts), np)
    for part, lse in zip(parts, lses, strict=True):
        out, out_lse = merger.add(is_unsplit=False)
        out[...], out_lse[...] = part, lse
    return merger


@pytest.mark.parametrize("count", [1, 2, 8, 9, 64, 65, 80])
def test_any_number_of_parts_is_merged_as_at_once(count: int, rng: np.random.Generator) -> None:
    parts, lses = random_parts(rng, "float64", (count, 2, 7, 3, 8))
    out, lse = merged(parts, lses).result(None)
    if count <= 8:
        assert_merged(out, lse, parts, lses)
    expected, expected_lse = cupy_flash.combine(parts, lses)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=ATOL)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=ATOL)


def test_rows_that_no_part_has_are_zero_and_see_nothing() -> None:
    merger = Merger((1, 4, 2, 8), np.dtype(np.float32), 1, np)
    out, lse = merger.add(is_unsplit=False)
    out[...] = np.nan
    out[:, 2:], lse[:, :, 2:] = 1, 0
    merged, merged_lse = merger.result(None)
    assert not merged[:, :2].any()
    assert (merged_lse[:, :, :2] == -np.inf).all()
    assert (merged[:, 2:] == 1).all()


def test_sinks_count_once_however_many_parts_there_are(rng: np.random.Generator) -> None:
    parts, lses = random_parts(rng, "float64", (11, 1, 5, 2, 4), unseen=0)
    sinks = rng.standard_normal(2)
    expected, expected_lse = cupy_flash.combine(parts, lses, sinks=sinks)
    out, lse = merged(parts, lses).result(sinks)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=ATOL)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=ATOL)
