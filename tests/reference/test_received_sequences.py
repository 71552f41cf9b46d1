"""Sums of attention weights over the queries of packed and cached sequences, on the CPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.calls.received_calls import KINDS, random_received_call
from support.draws import few_then_slow
from support.foreign import Foreign

from cupy_flash import (
    UnsupportedError,
    attention_received,
    attention_received_varlen,
    attention_received_with_kvcache,
    flash_attention_with_kvcache,
)

HEADS, HEADS_KV, DIM = 4, 2, 6
Generator = np.random.Generator


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", few_then_slow(range(24), 4))
def test_sums_are_those_of_the_output_for_an_identity(
    kind: str, number: int, rng: Generator
) -> None:
    dtype = str(rng.choice(["float16", "bfloat16", "float32", "float64"]))
    call = random_received_call(rng, dtype, kind, head_dims=(3, 8), longest=(40, 60))
    found = call.run(np)
    assert found.dtype == call.lse.dtype
    eps = float(np.finfo(found.dtype).eps)
    np.testing.assert_allclose(found, call.exact, rtol=2 * eps, atol=1e-12, err_msg=str(call))


def random_packed(rng: Generator, seqlens: list[tuple[int, int]]) -> tuple[Any, ...]:
    """Return q, k and the lengths of a packed call of sequences with these queries and keys."""
    ends = [np.concatenate([[0], np.cumsum(counts)]) for counts in zip(*seqlens, strict=True)]
    q = rng.standard_normal((ends[0][-1] + 2, HEADS, DIM))
    k = rng.standard_normal((ends[1][-1] + 3, HEADS_KV, DIM))
    return q, k, *ends, *np.max(seqlens, axis=0).tolist()


@pytest.mark.parametrize(
    "queries", [None, slice(-3, None), slice(2, 100), slice(-2, -1), slice(3, -3), slice(5, 2)]
)
def test_queries_are_counted_within_each_sequence(queries: slice | None, rng: Generator) -> None:
    seqlens = [(7, 9), (2, 5), (0, 4), (4, 0), (6, 6)]
    q, k, *lengths = random_packed(rng, seqlens)
    found = attention_received_varlen(q, k, *lengths, queries=queries, causal=True)
    assert found.shape == (HEADS, len(k))
    for b, (rows, keys) in enumerate(seqlens):
        first_row, first_key = (ends[b] for ends in lengths[:2])
        own = q[first_row : first_row + rows], k[first_key : first_key + keys]
        expected = attention_received(*own, queries=queries, causal=True)
        result = found[:, first_key : first_key + keys]
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-14)
    # The last rows belong to no sequence.
    assert not found[:, -3:].any()


def test_only_used_queries_count(rng: Generator) -> None:
    q, k, *lengths = random_packed(rng, [(7, 9), (5, 5), (3, 4)])
    used = [4, 0, 3]
    found = attention_received_varlen(
        q, k, *lengths, seqused_q=used, queries=slice(-2, None), causal=True
    )
    # The last used query is aligned with the last key.
    expected = attention_received(q[:4], k[:9], queries=slice(-2, None), causal=True)
    np.testing.assert_allclose(found[:, :9], expected, rtol=0, atol=1e-14)
    assert not found[:, 9:14].any()
    np.testing.assert_allclose(found[:, 14:18].sum(axis=1), 2, rtol=1e-14)


def paged(cache: np.ndarray, page_size: int, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a cache in pages of random order, and the block table."""
    batch, capacity = cache.shape[:2]
    pages = cache.reshape(batch * (capacity // page_size), page_size, *cache.shape[2:])
    order = rng.permutation(len(pages))
    table = np.argsort(order).reshape(batch, -1)
    return pages[order], table.astype(np.int32)


@pytest.mark.parametrize("page_size", [1, 5, 15, 30])
def test_pages_and_chosen_caches_hold_the_same_keys(page_size: int, rng: Generator) -> None:
    q = rng.standard_normal((3, 2, HEADS, DIM))
    cache = rng.standard_normal((3, 30, HEADS_KV, DIM))
    lengths = [30, 0, 17]
    found = attention_received_with_kvcache(q, cache, cache_seqlens=lengths, causal=True)
    assert found.shape == (3, HEADS, 30)
    for b, length in enumerate(lengths):
        expected = attention_received(q[b], cache[b, :length], causal=True)
        np.testing.assert_allclose(found[b, :, :length], expected, rtol=0, atol=1e-14)
        assert not found[b, :, length:].any()
    pages, table = paged(cache, page_size, rng)
    of_pages = attention_received_with_kvcache(
        q, pages, cache_seqlens=lengths, block_table=table, causal=True
    )
    np.testing.assert_array_equal(of_pages, found)
    order = [2, 0, 1]
    chosen = attention_received_with_kvcache(
        *(q[order], cache),
        cache_seqlens=np.array(lengths)[order],
        cache_batch_idx=order,
        causal=True,
    )
    np.testing.assert_array_equal(chosen, found[order])


def test_one_length_serves_all_sequences(rng: Generator) -> None:
    q, cache = rng.standard_normal((2, 1, HEADS, DIM)), rng.standard_normal((2, 9, HEADS_KV, DIM))
    found = attention_received_with_kvcache(q, cache, cache_seqlens=7, grouped=True)
    each = attention_received_with_kvcache(q, cache, cache_seqlens=[7, 7], grouped=True)
    np.testing.assert_array_equal(found, each)
    np.testing.assert_allclose(found.sum(axis=-1), HEADS // HEADS_KV, rtol=1e-14)


def test_decoding_steps_add_up_to_the_sums_of_all_queries(rng: Generator) -> None:
    q, k = rng.standard_normal((2, 6, HEADS, DIM)), rng.standard_normal((2, 6, HEADS_KV, DIM))
    k_cache, v_cache = np.zeros((2, 2, 8, HEADS_KV, DIM))
    total = np.zeros((2, HEADS, 8))
    for step in range(6):
        row = slice(step, step + 1)
        _, lse = flash_attention_with_kvcache(
            *(q[:, row], k_cache, v_cache, k[:, row], k[:, row]),
            cache_seqlens=step,
            return_lse=True,
            backend="cpu",
        )
        total += attention_received_with_kvcache(
            q[:, row], k_cache, cache_seqlens=step + 1, lse=lse
        )
    expected = attention_received(q, k, causal=True)
    np.testing.assert_allclose(total[:, :, :6], expected, rtol=0, atol=1e-14)
    assert not total[:, :, 6:].any()


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
def test_keys_of_8_bits_are_multiplied_by_their_scales(dtype: Any, rng: Generator) -> None:
    q = rng.standard_normal((2, 3, HEADS, DIM)).astype(np.float16)
    stored = (8 * rng.standard_normal((2, 9, HEADS_KV, DIM))).astype(dtype)
    scale = (0.1 + rng.random((2, 9, HEADS_KV))).astype(np.float32)
    keys = stored.astype(np.float64) * scale[..., None]
    expected = attention_received(q.astype(np.float64), keys)
    found = attention_received_with_kvcache(q, stored, cache_seqlens=9, k_scale=scale)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    ends = [0, 3, 6], [0, 9, 18]
    packed = attention_received_varlen(
        *(q.reshape(6, HEADS, DIM), stored.reshape(18, HEADS_KV, DIM), *ends, 3, 9),
        k_scale=scale.reshape(18, HEADS_KV),
    )
    np.testing.assert_array_equal(packed, found.swapaxes(0, 1).reshape(HEADS, 18))


def test_arrays_of_another_library_are_taken_and_given_back(rng: Generator) -> None:
    q, k, *lengths = random_packed(rng, [(3, 4), (2, 5)])
    found = attention_received_varlen(Foreign(q), Foreign(k), *lengths)
    assert isinstance(found, Foreign)
    np.testing.assert_array_equal(found.array, attention_received_varlen(q, k, *lengths))


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_empty_sizes_give_zeros(shape: tuple[int, int, int]) -> None:
    batch, seqlen_q, keys = shape
    q, cache = np.ones((batch, seqlen_q, HEADS, DIM)), np.ones((batch, keys, HEADS_KV, DIM))
    found = attention_received_with_kvcache(q, cache, cache_seqlens=keys)
    np.testing.assert_array_equal(found, np.zeros((batch, HEADS, keys)))
    ends = [np.arange(batch + 1) * n for n in (seqlen_q, keys)]
    packed = q.reshape(-1, HEADS, DIM), cache.reshape(-1, HEADS_KV, DIM)
    found = attention_received_varlen(*packed, *ends, seqlen_q, keys, grouped=True)
    np.testing.assert_array_equal(found, np.zeros((HEADS_KV, batch * keys)))


Q, K = np.ones((2, 3, HEADS, DIM)), np.ones((2, 5, HEADS_KV, DIM))
CACHED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a length": ({"cache_seqlens": 6}, ValueError, "cache_seqlens is 6; expected at most 5"),
    "lengths": ({"cache_seqlens": [1, 6]}, ValueError, r"cache_seqlens\[1\] is 6"),
    "no lengths": ({"cache_seqlens": None}, TypeError, "cache_seqlens is None"),
    "a cache": ({"cache_batch_idx": [0, 2]}, ValueError, r"cache_batch_idx\[1\] is 2"),
    "a page": ({"block_table": [[0], [2]]}, ValueError, r"block_table\[1, 0\] is 2"),
    "lse": ({"lse": np.ones((2, 3, HEADS))}, ValueError, r"lse has shape \(2, 3, 4\)"),
    "lse's dtype": ({"lse": np.ones((2, HEADS, 3), np.float32)}, TypeError, "lse has dtype"),
    "a scale": ({"k_scale": 0.5}, ValueError, "k_scale is for 8-bit caches"),
    "dtypes": ({"k_cache": K.astype(np.float32)}, TypeError, "must have one dtype"),
    "heads": ({"k_cache": K[:, :, :1].repeat(3, 2)}, ValueError, "q has 4 heads"),
    "no slice": ({"queries": 2}, TypeError, "queries is 2; expected a slice"),
    "a step": ({"queries": slice(None, None, 2)}, ValueError, "without a step"),
    "a fraction": ({"queries": slice(0.5, None)}, TypeError, "queries is 0.5"),
    "grouped": ({"grouped": "yes"}, TypeError, "grouped"),
    "dropout": ({"dropout_p": 0.5, "dropout_seed": 1}, UnsupportedError, "dropout_p"),
}


@pytest.mark.parametrize("name", CACHED)
def test_wrong_arguments_of_caches_are_refused(name: str) -> None:
    given, error, message = CACHED[name]
    with pytest.raises(error, match=message):
        attention_received_with_kvcache(**{"q": Q, "k_cache": K, "cache_seqlens": 4} | given)


PACKED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "offsets of q": ({"cu_seqlens_q": [0, 4, 2]}, ValueError, "cu_seqlens_q decreases"),
    "offsets of k": ({"cu_seqlens_k": [0, 4, 9]}, ValueError, r"cu_seqlens_k\[2\] is 9"),
    "a longer sequence": ({"max_seqlen_q": 1}, ValueError, "the value of max_seqlen_q"),
    "keys of two": ({"seqused_k": [3, 2]}, ValueError, "seqused_k gives sequence 0 3 keys"),
    "no offsets": ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k is"),
    "axes": ({"k": K}, ValueError, "k has 4 axes"),
    "lse": ({"lse": np.ones((2, HEADS))}, ValueError, "lse has shape"),
}


@pytest.mark.parametrize("name", PACKED)
def test_wrong_arguments_of_packed_sequences_are_refused(name: str) -> None:
    given, error, message = PACKED[name]
    right: dict[str, Any] = {"q": Q[0], "k": K[0], "cu_seqlens_q": [0, 1, 3]}
    right |= {"cu_seqlens_k": [0, 2, 5], "max_seqlen_q": 2, "max_seqlen_k": 3}
    attention_received_varlen(**right)
    with pytest.raises(error, match=message):
        attention_received_varlen(**right | given)
