"""Plan of the gradient of a bias on Hopper: `kernels_cu/backward/hopper/bias_gradients.cuh`."""

from __future__ import annotations

import math

from cupy_flash.families.contract import ceil_div
from cupy_flash.families.hopper.block import BARRIER_BYTES, WARPGROUP, WARPGROUP_ROWS
from cupy_flash.families.hopper.scores import bias_strides, can_stream_bias
from cupy_flash.families.hopper.tensor_maps import map_spec
from cupy_flash.families.input_gradients import BIAS_ENTRY, BiasPlan, kept_axes
from cupy_flash.families.schedule import Launch, TensorMapSpec
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

_SOURCE = "backward/hopper/bias_gradients.cuh"

# Number of rows, and of keys, of a tile of the gradient, and number of consumer warpgroups.
_SIZE, _CONSUMERS = 128, 2
# Number of columns of head_dim in a slot (a stage of the operands), and size of a slot in bytes.
_COLUMNS = 64
_SLOT_BYTES = 2 * _SIZE * _COLUMNS * 2
# Shared memory of a thread block on sm_90, in bytes, and largest number of slots.
SHARED_MEMORY, _MOST_SLOTS = 227 * 1024, 6
# Size in bytes of `BiasWorkSizes` in shared memory.
_SIZES_BYTES = 64
# Number of registers of a producer thread and of a consumer thread.
_REGISTERS = (40, 232)
# Number of score tiles that are added in float32, and size in bytes of a compensated sum.
_RUN_LENGTH, _SUM_BYTES = 64, 8
# Number of thread blocks of a cluster, which load operands for each other. Two thread blocks read a
# quarter less from L2.
_RANKS = 2
# Limit of the numbers of tiles, which are ints in the kernel.
_MOST_TILES = 2**31
# Number of work items (partial sums) per SM that evens out the work.
_ITEMS_PER_SM = 4
# Time to start and write a work item, in units of the time of a score tile.
_TILE_COST = 2


def serves(problem: Problem) -> bool:
    """Return whether the kernel serves a problem that the backward `hopper` family serves."""
    bias, score = problem.gradient_spec.bias, problem.score
    if bias is None or 0 in bias or score is None or score.dropout:
        return False
    # The mask is the same in all sequences, and position alone masks pairs.
    is_uniform = problem.layout.is_dense and not (score.prefix or score.offsets or score.seqused_q)
    return is_uniform and not score.masks_pairs and math.prod(_score_tiles(problem)) < _MOST_TILES


def bias_plan(problem: Problem, device: Device) -> BiasPlan | None:
    """Return how the kernel computes the gradient of a bias; None if it does not serve it."""
    if not serves(problem):
        return None
    ranks = _ranks(problem)
    tiles, summed = _tile_counts(problem)
    clusters = max(1, device.sm_count // ranks)
    parts = _parts(tiles, summed, clusters)
    clusters = min(clusters, tiles * parts)
    launch = Launch(
        BIAS_ENTRY,
        "hopper_bias_gradients",
        (clusters, 1, ranks),
        (_CONSUMERS + 1) * WARPGROUP,
        _shared_memory(problem),
        1,
        cluster=ranks if ranks > 1 else 0,
        arguments=(
            "bias_gradient_maps" if can_stream_bias(problem) else "gradient_maps",
            "gradients",
        ),
        source=_SOURCE,
    )
    has_runs = ceil_div(summed, parts) > _RUN_LENGTH
    runs = clusters * ranks * _SIZE**2 * _SUM_BYTES if has_runs else 0
    return BiasPlan(launch, parts, runs)


def tensor_maps(problem: Problem) -> dict[str, TensorMapSpec]:
    """Return the tensor map of the bias, if TMA loads it."""
    if not can_stream_bias(problem):
        return {}
    scores = (problem.seqlen_k, problem.seqlen_q, problem.heads_q, problem.batch)
    box = (_COLUMNS, WARPGROUP_ROWS)
    return {"bias": map_spec(problem, scores, bias_strides(problem), box)}


def config(problem: Problem) -> dict[str, int | bool]:
    """Return the members of the `Config` struct that the kernel reads."""
    if not serves(problem):
        return {}
    _, _, rows, keys = kept_axes(problem)
    producer_registers, consumer_registers = _REGISTERS
    return {
        "bias_ranks": _ranks(problem),
        "bias_slots": _slots(problem),
        "bias_streamed": can_stream_bias(problem),
        "bias_keeps_rows": rows,
        "bias_keeps_keys": keys,
        "bias_memory": _shared_memory(problem),
        "bias_producer_registers": producer_registers,
        "bias_consumer_registers": consumer_registers,
    }


def _score_tiles(problem: Problem) -> tuple[int, int, int, int]:
    """Return the number of score tiles of a cluster along each axis: batch, heads, rows, keys."""
    rows = _SIZE * _ranks(problem)
    tiles = ceil_div(problem.seqlen_q, rows), ceil_div(problem.seqlen_k, _SIZE)
    return problem.batch, problem.heads_q, *tiles


def _ranks(problem: Problem) -> int:
    """Return the number of thread blocks of a cluster, which compute different rows."""
    _, _, keeps_rows, _ = kept_axes(problem)
    return _RANKS if keeps_rows and problem.seqlen_q > _SIZE else 1


def _tile_counts(problem: Problem) -> tuple[int, int]:
    """Return the number of gradient tiles, and of score tiles that are summed into each."""
    axes = list(zip(_score_tiles(problem), kept_axes(problem), strict=True))
    tiles = math.prod(count for count, is_kept in axes if is_kept)
    return tiles, math.prod(count for count, is_kept in axes if not is_kept)


def _parts(tiles: int, summed: int, clusters: int) -> int:
    """Return the number of parts of each sum that minimizes the time of the slowest cluster."""

    def time(parts: int) -> int:
        return ceil_div(tiles * parts, clusters) * (ceil_div(summed, parts) + _TILE_COST)

    most = max(1, min(summed, ceil_div(_ITEMS_PER_SM * clusters, tiles)))
    return min(range(1, most + 1), key=time)


def _slots(problem: Problem) -> int:
    """Return the number of slots of operands in shared memory."""
    most = (SHARED_MEMORY - _other_memory(problem) - _barrier_bytes(_MOST_SLOTS)) // _SLOT_BYTES
    return min(_MOST_SLOTS, most)


def _other_memory(problem: Problem) -> int:
    """Return the size in bytes of the bias, the sums over rows, and the numbers of tiles."""
    _, _, keeps_rows, _ = kept_axes(problem)
    bias = _SIZE * _SIZE * problem.itemsize if can_stream_bias(problem) else 0
    return bias + _SIZES_BYTES + (0 if keeps_rows else _CONSUMERS * WARPGROUP // 32 * _SIZE * 4)


def _shared_memory(problem: Problem) -> int:
    slots = _slots(problem)
    return slots * _SLOT_BYTES + _other_memory(problem) + _barrier_bytes(slots)


def _barrier_bytes(slots: int) -> int:
    """Return the size in bytes of the barriers: full and empty of each slot and of each bias."""
    return 2 * (slots + _CONSUMERS) * BARRIER_BYTES
