"""Mask functions on Hopper: block masks, skipped KV tiles, and visible pairs loaded with K."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES, ModifiedCall
from support.gpu import cupy
from support.gpu.gpu_support import Case

from cupy_flash import MaskMod, flash_attention

pytestmark = pytest.mark.gpu

BATCH = 4
Arrays = dict[str, np.ndarray]


def documents(rng: np.random.Generator, keys: int) -> Arrays:
    return {"doc": np.sort(rng.integers(0, 5, (BATCH, keys)), axis=1).astype(np.int32)}


MASKS: dict[str, tuple[Callable[..., Any], Callable[..., Arrays]]] = {
    "documents": (lambda b, i, j, doc: doc[b, i] == doc[b, j], documents),
    # Every block is partially masked, and the block mask stores the pairs of only some of them.
    "pairs": (
        lambda i, j, seen: seen[i, j],
        lambda rng, keys: {"seen": rng.random((keys, keys)) < 0.3},
    ),
    "heads": (lambda h, i, j: (i * 7 + j * 3 + h) % 5 != 0, lambda rng, keys: {}),
    "few keys": (lambda i, j: (j - i) % 97 == 0, lambda rng, keys: {}),
    "rows without": (lambda i, j: (i % 50 > 20) & (j % 9 < 4), lambda rng, keys: {}),
}
TILES = (
    {"Br": 64, "Bc": 32, "turns": 0},
    {"Br": 64, "Bc": 176, "turns": 0},
    {"Br": 128, "Bc": 160, "q_stages": 1},
    {"Br": 128, "Bc": 96},
    {"Br": 192, "Bc": 16, "q_steps": 0},
    {"Br": 192, "Bc": 96, "q_steps": 0},
    {"Br": 192, "Bc": 64, "q_steps": 0, "turns": 0},
)


# The first case has more query tiles than SMs, so that a thread block processes several. The second
# has so few that the keys are split.
@pytest.mark.parametrize(("batch", "heads", "rows"), [(BATCH, 24, (100, 500)), (1, 2, (40, 200))])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "{Br}x{Bc}".format(**tile))
@pytest.mark.parametrize("name", MASKS)
def test_every_tile_sees_the_pairs_that_the_function_shows(
    name: str,
    tile: dict[str, int],
    batch: int,
    heads: int,
    rows: tuple[int, int],
    rng: np.random.Generator,
) -> None:
    if not Case("hopper", "bfloat16").is_supported():
        pytest.skip("the hopper family does not run here")
    function, arrays_of = MASKS[name]
    seqlen_q = int(rng.integers(*rows))
    seqlen_k = int(rng.integers(seqlen_q, 700))
    captures = arrays_of(rng, seqlen_k)
    lengths = {"q": seqlen_q, "k": seqlen_k, "v": seqlen_k}
    arrays = {
        name: rng.standard_normal((batch, length, heads, 64)).astype(DTYPES["bfloat16"])
        for name, length in lengths.items()
    }
    b, h, i, j = np.ogrid[:batch, :heads, seqlen_k - seqlen_q : seqlen_k, :seqlen_k]
    seen = MaskMod(function, **captures).evaluate(*(x.astype(np.int32) for x in (b, h, i, j)))
    mask = np.broadcast_to(seen, (batch, heads, seqlen_q, seqlen_k))
    options: dict[str, Any] = {"causal": bool(rng.integers(2))}
    call = ModifiedCall("dense", "bfloat16", {**arrays, "mask": mask}, options)
    on_gpu = [cupy.asarray(x) for x in arrays.values()]
    mod = MaskMod(function, **{n: cupy.asarray(x) for n, x in captures.items()})
    # pytest shows this output if the results differ.
    print(call, tile)
    out, lse = flash_attention(
        *on_gpu,
        return_lse=True,
        out=cupy.full(arrays["q"].shape, np.nan, DTYPES["bfloat16"]),
        mask_mod=mod,
        family="hopper",
        tile=tile,
        **options,
    )
    call.compare(cupy.asnumpy(out), cupy.asnumpy(lse))
