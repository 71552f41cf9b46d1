"""Queries that attend to listed keys: `key_indices`."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from support.calls.key_list_calls import KINDS, random_call
from support.comparisons import with_arrays

import cupy_flash
from cupy_flash import (
    UnsupportedError,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)
from cupy_flash.calls.key_lists import fold, forward

BATCH, ROWS, KEYS, HEADS, DIM = 2, 3, 20, 4, 8


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> Any:
    """Module of an array library, NumPy or CuPy."""
    return importlib.import_module(request.param)


def on_host(array: Any) -> np.ndarray:
    host: np.ndarray = array.get() if hasattr(array, "get") else array
    return host


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(6))
def test_random_calls_obey_the_error_rule(
    number: int, kind: str, xp: Any, rng: np.random.Generator
) -> None:
    kernels = int(rng.integers(2**32))
    for _ in range(21 if xp is not np else 2):
        # Compiling takes most of the time, so the calls of a test differ in what needs no kernel.
        call = random_call(rng, kind, choices=np.random.default_rng(kernels))
        call.check(*call.run(xp))
        call.check(*call.reference())


def arrays(xp: Any = np, heads_kv: int = 2) -> tuple[Any, ...]:
    """Return q, k, v and lists of all KV heads."""
    rng = np.random.default_rng(5)
    shapes = ((ROWS, HEADS), (KEYS, heads_kv), (KEYS, heads_kv))
    q, k, v = (rng.standard_normal((BATCH, n, heads, DIM)) for n, heads in shapes)
    lists = rng.integers(0, KEYS, (BATCH, ROWS, 1, 7)).astype(np.int32)
    return tuple(map(xp.asarray, (q, k, v, lists)))


def test_every_key_listed_once_is_the_plain_call(xp: Any) -> None:
    q, k, v, _ = arrays(xp)
    lists = xp.asarray(np.random.default_rng(0).permutation(KEYS).astype(np.int32))
    lists = xp.ascontiguousarray(xp.broadcast_to(lists, (BATCH, ROWS, 1, KEYS)))
    for options in ({}, {"causal": True, "window_size": (9, None)}):
        found = flash_attention(q, k, v, key_indices=lists, **options)
        plain = flash_attention(q, k, v, **options)
        np.testing.assert_allclose(on_host(found), on_host(plain), rtol=0, atol=1e-14)


def test_a_key_listed_twice_counts_twice(xp: Any) -> None:
    q, k, v, _ = arrays(xp)
    lists = xp.full((BATCH, ROWS, 1, 3), 4, np.int32)
    lists[..., 2] = 9
    found = flash_attention(q, k, v, key_indices=lists)
    keys, values = (x[:, [4, 4, 9]] for x in (k, v))
    plain = flash_attention(q, keys, values)
    np.testing.assert_allclose(on_host(found), on_host(plain), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["bias", "mask", "alibi_slopes", "softcap", "nothing"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_lists_of_each_kv_head_take_one_call(
    name: str, is_packed: bool, xp: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    q, k, v, _ = arrays(xp)
    lists = xp.asarray(rng.integers(-1, KEYS, (BATCH, ROWS, 2, 7)).astype(np.int32))
    pairs = (HEADS, BATCH * ROWS, KEYS) if is_packed else (BATCH, HEADS, ROWS, KEYS)
    options = {
        "bias": {"bias": xp.asarray(rng.standard_normal(pairs))},
        "mask": {"mask": xp.asarray(rng.random(pairs) < 0.7)},
        "alibi_slopes": {"alibi_slopes": xp.asarray(rng.random((BATCH, HEADS)))},
        "softcap": {"softcap": 2.0},
        "nothing": {},
    }[name] | {"causal": True, "return_lse": True, "return_entropy": True}
    function, given = flash_attention, (q, k, v)
    if is_packed:
        ends = [0, ROWS, 2 * ROWS], [0, KEYS, 2 * KEYS], ROWS, KEYS
        function = flash_attention_varlen
        given = (*(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)), *ends)
        lists = lists.reshape(-1, 2, 7)
    calls = []
    run = forward.dispatch.attention
    monkeypatch.setattr(forward.dispatch, "attention", lambda *x: calls.append(x) or run(*x))
    found = function(*given, key_indices=lists, **options)
    assert len(calls) == 1
    (inner, *_), *_ = calls
    cache = given[1]
    assert xp.may_share_memory(inner.k_cache, cache)
    assert inner.q.shape[:3] == (2 * BATCH * ROWS, 1, HEADS // 2)
    monkeypatch.setattr(fold, "_can_fold", lambda _: False)
    expected = function(*given, key_indices=lists, **options)
    assert len(calls) == 3
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(on_host(one), on_host(other), rtol=0, atol=1e-14)


def test_sinks_and_other_strides_take_one_call_for_each_kv_head(
    xp: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    q, k, v, _ = arrays(xp)
    lists = xp.asarray(rng.integers(-1, KEYS, (BATCH, ROWS, 2, 7)).astype(np.int32))
    apart = [xp.stack([x, x], axis=2)[:, :, 0] for x in (k, v)]
    calls = []
    run = forward.dispatch.attention
    monkeypatch.setattr(forward.dispatch, "attention", lambda *x: calls.append(x) or run(*x))
    plain = flash_attention(q, k, v, key_indices=lists)
    assert len(calls) == 1
    strided = flash_attention(q, *apart, key_indices=lists)
    assert len(calls) == 3
    np.testing.assert_allclose(on_host(strided), on_host(plain), rtol=0, atol=1e-14)
    sinks = xp.asarray(rng.standard_normal(HEADS))
    flash_attention(q, k, v, key_indices=lists, sinks=sinks)
    assert len(calls) == 5


def test_a_list_may_be_that_of_all_queries_of_a_sequence(xp: Any) -> None:
    q, k, v, lists = arrays(xp)
    of_all = lists[:, :1]
    every = xp.ascontiguousarray(xp.broadcast_to(of_all, lists.shape))
    expected = on_host(flash_attention(q, k, v, key_indices=every))
    for given in (of_all, of_all[:, 0], on_host(of_all).tolist(), of_all.astype(np.int64)):
        found = flash_attention(q, k, v, key_indices=given)
        np.testing.assert_array_equal(on_host(found), expected)


def test_new_rows_are_appended_before_they_are_attended_to(xp: Any) -> None:
    q, k_new, v_new, _ = arrays(xp)
    lengths = xp.asarray([3, 0], dtype=np.int32)
    lists = xp.broadcast_to(xp.arange(25, dtype=np.int32), (BATCH, 1, 25))
    angles = np.random.default_rng(1).uniform(0, 6, (40, 2))
    tables = {"rotary_cos": xp.asarray(np.cos(angles)), "rotary_sin": xp.asarray(np.sin(angles))}
    for options in ({}, {"causal": True}, {"causal": True, **tables}, tables):
        caches = [[xp.zeros((BATCH, 30, 2, DIM)) for _ in range(2)] for _ in range(2)]
        found, plain = (
            flash_attention_with_kvcache(
                *(q, *own, k_new, v_new), cache_seqlens=lengths, key_indices=listed, **options
            )
            for own, listed in zip(caches, (lists, None), strict=True)
        )
        np.testing.assert_allclose(on_host(found), on_host(plain), rtol=0, atol=1e-14)
        for one, other in zip(*caches, strict=True):
            np.testing.assert_array_equal(on_host(one), on_host(other))
    caches = [xp.zeros((BATCH, 30, 2, DIM)) for _ in range(2)]
    found = flash_attention_with_kvcache(
        *(q, *caches, k_new, v_new), cache_seqlens=3, key_indices=lists, **tables
    )
    assert np.isfinite(on_host(found)).all()


def test_out_is_written_and_returned(xp: Any) -> None:
    q, k, v, lists = arrays(xp)
    expected, lse = flash_attention(q, k, v, key_indices=lists, return_lse=True)
    out = xp.full((BATCH, ROWS, 2 * HEADS, DIM), np.nan)[:, :, ::2]
    found, again = flash_attention(q, k, v, key_indices=lists, return_lse=True, out=out)
    assert found is out
    np.testing.assert_array_equal(on_host(out), on_host(expected))
    np.testing.assert_array_equal(on_host(again), on_host(lse))


def test_row_statistics_are_those_of_the_listed_keys(xp: Any) -> None:
    q, k, v, lists = arrays(xp, heads_kv=1)
    options = {"return_max_logits": True, "return_entropy": True, "causal": True}
    _, logits, entropy = flash_attention(q, k, v, key_indices=lists, **options)
    q, k, lists = map(on_host, (q, k, lists))
    for b, i, h in np.ndindex(BATCH, ROWS, HEADS):
        keys = [j for j in lists[b, i, 0] if j <= i + KEYS - ROWS]
        scores = k[b, keys, 0] @ q[b, i, h] * DIM**-0.5
        weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        assert abs(on_host(logits)[b, h, i] - scores.max()) < 1e-12
        assert abs(on_host(entropy)[b, h, i] + weights @ np.log(weights)) < 1e-12


@pytest.mark.parametrize("count", [1, 2])
def test_8_bit_caches_with_any_scales(count: int, xp: Any, rng: np.random.Generator) -> None:
    q, *_ = arrays(heads_kv=2)
    q = q.astype(np.float16)
    k_cache, v_cache = rng.integers(-127, 128, (2, 6, 4, 2, DIM)).astype(np.int8)
    table = rng.permutation(6)[:6].reshape(2, 3).astype(np.int32)
    lists = rng.integers(-1, 12, (BATCH, ROWS, count, 7)).astype(np.int32)
    for shape in ((), (2,), (6, 1, 2), (6, 4, 2)):
        k_scale, v_scale = rng.uniform(0.001, 0.02, (2, *shape)).astype(np.float32)
        given = {"k_scale": k_scale, "v_scale": v_scale, "cache_seqlens": 12}
        given |= {"block_table": table, "key_indices": lists}
        given = with_arrays(xp.asarray, given)
        caches = [xp.asarray(x) for x in (q, k_cache, v_cache)]
        found = on_host(flash_attention_with_kvcache(*caches, **given))
        scales = (np.broadcast_to(x, (6, 4, 2))[..., None] for x in (k_scale, v_scale))
        whole = [
            (x * scale)[table].reshape(2, 12, 2, DIM)
            for x, scale in zip((k_cache, v_cache), scales, strict=True)
        ]
        for b, i, head in np.ndindex(BATCH, ROWS, 2):
            keys = lists[b, i, min(head, count - 1)]
            own, heads = (b, keys[keys >= 0], slice(head, head + 1)), slice(2 * head, 2 * head + 2)
            one = q[b, i, heads][None, None], *(x[own][None] for x in whole)
            exact = cupy_flash.attention_reference(*one)
            assert abs(found[b, i, heads] - exact[0, 0]).max() < 4e-3


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"dropout_p": 0.5, "dropout_seed": 1}, "dropout_seed"),
        ({"tree_mask": np.ones((BATCH, ROWS), np.uint64)}, "tree_mask"),
    ],
)
def test_other_modifications_are_not_supported(options: dict[str, Any], name: str) -> None:
    q, k, v, lists = arrays()
    with pytest.raises(UnsupportedError, match=f"{name} is not supported together with key_ind"):
        flash_attention(q, k, v, key_indices=lists, **options)


@pytest.mark.parametrize(
    ("lists", "error", "message"),
    [
        (np.zeros((BATCH, ROWS, 3, 7), int), ValueError, r"\(2, 3, 3, 7\); expected \(batch, seq"),
        (np.zeros((BATCH, 2, 1, 7), int), ValueError, r"= \(2, 3 or 1, 2 or 1, n\)"),
        (np.zeros((1, ROWS, 1, 7), int), ValueError, "key_indices has shape"),
        (np.zeros((BATCH, 7), int), ValueError, "key_indices has shape"),
        (np.zeros((BATCH, ROWS, 1, 7)), TypeError, "key_indices has dtype float64; expected int"),
        ("lists", TypeError, "key_indices is"),
    ],
)
def test_wrong_lists_are_errors(lists: Any, error: type[Exception], message: str) -> None:
    q, k, v, _ = arrays()
    with pytest.raises(error, match=message):
        flash_attention(q, k, v, key_indices=lists)


def test_wrong_lists_of_packed_queries_are_errors() -> None:
    q, k, v, lists = arrays()
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    ends = [0, ROWS, 2 * ROWS], [0, KEYS, 2 * KEYS], ROWS, KEYS
    with pytest.raises(ValueError, match=r"\(total_q, heads, n\) = \(6, 2 or 1, n\)"):
        flash_attention_varlen(*packed, *ends, key_indices=lists)


def test_calls_without_queries_keys_or_sequences_are_those_without_lists(xp: Any) -> None:
    q, k, v, lists = arrays(xp)
    for given in (
        (q[:, :0], k, v, lists[:, :0]),
        (q[:0], k[:0], v[:0], lists[:0]),
        (q, k[:, :0], v[:, :0], lists),
        (q, k, v, lists[..., :0]),
    ):
        out, lse = flash_attention(*given[:3], key_indices=given[3], return_lse=True)
        assert out.shape == given[0].shape
        assert not on_host(out).any()
        assert np.isneginf(on_host(lse)).all()
    ends = [0], [0], ROWS, KEYS
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    out = flash_attention_varlen(*packed, *ends, key_indices=lists.reshape(-1, 1, 7))
    assert not on_host(out).any()


def test_new_rows_are_appended_without_queries(xp: Any) -> None:
    q, k, v, lists = arrays(xp)
    caches = [xp.zeros((BATCH, 30, 2, DIM)) for _ in range(2)]
    given = {"cache_seqlens": 4, "key_indices": lists[:, :0]}
    out = flash_attention_with_kvcache(q[:, :0], *caches, k, v, **given)
    assert out.shape == (BATCH, 0, HEADS, DIM)
    np.testing.assert_array_equal(on_host(caches[0][:, 4 : 4 + KEYS]), on_host(k))


@pytest.mark.parametrize("axes", [(1, 2, 3), (2, 3), (3,), (1, 3), (1, 2), (2,)])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_arrays_of_packed_pairs_may_be_broadcast(
    name: str, axes: tuple[int, ...], xp: Any, rng: np.random.Generator
) -> None:
    q, k, v, lists = arrays(xp)
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    ends = [0, ROWS, 2 * ROWS], [0, KEYS, 2 * KEYS], ROWS, KEYS
    sizes = {1: HEADS, 2: 2 * ROWS, 3: KEYS}
    first = min(axes)
    shape = [sizes[axis] if axis in axes else 1 for axis in range(first, 4)]
    array = rng.standard_normal(shape)
    given = {name: xp.asarray(array if name == "bias" else array < 0.7)}
    lists = lists.reshape(-1, 1, 7)
    out, lse = flash_attention_varlen(*packed, *ends, key_indices=lists, **given, return_lse=True)
    expected = cupy_flash.attention_varlen_reference(*packed, *ends, key_indices=lists, **given)
    for found, right in zip((out, lse), expected, strict=True):
        np.testing.assert_allclose(on_host(found), on_host(right), rtol=0, atol=1e-13)


def test_indices_of_any_integer_dtype_do_not_wrap_around(xp: Any) -> None:
    q, k, v, lists = arrays(xp)
    expected = on_host(flash_attention(q, k, v, key_indices=lists))
    for dtype, far in (
        (np.int64, 2**32 + 3),
        (np.int64, -(2**33) + 3),
        (np.uint64, 2**64 - 1),
        (np.uint32, 2**32 - 1),
        (np.int8, -100),
    ):
        more = xp.concatenate([lists.astype(dtype), xp.full_like(lists, far, dtype)], axis=-1)
        found = flash_attention(q, k, v, key_indices=more)
        np.testing.assert_allclose(on_host(found), expected, rtol=0, atol=1e-15)


def test_nothing_is_appended_if_an_argument_is_wrong() -> None:
    q, k, v, lists = arrays()
    read_only = np.empty_like(q)
    read_only.flags.writeable = False
    caches = np.zeros((2, BATCH, 30, 2, DIM))
    for wrong, error, message in (
        ({"out": read_only}, ValueError, "out is read-only"),
        ({"family": "mma"}, UnsupportedError, "family 'mma' is a GPU kernel"),
        ({"shared_prefix_len": 3}, ValueError, "pass only one of them"),
    ):
        given = {"cache_seqlens": 4, "key_indices": lists} | wrong
        with pytest.raises(error, match=message):
            flash_attention_with_kvcache(q, *caches, k, v, **given)
        assert not caches.any()
    strided = np.zeros((BATCH, 2, 30, 2, DIM))[:, 0]
    with pytest.raises(ValueError, match="k_cache has strides"):
        flash_attention_with_kvcache(q, strided, caches[1], cache_seqlens=4, key_indices=lists)


def test_a_call_with_lists_has_no_plan() -> None:
    q, k, v, lists = arrays()
    error = pytest.raises(UnsupportedError, match="calls with key_indices have no plan")
    with error:
        cupy_flash.plan(flash_attention, q, k, v, key_indices=lists)
    with error:
        cupy_flash.plan(cupy_flash.flash_attention_backward, q=q, k=k, v=v, key_indices=lists)
    with error, pytest.deprecated_call():
        cupy_flash.plan_with_kvcache(q, k, v, cache_seqlens=3, key_indices=lists)


def test_arrays_of_other_libraries_are_answered_in_kind() -> None:
    torch = pytest.importorskip("torch")
    expected = flash_attention(*arrays()[:3], key_indices=arrays()[3])
    q, k, v, lists = map(torch.from_numpy, arrays())
    found = flash_attention(q, k, v, key_indices=lists)
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found, expected)
