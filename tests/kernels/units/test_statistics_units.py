"""Kernels that write row statistics compile for all architectures, in every family."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import (
    Plan,
    ScoreMod,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
    plan,
)
from cupy_flash.gpu.compiler import compile_cubin
from cupy_flash.problem.device import device_for_arch

BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
SEQLEN = 2048
SINKS, SLOPES = np.zeros(8, np.float32), np.ones(8, np.float32)
RELATIVE = ScoreMod(lambda score, i, j: score - 0.1 * (i - j))
# Family, architecture, dtype, head dims and other arguments of dense calls.
DENSE: list[tuple[str, str, Any, tuple[int, int], dict[str, Any]]] = [
    ("hopper", "sm_90", BF16, (128, 128), {}),
    ("hopper", "sm_90", np.float16, (64, 64), {"causal": True, "softcap": 30.0}),
    ("hopper", "sm_90", BF16, (128, 128), {"softcap": 30.0, "sinks": SINKS}),
    ("hopper", "sm_90", BF16, (192, 128), {"alibi_slopes": SLOPES}),
    ("hopper", "sm_90", BF16, (128, 128), {"bias": np.zeros((1, 8, SEQLEN, SEQLEN), BF16)}),
    ("hopper", "sm_90", BF16, (576, 512), {"window_size": (300, 0)}),
    ("hopper", "sm_90", np.float32, (64, 64), {"causal": True}),
    ("hopper", "sm_90", FP8, (128, 128), {"causal": True}),
    ("mma", "sm_80", BF16, (128, 128), {"sinks": SINKS}),
    ("mma", "sm_100", np.float16, (512, 512), {"score_mod": RELATIVE}),
    ("mma", "sm_120", np.float32, (64, 96), {"window_size": (20, 3)}),
    ("simt", "sm_75", np.float16, (40, 40), {"softcap": 30.0, "sinks": SINKS}),
    ("simt", "sm_90", np.float64, (64, 64), {"causal": True}),
    ("naive", "sm_80", np.float32, (64, 64), {"sinks": SINKS}),
    ("decode", "sm_90", BF16, (128, 128), {"rows": 1}),
    ("decode", "sm_80", BF16, (64, 64), {"rows": 4, "alibi_slopes": SLOPES, "sinks": SINKS}),
    ("mma", "sm_90", BF16, (128, 128), {"rows": 1, "sinks": SINKS}),
]
# The same for calls on a KV cache. The last entries are the page size (0 for none) and num_splits.
CACHED: list[tuple[str, str, Any, Any, tuple[int, int], int, int]] = [
    ("decode", "sm_90", BF16, FP8, (128, 128), 16, 0),
    ("decode", "sm_80", np.float16, np.int8, (64, 64), 0, 5),
    ("mma", "sm_80", BF16, BF16, (128, 128), 16, 3),
    ("simt", "sm_86", np.float32, np.float32, (200, 200), 0, 4),
    ("hopper", "sm_90", BF16, BF16, (576, 512), 0, 4),
]
BOTH = {"return_max_logits": True, "return_entropy": True}
VARLEN = [("hopper", "sm_90", BF16), ("mma", "sm_90", np.float32), ("simt", "sm_75", np.float64)]


def dense_plan(family: str, arch: str, dtype: Any, dims: Any, more: Any, statistics: Any) -> Plan:
    more = dict(more)
    rows = more.pop("rows", SEQLEN)
    q, k, v = (
        np.zeros((1, length, 8, dim), dtype)
        for length, dim in ((rows, dims[0]), (SEQLEN, dims[0]), (SEQLEN, dims[1]))
    )
    return plan(flash_attention, q, k, v, family=family, arch=arch, **statistics, **more)


def cached_plan(
    family: str,
    arch: str,
    dtype: Any,
    stored: Any,
    dims: Any,
    page: int,
    splits: int,
    statistics: Any,
) -> Plan:
    batch, capacity = 2, 4096
    blocks, size = (batch, capacity) if not page else (batch * capacity // page, page)
    heads_kv = 1 if dims == (576, 512) else 2
    q = np.zeros((batch, 1, 16, dims[0]), dtype)
    k_cache, v_cache = (np.zeros((blocks, size, heads_kv, dim), stored) for dim in dims)
    more: dict[str, Any] = {}
    if page:
        more["block_table"] = np.zeros((batch, capacity // page), np.int32)
    if stored != dtype:
        more["k_scale"] = more["v_scale"] = np.ones((blocks, size, heads_kv), np.float32)
    if dims == (576, 512):
        more["head_dim_v"] = 512
    return plan(
        flash_attention_with_kvcache,
        *(q, k_cache, None if "head_dim_v" in more else v_cache),
        cache_seqlens=np.full(batch, capacity, np.int32),
        num_splits=splits,
        family=family,
        arch=arch,
        **statistics,
        **more,
    )


def varlen_plan(family: str, arch: str, dtype: Any, statistics: Any) -> Plan:
    q, k = np.zeros((5000, 8, 64), dtype), np.zeros((5000, 2, 64), dtype)
    starts = np.array([0, 2000, 5000], np.int32)
    lengths = starts, starts, 3000, 3000
    return plan(
        flash_attention_varlen,
        q,
        k,
        k,
        *lengths,
        causal=True,
        family=family,
        arch=arch,
        **statistics,
    )


def plans(statistics: dict[str, bool]) -> list[Plan]:
    found = [dense_plan(*case, statistics) for case in DENSE]
    found += [cached_plan(*case, statistics) for case in CACHED]
    return found + [varlen_plan(*case, statistics) for case in VARLEN]


def spilled(made: Plan) -> int:
    """Compile the unit of a plan; return the bytes that its kernels spill."""
    assert made.unit is not None
    cubin = compile_cubin(made.unit, made.device)
    return max(each.spill_bytes for each in cubin.resources.values())


@pytest.mark.slow
def test_units_compile_and_spill_little_more() -> None:
    plain, made = plans({}), plans(BOTH)
    with ProcessPoolExecutor(2) as pool:
        spills = list(pool.map(spilled, plain + made))
    for each, before, after in zip(made, spills, spills[len(plain) :], strict=False):
        assert each.unit is not None
        assert "max_logits entropy" in each.unit.title
        # Two more numbers per row. Two CTAs that share a head of 576 columns spill most.
        assert after <= before + (160 if each.problem.head_dim > 512 else 64), each.unit.title


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_largest_score_spills_nothing_on_hopper(head_dim: int, causal: bool) -> None:
    q = np.zeros((2, 8192, 8, head_dim), BF16)
    made = plan(flash_attention, q, q, q, causal=causal, arch="sm_90", return_max_logits=True)
    assert made.family == "hopper"
    assert spilled(made) == 0


def test_only_units_with_statistics_define_the_macro() -> None:
    q = np.zeros((2, 512, 8, 64), BF16)
    made = plan(flash_attention, q, q, q, arch="sm_90")
    assert made.unit is not None
    assert "CUPY_FLASH_STATISTICS" not in made.unit.text
    with_them = plan(flash_attention, q, q, q, arch="sm_90", **BOTH)
    assert with_them.unit is not None
    assert with_them.unit.text.startswith("// cupy_flash hopper")
    assert "#define CUPY_FLASH_STATISTICS" in with_them.unit.text


def test_partial_results_of_splits_take_more_workspace() -> None:
    q, k = np.zeros((1, 1, 8, 64), np.float32), np.zeros((1, 8192, 8, 64), np.float32)
    device = device_for_arch("sm_80")
    plain = plan(flash_attention, q, k, k, family="simt", arch="sm_80")
    parts = plain.schedule.split.parts
    assert parts > 1
    both = plan(flash_attention, q, k, k, family="simt", arch="sm_80", **BOTH)
    assert both.device == device
    assert both.workspace - plain.workspace == parts * 8 * 2 * 4
