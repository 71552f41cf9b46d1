"""Gradients of biases, sinks and captured arrays, by kernels that all backward families use.

These kernels recompute the scores and run after the kernels that compute dq, dk and dv.
"""

from __future__ import annotations

import math

from cupy_flash.families.contract import ceil_div, round_up
from cupy_flash.families.schedule import Launch
from cupy_flash.problem.arrays import ITEMSIZE
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# Members of `GradientParams` that receive addresses in the workspace.
BIAS_PARTS, CAPTURE_SUMS = "bias_parts", "capture_sums"

_SINKS = "backward/inputs/sinks.cuh"
_BIAS = "backward/inputs/bias.cuh"
_CAPTURES = "backward/inputs/captures.cuh"

_THREADS = 256
_SINK_THREADS = 1024
# Number of thread blocks per SM, if there are enough score tiles.
_BLOCKS_PER_SM = 2
# Number of operand columns in shared memory at once, in kernels on CUDA cores.
_SLICE = 32
# Size in bytes of a fixed-point sum, see `kernels_cu/backward/inputs/fixed_point.cuh`.
_FIXED_BYTES = 16
_FLAGS_OF_WORD = 16


def launches(problem: Problem, device: Device) -> tuple[Launch, ...]:
    """Return the launches for the gradients of inputs other than q, k and v."""
    gradient = problem.gradient_spec
    kernels: list[Launch] = []
    if gradient.wants("sinks"):
        kernels.append(_launch("sink_gradients", problem.heads_q, _SINKS, threads=_SINK_THREADS))
    if gradient.bias is not None and 0 not in gradient.bias:
        parts = bias_parts(problem, device)
        kernels.append(
            _tiled(problem, device, "bias_gradients", bias_tiles(problem) * parts, _BIAS)
        )
        if parts > 1:
            blocks = ceil_div(math.prod(gradient.bias), _THREADS)
            kernels.append(_launch("bias_sums", blocks, _BIAS))
    if gradient.captured:
        blocks = _capture_blocks(problem, device)
        for entry in ("measure_captures", "add_captures"):
            kernels.append(_tiled(problem, device, entry, blocks, _CAPTURES))
        kernels.append(_launch("write_captures", blocks, _CAPTURES))
    return tuple(kernels)


def _launch(
    entry: str,
    blocks: int,
    source: str,
    *,
    threads: int = _THREADS,
    shared_memory: int = 0,
    min_blocks: int | None = None,
) -> Launch:
    blocks = max(1, blocks)
    return Launch.of_gradients(
        entry, entry, blocks, threads, shared_memory, min_blocks, source=source
    )


def _tiled(problem: Problem, device: Device, entry: str, blocks: int, source: str) -> Launch:
    """Return the launch of a kernel that iterates over tiles of the score matrix."""
    members = config(problem)
    memory = members["score_memory" if device.arch >= 80 else "simt_score_memory"]
    # float64 takes twice the registers, so the compiler may use all registers of an SM for one
    # thread block.
    min_blocks = 1 if problem.dtype == "float64" else _BLOCKS_PER_SM
    return _launch(entry, blocks, source, shared_memory=memory, min_blocks=min_blocks)


def config(problem: Problem) -> dict[str, int]:
    """Return the `Config` members for shared memory: the maximum of operands and scores of a tile.

    `simt_score_memory` is for CUDA cores, `score_memory` for tensor cores if inputs are 16-bit.
    """
    size, real = _size(problem), ITEMSIZE[problem.lse_dtype]
    elements = size * (size + 1) * real
    simt = max(2 * size * (_SLICE + 1) * real, elements)
    dim = round_up(max(problem.head_dim, problem.head_dim_v), 16)
    tensor = max(2 * size * dim * problem.itemsize, elements)
    return {
        "simt_score_memory": simt,
        "score_memory": tensor if problem.itemsize == 2 else simt,
    }


def _size(problem: Problem) -> int:
    """Return the number of query rows, and of keys, of a tile of the score matrix."""
    return 32 if problem.dtype == "float64" else 64


def _score_tiles(problem: Problem) -> tuple[int, int, int, int]:
    """Return the numbers of score tiles along the batch, heads, query rows and keys."""
    size = _size(problem)
    tiles = ceil_div(problem.seqlen_q, size), ceil_div(problem.seqlen_k, size)
    return problem.batch, problem.heads_q, *tiles


def _kept_axes(problem: Problem) -> tuple[bool, bool, bool, bool]:
    """Return along which axes (batch, heads, rows, keys) the bias is not broadcast."""
    assert problem.gradient_spec.bias is not None
    batch, heads, rows, keys = (length > 1 for length in problem.gradient_spec.bias)
    # The row of a packed bias determines the sequence.
    return rows if problem.layout.packed_q else batch, heads, rows, keys


def bias_tiles(problem: Problem) -> int:
    """Return the number of tiles of the bias gradient; 0 if it is not computed."""
    if problem.gradient_spec.bias is None:
        return 0
    axes = zip(_score_tiles(problem), _kept_axes(problem), strict=True)
    return math.prod(tiles for tiles, is_kept in axes if is_kept)


def bias_parts(problem: Problem, device: Device) -> int:
    """Return over how many thread blocks the score tiles of one bias gradient tile are split."""
    assert problem.gradient_spec.bias is not None
    kept = _kept_axes(problem)
    if problem.layout.packed_q and (kept[2] or problem.gradient_spec.bias[3] > problem.seqlen_k):
        # No thread block would write partial sums for rows and keys that belong to no sequence.
        return 1
    axes = zip(_score_tiles(problem), kept, strict=True)
    passing = math.prod(tiles for tiles, is_kept in axes if not is_kept)
    wanted = ceil_div(_BLOCKS_PER_SM * device.sm_count, max(1, bias_tiles(problem)))
    return max(1, min(passing, wanted))


def _capture_blocks(problem: Problem, device: Device) -> int:
    batch, heads, row_tiles, _ = _score_tiles(problem)
    return max(1, min(batch * heads * row_tiles, _BLOCKS_PER_SM * device.sm_count))


def workspace(problem: Problem, device: Device) -> dict[str, int]:
    """Return the size in bytes of each array in the workspace, by the `GradientParams` member."""
    gradient = problem.gradient_spec
    sizes = {}
    real = ITEMSIZE[problem.lse_dtype]
    if gradient.bias is not None and (parts := bias_parts(problem, device)) > 1:
        sizes[BIAS_PARTS] = parts * math.prod(gradient.bias) * real
    if gradient.captured:
        assert problem.score is not None
        largest = _capture_blocks(problem, device) * len(problem.score.differentiable) * real
        flags = ceil_div(gradient.captured, _FLAGS_OF_WORD) * 4
        sizes[CAPTURE_SUMS] = gradient.captured * _FIXED_BYTES + round_up(largest, 4) + flags
    return sizes


def bias_fields(problem: Problem, device: Device) -> tuple[int, ...] | None:
    """Return the fields of `BiasGradient` except its address; None if it is not computed."""
    bias = problem.gradient_spec.bias
    return None if bias is None else (*bias, bias_parts(problem, device))
