"""The part of the score matrix that one rank's queries and another's keys are, as a few calls.

Of an unmasked, causal or windowed sequence nothing is computed that a mask hides, but for the tiles
that its edge crosses: a rank's chunks of queries meet another's chunks of keys in rectangles that
are seen wholly, not at all, or as the same mask moved by the distance of the chunks, which the
argument `q_offset` of attention says. What no query sees does not travel either.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

from cupy_flash.parallel.shards import Chunk, chunks
from cupy_flash.problem.mask import Mask


class Span(NamedTuple):
    """Neighbouring rows, of queries or of keys, [start, stop)."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Rows."""
        return self.stop - self.start

    def moved(self, distance: int) -> Span:
        """The same rows counted from another one."""
        return Span(self.start + distance, self.stop + distance)


class Geometry(NamedTuple):
    """A sequence, its shards and its mask: all that says which rank needs what of which.

    Attributes
    ----------
    seqlen_q, seqlen_k
        Tokens of the whole sequence.
    ranks, order
        Shards; see `cupy_flash.parallel.shards`.
    causal, left, right
        The mask, as of `Mask`; the last query stands at the last key.
    cu_seqlens
        Where packed sequences begin and end, from 0 to seqlen_q = seqlen_k; None of one.
    by_distance
        Whether scores change with the distance of a query and a key, so that chunks that do not
        touch cannot share a call.
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
        """Whether distances are bounded, besides by causality."""
        return self.left is not None or self.right is not None


class Piece(NamedTuple):
    """One call of attention.

    Attributes
    ----------
    rows
        Of the queries' shard.
    keys
        Of the keys' shard; from `Visit` on, of those that travel.
    q_offset
        Position of the first row among the keys.
    is_masked
        Whether the mask hides any of it.
    cu_seqlens
        Where packed sequences begin and end, in rows and in keys; None of one.
    """

    rows: Span
    keys: Span
    q_offset: int
    is_masked: bool
    cu_seqlens: tuple[int, ...] | None = None


class Visit(NamedTuple):
    """What keys of one rank are to queries of another.

    Attributes
    ----------
    ranges
        Rows of the keys' shard that are needed, in order: these travel, one behind the other.
    layers
        Pieces, in groups that have no rows in common.
    """

    ranges: tuple[Span, ...]
    layers: tuple[tuple[Piece, ...], ...]

    @property
    def keys(self) -> int:
        """Keys that travel."""
        return sum(span.length for span in self.ranges)


@functools.lru_cache(4096)
def visit(geometry: Geometry, rank: int, other: int) -> Visit:
    """What the keys of rank `other` are to the queries of `rank`."""
    g = geometry
    columns = chunks(g.seqlen_k, g.ranks, other, g.order)
    found: list[list[Piece]] = []
    for rows in chunks(g.seqlen_q, g.ranks, rank, g.order):
        meetings = (_meeting(g, rows, keys) for keys in columns)
        found.append(_side_by_side(g, [piece for piece in meetings if piece is not None]))
    pieces = _one_above_the_other(g, found)
    if rank == other:
        ranges: tuple[Span, ...] = (Span(0, sum(chunk.length for chunk in columns)),)
    else:
        ranges = _union([piece.keys for piece in pieces])
    return Visit(ranges, _layers([_among(ranges, piece) for piece in pieces]))


def _meeting(g: Geometry, rows: Chunk, keys: Chunk) -> Piece | None:
    """What a chunk of keys is to a chunk of queries; None where no query sees a key."""
    first_row, first_key, last_row, last_key = rows.start, keys.start, rows.stop, keys.stop
    offset = g.seqlen_k - g.seqlen_q
    if g.cu_seqlens is not None:
        inner = [cut for cut in g.cu_seqlens if rows.start < cut < rows.stop]
        if rows.start == keys.start and inner:
            local = tuple(cut - rows.start for cut in (rows.start, *inner, rows.stop))
            own = Span(rows.at, rows.at + rows.length)
            return Piece(own, Span(keys.at, keys.at + keys.length), 0, True, local)
        # Chunks that are not the same have one sequence in common at most: the one that reaches
        # from the end of the first to the begin of the second.
        later = bisect.bisect_right(g.cu_seqlens, max(rows.start, keys.start))
        begin, end = g.cu_seqlens[later - 1 : later + 1]
        first_row, last_row = max(rows.start, begin), min(rows.stop, end)
        first_key, last_key = max(keys.start, begin), min(keys.stop, end)
        if first_row >= last_row or first_key >= last_key:
            return None
    distance = first_row + offset - first_key
    mask = Mask(last_row - first_row, last_key - first_key, g.causal, distance, g.left, g.right)
    # Rows and keys that see, and are seen by, none of the others are left out.
    seeing = Span(mask.first_row(0), mask.last_row(mask.seqlen_k - 1))
    if seeing.length <= 0:
        return None
    seen = Span(mask.begin(seeing.start), mask.end(seeing.stop - 1))
    if seen.length <= 0:
        return None
    distance += seeing.start - seen.start
    within = Mask(seeing.length, seen.length, g.causal, distance, g.left, g.right)
    return Piece(
        seeing.moved(rows.at + first_row - rows.start),
        seen.moved(keys.at + first_key - keys.start),
        distance,
        not within.sees_all(0, seeing.length),
    )


def _side_by_side(g: Geometry, pieces: list[Piece]) -> list[Piece]:
    """Pieces of the same rows with those made one whose keys lie next to each other.

    What is seen wholly can be followed by more of the same, or by what is causal: then all keys
    before the last that a row sees are seen.
    """
    joined: list[Piece] = []
    for piece in pieces:
        if joined and not g.by_distance:
            last = joined[-1]
            touching = last.rows == piece.rows and last.keys.stop == piece.keys.start
            plain = piece.cu_seqlens is None and not (piece.is_masked and g.has_window)
            if touching and not last.is_masked and plain:
                keys = Span(last.keys.start, piece.keys.stop)
                offset = piece.q_offset + last.keys.length
                joined[-1] = Piece(piece.rows, keys, offset, piece.is_masked)
                continue
        joined.append(piece)
    return joined


def _one_above_the_other(g: Geometry, found: list[list[Piece]]) -> list[Piece]:
    """The pieces of all chunks of rows, with those made one that are one wider call.

    Rows that see all of the same keys; and causal rows, where the later see all that the earlier
    do, and then one more each:

        earlier rows  x . . . . .        low chunk
                      x x . . . .
        later rows    x x x . . .        high chunk
                      x x x x . .
    """
    joined: list[Piece] = []
    for pieces in found:
        if len(joined) == 1 and len(pieces) == 1 and not g.by_distance:
            (above,), (below,) = joined, pieces
            touching = above.rows.stop == below.rows.start
            plain = above.cu_seqlens is None and below.cu_seqlens is None
            rows = Span(above.rows.start, below.rows.stop)
            if touching and plain and not above.is_masked and not below.is_masked:
                if above.keys == below.keys:
                    joined = [above._replace(rows=rows)]
                    continue
            elif touching and plain and above.is_masked and below.is_masked and not g.has_window:
                steps_on = below.q_offset == above.q_offset + above.rows.length
                within = above.q_offset + above.rows.length <= above.keys.length
                if steps_on and within and above.keys.start == below.keys.start:
                    joined = [above._replace(rows=rows, keys=below.keys)]
                    continue
        joined += pieces
    return joined


def _union(spans: list[Span]) -> tuple[Span, ...]:
    """The same rows, each once and in order."""
    union: list[Span] = []
    for span in sorted(spans):
        if union and span.start <= union[-1].stop:
            union[-1] = Span(union[-1].start, max(union[-1].stop, span.stop))
        else:
            union.append(span)
    return tuple(union)


def _among(ranges: tuple[Span, ...], piece: Piece) -> Piece:
    """A piece with its keys counted among those that travel."""
    before = 0
    for span in ranges:
        if piece.keys.start < span.stop:
            break
        before += span.length
    return piece._replace(keys=piece.keys.moved(before - span.start))


def _layers(pieces: list[Piece]) -> tuple[tuple[Piece, ...], ...]:
    layers: list[list[Piece]] = []
    for piece in pieces:
        for layer in layers:
            if all(
                p.rows.stop <= piece.rows.start or piece.rows.stop <= p.rows.start for p in layer
            ):
                layer.append(piece)
                break
        else:
            layers.append([piece])
    return tuple(map(tuple, layers))
