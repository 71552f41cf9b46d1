"""Decoding steps over a sharded KV cache: errors, and the distribution of keys over ranks."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from cupy_flash import flash_attention_with_kvcache, parallel
from cupy_flash.parallel import generation


def read_only(*shape: int) -> np.ndarray:
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


def arguments(**changed: Any) -> dict[str, Any]:
    caches = {name: np.zeros((2, 40, 2, 8), np.float32) for name in ("k_cache", "v_cache")}
    new = {name: np.ones((2, 3, 2, 8), np.float32) for name in ("k", "v")}
    lengths = {"cache_seqlens": np.array([5, 37], np.int32)}
    return {"q": np.ones((2, 1, 4, 8), np.float32), **caches, **new, **lengths, **changed}


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"cache_seqlens": np.array([5, 38], np.int32)}, ValueError,
         r"cache_seqlens\[1\] is 38; expected at most 37: k_cache has 40 rows on rank 0 of 1"),
        ({"cache_seqlens": 38}, ValueError, "cache_seqlens is 38; expected at most 37"),
        ({"cache_seqlens": [3, -1]}, ValueError, r"cache_seqlens\[1\] is -1; expected at least 0"),
        ({"cache_seqlens": -1}, ValueError, "cache_seqlens is -1; expected at least 0"),
        ({"cache_seqlens": [5, 2.7]}, TypeError, "cache_seqlens holds a float; expected integers"),
        ({"cache_seqlens": [[5], [3, 7]]}, ValueError, "cache_seqlens is not a list of integers"),
        ({"cache_seqlens": [5, 2**40]}, ValueError,
         "cache_seqlens holds integers that do not fit int32"),
        ({"cache_seqlens": np.array([5.0, 37])}, TypeError, r"float64; pass cache_seqlens\.astype"),
        ({"cache_seqlens": np.array([5, 2**31])}, ValueError, "integers that do not fit int32"),
        ({"cache_seqlens": {5, 37}}, TypeError, "cache_seqlens is a set; expected a NumPy"),
        ({"cache_seqlens": np.array([5], np.int32)}, ValueError, "one length for each sequence"),
        ({"cache_seqlens": None}, TypeError, "cache_seqlens is None"),
        ({"v": None}, TypeError, "expected both or neither"),
        ({"q": np.ones((2, 4, 4, 8), np.float32), "causal": True}, ValueError, "4 causal queries"),
        ({"stripe": 0}, ValueError, "at least 1 key"),
        ({"q": np.ones((3, 1, 4, 8), np.float32)}, ValueError, "k_cache has shape"),
        ({"sinks": np.ones(3, np.float32)}, ValueError, "one sink|one for each query head"),
        ({"sinks": np.ones(4)}, TypeError, "sinks has dtype float64"),
        ({"k": np.ones((2, 3, 2, 8))}, TypeError, "k has dtype float64; expected float32, as q"),
        ({"v": np.ones((2, 3, 2, 8), np.float16)}, TypeError, "v has dtype float16"),
        ({"v_cache": np.zeros((2, 40, 2, 8))}, TypeError, "v_cache has dtype float64"),
        ({"q": np.ones((2, 1, 4, 8))}, TypeError, "k_cache has dtype float32; expected float64"),
        ({"v_cache": read_only(2, 40, 2, 8)}, ValueError, "v_cache is read-only"),
        ({"backend": "tpu"}, ValueError, "backend is 'tpu'"),
        ({"return_lse": 1}, TypeError, "return_lse is 1"),
        (
            dict.fromkeys(("k_cache", "v_cache"), np.zeros((2, 40, 0, 8), np.float32))
            | dict.fromkeys("kv", np.ones((2, 3, 0, 8), np.float32)),
            ValueError,
            "k_cache and v_cache have no heads",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_before_anything_is_written(
    group: parallel.Group, changed: dict[str, Any], error: Any, text: str
) -> None:
    given = arguments(**changed)
    with pytest.raises(error, match=text):
        parallel.flash_attention_with_kvcache(**given, group=group)
    assert not given["k_cache"].any()
    parallel.flash_attention_with_kvcache(**arguments(), group=group)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (lambda k_cache: {"v_cache": k_cache}, "k_cache overlaps v_cache"),
        (lambda k_cache: {"k": k_cache[:, 2:5]}, "k_cache overlaps k"),
        (lambda k_cache: {"q": k_cache[:, :1].repeat(2, 2)[:, :, ::-1]}, None),
        (
            lambda k_cache: {"v_cache": np.broadcast_to(k_cache[:1].copy(), k_cache.shape)},
            "v_cache is read-only",
        ),
        (
            lambda k_cache: {
                "k_cache": np.lib.stride_tricks.as_strided(
                    k_cache.copy(), strides=(0, *k_cache.strides[1:])
                )
            },
            "k_cache overlaps itself",
        ),
        (lambda k_cache: {"k": None, "v": None, "v_cache": k_cache}, None),
    ],
)
def test_what_is_written_overlaps_nothing_else(
    group: parallel.Group, changed: Any, text: str | None
) -> None:
    given = arguments()
    given |= changed(given["k_cache"])
    if text is None:
        parallel.flash_attention_with_kvcache(**given, group=group)
        return
    with pytest.raises(ValueError, match=text):
        parallel.flash_attention_with_kvcache(**given, group=group)
    assert not given["k_cache"].any()


@pytest.mark.parametrize("cache_seqlens", [7, np.int64(7), np.array([7, 7], np.int64)])
def test_one_length_serves_all_sequences(group: parallel.Group, cache_seqlens: Any) -> None:
    given = arguments(cache_seqlens=cache_seqlens)
    out = parallel.flash_attention_with_kvcache(**given, group=group)
    other = arguments(cache_seqlens=7)
    expected = flash_attention_with_kvcache(**other)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    np.testing.assert_array_equal(given["k_cache"], other["k_cache"])


@pytest.mark.parametrize(
    ("ranks", "rank", "stripe", "text"),
    [
        (2, 2, 4, "rank is 2 of 2"),
        (0, 0, 4, "ranks is 0; expected at least 1"),
        (2, -1, 4, "rank is -1"),
        (2, 0, 0, "stripe is 0"),
        (2, 0, -1, "stripe is -1"),
        (2, 0, 2**30, "stripe is 1073741824; expected at most 1073741823 keys on each of 2 ranks"),
    ],
)
def test_a_rank_or_stripe_that_there_is_not_is_refused(
    ranks: int, rank: int, stripe: int, text: str
) -> None:
    for call in (
        lambda: parallel.cache_shard(np.arange(9), ranks, rank, axis=0, stripe=stripe),
        lambda: parallel.cache_shard_length(9, ranks, rank, stripe=stripe),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_a_length_is_refused_where_a_rank_has_no_row_for_its_last_key() -> None:
    for capacity, ranks, stripe in itertools.product((1, 7, 8, 13), (1, 2, 3), (1, 4, 16)):
        for rank in range(ranks):
            limit = generation._length_limit(capacity, 2, ranks, rank, stripe)
            whole = limit.most + 2
            length = functools.partial(parallel.cache_shard_length, ranks=ranks, rank=rank)
            assert length(whole, stripe=stripe) == capacity
            assert length(whole + 1, stripe=stripe) == capacity + 1


@pytest.mark.parametrize(
    ("seqlens", "error", "text"),
    [
        (10.5, TypeError, "seqlens is 10.5; expected an integer, or a NumPy or CuPy array of"),
        (True, TypeError, "seqlens is True; expected an integer"),
        ([10, 2000], TypeError,
         r"seqlens is \[10, 2000\]; expected an integer, or a NumPy or CuPy array of"),
        (np.array([10, 2**31]), ValueError, "seqlens holds integers that do not fit int32"),
        (np.array([1.5]), TypeError, "seqlens has dtype float64"),
        (np.ma.ones(2, np.int32), TypeError, "seqlens is a masked array"),
        (-10, ValueError, "seqlens is -10; expected at least 0"),
        (np.array([3, -10], np.int32), ValueError, "seqlens holds -10; expected lengths of at"),
    ],
)  # fmt: skip
def test_lengths_of_sequences_are_integers(seqlens: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        parallel.cache_shard_length(seqlens, 2, 1)


def test_lengths_of_shards_are_of_the_lengths_kind() -> None:
    assert type(parallel.cache_shard_length(np.int32(2000), 2, 1)) is int
    found = parallel.cache_shard_length(np.array([10, 2000], np.int64), 2, 1)
    assert found.dtype == np.int32
    assert found.tolist() == [0, 976]
    longest = np.array([2**31 - 1], np.int32)
    assert parallel.cache_shard_length(longest, 2, 1, stripe=2**30 - 1) == [2**30 - 1]


def test_ranks_have_as_many_keys_but_for_a_stripe(rng: np.random.Generator) -> None:
    for _ in range(20):
        seqlen, ranks, stripe = (int(rng.integers(1, most)) for most in (300, 7, 20))
        keys = np.arange(seqlen)
        shards = [parallel.cache_shard(keys, ranks, r, axis=0, stripe=stripe) for r in range(ranks)]
        assert sorted(np.concatenate(shards).tolist()) == keys.tolist()
        length = functools.partial(parallel.cache_shard_length, seqlen, ranks, stripe=stripe)
        lengths = [length(rank) for rank in range(ranks)]
        assert lengths == list(map(len, shards))
        assert max(lengths) - min(lengths) <= stripe
        for rank, own in enumerate(shards):
            rows = keys // (stripe * ranks) * stripe + keys % stripe
            assert (rows[own] == np.arange(len(own))).all(), rank
