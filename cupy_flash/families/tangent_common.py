"""Shared code of the families that compute tangents."""

from __future__ import annotations

from cupy_flash.families.backward_common import may_have_one_key
from cupy_flash.families.contract import MAX_GRID, ceil_div, heads_in_l2
from cupy_flash.families.schedule import MAIN_ENTRY, Launch, Schedule
from cupy_flash.problem.device import Device
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.problem import Problem


def why_not(problem: Problem) -> str | None:
    """Return why no tangent family supports the problem, or None if one may support it."""
    if problem.layout.page_size or problem.layout.kind == "kvcache":
        return "does not compute tangents of a KV cache"
    return None


def _blocks(problem: Problem, Br: int) -> int:
    """Return the number of thread blocks, one for each query tile of the longest sequence."""
    return ceil_div(problem.seqlen_q, Br) * problem.batch * problem.heads_q


def why_not_grid(problem: Problem, Br: int) -> str | None:
    """Return why a grid with a thread block per query tile is too large, or None if it is not."""
    if (blocks := _blocks(problem, Br)) > MAX_GRID:
        return f"needs {blocks} thread blocks, more than the {MAX_GRID} of a launch"
    return None


def schedule(
    problem: Problem,
    device: Device,
    Br: int,
    function: str,
    threads: int,
    shared_memory: int,
    min_blocks: int = 1,
    arguments: tuple[str, ...] = ("tangents",),
) -> Schedule:
    """Return the schedule of the only kernel, with a thread block for each query tile of Br rows.

    The other parameters are those of `Launch`.
    """
    grid = (_blocks(problem, Br), 1, 1)
    main = Launch(
        *(MAIN_ENTRY, function, grid, threads, shared_memory, min_blocks), arguments=arguments
    )
    return Schedule((main,), section_heads=heads_in_l2(problem, device))


def config(problem: Problem) -> dict[str, int | bool]:
    """Return the members of the `Config` struct that all tangent kernels read."""
    return {
        **{f"moves_{name}": name in problem.moves for name in ROWS},
        "has_seqlens": not problem.layout.is_dense,
        "packed": problem.layout.packed_q,
        "may_mask_pairs": problem.score is not None and problem.score.conceals,
        # In rows that attend to one key by their position, P is set to 1.
        "has_one_key_rows": may_have_one_key(problem),
        "has_dlse": False,
    }
