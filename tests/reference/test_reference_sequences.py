"""The reference on packed, cached and paged sequences, compared with one dense call for each."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from support.calls.sequence_support import (
    KVCacheCase,
    VarlenCase,
    random_kvcache_case,
    random_varlen_case,
)
from support.comparisons import assert_all_equal, with_arrays
from support.foreign import Foreign
from support.gpu.gpu_support import DTYPES

from cupy_flash.reference.dense import attention_reference, max_error
from cupy_flash.reference.packed import attention_varlen_reference, attention_with_kvcache_reference

PAGE_SIZES = [0, 1, 3, 16, 64]


def dense_reference(sequence, case):
    """Return (out, lse) of a sequence: (seqlen_q, heads_q, head_dim_v) and (heads_q, seqlen_q)."""
    options = {"causal": case.causal, "softmax_scale": case.softmax_scale, "return_lse": True}
    out, lse = attention_reference(*(x[None] for x in sequence), **options)
    return out[0], lse[0]


@pytest.mark.parametrize("seqused", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_packed_sequences_are_each_computed_on_their_own(rng, page_size, causal, seqused):
    options = {"page_size": page_size, "causal": causal, "seqused": seqused}
    case = random_varlen_case(rng, head_dim_v=24, softmax_scale=-0.3, **options)
    problem = case.problem()
    out, lse = attention_varlen_reference(**problem.arguments())
    for b, sequence in enumerate(problem.dense):
        rows = slice(problem.cu_seqlens_q[b], problem.cu_seqlens_q[b + 1])
        assert_all_equal((out[rows], lse[:, rows]), dense_reference(sequence, case))
    of_none = slice(problem.cu_seqlens_q[-1], None)
    assert len(out[of_none]) == case.rows_of_none
    assert (out[of_none] == 0).all()
    assert (lse[:, of_none] == -np.inf).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_new", [0, 1, 20])
@pytest.mark.parametrize(("page_size", "indexed"), [(0, False), (0, True), (1, False), (16, False)])
def test_cached_sequences_are_each_computed_on_their_own(
    rng, page_size, indexed, seqlen_new, causal
):
    options = {"page_size": page_size, "indexed": indexed, "causal": causal}
    case = random_kvcache_case(rng, seqlen_q=7, seqlen_new=seqlen_new, **options)
    problem = case.problem()
    out, lse, k_cache, v_cache, _, _ = attention_with_kvcache_reference(**problem.arguments())
    for b, sequence in enumerate(problem.dense):
        assert_all_equal((out[b], lse[b]), dense_reference(sequence, case))
    problem.check_caches(k_cache, v_cache)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 24, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_new_keys_and_queries_are_turned_by_their_positions(
    rng, dtype, rotary_dim, interleaved, causal
):
    turn = {"rotary_dim": rotary_dim, "rotary_interleaved": interleaved}
    sizes = {"dtype": dtype, "seqlen_q": 5, "seqlen_new": 5}
    case = random_kvcache_case(rng, causal=causal, **sizes, **turn)
    problem = case.problem()
    result = attention_with_kvcache_reference(**problem.arguments())
    problem.check_caches(result.k_cache, result.v_cache)
    # `problem` rotates by another formula in the dtype's precision, and rounds q.
    eps = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    for b, sequence in enumerate(problem.dense):
        expected_out, expected_lse = dense_reference(sequence, case)
        assert max_error(result.lse[b], expected_lse) <= 8 * eps
        assert max_error(result.out[b], expected_out) <= 16 * eps


def test_turned_keys_are_rounded_as_a_cache_holds_them_and_queries_are_not():
    # One pair of columns is rotated by 45 degrees: 1 becomes sqrt(1/2), which float16 rounds.
    one = np.zeros((1, 1, 1, 2), np.float16)
    one[..., 0] = 1
    caches = np.zeros_like(one), np.zeros_like(one)
    tables = dict.fromkeys(("rotary_cos", "rotary_sin"), np.full((1, 1), np.sqrt(0.5)))
    options = {"cache_seqlens": 0, "softmax_scale": 1.0, **tables}
    result = attention_with_kvcache_reference(one, *caches, one, one, **options)
    rounded = float(np.float16(np.sqrt(0.5)))
    assert result.k_cache.dtype == np.float16
    # The only score, which is the lse, is q . k = 2 * sqrt(1/2) * rounded.
    np.testing.assert_allclose(result.lse, 2 * np.sqrt(0.5) * rounded, rtol=1e-14)


def test_one_length_for_all_may_be_an_int():
    problem = KVCacheCase((17, 17), seqlen_new=3).problem()
    arguments = problem.arguments()
    expected = attention_with_kvcache_reference(**arguments)
    result = attention_with_kvcache_reference(**arguments | {"cache_seqlens": 17})
    assert_all_equal(result, expected)


def test_the_arguments_are_left_alone():
    problem = KVCacheCase((17, 40, 3), seqlen_new=3, page_size=4, rotary_dim=8).problem()
    arguments = problem.arguments()
    attention_with_kvcache_reference(**arguments)
    for name, array in problem.arguments().items():
        if isinstance(array, np.ndarray):
            assert array.tobytes() == arguments[name].tobytes()


def test_no_more_rows_than_max_seqlen_are_looked_at():
    problem = VarlenCase((30, 5), (40, 9), causal=True).problem()
    most = {"max_seqlen_q": 11, "max_seqlen_k": 19}
    out, _ = attention_varlen_reference(**problem.arguments() | most)
    q, k, v = problem.dense[0]
    expected, _ = dense_reference((q[:11], k[:19], v[:19]), problem.case)
    np.testing.assert_array_equal(out[:11], expected)
    assert (out[11:30] == 0).all()


def test_without_cu_seqlens_k_pages_hold_max_seqlen_k_keys():
    problem = VarlenCase((3, 5), (40, 40), page_size=16).problem()
    arguments = problem.arguments()
    expected, _ = attention_varlen_reference(**arguments)
    out, _ = attention_varlen_reference(**arguments | {"cu_seqlens_k": None, "max_seqlen_k": 40})
    np.testing.assert_array_equal(out, expected)


# Invalid integers


def test_a_decreasing_pair_is_an_empty_sequence_and_ends_are_clamped():
    problem = VarlenCase((30, 20), (40, 25), rows_of_none=0).problem()
    q, k, v = problem.q, problem.k, problem.v
    starts = {"cu_seqlens_q": [-7, 30, 20, 2**31 - 1], "cu_seqlens_k": [40, 10, 30, 2**31 - 1]}
    lengths = {name: np.array(values) for name, values in starts.items()}
    lengths |= {"max_seqlen_q": 100, "max_seqlen_k": 100}
    out, _ = attention_varlen_reference(**problem.arguments() | lengths)
    # Sequence 0 has no keys, sequence 1 no queries. Sequence 2 has the last 30 of 50 queries and
    # the last 35 of 65 keys; queries that it shares with sequence 0 belong to sequence 2.
    assert not out[:20].any()
    expected, _ = dense_reference((q[20:], k[30:], v[30:]), problem.case)
    np.testing.assert_array_equal(out[20:], expected)


@pytest.mark.parametrize("page", [-1, -(2**31), 10**6, 2**31 - 1])
def test_a_page_that_does_not_exist_reads_as_zeros_and_takes_no_rows(page):
    problem = KVCacheCase((40,), seqlen_new=4, page_size=16).problem()
    block_table = problem.block_table.copy()
    block_table[0, 0] = block_table[0, 2] = page
    arguments = problem.arguments() | {"block_table": block_table}
    result = attention_with_kvcache_reference(**arguments)
    q, k, v = (x.copy() for x in problem.dense[0])
    for x in (k, v):
        x[:16] = x[32:] = 0
    expected, _ = dense_reference((q, k, v), problem.case)
    np.testing.assert_array_equal(result.out[0], expected)
    assert result.k_cache.tobytes() == problem.k_cache.tobytes()
    assert result.v_cache.tobytes() == problem.v_cache.tobytes()


@pytest.mark.parametrize(("length", "kept"), [(2**31 - 1, 0), (25, 2), (27, 0), (-5, 3)])
def test_lengths_are_clamped_and_rows_past_the_capacity_dropped(length, kept):
    problem = KVCacheCase((20,), seqlen_new=3, slack=4, filler=0.5, causal=True).problem()
    capacity = problem.k_cache.shape[1]
    assert capacity == 27
    result = attention_with_kvcache_reference(**problem.arguments() | {"cache_seqlens": length})
    first = min(max(length, 0), capacity)
    k, v = problem.k_cache[0].copy(), problem.v_cache[0].copy()
    k[first : first + kept], v[first : first + kept] = problem.k[0, :kept], problem.v[0, :kept]
    np.testing.assert_array_equal(result.k_cache[0], k)
    np.testing.assert_array_equal(result.v_cache[0], v)
    keys = slice(0, first + kept)
    expected, _ = dense_reference((problem.q[0], k[keys], v[keys]), problem.case)
    np.testing.assert_array_equal(result.out[0], expected)


@pytest.mark.parametrize("index", [-1, 4, 2**31 - 1])
def test_a_cache_that_does_not_exist_leaves_its_sequence_without_keys(index):
    problem = KVCacheCase((20, 9), seqlen_new=3, indexed=True).problem()
    places = problem.cache_batch_idx.copy()
    places[0] = index
    result = attention_with_kvcache_reference(**problem.arguments() | {"cache_batch_idx": places})
    assert not result.out[0].any()
    assert (result.lse[0] == -np.inf).all()
    expected, _ = dense_reference(problem.dense[1], problem.case)
    np.testing.assert_array_equal(result.out[1], expected)
    untouched = np.arange(4) != places[1]
    for name in ("k_cache", "v_cache"):
        after, before = getattr(result, name), getattr(problem, name)
        assert after[untouched].tobytes() == before[untouched].tobytes()


@pytest.mark.parametrize("causal", [False, True])
def test_positions_past_the_rotary_table_take_its_last_row(causal):
    case = KVCacheCase((20, 2), seqlen_q=4, seqlen_new=4, rotary_dim=8, causal=causal)
    problem = case.problem()
    short = {name: getattr(problem, name)[:5] for name in ("rotary_cos", "rotary_sin")}
    long = {n: np.concatenate([x, np.repeat(x[-1:], 30, axis=0)]) for n, x in short.items()}
    assert_all_equal(
        *(attention_with_kvcache_reference(**problem.arguments() | x) for x in (short, long))
    )


def test_cupy_is_not_imported_for_numpy_arrays():
    code = (
        "import sys, numpy as np;"
        "from cupy_flash import attention_with_kvcache_reference as f;"
        "x = np.ones((1, 2, 1, 4)); f(x, x, x, cache_seqlens=2);"
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Error checks that tests in other files rely on


def test_a_wrong_row_of_values_is_noticed_in_a_long_sequence_beside_short_ones():
    case = VarlenCase((1, 1, 1), (1, 2, 300), dtype="float16", head_dim=128, head_dim_v=128)
    problem = case.problem()
    last = problem.cu_seqlens_k[3] - 1
    wrong = problem.arguments()
    wrong["v"][last] = -wrong["v"][last]
    out, lse = attention_varlen_reference(**wrong)
    with pytest.raises(AssertionError):
        problem.check(out.astype(np.float16), lse.astype(np.float32))


def test_a_missing_key_is_noticed_by_the_lse():
    case = VarlenCase((1, 30), (900, 700), dtype="bfloat16")
    problem = case.problem()
    missing = dataclasses.replace(case, seqused=True).problem().arguments()["seqused_k"] - 1
    out, lse = attention_varlen_reference(**problem.arguments() | {"seqused_k": missing})
    problem.check(out.astype(problem.q.dtype))
    with pytest.raises(AssertionError):
        problem.check(out.astype(problem.q.dtype), lse.astype(np.float32))


@pytest.mark.parametrize("page_size", [0, 16])
def test_packed_arrays_of_another_library_are_taken_and_given_back(page_size):
    arguments = VarlenCase((5, 0, 9), (7, 3, 20), page_size=page_size).problem().arguments()
    given = attention_varlen_reference(**with_arrays(Foreign, arguments))
    assert_all_equal((x.array for x in given), attention_varlen_reference(**arguments))


def test_caches_of_another_library_are_taken_and_given_back():
    case = KVCacheCase((5, 0, 9), seqlen_new=2, indexed=True, rotary_dim=8)
    arguments = case.problem().arguments()
    given = attention_with_kvcache_reference(**with_arrays(Foreign, arguments))
    expected = attention_with_kvcache_reference(**arguments)
    # The last two results are scales, which only 8-bit caches have.
    assert_all_equal((x.array for x in given[:4]), expected[:4])
    assert given[4:] == (None, None)
