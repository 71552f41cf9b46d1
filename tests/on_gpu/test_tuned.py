"""The tiles of the shipped tables against the reference, on GPUs that may be given them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.gpu_support import Case, check, current_device, random_values
from support.prebuilt import jobs_of_cases, use_cubins, write_cubins

from cupy_flash.cli.build.kernel_sets import problem_of_class
from cupy_flash.cli.tune.findings import is_stale
from cupy_flash.families import FORWARD
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.planning import tuning

__all__ = ["use_cubins"]  # fixture

pytestmark = pytest.mark.gpu


def tuned_cases() -> list[Case]:
    """Each shipped tile that fits this GPU, on ragged lengths with few and many query tiles."""
    if gpu_unavailable():
        return []
    cases = {}
    device = current_device()
    for path in sorted(tuning.SHIPPED_DIR.glob("*.json")):
        for entry in tuning.read_table(path):
            problem = problem_of_class(entry.problem_class)
            if problem is None or entry.arch != device.arch or is_stale(entry):
                continue
            tile = FORWARD[entry.family].tile_type(**entry.tile)
            if FORWARD[entry.family].why_not_tile(problem, device, tile):
                continue
            few = Case(
                entry.family,
                problem.dtype,
                seqlen_q=799,
                seqlen_k=513,
                head_dim=problem.head_dim,
                head_dim_v=problem.head_dim_v,
                causal=problem.causal,
                q_offset=-150 if problem.causal else None,
                tile=tile,
            )
            many = dataclasses.replace(
                few, seqlen_q=333, batch=4, heads_q=36, heads_kv=12, q_offset=None
            )
            cases.update(dict.fromkeys((few, many)))
    return list(cases)


CASES = tuned_cases()


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All their kernels, compiled on all CPUs."""
    folder: Path = tmp_path_factory.mktemp("cubins")
    write_cubins(folder, jobs_of_cases(CASES))
    return folder


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_shipped_tile_computes_what_the_reference_does(case: Case) -> None:
    check(case, random_values(case))
