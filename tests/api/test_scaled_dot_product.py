"""`scaled_dot_product_attention`, against the formula of PyTorch's documentation in float64."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.libraries import HOST_LIBRARIES, host_array

from cupy_flash import flash_attention, scaled_dot_product_attention
from cupy_flash.calls import scaled_dot_product

Array = np.ndarray


def formula(
    *arrays: Array, attn_mask: Any = None, is_causal: bool = False, scale: Any = None
) -> Array:
    query, key, value = (x.astype(np.float64) for x in arrays)
    if query.ndim > 2 and key.shape[-3] != query.shape[-3]:
        group = query.shape[-3] // key.shape[-3]
        key, value = (np.repeat(x, group, axis=-3) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * query @ key.swapaxes(-2, -1)
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    if attn_mask is not None and attn_mask.dtype == bool:
        scores = np.where(attn_mask, scores, -np.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.astype(np.float64)
    largest = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), -1e300)
    weights = np.exp(scores - largest)
    sums = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(sums == 0, 1, sums) @ value


def arrays(
    rng: np.random.Generator,
    *leading: int,
    sizes: tuple[int, int, int, int] = (7, 10, 5, 3),
    dtype: Any = np.float64,
    heads_kv: int | None = None,
) -> list[Array]:
    """Return random query, key and value arrays; `sizes` are L, S, E and Ev."""
    seqlen_q, seqlen_k, dim, dim_v = sizes
    of_keys = leading if heads_kv is None else (*leading[:-1], heads_kv)
    shapes = (*leading, seqlen_q, dim), (*of_keys, seqlen_k, dim), (*of_keys, seqlen_k, dim_v)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def assert_alike(found: Array, expected: Array, values: Array, *, eps: float = 2.0**-52) -> None:
    """Assert equality up to roundings of weighted means of `values`."""
    assert found.shape == expected.shape
    bound = 64 * eps * float(np.abs(values.astype(np.float64)).max(initial=1))
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=bound)


LEADING = [(), (4,), (2, 4), (3, 2, 4), (2, 1, 3, 4), (0, 4), (2, 0, 4)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlens", [(7, 10), (10, 7), (1, 5), (5, 1), (6, 6), (65, 130)])
@pytest.mark.parametrize("leading", LEADING)
def test_any_number_of_axes(
    leading: tuple[int, ...], seqlens: tuple[int, int], is_causal: bool, rng: np.random.Generator
) -> None:
    given = arrays(rng, *leading, sizes=(*seqlens, 5, 3))
    found = scaled_dot_product_attention(*given, is_causal=is_causal)
    assert_alike(found, formula(*given, is_causal=is_causal), given[2])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_every_dtype(dtype: Any, rng: np.random.Generator) -> None:
    given = arrays(rng, 2, 4, sizes=(33, 47, 24, 16), dtype=dtype)
    found = scaled_dot_product_attention(*given)
    assert found.dtype == dtype
    eps = float(ml_dtypes.finfo(dtype).eps) / 8
    assert_alike(found, formula(*given), given[2], eps=max(eps, 2.0**-52))


def test_the_causal_mask_is_aligned_at_the_top_left(rng: np.random.Generator) -> None:
    query, key, value = arrays(rng, 2, 4)
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_array_equal(out[..., 0, :], value[..., 0, :])
    bottom_right = flash_attention(query, key, value, causal=True, layout="bhsd")
    assert not np.array_equal(out, bottom_right)


@pytest.mark.parametrize("kind", [np.bool_, np.float32, np.float64])
@pytest.mark.parametrize("leading", [(), (4,), (2, 4), (3, 2, 4)])
def test_masks_that_broadcast(leading: tuple[int, ...], kind: Any, rng: Any) -> None:
    given = arrays(rng, *leading)
    scores = (*leading, 7, 10)
    shapes = {scores[i:] for i in range(len(scores))}
    shapes |= {tuple(n if rng.random() < 0.5 else 1 for n in scores) for _ in range(8)}
    for shape in shapes:
        mask = rng.standard_normal(shape).astype(np.float32).astype(kind)
        if kind is np.bool_:
            mask = rng.random(shape) < 0.6
        found = scaled_dot_product_attention(*given, attn_mask=mask)
        assert_alike(found, formula(*given, attn_mask=mask), given[2])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_mask_of_the_dtype_of_query(dtype: Any, rng: np.random.Generator) -> None:
    given = arrays(rng, 2, 4, dtype=dtype)
    mask = rng.standard_normal((4, 7, 10)).astype(dtype)
    eps = float(ml_dtypes.finfo(dtype).eps) / 8
    found = scaled_dot_product_attention(*given, mask)
    assert_alike(found, formula(*given, attn_mask=mask), given[2], eps=eps)


def test_a_wholly_masked_row_is_zero(rng: np.random.Generator) -> None:
    given = arrays(rng, 2, 4)
    seen = rng.random((7, 10)) < 0.6
    seen[3] = False
    added = np.where(seen, 0, -np.inf)
    for mask in (seen, added):
        found = scaled_dot_product_attention(*given, attn_mask=mask)
        assert not found[..., 3, :].any()
        assert_alike(found, formula(*given, attn_mask=mask), given[2])


@pytest.mark.parametrize("leading", [(6,), (2, 6), (2, 3, 6)])
@pytest.mark.parametrize("heads_kv", [1, 2, 3, 6])
def test_query_heads_that_share_keys(leading: tuple[int, ...], heads_kv: int, rng: Any) -> None:
    given = arrays(rng, *leading, heads_kv=heads_kv)
    found = scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    assert_alike(found, formula(*given, is_causal=True), given[2])


@pytest.mark.parametrize("scale", [0.0, -0.5, 2, np.float32(0.25)])
def test_a_scale(scale: float, rng: np.random.Generator) -> None:
    given = arrays(rng, 2, 4)
    found = scaled_dot_product_attention(*given, scale=scale)
    assert_alike(found, formula(*given, scale=float(scale)), given[2])


def test_arguments_have_the_order_of_pytorch(rng: np.random.Generator) -> None:
    given = arrays(rng, 2, 4)
    found = scaled_dot_product_attention(*given, None, 0.0, True, 0.5, False)
    assert_alike(found, formula(*given, is_causal=True, scale=0.5), given[2])


def test_four_axes_are_read_in_place(rng: np.random.Generator) -> None:
    # Projections of a model have this order in memory: (batch, seqlen, heads, head_dim).
    given = [rng.standard_normal((2, 7, 4, 5)).swapaxes(1, 2) for _ in range(3)]
    mask = rng.random((7, 7)) < 0.6
    made, options, _ = scaled_dot_product.prepared(*given, mask, 0.0, False, None, False, None)
    for x, original in zip((*made, options["mask"]), (*given, mask), strict=True):
        assert np.shares_memory(x, original)
    assert made[0].strides == given[0].strides


@pytest.mark.parametrize("library", ["torch", "dlpack"])
def test_arrays_of_other_libraries(library: str, rng: np.random.Generator) -> None:
    to = HOST_LIBRARIES[library]()
    for leading in ((), (2, 4), (3, 2, 4)):
        given = arrays(rng, *leading)
        mask = rng.standard_normal((7, 10))
        found = scaled_dot_product_attention(*map(to.convert, given), to.convert(mask))
        assert type(found) is to.type
        expected = scaled_dot_product_attention(*given, mask)
        np.testing.assert_array_equal(host_array(found), expected)


def _zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


_Q = _zeros(2, 4, 7, 5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": None}, TypeError, "query is a NoneType; expected a NumPy or CuPy array"),
        ({"key": [1.0]}, TypeError, "key is a list; expected a NumPy or CuPy array"),
        ({"attn_mask": 3}, TypeError, "attn_mask is an int; expected a NumPy or CuPy array"),
        ({"query": _Q.astype(int)}, TypeError, "query has dtype int64; expected one of float16"),
        ({"value": _Q.astype(np.float16)}, TypeError, "value has dtype float16; expected one of"),
        ({"query": _zeros(5)}, ValueError, "query has shape (5,); expected (..., heads, seqlen"),
        ({"key": _zeros(4, 7, 5)}, ValueError, "key has shape (4, 7, 5); expected (..., heads"),
        ({"key": _zeros(1, 4, 7, 5)}, ValueError, "expected the leading axes (2,) of query"),
        ({"value": _zeros(2, 4, 8, 5)}, ValueError, "expected (2, 4, 7, 5), with the heads and"),
        ({"key": _zeros(2, 4, 7, 6)}, ValueError, "key has a head_dim of 6; expected 5, as query"),
        ({"key": _zeros(2, 2, 7, 5), "value": _zeros(2, 2, 7, 5)}, ValueError,
         "query has 4 heads and key 2; pass enable_gqa=True"),
        ({"key": _zeros(2, 3, 7, 5), "value": _zeros(2, 3, 7, 5), "enable_gqa": True}, ValueError,
         "query has 4 heads; expected a multiple of the 3 heads of key"),
        ({"key": _zeros(2, 0, 7, 5), "value": _zeros(2, 0, 7, 5), "enable_gqa": True}, ValueError,
         "query has 4 heads; expected a multiple of the 0 heads of key"),
        ({"attn_mask": _zeros(7, 6)}, ValueError,
         "attn_mask has shape (7, 6); expected one that broadcasts to (2, 4, 7, 7)"),
        ({"attn_mask": _zeros(1, 2, 4, 7, 7)}, ValueError,
         "attn_mask has shape (1, 2, 4, 7, 7); expected one that broadcasts to (2, 4, 7, 7)"),
        ({"attn_mask": np.zeros((7, 7), np.int32)}, TypeError,
         "attn_mask has dtype int32; expected bool or float32"),
        ({"attn_mask": _zeros(7, 7), "is_causal": True}, ValueError,
         "attn_mask is given and is_causal is True; pass only one of them"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p is 1; expected a number from 0 to below 1"),
        ({"dropout_p": 0.1, "dropout_seed": 0.5}, TypeError, "dropout_seed is 0.5; expected"),
        ({"dropout_p": None}, TypeError, "dropout_p is None; expected a number"),
        ({"is_causal": 1}, TypeError, "is_causal is 1; expected True or False"),
        ({"enable_gqa": None}, TypeError, "enable_gqa is None; expected True or False"),
        ({"scale": np.nan}, ValueError, "scale is nan; expected a finite number"),
        ({"scale": "a"}, TypeError, "scale is 'a'; expected a number"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(change: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        scaled_dot_product_attention(**{"query": _Q, "key": _Q, "value": _Q, **change})
