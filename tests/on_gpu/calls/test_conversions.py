"""Arguments that a call on a GPU converts: they give the same bits as already converted ones."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from support.calls.sequence_support import random_kvcache_case, random_varlen_case
from support.gpu import cupy

from cupy_flash import (
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)

pytestmark = pytest.mark.gpu

LENGTHS = {"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "cache_seqlens"}
HEADS = 4


def on_gpu(array: np.ndarray) -> Any:
    return cupy.asarray(array)


def at_odd_address(array: Any) -> Any:
    """Return a copy whose elements do not begin at multiples of their size."""
    memory = cupy.zeros(array.nbytes + 1, np.uint8)
    memory[1:] = cupy.ascontiguousarray(array).view(np.uint8).ravel()
    return cupy.ndarray(array.shape, array.dtype, memory.data + 1)


def same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.get(), other.get())


def dense(rng: np.random.Generator, *batch: int) -> dict[str, Any]:
    lengths = {"q": 70, "k": 90, "v": 90}
    shapes = {n: (*batch, length, HEADS, 64) for n, length in lengths.items()}
    return {n: on_gpu(rng.standard_normal(x).astype(np.float16)) for n, x in shapes.items()}


@pytest.mark.parametrize("change", [np.int64, np.uint32, list])
def test_lengths_may_be_lists_or_other_integers(rng: np.random.Generator, change: Any) -> None:
    def changed(arguments: dict[str, Any]) -> dict[str, Any]:
        lengths = {n: x for n, x in arguments.items() if n in LENGTHS and x is not None}
        if change is list:
            return arguments | {n: x.get().tolist() for n, x in lengths.items()}
        return arguments | {n: x.astype(change) for n, x in lengths.items()}

    packed = random_varlen_case(rng, page_size=16, seqused=True).problem()
    call = functools.partial(flash_attention_varlen, return_lse=True)
    found = call(**changed(packed.arguments(cupy)))
    same(found, call(**packed.arguments(cupy)))
    same(call(**packed.arguments(cupy) | {"cu_seqlens_k": None}), found)
    cached = random_kvcache_case(rng, seqlen_new=2).problem()
    call = functools.partial(flash_attention_with_kvcache, return_lse=True)
    same(call(**changed(cached.arguments(cupy))), call(**cached.arguments(cupy)))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, list])
def test_slopes_and_sinks_may_be_lists_or_other_floats(
    rng: np.random.Generator, dtype: Any
) -> None:
    arrays = dense(rng, 2)
    vectors = {"alibi_slopes": [0.5, 0.25, 1, 0], "sinks": [1, -2, 0.5, 0]}
    right = {n: on_gpu(np.array(x, np.float32)) for n, x in vectors.items()}
    if dtype is not list:
        vectors = {n: on_gpu(np.array(x, dtype)) for n, x in vectors.items()}
    call = functools.partial(flash_attention, **arrays, return_lse=True)
    out, lse = call(**right)
    found = call(**vectors)
    for one, other in zip(found, (out, lse), strict=True):
        np.testing.assert_allclose(one.get(), other.get(), rtol=2e-3, atol=2e-3)
    back = functools.partial(flash_attention_backward, out, **arrays, out=out, lse=lse)
    (expected,) = back(**right, wrt=("sinks",))
    (found,) = back(**vectors, wrt=("sinks",))
    assert found.dtype == (np.float32 if dtype is list else dtype)
    np.testing.assert_allclose(found.get(), expected.get(), rtol=2e-3, atol=2e-3)
    same(call(alibi_slopes=0.5, sinks=0.25), call(alibi_slopes=[0.5] * HEADS, sinks=[0.25] * HEADS))


@pytest.mark.parametrize(
    "name", ["bias", "mask", "tree_mask", "alibi_slopes", "sinks", "prefix_lens", "seqlens_k"]
)
def test_modifications_at_odd_addresses_are_copied(rng: np.random.Generator, name: str) -> None:
    arrays = dense(rng, 2)
    arrays["q"] = arrays["q"][:, :40]
    value = {
        "bias": rng.standard_normal((HEADS, 40, 90)).astype(np.float16),
        "mask": rng.random((40, 90)) < 0.7,
        "tree_mask": rng.integers(0, 2**40, (2, 40)).astype(np.uint64),
        "alibi_slopes": rng.random(HEADS).astype(np.float32),
        "sinks": rng.standard_normal(HEADS).astype(np.float32),
        "prefix_lens": np.array([3, 60], np.int32),
        "seqlens_k": np.array([90, 55], np.int32),
    }[name]
    call = functools.partial(flash_attention, **arrays, causal=True, return_lse=True)
    right = on_gpu(value)
    same(call(**{name: at_odd_address(right)}), call(**{name: right}))


def test_lengths_of_padded_keys_may_be_strided(rng: np.random.Generator) -> None:
    call = functools.partial(flash_attention, **dense(rng, 2), return_lse=True)
    spread = on_gpu(np.array([50, 7, 80, 7], np.int32))[::2]
    same(call(seqlens_k=spread), call(seqlens_k=spread.copy()))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("batch", [(), (2, 3), (3, 1, 2)])
def test_batch_axes_are_those_of_the_inputs(
    rng: np.random.Generator, batch: tuple[int, ...], layout: str
) -> None:
    arrays = dense(rng, *batch)
    if layout == "bhsd":
        arrays = {n: x.swapaxes(-2, -3).copy() for n, x in arrays.items()}
    flat = {n: x.reshape(-1, *x.shape[-3:]) for n, x in arrays.items()}
    options: dict[str, Any] = {"causal": True, "layout": layout}
    expected = flash_attention(**flat, **options, return_lse=True)
    found = flash_attention(**arrays, **options, return_lse=True)
    assert [x.shape for x in found] == [(*batch, *x.shape[1:]) for x in expected]
    same([x.reshape(y.shape) for x, y in zip(found, expected, strict=True)], expected)
    back = functools.partial(flash_attention_backward, **options)
    gradients = back(found[0], **arrays, out=found[0], lse=found[1])
    of_flat = back(expected[0], **flat, out=expected[0], lse=expected[1])
    same([x.reshape(y.shape) for x, y in zip(gradients, of_flat, strict=True)], of_flat)
