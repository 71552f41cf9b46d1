"""Arguments of flash_attn that have another name or form here, by their definitions.

The functions with flash_attn's own names are tested in tests/differentiable.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.pages.migration import (
    BATCH,
    DIM,
    HEADS,
    HEADS_KV,
    SEQLENS,
    arrays,
    assert_close,
    positions,
)

from cupy_flash import (
    MaskMod,
    attention_reference,
    combine,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (3, 2), (-1, 2), (3, -1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_masks_are_aligned_at_the_bottom_right(
    causal: bool, window: tuple[int, int], seqlens: tuple[int, int], rng: np.random.Generator
) -> None:
    q, k, v, _, _ = arrays(rng, *seqlens)
    i, j = positions(*seqlens)
    position = i + seqlens[1] - seqlens[0]
    left, right = (np.inf if bound < 0 else bound for bound in window)
    mask = (position - left <= j) & (j <= position + (0 if causal else right))
    found = flash_attention(q, k, v, causal=causal, window_size=window)
    assert_close(found, attention_reference(q, k, v, mask=mask))


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_a_chunk_is_a_mask_mod(seqlens: tuple[int, int], rng: np.random.Generator) -> None:
    q, k, v, _, _ = arrays(rng, *seqlens)
    i, j = positions(*seqlens)
    position = i + seqlens[1] - seqlens[0]
    begin = position - position % 4
    mask = (begin <= j) & (j < begin + 4) & (j <= position)
    chunks = MaskMod(lambda i, j: i // 4 == j // 4)
    found = flash_attention(q, k, v, causal=True, mask_mod=chunks)
    assert_close(found, attention_reference(q, k, v, mask=mask))


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_qv_is_part_of_wider_queries(seqlens: tuple[int, int], rng: np.random.Generator) -> None:
    q, k, v, _, _ = arrays(rng, *seqlens)
    qv = rng.standard_normal(q.shape, dtype=np.float32)
    groups = HEADS // HEADS_KV
    keys, values = (np.repeat(x, groups, axis=2) for x in (k, v))
    scores = sum(np.einsum("bihd,bjhd->bhij", *x) for x in ((q, keys), (qv, values)))
    scores *= (2 * DIM) ** -0.5
    i, j = positions(*seqlens)
    scores = np.where(j <= i + seqlens[1] - seqlens[0], scores, np.float32(-np.inf))
    # Queries of zeros have scores of 0, so that the bias is the scores.
    expected = attention_reference(np.zeros_like(q), k, v, bias=scores)
    wide = (np.concatenate(x, axis=3) for x in ((q, qv), (k, v)))
    assert_close(flash_attention(*wide, v, causal=True), expected)


def test_partial_results_are_merged(rng: np.random.Generator) -> None:
    q, k, v, _, _ = arrays(rng, *SEQLENS[0])
    outs, lses = zip(
        *(flash_attention(q, k[:, x], v[:, x], return_lse=True) for x in (slice(9), slice(9, 23))),
        strict=True,
    )
    out, lse = combine(outs, lses)
    whole = flash_attention(q, k, v, return_lse=True)
    assert_close(out, whole[0])
    assert_close(lse, whole[1])


def test_slices_of_packed_arrays(rng: np.random.Generator) -> None:
    qkv = rng.standard_normal((9, 3, HEADS, DIM), dtype=np.float32)
    ends = np.array([0, 4, 9], np.int32)
    found = flash_attention_varlen(*(qkv[:, n] for n in range(3)), ends, ends, 5, 5, causal=True)
    for begin, end in ((0, 4), (4, 9)):
        one = (qkv[None, begin:end, n] for n in range(3))
        assert_close(found[begin:end], attention_reference(*one, causal=True)[0])


def test_a_missing_cache_seqlens_is_the_whole_cache(rng: np.random.Generator) -> None:
    q, k, v, _, _ = arrays(rng, *SEQLENS[0])
    found = flash_attention_with_kvcache(q, k, v, cache_seqlens=k.shape[1], causal=True)
    assert_close(found, attention_reference(q, k, v, causal=True))


def test_packed_queries_attend_to_a_paged_cache(rng: np.random.Generator) -> None:
    k, v = rng.standard_normal((2, 6, 4, HEADS_KV, DIM), dtype=np.float32)
    q = rng.standard_normal((5, HEADS, DIM), dtype=np.float32)
    table, used, ends = np.array([[4, 1], [2, 5]], np.int32), (7, 3), np.array([0, 4, 5], np.int32)
    found = flash_attention_varlen(
        *(q, k, v, ends, None, 4, 8),
        causal=True,
        block_table=table,
        seqused_k=np.array(used, np.int32),
    )
    for b, length in enumerate(used):
        rows = slice(ends[b], ends[b + 1])
        keys, values = (x[table[b]].reshape(1, 8, HEADS_KV, DIM)[:, :length] for x in (k, v))
        assert_close(found[rows], attention_reference(q[None, rows], keys, values, causal=True)[0])


def test_a_learnable_sink_is_a_key_without_a_value(rng: np.random.Generator) -> None:
    q, k, v, _, _ = arrays(rng, *SEQLENS[0])
    sinks = rng.standard_normal(HEADS, dtype=np.float32)
    one = np.zeros((BATCH, 1, HEADS_KV, DIM), np.float32)
    bias: Any = np.zeros((1, HEADS, 1, 24), np.float32)
    bias[0, :, 0, 23] = sinks
    expected = attention_reference(
        *(q, *(np.concatenate([x, one], axis=1) for x in (k, v))), bias=bias
    )
    assert_close(flash_attention(q, k, v, sinks=sinks), expected)


def test_a_list_of_keys_is_a_mask(rng: np.random.Generator) -> None:
    q, k, v, _, _ = arrays(rng, *SEQLENS[0])
    mask = rng.random((BATCH, 1, *SEQLENS[0])) < 0.4
    mask[..., 0] = True
    # The first keys in this order are those that the mask keeps.
    lists = np.where(np.sort(~mask), -1, np.argsort(~mask, kind="stable")).astype(np.int32)
    found = flash_attention(q, k, v, key_indices=lists.swapaxes(1, 2))
    assert_close(found, attention_reference(q, k, v, mask=mask))
