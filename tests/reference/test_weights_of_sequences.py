"""Attention weights of chosen rows of packed and cached sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.calls.received_calls import random_received_call
from support.draws import few_then_slow

from cupy_flash import (
    UnsupportedError,
    attention_weights,
    attention_weights_varlen,
    attention_weights_with_kvcache,
)

HEADS, HEADS_KV, DIM = 4, 2, 6
Generator = np.random.Generator


def of_random_call(
    rng: Generator, kind: str, **chosen: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a random call, and the arguments of the function that computes its weights."""
    dtype = str(rng.choice(["float16", "float32", "float64"]))
    call = random_received_call(rng, dtype, kind, head_dims=(3, 8), longest=(30, 40))
    call.queries, call.grouped = slice(None), False
    positional, named = call.given(np)
    named = {n: x for n, x in named.items() if n not in ("queries", "grouped")}
    return call, positional, named | chosen


@pytest.mark.parametrize("number", few_then_slow(range(16), 4))
def test_weights_of_packed_rows_add_up_to_what_keys_receive(number: int, rng: Generator) -> None:
    call, positional, named = of_random_call(rng, "varlen")
    weights = attention_weights_varlen(*positional, **named)
    q, k, starts_q, starts_k, _, max_seqlen_k = positional
    heads = q.shape[1]
    assert weights.shape == (heads, len(q), max_seqlen_k)
    found = np.zeros((heads, len(k)))
    for b in range(len(starts_q) - 1):
        rows, keys = (slice(starts[b], starts[b + 1]) for starts in (starts_q, starts_k))
        length = keys.stop - keys.start
        found[:, keys] = weights[:, rows, :length].sum(axis=1, dtype=np.float64)
        assert not weights[:, rows, length:].any()
    np.testing.assert_allclose(found, call.exact, rtol=1e-6, atol=1e-9, err_msg=str(call))
    # Rows of no sequence have no weights.
    assert not weights[:, starts_q[-1] :].any()


@pytest.mark.parametrize("kind", ["kvcache", "paged"])
@pytest.mark.parametrize("number", few_then_slow(range(16), 4))
def test_weights_in_a_cache_add_up_to_what_keys_receive(
    kind: str, number: int, rng: Generator
) -> None:
    call, positional, named = of_random_call(rng, kind)
    weights = attention_weights_with_kvcache(*positional, **named)
    batch, seqlen_q, heads, _ = positional[0].shape
    assert weights.shape == (batch, heads, seqlen_q, call.exact.shape[-1])
    found = weights.sum(axis=2, dtype=np.float64)
    np.testing.assert_allclose(found, call.exact, rtol=1e-6, atol=1e-9, err_msg=str(call))


@pytest.mark.parametrize("kind", ["varlen", "kvcache", "paged"])
def test_rows_heads_and_keys_are_chosen(kind: str, rng: Generator) -> None:
    _, positional, named = of_random_call(rng, kind)
    functions = {"varlen": attention_weights_varlen}
    function = functions.get(kind, attention_weights_with_kvcache)
    weights = function(*positional, **named)
    axis = 0 if kind == "varlen" else 1
    queries = rng.integers(-weights.shape[-2], weights.shape[-2], 5)
    heads = rng.integers(-weights.shape[axis], weights.shape[axis], 3)
    expected = np.take(np.take(weights, queries, -2), heads, axis)
    found = function(*positional, **named, queries=queries, heads=heads)
    eps = float(np.finfo(weights.dtype).eps)
    np.testing.assert_allclose(found, expected, rtol=4 * eps, atol=1e-14)
    for count in (0, 1, 3, 1000):
        largest, keys = function(*positional, **named, queries=queries, heads=heads, top_k=count)
        columns = min(count, weights.shape[-1])
        assert largest.shape == keys.shape == (*found.shape[:-1], columns)
        np.testing.assert_array_equal(np.take_along_axis(found, keys, -1), largest)
        ordered = np.sort(found, axis=-1)[..., ::-1]
        np.testing.assert_array_equal(largest, ordered[..., :columns])


def test_pages_of_packed_queries_hold_the_same_keys(rng: Generator) -> None:
    q, k = rng.standard_normal((5, HEADS, DIM)), rng.standard_normal((2, 12, HEADS_KV, DIM))
    pages = k.reshape(8, 3, HEADS_KV, DIM)
    order = rng.permutation(8)
    table = np.argsort(order).reshape(2, 4)
    found = attention_weights_varlen(
        *(q, pages[order], [0, 3, 5], None, 3, 12),
        block_table=table,
        seqused_k=[10, 7],
        causal=True,
    )
    for b, (rows, keys) in enumerate([(slice(0, 3), 10), (slice(3, 5), 7)]):
        expected = attention_weights(q[rows], k[b, :keys], causal=True)
        np.testing.assert_allclose(found[:, rows, :keys], expected, rtol=0, atol=1e-14)
        assert not found[:, rows, keys:].any()


def test_keys_of_8_bits_are_multiplied_by_their_scales(rng: Generator) -> None:
    q = rng.standard_normal((2, 3, HEADS, DIM))
    stored = (8 * rng.standard_normal((2, 9, HEADS_KV, DIM))).astype(np.int8)
    expected = attention_weights(q, stored * 0.25)
    found = attention_weights_with_kvcache(q, stored, cache_seqlens=9, k_scale=0.25)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a query too far": ({"queries": [3]}, ValueError, "index 3 of queries is out of range"),
    "a head": ({"heads": 4}, ValueError, "index 4 of heads is out of range"),
    "fewer keys than none": ({"top_k": -1}, ValueError, "top_k is -1"),
    "a mask of other keys": ({"mask": np.ones((3, 6), bool)}, ValueError, "mask has shape"),
    "dropout": ({"dropout_p": 0.5, "dropout_seed": 1}, UnsupportedError, "dropout_p"),
    "an unknown name": ({"scale": 1.0}, TypeError, "pass softmax_scale"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str) -> None:
    given, error, message = WRONG[name]
    q, cache = np.ones((2, 3, HEADS, DIM)), np.ones((2, 5, HEADS_KV, DIM))
    with pytest.raises(error, match=message):
        attention_weights_with_kvcache(q, cache, cache_seqlens=4, **given)
    if name != "dropout":
        with pytest.raises(error, match=message):
            attention_weights_varlen(q[0], cache[0], [0, 3], [0, 5], 3, 5, **given)
