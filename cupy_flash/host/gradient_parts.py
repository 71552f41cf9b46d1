"""How a backward pass of the CPU backend is cut up, and rows made ready for it.

A chunk is some rows of query heads that share keys. One range of keys after the other meets it, and
each of these is an item of work: see `cupy_flash.host.gradient_tiles`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host.gradient_sums import Sums, sink_gradients
from cupy_flash.host.passes import SCRATCH_LIMIT, Block, Pass
from cupy_flash.host.turns import Turns
from cupy_flash.problem.tile import Tile

Array = NDArray[Any]

# Scores of the heads, and sequences, that are taken up in one step.
SCORES_AT_ONCE = 1 << 17

# Elements of the rows of a chunk.
CHUNK_ELEMENTS = 1 << 19

# Items that a pass is cut into at least, but for chunks of fewer rows: threads share them out.
MIN_ITEMS = 8
MIN_ROWS = 256


class Parts(NamedTuple):
    """How a pass is cut up."""

    Br: int
    Bc: int
    tile_heads: int  # query heads of one kv head whose rows, if few, are stacked in one tile
    rows: int  # of a chunk
    heads: int  # query heads of one kv head, of a chunk
    kv_heads: int  # of a chunk
    batch: int  # sequences of a chunk
    elements: int  # of a worker's scratch and a chunk

    @classmethod
    def make(
        cls,
        batch: int,
        seqlen_q: int,
        seqlen_k: int,
        heads_kv: int,
        group: int,
        head_dim: int,
        head_dim_v: int,
        tile: Tile,
    ) -> Parts:
        """As many whole heads and sequences to a chunk as one step takes, or parts of a head.

        No length is 0, but that of the keys may be.
        """
        Br, Bc = min(tile.Br, seqlen_q), min(tile.Bc, max(seqlen_k, 1))
        tile_heads = min(group, max(1, tile.Br // seqlen_q))
        # As a row is made ready, and the sum of its dq.
        of_row = 2 * head_dim + head_dim_v + 2
        at_once = min(
            SCORES_AT_ONCE // (Br * tile_heads * Bc), CHUNK_ELEMENTS // (of_row * seqlen_q * group)
        )
        kv_heads = min(heads_kv, max(1, at_once))
        sequences = min(batch, max(1, at_once // heads_kv))
        items = -(-batch // sequences) * -(-heads_kv // kv_heads) * max(1, -(-seqlen_k // Bc))
        rows = max(1, CHUNK_ELEMENTS // of_row)
        if items < MIN_ITEMS:
            rows = min(rows, max(MIN_ROWS, group * seqlen_q * items // MIN_ITEMS))
        heads = min(group, max(tile_heads, rows // seqlen_q // tile_heads * tile_heads))
        Br = min(Br, rows)
        rows = min(seqlen_q, rows // Br * Br)
        m = Br * tile_heads
        of_keys = Bc * (3 * head_dim + 2 * head_dim_v + 2)
        scratch = 2 * m * Bc + of_keys + max(m, Bc) * max(head_dim, head_dim_v)
        elements = kv_heads * sequences * (scratch + heads * rows * of_row)
        return cls(Br, Bc, tile_heads, rows, heads, kv_heads, sequences, elements)


class Gradients(NamedTuple):
    """One backward pass: the forward pass it belongs to, and the gradients; None is not wanted."""

    job: Pass
    lse: Array  # (batch, heads_kv, group, seqlen_q)
    dout: Array  # (batch, heads_kv, group, seqlen_q, head_dim_v)
    dlse: Array | None  # (batch, heads_kv, group, seqlen_q)
    dq: Array | None  # (batch, heads_kv, group, seqlen_q, head_dim)
    dk: Array | None  # (batch, heads_kv, seqlen_k, head_dim)
    dv: Array | None  # (batch, heads_kv, seqlen_k, head_dim_v)
    sums: Sums
    parts: Parts

    @classmethod
    def make(
        cls,
        job: Pass,
        dout: Array,
        lse: Array,
        dlse: Array | None,
        dq: Array | None,
        dk: Array | None,
        dv: Array | None,
        sums: Sums,
        tile: Tile,
    ) -> Gradients:
        """A pass over what `cupy_flash.host.gradients.backward` is given.

        Raises
        ------
        ValueError
            The scratch of one worker passes `SCRATCH_LIMIT` with this tile.
        """
        batch, heads_kv, group, seqlen_q, head_dim = job.q.shape
        _, seqlen_k, _, head_dim_v = job.v.shape
        of_heads = heads_kv, group, head_dim, head_dim_v
        modified = job.modified
        alone = modified is not None and not (modified.prefix_lens is modified.seqlens_k is None)
        # Sequences that have masks of their own are not computed together.
        parts = Parts.make(1 if alone else batch, seqlen_q, seqlen_k, *of_heads, tile)
        worker_bytes = parts.elements * job.compute.itemsize
        if worker_bytes > SCRATCH_LIMIT:
            raise ValueError(
                f"tile {tile} needs {worker_bytes} bytes of scratch per worker, more than "
                f"{SCRATCH_LIMIT}; choose a smaller Br or Bc"
            )

        def by_row(x: Array) -> Array:
            grouped = x.reshape(batch, seqlen_q, heads_kv, group, x.shape[3])
            return grouped.transpose(0, 2, 3, 1, 4)

        def by_head(x: Array) -> Array:
            return x.reshape(batch, heads_kv, group, seqlen_q)

        return cls(
            job=job,
            lse=by_head(lse),
            dout=by_row(dout),
            dlse=None if dlse is None else by_head(dlse),
            dq=None if dq is None else by_row(dq),
            dk=None if dk is None else dk.swapaxes(1, 2),
            dv=None if dv is None else dv.swapaxes(1, 2),
            sums=sums,
            parts=parts,
        )

    def items(self, turns: Turns, numbers: Iterator[int]) -> Iterator[Item]:
        """The work to be done, as threads are to take it up."""
        batch, heads_kv, group, seqlen_q, _ = self.job.q.shape
        seqlen_k, parts = self.job.k.shape[1], self.parts
        keys = list(slices(0, seqlen_k, parts.Bc)) or [slice(0, 0)]
        for sequences in slices(0, batch, parts.batch):
            for kv_heads in slices(0, heads_kv, parts.kv_heads):
                chunks = [
                    Block(sequences, kv_heads, heads, rows)
                    for heads in slices(0, group, parts.heads)
                    for rows in reversed(list(slices(0, seqlen_q, parts.rows)))
                ]
                totals = Totals.make(self, sequences, kv_heads, len(chunks))
                for i, block in enumerate(chunks):
                    chunk = Chunk(self, block)
                    place = totals, i == 0, i == len(chunks) - 1
                    for some in keys:
                        item = Item(chunk, some, next(numbers), *place)
                        item.enter(turns)
                        yield item


class Totals(NamedTuple):
    """Where chunks add up dk and dv of the heads they share."""

    sequences: slice
    kv_heads: slice
    dk: Array | None  # (sequences, kv heads, seqlen_k, head_dim)
    dv: Array | None

    @classmethod
    def make(cls, work: Gradients, sequences: slice, kv_heads: slice, chunks: int) -> Totals:
        """The gradients themselves, unless several chunks need more precision."""
        totals = []
        for wanted in (work.dk, work.dv):
            total = None if wanted is None else wanted[sequences, kv_heads]
            if total is not None and chunks > 1 and total.dtype != work.job.compute:
                total = np.empty(total.shape, work.job.compute)
            totals.append(total)
        return cls(sequences, kv_heads, *totals)


class Chunk:
    """Some rows of some heads, and what ranges of keys share that meet them.

    Attributes
    ----------
    work
        The pass.
    block
        The rows.
    tiles
        Tiles of rows, from the last on, each with the keys that they see: from the first on, and
        behind the last.
    dq
        Where dq is added up, (sequences, kv heads, heads, rows, head_dim), if it is wanted.
    """

    def __init__(self, work: Gradients, block: Block) -> None:
        self.work, self.block = work, block
        job, Bc = work.job, work.parts.Bc
        rows = reversed(list(slices(block.rows.start, block.rows.stop, work.parts.Br)))
        self.tiles = [(tile, *job.keys_seen(block._replace(rows=tile))) for tile in rows]
        self.dq = None if work.dq is None else work.dq[tuple(block)]
        if self.dq is not None and self.dq.dtype != job.compute:
            meet_several = any(begin // Bc < (end - 1) // Bc for _, begin, end in self.tiles)
            if meet_several:
                self.dq = np.empty(self.dq.shape, job.compute)
        self._rows: Rows | None = None
        self._lock = threading.Lock()

    @property
    def queue(self) -> Hashable:
        """Of those that add to the same rows."""
        work, rows = self.work, self.block.rows
        # Of all heads, if a bias serves them.
        return (id(work), rows.start) if work.sums.share_rows(*work.job.q.shape[:3]) else id(self)

    def rows(self) -> Rows:
        """The rows, made ready by the thread that asks first."""
        with self._lock:
            if self._rows is None:
                self._rows = Rows.make(self.work, self.block)
            return self._rows


class Item(NamedTuple):
    """A range of keys that meets a chunk."""

    chunk: Chunk
    keys: slice
    number: int
    totals: Totals
    is_first: bool  # of the chunks that its keys meet
    is_last: bool

    @property
    def queue(self) -> Hashable:
        """Of those that add to the same keys."""
        return id(self.totals), self.keys.start

    @property
    def shares_keys(self) -> bool:
        """Whether there are any others."""
        return not (self.is_first and self.is_last)

    def enter(self, turns: Turns) -> None:
        """Take one's place among all items; to be called in their order."""
        turns.enter(self.chunk.queue, self.number, self.chunk.block.rows.stop)
        if self.shares_keys:
            turns.enter(self.queue, self.number, 0)


class Rows(NamedTuple):
    """Rows as products take them."""

    q: Array  # (sequences, kv heads, heads, rows, head_dim + 1): the last column is -lse
    dout: Array  # (sequences, kv heads, heads, rows, head_dim_v + 1): the last column is -delta
    dead: Array | None  # rows without weight, if any: (sequences, kv heads, heads, rows, 1)
    finite: bool  # both
    dsinks: Array | None  # (kv heads, heads)

    @classmethod
    def make(cls, work: Gradients, block: Block) -> Rows:
        """Read the rows of a block; delta is rowsum(dout * out) - dlse."""
        job, where = work.job, tuple(block)
        q = _with_column(job.q[where], job.compute)
        dout = _with_column(work.dout[where], job.compute)
        lse, out = work.lse[where], job.out[where]
        delta = np.empty(lse.shape, job.compute)
        for rows in slices(0, lse.shape[3], work.parts.Br):
            some = out[:, :, :, rows].astype(job.compute, copy=False)
            np.einsum("...d,...d->...", dout[:, :, :, rows, :-1], some, out=delta[..., rows])
        dead: Array | None = lse == -np.inf
        if dead.any():
            # Whatever is there, nothing comes of it.
            q[dead], dout[dead], delta[dead] = 0, 0, 0
            lse = np.where(dead, 0, lse)
            dead = dead[..., None]
        else:
            dead = None
        ...
        sinks = job.sinks_of(block)
