"""Arguments of `jax.nn.dot_product_attention` and of Flax, and their counterparts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.pages.migration import SEQLENS, arrays, assert_close, positions

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")

LENGTHS = np.array([9, 6], np.int32)
ROWS = ("causal", "mask", "bias", "scale", "window", "causal window", "one bound", "lengths")


def rows(rng: np.random.Generator, seqlens: tuple[int, int]) -> dict[str, tuple[Any, Any]]:
    """Return arguments of JAX's function, with those of `flash_attention`, by row."""
    mask, bias = arrays(rng, *seqlens)[3:]
    return {
        "causal": ({"is_causal": True}, {"causal": True, "q_offset": 0}),
        "mask": ({"mask": mask}, {"mask": mask}),
        "bias": ({"bias": bias}, {"bias": bias}),
        "scale": ({"scale": 0.7}, {"softmax_scale": 0.7}),
        "window": ({"local_window_size": (3, 2)}, {"window_size": (3, 2), "q_offset": 0}),
        "causal window": (
            {"local_window_size": (3, 2), "is_causal": True},
            {"window_size": (3, 2), "causal": True, "q_offset": 0},
        ),
        "one bound": ({"local_window_size": 3}, {"window_size": (3, 3), "q_offset": 0}),
        "lengths": ({"key_value_seq_lengths": LENGTHS}, {"seqlens_k": LENGTHS}),
    }


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_an_argument(name: str, seqlens: tuple[int, int], rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, *seqlens)[:3]
    theirs, ours = rows(rng, seqlens)[name]
    expected, residual = jax.nn.dot_product_attention(q, k, v, return_residual=True, **theirs)
    found, lse = cj.flash_attention(q, k, v, return_lse=True, **ours)
    # Rows without a key are the mean of all values in JAX.
    seen = np.isfinite(np.asarray(lse)).swapaxes(1, 2)
    assert_close(found, expected, rows=seen)
    assert_close(lse.swapaxes(1, 2), residual, rows=seen)
    means = np.repeat(v.mean(axis=1, keepdims=True), q.shape[2] // v.shape[2], axis=2)
    assert_close(np.broadcast_to(means, q.shape), expected, rows=~seen)
    assert not np.asarray(found)[~seen].any()
    assert (np.asarray(residual)[~seen] < -1e30).all()


def test_the_end_of_a_cache(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, *SEQLENS[0])[:3]
    i, j = positions(*SEQLENS[0])
    mask = (j <= i + 10)[None, None]
    found = cj.flash_attention(q, k, v, causal=True)
    assert_close(found, jax.nn.dot_product_attention(q, k, v, mask=mask))


@pytest.mark.parametrize("name", ["bias", "mask", "numbers", "half"])
def test_an_argument_of_flax(name: str, rng: np.random.Generator) -> None:
    linen = pytest.importorskip("flax.linen")
    q, k, v, mask, bias = arrays(rng, *SEQLENS[0])
    q = q[:, :, : k.shape[2]]  # Flax's function has no grouped-query heads.
    mask, bias = mask[:, : k.shape[2]], bias[:, : k.shape[2]]
    rows: dict[str, tuple[Any, Any]] = {
        "bias": ({"bias": bias}, {"bias": bias}),
        "mask": ({"mask": mask}, {"mask": mask}),
        "numbers": ({"mask": mask.astype(np.float32)}, {"mask": mask}),
        "half": ({"dtype": np.float32, "deterministic": True, "dropout_rate": 0.5}, {}),
    }
    theirs, ours = rows[name]
    expected = linen.dot_product_attention(q, k, v, **theirs)
    assert_close(cj.flax_attention(q, k, v, **theirs), expected)
    assert_close(cj.flash_attention(q, k, v, **ours), expected)
