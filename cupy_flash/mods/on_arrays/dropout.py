"""Random mask of dropout, on NumPy or CuPy arrays: which weights of a call are kept.

The random numbers are those of Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", 2011): ten rounds of multiplications turn a counter of four 32-bit words and a key of two
into four random words. The key is that of the call, and the counter that of 16 pairs of queries and
keys, each of which has one byte of the words. Queries (2a, 2a + 1, 2a + 8, 2a + 9) and as many keys
of a square of 16 queries and 16 keys share a counter: these are the pairs that one thread holds in
the tiles of tensor-core products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_flash.mods.on_arrays.bound_modifications import Dropout

# Number of queries and keys of a square of pairs, and of its counters along each axis.
_SQUARE = 16
_COUNTERS = 4

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
# Increments of the key after each round.
_INCREMENTS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
# Odd factor by which an offset is spread over the bits of the key.
_OFFSET_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Key(NamedTuple):
    """Key of the random numbers: two 32-bit words as uint64 arrays of one element."""

    low: Any
    high: Any

    @classmethod
    def of(cls, dropout_seed: Any) -> Key:
        """Return the key for an int64 array of a seed and an offset, which may be on a GPU."""
        bits = dropout_seed.view(np.uint64)
        mixed = bits[:1] ^ (bits[1:] * _OFFSET_FACTOR)
        return cls(mixed & _WORD, mixed >> _HALF)


def key_of(dropout: Dropout) -> Key:
    """Return the key of a call whose seed is in host memory."""
    return Key.of(np.array([dropout.seed, dropout.offset], np.int64))


def philox(counter: tuple[Any, Any, Any, Any], key: Key) -> list[Any]:
    """Return the four random words of each counter, as uint64 arrays below 2^32.

    The words of the counter are uint64 arrays that broadcast against each other.
    """
    first, second, third, fourth = counter
    low, high = key
    for _ in range(_ROUNDS):
        # As long as words are the same along an axis, these arrays have length 1 there.
        product, other = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, third = _mixed(other, second, low), _mixed(product, fourth, high)
        other &= _WORD
        product &= _WORD
        second, fourth = other, product
        low, high = (low + _INCREMENTS[0]) & _WORD, (high + _INCREMENTS[1]) & _WORD
    return [first, second, third, fourth]


def _mixed(product: Any, word: Any, key: Any) -> Any:
    """Return the upper word of a product XOR a word of the counter XOR a word of the key."""
    result = (product >> _HALF) ^ word
    result ^= key
    return result


def kept_pairs(
    threshold: int, key: Key, b: Any, h: Any, rows: slice, keys: slice, xp: Any = np
) -> Any:
    """Return which weights are kept, a bool array (..., rows, keys).

    Parameters
    ----------
    threshold
        Probability of dropout in steps of 1 / 256.
    key
        Key of the call.
    b, h
        Indices of sequences and query heads. Together they broadcast to the leading axes of the
        result.
    rows, keys
        Queries and keys of each sequence, as ranges of indices in the sequence.
    xp
        Module of the arrays, NumPy or CuPy.
    """
    of_rows, of_keys = _counters(rows, xp), _counters(keys, xp)
    sequence, head = (xp.asarray(index).astype(np.uint64)[..., None, None] for index in (b, h))
    words = philox((of_rows[:, None], of_keys, head, sequence), key)
    *outer, _, _ = shape = np.broadcast_shapes(*(word.shape for word in words))
    # Little-endian words, so that byte 0 is the lowest one on every machine.
    bits = xp.empty((*shape, len(words)), "<u4")
    for number, word in enumerate(words):
        bits[..., number] = word
    kept = bits.view(np.uint8) >= np.uint8(threshold)
    # Axes: squares of rows, pairs of rows, squares of keys, pairs of keys, word (row, key of the
    # pair), byte (halves of the square). The result has rows and keys in ascending order.
    squares = shape[-2] // _COUNTERS, shape[-1] // _COUNTERS
    kept = kept.reshape(*outer, squares[0], _COUNTERS, squares[1], _COUNTERS, 2, 2, 2, 2)
    first = len(outer)
    order = (first + axis for axis in (0, 6, 1, 4, 2, 7, 3, 5))
    whole = kept.transpose(*range(first), *order).reshape(
        *outer, squares[0] * _SQUARE, squares[1] * _SQUARE
    )
    return whole[..., _within(rows), _within(keys)]


def _counters(span: slice, xp: Any) -> Any:
    """Return the words of the counters along one axis, for all squares that a range touches."""
    first, end = span.start // _SQUARE, -(-span.stop // _SQUARE)
    return xp.arange(first * _COUNTERS, end * _COUNTERS, dtype=np.uint64)


def _within(span: slice) -> slice:
    """Return a range relative to the first square that it touches."""
    begin = span.start // _SQUARE * _SQUARE
    return slice(span.start - begin, span.stop - begin)
