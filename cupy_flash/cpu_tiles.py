"""Attention of a tile of query rows over tiles of keys: the heart of the CPU backend's algorithm.

See `cupy_flash.cpu`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.cpu_pass import (
    KEY_GROUP,
    SHRINK,
    Block,
    Pass,
    Scratch,
    hidden,
    lost_rows,
    lowest,
    ones,
)
from cupy_flash.cpu_threads import Stop

Array = NDArray[Any]

# Scores within [-SCORE_BOUND, SCORE_BOUND] need no running maximum: exp stays within [1e-13, 1e13],
# far from float32's ends even when multiplied by values of magnitude VALUE_BOUND, or its inverse,
# and summed. Normal random inputs of any head_dim stay below 25.
SCORE_BOUND = 30.0
VALUE_BOUND = 1e16

# Rows of a strip along the edge of a causal mask.
STRIP_ROWS = 64


class _Step(NamedTuple):
    """Keys for some rows of a tile to take up."""

    rows: slice | None  # of the tile; None for all of them
    start: int
    stop: int
    masked: bool = False


def attend(job: Pass, scratch: Scratch, block: Block, stop: Stop) -> None:
    """Output and lse of one block; nothing is written once ``stop`` is requested."""
    tile = _Tile(job, scratch, block)
    if not tile.take_all(stop):
        return
    overflown = tile.overflown()
    tile.finish()
    if overflown is not None:
        # Of the other rows not a bit may change.
        tile = _Tile(job, scratch, block, shrink=True)
        if tile.take_all(stop):
            tile.finish_shrunk(overflown)


class _Tile:
    """The rows of a block on their way through the keys.

    Arrays are (sequences, kv heads, heads, rows, ...).
    """

    def __init__(self, job: Pass, scratch: Scratch, block: Block, *, shrink: bool = False) -> None:
        self.job, self.scratch, self.block, self.shrink = job, scratch, block, shrink
        self.source = job.q[block.batch, block.kv_heads, block.heads, block.rows]
        rows = self.source.shape[:4]
        self.q = self._cut("q", self.source.shape)
        # With the scale folded in here, no pass over the scores is needed for it.
        scale = job.compute.type(job.softmax_scale)
        if self.source.dtype == job.compute:
            np.multiply(self.source, scale, out=self.q)
        else:
            np.copyto(self.q, self.source, casting="same_kind")
            self.q *= scale
        self.acc = self._cut("acc", (*rows, job.v.shape[3]))
        self.row_sum = self._cut("row_sum", (*rows, 1))
        self.row_max = self._cut("row_max", (*rows, 1))
        self.lowest = lowest(job.compute.char)
        self.at_once = False
        # Keys from the first on whose scores need no running maximum.
        self.bounded = 0

    def _cut(self, name: str, shape: tuple[int, ...]) -> Array:
        return self.scratch.cut(name, shape, self.job.compute)

    def take_all(self, stop: Stop) -> bool:
        """Take up all keys that a row sees; False if stopped on the way."""
        steps = self._steps()
        self._begin(steps)
        for step in steps:
            if stop.requested:
                return False
            self._take(step)
        return True

    def _steps(self) -> list[_Step]:
        """First the keys that all rows see, then those along the edge of the mask."""
        job, rows = self.job, self.block.rows
        seen_by_all, seen_by_any = job.keys_seen(rows.start), job.keys_seen(rows.stop - 1)
        if seen_by_all == seen_by_any:
            unmasked = seen_by_all
        else:
            # Rounded down to where the bounds are known.
            unmasked = seen_by_all // KEY_GROUP * KEY_GROUP
        if self._needs_no_maximum(unmasked):
            self.bounded = unmasked
        steps = [
            _Step(None, start, min(start + job.Bc, unmasked))
            for start in range(0, unmasked, job.Bc)
        ]
        if unmasked == seen_by_any:
            return steps
        for first in range(rows.start, rows.stop, STRIP_ROWS):
            last = min(first + STRIP_ROWS, rows.stop)
            strip = slice(first - rows.start, last - rows.start)
            seen, end = job.keys_seen(first), job.keys_seen(last - 1)
            for start in range(unmasked, end, job.Bc):
                key_stop = min(start + job.Bc, end)
                steps.append(_Step(strip, start, key_stop, masked=key_stop > seen))
        return steps

    def _needs_no_maximum(self, keys: int) -> bool:
        """Whether the scaled queries can do without a running maximum over some first keys.

        Asks only about keys that every row of the tile sees: a masked key must leave no trace, not
        even in the rounding. False if anything it looks at is NaN or inf.
        """
        job = self.job
        if job.bounds is None or self.shrink or keys < KEY_GROUP:
            return False
        if keys % KEY_GROUP and keys < job.k.shape[1]:
            return False
        key_norm, value_max = job.bounds.of_first(job, self.block, self.scratch, keys)
        q_norm = math.sqrt(np.einsum("...d,...d->...", self.q, self.q).max())
        return q_norm * key_norm <= SCORE_BOUND and (
            value_max == 0 or 1 / VALUE_BOUND <= value_max <= VALUE_BOUND
        )

    def _begin(self, steps: list[_Step]) -> None:
        """Before the first key."""
        rows = self.source.shape[3]
        # Where all rows take up their keys in one step, that writes what others add to.
        self.at_once = len(steps) == 1 and steps[0].rows in (None, slice(0, rows))
        if not self.at_once:
            self.acc.fill(0)
            self.row_sum.fill(0)
        if self.bounded or not self.at_once:
            self.row_max.fill(0 if self.bounded else self.lowest)

    def _take(self, step: _Step) -> None:
        """Take up some keys."""
        job, scratch = self.job, self.scratch
        k = job.keys(self.block, step.start, step.stop, scratch)
        v = job.values(self.block, step.start, step.stop, scratch)
        if self.shrink:
            v = v * job.compute.type(SHRINK)
        arrays = self.q, self.acc, self.row_sum, self.row_max
        if step.rows is None or self.at_once:
            # The rows of all heads are one matrix.
            shape = *self.q.shape[:2], -1
            q, acc, row_sum, row_max = (x.reshape(*shape, x.shape[4]) for x in arrays)
        else:
            q, acc, row_sum, row_max = (x[..., step.rows, :] for x in arrays)
            k, v = k[:, :, None], v[:, :, None]
        count = step.stop - step.start
        scores = self._cut("scores", (*q.shape[:-1], count))
        np.matmul(q, k.swapaxes(-1, -2), out=scores)
        if step.masked:
            self._mask(scores, step)
        if step.stop > self.bounded:
            new_max = self._cut("new_max", row_max.shape)
            # -inf - -inf would be NaN; subtracting the lowest number leaves exp(-inf) = 0.
            np.maximum.reduce(scores, axis=-1, keepdims=True, initial=self.lowest, out=new_max)
            if not self.at_once:
                np.maximum(new_max, row_max, out=new_max)
                # The maxima seldom move after the first tiles; comparing them is cheap.
                if step.start and not np.array_equal(new_max, row_max):
                    row_max -= new_max
                    np.exp(row_max, out=row_max)
                    row_sum *= row_max
                    acc *= row_max
            row_max[...] = new_max
            scores -= new_max
        np.exp(scores, out=scores)
        # A product with ones sums rows three times as fast as add.reduce.
        column = ones(count, job.compute.char)
        if self.at_once:
            np.matmul(scores.reshape(-1, count), column, out=row_sum.reshape(-1))
            np.matmul(scores, v, out=acc)
            return
        tile_sum = self._cut("tile_sum", row_sum.shape)
        np.matmul(scores.reshape(-1, count), column, out=tile_sum.reshape(-1))
        product = self._cut("product", acc.shape)
        np.matmul(scores, v, out=product)
        row_sum += tile_sum
        acc += product

    def _mask(self, scores: Array, step: _Step) -> None:
        """Set to -inf what rows of a strip do not see."""
        rows = step.rows
        assert rows is not None
        first = self.block.rows.start + rows.start
        # Columns from here on are not seen by all.
        column = max(self.job.keys_seen(first) - step.start, 0)
        columns = step.stop - step.start - column
        last_seen = first + self.job.q_offset - step.start - column
        by_head = scores.reshape(*self.q.shape[:3], rows.stop - rows.start, -1)
        unseen = hidden(rows.stop - rows.start, columns, last_seen)
        np.copyto(by_head[..., column:], -np.inf, where=unseen)

    def overflown(self) -> Array | None:
        """Rows with a sum of weighted values that is not finite, though the values may be."""
        acc = self.acc.reshape(-1)
        # The sum of squares, which takes no memory, is inf or NaN then, though not only then.
        if math.isfinite(np.dot(acc, acc)):
            return None
        overflown = ~np.asarray(np.isfinite(self.acc).all(axis=-1, keepdims=True))
        # Rows without weight are 0, whatever the values.
        overflown[self.row_sum == 0] = False
        return overflown if overflown.any() else None

    def finish(self) -> None:
        """Write the output and the lse."""
        job, acc, row_sum = self.job, self.acc, self.row_sum
        # 0 only where no score is above -inf: the largest term is exp(0), or bounded from below.
        if not row_sum.all():
            empty = row_sum == 0
            row_sum[empty] = 1
            np.copyto(acc, 0, where=empty)
            self.row_max[empty] = -np.inf
            lost = lost_rows(job, self.block, self.scratch, empty)
            np.copyto(acc, np.nan, where=lost)
            self.row_max[lost] = np.nan
        where = tuple(self.block)
        out = job.out[where]
        if out.dtype == job.compute:
            np.divide(acc, row_sum, out=out)
        else:
            acc /= row_sum
            np.copyto(out, acc, casting="same_kind")
        if job.lse is not None:
            np.log(row_sum, out=row_sum)
            row_sum += self.row_max
            job.lse[where] = row_sum[..., 0]

    def finish_shrunk(self, rows: Array) -> None:
        """Write the output of some rows, whose values were shrunk."""
        self.acc /= self.row_sum
        self.acc /= self.job.compute.type(SHRINK)
        np.copyto(self.job.out[tuple(self.block)], self.acc, casting="same_kind", where=rows)
