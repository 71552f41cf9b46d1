"""Sequences that are used in part: the queries at their end, the keys at the start of a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.comparisons import assert_all_close, with_arrays

import cupy_flash
from cupy_flash.reference.dense import attention_naive, error_bound, max_error

HEADS_Q, HEADS_KV, DIM = 4, 2, 16
OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (9, 4)},
    {"causal": True, "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4])},
    {"sinks": np.array([0.5, -np.inf, 2.0, 0.0])},
    {"mask_mod": cupy_flash.MaskMod(lambda i, j: (i - j) % 3 != 1)},
    {"causal": True, "softcap": 3.0, "window_size": (30, None)},
]
ROWS, USED = np.array([7, 0, 40, 65]), np.array([3, 0, 40, 0])
KEYS = np.array([20, 9, 33, 70])


def on_host(array: Any) -> np.ndarray:
    host: np.ndarray = array.get() if hasattr(array, "get") else array
    return host


@pytest.mark.parametrize("offsets", [None, [5, 0, -3, 2]], ids=["aligned", "placed"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_queries_behind_those_that_are_used_are_left_out(
    xp: Any, options: dict[str, Any], offsets: list[int] | None, rng: Any
) -> None:
    starts, first = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (ROWS, KEYS))
    q, dout = rng.standard_normal((2, starts[-1], HEADS_Q, DIM))
    k, v = rng.standard_normal((2, first[-1], HEADS_KV, DIM))
    placed = options if offsets is None else {**options, "q_offset": np.array(offsets, np.int32)}
    if offsets is not None and not options:
        placed["causal"] = True
    more = with_arrays(xp.asarray, {**placed, "seqused_q": USED.astype(np.int32)})
    arrays = [xp.asarray(x) for x in (q, k, v)]
    lengths = [*map(xp.asarray, (starts, first)), int(ROWS.max()), int(KEYS.max())]
    out, lse = cupy_flash.flash_attention_varlen(*arrays, *lengths, **more, return_lse=True)
    inputs = xp.asarray(dout), *arrays
    gradients = cupy_flash.flash_attention_varlen_backward(*inputs, out, lse, *lengths, **more)
    reference = cupy_flash.attention_varlen_reference(*arrays, *lengths, **more)
    of_reference = cupy_flash.attention_varlen_backward_reference(*inputs, *lengths, **more)
    out, lse, *gradients = (on_host(x) for x in (out, lse, *gradients))

    expected = np.zeros_like(q), np.full(lse.shape, -np.inf)
    if "sinks" in options:
        expected[1][:] = options["sinks"][:, None]
    right = [np.zeros_like(x) for x in (q, k, v)]
    for b, used in enumerate(USED):
        rows, keys = slice(starts[b], starts[b] + used), slice(first[b], first[b + 1])
        one = q[None, rows], k[None, keys], v[None, keys]
        own = {**placed} if offsets is None else {**placed, "q_offset": offsets[b]}
        result, of_rows = cupy_flash.attention_reference(*one, **own, return_lse=True)
        expected[0][rows], expected[1][:, rows] = result[0], of_rows[0]
        own_gradients = cupy_flash.attention_backward_reference(dout[None, rows], *one, **own)
        for total, part, where in zip(right, own_gradients, (rows, keys, keys), strict=True):
            total[where] = part[0]
    for results in ((out, lse), map(on_host, reference)):
        assert_all_close(results, expected, rtol=0, atol=1e-12)
    for results in (gradients, map(on_host, of_reference)):
        assert_all_close(results, right, rtol=0, atol=1e-11)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_padding_at_the_start_of_a_cache_is_left_out(
    xp: Any, options: dict[str, Any], paged: bool, rng: Any
) -> None:
    lengths, padding = np.array([30, 12, 47], np.int32), np.array([0, 12, 17], np.int32)
    q = rng.standard_normal((3, 5, HEADS_Q, DIM))
    keys, values = rng.standard_normal((2, 3, 48, HEADS_KV, DIM))
    caches, more = (keys, values), {}
    if paged:
        table = rng.permutation(9).reshape(3, 3)
        pages = np.empty((2, 9, 16, HEADS_KV, DIM))
        for array, found in zip((keys, values), pages, strict=True):
            found[table.ravel()] = array.reshape(9, 16, HEADS_KV, DIM)
        caches, more = tuple(pages), {"block_table": xp.asarray(table.astype(np.int32))}
    same = {**options, "cache_leftpad": padding, "cache_seqlens": lengths}
    given = with_arrays(xp.asarray, same) | more
    arrays = [xp.asarray(x) for x in (q, *caches)]
    results = cupy_flash.flash_attention_with_kvcache(*arrays, **given, return_lse=True)
    reference = cupy_flash.attention_with_kvcache_reference(*arrays, **given)
    for b, (length, first) in enumerate(zip(lengths, padding, strict=True)):
        own, one = slice(int(first), int(length)), slice(b, b + 1)
        inputs = q[one], keys[one, own], values[one, own]
        expected = [
            x[0] for x in cupy_flash.attention_reference(*inputs, **options, return_lse=True)
        ]
        for found in (results, (reference.out, reference.lse)):
            assert_all_close((on_host(x)[b] for x in found), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("places", [lambda b: 1000 * b, lambda b: 8191 - 1000 * b])
@pytest.mark.parametrize("batch", [8, 40])
@pytest.mark.parametrize("is_cached", [False, True], ids=["dense", "kvcache"])
def test_windows_may_begin_elsewhere_in_each_sequence(
    xp: Any, is_cached: bool, batch: int, places: Any, rng: Any
) -> None:
    """For one query and many keys, `decode` splits the keys of all sequences over its blocks."""
    keys = 8192 if batch == 8 else 1500
    q, k, v = (
        rng.standard_normal((batch, rows, heads, DIM)).astype(np.float16)
        for rows, heads in ((1, HEADS_Q), (keys, HEADS_KV), (keys, HEADS_KV))
    )
    offsets = np.clip(places(np.arange(batch)), -500, keys + 400).astype(np.int32)
    options = {"causal": True, "window_size": (511, 0)}
    arrays = [xp.asarray(x) for x in (q, k, v)]
    given = {**options, "q_offset": xp.asarray(offsets), "return_lse": True}
    if xp.__name__ == "cupy":
        given["family"] = "decode"
    if is_cached:
        out, lse = cupy_flash.flash_attention_with_kvcache(*arrays, cache_seqlens=keys, **given)
    else:
        out, lse = cupy_flash.flash_attention(*arrays, **given)
    expected = cupy_flash.attention_reference(q, k, v, **options, q_offset=offsets, return_lse=True)
    bound = error_bound(attention_naive(q, k, v, **options, q_offset=offsets), expected[0], q.dtype)
    assert max_error(on_host(out), expected[0]) <= bound
    np.testing.assert_allclose(on_host(lse), expected[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("used", "message"),
    [
        ([7, 0, 41, 0], r"seqused_q\[2\] is 41; expected at most 40: cu_seqlens_q gives"),
        ([-1, 0, 0, 0], r"seqused_q\[0\] is -1; expected at least 0"),
        ([1, 2], r"seqused_q has shape \(2,\); expected \(4,\), one for each sequence"),
    ],
)
def test_more_queries_than_there_are_cannot_be_used(used: list[int], message: str) -> None:
    starts = np.concatenate([[0], np.cumsum(ROWS)]).astype(np.int32)
    q = np.zeros((starts[-1], HEADS_Q, DIM))
    with pytest.raises(ValueError, match=message):
        cupy_flash.flash_attention_varlen(*[q] * 3, *[starts] * 2, 65, 65, seqused_q=used)


def test_lengths_of_another_kind_of_call_are_refused() -> None:
    q, lengths = np.zeros((2, 4, HEADS_Q, DIM)), np.array([1, 2], np.int32)
    starts = np.array([0, 4, 8], np.int32)
    packed = [q.reshape(8, HEADS_Q, DIM)] * 3
    with pytest.raises(ValueError, match="seqused_q is for packed sequences"):
        cupy_flash.flash_attention_with_kvcache(q, q, q, cache_seqlens=4, seqused_q=lengths)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="cache_leftpad is for KV caches; pass mask_mod"):
        cupy_flash.flash_attention_varlen(*packed, starts, starts, 4, 4, cache_leftpad=lengths)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"cache_leftpad\[1\] is 5; expected at most 4: the cache"):
        cupy_flash.flash_attention_with_kvcache(q, q, q, cache_seqlens=4, cache_leftpad=[0, 5])


def test_positions_of_queries_have_something_to_place_in_both_directions() -> None:
    q, lse = np.zeros((2, 4, HEADS_Q, DIM)), np.zeros((2, HEADS_Q, 4))
    with pytest.raises(ValueError, match="q_offset is for a causal mask"):
        cupy_flash.flash_attention_backward(q, q, q, q, q, lse, q_offset=[2, 6])


def test_one_integer_for_all_sequences_is_told_from_an_array() -> None:
    q = np.zeros((2, 4, HEADS_Q, DIM))
    message = "q_offset is 3, one integer; expected an int32 array, or a list"
    with pytest.raises(TypeError, match=message):
        cupy_flash.flash_attention_with_kvcache(q, q, q, cache_seqlens=4, causal=True, q_offset=3)


def test_a_plan_counts_no_blocks_of_positions_in_arrays() -> None:
    q = np.zeros((2, 512, HEADS_Q, DIM))
    text = str(
        cupy_flash.plan(
            cupy_flash.flash_attention, q, q, q, causal=True, q_offset=[0, 0], arch="sm_90"
        )
    )
    assert "q_offset per sequence" in text
    assert "computed" not in text


@pytest.mark.parametrize("name", ["q_offset", "seqused_q", "cache_leftpad"])
def test_a_picture_of_a_sequence_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} has shape \(2,\), but b is 3"):
        cupy_flash.seen_pairs(5, 9, b=3, causal=True, **{name: [2, 6]})


def test_the_reference_takes_integers_only() -> None:
    q = np.zeros((2, 4, HEADS_Q, DIM))
    with pytest.raises(TypeError, match="an array has dtype float64; expected integers"):
        cupy_flash.attention_reference(q, q, q, causal=True, q_offset=[1.5, 2])
