"""Tangents of dense 16-bit calls on Hopper (sm_90a): `kernels_cu/tangents/hopper.cu`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cupy_flash.families import tangent_common
from cupy_flash.families.contract import (
    Family,
    ceil_div,
    round_up,
    tile_members,
    why_not_scale,
    why_not_shared_memory,
)
from cupy_flash.families.hopper.block import (
    BARRIER_BYTES,
    REGISTERS,
    WARPGROUP,
    WARPGROUP_ROWS,
    most_stages,
    why_not_device,
)
from cupy_flash.families.hopper.tensor_maps import (
    box_columns,
    map_spec,
    why_not_rows,
    why_not_strides,
)
from cupy_flash.families.schedule import Schedule, Split, TensorMapSpec
from cupy_flash.problem.device import Device
from cupy_flash.problem.gradient import ROWS, tangent_of
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

# Number of registers of a consumer thread for addresses, sums of rows and the softmax. With fewer,
# the compiler serializes the products.
_STATE_REGISTERS = 64
_MAX_STAGES = 4
_MAX_DIM = 128


@dataclass(frozen=True)
class HopperTangentTile(Tile):
    """Tile of the tangents of the `hopper` family; a consumer warpgroup has 64 of the Br rows.

    Attributes
    ----------
    stages
        Number of KV tiles in shared memory, each with its tangents.
    q_steps
        Number of k steps (16 columns each) of Q in registers; the others are read from shared
        memory for each KV tile.
    """

    stages: int = 2
    q_steps: int = 0


class HopperTangentFamily(Family[HopperTangentTile]):
    """Tangents by five products with wgmma and TMA, after the forward pass."""

    name = "hopper"
    source = "tangents/hopper.cu"
    tile_type = HopperTangentTile
    arch_specific = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if problem.itemsize != 2:
            return f"its tensor-core products take float16 or bfloat16, not {problem.dtype}"
        if reason := why_not_device(device) or tangent_common.why_not(problem):
            return reason
        if reason := why_not_scale(problem) or why_not_rows(problem):
            return reason
        if max(problem.head_dim, problem.head_dim_v) > _MAX_DIM:
            return f"needs too many registers for head dims over {_MAX_DIM}"
        if problem.seqlen_k == 0:
            return "TMA cannot address arrays without keys"
        if reason := why_not_strides(
            problem, lambda: _tensor_maps(problem, HopperTangentTile(64, 64))
        ):
            return reason
        if self._first_legal(problem, device) is None:
            return f"none of its tiles fits {device.name}"
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[HopperTangentTile]:
        steps = ceil_div(problem.head_dim, 16)
        for Br, Bc, q_steps in itertools.product(
            (128, 64), range(128, 15, -16), sorted({0, min(2, steps), min(4, steps), steps})
        ):
            tile = HopperTangentTile(Br, Bc, q_steps=q_steps)
            yield self._with_all_stages(problem, device, tile)

    def preferred_tiles(self, problem: Problem, device: Device) -> Iterable[HopperTangentTile]:
        widest = max(problem.head_dim, problem.head_dim_v)
        steps = min(ceil_div(problem.head_dim, 16), 4 if 64 < widest <= 96 else 2)
        best = HopperTangentTile(128, 80 if widest <= 64 else 64, q_steps=steps)
        first = self._with_all_stages(problem, device, best)
        return itertools.chain((first,), self.candidates(problem, device))

    def _with_all_stages(
        self, problem: Problem, device: Device, tile: HopperTangentTile
    ) -> HopperTangentTile:
        """Return the tile with as many stages as shared memory has space for."""
        tiles = (dataclasses.replace(tile, stages=n) for n in range(_MAX_STAGES, 1, -1))
        return most_stages(device, tiles, lambda each: self.shared_memory(problem, each))

    def why_not_tile(self, problem: Problem, device: Device, tile: HopperTangentTile) -> str | None:
        if tile.Br not in (64, 128):
            return f"Br is {tile.Br}; expected 64 or 128"
        if tile.Bc % 16 or not 16 <= tile.Bc <= 128:
            return f"Bc is {tile.Bc}; expected a multiple of 16 up to 128"
        if tile.q_steps > ceil_div(problem.head_dim, 16):
            return f"q_steps is {tile.q_steps}; expected at most {ceil_div(problem.head_dim, 16)}"
        if tile.stages < 2:
            return f"stages is {tile.stages}; expected at least 2"
        if reason := why_not_shared_memory(device, self.shared_memory(problem, tile)):
            return reason
        need, (_, most) = self._registers(problem, tile), REGISTERS[tile.Br // WARPGROUP_ROWS]
        if need > most:
            return f"needs about {need} registers per thread; {most} are available"
        return tangent_common.why_not_grid(problem, tile.Br)

    def _registers(self, problem: Problem, tile: HopperTangentTile) -> int:
        """Return a lower bound of the registers of a consumer thread."""
        # S and its tangent, and P and H as operands.
        scores = 2 * (tile.Bc // 2 + tile.Bc // 4)
        output = round_up(problem.head_dim_v, 16) // 2
        return scores + 4 * tile.q_steps + output + _STATE_REGISTERS

    def shared_memory(self, problem: Problem, tile: HopperTangentTile) -> int:
        row, row_v = (2 * round_up(n, 32) for n in (problem.head_dim, problem.head_dim_v))
        moves = problem.moves
        queries = (1 + ("q" in moves)) * row
        of_key = (1 + ("k" in moves)) * row
        of_key += (("q" in moves or "k" in moves) + ("v" in moves)) * row_v
        barriers = (2 * tile.stages + 3) * BARRIER_BYTES
        return tile.Br * queries + tile.stages * tile.Bc * of_key + barriers

    def schedule(self, problem: Problem, device: Device, tile: HopperTangentTile) -> Schedule:
        schedule = tangent_common.schedule(
            *(problem, device, tile.Br, "hopper_tangents"),
            WARPGROUP * (tile.Br // WARPGROUP_ROWS + 1),
            self.shared_memory(problem, tile),
            arguments=("tangent_maps", "tangents"),
        )
        return dataclasses.replace(schedule, tensor_maps=_tensor_maps(problem, tile))

    def config(
        self, problem: Problem, tile: HopperTangentTile, split: Split
    ) -> dict[str, int | bool]:
        producer, consumer = REGISTERS[tile.Br // WARPGROUP_ROWS]
        return {
            **tile_members(tile, "Br Bc stages q_steps"),
            "producer_registers": producer,
            "consumer_registers": consumer,
            "shared_memory": self.shared_memory(problem, tile),
        } | tangent_common.config(problem)


def _tensor_maps(problem: Problem, tile: HopperTangentTile) -> dict[str, TensorMapSpec]:
    """Return the maps of q, k, v and of their tangents; an array stands for a missing tangent."""
    p = problem
    sizes = {
        "q": (p.head_dim, p.seqlen_q, p.heads_q, p.batch),
        "k": (p.head_dim, p.seqlen_k, p.heads_kv, p.batch),
        "v": (p.head_dim_v, p.seqlen_k, p.heads_kv, p.batch),
    }

    def spec(name: str, array: str) -> TensorMapSpec:
        box = box_columns(sizes[name][0]), tile.Br if name == "q" else tile.Bc
        made = map_spec(p, sizes[name], p.tensors[array].strides, box)
        return dataclasses.replace(made, array=array)

    maps = {name: spec(name, name) for name in ROWS}
    for name in ROWS:
        maps[tangent_of(name)] = spec(name, tangent_of(name) if name in p.moves else name)
    return maps
