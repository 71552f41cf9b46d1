"""Masks of xFormers, by the definitions in its documentation, and their counterparts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.pages.migration import DIM, HEADS, HEADS_KV, SEQLENS, arrays, assert_close, positions

from cupy_flash import (
    attention_reference,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)

# Number of keys of a window, which includes the query itself, and its two bounds.
WINDOW, LEFT, RIGHT = 4, 3, 2
# Lengths, where no sequence has more queries than keys, and rows that each sequence's keys occupy.
LENGTHS_Q, LENGTHS_K, PADDING = (5, 1, 7), (9, 4, 7), 12
GAPPY_STARTS = (2, 13, 20, 36)
PAGE_SIZE = 4
BLOCK_TABLE = np.array([[4, 1, 0], [2, 8, 3], [7, 5, 6]], np.int32)

Mask = Callable[[int, int], np.ndarray]


def band(from_bottom_right: bool, left: float, right: float) -> Mask:
    """Return the mask with -left <= j - i - shift <= right as a function of the lengths."""

    def mask(seqlen_q: int, seqlen_k: int) -> np.ndarray:
        i, j = positions(seqlen_q, seqlen_k)
        distance = j - i - (seqlen_k - seqlen_q if from_bottom_right else 0)
        result: np.ndarray = (-left <= distance) & (distance <= right)
        return result

    return mask


TOP_LEFT, BOTTOM_RIGHT = band(False, np.inf, 0), band(True, np.inf, 0)
DENSE: dict[str, tuple[Mask, dict[str, Any]]] = {
    "LowerTriangularMask": (TOP_LEFT, {"causal": True, "q_offset": 0}),
    "LowerTriangularFromBottomRightMask": (BOTTOM_RIGHT, {"causal": True}),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        band(True, WINDOW - 1, 0),
        {"window_size": (WINDOW - 1, 0)},
    ),
    "LocalAttentionFromBottomRightMask": (
        band(True, LEFT, RIGHT),
        {"window_size": (LEFT, RIGHT)},
    ),
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_a_dense_mask(name: str, seqlens: tuple[int, int], rng: np.random.Generator) -> None:
    q, k, v, _, _ = arrays(rng, *seqlens)
    mask, options = DENSE[name]
    expected = attention_reference(q, k, v, mask=mask(*seqlens))
    assert_close(flash_attention(q, k, v, **options), expected)


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_a_tensor_is_a_bias(seqlens: tuple[int, int], rng: np.random.Generator) -> None:
    q, k, v, _, bias = arrays(rng, *seqlens)
    masked = np.where(TOP_LEFT(*seqlens), bias, np.float32(-np.inf))
    found = flash_attention(q, k, v, causal=True, q_offset=0, bias=bias)
    assert_close(found, flash_attention(q, k, v, bias=masked))
    assert_close(found, attention_reference(q, k, v, bias=masked))


def test_groups_of_heads_are_consecutive_heads(rng: np.random.Generator) -> None:
    q, k, v, _, _ = arrays(rng, *SEQLENS[0])
    groups = HEADS // HEADS_KV
    whole = [np.repeat(x, groups, axis=2) for x in (k, v)]
    # (batch, seqlen, groups, heads of a group, head_dim), whose keys are expanded.
    bmghk = q.reshape(*q.shape[:2], HEADS_KV, groups, DIM)
    expected = attention_reference(bmghk.reshape(q.shape), *whole)
    assert_close(flash_attention(q, k, v), expected)


PACKED: dict[str, tuple[Mask, dict[str, Any]]] = {
    "BlockDiagonalMask": (band(False, np.inf, np.inf), {}),
    "BlockDiagonalCausalMask": (TOP_LEFT, {"causal": True, "q_offset": np.zeros(3, np.int32)}),
    "BlockDiagonalCausalFromBottomRightMask": (BOTTOM_RIGHT, {"causal": True}),
    "BlockDiagonalCausalLocalAttentionMask": (
        band(False, WINDOW - 1, 0),
        {"window_size": (WINDOW - 1, 0), "q_offset": np.zeros(3, np.int32)},
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        band(True, WINDOW - 1, 0),
        {"window_size": (WINDOW - 1, 0)},
    ),
}
# Masks of padded, gappy and paged keys are all aligned at the bottom right.
OF_SOME_KEYS = {
    "": (band(True, np.inf, np.inf), {}),
    "CausalWithOffset": PACKED["BlockDiagonalCausalFromBottomRightMask"],
    "LocalAttention": DENSE["LocalAttentionFromBottomRightMask"],
    "CausalLocalAttention": PACKED["BlockDiagonalCausalLocalAttentionFromBottomRightMask"],
}


def ends(lengths: tuple[int, ...]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int32)


def packed(rng: np.random.Generator, total_k: int) -> list[np.ndarray]:
    shapes = (sum(LENGTHS_Q), HEADS), (total_k, HEADS_KV), (total_k, HEADS_KV)
    return [rng.standard_normal((*shape, DIM), dtype=np.float32) for shape in shapes]


def block_diagonal(mask: Mask, starts: Any, total_k: int) -> np.ndarray:
    """Return a mask of packed sequences whose keys begin at `starts`."""
    whole = np.zeros((sum(LENGTHS_Q), total_k), bool)
    begins = zip(ends(LENGTHS_Q)[:3], starts[:3], LENGTHS_Q, LENGTHS_K, strict=True)
    for row, start, seqlen_q, seqlen_k in begins:
        whole[row : row + seqlen_q, start : start + seqlen_k] = mask(seqlen_q, seqlen_k)
    return whole


def expected_of(rows: list[np.ndarray], mask: np.ndarray) -> np.ndarray:
    result: np.ndarray = attention_reference(*(x[None] for x in rows), mask=mask)[0]
    return result


@pytest.mark.parametrize("name", PACKED)
def test_a_block_diagonal_mask(name: str, rng: np.random.Generator) -> None:
    mask, options = PACKED[name]
    offsets, total = ends(LENGTHS_K), sum(LENGTHS_K)
    rows = packed(rng, total)
    found = flash_attention_varlen(*rows, ends(LENGTHS_Q), offsets, 7, 9, **options)
    assert_close(found, expected_of(rows, block_diagonal(mask, offsets, total)))


@pytest.mark.parametrize("name", OF_SOME_KEYS)
@pytest.mark.parametrize("starts", [PADDING * np.arange(4), GAPPY_STARTS], ids=["padded", "gappy"])
def test_padded_and_gappy_keys(starts: Any, name: str, rng: np.random.Generator) -> None:
    mask, options = OF_SOME_KEYS[name]
    rows = packed(rng, 3 * PADDING)
    found = flash_attention_varlen(
        *(*rows, ends(LENGTHS_Q), np.array(starts, np.int32), 7, PADDING),
        seqused_k=np.array(LENGTHS_K, np.int32),
        **options,
    )
    assert_close(found, expected_of(rows, block_diagonal(mask, starts, 3 * PADDING)))


@pytest.mark.parametrize("is_causal", [False, True])
def test_padded_keys_of_equal_numbers_of_queries(is_causal: bool, rng: np.random.Generator) -> None:
    q, k, v, _, _ = arrays(rng, 3, PADDING)
    lengths = np.array([9, 4], np.int32)
    options = {"causal": True, "q_offset": lengths - 3} if is_causal else {}
    mask = (BOTTOM_RIGHT if is_causal else OF_SOME_KEYS[""][0])(3, 9)
    alone = attention_reference(q[:1], k[:1, :9], v[:1, :9], mask=mask)
    assert_close(flash_attention(q, k, v, seqlens_k=lengths, **options)[:1], alone)


def pages(keys: np.ndarray) -> np.ndarray:
    """Return flat rows of keys as pages, in the order that `BLOCK_TABLE` restores."""
    order = np.argsort(BLOCK_TABLE.ravel())
    return keys.reshape(-1, PAGE_SIZE, *keys.shape[1:])[order]


@pytest.mark.parametrize("name", OF_SOME_KEYS)
def test_paged_keys(name: str, rng: np.random.Generator) -> None:
    mask, options = OF_SOME_KEYS[name]
    q, k, v = packed(rng, 3 * PADDING)
    found = flash_attention_varlen(
        *(q, pages(k), pages(v), ends(LENGTHS_Q), None, 7, PADDING),
        seqused_k=np.array(LENGTHS_K, np.int32),
        block_table=BLOCK_TABLE,
        **options,
    )
    whole = block_diagonal(mask, PADDING * np.arange(3), 3 * PADDING)
    assert_close(found, expected_of([q, k, v], whole))


@pytest.mark.parametrize("name", ["", "CausalWithOffset"])
def test_paged_gappy_keys(name: str, rng: np.random.Generator) -> None:
    mask, options = OF_SOME_KEYS[name]
    starts, lengths = np.array([1, 2, 0], np.int32), np.array(LENGTHS_K, np.int32)
    q = rng.standard_normal((3, 3, HEADS, DIM), dtype=np.float32)
    k, v = rng.standard_normal((2, 3, PADDING, HEADS_KV, DIM), dtype=np.float32)
    found = flash_attention_with_kvcache(
        *(q, *(pages(x.reshape(-1, HEADS_KV, DIM)) for x in (k, v))),
        cache_leftpad=starts,
        cache_seqlens=starts + lengths,
        block_table=BLOCK_TABLE,
        **options,
    )
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        seen = slice(start, start + length)
        one = attention_reference(
            *(q[b : b + 1], k[b : b + 1, seen], v[b : b + 1, seen]), mask=mask(3, length)
        )
        assert_close(found[b : b + 1], one)
