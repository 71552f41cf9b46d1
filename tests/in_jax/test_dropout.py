"""Dropout of `cupy_flash.jax`: seeds and keys, gradients, transformations of JAX, and Flax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import UnsupportedError

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")

P = 0.3
EXACT_P = round(256 * P) / 256
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


def rows(rng: np.random.Generator) -> list[np.ndarray]:
    shapes = (2, 19, 4, 8), (2, 21, 2, 8), (2, 21, 2, 6)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def call(q: Any, k: Any, v: Any, seed: Any, **options: Any) -> Any:
    return cj.flash_attention(q, k, v, dropout_p=P, dropout_seed=seed, **options)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-4)


# Seeds as calls of JAX take them, and the seed and offset that they mean.
SEEDS: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "integer": (lambda: 7, [7, 0]),
    "large integer": (lambda: 2**64 - 9, [-9, 0]),
    "list": (lambda: [2**40, -3], [2**40, -3]),
    "numpy": (lambda: np.array([2**40, -3]), [2**40, -3]),
    "one traced integer": (lambda: jax.numpy.asarray(-7), [-7, 0]),
    "array": (lambda: jax.numpy.array([-7, 5]), [-7, 5]),
    "int16": (lambda: jax.numpy.array([-7, 5], np.int16), [-7, 5]),
    "one uint32": (lambda: jax.numpy.uint32(2**32 - 7), [2**32 - 7, 0]),
    "uint8": (lambda: jax.numpy.array([200, 5], np.uint8), [200, 5]),
    "uint64": (lambda: np.array([2**64 - 7, 5], np.uint64), [-7, 5]),
    "key": (lambda: jax.random.key(7), [7, 0]),
    "folded key": (
        lambda: jax.random.wrap_key_data(np.array([0x80000001, 5], np.uint32)),
        [(0x80000001 << 32 | 5) - 2**64, 0],
    ),
    "key of four words": (lambda: jax.random.key(7, impl="rbg"), [7, 7]),
    "old key": (lambda: jax.random.PRNGKey(7), [7, 0]),
    "data of a key": (lambda: np.array([3, 7], np.uint32), [3 << 32 | 7, 0]),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", SEEDS)
def test_results_and_gradients_are_those_of_numpy_calls(
    name: str, is_compiled: bool, rng: np.random.Generator, device: Any
) -> None:
    make, numbers = SEEDS[name]
    arrays = rows(rng)
    seed = make()
    is_static = isinstance(seed, (int, list, np.ndarray))
    dout = rng.standard_normal((2, 19, 4, 6)).astype(np.float32)

    def run(q: Any, k: Any, v: Any, dout: Any, given: Any) -> Any:
        function = lambda q, k, v: call(q, k, v, given, causal=True, return_lse=True)  # noqa: E731
        (out, lse), pull_back = jax.vjp(function, q, k, v)
        return out, lse, *pull_back((dout, lse))

    if not is_compiled:
        found = run(*map(jax.numpy.asarray, arrays), dout, seed)
    elif is_static:
        found = jax.jit(lambda *xs: run(*xs, seed))(*arrays, dout)
    else:
        found = jax.jit(run)(*arrays, dout, seed)
    dropout = {"dropout_p": P, "dropout_seed": numbers, "causal": True}
    results = cupy_flash.flash_attention(*arrays, **dropout, return_lse=True)
    gradients = cupy_flash.flash_attention_backward(
        dout, *arrays, *results, dlse=results[1], **dropout
    )
    for x, y in zip(found, (*results, *gradients), strict=True):
        close(x, y)


def test_lists_are_read_in_the_forward_pass(rng: np.random.Generator, device: Any) -> None:
    arrays, pair = rows(rng), [2, 3]
    dout = rng.standard_normal(arrays[0].shape[:3] + arrays[2].shape[3:]).astype(np.float32)
    _, expected = jax.vjp(lambda *given: call(*given, tuple(pair)), *arrays)
    _, pull_back = jax.vjp(lambda *given: call(*given, pair), *arrays)
    right = expected(dout)
    pair[1] = 7
    for x, y in zip(pull_back(dout), right, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_64_bits_of_arrays_count(rng: np.random.Generator, device: Any) -> None:
    arrays, pair = rows(rng), [2**62 + 1, -(2**40)]
    expected = cupy_flash.flash_attention(*arrays, dropout_p=P, dropout_seed=pair)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        seed = jax.numpy.array(pair)
        close(jax.jit(call)(*arrays, seed), expected)
    close(call(*arrays, seed), expected)


def test_gradients_are_finite_differences(rng: np.random.Generator) -> None:
    from jax.test_util import check_grads

    key = jax.random.key(3)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        inputs = [jax.numpy.asarray(x[:1, :5], np.float64) for x in rows(rng)]
        bias = jax.numpy.asarray(rng.standard_normal((1, 4, 5, 5)))
        function = lambda q, k, v, bias: call(q, k, v, key, bias=bias)  # noqa: E731
        check_grads(function, (*inputs, bias), order=1, modes=["rev"])


def test_packed_sequences(rng: np.random.Generator, device: Any) -> None:
    q, k, v = (x.reshape(-1, *x.shape[2:])[:38] for x in rows(rng))
    ends = np.array([0, 13, 38], np.int32)
    options = {"dropout_p": P, "dropout_seed": jax.random.key(9)}
    found = jax.jit(lambda *xs: cj.flash_attention_varlen(*xs, 25, 25, **options))(
        q, k, v, ends, ends
    )
    expected = cupy_flash.flash_attention_varlen(
        *(q, k, v, ends, ends, 25, 25), dropout_p=P, dropout_seed=9
    )
    close(found, expected)


def test_mapped_calls_drop_what_each_call_does(rng: np.random.Generator, device: Any) -> None:
    q, k, v = map(jax.numpy.asarray, rows(rng))
    many, keys = jax.numpy.stack([q, 2 * q, 3 * q]), jax.random.split(jax.random.key(1), 3)

    def gradient(q: Any, key: Any) -> Any:
        return jax.grad(lambda q: jax.numpy.sin(call(q, k, v, key)).sum())(q)

    for function in (lambda q, key: call(q, k, v, key), gradient):
        expected = [function(*each) for each in zip(many, keys, strict=True)]
        close(jax.jit(jax.vmap(function))(many, keys), jax.numpy.stack(expected))
        expected = [function(each, keys[0]) for each in many]
        close(jax.vmap(function, (0, None))(many, keys[0]), jax.numpy.stack(expected))


def test_checkpoints_compute_the_same_gradients(rng: np.random.Generator, device: Any) -> None:
    arrays, key = rows(rng), jax.random.key(4)

    def loss(q: Any, k: Any, v: Any, key: Any) -> Any:
        return jax.numpy.sin(call(q, k, v, key)).sum()

    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays, key)
    found = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*arrays, key)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_compiled_step_drops_other_weights_for_each_key(
    rng: np.random.Generator, device: Any
) -> None:
    step = jax.jit(lambda q, key: call(q, q, q, key))
    ones = np.ones((2, 64, 4, 8), np.float32)
    first, second = (np.asarray(step(ones, jax.random.key(n))) for n in (1, 2))
    assert not np.array_equal(first, second)
    kept = first[..., 0] * (1 - EXACT_P)
    assert abs(kept.mean() - (1 - EXACT_P)) < 5 * (EXACT_P / (2 * 4 * 64 * 64)) ** 0.5
    assert step._cache_size() == 1


@pytest.mark.parametrize("dropout_p", [0, 0.0, None])
def test_no_dropout_needs_no_seed(dropout_p: float | None, rng: np.random.Generator) -> None:
    arrays = rows(rng)
    found = cj.flash_attention(*arrays, dropout_p=dropout_p)
    np.testing.assert_array_equal(found, cj.flash_attention(*arrays))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_p": P}, ValueError, "dropout_seed is missing"),
        ({"dropout_p": 1.0, "dropout_seed": 1}, ValueError, "dropout_p is 1; expected"),
        ({"dropout_p": P, "dropout_seed": 0.5}, TypeError, r"dropout_seed is 0\.5"),
        ({"dropout_p": P, "dropout_seed": True}, TypeError, "dropout_seed is True"),
        ({"dropout_p": P, "dropout_seed": "1"}, TypeError, "dropout_seed is a str"),
        ({"dropout_p": P, "dropout_seed": np.zeros(2)}, TypeError, "dropout_seed has dtype"),
        ({"dropout_p": P, "dropout_seed": np.zeros(3, int)}, ValueError, "dropout_seed has shape"),
        ({"dropout_p": P, "dropout_seed": np.zeros(3, np.uint32)}, ValueError, "data of one key"),
    ],
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_wrong_arguments_are_named(
    options: dict[str, Any],
    error: Any,
    message: str,
    is_compiled: bool,
    rng: np.random.Generator,
) -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return cj.flash_attention(q, k, v, **options)

    with pytest.raises(error, match=message):
        (jax.jit(run) if is_compiled else run)(*rows(rng))


def test_keys_and_probabilities_that_are_refused(rng: np.random.Generator) -> None:
    arrays = rows(rng)
    with pytest.raises(ValueError, match=r"array of keys of shape \(2,\); expected one key"):
        call(*arrays, jax.random.split(jax.random.key(1)))
    with pytest.raises(TypeError, match="dropout_p is traced by JAX"):
        jax.jit(lambda p: cj.flash_attention(*arrays, dropout_p=p, dropout_seed=1))(P)
    q, k, v = arrays
    step = jax.jit(
        lambda q: cj.flash_attention_with_kvcache(
            *(q[:, :1], k, v), cache_seqlens=5, dropout_p=P, dropout_seed=1
        )
    )
    with pytest.raises(UnsupportedError, match="not supported by calls on KV caches"):
        step(q)


def test_flax_functions_draw_from_their_key(rng: np.random.Generator, device: Any) -> None:
    q, k, v = rows(rng)
    k, v = (np.repeat(x, 2, 2) for x in (k, v))
    key = jax.random.key(6)
    found = cj.flax_attention(q, k, v, dropout_rng=key, dropout_rate=P)
    close(found, cupy_flash.flash_attention(q, k, v, dropout_p=P, dropout_seed=6))
    plain = cupy_flash.flash_attention(q, k, v)
    close(cj.flax_attention(q, k, v, dropout_rate=P, deterministic=True), plain)
    close(cj.flax_attention(q, k, v, dropout_rng=key, broadcast_dropout=False), plain)
    with pytest.raises(ValueError, match=r"dropout_rate is 0\.3, but dropout_rng is missing"):
        cj.flax_attention(q, k, v, dropout_rate=P)
    with pytest.raises(ValueError, match=r"dropout_rate is 1\.0; expected a number from 0"):
        cj.flax_attention(q, k, v, dropout_rng=key, dropout_rate=1.0)


def test_a_module_of_linen_trains_with_dropout(rng: np.random.Generator, device: Any) -> None:
    linen = pytest.importorskip("flax.linen")
    x = jax.numpy.asarray(rng.standard_normal((2, 6, 16)), np.float32)
    module = linen.MultiHeadDotProductAttention(
        num_heads=4, attention_fn=cj.flax_attention, dropout_rate=0.5, deterministic=False
    )
    parameters = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    @jax.jit
    def step(parameters: Any, key: Any) -> Any:
        def loss(parameters: Any) -> Any:
            return (module.apply(parameters, x, rngs={"dropout": key}) ** 2).sum()

        return jax.value_and_grad(loss)(parameters)

    values = [float(step(parameters, jax.random.key(n))[0]) for n in (2, 3, 2)]
    assert values[0] == values[2] != values[1]


def test_a_module_of_nnx_trains_with_dropout(rng: np.random.Generator, device: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")
    x = jax.numpy.asarray(rng.standard_normal((2, 6, 16)), np.float32)
    module = nnx.MultiHeadAttention(
        4,
        16,
        attention_fn=cj.flax_attention,
        dropout_rate=0.5,
        deterministic=False,
        decode=False,
        rngs=nnx.Rngs(0),
    )

    def loss(module: Any) -> Any:
        return (module(x) ** 2).sum()

    step = nnx.jit(nnx.value_and_grad(loss))
    (first, _), (second, gradients) = step(module), step(module)
    assert first != second
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
