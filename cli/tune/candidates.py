"""Tiles that a sweep tries, and their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cupy_flash.cpu import forward as cpu_forward
from cupy_flash.cpu.plan import make_cpu_plan
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.planning.planner import Plan, make_plan, plan_tile
from cupy_flash.problem.device import Device, Resources
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

from ..cases.workload import Weighted


@dataclass(frozen=True)
class Limits:
    """Restrictions on the tiles that a sweep tries.

    Attributes
    ----------
    Br, Bc
        Allowed sizes; None for all.
    max_smem
        Largest shared memory of a thread block, in KiB.
    max_spills
        Largest number of bytes that a thread may spill.
    max_tiles
        Largest number of tiles, sampled evenly.
    """

    Br: tuple[int, ...] | None = None
    Bc: tuple[int, ...] | None = None
    max_smem: float | None = None
    max_spills: int = 32
    max_tiles: int | None = None

    @property
    def exclude_nothing(self) -> bool:
        """Whether every legal tile is tried, except tiles that spill."""
        return self == Limits(max_spills=self.max_spills)

    def why_not(self, tile: Tile, shared_memory: int) -> str | None:
        """Return why a tile is excluded, or None if it is not."""
        for name, allowed in (("br", self.Br), ("bc", self.Bc)):
            value = tile.Br if name == "br" else tile.Bc
            if allowed is not None and value not in allowed:
                return f"not in --{name}"
        if self.max_smem is not None and shared_memory > 1024 * self.max_smem:
            return f"{shared_memory / 1024:.0f} KiB are over --max-smem"
        return None


# Fields of a `Candidate` that measuring it sets.
_RESULT = ("max_error", "failed", "medians_ms", "rounds", "dropped")


@dataclass
class Candidate:
    """One tile for the cases of a group, and its results.

    Attributes
    ----------
    plans
        Plan of each case.
    weights
        Weight of each case's time.
    flops
        FLOPs of each case.
    medians_ms
        Last measured time of each case; empty before the first measurement.
    rounds
        Number of rounds of the race in which the tile was timed.
    same_binary
        Candidate with the same machine code, which is timed instead of this one.
    """

    plans: tuple[Plan, ...]
    weights: tuple[float, ...]
    flops: tuple[float, ...]
    is_default: bool = False
    resources: Resources | None = None
    dropped: str | None = None
    max_error: float | None = None
    failed: bool = False
    medians_ms: list[float] = field(default_factory=list)
    rounds: int = 0
    same_binary: Candidate | None = None

    @property
    def plan(self) -> Plan:
        """Plan of the first case."""
        return self.plans[0]

    @property
    def tile(self) -> Tile:
        """Tile, which is the same for all cases."""
        return self.plan.tile

    @property
    def cost_ms(self) -> float | None:
        """Weighted sum of the cases' times; None before they are measured."""
        if not self.medians_ms:
            return None
        return sum(w * ms for w, ms in zip(self.weights, self.medians_ms, strict=True))

    @property
    def tflops(self) -> float | None:
        """Rate in TFLOP/s over all cases, with their weights."""
        cost = self.cost_ms
        if not cost:
            return None
        return sum(w * n for w, n in zip(self.weights, self.flops, strict=True)) / cost / 1e9

    @property
    def blocks_per_sm(self) -> int | None:
        """Number of thread blocks that fit an SM; None if the registers are not known."""
        if self.resources is None:
            return None
        return dataclasses.replace(self.plan, resources=self.resources).blocks_per_sm()

    @property
    def result(self) -> dict[str, Any]:
        """Results of the check and of the race, as `take` expects them."""
        return {name: getattr(self, name) for name in _RESULT}

    def take(self, result: Mapping[str, Any]) -> None:
        """Copy the results of another candidate, or of this one in an interrupted sweep."""
        for name in _RESULT:
            setattr(self, name, result[name])


def evenly(tiles: Sequence[Tile], default: Tile, most: int | None) -> list[Tile]:
    """Return the default and an even sample of the other tiles, `most` tiles in all."""
    others = [tile for tile in tiles if tile != default]
    if most is None or len(others) < most:
        return [default, *others]
    step = len(others) / max(1, most - 1)
    return [default, *(others[int(index * step)] for index in range(most - 1))]


def gpu_candidates(
    cases: Sequence[Weighted], device: Device, family: str | None, limits: Limits
) -> list[Candidate]:
    """Return the allowed tiles that are legal for all cases, and the default of the first case.

    Parameters
    ----------
    cases
        Cases that the tile will serve.
    device
        Device that the tile runs on.
    family
        Family of the tiles; None for the family that the planner would choose.
    limits
        Restrictions on the tiles; the default one is tried in any case.
    """
    problems = [case.case.problem() for case in cases]
    families = FAMILIES[problems[0].direction]
    chosen = families[make_plan(problems[0], device, family=family).family]
    default = chosen.default_tile(problems[0], device)
    wanted = [
        tile
        for tile in chosen.tiles(problems[0], device)
        if limits.why_not(tile, chosen.shared_memory(problems[0], tile)) is None
        and all(chosen.why_not_tile(problem, device, tile) is None for problem in problems[1:])
    ]
    tiles = evenly(wanted, default, limits.max_tiles)
    plans = [
        [plan_tile(chosen, p, device, tile, reason="tuning") for p in problems] for tile in tiles
    ]
    return _candidates(cases, plans)


def cpu_candidates(cases: Sequence[Weighted], limits: Limits) -> list[Candidate]:
    """Return the CPU backend's tiles that are worth timing, and the default of the first case."""
    problems = [case.case.problem() for case in cases]
    default = cpu_forward.default_tile(problems[0])
    wanted = [
        tile for tile in cpu_forward.candidate_tiles(problems[0]) if limits.why_not(tile, 0) is None
    ]
    tiles = evenly(wanted, default, limits.max_tiles)
    plans = [[make_cpu_plan(p, tile, gpu_unavailable()) for p in problems] for tile in tiles]
    return _candidates(cases, plans)


def _candidates(cases: Sequence[Weighted], plans: Sequence[Sequence[Plan]]) -> list[Candidate]:
    """Return a candidate for each tile, given its plan of each case; the first is the default."""
    weights = tuple(case.weight for case in cases)
    flops = tuple(case.case.flops() for case in cases)
    return [Candidate(tuple(p), weights, flops, is_default=not i) for i, p in enumerate(plans)]


def illegal_sizes(
    problem: Problem, device: Device, family: str, limits: Limits
) -> dict[tuple[int, int], str]:
    """Return why sizes (Br, Bc) of the search space have no legal tile, for sizes without one."""
    the_family = FAMILIES[problem.direction][family]
    reasons: dict[tuple[int, int], str] = {}
    legal = set()
    for tile in the_family.candidates(problem, device):
        size = (tile.Br, tile.Bc)
        reason = the_family.why_not_tile(problem, device, tile) or limits.why_not(
            tile, the_family.shared_memory(problem, tile)
        )
        if reason is None:
            legal.add(size)
        else:
            reasons.setdefault(size, reason)
    return {size: reason for size, reason in reasons.items() if size not in legal}
