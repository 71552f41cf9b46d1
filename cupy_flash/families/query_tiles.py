"""Shared code of families whose thread blocks process one query tile each, dense or varlen."""

from __future__ import annotations

from cupy_flash.families import split_kv
from cupy_flash.families.contract import MAX_GRID, ceil_div, has_dropout, heads_in_l2
from cupy_flash.families.schedule import Launch, Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import MAX_SEQLEN, Problem
from cupy_flash.problem.tile import Tile
from cupy_flash.problem.values import MAX_COUNT


def group_size(problem: Problem) -> int:
    """Return the number of query heads packed into a query tile: all heads of a KV head, or 1.

    A tile of several heads reads keys and values once for all of them. For few query rows these
    reads dominate, and for many rows the packing costs nothing.
    """
    # Random numbers of dropout are shared by rows of one head.
    if problem.layout.is_dense or has_dropout(problem):
        return 1
    # heads_q may be 0: the result is then empty.
    group = max(1, problem.heads_q // problem.heads_kv)
    # The kernels count the packed rows of a sequence in 32 bits.
    return group if problem.seqlen_q * group <= MAX_SEQLEN else 1


def query_rows(problem: Problem) -> int:
    """Return the largest number of rows in the query tiles of one sequence and group of heads."""
    return problem.seqlen_q * group_size(problem)


def query_blocks(problem: Problem, Br: int) -> int:
    """Return the number of query tiles of the whole batch and all heads."""
    groups = problem.heads_q // group_size(problem)
    return ceil_div(query_rows(problem), Br) * problem.batch * groups


def why_not_grid(problem: Problem, Br: int) -> str | None:
    """Return why a launch cannot have all query tiles of Br rows, or None if it can."""
    blocks = query_blocks(problem, Br)
    layout = problem.layout
    if not layout.is_dense:
        heads = problem.batch * problem.heads_q
        if heads > MAX_COUNT:
            # The kernel that merges partial results numbers the heads of all sequences with int32.
            return f"has {heads} query heads in all sequences; expected at most {MAX_COUNT}"
        parts = layout.num_splits or 1
        if parts > 1:
            blocks = max(blocks * parts, split_kv.combine_blocks(problem))
    if blocks > MAX_GRID:
        return f"needs {blocks} thread blocks, more than the {MAX_GRID} of a launch"
    return None


def choose_split(
    problem: Problem, device: Device, tile: Tile, blocks_per_sm: int, tflops_per_sm: float
) -> Split:
    """Choose the split of the keys of a query tile (see `split_kv.choose`).

    Parameters
    ----------
    tflops_per_sm
        Approximate TFLOP/s of the kernel on an SM that is full of its thread blocks.
    """
    dims = problem.head_dim + problem.head_dim_v
    return split_kv.choose(
        problem,
        device,
        q_tiles=ceil_div(query_rows(problem), tile.Br),
        key_tiles=ceil_div(problem.seqlen_k, tile.Bc),
        blocks_per_sm=blocks_per_sm,
        group=group_size(problem),
        tile_time=split_kv.TileTime.estimate(
            2 * tile.Br * tile.Bc * dims, tile.Bc * dims * problem.itemsize, tflops_per_sm
        ),
    )


def schedule(problem: Problem, device: Device, split: Split, main: Launch) -> Schedule:
    """Return the schedule of a main kernel, followed by a merge of the parts if keys are split."""
    return Schedule(
        (main, *split_kv.combine_launches(problem, split)),
        split,
        workspace=split_kv.workspace(problem, split),
        section_heads=heads_in_l2(problem, device),
    )


def config(problem: Problem) -> dict[str, int | bool]:
    """Return the members of the `Config` struct that `sequence_view.cuh` reads."""
    layout = problem.layout
    return {
        "has_seqlens": not layout.is_dense,
        "page_size": layout.page_size,
        "group": group_size(problem),
    }
