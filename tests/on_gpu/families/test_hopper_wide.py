"""The Hopper family with head dims above 256, which two thread blocks split, on a GPU."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import KINDS, random_call
from support.calls.sequence_support import KVCacheCase, VarlenCase, ragged_lengths
from support.gpu import cupy
from support.gpu.gpu_sequences import Target, check_sequences
from support.gpu.gpu_support import Case, check, check_all, check_captured_call, check_same_bits
from support.gpu.hopper_support import marks, random_chunks, tiled
from support.prebuilt import cubins, use_cubins

__all__ = ["cubins", "use_cubins"]  # fixtures

pytestmark = marks(head_dim=512)

# The second thread block has as many columns as the first, fewer, or no query columns. Each entry
# has one dtype, and only the first has few rows or split keys, to limit the number of kernels.
DIMS = {(512, 512): "bfloat16", (576, 512): "float16", (264, 264): "float16", (8, 424): "bfloat16"}
# There are more query tiles than pairs of SMs, so each pair of thread blocks processes several.
MANY = Case("hopper", "bfloat16", 133, 250, 3, 24, 12, 512, 512, causal=True)
PROBLEMS, CHUNK = 200, 20


def random_case(draw: random.Random) -> Case:
    dims = draw.choice(list(DIMS))
    seqlen_q, seqlen_k = draw.randint(65, 200), draw.randint(1, 270)
    batch, heads_kv, group = draw.randint(2, 3), draw.randint(5, 6), draw.choice((2, 3))
    kind = draw.random()
    if kind < 0.1 and dims == (512, 512):
        seqlen_q = draw.choice((1, 2, 7, 64))
    elif kind < 0.2:
        seqlen_k = draw.randint(1, 9)
    elif kind < 0.35 and dims == (512, 512):
        # With these sizes, the keys are split.
        seqlen_k, batch, heads_kv, group = draw.randint(700, 3000), 1, 1, draw.choice((1, 2))
    elif kind < 0.5:
        # These sizes have more query tiles than a GPU has pairs of SMs.
        seqlen_q, seqlen_k, batch, heads_kv, group = draw.randint(65, 140), 70, 3, 8, 3
    causal = draw.random() < 0.5
    return Case(
        "hopper",
        *(DIMS[dims], seqlen_q, seqlen_k, batch, heads_kv * group, heads_kv, *dims, causal),
        q_offset=draw.randint(-seqlen_q - 9, seqlen_k + 9) if causal and kind > 0.5 else None,
        softmax_scale=draw.choice((None, None, 0.0, draw.uniform(0.01, 0.2))),
        layout=draw.choice(("bshd", "bhsd")),
    )


@pytest.mark.parametrize(
    "cases", random_chunks(random_case, 576, problems=PROBLEMS, chunk=CHUNK), ids=lambda _: "chunk"
)
def test_random_problems_are_right(cases: list[Case]) -> None:
    check_all(cases)


def test_rows_that_end_within_a_slab_are_right() -> None:
    # The rows have an odd number of elements, and start at multiples of 16 bytes.
    check(dataclasses.replace(MANY, head_dim=511, head_dim_v=259, layout="bhsd"))


TILES = (
    {"Br": 64, "Bc": 80, "q_stages": 1, "q_steps": 4},
    {"Br": 64, "Bc": 32, "q_stages": 2, "q_steps": 2},
    {"Br": 128, "Bc": 48, "q_stages": 1, "q_steps": 0, "turns": 0},
)


@pytest.mark.parametrize("case", list(tiled(MANY, TILES)), ids=str)
def test_other_tiles_than_the_default_are_right(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case", [MANY, dataclasses.replace(MANY, batch=1, heads_q=2, heads_kv=1)], ids=str
)
def test_fifty_calls_give_the_same_bits(case: Case) -> None:
    check_same_bits(case, 50)


def test_a_captured_call_replays_on_new_contents() -> None:
    check_captured_call(MANY)


# ---- Sequences and modifications


def random_sequences(seed: int) -> VarlenCase | KVCacheCase:
    draw, rng = random.Random(f"wide {seed}"), np.random.default_rng(seed)
    heads_kv, group = draw.randint(1, 3), draw.choice((1, 2, 4))
    batch = draw.choice((2, 5, 60))
    common: dict[str, Any] = {
        "dtype": "float16",
        "head_dim": 576,
        "head_dim_v": 512,
        "heads_q": heads_kv * group,
        "heads_kv": heads_kv,
        "causal": draw.random() < 0.6,
        "seed": seed,
    }
    lengths = ragged_lengths(rng, batch, draw.choice((300, 600)) if batch <= 5 else 60)
    if seed % 2:
        seqlens_q = draw.choice((lengths, ragged_lengths(rng, batch, max(lengths))))
        return VarlenCase(seqlens_q, lengths, seqused=draw.random() < 0.4, **common)
    seqlen_q = draw.choice((100, 200) if batch <= 5 else (9, 70))
    return KVCacheCase(lengths, seqlen_q=seqlen_q, seqlen_new=draw.choice((0, 3)), **common)


@pytest.mark.parametrize("seed", range(16))
def test_random_sequences_are_right(seed: int) -> None:
    check_sequences(Target("hopper"), random_sequences(seed))


@pytest.mark.parametrize("seed", range(8))
def test_random_modifications_are_right(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(["float16", "bfloat16"]))
    kind = str(rng.choice([kind for kind in KINDS if kind != "paged"]))
    call = random_call(rng, dtype, kind, few_rows=False, head_dims=(264, 512))
    call.check(cupy, family="hopper")
