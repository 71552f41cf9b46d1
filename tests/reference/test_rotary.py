"""Rotary embedding of the reference, compared with products of complex numbers."""

from __future__ import annotations

import cmath

import numpy as np
import pytest

from cupy_flash.reference.rotary import rotated


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_turn_as_complex_numbers(rng, interleaved):
    batch, seqlen, heads, head_dim, half, table = 2, 3, 2, 11, 4, 6
    x = rng.normal(size=(batch, seqlen, heads, head_dim)).astype(np.float32)
    angles = rng.normal(size=(table, half))
    positions = rng.integers(-3, table + 3, (batch, seqlen))
    result = rotated(x, np.cos(angles), np.sin(angles), positions, interleaved=interleaved)
    assert result.dtype == np.float64
    expected = x.astype(np.float64)
    for b, row, h, p in np.ndindex(batch, seqlen, heads, half):
        first, second = (2 * p, 2 * p + 1) if interleaved else (p, p + half)
        angle = angles[min(max(int(positions[b, row]), 0), table - 1), p]
        number = complex(x[b, row, h, first], x[b, row, h, second]) * cmath.exp(1j * angle)
        expected[b, row, h, first], expected[b, row, h, second] = number.real, number.imag
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-14)
