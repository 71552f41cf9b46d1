"""`dot_product_attention` of `jax.nn`, and attention functions of Flax, replaced by the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupy_flash.errors import UnsupportedError

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")

BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM = 2, 5, 7, 4, 2, 8


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return jax.numpy.asarray(rng.standard_normal(shape), np.float32)


def options_of(rng: np.random.Generator, name: str) -> dict[str, Any]:
    mask = rng.random((BATCH, 1, ROWS, KEYS)) < 0.6
    # A row without keys is 0 here, and the mean of the values there.
    mask[..., 0] = True
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"is_causal": True},
        "bias": {"bias": normal(rng, 1, HEADS, ROWS, KEYS)},
        "half bias": {"bias": normal(rng, BATCH, 1, 1, KEYS).astype(np.float16)},
        "mask": {"mask": jax.numpy.asarray(mask), "scale": 0.3},
        "window": {"local_window_size": (2, 1)},
        "one window": {"local_window_size": 2, "is_causal": True},
        "lengths": {
            "query_seq_lengths": jax.numpy.array([3, 5]),
            "key_value_seq_lengths": jax.numpy.array([4, 7]),
        },
        "residual": {"return_residual": True, "implementation": "xla"},
    }
    return options[name]


NAMES = ("plain", "causal", "bias", "half bias", "mask", "window", "one window", "lengths")


@pytest.mark.parametrize("name", [*NAMES, "residual"])
def test_the_function_computes_what_that_of_jax_does(rng: np.random.Generator, name: str) -> None:
    inputs = [
        normal(rng, BATCH, *shape, DIM)
        for shape in ((ROWS, HEADS), (KEYS, HEADS_KV), (KEYS, HEADS_KV))
    ]
    options = options_of(rng, name)

    def with_gradients(function: Callable[..., Any]) -> Any:
        def loss(*xs: Any) -> Any:
            results = function(*xs, **options)
            return sum((x**2).sum() for x in jax.tree.leaves(results)), results

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))

    with jax.default_matmul_precision("highest"):
        found, expected = (
            with_gradients(function)(*inputs)
            for function in (cj.dot_product_attention, jax.nn.dot_product_attention)
        )
    close = {"rtol": 1e-4, "atol": 1e-4}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), found, expected)


def test_the_batch_axis_may_be_missing(rng: np.random.Generator) -> None:
    q, k = normal(rng, ROWS, HEADS, DIM), normal(rng, KEYS, HEADS_KV, DIM)
    lengths = {"query_seq_lengths": jax.numpy.array([3]), "is_causal": True}
    found = cj.dot_product_attention(q, k, k, **lengths)
    expected = jax.nn.dot_product_attention(q, k, k, **lengths)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def training_step(module: Any, apply: Callable[..., Any], x: Any) -> Any:
    """Return the loss and the new parameters of a step of gradient descent."""

    def loss(parameters: Any) -> Any:
        return (apply(parameters, x) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(module)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, module, gradients)


def test_a_transformer_of_linen_trains_alike(rng: np.random.Generator) -> None:
    linen = pytest.importorskip("flax.linen")

    class Transformer(linen.Module):
        attention_fn: Any

        @linen.compact
        def __call__(self, x: Any) -> Any:
            mask = linen.make_causal_mask(x[..., 0])
            for _ in range(2):
                y = linen.LayerNorm()(x)
                attention = linen.MultiHeadDotProductAttention(
                    num_heads=4,
                    attention_fn=self.attention_fn,
                    dropout_rate=0.5,
                    force_fp32_for_softmax=True,
                )
                x = x + attention(y, y, mask=mask, deterministic=True)
                x = x + linen.Dense(16)(linen.gelu(linen.Dense(32)(linen.LayerNorm()(x))))
            return x

    x = normal(rng, 2, 6, 16)
    found, expected = [], []
    for steps, function in (
        (found, cj.flax_attention),
        (expected, linen.dot_product_attention),
    ):
        model = Transformer(function)
        parameters = model.init(jax.random.key(0), x)
        step = jax.jit(lambda p, model=model: training_step(p, model.apply, x))
        for _ in range(3):
            value, parameters = step(parameters)
            steps.append(value)
        steps.append(parameters)
    close = {"rtol": 1e-3, "atol": 1e-4}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), found, expected)
    assert found[2] < found[0]


@pytest.mark.parametrize("axes", [(), (2,), (2, 3)])
def test_a_module_of_nnx_calls_the_function(rng: np.random.Generator, axes: tuple[int]) -> None:
    nnx = pytest.importorskip("flax.nnx")
    x = normal(rng, *axes, 6, 16)
    mask = jax.numpy.asarray(rng.random((*axes, 1, 6, 6)) < 0.5) | jax.numpy.eye(6, dtype=bool)
    results = []
    for function in (cj.flax_attention, nnx.dot_product_attention):
        module = nnx.MultiHeadAttention(
            4, 16, attention_fn=function, decode=False, rngs=nnx.Rngs(0)
        )

        def loss(module: Any, x: Any) -> Any:
            return (module(x, mask=mask, is_causal=True) ** 2).sum()

        value, gradients = nnx.jit(nnx.value_and_grad(loss))(module, x)
        results.append((value, jax.tree.leaves(gradients)))
    close = {"rtol": 1e-3, "atol": 1e-3}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), *results)


def test_arrays_are_promoted_as_flax_does(rng: np.random.Generator) -> None:
    q, k = normal(rng, ROWS, HEADS, DIM), normal(rng, KEYS, HEADS, DIM).astype(np.float16)
    assert cj.flax_attention(q, k, k).dtype == np.float32
    assert cj.flax_attention(q, k, k, dtype=jax.numpy.bfloat16).dtype == jax.numpy.bfloat16


def test_what_is_not_supported_is_refused(rng: np.random.Generator) -> None:
    q = normal(rng, ROWS, HEADS, DIM)
    with pytest.raises(UnsupportedError, match="records attention weights"):
        cj.flax_attention(q, q, q, module=object())
    for name in ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"):
        with pytest.raises(UnsupportedError, match=f"^{name} is not supported"):
            cj.flax_attention(q, q, q, **{name: jax.numpy.einsum})
    with pytest.raises(ValueError, match="mask has shape"):
        cj.dot_product_attention(q, q, q, mask=jax.numpy.ones((3, 3), bool))
