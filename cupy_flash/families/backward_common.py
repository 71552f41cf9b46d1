"""Shared code of the backward families: preprocessing, and the accumulator of dq.

Each row of dk, dv and dq is accumulated in a fixed order, so that results are reproducible bitwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cupy_flash.families import input_gradients
from cupy_flash.families.contract import (
    MAX_GRID,
    QueryTileLists,
    ceil_div,
    heads_in_l2,
    round_up,
    why_not_scale,
)
from cupy_flash.families.input_gradients import BiasPlan
from cupy_flash.families.schedule import ROW_TERMS, Launch, Schedule, TensorMapSpec
from cupy_flash.problem.arrays import ITEMSIZE
from cupy_flash.problem.device import Device
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.problem import Problem

_ROW_STATS_THREADS = 256
# Alignment of the arrays in the workspace, in bytes.
_WORKSPACE_ALIGNMENT = 512
_WORD = 4
# Size in bytes of `PackedTileSlot`: the sequence of a KV tile and its rows.
_PACKED_TILE_BYTES = 48
# Size in bytes of `ListedKvTile`, and of the counter in front of a list.
_LISTED_TILE_BYTES = 16
# Smallest number of query tiles of a chunk, if thread blocks divide the query tiles of a KV tile.
_LEAST_CHUNK_TILES = 4
# Largest number of chunks of the query tiles of the last heads, and the largest time with such
# chunks relative to the time without them.
_MOST_LAST_CHUNKS, _LARGEST_TIME = 4, 0.99
# Time that a thread block takes to start and to end, in query tiles.
_BLOCK_STEPS = 4
# Smallest number of KV tiles of the longest sequence for which a batch that is not dense has lists.
# With 4 tiles, 64 sequences take 0.74 ms instead of 1.32 ms (H200, 6 documents, 16 heads, head_dim
# 128). In packed batches, the lists also have space for the longest sequence in each sequence, so
# they are used only if this is at most `_LARGEST_PADDING` times the number of tiles that exist.
_LEAST_LISTED_KV_TILES = 4
_LARGEST_PADDING = 16
# Largest size in bytes of the lists of query tiles in a block mask.
_LIST_BYTES = 150_000_000
# Upper bounds, exclusive, of the numbers of query tiles and KV tiles that an entry of a list can
# hold.
_MAX_QUERY_TILES, _MAX_KV_TILES = 2**16, 2**13


def why_not(problem: Problem) -> str | None:
    """Return why no backward family serves the problem, or None if some may."""
    if problem.layout.page_size or problem.layout.kind == "kvcache":
        return "does not compute gradients of a KV cache"
    return None


def why_not_tensor_cores(problem: Problem) -> str | None:
    """Return why no backward family on tensor cores serves the problem, or None if some may."""
    return why_not(problem) or why_not_scale(problem)


def reads_lists(problem: Problem, queries: int, keys: int) -> bool:
    """Return whether thread blocks read their query tiles from lists in a block mask.

    If the batch is not dense, the lists are built in every call, because the lengths are in device
    memory.

    Parameters
    ----------
    problem
        Backward problem.
    queries, keys
        Number of rows of a query tile, and of a KV tile.
    """
    score = problem.score
    if score is None or not score.block_mask_suffices or 0 in problem.shape_of("q"):
        return False
    # The kernels of other gradients, such as those of a bias, read no lists.
    if not any(problem.gradient_spec.wants(name) for name in ROWS):
        return False
    query_tiles, kv_tiles = ceil_div(problem.seqlen_q, queries), ceil_div(problem.seqlen_k, keys)
    layout, batch = problem.layout, problem.batch
    if kv_tiles < (1 if layout.is_dense else _LEAST_LISTED_KV_TILES) or 0 in (query_tiles, batch):
        return False
    if layout.packed_k and (
        batch * query_tiles > _LARGEST_PADDING * (layout.total_q // queries + batch)
        or batch * kv_tiles > _LARGEST_PADDING * (layout.total_k // keys + batch)
    ):
        return False
    return (
        query_tiles < _MAX_QUERY_TILES
        and kv_tiles < _MAX_KV_TILES
        and list_entries(problem, queries, keys) * _WORD <= _LIST_BYTES
    )


def list_entries(problem: Problem, queries: int, keys: int) -> int:
    """Return the number of entries of all lists.

    If the mask is the same for all sequences, or for all heads, they use the same lists. Sequences
    of different lengths have different lists, each with space for those of the longest sequence.
    """
    assert problem.score is not None
    of_batch, of_head = problem.score.mask_varies
    of_batch |= not problem.layout.is_dense
    lists = (problem.batch if of_batch else 1) * (problem.heads_kv if of_head else 1)
    return lists * ceil_div(problem.seqlen_q, queries) * ceil_div(problem.seqlen_k, keys)


def query_tile_lists(problem: Problem, *, stores_pairs: bool = False) -> QueryTileLists:
    """Return a description of the lists of query tiles in the block mask of a problem."""
    return QueryTileLists(problem.heads_q // problem.heads_kv, stores_pairs)


def visited_rows(problem: Problem, *, has_lists: bool) -> int:
    """Return the assumed number of query rows of a head that concurrent thread blocks process.

    With lists of query tiles, it is a quarter of the rows. A smaller number makes the planner
    interleave more heads. Thread blocks of the same head then start further apart, and wait less.
    """
    return ceil_div(problem.seqlen_q, 4) if has_lists else problem.seqlen_q


def row_lanes(problem: Problem) -> int:
    """Return the number of lanes that read a row of out and dout, 16 bytes each: a power of two."""
    chunks = ceil_div(problem.head_dim_v * problem.itemsize, 16)
    return min(32, 1 << (chunks - 1).bit_length())


def count_blocks(problem: Problem, keys: int, queries: int) -> tuple[int, int]:
    """Return the number of KV tiles of `keys` rows, and of query tiles of `queries` rows."""
    p, layout = problem, problem.layout
    kv_blocks = (
        layout.total_k // keys + p.batch
        if layout.packed_k
        else ceil_div(p.seqlen_k, keys) * p.batch
    )
    query_blocks = (
        layout.total_q // queries + p.batch
        if layout.packed_q
        else ceil_div(p.seqlen_q, queries) * p.batch
    )
    return kv_blocks * p.heads_kv, query_blocks * p.heads_q


def why_not_grid(problem: Problem, keys: int, queries: int) -> str | None:
    """Return why a launch cannot have a thread block per tile, or None if it can."""
    block_counts = count_blocks(problem, keys, queries)
    blocks = max(*block_counts, _row_stats_blocks(problem), input_gradients.bias_tiles(problem))
    if blocks > MAX_GRID:
        return f"needs {blocks} thread blocks, more than the {MAX_GRID} of a launch"
    return None


def schedule(
    problem: Problem,
    device: Device,
    launches: Iterable[Launch],
    sums: QuerySums | None = None,
    section_heads: int = 0,
    tensor_maps: Mapping[str, TensorMapSpec] | None = None,
    params: Mapping[str, int] | None = None,
    bias: BiasPlan | None = None,
) -> Schedule:
    """Return the schedule of a backward pass: preprocessing, `launches`, and input gradients.

    Launches without rows are left out, and so are launches whose gradients the call does not need.

    Parameters
    ----------
    problem, device, launches
        Backward problem, the device, and the launches that compute dq, dk and dv.
    sums
        Accumulator of dq in the workspace; None if thread blocks do not add to dq.
    section_heads
        Number of query heads whose tiles are interleaved; 0 for as many as fit in L2.
    tensor_maps
        Tensor maps that the kernels take, by name.
    params
        Fields of the argument struct, see `Schedule`.
    bias
        Computation of the gradient of a bias; None for the kernel that runs on every GPU.
    """
    bias = bias or input_gradients.bias_plan(problem, device)
    gradient = problem.gradient_spec
    blocks = _row_stats_blocks(problem)
    terms = Launch.of_gradients(ROW_TERMS, "preprocess", blocks, _ROW_STATS_THREADS)
    workspace = (
        _query_rows(problem) * 2 * ITEMSIZE[problem.lse_dtype]
        if sums is None
        else sums.workspace(problem)
    )
    offsets = {}
    for name, size in input_gradients.workspace(problem, device, bias).items():
        offsets[name] = round_up(workspace, _WORKSPACE_ALIGNMENT)
        workspace = offsets[name] + size
    return Schedule(
        (
            terms,
            *(launch for launch in launches if launch.grid[0] and gradient.wants(*ROWS)),
            *input_gradients.launches(problem, device, bias),
        ),
        workspace=workspace,
        section_heads=section_heads or heads_in_l2(problem, device),
        tensor_maps=tensor_maps or {},
        workspace_offsets=offsets,
        params={**(params or {}), **input_gradients.params(problem, bias)},
    )


class QueryChunks(NamedTuple):
    """Division of the queries of a KV tile among thread blocks, which add to its dk and dv.

    Attributes
    ----------
    heads, tiles
        Number of chunks of the query heads of a KV head, and of the query tiles of a head.
    whole
        Number of KV tiles whose query tiles are not divided. They precede the others. Each KV tile
        counts once for each chunk of query heads; if `whole` is not 0, there is one such chunk.
    """

    heads: int = 1
    tiles: int = 1
    whole: int = 0

    def blocks(self, kv_tiles: int) -> int:
        """Return the number of thread blocks of `kv_tiles` KV tiles."""
        return self.whole + (kv_tiles * self.heads - self.whole) * self.tiles


def query_chunks(
    problem: Problem,
    blocks: int,
    query_tiles: int,
    *,
    least: int,
    wave: int,
    divides_last: bool = False,
) -> QueryChunks:
    """Return the chunks of queries that give enough thread blocks, if the problem allows them.

    With mask functions there are no chunks: the last thread block of a KV tile would also need to
    know for which keys the other thread blocks found a visible pair.

    Parameters
    ----------
    problem
        Backward problem.
    blocks
        Number of KV tiles of all heads.
    query_tiles
        Number of query tiles of a head.
    least
        Number of thread blocks below which the query heads of a KV head are divided.
    wave
        Number of thread blocks that run at a time. If there are fewer, query tiles are divided.
    divides_last
        Whether query tiles of the last heads may be divided, if the last wave is not full.
    """
    masks_pairs = problem.score is not None and problem.score.masks_pairs
    if masks_pairs or not blocks or not problem.gradient_spec.wants("k", "v"):
        return QueryChunks()
    group = problem.heads_q // problem.heads_kv
    divisors = [heads for heads in range(1, group + 1) if group % heads == 0]
    heads = next((n for n in divisors if n * blocks >= least), group)
    tiles = min(wave // (heads * blocks), query_tiles // _LEAST_CHUNK_TILES)
    if tiles > 1:
        return QueryChunks(heads, tiles)
    if divides_last and group == 1 and problem.mask.is_full and problem.layout.is_dense:
        return _chunks_of_last_heads(problem, blocks, query_tiles, wave)
    return QueryChunks(heads)


def _chunks_of_last_heads(
    problem: Problem, blocks: int, query_tiles: int, wave: int
) -> QueryChunks:
    """Return chunks of the query tiles of the last heads, or no chunks if they gain little.

    The heads are not grouped.

    If all thread blocks take the same time, the last wave of thread blocks leaves SMs idle, unless
    it has as many thread blocks as the others. Shorter thread blocks at the end fill it: 16 heads
    of 16384 tokens have 15.5 waves, and 549 became 556 TFLOP/s (H200, head_dim 128). Grouped heads
    lost 2%.
    """
    heads = problem.batch * problem.heads_kv
    of_head = blocks // heads
    whole = blocks - min(heads, max(1, round(wave / of_head))) * of_head
    chunks = [
        QueryChunks(1, tiles, whole)
        for tiles in range(2, min(_MOST_LAST_CHUNKS, query_tiles // _LEAST_CHUNK_TILES) + 1)
    ]
    undivided = ceil_div(blocks, wave) * (query_tiles + _BLOCK_STEPS)
    times = {x: _time_of_chunks(x, blocks, query_tiles, wave) for x in chunks}
    best = min(times, key=times.__getitem__, default=None)
    return best if best and times[best] < _LARGEST_TIME * undivided else QueryChunks()


def _time_of_chunks(chunks: QueryChunks, blocks: int, query_tiles: int, wave: int) -> float:
    """Return the time of all thread blocks, in units of the time that a query tile takes.

    A thread block of a chunk also adds its sums, which takes about as long as one query tile.
    """
    waves, rest = divmod(chunks.whole, wave)
    time = query_tiles + _BLOCK_STEPS
    piece = query_tiles / chunks.tiles + _BLOCK_STEPS + 1
    pieces, count = (blocks - chunks.whole) * chunks.tiles, 0
    # `rest` SMs first process a whole thread block.
    while (wave - rest) * count + rest * max(0, count - math.ceil(time / piece)) < pieces:
        count += 1
    return waves * time + max(count * piece, time if rest else 0)


def with_chunks(
    schedule: Schedule,
    problem: Problem,
    chunks: QueryChunks,
    kv_tiles: int,
    parties: int,
    floats: int,
) -> Schedule:
    """Return a schedule with the workspace and the parameters of chunks of queries.

    Parameters
    ----------
    schedule, problem
        Schedule of the backward pass, and its problem.
    chunks
        Chunks of queries.
    kv_tiles
        Number of KV tiles of all heads.
    parties
        Number of groups of threads of a thread block, which add independently.
    floats
        Number of sums of a group.
    """
    has_last_section = chunks.tiles > 1 and not problem.layout.packed_k
    params = {
        "head_chunks": chunks.heads,
        "tile_chunks": chunks.tiles,
        "last_section": chunks.whole if has_last_section else chunks.blocks(kv_tiles),
        **schedule.params,
    }
    if chunks.heads == chunks.tiles == 1:
        return dataclasses.replace(schedule, params=params)
    groups = (kv_tiles - chunks.whole) * parties
    semaphores = round_up(groups, _WORKSPACE_ALIGNMENT // _WORD)
    offset = round_up(schedule.workspace, _WORKSPACE_ALIGNMENT)
    return dataclasses.replace(
        schedule,
        workspace=offset + (semaphores + groups * floats) * _WORD,
        workspace_offsets={**schedule.workspace_offsets, "kv_sums": offset},
        params=params | {"kv_semaphores": semaphores},
    )


def with_packed_order(problem: Problem, schedule: Schedule, keys: int) -> Schedule:
    """Return a schedule that processes packed sequences in the order of their lengths.

    Preprocessing writes the order to the workspace (`kernels_cu/backward/packed_order.cuh`).

    Parameters
    ----------
    problem, schedule
        Backward problem, and its schedule.
    keys
        Number of rows of a KV tile.
    """
    layout = problem.layout
    if not layout.packed_k:
        return schedule
    offset = round_up(schedule.workspace, _WORKSPACE_ALIGNMENT)
    slots = layout.total_k // keys + problem.batch
    return dataclasses.replace(
        schedule,
        workspace=offset + slots * _PACKED_TILE_BYTES,
        workspace_offsets={**schedule.workspace_offsets, "packed_tiles": offset},
    )


def with_kv_tile_list(schedule: Schedule, kv_tiles: int) -> Schedule:
    """Return a schedule with a list of KV tiles, from which thread blocks fetch.

    Preprocessing writes the list to the workspace (`kernels_cu/backward/kv_tile_list.cuh`).

    Parameters
    ----------
    schedule
        Schedule of the backward pass.
    kv_tiles
        Number of KV tiles of all heads.
    """
    offset = round_up(schedule.workspace, _WORKSPACE_ALIGNMENT)
    terms, *others = schedule.launches
    blocks = max(terms.grid[0], ceil_div(kv_tiles, _ROW_STATS_THREADS))
    return dataclasses.replace(
        schedule,
        launches=(dataclasses.replace(terms, grid=(blocks, *terms.grid[1:])), *others),
        workspace=offset + (1 + kv_tiles) * _LISTED_TILE_BYTES,
        workspace_offsets={**schedule.workspace_offsets, "counters": offset},
    )


@dataclass(frozen=True)
class QuerySums:
    """Float32 accumulator of dq in the workspace, see `kernels_cu/backward/dq/accumulate.cuh`.

    Attributes
    ----------
    Br, columns
        Number of rows, and of columns, of a dq tile.
    """

    Br: int
    columns: int

    def workspace(self, problem: Problem) -> int:
        """Return the size in bytes of row statistics (lse and delta), semaphores and dq tiles."""
        terms = _query_rows(problem) * 2 * ITEMSIZE[problem.lse_dtype]
        tile_slots = self.tile_slots(problem)
        sums = tile_slots * self.Br * self.columns * _WORD
        return (
            round_up(terms, _WORKSPACE_ALIGNMENT)
            + round_up(tile_slots * _WORD, _WORKSPACE_ALIGNMENT)
            + sums
        )

    def tile_slots(self, problem: Problem) -> int:
        """Return the number of dq tiles; each packed sequence has a padded last tile."""
        layout = problem.layout
        if layout.packed_q:
            return problem.heads_q * (layout.total_q // self.Br + problem.batch)
        return problem.batch * problem.heads_q * ceil_div(problem.seqlen_q, self.Br)


def inspects(problem: Problem) -> bool:
    """Return whether some row may attend to no key, or no row may attend to some key.

    Kernels then inspect tiles for NaN and infinity, see `kernels_cu/backward/preprocess/clean.cuh`.
    """
    mask = problem.mask
    if problem.score is not None and problem.score.conceals:
        return True
    if mask.is_full or 0 in (problem.seqlen_q, problem.seqlen_k):
        return False
    # The row with the fewest visible keys is the first or the last, whatever the mask. Likewise,
    # the key that the fewest rows attend to is the first or the last.
    rows, keys = (0, problem.seqlen_q - 1), (0, problem.seqlen_k - 1)
    return (
        not problem.layout.is_dense
        or (problem.score is not None and problem.score.offsets)
        or any(mask.begin(row) >= mask.end(row) for row in rows)
        or any(mask.first_row(key) >= mask.last_row(key) for key in keys)
    )


def may_have_one_key(problem: Problem) -> bool:
    """Return whether some query row may attend to only one key."""
    is_plain = problem.mask.is_full and problem.layout.is_dense
    is_plain &= problem.score is None or not problem.score.conceals
    return not is_plain or problem.seqlen_k == 1


def _query_rows(problem: Problem) -> int:
    """Return the number of query rows of all heads, which is the size of lse."""
    return math.prod(problem.lse_shape)


def _row_stats_blocks(problem: Problem) -> int:
    """Return the number of thread blocks of preprocessing, which also zeroes rows of dk and dv."""
    layout, threads = problem.layout, _query_rows(problem) * row_lanes(problem)
    if not layout.is_dense:
        keys = layout.total_k if layout.packed_k else problem.batch * problem.seqlen_k
        threads = max(threads, keys)
    return max(1, ceil_div(threads, _ROW_STATS_THREADS))


def config(
    problem: Problem,
    sums: QuerySums | None = None,
    *,
    last_writes: bool = False,
    may_descend: bool = False,
    fetches_kv_tiles: bool = False,
) -> dict[str, int | bool]:
    """Return the members of the `Config` struct that all backward kernels read.

    Parameters
    ----------
    problem, sums
        See `schedule`.
    last_writes
        Whether the last thread block that adds to a dq tile also writes dq. Preprocessing then
        zeroes the tiles that attend to no key.
    may_descend
        Whether thread blocks of the last section may go through query tiles in descending order.
    fetches_kv_tiles
        Whether thread blocks fetch KV tiles. Preprocessing then writes the list of KV tiles.
    """
    return {
        "as_inputs": problem.gradient_spec.as_inputs,
        "row_lanes": row_lanes(problem),
        "has_seqlens": not problem.layout.is_dense,
        "packed": problem.layout.packed_q,
        "dq_Br": 0 if sums is None else sums.Br,
        "may_descend": may_descend,
        "fetches_kv_tiles": fetches_kv_tiles,
        "may_mask_pairs": problem.score is not None and problem.score.conceals,
        "inspects": inspects(problem),
        "has_one_key_rows": may_have_one_key(problem),
        "zeroes_queries": last_writes or not problem.layout.is_dense,
    } | input_gradients.config(problem)
