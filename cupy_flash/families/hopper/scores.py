"""What is done to scores besides, as the kernel takes it: biases, edges, bounds."""

from __future__ import annotations

import numpy as np

from cupy_flash.families.contract import ceil_div, may_have_block_map
from cupy_flash.families.hopper.sm90 import WARPGROUP_ROWS
from cupy_flash.families.hopper.tiles import HopperTile
from cupy_flash.families.mma import MmaFamily, MmaTile
from cupy_flash.families.schedule import MAX_STRIDE, STRIDE_UNIT, Launch
from cupy_flash.problem.device import Device, device_for_arch
from cupy_flash.problem.problem import Problem

# Tiles of a bias in shared memory.
BIAS_STAGES = 2
# Counters: a flag that some row is empty, and the number of thread blocks of the second launch that
# are done.
_LOW_ROW_COUNTERS = 2
# Computes rows of low or high scores.
_MMA = MmaFamily()


def streams_bias(problem: Problem) -> bool:
    """Whether the copy engine brings a bias beside the keys."""
    score = problem.score
    bias = score.bias if score is not None else None
    if bias is None or bias.dtype != problem.dtype or bias.alignment < STRIDE_UNIT:
        return False
    if not problem.layout.is_equal or problem.seqlen_k == 0 or _has_edges(problem):
        return False
    most = MAX_STRIDE // problem.itemsize
    return all(0 <= stride < most for stride in bias.strides)


def bias_strides(problem: Problem) -> tuple[int, int, int]:
    """Of batch, row and head of a bias that there is, in elements."""
    score = problem.score
    assert score is not None
    assert score.bias is not None
    batch, head, row = score.bias.strides
    return batch, row, head


def is_noted(problem: Problem, tile: HopperTile) -> bool:
    """Whether consumers leave out blocks of which their own 64 rows see nothing.

    It takes 2% of a window's time, and blocks no smaller than the tile leave nothing out. With
    causality alone it loses 1 to 3%, as those are two blocks of a query tile at most.
    """
    score = problem.score
    if score is None or not _has_edges(problem):
        return False
    return score.may_be_mapped or tile.Br > max(WARPGROUP_ROWS, tile.Bc)


def is_bounded(problem: Problem) -> bool:
    """Whether p = exp(score) can be taken as it is: bfloat16 has the exponents for it.

    The consumers then take turns at the softmax. Wider heads, whose products are longer, were not
    measured.
    """
    if problem.dtype != "bfloat16" or max(problem.head_dim, problem.head_dim_v) > 128:
        return False
    return problem.score is not None and problem.score.is_bounded


def finds_only_keys(problem: Problem) -> bool:
    """Return whether the kernel looks for rows that attend to one key at the end of a query tile.

    If a window alone hides keys, the only key of a row is the first key, which the mask tells.
    Looking for such rows takes 1.5% of the time of a causal window of 1024 keys (bfloat16, head_dim
    64, H100). Rows with sinks are left out, as a sink adds to the sum; so is float8, whose
    probabilities are powers of two.
    """
    score = problem.score
    if score is None or score.sinks or problem.is_float8:
        return False
    if score.changes_scores or score.hides_pairs or score.prefix or score.offsets:
        return True
    if not problem.layout.is_equal:
        return True
    # From row to row the number of keys grows while the first key is among them, and then stays or
    # falls. So if the last row attends to several keys, no row attends to a later key alone.
    last = np.array([problem.seqlen_q - 1])
    begin, end = problem.mask.begins(last)[0], problem.mask.ends(last)[0]
    return bool(begin > 0 and end - begin <= 1)


def computes_low_rows(problem: Problem) -> bool:
    """Return whether a launch computes rows of low or high scores."""
    score = problem.score
    return score is not None and score.has_low_scores and not problem.is_float8


def why_not_low_rows(problem: Problem, device: Device) -> str | None:
    """Return why that launch cannot be made, or None if it can be or is not needed."""
    return _MMA.why_not(problem, device) if computes_low_rows(problem) else None


def low_row_launches(problem: Problem, device: Device) -> tuple[Launch, ...]:
    """Return the launch that computes rows of low scores with the kernel of the `mma` family.

    See ``kernels_cu/forward/hopper/low_rows.cuh``.
    """
    if not computes_low_rows(problem):
        return ()
    tile = _low_row_tile(problem)
    tiles = ceil_div(problem.seqlen_q, tile.Br) * problem.batch * problem.heads_q
    threads, shared_memory = _MMA.threads(tile), _MMA.shared_memory(problem, tile)
    blocks = device.sm_count * device.blocks_per_sm(threads, shared_memory, 255)
    return (
        Launch(
            "low_rows",
            "compute_low_rows",
            (max(1, min(tiles, blocks)), 1, 1),
            threads,
            shared_memory,
            tile.min_blocks,
            source="forward/hopper/low_rows.cuh",
        ),
    )


def low_row_counters(problem: Problem) -> int:
    """Return the number of counters that the attention kernel and that launch communicate by."""
    return _LOW_ROW_COUNTERS if computes_low_rows(problem) else 0


def low_row_config(problem: Problem) -> dict[str, int | bool]:
    """Return the members of the `Config` struct for that launch: whether it is made, its tile."""
    if not computes_low_rows(problem):
        return {"marks_low_rows": False}
    tile = _low_row_tile(problem)
    return {
        "marks_low_rows": True,
        "low_Br": tile.Br,
        "low_Bc": tile.Bc,
        "low_warps": tile.warps,
        "low_stages": tile.stages,
        "low_q_in_registers": bool(tile.q_in_registers),
        "low_shared_memory": _MMA.shared_memory(problem, tile),
    }


def _low_row_tile(problem: Problem) -> MmaTile:
    """Return a small tile: few calls need the launch, but all compile it."""
    tile, sm90 = MmaTile(64, 32), device_for_arch("sm_90")
    is_legal = _MMA.why_not_tile(problem, sm90, tile) is None
    return tile if is_legal else _MMA.default_tile(problem, sm90)


def _has_edges(problem: Problem) -> bool:
    """Whether tiles of keys are left out on both sides, by a window or a block map."""
    score = problem.score
    if score is None:
        return False
    return score.left is not None or score.right is not None or may_have_block_map(problem)
