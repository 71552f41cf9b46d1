"""Functions and block masks of FlexAttention, and their counterparts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.pages.migration import HEADS, SEQLENS, arrays, assert_close

from cupy_flash import BlockList, MaskMod, ScoreMod, flash_attention

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

OPTIONS = {"q_offset": 0, "layout": "bhsd"}
TABLE = np.linspace(-2, 2, HEADS * 64, dtype=np.float32).reshape(HEADS, 64)
OF_TORCH = torch.from_numpy(TABLE)


def run(seqlens: tuple[int, int], rng: np.random.Generator, **options: Any) -> tuple[Any, Any]:
    """Return random inputs, and the results of FlexAttention for them."""
    inputs = arrays(rng, *seqlens).bhsd()[:3]
    tensors = map(torch.from_numpy, inputs)
    return inputs, flex.flex_attention(*tensors, enable_gqa=True, **options)


SCORES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "table": (
        lambda score, b, h, q_idx, kv_idx: score + OF_TORCH[h, q_idx - kv_idx + 30],
        lambda score, h, i, j: score + TABLE[h, i - j + 30],
    ),
    "softcap": (
        lambda score, b, h, q_idx, kv_idx: 3 * torch.tanh(score / 3),
        lambda score: 3 * np.tanh(score / 3),
    ),
    "where": (
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf")),
        lambda score, i, j: np.where(i >= j, score, -np.inf),
    ),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_a_score_mod(name: str, seqlens: tuple[int, int], rng: np.random.Generator) -> None:
    theirs, ours = SCORES[name]
    inputs, expected = run(seqlens, rng, score_mod=theirs, scale=0.7)
    found = flash_attention(*inputs, softmax_scale=0.7, score_mod=ScoreMod(ours), **OPTIONS)
    assert_close(found, expected)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return abs(q_idx - kv_idx) < 3 + h


MASKS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "causal": (causal, {"mask_mod": MaskMod(lambda i, j: i >= j)}),
    "argument": (causal, {"causal": True}),
    "and": (
        flex.and_masks(causal, near),
        {"mask_mod": MaskMod(lambda h, i, j: (i >= j) & (abs(i - j) < 3 + h))},
    ),
    "both": (
        flex.and_masks(causal, near),
        {"causal": True, "mask_mod": MaskMod(lambda h, i, j: abs(i - j) < 3 + h)},
    ),
    "or": (
        flex.or_masks(causal, near),
        {"mask_mod": MaskMod(lambda h, i, j: (i >= j) | (abs(i - j) < 3 + h))},
    ),
    # The first queries attend to no key.
    "masked rows": (
        lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx > 5),
        {"mask_mod": MaskMod(lambda i, j: (i >= j) & (i > 5))},
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_a_mask_mod(name: str, seqlens: tuple[int, int], rng: np.random.Generator) -> None:
    theirs, ours = MASKS[name]
    mask = flex.create_block_mask(theirs, None, HEADS, *seqlens, device="cpu")
    auxiliary = flex.AuxRequest(lse=True)
    inputs, (out, aux) = run(seqlens, rng, block_mask=mask, return_aux=auxiliary)
    found, lse = flash_attention(*inputs, return_lse=True, **ours, **OPTIONS)
    assert_close(found, out)
    assert_close(lse, aux.lse)


def test_blocks(rng: np.random.Generator) -> None:
    # FlexAttention ignores blocks unless it is compiled, so its blocks become a mask.
    blocks = np.array([[[[True, False, True], [False, True, True]]]])
    count = torch.from_numpy(blocks.sum(axis=-1).astype(np.int32))
    order = torch.from_numpy(np.argsort(~blocks, axis=-1, kind="stable").astype(np.int32))
    mask = flex.BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=(8, 8), seq_lengths=(13, 23))
    dense = mask.to_dense().repeat_interleave(8, -1).repeat_interleave(8, -2) != 0
    q, k, v = arrays(rng, 13, 23).bhsd()[:3]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.from_numpy, (q, k, v)), attn_mask=dense[..., :13, :23], enable_gqa=True
    )
    found = flash_attention(q, k, v, mask_mod=BlockList(blocks, block=(8, 8)), **OPTIONS)
    assert_close(found, expected)


def test_functions_of_torch_are_refused() -> None:
    with pytest.raises(TypeError, match=r"write NumPy's functions, such as np\.where"):
        ScoreMod(lambda score: torch.tanh(score))
