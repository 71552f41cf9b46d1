"""Score modifications in the `hopper` family: biases by TMA, masks, bounds and low scores."""

from __future__ import annotations

import numpy as np

from cupy_flash.families.contract import ceil_div, may_have_block_mask
from cupy_flash.families.hopper.block import WARPGROUP_ROWS
from cupy_flash.families.hopper.tiles import HopperTile
from cupy_flash.families.mma.forward import MmaFamily, MmaTile
from cupy_flash.families.schedule import MAX_STRIDE, STRIDE_UNIT, Launch
from cupy_flash.problem.device import Device, device_for_arch
from cupy_flash.problem.problem import Problem

# Number of bias tiles in shared memory.
BIAS_STAGES = 2
# Number of counters: a flag that some row is empty, and the number of finished thread blocks of
# the launch that computes such rows.
_LOW_ROW_COUNTERS = 2
# Family whose kernel computes rows of low or high scores.
_MMA = MmaFamily()


def can_stream_bias(problem: Problem) -> bool:
    """Return whether TMA can load tiles of a bias."""
    score = problem.score
    bias = score.bias if score is not None else None
    if bias is None or bias.dtype != problem.dtype or bias.alignment < STRIDE_UNIT:
        return False
    if not problem.layout.is_dense or problem.seqlen_k == 0:
        return False
    most = MAX_STRIDE // problem.itemsize
    return all(0 <= stride < most for stride in bias.strides)


def streams_bias(problem: Problem) -> bool:
    """Return whether TMA loads tiles of a bias in addition to keys and values."""
    return can_stream_bias(problem) and not _has_edges(problem)


def bias_strides(problem: Problem) -> tuple[int, int, int]:
    """Return the strides of batch, row and head of the bias, in elements; a bias is required."""
    score = problem.score
    assert score is not None
    assert score.bias is not None
    batch, head, row = score.bias.strides
    return batch, row, head


def skips_tiles(problem: Problem, tile: HopperTile) -> bool:
    """Return whether a consumer skips KV tiles that are fully masked for its own 64 rows.

    Skipping costs 2% of the time with a window, and KV tiles of at least Br keys are never skipped.
    A causal mask alone leaves at most two such tiles per query tile, so it would lose 1 to 3%.
    """
    score = problem.score
    if score is None or not _has_edges(problem):
        return False
    return score.block_mask_suffices or tile.Br > max(WARPGROUP_ROWS, tile.Bc)


def is_bounded(problem: Problem) -> bool:
    """Return whether P = exp(S) needs no row maximum, because bounded scores fit bfloat16's range.

    The consumers then compute their softmax one after another (ping-pong). Larger head dims, with
    longer products, were not measured.
    """
    if problem.dtype != "bfloat16" or max(problem.head_dim, problem.head_dim_v) > 128:
        return False
    return problem.score is not None and problem.score.is_bounded


def finds_only_keys(problem: Problem) -> bool:
    """Return whether the kernel checks each query tile for rows that attend to only one key.

    If only a window masks keys, such a row attends to key 0, and the mask identifies it. The check
    takes 1.5% of the time (causal window of 1024 keys, head_dim 64, H100). Sinks need no check, as
    a sink adds to the sum. Dropout needs none, as it multiplies the value of an only key. float8
    needs none, as the probability of an only key is a power of two.
    """
    score = problem.score
    if score is None or score.sinks or score.dropout or problem.is_float8:
        return False
    if score.changes_scores or score.masks_pairs or score.prefix or score.offsets:
        return True
    if not problem.layout.is_dense:
        return True
    # From row to row, the number of visible keys grows while key 0 is visible, and then stays or
    # falls. So if the last row attends to several keys, no row attends to a later key alone.
    last = np.array([problem.seqlen_q - 1])
    begin, end = problem.mask.begins(last)[0], problem.mask.ends(last)[0]
    return bool(begin > 0 and end - begin <= 1)


def computes_low_rows(problem: Problem) -> bool:
    """Return whether a launch computes rows of low or high scores."""
    score = problem.score
    return score is not None and score.has_low_scores and not problem.is_float8


def why_not_low_rows(problem: Problem, device: Device) -> str | None:
    """Return why rows of low scores cannot be computed; None if they can be, or need not be."""
    return _MMA.why_not(problem, device) if computes_low_rows(problem) else None


def low_row_launches(problem: Problem, device: Device) -> tuple[Launch, ...]:
    """Return the launch, if needed, of the `mma` kernel for rows of very low or high scores.

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
    """Return the number of counters through which the main kernel and the launch communicate."""
    return _LOW_ROW_COUNTERS if computes_low_rows(problem) else 0


def low_row_config(problem: Problem) -> dict[str, int | bool]:
    """Return the `Config` members of the launch for low rows: whether it exists, and its tile."""
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
    """Return a small tile for low rows: few calls need the launch, but all compile it."""
    tile, sm90 = MmaTile(64, 32), device_for_arch("sm_90")
    is_legal = _MMA.why_not_tile(problem, sm90, tile) is None
    return tile if is_legal else _MMA.default_tile(problem, sm90)


def _has_edges(problem: Problem) -> bool:
    """Return whether a window or a block mask may skip KV tiles at both ends of the keys."""
    score = problem.score
    if score is None:
        return False
    return score.left is not None or score.right is not None or may_have_block_mask(problem)
