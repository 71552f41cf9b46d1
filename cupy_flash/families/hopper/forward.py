"""Fused attention of float8 to float32 on Hopper (sm_90a): `kernels_cu/forward/hopper.cu`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from cupy_flash.families import split_kv
from cupy_flash.families.contract import (
    MAX_GRID,
    Family,
    TranslationUnit,
    ceil_div,
    remembers_last,
    tile_members,
    why_not_scale,
    why_not_shared_memory,
)
from cupy_flash.families.hopper import float8, float32, mla, persistent, scores, tensor_maps, varlen
from cupy_flash.families.hopper.block import (
    MAX_COLUMNS,
    WARPGROUP,
    WARPGROUP_ROWS,
    block_columns,
    cta_ranks,
    k_steps,
    why_not_device,
)
from cupy_flash.families.hopper.registers import consumer_registers, overlaps_output, register_split
from cupy_flash.families.hopper.shared_memory import block_bytes, footprint
from cupy_flash.families.hopper.tiles import MIN_KEYS, HopperTile, preferred_tiles, tile_of
from cupy_flash.families.schedule import MAIN_ENTRY, UNSPLIT, Launch, Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

# Largest number of stages of the KV ring; more are not faster.
_MAX_STAGES = 8
# Largest number of tiles in the cache of their stage counts.
_MAX_COUNTED = 1024
# Largest number of query heads to interleave for the sake of a block mask or bias.
_MAX_HEADS = 64


class HopperFamily(Family[HopperTile]):
    """FlashAttention-3 with wgmma and TMA; loads run ahead across the tiles of a thread block."""

    name = "hopper"
    source = "forward/hopper.cu"
    tile_type = HopperTile
    arch_specific = True
    serves_sequences = True
    serves_float8 = True
    reads_block_masks = True

    def __init__(self) -> None:
        # Cache of tiles with the largest number of stages; the key is what this number depends on.
        self._counted: dict[tuple[Any, ...], HopperTile] = {}

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        problem = mla.kernel_problem(problem)
        if problem.itemsize > 4:
            return f"its tensor-core products take no {problem.dtype}"
        if reason := why_not_device(device) or why_not_scale(problem):
            return reason
        if problem.seqlen_k == 0:
            return "TMA cannot address arrays without keys"
        if reason := varlen.why_not(problem):
            return reason
        if problem.dtype == "float32":
            return float32.why_not(problem) or self._why_not_tiles(problem, device)
        if problem.is_float8:
            return float8.why_not(problem) or self._why_not_block_mask(problem, device)
        if block_columns(problem, problem.head_dim_v) > MAX_COLUMNS:
            return (
                f"two thread blocks compute at most {2 * MAX_COLUMNS} output columns of a head, "
                f"not {problem.head_dim_v}"
            )
        return tensor_maps.why_not_rows(problem) or self._why_not_block_mask(problem, device)

    def _why_not_block_mask(self, problem: Problem, device: Device) -> str | None:
        return (
            tensor_maps.why_not_strides(
                problem, lambda: tensor_maps.forward_maps(problem, HopperTile(64, 16))
            )
            or scores.why_not_low_rows(problem, device)
            or self._why_not_tiles(problem, device)
        )

    def _why_not_tiles(self, problem: Problem, device: Device) -> str | None:
        if self._first_legal(problem, device) is None:
            return f"none of its tiles fits {device.name}"
        return None

    def why_not_first(self, problem: Problem, device: Device) -> str | None:
        mla_problem = mla.kernel_problem(problem)
        if mla_problem is not problem:
            tile = self.default_tile(problem, device)
            return mla.why_not_first(mla_problem, device, tile, self._tiles(mla_problem, tile))
        if problem.dtype == "float32":
            return float32.why_not_first(problem) or self._why_not_few_tiles(problem, device)
        if problem.layout.is_dense:
            return None
        return varlen.why_not_first(problem) or self._why_not_few_tiles(problem, device)

    def _why_not_few_tiles(self, problem: Problem, device: Device) -> str | None:
        """Return why other families are faster if the keys are not split, or None."""
        tile = self.default_tile(problem, device)
        tiles = self._tiles(varlen.as_dense(problem), tile)
        if 2 * tiles * cta_ranks(problem) >= device.sm_count:
            return None
        is_dense = problem.layout.is_dense
        what, number = ("float32", "") if is_dense else ("sequences of unequal length", "about ")
        return (
            f"does not split the keys of {what}, and {number}{tiles} query tiles leave most of "
            f"{device.sm_count} SMs idle"
        )

    def candidates(self, problem: Problem, device: Device) -> Iterator[HopperTile]:
        problem = mla.kernel_problem(problem)
        steps = k_steps(problem)
        for Br, Bc, q_stages, q_steps, turns in itertools.product(
            (64, 128, 192),
            range(MIN_KEYS, 257, 16),
            (1, 2),
            sorted({0, 2, steps // 4, steps}),
            (0, 1),
        ):
            if turns and Br == 64:
                continue
            tile = dataclasses.replace(tile_of(Br, Bc, q_stages, q_steps), turns=turns)
            yield self._with_all_stages(problem, device, tile)

    def why_not_tile(self, problem: Problem, device: Device, tile: HopperTile) -> str | None:
        problem = mla.kernel_problem(problem)
        if tile.Br not in (64, 128, 192):
            return f"Br is {tile.Br}; expected 64, 128 or 192"
        if tile.Bc % 16 or not 16 <= tile.Bc <= 256:
            return f"Bc is {tile.Bc}; expected a multiple of 16 up to 256"
        if problem.layout.page_size % tile.Bc:
            return f"Bc is {tile.Bc}; expected a divisor of page_size, {problem.layout.page_size}"
        if problem.is_float8 and (reason := float8.why_not_tile(problem, tile)):
            return reason
        if tile.stages < 2:
            return f"stages is {tile.stages}; expected at least 2"
        if tile.q_stages not in (1, 2):
            return f"q_stages is {tile.q_stages}; expected 1 or 2"
        if tile.q_steps and float32.count(problem) > 1:
            return f"q_steps is {tile.q_steps}; expected 0 for float32"
        if tile.q_steps and mla.holds_values_in_keys(problem):
            return f"q_steps is {tile.q_steps}; expected 0 if the keys hold the values"
        if tile.q_steps > k_steps(problem):
            return f"q_steps is {tile.q_steps}; expected at most {k_steps(problem)}"
        if tile.turns not in (0, 1) or (tile.turns and tile.Br == 64):
            return f"turns (ping-pong order) is {tile.turns}; expected 0, or 1 if Br is above 64"
        if reason := why_not_shared_memory(device, self.shared_memory(problem, tile)):
            return reason
        if self._tiles(problem, tile) > MAX_GRID:
            return f"has {self._tiles(problem, tile)} query tiles; expected at most {MAX_GRID}"
        need, (_, most) = consumer_registers(problem, tile), register_split(problem, tile)
        if need > most:
            return f"needs about {need} registers per thread; {most} are available"
        return None

    def default_tile(self, problem: Problem, device: Device) -> HopperTile:
        return super().default_tile(mla.kernel_problem(problem), device)

    def preferred_tiles(self, problem: Problem, device: Device) -> Iterator[HopperTile]:
        dense, steps = varlen.as_dense(problem), k_steps(problem)
        for tile in preferred_tiles(dense, device, scores.streams_bias(dense)):
            if tile.q_steps > steps:
                tile = dataclasses.replace(tile, q_steps=steps)
            yield self._with_all_stages(problem, device, tile)
        yield from self.candidates(problem, device)

    def _with_all_stages(self, problem: Problem, device: Device, tile: HopperTile) -> HopperTile:
        """Return the tile with as many stages as shared memory has space for.

        The result is cached for all lengths: counting takes a tenth of the time to plan a call.
        """
        most = device.shared_memory_per_block
        key = (*footprint(problem), most, tile)
        result = self._counted.get(key)
        if result is None:
            candidates = (dataclasses.replace(tile, stages=n) for n in range(_MAX_STAGES, 0, -1))
            fitting = (t for t in candidates if self.shared_memory(problem, t) <= most)
            result = next(fitting, dataclasses.replace(tile, stages=0))
            if len(self._counted) >= _MAX_COUNTED:
                self._counted.clear()
            self._counted[key] = result
        return result

    @remembers_last
    def shared_memory(self, problem: Problem, tile: HopperTile) -> int:
        return block_bytes(mla.kernel_problem(problem), tile)

    def tile_note(self, problem: Problem, tile: HopperTile) -> str:
        block = problem.score.block if problem.score is not None else None
        if block is None or not self.uses_block_mask(problem, tile):
            return ""
        checked, rows = "so the mask is evaluated for each pair at their edges", WARPGROUP_ROWS
        if block[0] % rows or block[1] % tile.Bc:
            return (
                f"; blocks of {block[0]} x {block[1]} are not multiples of {rows} rows and of "
                f"the tile's {tile.Bc} keys, {checked}"
            )
        if math.gcd(problem.q_offset, rows) < rows:
            return (
                f"; queries begin at key {problem.q_offset}, not a multiple of {rows}, and blocks "
                f"of rows at key 0, {checked}"
            )
        return ""

    def row_groups(self, tile: HopperTile) -> int:
        return tile.Br // WARPGROUP_ROWS

    def threads(self, tile: HopperTile) -> int:
        return WARPGROUP * (tile.Br // WARPGROUP_ROWS + 1)

    def schedule(self, problem: Problem, device: Device, tile: HopperTile) -> Schedule:
        given, problem = problem, mla.kernel_problem(problem)
        maps = tensor_maps.forward_maps(problem, tile)
        if not problem.layout.is_dense:
            is_mla = mla.holds_values_in_keys(problem)
            split = mla.choose_split(problem, device, tile) if is_mla else UNSPLIT
            main = self._main(problem, device, tile, split)
            # An earlier kernel computes the order of the sequences, or each thread block does.
            order = varlen.order_bytes(problem)
            launches: tuple[Launch, ...] = (varlen.launch(), main)
            if cta_ranks(problem) > 1:
                launches, order = (main,), order * math.prod(main.grid)
            return Schedule(
                (
                    *launches,
                    *split_kv.combine_launches(problem, split),
                    *scores.low_row_launches(problem, device),
                ),
                split,
                workspace=split_kv.workspace(problem, split) + order,
                counters=scores.low_row_counters(problem),
                # A lower bound: the kernel interleaves more heads for short causal sequences.
                section_heads=problem.heads_q // problem.heads_kv,
                tensor_maps=maps,
                params=mla.param_overrides(given, problem),
            )
        converts_float32 = float32.count(problem) > 1
        if converts_float32 or problem.is_float8:
            if converts_float32:
                workspace, offsets = float32.workspace(problem)
            else:
                workspace, offsets = float8.workspace(problem), {float8.VALUES: 0}
            conversion = float32.launch(device) if converts_float32 else float8.launch(device)
            return Schedule(
                (conversion, self._main(problem, device, tile, UNSPLIT)),
                workspace=workspace,
                section_heads=self._section_heads(problem, device, tile),
                tensor_maps=maps,
                workspace_offsets=offsets,
            )
        split = split_kv.choose(
            problem,
            device,
            q_tiles=ceil_div(problem.seqlen_q, tile.Br) * cta_ranks(problem),
            key_tiles=ceil_div(problem.seqlen_k, tile.Bc),
            blocks_per_sm=1,
        )
        main = self._main(problem, device, tile, split)
        return Schedule(
            (
                main,
                *split_kv.combine_launches(problem, split),
                *scores.low_row_launches(problem, device),
            ),
            split,
            workspace=split_kv.workspace(problem, split),
            counters=scores.low_row_counters(problem),
            section_heads=self._section_heads(problem, device, tile),
            tensor_maps=maps,
        )

    def _section_heads(self, problem: Problem, device: Device, tile: HopperTile) -> int:
        # With a block mask, query tiles are ordered by their work, and interleaving more heads
        # balances it better. A bias without a head axis stays in L2 while heads read the same rows.
        shares_bias = scores.streams_bias(problem) and not scores.bias_strides(problem)[2]
        if self.uses_block_mask(problem, tile) or shares_bias:
            return min(problem.batch * problem.heads_q, _MAX_HEADS)
        blocks = device.sm_count // cta_ranks(problem)
        return persistent.section_heads(problem, blocks=blocks, Br=tile.Br, Bc=tile.Bc)

    def _main(self, problem: Problem, device: Device, tile: HopperTile, split: Split) -> Launch:
        count = cta_ranks(problem)
        blocks = self._tiles(problem, tile) * split.parts
        # The grid is persistent, except for dense batches if other kernels use the GPU: a thread
        # block that starts late would delay the end. In varlen, such a block fetches fewer tiles.
        if not (problem.shares_gpu and problem.layout.is_dense):
            blocks = min(blocks, device.sm_count // count)
        return Launch(
            MAIN_ENTRY,
            "hopper_forward",
            (blocks, 1, count),
            self.threads(tile),
            self.shared_memory(problem, tile),
            min_blocks=1,
            cluster=count if count > 1 else 0,
            arguments=(
                tensor_maps.argument(problem),
                "float8_params" if problem.is_float8 else "params",
            ),
        )

    def _tiles(self, problem: Problem, tile: HopperTile) -> int:
        return ceil_div(problem.seqlen_q, tile.Br) * problem.batch * problem.heads_q

    def unit(self, problem: Problem, tile: HopperTile, schedule: Schedule) -> TranslationUnit:
        return super().unit(mla.kernel_problem(problem), tile, schedule)

    def config(self, problem: Problem, tile: HopperTile, split: Split) -> dict[str, int | bool]:
        producer, consumer = register_split(problem, tile)
        return {
            **tile_members(tile, "Br Bc stages q_stages"),
            "pingpong": bool(tile.turns),
            "overlaps_output": overlaps_output(problem, tile),
            "q_steps": tile.q_steps,
            "producer_registers": producer,
            "consumer_registers": consumer,
            "has_seqlens": not problem.layout.is_dense,
            "page_size": problem.layout.page_size,
            "values_in_keys": mla.holds_values_in_keys(problem),
            "skips_tiles": scores.skips_tiles(problem, tile),
            "bounded": scores.is_bounded(problem),
            "detects_one_key_rows": scores.finds_only_keys(problem),
            "bias_stages": scores.BIAS_STAGES if scores.streams_bias(problem) else 0,
            "shared_memory": self.shared_memory(problem, tile),
            **scores.low_row_config(problem),
            **(float8.config(problem, tile) if problem.is_float8 else {}),
        }
