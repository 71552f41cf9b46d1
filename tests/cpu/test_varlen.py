"""The CPU backend on packed, cached and paged sequences, compared with the reference."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.calls.sequence_support import (
    KVCacheCase,
    Truth,
    VarlenCase,
    random_kvcache_case,
    random_varlen_case,
)
from support.comparisons import assert_same_bits, peak_memory
from support.draws import few_then_slow
from support.gpu.gpu_support import DTYPES

from cupy_flash import (
    attention_varlen_reference,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)
from cupy_flash.cpu import forward as cpu_forward
from cupy_flash.cpu import padding, rowwise, thread_pool, varlen
from cupy_flash.cpu.row_results import RowResults
from cupy_flash.cpu.varlen import append, kvcache_forward, rotate, varlen_forward
from cupy_flash.problem.tile import Tile

# The run time of an example depends on its shape.
relaxed = settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])

PAGE_SIZES = [0, 1, 3, 16, 64]
lengths = st.sampled_from([0, 0, 1, 2, 17, 64, 113, 203])
heads = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)])
tiles = st.sampled_from([None, None, Tile(7, 5), Tile(64, 64)])
common = {
    "dtype": st.sampled_from(sorted(DTYPES)),
    "head_dim": st.sampled_from([8, 24, 64, 320]),
    "head_dim_v": st.sampled_from([1, 16, 72, 300]),
    "causal": st.booleans(),
    "softmax_scale": st.sampled_from([None, 0.0, -0.1, 0.3]),
    "page_size": st.sampled_from(PAGE_SIZES),
    "seed": st.integers(0, 2**32),
}


@st.composite
def varlen_cases(draw):
    pairs = draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=5))
    heads_q, heads_kv = draw(heads)
    return VarlenCase(
        *zip(*pairs, strict=True),
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqused=draw(st.booleans()),
        rows_of_none=draw(st.integers(0, 5)),
        slack=draw(st.integers(0, 3)),
        **{name: draw(strategy) for name, strategy in common.items()},
    )


@st.composite
def kvcache_cases(draw):
    heads_q, heads_kv = draw(heads)
    fields = {name: draw(strategy) for name, strategy in common.items()}
    seqlen_new = draw(st.sampled_from([0, 1, 5, 70]))
    rotary_dim = draw(st.sampled_from([0, 2, 8, fields["head_dim"]])) if seqlen_new else 0
    return KVCacheCase(
        lengths=tuple(draw(st.lists(lengths, min_size=1, max_size=5))),
        seqlen_q=draw(st.sampled_from([1, 3, 70])),
        seqlen_new=seqlen_new,
        heads_q=heads_q,
        heads_kv=heads_kv,
        indexed=not fields["page_size"] and draw(st.booleans()),
        rotary_dim=rotary_dim,
        rotary_interleaved=draw(st.booleans()),
        slack=draw(st.integers(0, 3)),
        **fields,
    )


def lse_like(q):
    return np.float64 if q.dtype == np.float64 else np.float32


def run_varlen(arguments, **options):
    """Return (out, lse) of packed sequences, in buffers that held NaN before."""
    q, v = arguments["q"], arguments["v"]
    out = np.full((*q.shape[:2], v.shape[-1]), np.nan, q.dtype)
    lse = np.full((q.shape[1], q.shape[0]), np.nan, lse_like(q))
    scale = arguments["softmax_scale"]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    varlen_forward(
        out=out, results=RowResults(lse), **{**arguments, "softmax_scale": scale}, **options
    )
    return out, lse


def run_kvcache(arguments, **options):
    """Return (out, lse) of one decoding step: rotate, append in place, attend."""
    arguments = dict(arguments)
    q, k, v = (arguments.pop(name) for name in "qkv")
    cos, sin = arguments.pop("rotary_cos"), arguments.pop("rotary_sin")
    turn = {"interleaved": arguments.pop("rotary_interleaved")}
    before = clamped_lengths(arguments, arguments.pop("cache_seqlens"))
    where = {name: arguments[name] for name in ("cache_batch_idx", "block_table")}
    k_cache, v_cache = arguments["k_cache"], arguments["v_cache"]
    after = before
    if cos is not None:
        q = rotate(q, cos, sin, before, advance=arguments["causal"], **turn)
        k = rotate(k, cos, sin, before, advance=True, **turn)
    if k is not None:
        append(k_cache, v_cache, k, v, lengths=before, **where)
        after = before + k.shape[1]
    out = np.full((*q.shape[:3], v_cache.shape[-1]), np.nan, q.dtype)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, lse_like(q))
    scale = arguments.pop("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    results = RowResults(lse)
    where = {"lengths": after, "softmax_scale": scale, **arguments, **options}
    kvcache_forward(q, out=out, results=results, **where)
    return out, lse


def clamped_lengths(arguments, lengths):
    rows, block_table = arguments["k_cache"].shape[1], arguments["block_table"]
    return np.clip(lengths, 0, rows if block_table is None else rows * block_table.shape[1])


def check_varlen(case, **options):
    problem = case.problem()
    out, lse = run_varlen(problem.arguments(), **options)
    problem.check(out, lse)


def check_kvcache(case, **options):
    problem = case.problem()
    arguments = problem.arguments()
    problem.check(*run_kvcache(arguments, **options))
    problem.check_caches(arguments["k_cache"], arguments["v_cache"])


@relaxed
@given(case=varlen_cases(), tile=tiles, batch_invariant=st.booleans(), threads=st.integers(1, 3))
def test_packed_sequences_equal_the_reference_whatever_their_lengths(
    case, tile, batch_invariant, threads
):
    check_varlen(case, tile=tile, batch_invariant=batch_invariant, threads=threads)


@relaxed
@given(case=kvcache_cases(), tile=tiles, batch_invariant=st.booleans(), threads=st.integers(1, 3))
def test_a_step_on_a_cache_equals_the_reference_and_writes_nothing_but_the_new_rows(
    case, tile, batch_invariant, threads
):
    check_kvcache(case, tile=tile, batch_invariant=batch_invariant, threads=threads)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("page_size", few_then_slow(PAGE_SIZES, 1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_ragged_batch_of_many_sequences_is_right(rng, dtype, page_size, batch_invariant):
    fixed = {"batch": 17, "dtype": dtype, "page_size": page_size, "head_dim_v": 40}
    check_varlen(
        random_varlen_case(rng, longest=300, causal=True, **fixed), batch_invariant=batch_invariant
    )
    check_kvcache(
        random_kvcache_case(rng, longest=900, seqlen_q=2, seqlen_new=2, rotary_dim=16, **fixed),
        batch_invariant=batch_invariant,
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_long_sequences_beside_short_ones_are_right(rng, threads, monkeypatch):
    # With this limit, sequences are computed in all three ways: alone, by threads, and by rows.
    monkeypatch.setattr(cpu_forward, "MIN_PAIRS_PER_WORKER", 1 << 16)
    case = VarlenCase((799, 1, 239, 0, 150, 113), (799, 3, 100, 50, 0, 203), causal=True, seed=1)
    check_varlen(case, threads=threads)


def test_a_thousand_single_queries_start_no_thread(monkeypatch):
    told = []
    begin = thread_pool._pool.begin
    monkeypatch.setattr(thread_pool._pool, "begin", lambda task: told.append(task) or begin(task))
    check_kvcache(KVCacheCase((20,) * 1000, heads_q=2, heads_kv=1, head_dim=8, head_dim_v=8))
    assert not told
    check_varlen(VarlenCase((799, 700), (799, 700)), threads=2)
    assert told


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_rows_before_the_first_key_give_zero_and_minus_infinity(batch_invariant):
    problem = VarlenCase((50, 7, 3), (20, 0, 9), causal=True).problem()
    out, lse = run_varlen(problem.arguments(), batch_invariant=batch_invariant)
    assert not out[:30].any()
    assert (lse[:, :30] == -np.inf).all()
    assert np.isfinite(lse[:, 30:50]).all()
    assert not out[50:57].any()
    assert (lse[:, 50:57] == -np.inf).all()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_lse_can_be_left_out(batch_invariant):
    problem = VarlenCase((50, 7), (90, 203)).problem()
    arguments = problem.arguments() | {"softmax_scale": 0.125}
    out = np.full_like(problem.q, np.nan)
    varlen_forward(out=out, results=RowResults(), batch_invariant=batch_invariant, **arguments)
    problem.check(out)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_whatever_the_number_of_threads(dtype, batch_invariant):
    problem = VarlenCase((799, 113, 40), (513, 300, 203), dtype=dtype, causal=True).problem()
    first = run_varlen(problem.arguments(), threads=1, batch_invariant=batch_invariant)
    for threads in (2, 5):
        other = run_varlen(problem.arguments(), threads=threads, batch_invariant=batch_invariant)
        assert_same_bits(first, other)


# Invalid integers, which functions check on the host, and which kernels have to clamp


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {"cu_seqlens_q": [0, 40, 20, 70, 2**31 - 1]},
        {"cu_seqlens_q": [-(2**31), -5, 60, 60, 1000]},
        {"cu_seqlens_k": [0, 400, 20, 70, 2**31 - 1]},
        {"cu_seqlens_k": [-(2**31), -5, 60, 160, 100]},
        {"seqused_k": [2**31 - 1, -(2**31), 30, 0]},
        {"max_seqlen_q": 11, "max_seqlen_k": 19},
    ],
    ids=str,
)
def test_cu_seqlens_that_point_anywhere_are_clamped_as_in_the_reference(given, batch_invariant):
    case = VarlenCase((30, 17, 50, 20), (60, 100, 0, 40), causal=True, filler=0.5)
    given = {n: np.array(x, np.int32) if isinstance(x, list) else x for n, x in given.items()}
    arguments = case.problem().arguments() | given
    truth = Truth.of_varlen(arguments)
    assert truth.parts
    truth.check(*run_varlen(arguments, batch_invariant=batch_invariant))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_pages_and_lengths_that_are_none_read_as_zeros_and_are_clamped(batch_invariant):
    case = KVCacheCase(
        (50, 200, 7, 0), seqlen_q=3, seqlen_new=5, page_size=16, causal=True, filler=0.5
    )
    problem = case.problem()
    block_table = problem.block_table.copy()
    block_table[0, 1], block_table[1, 12], block_table[2, 0] = -1, 2**31 - 1, -(2**31)
    given = {
        "block_table": block_table,
        "cache_seqlens": np.array([50, 2**31 - 100, 7, -3], np.int32),
    }
    arguments = problem.arguments() | given
    truth = Truth.of_kvcache(arguments)
    result = run_kvcache(arguments, batch_invariant=batch_invariant)
    truth.check(*result)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_cache_that_does_not_exist_has_no_keys_and_takes_none(batch_invariant):
    case = KVCacheCase((50, 20, 7), seqlen_new=1, indexed=True)
    problem = case.problem()
    given = {"cache_batch_idx": np.array([-1, problem.cache_batch_idx[1], 5], np.int32)}
    arguments = problem.arguments() | given
    out, lse = run_kvcache(arguments, batch_invariant=batch_invariant)
    assert not out[[0, 2]].any()
    assert (lse[[0, 2]] == -np.inf).all()
    assert np.isfinite(lse[1]).all()
    changed = problem.cache_batch_idx[1], 20
    for name in ("k_cache", "v_cache"):
        before, after = getattr(problem, name), arguments[name]
        assert np.isfinite(after[changed]).all()
        after[changed] = before[changed]
        assert after.tobytes() == before.tobytes()


def test_new_rows_that_the_cache_has_no_room_for_are_dropped():
    for page_size in (0, 3):
        problem = KVCacheCase((9, 4), seqlen_new=4, page_size=page_size, slack=0).problem()
        arguments = problem.arguments()
        rows = problem.k_cache.shape[1] * (1 if not page_size else problem.block_table.shape[1])
        full = np.array([rows - 1, rows + 70])
        where = {name: arguments[name] for name in ("cache_batch_idx", "block_table")}
        k_cache, v_cache = arguments["k_cache"], arguments["v_cache"]
        append(k_cache, v_cache, problem.k, problem.v, lengths=full, **where)
        last = (0, rows - 1) if not page_size else (problem.block_table[0, -1], page_size - 1)
        for before, after, new in (
            (problem.k_cache, k_cache, problem.k),
            (problem.v_cache, v_cache, problem.v),
        ):
            np.testing.assert_array_equal(after[last], new[0, 0])
            after[last] = before[last]
            assert after.tobytes() == before.tobytes()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_one_key_is_exactly_its_value(dtype, batch_invariant):
    problem = VarlenCase((1, 7, 3, 90), (1, 1, 1, 90), dtype=dtype, causal=False).problem()
    arguments = problem.arguments()
    out, _ = run_varlen(arguments, batch_invariant=batch_invariant)
    group = out.shape[1] // arguments["v"].shape[1]
    for rows, key in ((slice(0, 1), 0), (slice(1, 8), 1), (slice(8, 11), 2)):
        value = np.repeat(problem.dense[(rows.start > 0) + (rows.start > 1)][2], group, axis=1)
        np.testing.assert_array_equal(out[rows], np.broadcast_to(value, out[rows].shape), str(key))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("magnitude", [1e32, 3e38])
def test_values_up_to_the_largest_number_give_finite_results(magnitude, batch_invariant):
    problem = VarlenCase((40, 3, 300), (40, 200, 300), causal=True, filler=0.0).problem()
    arguments = problem.arguments()
    arguments["v"] = np.clip(arguments["v"], 0, 1) * np.float32(magnitude)
    truth = Truth.of_varlen(arguments)
    out, lse = run_varlen(arguments, batch_invariant=batch_invariant)
    truth.check(out, lse)
    assert np.isfinite(out[truth.owned]).all()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_scores_beyond_float32_give_nan_never_a_wrong_number(batch_invariant):
    arguments = VarlenCase((40, 3), (40, 200)).problem().arguments()
    arguments["q"][...], arguments["k"][...] = 1e20, -1e20
    out, lse = run_varlen(arguments, batch_invariant=batch_invariant)
    assert np.isnan(out[:43]).all()
    assert not np.isfinite(lse[:, :43]).any()


@pytest.mark.parametrize("lengths", [(30,) * 9, (30, 30, 30, 7, 7, 0, 0, 0, 30, 30)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_of_equal_sequences_are_right(lengths, dtype):
    check_varlen(VarlenCase(lengths, lengths, dtype=dtype, causal=True, heads_q=6, rows_of_none=2))
    check_kvcache(KVCacheCase(lengths, dtype=dtype, heads_q=6))
    check_kvcache(KVCacheCase(lengths, dtype=dtype, heads_q=6, indexed=True, seqlen_q=2))


# Sequences without keys


@pytest.fixture
def no_passes(monkeypatch):
    """Make any forward pass fail the test."""

    def fail(*arguments):
        raise AssertionError("a pass was made")

    monkeypatch.setattr(varlen.Pass, "make", fail)
    monkeypatch.setattr(rowwise, "forward", fail)


@pytest.mark.usefixtures("no_passes")
@pytest.mark.parametrize("modifications", [{}, {"sinks": np.array([3, -np.inf], np.float32)}])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_sequences_without_keys_take_no_pass(batch_invariant, modifications):
    count, options = 2000, {"return_lse": True, "batch_invariant": batch_invariant}
    rows, keys = np.full((count, 2, 16), np.nan, np.float32), np.ones((3, 2, 16), np.float32)
    each, none = np.arange(count + 1, dtype=np.int32), np.zeros(count + 1, np.int32)
    expected = modifications.get("sinks", np.full(2, -np.inf, np.float32))
    out, lse = flash_attention_varlen(
        rows, keys, keys, each, none, 1, 3, **options, **modifications, backend="cpu"
    )
    assert not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(expected[:, None], lse.shape))
    cache = np.full((count, 1, 2, 16), np.nan, np.float32)
    given = {"cache_seqlens": none[1:], "backend": "cpu", **options, **modifications}
    for table in (None, np.zeros((count, 1), np.int32)):
        out, lse = flash_attention_with_kvcache(
            rows[:, None], cache, cache, block_table=table, **given
        )
        assert not out.any()
        np.testing.assert_array_equal(lse, np.broadcast_to(expected[:, None], lse.shape))


def test_modifications_count_sequences_without_queries_and_keys():
    lengths_q, lengths_k = [0, 2, 3, 0, 0, 4], [3, 0, 5, 0, 0, 4]
    ends_q, ends_k = (np.cumsum([0, *x]).astype(np.int32) for x in (lengths_q, lengths_k))
    q = np.ones((9, 2, 16), np.float32)
    k = np.random.default_rng(0).standard_normal((12, 2, 16)).astype(np.float32)
    slopes = np.arange(12, dtype=np.float32).reshape(6, 2)
    arguments = q, k, k, ends_q, ends_k, 4, 5
    out = flash_attention_varlen(*arguments, alibi_slopes=slopes, backend="cpu")
    truth, _ = attention_varlen_reference(*arguments, alibi_slopes=slopes)
    np.testing.assert_allclose(out, truth, rtol=1e-5, atol=1e-5)


# Short packed sequences of unequal lengths

SHORT = (5, 17, 1, 9, 20, 2, 12, 23, 8, 21, 11, 3, 16, 22)


@pytest.fixture
def padded(monkeypatch):
    """Steps of padded sequences: how many sequences, and whether `padding.forward` was done."""
    steps = []
    forward = padding.forward

    def watched(group, *arrays, **options):
        done = forward(group, *arrays, **options)
        steps.append((len(group.members), done))
        return done

    monkeypatch.setattr(padding, "forward", watched)
    return steps


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_q", [2, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_short_sequences_of_unequal_lengths_are_computed_together(dtype, heads_q, causal, padded):
    longer = tuple(n + n % 4 for n in SHORT)
    for keys in (SHORT, longer):
        check_varlen(
            VarlenCase(SHORT, keys, dtype=dtype, causal=causal, heads_q=heads_q, rows_of_none=2)
        )
    assert sum(count for count, _ in padded) == 2 * len(SHORT)
    assert all(done for _, done in padded)


@pytest.mark.parametrize("causal", [False, True])
def test_a_nan_in_one_padded_sequence_leaves_no_trace_in_another(causal, padded):
    problem = VarlenCase(SHORT, SHORT, causal=causal, rows_of_none=0).problem()
    clean, clean_lse = run_varlen(problem.arguments())
    ends = np.cumsum(SHORT)
    others = np.ones(ends[-1], bool)
    others[ends[3] : ends[4]] = False
    arguments = problem.arguments()
    for name in "qkv":
        arguments[name] = arguments[name].copy()
        arguments[name][~others] = np.nan
    out, lse = run_varlen(arguments)
    assert np.isnan(out[~others]).all()
    assert_same_bits((clean[others], clean_lse[:, others]), (out[others], lse[:, others]))
    assert padded


def test_padded_sequences_have_the_same_bits_whatever_the_number_of_threads(padded, monkeypatch):
    monkeypatch.setattr(cpu_forward, "MIN_PAIRS_PER_WORKER", 1)
    problem = VarlenCase(SHORT * 6, SHORT * 6, causal=True).problem()
    first = run_varlen(problem.arguments(), threads=1)
    for threads in (2, 5):
        assert_same_bits(first, run_varlen(problem.arguments(), threads=threads))
    assert len(padded) > 6


def test_padded_rows_without_weight_are_left_to_another_way(padded):
    problem = VarlenCase(SHORT, SHORT, rows_of_none=0).problem()
    arguments = problem.arguments()
    arguments["k"] = np.full_like(arguments["k"], -np.inf)
    arguments["q"] = np.abs(arguments["q"]) + 1
    out, lse = run_varlen(arguments)
    assert not any(done for _, done in padded)
    assert not out.any()
    assert (lse == -np.inf).all()


# batch_invariant


def slice_of(problem, sequence, rows, keys=None):
    """Return the arguments for some rows of one sequence alone, over its first `keys` keys."""
    q, k, v = problem.dense[sequence]
    q, k, v = q[rows], k[:keys], v[:keys]
    arrays = {"q": q, "k": k, "v": v, "seqused_k": None, "block_table": None}
    starts = {"cu_seqlens_q": np.array([0, len(q)]), "cu_seqlens_k": np.array([0, len(k)])}
    most = {"max_seqlen_q": len(q), "max_seqlen_k": len(k)}
    return problem.arguments() | arrays | starts | most


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("tile", [None, Tile(16, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariant_bits_do_not_depend_on_the_batch(rng, dtype, tile, page_size):
    case = random_varlen_case(
        rng, batch=9, longest=400, dtype=dtype, causal=True, page_size=page_size, heads_q=6
    )
    problem = case.problem()
    options = {"batch_invariant": True, "tile": tile}
    out, lse = run_varlen(problem.arguments(), **options)
    for b, (first, stop) in enumerate(pairwise(problem.cu_seqlens_q)):
        alone = run_varlen(slice_of(problem, b, slice(None)), **options)
        assert_same_bits(alone, (out[first:stop], lse[:, first:stop]))


@pytest.mark.parametrize("tile", [None, Tile(16, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariant_bits_do_not_depend_on_prefill_chunks_and_decode_steps(rng, dtype, tile):
    problem = VarlenCase(
        (351,), (351,), dtype=dtype, causal=True, heads_q=6, seed=int(rng.integers(2**32))
    ).problem()
    options = {"batch_invariant": True, "tile": tile}
    out, lse = run_varlen(slice_of(problem, 0, slice(None)), **options)
    cuts = [0, 113, 120, 250, *range(300, 352, 3), 351]
    for first, stop in pairwise(cuts):
        chunk = run_varlen(slice_of(problem, 0, slice(first, stop), keys=stop), **options)
        assert_same_bits(chunk, (out[first:stop], lse[:, first:stop]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariant_bits_without_causality_do_not_depend_on_the_other_queries(rng, dtype):
    problem = VarlenCase(
        (203,), (599,), dtype=dtype, head_dim=40, seed=int(rng.integers(2**32))
    ).problem()
    out, lse = run_varlen(slice_of(problem, 0, slice(None)), batch_invariant=True)
    for rows in (slice(0, 1), slice(7, 8), slice(50, 113), slice(200, 203)):
        some = run_varlen(slice_of(problem, 0, rows), batch_invariant=True)
        assert_same_bits(some, (out[rows], lse[:, rows]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariant_bits_do_not_depend_on_what_lies_behind_the_last_visible_key(rng, dtype):
    problem = VarlenCase((200,), (300,), dtype=dtype, causal=True).problem()
    arguments = slice_of(problem, 0, slice(None))
    clean = run_varlen(arguments, batch_invariant=True)
    last_seen = 100 + 60  # the last key that row 60 attends to
    arguments["k"][last_seen + 1 :] = np.inf
    arguments["v"][last_seen + 1 :] *= -100
    dirty = run_varlen(arguments, batch_invariant=True)
    assert_same_bits((clean[0][:61], clean[1][:, :61]), (dirty[0][:61], dirty[1][:, :61]))


def test_batch_invariant_steps_on_a_cache_have_the_bits_of_the_whole_prompt(rng):
    case = random_kvcache_case(rng, lengths=(0, 0, 0), seqlen_q=90, seqlen_new=90, causal=True)
    whole = dataclasses.replace(case, slack=40).problem()
    expected_out, expected_lse = run_kvcache(whole.arguments(), batch_invariant=True)
    stepwise = whole.arguments()
    for first, stop in ((0, 64), (64, 65), (65, 66), (66, 90)):
        rows = slice(first, stop)
        step = {name: getattr(whole, name)[:, rows] for name in "qkv"}
        step["cache_seqlens"] = np.full(3, first)
        out, lse = run_kvcache(stepwise | step, batch_invariant=True)
        assert_same_bits((out, lse), (expected_out[:, rows], expected_lse[..., rows]))


def test_batch_invariance_takes_another_way_than_the_default_one():
    problem = VarlenCase((200,), (300,), causal=True).problem()
    out, _ = run_varlen(problem.arguments())
    invariant, _ = run_varlen(problem.arguments(), batch_invariant=True)
    assert out.tobytes() != invariant.tobytes()


def test_long_work_items_are_cut_without_changing_a_bit(monkeypatch):
    problem = VarlenCase((301, 40), (313, 80), causal=True, heads_q=6).problem()
    whole = run_varlen(problem.arguments(), batch_invariant=True)
    monkeypatch.setattr(varlen, "MAX_PAIRS_PER_ITEM", 0)
    monkeypatch.setattr(varlen, "MAX_ROWS_PER_ITEM", 7)
    assert_same_bits(whole, run_varlen(problem.arguments(), batch_invariant=True))


def test_rotation_keeps_the_dtype_and_leaves_the_other_columns_and_the_argument_alone(rng):
    x = rng.standard_normal((2, 3, 2, 24)).astype(np.float16)
    before = x.copy()
    angles = rng.uniform(-3, 3, (50, 4))
    turned = rotate(
        x, np.cos(angles), np.sin(angles), np.array([5, 7]), interleaved=True, advance=True
    )
    assert turned.dtype == np.float16
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    assert (turned[..., :8] != x[..., :8]).any(axis=(-1, -2)).all()


@pytest.mark.filterwarnings("error")
def test_no_numpy_warning_reaches_the_caller():
    problem = VarlenCase((50, 0, 300), (20, 9, 280), dtype="float16", causal=True).problem()
    arguments = problem.arguments()
    arguments["k"][3], arguments["v"][5], arguments["q"][7] = np.inf, np.nan, 6e4
    for batch_invariant in (False, True):
        run_varlen(arguments, threads=1, batch_invariant=batch_invariant)


def test_the_default_key_tile_leaves_no_tail_in_vector_loops():
    assert rowwise.DEFAULT_BC % 16 == 0


@pytest.mark.parametrize(
    ("page_size", "length", "most"), [(16, 16384, cpu_forward.SCRATCH_LIMIT), (16384, 10, 1 << 20)]
)
def test_of_pages_that_are_read_once_no_more_is_copied_than_the_tiles_at_hand(
    page_size, length, most
):
    # Keys and values take 128 MiB.
    k, v = (np.ones((16384 // page_size, page_size, 8, 128), np.float32) for _ in range(2))
    q = np.ones((1, 1, 16, 128), np.float32)
    out = np.empty_like(q)
    where = {"block_table": np.arange(len(k), dtype=np.int32)[None], "cache_batch_idx": None}
    options = {"lengths": np.array([length]), "causal": False, "softmax_scale": 1.0, "threads": 4}
    assert (
        peak_memory(lambda: kvcache_forward(q, k, v, out, RowResults(), **where, **options)) < most
    )
    np.testing.assert_allclose(out, 1, rtol=1e-5)


def test_empty_caches_and_sequences_are_few_records(monkeypatch):
    count = 20_000
    made = []
    whole = varlen._WorkItem.whole
    monkeypatch.setattr(varlen._WorkItem, "whole", lambda *of: made.append(of) or whole(*of))
    q, cache = np.ones((count, 1, 2, 16), np.float32), np.ones((count, 4, 2, 16), np.float32)
    none = np.zeros(count, np.int32)
    given = {"cache_seqlens": none, "backend": "cpu"}
    for where in ({}, {"block_table": none[:, None]}, {"cache_batch_idx": none}):
        assert not flash_attention_with_kvcache(q, cache, cache, **given, **where).any()
    starts, each = np.zeros(count + 1, np.int32), np.arange(count + 1, dtype=np.int32)
    for starts_q in (starts, each):
        packed = q[:, 0], cache[:, 0], cache[:, 0], starts_q, starts, 4, 4
        assert not flash_attention_varlen(*packed, backend="cpu").any()
    assert len(made) == 4
