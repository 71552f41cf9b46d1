"""The Hopper family on heads of more than 256 columns, which two thread blocks share, on a GPU."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.gpu_sequences import Place, check_kvcache, check_varlen
from support.gpu_support import (
    DTYPES,
    Case,
    check,
    check_all,
    check_captured_call,
    current_device,
    on_gpu,
    random_values,
)
from support.modified_calls import KINDS, random_call
from support.prebuilt import cubins, use_cubins
from support.sequence_support import KVCacheCase, VarlenCase, ragged_lengths

from cupy_flash import flash_attention
from cupy_flash.families import FORWARD
from cupy_flash.families.hopper import HopperTile

__all__ = ["cubins", "use_cubins"]  # fixtures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not Case("hopper", "float16", head_dim=512, head_dim_v=512).is_supported(),
        reason="the hopper family needs sm_90",
    ),
]

# Of the second block all columns are there, or a part of a slab; its queries or values may be none.
DIMS = {
    (512, 512): ("float16", "bfloat16"),
    (576, 512): ("bfloat16",),
    (264, 264): ("float16",),
    (320, 376): ("bfloat16",),
    (512, 8): ("float16",),
    (8, 424): ("bfloat16",),
    (400, 256): ("float16",),
}
# More query tiles than a GPU has room for: each pair of blocks goes on to others.
MANY = Case(
    "hopper",
    "bfloat16",
    133,
    450,
    batch=4,
    heads_q=36,
    heads_kv=12,
    head_dim=512,
    head_dim_v=512,
    causal=True,
)
PROBLEMS, CHUNK = 200, 10


def random_case(draw: random.Random) -> Case:
    dims = draw.choice(list(DIMS))
    seqlen_q, seqlen_k = draw.randint(1, 500), draw.randint(1, 500)
    batch, heads_kv, group = draw.randint(1, 3), draw.randint(1, 2), draw.choice((1, 1, 3))
    kind = draw.random()
    if kind < 0.1:
        seqlen_q = draw.choice((0, 1, 2, 7, 64))
    elif kind < 0.2:
        seqlen_k = draw.randint(1, 9)
    elif kind < 0.3:
        # Split keys.
        seqlen_k, batch, heads_kv = draw.randint(700, 5000), 1, 1
    elif kind < 0.4:
        seqlen_q, batch, heads_kv, group = draw.randint(1, 300), 3, 8, 5
    causal = draw.random() < 0.5
    return Case(
        "hopper",
        draw.choice(DIMS[dims]),
        seqlen_q,
        seqlen_k,
        batch=batch,
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=dims[0],
        head_dim_v=dims[1],
        causal=causal,
        q_offset=draw.randint(-seqlen_q - 9, seqlen_k + 9) if causal and kind < 0.7 else None,
        softmax_scale=draw.choice((None, None, 0.0, draw.uniform(0.01, 0.2))),
        layout=draw.choice(("bshd", "bhsd")),
    )


def random_chunks() -> Iterator[list[Case]]:
    draw = random.Random(576)
    for _ in range(PROBLEMS // CHUNK):
        yield [random_case(draw) for _ in range(CHUNK)]


@pytest.mark.parametrize("cases", list(random_chunks()), ids=lambda _: "chunk")
def test_random_problems_are_right(cases: list[Case]) -> None:
    check_all(cases)


@pytest.mark.parametrize("head_dim", [258, 260, 384, 511])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_rows_that_end_within_a_slab_are_right(head_dim: int, layout: str) -> None:
    # Rows of an odd number of elements, in arrays whose rows begin on 16 bytes.
    check(
        dataclasses.replace(
            MANY, head_dim=head_dim, head_dim_v=head_dim, layout=layout, batch=1, heads_q=12
        )
    )


def tiles() -> Iterator[Case]:
    """Each with as many stages as fit."""
    family, device = FORWARD["hopper"], current_device()
    for start in (MANY, dataclasses.replace(MANY, dtype="float16", head_dim=288, head_dim_v=320)):
        for Br, Bc, q_stages, q_steps, turns in (
            (64, 64, 1, 0, 0),
            (64, 80, 1, 4, 0),
            (64, 32, 2, 2, 0),
            (128, 48, 1, 0, 1),
            (128, 32, 1, 2, 0),
            (128, 16, 1, 0, 1),
        ):
            made = (HopperTile(Br, Bc, n, q_stages, q_steps, turns) for n in range(8, 1, -1))
            problem = start.problem()
            legal = (t for t in made if family.why_not_tile(problem, device, t) is None)
            if tile := next(legal, None):
                yield dataclasses.replace(start, tile=tile)


@pytest.mark.parametrize("case", list(tiles()), ids=str)
def test_other_tiles_than_the_default_are_right(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case", [MANY, dataclasses.replace(MANY, batch=1, heads_q=2, heads_kv=1)], ids=str
)
def test_fifty_calls_give_the_same_bits(case: Case) -> None:
    import cupy

    inputs = on_gpu(random_values(case))
    out = cupy.ndarray(case.shape("out"), DTYPES[case.dtype])
    results = set()
    for _ in range(50):
        out.data.memset_async(0xFF, out.nbytes)
        _, lse = flash_attention(*inputs, out=out, return_lse=True, **case.formula, **case.choice)
        results.add((out.get().tobytes(), lse.get().tobytes()))
    assert len(results) == 1


def test_a_captured_call_replays_on_new_contents() -> None:
    check_captured_call(MANY)


# ---- Sequences and modifications


def random_sequences(seed: int) -> VarlenCase | KVCacheCase:
    draw, rng = random.Random(f"wide {seed}"), np.random.default_rng(seed)
    dims = draw.choice(list(DIMS))
    heads_kv, group = draw.randint(1, 3), draw.choice((1, 2, 4))
    batch = draw.choice((1, 2, 5, 60))
    longest = draw.choice((30, 300, 900)) if batch <= 5 else 60
    common: dict[str, Any] = {
        "dtype": draw.choice(DIMS[dims]),
        "head_dim": dims[0],
        "head_dim_v": dims[1],
        "heads_q": heads_kv * group,
        "heads_kv": heads_kv,
        "causal": draw.random() < 0.6,
        "seed": seed,
    }
    lengths = ragged_lengths(rng, batch, longest)
    if seed % 2:
        seqlens_q = draw.choice((lengths, ragged_lengths(rng, batch, longest)))
        return VarlenCase(seqlens_q, lengths, seqused=draw.random() < 0.4, **common)
    seqlen_q = draw.choice((1, 17, 100, 300) if batch <= 5 else (1, 9, 70))
    seqlen_new = draw.choice((0, seqlen_q, 3))
    return KVCacheCase(lengths, seqlen_q=seqlen_q, seqlen_new=seqlen_new, **common)


@pytest.mark.parametrize("seed", range(40))
def test_random_sequences_are_right(seed: int) -> None:
    case = random_sequences(seed)
    if isinstance(case, VarlenCase):
        check_varlen(Place("hopper"), case)
    else:
        check_kvcache(Place("hopper"), case)


@pytest.mark.parametrize("seed", range(40))
def test_random_modifications_are_right(seed: int) -> None:
    import cupy

    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(["float16", "bfloat16"]))
    kind = str(rng.choice([kind for kind in KINDS if kind != "paged"]))
    call = random_call(rng, dtype, kind, few_rows=False, head_dims=(264, 320, 512))
    call.check(cupy, family="hopper")
