"""Patterns that `cupy_flash.transformers` recognizes in the masks of transformers."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
masking = pytest.importorskip("transformers.masking_utils")
adapter = pytest.importorskip("cupy_flash.transformers")
patterns = pytest.importorskip("cupy_flash.transformers_masks")

KINDS = {
    "causal": masking.create_causal_mask,
    "window": masking.create_sliding_window_causal_mask,
    "chunk": masking.create_chunked_causal_mask,
    "bidirectional": masking.create_bidirectional_mask,
    "window on both sides": masking.create_bidirectional_sliding_window_mask,
}
PADDINGS = ["none", "full", "left", "right", "both", "holes"]


def config_of(implementation: str, size: int) -> Any:
    """Return the attributes of a model's configuration that masks depend on."""
    return types.SimpleNamespace(
        _attn_implementation=implementation, sliding_window=size, attention_chunk_size=size
    )


def random_padding(rng: np.random.Generator, kind: str, batch: int, total: int) -> Any:
    """Return a mask (batch, total) of keys that are no padding, at least one in each row."""
    if kind == "none":
        return None
    first, last = np.sort(rng.integers(0, total, (2, batch)), axis=0)
    at = np.arange(total)
    mask = np.ones((batch, total), bool)
    if kind in ("left", "both"):
        mask &= at >= first[:, None]
    if kind in ("right", "both"):
        mask &= at <= last[:, None]
    if kind == "holes":
        mask = rng.random((batch, total)) < 0.6
        mask[np.arange(batch), first] = True
    return torch.tensor(mask)


def masks(kind: str, size: int, q_shape: tuple[int, int], **options: Any) -> tuple[Any, Any]:
    """Return the mask that cupy_flash gets, and the dense one."""
    adapter.register()
    embeddings = torch.empty(*q_shape, 0)
    options = {"cache": None, "attention_mask": None, **options}
    made = (
        KINDS[kind](config=config_of(name, size), inputs_embeds=embeddings, **options)
        for name in ("fused_cupy", "eager")
    )
    pattern, dense = made
    return pattern, None if dense is None else dense == 0


def formula(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Compute attention (batch, seqlen_q, heads_q, head_dim) by elementary operations."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0) @ v).transpose(1, 2)


def assert_right(
    rng: np.random.Generator, pattern: Any, dense: Any, shape: tuple[int, int, int]
) -> None:
    """Assert that attention with a pattern is that with the dense mask; masked rows are 0."""
    batch, seqlen_q, seqlen_k = shape
    sizes = ((4, seqlen_q), (2, seqlen_k), (2, seqlen_k))
    q, k, v = (torch.tensor(rng.standard_normal((batch, *size, 5))) for size in sizes)
    for x in (q, k, v):
        x.requires_grad_()
    module = torch.nn.Module()
    out, weights = adapter.attention(module, q, k, v, pattern)
    assert weights is None
    expected = formula(q, k, v, dense)
    assert out.shape == expected.shape
    dout = torch.tensor(rng.standard_normal(out.shape))
    found = torch.autograd.grad(out, (q, k, v), dout)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    for x, y in zip(
        (out, *found),
        (expected, *wanted),
        strict=True,
    ):
        np.testing.assert_allclose(x.detach(), y.detach(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_masks_without_a_cache(kind: str, padding: str, rng: np.random.Generator) -> None:
    for _ in range(5):
        batch, seqlen, size = (int(x) for x in rng.integers(1, (4, 30, 12)))
        keys = random_padding(rng, padding, batch, seqlen)
        pattern, dense = masks(kind, size, (batch, seqlen), attention_mask=keys)
        if padding != "holes":
            assert isinstance(pattern, patterns.AttentionPattern)
        assert_right(rng, pattern, dense, (batch, seqlen, seqlen))


def filled(make: Callable[..., Any], batch: int, past: int, config: Any) -> Any:
    """Return a cache that holds the keys of earlier calls."""
    cache = make(config)
    if past:
        rows = torch.zeros(batch, 2, past, 5)
        cache.update(rows, rows, 0)
    return cache


CACHES: dict[str, Callable[..., Any]] = {
    "dynamic": lambda config: transformers.DynamicCache(config=config),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=40),
}
LAYER = {"causal": "full_attention", "window": "sliding_attention", "chunk": "chunked_attention"}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", LAYER)
def test_masks_with_a_cache(kind: str, padding: str, cache: str, rng: np.random.Generator) -> None:
    for round_ in range(6):
        batch, seqlen, past, size = (int(x) for x in rng.integers(1, (4, 14, 20, 12)))
        if round_ < 3:
            seqlen = 1
        elif round_ < 5:
            past = 0
        config = transformers.LlamaConfig(
            num_hidden_layers=1, layer_types=[LAYER[kind]], sliding_window=size
        )
        config.attention_chunk_size = size
        keys = random_padding(rng, padding, batch, past + seqlen)
        if keys is not None:
            keys[:, -1] = True
        caches = [filled(CACHES[cache], batch, past, config) for _ in range(2)]
        (pattern, _), (_, dense) = (
            masks(kind, size, (batch, seqlen), attention_mask=keys, cache=x) for x in caches
        )
        # A layer writes the new keys before it attends.
        rows = torch.zeros(batch, 2, seqlen, 5)
        caches[0].update(rows, rows, 0)
        seqlen_k = dense.shape[-1]
        if padding != "holes" and kind != "chunk":
            assert isinstance(pattern, patterns.AttentionPattern)
        if isinstance(pattern, patterns.AttentionPattern):
            assert torch.equal(pattern.dense(), dense)
        assert_right(rng, pattern, dense, (batch, seqlen, seqlen_k))


@pytest.mark.parametrize("kind", LAYER)
def test_documents_that_positions_separate(kind: str, rng: np.random.Generator) -> None:
    for _ in range(5):
        batch, seqlen, size = (int(x) for x in rng.integers((1, 2, 1), (4, 30, 12)))
        begins = rng.random((batch, seqlen)) < 0.2
        begins[:, 0] = begins[0, 1] = True
        starts = np.maximum.accumulate(begins * np.arange(seqlen), axis=1)
        ids = torch.tensor(np.arange(seqlen) - starts)
        pattern, dense = masks(kind, size, (batch, seqlen), position_ids=ids)
        assert isinstance(pattern, patterns.AttentionPattern)
        assert_right(rng, pattern, dense, (batch, seqlen, seqlen))


def test_functions_of_the_user_give_a_dense_mask(rng: np.random.Generator) -> None:
    def first_keys(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key < 3

    options = {"or_mask_function": first_keys}
    pattern, dense = masks("causal", 1, (2, 9), **options)
    assert torch.equal(pattern, dense)
    assert_right(rng, pattern, dense, (2, 9, 9))


def test_a_pattern_can_be_used_as_a_tensor() -> None:
    keys = random_padding(np.random.default_rng(0), "left", 2, 9)
    pattern, dense = masks("window", 4, (2, 9), attention_mask=keys)
    assert pattern.shape == dense.shape
    assert pattern.ndim == 4
    assert pattern.dtype == torch.bool
    assert torch.equal(pattern[:, :, 3:], dense[:, :, 3:])
    assert torch.equal(torch.where(pattern, 1, 2), torch.where(dense, 1, 2))
    assert torch.equal(torch.zeros(9).masked_fill(pattern, 1), dense.float())
    assert torch.equal(pattern.to("cpu").dense(), dense)


def test_two_windows_are_one_of_the_nearer_bounds() -> None:
    causal, window = masking.causal_mask_function, masking.sliding_window_overlay
    both_sides = masking.sliding_window_bidirectional_overlay
    and_masks = masking.and_masks
    for sizes in ((3, 6), (6, 3)):
        functions = [window(size) for size in sizes]
        found = patterns._parts(and_masks(causal, *functions))
        assert found == {"causal": True, "window": (2, None)}
    found = patterns._parts(and_masks(window(6), both_sides(4)))
    assert found == {"window": (4, 4)}


def test_two_divisions_into_chunks_are_no_pattern() -> None:
    leftpad = torch.zeros(1, dtype=torch.int32)
    chunks = [masking.chunked_overlay(size, leftpad) for size in (3, 4)]
    assert patterns._parts(masking.and_masks(*chunks)) is None
