"""Merging of partial results: NumPy arrays, errors, specs and plans, and compilation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.calls.combine_support import (
    DTYPES,
    assert_merged,
    random_parts,
    random_sinks,
    with_sinks,
)
from support.comparisons import assert_all_close, assert_all_equal, assert_same_bits, peak_memory

from cupy_flash import combine, flash_attention
from cupy_flash.calls.check.partials import spec_of_call
from cupy_flash.families.params import TENSOR_DTYPE
from cupy_flash.gpu.combine import COMBINE_DTYPE, Combine, combine_unit
from cupy_flash.gpu.compiler import compile_cubin, known_architectures, why_no_compiler
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.partials import CombineSpec
from cupy_flash.reference.dense import attention_naive, attention_reference, error_bound, max_error

needs_nvrtc = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))
# A single partial result and its log-sum-exp.
OUT, LSE = np.zeros((1, 3, 2, 5), np.float32), np.zeros((1, 2, 3), np.float32)
SHAPES = [(3, 2, 113, 6, 40), (1, 1, 1, 1, 1), (33, 2, 1, 8, 64), (2, 17, 3, 5), (7, 239, 2, 256)]


def random_attention(rng, seqlen_q, seqlen_k, dtype=np.float64, dims=(24, 40)):
    shapes = (2, seqlen_q, 4, dims[0]), (2, seqlen_k, 2, dims[0]), (2, seqlen_k, 2, dims[1])
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def attend_in_parts(q, k, v, ends, dtype=np.float64):
    """Return partial results of attention; each covers the keys between two successive ends."""
    parts = [
        attention_reference(q, k[:, begin:end], v[:, begin:end], return_lse=True)
        for begin, end in itertools.pairwise([0, *ends])
    ]
    out, lse = (np.stack(arrays) for arrays in zip(*parts, strict=True))
    return out.astype(dtype), lse.astype(np.float64 if dtype == np.float64 else np.float32)


# Comparison with attention over all keys


@settings(max_examples=50)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.integers(0, 203),
    st.lists(st.integers(0, 203), max_size=9),
)
def test_keys_split_anywhere_give_the_attention_over_all_of_them(seed, seqlen_q, seqlen_k, cuts):
    rng = np.random.default_rng(seed)
    q, k, v = random_attention(rng, seqlen_q, seqlen_k)
    ends = [*sorted(min(cut, seqlen_k) for cut in cuts), seqlen_k]
    out, lse = combine(*attend_in_parts(q, k, v, ends))
    whole, whole_lse = attention_reference(q, k, v, return_lse=True)
    bound = error_bound(whole, whole, np.float64, lse=whole_lse)
    assert max_error(out, whole) <= bound
    assert max_error(lse, whole_lse) <= 1e-14 * max(
        1, np.abs(whole_lse[whole_lse > -9e9]).max(initial=1)
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_parts_in_the_dtype_of_the_inputs_are_merged_as_well_as_they_are_known(rng, dtype):
    q, k, v = random_attention(rng, 113, 203, dtype)
    out_partial, lse_partial = attend_in_parts(q, k, v, [1, 1, 60, 203], dtype)
    out, _ = combine(out_partial, lse_partial)
    whole, lse = attention_reference(q, k, v, return_lse=True)
    naive = attention_naive(q, k, v)
    assert max_error(out, whole) <= error_bound(naive, whole, dtype, lse=lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sink_is_one_more_part_without_values(rng, dtype, shape):
    parts = random_parts(rng, dtype, shape)
    for kind in {parts[1].dtype, parts[0].dtype}:
        sinks = random_sinks(rng, shape).astype(kind)
        assert_merged(*combine(*parts, sinks=sinks), *with_sinks(*parts, sinks))


def test_of_parts_and_sinks_comes_what_a_call_with_sinks_gives(rng):
    q, k, v = (x.astype(np.float32) for x in random_attention(rng, 30, 90))
    sinks = rng.standard_normal(4).astype(np.float32)
    parts = [
        flash_attention(q, k[:, cut], v[:, cut], return_lse=True, backend="cpu")
        for cut in (slice(0, 17), slice(17, 90))
    ]
    found = combine(*(np.stack(x) for x in zip(*parts, strict=True)), sinks=sinks)
    whole = flash_attention(q, k, v, sinks=sinks, return_lse=True, backend="cpu")
    assert_all_close(found, whole, atol=2e-6)


def test_a_row_without_keys_has_the_sink_for_its_lse():
    out_partial = np.full((2, 1, 3, 2, 5), np.nan, np.float32)
    lse_partial = np.full((2, 1, 2, 3), -np.inf, np.float32)
    out, lse = combine(out_partial, lse_partial, sinks=np.array([0.5, -np.inf], np.float32))
    assert not out.any()
    np.testing.assert_array_equal(lse, [[[0.5] * 3, [-np.inf] * 3]])


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        (np.zeros(3, np.float32), ValueError, "one sink for each query head"),
        (np.zeros((1, 2), np.float32), ValueError, "one sink for each query head"),
        (np.zeros(2, np.int32), TypeError, "expected float32"),
    ],
)
def test_sinks_that_are_none_are_refused(sinks, error, message):
    parts = np.zeros((2, 1, 3, 2, 5), np.float32), np.zeros((2, 1, 2, 3), np.float32)
    with pytest.raises(error, match=message):
        combine(*parts, sinks=sinks)


def test_causal_parts_leave_rows_that_one_of_them_does_not_see(rng):
    q, k, v = random_attention(rng, 60, 60)
    early = attention_reference(q, k[:, :30], v[:, :30], causal=True, q_offset=0, return_lse=True)
    late = attention_reference(q, k[:, 30:], v[:, 30:], causal=True, q_offset=-30, return_lse=True)
    assert (late[1] == -np.inf).any()
    found = combine(*(np.stack(arrays) for arrays in zip(early, late, strict=True)))
    whole = attention_reference(q, k, v, causal=True, return_lse=True)
    assert all(max_error(*pair) <= 1e-14 for pair in zip(found, whole, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_parts_are_merged_to_the_precision_of_their_sums(rng, dtype, shape):
    out_partial, lse_partial = random_parts(rng, dtype, shape)
    out, lse = combine(out_partial, lse_partial)
    assert type(out) is type(lse) is np.ndarray
    assert_merged(out, lse, out_partial, lse_partial)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_parts_are_merged_as_one_array_of_them(rng, dtype, kind):
    out_partial, lse_partial = random_parts(rng, dtype, SHAPES[0])
    expected = combine(out_partial, lse_partial)
    # Each partial result has its own strides, and the first one is not contiguous.
    apart = [np.repeat(x, 2, axis=1)[:, ::2] if i == 0 else x for i, x in enumerate(out_partial)]
    assert_all_equal(combine(kind(apart), kind(lse_partial)), expected)
    alone = combine(kind(apart), kind(lse_partial), return_lse=False)
    np.testing.assert_array_equal(alone, expected[0])


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        ([], [], ValueError, "at least one"),
        ([OUT], [LSE, LSE], ValueError, "out_partial has 1 parts and lse_partial 2"),
        ([OUT, OUT], np.stack([LSE, LSE]), TypeError, "pass two lists"),
        ([OUT], None, TypeError, "pass two lists"),
        ([OUT, OUT[:, :2]], [LSE, LSE], ValueError, r"out_partial\[1\] has shape"),
        ([OUT, OUT], [LSE, LSE[..., :2]], ValueError, r"lse_partial\[1\] has shape"),
        ([OUT, OUT.astype(np.float16)], [LSE, LSE], TypeError, r"out_partial\[1\] has dtype"),
        ([OUT, None], [LSE, LSE], TypeError, r"out_partial\[1\] is "),
        ([None], [None], TypeError, r"out_partial\[0\] is a NoneType; expected a NumPy or CuPy"),
        ([[1.0]], [[1.0]], TypeError, r"out_partial\[0\] is a list; expected a NumPy or CuPy"),
        ([OUT, OUT.astype(int)], [LSE, LSE], TypeError, r"out_partial\[1\] has dtype int64"),
    ],
)
def test_lists_of_parts_that_do_not_go_together_are_refused(outs, lses, error, message):
    with pytest.raises(error, match=message):
        combine(outs, lses)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_part_comes_out_bit_for_bit(rng, dtype):
    out_partial, lse_partial = random_parts(rng, dtype, (1, 2, 11, 3, 20), unseen=0)
    assert_same_bits(combine(out_partial, lse_partial), (out_partial[0], lse_partial[0]))


def test_a_part_that_saw_no_key_counts_nothing_whatever_it_holds(rng):
    out_partial, lse_partial = random_parts(rng, "float32", (2, 1, 5, 2, 8), unseen=0)
    lse_partial[1] = -np.inf
    results = []
    for garbage in (0, np.nan, np.inf, 3e38):
        out_partial[1] = garbage
        results.append(combine(out_partial, lse_partial)[0].tobytes())
    assert results == [out_partial[0].tobytes()] * 4


def test_a_row_that_no_part_saw_a_key_for_is_zero_with_an_lse_of_minus_infinity():
    out, lse = combine(
        np.full((3, 1, 2, 1, 4), np.nan, np.float16), np.full((3, 1, 1, 2), -np.inf, np.float32)
    )
    assert not out.any()
    assert (lse == -np.inf).all()


def test_nan_and_infinite_sums_of_a_part_show_in_the_row():
    lse_partial = np.array([[[[0.0, 1.0, 2.0]]], [[[np.nan, np.inf, 2.0]]]], np.float32)
    out, lse = combine(np.ones((2, 1, 3, 1, 2), np.float32), lse_partial)
    assert np.isnan(out[0, :2]).all()
    assert np.isnan(lse[0, 0, 0])
    assert lse[0, 0, 1] == np.inf
    assert (out[0, 2] == 1).all()


def test_sums_far_from_zero_neither_overflow_nor_vanish():
    lse_partial = np.array([-3e4, 3e4, 3e4], np.float32).reshape(3, 1, 1)
    out_partial = np.array([7, 1, 3], np.float32).reshape(3, 1, 1, 1)
    out, lse = combine(out_partial, lse_partial)
    assert out.item() == 2
    assert lse.item() == np.float32(3e4 + math.log(2))


def test_out_is_filled_and_returned(rng):
    out_partial, lse_partial = random_parts(rng, "float32", (4, 2, 9, 3, 16))
    out = np.full((2, 9, 6, 20), np.nan, np.float32)[:, :, ::2, :16]
    result, lse = combine(out_partial, lse_partial, out=out)
    assert result is out
    assert_merged(out, lse, out_partial, lse_partial)


def test_strided_and_transposed_parts_give_what_contiguous_ones_give(rng):
    out_partial, lse_partial = random_parts(rng, "float32", (4, 2, 9, 3, 16))
    expected = combine(out_partial, lse_partial)
    strided = np.asfortranarray(out_partial), np.asfortranarray(lse_partial)
    assert_same_bits(combine(*strided), expected)


@pytest.mark.parametrize("shape", [(2, 0, 5, 3, 8), (2, 0, 3, 8), (2, 4, 0, 3, 8)])
def test_no_rows_give_empty_results(shape):
    out, lse = combine(*random_parts(np.random.default_rng(0), "float32", shape))
    assert out.shape == shape[1:]
    assert lse.size == 0


def parts(**changes):
    out_partial = np.zeros((2, 1, 5, 4, 8), np.float16)
    lse_partial = np.zeros((2, 1, 4, 5), np.float32)
    return {"out_partial": out_partial, "lse_partial": lse_partial, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"out_partial": [[1.0]]}, TypeError, "out_partial is a list"),
        ({"lse_partial": None}, TypeError, "lse_partial is a NoneType"),
        ({"out_partial": np.zeros((2, 1, 5, 4, 8), int)}, TypeError, "out_partial has dtype int64"),
        ({"lse_partial": np.zeros((2, 1, 4, 5))}, TypeError,
         "lse_partial has dtype float64; expected float32 for an out_partial of float16"),
        ({"out_partial": np.zeros((2, 1, 5, 4, 8))}, TypeError,
         "lse_partial has dtype float32; expected float64 for an out_partial of float64"),
        ({"lse_partial": np.zeros((2, 1, 4, 5), ">f4")}, TypeError,
         "lse_partial has dtype >f4, in another byte order"),
        ({"lse_partial": np.zeros((2, 1, 5, 4), np.float32)}, ValueError,
         r"lse_partial has shape \(2, 1, 5, 4\); expected \(2, 1, 4, 5\)"),
        ({"out_partial": np.zeros((2, 5, 8), np.float16)}, ValueError, "expected .num_splits"),
        ({"out_partial": np.zeros((0, 1, 5, 4, 8), np.float16)}, ValueError,
         "expected at least 1 split"),
        ({"out": np.zeros((1, 4, 5, 8), np.float16)}, ValueError,
         r"out has shape \(1, 4, 5, 8\); expected \(1, 5, 4, 8\)"),
        ({"out": np.zeros((5, 4, 8), np.float16)}, ValueError, "out has shape"),
        ({"out": np.zeros((1, 5, 4, 8), np.float32)}, TypeError, "out has dtype float32"),
        ({"out": np.zeros((1, 5, 4, 16), np.float16)[..., ::2]}, ValueError,
         "expected a contiguous last axis"),
        ({"out": np.broadcast_to(np.zeros(8, np.float16), (1, 5, 4, 8))}, ValueError,
         "out is read-only"),
        (
            {
                "out": np.lib.stride_tricks.as_strided(
                    np.zeros(99, np.float16), (1, 5, 4, 8), (2,) * 4
                )
            },
            ValueError,
            "out overlaps itself",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused_by_name(changes, error, words):
    with pytest.raises(error, match=words):
        combine(**parts(**changes))


def test_an_out_that_shares_memory_with_the_parts_is_refused():
    arguments = parts()
    with pytest.raises(ValueError, match="out overlaps out_partial"):
        combine(**arguments, out=arguments["out_partial"][1])


# Specs and plans


def spec(**changes):
    sizes = {
        "dtype": "float16", "num_splits": 3, "batch": 2, "seqlen_q": 113, "heads_q": 6,
        "head_dim_v": 128, "split_stride": 2 * 113 * 6 * 128,
        "partial_strides": (113 * 6 * 128, 6 * 128, 128),
        "out_strides": (113 * 6 * 128, 6 * 128, 128), "alignment": 16, "out_alignment": 16,
    }  # fmt: skip
    return CombineSpec(**(sizes | changes))


def aligned(shape, dtype):
    """Return zeros at an address that is a multiple of 16 bytes."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(size + 16, np.uint8)
    start = -buffer.ctypes.data % 16
    return buffer[start : start + size].view(dtype).reshape(shape)


def test_contiguous_parts_are_one_aligned_block():
    out_partial = aligned((3, 2, 113, 6, 128), np.dtype(np.float16))
    assert spec_of_call(out_partial, np.zeros((3, 2, 6, 113), np.float32), None) == spec()


def test_packed_rows_are_one_sequence():
    arrays = aligned((3, 113, 6, 128), np.dtype(np.float16)), np.zeros((3, 6, 113), np.float32)
    found = spec_of_call(*arrays, None)
    assert (found.batch, found.seqlen_q, found.heads_q) == (1, 113, 6)
    assert found.split_stride == 113 * 6 * 128


@pytest.mark.parametrize("elements", [1, 2, 4, 8])
def test_the_step_between_splits_counts_for_the_alignment(elements):
    size = 113 * 6 * 128
    rows = aligned((3, size + elements), np.dtype(np.float16))[:, :size]
    out_partial = np.lib.stride_tricks.as_strided(
        rows, (3, 113, 6, 128), (rows.strides[0], 6 * 256, 256, 2)
    )
    lse_partial = np.zeros((3, 6, 113), np.float32)
    assert spec_of_call(out_partial, lse_partial, None).alignment == 2 * elements
    assert spec_of_call(out_partial[:1], lse_partial[:1], None).alignment == 16


@pytest.mark.parametrize(
    ("dtype", "head_dim_v", "lanes"),
    [
        ("float16", 1, 1), ("float16", 9, 2), ("float16", 96, 16), ("float16", 128, 16),
        ("float32", 128, 32), ("float64", 256, 32),
    ],
)  # fmt: skip
def test_a_row_has_a_thread_for_each_sixteen_bytes_up_to_a_warp(dtype, head_dim_v, lanes):
    assert spec(dtype=dtype, head_dim_v=head_dim_v).lanes == lanes


def test_packing_fills_every_field_of_the_dtype():
    struct = bytearray(COMBINE_DTYPE.itemsize)
    names = ("out_partial", "lse_partial", "another", "sinks", "result", "lse")
    Combine(spec(), None, names)._params.pack_into(struct, (1, 2, 7, 4, 3, 2**64 - 1))
    packed = np.frombuffer(struct, COMBINE_DTYPE)[0]
    assert packed["out_partial"].tolist() == (1, *spec().partial_strides)
    assert packed["out"].tolist() == (3, *spec().out_strides)
    assert (packed["lse_partial"], packed["lse"], packed["sinks"]) == (2, 2**64 - 1, 4)
    for name in ("split_stride", "num_splits", "batch", "seqlen_q", "heads_q", "head_dim_v"):
        assert packed[name] == getattr(spec(), name)


def test_fields_lie_as_a_c_compiler_aligns_them():
    aligned_dtype = np.dtype([(n, COMBINE_DTYPE[n]) for n in COMBINE_DTYPE.names], align=True)
    assert aligned_dtype.itemsize == COMBINE_DTYPE.itemsize
    for name in COMBINE_DTYPE.names:
        assert aligned_dtype.fields[name][1] == COMBINE_DTYPE.fields[name][1]


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_unit_with_sinks_compiles_without_spills(dtype):
    for sinks in {dtype, "float64" if dtype == "float64" else "float32"}:
        unit = combine_unit(spec(dtype=dtype, sinks=sinks))
        cubin = compile_cubin(unit, device_for_arch("sm_90"))
        assert "warning" not in cubin.log
        assert cubin.resources["combine_partials"].spill_bytes == 0


def test_every_member_of_the_struct_is_asserted_in_the_unit():
    text = combine_unit(spec()).text
    assert text.count("static_assert") == 2 + len(TENSOR_DTYPE.names) + len(COMBINE_DTYPE.names)
    assert f"sizeof(CombineParams) == {COMBINE_DTYPE.itemsize}" in text


def test_lengths_and_splits_share_one_kernel():
    other = spec(num_splits=9, batch=7, seqlen_q=1, heads_q=64, head_dim_v=100)
    assert combine_unit(other).text == combine_unit(spec()).text


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "dtype"), list(zip(known_architectures(), itertools.cycle(DTYPES), strict=False))
)
def test_the_kernel_compiles_without_spills(arch, dtype):
    cubin = compile_cubin(combine_unit(spec(dtype=dtype)), device_for_arch(arch))
    assert cubin.resources["combine_partials"].spill_bytes == 0
    assert "warning" not in cubin.log


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_alignment_and_number_of_lanes_compiles(dtype):
    size = DTYPES[dtype].itemsize
    alignments = [a for a in (2, 4, 8, 16) if a >= size]
    for alignment, head_dim_v in zip(alignments * 6, (1, 9, 33, 64, 128, 256), strict=False):
        places = {"alignment": alignment, "out_alignment": alignments[0]}
        unit = combine_unit(spec(dtype=dtype, head_dim_v=head_dim_v, **places))
        cubin = compile_cubin(unit, device_for_arch("sm_90"))
        assert cubin.resources["combine_partials"].spill_bytes == 0


@pytest.mark.parametrize("shape", [(4, 2, 300, 8, 64), (3, 1000, 5, 72), (2, 700, 1, 2, 200)])
def test_parts_are_merged_in_blocks_with_little_memory(shape, rng):
    out_partial = rng.standard_normal(shape).astype(np.float32)
    lse_partial = rng.standard_normal((*shape[:-3], shape[-2], shape[-3])).astype(np.float32)
    lse_partial[0, ..., ::3] = -np.inf
    out_partial[0, ..., ::3, :, :] = np.nan
    out = np.empty(shape[1:], np.float32)
    results = []
    peak = peak_memory(lambda: results.extend(combine(out_partial, lse_partial, out=out)))
    assert peak < 12 * lse_partial.nbytes + (1 << 19)
    _, lse = results
    weights = np.exp(lse_partial.astype(np.float64) - lse).swapaxes(-1, -2)[..., None]
    parts = np.where(weights == 0, 0, out_partial.astype(np.float64))
    np.testing.assert_allclose(out, (weights * parts).sum(axis=0), atol=2e-6)
