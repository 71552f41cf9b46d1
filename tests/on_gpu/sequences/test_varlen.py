"""Packed sequences of any lengths against the reference, on the CPU and on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support.calls.sequence_support import VarlenCase
from support.gpu.gpu_sequences import (
    GROUPS,
    HEAD_DIMS,
    PAGE_SIZES,
    PAGES_OF_DIMS,
    SIXTEEN_BIT,
    Amid,
    Target,
    assert_same_bits,
    check_varlen,
    checks_everywhere,
    cubins,
    everywhere,
    of_aligned_cases,
    of_cases,
    on_every_family,
    on_gpu,
    problem_of,
    run_varlen,
    varlen,
)
from support.gpu.gpu_support import DTYPES, Truth, bits
from support.prebuilt import use_cubins
from support.wrong_numbers import VARLEN_CALLS, check_varlen_result, wrong_varlen

from cupy_flash import flash_attention, flash_attention_varlen

__all__ = ["cubins", "use_cubins"]  # fixtures


# ---- Lengths, dtypes, heads, head dims


test_sequences_of_random_lengths_are_right = checks_everywhere(
    varlen(dtype=dtype, causal=causal, heads_q=heads_q, heads_kv=heads_kv)
    for dtype in DTYPES
    for causal in (False, True)
    for heads_q, heads_kv in GROUPS
)

test_any_head_dims_are_right = checks_everywhere(
    varlen(
        dtype=dtype,
        head_dim=dim,
        head_dim_v=dim_v,
        causal=index // 2 % 2 == 0,
        seqused=index % 3 == 0,
    )
    for index, (dim, dim_v) in enumerate(HEAD_DIMS)
    for dtype in (SIXTEEN_BIT[index % 2], ("float32", "float64")[index % 2])
)

test_seqused_k_hides_the_rest_of_each_sequence = checks_everywhere(
    varlen(dtype=dtype, causal=causal, seqused=seqused, heads_q=heads_q, heads_kv=heads_kv)
    for (dtype, causal), (heads_q, heads_kv) in zip(
        itertools.product(("float16", "float32"), (False, True)), (*GROUPS, (4, 2)), strict=True
    )
    for seqused in (True,)
)

test_empty_sequences_give_nothing_and_rows_without_keys_zero = checks_everywhere(
    VarlenCase(seqlens_q, seqlens_k, dtype=dtype, causal=causal)
    for seqlens_q, seqlens_k in (
        ((0, 7, 0, 0, 19), (5, 0, 0, 31, 40)),
        ((0, 0, 0), (0, 0, 0)),
        ((0, 0), (17, 5)),
        ((17, 5), (0, 0)),
        ((1,), (1,)),
        # With more queries than keys, the first rows of a causal sequence attend to none.
        ((113, 30), (20, 29)),
    )
    for dtype, causal in (("float16", True), ("float32", False))
)

test_one_sequence_or_hundreds_are_right = checks_everywhere(
    varlen(batch=batch, longest=longest, dtype=dtype, causal=causal, heads_q=4, heads_kv=1)
    for batch, longest in ((1, 799), (70, 60), (300, 3))
    for dtype, causal in (("bfloat16", True), ("float64", False))
)

test_any_softmax_scale_is_right = checks_everywhere(
    varlen(longest=70, dtype=dtype, causal=causal, softmax_scale=scale)
    for dtype in ("float16", "float32")
    for scale, causal in ((0.0, True), (-0.3, True), (2.0, False))
)


# ---- Rows of no sequence


def with_gaps(case: VarlenCase, rng: np.random.Generator, *, cuts: bool) -> dict[str, Any]:
    """Return arguments with rows before the first sequence and after the last one.

    With `cuts` sequences also have rows past max_seqlen_q, which calls on host arrays refuse.
    """
    arguments = problem_of(case).arguments()
    before, after = rng.integers(0, 40, 2)
    q = arguments["q"]
    arguments["q"] = np.pad(
        q, ((before, after), (0, 0), (0, 0)), constant_values=np.array(np.nan, q.dtype)
    )
    arguments["cu_seqlens_q"] = arguments["cu_seqlens_q"] + np.int32(before)
    longest = max(case.seqlens_q)
    if cuts and longest:
        arguments["max_seqlen_q"] = int(rng.integers(1, longest + 1))
    return arguments


@everywhere
@pytest.mark.parametrize("num_splits", [0, 3])
@of_cases(
    varlen(
        dtype=dtype,
        head_dim=dim,
        head_dim_v=dim_v,
        causal=index % 2 == 0,
        seqused=index % 3 == 0,
        batch=(1, 5, 70)[index % 3],
        longest=(300, 120, 40)[index % 3],
        page_size=(0, 16)[index // 2 % 2],
    )
    for index, (dtype, (dim, dim_v)) in enumerate(
        itertools.product(DTYPES, ((64, 64), (40, 33), (320, 320)))
    )
)
def test_rows_of_no_sequence_become_0_and_their_lse_minus_infinity(
    target: Target, case: VarlenCase, num_splits: int
) -> None:
    rng = np.random.default_rng(case.seed + num_splits)
    for _ in range(3):
        arguments = with_gaps(case, rng, cuts=target.is_gpu)
        out, lse = run_varlen(target, arguments, num_splits=num_splits)
        check_varlen_result(arguments, out, lse)


@everywhere
@pytest.mark.parametrize("starts", [(0,), (4,), (0, 0, 0)])
def test_rows_beside_empty_sequences_become_0(target: Target, starts: tuple[int, ...]) -> None:
    xp = target.xp
    rows = xp.asarray(np.full((9, 4, 64), np.nan, np.float16))
    ends = xp.asarray(np.array(starts, np.int32))
    options = {"return_lse": True, "out": rows.copy()}
    out, lse = target.call(flash_attention_varlen, *[rows] * 3, ends, ends, 0, 0, **options)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


# ---- Pages


test_pages_of_any_size_are_right = checks_everywhere(
    varlen(
        dtype=dtype,
        page_size=page_size,
        causal=causal,
        seqused=index % 3 == 0,
        heads_q=GROUPS[index % 3][0],
        heads_kv=GROUPS[index % 3][1],
    )
    for index, (page_size, causal) in enumerate(itertools.product(PAGE_SIZES, (False, True)))
    for dtype in (SIXTEEN_BIT[index // 2 % 2], ("float32", "float64")[index // 2 % 2])
)

test_pages_of_any_head_dims_are_right = checks_everywhere(
    varlen(dtype=dtype, page_size=page_size, head_dim=dim, head_dim_v=dim_v, causal=True)
    for dtype, page_size, dim, dim_v in PAGES_OF_DIMS
)


@everywhere
def test_sequences_may_share_pages(target: Target) -> None:
    # Four sequences have one prompt, whose page numbers are in each row of the block table.
    case = varlen(dtype="float16", page_size=16, heads_q=8, heads_kv=2, batch=4, longest=150)
    arguments = problem_of(case).arguments()
    rng = np.random.default_rng(11)
    for name in ("k", "v"):
        values = rng.standard_normal(arguments[name].shape)
        arguments[name] = values.astype(arguments[name].dtype)
    arguments["block_table"][:, :4] = arguments["block_table"][0, :4]
    out, lse = run_varlen(target, arguments)
    check_varlen_result(arguments, out, lse)


# ---- Rows of any alignment, strides


@everywhere
@of_aligned_cases(
    varlen(dtype=dtype, page_size=page_size, head_dim=40, head_dim_v=33, causal=True)
    for dtype in ("bfloat16", "float32", "float64")
    for page_size in (0, 16)
)
def test_rows_of_any_alignment_are_read_and_written_in_place(
    target: Target, case: VarlenCase, alignment: int
) -> None:
    check_varlen(target, case, alignment)


@everywhere
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_views_of_one_packed_projection_are_right(target: Target, dtype: str) -> None:
    rng = np.random.default_rng(3)
    cu_seqlens = np.array([0, 57, 57, 180, 203], np.int32)
    qkv = rng.standard_normal((203, 3, 4, 64)).astype(DTYPES[dtype])
    on_device = target.xp.asarray(qkv)
    q, k, v = (on_device[:, i] for i in range(3))
    lengths = target.xp.asarray(cu_seqlens)
    out = target.call(flash_attention_varlen, q, k, v, lengths, lengths, 123, 123, causal=True)
    assert out.shape == (203, 4, 64)
    assert out.flags.c_contiguous
    host = out if target.name == "cpu" else out.get()
    for first, end in itertools.pairwise(cu_seqlens):
        own = qkv[None, first:end]
        truth = Truth.of((own[:, :, 0], own[:, :, 1], own[:, :, 2]), causal=True)
        truth.check(host[None, first:end])


# ---- Splits of the keys


@everywhere
@of_cases(
    varlen(
        seqlens_q=(1, 5, 0, 2, 33),
        seqlens_k=(4999, 1203, 77, 0, 2500),
        dtype=dtype,
        page_size=page_size,
        causal=causal,
        heads_q=8,
        heads_kv=2,
    )
    for dtype, page_size, causal in (
        ("float16", 0, True),
        ("bfloat16", 16, True),
        ("float32", 0, False),
    )
)
@pytest.mark.parametrize("num_splits", [0, 1, 3, 7])
def test_any_number_of_splits_is_right(target: Target, case: VarlenCase, num_splits: int) -> None:
    check_varlen(target, case, num_splits=num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(16, 256), (64, 128), (16, 16)])
def test_the_splits_of_a_tile_with_little_shared_memory_are_merged(dims: tuple[int, int]) -> None:
    # Shared memory cannot hold even one row of the partial result of each split.
    case = VarlenCase(
        (16,), (65536,), "float16", heads_q=1, heads_kv=1, head_dim=dims[0], head_dim_v=dims[1]
    )
    tile = {"Br": 16, "Bc": 16, "warps": 1, "stages": 2, "min_blocks": 1}
    check_varlen(Target("decode"), case, tile=tile)


# ---- Reproducible bits


@on_gpu
@pytest.mark.parametrize("num_splits", [0, 7])
def test_fifty_calls_give_the_same_bits(target: Target, num_splits: int) -> None:
    case = varlen(dtype="bfloat16", longest=1500, causal=True, heads_q=8, heads_kv=2)
    arguments = problem_of(case).arguments()
    expected = run_varlen(target, arguments, num_splits=num_splits)
    problem_of(case).check(*expected)
    owned = int(arguments["cu_seqlens_q"][-1])
    for _ in range(49):
        out, lse = run_varlen(target, arguments, num_splits=num_splits)
        assert_same_bits((out, lse[:, :owned]), (expected[0], expected[1][:, :owned]))


INVARIANT = [
    varlen(dtype=dtype, page_size=page_size, causal=causal, longest=400, heads_q=8, heads_kv=2)
    for dtype, page_size, causal in (
        ("float16", 0, True),
        ("bfloat16", 16, True),
        ("float16", 0, False),
        ("float32", 0, True),
        ("float64", 3, True),
    )
]


@everywhere
@of_cases(INVARIANT)
def test_batch_invariant_bits_of_a_sequence_are_the_same_alone(
    target: Target, case: VarlenCase
) -> None:
    problem = problem_of(case)
    arguments = problem.arguments()
    out, lse = run_varlen(target, arguments, batch_invariant=True)
    problem.check(out, lse)
    for b in range(len(case.seqlens_q)):
        rows = slice(*arguments["cu_seqlens_q"][b : b + 2])
        alone = run_varlen(target, only(arguments, b), batch_invariant=True)
        assert_same_bits(alone, (out[rows], lse[:, rows]))


def only(arguments: dict[str, Any], b: int) -> dict[str, Any]:
    """Return the arguments of one sequence of the batch, with arrays cut to its rows."""
    q_rows = slice(*arguments["cu_seqlens_q"][b : b + 2])
    k_first, k_end = arguments["cu_seqlens_k"][b : b + 2]
    one = arguments | {
        "q": arguments["q"][q_rows],
        "cu_seqlens_q": np.array([0, q_rows.stop - q_rows.start], np.int32),
        "cu_seqlens_k": np.array([0, k_end - k_first], np.int32),
        "max_seqlen_q": int(q_rows.stop - q_rows.start),
        "max_seqlen_k": int(k_end - k_first),
    }
    if arguments["block_table"] is not None:
        one["block_table"] = arguments["block_table"][b : b + 1]
    else:
        one["k"], one["v"] = (arguments[name][k_first:k_end] for name in "kv")
    if arguments["seqused_k"] is not None:
        one["seqused_k"] = arguments["seqused_k"][b : b + 1]
    return one


@everywhere
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_batch_invariant_bits_do_not_depend_on_how_a_prefill_is_cut(
    target: Target, dtype: str, page_size: int
) -> None:
    # A prefill is one sequence, or a batch of chunks. The keys of a chunk end with its last row.
    length = 333
    lengths, sizes = (length,), {"page_size": page_size, "rows_of_none": 0}
    case = VarlenCase(lengths, lengths, dtype, 8, 2, causal=True, **sizes)
    arguments = problem_of(case).arguments()
    whole = run_varlen(target, arguments, batch_invariant=True)
    ends = np.array([0, 100, 101, 102, 230, 247, 333], np.int32)
    chunks = arguments | {"cu_seqlens_q": ends, "max_seqlen_q": 128}
    if page_size:
        chunks["block_table"] = np.repeat(arguments["block_table"], len(ends) - 1, axis=0)
        chunks["cu_seqlens_k"] = np.cumsum(np.concatenate([[0], ends[1:]])).astype(np.int32)
    else:
        # Packed sequences cannot share keys, so each chunk has a copy.
        for name in "kv":
            chunks[name] = np.concatenate([arguments[name][:end] for end in ends[1:]])
        chunks["cu_seqlens_k"] = np.cumsum(np.concatenate([[0], ends[1:]])).astype(np.int32)
    assert_same_bits(run_varlen(target, chunks, batch_invariant=True), whole)


# ---- NaN and infinity that must have no effect


@on_every_family
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_one_sequence_leaves_no_trace_in_another(
    target: Target, page_size: int, poison: float
) -> None:
    # Neighbouring sequences share query tiles; the values of one must not affect the other.
    case = VarlenCase((37, 70, 5), (50, 91, 203), dtype="float16", page_size=page_size, causal=True)
    arguments = problem_of(case).arguments()
    clean = run_varlen(target, arguments)
    middle = slice(37, 107)
    arguments["q"][middle] = poison
    if page_size:
        pages = arguments["block_table"][1]
        arguments["k"][pages], arguments["v"][pages] = poison, poison
    else:
        arguments["k"][50:141], arguments["v"][50:141] = poison, poison
    poisoned = run_varlen(target, arguments)
    others = np.r_[0:37, 107:112]
    assert_same_bits(
        (poisoned[0][others], poisoned[1][:, others]), (clean[0][others], clean[1][:, others])
    )
    assert np.isnan(poisoned[0][middle].astype(np.float32)).any()


# ---- Invalid lengths and indices in device memory, which the host cannot check


@on_gpu
@pytest.mark.parametrize(("change", "page_size"), VARLEN_CALLS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("num_splits", [0, 3])
def test_wrong_numbers_do_what_is_documented_and_no_harm(
    target: Target, change: str, page_size: int, dtype: str, num_splits: int
) -> None:
    arguments = wrong_varlen(change, page_size, dtype)
    out, lse = run_varlen(target, arguments, num_splits=num_splits)
    check_varlen_result(arguments, out, lse)


# ---- Equal lengths, empty inputs, and new results


@everywhere
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_equal_lengths_are_what_flash_attention_computes(target: Target, dtype: str) -> None:
    xp = target.xp
    rng = np.random.default_rng(2)
    values = [rng.standard_normal((3, 70, 4, 64)).astype(DTYPES[dtype]) for _ in range(3)]
    q, k, v = map(xp.asarray, values)
    cu_seqlens = xp.asarray(np.arange(4, dtype=np.int32) * 70)
    packed = [x.reshape(210, 4, 64) for x in (q, k, v)]
    lengths = (cu_seqlens, cu_seqlens, 70, 70)
    out = target.call(flash_attention_varlen, *packed, *lengths, causal=True)
    dense = flash_attention(q, k, v, causal=True, backend="cpu" if target.name == "cpu" else "auto")
    truth = Truth.of(tuple(values), causal=True)
    for result in (out.reshape(3, 70, 4, 64), dense):
        truth.check(result if target.name == "cpu" else result.get())


@everywhere
def test_no_sequences_give_an_empty_result(target: Target) -> None:
    xp = target.xp
    rows = xp.asarray(np.full((0, 4, 64), np.nan, np.float16))
    none = xp.asarray(np.zeros(1, np.int32))
    given = (rows, rows, rows, none, none, 0, 0)
    out, lse = target.call(flash_attention_varlen, *given, return_lse=True)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (4, 0)


@everywhere
def test_queries_without_heads_give_an_empty_result(target: Target) -> None:
    xp = target.xp
    q, k = (xp.asarray(np.full((5, heads, 64), np.nan, np.float16)) for heads in (0, 2))
    lengths = xp.asarray(np.array([0, 2, 5], np.int32))
    given = (q, k, k, lengths, lengths, 3, 3)
    out, lse = target.call(flash_attention_varlen, *given, return_lse=True)
    assert out.shape == (5, 0, 64)
    assert lse.shape == (0, 5)


@on_every_family
def test_without_out_the_result_is_new_and_has_the_same_bits(target: Target) -> None:
    case = varlen(dtype="bfloat16", causal=True)
    problem = problem_of(case)
    given = run_varlen(target, problem.arguments())[0]
    arguments = problem.arguments(target.xp)
    out = target.call(flash_attention_varlen, **arguments)
    assert out.flags.c_contiguous
    owned = problem.truth.owned
    np.testing.assert_array_equal(bits(out.get()[owned]), bits(given[owned]))


def test_what_is_written_around_an_array_is_seen() -> None:
    amid = Amid(np, np.zeros((3, 2, 5), np.float16))
    amid.view[1] = 1
    assert amid.values()[1].all()
    amid.buffer[0] = 0
    with pytest.raises(AssertionError, match="around"):
        amid.values()
