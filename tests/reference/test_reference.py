"""The reference, compared with the formula written out row by row, and edge cases."""

from __future__ import annotations

import functools
import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from support.comparisons import assert_all_close
from support.foreign import Foreign

from cupy_flash.reference import rows
from cupy_flash.reference.dense import attention_naive, attention_reference, error_bound, max_error
from cupy_flash.reference.gradients import attention_backward_reference, backward_naive

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def random_qkv(seqlen_q, seqlen_k, *, heads=(2, 2), dims=(40, 40), dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(seqlen_q, heads[0], dims[0]), (seqlen_k, heads[1], dims[0])]
    shapes.append((seqlen_k, heads[1], dims[1]))
    return [rng.standard_normal((2, *shape)).astype(dtype) for shape in shapes]


def by_rows(q, k, v, scale, q_offset=None):
    """Return (out, lse) by the formula, one query at a time, with Python's exact sums."""
    batch, seqlen_q, heads_q, _ = q.shape
    group = heads_q // k.shape[2]
    out = np.zeros((batch, seqlen_q, heads_q, v.shape[3]))
    lse = np.full((batch, heads_q, seqlen_q), -np.inf)
    for b, i, h in np.ndindex(batch, seqlen_q, heads_q):
        seen = k.shape[1] if q_offset is None else min(max(i + q_offset + 1, 0), k.shape[1])
        if seen == 0:
            continue
        scores = [scale * math.fsum(q[b, i, h] * k[b, j, h // group]) for j in range(seen)]
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        total = math.fsum(weights)
        lse[b, h, i] = top + math.log(total)
        for j, weight in enumerate(weights):
            out[b, i, h] += weight / total * v[b, j, h // group]
    return out, lse


@pytest.mark.parametrize("q_offset", [None, 0, 5, -3, 40, -40])
@pytest.mark.parametrize("seqlens", [(11, 23), (1, 23), (17, 3)])
def test_equals_the_formula_taken_row_by_row(seqlens, q_offset):
    q, k, v = random_qkv(*seqlens, heads=(6, 2), dims=(24, 9))
    options = {"causal": q_offset is not None, "q_offset": q_offset, "softmax_scale": -0.3}
    found = attention_reference(q, k, v, return_lse=True, **options)
    assert_all_close(found, by_rows(q, k, v, -0.3, q_offset), rtol=0, atol=1e-13)


def test_causal_is_aligned_bottom_right_and_scale_is_one_over_root_head_dim_by_default():
    q, k, v = random_qkv(7, 12)
    expected, _ = by_rows(q, k, v, 40**-0.5, 12 - 7)
    np.testing.assert_allclose(attention_reference(q, k, v, causal=True), expected, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("function", [attention_reference, attention_naive])
def test_bhsd_is_bshd_with_the_axes_swapped(function, causal):
    q, k, v = random_qkv(13, 29, heads=(4, 2), dims=(8, 5))
    swapped = [x.swapaxes(1, 2).copy() for x in (q, k, v)]
    found = function(*swapped, causal=causal, layout="bhsd")
    np.testing.assert_array_equal(found, function(q, k, v, causal=causal).swapaxes(1, 2))


@pytest.mark.parametrize("chunk_bytes", [1, 8 * 203 * 7, 8 * 203 * 50])
def test_chunks_do_not_change_the_result(monkeypatch, chunk_bytes):
    q, k, v = random_qkv(113, 203, heads=(2, 1))
    whole = attention_reference(q, k, v, causal=True, return_lse=True)
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk_bytes)
    chunked = attention_reference(q, k, v, causal=True, return_lse=True)
    assert_all_close(whole, chunked, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float_dtype_gives_float64(dtype):
    q, k, v = random_qkv(5, 9, dtype=dtype)
    out, lse = attention_reference(q, k, v, return_lse=True)
    exact = attention_reference(*(x.astype(np.float64) for x in (q, k, v)))
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_array_equal(out, exact)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences_give_zero_and_minus_infinity(seqlen_q, seqlen_k):
    q, k, v = random_qkv(seqlen_q, seqlen_k, dims=(4, 3))
    out, lse = attention_reference(q, k, v, return_lse=True)
    np.testing.assert_array_equal(out, np.zeros((2, seqlen_q, 2, 3)))
    np.testing.assert_array_equal(lse, np.full((2, 2, seqlen_q), -np.inf))
    np.testing.assert_array_equal(attention_naive(q, k, v), out)


def test_a_row_whose_seen_scores_are_all_minus_infinity_gives_zero():
    q, k, v = random_qkv(3, 4, dims=(2, 2))
    q[...], k[...] = 1, -np.inf
    v[0, 1, 0, 0] = np.nan
    out, lse = attention_reference(q, k, v, return_lse=True)
    assert not out.any()
    assert (lse == -np.inf).all()
    assert not attention_naive(q, k, v).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_masked_key_leaves_no_trace(poison):
    q, k, v = random_qkv(6, 6)
    clean = attention_reference(q, k, v, causal=True, return_lse=True)
    k[:, 4:] = poison
    poisoned = attention_reference(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(clean[0][:, :4], poisoned[0][:, :4])
    np.testing.assert_array_equal(clean[1][:, :, :4], poisoned[1][:, :, :4])


def test_nan_reaches_exactly_the_rows_that_see_it():
    q, k, v = random_qkv(6, 6, heads=(1, 1))
    q[0, 3], k[1, 4] = np.nan, np.nan
    out, lse = attention_reference(q, k, v, causal=True, return_lse=True)
    expected = np.array([[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1]], bool)
    np.testing.assert_array_equal(np.isnan(out).all(axis=(2, 3)), expected)
    np.testing.assert_array_equal(np.isnan(out).any(axis=(2, 3)), expected)
    np.testing.assert_array_equal(np.isnan(lse[:, 0]), expected)


def test_a_score_of_plus_infinity_gives_nan_as_the_formula_does():
    q, k, v = random_qkv(2, 3, dims=(1, 1))
    q[...], k[:, 1] = 1, np.inf
    out, lse = attention_reference(q, k, v, return_lse=True)
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_naive_keeps_the_dtype_and_is_close(dtype):
    q, k, v = random_qkv(33, 47, heads=(4, 2), dims=(16, 24), dtype=dtype)
    naive = attention_naive(q, k, v, causal=True)
    exact = attention_reference(q, k, v, causal=True)
    assert naive.dtype == dtype
    assert max_error(naive, exact) < 8 * float(ml_dtypes.finfo(dtype).eps)


@pytest.mark.parametrize("axis", ["batch", "heads", "head_dim", "seqlen", "ndim", "layout"])
def test_shapes_that_do_not_match_are_refused(axis):
    q, k, v = random_qkv(4, 6, heads=(4, 2))
    layout = "sbhd" if axis == "layout" else "bshd"
    q = {"batch": q[:1], "heads": q[:, :, :3], "head_dim": q[..., :7], "ndim": q[0]}.get(axis, q)
    v = v[:, :5] if axis == "seqlen" else v
    with pytest.raises(ValueError, match=r"layout|dimensions|agree|multiple"):
        attention_reference(q, k, v, layout=layout)


def test_a_list_is_refused_by_name():
    q, k, v = random_qkv(4, 6)
    with pytest.raises(TypeError, match="k is a list; expected a NumPy or CuPy array"):
        attention_reference(q, k.tolist(), v)


def test_max_error_counts_equal_nan_and_inf_as_zero_and_unequal_ones_as_inf():
    special = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert max_error(special, special) == 0
    assert max_error(special, np.array([np.nan, np.inf, -np.inf, 1.25])) == 0.25
    for position in range(3):
        other = special.copy()
        other[position] = 0
        assert max_error(special, other) == math.inf
        assert max_error(other, special) == math.inf
    assert max_error(special[1:2], special[2:3]) == math.inf
    assert max_error(special[:0], special[:0]) == 0


def test_max_error_refuses_to_broadcast():
    with pytest.raises(ValueError, match="shape"):
        max_error(np.zeros((2, 1)), np.zeros((2, 2)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_error_bound_is_twice_the_naive_error_and_four_ulps(dtype):
    eps = float(ml_dtypes.finfo(dtype).eps)
    exact = np.array([0.5, -3.0])
    assert error_bound(exact, exact, dtype) == 4 * 2 * eps
    assert error_bound(exact + np.array([0.25, 0]), exact, dtype) == 0.5 + 4 * 2 * eps
    assert error_bound(exact, exact, dtype, lse=np.array([-5.0, -np.inf])) == 14 * 2 * eps


def test_error_bound_stays_finite_where_the_naive_result_overflows():
    exact = np.array([1.0, 2.0, np.nan])
    overflowed = np.array([np.nan, 2.0, np.nan])
    assert error_bound(overflowed, exact, np.float32) == 4 * 2 * 2.0**-23


def test_cupy_is_not_imported_for_numpy_arrays():
    code = (
        "import sys, numpy as np; from cupy_flash import attention_reference as f;"
        "x = np.ones((1, 2, 1, 4)); f(x, x, x); assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arrays_of_another_library_are_taken_and_given_back():
    q, k, v = random_qkv(5, 7, dtype=np.float32)
    out, lse = attention_reference(q, k, v, causal=True, return_lse=True)
    foreign = [Foreign(x) for x in (q, k, v)]
    other_out, other_lse = attention_reference(*foreign, causal=True, return_lse=True)
    np.testing.assert_array_equal(other_out.array, out)
    np.testing.assert_array_equal(other_lse.array, lse)
    naive = attention_naive(*foreign)
    np.testing.assert_array_equal(naive.array, attention_naive(q, k, v))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_torch_tensors_give_torch_tensors(name):
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x).to(getattr(torch, name)) for x in random_qkv(5, 7)]
    exact = attention_reference(*(x.double().numpy() for x in tensors))
    out = attention_reference(*tensors)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, torch.from_numpy(exact))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (1, 2, 1)])
def test_any_batch_axes_are_taken_and_given_back(rng, batch, layout):
    size = math.prod(batch)
    shapes = {"q": (5, 4, 8), "k": (7, 2, 8), "v": (7, 2, 6), "dout": (5, 4, 6)}
    if layout == "bhsd":
        shapes = {name: (heads, rows, dim) for name, (rows, heads, dim) in shapes.items()}
    one = {n: rng.standard_normal((size, *shape)) for n, shape in shapes.items()}
    several = {n: x.reshape(*batch, *x.shape[1:]) for n, x in one.items()}
    douts = one.pop("dout"), several.pop("dout")
    dlse = rng.standard_normal((size, 4, 5))
    options = {"causal": True, "layout": layout}

    def assert_same(found, expected):
        for result, other in zip(found, expected, strict=True):
            assert result.shape == (*batch, *other.shape[1:])
            np.testing.assert_array_equal(result.reshape(other.shape), other)

    reference = functools.partial(attention_reference, **options, return_lse=True)
    assert_same(reference(**several), reference(**one))
    assert_same([attention_naive(**several, **options)], [attention_naive(**one, **options)])
    for gradients in (attention_backward_reference, backward_naive):
        expected = gradients(douts[0], **one, dlse=dlse, **options)
        of_lse = dlse.reshape(*batch, 4, 5)
        assert_same(gradients(douts[1], **several, dlse=of_lse, **options), expected)


def test_arrays_of_other_batch_axes_are_refused_by_name(rng):
    q, k = rng.standard_normal((2, 3, 5, 4, 8)), rng.standard_normal((3, 2, 5, 4, 8))
    for function in (attention_reference, attention_naive):
        with pytest.raises(ValueError, match="k has the batch axes"):
            function(q, k, k)
        with pytest.raises(ValueError, match="v has 4 axes"):
            function(q, q, q[0])
        with pytest.raises(ValueError, match="q has 2 axes"):
            function(q[0, 0, 0], k, k)
