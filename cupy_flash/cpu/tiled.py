"""Tiled attention on the CPU: one query tile, with an online softmax over its KV tiles.

`cupy_flash.cpu.forward` describes the algorithm.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.cpu.forward_pass import (
    SHRINK,
    Block,
    Pass,
    Scratch,
    apply_mask,
    find_nan_rows,
    include_sink,
    lowest,
    ones,
)
from cupy_flash.cpu.row_results import KeySums, moment_of, shifted_moment
from cupy_flash.cpu.thread_pool import Stop

Array = NDArray[Any]


def attend(
    job: Pass, scratch: Scratch, block: Block, tiles: list[tuple[int, int]], stop: Stop
) -> None:
    """Write the results of one query tile; write nothing once ``stop`` is requested."""
    tile = _Tile(job, scratch, block)
    if not tile.process_tiles(tiles, stop):
        return
    overflowed = tile.overflowed()
    tile.finish()
    if overflowed is not None:
        # Only these rows are rewritten, so that the bits of all others stay as they are.
        tile = _Tile(job, scratch, block, shrink=True)
        if tile.process_tiles(tiles, stop):
            tile.finish_shrunk(overflowed)


class _Tile:
    """State of the online softmax of one query tile.

    The axes of arrays are (sequences, KV heads, heads, rows, ...).
    """

    def __init__(self, job: Pass, scratch: Scratch, block: Block, *, shrink: bool = False) -> None:
        self.job, self.scratch, self.block, self.shrink = job, scratch, block, shrink
        self.q = job.queries(block, scratch)
        rows = self.q.shape[:4]
        self.acc = self._scratch_array("acc", (*rows, job.v.shape[3]))
        self.row_sum = self._scratch_array("row_sum", (*rows, 1))
        self.row_max = self._scratch_array("row_max", (*rows, 1))
        # Moments of the rows (see `row_results`), if the call returns entropies.
        self.moment = None if job.rows.entropy is None else np.zeros_like(self.row_sum)

    def _scratch_array(self, name: str, shape: tuple[int, ...]) -> Array:
        return self.scratch.array(name, shape, self.job.compute)

    def process_tiles(self, tiles: list[tuple[int, int]], stop: Stop) -> bool:
        """Process KV tiles in order; return False if a stop was requested meanwhile."""
        for number, (start, end) in enumerate(tiles):
            if stop.requested:
                return False
            self._process_tile(start, end, is_first=number == 0)
        return True

    def _process_tile(self, start: int, stop: int, *, is_first: bool) -> None:
        """Process keys [start, stop). The first KV tile initializes the running sums."""
        job, scratch = self.job, self.scratch
        k = job.keys(self.block, start, stop, scratch)
        v = job.values(self.block, start, stop, scratch)
        if self.shrink:
            v = v * job.compute.type(SHRINK)
        # The rows of all query heads that use the same KV head form one matrix.
        q, acc, row_sum, row_max = (
            x.reshape(*x.shape[:2], -1, x.shape[4])
            for x in (self.q, self.acc, self.row_sum, self.row_max)
        )
        count = stop - start
        scores = self._scratch_array("scores", (*q.shape[:-1], count))
        np.matmul(q, k.swapaxes(-1, -2), out=scores)
        apply_mask(job, self.block, scores.reshape(*self.q.shape[:4], count), start, stop)
        new_max = row_max if is_first else self._scratch_array("new_max", row_max.shape)
        # -inf - -inf would be NaN; subtracting the lowest number leaves exp(-inf) = 0.
        lowest_score = lowest(job.compute.char)
        np.maximum.reduce(scores, axis=-1, keepdims=True, initial=lowest_score, out=new_max)
        if not is_first:
            np.maximum(new_max, row_max, out=new_max)
            # The maxima rarely change after the first tiles, and comparing them is cheap.
            if not np.array_equal(new_max, row_max):
                row_max -= new_max
                if self.moment is not None:
                    self._shift_moment(row_max.reshape(self.moment.shape))
                np.exp(row_max, out=row_max)
                row_sum *= row_max
                acc *= row_max
                row_max[...] = new_max
        scores -= new_max
        exponents = None if self.moment is None else scores.copy()
        np.exp(scores, out=scores)
        if self.moment is not None and exponents is not None:
            self.moment += moment_of(scores, exponents).reshape(self.moment.shape)
        # A product with ones computes row sums in a third of the time of add.reduce.
        column = ones(count, job.compute.char)
        tile_sum = row_sum if is_first else self._scratch_array("tile_sum", row_sum.shape)
        np.matmul(scores.reshape(-1, count), column, out=tile_sum.reshape(-1))
        # The row sums, and hence the log-sum-exp, are those of all weights.
        kept = job.kept_by_dropout(self.block, start, stop)
        if kept is not None:
            scores *= kept.reshape(scores.shape)
        if is_first:
            np.matmul(scores, v, out=acc)
            return
        row_sum += tile_sum
        product = self._scratch_array("product", acc.shape)
        np.matmul(scores, v, out=product)
        acc += product

    def _shift_moment(self, change: Array) -> None:
        """Make the moments relative to new maxima; `change` is old minus new maxima."""
        assert self.moment is not None
        self.moment = shifted_moment(self.moment, self.row_sum, change, np.exp(change))

    def overflowed(self) -> Array | None:
        """Return which rows have a sum of weighted values that is not finite; None if none has."""
        acc = self.acc.reshape(-1)
        # Quick test without a temporary array: a finite sum of squares means that all are finite.
        if math.isfinite(np.dot(acc, acc)):
            return None
        overflowed = ~np.asarray(np.isfinite(self.acc).all(axis=-1, keepdims=True))
        # A row sum of 0 makes the output row 0, whatever the values are.
        overflowed[self.row_sum == 0] = False
        return overflowed if overflowed.any() else None

    def finish(self) -> None:
        """Write the output and the results per row."""
        job, acc, row_sum = self.job, self.acc, self.row_sum
        # A row sum is 0 only if no score is above -inf: otherwise its largest term is exp(0) = 1.
        empty = None if row_sum.all() else row_sum == 0
        key_sums = None
        if job.rows.has_statistics:
            key_sums = KeySums(self.row_max.copy(), row_sum.copy(), self.moment)
        sinks = self._include_sinks()
        if empty is not None:
            row_sum[empty] = 1
            np.copyto(acc, 0, where=empty)
            np.copyto(self.row_max, -np.inf if sinks is None else sinks, where=empty)
            nan_rows = find_nan_rows(job, self.block, self.scratch, empty)
            np.copyto(acc, np.nan, where=nan_rows)
            self.row_max[nan_rows] = np.nan
        where = tuple(self.block)
        out = job.out[where]
        if out.dtype == job.compute:
            np.divide(acc, self._divisor(), out=out)
        else:
            acc /= self._divisor()
            np.copyto(out, acc, casting="same_kind")
        rows = job.rows.each(lambda array: array[where])
        if any(array is not None for array in rows):
            np.log(row_sum, out=row_sum)
            row_sum += self.row_max
        if rows.lse is not None:
            rows.lse[...] = row_sum[..., 0]
        if key_sums is not None:
            key_sums.write(rows, row_sum, empty, has_sinks=sinks is not None)

    def _divisor(self) -> Array:
        """Return the row sums, times the probability with which dropout keeps a weight."""
        share = self.job.kept_share
        return self.row_sum if share is None else self.row_sum * self.job.compute.type(share)

    def _include_sinks(self) -> Array | None:
        sinks = self.job.sinks_of(self.block)
        if sinks is not None:
            self.acc *= include_sink(self.row_max, self.row_sum, sinks)
        return sinks

    def finish_shrunk(self, rows: Array) -> None:
        """Write the output of `rows`, which was computed with values multiplied by `SHRINK`."""
        self._include_sinks()
        self.acc /= self._divisor()
        self.acc /= self.job.compute.type(SHRINK)
        np.copyto(self.job.out[tuple(self.block)], self.acc, casting="same_kind", where=rows)
