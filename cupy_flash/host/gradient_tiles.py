"""Gradients of a range of keys over tiles of query rows: the heart of the CPU backward pass.

See `cupy_flash.host.gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host.crew import Stop
from cupy_flash.host.passes import Block, Pass, Scratch
from cupy_flash.host.turns import Turns

Array = NDArray[Any]


class Gradients(NamedTuple):
    """One backward pass: the forward pass, what its outputs' gradients are, and what is wanted."""

    job: Pass
    lse: Array  # (batch, heads_kv, group, seqlen_q)
    dout: Array  # (batch, heads_kv, group, seqlen_q, head_dim_v)
    delta: Array  # (batch, heads_kv, group, seqlen_q): see `row_sums`
    dq: Array | None  # (batch, heads_kv, group, seqlen_q, head_dim)
    dk: Array | None  # (batch, seqlen_k, heads_kv, head_dim)
    dv: Array | None  # (batch, seqlen_k, heads_kv, head_dim_v)

    def items(self, turns: Turns, first: int) -> Iterator[KeyRange]:
        """All ranges of keys, numbered from one on."""
        batch, heads_kv, group, seqlen_q, _ = self.job.q.shape
        seqlen_k, cut = self.job.k.shape[1], self.job.cut
        number = first
        tiles = -(-seqlen_q // cut.Br)
        for sequences in slices(batch, cut.batch):
            for kv_heads in slices(heads_kv, cut.kv_heads):
                heads = Heads.make(self, sequences, kv_heads)
                for keys in slices(seqlen_k, cut.Bc):
                    turns.enter(heads.key, number, tiles)
                    yield KeyRange(self, heads, keys, number)
                    number += 1


class Heads(NamedTuple):
    """Query heads, with the key/value heads they share, that ranges of keys have in common."""

    key: tuple[int, ...]
    sequences: slice
    kv_heads: slice
    seen: list[tuple[slice, int, int]]  # tiles of rows, from the last on, with the keys they see
    dq: Array | None  # what is added up, (sequences, kv heads, group, seqlen_q, head_dim)

    @classmethod
    def make(cls, work: Gradients, sequences: slice, kv_heads: slice) -> Heads:
        job = work.job
        seqlen_q = job.q.shape[3]
        heads = Block(sequences, kv_heads, slice(0, job.q.shape[2]), slice(0, seqlen_q))
        tiles = [heads._replace(rows=rows) for rows in slices(seqlen_q, job.cut.Br)]
        seen = [(tile.rows, *job.keys_seen(tile)) for tile in reversed(tiles)]
        dq = None
        if work.dq is not None:
            dq = work.dq[tuple(heads)]
            if dq.dtype != job.compute and any(
                begin // job.cut.Bc < (end - 1) // job.cut.Bc for _, begin, end in seen
            ):
                dq = np.empty(dq.shape, job.compute)
        return cls((sequences.start, kv_heads.start), sequences, kv_heads, seen, dq)


class KeyRange(NamedTuple):
    """A range of keys with the rows that see some of it."""

    work: Gradients
    heads: Heads
    keys: slice
    number: int

    def compute(self, scratch: Scratch, turns: Turns, stop: Stop) -> None:
        """Write dk and dv of the range, and add what it gives to dq."""
        result = _Keys(self, scratch).take_all(turns, stop)
        turns.leave(self.heads.key, self.number, result)


class _Keys:
    """A range of keys while the rows pass by.

    Scores and what else there is of each pair are (sequences, kv heads, keys, rows): the long side
    first, as matrix products are fastest.
    """

    def __init__(self, item: KeyRange, scratch: Scratch) -> None:
        self.item, self.scratch = item, scratch
        self.work, self.job, self.heads = item.work, item.work.job, item.heads
        scale = self.job.compute.type(self.job.softmax_scale)
        k, v = (x[self.heads.sequences, item.keys, self.heads.kv_heads].swapaxes(1, 2) for x in (self.job.k, self.job.v))
        self.k = self._cut("k", k.shape)
        np.copyto(self.k, k, casting="same_kind")
        self.k *= scale
        self.kT = self._columns("kT", self.k)
        self.vT = self._columns("vT", v)
        self.dk = self._zeros("dk", k, self.work.dk)
        self.dv = self._zeros("dv", v, self.work.dv)

    def _cut(self, name: str, shape: tuple[int, ...]) -> Array:
        return self.scratch.cut(name, shape, self.job.compute)

    def _columns(self, name: str, x: Any) -> Array:
        """The range's rows and a column of ones: (sequences, kv heads, keys, dim + 1)."""
        b, h, n, d = x.shape
        copy = self._cut(name, (b, h, d + 1, n))
        np.copyto(copy[:, :, :-1], x.swapaxes(2, 3), casting="same_kind")
        copy[:, :, -1] = 1
        return copy

    def _zeros(self, name: str, like: Array, wanted: Array | None) -> Array | None:
        if wanted is None:
            return None
        zeros = self._cut(name, like.shape)
        zeros[...] = 0
        return zeros

    def take_all(self, turns: Turns, stop: Stop) -> Callable[[], None] | None:
        start, end = self.item.keys.start, self.item.keys.stop
        Bc = self.job.cut.Bc
        group = self.job.q.shape[2]
        key, number = self.heads.key, self.item.number
        tile = len(self.heads.seen)
        visible = self.job.mask_of(Block(self.heads.sequences, self.heads.kv_heads, None, None))
        for rows, first, last in self.heads.seen:
            tile -= 1
            begin, behind = max(first, start), min(last, end)
            if begin >= behind:
                if first >= last and start == 0 and self.heads.dq is not None:
                    self.work.dq[self.heads.sequences, self.heads.kv_heads, :, rows] = 0
                continue
            if stop.requested:
                return None
            some = slice(max(rows.start, visible.first_row(begin)), min(rows.stop, visible.last_row(behind-1)))
            for heads in slices(group, self.job.cut.heads_per_tile):
                block = Block(self.heads.sequences, self.heads.kv_heads, heads, some)
                product = self._take(block, begin, behind)
                if product is not None:
                    if first < start and not turns.wait(key, number, tile):
                        return None
                    self._add(block, rows, product, first >= start, last <= end)
            if last > end:
                turns.passed(key, number, tile)
        self.dk *= self.job.compute.type(self.job.softmax_scale)
        for array, wanted in ((self.dk, self.work.dk), (self.dv, self.work.dv)):
            if array is not None:
                np.copyto(wanted[self.heads.sequences, self.item.keys, self.heads.kv_heads], array.swapaxes(1, 2), casting="same_kind")
        return None

    def _add(self, block: Block, rows, product: Array, is_first: bool, is_last: bool) -> None:
        where = tuple(block)
        target = self.work.dq[where]
        sums = self.heads.dq[:, :, block.heads, block.rows]
        if is_first and block.rows != rows:
            self.heads.dq[:, :, block.heads, rows] = 0
        if is_first:
            sums[...] = product
        else:
            sums += product

    def _take(self, block: Block, begin: int, end: int) -> Array | None:
        job, work = self.job, self.work
        where = tuple(block)
        start = self.item.keys.start
        local = slice(begin - start, end - start)
        source = job.q[where]
        b, h, g, s, d = source.shape
        R = g * s
        q = self._cut("q", (b, h, g, s, d + 1))
        np.copyto(q[..., :-1], source, casting="same_kind")
        np.negative(work.lse[where], out=q[..., -1])
        source = work.dout[where]
        dv = source.shape[4]
        dout = self._cut("dout", (b, h, g, s, dv + 1))
        np.copyto(dout[..., :-1], source, casting="same_kind")
        np.negative(work.delta[where], out=dout[..., -1])
        q, dout = q.reshape(b, h, R, d + 1), dout.reshape(b, h, R, dv + 1)
        n = end - begin
        kT, vT = self.kT[..., local], self.vT[..., local]
        p = self._cut("p", (b, h, R, n))
        np.matmul(q, kT, out=p)
        np.exp(p, out=p)
        self._hide(block, p, begin, end)
        if self.dv is not None:
            product = self._cut("product", (b, h, n, dv))
            np.matmul(p.swapaxes(2, 3), dout[..., :-1], out=product)
            self.dv[:, :, local] += product
        ds = self._cut("ds", (b, h, R, n))
        np.matmul(dout, vT, out=ds)
        ds *= p
        self._hide(block, ds, begin, end)
        if self.dk is not None:
            product = self._cut("product", (b, h, n, d))
            np.matmul(ds.swapaxes(2, 3), q[..., :-1], out=product)
            self.dk[:, :, local] += product
        if work.dq is None:
            return None
        product = self._cut("product", (b, h, R, d))
        np.matmul(ds, self.k[:, :, local], out=product)
        return product.reshape(b, h, g, s, d)

    def _hide(self, block: Block, x: Array, begin: int, end: int) -> None:
        rows, visible = block.rows, self.job.mask_of(block)
        for first, stop in visible.edges(rows.start, rows.stop, begin, end):
            hidden = visible.hidden(rows.start, rows.stop, first, stop)
            b, h, R, n = x.shape
            x5 = x.reshape(b, h, -1, rows.stop - rows.start, n)[..., first - begin : stop - begin]
            np.copyto(x5, 0, where=hidden)


def slices(count: int, size: int) -> Iterator[slice]:
    """Parts of a size, but for the last."""
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))
