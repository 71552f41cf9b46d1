"""Biases that TMA loads along with the keys on Hopper, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES, ModifiedCall
from support.gpu import cupy
from support.gpu.hopper_support import marks

from cupy_flash import flash_attention, plan

pytestmark = marks()

# Some tiles let the consumer warpgroups drift apart, and some have little work per KV tile.
TILES: list[dict[str, int] | None] = [
    None,
    {"Br": 192, "Bc": 64, "turns": 0, "q_stages": 1, "q_steps": 0},
    {"Br": 192, "Bc": 32, "turns": 0, "q_stages": 1, "q_steps": 0},
    {"Br": 192, "Bc": 48},
    {"Br": 128, "Bc": 48, "turns": 0},
    {"Br": 64, "Bc": 128},
]


def on_gpu(bias: np.ndarray) -> Any:
    """Return the bias with rows that start at multiples of 16 bytes, and NaN after each row."""
    *shape, columns = bias.shape
    padded = cupy.full((*shape, -(-columns // 8) * 8 + 8), np.nan, bias.dtype)
    padded[..., :columns] = cupy.asarray(bias)
    return padded[..., :columns]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_it_is_right_whatever_the_tile_and_which_axes_share_it(
    dtype: str, head_dim: int, tile: dict[str, int] | None, rng: np.random.Generator
) -> None:
    real = DTYPES[dtype]
    for _ in range(3):
        batch, heads_kv = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        heads_q = heads_kv * int(rng.integers(1, 3))
        seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, 700, 2))
        shapes = {
            "q": (batch, seqlen_q, heads_q, head_dim),
            "k": (batch, seqlen_k, heads_kv, head_dim),
            "v": (batch, seqlen_k, heads_kv, head_dim),
        }
        of_pairs = (batch, heads_q, seqlen_q)
        axes = tuple(1 if rng.integers(3) == 0 else n for n in of_pairs)
        arrays = {name: rng.standard_normal(shape).astype(real) for name, shape in shapes.items()}
        bias = rng.standard_normal((*axes, seqlen_k)).astype(real)
        options = {"causal": bool(rng.integers(2))}
        call = ModifiedCall("dense", dtype, {**arrays, "bias": bias}, options)
        q, k, v = (cupy.asarray(x) for x in arrays.values())
        how: dict[str, Any] = {"family": "hopper", "tile": tile, "bias": on_gpu(bias)}
        made = plan(flash_attention, q, k, v, **options, **how)
        assert list(made.schedule.tensor_maps) == ["q", "k", "v", "bias"]
        # A race would show in few calls only, so the call is repeated.
        results = set()
        for _ in range(5):
            out, lse = flash_attention(q, k, v, return_lse=True, **options, **how)
            results.add(out.tobytes() + lse.tobytes())
        assert len(results) == 1
        call.compare(cupy.asnumpy(out), cupy.asnumpy(lse))
