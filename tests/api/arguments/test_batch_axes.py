"""Dense arrays without a batch axis, or with several batch axes."""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np
import pytest
from support.comparisons import assert_all_equal
from support.foreign import Foreign

from cupy_flash import (
    attention_reference,
    flash_attention,
    flash_attention_backward,
    flash_attention_qkvpacked,
    flash_attention_qkvpacked_backward,
    flash_attention_qkvpacked_vjp,
    flash_attention_vjp,
    plan,
)
from cupy_flash.reference.dense import attention_naive, error_bound, max_error

# Sizes of the batch axes, and the order of these axes in memory, outermost first.
BATCHES = [((), ()), ((3,), (0,)), ((2, 3), (0, 1)), ((2, 3), (1, 0)), ((2, 1, 3), (2, 0, 1))]
SEQLEN_Q, SEQLEN_K, HEADS, HEADS_KV, DIM, DIM_V = 13, 21, 4, 2, 16, 24


def placed(array, batch, order):
    """Return a copy of an array of (batch, ...) with these batch axes, in this order in memory."""
    split = array.reshape(*batch, *array.shape[1:])
    rest = range(len(batch), split.ndim)
    copy = np.ascontiguousarray(split.transpose(*order, *rest))
    return copy.transpose(*np.argsort(order).tolist(), *rest)


def random_arrays(rng, batch, layout="bshd", dtype=np.float32):
    """Return q, k, v and dout with one batch axis."""
    size = math.prod(batch)
    shapes = {
        "q": (size, SEQLEN_Q, HEADS, DIM),
        "k": (size, SEQLEN_K, HEADS_KV, DIM),
        "v": (size, SEQLEN_K, HEADS_KV, DIM_V),
        "dout": (size, SEQLEN_Q, HEADS, DIM_V),
    }
    arrays = {n: rng.standard_normal(shape).astype(dtype) for n, shape in shapes.items()}
    if layout == "bhsd":
        arrays = {n: np.ascontiguousarray(x.swapaxes(1, 2)) for n, x in arrays.items()}
    return arrays


def split_batch(arrays, batch):
    """Return copies of named arrays with these batch axes, in C order."""
    return {name: placed(x, batch, range(len(batch))) for name, x in arrays.items()}


def assert_same(found, expected, batch):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == (*batch, *other.shape[1:])
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.reshape(other.shape), other)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(("batch", "order"), BATCHES)
def test_results_have_the_batch_axes_of_the_inputs(rng, batch, order, layout):
    arrays = random_arrays(rng, batch, layout)
    dout = arrays.pop("dout")
    options = {"causal": True, "layout": layout, "backend": "cpu"}
    out, lse = expected = flash_attention(**arrays, **options, return_lse=True)
    place = functools.partial(placed, batch=batch, order=order)
    split = {n: place(x) for n, x in arrays.items()}
    found = flash_attention(**split, **options, return_lse=True)
    assert_same(found, expected, batch)
    back = functools.partial(flash_attention_backward, **options, dlse=None)
    gradients = back(dout, **arrays, out=out, lse=lse)
    results = {"out": place(out), "lse": place(lse)}
    assert_same(back(place(dout), **split, **results), gradients, batch)
    _, pull_back = flash_attention_vjp(**split, **options)
    assert_same(pull_back(place(dout)), gradients, batch)
    plans = [plan(flash_attention, **x, **options) for x in (split, arrays)]
    made, flat = ((p.problem.mask, p.problem.batch, p.tile) for p in plans)
    assert made == flat
    planned = plan(flash_attention_backward, **split, **options)
    assert planned.workspace == plan(flash_attention_backward, **arrays, **options).workspace


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_they_are_what_the_formula_gives(rng, batch, dtype):
    arrays = random_arrays(rng, batch, dtype=dtype)
    del arrays["dout"]
    split = split_batch(arrays, batch)
    out = flash_attention(**split, causal=True, backend="cpu").reshape(-1, SEQLEN_Q, HEADS, DIM_V)
    exact, lse = attention_reference(**arrays, causal=True, return_lse=True)
    naive = attention_naive(**arrays, causal=True)
    assert max_error(out, exact) <= error_bound(naive, exact, dtype, lse=lse)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_results_are_written_to_arrays_of_the_same_axes(rng, batch):
    split = split_batch(random_arrays(rng, batch), batch)
    dout = split.pop("dout")
    expected = flash_attention(**split, return_lse=True, backend="cpu")
    # `out` consists of every other head of an array with twice the heads.
    wide = np.full((*batch, SEQLEN_Q, 2 * HEADS, DIM_V), np.nan, np.float32)
    out = wide[..., ::2, :]
    results = flash_attention(**split, out=out, return_lse=True, backend="cpu")
    assert results[0] is out
    assert_all_equal(results, expected)
    assert np.isnan(wide[..., 1::2, :]).all()
    back = functools.partial(flash_attention_backward, dout, **split, out=out, lse=expected[1])
    new = {f"d{n}": np.full_like(x, np.nan) for n, x in split.items()}
    gradients, into = back(backend="cpu"), back(**new, backend="cpu")
    assert all(one is array for one, array in zip(into, new.values(), strict=True))
    assert_all_equal(into, gradients)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_modifications_have_one_batch_axis(rng, batch):
    arrays = random_arrays(rng, batch)
    size = math.prod(batch)
    split = split_batch(arrays, batch)
    dout = split.pop("dout")
    given = {
        "bias": rng.standard_normal((size, HEADS, SEQLEN_Q, SEQLEN_K), np.float32),
        "alibi_slopes": rng.random((size, HEADS), np.float32),
        "seqlens_k": rng.integers(1, SEQLEN_K + 1, size).astype(np.int32),
        "prefix_lens": rng.integers(0, SEQLEN_K, size).astype(np.int32),
        "sinks": rng.standard_normal(HEADS, np.float32),
        "causal": True,
        "backend": "cpu",
    }
    flat = {n: arrays[n] for n in "qkv"}
    out, lse = expected = flash_attention(**flat, **given, return_lse=True)
    found = flash_attention(**split, **given, return_lse=True)
    assert_same(found, expected, batch)
    wrt = ("q", "k", "v", "bias", "sinks")
    back = functools.partial(flash_attention_backward, wrt=wrt, **given)
    *gradients, of_bias, of_sinks = back(dout, **split, out=found[0], lse=found[1])
    *exact, exact_bias, exact_sinks = back(arrays["dout"], **flat, out=out, lse=lse)
    assert_same(gradients, exact, batch)
    np.testing.assert_array_equal(of_bias, exact_bias)
    np.testing.assert_array_equal(of_sinks, exact_sinks)


def test_a_bias_with_several_batch_axes_is_refused_with_the_shape_that_is_taken(rng):
    batch = (2, 3)
    split = split_batch(random_arrays(rng, batch), batch)
    del split["dout"]
    bias = np.zeros((*batch, HEADS, SEQLEN_Q, SEQLEN_K), np.float32)
    message = r"bias has shape \(2, 3, .*broadcasts to \(6, 4, 13, 21\)"
    with pytest.raises(ValueError, match=message):
        flash_attention(**split, bias=bias)


def test_float8_may_have_other_batch_axes(rng):
    arrays = random_arrays(rng, (2, 3), dtype=ml_dtypes.float8_e4m3fn)
    arrays["v"] = arrays["v"][..., :DIM]
    flat = {n: np.ascontiguousarray(arrays[n]) for n in "qkv"}
    split = {n: placed(x, (2, 3), (1, 0)) for n, x in flat.items()}
    scale = rng.random((6, 1, HEADS_KV), np.float32)
    options = {"k_scale": scale, "return_lse": True, "backend": "cpu"}
    assert_same(flash_attention(**split, **options), flash_attention(**flat, **options), (2, 3))


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_another_librarys_arrays_are_taken_alike(rng, batch):
    split = split_batch(random_arrays(rng, batch), batch)
    del split["dout"]
    expected = flash_attention(**split)
    out = flash_attention(**{n: Foreign(x) for n, x in split.items()})
    assert isinstance(out, Foreign)
    np.testing.assert_array_equal(out.array, expected)


@pytest.mark.parametrize(("batch", "order"), BATCHES)
def test_one_array_of_queries_keys_and_values_may_have_them(rng, batch, order):
    shape = (math.prod(batch), SEQLEN_Q, 3, HEADS, DIM)
    flat = rng.standard_normal(shape, np.float32)
    flat_dout = rng.standard_normal((shape[0], SEQLEN_Q, HEADS, DIM), np.float32)
    qkv, dout = (placed(x, batch, order) for x in (flat, flat_dout))
    options = {"causal": True, "backend": "cpu"}
    call = functools.partial(flash_attention_qkvpacked, **options, return_lse=True)
    out, lse = expected = call(flat)
    found = call(qkv)
    assert_same(found, expected, batch)
    into = np.full_like(found[0], np.nan)
    assert call(qkv, out=into)[0] is into
    np.testing.assert_array_equal(into, found[0])
    back = flash_attention_qkvpacked_backward
    gradient = back(flat_dout, flat, out, lse, **options)
    assert_same([back(dout, qkv, *found, **options)], [gradient], batch)
    dqkv = np.full(qkv.shape, np.nan, np.float32)
    assert back(dout, qkv, *found, dqkv=dqkv, **options) is dqkv
    assert_same([dqkv], [gradient], batch)
    _, pull_back = flash_attention_qkvpacked_vjp(qkv, **options)
    assert_same([pull_back(dout)], [gradient], batch)
    for function in (flash_attention_qkvpacked, back):
        problem = plan(function, qkv=qkv, **options).problem
        assert (problem.batch, problem.seqlen_q, problem.heads_q) == (shape[0], SEQLEN_Q, HEADS)


def test_no_sequences_are_computed(rng):
    arrays = random_arrays(rng, (2, 0, 3))
    split = {n: arrays[n].reshape(2, 0, 3, *arrays[n].shape[1:]) for n in "qkv"}
    out, lse = flash_attention(**split, return_lse=True)
    assert out.shape == (2, 0, 3, SEQLEN_Q, HEADS, DIM_V)
    assert lse.shape == (2, 0, 3, HEADS, SEQLEN_Q)


SHAPES = {"q": (113, 6, 40), "k": (203, 3, 40), "v": (203, 3, 72)}


def assert_read_in_place(gpu, batch):
    """Assert that a call with several batch axes reads the memory that the call before reads."""
    (_, expected), (_, params) = gpu.launches
    for name in ("q", "k", "v"):
        for field in ("data", "row_stride", "head_stride"):
            assert params[name][field] == expected[name][field]
        assert not batch or params[name]["batch_stride"] == expected[name]["batch_stride"]


@pytest.mark.parametrize("batch", [(), (2, 3), (1, 6), (2, 1, 3)])
def test_arrays_on_a_gpu_are_read_where_they_lie(gpu, batch):
    flat = {n: gpu.array(math.prod(batch), *shape) for n, shape in SHAPES.items()}
    split = {n: gpu.array(*batch, *SHAPES[n], address=x.data.ptr) for n, x in flat.items()}
    flash_attention(**flat, return_lse=True)
    out, lse = flash_attention(**split, return_lse=True)
    assert_read_in_place(gpu, batch)
    _, params = gpu.launches[1]
    assert params["batch"] == math.prod(batch)
    assert params["out"]["data"] == out.data.ptr
    assert params["lse"] == lse.data.ptr
    assert (out.shape, lse.shape) == ((*batch, 113, 6, 72), (*batch, 6, 113))
    dout = gpu.array(*out.shape)
    gradients = flash_attention_backward(dout, **split, out=out, lse=lse)
    assert [gradient.shape for gradient in gradients] == [x.shape for x in split.values()]
    _, params = gpu.launches[-1]
    assert params["k"]["data"] == split["k"].data.ptr


@pytest.mark.parametrize("batch", [(), (2, 3), (2, 1, 3)])
def test_one_array_of_all_three_is_read_where_it_lies(gpu, batch):
    flat = gpu.array(math.prod(batch), 113, 3, 4, 40)
    qkv = gpu.array(*batch, *flat.shape[1:], address=flat.data.ptr)
    for array in (flat, qkv):
        out, lse = flash_attention_qkvpacked(array, return_lse=True)
    assert (out.shape, lse.shape) == ((*batch, 113, 4, 40), (*batch, 4, 113))
    assert_read_in_place(gpu, batch)
    # Batch axes that are in another order in memory cannot be merged into one.
    if len(batch) == 2:
        step = qkv.strides[1]
        turned = gpu.array(*qkv.shape, strides=(step, 2 * step, *qkv.strides[2:]))
        flash_attention_qkvpacked(turned)
        _, params = gpu.launches[-1]
        first = params["q"]["data"]
        assert first not in (0, turned.data.ptr)
        assert params["k"]["data"] == first + 4 * 40 * 2


def test_batch_axes_without_a_common_stride_are_copied_on_a_gpu(gpu):
    split = {n: gpu.array(2, 3, *shape) for n, shape in SHAPES.items()}
    k = split["k"]
    step = k.strides[1]
    turned = gpu.array(*k.shape, strides=(step, 2 * step, *k.strides[2:]))
    flash_attention(**(split | {"k": turned}))
    ((_, params),) = gpu.launches
    assert params["k"]["data"] not in (0, turned.data.ptr)
    out = gpu.array(2, 3, 113, 6, 72)
    strides = (out.strides[1], 2 * out.strides[1], *out.strides[2:])
    out = gpu.array(*out.shape, strides=strides)
    message = r"out has shape .*; expected batch axes that can be merged"
    with pytest.raises(ValueError, match=message):
        flash_attention(**split, out=out)
