"""Shared code of the families that sum attention weights over queries."""

from __future__ import annotations

from cupy_flash.families.contract import MAX_GRID, ceil_div, heads_in_l2
from cupy_flash.families.schedule import MAIN_ENTRY, Launch, Schedule
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem


def _blocks(problem: Problem, Bc: int) -> int:
    """Return the number of thread blocks, one for each KV tile of each head."""
    heads = problem.heads_kv if problem.received == "groups" else problem.heads_q
    return ceil_div(problem.seqlen_k, Bc) * problem.batch * heads


def why_not_grid(problem: Problem, Bc: int) -> str | None:
    """Return why a launch cannot have a thread block per KV tile, or None if it can."""
    if (blocks := _blocks(problem, Bc)) > MAX_GRID:
        return f"needs {blocks} thread blocks, more than the {MAX_GRID} of a launch"
    return None


def schedule(
    problem: Problem, device: Device, Bc: int, function: str, threads: int, shared_memory: int
) -> Schedule:
    """Return the schedule of the only kernel, with a thread block for each KV tile of Bc keys.

    The other parameters are those of `Launch`.
    """
    grid = (max(1, _blocks(problem, Bc)), 1, 1)
    main = Launch(*(MAIN_ENTRY, function, grid, threads, shared_memory, 1), arguments=("received",))
    return Schedule((main,), section_heads=heads_in_l2(problem, device))


def config(problem: Problem) -> dict[str, int | bool]:
    """Return the members of the `Config` struct that all such kernels read."""
    return {
        "grouped": problem.received == "groups",
        "has_seqlens": not problem.layout.is_dense,
        "packed": problem.layout.packed_k,
        "page_size": problem.layout.page_size,
        "may_mask_pairs": problem.score is not None and problem.score.conceals,
        "has_one_key_rows": False,
        "has_dlse": False,
    }
