"""float8 inputs in the `hopper` family: the host side of `forward/hopper/float8/float8.cuh`.

The values are transposed into the workspace (`float8/transpose_values.cuh`), as an array
(batch, heads_kv, head_dim_v, keys) whose keys are padded to whole tiles.
"""

from __future__ import annotations

from cupy_flash.families.contract import round_up
from cupy_flash.families.hopper.tiles import HopperTile
from cupy_flash.families.schedule import STRIDE_UNIT, Launch, TensorMapSpec
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# Name of the array of transposed values, and of the launch that writes it.
VALUES = "values"
# Number of registers for state. It is smaller than for 16-bit inputs: a 192x128 tile at head_dim
# 128 does not spill with 160 registers.
_STATE_REGISTERS = 16
# Number of keys of a k step, and largest number of rows of a TMA box.
_STEP = 32
_MAX_ROWS = 256
# Largest head dim: at 256, the output and the scores of 32 keys take all registers.
_MAX_COLUMNS = 256
# Number of keys of a tile of the transposing kernel, which has as many threads.
_KEYS = 128
_BLOCKS_PER_SM = 8


def why_not(problem: Problem) -> str | None:
    """Return why no tile can serve the problem, or None if one may."""
    if not problem.layout.is_dense:
        return "supports float8 only in batches of equal lengths"
    if problem.score is not None:
        return "supports float8 only without modifications"
    if max(problem.head_dim, problem.head_dim_v) > _MAX_COLUMNS:
        return f"has too few registers for float8 with head dims over {_MAX_COLUMNS}"
    alignment = min(problem.tensors[name].alignment for name in ("q", "k"))
    if alignment < STRIDE_UNIT:
        return (
            f"TMA needs rows of q and k that are aligned to {STRIDE_UNIT} bytes; these are "
            f"aligned to {alignment}"
        )
    return None


def score_parts(problem: Problem, tile: HopperTile) -> int:
    """Return into how many parts the keys of a tile are divided; each part of S is one product.

    The partial output of a KV tile reuses the registers of one part of S and has as many columns.
    With one part, the partial output would be half empty for narrow values: 503 TFLOP/s with one
    part and 64 keys, 637 TFLOP/s with two parts (H100, head_dim 64).
    """
    return 2 if 2 * problem.head_dim_v <= tile.Bc else 1


def value_rows(problem: Problem, tile: HopperTile) -> int:
    """Return the rows of a transposed value tile: head_dim_v, padded to whole parts of O."""
    return round_up(problem.head_dim_v, tile.Bc // score_parts(problem, tile))


def why_not_tile(problem: Problem, tile: HopperTile) -> str | None:
    """Return why the tile is not legal, or None if it is."""
    if tile.Bc % _STEP:
        return f"Bc is {tile.Bc}; expected a multiple of {_STEP} for float8"
    if tile.q_steps:
        return f"q_steps is {tile.q_steps}; expected 0 for float8"
    if (rows := value_rows(problem, tile)) > _MAX_ROWS:
        return f"Bc is {tile.Bc}, which pads head_dim_v to {rows}; TMA loads at most {_MAX_ROWS}"
    return None


def config(problem: Problem, tile: HopperTile) -> dict[str, int | bool]:
    """Return the `Config` members that only float8 kernels have."""
    return {"score_parts": score_parts(problem, tile)}


def registers(problem: Problem, tile: HopperTile) -> int:
    """Return the registers per consumer thread: O, S (or partial outputs), P and loop state."""
    return value_rows(problem, tile) // 2 + tile.Bc // 2 + tile.Bc // 8 + _STATE_REGISTERS


def launch(device: Device) -> Launch:
    """Return the launch that transposes the values before the main kernel."""
    blocks = _BLOCKS_PER_SM * device.sm_count
    return Launch(
        VALUES, "hopper_transpose_values", (blocks, 1, 1), _KEYS, arguments=("float8_params",)
    )


def workspace(problem: Problem) -> int:
    """Return the size in bytes of the array of transposed values."""
    return problem.batch * problem.heads_kv * problem.head_dim_v * _padded_keys(problem)


def tensor_map(problem: Problem, box: tuple[int, int]) -> TensorMapSpec:
    """Return the tensor map of the transposed values; `box` has keys and head_dim_v columns."""
    p, line = problem, _padded_keys(problem)
    head_stride = p.head_dim_v * line
    return TensorMapSpec(
        p.dtype,
        (line, p.head_dim_v, p.heads_kv, p.batch),
        (line, head_stride, p.heads_kv * head_stride),
        box,
    )


def _padded_keys(problem: Problem) -> int:
    """Return the size in bytes of a row of transposed values: the keys, padded to whole tiles."""
    return round_up(problem.seqlen_k, _KEYS)
