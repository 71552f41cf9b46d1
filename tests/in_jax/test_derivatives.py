"""Forward mode and second derivatives of JAX, in eager calls and in compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gradients.gradient_calls import random_gradient_call
from support.in_jax.compiled_call import in_64_bits

from cupy_flash import (
    MaskMod,
    ScoreMod,
    attention_hvp_reference,
    attention_jvp_reference,
    flash_attention_hvp,
    flash_attention_jvp,
)

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")

from jax import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap  # noqa: E402

# The sums have at most a few hundred float64 products of order 1, added in different orders.
CLOSE = {"rtol": 1e-11, "atol": 1000 * 2**-50}
# Largest errors of results, relative to the largest result.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2**-7}
EVERY = (0, 1, 2)
JIT = pytest.mark.parametrize("is_compiled", [False, True], ids=["at once", "compiled"])


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    try:
        return jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip(f"JAX has no {request.param}")


def numbers(device: Any, rng: np.random.Generator, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(jax.device_put(rng.standard_normal(shape), device) for shape in shapes)


def rows(device: Any, rng: np.random.Generator) -> tuple[Any, ...]:
    """Return q, k and v of two sequences, with grouped heads."""
    return numbers(device, rng, (2, 4, 2, 3), (2, 5, 1, 3), (2, 5, 1, 4))


def plain(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Return out and lse as operations that JAX differentiates."""
    jnp = jax.numpy
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = options.get("softmax_scale", q.shape[-1] ** -0.5)
    scores *= jnp.einsum("bihd,bjhd->bhij", q, k)
    if cap := options.get("softcap"):
        scores = cap * jnp.tanh(scores / cap)
    if "score_mod" in options:
        scores = jnp.sin(scores) * scores
    if "bias" in options:
        scores = scores + options["bias"]
    seen = options.get("mask", jnp.ones(scores.shape[2:], bool))
    if options.get("causal"):
        seen = jnp.tril(seen, scores.shape[3] - scores.shape[2])
    scores = jnp.where(seen, scores, -jnp.inf)
    every = scores
    if "sinks" in options:
        sinks = jnp.broadcast_to(options["sinks"][:, None, None], (*scores.shape[:3], 1))
        every = jnp.concatenate((scores, sinks), 3)
    lse = jax.nn.logsumexp(every, 3)
    return jnp.einsum("bhij,bjhd->bihd", jnp.exp(scores - lse[..., None]), v), lse


def ours(*inputs: Any, **options: Any) -> Any:
    return cj.flash_attention(*inputs, return_lse=True, **options)


# Offsets of packed sequences, one of which is empty. The last rows belong to none.
ENDS_Q, ENDS_K = np.array([0, 3, 3, 5], np.int32), np.array([0, 2, 4, 8], np.int32)
PACKED_BIAS = (2, 6, 4)


def packed_rows(device: Any, rng: np.random.Generator) -> tuple[Any, ...]:
    """Return packed q, k and v with grouped heads, a bias and sinks."""
    return numbers(device, rng, (6, 2, 3), (9, 1, 3), (9, 1, 4), PACKED_BIAS, (2,))


def ours_packed(q: Any, k: Any, v: Any, bias: Any, sinks: Any, **options: Any) -> Any:
    return cj.flash_attention_varlen(
        *(q, k, v, ENDS_Q, ENDS_K, 3, 4), bias=bias, sinks=sinks, return_lse=True, **options
    )


def plain_packed(q: Any, k: Any, v: Any, bias: Any, sinks: Any, **options: Any) -> Any:
    jnp = jax.numpy
    outs, rows = [], []
    for b in range(3):
        of_q, of_k = (slice(*ends[b : b + 2]) for ends in (ENDS_Q, ENDS_K))
        of_bias = bias[None, :, of_q, : of_k.stop - of_k.start]
        given = q[None, of_q], k[None, of_k], v[None, of_k]
        out, lse = plain(*given, bias=of_bias, sinks=sinks, **options)
        outs.append(out[0])
        rows.append(lse[0])
    outs.append(jnp.zeros((1, 2, 4)))
    # The log-sum-exp of a row of no sequence is -inf.
    rows.append(jnp.full((2, 1), -jnp.inf))
    return jnp.concatenate(outs), jnp.concatenate(rows, 1)


def rows_of_everything(device: Any, rng: np.random.Generator) -> tuple[Any, ...]:
    """Return q, k, v, a bias and sinks."""
    return (*rows(device, rng), *numbers(device, rng, (2, 4, 5), (2,)))


def ours_with_everything(q: Any, k: Any, v: Any, bias: Any, sinks: Any, **options: Any) -> Any:
    return ours(q, k, v, bias=bias, sinks=sinks, **options)


def plain_with_everything(q: Any, k: Any, v: Any, bias: Any, sinks: Any, **options: Any) -> Any:
    return plain(q, k, v, bias=bias, sinks=sinks, **options)


# Inputs, the function of the library, the formula, and options of calls with more inputs.
OF_MORE_INPUTS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "packed": (packed_rows, ours_packed, plain_packed, {"causal": True, "softmax_scale": 0.7}),
    "everything": (
        *(rows_of_everything, ours_with_everything, plain_with_everything),
        {"softcap": 1.5},
    ),
}


def options_of(device: Any, rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Return options of calls by name; every row attends to at least one key."""
    mask = np.ones((4, 5), bool)
    mask[1, 3] = mask[2, 0] = mask[2, 4] = False
    bias, sinks = numbers(device, rng, (1, 2, 4, 5), (2,))
    return {
        "none": {},
        "causal": {"causal": True, "softmax_scale": 0.7},
        "bias": {"bias": bias, "softcap": 1.5},
        "mask": {"mask": jax.device_put(mask, device)},
        "sinks": {"sinks": sinks},
        "score_mod": {"score_mod": ScoreMod(lambda score: np.sin(score) * score), "softcap": 2.0},
    }


OPTIONS = ("none", "causal", "bias", "mask", "sinks", "score_mod")


def loss_of(function: Any, **options: Any) -> Callable[..., Any]:
    """Return a function of the inputs whose gradients of out and lse depend on them."""

    def loss(*inputs: Any) -> Any:
        out, lse = function(*inputs, **options)
        weights = jax.numpy.linspace(-2, 3, out.size).reshape(out.shape)
        lse = jax.numpy.where(lse == -jax.numpy.inf, 0, lse)
        return (jax.numpy.sin(out) * weights).sum() + (lse**2).sum()

    return loss


def along(loss: Any, directions: Any) -> Callable[..., Any]:
    """Return the derivative of a function along a direction, as a function of its arguments."""
    return lambda *inputs: jvp(loss, inputs, directions)[1]


def penalty(loss: Any) -> Callable[..., Any]:
    """Return the squared magnitude of gradients."""
    return lambda *inputs: sum((x**2).sum() for x in grad(loss, each(inputs))(*inputs))


def each(inputs: Any) -> tuple[int, ...]:
    """Return the positions of the inputs."""
    return tuple(range(len(inputs)))


def products_of_samples(loss: Any, inputs: Any, directions: Any) -> Any:
    """Return mapped products with the Hessian of mapped and of shared inputs."""
    q, *others = inputs

    def one(q: Any, direction: Any) -> Any:
        of_all = direction, *directions[1:]
        return jvp(grad(loss, each(inputs)), (q, *others), of_all)[1]

    stacked = jax.numpy.stack([q, directions[0], -q])
    return vmap(one)(stacked, stacked[::-1]), vmap(one, (None, 0))(q, stacked)


WAYS: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, x, t: jvp(f, x, t),
    "one tangent": lambda f, x, t: jvp(lambda k: f(x[0], k, *x[2:]), x[1:2], t[1:2]),
    "linearize": lambda f, x, t: linearize(f, *x)[1](*t),
    "jacfwd": lambda f, x, t: jacfwd(f, each(x))(*x),
    "transpose": lambda f, x, t: jax.linear_transpose(lambda *t: along(f, t)(*x), *x)(
        f(*x).astype(float)
    ),
    "hessian": lambda f, x, t: hessian(f, each(x))(*x),
    "reverse over reverse": lambda f, x, t: jacrev(jacrev(f, each(x)), each(x))(*x),
    "reverse over forward": lambda f, x, t: jacrev(jacfwd(f, 2), 0)(*x),
    "tangents of gradients": lambda f, x, t: jvp(grad(f, each(x)), x, t)[1],
    "gradients of tangents": lambda f, x, t: grad(along(f, t), each(x))(*x),
    "products with gradients": lambda f, x, t: vjp(grad(f, each(x)), *x)[1](t),
    "penalty": lambda f, x, t: grad(penalty(f), each(x))(*x),
    "of a checkpoint": lambda f, x, t: grad(penalty(jax.checkpoint(f)), each(x))(*x),
    "of one": lambda f, x, t: grad(lambda k: (grad(f)(x[0], k, *x[2:]) ** 2).sum())(x[1]),
    "of the last": lambda f, x, t: grad(lambda y: (grad(f)(*x[:-1], y) ** 2).sum())(x[-1]),
    "tangent of the last": lambda f, x, t: jvp(
        lambda y: grad(f, (1, 2))(*x[:-1], y), x[-1:], t[-1:]
    )[1],
    "mapped": products_of_samples,
}


# Ways that map calls, which JAX compiles.
MAPPED = ("jacfwd", "hessian", "reverse over reverse", "reverse over forward", "mapped")
# Compiling takes most of the time, and does not depend on the option.
CASES = [
    (way, option, False)
    for way in WAYS
    for option in OPTIONS
    if way not in MAPPED or option == "score_mod"
]
CASES += [(way, "bias", True) for way in WAYS]
CASES += [(way, call, False) for way in WAYS for call in OF_MORE_INPUTS if way not in MAPPED]
CASES += [
    (way, call, True)
    for way in ("jvp", "penalty", "tangents of gradients")
    for call in OF_MORE_INPUTS
]


@pytest.mark.parametrize(("way", "option", "is_compiled"), CASES)
def test_derivatives_are_those_of_the_formula(
    way: str, option: str, is_compiled: bool, device: Any, rng: np.random.Generator
) -> None:
    with in_64_bits("float64"):
        if option in OF_MORE_INPUTS:
            make, library, formula, options = OF_MORE_INPUTS[option]
        else:
            make, library, formula = rows, ours, plain
            options = options_of(device, rng)[option]
        inputs, directions = make(device, rng), make(device, rng)

        def derivatives(function: Any) -> Callable[..., Any]:
            return lambda inputs, directions: WAYS[way](
                loss_of(function, **options), inputs, directions
            )

        run = derivatives(library)
        found = (jax.jit(run) if is_compiled else run)(inputs, directions)
        expected = jax.jit(derivatives(formula))(inputs, directions)
        assert_tree_close(found, expected)
        assert all(np.any(x) for x in jax.tree.leaves(expected))


@pytest.mark.parametrize("i", [3, 4])
def test_mapped_tangents_of_modifications(i: int, device: Any, rng: np.random.Generator) -> None:
    with in_64_bits("float64"):
        inputs, directions = (rows_of_everything(device, rng) for _ in range(2))
        loss = loss_of(ours_with_everything)
        moving = jax.numpy.stack([directions[i], -2 * directions[i]])

        def product(direction: Any) -> Any:
            of_all = [direction if n == i else x for n, x in enumerate(directions)]
            return jvp(grad(loss, each(inputs)), inputs, tuple(of_all))[1]

        found = vmap(product)(moving)
        for n in range(2):
            assert_tree_close([x[n] for x in found], list(product(moving[n])))


def assert_tree_close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **CLOSE), found, expected)


@JIT
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("kind", ["dense", "padded"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_derivatives_are_those_of_arrays(
    dtype: str, kind: str, number: int, is_compiled: bool, device: Any, rng: np.random.Generator
) -> None:
    call = random_gradient_call(rng, dtype, kind, head_dims=(5, 24, 64), longest=(60, 90))
    positional, named = call.forward.given(np)
    moving = [np.where(np.isnan(x), np.nan, rng.standard_normal(x.shape)) for x in positional]
    dlse = call.dlse
    with in_64_bits(dtype):
        inputs = tuple(jax.device_put(x, device) for x in positional)
        directions = tuple(
            jax.device_put(x.astype(y.dtype), device)
            for x, y in zip(moving, positional, strict=True)
        )
        dout = jax.device_put(call.dout, device)
        of_lse = None if dlse is None else jax.device_put(dlse, device)

        def gradients(*inputs: Any) -> Any:
            results, pull_back = vjp(lambda *x: ours(*x, **named), *inputs)
            zeros = jax.numpy.zeros_like(results[1])
            return pull_back((dout, zeros if of_lse is None else of_lse))

        def both(inputs: Any, directions: Any) -> Any:
            tangents = jvp(lambda *x: ours(*x, **named), inputs, directions)[1]
            return tangents, jvp(gradients, inputs, directions)[1]

        run = jax.jit(both) if is_compiled else both
        tangents, products = jax.tree.map(np.asarray, run(inputs, directions))
        directions = jax.tree.map(np.asarray, directions)
    expected = flash_attention_jvp(*positional, *directions, **named, return_lse=True)[1::2]
    exact = attention_jvp_reference(*positional, *directions, **named, return_lse=True)[1::2]
    of_arrays, of_reference = (
        f(call.dout, *positional, *directions, dlse=dlse, **named)
        for f in (flash_attention_hvp, attention_hvp_reference)
    )
    for one, other, right in zip(
        (*tangents, *products), (*expected, *of_arrays), (*exact, *of_reference), strict=True
    ):
        assert one.dtype == other.dtype
        if device.platform == "cpu":
            np.testing.assert_array_equal(one, other)
        # Kernels on a GPU add in a different order, and results are rounded to the dtype.
        one, size = one.astype(np.float64), max(1, np.abs(right).max(initial=0))
        np.testing.assert_allclose(one, right, rtol=0, atol=TOLERANCES[dtype] * size)


@JIT
def test_inputs_of_numpy_and_other_functions(
    is_compiled: bool, device: Any, rng: np.random.Generator
) -> None:
    with in_64_bits("float64"):
        q, k, v = (np.asarray(x) for x in rows(device, rng))
        (moving,) = numbers(device, rng, (2, 4, 2, 3))

        def product(function: Any) -> Callable[..., Any]:
            loss = loss_of(function)
            return lambda q: jvp(grad(lambda q: loss(q, k, v)), (q,), (moving,))[1]

        run = jax.jit(product(ours)) if is_compiled else product(ours)
        given = jax.device_put(q, device)
        assert_tree_close(run(given), product(plain)(given))
        (qkv,) = numbers(device, rng, (1, 4, 3, 2, 3))

        def packed(qkv: Any) -> Any:
            return (cj.flash_attention_qkvpacked(qkv, causal=True) ** 2).sum()

        def of_parts(qkv: Any) -> Any:
            parts = (qkv[:, :, i] for i in range(3))
            return (plain(*parts, causal=True)[0] ** 2).sum()

        found = (jax.jit if is_compiled else lambda f: f)(hessian(packed))(qkv)
        assert_tree_close(found, hessian(of_parts)(qkv))


@JIT
def test_dropout_is_differentiated_with_one_mask(
    is_compiled: bool, device: Any, rng: np.random.Generator
) -> None:
    with in_64_bits("float64"):
        inputs, directions = rows(device, rng), rows(device, rng)

        def product(inputs: Any, key: Any) -> Any:
            loss = loss_of(ours, dropout_p=0.5, dropout_seed=key)
            found = jvp(grad(loss, EVERY), inputs, directions)[1]
            return found, grad(along(loss, directions), EVERY)(*inputs)

        found, transposed = (jax.jit(product) if is_compiled else product)(
            inputs, jax.random.key(3)
        )
        # The Hessian is symmetric only if both products use the same mask.
        assert_tree_close(found, transposed)
        others, _ = product(inputs, jax.random.key(4))
        assert np.abs(found[0] - others[0]).max() > 1e-3


def test_loops_and_branches(device: Any, rng: np.random.Generator) -> None:
    with in_64_bits("float64"):
        inputs, directions = rows(device, rng), rows(device, rng)

        def branched(function: Any) -> Callable[..., Any]:
            loss = loss_of(function)
            return lambda *x: jax.lax.cond(x[0].sum() < 1e9, loss, lambda *x: 0.0, *x)

        def repeated(function: Any) -> Callable[..., Any]:
            def loss(q: Any, k: Any, v: Any) -> Any:
                def step(q: Any, _: Any) -> Any:
                    out, lse = function(q, k, v)
                    return q + out[..., :3], (lse**2).sum()

                q, sums = jax.lax.scan(step, q, None, length=3)
                return (q**2).sum() + sums.sum()

            return loss

        for way, made in (
            *(("jvp", branched), ("penalty", branched)),
            *(("gradients of tangents", repeated), ("penalty", repeated)),
        ):
            found, expected = (WAYS[way](made(f), inputs, directions) for f in (ours, plain))
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9),
                *(found, expected),
            )


def test_a_linear_function_is_compiled_alone(device: Any, rng: np.random.Generator) -> None:
    with in_64_bits("float64"):
        inputs, directions = rows(device, rng), rows(device, rng)
        found, expected = (
            jax.jit(linearize(loss_of(f), *inputs)[1])(*directions) for f in (ours, plain)
        )
        assert_tree_close(found, expected)


def test_only_requested_gradients_are_computed(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy_flash.differentiable import DifferentiableCall

    requests = []
    original = DifferentiableCall.pull_back

    def recorded(self: Any, inputs: Any, results: Any, gradients: Any, wrt: Any) -> Any:
        requests.append((wrt, [x is not None for x in gradients]))
        return original(self, inputs, results, gradients, wrt)

    monkeypatch.setattr(DifferentiableCall, "pull_back", recorded)
    q, k, v = (x.astype(np.float32) for x in rows(jax.devices("cpu")[0], rng))
    grad(lambda k: cj.flash_attention(q, k, v).sum())(k)
    grad(lambda q, v: (ours(q, k, v)[1] ** 2).sum(), (0, 1))(q, v)
    assert requests == [(("k",), [True, False]), (("q", "v"), [True, True])]


@JIT
@pytest.mark.parametrize("form", ["a number", "bfloat16"])
def test_gradients_of_sinks_have_their_shape_and_dtype(
    form: str, is_compiled: bool, device: Any, rng: np.random.Generator
) -> None:
    inputs = tuple(x.astype(np.float32) for x in rows(device, rng))
    sinks = jax.device_put(rng.standard_normal(2), device).astype(np.float32)
    given = sinks[0] if form == "a number" else sinks.astype(jax.numpy.bfloat16)

    def every(function: Any, sinks: Any) -> Any:
        loss = loss_of(function)

        def of_sinks(sinks: Any) -> Any:
            wide = jax.numpy.broadcast_to(sinks.astype(np.float32), (2,))
            return loss(*inputs, wide if function is plain_with_sinks else sinks)

        return jvp(grad(of_sinks), (sinks,), (jax.numpy.ones_like(sinks),))

    def run(sinks: Any) -> Any:
        return every(lambda q, k, v, sinks: ours(q, k, v, sinks=sinks), sinks)

    found = (jax.jit(run) if is_compiled else run)(given)
    for one, other in zip(found, every(plain_with_sinks, given), strict=True):
        assert (one.shape, one.dtype) == (given.shape, given.dtype)
        tolerance = 2**-6 if form == "bfloat16" else 1e-4
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


def plain_with_sinks(q: Any, k: Any, v: Any, sinks: Any) -> Any:
    return plain(q, k, v, sinks=sinks)


# ---- What has no derivative


@JIT
@pytest.mark.parametrize(
    ("derivative", "message"),
    [
        (lambda f: jacfwd(jacfwd(f)), "a tangent of attention has no tangent"),
        (lambda f: grad(lambda x: grad(penalty(f))(x, x, x).sum()), "third"),
        (lambda f: jacfwd(hessian(f)), "third|a tangent of attention has no tangent"),
        (lambda f: jacrev(hessian(f)), "third"),
    ],
)
def test_third_derivatives_and_tangents_of_tangents_are_errors(
    derivative: Any, message: str, is_compiled: bool, device: Any, rng: np.random.Generator
) -> None:
    (x,) = numbers(device, rng, (1, 4, 2, 3))
    loss = loss_of(ours)
    first = derivative(lambda *x: loss(*(x if len(x) == 3 else x * 3)))
    with pytest.raises(NotImplementedError, match=message):
        (jax.jit(first) if is_compiled else first)(x.astype(np.float32))


@JIT
@pytest.mark.parametrize("mode", ["jvp", "grad"])
def test_what_has_no_gradient_has_no_tangent(
    mode: str, is_compiled: bool, device: Any, rng: np.random.Generator
) -> None:
    inputs = tuple(x.astype(np.float32) for x in rows(device, rng))
    slopes = jax.numpy.ones(2)

    def loss(slopes: Any) -> Any:
        return cj.flash_attention(*inputs, alibi_slopes=slopes).sum()

    function = grad(loss) if mode == "grad" else lambda x: jvp(loss, (x,), (x,))
    with pytest.raises(TypeError, match=r"alibi_slopes is differentiated by JAX; pass jax\.lax"):
        (jax.jit(function) if is_compiled else function)(slopes)


def test_functions_of_pairs_have_derivatives_of_scores_alone(rng: np.random.Generator) -> None:
    """Captured arrays of a compiled function are constants."""
    gain = rng.random(2)
    options = {
        "score_mod": ScoreMod(lambda score, h, gain: score * score * gain[h], gain=gain),
        "mask_mod": MaskMod(lambda i, j: j <= i + 1),
        "alibi_slopes": np.array([0.5, 0.25]),
    }
    with in_64_bits("float64"):
        device = jax.devices("cpu")[0]
        inputs, directions = rows(device, rng), rows(device, rng)
        loss = loss_of(ours, **options)
        (one,), (other,) = (
            run(grad(lambda q: along(loss, directions)(q, *inputs[1:])))(inputs[0])[None]
            for run in (jax.jit, lambda f: f)
        )
        assert_tree_close(one, other)
        step = 1e-5
        ends = [
            grad(loss)(*(x + sign * step * t for x, t in zip(inputs, directions, strict=True)))
            for sign in (1, -1)
        ]
        np.testing.assert_allclose(one, (ends[0] - ends[1]) / (2 * step), rtol=1e-7, atol=1e-7)
