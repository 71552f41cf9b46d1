"""Tile and `Plan` of a call that the CPU backend computes."""

from __future__ import annotations

import dataclasses

from cupy_flash.cpu import forward as cpu_forward
from cupy_flash.cpu import sources
from cupy_flash.families import FORWARD
from cupy_flash.families.schedule import Schedule
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import Plan, tile_fields, tuned_tile
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import FrozenTile, Tile


def choose_cpu_tile(problem: Problem, request: FrozenTile) -> Tile:
    """Return the tile that the CPU backend uses: the requested, the tuned or the default one."""
    default = cpu_forward.default_tile(problem)
    if request is not None:
        return dataclasses.replace(default, **tile_fields(type(default), request))
    # Computing the digest takes 20 ms once per process, and is skipped if there are no tuned tiles.
    is_tuned = "cpu" in tuning.families()
    entry = tuning.lookup(None, "cpu", sources.digest(), problem) if is_tuned else None
    tile = tuned_tile(Tile, entry.tile) if entry else None
    fits = (
        tile is not None and cpu_forward.scratch_bytes(problem, tile) <= cpu_forward.SCRATCH_LIMIT
    )
    return tile if tile is not None and fits else default


def make_cpu_plan(problem: Problem, tile: Tile, no_gpu: str | None) -> Plan:
    """Return the plan of the CPU backend; `no_gpu` is the reason why no GPU is used, or None."""
    reason = "no GPU is available" if no_gpu else "the CPU backend was requested"
    return Plan(
        problem=problem,
        device=None,
        family="cpu",
        tile=tile,
        schedule=Schedule((), workspace=cpu_forward.scratch_bytes(problem, tile)),
        unit=None,
        reason=reason,
        rejected=dict.fromkeys(FORWARD, no_gpu) if no_gpu else {},
    )
