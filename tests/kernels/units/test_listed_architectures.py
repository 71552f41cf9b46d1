"""Tests that each family compiles for every architecture for which the support matrix lists it.

The pairs that the table of machine code has are compiled by `test_machine_code.py`.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest
from support.cli.benchmark_scripts import IN_CHECKOUT, script

from cupy_flash.cli.records.environment import kernel_name
from cupy_flash.gpu.compiler import compile_cubin, known_architectures
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.arrays import DTYPES
from cupy_flash.problem.device import device_for_arch

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

dims = script("support_matrix/support_dims")
_, _, TESTED = script("machine_code").read_table()
IN_TABLE = {(kernel.arch, kernel.family) for kernel in TESTED}
OTHERS = [
    (arch, direction, family)
    for arch, direction, family in dims.served()
    if (arch, kernel_name(family, direction)) not in IN_TABLE
]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "direction", "family"), OTHERS)
def test_a_small_kernel_compiles(
    arch: int, direction: str, family: str, compile_pool: ProcessPoolExecutor
) -> None:
    if arch not in known_architectures():
        pytest.skip(f"this NVRTC does not know sm_{arch}")
    dtype = next(x for x in DTYPES if dims.is_served(direction, family, x, arch, dims.SMALL))
    problem = dims.plain_problem(direction, family == "decode", dtype, dims.SMALL)
    device = device_for_arch(arch)
    plan = make_plan(problem, device, family=family)
    assert plan.unit is not None
    cubin = compile_pool.submit(compile_cubin, plan.unit, device).result()
    assert cubin.image.startswith(b"\x7fELF")
    assert set(cubin.resources) == {launch.entry for launch in plan.launches}
