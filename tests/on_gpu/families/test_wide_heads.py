"""Head dims above 256 against the reference, in every family that supports them, on a GPU."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import KINDS, random_call
from support.calls.sequence_support import KVCacheCase, VarlenCase, ragged_lengths
from support.gpu import cupy
from support.gpu.gpu_sequences import ON_GPU, Target, check_sequences, kvcache, varlen
from support.gpu.gpu_sequences import of_cases as of_sequences
from support.gpu.gpu_support import DTYPES, Case, check, current_device, naming
from support.gradients.gradient_calls import KINDS as GRADIENT_KINDS
from support.gradients.gradient_calls import random_gradient_call
from support.gradients.gradient_rule import check_gradients

from cupy_flash.families import FORWARD
from cupy_flash.families.mma.forward import MmaTile

pytestmark = pytest.mark.gpu

# (head_dim, head_dim_v) of global layers, of MLA, of other sizes, and with only one above 256.
WIDE = [(257, 257), (288, 320), (320, 288), (384, 384), (512, 512), (576, 512), (576, 576)]
WIDE += [(64, 512), (512, 33), (300, 513)]
WIDE_GRADIENTS = (264, 320, 512, 576)
FAMILIES = list(FORWARD)
DENSE = [
    Case(
        family,
        dtype,
        (77, 200, 1)[index % 3],
        (333, 150, 1000)[index % 3],
        head_dim=dim,
        head_dim_v=dim_v,
        causal=causal,
    )
    for family in FAMILIES
    for index, (dim, dim_v) in enumerate(WIDE)
    # Each entry has one dtype and mask, because each takes long to compile.
    for dtype, causal in [(list(DTYPES)[index % len(DTYPES)], index % 3 == 0)]
]


@pytest.mark.parametrize("case", [case for case in DENSE if case.is_supported()], ids=str)
def test_wide_heads_are_right(case: Case) -> None:
    check(case)


TILES = [MmaTile(64, 64, warps=8), MmaTile(64, 32, warps=8, stages=3), MmaTile(32, 64)]
TILES += [MmaTile(32, 32), MmaTile(16, 32, warps=2), MmaTile(64, 32)]
TILED = [
    (tile, *dims)
    for dims in ((512, 512), (576, 384), (512, 192))
    for tile in TILES
    # With this tile a warp holds all columns of its rows, but lacks registers for 512 of them.
    if dims != (512, 512) or tile != MmaTile(64, 32)
]


@pytest.mark.parametrize(("tile", "head_dim", "head_dim_v"), TILED, ids=str)
def test_any_tile_of_mma_is_right(tile: MmaTile, head_dim: int, head_dim_v: int) -> None:
    for dtype, causal in (("float16", False), ("bfloat16", True)):
        case = Case(
            "mma",
            dtype,
            131,
            270,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            causal=causal,
            tile=tile,
        )
        if reason := FORWARD["mma"].why_not_tile(case.problem(), current_device(), tile):
            # Some GPUs have less shared memory than the tile needs.
            assert "shared memory" in reason
            pytest.skip(reason)
        check(case)


# ---- Random problems

# The kernels of a test's problems differ only in the tile.
PROBLEMS, CALLS = 1000, 40


def draw(test: int, number: int) -> tuple[str, int, Case | VarlenCase | KVCacheCase]:
    """Return a family, the alignment of rows in bytes, and a problem."""
    rng = np.random.default_rng([zlib.crc32(b"wide"), test])
    sizes = np.random.default_rng([zlib.crc32(b"wide"), test, number])
    family = str(rng.choice(["mma", "mma", "decode", "simt"]))
    dtypes = ["float32", "float32", "float64"] if family == "simt" else ["float16", "bfloat16"]
    dtype = str(rng.choice(dtypes))
    ragged = tuple(int(dim) for dim in rng.integers(257, 577, 2))
    usual = WIDE[rng.integers(len(WIDE))]
    head_dim, head_dim_v = ragged if rng.random() < 0.4 else usual
    alignment = int(rng.choice([a for a in (16, 16, 8, 4, 2) if a >= DTYPES[dtype].itemsize]))
    heads_kv, group = int(sizes.integers(1, 4)), int(rng.choice([1, 2, 4]))
    most_q = 3 if family == "decode" else 150
    common: dict[str, Any] = {
        "dtype": dtype,
        "heads_q": heads_kv * group,
        "heads_kv": heads_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "causal": bool(rng.random() < 0.5),
        "softmax_scale": None if rng.random() < 0.7 else float(sizes.uniform(0.01, 0.2)),
    }
    kind = str(rng.choice(["dense", "dense", "varlen", "kvcache"]))
    if kind == "dense":
        seqlen_q, seqlen_k = int(sizes.integers(1, most_q)), int(sizes.integers(1, 300))
        offset_drawn = common["causal"] and sizes.random() < 0.5
        return (
            family,
            alignment,
            Case(
                family,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                batch=int(sizes.integers(1, 4)),
                q_offset=int(sizes.integers(-seqlen_q - 9, seqlen_k + 9)) if offset_drawn else None,
                layout=str(sizes.choice(["bshd", "bhsd"])),
                alignment=alignment,
                **common,
            ),
        )
    common |= {"page_size": int(rng.choice([0, 1, 16])), "seed": int(sizes.integers(2**32))}
    lengths = ragged_lengths(sizes, 4, 250)
    if kind == "varlen":
        return family, alignment, VarlenCase(ragged_lengths(sizes, 4, most_q), lengths, **common)
    seqlen_q = int(sizes.integers(1, most_q))
    new = int(sizes.integers(1, 4)) if rng.random() < 0.5 else 0
    return family, alignment, KVCacheCase(lengths, seqlen_q=seqlen_q, seqlen_new=new, **common)


@pytest.mark.parametrize("test", range(PROBLEMS // CALLS))
def test_random_problems_are_right(test: int) -> None:
    for number in range(CALLS):
        family, alignment, case = draw(test, number)
        with naming(f"problem {number}, {family} alignment {alignment} {case}"):
            if isinstance(case, Case):
                check(case)
            else:
                check_sequences(Target(family), case, alignment)


@pytest.mark.parametrize("alignment", [2, 4, 8])
def test_wide_rows_of_any_alignment_are_right(alignment: int) -> None:
    for family, layout in itertools.product(("mma", "simt"), ("bshd", "bhsd")):
        dims = {"head_dim": 320, "head_dim_v": 515}
        check(Case(family, "bfloat16", 100, 170, layout=layout, alignment=alignment, **dims))


@pytest.mark.parametrize("test", range(4))
def test_modified_wide_heads_are_right(test: int) -> None:
    for seed in range(2 * test, 2 * test + 2):
        rng = np.random.default_rng([zlib.crc32(b"wide"), seed])
        family = str(rng.choice(["mma", "mma", "simt", "any"]))
        dtypes = ["float16", "bfloat16"] if family == "mma" else list(DTYPES)
        call = random_call(
            rng,
            str(rng.choice(dtypes)),
            str(rng.choice(["dense", *KINDS])),
            few_rows=bool(rng.integers(4) == 0),
            head_dims=(264, 320, 512, 576),
        )
        call.check(cupy, family=None if family == "any" else family)


@pytest.mark.parametrize("target", ON_GPU, ids=str)
@of_sequences(
    varlen(dtype=dtype, head_dim=dim, head_dim_v=dim_v, causal=causal)
    for dtype, dim, dim_v, causal in (
        ("bfloat16", 512, 512, True),
        ("float16", 576, 512, False),
        ("float32", 320, 400, True),
        ("float64", 512, 512, True),
    )
)
def test_packed_wide_heads_are_right(target: Target, case) -> None:
    check_sequences(target, case)


@pytest.mark.parametrize("target", ON_GPU, ids=str)
@of_sequences(
    kvcache(
        dtype=dtype,
        head_dim=dim,
        head_dim_v=dim_v,
        seqlen_q=seqlen_q,
        seqlen_new=seqlen_q,
        page_size=page_size,
        causal=True,
        rotary_dim=rotary_dim,
    )
    for dtype, dim, dim_v, page_size, seqlen_q, rotary_dim in (
        ("bfloat16", 512, 512, 16, 1, 512),
        ("bfloat16", 512, 512, 64, 40, 512),
        ("float16", 576, 512, 3, 2, 64),
        ("float16", 576, 576, 0, 70, 576),
        ("float32", 320, 320, 16, 5, 320),
        ("float64", 512, 512, 0, 3, 512),
    )
)
@pytest.mark.parametrize("num_splits", [0, 3])
def test_cached_wide_heads_are_right(target: Target, case, num_splits: int) -> None:
    check_sequences(target, case, num_splits=num_splits)


@pytest.mark.parametrize("test", range(4))
def test_gradients_of_wide_heads_are_right(test: int) -> None:
    for number in range(2):
        rng = np.random.default_rng([zlib.crc32(b"wide"), test])
        sizes = np.random.default_rng([test, number])
        dtype, kind = list(DTYPES)[test % 4], str(rng.choice(GRADIENT_KINDS))
        call = random_gradient_call(rng, dtype, kind, head_dims=WIDE_GRADIENTS, sizes=sizes)
        check_gradients(call, call.run(cupy))
