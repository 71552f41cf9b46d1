"""Arguments of PyTorch's attention function and module, and their counterparts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.pages.migration import BATCH, HEADS, SEQLENS, arrays, assert_close, positions

from cupy_flash import attention_weights, flash_attention

torch = pytest.importorskip("torch")
bias_of_torch = pytest.importorskip("torch.nn.attention.bias")
functional = torch.nn.functional

LENGTHS = np.array([9, 6], np.int32)
# A hidden size of the module, whose heads have 8 columns.
HIDDEN = 8 * HEADS


def rows(rng: np.random.Generator, seqlens: tuple[int, int]) -> dict[str, tuple[Any, Any]]:
    """Return arguments of PyTorch's function, with those of `flash_attention`, by row."""
    mask, bias = arrays(rng, *seqlens)[3:]
    i, j = positions(*seqlens)
    keys = (j < LENGTHS[:, None])[:, None, None]
    causal = {"causal": True, "q_offset": 0}
    return {
        "nothing": ({}, {}),
        "mask": ({"attn_mask": mask}, {"mask": mask}),
        "mask of two axes": ({"attn_mask": mask[0, 0]}, {"mask": mask[0, 0]}),
        "numbers": ({"attn_mask": bias}, {"bias": bias}),
        "infinities": (
            {"attn_mask": np.where(mask, bias, np.float32(-np.inf))},
            {"bias": bias, "mask": mask},
        ),
        "upper left": ({"attn_mask": bias_of_torch.causal_upper_left(*seqlens)}, causal),
        "lower right": (
            {"attn_mask": bias_of_torch.causal_lower_right(*seqlens)},
            {"causal": True},
        ),
        "causal": ({"is_causal": True}, causal),
        "causal and a mask": ({"attn_mask": mask & (j <= i)}, causal | {"mask": mask}),
        "scale": ({"scale": 0.7}, {"softmax_scale": 0.7}),
        "padding": ({"attn_mask": keys}, {"seqlens_k": LENGTHS}),
        "window": (
            {"attn_mask": (i - 3 <= j) & (j <= i + 2)},
            {"window_size": (3, 2), "q_offset": 0},
        ),
    }


ROWS = (
    "nothing", "mask", "mask of two axes", "numbers", "infinities", "upper left", "lower right",
    "causal", "causal and a mask", "scale", "padding", "window",
)  # fmt: skip


def tensor(x: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_an_argument_of_the_function(
    name: str, seqlens: tuple[int, int], rng: np.random.Generator
) -> None:
    q, k, v, _, _ = arrays(rng, *seqlens).bhsd()
    theirs, ours = rows(rng, seqlens)[name]
    expected = functional.scaled_dot_product_attention(
        *map(tensor, (q, k, v)), enable_gqa=True, **{x: tensor(y) for x, y in theirs.items()}
    )
    assert_close(flash_attention(q, k, v, layout="bhsd", **ours), expected)


def test_fully_masked_rows_are_0_in_the_function(rng: np.random.Generator) -> None:
    q, k, v, mask, _ = arrays(rng, *SEQLENS[0]).bhsd()
    mask[:, :, 5] = False
    expected = functional.scaled_dot_product_attention(
        *map(tensor, (q, k, v)), attn_mask=tensor(mask), enable_gqa=True
    )
    found = flash_attention(q, k, v, layout="bhsd", mask=mask)
    assert (found[:, :, 5] == 0).all()
    assert_close(found, expected)


@pytest.fixture
def inputs(rng: np.random.Generator) -> list[Any]:
    """Input rows and rows of memory for the module."""
    return [tensor(rng.standard_normal((BATCH, n, HIDDEN), dtype=np.float32)) for n in SEQLENS[0]]


def module(**options: Any) -> Any:
    torch.manual_seed(0)
    return torch.nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True, **options)


def projected(attention: Any, inputs: list[Any]) -> list[Any]:
    """Return q, k and v of a module, with the axes (batch, seqlen, heads, head_dim)."""
    x, memory = inputs
    parts = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    return [
        functional.linear(rows, weight, bias).unflatten(-1, (HEADS, -1))
        for rows, weight, bias in zip((x, memory, memory), *parts, strict=True)
    ]


def module_rows(rng: np.random.Generator) -> dict[str, tuple[Any, Any]]:
    mask, bias = arrays(rng, *SEQLENS[0])[3:]
    i, j = positions(*SEQLENS[0])
    return {
        "padding": ({"key_padding_mask": j >= LENGTHS[:, None]}, {"seqlens_k": LENGTHS}),
        "padding by a mask": (
            {"key_padding_mask": j >= LENGTHS[:, None]},
            {"mask": (j < LENGTHS[:, None])[:, None, None]},
        ),
        "mask": ({"attn_mask": ~mask[0, 0]}, {"mask": mask[0, 0]}),
        "mask of heads": ({"attn_mask": ~mask.reshape(-1, *SEQLENS[0])}, {"mask": mask}),
        "numbers": ({"attn_mask": bias.reshape(-1, *SEQLENS[0])}, {"bias": bias}),
        "causal": (
            {"attn_mask": j > i, "is_causal": True},
            {"causal": True, "q_offset": 0},
        ),
    }


MODULE_ROWS = ("padding", "padding by a mask", "mask", "mask of heads", "numbers", "causal")


@torch.no_grad()
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", MODULE_ROWS)
def test_an_argument_of_the_module(
    name: str, average: bool, inputs: list[Any], rng: np.random.Generator
) -> None:
    attention = module()
    theirs, ours = module_rows(rng)[name]
    x, memory = inputs
    expected, expected_weights = attention(
        *(x, memory, memory),
        average_attn_weights=average,
        **{key: tensor(value) for key, value in theirs.items()},
    )
    q, k, v = projected(attention, inputs)
    ours = {key: tensor(value) for key, value in ours.items()}
    assert_close(attention.out_proj(flash_attention(q, k, v, **ours).flatten(-2)), expected)
    weights = attention_weights(q, k, **ours)
    assert_close(weights.mean(axis=1) if average else weights, expected_weights)


@torch.no_grad()
def test_a_key_of_zeros_is_a_sink(inputs: list[Any]) -> None:
    attention = module(add_zero_attn=True)
    x, memory = inputs
    found = flash_attention(*projected(attention, inputs), sinks=torch.zeros(HEADS))
    expected, _ = attention(x, memory, memory)
    assert_close(attention.out_proj(found.flatten(-2)), expected)


@torch.no_grad()
def test_learned_keys_are_concatenated(inputs: list[Any]) -> None:
    attention = module(add_bias_kv=True)
    x, memory = inputs
    q, k, v = projected(attention, inputs)
    last = [
        rows.unflatten(-1, (HEADS, -1)).expand(BATCH, -1, -1, -1)
        for rows in (attention.bias_k, attention.bias_v)
    ]
    wide = [torch.cat(pair, dim=1) for pair in zip((k, v), last, strict=True)]
    found = flash_attention(q, *wide)
    assert_close(attention.out_proj(found.flatten(-2)), attention(x, memory, memory)[0])


@torch.no_grad()
def test_the_module_returns_nan_for_fully_masked_rows_with_weights(inputs: list[Any]) -> None:
    attention = module()
    x, memory = inputs
    padding = torch.ones(memory.shape[:2], dtype=torch.bool)
    with_weights, without = (
        attention(x, memory, memory, key_padding_mask=padding, need_weights=need)[0]
        for need in (True, False)
    )
    assert with_weights.isnan().all()
    assert not without.isnan().any()
