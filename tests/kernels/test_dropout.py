"""Tests of `score/dropout.cuh`, run on the host and compared with `cupy_flash.dropout_mask`."""

from __future__ import annotations

import numpy as np
import pytest
from support.host_programs import HostProgram, needs_host_compiler

from cupy_flash import dropout_mask

pytestmark = needs_host_compiler


def fragments(digits: np.ndarray, columns: int) -> np.ndarray:
    """Return digits in the order of lanes and accumulators as an array of 16 rows."""
    # The axes are: row in half, pair of columns in eight; eight columns, half, column in pair.
    lanes = digits.reshape(8, 4, columns // 8, 2, 2)
    return lanes.transpose(3, 0, 2, 1, 4).reshape(16, columns)


def test_kernels_keep_the_pairs_of_the_mask(tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = np.random.default_rng(11)
    lines, expected = [], []
    for _ in range(40):
        seed, offset = rng.integers(-(2**63), 2**63, 2).tolist()
        rows_are_keys = int(rng.integers(2))
        batch, head = map(int, rng.integers(0, 3, 2))
        row, column = (16 * int(n) for n in rng.integers(0, 20, 2))
        threshold = int(rng.integers(1, 256))
        lines.append(f"{seed} {offset} {threshold} {rows_are_keys} {batch} {head} {row} {column}")
        ends = (column + 128, row + 16) if rows_are_keys else (row + 16, column + 128)
        mask = dropout_mask(batch + 1, head + 1, *ends, threshold / 256, [seed, offset])
        mask = mask[batch, head]
        expected.append((mask.T if rows_are_keys else mask)[row:, column:])
    program = HostProgram("kept_pairs", tmp_path_factory)
    for text, mask in zip(program.output(lines).split(), expected, strict=True):
        digits = np.array(list(text), int).astype(bool)
        narrow, wide, single = np.split(digits, np.cumsum([16 * 48, 16 * 128]))
        np.testing.assert_array_equal(fragments(narrow, 48), mask[:, :48])
        np.testing.assert_array_equal(fragments(wide, 128), mask)
        np.testing.assert_array_equal(single.reshape(16, 48), mask[:, :48])
