"""`Problem`, the record of one call: its fields and counts, and how positions are kept in range."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash.problem.arrays import DTYPES, ITEMSIZE, ArraySpec, contiguous_strides
from cupy_flash.problem.problem import MAX_SEQLEN, make_contiguous_problem, make_problem

SIZES = {"dtype": "float32", "batch": 2, "seqlen_q": 113, "seqlen_k": 203, "heads_q": 6}
SIZES |= {"heads_kv": 3, "head_dim": 40, "head_dim_v": 72}
seqlens = st.integers(0, 40)


def problem(**changes):
    return make_contiguous_problem(**(SIZES | changes))


def seen(problem):
    """Return whether query i attends to key j, by definition, shape (seqlen_q, seqlen_k)."""
    i, j = np.ogrid[: problem.seqlen_q, : problem.seqlen_k]
    return (j <= i + problem.q_offset) | (not problem.causal)


def test_a_problem_holds_the_sizes_strides_and_defaults():
    p = problem()
    assert (p.batch, p.seqlen_q, p.seqlen_k) == (2, 113, 203)
    assert (p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v) == (6, 3, 40, 72)
    assert p.tensors["q"].strides == (113 * 6 * 40, 6 * 40, 40)
    assert p.tensors["v"].strides == (203 * 3 * 72, 3 * 72, 72)
    assert p.tensors["out"].strides == (113 * 6 * 72, 6 * 72, 72)
    assert p.softmax_scale == 1 / math.sqrt(40)
    assert (p.causal, p.q_offset) == (False, 0)
    assert p.rows == 2 * 6 * 113


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_itemsize_is_that_of_the_dtype(dtype):
    assert problem(dtype=dtype).itemsize == ITEMSIZE[dtype]


def test_equal_calls_make_equal_problems_that_hash_alike():
    assert problem() == problem()
    assert hash(problem()) == hash(problem())
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem().batch = 3


@pytest.mark.parametrize("axis", ["batch", "seqlen_q"])
def test_a_problem_without_output_elements_is_empty(axis):
    assert problem(**{axis: 0}).is_empty


def test_a_problem_without_keys_still_has_an_output():
    assert not problem(seqlen_k=0).is_empty


def test_contiguous_strides_are_numpys():
    shape = (3, 5, 7, 11)
    strides = np.empty(shape, np.int8).strides
    assert contiguous_strides(shape) == strides[:3]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 239), (799, 3), (113, 113)])
def test_a_causal_mask_is_aligned_bottom_right_by_default(seqlen_q, seqlen_k):
    p = problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=True)
    assert p.q_offset == seqlen_k - seqlen_q
    # The last query attends to the last key; the query before it does not.
    assert seen(p)[-1].all()
    assert seqlen_q == 1 or not seen(p)[-2].all()


@given(seqlens, seqlens, st.integers(-(2**40), 2**40) | st.integers(-50, 50))
def test_clamping_q_offset_does_not_change_the_mask(seqlen_q, seqlen_k, q_offset):
    p = problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=True, q_offset=q_offset)
    assert -seqlen_q <= p.q_offset <= seqlen_k
    np.testing.assert_array_equal(seen(p), seen(dataclasses.replace(p, q_offset=q_offset)))


def test_q_offset_may_be_a_numpy_integer():
    assert problem(causal=True, q_offset=np.int64(7)).q_offset == 7


def test_q_offset_without_a_causal_mask_is_refused():
    with pytest.raises(ValueError, match=r"a causal mask, a window or another .* causal=True"):
        problem(q_offset=0)


@pytest.mark.parametrize("scale", [0, 0.0, -0.5, 1e-30, np.float32(0.25), 3])
def test_any_finite_softmax_scale_is_taken(scale):
    assert problem(softmax_scale=scale).softmax_scale == float(scale)
    assert type(problem(softmax_scale=scale).softmax_scale) is float


def test_zeros_of_both_signs_are_one_scale_as_keys_hold_one_for_both():
    assert math.copysign(1, problem(softmax_scale=-0.0).softmax_scale) == 1


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 10**400])
def test_a_softmax_scale_that_is_not_finite_is_refused(scale):
    with pytest.raises(ValueError, match=r"softmax_scale is .*; expected a finite number"):
        problem(softmax_scale=scale)


@pytest.mark.parametrize("scale", [1e39, -1e39])
def test_a_softmax_scale_beyond_float32_is_refused_but_for_float64(scale):
    for dtype in ("float32", "float16", "bfloat16"):
        with pytest.raises(ValueError, match=rf"softmax_scale is .*, as scores of {dtype} arrays"):
            problem(softmax_scale=scale, dtype=dtype)
    assert problem(softmax_scale=scale, dtype="float64").softmax_scale == scale


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@given(scale=st.floats(-1e30, 1e30))
def test_kernels_get_a_scale_in_parts_that_make_it_up(dtype, scale):
    (sign, shift), factor = problem(softmax_scale=scale, dtype=dtype).score_factor
    exponent = 1022 if dtype == "float64" else 126
    assert factor > 2.0**-exponent
    if sign:
        assert sign * factor * 2.0**-shift == scale
    else:
        # A scale this small makes no difference to any score.
        assert abs(scale) * 2.0**exponent < 1e-6


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("softmax_scale", "0.5", "a number"),
        ("softmax_scale", 1j, "a number"),
        ("q_offset", 1.5, "an integer"),
        ("q_offset", "3", "an integer"),
        ("causal", "no", "True or False"),
        ("causal", 1, "True or False"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_by_name(option, value, expected):
    with pytest.raises(TypeError, match=f"{option} is .*; expected {expected}"):
        problem(**({"causal": True} | {option: value}))


def test_a_numpy_bool_is_a_mask_choice():
    assert problem(causal=np.True_).causal is True


@given(
    st.sampled_from([(0, 0), (1, 1), (16, 48), (0, 16), (40, 8)]),
    st.integers(0, 5),
    st.integers(1, 5),
)
def test_rows_are_aligned_as_the_address_and_every_stride_in_use_are(padding, offset, heads):
    row, first = padding
    dims = 24
    flat = np.zeros(4096, np.float32)
    strides = (4 * (600 + first), 4 * (150 + row), 4 * 28, 4)
    array = np.lib.stride_tricks.as_strided(flat[offset:], (2, 3, heads, dims), strides)
    rows = (array[b, s, h] for b, s, h in np.ndindex(*array.shape[:3]))
    addresses = [each.ctypes.data - flat.ctypes.data for each in rows]
    in_elements = tuple(n // 4 for n in array.strides[:3])
    spec = ArraySpec(array.shape, in_elements, "float32", alignment=math.gcd(4 * offset, 16))
    assert spec.row_alignment() == math.gcd(16, *addresses)


def test_the_stride_of_an_axis_of_length_one_does_not_limit_alignment():
    spec = ArraySpec((1, 5, 1, 64), (7, 64, 3), "float16")
    assert spec.row_alignment() == 16


def test_a_problem_has_the_alignment_of_its_worst_input_and_that_of_out_apart():
    shape = (1, 8, 1, 64)
    aligned = ArraySpec.contiguous(shape, "float16")
    odd = ArraySpec(shape, (8 * 65, 65, 65), "float16")
    half = ArraySpec(shape, (8 * 68, 68, 68), "float16")
    p = make_problem(aligned, aligned, odd, half)
    assert (p.alignment, p.out_alignment) == (2, 8)
    assert [p.tensors[name].alignment for name in ("q", "k", "v", "out")] == [16, 16, 2, 8]


def test_a_problem_may_be_posed_of_other_alignment():
    for p, expected in ((problem().aligned(4), (4, 16)), (problem().aligned(8, 4), (8, 4))):
        assert (p.alignment, p.out_alignment) == expected
        assert p.aligned(16, 16) == problem() != p


def test_out_may_have_any_strides_that_do_not_overlap():
    shape = (2, 3, 4, 8)
    q = ArraySpec.contiguous(shape, "float32")
    for strides in [(96, 32, 8), (8, 64, 16), (1000, -32, 8), (96, 8, 24)]:
        out = ArraySpec(shape, strides, "float32")
        assert make_problem(q, q, q, out).tensors["out"].strides == strides


@pytest.mark.parametrize("strides", [(0, 32, 8), (96, 32, 7), (96, 8, 8), (96, -4, 32)])
def test_an_out_that_overlaps_itself_is_refused(strides):
    shape = (2, 3, 4, 8)
    q = ArraySpec.contiguous(shape, "float32")
    with pytest.raises(ValueError, match=r"out overlaps itself: .* elements do not share memory"):
        make_problem(q, q, q, ArraySpec(shape, strides, "float32"))


def test_an_empty_out_overlaps_nothing():
    q = ArraySpec.contiguous((2, 0, 4, 8), "float32")
    assert make_problem(q, q, q, ArraySpec(q.shape, (0, 0, 0), "float32")).is_empty


def test_sequences_longer_than_32_bit_row_counts_are_refused():
    with pytest.raises(ValueError, match=f"seqlen of k and v is .*; expected at most {MAX_SEQLEN}"):
        problem(seqlen_k=MAX_SEQLEN + 1)


def test_a_full_problem_counts_four_flops_per_pair_and_column():
    p = problem(head_dim=64, head_dim_v=64)
    assert p.flops() == 4 * 2 * 6 * 113 * 203 * 64


def test_different_head_dims_count_by_their_mean():
    assert problem().flops() == 4 * 2 * 6 * 113 * 203 * (40 + 72) / 2


def test_a_square_causal_problem_counts_exactly_half():
    full, causal = (problem(seqlen_k=113, causal=causal).flops() for causal in (False, True))
    assert causal == full / 2


@given(seqlens, seqlens, st.integers(-60, 60))
def test_a_causal_problem_counts_half_a_pair_less_per_row_on_the_diagonal(
    seqlen_q, seqlen_k, q_offset
):
    p = problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=True, q_offset=q_offset)
    mask = seen(p)
    on_diagonal = sum(0 <= i + p.q_offset < seqlen_k for i in range(seqlen_q))
    pairs = mask.sum() - on_diagonal / 2
    assert p.flops() == 2 * 2 * 6 * pairs * (40 + 72)
