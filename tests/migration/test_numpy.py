"""Expressions of NumPy that docs/migration/numpy.md replaces, compared with the calls there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.pages.migration import HEADS, HEADS_KV, SEQLENS, arrays, assert_close, positions

from cupy_flash import ScoreMod, attention_weights, flash_attention

LENGTHS = np.array([9, 6], np.int32)


def scores_of(q: Any, k: Any) -> Any:
    return q @ np.repeat(k, HEADS // HEADS_KV, axis=1).swapaxes(-1, -2) / np.sqrt(q.shape[-1])


def weights_of(scores: Any) -> Any:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def masked(seqlens: tuple[int, int], name: str) -> tuple[Any, dict[str, Any]]:
    """Return a mask of the page, and the arguments that replace it."""
    i, j = positions(*seqlens)
    shift = seqlens[1] - seqlens[0]
    masks: dict[str, tuple[Any, dict[str, Any]]] = {
        "top left": (np.tri(*seqlens, dtype=bool), {"causal": True, "q_offset": 0}),
        "bottom right": (np.tri(*seqlens, shift, dtype=bool), {"causal": True}),
        "lengths": ((j < LENGTHS[:, None])[:, None, None], {"seqlens_k": LENGTHS}),
        "window": (abs(i - j) <= 2, {"window_size": (2, 2), "q_offset": 0}),
    }
    return masks[name]


@pytest.mark.parametrize("name", ["top left", "bottom right", "lengths", "window"])
@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_a_mask(name: str, seqlens: tuple[int, int], rng: np.random.Generator) -> None:
    q, k, v, _, _ = arrays(rng, *seqlens).bhsd()
    mask, options = masked(seqlens, name)
    with np.errstate(invalid="ignore"):
        weights = weights_of(np.where(mask, scores_of(q, k), -np.inf))
    # The formula is NaN in rows without a key, which are 0 here.
    weights = np.nan_to_num(weights, nan=0.0)
    expected = weights @ np.repeat(v, HEADS // HEADS_KV, axis=1)
    assert_close(flash_attention(q, k, v, layout="bhsd", **options), expected)
    assert_close(attention_weights(q, k, layout="bhsd", **options), weights)


CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "scale": (lambda scores: scores * 2, {"softmax_scale": 0.5}),
    "softcap": (lambda scores: 3 * np.tanh(scores / 3), {"softcap": 3.0}),
    "function": (
        lambda scores: np.where(scores > 0, scores, 0.5 * scores),
        {"score_mod": ScoreMod(lambda score: np.where(score > 0, score, 0.5 * score))},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_a_change_of_scores(name: str, seqlens: tuple[int, int], rng: np.random.Generator) -> None:
    q, k, v, mask, bias = arrays(rng, *seqlens).bhsd()
    change, options = CHANGES[name]
    scores = np.where(mask, change(scores_of(q, k)) + bias, -np.inf)
    largest = scores.max(axis=-1)
    expected = weights_of(scores) @ np.repeat(v, HEADS // HEADS_KV, axis=1)
    out, lse, max_logits = flash_attention(
        *(q, k, v),
        layout="bhsd",
        mask=mask,
        bias=bias,
        return_lse=True,
        return_max_logits=True,
        **options,
    )
    assert_close(out, expected)
    assert_close(lse, np.log(np.exp(scores - largest[..., None]).sum(axis=-1)) + largest)
    assert_close(max_logits, largest)


def test_a_large_negative_number_is_a_mean(rng: np.random.Generator) -> None:
    q, k, v, mask, _ = arrays(rng, *SEQLENS[0]).bhsd()
    mask[:, :, 5] = False
    scores = np.where(mask, scores_of(q, k), np.float32(-1e9))
    expected = weights_of(scores) @ np.repeat(v, HEADS // HEADS_KV, axis=1)
    mean = np.repeat(v.mean(axis=2), HEADS // HEADS_KV, axis=1)
    assert_close(expected[:, :, 5], mean)
    found = flash_attention(q, k, v, layout="bhsd", mask=mask)
    assert (found[:, :, 5] == 0).all()
    found[:, :, 5] = mean
    assert_close(found, expected)
