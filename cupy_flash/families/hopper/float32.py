"""float32 inputs in the `hopper` family: the host side of `forward/hopper/float32_bf16x3.cuh`.

q, k and v are each converted to an array in the workspace, (3, batch, seqlen, heads, columns). An
element is the sum of three bfloat16 components, the largest first. Columns are padded to 16 bytes.
"""

from __future__ import annotations

import itertools
import math

from cupy_flash.families.contract import round_up
from cupy_flash.families.hopper.block import MAX_COLUMNS, cta_ranks
from cupy_flash.families.schedule import Launch, TensorMapSpec
from cupy_flash.problem.arrays import Shape
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

ROWS = ("q", "k", "v")
_COMPONENTS = 3
_ITEMSIZE = 2
_CHUNK = 8
_THREADS, _BLOCKS_PER_SM = 256, 8
# Least number of keys, and of query rows per KV head, for which the family is faster than others.
# At 512, it is 1.2 to 1.4 times as fast as `mma` (H100, head_dim up to 128). A causal mask at
# head_dim 64 needs more rows, and head dims above 128 need fewer.
_MIN_ROWS = 512
_NARROW_CAUSAL_MIN_ROWS = 1024
_WIDE_MIN_ROWS = 256


def why_not(problem: Problem) -> str | None:
    """Return why no tile can serve a float32 problem, or None if one may."""
    if not problem.layout.is_dense:
        return "supports float32 only in batches of equal lengths"
    if problem.score is not None:
        return "supports float32 only without modifications"
    if cta_ranks(problem) > 1:
        return f"supports float32 only for head dims up to {MAX_COLUMNS}"
    if problem.seqlen_k == 1:
        return "its float32 products do not reproduce the value of a single key exactly"
    return None


def why_not_first(problem: Problem) -> str | None:
    """Return why a kernel that reads float32 without conversion is faster, or None."""
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    least = _least_rows(problem)
    if min(rows, problem.seqlen_k) < least:
        return (
            f"is slower than other families for fewer than {least} keys, or {least} query rows per "
            "KV head, because it first splits float32 into components"
        )
    if _are_broadcast(problem):
        return "splits float32 elements once per repetition, and these arrays are broadcast"
    return None


def count(problem: Problem) -> int:
    """Return the number of components of an element: 3 bfloat16 for float32, otherwise 1."""
    return _COMPONENTS if problem.dtype == "float32" else 1


def output_registers(problem: Problem, columns: int) -> int:
    """Return the number of registers per consumer thread for O and, if float32, partial outputs.

    A partial output is the contribution of one KV tile. It has all columns or, for wide heads, 32
    columns in each of two buffers. `columns` is the number of output columns of a thread block.
    """
    if count(problem) == 1:
        return round_up(columns, 16) // 2
    if max(problem.head_dim, problem.head_dim_v) > 128:
        return round_up(problem.head_dim_v, 32) // 2 + 32
    return round_up(problem.head_dim_v, 16)


def launch(device: Device) -> Launch:
    """Return the launch that converts q, k and v before the main kernel."""
    blocks = _BLOCKS_PER_SM * device.sm_count
    return Launch("pieces", "hopper_components", (blocks, 1, 1), _THREADS)


def workspace(problem: Problem) -> tuple[int, dict[str, int]]:
    """Return the size in bytes of the converted arrays, and the byte offset of each."""
    sizes = [math.prod(_shape(problem, name)) * _ITEMSIZE * _COMPONENTS for name in ROWS]
    *starts, end = itertools.accumulate(sizes, initial=0)
    return end, {_name(name): start for name, start in zip(ROWS, starts, strict=True)}


def tensor_maps(problem: Problem, boxes: dict[str, tuple[int, int]]) -> dict[str, TensorMapSpec]:
    """Return tensor maps of the converted arrays, with components as additional batches.

    `boxes` has the columns and rows of a TMA box for each of q, k and v.
    """
    maps = {}
    for name in ROWS:
        columns, rows, heads, batch = _shape(problem, name)
        row = heads * columns * _ITEMSIZE
        strides = (row, columns * _ITEMSIZE, rows * row)
        shape = (columns, rows, heads, batch * _COMPONENTS)
        maps[_name(name)] = TensorMapSpec("bfloat16", shape, strides, boxes[name])
    return maps


def _least_rows(problem: Problem) -> int:
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > 128:
        return _WIDE_MIN_ROWS
    return _NARROW_CAUSAL_MIN_ROWS if problem.causal and widest <= 64 else _MIN_ROWS


def _are_broadcast(problem: Problem) -> bool:
    """Return whether an array is broadcast (stride 0): its conversion would repeat elements."""
    p = problem
    lengths = {name: _shape(p, name)[:0:-1] for name in ROWS}  # batch, heads, rows
    return any(
        length > 1 and stride == 0
        for name in ROWS
        for length, stride in zip(
            lengths[name], (p.tensors[name].strides[i] for i in (0, 2, 1)), strict=True
        )
    )


def _name(name: str) -> str:
    return f"{name}_pieces"


def _shape(problem: Problem, name: str) -> Shape:
    p = problem
    rows, heads = (p.seqlen_q, p.heads_q) if name == "q" else (p.seqlen_k, p.heads_kv)
    return round_up(p.head_dim_v if name == "v" else p.head_dim, _CHUNK), rows, heads, p.batch
