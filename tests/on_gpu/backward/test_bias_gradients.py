"""Gradients of biases on a GPU, with several tiles of each kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES, ModifiedCall
from support.gpu import cupy
from support.gradients.edge_gradients import mask_pairs
from support.gradients.gradient_calls import GradientCall
from support.gradients.gradient_rule import check_repeatedly

from cupy_flash.families.hopper import bias_gradients

pytestmark = pytest.mark.gpu

# The last tiles of 128 rows and keys are partial, and the last cluster of two has rows for one
# only.
BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 300, 328
WHOLE = (BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
CAUSAL = {"causal": True}


def make_call(
    shape: tuple[int, ...] = WHOLE,
    *,
    dtype: str = "bfloat16",
    bias_dtype: str | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    scores: tuple[int, int, int, int] = WHOLE,
    group: int = 1,
    seed: int = 0,
    **options: Any,
) -> GradientCall:
    """Return a call that requests the gradient of a bias of this shape."""
    rng = np.random.default_rng(seed)
    batch, heads, seqlen_q, seqlen_k = scores
    dim_v = head_dim_v or head_dim

    def values(*shape: int, dtype: str = dtype) -> np.ndarray:
        return rng.standard_normal(shape).astype(DTYPES[dtype])

    inputs = {
        "q": values(batch, seqlen_q, heads, head_dim),
        "k": values(batch, seqlen_k, heads // group, head_dim),
        "v": values(batch, seqlen_k, heads // group, dim_v),
        "bias": values(*shape, dtype=bias_dtype or dtype),
    }
    call = GradientCall(
        ModifiedCall("dense", dtype, inputs, options), values(batch, seqlen_q, heads, dim_v)
    )
    call.wrt = ("bias",)
    return call


@pytest.mark.parametrize("kept", list(np.ndindex(2, 2, 2, 2)))
@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
def test_a_bias_of_several_tiles_may_be_broadcast(
    kept: tuple[int, ...], options: dict[str, Any]
) -> None:
    shape = tuple(n if is_kept else 1 for n, is_kept in zip(WHOLE, kept, strict=True))
    check_repeatedly(make_call(shape, group=2, **options))


@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (256, 256), (96, 80), (192, 128), (128, 64), (24, 200), (16, 16)]
)
@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
def test_every_number_of_columns(dims: tuple[int, int], options: dict[str, Any]) -> None:
    dim, dim_v = dims
    shape = (1, HEADS, SEQLEN_Q, SEQLEN_K)
    check_repeatedly(make_call(shape, head_dim=dim, head_dim_v=dim_v, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (100, 30)},
        {"causal": True, "window_size": (40, 0)},
        {"causal": True, "softcap": 5.0},
        {"causal": True, "q_offset": -150},
        {"causal": True, "q_offset": 200},
        {"softmax_scale": -0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masks_and_changes_of_scores(dtype: str, options: dict[str, Any]) -> None:
    check_repeatedly(make_call((HEADS, SEQLEN_Q, SEQLEN_K), dtype=dtype, **options))
    check_repeatedly(make_call((BATCH, 1, 1, SEQLEN_K), dtype=dtype, **options))


@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("grad_dtype", [None, "float32"])
@pytest.mark.parametrize("seqlen_k", [SEQLEN_K, 333, 330])
def test_every_dtype_and_alignment_of_a_bias(
    bias_dtype: str, grad_dtype: str | None, seqlen_k: int
) -> None:
    scores = (BATCH, HEADS, SEQLEN_Q, seqlen_k)
    call = make_call((1, *scores[1:]), bias_dtype=bias_dtype, scores=scores, causal=True)
    call.grad_dtype = grad_dtype
    check_repeatedly(call)


@pytest.mark.parametrize("seqlens", [(1, 1), (1, 200), (128, 128), (129, 64), (700, 40), (5, 900)])
def test_few_rows_or_keys(seqlens: tuple[int, int]) -> None:
    scores = (BATCH, HEADS, *seqlens)
    check_repeatedly(make_call((HEADS, *seqlens), scores=scores))
    check_repeatedly(make_call((HEADS, *seqlens), scores=scores, causal=True))


def test_many_more_tiles_than_thread_blocks() -> None:
    scores = (2, 48, 600, 520)
    check_repeatedly(make_call(scores, scores=scores, causal=True, head_dim=32))
    check_repeatedly(make_call(scores[1:], scores=scores, head_dim=32))


@pytest.mark.parametrize("kept", [(0, 0, 1, 1), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 0, 0)])
def test_sums_of_more_tiles_than_a_run(
    kept: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One thread block adds all score tiles of a gradient tile: 72 or more, so there are several
    # runs.
    monkeypatch.setattr(bias_gradients, "_ITEMS_PER_SM", 0)
    scores = (3, 24, 150, 136)
    shape = tuple(n if is_kept else 1 for n, is_kept in zip(scores, kept, strict=True))
    call = make_call(shape, scores=scores, head_dim=32)
    call.grad_dtype = "float32"
    check_repeatedly(call)


def test_a_bias_may_mask_pairs() -> None:
    call = make_call((1, HEADS, SEQLEN_Q, SEQLEN_K), causal=True)
    mask_pairs(call.forward.arrays["bias"])
    found = check_repeatedly(call)["bias"]
    assert not found[:, :, 150:290].any()


def test_nan_in_dout_stays_in_its_row() -> None:
    call = make_call((BATCH, HEADS, SEQLEN_Q, SEQLEN_K), **CAUSAL)
    expected = check_repeatedly(call)["bias"]
    position = 30 + SEQLEN_K - SEQLEN_Q
    call.dout[0, 30, 2] = np.nan
    found = call.run(cupy)["bias"]
    assert np.isnan(found[0, 2, 30, : position + 1]).all()
    found[0, 2, 30], expected[0, 2, 30] = 0, 0
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
