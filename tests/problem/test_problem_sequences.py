"""The record of a call on packed, cached or paged sequences, and errors when it is made."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupy_flash.problem.arrays import ArraySpec, check_no_self_overlap
from cupy_flash.problem.problem import MAX_SEQLEN, MAX_SPLITS, make_problem
from cupy_flash.problem.values import MAX_COUNT

DTYPE = "float16"


def spec(*shape, dtype=DTYPE):
    return ArraySpec.contiguous(shape, dtype)


def packed(**changes):
    arrays = {"q": spec(1, 113, 6, 40), "k": spec(1, 203, 3, 40), "v": spec(1, 203, 3, 72)}
    sequences = {"kind": "varlen", "batch": 5, "max_seqlen_q": 50, "max_seqlen_k": 90}
    return make_problem(**(arrays | sequences | changes))


def cached(**changes):
    arrays = {"q": spec(5, 2, 6, 40), "k": spec(7, 239, 3, 40), "v": spec(7, 239, 3, 72)}
    return make_problem(**(arrays | {"kind": "kvcache"} | changes))


def paged(**changes):
    arguments = {"k": spec(31, 16, 3, 40), "v": spec(31, 16, 3, 72), "block_table": (9, 12)}
    return cached(**(arguments | changes))


def test_a_packed_problem_has_the_sequences_for_a_batch_and_the_bounds_for_seqlens():
    p = packed()
    assert (p.batch, p.seqlen_q, p.seqlen_k) == (5, 50, 90)
    assert (p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v) == (6, 3, 40, 72)
    assert p.tensors["q"].strides == (0, 240, 40)
    assert p.tensors["k"].strides == (0, 120, 40)
    assert p.tensors["out"].strides == (0, 6 * 72, 72)
    s = p.layout
    assert (s.packed_q, s.packed_k, s.total_q, s.total_k) == (True, True, 113, 203)
    assert (s.caches, s.page_size, s.pages, s.max_pages, s.new_keys) == (0, 0, 0, 0, 0)


def test_bounds_beyond_the_arrays_are_those_of_the_arrays():
    p = packed(max_seqlen_q=10**6, max_seqlen_k=10**6)
    assert (p.seqlen_q, p.seqlen_k) == (113, 203)


def test_a_packed_problem_over_pages_has_packed_queries_only():
    p = packed(k=spec(31, 16, 3, 40), v=spec(31, 16, 3, 72), block_table=(4, 6))
    s = p.layout
    assert (s.packed_q, s.packed_k, s.total_k) == (True, False, 0)
    assert (s.page_size, s.pages, s.max_pages, s.block_table_stride) == (16, 31, 4, 6)
    assert p.seqlen_k == 64
    assert p.tensors["k"].strides == (16 * 3 * 40, 3 * 40, 40)


def test_a_cache_has_its_capacity_for_seqlen_k():
    p = cached(new_keys=2)
    assert (p.batch, p.seqlen_q, p.seqlen_k) == (5, 2, 239)
    s = p.layout
    assert (s.packed_q, s.packed_k, s.caches, s.page_size, s.new_keys) == (False, False, 7, 0, 2)
    assert p.softmax_scale == 1 / math.sqrt(40)


def test_a_paged_cache_has_the_rows_of_its_pages_for_seqlen_k():
    p = paged()
    assert p.seqlen_k == 9 * 16
    assert (p.layout.caches, p.layout.pages, p.layout.max_pages) == (0, 31, 9)


def test_a_causal_problem_leaves_the_offset_to_each_sequence():
    assert (cached(causal=True).causal, cached(causal=True).q_offset) == (True, 0)


def test_rows_of_one_packed_block_are_aligned_whatever_its_batch_stride():
    q = ArraySpec((1, 113, 6, 64), (3, 384, 64), DTYPE)
    p = packed(q=q, k=spec(1, 203, 3, 64), v=spec(1, 203, 3, 64))
    assert (p.alignment, p.tensors["q"].strides) == (16, (0, 384, 64))


def test_a_batch_invariant_problem_does_not_split_keys():
    s = cached(batch_invariant=True).layout
    assert (s.num_splits, s.batch_invariant) == (1, True)
    assert cached(batch_invariant=True, num_splits=1) == cached(batch_invariant=True)
    assert cached(num_splits=7).layout.num_splits == 7


@pytest.mark.parametrize("make", [packed, cached, paged])
def test_problems_of_sequences_hash(make):
    assert hash(make()) == hash(make())


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (packed, {"v": spec(1, 202, 3, 72)}, "k and v must have one total length, but have 203"),
        (packed, {"max_seqlen_q": -1}, "max_seqlen_q is -1; expected at least 0"),
        (packed, {"max_seqlen_k": -3}, "max_seqlen_k is -3; expected at least 0"),
        (packed, {"k": spec(1, 203, 3, 32)}, "k has head_dim 32, but q has 40"),
        (packed, {"v": spec(1, 203, 2, 72)}, "k and v must have one number of heads, but have 3"),
        (
            packed,
            {"q": spec(1, MAX_SEQLEN + 1, 6, 40)},
            f"total length of q is {MAX_SEQLEN + 1}; expected at most {MAX_SEQLEN}",
        ),
        (cached, {"v": spec(6, 239, 3, 72)}, "k_cache and v_cache must have one number of caches"),
        (cached, {"v": spec(7, 238, 3, 72)}, "k_cache and v_cache must have one seqlen, but have"),
        (cached, {"k": spec(7, 239, 3, 32)}, "k_cache has head_dim 32, but q has 40"),
        (
            cached,
            {"q": spec(5, 2, 7, 40)},
            "q has 7 heads; expected a multiple of the 3 heads of k_cache and v_cache",
        ),
        (
            cached,
            {"q": spec(8, 2, 6, 40)},
            "hold 7 caches, but q has batch 8; expected one for each sequence, or cache_batch_idx",
        ),
        (cached, {"new_keys": 240}, "k and v append 240 rows to each cache, but a cache holds 239"),
        (paged, {"v": spec(31, 8, 3, 72)}, "must have one page_size, but have 16 and 8"),
        (paged, {"v": spec(30, 16, 3, 72)}, "must have one number of pages, but have 31 and 30"),
        (
            paged,
            {"k": spec(31, 0, 3, 40), "v": spec(31, 0, 3, 72)},
            "k_cache and v_cache have pages of 0 rows; expected at least 1",
        ),
        (
            paged,
            {"block_table": (2**27, 2**27)},
            f"capacity of a cache is {2**31}; expected at most {MAX_SEQLEN}",
        ),
        (
            cached,
            {"k": spec(2**31, 239, 3, 40), "v": spec(2**31, 239, 3, 72)},
            f"number of caches in k_cache and v_cache is {2**31}; expected at most {MAX_COUNT}",
        ),
        (
            paged,
            {"k": spec(2**31, 16, 3, 40), "v": spec(2**31, 16, 3, 72)},
            f"number of pages in k_cache and v_cache is {2**31}; expected at most {MAX_COUNT}",
        ),
        (packed, {"batch": 2**31}, f"batch is {2**31}; expected at most {MAX_COUNT}"),
        (paged, {"q": spec(2**31, 2, 6, 40)}, f"batch is {2**31}; expected at most {MAX_COUNT}"),
        (cached, {"num_splits": -1}, f"num_splits is -1; expected 1 to {MAX_SPLITS}, or 0"),
        (cached, {"num_splits": MAX_SPLITS + 1}, f"expected 1 to {MAX_SPLITS}, or 0"),
        (
            cached,
            {"num_splits": 2, "batch_invariant": True},
            "num_splits is 2, but batch_invariant=True does not split keys; pass 0 or 1",
        ),
        (cached, {"softmax_scale": math.inf}, "softmax_scale is inf; expected a finite number"),
        (cached, {"out": spec(5, 2, 6, 40)}, r"out has shape .*; expected \(5, 2, 6, 72\)"),
    ],
)
def test_what_does_not_go_together_is_refused(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (packed, {"max_seqlen_k": None}, "max_seqlen_k is None; expected an integer"),
        (packed, {"max_seqlen_q": 5.0}, r"max_seqlen_q is 5\.0; expected an integer"),
        (packed, {"q": spec(1, 113, 6, 40, dtype="float32")}, "q, k and v must have one dtype"),
        (cached, {"v": spec(7, 239, 3, 72, dtype="int8")}, "v_cache has dtype int8; expected one"),
        (cached, {"q": spec(5, 2, 6, 40, dtype="float32")}, "q, k_cache and v_cache must have one"),
        (cached, {"causal": 1}, "causal is 1; expected True or False"),
        (cached, {"batch_invariant": "no"}, "batch_invariant is 'no'; expected True or False"),
        (cached, {"num_splits": 1.5}, r"num_splits is 1\.5; expected an integer"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_by_name(make, changes, message):
    with pytest.raises(TypeError, match=message):
        make(**changes)


def test_a_cache_of_each_sequence_s_choice_may_hold_fewer_than_the_batch():
    q = spec(9, 2, 6, 40)
    assert cached(q=q, chosen_caches=True).layout.caches == 7


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        *(
            (packed, {"batch": 0}),
            (packed, {"q": spec(1, 0, 6, 40)}),
            (packed, {"max_seqlen_q": 0}),
        ),
        *((cached, {"q": spec(0, 2, 6, 40)}), (cached, {"q": spec(5, 0, 6, 40)})),
    ],
)
def test_a_problem_without_rows_is_empty(make, changes):
    assert make(**changes).is_empty


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (packed, {"k": spec(1, 0, 3, 40), "v": spec(1, 0, 3, 72)}),
        (packed, {"max_seqlen_k": 0}),
        (cached, {"k": spec(7, 0, 3, 40), "v": spec(7, 0, 3, 72)}),
        (paged, {"block_table": (0, 0)}),
    ],
)
def test_a_problem_without_keys_still_has_an_output(make, changes):
    p = make(**changes)
    assert p.seqlen_k == 0
    assert not p.is_empty


def test_a_cache_that_overlaps_itself_is_told_by_its_strides():
    cache = np.broadcast_to(np.zeros((1, 4, 2, 8), np.float32), (3, 4, 2, 8))
    strides = tuple(stride // 4 for stride in cache.strides[:3])
    message = r"k_cache overlaps itself: .* elements do not share memory"
    with pytest.raises(ValueError, match=message):
        check_no_self_overlap("k_cache", ArraySpec(cache.shape, strides, "float32"))
