"""Attention inside functions that JAX compiles: random calls, and the transformations of JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES
from support.gradients.gradient_calls import KINDS, random_gradient_call
from support.gradients.gradient_rule import check_gradients
from support.in_jax.compiled_call import DIFFERENTIABLE, compiled, in_64_bits

import cupy_flash
from cupy_flash import MaskMod, ScoreMod

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compiled_function_computes_what_the_library_does(
    rng: np.random.Generator, dtype: str, kind: str
) -> None:
    for _ in range(4):
        call = random_gradient_call(rng, dtype, kind, head_dims=(5, 16, 24), longest=(20, 30))
        call.grad_dtype, call.places = None, {}
        call.wrt = tuple(name for name in call.inputs if name in DIFFERENTIABLE)
        call.forward.mods.get("score_mod", ("", {}))[1].pop("differentiable", None)
        with in_64_bits(dtype):
            (out, lse), gradients = compiled(call)
        positional, named = call.forward.given(np)
        packed = "_varlen" if call.is_packed else ""
        function = getattr(cupy_flash, f"flash_attention{packed}")
        expected = function(*positional, **named, return_lse=True, backend="cpu")
        for found, one in zip((out, lse), expected, strict=True):
            np.testing.assert_array_equal(found, one)
        check_gradients(call, gradients)


def random_arrays(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[Any]:
    return [jax.numpy.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]


def rows(rng: np.random.Generator) -> list[Any]:
    seqlen_q, seqlen_k = (int(n) for n in rng.integers(3, 20, 2))
    return random_arrays(rng, (2, seqlen_q, 4, 8), (2, seqlen_k, 2, 8), (2, seqlen_k, 2, 8))


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit,
    "checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "policy": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "cond": lambda f: lambda *xs: jax.lax.cond(xs[0].sum() < np.inf, f, lambda q, *_: q, *xs),
    "scan": lambda f: lambda *xs: jax.lax.scan(lambda c, _: (f(c, *xs[1:]), 0), xs[0], length=1)[0],
    "map": lambda f: lambda q, k, v: jax.lax.map(lambda q: f(q, k, v), q[None])[0],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transformed_functions_and_their_gradients_have_the_same_bits(
    rng: np.random.Generator, transform: str
) -> None:
    inputs = rows(rng)

    def attention(q: Any, k: Any, v: Any) -> Any:
        return cj.flash_attention(q, k, v, causal=True)

    def with_gradients(function: Any) -> Any:
        return jax.value_and_grad(lambda *xs: function(*xs).sum(), (0, 1, 2))

    changed = TRANSFORMS[transform](attention)
    assert_equal(changed(*inputs), attention(*inputs))
    (_, found), (_, expected) = (with_gradients(f)(*inputs) for f in (changed, attention))
    assert_equal(found, expected)
    (_, found) = jax.jit(with_gradients(changed))(*inputs)
    assert_equal(found, expected)


def test_a_loop_calls_attention_each_time(rng: np.random.Generator) -> None:
    q, k, v = rows(rng)

    def loop(q: Any, count: Any) -> Any:
        def step(state: Any) -> Any:
            return state[0] - 1, cj.flash_attention(state[1], k, v)

        return jax.lax.while_loop(lambda state: state[0] > 0, step, (count, q))[1]

    found, expected = jax.jit(loop)(q, 3), q
    for _ in range(3):
        expected = cj.flash_attention(expected, k, v)
    assert_equal(found, expected)


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8)])
def test_empty_arrays_have_empty_results_and_gradients(shape: tuple[int, ...]) -> None:
    q, k = jax.numpy.ones(shape), jax.numpy.ones((shape[0], 3, 2, 8))
    found = jax.jit(jax.grad(lambda *xs: cj.flash_attention(*xs).sum(), (0, 1, 2)))(q, k, k)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
    assert not any(x.any() for x in found)


def test_without_keys_the_output_is_0(rng: np.random.Generator) -> None:
    q, k, v = rows(rng)
    out, lse = jax.jit(lambda *xs: cj.flash_attention(*xs, return_lse=True))(q, k[:, :0], v[:, :0])
    assert not out.any()
    assert np.all(lse == -np.inf)


def test_float8_arrays_have_scales(rng: np.random.Generator) -> None:
    inputs = [x.astype(jax.numpy.float8_e4m3fn) for x in rows(rng)]
    scales = {"q_scale": 0.5, "k_scale": np.float32(2), "out_dtype": jax.numpy.float16}

    def attention(*rows: Any) -> Any:
        return cj.flash_attention(*rows, **scales)

    found = jax.jit(attention)(*inputs)
    expected = cupy_flash.flash_attention(
        *map(np.asarray, inputs), q_scale=0.5, k_scale=2.0, out_dtype="float16"
    )
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(attention(*inputs), expected)
    with pytest.raises(TypeError, match=r"on 8-bit arrays.* is differentiated by JAX"):
        jax.grad(lambda q: attention(q, *inputs[1:]).astype(np.float32).sum())(inputs[0])


def test_packed_rows_may_be_in_pages(rng: np.random.Generator) -> None:
    (q,) = random_arrays(rng, (5, 4, 8))
    k, v = random_arrays(rng, *[(3, 4, 2, 8)] * 2)
    table = jax.numpy.array([[0, 2], [1, 0]], np.int32)
    lengths = ([0, 2, 5], None, 3, 8)

    def attention(q: Any, table: Any, used: Any) -> Any:
        return cj.flash_attention_varlen(
            q, k, v, *lengths, seqused_k=used, block_table=table, causal=True
        )

    used = jax.numpy.array([3, 7])
    arrays = [np.asarray(x) for x in (q, k, v)]
    expected = cupy_flash.flash_attention_varlen(
        *arrays, *lengths, seqused_k=[3, 7], block_table=np.asarray(table), causal=True
    )
    np.testing.assert_array_equal(jax.jit(attention)(q, table, used), expected)
    with pytest.raises(TypeError, match="with a block_table, is differentiated by JAX"):
        jax.grad(lambda q: attention(q, table, used).sum())(q)


def test_functions_of_scores_and_64_bit_masks_are_part_of_a_compiled_function(
    rng: np.random.Generator,
) -> None:
    q, k, v = random_arrays(rng, (2, 5, 4, 8), *[(2, 40, 2, 8)] * 2)
    slopes = np.array([0.5, 0.25, 1, 2], np.float64)
    options = {
        "score_mod": ScoreMod(lambda score, h, i, j: score - slopes[h] * np.abs(i - j)),
        "mask_mod": MaskMod(lambda b, j: j >= b),
        "tree_mask": rng.integers(2**40, size=(2, 5), dtype=np.uint64) | np.uint64(1),
    }

    def loss(q: Any) -> Any:
        return (cj.flash_attention(q, k, v, **options) ** 2).sum()

    expected = jax.value_and_grad(loss)(q)
    assert_equal(jax.jit(jax.value_and_grad(loss))(q), expected)
    # The captured array is that of the time when the function was compiled.
    step = jax.jit(loss)
    before = step(q)
    slopes[:] = 0
    assert_equal(step(q), before)
    assert loss(q) != before
    assert_equal(jax.jit(lambda q: loss(q))(q), loss(q))


def test_the_offset_of_queries_may_be_traced(rng: np.random.Generator) -> None:
    q, k, v = rows(rng)
    attention = jax.jit(lambda n: cj.flash_attention(q, k, v, causal=True, q_offset=n))
    for offset in (-1, 0, 2):
        expected = cj.flash_attention(q, k, v, causal=True, q_offset=[offset, offset])
        assert_equal(attention(offset), expected)


def test_errors_of_shapes_are_raised_when_a_function_is_traced(rng: np.random.Generator) -> None:
    q, k, v = rows(rng)
    with pytest.raises(ValueError, match="k has batch 1, but q has 2"):
        jax.jit(cj.flash_attention)(q, k[:1], v)
    with pytest.raises(TypeError, match="mask has dtype float32"):
        jax.jit(lambda m: cj.flash_attention(q, k, v, mask=m))(jax.numpy.ones((1, 1, 1, 1)))
    for name in ("softmax_scale", "softcap"):
        with pytest.raises(TypeError, match=f"{name} is traced by JAX; pass a value"):
            jax.jit(lambda x, n=name: cj.flash_attention(q, k, v, **{n: x}))(0.5)
    with pytest.raises(TypeError, match="causal is traced by JAX; pass a value"):
        jax.jit(lambda x: cj.flash_attention(q, k, v, causal=x))(True)
    with pytest.raises(TypeError, match="window_size is traced by JAX; pass a value"):
        jax.jit(lambda x: cj.flash_attention(q, k, v, window_size=(x, 0)))(3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        jax.jit(lambda q: cj.flash_attention(q, k, v, window=3))(q)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_numbers_and_lists_are_no_arrays(rng: np.random.Generator, is_compiled: bool) -> None:
    q, k, v = rows(rng)
    given: dict[str, list[Any]] = {
        "bias": [0.5, np.float32(0.5), [0.5] * k.shape[1], True],
        "mask": [True, np.True_, [True] * k.shape[1]],
        "tree_mask": [1],
        "seqlens_k": [2, True],
    }
    for name, values in given.items():
        for value in values:

            def attention(q: Any, given: Any = {name: value}) -> Any:  # noqa: B006
                return cj.flash_attention(q, k, v, **given)

            with pytest.raises(TypeError, match=f"{name} .*expected"):
                (jax.jit(attention) if is_compiled else attention)(q)


def test_errors_of_contents_are_raised_when_a_function_runs(rng: np.random.Generator) -> None:
    q, k, v = (x[0] for x in rows(rng))
    ends = jax.numpy.array([0, len(k)], np.int32)
    attention = jax.jit(
        lambda ends_q: cj.flash_attention_varlen(q, k, v, ends_q, ends, len(q), len(k))
    )
    right = jax.numpy.array([0, len(q)], np.int32)
    with pytest.raises(Exception, match="INTERNAL: ValueError: cu_seqlens_q"):
        attention(right + 1).block_until_ready()
    assert_equal(attention(right), cj.flash_attention(q, k, v))


@pytest.mark.parametrize("name", ["alibi_slopes", "mask"])
def test_arrays_without_gradients_may_be_traced(rng: np.random.Generator, name: str) -> None:
    q, k, v = rows(rng)
    array = {
        "alibi_slopes": jax.numpy.arange(4.0) / 4,
        "mask": jax.numpy.arange(k.shape[1]) < 3,
    }[name]

    def loss(q: Any, array: Any) -> Any:
        return (cj.flash_attention(q, k, v, **{name: array}) ** 2).sum()

    expected = jax.grad(loss)(q, array)
    assert_equal(jax.jit(jax.grad(loss))(q, array), expected)
    if name == "alibi_slopes":
        for function in (loss, jax.jit(loss)):
            with pytest.raises(TypeError, match="alibi_slopes is differentiated by JAX"):
                jax.grad(function, 1)(q, array)
        stopped = jax.grad(lambda x: loss(q, jax.lax.stop_gradient(x)))(array)
        assert not stopped.any()
