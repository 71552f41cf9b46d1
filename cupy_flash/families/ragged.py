"""What families do alike whose blocks have a query tile each, of equal lengths or not."""

from __future__ import annotations

from cupy_flash.families import split
from cupy_flash.families.contract import MAX_GRID, ceil_div, heads_in_l2
from cupy_flash.families.schedule import Launch, Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import MAX_SEQLEN, Problem
from cupy_flash.problem.tile import Tile
from cupy_flash.problem.values import MAX_COUNT


def group_size(problem: Problem) -> int:
    """Query heads whose rows make up a tile: all that share a key/value head, or one.

    Tiles of several heads read keys and values once for all of them, which is most of what a few
    query rows wait for; where there are many rows it is no loss.
    """
    if problem.layout.is_equal:
        return 1
    # Queries without heads are a call, with an empty result.
    group = max(1, problem.heads_q // problem.heads_kv)
    # The kernels count a tile's rows in 32 bits.
    return group if problem.seqlen_q * group <= MAX_SEQLEN else 1


def query_rows(problem: Problem) -> int:
    """The most rows that the query tiles of one sequence and group of heads hold."""
    return problem.seqlen_q * group_size(problem)


def query_blocks(problem: Problem, Br: int) -> int:
    """Query tiles over the whole batch and all heads."""
    groups = problem.heads_q // group_size(problem)
    return ceil_div(query_rows(problem), Br) * problem.batch * groups


def why_not_grid(problem: Problem, Br: int) -> str | None:
    """Why tiles of Br rows are more than a launch takes, or None if they are not."""
    blocks = query_blocks(problem, Br)
    layout = problem.layout
    if not layout.is_equal:
        heads = problem.batch * problem.heads_q
        if heads > MAX_COUNT:
            # The kernel that merges splits counts them in one line.
            return f"has {heads} query heads in all sequences; {MAX_COUNT} can be counted"
        parts = layout.num_splits or 1
        if parts > 1:
            blocks = max(blocks * parts, split.combine_blocks(problem))
    if blocks > MAX_GRID:
        return f"needs {blocks} thread blocks, more than the {MAX_GRID} of a launch"
    return None


def choose_split(
    problem: Problem, device: Device, tile: Tile, blocks_per_sm: int, tflops_per_sm: float
) -> Split:
    """How the keys of a query tile are shared out (see `split.choose`).

    Parameters
    ----------
    tflops_per_sm
        What the kernel reaches on an SM that is full of its blocks, about.
    """
    dims = problem.head_dim + problem.head_dim_v
    return split.choose(
        problem,
        device,
        q_tiles=ceil_div(query_rows(problem), tile.Br),
        key_tiles=ceil_div(problem.seqlen_k, tile.Bc),
        blocks_per_sm=blocks_per_sm,
        group=group_size(problem),
        tile_time=split.TileTime.estimate(
            2 * tile.Br * tile.Bc * dims, tile.Bc * dims * problem.itemsize, tflops_per_sm
        ),
    )


def schedule(problem: Problem, device: Device, cut: Split, main: Launch) -> Schedule:
    """That of a main kernel whose blocks each have a query tile, and a part of its keys."""
    return Schedule(
        (main, *split.combine_launches(problem, cut)),
        cut,
        workspace=split.workspace(problem, cut),
        section_heads=heads_in_l2(problem, device),
    )


def config(problem: Problem) -> dict[str, int | bool]:
    """Members of the `Config` struct that `place.cuh` reads."""
    layout = problem.layout
    return {
        "sequences": not layout.is_equal,
        "page_size": layout.page_size,
        "group": group_size(problem),
    }
