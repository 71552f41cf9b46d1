"""Lists of keys in `cupy_flash.jax`: results, gradients, transforms and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import UnsupportedError

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")

from jax import numpy as jnp  # noqa: E402

ENDS_Q, ENDS_K = [0, 3, 3, 8], [0, 9, 11, 16]
RUNS = [lambda function: function, jax.jit]


def inputs_of(kind: str, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray, Any]:
    """Return q, k and v, lists with repeated keys and -1, and the lengths of packed sequences."""
    shapes, lists, lengths = ((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 4)), (2, 5, 2, 7), ()
    if kind == "packed":
        shapes, lists = ((8, 4, 8), (16, 2, 8), (16, 2, 4)), (8, 1, 7)
        lengths = (np.array(ENDS_Q, np.int32), np.array(ENDS_K, np.int32), 5, 9)
    rows = [rng.standard_normal(x).astype(np.float32) for x in shapes]
    return rows, rng.integers(-1, 10, lists), lengths


@pytest.mark.parametrize("run", RUNS, ids=["at once", "jit"])
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_results_and_gradients_are_those_of_the_reference(
    kind: str, run: Any, rng: np.random.Generator
) -> None:
    rows, lists, lengths = inputs_of(kind, rng)
    function = cj.flash_attention_varlen if lengths else cj.flash_attention
    names = ("attention_reference", "attention_backward_reference")
    if lengths:
        names = ("attention_varlen_reference", "attention_varlen_backward_reference")
    reference, backward = (getattr(cupy_flash, name) for name in names)

    def attention(q: Any, k: Any, v: Any, lists: Any) -> Any:
        return function(q, k, v, *lengths, causal=True, key_indices=lists)

    given = [jnp.asarray(x) for x in (*rows, lists)]
    out, pullback = jax.vjp(lambda *x: run(attention)(*x, given[3]), *given[:3])
    dout = rng.standard_normal(out.shape).astype(np.float32)
    found = run(pullback)(jnp.asarray(dout))
    options = {"causal": True, "key_indices": lists}
    expected = reference(*rows, *lengths, **options)
    expected = expected[0] if lengths else expected
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    for one, other in zip(found, backward(dout, *rows, *lengths, **options), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_lists_may_be_arrays_of_any_integers(rng: np.random.Generator) -> None:
    (q, k, v), lists, _ = inputs_of("dense", rng)
    far = np.concatenate([lists, np.full_like(lists, 2**32 + 3), np.full_like(lists, -(2**33))], -1)
    expected = cj.flash_attention(q, k, v, key_indices=lists)
    of_all = lists[:, 0]
    for given, other in ((far, lists), (of_all, of_all[:, None].repeat(5, 1))):
        found = cj.flash_attention(q, k, v, key_indices=given)
        expected = cj.flash_attention(q, k, v, key_indices=other)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        traced = jax.jit(lambda q, lists=given: cj.flash_attention(q, k, v, key_indices=lists))(q)
        np.testing.assert_allclose(traced, expected, rtol=0, atol=1e-6)


def test_vmap(rng: np.random.Generator) -> None:
    (q, k, v), lists, _ = inputs_of("dense", rng)

    def attention(q: Any, k: Any, v: Any, lists: Any) -> Any:
        return cj.flash_attention(q, k, v, key_indices=lists)

    expected = attention(q, k, v, lists)
    each = [jnp.asarray(x[:, None]) for x in (q, k, v, lists)]
    np.testing.assert_allclose(jax.vmap(attention)(*each)[:, 0], expected, rtol=0, atol=1e-6)


def test_pages(rng: np.random.Generator) -> None:
    q = rng.standard_normal((8, 4, 8)).astype(np.float32)
    pages = rng.standard_normal((2, 9, 4, 2, 8)).astype(np.float32)
    lists, table = rng.integers(-1, 9, (8, 1, 7)), rng.permutation(9).reshape(3, 3)
    given = (q, *pages, np.array(ENDS_Q, np.int32), None, 5, 12)
    options = {"seqused_k": np.array([9, 2, 5], np.int32), "block_table": table.astype(np.int32)}
    options["key_indices"] = lists
    expected, _ = cupy_flash.attention_varlen_reference(*given, **options)
    found = cj.flash_attention_varlen(*given, **options)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_steps_of_generation_take_no_lists() -> None:
    q = k = np.ones((1, 1, 2, 8), np.float32)
    with pytest.raises(TypeError, match="'key_indices'; cupy_flash"):
        cj.flash_attention_with_kvcache(q, k, k, cache_seqlens=1, key_indices=[[[0]]])


@pytest.mark.parametrize("run", RUNS, ids=["at once", "jit"])
def test_errors(run: Any, rng: np.random.Generator) -> None:
    (q, k, v), lists, _ = inputs_of("dense", rng)
    q, k, v, lists = map(jnp.asarray, (q, k, v, lists))

    def attention(q: Any, **options: Any) -> Any:
        return run(lambda q: cj.flash_attention(q, k, v, **{"key_indices": lists, **options}))(q)

    with pytest.raises(NotImplementedError, match="key_indices has neither tangents nor second"):
        jax.jvp(attention, (q,), (q,))
    with pytest.raises(NotImplementedError, match="key_indices has neither tangents nor second"):
        jax.hessian(lambda q: attention(q).sum())(q)
    with pytest.raises(UnsupportedError, match="wrt names 'bias'"):
        jax.grad(lambda bias: attention(q, bias=bias).sum())(jnp.zeros((1, 4, 5, 9)))
    with pytest.raises(ValueError, match="key_indices has shape"):
        attention(q, key_indices=lists[:1])
    with pytest.raises(TypeError, match="key_indices has dtype float32"):
        attention(q, key_indices=lists.astype(jnp.float32))
    with pytest.raises(UnsupportedError, match="dropout_seed is not supported together with key"):
        attention(q, dropout_p=0.5, dropout_seed=1)
