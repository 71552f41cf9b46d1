"""Tests that backward kernels compile for every architecture, within a limit of spilled bytes.

The kernels in the table of machine code are compiled by `test_machine_code.py`.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import MaskMod, ScoreMod, flash_attention_backward, plan
from cupy_flash.gpu.compiler import compile_cubin, known_architectures
from cupy_flash.problem.device import device_for_arch

SEQLEN, HEADS, HEADS_KV = 512, 4, 2
DTYPES = {"bfloat16": ml_dtypes.bfloat16}

TABLE = ScoreMod(
    lambda score, h, i, j, table: score + table[h, np.clip(i - j, -64, 64) + 64],
    table=np.zeros((HEADS, 129), np.float32),
    differentiable=["table"],
)
DOCUMENTS = MaskMod(lambda i, j: i // 64 == j // 64)
# The query heads of a KV head have different masks, so the block mask stores no visible pairs.
BY_HEAD = MaskMod(lambda h, i, j: abs(i - j) < 64 * h + 9)
BIAS = np.zeros((1, HEADS, SEQLEN, SEQLEN), np.float16)
SINKS = np.zeros(HEADS, np.float32)
LENGTHS = np.array([99], np.int32)
PREFIX = {"window_size": (99, 40), "prefix_lens": np.array([64], np.int32)}
OFFSETS = {"window_size": (99, 40), "q_offset": np.array([64], np.int32)}
# Tuples of dtype, head_dim, limit of spilled bytes, bias and options, for the kernel that computes
# gradients of biases on Hopper.
BIASES: list[tuple[str, int, int, np.ndarray, dict[str, Any]]] = [
    ("float16", 64, 0, BIAS, {}),
    ("float16", 128, 0, BIAS, {"causal": True}),
    ("float16", 256, 0, BIAS, {"causal": True}),
    ("float16", 96, 8, BIAS, {"causal": True, "window_size": (99, 0)}),
    ("float16", 128, 0, BIAS[:, :1, :1], {"causal": True}),
    ("float16", 128, 0, BIAS[..., :1], {"causal": True}),
    ("bfloat16", 64, 32, BIAS.astype(np.float32), {"causal": True, "grad_dtype": "float32"}),
]
# Tuples of family, architecture, dtype, head_dim, limit of spilled bytes, options.
UNITS: list[tuple[str, str, str, int, int, dict[str, Any]]] = [
    ("hopper", "sm_90", "float16", 128, 52, {"window_size": (99, 0), "softcap": 30.0}),
    ("hopper", "sm_90", "bfloat16", 80, 0, {"causal": True}),
    ("hopper", "sm_90", "bfloat16", 96, 0, {}),
    ("hopper", "sm_90", "bfloat16", 192, 0, {"causal": True}),
    ("hopper", "sm_90", "bfloat16", 256, 0, {"causal": True}),
    ("hopper", "sm_90", "bfloat16", 256, 8, {}),
    ("hopper", "sm_90", "bfloat16", 192, 0, {"window_size": (99, 40)}),
    ("hopper", "sm_90", "bfloat16", 320, 0, {"causal": True}),
    ("hopper", "sm_90", "bfloat16", 512, 0, {}),
    ("hopper", "sm_90", "float16", 512, 16, {"causal": True}),
    ("hopper", "sm_90", "bfloat16", 512, 0, {"causal": True, "wrt": ("k", "v")}),
    ("mma", "sm_90", "bfloat16", 512, 0, {"wrt": ("q",)}),
    ("hopper", "sm_90", "bfloat16", 64, 24, {"seqlens_k": LENGTHS}),
    ("hopper", "sm_90", "bfloat16", 128, 0, {"seqlens_k": LENGTHS}),
    ("hopper", "sm_90", "bfloat16", 96, 28, {"seqlens_k": LENGTHS}),
    ("hopper", "sm_90", "bfloat16", 192, 16, {"seqlens_k": LENGTHS}),
    ("hopper", "sm_90", "bfloat16", 128, 256, PREFIX),
    ("mma", "sm_80", "bfloat16", 64, 88, PREFIX),
    ("simt", "sm_75", "float32", 64, 0, PREFIX),
    ("hopper", "sm_90", "bfloat16", 128, 8, OFFSETS),
    ("mma", "sm_80", "bfloat16", 64, 72, OFFSETS),
    ("simt", "sm_75", "float32", 64, 0, OFFSETS),
    ("hopper", "sm_90", "bfloat16", 256, 8, {"seqlens_k": LENGTHS}),
    ("hopper", "sm_90", "bfloat16", 64, 40, {"mask_mod": DOCUMENTS}),
    ("hopper", "sm_90", "bfloat16", 128, 16, {"mask_mod": DOCUMENTS, "causal": True}),
    ("hopper", "sm_90", "bfloat16", 128, 28, {"mask_mod": DOCUMENTS, "window_size": (99, 40)}),
    ("hopper", "sm_90", "bfloat16", 256, 32, {"mask_mod": DOCUMENTS}),
    ("hopper", "sm_90", "bfloat16", 128, 352, {"mask_mod": BY_HEAD}),
    ("hopper", "sm_90", "bfloat16", 128, 304, {"mask_mod": DOCUMENTS, "softcap": 20.0}),
    ("mma", "sm_80", "bfloat16", 64, 56, {"mask_mod": DOCUMENTS, "causal": True}),
    ("mma", "sm_89", "float16", 64, 40, {"mask_mod": DOCUMENTS}),
    ("mma", "sm_90", "bfloat16", 128, 8, {"mask_mod": BY_HEAD}),
    ("mma", "sm_90", "bfloat16", 128, 32, {"mask_mod": DOCUMENTS, "softcap": 20.0}),
    ("mma", "sm_80", "bfloat16", 256, 8, {"mask_mod": DOCUMENTS}),
    ("mma", "sm_90", "bfloat16", 512, 8, {"mask_mod": DOCUMENTS}),
    ("mma", "sm_90", "float32", 64, 100, {"mask_mod": DOCUMENTS, "causal": True}),
    # Thread blocks fetch KV tiles.
    ("hopper", "sm_90", "bfloat16", 64, 176, {"batch": 50}),
    ("hopper", "sm_90", "float16", 64, 176, {"batch": 50, "grad_dtype": "float32"}),
    ("hopper", "sm_90", "bfloat16", 40, 256, {"batch": 50, "wrt": ("q",)}),
    # TMA loads the bias.
    ("hopper", "sm_90", "float16", 64, 24, {"bias": BIAS}),
    ("hopper", "sm_90", "float16", 64, 56, {"bias": BIAS, "causal": True}),
    ("hopper", "sm_90", "float16", 96, 0, {"bias": BIAS, "causal": True}),
    ("hopper", "sm_90", "float16", 128, 20, {"bias": BIAS}),
    ("hopper", "sm_90", "float16", 128, 24, {"bias": BIAS[:, :1], "causal": True}),
    ("mma", "sm_86", "float16", 64, 0, {"wrt": ("q", "bias"), "bias": BIAS}),
    *(
        ("hopper", "sm_90", dtype, head_dim, spilled, {"wrt": ("bias",), "bias": bias} | options)
        for dtype, head_dim, spilled, bias, options in BIASES
    ),
    ("mma", "sm_90", "float32", 64, 172, {"softcap": 30.0}),
    ("mma", "sm_100", "bfloat16", 256, 40, {"score_mod": TABLE}),
    ("mma", "sm_90", "bfloat16", 512, 8, {"causal": True}),
    ("mma", "sm_90", "float16", 576, 0, {"wrt": ("q", "v")}),
    ("mma", "sm_90", "float32", 512, 172, {"causal": True}),
    ("mma", "sm_80", "bfloat16", 576, 32, {"sinks": SINKS}),
    ("mma", "sm_86", "bfloat16", 512, 32, {"softcap": 30.0}),
    ("mma", "sm_120", "float32", 64, 0, {"wrt": ("k", "v", "sinks"), "sinks": SINKS}),
    ("simt", "sm_100", "float64", 80, 0, {"score_mod": TABLE}),
]


# The unit that is tested by default; the others take longer.
QUICK = [next(u for u in UNITS if u[0] == "simt")]


@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(
            unit,
            id=f"{' '.join(map(str, unit[:4]))} {'+'.join(unit[-1])}",
            marks=() if any(unit is quick for quick in QUICK) else pytest.mark.slow,
        )
        for unit in UNITS
    ],
)
def test_a_unit_of_gradients_compiles(compile_pool: ProcessPoolExecutor, unit: Any) -> None:
    family, arch, dtype, head_dim, spilled, options = unit
    device = device_for_arch(arch)
    if device.arch not in known_architectures():
        pytest.skip(f"this NVRTC does not know {arch}")
    options = dict(options)
    batch = options.pop("batch", 1)
    q, k = (
        np.empty((batch, SEQLEN, heads, head_dim), DTYPES.get(dtype, dtype))
        for heads in (HEADS, HEADS_KV)
    )
    made = plan(flash_attention_backward, q=q, k=k, v=k, arch=arch, family=family, **options)
    assert made.unit is not None
    cubin = compile_pool.submit(compile_cubin, made.unit, device).result()
    assert "warning" not in cubin.log
    # If registers do not suffice, ptxas serializes wgmma and reports it without the word "warning".
    assert "wgmma.mma_async instructions are serialized" not in cubin.log
    assert set(cubin.resources) == {launch.entry for launch in made.launches}
    assert max(resources.spill_bytes for resources in cubin.resources.values()) <= spilled
