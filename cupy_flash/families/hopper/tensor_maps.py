"""Tensor maps of the `hopper` family, through which TMA loads tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from cupy_flash.families.contract import round_up
from cupy_flash.families.hopper import float8, float32, mla
from cupy_flash.families.hopper.cta_columns import block_columns, operand_bytes
from cupy_flash.families.hopper.scores import bias_strides, streams_bias
from cupy_flash.families.hopper.tiles import HopperTile
from cupy_flash.families.schedule import MAX_STRIDE, STRIDE_UNIT, TensorMapSpec
from cupy_flash.problem.arrays import Shape, Strides
from cupy_flash.problem.problem import Problem


def why_not_rows(problem: Problem) -> str | None:
    """Return why TMA cannot load rows of this alignment, or None if it can."""
    if problem.alignment >= STRIDE_UNIT:
        return None
    return (
        f"TMA needs rows that are aligned to {STRIDE_UNIT} bytes; these are aligned to "
        f"{problem.alignment}"
    )


def why_not_strides(
    problem: Problem, maps: Callable[[], Mapping[str, TensorMapSpec]]
) -> str | None:
    """Return why TMA does not support the strides of a problem's maps, or None if it does."""
    most = MAX_STRIDE // problem.itemsize
    if all(0 <= n < most for tensor in problem.tensors.values() for n in tensor.strides):
        # Skip the construction of the maps, which takes 15 us.
        return None
    for spec in maps().values():
        for length, stride in zip(spec.shape[1:], spec.strides, strict=True):
            if length > 1 and not 0 <= stride < MAX_STRIDE:
                return f"TMA does not support a stride of {stride} bytes"
    return None


def argument(problem: Problem) -> str:
    """Return the name of the tensor map argument of the forward kernel (see `Launch.arguments`)."""
    if mla.holds_values_in_keys(problem):
        return "mla_maps"
    return "biased_maps" if streams_bias(problem) else "maps"


def forward_maps(problem: Problem, tile: HopperTile) -> dict[str, TensorMapSpec]:
    """Return the tensor maps of q, k and v (or their converted arrays) and of a bias, by name."""
    p = problem
    rows_q, batch_q, rows_k, batch_k = p.seqlen_q, p.batch, p.seqlen_k, p.batch
    if not p.layout.is_dense:
        if p.layout.packed_q:
            rows_q, batch_q = p.layout.total_q, 1
        if p.layout.packed_k:
            rows_k, batch_k = p.layout.total_k, 1
        elif p.layout.page_size:
            rows_k, batch_k = p.layout.page_size, p.layout.pages
        else:
            batch_k = p.layout.caches
    if float32.count(p) > 1:
        rows = {"q": tile.Br, "k": tile.Bc, "v": tile.Bc}
        dims = {"q": p.head_dim, "k": p.head_dim, "v": p.head_dim_v}
        boxes = {name: (box_columns(dims[name]), rows[name]) for name in float32.ROWS}
        return float32.tensor_maps(p, boxes)
    maps = {
        "q": _spec(p, "q", (p.head_dim, rows_q, p.heads_q, batch_q), tile.Br),
        "k": _spec(p, "k", (p.head_dim, rows_k, p.heads_kv, batch_k), tile.Bc),
    }
    if p.is_float8:
        box = (box_columns(tile.Bc, 1), float8.value_rows(p, tile))
        maps[float8.VALUES] = float8.tensor_map(p, box)
        return maps
    maps["v"] = _spec(p, "v", (p.head_dim_v, rows_k, p.heads_kv, batch_k), tile.Bc)
    if mla.holds_values_in_keys(p):
        # Widths of a box for the columns of the values, and for the other columns.
        line, rest = (box_columns(n // 2) for n in (p.head_dim_v, p.head_dim - p.head_dim_v))
        for name, height in (("q", tile.Br), ("k", tile.Bc)):
            spec = maps[name]
            maps[name] = dataclasses.replace(spec, box=(line, height))
            maps[f"{name}_rest"] = dataclasses.replace(spec, box=(rest, height), array=name)
    if streams_bias(p):
        scores = (p.seqlen_k, p.seqlen_q, p.heads_q, p.batch)
        box = (box_columns(tile.Bc), tile.Br)
        maps["bias"] = map_spec(p, scores, bias_strides(p), box)
    return maps


def map_spec(
    problem: Problem, shape: Shape, strides: Strides, box: tuple[int, int]
) -> TensorMapSpec:
    """Return the map of an array (dim, rows, heads, batch); strides are of batch, row and head."""
    batch_stride, row_stride, head_stride = (s * problem.itemsize for s in strides)
    steps = (row_stride, head_stride, batch_stride)
    # An axis of length 1 may have any stride that the driver accepts.
    row, head, batch = (
        step if length > 1 else STRIDE_UNIT for length, step in zip(shape[1:], steps, strict=True)
    )
    return TensorMapSpec(problem.dtype, shape, (row, head, batch), box)


def _spec(problem: Problem, name: str, shape: Shape, rows: int) -> TensorMapSpec:
    columns = box_columns(block_columns(problem, shape[0]), operand_bytes(problem))
    return map_spec(problem, shape, problem.tensors[name].strides, (columns, rows))


def box_columns(columns: int, itemsize: int = 2) -> int:
    """Return the columns of a TMA box: its row is 64 or 128 bytes, which is the swizzle width."""
    return (128 if round_up(columns * itemsize, 64) % 128 == 0 else 64) // itemsize
