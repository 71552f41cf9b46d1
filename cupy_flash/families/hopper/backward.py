"""Backward pass of 16-bit inputs on Hopper (sm_90a): `kernels_cu/backward/hopper.cu`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cupy_flash.families import backward_common
from cupy_flash.families.backward_common import QueryChunks, QuerySums
from cupy_flash.families.contract import (
    Family,
    QueryTileLists,
    ceil_div,
    remembers_last,
    round_up,
    tile_members,
    why_not_shared_memory,
)
from cupy_flash.families.hopper import bias_gradients
from cupy_flash.families.hopper.block import (
    BARRIER_BYTES,
    MAX_COLUMNS,
    WARPGROUP,
    WARPGROUP_ROWS,
    cta_ranks,
    why_not_device,
)
from cupy_flash.families.hopper.scores import bias_strides, can_stream_bias
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

# Number of columns of a TMA box, which is 128 bytes wide. If both head dims are at most 96, a head
# dim above 64 takes three boxes of half that width instead of two boxes (tile/tma_tile.cuh).
_BOX_COLUMNS = 64
_WIDEST_OF_HALF_BOXES = 96
# Largest head_dim and head_dim_v that the family serves. Each thread block of a cluster of two then
# has half of the columns.
_WIDEST = 2 * MAX_COLUMNS
# Largest head dim for which a consumer warpgroup holds both dk and dv of 64 keys.
_WIDEST_WHOLE = 128
# Number of registers of a producer thread and of a consumer thread. Together, the warpgroups take
# what the launch allocates, 168 for each of 384 threads.
_REGISTERS = (24, 240)
# The same numbers for wide heads in varlen or with dq buffers, and for TMA boxes of 64 bytes. With
# 24 registers, producer warps would spill there, and a loop for wide heads in varlen is
# miscompiled.
_MORE_PRODUCER_REGISTERS = (40, 232)
# Number of registers of a consumer thread besides accumulators and operands: addresses and state.
_STATE_REGISTERS = 24
# Number of barriers in addition to those of the ring stages.
_OTHER_BARRIERS = 13
# Number of barriers of two stages of k and v and of two fetched KV tiles. Size of these in bytes.
_FETCH_BARRIERS, _FETCHED_BYTES = 2 * 3 + 2 * 2, 2 * 16
# Largest number of query tiles, of all query heads of a KV head, for which thread blocks fetch KV
# tiles, and the smallest number of KV tiles.
_FEW_STEPS, _MANY_KV_TILES = 8, 400
# Number of warps of a thread block that receive scores from its peer, and of barriers of each warp.
_PEER_WARPS, _PEER_BARRIERS = 8, 2
# Size in bytes of `HopperGradientBlockInfo`: a thread block's keys and its range of query tiles.
_BLOCK_INFO_BYTES = 112
# Size in bytes of the statistics of a query row: its log-sum-exp and delta.
_ROW_STATS_BYTES = 8
# Size in bytes of a step in shared memory: a query head and an entry of a list.
_STEP_BYTES = 8
# Number of dS tiles that consumers exchange: while one is written, products still read the other.
_PAIR_STAGES = 2
# Fields of a tile that are members of `Config`.
_TILE_MEMBERS = "Br Bc columns q_stages dout_stages exchange_stages buffers_dq pair"
# Largest size in bytes of the visible pairs of all entries of a block mask. The pairs of 32768
# queries and keys take 134 MB if the mask is the same for all sequences and heads.
_PAIR_BYTES = 150_000_000
# Number of bias tiles in shared memory, of 64 query rows each.
_BIAS_STAGES = 2
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
    exchange_stages
        Number of buffers through which the consumers of wide heads exchange P, and dS. With 2, P is
        computed a query tile ahead. Must be 1 for narrow heads.
    buffers_dq
        Whether dq sums of wide heads are added from buffers in shared memory (1) or from registers
        (0). Must be 0 for narrow heads, which always have these buffers.
    pair
        Number of KV tiles of a cluster, which has a thread block for each. With 2, the thread
        blocks exchange dS, and each adds half of the columns of dq. Must be 1 for heads of at most
        128 or more than 256 columns.
    """

    columns: int = 64
    q_stages: int = 2
    dout_stages: int = 2
    exchange_stages: int = 1
    buffers_dq: int = 0
    pair: int = 1


class HopperBackwardFamily(Family[HopperBackwardTile]):
    """Backward pass in one kernel with wgmma and TMA; thread blocks add to dq in a fixed order."""

    name = "hopper"
    source = "backward/hopper.cu"
    tile_type = HopperBackwardTile
    arch_specific = True
    serves_sequences = True
    reads_block_masks = True

    def uses_block_mask(self, problem: Problem, tile: HopperBackwardTile) -> bool:
        """Return whether the kernels of a tile read a block mask of the problem."""
        return _reads_lists(problem)

    def query_tile_lists(self, problem: Problem, tile: HopperBackwardTile) -> QueryTileLists | None:
        """Return the lists of query tiles that a block mask has for the kernels, or None."""
        if not _reads_lists(problem):
            return None
        return backward_common.query_tile_lists(
            problem, stores_pairs=self._stores_pairs(problem, tile)
        )

    def _stores_pairs(self, problem: Problem, tile: HopperBackwardTile) -> bool:
        """Return whether the block mask stores the visible pairs of entries that are not full.

        The query heads of a KV head use the same list, so they must have the same visible pairs.
        The stored pairs must include the causal or window band, which a block mask ignores if there
        is a prefix. A thread reads one word of pairs, for 64 rows.
        """
        score = problem.score
        if score is None or tile.columns != WARPGROUP_ROWS or not _reads_lists(problem):
            return False
        entries = backward_common.list_entries(problem, tile.Br, tile.Bc)
        size = entries * tile.Br * tile.Bc // 8
        shares = problem.heads_q == problem.heads_kv or not score.mask_varies[1]
        return shares and not score.prefix and size <= _PAIR_BYTES

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if problem.itemsize != 2:
            return f"its tensor-core products take float16 or bfloat16, not {problem.dtype}"
        if reason := why_not_device(device) or backward_common.why_not_tensor_cores(problem):
            return reason
        if max(problem.head_dim, problem.head_dim_v) > _WIDEST:
            return f"accumulating dk and dv needs too many registers for head dims over {_WIDEST}"
        is_plain = problem.layout.is_dense and problem.score is None
        if cta_ranks(problem) > 1 and not is_plain:
            return f"head dims over {MAX_COLUMNS} need dense batches and unmodified scores"
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
        stages = (1, 2, 3), (1, 2)
        if _is_wide(problem):
            for wide_fields in itertools.product(*stages, (1, 2), (0, 1)):
                tile = HopperBackwardTile(WARPGROUP_ROWS, WARPGROUP_ROWS, 64, *wide_fields)
                yield tile
                if tile.q_stages == 2:
                    yield dataclasses.replace(tile, pair=2)
        else:
            for Br, *fields in itertools.product((64, 128), *stages):
                yield HopperBackwardTile(Br, 2 * WARPGROUP_ROWS, 64, *fields)

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
        if tile.exchange_stages not in ((1, 2) if wide else (1,)):
            expected = "1 or 2" if wide else "1"
            return f"exchange_stages is {tile.exchange_stages}; expected {expected}"
        if tile.buffers_dq not in ((0, 1) if wide else (0,)):
            expected = "0 or 1" if wide else "0"
            return f"buffers_dq is {tile.buffers_dq}; expected {expected}"
        if reason := _why_not_pair(problem, tile):
            return reason
        # For narrow heads, consumers wait for the next query tile before they release the last one.
        least = 1 if wide else 2
        if tile.q_stages < least:
            return f"q_stages is {tile.q_stages}; expected at least {least}"
        if tile.dout_stages < 1:
            return f"dout_stages is {tile.dout_stages}; expected at least 1"
        if tile.Br == WARPGROUP_ROWS and _padded_dims(problem)[0] <= _BOX_COLUMNS:
            return f"Br is {tile.Br}; expected {2 * WARPGROUP_ROWS} for head_dim {problem.head_dim}"
        if reason := why_not_shared_memory(device, self.shared_memory(problem, tile)):
            return reason
        need, most = self._registers(problem, tile), _register_split(problem, tile)[1]
        if need > most:
            return f"needs about {need} registers per thread; {most} are available"
        return backward_common.why_not_grid(problem, tile.pair * tile.Bc, tile.Br)

    def _registers(self, problem: Problem, tile: HopperBackwardTile) -> int:
        """Return a lower bound: dk and dv; S, dP and P as an operand; loop state."""
        dim, dim_v = _padded_dims(problem)
        if _is_wide(problem):
            # A consumer holds either dk or dv, and its columns of dq, rounded up to whole boxes.
            slabs = ceil_div(dim // _BOX_COLUMNS, 2 * tile.pair)
            sums = max(dim, dim_v) + slabs * _BOX_COLUMNS
            return sums // 2 + tile.columns // 4 + _STATE_REGISTERS
        return (dim + dim_v) // 2 + tile.columns * 5 // 4 + _STATE_REGISTERS

    def preferred_tiles(self, problem: Problem, device: Device) -> Iterable[HopperBackwardTile]:
        tiles = _preferred_tiles(problem)
        if not _may_stream_bias(problem):
            return tiles
        # A streamed bias is worth more than a third stage of q.
        return sorted(tiles, key=lambda tile: not self._bias_stages(problem, tile))

    @remembers_last
    def shared_memory(self, problem: Problem, tile: HopperBackwardTile) -> int:
        rest = self._other_memory(problem, tile)
        if self._fetches_kv_tiles(problem, tile):
            rest += _fetch_bytes(problem, tile)
        return rest + self._bias_stages(problem, tile) * _bias_stage_bytes(problem, tile)

    def _fetches_kv_tiles(self, problem: Problem, tile: HopperBackwardTile) -> bool:
        """Return whether a thread block fetches KV tiles, see `backward/hopper/kv_tiles.cuh`."""
        needed = self._other_memory(problem, tile) + _fetch_bytes(problem, tile)
        return _has_few_queries(problem) and needed <= bias_gradients.SHARED_MEMORY

    def _bias_stages(self, problem: Problem, tile: HopperBackwardTile) -> int:
        """Return the number of bias tiles that TMA loads in advance; 0 if threads load the bias."""
        if tile.columns != WARPGROUP_ROWS or not _may_stream_bias(problem):
            return 0
        needed = self._other_memory(problem, tile) + _BIAS_STAGES * _bias_stage_bytes(problem, tile)
        return _BIAS_STAGES if needed <= bias_gradients.SHARED_MEMORY else 0

    def _other_memory(self, problem: Problem, tile: HopperBackwardTile) -> int:
        """Return the size in bytes of everything in shared memory except a streamed bias."""
        gradient = problem.gradient_spec
        dim, dim_v = _padded_dims(problem)
        size = problem.itemsize
        total = tile.Bc * (dim + dim_v) * size
        total += tile.Br * (tile.q_stages * dim + tile.dout_stages * dim_v) * size
        total += tile.q_stages * tile.Br * _ROW_STATS_BYTES
        if _reads_lists(problem) and not _is_wide(problem):
            total += tile.q_stages * _STEP_BYTES
        if self._stores_pairs(problem, tile):
            total += tile.q_stages * tile.Br * tile.Bc // 8
        pairs = tile.Br * tile.Bc * size
        if tile.pair > 1:
            # Two buffers of P and two of dS, the buffers of the peer's dS, and the peer's keys.
            total += (2 * _PAIR_STAGES + tile.exchange_stages + 1) * pairs
            total += tile.Bc * dim // tile.pair * size
        elif _is_wide(problem):
            # P is always stored, and dS only if dq is computed.
            total += (2 if gradient.wants("q") else 1) * tile.exchange_stages * pairs
        elif gradient.wants("q"):
            total += _PAIR_STAGES * pairs
        if gradient.wants("q") and (tile.buffers_dq or not _is_wide(problem)):
            total += tile.Br * dim * 4 // tile.pair
        if cta_ranks(problem) > 1:
            scores = WARPGROUP_ROWS // 4 * tile.Br * 4
            total += _PEER_WARPS * (scores + _PEER_BARRIERS * BARRIER_BYTES)
        slots = tile.q_stages + tile.dout_stages
        # Each stage has barriers for full and empty and, if tiles are inspected, for arrived.
        arrives = not problem.layout.is_dense or backward_common.inspects(problem)
        barriers = (3 if arrives else 2) * slots + _OTHER_BARRIERS
        if tile.pair > 1:
            barriers += tile.exchange_stages + 1
        return total + barriers * BARRIER_BYTES + _BLOCK_INFO_BYTES

    def threads(self, tile: HopperBackwardTile) -> int:
        """Return the threads of a thread block: two consumer warpgroups and a producer."""
        return 3 * WARPGROUP

    def schedule(self, problem: Problem, device: Device, tile: HopperBackwardTile) -> Schedule:
        keys = tile.pair * tile.Bc
        kv_blocks, query_blocks = backward_common.count_blocks(problem, keys, tile.Br)
        fetches = self._fetches_kv_tiles(problem, tile)
        chunks = QueryChunks() if fetches else _query_chunks(problem, device, tile)
        blocks = chunks.blocks(kv_blocks)
        resources = self.threads(tile), self.shared_memory(problem, tile), 1
        ranks = _cluster(problem, tile)
        grid = min(blocks, device.sm_count) if fetches else blocks
        maps = _tensor_maps(problem, tile)
        streams_bias = self._bias_stages(problem, tile) > 0
        if streams_bias or bias_gradients.serves(problem):
            maps |= bias_gradients.tensor_maps(problem)
        launches = [
            Launch.of_gradients(
                *(KEY_GRADIENTS, "hopper_gradients", grid, *resources),
                ranks=ranks,
                cluster=ranks if ranks > 1 else 0,
                arguments=("bias_gradient_maps" if streams_bias else "gradient_maps", "gradients"),
            )
        ]
        if problem.gradient_spec.wants("q") and not _last_writes(problem):
            entry, function = QUERY_GRADIENTS, "hopper_query_gradients"
            parts = cta_ranks(problem)
            launches.append(
                Launch.of_gradients(entry, function, query_blocks, _SUM_THREADS, ranks=parts)
            )
        last_section = {}
        if _may_descend(problem):
            descending = _descending_section(problem, device, tile)
            last_section["last_section"] = max(0, blocks - descending)
        schedule = backward_common.schedule(
            problem,
            device,
            launches,
            self._sums(problem, tile),
            _section(problem, device, chunks),
            maps,
            last_section,
            bias_gradients.bias_plan(problem, device),
        )
        schedule = backward_common.with_packed_order(problem, schedule, tile.Bc)
        if fetches:
            schedule = backward_common.with_kv_tile_list(schedule, kv_blocks)
        return backward_common.with_chunks(
            schedule, problem, chunks, kv_blocks, 2, WARPGROUP_ROWS * sum(_padded_dims(problem))
        )

    def _sums(self, problem: Problem, tile: HopperBackwardTile) -> QuerySums:
        gradient = problem.gradient_spec
        columns = cta_ranks(problem) * _padded_dims(problem)[0]
        return QuerySums(tile.Br, columns if gradient.wants("q") else 0)

    def config(
        self, problem: Problem, tile: HopperBackwardTile, split: Split
    ) -> dict[str, int | bool]:
        gradient = problem.gradient_spec
        dim, dim_v = _padded_dims(problem)
        producer_registers, consumer_registers = _register_split(problem, tile)
        members = {
            **tile_members(tile, _TILE_MEMBERS),
            "padded_dim": dim,
            "padded_dim_v": dim_v,
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
            "wide": _is_wide(problem),
            "cta_ranks": cta_ranks(problem),
            "shared_memory": self.shared_memory(problem, tile),
            **{f"wants_{name}": gradient.wants(name) for name in ROWS},
        }
        members["stores_pairs"] = self._stores_pairs(problem, tile)
        members["bias_stages"] = self._bias_stages(problem, tile)
        if members["bias_stages"]:
            members["bias_is_shared"] = 0 in bias_strides(problem)
        members |= bias_gradients.config(problem)
        return members | backward_common.config(
            problem,
            self._sums(problem, tile),
            last_writes=_last_writes(problem),
            may_descend=_may_descend(problem),
            fetches_kv_tiles=self._fetches_kv_tiles(problem, tile),
        )


def _is_wide(problem: Problem) -> bool:
    """Return whether dk and dv of 64 keys need the registers of two consumers."""
    return max(problem.head_dim, problem.head_dim_v) > _WIDEST_WHOLE


def _has_few_queries(problem: Problem) -> bool:
    """Return whether KV tiles have so few queries that thread blocks should fetch many KV tiles.

    On an H200, 40 heads with 448 queries and 8192 keys then take 243 instead of 296 us, and 512
    heads with 512 queries and keys 252 instead of 281 us (head_dim 64). For wider heads, loops
    spill: 16 heads of 1024 queries took 716 instead of 646 us (head_dim 128).
    """
    rows = 2 * WARPGROUP_ROWS
    steps = problem.heads_q // problem.heads_kv * ceil_div(problem.seqlen_q, rows)
    kv_tiles = problem.batch * problem.heads_kv * ceil_div(problem.seqlen_k, rows)
    return (
        problem.layout.is_dense
        and problem.score is None
        and problem.mask.is_full
        and max(_padded_dims(problem)) <= _BOX_COLUMNS
        and problem.gradient_spec.wants("q")
        and 0 < steps <= _FEW_STEPS
        and kv_tiles >= _MANY_KV_TILES
    )


def _may_stream_bias(problem: Problem) -> bool:
    """Return whether TMA loads a bias if it fits in shared memory.

    Kernels that evaluate slopes or masks have no registers for the bias of several pairs.
    """
    score = problem.score
    if _is_wide(problem) or score is None or score.changes_slope or score.masks_pairs:
        return False
    return can_stream_bias(problem) and not _reads_lists(problem)


def _bias_stage_bytes(problem: Problem, tile: HopperBackwardTile) -> int:
    """Return the size in bytes of a bias tile and its two barriers, for full and empty."""
    return tile.columns * tile.Bc * problem.itemsize + 2 * BARRIER_BYTES


def _fetch_bytes(problem: Problem, tile: HopperBackwardTile) -> int:
    """Return the size in bytes of what a thread block needs in addition to fetch KV tiles."""
    stage = tile.Bc * sum(_padded_dims(problem)) * problem.itemsize
    return stage + _FETCH_BARRIERS * BARRIER_BYTES + _FETCHED_BYTES


def _cluster(problem: Problem, tile: HopperBackwardTile) -> int:
    """Return the number of thread blocks of a cluster, which divide KV tiles or the columns."""
    return tile.pair * cta_ranks(problem)


def _reads_lists(problem: Problem) -> bool:
    """Return whether thread blocks read their query tiles from lists in a block mask.

    All tiles have the same answer: that of the smallest tile, whose lists are the longest.
    """
    keys = WARPGROUP_ROWS if _is_wide(problem) else 2 * WARPGROUP_ROWS
    return backward_common.reads_lists(problem, WARPGROUP_ROWS, keys)


def _last_writes(problem: Problem) -> bool:
    """Return whether the last thread block that adds to a dq tile also writes dq."""
    return not _is_wide(problem) and problem.gradient_spec.dtype == problem.dtype


def _query_chunks(problem: Problem, device: Device, tile: HopperBackwardTile) -> QueryChunks:
    """Return the chunks of queries that thread blocks divide.

    With a causal mask, thread blocks of the first keys have the most work, and each query head of a
    KV head adds to it. Chunks of query heads even out the work. Without a causal mask, thread
    blocks proceed in step and wait for each other more often, so more of them are needed. On an
    H200, chunks reach 512 instead of 271 TFLOP/s with a causal mask (8 chunks), and 556 instead of
    475 without a mask (32 chunks): 2 x 8192 tokens, 32 query heads, 1 KV head, head_dim 128.
    """
    if _is_wide(problem):
        return QueryChunks()
    blocks, _ = backward_common.count_blocks(problem, tile.Bc, tile.Br)
    return backward_common.query_chunks(
        problem,
        blocks,
        ceil_div(problem.seqlen_q, tile.Br),
        least=(6 if _is_triangular(problem) else 12) * device.sm_count,
        wave=device.sm_count,
        divides_last=True,
    )


def _is_triangular(problem: Problem) -> bool:
    """Return whether thread blocks of later keys have less work: causal, without a window."""
    mask = problem.mask
    return mask.causal and mask.left is None and not _reads_lists(problem)


def _may_descend(problem: Problem) -> bool:
    """Return whether the last section has the descending dq order (`dq/order.cuh`).

    Lists of query tiles and packed sequences have the ascending order only. The last ones of packed
    sequences are short.
    """
    return _is_triangular(problem) and not problem.layout.packed_k


def _descending_section(problem: Problem, device: Device, tile: HopperBackwardTile) -> int:
    """Return the number of thread blocks or clusters of the descending section, at most.

    The descending section (`tile_coord.cuh`) has about two thread blocks per SM. In a simulation of
    16384 tokens and 16 heads, the SMs are then busy for 97% instead of 90% of the time.
    """
    tiles = ceil_div(problem.seqlen_k, tile.pair * tile.Bc)
    slots = device.sm_count // _cluster(problem, tile)
    return max(1, round(2 * slots / tiles)) * tiles


def _register_split(problem: Problem, tile: HopperBackwardTile) -> tuple[int, int]:
    if _is_wide(problem):
        spills = tile.buffers_dq or not problem.layout.is_dense
    else:
        half_boxes = any(dim % _BOX_COLUMNS for dim in _padded_dims(problem))
        spills = half_boxes
    return _MORE_PRODUCER_REGISTERS if spills else _REGISTERS


def _padded_dims(problem: Problem) -> tuple[int, int]:
    """Return the padded number of columns of q and k, and of v and dout, of a thread block.

    For wide heads, each of the two consumers computes at least one box of columns of dq.
    """
    ranks = cta_ranks(problem)
    dims = ceil_div(problem.head_dim, ranks), ceil_div(problem.head_dim_v, ranks)
    # The kernel of bias gradients reads the same tensor maps, by whole boxes.
    may_halve = max(dims) <= _WIDEST_OF_HALF_BOXES and not bias_gradients.serves(problem)
    dim, dim_v = (
        round_up(n, _BOX_COLUMNS // 2 if may_halve and n > _BOX_COLUMNS else _BOX_COLUMNS)
        for n in dims
    )
    return (max(dim, 2 * _BOX_COLUMNS) if _is_wide(problem) else dim), dim_v


def _box_columns(padded_dim: int) -> int:
    """Return the number of columns of a TMA box, for a tile with `padded_dim` columns."""
    return _BOX_COLUMNS // 2 if padded_dim % _BOX_COLUMNS else _BOX_COLUMNS


def _key_box_columns(problem: Problem, tile: HopperBackwardTile) -> int:
    """Return the number of columns of a TMA box of k.

    In a pair of thread blocks, each consumer computes dq of whole boxes of columns.
    """
    padded_dim = _padded_dims(problem)[0]
    if tile.pair > 1 and padded_dim % (2 * tile.pair * _BOX_COLUMNS):
        return _BOX_COLUMNS // 2
    return _box_columns(padded_dim)


def _why_not_pair(problem: Problem, tile: HopperBackwardTile) -> str | None:
    """Return why a tile cannot have pairs of thread blocks, or None if it can or has none."""
    if tile.pair == 1:
        return None
    may_pair = _is_wide(problem) and cta_ranks(problem) == 1
    if tile.pair != 2 or not may_pair:
        return f"pair is {tile.pair}; expected {'1 or 2' if may_pair else '1'}"
    if not problem.gradient_spec.wants("q"):
        return "pairs of thread blocks divide the columns of dq, which is not wanted"
    if not problem.layout.is_dense or (problem.score is not None and problem.score.masks_pairs):
        return "pairs of thread blocks serve dense batches in which position alone masks pairs"
    if _key_box_columns(problem, tile) < _BOX_COLUMNS and bias_gradients.serves(problem):
        return "the kernel of bias gradients reads whole boxes of k"
    return None


def _tensor_maps(problem: Problem, tile: HopperBackwardTile) -> dict[str, TensorMapSpec]:
    maps = {}
    padded_dim, padded_dim_v = _padded_dims(problem)
    for name, rows, columns in (
        ("q", tile.Br, _box_columns(padded_dim)),
        ("k", tile.Bc, _key_box_columns(problem, tile)),
        ("v", tile.Bc, _box_columns(padded_dim_v)),
        ("dout", tile.Br, _box_columns(padded_dim_v)),
    ):
        batch, length, heads, dim = problem.shape_of("out" if name == "dout" else name)
        shape, strides = (dim, length, heads, batch), problem.tensors[name].strides
        maps[name] = map_spec(problem, shape, strides, (columns, rows))
    return maps


def _section(problem: Problem, device: Device, chunks: QueryChunks) -> int:
    """Return the number of query heads whose tiles are interleaved.

    The query heads of a KV head count as one group. If they are divided into chunks, each chunk
    counts as a group.

    q, dout and the dq accumulator of these heads should fit in a third of L2, because adding to
    memory outside of L2 takes twice the time: 470 TFLOP/s with 1 head, 334 with 32 heads (H200,
    head_dim 64, causal, seqlen 8192).
    """
    rows = backward_common.visited_rows(problem, has_lists=_reads_lists(problem))
    group = problem.heads_q // problem.heads_kv
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.itemsize + 4 * problem.head_dim
    in_l2 = device.l2_cache // 3 // max(1, group // chunks.heads * rows * row_bytes)
    # The tiles of packed sequences start less regularly. With sections twice as large, they reach
    # 0.97 instead of 0.94 of the rate of equal lengths (H200, head_dim 128, full).
    if problem.layout.packed_k:
        in_l2 *= 2
    return group * max(1, min(in_l2, problem.batch * problem.heads_kv * chunks.heads))


def _preferred_tiles(problem: Problem) -> tuple[HopperBackwardTile, ...]:
    """Return tiles from the best to the worst, by resource arithmetic without measurements."""
    tile = HopperBackwardTile
    if cta_ranks(problem) > 1:
        ahead = [tile(64, 64, 64, 2, n, exchange_stages=2) for n in (2, 1)]
        return (*ahead, tile(64, 64, dout_stages=1))
    if _is_wide(problem):
        buffered = [tile(64, 64, 64, n, exchange_stages=2, buffers_dq=1) for n in (3, 2)]
        single = (*buffered, tile(64, 64))
        if problem.seqlen_k <= WARPGROUP_ROWS:
            return single
        pairs = [dataclasses.replace(x, dout_stages=n, pair=2) for x in single[1:] for n in (2, 1)]
        return (*pairs, *single)
    if _padded_dims(problem)[0] <= 64:
        return (tile(128, 128), tile(128, 128, dout_stages=1))
    return (tile(64, 128, q_stages=3), tile(64, 128))
