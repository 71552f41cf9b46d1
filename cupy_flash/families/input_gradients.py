"""Gradients of biases, sinks and captured arrays, by kernels that all backward families use.

These kernels recompute the scores and run after the kernels that compute dq, dk and dv.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupy_flash.families.contract import ceil_div, round_up
from cupy_flash.families.schedule import Launch
from cupy_flash.problem.arrays import ITEMSIZE
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# Members of `GradientParams` that receive addresses in the workspace.
BIAS_PARTS, BIAS_RUNS, CAPTURE_SUMS = "bias_parts", "bias_runs", "capture_sums"

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


# Name of the entry point of the kernel that computes the gradient of a bias.
BIAS_ENTRY = "bias_gradients"


@dataclass(frozen=True)
class BiasPlan:
    """Computation of the gradient of a bias.

    Attributes
    ----------
    launch
        Launch of the kernel with the entry point `BIAS_ENTRY`.
    parts
        Number of thread blocks, or clusters, that divide the score tiles of one gradient tile. If
        there are several, another kernel adds their partial sums.
    runs
        Size in bytes of the compensated sums of runs of score tiles in the workspace.
    """

    launch: Launch
    parts: int
    runs: int = 0


def bias_plan(problem: Problem, device: Device) -> BiasPlan | None:
    """Return the plan of a kernel that runs on every GPU; None if the call has no such gradient."""
    bias = problem.gradient_spec.bias
    if bias is None or 0 in bias:
        return None
    parts = _bias_parts(problem, device)
    blocks = bias_tiles(problem) * parts
    return BiasPlan(_tiled(problem, device, BIAS_ENTRY, blocks, _BIAS), parts)


def launches(problem: Problem, device: Device, bias: BiasPlan | None) -> tuple[Launch, ...]:
    """Return the launches for the gradients of inputs other than q, k and v."""
    gradient = problem.gradient_spec
    kernels: list[Launch] = []
    if gradient.wants("sinks"):
        kernels.append(_launch("sink_gradients", problem.heads_q, _SINKS, threads=_SINK_THREADS))
    if bias is not None:
        kernels.append(bias.launch)
        if bias.parts > 1:
            blocks = ceil_div(_bias_elements(problem), _THREADS)
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


def kept_axes(problem: Problem) -> tuple[bool, bool, bool, bool]:
    """Return along which axes (batch, heads, rows, keys) the bias is not broadcast."""
    assert problem.gradient_spec.bias is not None
    batch, heads, rows, keys = (length > 1 for length in problem.gradient_spec.bias)
    # The row of a packed bias determines the sequence.
    return rows if problem.layout.packed_q else batch, heads, rows, keys


def bias_tiles(problem: Problem) -> int:
    """Return the number of tiles of the bias gradient; 0 if it is not computed."""
    if problem.gradient_spec.bias is None:
        return 0
    axes = zip(_score_tiles(problem), kept_axes(problem), strict=True)
    return math.prod(tiles for tiles, is_kept in axes if is_kept)


def _bias_parts(problem: Problem, device: Device) -> int:
    """Return over how many thread blocks the score tiles of one bias gradient tile are split."""
    assert problem.gradient_spec.bias is not None
    kept = kept_axes(problem)
    if problem.layout.packed_q and (kept[2] or problem.gradient_spec.bias[3] > problem.seqlen_k):
        # No thread block would write partial sums for rows and keys that belong to no sequence.
        return 1
    axes = zip(_score_tiles(problem), kept, strict=True)
    passing = math.prod(tiles for tiles, is_kept in axes if not is_kept)
    wanted = ceil_div(_BLOCKS_PER_SM * device.sm_count, max(1, bias_tiles(problem)))
    return max(1, min(passing, wanted))


def _bias_elements(problem: Problem) -> int:
    assert problem.gradient_spec.bias is not None
    return math.prod(problem.gradient_spec.bias)


def _capture_blocks(problem: Problem, device: Device) -> int:
    batch, heads, row_tiles, _ = _score_tiles(problem)
    return max(1, min(batch * heads * row_tiles, _BLOCKS_PER_SM * device.sm_count))


def workspace(problem: Problem, device: Device, bias: BiasPlan | None) -> dict[str, int]:
    """Return the size in bytes of each array in the workspace, by the `GradientParams` member."""
    gradient = problem.gradient_spec
    sizes = {}
    real = ITEMSIZE[problem.lse_dtype]
    if bias is not None and bias.parts > 1:
        sizes[BIAS_PARTS] = bias.parts * _bias_elements(problem) * real
    if bias is not None and bias.runs:
        sizes[BIAS_RUNS] = bias.runs
    if gradient.captured:
        assert problem.score is not None
        largest = _capture_blocks(problem, device) * len(problem.score.differentiable) * real
        flags = ceil_div(gradient.captured, _FLAGS_OF_WORD) * 4
        sizes[CAPTURE_SUMS] = gradient.captured * _FIXED_BYTES + round_up(largest, 4) + flags
    return sizes


def params(problem: Problem, bias: BiasPlan | None) -> dict[str, tuple[int, ...]]:
    """Return the fields of `BiasGradient` except its address, if the gradient is computed."""
    shape = problem.gradient_spec.bias
    if shape is None:
        return {}
    return {"dbias": (*shape, 1 if bias is None else bias.parts)}
