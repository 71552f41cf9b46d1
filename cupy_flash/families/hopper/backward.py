"""Backward pass of 16-bit inputs on Hopper (sm_90a): `kernels_cu/backward/hopper.cu`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cupy_flash.families import backward_common
from cupy_flash.families.backward_common import QuerySums
from cupy_flash.families.contract import (
    Family,
    QueryTileLists,
    ceil_div,
    may_have_block_mask,
    remembers_last,
    round_up,
    tile_members,
    why_not_shared_memory,
)
from cupy_flash.families.hopper.sm90 import BARRIER_BYTES, WARPGROUP, WARPGROUP_ROWS, why_not_device
from cupy_flash.families.hopper.tensor_maps import map_spec, why_not_rows, why_not_strides
from cupy_flash.families.schedule import (
    KEY_GRADIENTS,
    QUERY_GRADIENTS,
    Launch,
    Schedule,
    Split,
    TensorMapSpec,
)
from cupy_flash.problem.device import Device
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

# Number of columns of a TMA box, which is 128 bytes wide.
_BOX_COLUMNS = 64
# Largest head dim for which a consumer warpgroup holds both dk and dv of 64 keys.
_WIDEST = 128
# Number of registers of a producer thread and of a consumer thread. Together, the warpgroups take
# what the launch allocates, 168 for each of 384 threads.
_REGISTERS = (24, 240)
# The same numbers for wide heads in varlen: with 24 registers, producer warps spill, and a loop is
# miscompiled.
_WIDE_REGISTERS_OF_SEQUENCES = (40, 232)
# Number of registers of a consumer thread besides accumulators and operands: addresses and state.
_STATE_REGISTERS = 24
# Number of barriers in addition to those of the ring stages.
_OTHER_BARRIERS = 11
# Size in bytes of `HopperGradientBlockInfo`: a thread block's keys and its range of query tiles.
_BLOCK_INFO_BYTES = 96
# Size in bytes of the statistics of a query row: its log-sum-exp and delta.
_ROW_STATS_BYTES = 8
# Size in bytes of the step of a query tile in a list.
_STEP_BYTES = 8
# Number of dS tiles that consumers exchange: while one is written, products still read the other.
_PAIR_STAGES = 2
# Largest number of bytes of the lists of query tiles in a block mask, and of the visible pairs of
# their entries. The pairs of 32768 queries and keys take 134 MB if sequences and heads share them.
_LIST_BYTES = _PAIR_BYTES = 150_000_000
# Bounds of the query tiles and of the KV tiles that an entry of a list can describe.
_MAX_QUERY_TILES, _MAX_KV_TILES = 2**16, 2**13
# Number of threads of the kernel that converts the dq accumulator to dq.
_SUM_THREADS = 256


@dataclass(frozen=True)
class HopperBackwardTile(Tile):
    """Tile of the backward `hopper` family.

    Attributes
    ----------
    Br, Bc
        Number of query rows of each iteration, and number of keys of a thread block. Each of the
        two consumers has 64 of the keys; for wide heads, both have the same 64 keys.
    columns
        Number of query rows for which a consumer computes scores at once.
    q_stages, dout_stages
        Number of tiles of q, and of dout, in shared memory.
    """

    columns: int = 64
    q_stages: int = 2
    dout_stages: int = 2


class HopperBackwardFamily(Family[HopperBackwardTile]):
    """Backward pass in one kernel with wgmma and TMA; thread blocks add to dq in a fixed order."""

    name = "hopper"
    source = "backward/hopper.cu"
    tile_type = HopperBackwardTile
    arch_specific = True
    serves_sequences = True
    reads_block_masks = True

    def uses_block_mask(self, problem: Problem) -> bool:
        """Return whether the kernels read a block mask of the problem."""
        if not may_have_block_mask(problem):
            return False
        query_tiles, kv_tiles = _max_tiles(problem)
        size = _lists(problem) * kv_tiles * query_tiles * 4
        return query_tiles < _MAX_QUERY_TILES and kv_tiles < _MAX_KV_TILES and size <= _LIST_BYTES

    def query_tile_lists(self, problem: Problem, tile: HopperBackwardTile) -> QueryTileLists | None:
        """Return the lists of query tiles that a block mask has for the kernels, or None."""
        if not self.uses_block_mask(problem):
            return None
        group = problem.heads_q // problem.heads_kv
        return QueryTileLists(group, self._stores_pairs(problem, tile))

    def _stores_pairs(self, problem: Problem, tile: HopperBackwardTile) -> bool:
        """Return whether the block mask stores the visible pairs of partial tiles.

        Query heads that share a list must have the same pairs. The pairs must include all that
        positions mask, so there is no prefix. A thread reads one word, for 64 rows.
        """
        score = problem.score
        if score is None or tile.columns != WARPGROUP_ROWS or not self.uses_block_mask(problem):
            return False
        entries = _lists(problem) * ceil_div(problem.seqlen_q, tile.Br)
        entries *= ceil_div(problem.seqlen_k, tile.Bc)
        size = entries * tile.Br * tile.Bc // 8
        shares = problem.heads_q == problem.heads_kv or not score.mask_varies[1]
        return shares and not score.prefix and size <= _PAIR_BYTES

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if problem.itemsize != 2:
            return f"its tensor-core products take float16 or bfloat16, not {problem.dtype}"
        if reason := why_not_device(device) or backward_common.why_not_tensor_cores(problem):
            return reason
        if 0 in problem.shape_of("q") or 0 in problem.shape_of("k"):
            return "TMA cannot address arrays without rows"
        tile = HopperBackwardTile(WARPGROUP_ROWS, WARPGROUP_ROWS)
        reason = why_not_rows(problem) or why_not_strides(
            problem, lambda: _tensor_maps(problem, tile)
        )
        if reason:
            return reason
        if self._first_legal(problem, device) is None:
            return self.why_not_tile(problem, device, _preferred_tiles(problem)[-1])
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[HopperBackwardTile]:
        Bc = WARPGROUP_ROWS if _is_wide(problem) else 2 * WARPGROUP_ROWS
        for Br, q_stages, dout_stages in itertools.product((64, 128), (1, 2, 3), (1, 2)):
            yield HopperBackwardTile(Br, Bc, 64, q_stages, dout_stages)

    def why_not_tile(
        self, problem: Problem, device: Device, tile: HopperBackwardTile
    ) -> str | None:
        wide = _is_wide(problem)
        keys = WARPGROUP_ROWS if wide else 2 * WARPGROUP_ROWS
        if tile.Bc != keys:
            return f"Bc is {tile.Bc}; expected {keys}"
        if tile.Br not in (WARPGROUP_ROWS, 2 * WARPGROUP_ROWS):
            return f"Br is {tile.Br}; expected {WARPGROUP_ROWS} or {2 * WARPGROUP_ROWS}"
        if tile.columns % 16 or tile.columns < 16 or tile.Br % tile.columns:
            return f"columns is {tile.columns}; expected a multiple of 16 that divides {tile.Br}"
        if wide and not tile.Br == tile.columns == WARPGROUP_ROWS:
            return f"Br and columns are {tile.Br} and {tile.columns}; expected {WARPGROUP_ROWS}"
        # For narrow heads, consumers wait for the next query tile before they release the last one.
        least = 1 if wide else 2
        if tile.q_stages < least:
            return f"q_stages is {tile.q_stages}; expected at least {least}"
        if tile.dout_stages < 1:
            return f"dout_stages is {tile.dout_stages}; expected at least 1"
        if tile.Br == WARPGROUP_ROWS and _padded_dims(problem)[0] < 2 * _BOX_COLUMNS:
            return f"Br is {tile.Br}; expected {2 * WARPGROUP_ROWS} for head_dim {problem.head_dim}"
        if reason := why_not_shared_memory(device, self.shared_memory(problem, tile)):
            return reason
        need, most = self._registers(problem, tile), _register_split(problem)[1]
        if need > most:
            return f"needs about {need} registers per thread; {most} are available"
        return backward_common.why_not_grid(problem, tile.Bc, tile.Br)

    def _registers(self, problem: Problem, tile: HopperBackwardTile) -> int:
        """Return a lower bound: dk and dv; S, dP and P as an operand; loop state."""
        dim, dim_v = _padded_dims(problem)
        if _is_wide(problem):
            # A consumer holds either dk or dv, and half of the columns of dq.
            return max(dim, dim_v) // 2 + dim // 4 + tile.columns // 4 + _STATE_REGISTERS
        return (dim + dim_v) // 2 + tile.columns * 5 // 4 + _STATE_REGISTERS

    def preferred_tiles(self, problem: Problem, device: Device) -> Iterable[HopperBackwardTile]:
        return _preferred_tiles(problem)

    @remembers_last
    def shared_memory(self, problem: Problem, tile: HopperBackwardTile) -> int:
        gradient = problem.gradient_spec
        dim, dim_v = _padded_dims(problem)
        size = problem.itemsize
        total = tile.Bc * (dim + dim_v) * size
        total += tile.Br * (tile.q_stages * dim + tile.dout_stages * dim_v) * size
        total += tile.q_stages * tile.Br * _ROW_STATS_BYTES
        if self.uses_block_mask(problem) and not _is_wide(problem):
            total += tile.q_stages * _STEP_BYTES
        if self._stores_pairs(problem, tile):
            total += tile.q_stages * tile.Br * tile.Bc // 8
        pairs = tile.Br * tile.Bc * size
        if _is_wide(problem):
            # P is always stored, and dS only if dq is computed.
            total += (2 if gradient.wants("q") else 1) * pairs
        elif gradient.wants("q"):
            total += _PAIR_STAGES * pairs + tile.Br * dim * 4
        slots = tile.q_stages + tile.dout_stages
        # Each stage has barriers for full and empty and, if tiles are inspected, for arrived.
        arrives = not problem.layout.is_dense or backward_common.inspects(problem)
        barriers = (3 if arrives else 2) * slots + _OTHER_BARRIERS
        return total + barriers * BARRIER_BYTES + _BLOCK_INFO_BYTES

    def threads(self, tile: HopperBackwardTile) -> int:
        """Return the threads of a thread block: two consumer warpgroups and a producer."""
        return 3 * WARPGROUP

    def schedule(self, problem: Problem, device: Device, tile: HopperBackwardTile) -> Schedule:
        kv_blocks, query_blocks = backward_common.count_blocks(problem, tile.Bc, tile.Br)
        chunks = _head_chunks(problem, device)
        resources = self.threads(tile), self.shared_memory(problem, tile), 1
        launches = [
            Launch.of_gradients(
                *(KEY_GRADIENTS, "hopper_gradients", kv_blocks * chunks, *resources),
                arguments=("gradient_maps", "gradients"),
            )
        ]
        if problem.gradient_spec.wants("q") and not _last_writes(problem):
            entry, function = QUERY_GRADIENTS, "hopper_query_gradients"
            launches.append(Launch.of_gradients(entry, function, query_blocks, _SUM_THREADS))
        return backward_common.schedule(
            problem,
            device,
            launches,
            self._sums(problem, tile, chunks),
            _section(problem, device, chunks, reads_lists=self.uses_block_mask(problem)),
            _tensor_maps(problem, tile),
            {"num_splits": chunks},
        )

    def _sums(self, problem: Problem, tile: HopperBackwardTile, chunks: int) -> QuerySums:
        dim, dim_v = _padded_dims(problem)
        columns = dim if problem.gradient_spec.wants("q") else 0
        if chunks == 1:
            return QuerySums(tile.Br, columns)
        kv_tiles, _ = backward_common.count_blocks(problem, tile.Bc, tile.Br)
        return QuerySums(tile.Br, columns, kv_tiles, tile.Bc * (dim + dim_v))

    def config(
        self, problem: Problem, tile: HopperBackwardTile, split: Split
    ) -> dict[str, int | bool]:
        gradient = problem.gradient_spec
        dim, dim_v = _padded_dims(problem)
        producer_registers, consumer_registers = _register_split(problem)
        return (
            {
                **tile_members(tile, "Br Bc columns q_stages dout_stages"),
                "padded_dim": dim,
                "padded_dim_v": dim_v,
                "producer_registers": producer_registers,
                "consumer_registers": consumer_registers,
                "wide": _is_wide(problem),
                "shared_memory": self.shared_memory(problem, tile),
                **{f"wants_{name}": gradient.wants(name) for name in ROWS},
            }
            | backward_common.config(
                problem,
                self._sums(problem, tile, 1),
                last_writes=_last_writes(problem),
                splits_heads=_may_split_heads(problem),
            )
            | {"kv_Bc": tile.Bc, "stores_pairs": self._stores_pairs(problem, tile)}
        )


def _is_wide(problem: Problem) -> bool:
    """Return whether dk and dv of 64 keys need the registers of two consumers."""
    return max(problem.head_dim, problem.head_dim_v) > _WIDEST


def _max_tiles(problem: Problem) -> tuple[int, int]:
    """Return the number of query tiles of the smallest Br, and the number of KV tiles."""
    keys = WARPGROUP_ROWS if _is_wide(problem) else 2 * WARPGROUP_ROWS
    return ceil_div(problem.seqlen_q, WARPGROUP_ROWS), ceil_div(problem.seqlen_k, keys)


def _lists(problem: Problem) -> int:
    """Return the number of sequences and KV heads whose lists of query tiles may differ."""
    assert problem.score is not None
    of_batch, of_head = problem.score.mask_varies
    return (problem.batch if of_batch else 1) * (problem.heads_kv if of_head else 1)


def _last_writes(problem: Problem) -> bool:
    """Return whether the last thread block that adds to a dq tile also writes dq."""
    return not _is_wide(problem) and problem.gradient_spec.dtype == problem.dtype


def _may_split_heads(problem: Problem) -> bool:
    """Return whether several thread blocks may divide the query heads of a KV tile.

    With mask functions, a thread block would also need the sums of P over all of these heads.
    """
    score = problem.score
    return (
        problem.heads_q > problem.heads_kv
        and not _is_wide(problem)
        and (score is None or not score.masks_pairs)
    )


def _head_chunks(problem: Problem, device: Device) -> int:
    """Return the number of thread blocks that divide the query heads of a KV tile.

    With a causal mask, the KV tiles differ in length, and a whole group of query heads multiplies
    the length of the longest one. So there are at least 12 thread blocks per SM, if possible.
    """
    if not _may_split_heads(problem) or (problem.mask.is_full and problem.layout.is_dense):
        return 1
    group = problem.heads_q // problem.heads_kv
    blocks, _ = backward_common.count_blocks(problem, 2 * WARPGROUP_ROWS, WARPGROUP_ROWS)
    chunks = [chunk for chunk in range(1, group + 1) if group % chunk == 0]
    return next((n for n in chunks if n * blocks >= 12 * device.sm_count), chunks[-1])


def _register_split(problem: Problem) -> tuple[int, int]:
    spills = _is_wide(problem) and not problem.layout.is_dense
    return _WIDE_REGISTERS_OF_SEQUENCES if spills else _REGISTERS


def _padded_dims(problem: Problem) -> tuple[int, int]:
    """Return the number of columns of q and k, and of v and dout, in shared memory.

    For wide heads, each consumer computes half of the columns of dq, in whole boxes.
    """
    unit = 2 * _BOX_COLUMNS if _is_wide(problem) else _BOX_COLUMNS
    return round_up(problem.head_dim, unit), round_up(problem.head_dim_v, _BOX_COLUMNS)


def _tensor_maps(problem: Problem, tile: HopperBackwardTile) -> dict[str, TensorMapSpec]:
    maps = {}
    for name, rows in (("q", tile.Br), ("k", tile.Bc), ("v", tile.Bc), ("dout", tile.Br)):
        batch, length, heads, dim = problem.shape_of("out" if name == "dout" else name)
        shape, strides = (dim, length, heads, batch), problem.tensors[name].strides
        maps[name] = map_spec(problem, shape, strides, (_BOX_COLUMNS, rows))
    return maps


def _section(problem: Problem, device: Device, chunks: int, *, reads_lists: bool) -> int:
    """Return the number of query heads whose tiles are interleaved.

    If thread blocks divide the query heads of a group, those of one chunk run at a time.

    q, dout and the dq accumulator of these heads should fit in a third of L2, because adding to
    memory outside of L2 takes twice the time: 470 TFLOP/s with 1 head, 334 with 32 heads (H200,
    head_dim 64, causal, seqlen 8192). With lists of query tiles, thread blocks that run together
    are assumed to visit a quarter of a head's rows: with more heads, thread blocks of the same head
    start further apart, and wait less.
    """
    rows = ceil_div(problem.seqlen_q, 4) if reads_lists else problem.seqlen_q
    group = problem.heads_q // problem.heads_kv
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.itemsize + 4 * problem.head_dim
    in_l2 = device.l2_cache // 3 // max(1, group // chunks * rows * row_bytes)
    return group * max(1, min(in_l2, problem.batch * problem.heads_kv))


def _preferred_tiles(problem: Problem) -> tuple[HopperBackwardTile, ...]:
    """Return tiles from the best to the worst, by resource arithmetic without measurements."""
    tile = HopperBackwardTile
    if _is_wide(problem):
        return (tile(64, 64),)
    if _padded_dims(problem)[0] <= 64:
        return (tile(128, 128), tile(128, 128, dout_stages=1))
    return (tile(64, 128, q_stages=3), tile(64, 128))
