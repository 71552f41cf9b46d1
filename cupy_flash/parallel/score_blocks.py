"""Division of the scores of one rank's queries and another rank's keys into a few attention calls.

A chunk of queries and a chunk of keys form a rectangle of the score matrix. It is unmasked, fully
masked, or has the mask of the whole sequence shifted by the distance of the chunks, which the
argument `q_offset` of attention expresses. Fully masked parts are not computed, except in tiles
that the edge of the mask crosses, and keys that no query attends to are not sent.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

from cupy_flash.parallel.shards import Chunk, chunks
from cupy_flash.problem.mask import Mask


class Span(NamedTuple):
    """Range [start, stop) of consecutive query rows or keys."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def shifted(self, distance: int) -> Span:
        """Return the range shifted by `distance` rows."""
        return Span(self.start + distance, self.stop + distance)


class Geometry(NamedTuple):
    """A sequence, its sharding and its mask, which determine the keys that each rank needs.

    Attributes
    ----------
    seqlen_q, seqlen_k
        Numbers of queries and keys of the whole sequence.
    ranks, order
        Number of shards, and assignment of tokens to them; see `cupy_flash.parallel.shards`.
    causal, left, right
        Mask, see `Mask`; the last query is aligned with the last key.
    cu_seqlens
        Boundaries of packed sequences, from 0 to seqlen_q = seqlen_k; None for a single sequence.
    by_distance
        Whether scores depend on the distance of query and key (ALiBi), so that one call cannot
        compute chunks that are not adjacent.
    """

    seqlen_q: int
    seqlen_k: int
    ranks: int
    order: str
    causal: bool = False
    left: int | None = None
    right: int | None = None
    cu_seqlens: tuple[int, ...] | None = None
    by_distance: bool = False

    @property
    def has_window(self) -> bool:
        """Whether there is a window, in addition to a causal mask or instead of it."""
        return self.left is not None or self.right is not None


class ScoreBlock(NamedTuple):
    """Block of the score matrix that one attention call computes.

    Attributes
    ----------
    rows
        Range of rows in the shard of queries.
    keys
        Range of keys in the shard of keys or, in a `RingStep`, in the array of keys that are sent.
    q_offset
        Position of the first row relative to the first key.
    is_masked
        Whether any pair of the block is masked.
    cu_seqlens
        Boundaries of packed sequences, relative to `rows` and `keys`; None for a single sequence.
    """

    rows: Span
    keys: Span
    q_offset: int
    is_masked: bool
    cu_seqlens: tuple[int, ...] | None = None


class RingStep(NamedTuple):
    """Ring step of a rank: the keys that it needs from another rank, and the calls that use them.

    Attributes
    ----------
    ranges
        Ranges of the other rank's keys that are needed, in order; they are sent concatenated.
    layers
        Groups of blocks; the blocks of a group have no rows in common.
    """

    ranges: tuple[Span, ...]
    layers: tuple[tuple[ScoreBlock, ...], ...]

    @property
    def keys(self) -> int:
        """Number of keys that are sent."""
        return sum(span.length for span in self.ranges)


@functools.lru_cache(4096)
def find_ring_step(geometry: Geometry, rank: int, other: int) -> RingStep:
    """Return the ring step in which the queries of `rank` attend to the keys of rank `other`."""
    g = geometry
    columns = chunks(g.seqlen_k, g.ranks, other, g.order)
    blocks_by_chunk: list[list[ScoreBlock]] = []
    for rows in chunks(g.seqlen_q, g.ranks, rank, g.order):
        candidates = (_score_block(g, rows, keys) for keys in columns)
        blocks_by_chunk.append(_join_keys(g, [block for block in candidates if block is not None]))
    blocks = _join_rows(g, blocks_by_chunk)
    if rank == other:
        ranges: tuple[Span, ...] = (Span(0, sum(chunk.length for chunk in columns)),)
    else:
        ranges = _union([block.keys for block in blocks])
    return RingStep(ranges, _layers([_relative_to_ranges(ranges, block) for block in blocks]))


def _score_block(g: Geometry, rows: Chunk, keys: Chunk) -> ScoreBlock | None:
    """Return the block of a chunk of queries and a chunk of keys; None if it is fully masked."""
    first_row, first_key, last_row, last_key = rows.start, keys.start, rows.stop, keys.stop
    offset = g.seqlen_k - g.seqlen_q
    if g.cu_seqlens is not None:
        inner = [boundary for boundary in g.cu_seqlens if rows.start < boundary < rows.stop]
        if rows.start == keys.start and inner:
            local = tuple(boundary - rows.start for boundary in (rows.start, *inner, rows.stop))
            shard_rows = Span(rows.offset, rows.offset + rows.length)
            return ScoreBlock(
                shard_rows, Span(keys.offset, keys.offset + keys.length), 0, True, local
            )
        # Two different chunks have at most one sequence in common: the one that reaches from the
        # end of the first chunk to the beginning of the second.
        later = bisect.bisect_right(g.cu_seqlens, max(rows.start, keys.start))
        begin, end = g.cu_seqlens[later - 1 : later + 1]
        first_row, last_row = max(rows.start, begin), min(rows.stop, end)
        first_key, last_key = max(keys.start, begin), min(keys.stop, end)
        if first_row >= last_row or first_key >= last_key:
            return None
    distance = first_row + offset - first_key
    mask = Mask(last_row - first_row, last_key - first_key, g.causal, distance, g.left, g.right)
    # Leave out rows that attend to no key of the chunk, and keys that no row attends to.
    row_span = Span(mask.first_row(0), mask.last_row(mask.seqlen_k - 1))
    if row_span.length <= 0:
        return None
    key_span = Span(mask.begin(row_span.start), mask.end(row_span.stop - 1))
    if key_span.length <= 0:
        return None
    distance += row_span.start - key_span.start
    block_mask = Mask(row_span.length, key_span.length, g.causal, distance, g.left, g.right)
    return ScoreBlock(
        row_span.shifted(rows.offset + first_row - rows.start),
        key_span.shifted(keys.offset + first_key - keys.start),
        distance,
        not block_mask.all_visible(0, row_span.length),
    )


def _join_keys(g: Geometry, blocks: list[ScoreBlock]) -> list[ScoreBlock]:
    """Return blocks of the same rows, with blocks of adjacent keys joined into one.

    An unmasked block can be joined with a following unmasked or causal one: each row of the result
    attends to all keys before its last one.
    """
    joined: list[ScoreBlock] = []
    for block in blocks:
        if joined and not g.by_distance:
            last = joined[-1]
            adjacent = last.rows == block.rows and last.keys.stop == block.keys.start
            joinable = block.cu_seqlens is None and not (block.is_masked and g.has_window)
            if adjacent and not last.is_masked and joinable:
                keys = Span(last.keys.start, block.keys.stop)
                offset = block.q_offset + last.keys.length
                joined[-1] = ScoreBlock(block.rows, keys, offset, block.is_masked)
                continue
        joined.append(block)
    return joined


def _join_rows(g: Geometry, blocks_by_chunk: list[list[ScoreBlock]]) -> list[ScoreBlock]:
    """Return the blocks of all chunks of rows, with adjacent rows joined if one call suffices.

    It does for unmasked blocks of the same keys. It also does for causal blocks if the later rows
    attend to all keys of the earlier rows, and each to one more:

        earlier rows  x . . . . .        low chunk
                      x x . . . .
        later rows    x x x . . .        high chunk
                      x x x x . .
    """
    joined: list[ScoreBlock] = []
    for blocks in blocks_by_chunk:
        if len(joined) == 1 and len(blocks) == 1 and not g.by_distance:
            (above,), (below,) = joined, blocks
            adjacent = above.rows.stop == below.rows.start
            joinable = above.cu_seqlens is None and below.cu_seqlens is None
            rows = Span(above.rows.start, below.rows.stop)
            if adjacent and joinable and not above.is_masked and not below.is_masked:
                if above.keys == below.keys:
                    joined = [above._replace(rows=rows)]
                    continue
            elif adjacent and joinable and above.is_masked and below.is_masked and not g.has_window:
                steps_on = below.q_offset == above.q_offset + above.rows.length
                within = above.q_offset + above.rows.length <= above.keys.length
                if steps_on and within and above.keys.start == below.keys.start:
                    joined = [above._replace(rows=rows, keys=below.keys)]
                    continue
        joined += blocks
    return joined


def _union(spans: list[Span]) -> tuple[Span, ...]:
    """Return the union of ranges as disjoint ranges in ascending order."""
    union: list[Span] = []
    for span in sorted(spans):
        if union and span.start <= union[-1].stop:
            union[-1] = Span(union[-1].start, max(union[-1].stop, span.stop))
        else:
            union.append(span)
    return tuple(union)


def _relative_to_ranges(ranges: tuple[Span, ...], block: ScoreBlock) -> ScoreBlock:
    """Return a block with `keys` relative to the concatenated `ranges` that are sent."""
    before = 0
    for span in ranges:
        if block.keys.start < span.stop:
            break
        before += span.length
    return block._replace(keys=block.keys.shifted(before - span.start))


def _layers(blocks: list[ScoreBlock]) -> tuple[tuple[ScoreBlock, ...], ...]:
    layers: list[list[ScoreBlock]] = []
    for block in blocks:
        for layer in layers:
            if all(
                p.rows.stop <= block.rows.start or block.rows.stop <= p.rows.start for p in layer
            ):
                layer.append(block)
                break
        else:
            layers.append([block])
    return tuple(map(tuple, layers))
