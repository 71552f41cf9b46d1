"""Gradients of q, k and v on Hopper if TMA loads the bias, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES, ModifiedCall
from support.gpu import cupy
from support.gpu.hopper_support import marks
from support.gradients.edge_gradients import mask_pairs
from support.gradients.gradient_calls import GradientCall
from support.gradients.gradient_rule import check_gradients, check_repeatedly

from cupy_flash import flash_attention_backward, plan

pytestmark = marks()

# The last tiles of 64 or 128 rows, and of 128 keys, are partial.
BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 300, 328
WHOLE = (BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
DIMS = [64, 96, 128]
CAUSAL: dict[str, Any] = {"causal": True}


def make_call(
    shape: tuple[int, ...] = WHOLE,
    *,
    dtype: str = "bfloat16",
    head_dim: int = 64,
    scores: tuple[int, int, int, int] = WHOLE,
    group: int = 1,
    **options: Any,
) -> GradientCall:
    """Return a call with a bias of this shape that requests the gradients of q, k and v."""
    rng = np.random.default_rng(0)
    batch, heads, seqlen_q, seqlen_k = scores

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(DTYPES[dtype])

    inputs = {
        "q": values(batch, seqlen_q, heads, head_dim),
        "k": values(batch, seqlen_k, heads // group, head_dim),
        "v": values(batch, seqlen_k, heads // group, head_dim),
        "bias": values(*shape),
    }
    dout = values(batch, seqlen_q, heads, head_dim)
    return GradientCall(ModifiedCall("dense", dtype, inputs, options), dout, wrt=("q", "k", "v"))


def check(call: GradientCall, **how: Any) -> dict[str, np.ndarray]:
    """Check that TMA loads the bias, and the gradients of repeated calls; return the gradients."""
    positional, named = call.given(cupy)
    made = plan(flash_attention_backward, *positional, **named, family="hopper", **how)
    assert "bias" in made.schedule.tensor_maps
    return check_repeatedly(call, family="hopper", **how)


@pytest.mark.parametrize("kept", [(1, 1, 1), (0, 1, 1), (1, 0, 1), (0, 0, 1), (1, 1, 0), (0, 0, 0)])
@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bias_may_be_broadcast_and_heads_grouped(
    dtype: str, head_dim: int, options: dict[str, Any], kept: tuple[int, ...]
) -> None:
    axes = (n if is_kept else 1 for n, is_kept in zip(WHOLE[:3], kept, strict=True))
    shape = (*axes, SEQLEN_K)
    check(make_call(shape, dtype=dtype, head_dim=head_dim, group=2, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (100, 30)},
        {"causal": True, "window_size": (40, 0)},
        {"causal": True, "q_offset": -150},
        {"causal": True, "q_offset": 200},
        {"softmax_scale": -0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", DIMS)
def test_other_options(head_dim: int, options: dict[str, Any]) -> None:
    check(make_call(head_dim=head_dim, **options))


@pytest.mark.parametrize("wrt", [("v",), ("q",), ("k",), ("k", "v"), ("q", "k", "v", "bias")])
@pytest.mark.parametrize("head_dim", DIMS)
def test_every_choice_of_gradients(head_dim: int, wrt: tuple[str, ...]) -> None:
    call = make_call(head_dim=head_dim, **CAUSAL)
    call.wrt = wrt
    check_repeatedly(call, family="hopper")


@pytest.mark.parametrize(
    "seqlens", [(1, 8), (1, 200), (64, 64), (65, 72), (128, 128), (129, 136), (700, 40), (5, 904)]
)
@pytest.mark.parametrize("head_dim", DIMS)
def test_few_rows_or_keys(head_dim: int, seqlens: tuple[int, int]) -> None:
    scores = (BATCH, HEADS, *seqlens)
    for options in ({}, CAUSAL):
        check(make_call(scores, scores=scores, head_dim=head_dim, **options))


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("fields", [{}, {"dout_stages": 1}], ids=str)
def test_many_tiles(head_dim: int, fields: dict[str, int]) -> None:
    scores = (1, 8, 1000, 1160)
    tile = {"Br": 128 if head_dim == 64 else 64, "Bc": 128, **fields}
    check(make_call(scores, scores=scores, head_dim=head_dim, group=4), tile=tile)


def test_a_tile_without_memory_for_a_bias_loads_it_when_needed() -> None:
    call, tile = make_call(head_dim=128), {"Br": 64, "Bc": 128, "q_stages": 3}
    check_repeatedly(call, family="hopper", tile=tile)


@pytest.mark.parametrize("head_dim", DIMS)
def test_a_bias_may_mask_pairs(head_dim: int) -> None:
    call = make_call(head_dim=head_dim, **CAUSAL)
    mask_pairs(call.forward.arrays["bias"])
    found = check(call)
    assert not found["q"][:, 7].any()
    assert not found["q"][:, 150:290].any()


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("concealed", [np.nan, np.inf])
def test_masked_elements_and_padding_have_no_effect(head_dim: int, concealed: float) -> None:
    call = make_call(head_dim=head_dim, **CAUSAL)
    rows, keys = np.ogrid[:SEQLEN_Q, :SEQLEN_K]
    padded = np.full((*WHOLE[:3], SEQLEN_K + 8), concealed, DTYPES["bfloat16"])
    visible = call.forward.arrays["bias"]
    padded[..., :SEQLEN_K] = np.where(keys > rows + SEQLEN_K - SEQLEN_Q, concealed, visible)
    positional, named = call.given(cupy)
    named["bias"] = cupy.asarray(padded)[..., :SEQLEN_K]
    found = flash_attention_backward(*positional, **named, family="hopper")
    check_gradients(call, dict(zip("qkv", map(cupy.asnumpy, found), strict=True)))
