"""Tests that the kernels for 8-bit caches (attention and append) compile for all architectures."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.calls.quantized_support import QuantizedCase
from support.calls.sequence_support import VarlenCase

from cupy_flash import flash_attention_varlen, flash_attention_with_kvcache, plan
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.check.problems import problem_of
from cupy_flash.calls.gpu.forward import append_spec
from cupy_flash.calls.options import Options
from cupy_flash.errors import UnsupportedError
from cupy_flash.families.contract import TranslationUnit
from cupy_flash.gpu.append import AppendSpec, append_unit, prepare
from cupy_flash.gpu.compiler import compile_cubin, known_architectures
from cupy_flash.problem.device import Device, device_for_arch

BF16, FP8, INT8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8
ROWS, CACHES, PAGE = 512, 3, 16
# Tuples of architecture, dtypes of q and of the cache, head dims, page size, scales, modifications.
DECODE: list[tuple[str, Any, Any, tuple[int, int], int, str, dict[str, Any]]] = [
    ("sm_80", np.float16, INT8, (128, 128), 0, "row", {}),
    ("sm_86", BF16, INT8, (64, 64), 1, "row", {"window_size": (99, 0)}),
    ("sm_89", np.float16, FP8, (72, 40), PAGE, "row", {}),
    ("sm_90", BF16, FP8, (128, 128), 0, "head", {}),
    ("sm_90", BF16, FP8, (128, 128), 64, "page", {"softcap": 30.0}),
    ("sm_100", np.float16, FP8, (64, 128), 0, "none", {}),
    ("sm_120", BF16, INT8, (256, 256), 0, "head", {}),
]
PACKED = [("sm_80", "int8", 0), ("sm_90", "float8_e4m3fn", 16)]
APPENDS = [
    ("sm_75", "float16", "int8", True, 24),
    ("sm_80", "float32", "int8", False, 0),
    ("sm_89", "bfloat16", "float8_e4m3fn", True, 0),
    ("sm_90", "float16", "float8_e4m3fn", False, 64),
    ("sm_120", "bfloat16", "float8_e4m3fn", True, 64),
]


def decode_unit(
    arch: str, dtype: Any, cache: Any, dims: Any, page_size: int, scales: str, more: dict[str, Any]
) -> TranslationUnit:
    blocks = CACHES if not page_size else CACHES * ROWS // page_size
    rows = page_size or ROWS
    k_cache, v_cache = (np.zeros((blocks, rows, 2, dim), cache) for dim in dims)
    shape = {"row": (blocks, rows, 2), "page": (blocks, 1, 2), "head": (2,)}.get(scales)
    of_cache = None if shape is None else np.ones(shape, np.float32)
    table = np.zeros((CACHES, ROWS // page_size), np.int32) if page_size else None
    q, more = np.zeros((CACHES, 1, 8, dims[0]), dtype), {"k_scale": of_cache, **more}
    options = {"cache_seqlens": ROWS, "block_table": table, "v_scale": of_cache, "arch": arch}
    made = plan(flash_attention_with_kvcache, q, k_cache, v_cache, **options, **more)
    assert made.family == "decode"
    assert made.unit is not None
    return made.unit


def packed_unit(arch: str, cache_dtype: str, page_size: int) -> TranslationUnit:
    base = VarlenCase((70, 0, 3), (150, 9, 300), "bfloat16", causal=True, page_size=page_size)
    arguments = QuantizedCase(base, cache_dtype, "row").arguments()
    made = plan(flash_attention_varlen, **arguments, arch=arch)
    assert made.family == "decode"
    assert made.unit is not None
    return made.unit


def spec_of_append(dtype: str, cache_dtype: str, computed: bool, rotary_dim: int) -> AppendSpec:
    types = {"bfloat16": BF16, "float8_e4m3fn": FP8}
    dtypes = [types.get(name, name) for name in (dtype, cache_dtype)]
    shapes = ((2, 1, 8, 64), (2, 1, 2, 64), (2, 1, 2, 40))
    q, k, v = (np.zeros(shape, dtypes[0]) for shape in shapes)
    k_cache, v_cache = (np.zeros((2, 100, 2, dim), dtypes[1]) for dim in (64, 40))
    table = np.zeros((100, rotary_dim // 2), np.float32) if rotary_dim else None
    scale = np.ones((2, 100, 2), np.float32)
    caches = {"k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": np.zeros(2, np.int32)}
    tables = {"rotary_cos": table, "rotary_sin": table, "k_scale": scale, "v_scale": scale}
    arguments = Arguments(q, k, v, **caches, **tables)
    options = Options("kvcache", True, compute_scales=computed)
    return append_spec(arguments, problem_of(arguments, options), options)


def device_of(arch: str) -> Device:
    return device_for_arch(int(arch.removeprefix("sm_")))


@pytest.mark.slow
def test_units_compile_and_spill_little() -> None:
    units = [(decode_unit(*case), device_of(case[0])) for case in DECODE]
    units += [(append_unit(spec_of_append(*case)), device_of(arch)) for arch, *case in APPENDS]
    units += [(packed_unit(*case), device_of(case[0])) for case in PACKED]
    known = known_architectures()
    units = [(unit, device) for unit, device in units if device.arch in known]
    assert units
    with ProcessPoolExecutor(2) as pool:
        for cubin in pool.map(compile_cubin, *zip(*units, strict=True)):
            assert "warning" not in cubin.log
            # The kernels of head_dim 256 spill most.
            assert max(r.spill_bytes for r in cubin.resources.values()) <= 80


def test_float8_is_for_gpus_that_convert_it() -> None:
    with pytest.raises(UnsupportedError, match="needs sm_89 or newer to read float8_e4m3fn"):
        decode_unit("sm_86", BF16, FP8, (64, 64), 0, "head", {})
    spec = spec_of_append("float16", "float8_e4m3fn", False, 0)
    with pytest.raises(UnsupportedError, match="append to float8_e4m3fn needs sm_89 or later"):
        prepare(spec, device_of("sm_80"), ())


def test_a_tile_of_8_bits_has_32_keys() -> None:
    q, cache = np.zeros((CACHES, 1, 8, 64), np.float16), np.zeros((CACHES, ROWS, 2, 64), INT8)
    options = {"cache_seqlens": ROWS, "arch": "sm_90", "family": "decode"}
    with pytest.raises(ValueError, match="Bc is 16; expected 32 for 8-bit caches"):
        plan(flash_attention_with_kvcache, q, cache, cache, **options, tile=(16, 16))
