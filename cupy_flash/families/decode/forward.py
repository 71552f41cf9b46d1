"""Memory-bound attention of few query rows over many keys: `kernels_cu/forward/decode.cu`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from cupy_flash.families.contract import (
    FLOAT8_ARCH,
    MAX_GRID,
    Family,
    heads_in_l2,
    tile_members,
    why_not_blocks,
    why_not_dropout,
    why_not_scale,
)
from cupy_flash.families.decode import partition, preferred, sizes
from cupy_flash.families.decode.tile import CLUSTERS, MAX_STAGES, QUANTIZED_KEYS, DecodeTile
from cupy_flash.families.hopper import HopperFamily
from cupy_flash.families.schedule import EVEN, MAIN_ENTRY, Launch, Schedule, Split
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import MAX_SEQLEN, Problem

_HOPPER = HopperFamily()
# Other families are faster for more query rows of a KV head, or for fewer keys.
_MAX_ROWS = 32
_MIN_KEYS = 256
# Up to this size of keys and values in bytes, all loads use the L2 policy evict_first.
_SMALL_KV_BYTES = 320 << 20


class DecodeFamily(Family[DecodeTile]):
    """Flash-Decoding with the merge in the same kernel, and evenly divided keys if possible."""

    name = "decode"
    source = "forward/decode.cu"
    tile_type = DecodeTile
    serves_sequences = True
    serves_quantized = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if problem.itemsize != 2:
            return f"its tensor-core products take float16 or bfloat16, not {problem.dtype}"
        if device.arch < 80:
            return f"needs sm_80 or newer for cp.async and its mma shapes, not {device.sm}"
        if reason := why_not_dropout(problem) or why_not_scale(problem):
            return reason
        layout, stored = problem.layout, problem.tensors["k"].dtype
        if stored == "float8_e4m3fn" and device.arch < FLOAT8_ARCH:
            return f"needs sm_{FLOAT8_ARCH} or newer to read {stored}, not {device.sm}"
        if layout.page_size and layout.max_pages == 0:
            return "block_table has no pages"
        if self._first_legal(problem, device) is None:
            return f"none of its tiles fits {device.name}"
        return None

    def suits_rows(self, problem: Problem) -> bool:
        return 1 <= sizes.rows(problem) <= _max_rows(problem)

    def why_not_first(self, problem: Problem, device: Device) -> str | None:
        rows, most = sizes.rows(problem), _max_rows(problem)
        if not self.suits_rows(problem):
            return f"is for 1 to {most} query rows per KV head; this problem has {rows}"
        if rows > _MAX_ROWS and _suits_hopper(problem, device):
            return f"reads the keys once per 16 of {rows} query rows; hopper puts them in one tile"
        if problem.seqlen_k < _MIN_KEYS:
            return f"is for at least {_MIN_KEYS} keys; this problem has {problem.seqlen_k}"
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[DecodeTile]:
        for Br, Bc, warps, min_blocks, cluster in itertools.product(
            (16, 32), (16, 32), (2, 4, 8), (1, 2, 3, 4), (0, *CLUSTERS)
        ):
            if warps % sizes.column_warps(problem):
                continue
            tile = DecodeTile(Br, Bc, warps, 2, min_blocks, cluster)
            yield sizes.with_all_stages(problem, device, tile)

    def why_not_tile(self, problem: Problem, device: Device, tile: DecodeTile) -> str | None:
        if tile.Br not in (16, 32):
            return f"Br is {tile.Br}; expected 16 or 32"
        if tile.Bc not in (16, 32):
            return f"Bc is {tile.Bc}; expected 16 or 32"
        if problem.scales is not None and tile.Bc != QUANTIZED_KEYS:
            return f"Bc is {tile.Bc}; expected {QUANTIZED_KEYS} for 8-bit caches"
        if not 1 <= tile.warps <= 16:
            return f"warps is {tile.warps}; expected 1 to 16"
        warps = sizes.column_warps(problem)
        if tile.warps % warps:
            return f"warps is {tile.warps}; expected a multiple of {warps}, as {warps} share a row"
        if warps > 1 and tile.Br != 16:
            return f"Br is {tile.Br}; expected 16 if several warps share a row"
        if not 2 <= tile.stages <= MAX_STAGES:
            return f"stages is {tile.stages}; expected 2 to {MAX_STAGES}"
        if tile.cluster not in (0, *CLUSTERS):
            return f"cluster is {tile.cluster}; expected 0, 1, 2, 4 or 8"
        if tile.cluster and not partition.has_clusters(device):
            return f"needs sm_90 or sm_100 for clusters, not {device.sm}"
        if (rows := sizes.rows(problem)) > MAX_SEQLEN:
            return f"has {rows} query rows per KV head; expected at most {MAX_SEQLEN}"
        if tile.min_blocks < 1:
            return f"min_blocks is {tile.min_blocks}; expected at least 1"
        stage_bytes = sizes.stage_bytes(problem, tile)
        if tile.Br * sizes.padded_dims(problem)[0] * problem.itemsize > stage_bytes:
            return f"Br is {tile.Br}; its queries must fit a stage of {tile.Bc} keys and values"
        if tile.Br * sizes.record_bytes(problem) > tile.stages * stage_bytes:
            return f"stages is {tile.stages}; the result of a warp must fit its stages"
        reason = why_not_blocks(
            device,
            threads=self.threads(tile),
            shared_memory=self.shared_memory(problem, tile),
            registers=sizes.registers(problem, tile),
            min_blocks=tile.min_blocks,
        )
        if reason:
            return reason
        tiles, splits = partition.output_tiles(problem, tile), problem.layout.num_splits or 1
        if tiles * splits > MAX_GRID:
            return f"has {tiles} query tiles x {splits} splits; expected at most {MAX_GRID}"
        if (units := sizes.units(problem, tile)) > MAX_GRID:
            return f"may have {units} units of keys; expected at most {MAX_GRID}"
        return None

    def preferred_tiles(self, problem: Problem, device: Device) -> Iterable[DecodeTile]:
        best = preferred.preferred_tiles(problem, device)
        return itertools.chain(best, self.candidates(problem, device))

    def shared_memory(self, problem: Problem, tile: DecodeTile) -> int:
        return sizes.shared_memory(problem, tile)

    def threads(self, tile: DecodeTile) -> int:
        return 32 * tile.warps

    def schedule(self, problem: Problem, device: Device, tile: DecodeTile) -> Schedule:
        is_balanced = partition.is_balanced(problem, tile.Br)
        split = EVEN if is_balanced else partition.choose_split(problem, device, tile)
        launched_tile = partition.launched_tile(tile, split)
        if split == EVEN:
            grid = partition.grid_size(problem, device, tile)
        else:
            grid = (partition.output_tiles(problem, tile) * split.parts, 1, 1)
        slots = partition.partial_slots(problem, device, tile, split)
        launch = Launch(
            MAIN_ENTRY,
            "decode_forward",
            grid,
            self.threads(tile),
            self.shared_memory(problem, launched_tile),
            tile.min_blocks,
            launched_tile.cluster,
            ("params",) if problem.scales is None else ("quantized_params",),
        )
        return Schedule(
            (launch,),
            split,
            workspace=slots * tile.Br * sizes.slot_record_bytes(problem, launched_tile),
            counters=slots * sizes.merge_slices(launched_tile),
            section_heads=heads_in_l2(problem, device),
        )

    def config(self, problem: Problem, tile: DecodeTile, split: Split) -> dict[str, int | bool]:
        layout, launched_tile = problem.layout, partition.launched_tile(tile, split)
        quantized: dict[str, int | bool] = {"quantized": problem.scales is not None}
        if problem.scales is not None:
            quantized |= {
                f"{name}_scales_by_key": sizes.scales_vary_by_key(problem, strides)
                for name, strides in (("k", problem.scales.k), ("v", problem.scales.v))
            }
        return quantized | {
            **tile_members(tile, "Br Bc warps"),
            "column_warps": sizes.column_warps(problem),
            "stages": tile.stages,
            "values_in_keys": problem.values_in_keys,
            "cluster_units": partition.CLUSTER_UNITS,
            "small_kv": sizes.total_kv_bytes(problem) <= _SMALL_KV_BYTES,
            "q_in_registers": True,
            "receive_rows": sizes.receive_rows(problem, tile),
            "group": sizes.group(problem),
            "has_seqlens": not layout.is_dense,
            "page_size": layout.page_size,
            "balanced": split == EVEN,
            "cluster": launched_tile.cluster,
            "shared_memory": self.shared_memory(problem, launched_tile),
        }


def _max_rows(problem: Problem) -> int:
    if sizes.column_warps(problem) == 1:
        return _MAX_ROWS
    # In MLA, one query has up to 128 rows: one for each query head of the KV head.
    return max(_MAX_ROWS, min(sizes.group(problem), 16 * partition.MAX_QUERY_TILES))


def _suits_hopper(problem: Problem, device: Device) -> bool:
    reasons = (_HOPPER.why_not, _HOPPER.why_not_first)
    return all(reason(problem, device) is None for reason in reasons)
