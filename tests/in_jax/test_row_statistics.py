"""Row statistics of `cupy_flash.jax`: traced and computed calls, and their missing gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")

STATISTICS = {"return_max_logits": True, "return_entropy": True}
DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    """Device on which a test runs by default."""
    try:
        (device, *_) = jax.devices(request.param)
    except RuntimeError:
        pytest.skip(f"JAX has no {request.param}")
    with jax.default_device(device):
        yield device


def rows(rng: np.random.Generator) -> list[Any]:
    shapes = (2, 19, 4, 8), (2, 21, 2, 8), (2, 21, 2, 6)
    return [jax.numpy.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]


def close(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_results_are_those_of_the_reference(
    compiled: bool, device: Any, rng: np.random.Generator
) -> None:
    inputs = rows(rng)
    sinks = jax.numpy.asarray(rng.standard_normal(4), np.float32)

    def call(*arrays: Any) -> Any:
        return cj.flash_attention(*arrays, sinks=sinks, causal=True, **STATISTICS)

    expected = cupy_flash.attention_reference(
        *map(np.asarray, inputs), sinks=np.asarray(sinks), causal=True, **STATISTICS
    )
    close((jax.jit(call) if compiled else call)(*inputs), expected)
    close(cupy_flash.flash_attention(*inputs, sinks=sinks, causal=True, **STATISTICS), expected)


def test_packed_and_cached_calls_return_statistics(device: Any, rng: np.random.Generator) -> None:
    q, k, v = rows(rng)
    expected = cj.flash_attention(q, k, v, return_lse=True, **STATISTICS)
    starts, ends = np.array([0, 19]), np.array([0, 21])
    packed = jax.jit(
        lambda q, k, v: cj.flash_attention_varlen(q, k, v, starts, ends, 19, 21, **STATISTICS)
    )(q[0], k[0], v[0])
    close(packed, (expected[0][0], *(x[0] for x in expected[2:])))
    step, *statistics = jax.jit(
        lambda q, k, v: cj.flash_attention_with_kvcache(
            *(q, jax.numpy.pad(k, ((0, 0), (0, 9), (0, 0), (0, 0)))),
            *(jax.numpy.pad(v, ((0, 0), (0, 9), (0, 0), (0, 0))), k[:, :4], v[:, :4]),
            cache_seqlens=21,
            return_entropy=True,
        )
    )(q, k, v)
    keys, values = (np.concatenate([x, x[:, :4]], axis=1) for x in (k, v))
    close(
        (step.out, *statistics),
        cupy_flash.attention_reference(np.asarray(q), keys, values, return_entropy=True),
    )
    assert step.k_cache.shape == (2, 30, 2, 8)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_out_ignore_statistics(
    compiled: bool, device: Any, rng: np.random.Generator
) -> None:
    q, k, v = rows(rng)

    def loss(q: Any, stops: bool) -> Any:
        out, max_logits = cj.flash_attention(q, k, v, return_max_logits=True)
        return out.sum() + (jax.lax.stop_gradient(max_logits) if stops else max_logits).sum()

    expected = jax.grad(lambda q: cj.flash_attention(q, k, v).sum())(q)

    def made(stops: bool) -> Any:
        found = jax.grad(lambda q: loss(q, stops))
        return jax.jit(found) if compiled else found

    close((made(True)(q),), (expected,))
    with pytest.raises(TypeError, match="max_logits is differentiated by JAX"):
        made(False)(q)


def test_vmap_maps_statistics(device: Any, rng: np.random.Generator) -> None:
    inputs = rows(rng)

    def call(*arrays: Any) -> Any:
        return cj.flash_attention(*arrays, **STATISTICS)

    close(jax.vmap(call)(*inputs), call(*inputs))
    close(jax.jit(jax.vmap(call))(*inputs), call(*inputs))
