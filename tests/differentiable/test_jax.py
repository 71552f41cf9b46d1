"""Attention under JAX's autodiff."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.comparisons import assert_all_close

import cupy_flash

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")

Q = np.ones((1, 4, 2, 8), np.float32)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    try:
        return jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip(f"JAX has no {request.param}")


def arrays(device: Any, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [
        jax.device_put(rng.standard_normal(shape).astype(np.float32), device) for shape in shapes
    ]


def formula(q: Any, k: Any, v: Any, bias: Any) -> Any:
    scores = jax.numpy.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5 + bias
    return jax.numpy.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)


def assert_alike(got: Callable[..., Any], expected: Callable[..., Any], inputs: list[Any]) -> None:
    def gradients(function: Callable[..., Any]) -> list[np.ndarray]:
        places = tuple(range(len(inputs)))
        found = jax.grad(lambda *xs: (function(*xs) ** 2).sum(), places)(*inputs)
        return [np.asarray(gradient) for gradient in found]

    # Each element sums at most 300 products of order 1, in float32 on both sides.
    assert_all_close(gradients(got), gradients(expected), rtol=0, atol=300 * 2**-20)


def test_gradients_are_those_of_the_formula(device: Any) -> None:
    shapes = (2, 7, 3, 5), (2, 9, 3, 5), (2, 9, 3, 4), (1, 3, 7, 9)
    inputs = arrays(device, *shapes)
    with jax.default_matmul_precision("highest"):
        assert_alike(lambda *xs: cj.flash_attention(*xs[:3], bias=xs[3]), formula, inputs)


@pytest.mark.parametrize("convert", [lambda x: x, np.array], ids=["jax", "numpy"])
def test_an_array_of_queries_keys_and_values_is_differentiable(device: Any, convert: Any) -> None:
    (qkv,) = arrays(device, (2, 7, 3, 4, 5))

    def expected(qkv: Any) -> Any:
        return formula(*(qkv[:, :, i] for i in range(3)), 0)

    with jax.default_matmul_precision("highest"), jax.default_device(device):
        assert_alike(cj.flash_attention_qkvpacked, expected, [convert(qkv)])


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_an_array_of_queries_keys_and_values_has_any_batch_axes(batch: tuple[int, ...]) -> None:
    (qkv,) = arrays(jax.devices("cpu")[0], (*batch, 7, 3, 4, 5))
    found = jax.grad(lambda x: (cj.flash_attention_qkvpacked(x) ** 2).sum())(qkv)
    assert found.shape == qkv.shape
    one = qkv.reshape(-1, 7, 3, 4, 5)
    expected = jax.grad(lambda x: (cj.flash_attention_qkvpacked(x) ** 2).sum())(one)
    np.testing.assert_array_equal(np.asarray(found).reshape(one.shape), np.asarray(expected))


def test_an_array_of_queries_keys_and_values_is_checked() -> None:
    qkv = jax.numpy.ones((2, 7, 3, 4, 5))
    message = "layout is 'bhsd'; expected 'bshd', the only layout of qkv"
    with pytest.raises(ValueError, match=message):
        cj.flash_attention_qkvpacked(qkv, layout="bhsd")
    with pytest.raises(ValueError, match="qkv has shape"):
        cj.flash_attention_qkvpacked(qkv[:, :, 0])
    with pytest.raises(TypeError, match="qkv is a list; expected a JAX or NumPy array"):
        cj.flash_attention_qkvpacked([1.0])


def test_packed_sequences_are_differentiable(device: Any) -> None:
    inputs = arrays(device, (9, 3, 5), (11, 3, 5), (11, 3, 5))
    places = np.array([0, 4, 9], np.int32), np.array([0, 3, 11], np.int32)
    ends_q, ends_k = (jax.device_put(x, device) for x in places)

    def expected(q: Any, k: Any, v: Any) -> Any:
        first = formula(q[None, :4], k[None, :3], v[None, :3], 0)
        second = formula(q[None, 4:], k[None, 3:], v[None, 3:], 0)
        return jax.numpy.concatenate([first[0], second[0]])

    def got(q: Any, k: Any, v: Any) -> Any:
        return cj.flash_attention_varlen(q, k, v, ends_q, ends_k, 5, 8)

    with jax.default_matmul_precision("highest"):
        assert_alike(got, expected, inputs)


# Arguments that are NumPy arrays in a call; the others are JAX arrays.
INPUTS = ("q", "k", "v", "bias", "sinks")
MIXTURES = [(name,) for name in INPUTS] + [("q", "k"), ("k", "v", "bias"), INPUTS]


@pytest.mark.parametrize("of_numpy", MIXTURES, ids="+".join)
@pytest.mark.parametrize("packed", [False, True])
def test_any_arguments_may_be_numpys(packed: bool, of_numpy: tuple[str, ...], device: Any) -> None:
    shapes = [(1, 7, 3, 5), (1, 9, 3, 5), (1, 9, 3, 4), (1, 3, 7, 9), (3,)]
    if packed:
        shapes = [shape[1:] if len(shape) == 4 else shape for shape in shapes]
    ours = dict(zip(INPUTS, arrays(device, *shapes), strict=True))
    mixed = {name: np.array(x) if name in of_numpy else x for name, x in ours.items()}
    sixty_four_bits = np.array([[2**7 - 1] * 7], np.uint64)
    lists = {"prefix_lens": [2], "window_size": (3, 3)}

    def of(inputs: dict[str, Any], lengths: Any) -> Any:
        options = {"bias": inputs["bias"], "sinks": inputs["sinks"], **lists}
        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        if packed:
            ends = lengths([0, 7]), lengths([0, 9])
            return cj.flash_attention_varlen(q, k, v, *ends, 7, 9, **options)
        return cj.flash_attention(q, k, v, tree_mask=sixty_four_bits, **options)

    def gradients(inputs: dict[str, Any], lengths: Any) -> dict[str, Any]:
        return jax.grad(lambda inputs: (of(inputs, lengths) ** 2).sum())(inputs)

    expected = gradients(ours, lambda x: jax.device_put(np.array(x, np.int32), device))
    for lengths in (list, lambda x: np.array(x, np.int32)):
        found = gradients(mixed, lengths)
        for name, gradient in found.items():
            assert isinstance(gradient, jax.Array)
            np.testing.assert_array_equal(np.asarray(gradient), np.asarray(expected[name]))
    out = of(mixed, list)
    assert isinstance(out, jax.Array)
    # A call without a JAX array is computed on JAX's default device.
    places = {jax.devices()[0]} if of_numpy == INPUTS else of(ours, list).devices()
    assert out.devices() == places
    # Gradients of one input, with the other inputs in either library.
    for name in INPUTS:
        alone = jax.grad(lambda x, n=name: (of(mixed | {n: x}, list) ** 2).sum())(mixed[name])
        np.testing.assert_array_equal(np.asarray(alone), np.asarray(expected[name]))


NUMBERS = [[0.1, 0.2, 0.3, 0.4], (0.1, -2, 0.3, 0), 0.25, 1, np.float32(0.5)]


@pytest.mark.parametrize("values", NUMBERS, ids=repr)
@pytest.mark.parametrize("function", ["dense", "packed qkv", "varlen"])
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_slopes_and_sinks_may_be_numbers_or_lists(
    device: Any, name: str, function: str, values: Any
) -> None:
    (q,) = arrays(device, (2, 7, 4, 5))
    ends = [0, 7, 14]

    def of(x: Any, given: Any) -> Any:
        if function == "dense":
            return cj.flash_attention(x, q, q, **{name: given})
        if function == "varlen":
            rows = (y.reshape(-1, 4, 5) for y in (x, q, q))
            return cj.flash_attention_varlen(*rows, ends, ends, 7, 7, **{name: given})
        return cj.flash_attention_qkvpacked(jax.numpy.stack([x, q, q], 2), **{name: given})

    array = jax.device_put(np.broadcast_to(np.array(values, np.float32), (4,)), device)
    np.testing.assert_array_equal(np.asarray(of(q, values)), np.asarray(of(q, array)))
    found, expected = (jax.grad(lambda x, y=y: (of(x, y) ** 2).sum())(q) for y in (values, array))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_one_sink_that_is_traced_has_a_gradient() -> None:
    (q,) = arrays(jax.devices("cpu")[0], (2, 7, 4, 5))

    def of(sinks: Any) -> Any:
        return (cj.flash_attention(q, q, q, sinks=sinks) ** 2).sum()

    found = jax.grad(of)(0.5)
    assert found.shape == ()
    four = jax.device_put(np.full(4, 0.5, np.float32), q.device)
    expected = np.asarray(jax.grad(of)(four)).sum()
    np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_lists_of_traced_numbers_are_refused(name: str) -> None:
    (q,) = arrays(jax.devices("cpu")[0], (2, 7, 4, 5))
    with pytest.raises(TypeError, match=f"{name} holds values that are traced by JAX"):
        jax.grad(lambda x: cj.flash_attention(q, q, q, **{name: [x] * 4}).sum())(0.5)


def test_lists_that_change_after_the_call_do_not_change_its_gradients() -> None:
    (q,) = arrays(jax.devices("cpu")[0], (2, 7, 4, 5))
    slopes = [[0.5, 1, 0, 2], [1, 2, 3, 4]]
    given: dict[str, Any] = {"sinks": [0.5, 1, 0, 2], "alibi_slopes": slopes}
    expected = jax.grad(lambda x: (cj.flash_attention(x, q, q, **given) ** 2).sum())(q)
    _, pull = jax.vjp(lambda x: (cj.flash_attention(x, q, q, **given) ** 2).sum(), q)
    given["sinks"][1] = given["alibi_slopes"][1][2] = 7
    np.testing.assert_array_equal(np.asarray(pull(np.float32(1))[0]), np.asarray(expected))


def test_what_is_overwritten_after_the_call_does_not_change_its_gradients() -> None:
    q, k, v = (np.asarray(x) for x in arrays(jax.devices("cpu")[0], *[(9, 2, 4)] * 3))
    ends = np.array([0, 4, 9], np.int32)
    expected = jax.grad(lambda q: cj.flash_attention_varlen(q, k, v, ends, ends, 5, 5).sum())(q)
    q, k, v, ends = q.copy(), k.copy(), v.copy(), ends.copy()
    _, pull = jax.vjp(lambda q: cj.flash_attention_varlen(q, k, v, ends, ends, 5, 5).sum(), q)
    for array in (q, k, v):
        array[...] = 0
    ends[1] = 7
    np.testing.assert_array_equal(np.asarray(pull(np.float32(1))[0]), np.asarray(expected))


def test_what_has_no_gradient_is_refused() -> None:
    q = jax.numpy.ones((1, 4, 2, 8))

    def of_scale(scale: float) -> Any:
        return cj.flash_attention(q, q, q, softmax_scale=scale).sum()

    with pytest.raises(TypeError, match="softmax_scale is traced by JAX; pass a value"):
        jax.grad(of_scale)(0.5)
    slopes = jax.numpy.ones(2)
    with pytest.raises(TypeError, match="alibi_slopes is differentiated by JAX"):
        jax.grad(lambda slopes: cj.flash_attention(q, q, q, alibi_slopes=slopes).sum())(slopes)


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())],
    ids=["jit", "vmap", "grad"],
)
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: cupy_flash.flash_attention(x, x, x), "q"),
        (lambda x: cupy_flash.flash_attention(Q, Q, Q, bias=x), "bias"),
        (lambda x: cupy_flash.flash_attention_vjp(x, x, x)[0], "q"),
        (lambda x: cupy_flash.attention_reference(x, x, x), "q"),
        (lambda x: cupy_flash.scaled_dot_product_attention(x, x, x), "query"),
        (lambda x: cupy_flash.combine([x], [x])[0], r"out_partial\[0\]"),
    ],
    ids=["q", "bias", "vjp", "reference", "sdpa", "combine"],
)
def test_plain_functions_of_what_jax_traces_name_those_for_gradients(
    transform: Any, function: Any, name: str
) -> None:
    message = rf"^{name} is an? \w*Tracer, a tracer of JAX .* call the functions of cupy_flash.jax"
    with pytest.raises(TypeError, match=message):
        transform(function)(jax.numpy.ones((1, 4, 2, 8)))
