"""Tests that kernels with modifications compile for all architectures and spill few registers."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import MaskMod, Plan, ScoreMod, flash_attention, plan
from cupy_flash import flash_attention_varlen as varlen
from cupy_flash import flash_attention_with_kvcache as with_kvcache
from cupy_flash.gpu.compiler import compile_cubin, known_architectures
from cupy_flash.problem.device import device_for_arch

SEQLEN, HEADS = 2048, 4
DTYPES = {"bfloat16": ml_dtypes.bfloat16}


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    # Its contents do not matter, so it is a broadcast scalar, which takes no memory.
    return np.broadcast_to(np.zeros((), dtype), shape)


DOCUMENTS = MaskMod(
    lambda b, i, j, doc: doc[b, i] == doc[b, j], doc=np.zeros((1, SEQLEN), np.int32)
)
TABLE = ScoreMod(
    lambda score, h, i, j, table: score + table[h, np.clip(i - j, -64, 64) + 64],
    table=np.zeros((HEADS, 129), np.float32),
)
BIAS = np.empty((1, HEADS, SEQLEN, SEQLEN), DTYPES["bfloat16"])
PREFIX = {"window_size": (255, 64), "prefix_lens": array(1, dtype=np.int32)}
LENGTHS = array(1, dtype=np.int32)
OFFSETS = {"window_size": (255, 64), "q_offset": array(1, dtype=np.int32)}
# Tuples of family, architecture, dtype, head_dim, queries, limit of spilled bytes, modifications.
# If KV is split and scores are changed, a split's log-sum-exp is a pair of numbers, and Hopper
# units spill two words.
UNITS = [
    ("hopper", "sm_90", "bfloat16", 64, SEQLEN, 8, {"window_size": (1023, 0), "softcap": 30.0}),
    ("hopper", "sm_90", "bfloat16", 64, SEQLEN, 8, {"softcap": 50.0}),
    ("hopper", "sm_90", "bfloat16", 128, SEQLEN, 8, {"softcap": 50.0}),
    ("hopper", "sm_90", "bfloat16", 128, SEQLEN, 8, {"bias": BIAS}),
    ("hopper", "sm_90", "bfloat16", 128, SEQLEN, 8, {"score_mod": TABLE}),
    # This unit spills two words if KV is split.
    ("hopper", "sm_90", "bfloat16", 128, SEQLEN, 8, {"alibi_slopes": array(HEADS)}),
    ("hopper", "sm_90", "float16", 64, SEQLEN, 0, {"mask_mod": DOCUMENTS, "causal": True}),
    # Loads for each pair take all free registers, see docs/engineering/measurements/masks.md.
    ("mma", "sm_80", "float16", 64, SEQLEN, 64, {"score_mod": TABLE, "sinks": array(HEADS)}),
    ("mma", "sm_120", "float32", 64, SEQLEN, 0, {"window_size": (64, 64), "softcap": 30.0}),
    ("decode", "sm_89", "bfloat16", 128, 1, 0, {"window_size": (1023, 0), "score_mod": TABLE}),
    ("decode", "sm_100", "float16", 64, 4, 0, {"tree_mask": array(1, 4, dtype=np.uint64)}),
    ("simt", "sm_75", "float32", 64, SEQLEN, 0, {"mask_mod": DOCUMENTS, "softcap": 30.0}),
    ("simt", "sm_90", "float64", 64, SEQLEN, 0, {"alibi_slopes": array(HEADS, dtype=np.float64)}),
    ("hopper", "sm_90", "bfloat16", 128, SEQLEN, 0, PREFIX),
    ("mma", "sm_80", "float16", 64, SEQLEN, 0, PREFIX),
    ("decode", "sm_89", "bfloat16", 128, 4, 0, PREFIX),
    ("simt", "sm_75", "float32", 64, SEQLEN, 0, PREFIX),
    ("hopper", "sm_90", "bfloat16", 128, SEQLEN, 0, OFFSETS),
    ("mma", "sm_80", "float16", 64, SEQLEN, 0, OFFSETS),
    ("decode", "sm_89", "bfloat16", 128, 4, 0, OFFSETS),
    ("simt", "sm_75", "float32", 64, SEQLEN, 0, OFFSETS),
    ("naive", "sm_86", "float32", 64, SEQLEN, 0, {"bias": array(HEADS, SEQLEN, SEQLEN)}),
]


# The first unit of each family; the others take longer.
QUICK = [next(u for u in UNITS if u[0] == family) for family in ("mma", "decode")]


@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(
            unit,
            id=f"{unit[0]} {unit[1]} {'+'.join(unit[-1])}",
            marks=() if any(unit is quick for quick in QUICK) else pytest.mark.slow,
        )
        for unit in UNITS
    ],
)
def test_a_unit_with_modifications_compiles(compile_pool: ProcessPoolExecutor, unit: Any) -> None:
    family, arch, dtype, head_dim, seqlen_q, spilled, modifications = unit
    device = device_for_arch(arch)
    if device.arch not in known_architectures():
        pytest.skip(f"this NVRTC does not know {arch}")
    kind = DTYPES.get(dtype, dtype)
    q = array(1, seqlen_q, HEADS, head_dim, dtype=kind)
    k = array(1, SEQLEN, HEADS, head_dim, dtype=kind)
    arrays = (np.ascontiguousarray(x) for x in (q, k, k))
    made = plan(flash_attention, *arrays, arch=arch, family=family, **modifications)
    check_unit(compile_pool, made, spilled)


# Tuples of kind of call, family, architecture, dtype, modifications.
OF_SEQUENCES = [
    ("varlen", "hopper", "sm_90", "bfloat16", {"causal": True, "seqused_q": LENGTHS}),
    ("varlen", "mma", "sm_80", "float16", {"seqused_q": LENGTHS, "q_offset": LENGTHS}),
    ("varlen", "simt", "sm_75", "float32", {"seqused_q": LENGTHS, "softcap": 30.0}),
    ("kvcache", "decode", "sm_90", "bfloat16", {"causal": True, "cache_leftpad": LENGTHS}),
    ("kvcache", "mma", "sm_86", "float32", {"cache_leftpad": LENGTHS, "q_offset": LENGTHS}),
    ("kvcache", "simt", "sm_100", "float64", {"cache_leftpad": LENGTHS}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "family", "arch", "dtype", "options"), OF_SEQUENCES)
def test_a_unit_of_sequences_that_are_used_in_part_compiles(
    compile_pool: ProcessPoolExecutor, kind: str, family: str, arch: str, dtype: str, options: Any
) -> None:
    q = np.zeros((1, 4, HEADS, 64), DTYPES.get(dtype, dtype))
    where = {"arch": arch, "family": family}
    if kind == "varlen":
        starts = np.array([0, 4], np.int32)
        made = plan(varlen, *[q[0]] * 3, starts, starts, 4, 4, **where, **options)
    else:
        made = plan(with_kvcache, *[q] * 3, cache_seqlens=4, **where, **options)
    check_unit(compile_pool, made, 0)


def check_unit(compile_pool: ProcessPoolExecutor, made: Plan, spilled: int) -> None:
    """Compile the unit of a plan; fail if a thread spills more than `spilled` bytes."""
    device = made.device
    assert device is not None
    assert made.unit is not None
    cubin = compile_pool.submit(compile_cubin, made.unit, device).result()
    assert "warning" not in cubin.log
    assert set(cubin.resources) == {launch.entry for launch in made.launches}
    main = cubin.resources[made.unit.main_entry]
    assert main.spill_bytes <= spilled
    others = [cubin.resources[name] for name in cubin.resources if name != made.unit.main_entry]
    assert all(other.spill_bytes == 0 for other in others)
