"""The random mask of dropout: known answers, the reference's mask, and its statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gradients import gradient_oracle

from cupy_flash import dropout_mask
from cupy_flash.mods.on_arrays.bound_modifications import Dropout
from cupy_flash.mods.on_arrays.dropout import Key, kept_pairs, key_of, philox
from cupy_flash.mods.on_arrays.scores import Pairs
from cupy_flash.reference import dropout as reference

ONES = 0xFFFFFFFF
# Counter, key and result, from the known-answer vectors of Random123 (Salmon et al. 2011).
KNOWN_ANSWERS = [
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip
LOWEST, HIGHEST = -(2**63), 2**63 - 1


def of_library(counter: list[np.ndarray], low: int, high: int) -> list[np.ndarray]:
    return philox(tuple(counter), Key(np.array([low], np.uint64), np.array([high], np.uint64)))


@pytest.mark.parametrize("function", [of_library, reference._philox])
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(
    function: Callable[..., list[np.ndarray]],
    counter: tuple[int, ...],
    key: tuple[int, int],
    expected: tuple[int, ...],
) -> None:
    found = function([np.array([word], np.uint64) for word in counter], *key)
    assert [int(word[0]) for word in found] == list(expected)


def random_span(rng: np.random.Generator) -> slice:
    first = int(rng.choice([0, rng.integers(100), 2**20 + rng.integers(100)]))
    return slice(first, first + int(rng.choice([0, 1, 15, 16, 17, 70])))


def test_the_mask_of_any_ranges_is_that_of_the_reference(rng: np.random.Generator) -> None:
    for _ in range(200):
        rows, keys = random_span(rng), random_span(rng)
        seed, offset = (
            int(rng.choice([0, 1, -1, LOWEST, HIGHEST, rng.integers(LOWEST, HIGHEST)]))
            for _ in range(2)
        )
        dropout = Dropout(int(rng.integers(1, 256)), seed, offset)
        b, h = rng.integers(0, 1000, (2, 1)), rng.integers(0, 100, 3)
        found = kept_pairs(dropout.threshold, key_of(dropout), b, h, rows, keys)
        i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
        pairs = Pairs(b[..., None, None], h[:, None, None], i, j)
        expected = reference.random_bytes(dropout, pairs) >= dropout.threshold
        np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))
        if i.size and j.size:
            at = gradient_oracle.At(int(b[1, 0]), int(h[2]), i, j[None])
            kept = gradient_oracle.random_bytes(at, seed, offset) >= dropout.threshold
            np.testing.assert_array_equal(found[1, 2], kept)


def test_the_mask_is_that_of_the_definition_pair_by_pair() -> None:
    seed, offset, threshold = -5, 7, 77
    mask = dropout_mask(2, 3, 35, 19, threshold / 256, [seed, offset])
    bits = 2**64 - 1
    key = (seed & bits) ^ (offset * 0x9E3779B97F4A7C15 & bits)
    for b, h, i, j in np.ndindex(*mask.shape):
        counter = [i // 16 * 4 + i % 8 // 2, j // 16 * 4 + j % 8 // 2, h, b]
        words = of_library([np.array([x], np.uint64) for x in counter], key & ONES, key >> 32)
        word = int(words[2 * (i % 2) + j % 2][0])
        byte = word >> (8 * (2 * (i % 16 // 8) + j % 16 // 8)) & 255
        assert mask[b, h, i, j] == (byte >= threshold)


def assert_random(masks: int, size: int, rng: np.random.Generator) -> None:
    """Assert that means of masks are within 5 standard deviations of the exact probability.

    Means are those of all bits, of each place in a square of 16 x 16 pairs, and of the agreement
    of neighbouring pairs, heads, sequences, seeds and offsets.
    """
    shape = 2, 2, size, size
    for p in rng.permutation([0.1, 0.5, 0.9, 1 / 256, 255 / 256])[:masks]:
        dropped = min(max(round(256 * p), 1), 255) / 256
        seed, offset = rng.integers(LOWEST, HIGHEST, 2).tolist()
        mask = dropout_mask(*shape, p, [seed, offset])
        squares = mask.reshape(4, size // 16, 16, size // 16, 16)
        _assert_mean(mask, 1 - dropped)
        for row, key in np.ndindex(16, 16):
            _assert_mean(squares[:, :, row, :, key], 1 - dropped)
        same = dropped**2 + (1 - dropped) ** 2
        for axis in range(4):
            _assert_mean(mask.take(0, axis) == mask.take(1, axis), same)
        _assert_mean(mask[:, :, :, 1:] == mask[:, :, :, :-1], same, pairs=True)
        for other in ([seed + 1, offset], [seed, offset + 1]):
            _assert_mean(mask == dropout_mask(*shape, p, other), same)


def _assert_mean(bits: np.ndarray, expected: float, *, pairs: bool = False) -> None:
    # Agreements of overlapping pairs are not independent: their variance is at most three times as
    # large.
    deviation = np.sqrt((3 if pairs else 1) * expected * (1 - expected) / bits.size)
    assert abs(bits.mean() - expected) <= 5 * deviation + 1 / bits.size


def test_bits_are_random() -> None:
    # Fixed seeds, because one of about 300 means is beyond 5 deviations in one of 5,000 runs.
    assert_random(3, 1024, np.random.default_rng(5))


@pytest.mark.slow
def test_400_million_bits_are_random() -> None:
    for seed in range(4):
        assert_random(5, 2560, np.random.default_rng(seed))


def test_any_form_of_the_seed_gives_the_same_mask() -> None:
    shape: Any = (1, 2, 20, 30)
    expected = dropout_mask(*shape, 0.4, 7)
    forms = (
        np.int64(7), np.uint8(7), [7, 0], (7, np.int32(0)), np.array([7, 0]),
        np.array([7, 0], np.int16), np.array([7, 9, 0])[::2], np.array([7, 0], np.uint64),
    )  # fmt: skip
    for seed in forms:
        np.testing.assert_array_equal(dropout_mask(*shape, 0.4, seed), expected)
    whole = dropout_mask(*shape, 0.4, 2**64 - 1)
    np.testing.assert_array_equal(dropout_mask(*shape, 0.4, -1), whole)
    np.testing.assert_array_equal(
        dropout_mask(*shape, 0.4, np.array([2**64 - 1, 0], np.uint64)), whole
    )


def test_a_smaller_mask_is_part_of_a_larger_one() -> None:
    mask = dropout_mask(3, 4, 50, 70, 0.5, 1)
    np.testing.assert_array_equal(dropout_mask(2, 1, 33, 17, 0.5, 1), mask[:2, :1, :33, :17])
    more = dropout_mask(3, 4, 50, 70, 0.4, 1)
    assert (more | ~mask).all()
    assert dropout_mask(3, 4, 50, 70, 0, 1).all()
    assert dropout_mask(0, 4, 50, 0, 0.3, 1).shape == (0, 4, 50, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, 1, 1, 1, 0.1, 1), ValueError, "batch is -1; expected at least 0"),
        ((1, 1.5, 1, 1, 0.1, 1), TypeError, "heads_q is 1.5; expected an integer"),
        ((1, 1, 1, 1, 1.0, 1), ValueError, "dropout_p is 1; expected a number from 0 to below 1"),
        ((1, 1, 1, 1, 0.1, 0.5), TypeError, "dropout_seed is 0.5; expected an integer"),
        ((1, 1, 1, 1, 0.1, np.zeros(2)), TypeError, "dropout_seed has dtype float64"),
        ((1, 1, 1, 1, 0.1, np.zeros(1, int)), ValueError, r"expected \(2,\), the seed and the"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dropout_mask(*arguments)
