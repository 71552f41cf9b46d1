"""KV cache calls that append a different number of rows to each sequence (cu_seqlens_k_new)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from support.calls.sequence_support import KVCacheCase, Truth, to_numpy
from support.comparisons import assert_same_bits, with_arrays
from support.draws import few_then_slow

from cupy_flash import attention_with_kvcache_reference, flash_attention_with_kvcache

LENGTHS, CACHES = (0, 70, 5, 131), {"k_cache", "v_cache"}
CASES = [
    KVCacheCase(LENGTHS, "float32", seqlen_q=3, seqlen_new=6, causal=True),
    KVCacheCase(LENGTHS, "float16", seqlen_q=2, seqlen_new=9, page_size=7, rotary_dim=32),
    KVCacheCase(LENGTHS, "bfloat16", seqlen_q=5, seqlen_new=5, causal=True, indexed=True,
                rotary_dim=22, rotary_interleaved=False, head_dim=40, head_dim_v=33),
    KVCacheCase(LENGTHS, "float64", seqlen_q=1, seqlen_new=200, causal=True, rotary_dim=64),
    KVCacheCase((9,), "float16", seqlen_q=4, seqlen_new=3, page_size=1, heads_q=8, heads_kv=1),
]  # fmt: skip


def packed(case: KVCacheCase, rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
    """Return the arguments of a call with packed new rows, and the number of rows per sequence."""
    arguments = case.problem().arguments()
    counts = rng.integers(0, case.seqlen_new + 1, len(case.lengths))
    counts[rng.integers(len(counts))] = 0
    # Rows before the first sequence and after the last belong to no sequence.
    before, after = rng.integers(0, 3, 2)
    for name in ("k", "v"):
        new = arguments[name]
        none = np.full_like(new[0, :1], np.nan)
        rows = [none] * before + [one[:count] for one, count in zip(new, counts, strict=True)]
        arguments[name] = np.concatenate([*rows, *[none] * after])
    starts = before + np.concatenate([[0], np.cumsum(counts)])
    arguments["cu_seqlens_k_new"] = starts.astype(np.int32)
    return arguments, counts


def converted(arguments: dict[str, Any], xp: Any) -> dict[str, Any]:
    return with_arrays(lambda array: xp.asarray(array).copy(), arguments)


def assert_same_arrays(names: Collection[str], found: Any, expected: Any) -> None:
    """Assert that the arrays of these names have the same bytes in both mappings."""
    assert_same_bits(*([to_numpy(x[name]) for name in names] for x in (found, expected)))


def call_of_each(arguments: dict[str, Any], counts: np.ndarray, xp: Any) -> dict[str, Any]:
    """Append the rows of each sequence by a separate call; return the arguments with the caches."""
    arguments = converted(arguments, xp)
    starts = to_numpy(arguments.pop("cu_seqlens_k_new"))
    for b, count in enumerate(counts):
        one = slice(b, b + 1)
        more = {
            name: arguments[name] if arguments[name] is None else arguments[name][one]
            for name in ("q", "cache_seqlens", "cache_batch_idx", "block_table")
        }
        if more["cache_batch_idx"] is None and more["block_table"] is None:
            more["cache_batch_idx"] = xp.asarray([b], np.int32)
        for name in ("k", "v"):
            more[name] = arguments[name][None, starts[b] : starts[b] + count]
        flash_attention_with_kvcache(**(arguments | more))
    return arguments


@pytest.mark.parametrize("draw", few_then_slow(range(6), 1))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_sequence_gets_its_own_rows(xp: Any, case: KVCacheCase, draw: int, rng: Any) -> None:
    arguments, counts = packed(case, rng)
    given = converted(arguments, xp)
    into = xp.full((*given["q"].shape[:3], case.head_dim_v), np.nan, given["q"].dtype)
    out, lse = flash_attention_with_kvcache(**given, return_lse=True, out=into)
    Truth.of_kvcache(arguments).check(out, lse)
    assert_same_arrays(CACHES, given, call_of_each(arguments, counts, xp))
    inputs = [name for name, array in arguments.items() if isinstance(array, np.ndarray)]
    assert_same_arrays(set(inputs) - CACHES, given, arguments)


def test_a_length_of_all_and_other_positions_may_be_given(xp: Any, rng: Any) -> None:
    case = KVCacheCase((40, 40, 40), "float64", seqlen_q=2, seqlen_new=5, causal=True, rotary_dim=8)
    arguments, counts = packed(case, rng)
    arguments["rotary_seqlens"] = np.array([3, 0, 31], np.int32)
    given = converted(arguments | {"cache_seqlens": 40}, xp)
    Truth.of_kvcache(arguments).check(flash_attention_with_kvcache(**given))
    expected = attention_with_kvcache_reference(**arguments)
    np.testing.assert_allclose(to_numpy(given["k_cache"]), expected.k_cache, rtol=0, atol=1e-14)
    assert to_numpy(given["v_cache"]).tobytes() == expected.v_cache.tobytes()
    assert counts.sum() == arguments["cu_seqlens_k_new"][-1] - arguments["cu_seqlens_k_new"][0]


def test_keys_may_hold_the_values(xp: Any, rng: np.random.Generator) -> None:
    case = KVCacheCase(LENGTHS, "float16", seqlen_new=4, heads_kv=1, head_dim_v=48, page_size=16)
    arguments, counts = packed(case, rng)
    arguments |= {"v": None, "v_cache": None, "head_dim_v": 48}
    given = converted(arguments, xp)
    out = flash_attention_with_kvcache(**given)
    with_values = {"v": arguments["k"][..., :48], "v_cache": arguments["k_cache"][..., :48]}
    alike = {name: x for name, x in arguments.items() if name != "head_dim_v"} | with_values
    Truth.of_kvcache(alike).check(out)
    starts = arguments["cu_seqlens_k_new"]
    expected = attention_with_kvcache_reference(**alike).k_cache
    assert counts.sum() == starts[-1] - starts[0]
    assert to_numpy(given["k_cache"]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}], ids=str)
def test_there_may_be_no_queries(xp: Any, sizes: dict[str, int]) -> None:
    batch, seqlen_q = sizes.get("batch", 3), sizes.get("seqlen_q", 2)
    rows = xp.ones((batch, 2, 8), np.float32)
    k_cache, v_cache = xp.zeros((2, 3, 16, 2, 8), np.float32)
    out = flash_attention_with_kvcache(
        *(xp.zeros((batch, seqlen_q, 2, 8), np.float32), k_cache, v_cache, rows, rows),
        cache_seqlens=xp.full(batch, 5, np.int32),
        cu_seqlens_k_new=xp.arange(batch + 1, dtype=np.int32),
    )
    assert out.shape == (batch, seqlen_q, 2, 8)
    for cache in (k_cache, v_cache):
        assert to_numpy(cache)[:batch, 5].all()
        assert to_numpy(cache).sum() == batch * 2 * 8


def test_without_new_rows_a_cache_may_be_read_only() -> None:
    cache = np.zeros((3, 16, 2, 8), np.float32)
    cache.flags.writeable = False
    none = np.zeros((0, 2, 8), np.float32)
    flash_attention_with_kvcache(
        *(np.zeros((3, 1, 2, 8), np.float32), cache, cache, none, none),
        cache_seqlens=16,
        cu_seqlens_k_new=[0, 0, 0, 0],
    )


@pytest.mark.gpu
def test_a_replayed_graph_reads_the_offsets_anew(rng: np.random.Generator) -> None:
    import cupy

    arguments, _ = packed(CASES[1], rng)
    given = converted(arguments, cupy)
    out = cupy.empty_like(given["q"])
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = cupy.cuda.MemoryPool()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        # This call compiles, and leaves the memory that the capture needs in the pool.
        flash_attention_with_kvcache(**given, out=out)
        stream.synchronize()
        stream.begin_capture()
        flash_attention_with_kvcache(**given, out=out)
        graph = stream.end_capture()
        for _ in range(3):
            total = len(arguments["k"])
            starts = np.sort(rng.integers(0, total + 1, len(LENGTHS) + 1)).astype(np.int32)
            starts[1:] = np.minimum(starts[1:], starts[:-1] + CASES[1].seqlen_new)
            arguments["cu_seqlens_k_new"] = np.maximum.accumulate(starts)
            for name in ("k", "v"):
                arguments[name][np.isnan(arguments[name])] = 1
            for name in ("k_cache", "v_cache", "k", "v", "cu_seqlens_k_new"):
                given[name].set(arguments[name])
            out.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            Truth.of_kvcache(arguments).check(out)


@pytest.mark.parametrize("page_size", [0, 16])
def test_new_rows_of_8_bits_get_their_scales(xp: Any, page_size: int, rng: Any) -> None:
    sizes = {"seqlen_q": 2, "seqlen_new": 6, "page_size": page_size, "rotary_dim": 32}
    arguments, counts = packed(KVCacheCase(LENGTHS, "float16", **sizes, filler=0), rng)
    for name in ("k", "v"):
        cache = arguments[f"{name}_cache"]
        arguments[f"{name}_cache"] = rng.integers(-127, 128, cache.shape).astype(np.int8)
        arguments[f"{name}_scale"] = rng.uniform(0.01, 0.02, cache.shape[:3]).astype(np.float32)
        arguments["compute_scales"] = True
    given = converted(arguments, xp)
    flash_attention_with_kvcache(**given)
    expected = call_of_each(arguments, counts, xp)
    assert_same_arrays((*CACHES, "k_scale", "v_scale"), given, expected)


@pytest.mark.parametrize("starts", [[0, 0, 0, 0, 0], [3, 3, 3, 3, 3]])
@pytest.mark.parametrize("rows", [0, 4])
def test_there_may_be_no_new_rows(xp: Any, rows: int, starts: list[int], rng: Any) -> None:
    arguments = CASES[0].problem().arguments()
    none = rng.standard_normal((rows, 2, 64)).astype(np.float32)
    starts = [min(start, rows) for start in starts]
    arguments |= {"k": none, "v": none, "cu_seqlens_k_new": np.array(starts, np.int32)}
    given = converted(arguments, xp)
    out = flash_attention_with_kvcache(**given)
    Truth.of_kvcache(arguments).check(out)
    assert_same_arrays(CACHES, given, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_offsets_out_of_range_are_limited_to_the_rows_there_are(
    case: KVCacheCase, rng: np.random.Generator
) -> None:
    import cupy

    arguments, _ = packed(case, rng)
    total = len(arguments["k"])
    for name in ("k", "v"):
        # `nan_to_num` does not replace NaN in bfloat16 arrays.
        arguments[name][np.isnan(arguments[name])] = 0.5
    for starts in (
        [-(2**31), 2, 2, total, 2**31 - 1],
        [total + 1, total + 2, total + 3, total + 4, total + 5],
        [-9, -8, -7, -1, 1],
    ):
        arguments["cu_seqlens_k_new"] = np.array(starts, np.int32)
        given = converted(arguments, cupy)
        out, lse = flash_attention_with_kvcache(**given, return_lse=True)
        found = attention_with_kvcache_reference(**arguments)
        np.testing.assert_array_equal(np.isfinite(to_numpy(lse)), np.isfinite(found.lse))
        assert to_numpy(given["v_cache"]).tobytes() == found.v_cache.tobytes()
        assert np.isfinite(to_numpy(out).astype(np.float64)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_k_new": [0, 3, 2, 5, 5]},
         "cu_seqlens_k_new decreases from 3 to 2 at index 2"),
        ({"cu_seqlens_k_new": [0, 3, 3]}, r"cu_seqlens_k_new has shape \(3,\); expected \(5,\)"),
        ({"cu_seqlens_k_new": [0, 1, 2, 3, 13]},
         r"cu_seqlens_k_new\[4\] is 13; expected at most 12, the rows of k and v"),
        ({"cache_seqlens": [0, 70, 139, 131]},
         r"cache_seqlens\[2\] is 139; expected at most 137: a cache holds 140 rows, and 3 are"),
        ({"k": None, "v": None}, "cu_seqlens_k_new divides packed k and v; pass k and v, too"),
        ({"k": np.zeros((4, 3, 2, 64), np.float32)},
         "k has 4 axes, .* expected 3: total_new, heads"),
        ({"v": np.zeros((11, 2, 64), np.float32)}, r"v has shape \(11, 2, 64\)"),
        (
            {
                "rotary_cos": np.zeros((132, 8), np.float32),
                "rotary_sin": np.zeros((132, 8), np.float32),
            },
            r"cache_seqlens\[3\] is 131; expected at most 129: rotary_cos has 132 rows, and 3 are",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_and_nothing_is_written(
    change: dict[str, Any], message: str
) -> None:
    arguments = CASES[0].problem().arguments()
    rows = np.ones((12, 2, 64), np.float32)
    arguments |= {"k": rows, "v": rows, "cu_seqlens_k_new": np.array([0, 3, 6, 9, 12], np.int32)}
    caches = {name: arguments[name].copy() for name in CACHES}
    with pytest.raises((TypeError, ValueError), match=message):
        flash_attention_with_kvcache(**(arguments | change))
    assert_same_arrays(CACHES, arguments, caches)
