"""Attention under `jax.vmap`: one call for all indices of the mapped axis, if kernels allow it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_flash import MaskMod, ScoreMod

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")

SIZE, BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM = 3, 2, 5, 7, 4, 2, 8
SHAPES = {
    "q": (BATCH, ROWS, HEADS, DIM),
    "k": (BATCH, KEYS, HEADS_KV, DIM),
    "v": (BATCH, KEYS, HEADS_KV, 6),
    "bias": (BATCH, HEADS, ROWS, KEYS),
    "bias of all": (1, 1, ROWS, KEYS),
    "bias of heads": (HEADS, 1, KEYS),
    "sinks": (HEADS,),
    "alibi_slopes": (HEADS,),
    "alibi_slopes of all": (BATCH, HEADS),
    "mask": (BATCH, 1, ROWS, KEYS),
    "prefix_lens": (BATCH,),
    "seqlens_k": (BATCH,),
    "q_offset": (BATCH,),
    "tree_mask": (BATCH, ROWS),
}
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
# The CPU backend sums in another order in larger batches.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def drawn(rng: np.random.Generator, name: str, *mapped: int) -> Any:
    shape = (*mapped, *SHAPES[name])
    if name == "mask":
        return jax.numpy.asarray(rng.random(shape) < 0.7)
    if name in ("prefix_lens", "seqlens_k", "q_offset"):
        return jax.numpy.asarray(rng.integers(1, KEYS, shape), np.int32)
    return jax.numpy.asarray(rng.standard_normal(shape), np.float32)


# Names of modifications, and of the mapped arrays among all.
CASES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    ((), ("q", "k", "v")),
    ((), ("q",)),
    ((), ("k", "v")),
    (("bias",), ("q", "k", "v", "bias")),
    (("bias",), ("q",)),
    (("bias of all", "alibi_slopes"), ("q", "bias of all")),
    (("bias of all", "alibi_slopes of all"), ("k",)),
    (("bias of heads", "alibi_slopes"), ("v", "bias of heads", "alibi_slopes")),
    (("bias of heads", "mask"), ("bias of heads",)),
    (("mask", "prefix_lens", "alibi_slopes of all"), ("q", "mask", "alibi_slopes of all")),
    (("prefix_lens", "seqlens_k", "q_offset"), ("prefix_lens", "q")),
    (("prefix_lens", "seqlens_k", "q_offset"), ("seqlens_k", "q_offset")),
    (("sinks",), ("q", "k")),
    (("sinks", "bias"), ("sinks",)),
]


@pytest.mark.parametrize(("modifications", "mapped"), CASES, ids=str)
def test_a_mapped_call_equals_one_call_for_each_index(
    rng: np.random.Generator, modifications: tuple[str, ...], mapped: tuple[str, ...]
) -> None:
    names = ("q", "k", "v", *modifications)
    arrays = [drawn(rng, name, *((SIZE,) if name in mapped else ())) for name in names]
    axes = [0 if name in mapped else None for name in names]
    wrt = tuple(i for i, name in enumerate(names) if name.partition(" ")[0] in DIFFERENTIABLE)

    def loss(*arrays: Any) -> Any:
        given = {n.partition(" ")[0]: x for n, x in zip(names, arrays, strict=True)}
        if "alibi_slopes" in given:
            given["alibi_slopes"] = jax.lax.stop_gradient(given["alibi_slopes"])
        q, k, v = (given.pop(name) for name in ("q", "k", "v"))
        out, lse = cj.flash_attention(q, k, v, causal=True, return_lse=True, **given)
        return (out**2).sum() + (jax.numpy.where(jax.numpy.isfinite(lse), lse, 0) ** 2).sum()

    one = jax.value_and_grad(loss, wrt)
    each = [
        one(*(x[i] if axis == 0 else x for x, axis in zip(arrays, axes, strict=True)))
        for i in range(SIZE)
    ]
    expected = jax.tree.map(lambda *xs: np.stack(xs), *each)
    found = jax.jit(jax.vmap(one, axes))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), found, expected)
    # Gradients of arrays that are not mapped are sums over the mapped axis.
    whole = jax.jit(jax.grad(lambda *xs: jax.vmap(loss, axes)(*xs).sum(), wrt))(*arrays)
    _, each_gradient = expected
    for i, found_one, gradients in zip(wrt, whole, each_gradient, strict=True):
        total = gradients if axes[i] == 0 else gradients.sum(0)
        np.testing.assert_allclose(found_one, total, **CLOSE)


def calls_and_loops(function: Any, *arrays: Any) -> tuple[int, int]:
    text = jax.jit(function).lower(*arrays).as_text()
    return text.count("custom_call @cupy_flash"), text.count("stablehlo.while")


def test_a_mapped_axis_is_a_batch_axis_of_one_call(rng: np.random.Generator) -> None:
    q, k, v = (drawn(rng, name, SIZE) for name in ("q", "k", "v"))
    loss = jax.value_and_grad(lambda *xs: cj.flash_attention(*xs).sum(), (0, 1, 2))
    assert calls_and_loops(jax.vmap(loss), q, k, v) == (2, 0)
    twice = jax.vmap(jax.vmap(cj.flash_attention))
    assert calls_and_loops(twice, q, k, v) == (1, 0)
    np.testing.assert_allclose(twice(q, k, v), cj.flash_attention(q, k, v), **CLOSE)


def test_functions_of_the_sequence_are_called_for_each_index(rng: np.random.Generator) -> None:
    q, k, v = (drawn(rng, name, SIZE) for name in ("q", "k", "v"))
    limits = np.array([3, 5], np.int32)
    mods = {
        "mask_mod": MaskMod(lambda b, j: j < limits[b]),
        "score_mod": ScoreMod(lambda score, h, j: score * (h + 1) - j),
    }
    for name, loops in (("mask_mod", 1), ("score_mod", 0)):
        attention = jax.vmap(lambda *xs, n=name: cj.flash_attention(*xs, **{n: mods[n]}))
        assert calls_and_loops(attention, q, k, v) == (1, loops)
        expected = [cj.flash_attention(q[i], k[i], v[i], **{name: mods[name]}) for i in range(SIZE)]
        np.testing.assert_allclose(attention(q, k, v), np.stack(expected), **CLOSE)


def test_packed_sequences_are_mapped(rng: np.random.Generator) -> None:
    q, k, v = (drawn(rng, name, SIZE)[:, 0] for name in ("q", "k", "v"))
    ends = jax.numpy.array([0, 3, KEYS], np.int32)

    def loss(q: Any, k: Any, v: Any, ends_q: Any) -> Any:
        return (cj.flash_attention_varlen(q, k, v, ends_q, ends, 4, 4, causal=True) ** 2).sum()

    one = jax.grad(loss, (0, 1, 2))
    ends_q = jax.numpy.array([[0, 1, 5], [0, 2, 5], [0, 4, 5]], np.int32)
    found = jax.jit(jax.vmap(one))(q, k, v, ends_q)
    for i in range(SIZE):
        expected = one(q[i], k[i], v[i], ends_q[i])
        jax.tree.map(np.testing.assert_array_equal, [x[i] for x in found], list(expected))
