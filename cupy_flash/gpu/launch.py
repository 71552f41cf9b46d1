"""Kernels of a plan, ready to be launched."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.planning.planner import Plan


class LoadedLaunch(NamedTuple):
    """A kernel, its grid and block, a block's dynamic shared memory in bytes, what it is given."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory: int
    takes_maps: bool


def loaded_launches(plan: Plan) -> tuple[LoadedLaunch, ...]:
    """The plan's launches in order, compiled and loaded; none where there is nothing to compute."""
    if plan.unit is None or plan.problem.is_empty:
        return ()
    kernels = kernel_cache.get(plan.unit, {e.entry: e.shared_memory for e in plan.launches})
    return tuple(
        LoadedLaunch(kernels[e.entry], e.grid, (e.threads, 1, 1), e.shared_memory, e.takes_maps)
        for e in plan.launches
    )
