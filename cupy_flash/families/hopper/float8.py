"""float8 as the `hopper` family takes it: the host's side of `forward/hopper/float8.cuh`.

The values become an array of their own in the workspace, transposed (`values.cuh`): (batch,
heads_kv, head_dim_v, keys), the keys filled up to whole tiles.
"""

from __future__ import annotations

from cupy_flash.families.contract import round_up
from cupy_flash.families.hopper.tiles import HopperTile
from cupy_flash.families.schedule import STRIDE_UNIT, Launch, TensorMapSpec
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# What the schedule calls the array.
VALUES = "values"
# Less than of 16 bits: with 192 rows, head_dim 128 and 128 keys the compiler spills none of 160.
_STATE_REGISTERS = 16
# Keys of a product's step, and rows of a copy.
_STEP = 32
_MOST_ROWS = 256
# The output and scores of 32 keys take all registers.
_MOST_COLUMNS = 256
# Keys of a tile, and threads that bring it to shared memory.
_KEYS = 128
_BLOCKS_PER_SM = 8


def why_not(problem: Problem) -> str | None:
    """Why no tile can serve the problem, or None."""
    if not problem.layout.is_equal:
        return "it transposes values of float8 of equal lengths only"
    if problem.score is not None:
        return "it takes float8 without modifications only"
    if max(problem.head_dim, problem.head_dim_v) > _MOST_COLUMNS:
        return f"it has no registers for float8 of head_dim above {_MOST_COLUMNS}"
    alignment = min(problem.tensors[name].alignment for name in ("q", "k"))
    if alignment < STRIDE_UNIT:
        return (
            f"the copy engine needs rows of q and k that begin on {STRIDE_UNIT} bytes; these "
            f"begin on {alignment}"
        )
    return None


def score_parts(problem: Problem, tile: HopperTile) -> int:
    """Parts of the keys whose scores are products of their own.

    A share of the output has the registers of one, so it is as wide. Two for narrow values, of
    which a share would be half empty: 637 TFLOP/s at head_dim 64 on an H100, with one and 64 keys
    503. At head_dim 128 two have 944, one 1030, at 256 both 1180.
    """
    return 2 if 2 * problem.head_dim_v <= tile.Bc else 1


def value_rows(problem: Problem, tile: HopperTile) -> int:
    """Columns of values in shared memory, where they are rows: whole shares."""
    return round_up(problem.head_dim_v, tile.Bc // score_parts(problem, tile))


def why_not_tile(problem: Problem, tile: HopperTile) -> str | None:
    """Why the tile is not legal, or None if it is."""
    if tile.Bc % _STEP:
        return f"Bc is {tile.Bc}; expected a multiple of {_STEP} of float8"
    if tile.q_steps:
        return f"q_steps is {tile.q_steps}; expected 0 of float8"
    if (rows := value_rows(problem, tile)) > _MOST_ROWS:
        return f"values have {rows} columns in shares of Bc; a copy takes up to {_MOST_ROWS}"
    return None


def config(problem: Problem, tile: HopperTile) -> dict[str, int | bool]:
    """Constants of the kernel that others do not have."""
    return {"score_parts": score_parts(problem, tile)}


def registers(problem: Problem, tile: HopperTile) -> int:
    """Of O, S or shares of O, P, and what else lives in the main loop."""
    return value_rows(problem, tile) // 2 + tile.Bc // 2 + tile.Bc // 8 + _STATE_REGISTERS


def launch(device: Device) -> Launch:
    """What makes the array, ahead of the kernel that reads it."""
    blocks = _BLOCKS_PER_SM * device.sm_count
    return Launch(VALUES, "hopper_values", (blocks, 1, 1), _KEYS, arguments=("float8_params",))


def workspace(problem: Problem) -> int:
    """Bytes of the array."""
    return problem.batch * problem.heads_kv * problem.head_dim_v * _line(problem)


def tensor_map(problem: Problem, box: tuple[int, int]) -> TensorMapSpec:
    """Of the array, with the keys and columns of a copy."""
    p, line = problem, _line(problem)
    of_head = p.head_dim_v * line
    return TensorMapSpec(
        p.dtype,
        (line, p.head_dim_v, p.heads_kv, p.batch),
        (line, of_head, p.heads_kv * of_head),
        box,
    )


def _line(problem: Problem) -> int:
    """Bytes between the columns."""
    return round_up(problem.seqlen_k, _KEYS)
