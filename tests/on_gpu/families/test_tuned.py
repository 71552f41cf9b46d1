"""The tiles of the shipped tables against the reference, on GPUs to which they apply.

A table may lack tiles for some kinds of calls, so `CLASSES` adds a call of each kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gpu.gpu_support import current_device
from support.prebuilt import use_cubins, write_cubins
from support.tuned_calls import TunedCall, calls_of

from cupy_flash.cli.build.build import Job
from cupy_flash.cli.build.kernel_sets import problem_of_class
from cupy_flash.cli.tune.findings import is_stale
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import make_plan
from cupy_flash.planning.tuning import Entry
from cupy_flash.problem.device import Device

__all__ = ["use_cubins"]  # fixture

pytestmark = pytest.mark.gpu

CLASSES = (
    "bfloat16 d128 dv128 causal q1024 k1024 rows65536 align16 packed",
    "float16 d128 dv128 full q1 k4096 rows1024 align16 cache",
    "bfloat16 d128 dv128 causal q4 k4096 rows4096 align16 page16",
    "bfloat16 d64 dv64 full q1 k4096 rows1024 align16 int8-page16",
    "float16 d576 dv512 full q1 k4096 rows1024 align16 latent-page64",
    "bfloat16 d576 dv512 full q1 k4096 rows1024 align16 float8_e4m3fn-latent-cache",
    "bfloat16 d128 dv128 causal q1024 k1024 rows65536 align16 float8_e4m3fn",
    "bfloat16 d64 dv64 causal q1024 k1024 rows65536 align16 backward",
    "float16 d128 dv128 causal q1024 k1024 rows65536 align16 packed backward",
)


def entries_of(device: Device) -> Iterator[Entry]:
    """Yield the shipped entries that are up to date, and `CLASSES` with the planner's tiles."""
    for path in sorted(tuning.SHIPPED_DIR.glob("*.json")):
        for entry in tuning.read_table(path):
            if entry.arch == device.arch and not is_stale(entry):
                yield entry
    for text in CLASSES:
        problem = problem_of_class(text)
        assert problem is not None, text
        if any(f.why_not(problem, device) is None for f in FAMILIES[problem.direction].values()):
            plan = make_plan(problem, device)
            digest = FAMILIES[problem.direction][plan.family].digest()
            tile = dataclasses.asdict(plan.tile)
            whose = (device.name, device.arch, device.sm_count, plan.family, digest)
            yield Entry(*whose, problem_class=text, tile=tile, tflops=0.0)


def tuned_calls() -> list[TunedCall]:
    """Return the calls to test on this GPU: some for each tile that applies to it."""
    if gpu_unavailable():
        return []
    device = current_device()
    calls = (call for entry in entries_of(device) for call in calls_of(entry, device))
    return list(dict.fromkeys(calls))


CALLS = tuned_calls()


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the kernels of all calls on all CPUs; return their folder."""
    folder: Path = tmp_path_factory.mktemp("cubins")
    write_cubins(folder, [Job.of(call.plan()) for call in CALLS])
    return folder


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_shipped_tile_computes_what_the_reference_does(call: TunedCall) -> None:
    call.check()
