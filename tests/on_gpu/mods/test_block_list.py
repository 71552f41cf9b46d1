"""`BlockList` masks on a GPU, against the reference with the same visible pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES, ModifiedCall
from support.gpu import cupy
from support.gpu.gpu_support import Case

from cupy_flash import BlockList, flash_attention

pytestmark = pytest.mark.gpu

BATCH, HEADS = 2, 4
# Tile sizes that divide all, some or none of the mask's block sizes below.
TILES: dict[str, list[dict[str, int] | None]] = {
    "hopper": [None, {"Br": 128, "Bc": 64}, {"Br": 192, "Bc": 48}],
    "mma": [None],
    "decode": [None],
}


def pairs(
    blocks: np.ndarray, block: tuple[int, int], seqlens: tuple[int, int], q_offset: int
) -> np.ndarray:
    """Return which pairs are visible, shape (batch or 1, heads or 1, seqlen_q, seqlen_k)."""
    places = np.arange(seqlens[0]) + q_offset, np.arange(seqlens[1])
    rows, keys = (
        np.clip(at // size, 0, count - 1)
        for at, size, count in zip(places, block, blocks.shape[2:], strict=True)
    )
    return blocks[:, :, rows[:, None], keys]


@pytest.mark.parametrize("block", [(64, 64), (128, 96), (192, 48), (100, 70), (1, 33)], ids=str)
@pytest.mark.parametrize("family", TILES)
def test_it_is_right_whether_or_not_tiles_divide_its_blocks(
    family: str, block: tuple[int, int], rng: np.random.Generator
) -> None:
    if not Case(family, "bfloat16").is_supported():
        pytest.skip(f"the {family} family does not run here")
    for tile in TILES[family]:
        seqlen_q = 3 if family == "decode" else int(rng.integers(300, 800))
        seqlen_k = int(rng.integers(seqlen_q, 900))
        q_offset = int(rng.choice([seqlen_k - seqlen_q, 64, 0, -70]))
        axes = (int(rng.choice([1, BATCH])), int(rng.choice([1, HEADS])))
        # The blocks may cover fewer rows and keys than the inputs have.
        counts = (int(rng.integers(1, 1 + -(-900 // size))) for size in block)
        blocks = rng.random((*axes, *counts)) < 0.4
        shapes = {
            "q": (BATCH, seqlen_q, HEADS, 64),
            "k": (BATCH, seqlen_k, HEADS // 2, 64),
            "v": (BATCH, seqlen_k, HEADS // 2, 64),
        }
        arrays = {n: rng.standard_normal(s).astype(DTYPES["bfloat16"]) for n, s in shapes.items()}
        options: dict[str, Any] = {"causal": bool(rng.integers(2)), "q_offset": q_offset}
        mask = pairs(blocks, block, (seqlen_q, seqlen_k), q_offset)
        call = ModifiedCall("dense", "bfloat16", {**arrays, "mask": mask}, options)
        # pytest shows this output if the results differ.
        print(call, blocks.shape, tile)
        out, lse = flash_attention(
            *(cupy.asarray(x) for x in arrays.values()),
            return_lse=True,
            mask_mod=BlockList(cupy.asarray(blocks), block),
            family=family,
            tile=tile,
            **options,
        )
        call.compare(cupy.asnumpy(out), cupy.asnumpy(lse))
