"""Tests that float8 kernels compile and spill few registers."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from cupy_flash.families.contract import TranslationUnit
from cupy_flash.gpu.compiler import compile_cubin, known_architectures
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.arrays import FLOAT8, ArraySpec
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.problem import make_problem

# Tuples of head_dim, head_dim_v, causal, output dtype.
CASES = [
    (64, 64, True, "bfloat16"),
    (128, 128, False, "float16"),
    (128, 128, True, "bfloat16"),
    (256, 256, False, "bfloat16"),
    (256, 256, True, "bfloat16"),
    (80, 61, True, "float16"),
    (192, 192, True, "bfloat16"),
    (192, 40, True, "float16"),
]


def unit_of(dim: int, dim_v: int, causal: bool, out: str) -> TranslationUnit:
    q, v = (ArraySpec.contiguous((1, 4096, 16, width), FLOAT8) for width in (dim, dim_v))
    target = ArraySpec.contiguous((1, 4096, 16, dim_v), out)
    problem = make_problem(q, q, v, target, causal=causal)
    plan = make_plan(problem, device_for_arch("sm_90"))
    assert plan.unit is not None
    return plan.unit


@pytest.mark.slow
def test_units_compile_and_spill_little() -> None:
    assert 90 in known_architectures()
    units = [(unit_of(*case), device_for_arch("sm_90")) for case in CASES]
    with ProcessPoolExecutor(2) as pool:
        for cubin in pool.map(compile_cubin, *zip(*units, strict=True)):
            assert "warning" not in cubin.log
            assert "serialized" not in cubin.log
            # At head_dim 256, a few elements of O spill. With 240 registers instead of 232 none do,
            # but the kernel is not faster.
            assert max(r.spill_bytes for r in cubin.resources.values()) <= 56
