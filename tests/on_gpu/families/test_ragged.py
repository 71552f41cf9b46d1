"""Random varlen and KV-cache calls, with and without pages, in each family that supports them.

`test_decode.py` does the same for few query rows over many keys.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.calls.sequence_support import KVCacheCase, VarlenCase, ragged_lengths
from support.gpu.gpu_sequences import CPU, SIXTEEN_BIT, Target, check_sequences, cubins
from support.prebuilt import use_cubins

from cupy_flash.problem.arrays import DTYPES

__all__ = ["cubins", "use_cubins"]  # fixtures

# Parameters that each family supports; a case that the family refuses would test nothing.
TAKES: dict[str, dict[str, Any]] = {
    "hopper": {"dtypes": SIXTEEN_BIT, "page_sizes": (0,), "splits": (0, 1)},
    "mma": {"dtypes": (*SIXTEEN_BIT, "float32")},
    "simt": {},
    "chosen": {},
    "cpu": {},
}
DIMS = ((64, 64), (128, 128), (40, 96), (192, 128), (256, 256))
COUNT = {"cpu": 20, "hopper": 100}
USUAL_COUNT = 80


def random_case(
    draw: random.Random,
    *,
    dtypes: tuple[str, ...] = DTYPES,
    page_sizes: tuple[int, ...] = (0, 0, 1, 16, 48, 128),
    splits: tuple[int, ...] = (0, 0, 1, 2, 3, 7),
) -> tuple[VarlenCase | KVCacheCase, int]:
    """Return a case and its number of KV splits."""
    dtype = draw.choice(dtypes)
    # The `mma` family supports float32 up to head_dim 128.
    dims = DIMS[:3] if dtype == "float32" or draw.random() < 0.6 else DIMS
    head_dim, head_dim_v = draw.choice(dims)
    heads_kv, group = draw.randint(1, 3), draw.choice((1, 2, 4, 5))
    page_size = draw.choice(page_sizes)
    common: dict[str, Any] = {
        "dtype": dtype,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "heads_q": heads_kv * group,
        "heads_kv": heads_kv,
        "causal": draw.random() < 0.6,
        "softmax_scale": draw.choice((None, None, None, 0.0, -0.2, draw.uniform(0.01, 1))),
        "page_size": page_size,
        "seed": draw.randrange(2**32),
    }
    rng = np.random.default_rng(draw.randrange(2**32))
    batch = draw.choice((1, 2, 5, 30, 150))
    longest = draw.choice((30, 300, 1500) if batch <= 5 else (3, 50, 200))
    lengths = ragged_lengths(rng, batch, longest)
    num_splits = draw.choice(splits)
    if draw.random() < 0.6:
        seqlens_q = draw.choice((lengths, ragged_lengths(rng, batch, longest)))
        return VarlenCase(seqlens_q, lengths, seqused=draw.random() < 0.4, **common), num_splits
    seqlen_q = draw.choice((1, 2, 17, 100, 300) if batch <= 5 else (1, 9, 70))
    seqlen_new = draw.choice((0, seqlen_q, 3))
    case = KVCacheCase(
        lengths,
        seqlen_q=seqlen_q,
        seqlen_new=seqlen_new,
        rotary_dim=draw.choice((0, 32)) if seqlen_new else 0,
        rotary_interleaved=draw.random() < 0.5,
        indexed=not page_size and draw.random() < 0.5,
        **common,
    )
    return case, num_splits


def draws() -> Iterator[Any]:
    for name, takes in TAKES.items():
        draw = random.Random(f"ragged {name}")
        target = CPU if name == "cpu" else Target(name)
        marks = [pytest.mark.gpu] if target.is_gpu else []
        for index in range(COUNT.get(name, USUAL_COUNT)):
            yield pytest.param(
                target, *random_case(draw, **takes), id=f"{name}-{index}", marks=marks
            )


@pytest.mark.parametrize(("target", "case", "num_splits"), list(draws()))
def test_random_sequences_are_right(
    target: Target, case: VarlenCase | KVCacheCase, num_splits: int
) -> None:
    check_sequences(target, case, num_splits=num_splits)
