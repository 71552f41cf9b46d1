"""Attention over KV caches against the reference, on the CPU and on a GPU."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import numpy as np
import pytest
from support.calls.sequence_support import KVCacheCase, KVCacheProblem, to_numpy
from support.calls.sequence_support import Truth as SequencesTruth
from support.gpu import cupy
from support.gpu.gpu_sequences import (
    GROUPS,
    HEAD_DIMS,
    PAGE_SIZES,
    PAGES_OF_DIMS,
    SIXTEEN_BIT,
    Amid,
    Target,
    assert_same_bits,
    check_kvcache,
    checks_everywhere,
    cluster_of,
    cubins,
    decode_on_h100,
    everywhere,
    kvcache,
    of_aligned_cases,
    of_cases,
    on_every_family,
    on_gpu,
    problem_of,
    run_kvcache,
)
from support.gpu.gpu_support import DTYPES, Truth, bits, require_free_memory, run_in_threads
from support.prebuilt import use_cubins
from support.wrong_numbers import HEADS, KVCACHE_CALLS, check_kvcache_result, wrong_kvcache

from cupy_flash import attention_with_kvcache_reference, combine, flash_attention_with_kvcache

__all__ = ["cubins", "use_cubins"]  # fixtures

# Random choices replace combinations of parameters that need not all be tested.
DRAW = random.Random(5)


# ---- Query rows, heads, head dims, lengths


test_any_number_of_query_rows_is_right = checks_everywhere(
    kvcache(
        dtype=dtype,
        seqlen_q=seqlen_q,
        causal=causal,
        heads_q=heads_q,
        heads_kv=heads_kv,
        indexed=index % 2 == 0,
    )
    for index, (seqlen_q, causal, (heads_q, heads_kv)) in enumerate(
        itertools.product((1, 2, 5, 17, 100), (False, True), GROUPS)
    )
    for dtype in (SIXTEEN_BIT[index % 2], ("float32", "float64")[index % 2])
)

test_any_head_dims_are_right = checks_everywhere(
    kvcache(dtype=dtype, head_dim=dim, head_dim_v=dim_v, seqlen_q=3, seqlen_new=2, causal=True)
    for index, (dim, dim_v) in enumerate(HEAD_DIMS)
    for dtype in (SIXTEEN_BIT[index % 2], ("float32", "float64")[index % 2])
)

test_any_batch_and_cache_length_is_right = checks_everywhere(
    kvcache(
        dtype=dtype,
        batch=batch,
        longest=longest,
        seqlen_q=seqlen_q,
        heads_q=heads_q,
        heads_kv=heads_kv,
    )
    for dtype in ("float16", "float32")
    for batch, longest, seqlen_q, heads_q, heads_kv in (
        (1, 5000, 1, 8, 8),
        (2, 5000, 5, 8, 2),
        (9, 2000, 2, 8, 1),
        (70, 500, 1, 4, 2),
    )
)

test_empty_caches_give_zero_and_lengths_about_a_tile_are_right = checks_everywhere(
    KVCacheCase(lengths, dtype=dtype, seqlen_q=2, causal=causal, heads_q=8, heads_kv=2)
    for lengths in ((0,), (0, 0, 0, 0), (1, 0, 2), (15, 16, 17, 63, 64, 65, 127, 128, 129))
    for dtype, causal in (("bfloat16", True), ("float16", False), ("float32", True))
)


@everywhere
@of_cases(
    KVCacheCase((length,) * 3, dtype=dtype, seqlen_new=new, page_size=page_size, causal=True)
    for length, new in ((0, 1), (0, 0), (117, 0), (203, 5))
    for dtype, page_size in (("float16", 0), ("bfloat16", 16), ("float32", 0))
)
def test_one_length_for_all_may_be_an_integer(target: Target, case: KVCacheCase) -> None:
    check_kvcache(target, case, cache_seqlens=case.lengths[0])


test_any_softmax_scale_is_right = checks_everywhere(
    kvcache(longest=90, dtype=dtype, causal=causal, seqlen_q=5, softmax_scale=scale)
    for dtype in ("float16", "float32")
    for scale, causal in ((0.0, True), (-0.3, True), (2.0, False))
)


@everywhere
def test_no_sequences_give_an_empty_result(target: Target) -> None:
    xp = target.xp
    q = xp.asarray(np.zeros((0, 2, 4, 64), np.float16))
    cache = xp.asarray(np.full((3, 50, 2, 64), np.nan, np.float16))
    lengths = xp.asarray(np.zeros(0, np.int32))
    options = {"cache_seqlens": lengths, "return_lse": True}
    out, lse = target.call(flash_attention_with_kvcache, q, cache, cache, **options)
    assert out.shape == (0, 2, 4, 64)
    assert lse.shape == (0, 4, 2)


@everywhere
def test_rows_are_appended_though_the_queries_have_no_heads(target: Target) -> None:
    xp = target.xp
    cache, other = (xp.asarray(np.zeros((2, 50, 2, 64), np.float16)) for _ in range(2))
    new = xp.asarray(np.ones((2, 1, 2, 64), np.float16))
    lengths = xp.asarray(np.array([0, 37], np.int32))
    arrays, options = (new[:, :, :0], cache, other, new, new), {"cache_seqlens": lengths}
    out, lse = target.call(flash_attention_with_kvcache, *arrays, **options, return_lse=True)
    assert out.shape == (2, 1, 0, 64)
    assert lse.shape == (2, 0, 1)
    appended = np.zeros((2, 50, 2, 64), np.float16)
    appended[0, 0] = appended[1, 37] = 1
    for written in (cache, other):
        np.testing.assert_array_equal(to_numpy(written), appended)


@everywhere
def test_sequences_may_read_one_cache(target: Target) -> None:
    # Several beams read the cache of one prompt; no rows are appended.
    case = kvcache(dtype="float16", seqlen_q=2, batch=4, indexed=True, heads_q=8, heads_kv=2)
    arguments = problem_of(case).arguments()
    arguments["cache_batch_idx"][:] = arguments["cache_batch_idx"][int(np.argmax(case.lengths))]
    out, lse, _, _ = run_kvcache(target, arguments)
    cache = arguments["cache_batch_idx"][0]
    for b, length in enumerate(case.lengths):
        k, v = (arguments[name][cache][None, :length] for name in ("k_cache", "v_cache"))
        Truth.of((arguments["q"][b : b + 1], k, v)).check(out[b : b + 1], lse[b : b + 1])


# ---- Pages


test_pages_of_any_size_are_right = checks_everywhere(
    kvcache(
        dtype=dtype,
        page_size=page_size,
        causal=causal,
        seqlen_q=DRAW.choice((1, 2, 5, 17)),
        seqlen_new=DRAW.choice((0, 1, 2)),
        heads_q=heads_q,
        heads_kv=heads_kv,
        longest=600,
    )
    for page_size, causal in itertools.product(PAGE_SIZES, (False, True))
    for dtype in (*SIXTEEN_BIT, DRAW.choice(("float32", "float64")))
    for heads_q, heads_kv in (DRAW.choice(GROUPS),)
)

test_pages_of_any_head_dims_are_right = checks_everywhere(
    kvcache(dtype=dtype, page_size=page_size, head_dim=dim, head_dim_v=dim_v, seqlen_q=2)
    for dtype, page_size, dim, dim_v in PAGES_OF_DIMS
)

test_long_or_many_paged_sequences_are_right = checks_everywhere(
    kvcache(batch=batch, longest=longest, page_size=page_size, dtype="bfloat16", heads_kv=1)
    for batch, longest, page_size in ((1, 5000, 1), (3, 3000, 16), (70, 300, 64))
)


# ---- Appended rows


test_new_rows_are_appended_and_attended_to = checks_everywhere(
    kvcache(
        dtype=dtype,
        seqlen_q=seqlen_q,
        seqlen_new=new,
        causal=causal,
        page_size=page_size,
        indexed=not page_size,
        head_dim_v=40,
    )
    for index, (seqlen_q, new) in enumerate(
        # There are equal numbers of queries and new keys, fewer queries, or more.
        [(1, 1), (2, 2), (17, 17), (100, 100), (1, 40), (5, 1)]
    )
    for causal in (False, True)
    for dtype, page_size in (
        (SIXTEEN_BIT[index % 2], 0),
        (SIXTEEN_BIT[index % 2], (1, 3, 16, 64)[index % 4]),
        (("float32", "float64")[index % 2], (0, 16)[index // 2 % 2]),
    )
)

test_new_rows_and_queries_are_turned_by_their_positions = checks_everywhere(
    kvcache(
        dtype=dtype,
        seqlen_q=new,
        seqlen_new=new,
        causal=causal,
        page_size=page_size,
        rotary_dim=rotary_dim,
        rotary_interleaved=interleaved,
        rotary_dtype=rotary_dtype,
    )
    for rotary_dim, interleaved, causal in itertools.product(
        (64, 32, 2, 22), (True, False), (True, False)
    )
    for dtype in (DRAW.choice(SIXTEEN_BIT), DRAW.choice(("float32", "float64")))
    for rotary_dtype in (DRAW.choice((None, "float64" if dtype == "float64" else "float32")),)
    for new, page_size in (DRAW.choice(((1, 0), (1, 16), (5, 16), (5, 3), (33, 0), (33, 3))),)
)

test_rotation_of_any_head_dims_is_right = checks_everywhere(
    kvcache(
        dtype=dtype,
        head_dim=dim,
        head_dim_v=dim,
        seqlen_q=seqlen_q,
        seqlen_new=new,
        causal=True,
        rotary_dim=rotary_dim,
        heads_q=8,
        heads_kv=2,
        indexed=True,
    )
    for dtype, dim, rotary_dim, seqlen_q, new in (
        ("bfloat16", 128, 128, 1, 1),
        ("float16", 256, 64, 2, 3),
        ("bfloat16", 40, 40, 3, 2),
        ("float32", 33, 6, 4, 4),
    )
)

test_a_whole_batch_of_decode_steps_is_right = checks_everywhere(
    kvcache(batch=40, longest=300, dtype=dtype, seqlen_new=1, rotary_dim=64, causal=True)
    for dtype in ("float16", "float32")
)


@everywhere
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_step_by_step_the_cache_fills_and_each_token_is_right(
    target: Target, dtype: str, page_size: int
) -> None:
    xp, steps = target.xp, 40
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((2, steps, 4, 64)).astype(DTYPES[dtype]) for _ in range(3))
    shape = (6, 16, 4, 64) if page_size else (2, steps, 4, 64)
    caches = [Amid(xp, np.full(shape, np.nan, q.dtype)) for _ in range(2)]
    views = [cache.view for cache in caches]
    table = xp.asarray(np.array([[4, 0, 2], [1, 5, 3]], np.int32)) if page_size else None
    outs = []
    for first, end in itertools.pairwise((0, 17, 18, 19, 20, 25, 38, 39, 40)):
        q_new, *kv_new = (xp.asarray(array[:, first:end]) for array in (q, k, v))
        options = {"cache_seqlens": xp.asarray(np.full(2, first, np.int32)), "causal": True}
        options["block_table"] = table
        out = target.call(flash_attention_with_kvcache, q_new, *views, *kv_new, **options)
        outs.append(to_numpy(out))
    Truth.of((q, k, v), causal=True).check(np.concatenate(outs, axis=1))
    for cache in caches:
        cache.values()


# ---- Rows of any alignment


@everywhere
@of_aligned_cases(
    kvcache(
        dtype=dtype,
        page_size=page_size,
        head_dim=40,
        head_dim_v=33,
        seqlen_q=3,
        seqlen_new=3,
        rotary_dim=rotary_dim,
        causal=True,
    )
    for dtype in ("bfloat16", "float32", "float64")
    for page_size, rotary_dim in ((0, 0), (16, 20))
)
def test_rows_of_any_alignment_are_read_and_written_in_place(
    target: Target, case: KVCacheCase, alignment: int
) -> None:
    check_kvcache(target, case, alignment)


# ---- Splits of the keys


@everywhere
@of_cases(
    KVCacheCase(
        *((4999, 1203, 0, 77), dtype, seqlen_q, new, 8, 2), causal=True, page_size=page_size
    )
    for dtype, page_size, seqlen_q, new in (
        ("float16", 0, 1, 1),
        ("bfloat16", 16, 1, 0),
        ("bfloat16", 0, 17, 0),
        ("float16", 1, 5, 5),
        ("float32", 0, 2, 2),
    )
)
@pytest.mark.parametrize("num_splits", [0, 1, 3, 7])
def test_any_number_of_splits_is_right(target: Target, case: KVCacheCase, num_splits: int) -> None:
    check_kvcache(target, case, num_splits=num_splits)


@on_gpu
@of_cases([kvcache(dtype="float16", batch=2, longest=300, seqlen_q=2, heads_q=8, heads_kv=2)])
@pytest.mark.parametrize("num_splits", [32, 100, 512])
def test_more_splits_than_there_are_tiles_of_keys_are_right(
    target: Target, case: KVCacheCase, num_splits: int
) -> None:
    check_kvcache(target, case, num_splits=num_splits)


# ---- Reproducible bits, and counters that kernels reset to zero


@on_gpu
@of_cases(
    [kvcache(dtype="bfloat16", longest=3000, seqlen_q=2, seqlen_new=2, rotary_dim=64, causal=True)]
)
@pytest.mark.parametrize("num_splits", [0, 7])
def test_fifty_calls_give_the_same_bits(target: Target, case: KVCacheCase, num_splits: int) -> None:
    problem: KVCacheProblem = problem_of(case)
    expected = run_kvcache(target, problem.arguments(), num_splits=num_splits)
    problem.check(*expected[:2])
    for _ in range(49):
        again = run_kvcache(target, problem.arguments(), num_splits=num_splits)
        assert_same_bits(again, expected)


# These cases split their keys differently, and use different counters.
MIXED = [
    kvcache(dtype="float16", batch=batch, longest=longest, seqlen_q=rows, heads_q=q, heads_kv=kv)
    for batch, longest, rows, q, kv in (
        (1, 4000, 1, 8, 8),
        (30, 900, 1, 8, 1),
        (3, 50, 17, 4, 2),
        (2, 3000, 5, 8, 2),
        (60, 20, 2, 4, 4),
        (1, 2500, 1, 1, 1),
    )
]


def on_device(case: KVCacheCase) -> dict[str, Any]:
    arguments: dict[str, Any] = problem_of(case).arguments(cupy)
    return arguments


def call(target: Target, arguments: dict[str, Any], **options: Any) -> Any:
    return target.call(flash_attention_with_kvcache, **arguments, **options)


@on_every_family
def test_calls_of_different_shapes_one_after_another_do_not_disturb_each_other(
    target: Target,
) -> None:
    sets = [on_device(case) for case in MIXED]
    expected = [call(target, arguments).get() for arguments in sets]
    for case, result in zip(MIXED, expected, strict=True):
        problem_of(case).check(result)
    # The calls are enqueued without a pause, and each uses the counters that the last one reset.
    order = np.random.default_rng(8).integers(len(sets), size=200)
    splits = np.random.default_rng(9).integers(0, 4, size=200)
    results = [call(target, sets[i], num_splits=int(n)) for i, n in zip(order, splits, strict=True)]
    for i, n, result in zip(order, splits, results, strict=True):
        if n == 0:
            np.testing.assert_array_equal(bits(result.get()), bits(expected[i]))
        else:
            problem_of(MIXED[i]).check(result)


@on_every_family
def test_two_streams_at_once_are_right(target: Target) -> None:
    sets = [on_device(case) for case in MIXED]
    expected = [call(target, arguments).get() for arguments in sets]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    results: list[list[tuple[int, Any]]] = [[], []]
    # The second stream uses the reverse order, so that different calls run at the same time.
    for repeat in range(20):
        for i in range(len(sets)):
            for s, which in enumerate((i, -1 - i)):
                with streams[s]:
                    results[s].append((which, call(target, sets[which])))
        if repeat == 0:
            cupy.cuda.Device().synchronize()
    cupy.cuda.Device().synchronize()
    for which, result in itertools.chain(*results):
        np.testing.assert_array_equal(bits(result.get()), bits(expected[which]))


@on_every_family
def test_threads_with_streams_of_their_own_are_right(target: Target) -> None:
    sets = [on_device(case) for case in MIXED]
    expected = [call(target, arguments).get() for arguments in sets]
    results: dict[int, list[np.ndarray]] = {}
    start = threading.Barrier(len(sets))
    cupy.cuda.Device().synchronize()

    def work(index: int) -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            start.wait(60)
            outs = [call(target, sets[index]) for _ in range(20)]
            results[index] = [out.get(stream=stream) for out in outs]
            stream.synchronize()

    run_in_threads(work, len(sets))
    assert sorted(results) == list(range(len(sets)))
    for index, outs in results.items():
        for out in outs:
            np.testing.assert_array_equal(bits(out), bits(expected[index]))


# ---- Batch invariance

INVARIANT = [
    kvcache(
        dtype=dtype,
        page_size=page_size,
        indexed=not page_size,
        seqlen_q=seqlen_q,
        seqlen_new=new,
        rotary_dim=rotary_dim,
        causal=True,
        longest=700,
        heads_q=8,
        heads_kv=2,
    )
    for dtype, page_size, seqlen_q, new, rotary_dim in (
        ("float16", 0, 1, 1, 0),
        ("bfloat16", 16, 1, 1, 64),
        ("float16", 0, 17, 0, 0),
        ("float32", 0, 2, 2, 32),
        ("float64", 3, 1, 0, 0),
    )
]


@everywhere
@of_cases(INVARIANT)
def test_batch_invariant_bits_of_a_sequence_are_the_same_alone(
    target: Target, case: KVCacheCase
) -> None:
    problem: KVCacheProblem = problem_of(case)
    arguments = problem.arguments()
    out, lse, *caches = run_kvcache(target, arguments, batch_invariant=True)
    problem.check(out, lse)
    problem.check_caches(*caches)
    for b in range(len(case.lengths)):
        alone = run_kvcache(target, only(arguments, b), batch_invariant=True)
        assert_same_bits(alone[:2], (out[b : b + 1], lse[b : b + 1]))


def only(arguments: dict[str, Any], b: int) -> dict[str, Any]:
    """Return the arguments of one sequence of the batch; the caches stay whole."""
    per_sequence = ("q", "k", "v", "cache_seqlens", "cache_batch_idx", "block_table")
    return {
        name: value[b : b + 1] if name in per_sequence and value is not None else value
        for name, value in arguments.items()
    }


@everywhere
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("rotary_dim", [0, 64])
@pytest.mark.parametrize("cuts", [(100, 101, 102, 230, 247), (1, 2, 3, 4, 5, 6, 7), (299,)])
def test_batch_invariant_bits_do_not_depend_on_chunks_and_steps(
    target: Target, dtype: str, page_size: int, rotary_dim: int, cuts: tuple[int, ...]
) -> None:
    length = 300
    sizes = {"page_size": page_size, "rotary_dim": rotary_dim}
    case = KVCacheCase((0,), dtype, length, length, 8, 2, causal=True, **sizes)
    arguments = problem_of(case).arguments()
    whole = run_kvcache(target, arguments, batch_invariant=True)
    problem_of(case).check(*whole[:2])
    chunks = []
    caches = {name: arguments[name] for name in ("k_cache", "v_cache")}
    for first, end in itertools.pairwise((0, *cuts, length)):
        chunk = {name: arguments[name][:, first:end] for name in ("q", "k", "v")}
        lengths = {"cache_seqlens": np.array([first], np.int32)}
        out, lse, *after = run_kvcache(
            target, arguments | caches | chunk | lengths, batch_invariant=True
        )
        chunks.append((out, lse))
        caches = dict(zip(caches, after, strict=True))
    together = (
        np.concatenate([out for out, _ in chunks], axis=1),
        np.concatenate([lse for _, lse in chunks], axis=2),
    )
    assert_same_bits((*together, *caches.values()), whole)


# ---- NaN and infinity that must have no effect


@on_every_family
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("num_splits", [0, 3])
def test_what_lies_beyond_the_lengths_leaves_no_trace(
    target: Target, page_size: int, num_splits: int
) -> None:
    # Unused rows hold NaN, infinity or a number; the bits of the result must be the same.
    case = kvcache(
        dtype="float16", longest=900, seqlen_q=5, page_size=page_size, heads_q=8, heads_kv=2
    )
    results = []
    for filling in (np.nan, np.inf, 1e4):
        arguments = problem_of(case).arguments()
        for name in ("k_cache", "v_cache"):
            cache = arguments[name]
            cache[np.isnan(cache.astype(np.float32))] = filling
        results.append(run_kvcache(target, arguments, num_splits=num_splits)[:2])
    problem_of(case).check(*results[0])
    for result in results[1:]:
        assert_same_bits(result, results[0])


@on_every_family
@pytest.mark.parametrize("page_size", [0, 16])
def test_one_sequence_leaves_no_trace_in_another(target: Target, page_size: int) -> None:
    lengths = 300, 120, 700
    case = KVCacheCase(lengths, "bfloat16", 3, 3, 8, 2, causal=True, page_size=page_size)
    arguments = problem_of(case).arguments()
    clean = run_kvcache(target, arguments)
    arguments["q"][1] = np.nan
    place_of_second = arguments["block_table"][1] if page_size else 1
    for name in ("k_cache", "v_cache"):
        arguments[name][place_of_second] = np.inf
    poisoned = run_kvcache(target, arguments)
    for result, expected in zip(poisoned[:2], clean[:2], strict=True):
        np.testing.assert_array_equal(bits(result[[0, 2]]), bits(expected[[0, 2]]))
    assert np.isnan(poisoned[0][1].astype(np.float32)).all()


# ---- Rows after the first 2^31 elements

FAR = 2**31 + 2**20  # elements


@on_gpu
@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@pytest.mark.parametrize("seqlen_new", [0, 3])
def test_rows_beyond_32_bits_of_a_cache_are_read_and_appended(
    target: Target, page_size: int, seqlen_new: int
) -> None:
    rng = np.random.default_rng(31)
    batch, capacity, head_dim = 3, 300, 64

    def random_rows(*shape: int) -> np.ndarray:
        return rng.standard_normal((*shape, head_dim)).astype(np.float16)

    # Caches or pages with numbers are at both ends of the array, with NaN in between. Half of them
    # belong to sequences, including the last one.
    rows = page_size or capacity
    owned = batch * -(-capacity // rows)
    values = random_rows(2 * owned, rows, 2, 1)
    owners = np.append(2 * owned - 1, rng.permutation(2 * owned - 1)[: owned - 1])
    arguments = {
        "q": random_rows(batch, 2, 4),
        "k": random_rows(batch, seqlen_new, 1) if seqlen_new else None,
        "v": random_rows(batch, seqlen_new, 1) if seqlen_new else None,
        "cache_seqlens": np.array((290, 97, 0), np.int32),
        "rotary_cos": None,
        "rotary_sin": None,
        "rotary_interleaved": True,
        "causal": True,
        "softmax_scale": None,
    }

    def with_cache(buffer: Any, indices: np.ndarray) -> dict[str, Any]:
        """Return the arguments with interleaved keys and values, (blocks, rows, 2, 1, dim)."""
        numbers = indices.astype(np.int32)
        return arguments | {
            "k_cache": buffer[:, :, 0],
            "v_cache": buffer[:, :, 1],
            "cache_batch_idx": None if page_size else numbers,
            "block_table": numbers.reshape(batch, -1) if page_size else None,
        }

    near = with_cache(values, owners)
    count = FAR // values[0].size + 2 * owned
    require_free_memory(count * values[0].nbytes + 2**30)
    buffer = cupy.ndarray((count, *values.shape[1:]), np.float16)
    buffer.data.memset_async(0xFF, buffer.nbytes)
    buffer[:owned].set(values[:owned])
    buffer[-owned:].set(values[owned:])
    far = with_cache(buffer, np.where(owners < owned, owners, owners + count - 2 * owned))
    on_device = {
        name: cupy.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in far.items()
    }
    out, lse = call(target, on_device, return_lse=True)
    SequencesTruth.of_kvcache(near).check(out, lse)
    after = attention_with_kvcache_reference(**near)
    written = np.concatenate([buffer[:owned].get(), buffer[-owned:].get()])
    assert written[:, :, 0].tobytes() == after.k_cache.tobytes()
    assert written[:, :, 1].tobytes() == after.v_cache.tobytes()


# ---- Invalid lengths and indices in device memory, which the host cannot check


@on_gpu
@pytest.mark.parametrize(("change", "page_size"), KVCACHE_CALLS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("seqlen_new", [0, 1, 7])
@pytest.mark.parametrize("num_splits", [0, 3])
def test_wrong_numbers_do_what_is_documented_and_no_harm(
    target: Target, change: str, page_size: int, dtype: str, seqlen_new: int, num_splits: int
) -> None:
    arguments = wrong_kvcache(change, page_size, dtype, seqlen_new)
    check_kvcache_result(arguments, *run_kvcache(target, arguments, num_splits=num_splits))


@on_gpu
@pytest.mark.parametrize(("change", "page_size"), KVCACHE_CALLS)
@pytest.mark.parametrize("seqlen_new", [0, 7])
def test_wrong_numbers_do_no_harm_where_there_are_many_heads_either(
    target: Target, change: str, page_size: int, seqlen_new: int
) -> None:
    arguments = wrong_kvcache(change, page_size, "bfloat16", seqlen_new, heads=HEADS[1])
    check_kvcache_result(arguments, *run_kvcache(target, arguments))


@pytest.mark.parametrize(("change", "page_size"), KVCACHE_CALLS)
def test_these_heads_are_so_many_that_clusters_compute_them(change: str, page_size: int) -> None:
    arguments = wrong_kvcache(change, page_size, "bfloat16", 7, heads=HEADS[1])
    assert cluster_of(decode_on_h100(arguments)) in (4, 8)


@on_gpu
@pytest.mark.parametrize("lengths", [(60, 250, 0), (-7, 2**31 - 1, 33)])
@pytest.mark.parametrize("causal", [False, True])
def test_positions_outside_of_the_rotary_table_take_its_nearest_row(
    target: Target, lengths: tuple[int, int, int], causal: bool
) -> None:
    case = KVCacheCase(
        (60, 250, 0), dtype="float16", seqlen_q=5, seqlen_new=5, rotary_dim=32, causal=causal
    )
    arguments = problem_of(case).arguments()
    arguments["cache_seqlens"] = np.array(lengths, np.int32)
    rows = 62
    short, extended = {}, {}
    for name in ("rotary_cos", "rotary_sin"):
        table = arguments[name]
        short[name] = table[:rows]
        last = np.repeat(table[rows - 1 : rows], len(table) - rows, axis=0)
        extended[name] = np.concatenate([table[:rows], last])
    assert_same_bits(
        run_kvcache(target, arguments | short), run_kvcache(target, arguments | extended)
    )


@on_every_family
def test_a_call_that_is_refused_leaves_the_cache_as_it_was(target: Target) -> None:
    case = KVCacheCase((60, 0), dtype="float16", seqlen_new=1, causal=True)
    problem: KVCacheProblem = problem_of(case)
    arguments = problem.arguments(target.xp)
    for wrong in ({"tile": {"Br": 7}}, {"num_splits": -1}, {"softmax_scale": np.nan}):
        with pytest.raises(ValueError, match=r"7|-1|nan"):
            flash_attention_with_kvcache(**(arguments | target.options | wrong))
    for name in ("k_cache", "v_cache"):
        assert arguments[name].get().tobytes() == getattr(problem, name).tobytes()


# ---- Types of the arrays, and partial results of a cache merged by `combine`


@pytest.mark.parametrize("backend", [pytest.param("auto", marks=pytest.mark.gpu), "cpu"])
def test_caches_in_host_memory_are_appended_to_in_place(backend: str) -> None:
    case = kvcache(dtype="float16", seqlen_q=2, seqlen_new=2, causal=True, page_size=16)
    problem: KVCacheProblem = problem_of(case)
    arguments = problem.arguments()
    out, lse = flash_attention_with_kvcache(**arguments, return_lse=True, backend=backend)
    assert type(out) is type(lse) is np.ndarray
    problem.check(out, lse)
    problem.check_caches(arguments["k_cache"], arguments["v_cache"])


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # warnings of torch must not fail the test
def test_torch_tensors_on_the_gpu_are_appended_to_in_place() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no GPU")
    case = kvcache(dtype="float16", seqlen_q=2, seqlen_new=2, causal=True, page_size=16)
    problem: KVCacheProblem = problem_of(case)
    tensors = {
        name: torch.tensor(value, device="cuda") if isinstance(value, np.ndarray) else value
        for name, value in problem.arguments().items()
    }
    out = flash_attention_with_kvcache(**tensors)
    assert isinstance(out, torch.Tensor)
    problem.check(out.cpu().numpy())
    problem.check_caches(*(tensors[name].cpu().numpy() for name in ("k_cache", "v_cache")))


@everywhere
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parts_of_a_cache_attended_to_one_by_one_merge_into_the_whole(
    target: Target, dtype: str
) -> None:
    xp = target.xp
    case = KVCacheCase((301, 77, 0), dtype=dtype, seqlen_q=3, heads_q=8, heads_kv=2)
    problem: KVCacheProblem = problem_of(case)
    arguments = problem.arguments(xp)
    parts = []
    for first, end in itertools.pairwise((0, 50, 210, problem.k_cache.shape[1])):
        lengths = np.clip(np.array(case.lengths) - first, 0, end - first).astype(np.int32)
        part = {name: arguments[name][:, first:end] for name in ("k_cache", "v_cache")}
        part["cache_seqlens"] = xp.asarray(lengths)
        parts.append(call(target, arguments | part, return_lse=True))
    out, lse = combine(*(xp.stack(results) for results in zip(*parts, strict=True)))
    problem.check(out, lse)
