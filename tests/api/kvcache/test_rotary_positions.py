"""Rotary positions of queries and new keys in calls with a KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_flash import apply_rotary, attention_with_kvcache_reference, flash_attention_with_kvcache

LENGTHS = np.array([0, 17, 9], np.int32)
STARTS = np.array([3, 2, 40], np.int32)
ROWS, CAPACITY, DIM = 4, 32, 16
# Options of a call, and whether query i is rotated by the first position plus i.
OPTIONS = [
    ({}, False),
    ({"softcap": 20.0}, False),
    ({"causal": True}, True),
    ({"window_size": (6, 2)}, True),
    ({"window_size": (None, 1)}, True),
    ({"window_size": (-1, -1)}, False),
]


@pytest.mark.parametrize("starts", [None, STARTS], ids=["lengths", "starts"])
@pytest.mark.parametrize(("options", "advances"), OPTIONS, ids=str)
def test_queries_with_places_are_rotated_by_their_own(
    xp: Any, options: dict[str, Any], advances: bool, starts: np.ndarray | None, rng: Any
) -> None:
    q, k, v = (xp.asarray(rng.standard_normal((3, ROWS, 2, DIM))) for _ in range(3))
    k_cache, v_cache = (xp.asarray(rng.standard_normal((3, CAPACITY, 2, DIM))) for _ in range(2))
    angles = rng.uniform(-3, 3, (64, DIM // 2))
    tables = {"rotary_cos": xp.asarray(np.cos(angles)), "rotary_sin": xp.asarray(np.sin(angles))}
    same = {"cache_seqlens": xp.asarray(LENGTHS), **options}
    given = same | tables | ({} if starts is None else {"rotary_seqlens": xp.asarray(starts)})
    reference = attention_with_kvcache_reference(q, k_cache, v_cache, k, v, **given)
    caches = k_cache.copy(), v_cache.copy()
    out = flash_attention_with_kvcache(q, *caches, k, v, **given)

    first = xp.asarray(LENGTHS if starts is None else starts)[:, None]
    steps = xp.arange(ROWS)
    turn = tables.values()
    turned_q = apply_rotary(q, *turn, first + (steps if advances else 0 * steps), interleaved=True)
    turned_k = apply_rotary(k, *turn, first + steps, interleaved=True)
    expected = flash_attention_with_kvcache(turned_q, k_cache, v_cache, turned_k, v, **same)
    for found in (reference.out, expected):
        np.testing.assert_allclose(*(_on_host(x) for x in (out, found)), rtol=0, atol=1e-13)
    np.testing.assert_allclose(_on_host(caches[0]), _on_host(k_cache), rtol=0, atol=1e-15)


def _on_host(array: Any) -> np.ndarray:
    host: np.ndarray = array.get() if hasattr(array, "get") else array
    return host


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 61, 5], r"rotary_seqlens\[1\] is 61; expected at most 60: rotary_cos has 64 rows"),
        ([-1, 2, 5], r"rotary_seqlens\[0\] is -1; expected at least 0"),
        ([1, 2], r"rotary_seqlens has shape \(2,\); expected \(3,\), one position for each"),
    ],
)
def test_positions_outside_of_the_tables_are_refused(starts: list[int], message: str) -> None:
    q = np.zeros((3, ROWS, 2, DIM))
    caches, table = np.zeros((2, 3, CAPACITY, 2, DIM)), np.zeros((64, DIM // 2))
    turn = {"rotary_cos": table, "rotary_sin": table, "rotary_seqlens": starts}
    with pytest.raises(ValueError, match=message):
        flash_attention_with_kvcache(q, *caches, q, q, cache_seqlens=LENGTHS, **turn)


def test_positions_without_tables_are_refused() -> None:
    q, caches = np.zeros((3, ROWS, 2, DIM)), np.zeros((2, 3, CAPACITY, 2, DIM))
    given = {"cache_seqlens": LENGTHS, "rotary_seqlens": STARTS}
    with pytest.raises(ValueError, match="rotary_seqlens is for rotary_cos and rotary_sin"):
        flash_attention_with_kvcache(q, *caches, q, q, **given)
