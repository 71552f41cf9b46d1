"""Row indices of sequences, compared with loops in plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_flash.reference import sequences

EXTREMES = [-(2**31), -7, -1, 0, 1, 2, 3, 5, 8, 9, 2**31 - 1]


def clamped(x: int, low: int, high: int) -> int:
    return max(low, min(x, high))


@pytest.mark.parametrize("with_lengths", [False, True])
def test_packed_spans_lie_in_the_array_whatever_the_numbers_are(rng, with_lengths):
    for _ in range(200):
        batch, total, longest = (int(rng.integers(n)) for n in (5, 9, 7))
        starts = rng.choice(EXTREMES, batch + 1).astype(np.int32)
        lengths = rng.choice(EXTREMES, batch).astype(np.int32) if with_lengths else None
        spans = sequences.packed_spans(starts, longest, total, lengths)
        assert len(spans) == batch
        for b, span in enumerate(spans):
            first = clamped(int(starts[b]), 0, total)
            end = clamped(int(starts[b + 1]), 0, total)
            count = end - first if lengths is None else int(lengths[b])
            expected = [row for row in range(first, total) if row < first + min(count, longest)]
            assert list(range(span.start, span.stop)) == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_paged_rows_follow_the_table_and_skip_pages_that_do_not_exist(rng, dtype):
    pages, page_size = 3, 4
    for _ in range(50):
        table = rng.choice(EXTREMES, int(rng.integers(5))).astype(dtype)
        expected = [
            int(page) * page_size + row if 0 <= page < pages else sequences.MISSING
            for page in table
            for row in range(page_size)
        ]
        assert sequences.paged_rows(table, pages, page_size).tolist() == expected


def test_cached_rows_are_none_of_a_cache_that_does_not_exist():
    rows = sequences.cached_rows(np.array([1, -1, 0, 2, -(2**31)]), blocks=2, capacity=3)
    assert [r.tolist() for r in rows] == [[3, 4, 5], [], [0, 1, 2], [], []]


def test_missing_rows_read_as_zeros_and_are_not_written(rng):
    blocks = rng.random((2, 3, 4, 5))
    rows = np.array([5, sequences.MISSING, 0])
    taken = sequences.take(sequences.flat(blocks), rows)
    np.testing.assert_array_equal(taken, [blocks[1, 2], np.zeros((4, 5)), blocks[0, 0]])
    before, new = blocks.copy(), rng.random((3, 4, 5))
    sequences.put(sequences.flat(blocks), rows, new)
    before[1, 2], before[0, 0] = new[0], new[2]
    np.testing.assert_array_equal(blocks, before)
    assert sequences.take(np.zeros((0, 4, 5)), np.array([sequences.MISSING])).tolist() == [
        np.zeros((4, 5)).tolist()
    ]
