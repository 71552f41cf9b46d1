"""Lengths, slopes and sinks of any dtype, as lists or numbers, and arrays at odd addresses."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from support.calls.sequence_support import random_kvcache_case, random_varlen_case
from support.comparisons import assert_all_equal

from cupy_flash import (
    attention_reference,
    combine,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    flash_attention_varlen_vjp,
    flash_attention_with_kvcache,
    plan,
)
from cupy_flash.arrays.strided import is_aligned

INTEGERS = ["int8", "uint8", "int16", ">i4", "uint32", "int64", "uint64", ">i8"]
REALS = [np.float16, ml_dtypes.bfloat16, np.float64, ">f4", np.longdouble]
LENGTHS = {"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "cache_seqlens"}
HEADS = 4


def at_odd_address(array):
    """Return a copy whose elements do not begin at multiples of their size in bytes."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    view = memory[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert not is_aligned(view) or array.itemsize == 1
    return view


def dense(rng, dtype=np.float32):
    return tuple(rng.standard_normal((2, n, HEADS, 16)).astype(dtype) for n in (13, 21, 21))


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def lengths_of(arguments):
    """Return the lengths and offsets of a call; negative entries, which no call reads, become 0."""
    found = {n: x for n, x in arguments.items() if n in LENGTHS and x is not None}
    assert all(x.dtype == np.int32 and x.max(initial=0) < 128 for x in found.values())
    return {n: np.maximum(x, 0) for n, x in found.items()}


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("page_size", [0, 4])
def test_packed_calls_take_lengths_of_any_integer_dtype(rng, page_size, dtype):
    case = random_varlen_case(rng, batch=3, longest=20, page_size=page_size, seqused=True)
    arguments = case.problem().arguments()
    lengths = lengths_of(arguments)
    call = functools.partial(flash_attention_varlen, return_lse=True, backend="cpu")
    expected = call(**(arguments | lengths))
    changed = arguments | {n: x.astype(dtype) for n, x in lengths.items()}
    assert_same(call(**changed), expected)
    case.problem().check(*expected)
    assert plan(flash_attention_varlen, **changed, backend="cpu") == plan(
        flash_attention_varlen, **arguments, backend="cpu"
    )


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("page_size", [0, 4])
def test_cached_calls_take_lengths_of_any_integer_dtype(rng, page_size, dtype):
    case = random_kvcache_case(rng, batch=3, longest=20, page_size=page_size, seqlen_new=2)
    problem = case.problem()
    lengths = lengths_of(problem.arguments())
    call = functools.partial(flash_attention_with_kvcache, return_lse=True, backend="cpu")
    expected = call(**(problem.arguments() | lengths))
    changed = problem.arguments() | {n: x.astype(dtype) for n, x in lengths.items()}
    made = plan(flash_attention_with_kvcache, **changed, backend="cpu")
    assert_same(call(**changed), expected)
    problem.check(*expected)
    problem.check_caches(changed["k_cache"], changed["v_cache"])
    assert made == plan(flash_attention_with_kvcache, **problem.arguments(), backend="cpu")


@pytest.mark.parametrize("dtype", ["int64", "uint16", list, tuple])
def test_gradients_take_lengths_of_any_integer_dtype(rng, dtype):
    arguments = random_varlen_case(rng, batch=3, longest=20, seqused=True).problem().arguments()
    assert arguments.pop("block_table", None) is None
    out, lse = flash_attention_varlen(**arguments, return_lse=True, backend="cpu")
    call = functools.partial(flash_attention_varlen_backward, out, out=out, lse=lse, backend="cpu")
    expected = call(**arguments)
    change = dtype if isinstance(dtype, type) else lambda x: x.astype(dtype)
    changed = arguments | {n: change(x) for n, x in lengths_of(arguments).items()}
    assert_same(call(**changed), expected)
    _, pull_back = flash_attention_varlen_vjp(**changed, backend="cpu")
    assert_same(pull_back(out), expected)


@pytest.mark.parametrize("change", [np.int64, list, tuple])
def test_lengths_of_modifications_are_taken_alike(rng, change):
    q, k, v = dense(rng)
    lengths = {"prefix_lens": np.array([2, 9], np.int32), "seqlens_k": np.array([20, 5], np.int32)}
    changed = {n: change(x.tolist()) for n, x in lengths.items()}
    call = functools.partial(flash_attention, q, k, v, causal=True, backend="cpu")
    np.testing.assert_array_equal(call(**changed), call(**lengths))


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
@pytest.mark.parametrize("name", ["cu_seqlens_q", "seqused_k", "block_table"])
def test_integers_that_int32_does_not_hold_are_refused(rng, name, dtype):
    case = random_varlen_case(rng, batch=3, longest=20, page_size=4, seqused=True)
    arguments = case.problem().arguments()
    wrong = lengths_of(arguments)[name].astype(dtype)
    wrong.flat[-1] = 2**31
    with pytest.raises(ValueError, match=f"{name} holds integers that do not fit int32"):
        flash_attention_varlen(**(arguments | {name: wrong}), backend="cpu")


def test_paged_keys_need_no_cu_seqlens_k_beside_seqused_k(rng):
    case = random_varlen_case(rng, batch=3, longest=20, page_size=4, seqused=True)
    arguments = case.problem().arguments()
    without = arguments | {"cu_seqlens_k": None}
    call = functools.partial(flash_attention_varlen, return_lse=True, backend="cpu")
    assert_same(call(**without), call(**arguments))
    case.problem().check(*call(**without))
    assert plan(flash_attention_varlen, **without, backend="cpu") == plan(
        flash_attention_varlen, **arguments, backend="cpu"
    )
    with pytest.raises(TypeError, match=r"cu_seqlens_k is a NoneType; .*and seqused_k"):
        flash_attention_varlen(**(without | {"seqused_k": None}))


@pytest.mark.parametrize("dtype", REALS, ids=lambda dtype: np.dtype(dtype).str)
@pytest.mark.parametrize("of_q", [np.float16, np.float32, np.float64])
def test_slopes_and_sinks_are_taken_in_any_float_dtype(rng, of_q, dtype):
    q, k, v = dense(rng, of_q)
    # Every tested dtype represents these numbers exactly.
    vectors = {"alibi_slopes": np.array([0.5, 0.25, 1, 0]), "sinks": np.array([1, -2, 0.5, 0])}
    accumulator = np.float64 if of_q is np.float64 else np.float32
    right = {n: x.astype(accumulator) for n, x in vectors.items()}
    changed = {n: x.astype(dtype) for n, x in vectors.items()}
    call = functools.partial(flash_attention, q, k, v, return_lse=True, backend="cpu")
    out, lse = call(**right)
    assert_same(call(**changed), (out, lse))
    wrt = ("q", "sinks")
    back = functools.partial(flash_attention_backward, out, q, k, v, out, lse, wrt=wrt)
    dq, dsinks = back(**right, backend="cpu")
    found = back(**changed, backend="cpu")
    np.testing.assert_array_equal(found[0], dq)
    np.testing.assert_array_equal(found[1], dsinks.astype(dtype))
    assert found[1].dtype == np.dtype(dtype)
    for function, more in ((flash_attention, {}), (flash_attention_backward, {"wrt": wrt})):
        planned = functools.partial(plan, function, q=q, k=k, v=v, backend="cpu", **more)
        tiles = [planned(**x).tile for x in (changed, right)]
        assert tiles[0] == tiles[1]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_slopes_and_sinks_may_be_lists_or_numbers(rng, layout):
    arrays = dense(rng)
    q, k, v = arrays if layout == "bshd" else (x.swapaxes(1, 2) for x in arrays)
    call = functools.partial(flash_attention, q, k, v, layout=layout, return_lse=True)
    vectors = {"alibi_slopes": [0.5, 0.25, 1, 0], "sinks": (1, -np.inf, 0.5, 0)}
    expected = call(**{n: np.array(x, np.float32) for n, x in vectors.items()})
    assert_same(call(**vectors), expected)
    for number in (1, 0.5, np.float32(0.25), np.array(0.75)):
        numbers = {"alibi_slopes": number, "sinks": number}
        expected = call(**{n: np.full(HEADS, number, np.float32) for n in vectors})
        assert_same(call(**numbers), expected)
    planned = functools.partial(plan, flash_attention, q, k, v, layout=layout)
    assert planned(**numbers) == planned(**vectors)


def test_slopes_of_each_sequence_may_be_a_list(rng):
    q, k, v = dense(rng)
    slopes = [[0.5, 0.25, 1, 0], [0, 0, 2, 3]]
    out = flash_attention(q, k, v, alibi_slopes=slopes)
    expected = flash_attention(q, k, v, alibi_slopes=np.array(slopes, np.float32))
    np.testing.assert_array_equal(out, expected)


def test_the_gradient_of_sinks_is_shaped_as_they_are(rng):
    q, k, v = dense(rng)
    out, lse = flash_attention(q, k, v, sinks=0.5, return_lse=True)
    back = functools.partial(flash_attention_backward, out, q, k, v, out, lse, wrt=("sinks",))
    (of_list,) = back(sinks=[0.5] * HEADS)
    (expected,) = back(sinks=np.full(HEADS, 0.5, np.float32))
    np.testing.assert_array_equal(of_list, expected)
    (of_number,) = back(sinks=0.5)
    assert np.shape(of_number) == ()
    np.testing.assert_allclose(of_number, expected.sum(), rtol=1e-6)


@pytest.mark.parametrize(
    "sinks", [[0.5, -np.inf, 1, 0], 0.5, np.array([0.5, -np.inf, 1, 0])], ids=repr
)
def test_a_merge_takes_the_same_sinks(rng, sinks):
    parts = rng.standard_normal((3, 2, 5, HEADS, 8), np.float32)
    lse = rng.standard_normal((3, 2, HEADS, 5), np.float32)
    right = np.broadcast_to(np.array(sinks, np.float32), (HEADS,))
    assert_same(combine(parts, lse, sinks=sinks), combine(parts, lse, sinks=right.copy()))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_numbers_may_be_arrays_of_one(rng, shape):
    q, k, v = dense(rng)
    rows = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    lengths = {"cu_seqlens_q": [0, 13, 26], "cu_seqlens_k": [0, 21, 42]}
    lengths |= {"max_seqlen_q": 13, "max_seqlen_k": 21}
    numbers = {"softmax_scale": 0.25, "softcap": 2.0}
    calls = (
        functools.partial(flash_attention, q, k, v, backend="cpu"),
        functools.partial(flash_attention_varlen, *rows, **lengths, backend="cpu"),
        functools.partial(flash_attention_with_kvcache, q, k, v, cache_seqlens=21, backend="cpu"),
        functools.partial(attention_reference, q, k, v),
    )
    for call in calls:
        arrays = {name: np.full(shape, number) for name, number in numbers.items()}
        np.testing.assert_array_equal(call(**arrays), call(**numbers))
    largest = {n: np.full(shape, lengths[n]) for n in ("max_seqlen_q", "max_seqlen_k")}
    found = flash_attention_varlen(*rows, **(lengths | largest), backend="cpu")
    np.testing.assert_array_equal(found, flash_attention_varlen(*rows, **lengths, backend="cpu"))
    out, lse = flash_attention(q, k, v, **numbers, return_lse=True, backend="cpu")
    back = functools.partial(flash_attention_backward, out, q, k, v, out, lse, backend="cpu")
    assert_all_equal(back(**arrays), back(**numbers))
    call = functools.partial(flash_attention, q, k, v, causal=True, backend="cpu")
    np.testing.assert_array_equal(call(q_offset=np.array(5)), call(q_offset=5))


def test_arrays_of_several_numbers_are_no_numbers(rng):
    q, k, v = dense(rng)
    for name in ("softmax_scale", "softcap"):
        with pytest.raises(TypeError, match=rf"{name} is array.*; expected a number"):
            flash_attention(q, k, v, **{name: np.ones(2)})
    # There are two sequences, so `q_offset` needs two entries.
    with pytest.raises(ValueError, match=r"q_offset has shape \(1,\); expected \(2,\)"):
        flash_attention(q, k, v, causal=True, q_offset=np.array([5]))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_arrays_at_odd_addresses_give_the_same_bits(rng, dtype):
    q, k, v = dense(rng, dtype)
    arrays = {
        "q": q, "k": k, "v": v, "bias": rng.standard_normal((HEADS, 13, 21)).astype(dtype),
        "mask": rng.random((13, 21)) < 0.7,
        "tree_mask": rng.integers(0, 2**13, (2, 13)).astype(np.uint64),
        "alibi_slopes": rng.random(HEADS).astype(np.float32),
        "sinks": rng.standard_normal(HEADS).astype(dtype),
        "prefix_lens": np.array([3, 0], np.int32), "seqlens_k": np.array([21, 19], np.int32),
    }  # fmt: skip
    moved = {n: at_odd_address(x) for n, x in arrays.items()}
    call = functools.partial(flash_attention, causal=True, return_lse=True, backend="cpu")
    out, lse = call(**arrays)
    into = at_odd_address(np.full(q.shape, np.nan, dtype))
    results = call(**moved, out=into)
    assert results[0] is into
    assert_same(results, (out, lse))
    planned = functools.partial(plan, flash_attention, causal=True)
    assert planned(**moved).problem == planned(**arrays).problem
    wrt = ("q", "k", "v", "bias", "sinks")
    back = functools.partial(flash_attention_backward, causal=True, wrt=wrt, backend="cpu")
    expected = back(out, **arrays, out=out, lse=lse)
    odd = at_odd_address(out)
    assert_same(back(odd, **moved, out=odd, lse=at_odd_address(lse)), expected)


def test_packed_arrays_at_odd_addresses_give_the_same_bits(rng):
    case = random_varlen_case(rng, batch=3, longest=20, page_size=4, seqused=True)
    arguments = case.problem().arguments()
    arrays = {n: x for n, x in arguments.items() if isinstance(x, np.ndarray)}
    moved = arguments | {n: at_odd_address(x) for n, x in arrays.items()}
    call = functools.partial(flash_attention_varlen, return_lse=True, backend="cpu")
    assert_same(call(**moved), call(**arguments))


def test_elements_between_the_fields_of_records_are_read(rng):
    q, k, v = dense(rng)
    records = np.zeros(k.shape[:3], [("tag", np.uint8), ("row", np.float32, k.shape[3])])
    records["row"] = k
    assert records["row"].strides[2] % 4
    np.testing.assert_array_equal(flash_attention(q, records["row"], v), flash_attention(q, k, v))


def packed_on(gpu, **changes):
    return {
        "q": gpu.array(113, 6, 40),
        "k": gpu.array(31, 16, 3, 40),
        "v": gpu.array(31, 16, 3, 72),
        "cu_seqlens_q": gpu.lengths(4),
        "cu_seqlens_k": gpu.lengths(4),
        "max_seqlen_q": 63,
        "max_seqlen_k": 105,
        "seqused_k": gpu.lengths(3),
        "block_table": gpu.lengths(3, 7),
    } | changes


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16])
@pytest.mark.parametrize("name", sorted(LENGTHS - {"cache_seqlens"}))
def test_lengths_of_other_integers_are_converted_on_the_gpu(gpu, name, dtype):
    arguments = packed_on(gpu)
    given = gpu.array(*arguments[name].shape, dtype=dtype)
    for _ in range(2):
        flash_attention_varlen(**(arguments | {name: given}))
    for _, params in gpu.launches:
        assert params[name] not in (0, given.data.ptr)
    assert len(gpu.launches) == 2
    assert gpu.uploads == []
    made = plan(flash_attention_varlen, **(arguments | {name: given}), arch="sm_90")
    assert made == plan(flash_attention_varlen, **arguments, arch="sm_90")


def test_lists_are_copied_to_the_gpu(gpu):
    lists = {"cu_seqlens_q": [0, 5, 9, 113], "seqused_k": (1, 2, 3), "cu_seqlens_k": None}
    flash_attention_varlen(**packed_on(gpu, **lists, sinks=[0.5] * 6, alibi_slopes=0.25))
    assert [x.tolist() for x in gpu.uploads] == [
        *([0, 5, 9, 113], [0, 5, 9, 113], [1, 2, 3]),
        *([0.5] * 6, 0.25),
    ]
    ((_, params),) = gpu.launches
    assert params["seqused_k"]
    with pytest.raises(ValueError, match="seqused_k holds integers that do not fit int32"):
        flash_attention_varlen(**packed_on(gpu, seqused_k=[1, 2, 2**31]))


def test_the_gradient_of_sinks_on_a_gpu_has_their_dtype(gpu):
    rows, lse = (2, 113, 6, 40), gpu.array(2, 6, 113, dtype=np.float32)
    dout, q, k, v, out = (gpu.array(*rows) for _ in range(5))
    for dtype in (np.float64, np.float32, np.float16):
        given = {"sinks": gpu.array(6, dtype=dtype), "wrt": ("q", "sinks")}
        *_, dsinks = flash_attention_backward(dout, q, k, v, out, lse, **given)
        assert (dsinks.dtype, dsinks.shape) == (dtype, (6,))


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("bias", (6, 113, 203), np.float16),
        ("mask", (113, 203), np.bool_),
        ("sinks", (6,), np.float32),
        ("alibi_slopes", (6,), np.float32),
        ("prefix_lens", (2,), np.int32),
        ("seqlens_k", (2,), np.int32),
    ],
)
def test_modifications_at_odd_addresses_are_copied_on_the_gpu(gpu, monkeypatch, name, shape, dtype):
    dense = {"q": (2, 113, 6, 40), "k": (2, 203, 3, 40), "v": (2, 203, 3, 72)}
    arrays = {n: gpu.array(*shape) for n, shape in dense.items()}
    itemsize = np.dtype(dtype).itemsize
    odd = gpu.array(*shape, dtype=dtype, address=gpu.address() + itemsize // 2)
    flash_attention(**arrays, causal=True, **{name: odd})
